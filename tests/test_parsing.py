"""What an output means: every table row is a text a model can write, and what may or may not be done with it."""

import random

import pytest

from envace.chat import MAX_JSON_DEPTH, parse_action, parse_observation
from envace.prompts import execution_result, to_json, tool_call_block
from envace.types import ToolCall


def call(arguments='{"c": 1}', name="f"):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def nested(depth):
    """JSON text of `depth` objects in each other."""
    return '{"a": ' * depth + "1" + "}" * depth


F = ToolCall("f", {"c": 1})

READABLE = {
    "one call": (call(), [F], ""),
    "text around it": (f"Let me look.\n{call()}\nOne moment.", [F], "Let me look.\n\nOne moment."),
    "nested braces": (call('{"a": {"b": {"c": 1}}, "t": "}{"}'), [{"a": {"b": {"c": 1}}, "t": "}{"}], ""),
    "closing tag in a string": (call('{"c": "x </tool_call> y"}'), [{"c": "x </tool_call> y"}], ""),
    "opening tag in a string": (call('{"c": "<tool_call>{"}'), [{"c": "<tool_call>{"}], ""),
    "whole call in a string": (call('{"c": "<tool_call>{}</tool_call>"}'), [{"c": "<tool_call>{}</tool_call>"}], ""),
    "raw newline in a string": (call('{"c": "l1\nl2"}'), [{"c": "l1\nl2"}], ""),
    "escaped quote": (call(r'{"c": "say \"}\" \\"}'), [{"c": 'say "}" \\'}], ""),
    "unicode": (call('{"c": "查询天气 <b> 🌧"}'), [{"c": "查询天气 <b> 🌧"}], ""),
    "escaped unicode": (call(r'{"c": "\u5929"}'), [{"c": "天"}], ""),
    "think tags in a string": (call('{"c": "<think>a</think>"}'), [{"c": "<think>a</think>"}], ""),
    "closing think tag in a string": (call('{"c": "a </think> b"}'), [{"c": "a </think> b"}], ""),
    "both closing tags in a string": (call('{"c": "</tool_call></think>"}'), [{"c": "</tool_call></think>"}], ""),
    "no newlines": ('<tool_call>{"name": "f", "arguments": {"c": 1}}</tool_call>', [F], ""),
    "two calls": (call() + "\n" + call(name="g"), [F, ToolCall("g", {"c": 1})], ""),
    "list of two": ('<tool_call>[{"name": "f", "arguments": {"c": 1}}, {"name": "f", "arguments": {}}]</tool_call>',
                    [F, {}], ""),
    "parameters for arguments": ('<tool_call>{"name": "f", "parameters": {"c": 1}}</tool_call>', [F], ""),
    "arguments as a string": (call(r'"{\"c\": 1}"'), [F], ""),
    "arguments in another order": ('<tool_call>{"arguments": {"c": 1}, "name": "f"}</tool_call>', [F], ""),
    "after thinking": (f"<think>\nI need f.\n</think>\n\n{call()}", [F], ""),
    "after thinking that the prompt opened": (f"I need f.\n</think>\n\n{call()}", [F], ""),
    "after thinking that mentions the tag": (f"I need a <tool_call> now</think>{call()}", [F], None),
    "in thinking inside thinking": (f"<think><think>a</think>{call()}</think>No.", [], "No."),
    "in thinking": (f"<think>{call()}</think>No.", [], "No."),
    "in thinking that the prompt opened": (f"I could write\n{call()}\n</think>\n\nNo.", [], "No."),
    "in thinking and after it": (f"<think>{call('{}')}</think>{call()}", [F], ""),
    "in a later thought": (f"First. <think>{call()}</think> No.", [], "First.  No."),
    "broken in thinking": ("<think><tool_call>{</think>No.", [], "No."),
    "inline mention": ("Use a <tool_call> tag for that.", [], "Use a <tool_call> tag for that."),
    "mention before a call": (f"A <tool_call> follows: {call()}", [F], "A <tool_call> follows:"),
    "answer": (" Order A10 is shipped. ", [], "Order A10 is shipped."),
    "answer with JSON": ('{"name": "f", "arguments": {}}', [], '{"name": "f", "arguments": {}}'),
    "empty": ("", [], ""),
    "deep but sane": (call(nested(MAX_JSON_DEPTH - 1)), None, ""),
}  # fmt: skip


@pytest.mark.parametrize(("text", "calls", "content"), READABLE.values(), ids=READABLE)
def test_readable_action(text, calls, content):
    action = parse_action(text)
    assert action.error is None
    if calls is None:
        assert len(action.calls) == 1
    else:
        assert action.calls == [c if isinstance(c, ToolCall) else ToolCall("f", c) for c in calls]
    assert content is None or action.content == content


