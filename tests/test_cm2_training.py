"""CM2 records through the entry points, on a tiny model: warm-up, two RL steps under a judge on loopback, evaluation.

Most of it runs on a model of one layer that knows four short dialogues by heart, so that its episodes go on for several
user turns.
"""

import functools
import hashlib
import json
import math
from pathlib import Path

import pytest
import torch
from openai_server import PROMPT_TOKENS, OpenAIServer, Reply, verdict
from safetensors.torch import load_file

import evaluate
import train_rl
import train_sft
from envace import endpoints
from envace.checklist import reward
from envace.cm2 import source
from envace.cm2.records import load_rl
from envace.config import load_config
from envace.demo.model import build_model
from envace.outage import EndpointOutage
from envace.types import UserError

pytestmark = pytest.mark.slow

DATA = Path(__file__).parent / "data" / "cm2_rl.json"
BY_HEART = ["stock-0022", "garden-0019", "film-0025", "plain-0008"]  # of 3, 2, 2 and 1 user turns
SMALL = {"hidden": 32, "layers": 1}
SETTINGS = [
    "data.source=cm2 data.demonstrations=0 data.train_tasks=0 data.eval_tasks=0",
    "rollout.max_new_tokens=64 rollout.max_context_tokens=1500 rollout.max_rounds=6",
    "sft.batch_size=4 sft.micro_batch_size=4 sft.adam_beta2=0.95",
    "rl.steps=2 rl.prompts_per_step=2 rl.group_size=4 rl.micro_batch_size=8 rl.lr=1e-4 eval.every=0",
    "judge.model=j judge.retries=1 judge.max_outage_minutes=0.005",
]
SEPARATE = [
    *("rollout.view=separate", "rehearse.grounding=earlier_recorded_calls"),
    *("rehearse.reuse_recorded=true", "rehearse.schema_check=true"),
]


@pytest.fixture(autouse=True, scope="module")
def short_waits():
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(endpoints, "FIRST_BACKOFF", 0.01)
        patched.setattr(endpoints, "LONGEST_BACKOFF", 0.05)
        patched.setenv("NO_PROXY", "127.0.0.1")
        yield


class Service:
    """A judge that can be stopped, started again, and made to ramble. Its verdicts depend on what it is shown alone."""

    def __init__(self):
        self.log = []
        self.start()

    def start(self, port=0):
        self.rambles = False
        self._server = OpenAIServer(self._reply, port)
        self._server.__enter__()

    def stop(self):
        if self._server is not None:
            self.log += self._server.log
            self._server.__exit__()
            self._server = None

    def ramble(self):
        self.rambles = True

    @property
    def url(self):
        return self._server.url

    @property
    def port(self):
        return self._server.port

    def _reply(self, number, body):
        if self.rambles:
            return Reply("It depends.")
        return Reply(verdict(hashlib.sha256(body["messages"][1]["content"].encode()).digest()[0] % 4 > 0))


@pytest.fixture
def service():
    running = Service()
    yield running
    running.stop()


def configure(model, run_dir, path, *overrides, service=None):
    judged = ["reward.name=checklist", f"judge.endpoints=[{service.url}]"] if service is not None else []
    settings = [f"model.path={model}", f"run_dir={run_dir}", f"data.path={path}", *" ".join(SETTINGS).split()]
    return load_config(None, [*settings, *judged, *overrides])


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def logged(run_dir, stage):
    return [record for record in lines(run_dir / "metrics.jsonl") if record["stage"] == stage]


def unfolded(run_dir, split="train"):
    return [record for record in lines(run_dir / "trajectories.jsonl") if record["split"] == split]


def without_updated_logprobs(records):
    for segment in (segment for record in records for segment in record["segments"]):
        segment.pop("updated_logprobs", None)
    return records


def equal_weights(a, b):
    a, b = (load_file(folder / "model.safetensors") for folder in (a, b))
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# Every record


