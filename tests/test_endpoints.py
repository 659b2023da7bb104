"""The client under another name than the judge's, with answers of another kind; tests/test_judge.py has the rest."""

import pytest
from openai_server import OpenAIServer, Reply, error, in_order

from envace import endpoints
from envace.endpoints import ChatClient, probe
from envace.outage import EndpointError, EndpointOutage
from envace.settings import EndpointConfig


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(endpoints, "FIRST_BACKOFF", 0.01)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def client_of(server, **settings):
    config = EndpointConfig(**{"endpoints": [server.url], "model": "m", "retries": 1} | settings)
    return ChatClient(config, "simulator")


def number_in(text):
    return int(text) if text.isdigit() else None


def test_it_asks_until_the_reply_can_be_read():
    with OpenAIServer(in_order(Reply("none"), Reply("0"))) as server, client_of(server) as client:
        assert client.submit(client.ask({"model": "m", "messages": []}, "a", number_in)).result(timeout=10) == 0
        metrics = client.end_step()
    assert [request.body for request in server.log] == [{"model": "m", "messages": []}] * 2
    assert {name: value for name, value in metrics.items() if value and not name.endswith("seconds")} == {
        "simulator/asked": 1,
        "simulator/answered": 1,
        "simulator/requests": 2,
        "simulator/retries_no_result": 1,
        "simulator/prompt_tokens": 200,
        "simulator/completion_tokens": 40,
    }


def test_its_name_stands_in_what_it_says(caplog):
    with OpenAIServer(in_order(Reply("none"), Reply("none"), error(401))) as server, client_of(server) as client:
        assert client.submit(client.ask({"model": "m", "messages": []}, "a", number_in)).result(timeout=10) is None
        with pytest.raises(EndpointOutage, match="^simulator: 1 of 1 questions .* no result .*reply without a result"):
            client.end_step()
        with pytest.raises(EndpointError, match="^simulator: .* refuses the key .*check simulator.endpoints"):
            client.submit(client.ask({"model": "m", "messages": []}, "b", number_in)).result(timeout=10)
    assert "simulator: first question of this step without a result" in caplog.text and "judge" not in caplog.text
    with pytest.raises(EndpointError, match="^simulator.endpoints and simulator.model"):
        probe(EndpointConfig(), "simulator")


def test_any_error_of_what_was_submitted_stops_the_step():
    def broken(text):
        raise ValueError("no such field")

    with OpenAIServer(in_order(Reply("1"))) as server, client_of(server) as client:
        with pytest.raises(EndpointError, match="^simulator: ValueError: no such field"):
            client.submit(client.ask({"model": "m", "messages": []}, "a", broken)).result(timeout=10)
        with pytest.raises(EndpointOutage, match="no such field"):
            client.end_step()
