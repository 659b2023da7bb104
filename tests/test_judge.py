import asyncio
import json
import logging
import math
import threading
import time
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai_server import COMPLETION_TOKENS, PROMPT_TOKENS, OpenAIServer, Reply, error, in_order, verdict

from envace import endpoints
from envace.checklist import REPLY, Item, Message, Question
from envace.judge import Judge
from envace.outage import EndpointError, EndpointOutage, Outage
from envace.services import seen_messages
from envace.settings import EndpointConfig
from envace.types import ToolCall, UserError
from envace.verdicts import VerdictCache, read_verdict

pytestmark = pytest.mark.slow  # all together, though each alone is quick

KEY = "sk-test-1234567890abcdef"
YES, NO = Reply(verdict(True)), Reply(verdict(False))


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(endpoints, "FIRST_BACKOFF", 0.01)
    monkeypatch.setattr(endpoints, "LONGEST_BACKOFF", 0.05)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def config_for(*servers, **settings):
    urls = [server.url for server in servers]
    defaults = {"endpoints": urls, "model": "judge", "concurrency": 8, "timeout": 5.0, "retries": 2}
    return EndpointConfig(**defaults | settings)


def ask(text="q"):
    item = Item("C0", text, REPLY, "holds", (), (), False, (), 1.0)
    return Question(item, (), (Message("user", "hello"), Message("assistant", "hi")))


def asks(n):
    return [ask(f"q{i}") for i in range(n)]


def text_of(body):
    return body["messages"][1]["content"]


def judged(script, questions, **settings):
    """(verdicts, metrics without "judge/", the server's log)"""
    with OpenAIServer(script) as server, Judge(config_for(server, **settings)) as judge:
        verdicts = judge.submit(questions).result(timeout=30)
        return verdicts, {k.removeprefix("judge/"): v for k, v in judge.metrics().items()}, server.log


# Requests and their faults.


def test_verdicts_come_in_the_order_of_the_questions():
    def script(number, body):
        return Reply(verdict("q1" in text_of(body)), delay=0.05 if "q0" in text_of(body) else 0)

    verdicts, metrics, log = judged(script, asks(3))
    assert verdicts == [False, True, False]
    assert metrics["asked"] == metrics["answered"] == metrics["requests"] == 3
    assert metrics["prompt_tokens"] == 3 * PROMPT_TOKENS
    assert metrics["completion_tokens"] == 3 * COMPLETION_TOKENS
    assert metrics["latency_seconds"] >= 0.05
    assert metrics["latency_mean_seconds"] == pytest.approx(metrics["latency_seconds"] / 3)


def test_the_request_holds_model_sampling_and_schema():
    _, _, log = judged(in_order(YES), [ask()], temperature=0.3, top_p=0.5, max_tokens=77)
    body = log[0].body
    assert (body["model"], body["temperature"], body["top_p"], body["max_tokens"]) == ("judge", 0.3, 0.5, 77)
    assert [message["role"] for message in body["messages"]] == ["system", "user"]
    assert body["response_format"]["type"] == "json_schema"
    schema = body["response_format"]["json_schema"]
    assert schema["strict"] and schema["schema"]["additionalProperties"] is False
    assert schema["schema"]["properties"]["answer"]["type"] == "boolean"
    assert list(schema["schema"]["properties"])[-1] == "answer"


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (error(429, headers={"Retry-After": "0"}), "rate_limit"),
        (error(500), "server_error"),
        (error(503), "server_error"),
        (Reply(verdict(True), cut=0), "connection"),
        (Reply(verdict(True), cut=30), "connection"),
        (Reply(verdict(True), delay=2.5), "timeout"),
        (Reply(verdict(True), trickle=0.05), "timeout"),
        (Reply(body="{not json"), "no_verdict"),
        (Reply(body="<html>busy</html>", content_type="text/html"), "no_verdict"),
        (Reply(body='{"choices": []}'), "no_verdict"),
        (Reply(body='{"choices": [{}]}'), "no_verdict"),
        (Reply(body="[]"), "no_verdict"),
        (Reply(None), "no_verdict"),
        (Reply("Yes, it does."), "no_verdict"),
        (Reply(verdict(True)[:-8]), "no_verdict"),
        (Reply(verdict("true")), "no_verdict"),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value.status}-{str(value.body or value.content)[:20]}",
)
def test_a_fault_is_tried_again(fault, cause):
    timeout = 0.8 if cause == "timeout" else 5.0
    verdicts, metrics, log = judged(in_order(fault, NO), [ask()], timeout=timeout)
    assert verdicts == [False]
    retries = {name: value for name, value in metrics.items() if name.startswith("retries_") and value}
    assert retries == {f"retries_{cause}": 1.0}
    assert (metrics["asked"], metrics["answered"], metrics["unknown"], len(log)) == (1, 1, 0, 2)


