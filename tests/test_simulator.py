"""A model behind an endpoint as the environment, over HTTP; its outputs are scripted, and so are ACT's."""

import pytest
import torch
from openai_server import OpenAIServer, Reply, error, in_order

from envace import endpoints
from envace.batching import rows_from_trajectories
from envace.chat import ChatFormat
from envace.config import ConfigError, load_config
from envace.environments import Remote, Simulated
from envace.episodes import drive, episode, gather, opening
from envace.evaluation import simulated
from envace.outage import EndpointError, EndpointOutage
from envace.prompts import execution_result, rehearse_messages, tool_call_block
from envace.services import Services
from envace.types import Evidence, Limits, Role, Status, Task, ToolCall

LIMITS = Limits(max_rounds=9, max_parallel_calls=9, max_context_tokens=9999, max_new_tokens=999)
TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}]
LIMA, OSLO = ToolCall("find", {"city": "Lima"}), ToolCall("find", {"city": "Oslo"})
ENDPOINT = ["simulator_endpoint.endpoints=[http://h/v1]"]
TASK = Task("t", "Be brief.", TOOLS, ["Where?"])


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(endpoints, "FIRST_BACKOFF", 0.01)
    monkeypatch.setattr(endpoints, "LONGEST_BACKOFF", 0.05)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture(scope="module")
def chat(demo_tokenizer):
    return ChatFormat(demo_tokenizer)


def services_for(*servers, **settings):
    urls = ",".join(server.url for server in servers)
    fixed = {"endpoints": f"[{urls}]", "model": "world", "retries": 1, "timeout": 5, **settings}
    section = [f"simulator_endpoint.{name}={value}" for name, value in fixed.items()]
    return load_config(None, ["model.path=m", "rollout.environment=simulated", *section])


def unfolded(config, chat, scripted, *scripts):
    """(trajectories, metrics) of an episode for each script of ACT's outputs."""
    with Services(config) as services:
        writers = [scripted(chat, *outputs) for outputs in scripts]
        live = [episode(TASK, simulated(config, services), chat, LIMITS, group_id=str(i)) for i in range(len(scripts))]
        own = {}

        def generate(requests):
            for request in requests:
                if request.sequence not in own:
                    own[request.sequence] = writers[len(own)]
            return [own[request.sequence]([request])[0] for request in requests]

        return drive(gather(live), generate), services.end_step()


@pytest.mark.parametrize("text", ['{"n": 1}', execution_result('{"n": 1}'), '<think>so</think>\n{"n": 1}'])
def test_a_response_is_context_in_the_place_of_a_rehearsed_one(chat, scripted, text):
    with OpenAIServer(in_order(Reply(text))) as server:
        config = services_for(server)
        [found], metrics = unfolded(config, chat, scripted, [tool_call_block(LIMA), "There."])
    assert found.status is Status.FINISHED and [s.role for s in found.outputs()] == [Role.ACT] * 2
    [exchange] = found.exchanges
    assert (exchange.response, exchange.evidence) == ({"n": 1}, Evidence.SIMULATED)
    [fed] = [s for s in found.sequences[0].segments if s.evidence is Evidence.SIMULATED]
    assert fed.role is Role.CONTEXT and fed.ids == chat.response('{"n": 1}') and fed.provenance["model"] == "world"
    assert metrics["simulator_endpoint/asked"] == metrics["simulator_endpoint/answered"] == 1
    found.reward = 1.0
    [row] = rows_from_trajectories(
        [found], torch.ones(2), loss_aggregation="token_mean", role_weights={"act": 1.0, "rehearse": 1.0}
    )
    assert sum(row.weights) == sum(len(output.ids) for output in found.outputs())


