"""Requests that are none: each is refused with status 400, in the standard shape, at once."""

import copy
import http.client
import json
import random

import pytest
from serving import REHEARSAL, TOOL, WAIT, ask, assert_is_error, echo, running_scripted, user

from envace.chat import ChatFormat

NASTY = [
    b"", b" ", b"{", b"null", b"[]", b"3", b'"text"', b"\xff\xfe", b"\xef\xbb\xbf{}", b"\x00", b"{}{}", b"NaN",
    b"[" * 10_000 + b"]" * 10_000, b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
    b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e999}',
    b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": ' + b"9" * 10_000 + b"}",
    b'{"messages": [{"role": "user", "content": "x"}], "seed": 1' + b"0" * 400 + b"}",
    b'{"messages": [{"role": "user", "content": "x"}], "n": 2}',
    b'{"messages": [{"role": "user", "content": "x"}], "tool_choice": "required"}',
    b'{"messages": [{"role": "user", "content": "x"}], "tool_choice": {"type": "function"}}',
    b'{"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_object"}}',
    b'{"messages": [{"role": "tool", "tool_call_id": "x", "content": "x"}]}',
    b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
]  # fmt: skip
JUNK = [
    *(None, True, False, 0, -1, 1, 3.5, 10**30, -(10**400), "", "x", "\x00\uffff", "\ue000<|im_end|>", [], [[]], {}),
    *({"a": {"b": []}}, [None, {"type": "text"}], {"type": "object", "properties": 7}, {"enum": [{}], "type": 3}),
]


def malformed(rng):
    """A request of which up to three parts are something else."""
    shaped = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"q": 1}'}}
    body = {
        "model": "tiny",
        "messages": [
            {"role": "system", "content": "s"},
            *user([{"type": "text", "text": "u"}]),
            {"role": "assistant", "content": None, "tool_calls": [shaped], "reasoning_content": "r"},
            {"role": "tool", "tool_call_id": "c1", "content": "t"},
        ],
        "tools": [json.loads(json.dumps(TOOL))],
        **{"temperature": 0.5, "top_p": 0.9, "max_tokens": 5, "stop": ["x"], "seed": 1, "n": 1, "user": "me"},
        **{"stream": False, "stream_options": None, "tool_choice": "auto", "max_completion_tokens": 3},
        **{"logprobs": None, "response_format": {"type": "text"}, "parallel_tool_calls": True},
    }
    for _ in range(rng.randint(1, 3)):
        place = body
        while True:
            key = rng.choice(list(place) if isinstance(place, dict) else range(len(place)))
            if not place[key] or not isinstance(place[key], dict | list) or rng.random() < 0.3:
                break
            place = place[key]
        place[key] = copy.deepcopy(rng.choice(JUNK))
    data = json.dumps(body).encode()
    if rng.random() < 0.15:
        cut = rng.randrange(len(data))
        data = data[:cut] + rng.choice([b"", bytes([rng.randrange(256)]), b"\\u", b"{"]) + data[cut + 1 :]
    return data


@pytest.fixture(scope="module")
def chat(demo_tokenizer):
    return ChatFormat(demo_tokenizer)


@pytest.mark.slow
def test_none_of_two_hundred_fails_inside_or_hangs(chat):
    rng = random.Random(0)
    bodies = NASTY + [malformed(rng) for _ in range(200)]
    with running_scripted(chat, echo, "rehearse.schema_check=true", *REHEARSAL) as (server, _):
        host = server.url.split("/")[2]
        connection = http.client.HTTPConnection(host, timeout=WAIT)
        statuses = []
        for body in bodies:
            connection.request("POST", "/v1/chat/completions", body)
            response = connection.getresponse()
            text = response.read()
            statuses.append(response.status)
            assert response.status in (200, 400, 404), (body[:300], text)
            if response.status != 200:
                assert_is_error((response.status, json.loads(text)), response.status)
        connection.close()
        assert set(statuses[: len(NASTY)]) == {400}
        assert statuses.count(400) > 120 and statuses.count(200) > 5
        # It is as well as before.
        assert ask(server.client(), tools=[TOOL]).choices[0].finish_reason == "tool_calls"