@pytest.mark.parametrize("fault", [error(500), error(429), Reply("no idea")], ids=["500", "429", "prose"])
def test_without_a_verdict_after_the_retries_it_is_unknown(fault, caplog):
    verdicts, metrics, log = judged(in_order(fault), [ask()], retries=2)
    assert verdicts == [None]
    assert len(log) == 3
    assert (metrics["asked"], metrics["answered"], metrics["unknown"], metrics["unknown_share"]) == (1, 0, 1, 1.0)
    assert "without a verdict" in caplog.text


def test_a_question_that_the_endpoint_refuses_is_unknown_at_once():
    verdicts, metrics, log = judged(
        in_order(error(400, "prompt too long"), YES), [ask("long"), ask("b")], concurrency=1
    )
    assert verdicts == [None, True]
    assert (metrics["refused"], metrics["unknown"], len(log)) == (1, 1, 2)


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_refused_key_or_an_unknown_model_stops_at_once(status):
    with OpenAIServer(in_order(error(status))) as server, Judge(config_for(server)) as judge:
        with pytest.raises(EndpointError, match=f"HTTP {status}.*check judge.endpoints"):
            judge.submit([ask()]).result(timeout=10)
        assert len(server.log) == 1


@pytest.mark.parametrize("form", ["seconds", "date"])
def test_retry_after_is_honoured_by_all_requests(form):
    def script(number, body):
        # A date has whole seconds: 2 s from now may be little more than 1 s.
        later = format_datetime(datetime.now(UTC) + timedelta(seconds=2), usegmt=True)
        return YES if number else error(429, headers={"Retry-After": "0.4" if form == "seconds" else later})

    verdicts, metrics, log = judged(script, asks(3), concurrency=1)
    assert verdicts == [True] * 3
    assert all(later.arrived - log[0].finished > 0.35 for later in log[1:])


@pytest.mark.parametrize(
    ("header", "seconds"), [("2.5", 2.5), ("", 0), ("soon", 0), ("-3", 0), ("nan", 0), ("inf", 0), ("1e999", 0)]
)
def test_a_retry_after_that_says_nothing_is_no_wait(header, seconds):
    assert endpoints._retry_after(header) == seconds


def test_back_off_doubles_up_to_a_limit_and_is_spread(monkeypatch):
    monkeypatch.setattr(endpoints, "FIRST_BACKOFF", 0.5)
    monkeypatch.setattr(endpoints, "LONGEST_BACKOFF", 30.0)
    for attempt, longest in [(0, 0.5), (1, 1), (5, 16), (6, 30), (10_000, 30)]:
        waits = [endpoints._backoff(attempt) for _ in range(50)]
        assert longest / 2 <= min(waits) < max(waits) <= longest


def test_no_more_requests_at_once_than_allowed():
    with OpenAIServer(in_order(Reply(verdict(True), delay=0.03))) as server:
        with Judge(config_for(server, concurrency=4)) as judge:
            judge.submit(asks(20)).result(timeout=30)
        assert server.largest_concurrency == 4


def test_several_endpoints_take_turns():
    with OpenAIServer(in_order(YES)) as one, OpenAIServer(in_order(NO)) as two:
        with Judge(config_for(one, two)) as judge:
            verdicts = judge.submit(asks(10)).result(timeout=30)
        assert (len(one.log), len(two.log)) == (5, 5)
        assert sum(verdicts) == 5


@pytest.mark.parametrize("fault", [error(500), error(429, headers={"Retry-After": "30"})], ids=["500", "429"])
def test_an_endpoint_that_fails_is_passed_over(fault, caplog):
    with OpenAIServer(in_order(fault)) as bad, OpenAIServer(in_order(YES)) as good:
        with Judge(config_for(bad, good, concurrency=1)) as judge:
            assert judge.submit(asks(6)).result(timeout=20) == [True] * 6
        assert (len(bad.log), len(good.log)) == (1, 6)
    assert ("asks for 30 seconds without requests" in caplog.text) == ("Retry-After" in fault.headers)


