"""A TCP server for tests, with a thread for each connection."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import closing, suppress


class Listener:
    """Listens on a free port of the loopback address until `close`. `serve` gets each connection,
    which is closed after it."""

    def __init__(self, serve: Callable[[socket.socket], None]) -> None:
        self._serve = serve
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends `accept`, which would go on listening
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._served, args=(connection,), daemon=True).start()

    def _served(self, connection: socket.socket) -> None:
        with suppress(OSError), closing(connection):
            self._serve(connection)
