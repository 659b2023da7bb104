"""The endpoint over another OpenAI-compatible server: what is passed on, how it rehearses there, what when it fails."""

import json
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager

import openai
import pytest
from openai_server import OpenAIServer, Reply, error
from serving import REHEARSAL, TOOL, WAIT, joined, running, settings, user

from envace.chat import ChatFormat
from envace.serve.remote import RemoteEngine


@pytest.fixture(scope="module")
def chat(demo_tokenizer):
    return ChatFormat(demo_tokenizer)


@contextmanager
def passing_on(url, *overrides, chat=None, key=""):
    config = settings(f"serve.backend={url}", "serve.backend_model=big", *overrides)
    with running(lambda metrics: RemoteEngine(config, chat, key), config) as server:
        yield server


def say(client, messages=None, **options):
    return client.chat.completions.create(model="big", messages=messages or user(), **options)


def sse(*chunks, done=True):
    events = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks] + (["data: [DONE]\n\n"] if done else [])
    return Reply(body="".join(events), content_type="text/event-stream")


def chunk(delta, reason=None, **more):
    choice = {"index": 0, "delta": delta, "finish_reason": reason}
    return {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": "b", "choices": [choice], **more}


class TestPassingOn:
    def test_a_request_and_its_reply(self):
        with OpenAIServer(lambda n, body: Reply("hello")) as backend, passing_on(backend.url, key="k3y") as server:
            options = {"temperature": 0.5, "stop": "x", "seed": 3, "tools": [TOOL], "max_tokens": 10**6}
            reply = say(server.client(), user("q"), **options)
            assert server.metric("envace_tokens_total", kind="prompt") == reply.usage.prompt_tokens
        sent = backend.log[0]
        assert (reply.choices[0].message.content, reply.model, sent.authorization) == ("hello", "big", "Bearer k3y")
        expected = {
            "model": "big",
            "messages": user("q"),
            "temperature": 0.5,
            "stop": ["x"],
            "seed": 3,
            "tools": [TOOL],
        }
        assert sent.body == expected | {"max_tokens": 1024}

    def test_a_stream(self):
        call = {"index": 0, "id": "c", "type": "function", "function": {"name": "look", "arguments": ""}}
        more = {"index": 0, "function": {"arguments": '{"q": 1}'}}
        usage = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
        events = sse(
            chunk({"role": "assistant", "content": "a"}),
            chunk({"reasoning_content": "why"}),
            chunk({"tool_calls": [call]}),
            chunk({"tool_calls": [more]}),
            chunk({}, "tool_calls"),
            {**chunk({}), "choices": [], "usage": usage},
        )
        with OpenAIServer(lambda n, body: events) as backend, passing_on(backend.url) as server:
            stream = say(server.client(), stream=True, stream_options={"include_usage": True})
            content, thinking, calls, reason, used = joined(stream)
            assert server.metric("envace_tokens_total", kind="completion") == 2
        assert (content, thinking, calls, reason) == ("a", "why", [("c", "look", '{"q": 1}')], "tool_calls")
        assert used.total_tokens == 7
        assert backend.log[0].body["stream"] is True and backend.log[0].body["stream_options"] == {
            "include_usage": True
        }


class TestRehearsing:
    def test_over_completions_with_token_ids(self, chat):
        """One call, its response, the answer and a verdict, as the same Rehearser makes them over a local model."""
        both = threading.Barrier(2)

        def complete(number, body):
            both.wait(WAIT)  # as the two rehearsals are generated together
            text = chat.tokenizer.decode(body["prompt"], skip_special_tokens=False)
            last = text.rpartition("<|im_start|>")[2]
            if last.startswith("user\n<tool_response>"):
                said, stop = '{"found": 1}\n', chat.response_end
            elif "This was a rehearsal" in text:
                said, stop = "good", chat.turn_end
            elif "<tool_response>" in text:
                said, stop = "It is 1.", chat.turn_end
            else:
                said, stop = '<tool_call>\n{"name": "look", "arguments": {"q": "a"}}\n</tool_call>', chat.turn_end
            assert stop in body["stop_token_ids"] and body["skip_special_tokens"] is False
            named = {"stop_reason": stop} if number % 2 else {"matched_stop": stop, "stop_reason": None}
            choice = {"index": 0, "text": said, "finish_reason": "stop", "logprobs": None, **named}
            return Reply(body=json.dumps({"id": "x", "object": "text_completion", "choices": [choice]}))

        with (
            OpenAIServer(lambda n, body: Reply("done"), completions=complete) as backend,
            passing_on(backend.url, *REHEARSAL, chat=chat) as server,
        ):
            create = server.client().chat.completions.with_raw_response.create
            system = {"role": "system", "content": "Be brief."}
            replies = [create(model="big", messages=[system, *user("q")], tools=[TOOL]) for _ in range(2)]
        summaries = [json.loads(reply.headers["x-rehearsal"]) for reply in replies]
        assert [summary["cached"] for summary in summaries] == [False, True] and summaries[0]["n"] == 2
        asked = [request for request in backend.log if "prompt" in request.body]
        assert len(asked) == 8
        assert asked[0].body["prompt"] == chat.prompt([system, *user("q")], [TOOL])
        for request in backend.log[8:]:
            told = request.body["messages"][0]["content"]
            assert told.startswith("Be brief.") and '- 2x look {"q": "a"}: good' in told

    def test_a_backend_without_completions(self, chat):
        with (
            OpenAIServer(lambda n, body: Reply("done")) as backend,
            passing_on(backend.url, *REHEARSAL, chat=chat) as server,
            pytest.raises(openai.InternalServerError) as caught,
        ):
            say(server.client())
        assert caught.value.status_code == 502


class TestFailures:
    @pytest.mark.parametrize(
        "reply, status, code",
        [
            (error(400, "the context is too long, k3y"), 400, None),
            (error(422), 400, None),
            (error(401, "wrong key k3y"), 502, "backend_error"),
            (error(404, "no model at /data/x"), 502, "backend_error"),
            (error(429, headers={"Retry-After": "7"}), 429, "rate_limit_exceeded"),
            (error(500), 502, "backend_error"),
            (error(503), 502, "backend_error"),
            (Reply(body="<html>"), 502, "backend_error"),
            (Reply(body="[]"), 502, "backend_error"),
            (Reply(body="[" * 100_000), 502, "backend_error"),
            (Reply(body='{"choices": []}'), 502, "backend_error"),
            (Reply(body='{"choices": [{"message": 3}]}'), 502, "backend_error"),
            (Reply("hello", cut=20), 502, "backend_unavailable"),
        ],
    )
    def test_each_is_told_in_the_standard_shape(self, reply, status, code):
        with OpenAIServer(lambda n, body: reply) as backend, passing_on(backend.url, key="k3y") as server:
            with pytest.raises(openai.APIStatusError) as caught:
                say(server.client())
            if reply.body and reply.status != 200:
                with pytest.raises(openai.APIStatusError) as streamed:
                    say(server.client(), stream=True)
                assert streamed.value.status_code == status
        assert caught.value.status_code == status
        assert caught.value.body.keys() == {"message", "type", "param", "code"}
        assert code is None or caught.value.code == code
        text = caught.value.response.text
        assert "k3y" not in text and "/data" not in text
        if status == 429:
            assert caught.value.response.headers["retry-after"] == "7"

    @pytest.mark.parametrize(
        "events",
        [
            sse(chunk({"content": "a"}), done=False),
            sse(chunk({"content": "a"}), {"error": {"message": "out of memory at /data"}}),
            Reply(
                body=f"data: {json.dumps(chunk({'content': 'a'}))}\n\ndata: {{\n\n", content_type="text/event-stream"
            ),
        ],
    )
    def test_a_stream_that_breaks_off_says_so(self, events):
        with OpenAIServer(lambda n, body: events) as backend, passing_on(backend.url) as server:
            stream = say(server.client(), stream=True)
            assert next(stream).choices[0].delta.content == "a"
            with pytest.raises(openai.APIError, match="the backend broke off its reply"):
                list(stream)

    def test_one_that_takes_too_long(self):
        backend = OpenAIServer(lambda n, body: Reply("late", delay=3.0))
        with backend, passing_on(backend.url, "serve.timeout=0.3") as server:
            with pytest.raises(openai.InternalServerError) as caught:
                say(server.client())
        assert caught.value.status_code == 504 and caught.value.code == "timeout"

    def test_a_client_that_leaves_cancels_the_backend_request(self):
        with socket.create_server(("127.0.0.1", 0)) as listening:
            hung_up = threading.Event()

            def take():
                connection, _ = listening.accept()
                with connection:
                    while connection.recv(65536):  # "" when the other side has hung up
                        pass
                hung_up.set()

            threading.Thread(target=take, daemon=True).start()
            with passing_on(f"http://127.0.0.1:{listening.getsockname()[1]}/v1") as server:
                with pytest.raises(openai.APITimeoutError):
                    say(server.client(timeout=0.3))
                assert hung_up.wait(WAIT)

    @pytest.mark.slow
    def test_a_backend_that_is_killed_and_returns(self, tmp_path):
        process, port = started_backend(0)
        try:
            with passing_on(f"http://127.0.0.1:{port}/v1") as server:
                client = server.client()
                assert say(client).choices[0].message.content == "here"
                pending = client.with_options(timeout=WAIT)
                outcome = []

                def wait_for_reply():
                    try:
                        say(pending, user("hang"))
                    except openai.APIStatusError as e:
                        outcome.append(e)

                waiting = threading.Thread(target=wait_for_reply)
                waiting.start()
                assert process.stdout.readline() == "hangs\n"
                process.kill()
                process.wait()
                waiting.join(WAIT)
                with pytest.raises(openai.InternalServerError) as caught:
                    say(client)
                for failure in (outcome[0], caught.value):
                    assert failure.status_code == 502 and failure.code == "backend_unavailable"
                process, _ = started_backend(port)
                assert say(client).choices[0].message.content == "here"
        finally:
            process.kill()
            process.wait()


BACKEND = """
import json, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body["messages"][-1]["content"] == "hang":
            print("hangs", flush=True)
            time.sleep(600)
        choice = {"index": 0, "message": {"role": "assistant", "content": "here"}, "finish_reason": "stop"}
        reply = json.dumps({"id": "x", "object": "chat.completion", "created": 0, "model": "b", "choices": [choice]})
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply.encode())
    def log_message(self, *args):
        pass

server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
print(server.server_address[1], flush=True)
server.serve_forever()
"""


def started_backend(port):
    process = subprocess.Popen([sys.executable, "-c", BACKEND, str(port)], stdout=subprocess.PIPE, text=True)
    return process, int(process.stdout.readline())