def test_the_others_take_over_for_a_dead_endpoint(caplog, monkeypatch):
    monkeypatch.setattr(endpoints, "AVOID_SECONDS", 0.0)
    with OpenAIServer(in_order(YES)) as dead:
        pass
    with OpenAIServer(in_order(YES)) as good, Judge(config_for(dead, good, max_outage_minutes=0.0)) as judge:
        assert judge.submit(asks(20)).result(timeout=20) == [True] * 20
    assert "is down" in caplog.text and "the others take over" in caplog.text


# Outages.


def test_while_no_endpoint_can_be_reached_questions_wait(caplog):
    with OpenAIServer(in_order(YES)) as server:
        port = server.port
    with Judge(config_for(server, retries=1, max_outage_minutes=1.0)) as judge:
        pending = judge.submit(asks(3))
        time.sleep(0.5)
        assert not pending.done()
        assert "is down" in caplog.text and "waiting up to 1 minutes" in caplog.text
        with OpenAIServer(in_order(YES), port=port):
            assert pending.result(timeout=10) == [True] * 3
        assert judge.end_step()["judge/unknown"] == 0
    assert "answers again" in caplog.text


def test_an_outage_that_lasts_stops_the_run():
    with OpenAIServer(in_order(YES)) as server:
        pass
    with Judge(config_for(server, retries=1, max_outage_minutes=0.005)) as judge:
        with pytest.raises(EndpointOutage, match="down for 0.005 minutes") as raised:
            judge.submit(asks(3)).result(timeout=10)
    assert isinstance(raised.value, UserError) and "\n" not in str(raised.value)


def test_a_judge_that_takes_every_question_and_answers_none_is_an_outage(caplog):
    settings = {"timeout": 0.05, "retries": 1, "max_outage_minutes": 0.005}
    with (
        OpenAIServer(in_order(Reply(verdict(True), delay=30.0))) as server,
        Judge(config_for(server, **settings)) as judge,
    ):
        with pytest.raises(EndpointOutage):
            judge.submit(asks(4)).result(timeout=20)
    assert "is down" in caplog.text


def test_one_question_that_always_takes_too_long_is_unknown_and_no_outage():
    def script(number, body):
        return Reply(verdict(True), delay=30.0 if "q0" in text_of(body) else 0.0)

    settings = {"timeout": 0.1, "retries": 1, "max_outage_minutes": 0.001}
    with OpenAIServer(script) as server, Judge(config_for(server, **settings)) as judge:
        assert judge.submit(asks(3)).result(timeout=20) == [None, True, True]


def test_a_step_with_too_many_unknown_verdicts_stops_the_run():
    def script(number, body):
        return Reply("?") if "q0" in text_of(body) else YES

    with OpenAIServer(script) as server, Judge(config_for(server, retries=0)) as judge:
        judge.submit(asks(10)).result(timeout=10)
        assert judge.end_step()["judge/unknown_share"] == 0.1, "the largest share that is allowed"
        judge.submit([ask("q0")]).result(timeout=10)
        with pytest.raises(EndpointOutage, match="1 of 1 questions .* without a verdict .*max_unknown_share=0.1"):
            judge.end_step()
        assert judge.end_step()["judge/asked"] == 0


def test_an_endpoint_that_is_named_twice_is_one():
    one = Outage(EndpointConfig(endpoints=["a", "a"]), "judge", "verdict")
    one.failed("a", 0.0, "cut")
    assert one.all_failing


def outage(n=2):
    settings = {"max_unknown_share": 0.1, "max_outage_minutes": 1.0}
    return Outage(EndpointConfig(endpoints=["a", "b"][:n], **settings), "judge", "verdict")


def test_an_outage_counts_from_the_first_failure_until_an_answer():
    one = outage(1)
    one.failed("a", 100.0, "cut")
    one.failed("a", 159.0, "cut")
    one.check(159.9)
    assert one.all_failing and one.remaining(159.0) == 1.0
    with pytest.raises(EndpointOutage):
        one.check(160.0)
    one.answered("a")
    one.check(1e6)
    assert one.remaining(1e6) == math.inf
    one.failed("a", 1e6, "cut")
    one.check(1e6 + 59)


def test_an_outage_needs_every_endpoint_to_fail_for_that_long():
    both = outage()
    both.failed("a", 0.0, "cut")
    both.check(1000.0)
    both.failed("b", 1000.0, "cut")
    both.check(1059.0)
    with pytest.raises(EndpointOutage, match="a, b down"):
        both.check(1060.0)


