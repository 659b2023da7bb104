"""The endpoint when it must refuse, give up, wait, fail or stop; and what is generated together."""

import asyncio
import json
import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import openai
import pytest
from serving import (
    REHEARSAL,
    WAIT,
    Blocked,
    ScriptedPolicy,
    ask,
    assert_is_error,
    echo,
    post,
    raw,
    running_scripted,
    says,
    settings,
    team_of,
    until,
    user,
)

from envace.chat import ChatFormat
from envace.config import ConfigError
from envace.generation import CachedGenerator
from envace.serve.__main__ import is_loopback, main
from envace.serve.batches import BatchWorker, Kind
from envace.serve.local import LocalEngine
from envace.settings import SamplingConfig
from envace.types import Evidence, Request, Role, Segment, Sequence, UserError


@pytest.fixture(scope="module")
def chat(demo_tokenizer):
    return ChatFormat(demo_tokenizer)


class Noticing(LocalEngine):
    """left: a request that was being answered has been given up."""

    left = threading.Event()

    async def complete(self, request, memory):
        try:
            return await super().complete(request, memory)
        except BaseException:
            self.left.set()
            raise


class TestLimits:
    def test_a_body_that_is_too_long(self, chat):
        with running_scripted(chat, says("ok"), "serve.max_body_bytes=2000") as (server, policy):
            with pytest.raises(openai.APIStatusError) as caught:
                ask(server.client(), user("x" * 3_000_000))
            assert caught.value.status_code == 413 and caught.value.code == "request_too_large"
            # In chunks, without saying how long it is.
            host, port = server.url.split("/")[2].split(":")
            with socket.create_connection((host, int(port)), WAIT) as connection:
                connection.sendall(
                    b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
                )
                for _ in range(3):
                    connection.sendall(b"3e8\r\n" + b"x" * 1000 + b"\r\n")
                connection.sendall(b"0\r\n\r\n")
                assert connection.recv(1000).startswith(b"HTTP/1.1 413 ")
            assert ask(server.client()).choices[0].message.content == "ok"
            assert len(policy.prompts) == 1

    @pytest.mark.parametrize("rehearsal", [(), REHEARSAL])
    def test_a_prompt_that_is_too_long(self, chat, rehearsal):
        with running_scripted(chat, says("ok"), "rollout.max_context_tokens=60", *rehearsal) as (server, policy):
            with pytest.raises(openai.BadRequestError) as caught:
                ask(server.client(), user("word " * 100))
        assert caught.value.code == "context_length_exceeded" and policy.prompts == []

    def test_more_tokens_than_allowed_are_not_written(self, chat):
        with running_scripted(chat, says("one two three four five six"), "serve.max_new_tokens=3") as (server, _):
            assert ask(server.client(), max_tokens=100).usage.completion_tokens == 3
            assert ask(server.client()).usage.completion_tokens == 3

    def test_a_full_queue_asks_to_come_back(self, chat):
        model = Blocked()
        with running_scripted(chat, model, "serve.max_queue=1") as (server, _), ThreadPoolExecutor(1) as pool:
            first = pool.submit(ask, server.client())
            assert model.begun.wait(WAIT)
            with pytest.raises(openai.InternalServerError) as caught:
                ask(server.client())
            model.may_write.set()
            assert first.result(WAIT).choices[0].message.content == "ok"
        assert caught.value.status_code == 503 and caught.value.response.headers["retry-after"] == "1"

    @pytest.mark.parametrize("options", [{}, {"stream": True}])
    def test_a_request_that_takes_too_long(self, chat, options):
        model = Blocked()
        with running_scripted(chat, model, "serve.timeout=0.2") as (server, _):
            with pytest.raises(openai.InternalServerError) as caught:
                ask(server.client(), **options)
            model.may_write.set()
        assert caught.value.status_code == 504 and caught.value.code == "timeout"

    def test_a_body_that_never_comes(self, chat):
        with running_scripted(chat, says("ok"), "serve.timeout=0.2") as (server, _):
            host, port = server.url.split("/")[2].split(":")
            with socket.create_connection((host, int(port)), WAIT) as connection:
                connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
                assert connection.recv(1000).startswith(b"HTTP/1.1 408 ")

    def test_a_client_that_leaves_frees_its_work(self, chat):
        model, Noticing.left = Blocked(), threading.Event()
        with (
            running_scripted(chat, model, engine=Noticing) as (server, policy),
            ThreadPoolExecutor(1) as pool,
        ):
            first = pool.submit(ask, server.client(), user("first"))
            assert model.begun.wait(WAIT)
            with pytest.raises(openai.APITimeoutError):
                ask(server.client(timeout=0.3), user("second"))
            assert Noticing.left.wait(WAIT)
            model.may_write.set()
            first.result(WAIT)
            ask(server.client(), user("third"))
            until(lambda: server.metric("envace_requests_total", status="499") == 1)
        written = "".join(prompt for batch in policy.prompts for prompt in batch)
        assert "first" in written and "third" in written and "second" not in written

    def test_different_sampling_is_not_mixed_and_nobody_starves(self, chat):
        model = Blocked()
        with running_scripted(chat, model) as (server, policy), ThreadPoolExecutor(9) as pool:
            client = server.client()
            replies = [pool.submit(ask, client, user("head"))]
            assert model.begun.wait(WAIT)
            for i in range(8):
                replies.append(pool.submit(ask, client, user(f"t{i % 2}"), temperature=i % 2))
            until(lambda: server.metric("envace_requests_in_flight") == 9)
            model.may_write.set()
            for reply in replies:
                reply.result(WAIT)
        kinds = [{re.search(r"t[01]", prompt)[0] for prompt in batch} for batch in policy.prompts[1:]]
        assert all(len(kind) == 1 for kind in kinds) and set.union(*kinds) == {"t0", "t1"}


