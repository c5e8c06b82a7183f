"""A server with OpenAI's chat completions that answers as a test says: also with what real servers
do only now and then."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Body = dict[str, Any]


class Exchange:
    """One request, and the ways to answer it."""

    def __init__(self, handler: BaseHTTPRequestHandler, body: Body, server: FakeServer) -> None:
        self._handler, self.body, self.server = handler, body, server
        self.headers = dict(handler.headers.items())

    @property
    def prompt(self) -> str:
        content: str = self.body["messages"][-1]["content"]
        return content

    def respond(self, status: int, content: bytes | Any, **headers: str) -> None:
        """A whole response; JSON unless `content` is bytes."""
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()
        kind = headers.pop("content_type", "application/json")
        self._handler.send_response(status)
        for name, value in {
            "content-type": kind,
            "content-length": str(len(raw)),
            **headers,
        }.items():
            self._handler.send_header(name.replace("_", "-"), value)
        self._handler.end_headers()
        self._handler.wfile.write(raw)

    def begin(self, content_type: str = "text/event-stream") -> None:
        """The head of a streamed response."""
        self._handler.send_response(200)
        self._handler.send_header("content-type", content_type)
        self._handler.send_header("transfer-encoding", "chunked")
        self._handler.end_headers()

    def raw(self, data: bytes) -> None:
        self._handler.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self._handler.wfile.flush()

    def event(self, content: Any) -> None:
        self.raw(f"data: {json.dumps(content, ensure_ascii=False)}\n\n".encode())

    def chunk(self, index: int = 0, reason: str | None = None, **fields: Any) -> None:
        """A chunk of one choice. `logprobs`: beside the delta, as OpenAI has them."""
        logprobs = fields.pop("logprobs", None)
        choice = {"index": index, "delta": fields, "finish_reason": reason, "logprobs": logprobs}
        self.event({"object": "chat.completion.chunk", "choices": [choice]})

    def end(self, prompt: int = 3, output: int = 5, **details: Any) -> None:
        """The usage and the end of the stream."""
        usage = {"prompt_tokens": prompt, "completion_tokens": output, **details}
        self.event({"choices": [], "usage": usage})
        self.raw(b"data: [DONE]\n\n")
        self.raw(b"")

    def cut(self) -> None:
        """Close the connection without an end."""
        self._handler.wfile.flush()
        self._handler.connection.shutdown(socket.SHUT_RDWR)

    def closed(self) -> bool:
        """Wait until the client closes the connection."""
        with suppress(OSError):
            return self._handler.connection.recv(1) == b""
        return True


Answer = Callable[[Exchange], None]


def words_of(prompt: str) -> list[str]:
    """The answer of `echo`, by words."""
    return [f"{word} " for word in f"You said: {prompt}".split()]


def echo(exchange: Exchange) -> None:
    """An answer that depends on the prompt alone."""
    exchange.begin()
    exchange.chunk(role="assistant", content="")
    words = words_of(exchange.prompt)
    for index in range(exchange.body.get("n") or 1):
        for word in words:
            exchange.chunk(index, content=word)
        exchange.chunk(index, reason="stop")
    exchange.end(output=len(words))


def in_turn(*answers: Answer) -> Answer:
    """Answer each request with the next one; the last one is for all further ones."""
    left, lock = list(answers), threading.Lock()

    def answer(exchange: Exchange) -> None:
        with lock:
            one = left.pop(0) if len(left) > 1 else left[0]
        one(exchange)

    return answer


class FakeServer:
    """Listens from `start` to `stop`, always on the same port. `answer`: to each chat; `models`:
    their names; `list_status`: of the list of models."""

    def __init__(self) -> None:
        self.answer: Answer = echo
        self.models: list[dict[str, Any]] = [{"id": "there", "max_model_len": 4096}]
        self.list_answer: Answer | None = None
        self.key: str | None = None  # that requests need
        self.bodies: list[Body] = []
        self.lists = 0  # requests for the list of models
        self.running = self.peak = 0
        self.lock = threading.Lock()
        self._server: ThreadingHTTPServer | None = None
        self._connections: set[socket.socket] = set()
        with socket.create_server(("127.0.0.1", 0)) as found:
            self.port: int = found.getsockname()[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def start(self) -> None:
        server, outer = self, self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                outer._connections.add(self.connection)

            def finish(self) -> None:
                outer._connections.discard(self.connection)
                with suppress(OSError):
                    super().finish()

            def handle(self) -> None:
                with suppress(OSError, ValueError):
                    super().handle()

            def do_GET(self) -> None:
                server.lists += 1
                exchange = Exchange(self, {}, server)
                if server.list_answer is not None:
                    server.list_answer(exchange)
                elif server.key and exchange.headers.get("Authorization") != server.key:
                    given = exchange.headers.get("Authorization")
                    exchange.respond(401, {"error": {"message": f"wrong key {given}"}})
                else:
                    exchange.respond(200, {"object": "list", "data": server.models})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                exchange = Exchange(self, body, server)
                with server.lock:
                    server.bodies.append(body)
                    server.running += 1
                    server.peak = max(server.peak, server.running)
                try:
                    if server.key and exchange.headers.get("Authorization") != server.key:
                        exchange.respond(401, {"error": {"message": "wrong key"}})
                    else:
                        server.answer(exchange)
                finally:
                    with server.lock:
                        server.running -= 1

            def log_message(self, *_: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

        self._server = Server(("127.0.0.1", self.port), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        """As if it were killed: connections are cut."""
        if self._server is None:
            return
        self._server.shutdown()
        self._server.server_close()
        for connection in list(self._connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._server = None


def serving() -> Iterator[FakeServer]:
    server = FakeServer()
    server.start()
    yield server
    server.stop()