@pytest.mark.parametrize(
    ("view", "small"), [([], False), (SEPARATE, True)], ids=["shared, embedded model", "separate, smaller model"]
)
def test_all_records_go_through_warm_up_and_two_steps(tmp_path, monkeypatch, service, view, small):
    if small:
        monkeypatch.setattr(source, "build_model", functools.partial(build_model, **SMALL))
    settings = ["model.embedded=true", "sft.epochs=1", "sft.lr=1e-2", "rl.prompts_per_step=13", "rl.group_size=2"]
    settings += [f"data.eval_path={DATA}", "data.eval_tasks=2", "rollout.max_new_tokens=48", *view]
    sft = train_sft.main(configure(tmp_path / "base", tmp_path, DATA, *settings, service=service))
    assert service.log == [], "nobody is judged in the warm-up"
    train_rl.main(configure(sft, tmp_path, DATA, *settings, service=service))

    losses = [record["loss/sft"] for record in logged(tmp_path, "sft")]
    assert len(losses) == math.ceil(26 / 4) and all(map(math.isfinite, losses)) and losses[-1] < losses[0]
    records = logged(tmp_path, "rl")
    assert [record["step"] for record in records] == [0, 1]
    for record in records:
        for name in ("loss/policy", "loss/kl", "loss/entropy", "grad_norm", "reward/mean", "reward_parts/turns"):
            assert math.isfinite(record[name]), name
        assert record["env_calls/training"] == record["env_calls/evaluation"] == 0
        assert record["reward/unknown_share"] == record["status/fault"] == 0
    trained = unfolded(tmp_path)
    assert {record["task"] for record in trained} == {record.id for record in load_rl(DATA)[0]}
    assert len(unfolded(tmp_path, "eval-rehearsed")) == 2 and "eval/real_success" not in records[-1]
    service.stop()
    check_judging(tmp_path, DATA, service.log)


def check_judging(run_dir, path, log, *, dependence=False):
    """The judge's counts, the verdicts and the rewards of a run with tool errors in no response agree."""
    goals = {record.id: record.checklist() for record in load_rl(path)[0]}
    metrics = logged(run_dir, "rl")
    for record in metrics:
        judged = {name.removeprefix("judge/"): value for name, value in record.items() if name.startswith("judge/")}
        trajectories = [one for one in unfolded(run_dir) if one["step"] == record["step"]]
        verdicts = [
            answer
            for one in trajectories
            for turn in one["verdicts"]
            for variant in turn
            for step in variant
            for answer in step
        ]
        assert judged["asked"] > 0
        assert judged["asked"] == judged["answered"] + judged["cached"] + judged["unknown"]
        assert judged["unknown"] == judged["refused"] == judged["unknown_share"] == 0
        assert judged["requests"] == judged["answered"] and judged["latency_seconds"] > 0
        assert judged["prompt_tokens"] == PROMPT_TOKENS * judged["requests"]
        errors = "error_tool_call" in json.dumps(trajectories)
        assert judged["asked"] <= len(verdicts) if errors else judged["asked"] == len(verdicts)
        assert set(map(type, verdicts)) == {bool}
        for one in trajectories:
            assert one["reward"] == pytest.approx(reward(goals[one["task"]], one["verdicts"], dependence=dependence))
            assert len(one["verdicts"]) <= len(one["user_turns"])
    last = metrics[-1]
    assert len(log) == sum(record["judge/requests"] for record in metrics) + last.get("eval/judge/requests", 0)


# A model that knows its dialogues


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    """(records to train on, the same ones held out and asked about in other words)"""
    folder = tmp_path_factory.mktemp("few")
    rows = [row for row in json.loads(DATA.read_text(encoding="utf-8")) if row["uuid"] in BY_HEART]
    (folder / "few.json").write_text(json.dumps(rows))
    for row in rows:
        for turns in row["extra_info"]["interaction_kwargs"]["checklist_list"]:
            for item in (item for turn in turns for item in turn):
                item["question"] += " (held out)"
    (folder / "held_out.json").write_text(json.dumps(rows))
    return folder / "few.json", folder / "held_out.json"


@pytest.fixture(scope="module")
def warm(few, tmp_path_factory):
    """The folder of a model after SFT on the few records."""
    folder = tmp_path_factory.mktemp("warm")
    records, _ = load_rl(few[0])
    build_model(folder / "base", [(record.tools(), record.messages()) for record in records], seed=0, **SMALL)
    return train_sft.main(configure(folder / "base", folder, few[0], "sft.steps=80", "sft.lr=2e-2"))


def rl_config(warm, run_dir, few, *overrides, service=None):
    return configure(warm, run_dir, few[0], f"data.eval_path={few[1]}", *overrides, service=service)


@pytest.fixture(scope="module")
def whole_run(warm, few, tmp_path_factory):
    """(folder, requests) of two RL steps without any trouble."""
    folder, running = tmp_path_factory.mktemp("rl"), Service()
    try:
        train_rl.main(rl_config(warm, folder, few, service=running))
    finally:
        running.stop()
    return folder, running.log