def test_an_endpoint_is_called_down_once(caplog):
    one = outage()
    for now in range(10):
        one.failed("a", now, "refused")
    assert caplog.text.count("a is down (refused); the others take over") == 1
    one.answered("a")
    one.answered("a")
    assert caplog.text.count("answers again") == 1


def test_unknown_verdicts_are_warned_of_before_they_stop_a_run(caplog):
    outage().check_step(100, 5, "x")
    outage().check_step(0, 0, "")
    assert not caplog.records
    outage().check_step(100, 6, "x")
    assert "6 of 100" in caplog.text and "stops above" in caplog.text


# The same question twice, and the cache.


def test_identical_questions_are_asked_once():
    verdicts, metrics, log = judged(in_order(Reply(verdict(True), delay=0.1)), [ask("a"), ask("a"), ask("b")])
    assert verdicts == [True] * 3 and len(log) == 2
    assert (metrics["asked"], metrics["answered"], metrics["cached"]) == (3, 2, 1)


def test_verdicts_are_kept_on_disk_and_no_unknown_one_is(tmp_path):
    path = tmp_path / "new" / "verdicts.jsonl"

    def script(number, body):
        return Reply("?") if "q1" in text_of(body) else NO if "q2" in text_of(body) else YES

    assert judged(script, asks(3), cache=str(path), retries=0)[0] == [True, None, False]
    assert [set(json.loads(line)) for line in path.read_text().splitlines()] == [{"key", "answer"}] * 2
    verdicts, metrics, log = judged(in_order(YES), asks(3), cache=str(path))
    assert verdicts == [True, True, False] and len(log) == 1
    assert (metrics["cached"], metrics["answered"]) == (2, 1)


@pytest.mark.parametrize("changed", [{"model": "other"}, {"temperature": 0.0}, {"top_p": 1.0}, {"max_tokens": 9}])
def test_another_model_or_sampling_is_asked_anew(tmp_path, changed):
    path = str(tmp_path / "verdicts.jsonl")
    judged(in_order(YES), [ask()], cache=path)
    assert judged(in_order(NO), [ask()], cache=path, **changed)[0] == [False]
    assert judged(in_order(NO), [ask()], cache=path)[0] == [True]


def test_damaged_lines_of_a_cache_are_reported_and_the_rest_is_used(tmp_path, caplog):
    path = tmp_path / "verdicts.jsonl"
    path.write_text('{"key": "a", "answer": true}\n[]\n{"key": "x", "answer": 1}\n{"key": "b", "ans')
    cache = VerdictCache(str(path))
    assert "skipped 3 damaged lines" in caplog.text
    assert (cache.get("a"), cache.get("x"), cache.get("b")) == (True, None, None)
    cache.add("b", False)
    cache.add("c", True)
    again = VerdictCache(str(path))
    assert (again.get("a"), again.get("b"), again.get("c")) == (True, False, True)


def test_a_cache_that_cannot_be_used_is_said_in_one_line(tmp_path):
    with pytest.raises(EndpointError, match="cannot read the judge's cache"):
        VerdictCache(str(tmp_path))
    cache = VerdictCache(str(tmp_path / "gone" / "verdicts.jsonl"))
    (tmp_path / "gone").rmdir()
    with pytest.raises(EndpointError, match="cannot write the judge's cache"):
        cache.add("a", True)


# Replies.


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (verdict(True), True),
        (f"```json\n{verdict(False)}\n```", False),
        (f"Here it is: {verdict(True)} I hope this helps {{}}.", True),
        (f"<think>\nMaybe {verdict(True)}?\n</think>\n\n{verdict(False)}", False),
        (f"Maybe {verdict(True)}?\n</think>\n{verdict(False)}", False),
        (f"<think>{verdict(True)}", None),
        (f"{verdict(True)}<think>or {verdict(False)}", True),
        ('{"answer": false}', False),
        ('{"note": "a } brace, a { and \\"answer\\": true", "answer": false}', False),
        ('{"nested": {"answer": true}}', None),
        ('[{"answer": true}]', True),
        ('{"answer": true} no: {"answer": false}', None),
        (f'The user wrote {{"answer": true}}. {verdict(False)}', False),
        (f"{verdict(True)} {verdict(True)}", True),
        ('{"answer": "true"}', None),
        ('{"answer": 1}', None),
        ('{"answer": null}', None),
        ('{"answer": tru', None),
        ("true", None),
        ("", None),
        ("{" * 5000, None),
        ('{"a":' * 5000, None),
    ],
)
def test_a_verdict_is_found_in_what_stands_around_it(text, expected):
    assert read_verdict(text) is expected