UNREADABLE = {
    "truncated in the JSON": ('<tool_call>\n{"name": "f", "argum', "not valid JSON"),
    "truncated before the JSON": ("<tool_call>\n", "not valid JSON"),
    "truncated before the closing tag": (call().removesuffix("</tool_call>"), "</tool_call> expected"),
    "truncated with a closing think tag in it": ('<tool_call>{"name": "f", "arguments": {"c": "</think>', "not valid"),
    "second one truncated": (call() + '<tool_call>{"name"', "not valid JSON"),
    "first one broken": (call('{"c": }') + call(), "not valid JSON"),
    "no JSON": ("<tool_call>get_order(A10)</tool_call>", "not valid JSON"),
    "trailing junk": (call('{"c": 1}, 2'), "not valid JSON"),
    "junk behind the JSON": ('<tool_call>{"name": "f", "arguments": {}} or so</tool_call>', "</tool_call> expected"),
    "a brace too few": ('<tool_call>{"name": "f", "arguments": {"c": 1}\n</tool_call>', "not valid JSON"),
    "a brace too many": ('<tool_call>{"name": "f", "arguments": {"c": 1}}}\n</tool_call>', "</tool_call> expected"),
    "missing name": ('<tool_call>{"arguments": {}}</tool_call>', "a call needs a name"),
    "empty name": (call(name=""), "a call needs a name"),
    "name is a number": ('<tool_call>{"name": 1, "arguments": {}}</tool_call>', "a call needs a name"),
    "missing arguments": ('<tool_call>{"name": "f"}</tool_call>', "must be a JSON object"),
    "arguments are a list": (call("[1]"), "the arguments of f must be a JSON object"),
    "arguments are another string": (call('"now"'), "not valid JSON"),
    "text behind arguments in a string": (call(r'"{\"c\": 1} x"'), "text after the arguments of f"),
    "list of a number": ("<tool_call>[1]</tool_call>", "a call must be a JSON object"),
    "empty list": ("<tool_call>[]</tool_call>", "without a call"),
    "NaN": (call('{"c": NaN}'), "NaN"),
    "minus infinity": (call('{"c": -Infinity}'), "-Infinity"),
    "overflow to infinity": (call('{"c": 1e999}'), "Out of range"),
    "lone surrogate": (call(r'{"c": "\ud800"}'), "not valid Unicode"),
    "lone surrogate in the name": (call(name=r"f\udfff"), "not valid Unicode"),
    "lone surrogate in arguments in a string": (call(r'"{\"c\": \"\\ud800\"}"'), "not valid Unicode"),
    "nested too deeply": (call(nested(MAX_JSON_DEPTH)), "nested too deeply"),
    "nested beyond the stack": (call(nested(100_000)), "nested too deeply"),
    "lists beyond the stack": (call("[" * 100_000), "nested too deeply"),
    "integer of 5000 digits": (call('{"c": ' + "9" * 5000 + "}"), "digits"),
    "closing tag only": ("f </tool_call>", "</tool_call> without <tool_call>"),
    "closing tag before a call": (f"</tool_call>{call()}", "</tool_call> without <tool_call>"),
    "one closing tag too many": (call() + "</tool_call>" + call(), "</tool_call> without <tool_call>"),
    "thinking without end": (f"<think>{call()}", "<think> is never closed"),
    "thinking without end after a call": (f"{call()}<think>", "<think> is never closed"),
}


@pytest.mark.parametrize(("text", "error"), UNREADABLE.values(), ids=UNREADABLE)
def test_unreadable_action_runs_nothing(text, error):
    action = parse_action(text)
    assert action.calls == []
    assert error in action.error


def test_a_call_that_can_be_read_has_a_canonical_key():
    deepest = parse_action(call(nested(MAX_JSON_DEPTH - 1))).calls[0]
    assert deepest.key().count("{") == MAX_JSON_DEPTH - 1
    one, other = parse_action(call('{"b": 3.0, "a": 1}') + call('{"a": 1, "b": 3}')).calls
    assert one.key() == other.key()


