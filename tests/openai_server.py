"""A small OpenAI-compatible server on loopback whose replies a test writes: /v1/chat/completions, /v1/completions and
/v1/models.

    with OpenAIServer(lambda number, body: Reply(verdict(True), delay=0.2)) as server:
        ... server.url ... server.log ... server.largest_concurrency

The script is called once per completion, from several threads, with the number of the request (from 0, in order of
arrival) and its JSON body; another script answers /v1/completions. What GET /v1/models says is a reply of its own; such
requests are logged with an empty body.
"""

import json
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from envace.checklist import ANSWER, VERDICT_FIELDS

PROMPT_TOKENS, COMPLETION_TOKENS = 100, 20


@dataclass(frozen=True)
class Reply:
    """content: of the message. body: the whole HTTP body instead. cut: how many bytes of it until the line is cut.

    delay: seconds before the first byte. trickle: seconds between the bytes of the body.
    """

    content: str | None = ""
    status: int = 200
    delay: float = 0.0
    headers: dict[str, str] = field(default_factory=dict)
    body: str | None = None
    content_type: str = "application/json"
    cut: int | None = None
    trickle: float = 0.0


Script = Callable[[int, dict], Reply]


@dataclass
class Logged:
    """One request. arrived, finished: seconds of the monotonic clock; finished is 0.0 until the reply is sent."""

    number: int
    body: dict
    authorization: str
    arrived: float
    finished: float = 0.0
    status: int = 0


def verdict(answer: object) -> str:
    """A reply in the judge's schema."""
    return json.dumps({name: "..." for name in VERDICT_FIELDS} | {ANSWER: answer})


def error(status: int, message: str = "no", **settings) -> Reply:
    return Reply(status=status, body=json.dumps({"error": {"message": message}}), **settings)


def listing(*names: str) -> Reply:
    """What an endpoint says about its models."""
    models = [{"id": name, "object": "model", "created": 0, "owned_by": "test"} for name in names]
    return Reply(body=json.dumps({"object": "list", "data": models}))


LISTS_JUDGE = listing("judge")


def in_order(*replies: Reply) -> Script:
    """The replies one after the other; the last one is repeated."""
    return lambda number, body: replies[min(number, len(replies) - 1)]


def _unknown(number: int, body: dict) -> Reply:
    return error(404, "no such path")


class OpenAIServer:
    """port: 0 takes a free one. Leaving the context stops it; the port then refuses connections."""

    def __init__(self, script: Script, port: int = 0, models: Reply = LISTS_JUDGE, completions: Script | None = None):
        self.scripts = {"/v1/chat/completions": script, "/v1/completions": completions or _unknown}
        self.models = models
        self.log: list[Logged] = []
        self.largest_concurrency = 0
        self._now = 0
        self._lock = threading.Lock()
        self._http = _Server(("127.0.0.1", port), _handler(self))
        self.port = self._http.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}/v1"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    def __enter__(self) -> "OpenAIServer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._http.cut_all()
        self._thread.join()

    def arrived(self, body: dict, authorization: str) -> Logged:
        with self._lock:
            request = Logged(len(self.log), body, authorization, time.monotonic())
            self.log.append(request)
            self._now += 1
            self.largest_concurrency = max(self.largest_concurrency, self._now)
        return request

    def finished(self, request: Logged, status: int) -> None:
        with self._lock:
            request.finished, request.status = time.monotonic(), status
            self._now -= 1


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 256

    def __init__(self, *args):
        self._connections: set[socket.socket] = set()
        super().__init__(*args)

    def process_request(self, request, client_address):
        self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request):
        self._connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request, client_address):
        """A client that hangs up is part of the tests; nothing is printed."""

    def cut_all(self) -> None:
        """Also those that a client keeps alive, or a stopped server would go on answering."""
        for connection in list(self._connections):
            cut(connection)


def cut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:  # it is closed already
        pass


def _handler(server: OpenAIServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            request = server.arrived(body, self.headers.get("Authorization", ""))
            self._answer(request, server.scripts.get(self.path, _unknown)(request.number, body))

        def do_GET(self):
            request = server.arrived({}, self.headers.get("Authorization", ""))
            self._answer(request, server.models if self.path == "/v1/models" else error(404, "no such path"))

        def _answer(self, request: Logged, reply: Reply) -> None:
            try:
                time.sleep(reply.delay)
                self._send(reply)
            finally:
                server.finished(request, reply.status)

        def _send(self, reply: Reply) -> None:
            payload = (_completion(reply.content) if reply.body is None else reply.body).encode()
            self.send_response(reply.status)
            headers = {"Content-Type": reply.content_type, "Content-Length": str(len(payload)), **reply.headers}
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            if reply.trickle:
                for byte in payload:
                    self.wfile.write(bytes([byte]))
                    time.sleep(reply.trickle)
                return
            self.wfile.write(payload[: reply.cut])
            if reply.cut is not None:
                self.close_connection = True
                cut(self.connection)

        def log_message(self, *args):
            """The log of this server is a list."""

    return Handler


def _completion(content: str | None) -> str:
    message = {"role": "assistant", "content": content}
    return json.dumps(
        {
            "id": "chatcmpl-0",
            "object": "chat.completion",
            "created": 0,
            "model": "judge",
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {
                "prompt_tokens": PROMPT_TOKENS,
                "completion_tokens": COMPLETION_TOKENS,
                "total_tokens": PROMPT_TOKENS + COMPLETION_TOKENS,
            },
        }
    )