class TestBatches:
    def test_what_nobody_waits_for_is_not_generated_to_its_end(self, chat, tiny_model):
        model, passes = tiny_model(len(chat.tokenizer)), []
        policy = ScriptedPolicy(chat, echo)
        policy.model = model
        policy.generating = lambda sampling: nullcontext(CachedGenerator(model, chat.pad_id, sampling))
        kind = Kind(team_of(policy), SamplingConfig(0.0))

        def endless(tokens):
            stream = Sequence([Segment(Role.CONTEXT, chat.prompt(user()), Evidence.GIVEN)])
            [written] = yield [Request(stream, Role.ACT, frozenset(), tokens)]
            return len(written.ids)

        async def scenario():
            loop, is_running = asyncio.get_running_loop(), asyncio.Event()

            def count(*_):
                passes.append(1)
                if len(passes) == 5:
                    loop.call_soon_threadsafe(is_running.set)

            model.register_forward_hook(count)
            worker = BatchWorker(8)
            abandoned = asyncio.create_task(worker.run(kind, endless(3000)))
            await is_running.wait()
            abandoned.cancel()
            written = await worker.run(kind, endless(2))
            await worker.close()
            return written

        assert asyncio.run(asyncio.wait_for(scenario(), WAIT)) == 2
        assert len(passes) < 1000

    def test_one_job_that_fails_spares_the_others(self, chat):
        kind = Kind(team_of(ScriptedPolicy(chat, echo)), SamplingConfig(0.0))

        def fails():
            raise ValueError("of this job")
            yield

        def answers():
            return "fine"
            yield

        async def scenario():
            worker = BatchWorker(8)
            results = await asyncio.gather(
                worker.run(kind, fails()), worker.run(kind, answers()), return_exceptions=True
            )
            await worker.close()
            return results

        failed, answered = asyncio.run(asyncio.wait_for(scenario(), WAIT))
        assert isinstance(failed, ValueError) and answered == "fine"

    def test_a_batch_has_no_more_rows_than_fit(self, chat):
        model = Blocked()
        with running_scripted(chat, model, "rollout.batch_size=3") as (server, policy), ThreadPoolExecutor(8) as pool:
            client = server.client()
            replies = [pool.submit(ask, client)]
            assert model.begun.wait(WAIT)
            replies += [pool.submit(ask, client) for _ in range(7)]
            until(lambda: server.metric("envace_requests_in_flight") == 8)
            model.may_write.set()
            assert all(reply.result(WAIT) for reply in replies)
        assert max(map(len, policy.prompts)) <= 3 and sum(map(len, policy.prompts)) == 8


