"""Calls that a harness may spell out as Python: whatever passes is one call of an offered tool with literal values."""

import ast
import json

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai_server import OpenAIServer, Reply
from serving import TOOL, running, settings, user

from envace.serve.guard import GuardedEngine, are_plain
from envace.serve.remote import RemoteEngine

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


def call(name="look", arguments='{"q": "x"}'):
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize(
    "calls",
    [
        [call()],
        [call(arguments="{}")],
        [call(arguments='{"q": {"a b": [1, null, true]}}'), call()],
        [call(arguments={"q": 1})],
    ],
)
def test_plain_calls(calls):
    assert are_plain(calls, {"look"})


@pytest.mark.parametrize(
    "calls",
    [
        [call("look_up")],
        [call("__import__('os').system('true') or look")],
        [call("open", '{"file": "/etc/passwd"}')],
        [call(), call("open")],
        [call(arguments='{"q=1) or exit(": 1}')],
        [call(arguments='{"class": 1}')],
        [call(arguments='{"": 1}')],
        [call(arguments='{"q": NaN}')],
        [call(arguments='{"q": 1} and more')],
        [call(arguments="[1]")],
        [call(arguments="not json")],
        [call(arguments=None)],
        [{"function": None}],
        [call([])],
        [call({})],
        [call(None)],
        ["look"],
        {"look": {}},
        "look()",
        7,
    ],
)
def test_calls_that_are_not_plain(calls):
    assert not are_plain(calls, {"look"})


def test_without_an_offer_no_call_is_plain():
    assert not are_plain([call()], set())


@given(st.text() | st.sampled_from(["look", "look(", "open"]), st.dictionaries(st.text(), JSON, max_size=3))
def test_what_passes_is_one_call_with_literal_values_when_spelled_out(name, arguments):
    text = json.dumps(arguments)
    if not are_plain([call(name, text)], {"look"}):
        return
    spelled = f"{name}({','.join(f'{key}={value!r}' for key, value in json.loads(text).items())})"
    expression = ast.parse(spelled, mode="eval").body
    assert isinstance(expression, ast.Call) and expression.func.id == "look" and not expression.args
    assert {k.arg for k in expression.keywords} == {
        ast.parse(f"f({key}=1)").body[0].value.keywords[0].arg for key in arguments
    }
    for keyword in expression.keywords:
        ast.literal_eval(keyword.value)


def reply_with(*calls, content=None):
    message = {"role": "assistant", "content": content, "tool_calls": list(calls)}
    body = {
        "id": "x",
        "object": "chat.completion",
        "created": 0,
        "model": "m",
        "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }
    return Reply(body=json.dumps(body))


def ask(reply, **options):
    """(the message that a client gets, its finish reason, refused replies)"""
    with OpenAIServer(lambda n, body: reply) as backend:
        config = settings(f"serve.backend={backend.url}", "serve.backend_model=big", "serve.name=known")

        def guarded(metrics):
            return GuardedEngine(RemoteEngine(config, None, ""), ["tail"], metrics.refused_calls.inc)

        with running(guarded, config) as server:
            answer = server.client().chat.completions.create(model="known", messages=user(), **options)
            assert answer.model == "known" and backend.log[0].body["model"] == "big"
            [choice] = answer.choices
            return choice.message, choice.finish_reason, server.metric("envace_refused_calls_total")


def test_plain_calls_pass_unchanged():
    message, reason, refused = ask(reply_with(call()), tools=[TOOL])
    assert [c.function.arguments for c in message.tool_calls] == ['{"q": "x"}']
    assert (message.content, reason, refused) == (None, "tool_calls", 0)


def test_a_tool_that_is_known_besides_may_be_called():
    message, _, refused = ask(reply_with(call("tail"), call()), tools=[TOOL])
    assert [c.function.name for c in message.tool_calls] == ["tail", "look"] and not refused


def test_one_other_call_makes_the_reply_text_and_is_counted():
    message, reason, refused = ask(reply_with(call(), call("open"), content="I look."), tools=[TOOL])
    assert message.tool_calls is None and (reason, refused) == ("stop", 1)
    assert message.content.startswith("I look.\n") and '"open"' in message.content


def test_a_checked_reply_is_not_streamed():
    with pytest.raises(openai.BadRequestError, match="cannot be streamed"):
        ask(reply_with(call()), tools=[TOOL], stream=True)