OBSERVATIONS = {
    "object": ('{"ok": true}', {"ok": True}),
    "list": ('[1, {"a": 2}]', [1, {"a": 2}]),
    "space around it": (' \n{"ok": true}\n', {"ok": True}),
    "inside tags": ('<execution_result>\n{"ok": true}\n</execution_result>', {"ok": True}),
    "closing tag in a string": ('<execution_result>{"a": "</execution_result>"}</execution_result>',
                                {"a": "</execution_result>"}),
    "response tag in a string": ('{"a": "</tool_response>"}', {"a": "</tool_response>"}),
    "closing think tag in a string": ('{"a": "</think>"}', {"a": "</think>"}),
    "closing think tag inside tags": ('<execution_result>["</think>"]</execution_result>', ["</think>"]),
    "unicode": ('{"a": "天气 🌧"}', {"a": "天气 🌧"}),
    "after thinking": ('<think>\n{"no": 1}\n</think>\n\n{"ok": true}', {"ok": True}),
    "after thinking that the prompt opened": ('Perhaps {"no": 1}\n</think>\n\n{"ok": true}', {"ok": True}),
    "raw newline in a string": ('{"a": "l1\nl2"}', {"a": "l1\nl2"}),
}  # fmt: skip


@pytest.mark.parametrize(("text", "value"), OBSERVATIONS.values(), ids=OBSERVATIONS)
def test_readable_observation(text, value):
    observation = parse_observation(text)
    assert observation.error is None and observation.value == value
    assert parse_observation(observation.text) == observation, "its text is the bare JSON"


BAD_OBSERVATIONS = {
    "prose": ("The order is shipped.", "not valid JSON"),
    "prose before": ('Result: {"ok": true}', "not valid JSON"),
    "prose after": ('{"ok": true} as expected', "text after the JSON value"),
    "two values": ('{"a": 1}{"b": 2}', "text after the JSON value"),
    "truncated": ('{"ok": tr', "not valid JSON"),
    "a number": ("3", "not a JSON object or array"),
    "a string": ('"ok"', "not a JSON object or array"),
    "null": ("null", "not a JSON object or array"),
    "empty": ("", "not valid JSON"),
    "tag never closed": ('<execution_result>{"ok": true}', "</execution_result> expected"),
    "text behind the tags": ('<execution_result>{}</execution_result> ok', "text after the JSON value"),
    "thinking without end": ('<think>{"ok": true}', "<think> is never closed"),
    "NaN": ('{"a": NaN}', "NaN"),
    "lone surrogate": (r'{"a": "\ud800"}', "not valid Unicode"),
    "nested beyond the stack": ("[" * 100_000, "nested too deeply"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "error"), BAD_OBSERVATIONS.values(), ids=BAD_OBSERVATIONS)
def test_unreadable_observation_has_no_value(text, error):
    observation = parse_observation(text)
    assert observation.value is None
    assert error in observation.error


# Properties over random texts

PIECES = [
    "<tool_call>", "</tool_call>", "<think>", "</think>", "<execution_result>", "</execution_result>",
    "<tool_response>", "</tool_response>", "<|im_end|>", "{", "}", "[", "]", '"', "\\", "\\u", "\\ud83d", ":", ",",
    "\n", " ", "null", "NaN", "-1e9", "1e999", '"name": "f"', '"arguments": {}', '{"name": "f", "arguments": {"c": 1}}',
    "天", "🌧", "word", "\x00",
]  # fmt: skip


def random_value(rng, depth=0):
    kind = rng.randrange(7 if depth < 3 else 5)
    if kind < 3:
        return "".join(rng.choices(PIECES, k=rng.randrange(6)))
    if kind < 5:
        return rng.choice([None, True, 0, -7, 10**20, 0.25, 1e-9])
    values = [random_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    return values if kind == 5 else {"".join(rng.choices(PIECES, k=2)): value for value in values}


def test_no_text_makes_the_parsers_raise():
    rng = random.Random(0)
    outcomes = set()
    for _ in range(20_000):
        text = "".join(rng.choices(PIECES, k=rng.randrange(16)))
        action, observation = parse_action(text), parse_observation(text)
        assert not (action.error and action.calls)
        assert (observation.error is None) == (observation.value is not None)
        outcomes |= {(action.error is None, bool(action.calls)), observation.error is None}
    assert outcomes == {(True, True), (True, False), (False, False), True, False}


def test_rendered_calls_are_read_back():
    rng = random.Random(1)
    for _ in range(2_000):
        calls = [
            ToolCall(rng.choice(["f", "查询", "a b", "</tool_call>"]), {f"k{i}": random_value(rng) for i in range(2)})
            for _ in range(rng.randint(1, 3))
        ]
        thought = rng.choice(["", "Look:\n", "<think>\nhm, <tool_call>\n</think>\n\n"])
        text = thought + "\n".join(map(tool_call_block, calls))
        assert parse_action(text).calls == calls, text


def test_rendered_responses_are_read_back():
    rng = random.Random(2)
    for _ in range(2_000):
        value = {"a": random_value(rng), "b": [random_value(rng)]}
        assert parse_observation(to_json(value)).value == value
        assert parse_observation(execution_result(to_json(value))).value == value