def test_episodes_reach_later_user_turns_and_learn_from_their_verdicts(whole_run, warm, few):
    folder, log = whole_run
    check_judging(folder, few[0], log)
    trained = unfolded(folder)
    assert {record["task"] for record in trained} == set(BY_HEART), "each record is drawn once in two steps"
    turns = [len(record["verdicts"]) for record in trained]
    assert max(turns) >= 2 and turns.count(2) > 2
    for record in trained:
        gated = record["status"] == "finished" and len(record["verdicts"]) < len(record["user_turns"])
        assert (record["reason"] == "gate") == gated
    assert len({record["reward"] for record in trained}) > 3
    for record in logged(folder, "rl"):
        assert record["rollout/rehearse_outputs"] > 0 and record["advantage/act_abs_max"] > 0
    assert not equal_weights(folder / "rl", warm)


def test_the_last_step_is_evaluated_by_rehearsal_alone(whole_run):
    folder, _ = whole_run
    first, last = logged(folder, "rl")
    assert not any(name.startswith("eval/") for name in first)
    assert 0 < last["eval/rehearsed_reward"] <= 1 and last["eval/unknown_rewards"] == 0
    assert last["eval/judge/asked"] > 0
    assert not any(name in last for name in ("eval/real_success", "eval/imagination_gap", "fidelity/round_0"))
    assert {record["split"] for record in lines(folder / "trajectories.jsonl")} == {"train", "eval-rehearsed"}


def test_in_view_separate_recorded_responses_and_schema_errors_take_the_place_of_rehearsal(
    warm, few, tmp_path, service
):
    settings = [*SEPARATE, "reward.dependence=true", "rl.steps=1", "rl.prompts_per_step=4"]
    train_rl.main(configure(warm, tmp_path, few[0], *settings, service=service))
    service.stop()
    check_judging(tmp_path, few[0], service.log, dependence=True)
    [record] = logged(tmp_path, "rl")
    assert record["env_calls/training"] == 0 and math.isfinite(record["loss/policy"])
    trained = unfolded(tmp_path)
    kinds = {(segment["role"], segment["evidence"]) for one in trained for segment in one["segments"]}
    assert ("context", "observed") in kinds and ("rehearse", "observed") not in kinds
    assert max(len(one["verdicts"]) for one in trained) >= 2


@pytest.mark.parametrize("name", ["goal", "gold_calls", "answer_facts"])
def test_other_rewards_compare_with_the_reference_dialogue_and_need_no_judge(warm, few, tmp_path, name):
    train_rl.main(configure(warm, tmp_path, few[0], f"reward.name={name}", "rl.steps=1", "rl.prompts_per_step=4"))
    [record] = logged(tmp_path, "rl")
    assert not any(metric.startswith("judge/") for metric in record) and record["env_calls/training"] == 0
    trained = unfolded(tmp_path)
    assert {one["reward"] for one in trained} == {0.0, 1.0}, "by heart, but not always"
    parts = {"goal": ["reads", "writes", "answers"], "gold_calls": ["reads", "writes"], "answer_facts": ["answers"]}
    for one in trained:
        assert one["verdicts"] == [] and one["reason"] != "gate"
        assert one["reward"] == float(all(one["reward_parts"][part] for part in ["finished", *parts[name]]))


def test_a_step_needs_as_many_records_as_it_draws(warm, few, tmp_path):
    with pytest.raises(UserError, match="rl.prompts_per_step=5 would draw a task twice: there are 4"):
        train_rl.main(rl_config(warm, tmp_path, few, "rl.prompts_per_step=5"))


# Interruptions


def after_the_first_update(monkeypatch, act):
    """`act` is called behind the first RL step's update."""
    update, done = train_rl.update, []

    def watched(*args):
        metrics = update(*args)
        if not done:
            act()
        done.append(metrics)
        return metrics

    monkeypatch.setattr(train_rl, "update", watched)


def of_the_step(record):
    """What a step comes to, without how long it took and what the judge remembered."""
    timed = ("time", "throughput/", "judge/", "eval/judge/")
    return {name: value for name, value in record.items() if not name.startswith(timed)} | {
        name: record[name] for name in ("judge/asked", "judge/unknown")
    }


@pytest.mark.parametrize("trouble", ["stops", "rambles"])
def test_a_run_goes_on_after_an_interruption_as_if_there_had_been_none(
    whole_run, warm, few, tmp_path, service, caplog, trouble
):
    caplog.set_level("INFO", "envace")
    message = {"stops": "down for 0.005 minutes", "rambles": "have no verdict"}[trouble]
    config = rl_config(warm, tmp_path, few, service=service)
    with pytest.MonkeyPatch.context() as patched:
        after_the_first_update(patched, service.stop if trouble == "stops" else service.ramble)
        with pytest.raises(EndpointOutage, match=message):
            train_rl.main(config)
    assert [folder.name for folder in (tmp_path / "checkpoints" / "rl").iterdir()] == ["step-000001"]
    assert not (tmp_path / "rl").exists() and "stopped after step 1" in caplog.text
    assert [record["step"] for record in logged(tmp_path, "rl")] == [0]
    assert {record["step"] for record in unfolded(tmp_path)} == {0}, "what was unfolded without a judge is not kept"

    service.stop()
    service.start()  # at another port: where the judge is may change
    train_rl.main(rl_config(warm, tmp_path, few, "checkpoint.resume=true", service=service))
    expected, _ = whole_run
    assert equal_weights(tmp_path / "rl", expected / "rl")
    assert [*map(of_the_step, logged(tmp_path, "rl"))] == [*map(of_the_step, logged(expected, "rl"))]
    for split in ("train", "eval-rehearsed"):
        assert unfolded(tmp_path, split) == unfolded(expected, split)