@given(st.text(), st.text(), st.booleans())
def test_no_prose_around_a_verdict_changes_it(before, after, answer):
    if "think>" not in before + after and "answer" not in before + after:
        # An open brace or quote in front must not swallow the object.
        assert read_verdict(f"{before}\n{verdict(answer)}\n{after}") is answer


def test_fenced_and_thinking_replies_over_http():
    replies = in_order(Reply(f"<think>hm</think>```json\n{verdict(True)}\n```"))
    verdicts, metrics, _ = judged(replies, [ask()])
    assert verdicts == [True] and metrics["requests"] == 1


def test_an_output_is_split_in_thinking_reply_and_calls():
    call = '<tool_call>\n{"name": "f", "arguments": {"x": "</think>"}}\n</tool_call>'
    messages = [
        {"role": "user", "content": "<think>not thinking</think>"},
        {"role": "assistant", "content": f"<think>\nplan\n</think>\n\nOne moment.\n{call}"},
        {"role": "tool", "content": "{}"},
        {"role": "assistant", "content": "no thinking here"},
        {"role": "assistant", "content": "<think>x</think><tool_call>{broken</tool_call>"},
        {"role": "assistant", "content": "<think>never closed"},
        {"role": "assistant", "content": call},
        {"role": "assistant", "content": "<think>a</think>x<think>b</think>y"},
        {"role": "assistant", "content": "opened by the prompt</think>z"},
    ]
    assert seen_messages(messages) == [
        Message("user", "<think>not thinking</think>"),
        Message("assistant", "One moment.", "plan", (ToolCall("f", {"x": "</think>"}),)),
        Message("tool", "{}"),
        Message("assistant", "no thinking here"),
        Message("assistant", "<tool_call>{broken</tool_call>", "x"),
        Message("assistant", "", "never closed"),
        Message("assistant", "", "", (ToolCall("f", {"x": "</think>"}),)),
        Message("assistant", "xy", "a\nb"),
        Message("assistant", "z", "opened by the prompt"),
    ]


# Settings and the key.


@pytest.mark.parametrize(
    "settings",
    [
        {"endpoints": []},
        {"model": ""},
        {"endpoints": ["localhost:8000"]},
        {"endpoints": [f"http://me:{KEY}@localhost/v1"]},
        {"endpoints": [f"http://localhost/v1?key={KEY}"]},
        {"endpoints": ["http://[::1/v1"]},
        {"endpoints": ["http://localhost:80a/v1"]},
        {"key_env": "JUDGE_KEY_THAT_IS_NOT_SET"},
        {"key_env": KEY},
    ],
)
def test_settings_that_cannot_work_are_refused_in_one_line_without_the_key(settings):
    with pytest.raises(EndpointError) as raised:
        Judge(EndpointConfig(**{"endpoints": ["http://localhost/v1"], "model": "m"} | settings))
    assert "judge." in str(raised.value) and "\n" not in str(raised.value)
    assert KEY not in str(raised.value)