@pytest.mark.parametrize(("separate", "status"), [(True, Status.FAULT), (False, Status.TRUNCATED)])
def test_a_cap_of_the_simulators_own_chat_is_no_fault_of_the_policy(chat, scripted, separate, status):
    generate = scripted(chat, tool_call_block(LIMA))
    prompt = len(chat.prompt(opening(TASK), TOOLS))
    limits = Limits(max_rounds=9, max_parallel_calls=9, max_context_tokens=prompt + 1, max_new_tokens=999)
    found = drive(episode(TASK, Simulated(separate=separate), chat, limits), generate)
    assert (found.status, "context_tokens" in found.reason) == (status, True)


def test_the_endpoint_gets_the_chat_of_view_separate(chat, scripted):
    with OpenAIServer(in_order(Reply('{"n": 1}'))) as server:
        unfolded(services_for(server), chat, scripted, [tool_call_block(LIMA), "There."])
    [asked] = server.log
    history = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "content": tool_call_block(LIMA)},
    ]
    assert asked.body["messages"] == rehearse_messages(TOOLS, history, LIMA)
    assert (asked.body["model"], asked.body["temperature"], asked.body["top_p"]) == ("world", 0.6, 0.8)


def test_what_cannot_be_read_is_asked_for_again_and_then_unknown(chat, scripted):
    with OpenAIServer(in_order(Reply("It is sunny."), Reply('{"n": 1}'))) as server:
        [found], metrics = unfolded(services_for(server), chat, scripted, [tool_call_block(LIMA), "There."])
    assert found.status is Status.FINISHED and metrics["simulator_endpoint/retries_no_response"] == 1
    with OpenAIServer(in_order(Reply("It is sunny."))) as server:
        config = services_for(server, max_unknown_share=1)
        [found], metrics = unfolded(config, chat, scripted, [tool_call_block(LIMA)])
    assert found.status is Status.FAULT and found.reason == "simulator: no reply held a response"
    assert metrics["simulator_endpoint/unknown"] == 1


def test_each_episode_gets_its_own_responses(chat, scripted):
    def script(number, body):
        return Reply('{"city": "Lima"}' if "Lima" in body["messages"][1]["content"] else '{"city": "Oslo"}')

    with OpenAIServer(script) as server:
        scripts = [[tool_call_block(call), "There."] for call in (LIMA, OSLO, LIMA)]
        found, _ = unfolded(services_for(server), chat, scripted, *scripts)
    assert [t.exchanges[0].response["city"] for t in found] == ["Lima", "Oslo", "Lima"]
    assert len(server.log) == 3, "responses are not kept: rollouts of a prompt shall differ"


def test_an_endpoint_that_is_gone_stops_the_run_and_not_the_policy(chat, scripted):
    with OpenAIServer(in_order(error(503))) as server:
        config = services_for(server, max_outage_minutes=0.005)
        with pytest.raises(EndpointOutage, match="simulator_endpoint"):
            unfolded(config, chat, scripted, [tool_call_block(LIMA)])


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ([], "simulator.path"),
        (ENDPOINT, "simulator_endpoint.model"),
        ([*ENDPOINT, "simulator_endpoint.model=m", "simulator.path=x"], "simulator.path"),
        (["simulator.path=x", "simulator_endpoint.cache=y"], "simulator_endpoint.cache"),
        (["simulator.path=x", "simulator_endpoint.key_env=sk-1"], "simulator_endpoint.key_env"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, key):
    with pytest.raises(ConfigError, match=f"^{key}"):
        load_config(None, ["model.path=m", "rollout.environment=simulated", *settings])


def test_a_key_that_is_not_there_is_told_before_anything_is_done():
    with pytest.raises(EndpointError, match="simulator_endpoint.key_env"):
        Services(services_for(key_env="NO_SUCH_KEY", endpoints="[http://127.0.0.1:9/v1]"))


def test_a_remote_model_is_preferred_to_none(chat):
    config = services_for(endpoints="[http://127.0.0.1:9/v1]")
    with Services(config) as services:
        assert isinstance(simulated(config, services), Remote)