def test_an_outage_in_the_first_step_leaves_nothing_to_go_on_from(warm, few, tmp_path, service):
    config = rl_config(warm, tmp_path, few, service=service)
    service.stop()
    with pytest.raises(EndpointOutage):
        train_rl.main(config)
    assert not (tmp_path / "checkpoints").exists() and not (tmp_path / "rl").exists()


@pytest.mark.parametrize("done", [1, 2])
def test_a_judge_that_is_gone_while_it_is_evaluated_stops_the_run_behind_the_step(
    whole_run, warm, few, tmp_path, service, caplog, done
):
    evaluate_held_out, port = train_rl.evaluate_held_out, service.port

    def without_a_judge(*args):
        service.stop()
        try:
            return evaluate_held_out(*args)
        finally:
            service.start(port)

    settings = f"eval.every={done}"  # evaluated after the first step, or after the last one
    with pytest.MonkeyPatch.context() as patched, pytest.raises(EndpointOutage, match="down for 0.005 minutes"):
        patched.setattr(train_rl, "evaluate_held_out", without_a_judge)
        train_rl.main(rl_config(warm, tmp_path, few, settings, service=service))
    assert f"the evaluation after step {done} is incomplete" in caplog.text
    records = logged(tmp_path, "rl")
    assert [record["step"] for record in records] == list(range(done))
    assert all(record["judge/asked"] > 0 and record["reward/unknown_share"] == 0 for record in records)
    assert records[-1]["eval/unknown_rewards"] > 0 and "eval/judge/asked" not in records[-1]
    faults = [one for one in unfolded(tmp_path, "eval-rehearsed") if one["status"] == "fault"]
    assert faults and all(one["reward"] is None and "down" in one["reason"] for one in faults)
    assert [folder.name for folder in (tmp_path / "checkpoints" / "rl").iterdir()] == [f"step-00000{done}"]
    assert not (tmp_path / "rl").exists()

    train_rl.main(rl_config(warm, tmp_path, few, settings, "checkpoint.resume=true", service=service))
    expected, _ = whole_run
    assert equal_weights(tmp_path / "rl", expected / "rl"), "what is trained does not depend on the evaluation"
    # But when it is evaluated decides when is told what an update did.
    assert without_updated_logprobs(unfolded(tmp_path)) == without_updated_logprobs(unfolded(expected))


# Evaluation


def test_evaluation_without_an_executable_environment_is_of_rehearsed_runs(warm, few, tmp_path, service):
    results = evaluate.main(rl_config(warm, tmp_path, few, "eval.samples=2", service=service))
    assert json.loads((tmp_path / "evaluation.json").read_text()) == json.loads(json.dumps(results))
    assert (results["tasks"], results["samples"], len(results["success_by_task"])) == (4, 2, 4)
    assert results["ci"][0] <= results["rehearsed_success"] <= results["ci"][1]
    assert 0 < results["rehearsed_reward"] < 1 and results["unknown_rewards"] == 0
    assert set(results["by_kind"]) == {"single-turn", "multi-turn"}
    assert not {"real_success", "greedy", "imagination_gap", "right_final_state"} & results.keys()
    assert results["judge/asked"] == results["judge/answered"] + results["judge/cached"] > 0
    assert len(unfolded(tmp_path, "eval-rehearsed")) == 8
    [record] = logged(tmp_path, "evaluation")
    assert record["eval/rehearsed_success"] == results["rehearsed_success"]


def test_an_evaluation_whose_judge_is_gone_says_so(warm, few, tmp_path, service):
    config = rl_config(warm, tmp_path, few, service=service)
    service.stop()
    with pytest.raises(EndpointOutage, match="down for 0.005 minutes"):
        evaluate.main(config)
    assert not (tmp_path / "evaluation.json").exists()


def test_nothing_can_be_evaluated_without_held_out_records(warm, few, tmp_path):
    with pytest.raises(UserError, match="set data.eval_path"):
        evaluate.main(configure(warm, tmp_path, few[0]))