@pytest.mark.parametrize("status", [400, 401, 429, 500])
def test_the_key_is_sent_and_shows_nowhere_else(status, monkeypatch, tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("MY_JUDGE_KEY", KEY + "\n")
    path = tmp_path / "verdicts.jsonl"
    replies = in_order(YES, error(status, f"wrong key {KEY}"))
    with OpenAIServer(replies) as server:
        config = config_for(server, key_env="MY_JUDGE_KEY", cache=str(path), concurrency=1, retries=1)
        seen = [str(asdict(config))]
        with Judge(config) as judge:
            seen += [repr(judge), str(judge.__dict__), str(judge._client.__dict__)]
            assert judge.submit([ask("a")]).result(timeout=10) == [True]
            try:
                seen.append(str(judge.submit([ask("b")]).result(timeout=10)))
                judge.end_step()
            except UserError as raised:
                assert raised.__cause__ is None and (raised.__context__ is None or raised.__suppress_context__)
                seen += [str(raised), repr(raised)]
            seen.append(str(judge.metrics()))
        assert {request.authorization for request in server.log} == {f"Bearer {KEY}"}
        assert KEY not in str([request.body for request in server.log])
    seen += [path.read_text(), caplog.text]
    assert KEY not in "".join(seen) and KEY[:12] not in "".join(seen)


def test_without_a_key_another_key_in_the_environment_is_not_sent(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    _, _, log = judged(in_order(YES), [ask()])
    assert KEY not in log[0].authorization


# The bridge between the driver of the episodes and the event loop.


def test_judging_goes_on_while_the_caller_does_something_else():
    with OpenAIServer(in_order(Reply(verdict(True), delay=0.2))) as server, Judge(config_for(server)) as judge:
        first, second = judge.submit([ask("a")]), judge.submit([ask("b"), ask("a")])
        assert not first.done() and not second.done()
        deadline = time.monotonic() + 10
        while not (first.done() and second.done()) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert (first.result(), second.result()) == ([True], [True, True])
        assert len(server.log) == 2


def test_coroutines_of_any_event_loop_can_ask():
    with OpenAIServer(in_order(YES)) as server, Judge(config_for(server)) as judge:

        async def both():
            return await asyncio.gather(judge.verdicts([ask("a")]), judge.verdicts([ask("b"), ask("c")]))

        assert asyncio.run(both()) == [[True], [True, True]]
        assert asyncio.run(judge.verdicts([])) == []


def test_whoever_gives_up_does_not_take_the_answer_from_others():
    with OpenAIServer(in_order(Reply(verdict(True), delay=0.3))) as server, Judge(config_for(server)) as judge:
        first, second = judge.submit([ask("a")]), judge.submit([ask("a")])
        time.sleep(0.1)
        first.cancel()
        assert second.result(timeout=10) == [True]
        assert len(server.log) == 1


def test_closing_gives_up_what_is_pending_and_ends_the_thread():
    with OpenAIServer(in_order(Reply(verdict(True), delay=5.0))) as server:
        judge = Judge(config_for(server))
        pending = judge.submit([ask()])
        time.sleep(0.1)
        started = time.monotonic()
        judge.close()
        judge.close()
        assert time.monotonic() - started < 3
        assert pending.cancelled()
        assert not [thread for thread in threading.enumerate() if thread.name == "judge"]


def test_end_step_starts_the_counts_anew():
    with OpenAIServer(in_order(error(500), YES)) as server, Judge(config_for(server)) as judge:
        judge.submit([ask()]).result(timeout=10)
        metrics = judge.end_step()
        assert metrics["judge/asked"] == metrics["judge/retries_server_error"] == 1
        assert all(name.startswith("judge/") and isinstance(value, float) for name, value in metrics.items())
        assert not any(judge.metrics().values())
        assert judge.metrics().keys() == metrics.keys()


# Many questions.

TRAJECTORIES, CHECKS, LATENCY, FAILURES, CONCURRENCY = 64, 10, 0.2, 0.05, 16


def flaky(latency):
    """5% of the first tries fail, in four ways; the verdict depends on the question."""
    tried, lock = set(), threading.Lock()
    faults = [error(500, delay=latency), Reply(verdict(True), cut=10, delay=latency), Reply("?", delay=latency)]
    faults.append(error(429, delay=latency, headers={"Retry-After": "0"}))

    def script(number, body):
        question = int(json.loads(text_of(body).split("\n")[1])["question"])
        with lock:
            first = question not in tried
            tried.add(question)
        if first and question % round(1 / FAILURES) == 0:
            return faults[question // round(1 / FAILURES) % len(faults)]
        return Reply(verdict(question % 3 == 0), delay=latency)

    return script


def judge_all(latency):
    """(seconds, log) of 64 trajectories that each ask 10 questions, with no verdict lost or counted twice.

    bench/judge_speed.py compares the seconds with the ideal.
    """
    with OpenAIServer(flaky(latency)) as server, Judge(config_for(server, concurrency=CONCURRENCY)) as judge:
        started = time.monotonic()
        pending = {t: judge.submit([ask(str(t * CHECKS + c)) for c in range(CHECKS)]) for t in range(TRAJECTORIES)}
        for t, future in pending.items():
            assert future.result(timeout=120) == [(t * CHECKS + c) % 3 == 0 for c in range(CHECKS)]
        seconds = time.monotonic() - started
        metrics = judge.end_step()
    checks = TRAJECTORIES * CHECKS
    tries = checks + round(checks * FAILURES)
    assert metrics["judge/asked"] == metrics["judge/answered"] == checks
    assert metrics["judge/requests"] == len(server.log) == tries
    assert sum(value for name, value in metrics.items() if "/retries_" in name) == tries - checks
    assert server.largest_concurrency <= CONCURRENCY
    return seconds, server.log


def test_no_verdict_is_lost_or_counted_twice_among_many():
    judge_all(latency=0.002)
