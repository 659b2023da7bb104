"""The relay between a harness and a model: what gets through, what stays behind, and what counts as no answer."""

import http.client
import json
import urllib.error
import urllib.request

import pytest
from openai_server import OpenAIServer, Reply, error, in_order

from envace.benchmarks.relay import Refused, Unanswered, complete, relaying

BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def post(url, body):
    """(status, JSON) of what a harness gets."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=30) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as failure:
        return failure.code, json.loads(failure.read())


def test_only_what_the_api_knows_gets_through_and_the_key_is_added():
    calls = [{"id": "c", "type": "function", "name": "look", "function": {"name": "look", "arguments": "{}"}}]
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "assistant", "content": "there", "tool_calls": None},
    ]
    entry = {
        "name": "judge",
        "base_url": "http://secret",
        "headers": {"Authorization": "no"},
        "cost_1m_token_dollar": {},
    }
    asked = entry | {"model": "m", "messages": messages, "temperature": 0.0, "tools": None, "stream": False}
    with OpenAIServer(in_order(Reply("yes"))) as server:
        with relaying(server.url, "real", "the-key") as relay:
            status, answer = post(relay.url, asked)
        [logged] = server.log
    assert status == 200 and answer["choices"][0]["message"]["content"] == "yes"
    assert logged.authorization == "Bearer the-key"
    assert logged.body == {
        "model": "real",
        "temperature": 0.0,
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "tool_calls": calls},
            {"role": "assistant", "content": "there"},
        ],
    }
    assert relay.unanswered == 0


@pytest.mark.parametrize(
    ("reply", "status", "unanswered", "last"),
    [
        (error(400, "too long"), 400, 0, ""),
        (error(429, "slow down"), 500, 1, "HTTP 429"),
        (error(503, "busy"), 500, 1, "HTTP 503"),
        (error(401, "bad key"), 500, 1, "HTTP 401"),
        (Reply(cut=5), 500, 1, ""),
    ],
)
def test_a_refusal_is_passed_on_and_all_else_is_no_answer(reply, status, unanswered, last):
    with OpenAIServer(in_order(reply)) as server, relaying(server.url, "real") as relay:
        assert post(relay.url, BODY)[0] == status
        assert relay.unanswered == unanswered and last in relay.last
        assert server.log[0].authorization == ""


def test_a_server_that_is_gone_is_no_answer():
    with OpenAIServer(in_order(Reply("yes"))) as server:
        url = server.url
    with relaying(url, "real") as relay:
        assert post(relay.url, BODY)[0] == 500 and relay.unanswered == 1
    with pytest.raises(Unanswered):
        complete(url, BODY)


@pytest.mark.parametrize("body", ["{}", '{"choices": []}', '{"choices": [{"message": null}]}', "[" * 100_000, "no"])
def test_a_reply_without_a_message_is_no_answer(body):
    with OpenAIServer(in_order(Reply(body=body))) as server, relaying(server.url, "real") as relay:
        status, said = post(relay.url, BODY)
        assert (status, relay.unanswered) == (500, 1) and "no chat completion" in said["error"]


def test_a_refusal_can_count_as_no_answer():
    with OpenAIServer(in_order(error(413, "too long"))) as server:
        with relaying(server.url, "real", takes_refusals=False) as relay:
            assert post(relay.url, BODY)[0] == 413 and relay.unanswered == 1 and "too long" in relay.last


def test_a_redirect_is_not_followed_and_the_key_stays():
    with OpenAIServer(in_order(Reply("yes"))) as other:
        away = error(302, "moved", headers={"Location": f"{other.url}/models"})
        with OpenAIServer(in_order(away)) as server, pytest.raises(Unanswered, match="HTTP 302"):
            complete(server.url, BODY, "the-key")
        assert other.log == []


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({"Transfer-Encoding": "chunked"}, None),
        ({"Content-Length": "-1"}, None),
        ({}, b"{not json"),
        ({}, b"[" * 100_000),
        ({}, b"\xff"),
        ({}, b'{"model": "m"}'),
        ({}, b'{"messages": ["hi"]}'),
        ({}, b"[]"),
    ],
)
def test_what_is_no_request_is_refused(headers, body, capfd):
    with OpenAIServer(in_order(Reply("yes"))) as server, relaying(server.url, "real") as relay:
        host, _, path = relay.url.removeprefix("http://").partition("/")
        connection = http.client.HTTPConnection(host, timeout=30)
        connection.request("POST", f"/{path}", body, {"Content-Type": "application/json", **headers})
        answer = connection.getresponse()
        assert answer.status == 400 and json.loads(answer.read())["error"]
        connection.close()
        assert (server.log, relay.unanswered) == ([], 0)
    assert "Traceback" not in capfd.readouterr().err


def test_who_does_not_know_the_address_gets_nothing():
    with OpenAIServer(in_order(Reply("yes"))) as server, relaying(server.url, "real", "the-key") as relay:
        root = relay.url.split("/", 3)
        for path in ("v1/chat/completions", "chat/completions", ""):
            assert post(f"{root[0]}//{root[2]}/{path}", BODY)[0] == 404
        assert server.log == []
    with pytest.raises(urllib.error.URLError):  # and it ends with its block
        post(relay.url, BODY)


def test_a_refusal_says_what_the_server_said():
    with OpenAIServer(in_order(error(400, "too long\nfor us"))) as server:
        with pytest.raises(Refused, match="HTTP 400: .*too long") as caught:
            complete(server.url, BODY)
        assert "\n" not in str(caught.value) and caught.value.status == 400