class TestAccess:
    def test_health_is_open_and_the_rest_needs_the_key(self, chat):
        with running_scripted(chat, says("ok"), key="secret") as (server, _):
            root = server.url.removesuffix("/v1")
            assert raw(f"{root}/health") == (200, {"status": "ok"})
            for path in ("/metrics", "/v1/models", "/v1/nothing"):
                assert_is_error(raw(root + path), 401, "invalid_api_key")
            for wrong in ("", "secre", "secret2", "sécret"):
                assert_is_error(post(server, {"messages": user()}, Authorization=f"Bearer {wrong}"), 401)
            with pytest.raises(openai.AuthenticationError):
                ask(server.client(api_key="x"))
            assert ask(server.client(api_key="secret")).choices[0].message.content == "ok"
            status, text = raw(f"{root}/metrics", headers={"Authorization": "Bearer secret"})
        assert status == 200 and 'envace_requests_total{status="401"}' in text and "secret" not in text

    def test_models_and_unknown_paths(self, chat):
        with running_scripted(chat, says("ok")) as (server, _):
            assert [model.id for model in server.client().models.list()] == ["tiny"]
            assert_is_error(raw(f"{server.url}/nothing"), 404)
            assert_is_error(raw(f"{server.url}/chat/completions"), 405)
            with pytest.raises(openai.NotFoundError) as caught:
                server.client().chat.completions.create(model="other", messages=user())
        assert caught.value.code == "model_not_found" and "models/tiny" not in str(caught.value)

    def test_a_failure_inside_is_told_without_its_reason(self, chat, caplog):
        def fail(prompt):
            raise RuntimeError("weights at /some/where")

        with running_scripted(chat, fail) as (server, policy):
            status, reply = post(server, {"messages": user()})
            assert status == 500 and "/some/where" not in json.dumps(reply)
            number = re.search(r"request (\w+)", reply["error"]["message"])[1]
            policy.write = says("ok")
            assert post(server, {"messages": user()})[0] == 200
        assert number in caplog.text and "/some/where" in caplog.text

    def test_stopping_finishes_what_was_begun(self, chat):
        model = Blocked()
        with running_scripted(chat, model) as (server, _), ThreadPoolExecutor(1) as pool:
            client = server.client()
            reply = pool.submit(ask, client)
            assert model.begun.wait(WAIT)
            server.server.stop()
            until(lambda: not server.server.servers[0].is_serving())
            with pytest.raises(openai.APIConnectionError):
                ask(server.client())
            model.may_write.set()
            assert reply.result(WAIT).choices[0].message.content == "ok"
            server.thread.join(WAIT)
            assert not server.thread.is_alive()

    @pytest.mark.parametrize(
        "host, expected", [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False)]
    )
    def test_who_can_reach_it(self, host, expected):
        assert is_loopback(host) is expected


@pytest.mark.parametrize(
    "overrides, expected",
    [
        (["rehearsal.mode=candidates"], "rehearsal.mode=candidates"),
        (["serve.key_env=NO_SUCH_VARIABLE"], "serve.key_env must NAME"),
        (["serve.host=999.999.999.999"], "serve.host=999.999.999.999"),
        (["model.path=./nothing/here"], "model.path './nothing/here'"),
        (
            [
                "model.path=./nothing/here",
                "serve.backend=http://x/v1",
                "serve.backend_model=x",
                "rehearsal.mode=parallel",
            ],
            "model.path './nothing/here' has no tokenizer",
        ),
    ],
)
def test_what_cannot_work_is_said_at_once(overrides, expected):
    with pytest.raises(UserError, match=re.escape(expected)):
        main(settings(*overrides))


@pytest.mark.parametrize(
    "overrides, expected",
    [
        (["serve.backend=http://user:pass@x/v1"], "serve.backend=..."),
        (["serve.backend=http://x/v1"], "serve.backend_model"),
        (["serve.port=70000"], "serve.port"),
        (["serve.key_env=sk-1234"], "serve.key_env=..."),
        (["serve.timeout=0"], "serve.timeout"),
        (["serve.backend=http://x/v1", "serve.backend_model=x", "rehearsal.path=y"], "rehearsal.path"),
    ],
)
def test_settings_that_cannot_work(overrides, expected):
    with pytest.raises(ConfigError, match=re.escape(expected)):
        settings(*overrides)
