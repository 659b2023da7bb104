"""A model under an address of this machine, for a harness that cannot be given the real one.

VitaBench sends its whole entry of a model (headers, address, prices) as the body of each request, which strict servers
refuse, and writes that entry into its results file. Behind a relay the entry holds no key, the server gets what the API
knows, and what a server did not answer is counted: a task that failed for want of an answer is not the model's failure.
A refusal is the failure of the model that is measured, but of another one it is no answer either.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.error import HTTPError
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

from envace.types import first_line

FIELDS = ("messages", "tools", "tool_choice", "temperature", "top_p", "max_tokens", "max_completion_tokens")
TIMEOUT = 590.0  # seconds; VitaBench itself waits for 600
REFUSALS = (400, 413, 422)  # of this request for what it says; every other error is no answer
MESSAGE_CHARS = 200


@dataclass
class Relayed:
    """url: of its chat completions. unanswered: requests that had no answer; last: why the last of them had none."""

    url: str
    unanswered: int = 0
    last: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def reset(self) -> None:
        with self.lock:
            self.unanswered, self.last = 0, ""

    def count(self, reason: str) -> None:
        with self.lock:
            self.unanswered += 1
            self.last = reason


class Server(ThreadingHTTPServer):
    request_queue_size = 256  # connections at once that need not be tried again


class NoRedirects(HTTPRedirectHandler):
    """urllib would ask another host, key and all, and with GET."""

    def redirect_request(self, *_: Any) -> None:
        """Without another request, the status is an error like others."""


class Refused(Exception):
    """The server does not take this request, for what it says."""

    def __init__(self, status: int, said: str):
        super().__init__(f"HTTP {status}: {said}")
        self.status = status


class Unanswered(Exception):
    """There was no answer, whatever the request says."""


def complete(url: str, body: dict[str, Any], key: str = "", timeout: float = TIMEOUT) -> bytes:
    """What the chat completions of `url`, which ends in /v1, answer. Raises Refused, Unanswered."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = Request(f"{url}/chat/completions", json.dumps(body).encode(), headers)
    # No proxy stands between this machine and itself.
    opener = build_opener(NoRedirects, *([ProxyHandler({})] if "//127.0.0.1" in url or "//localhost" in url else []))
    try:
        with opener.open(request, timeout=timeout) as answer:
            return answer.read()
    except HTTPError as error:
        said = " ".join(error.read().decode(errors="replace").split())[:MESSAGE_CHARS]
        if error.code in REFUSALS:
            raise Refused(error.code, said) from None
        raise Unanswered(f"HTTP {error.code}: {said}") from None
    except (OSError, HTTPException) as error:
        raise Unanswered(first_line(error)) from None


def message_of(answer: bytes) -> dict[str, Any]:
    """The message in the body of an answer. Raises Unanswered if there is none."""
    try:
        message = json.loads(answer)["choices"][0]["message"]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError) as error:
        raise Unanswered(f"what was answered is no chat completion: {first_line(error)}") from None
    if not isinstance(message, dict):
        raise Unanswered("what was answered is no chat completion: its message is no object")
    return message


@contextmanager
def relaying(
    url: str, model: str, key: str = "", timeout: float = TIMEOUT, *, takes_refusals: bool = True
) -> Iterator[Relayed]:
    """Pass requests on to `model` at the chat completions of `url`, whatever they call it, until the block ends.

    Only who knows the address, which nobody can guess, gets through. takes_refusals: a refused request is answered;
    otherwise it counts as unanswered.
    """
    path = f"/{secrets.token_urlsafe(16)}/chat/completions"

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            length = self.headers.get("Content-Length", "")
            if not length.isdecimal():
                self.close_connection = True  # where the next request begins is not known
                self.fail(400, "Content-Length is no number")
                return
            body = self.rfile.read(int(length))
            if self.path != path:
                self.reply(404, b"{}")
                return
            try:
                asked = known(body)
            except ValueError as error:
                self.fail(400, str(error))
                return
            try:
                answer = complete(url, asked | {"model": model}, key, timeout)
                message_of(answer)
            except Refused as error:
                if not takes_refusals:
                    relayed.count(str(error))
                self.fail(error.status, str(error))
            except Unanswered as error:
                relayed.count(str(error))
                self.fail(500, str(error))  # the harness tries that again
            else:
                self.reply(200, answer)

        def fail(self, status: int, said: str) -> None:
            self.reply(status, json.dumps({"error": said}).encode())

        def reply(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """The harness has a log of its own."""

    with Server(("127.0.0.1", 0), Handler) as server:
        relayed = Relayed(f"http://127.0.0.1:{server.server_port}{path}")
        thread = threading.Thread(target=server.serve_forever, name="relay", daemon=True)
        thread.start()
        try:
            yield relayed
        finally:
            server.shutdown()
            thread.join()


def known(request: bytes) -> dict[str, Any]:
    """What the API knows of a request, without the nulls that stand for what a message does not have.

    Raises ValueError if it is no request for a chat completion.
    """
    try:
        body = json.loads(request)
    except RecursionError:
        raise ValueError("JSON is nested too deeply") from None
    messages = body.get("messages") if isinstance(body, dict) else None
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError("messages are no list of objects")
    found = {name: body[name] for name in FIELDS if body.get(name) is not None}
    found["messages"] = [{key: value for key, value in m.items() if value is not None} for m in messages]
    return found
