"""An address in front of a Redis server: moved to another server, held up, or disconnected."""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import suppress

from tests.servers import Server, free_port

RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER: close sends a reset, and drops what is unsent


class Address:
    """A port that leads to one server, and after `move` to another one. Old connections stay.

    While the server is down, connections are accepted and closed at once.
    """

    def __init__(self, server: Server) -> None:
        self._server, self.port = server, free_port()
        self._flows = threading.Event()  # cleared: nothing is passed on
        self._flows.set()
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, name="address", daemon=True).start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def move(self, server: Server) -> None:
        self._server = server

    def hold(self) -> None:
        """Pass nothing on until `drop` or `flow`. Connections stay open."""
        self._flows.clear()

    def flow(self) -> None:
        self._flows.set()

    def drop(self) -> None:
        """Break all connections; what they have not passed on is lost."""
        with self._lock:
            broken, self._open = self._open, set()
        for one in broken:
            with suppress(OSError):
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                outside, _ = self._listener.accept()
            except OSError:
                return
            try:
                inside = socket.create_connection(("127.0.0.1", self._server.port))
            except OSError:
                outside.close()
                continue
            with self._lock:
                self._open |= {outside, inside}
            for pair in ((outside, inside), (inside, outside)):
                threading.Thread(target=self._pump, args=pair, daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                self._flows.wait()
                target.sendall(data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._open.discard(source)
        source.close()
