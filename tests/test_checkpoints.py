"""Checkpoints: a resumed training is the training that was never stopped, and no accident costs more than a few steps.

Whole trainings run on a model of one layer; what does not depend on a model is tested on a policy that is one number.
"""

import errno
import json
import logging
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import train_rl
import train_sft
from envace import data, rewards
from envace.batching import Row
from envace.checkpoints import CheckpointError, Checkpoints, complete, latest, publish
from envace.config import load_config
from envace.data import Sampler
from envace.demo.demonstrations import Clerk, make_demonstrations
from envace.demo.desk import CallCounter
from envace.demo.model import build_model
from envace.demo.source import DemoSource
from envace.demo.tasks import make_task
from envace.losses import sft_loss
from envace.policy import Diverged, LoadError, Policy, SaveError
from envace.settings import ModelConfig
from envace.tracking import Tracker
from envace.types import Role, UserError

ROOT = Path(__file__).parent.parent
STEPS, EPOCH = 6, 4  # of the trainings here: all of them, and those after which each item has been drawn once
SETTINGS = [
    "data.demonstrations=8 data.train_tasks=8 data.eval_tasks=2 eval.every=3 sampling.temperature=1.3",
    "rollout.max_rounds=2 rollout.max_parallel_calls=2 rollout.max_context_tokens=1024 rollout.max_new_tokens=40",
    f"sft.steps={STEPS} sft.batch_size=2 sft.micro_batch_size=2 sft.lr=1e-2 sft.warmup=0.4",
    f"rl.steps={STEPS} rl.prompts_per_step=2 rl.group_size=2 rl.kl_coef=0.1 rl.lr=3e-3 rl.schedule=cosine",
]


class Numbered(DemoSource):
    """One task under many numbers, and rewards that depend on nothing but what was sampled."""

    task = make_task("status", "one", random.Random(0), held_out=False)

    def train_tasks(self):
        return [replace(self.task, id=f"task-{n}") for n in range(self.config.train_tasks)]

    def eval_tasks(self):
        return [self.task] * self.config.eval_tasks


def score(trajectory):
    return sum(token for segment in trajectory.outputs() for token in segment.ids) % 5 / 4, {}


class ByHeart(Numbered):
    """Its only dialogue is the one about that task."""

    def demonstrations(self):
        clerk = Clerk(self.task, random.Random(0), self.counter, habit_share=0.0, slip_share=0.0)
        return [(self.task, clerk.work())] * self.config.demonstrations


@pytest.fixture(autouse=True)
def numbered(monkeypatch):
    monkeypatch.setitem(data.SOURCES, "demo", Numbered)
    monkeypatch.setitem(rewards.REWARDS, "goal", score)


@pytest.fixture(autouse=True)
def log():
    """The lines logged so far."""
    logger, lines = logging.getLogger("envace"), []

    class Keep(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())

    before, handler = logger.level, Keep()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield lines
    logger.removeHandler(handler)
    logger.setLevel(before)


def configure(model, run_dir, *overrides):
    settings = [f"model.path={model}", f"run_dir={run_dir}", *" ".join(SETTINGS).split(), *overrides]
    return load_config(None, settings)


def build(path, **settings):
    recorded = make_demonstrations(64, 0, CallCounter())
    build_model(path, [(task.tools, messages) for task, messages in recorded], seed=0, layers=1, **settings)
    return path


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return build(tmp_path_factory.mktemp("checkpoints") / "base", hidden=32)


@pytest.fixture(scope="module")
def warm(base, tmp_path_factory):
    """A model whose samples mostly call a tool and answer the call, in words that differ."""
    folder = tmp_path_factory.mktemp("warm")
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(data.SOURCES, "demo", ByHeart)
        return train_sft.main(configure(base, folder, "sft.steps=40", "sft.batch_size=1", "sft.lr=2e-2"))


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def one_line(caught):
    message = str(caught.value)
    assert isinstance(caught.value, UserError) and "\n" not in message and len(message) < 600
    return message


# Whole trainings

STAGES = {"sft": train_sft, "rl": train_rl}
runs = count()


@dataclass
class Run:
    """drawn: names of the items of each step. sampled: token ids and log-probabilities of each step's outputs."""

    folder: Path
    stage: str
    drawn: list
    sampled: list

    @property
    def metrics(self):
        """All that does not depend on the clock, a record a step."""
        clocks = ("time", "throughput")
        records = read_lines(self.folder / "metrics.jsonl")
        return [{k: v for k, v in record.items() if k.partition("/")[0] not in clocks} for record in records]

    @property
    def trajectories(self):
        return read_lines(self.folder / "trajectories.jsonl") if self.stage == "rl" else []

    @property
    def weights(self):
        folder = self.folder / self.stage
        [file] = folder.glob("*model.safetensors")
        return load_file(file)

    @property
    def on_board(self):
        """(step, value) of the gradient norm, as TensorBoard shows it."""
        board = EventAccumulator(str(self.folder / "tensorboard" / self.stage)).Reload()
        return [(event.step, event.value) for event in board.Scalars("grad_norm")]

    @property
    def checkpoints(self):
        return sorted(path.name for path in (self.folder / "checkpoints" / self.stage).glob("*"))


def train(stage, config, *, stop_in=None, ends=nullcontext):
    """Run a stage. stop_in: SIGTERM comes in its n-th step, from 1 on. ends: a context that expects how it ends."""
    run = Run(Path(config.run_dir), stage, [], [])
    draw, unfold, clock, number = Sampler.next, train_rl.unfold, time.time, next(runs)

    def watched_draw(sampler, n):
        items = draw(sampler, n)
        run.drawn.append([item.id if stage == "rl" else item[0].id for item in items])
        if len(run.drawn) == stop_in:
            os.kill(os.getpid(), signal.SIGTERM)
        return items

    def watched_unfold(*arguments, **settings):
        trajectories, tokens = unfold(*arguments, **settings)
        run.sampled.append([(s.role, s.ids, s.logprobs) for t in trajectories for s in t.outputs()])
        return trajectories, tokens

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Sampler, "next", watched_draw)
        patched.setattr(train_rl, "unfold", watched_unfold)
        # TensorBoard orders files by the second they were made in.
        patched.setattr(time, "time", lambda: clock() + 60 * number)
        if stop_in is None:
            with ends():
                STAGES[stage].main(config)
        else:
            with pytest.raises(SystemExit) as stopped:
                STAGES[stage].main(config)
            assert stopped.value.code == 0
    return run


def stop_and_go_on(stage, model, folder, stop_in, *overrides):
    """(the run that SIGTERM stopped, the one that went on from there)"""
    stopped = train(stage, configure(model, folder, *overrides), stop_in=stop_in)
    assert not (folder / stage).exists()
    return stopped, train(stage, configure(model, folder, *overrides, "checkpoint.resume=true"))


def assert_ends_equal(run, straight):
    assert run.metrics == straight.metrics
    assert run.trajectories == straight.trajectories
    assert run.on_board == straight.on_board
    assert [step for step, _ in run.on_board] == list(range(STEPS))
    assert_equal_weights(run, straight)


def assert_equal_weights(run, straight):
    ours, theirs = run.weights, straight.weights
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


@pytest.fixture(scope="module")
def straight_sft(base, tmp_path_factory):
    """A warm-up that was never stopped and never saved a checkpoint."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(data.SOURCES, "demo", Numbered)
        return train("sft", configure(base, tmp_path_factory.mktemp("straight")))


@pytest.mark.parametrize("stop_in", [3, EPOCH])
def test_a_resumed_warm_up_is_the_one_that_was_never_stopped(base, tmp_path, straight_sft, log, stop_in):
    stopped, resumed = stop_and_go_on("sft", base, tmp_path, stop_in)
    assert len(stopped.drawn) == stop_in and stopped.drawn + resumed.drawn == straight_sft.drawn
    assert_ends_equal(resumed, straight_sft)
    assert [line for line in log if "SIGTERM" in line] == [
        f"SIGTERM: stopped after step {stop_in}; go on with checkpoint.resume=true"
    ]
    assert [line for line in log if "going on" in line] == [
        f"going on after step {stop_in} from {tmp_path}/checkpoints/sft/step-00000{stop_in}"
    ]
    # Had they begun anew, or each epoch been the same, this would show nothing.
    assert resumed.drawn != straight_sft.drawn[: len(resumed.drawn)]
    first, second = straight_sft.drawn[:EPOCH], straight_sft.drawn[EPOCH:]
    assert len({name for names in first for name in names}) == 8 and second != first[: len(second)]


@pytest.mark.parametrize("forgotten", ["optimizer", "weights", "sampler"])
@pytest.mark.slow
def test_a_warm_up_that_forgets_something_is_another_one(base, tmp_path, straight_sft, monkeypatch, forgotten):
    load = Policy.load_state

    def forget(policy, folder):
        before = {name: value.clone() for name, value in policy.lm.state_dict().items()}
        load(policy, folder)
        if forgotten == "optimizer":
            policy.optimizer.state.clear()
        if forgotten == "weights":
            policy.lm.load_state_dict(before)

    monkeypatch.setattr(Policy, "load_state", forget)
    if forgotten == "sampler":
        monkeypatch.setattr(Sampler, "load_state_dict", lambda sampler, state: None)
    _, resumed = stop_and_go_on("sft", base, tmp_path, 3)
    assert resumed.metrics[:3] == straight_sft.metrics[:3]
    assert resumed.metrics[-1] != straight_sft.metrics[-1]


VARIANTS = {"one update": [], "two updates": ["rl.updates_per_batch=2"], "adapters": ["policy.lora.r=4"]}


@pytest.fixture(scope="module")
def straight_rl(warm, tmp_path_factory):
    """straight_rl(name of a variant): a training that was never stopped and never saved a checkpoint."""
    made = {}

    def get(variant):
        if variant not in made:
            made[variant] = train("rl", configure(warm, tmp_path_factory.mktemp("straight"), *VARIANTS[variant]))
        return made[variant]

    return get


@pytest.mark.slow
@pytest.mark.parametrize("stop_in", [3, EPOCH])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_resumed_reinforcement_learning_is_the_one_that_was_never_stopped(
    warm, tmp_path, straight_rl, log, variant, stop_in
):
    straight = straight_rl(variant)
    stopped, resumed = stop_and_go_on("rl", warm, tmp_path, stop_in, *VARIANTS[variant])
    assert len(stopped.drawn) == stop_in and stopped.drawn + resumed.drawn == straight.drawn
    assert stopped.sampled + resumed.sampled == straight.sampled
    assert_ends_equal(resumed, straight)
    assert len([line for line in log if "checkpoint.resume=true" in line]) == 1

    # The reference is that of the start: there the distance to it is nothing, here it is not.
    kl = [record["loss/kl"] for record in straight.metrics]
    assert resumed.metrics[stop_in]["loss/kl"] == kl[stop_in] > 1e-5
    if variant != "two updates":  # the second of them is measured
        assert kl[0] == pytest.approx(0, abs=1e-6)

    # What was compared is a training in which something happened.
    roles = [{role for role, _, _ in outputs} for outputs in straight.sampled]
    assert {Role.ACT, Role.REHEARSE} in roles
    assert len({record["lr"] for record in straight.metrics}) == STEPS
    assert all(record["grad_norm"] > 0 for record in straight.metrics)
    assert {record["split"] for record in straight.trajectories} == {"train", "eval-real", "eval-rehearsed"}
    assert straight.metrics[stop_in]["env_calls/evaluation"] > 0


@pytest.mark.slow
def test_without_the_random_states_other_tokens_are_sampled(warm, tmp_path, straight_rl, monkeypatch):
    load = Policy.load_state

    def forget(policy, folder):
        before = torch.get_rng_state()
        load(policy, folder)
        torch.set_rng_state(before)

    monkeypatch.setattr(Policy, "load_state", forget)
    _, resumed = stop_and_go_on("rl", warm, tmp_path, 3)
    assert resumed.drawn[0] == straight_rl("one update").drawn[3]
    assert resumed.sampled[0] != straight_rl("one update").sampled[3]


def test_the_end_of_a_finished_training_can_be_reached_again(base, tmp_path, straight_sft):
    finished = train("sft", configure(base, tmp_path, "checkpoint.every=3"))
    shutil.rmtree(tmp_path / "sft")
    again = train("sft", configure(base, tmp_path, "checkpoint.every=3", "checkpoint.resume=true"))
    assert len(finished.drawn) == STEPS and again.drawn == []
    assert_ends_equal(again, straight_sft)


def test_checkpoints_of_an_earlier_run_are_not_trained_over(base, tmp_path, straight_sft):
    train("sft", configure(base, tmp_path), stop_in=3)
    before = contents(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        train("sft", configure(base, tmp_path))
    message = one_line(caught)
    assert "checkpoint.resume=true" in message and str(tmp_path / "checkpoints" / "sft") in message
    assert contents(tmp_path) == before


def test_to_resume_where_there_is_no_checkpoint_is_to_start(base, tmp_path, straight_sft, log):
    run = train("sft", configure(base, tmp_path, "checkpoint.resume=true"))
    assert_ends_equal(run, straight_sft)
    said = f"no checkpoint in {tmp_path}/checkpoints/sft: starting from the beginning"
    assert [line for line in log if "checkpoint" in line] == [said]


def test_a_model_of_another_width_is_refused_before_a_record_is_touched(base, tmp_path):
    model = shutil.copytree(base, tmp_path / "model")
    run_dir = tmp_path / "run"
    train("sft", configure(model, run_dir), stop_in=3)
    before = contents(run_dir)
    shutil.rmtree(model)
    build(model, hidden=48)
    with pytest.raises(CheckpointError, match="started from other files") as caught:
        train("sft", configure(model, run_dir, "checkpoint.resume=true"))
    assert str(run_dir / "checkpoints" / "sft" / "step-000003") in one_line(caught)
    assert contents(run_dir) == before


def test_every_model_that_a_run_started_from_has_to_be_what_it_was(tmp_path):
    """Files of one name in several folders are told apart, and an adapter's base counts."""
    for name in ("policy", "rehearser", "simulator", "base", "adapter"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text(name)
    (tmp_path / "adapter" / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": str(tmp_path / "base")})
    )
    deepspeed = shutil.copy(ROOT / "configs" / "deepspeed" / "zero3.json", tmp_path / "zero3.json")

    def started_from():
        config = configure(
            *(tmp_path / "adapter", tmp_path / "run"),
            *(f"model.rehearse_path={tmp_path / 'rehearser'}", f"simulator.path={tmp_path / 'simulator'}"),
        )
        config.policy.deepspeed = deepspeed
        return Checkpoints(None, config, "rl", {})._start()

    before = started_from()
    assert len(before) == 5 and before == started_from()
    files = {
        "model.path/model.safetensors": "adapter/model.safetensors",
        "base of model.path/model.safetensors": "base/model.safetensors",
        "model.rehearse_path/model.safetensors": "rehearser/model.safetensors",
        "simulator.path/model.safetensors": "simulator/model.safetensors",
        "policy.deepspeed/zero3.json": "zero3.json",
    }
    for name, path in files.items():
        content = (tmp_path / path).read_text()
        (tmp_path / path).write_text("something else")
        assert {key for key, _ in before.items() ^ started_from().items()} == {name}
        (tmp_path / path).write_text(content)


# Killed at the worst moment


def be_killed_while_saving(stage, model, run_dir, step):
    """Train until in the checkpoint of `step` one file is there, and then no more."""
    data.SOURCES["demo"] = Numbered
    rewards.REWARDS["goal"] = score
    save = Policy.save_state

    def save_state(policy, folder):
        if not folder.name.startswith(f"step-{int(step):06d}"):
            return save(policy, folder)
        (folder / "model.safetensors").write_bytes(b"half of")
        os.kill(os.getpid(), signal.SIGKILL)

    Policy.save_state = save_state
    STAGES[stage].main(configure(model, run_dir, "checkpoint.every=2"))


def killed_while_saving(tmp_path, *arguments):
    script = tmp_path / "script.py"
    script.write_text("import sys, test_checkpoints\ntest_checkpoints.be_killed_while_saving(*sys.argv[1:])\n")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "tests", ROOT, ROOT / "src"))),
        "OMP_NUM_THREADS": str(torch.get_num_threads()),  # sums of floats depend on it
    }
    command = [sys.executable, str(script), *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == -signal.SIGKILL, done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["sft", "rl"])
def test_after_a_kill_while_saving_the_checkpoint_before_it_is_as_good_as_ever(request, base, tmp_path, log, stage):
    model = base if stage == "sft" else request.getfixturevalue("warm")
    straight = request.getfixturevalue(f"straight_{stage}")
    straight = straight if stage == "sft" else straight("one update")
    run_dir = tmp_path / "run"
    killed_while_saving(tmp_path, stage, model, run_dir, 4)
    killed = Run(run_dir, stage, [], [])
    assert killed.checkpoints == ["step-000002", "step-000004.partial"]
    assert [record["step"] for record in killed.metrics] == [0, 1, 2, 3]

    resumed = train(stage, configure(model, run_dir, "checkpoint.every=2", "checkpoint.resume=true"))
    assert f"going on after step 2 from {run_dir}/checkpoints/{stage}/step-000002" in log
    assert resumed.drawn == straight.drawn[2:] and resumed.sampled == straight.sampled[2:]
    assert resumed.checkpoints == ["step-000004", "step-000006"]
    assert resumed.metrics == straight.metrics and resumed.trajectories == straight.trajectories
    assert_equal_weights(resumed, straight)
    steps = [step for step, _ in resumed.on_board]
    assert all(earlier < later for earlier, later in pairwise(steps)) and set(range(2, STEPS)) <= set(steps)


# A policy that is one number


class Number:
    """What Checkpoints needs of a policy. `disk` is called in the middle of saving."""

    def __init__(self, rank=0, world_size=1, wait=lambda: None):
        self.rank, self.world_size, self.wait = rank, world_size, wait
        self.value = 0
        self.others_asked_to_stop = False
        self.disk = lambda folder: None

    def randomness(self):
        return self.value

    def restore_randomness(self, states):
        self.value = states

    def save_state(self, folder):
        (folder / f"value{self.rank}").write_text(str(self.value))
        self.disk(folder)

    def load_state(self, folder):
        self.value = int((folder / f"value{self.rank}").read_text())

    def any_rank(self, flag):
        return flag or self.others_asked_to_stop

    def sum_over_ranks(self, value):
        """As if all ranks had the same value."""
        return value * self.world_size


def settings(run_dir, *overrides):
    return load_config(None, ["model.path=some/model", f"run_dir={run_dir}", *overrides])


def loop(run_dir, *overrides, steps=7, policy=None, during=lambda step: None):
    """Count to `steps`; what it counted, and what there was in the folder after each step."""
    policy, calls, seen = policy or Number(), CallCounter(), {}
    stage = Checkpoints(policy, settings(run_dir, *overrides), "rl", {"calls": calls})
    first = stage.resume()
    with stage:
        for step in range(first, steps):
            during(step)
            policy.value += 1
            calls.calls["training"] += 2
            stage.after_step(step, steps)
            seen[step + 1] = sorted(path.name for path in stage.root.glob("*"))
    return policy.value, calls.calls["training"], seen


def names(*steps):
    return [f"step-{step:06d}" for step in steps]


@pytest.mark.parametrize(
    ("every", "keep", "expected"),
    [
        (0, 2, {3: [], 7: []}),
        (2, 2, {1: [], 2: [2], 3: [2], 4: [2, 4], 6: [4, 6], 7: [6, 7]}),
        (3, 1, {2: [], 3: [3], 6: [6], 7: [7]}),
        (1, 3, {1: [1], 3: [1, 2, 3], 7: [5, 6, 7]}),
        (7, 2, {6: [], 7: [7]}),
    ],
)
def test_every_few_steps_there_is_a_checkpoint_and_the_last_few_stay(tmp_path, every, keep, expected):
    _, _, seen = loop(tmp_path, f"checkpoint.every={every}", f"checkpoint.keep={keep}")
    assert {step: seen[step] for step in expected} == {step: names(*steps) for step, steps in expected.items()}


def fail_in(step, error):
    def during(now):
        if now == step:
            raise error

    return during


@pytest.mark.parametrize(("every", "repeated"), [(1, 0), (2, 1), (3, 2), (0, 5)])
def test_a_resumed_run_repeats_only_what_came_after_the_last_checkpoint(tmp_path, every, repeated):
    done = []
    with pytest.raises(KeyboardInterrupt):
        loop(tmp_path, f"checkpoint.every={every}", during=fail_in(5, KeyboardInterrupt))
    again = loop(tmp_path, f"checkpoint.every={every}", "checkpoint.resume=true", during=done.append)
    assert done == list(range(5 - repeated, 7))
    assert again[:2] == (7, 14)


def test_counters_go_on_where_they_stood(tmp_path):
    assert loop(tmp_path, "checkpoint.every=3", steps=3)[:2] == (3, 6)
    assert loop(tmp_path, "checkpoint.resume=true", steps=4)[:2] == (4, 8)
    assert loop(tmp_path / "other", "checkpoint.resume=true", steps=4)[:2] == (4, 8)
    kept = json.loads((tmp_path / "checkpoints" / "rl" / "step-000003" / "rank0.json").read_text())
    assert kept["stateful"] == {"calls": {"training": 6}}


def test_a_counter_that_is_not_kept_starts_anew(tmp_path, monkeypatch):
    loop(tmp_path, "checkpoint.every=3", steps=3)
    monkeypatch.setattr(CallCounter, "load_state_dict", lambda counter, state: None)
    assert loop(tmp_path, "checkpoint.resume=true", steps=4)[:2] == (4, 2)


def test_a_sampler_goes_on_in_its_order_and_into_the_next_epoch():
    whole, resumed = (Sampler(list("abcdefgh"), seed=3) for _ in range(2))
    expected = whole.next(24)
    for drawn in (3, 8, 13):
        stopped = Sampler(list("abcdefgh"), seed=3)
        stopped.next(drawn)
        resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
        assert resumed.next(24 - drawn) == expected[drawn:]
    assert sorted(expected[:8]) == sorted(expected[8:16]) == list("abcdefgh")
    assert len({tuple(expected[i : i + 8]) for i in (0, 8, 16)}) == 3


def test_the_stages_of_a_run_keep_apart(tmp_path):
    loop(tmp_path, "checkpoint.every=3", steps=3)
    assert Checkpoints(Number(), settings(tmp_path), "sft", {}).resume() == 0
    assert Checkpoints(Number(), settings(tmp_path, "checkpoint.resume=true"), "sft", {}).resume() == 0
    with pytest.raises(CheckpointError):
        Checkpoints(Number(), settings(tmp_path), "rl", {}).resume()


def test_each_rank_keeps_its_own_counters(tmp_path):
    barrier = threading.Barrier(2, timeout=60)

    def on_both(work):
        problems = []

        def guarded(rank):
            try:
                work(rank)
            except BaseException as problem:
                problems.append(problem)
                barrier.abort()

        threads = [threading.Thread(target=guarded, args=(rank,)) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert problems == []

    def stage(rank, calls, *overrides):
        policy = Number(rank, 2, barrier.wait)
        policy.value = 10 + rank
        return policy, Checkpoints(policy, settings(tmp_path, *overrides), "rl", {"calls": calls})

    def save(rank):
        calls = CallCounter()
        calls.calls["training"] = 100 + rank
        stage(rank, calls)[1].save(5)

    def go_on(rank):
        calls = CallCounter()
        policy, mine = stage(rank, calls, "checkpoint.resume=true")
        policy.value = 0
        found[rank] = (mine.resume(), policy.value, calls.calls["training"])

    found = {}
    on_both(save)
    on_both(go_on)
    assert found == {0: (5, 10, 100), 1: (5, 11, 101)}


# Stopping


def terminate(step):
    def during(now):
        if now == step:
            os.kill(os.getpid(), signal.SIGTERM)

    return during


def test_sigterm_ends_the_program_with_success_after_the_step_it_came_in(tmp_path, log):
    with pytest.raises(SystemExit) as stopped:
        loop(tmp_path, during=terminate(2))
    assert stopped.value.code == 0
    assert [path.name for path in complete(tmp_path / "checkpoints" / "rl")] == names(3)
    assert log == ["SIGTERM: stopped after step 3; go on with checkpoint.resume=true"]
    assert loop(tmp_path, "checkpoint.resume=true")[:2] == (7, 14)


def test_sigterm_on_another_rank_stops_this_one_too(tmp_path):
    policy = Number()

    def during(step):
        policy.others_asked_to_stop = step == 4

    with pytest.raises(SystemExit):
        loop(tmp_path, policy=policy, during=during)
    assert [path.name for path in complete(tmp_path / "checkpoints" / "rl")] == names(5)


def test_a_checkpoint_that_is_due_anyway_is_written_once(tmp_path):
    written, policy = [], Number()
    policy.disk = lambda folder: written.append(folder.name)
    with pytest.raises(SystemExit):
        loop(tmp_path, "checkpoint.every=2", policy=policy, during=terminate(3))
    assert written == ["step-000002.partial", "step-000004.partial"]


def test_sigterm_in_the_last_step_lets_the_run_finish(tmp_path, log):
    value, _, seen = loop(tmp_path, during=terminate(6))
    assert value == 7 and seen[7] == [] and log == []


def test_outside_the_loop_sigterm_is_what_it_was(tmp_path):
    came = []
    before = signal.signal(signal.SIGTERM, lambda *_: came.append("ours"))
    try:
        ours = signal.getsignal(signal.SIGTERM)
        loop(tmp_path)
        assert signal.getsignal(signal.SIGTERM) is ours
        with pytest.raises(KeyboardInterrupt):
            loop(tmp_path, during=fail_in(1, KeyboardInterrupt))
        assert signal.getsignal(signal.SIGTERM) is ours
        with pytest.raises(SystemExit):
            loop(tmp_path, during=terminate(1))
        assert came == []
        os.kill(os.getpid(), signal.SIGTERM)
        assert came == ["ours"]
    finally:
        signal.signal(signal.SIGTERM, before)


# Complete or absent


def test_while_a_checkpoint_is_written_the_one_before_it_is_the_last(tmp_path):
    seen, policy = [], Number()
    policy.disk = lambda folder: seen.append((folder.name, latest(folder.parent)))
    loop(tmp_path, "checkpoint.every=2", "checkpoint.keep=1", steps=5, policy=policy)
    root = tmp_path / "checkpoints" / "rl"
    before = [None, root / "step-000002", root / "step-000004"]
    assert seen == list(zip([f"{name}.partial" for name in names(2, 4, 5)], before, strict=True))
    assert latest(root) == root / "step-000005"


def test_only_a_complete_folder_is_taken_for_a_checkpoint(tmp_path):
    loop(tmp_path, "checkpoint.every=2", steps=4)
    root = tmp_path / "checkpoints" / "rl"
    for leftover in ("step-000006.partial", "step-000008.replaced", "notes"):
        shutil.copytree(root / "step-000004", root / leftover)
    (root / "step-000009").write_text("a file")
    assert [path.name for path in complete(root)] == names(2, 4)
    assert loop(tmp_path, "checkpoint.every=2", "checkpoint.resume=true", steps=4)[:2] == (4, 8)
    # Control: under the name of a checkpoint it is one.
    (root / "step-000006.partial").rename(root / "step-000006")
    assert latest(root) == root / "step-000006"


def test_leftovers_alone_are_no_earlier_run(tmp_path, log):
    root = tmp_path / "checkpoints" / "rl"
    for leftover in ("step-000002.partial", "step-000004.replaced"):
        (root / leftover).mkdir(parents=True)
    assert loop(tmp_path, steps=1)[:2] == (1, 2)
    assert loop(tmp_path, "checkpoint.resume=true", steps=1)[:2] == (1, 2)
    assert log == [f"no checkpoint in {root}: starting from the beginning"]


def test_nothing_of_a_leftover_gets_into_the_next_checkpoint(tmp_path):
    partial = tmp_path / "checkpoints" / "rl" / "step-000002.partial"
    partial.mkdir(parents=True)
    (partial / "leftover").write_text("of a killed run")
    loop(tmp_path, "checkpoint.every=2", steps=2)
    assert {path.name for path in (partial.parent / "step-000002").iterdir()} == {"value0", "rank0.json", "files.json"}
    assert not partial.exists()


@pytest.mark.parametrize("renamed", [0, 1])
def test_a_folder_that_is_replaced_is_never_half_new(tmp_path, monkeypatch, renamed):
    old, new = tmp_path / "out", tmp_path / "out.partial"
    for folder, text in ((old, "old"), (new, "new")):
        folder.mkdir()
        (folder / "weights").write_text(text)
    rename, done = Path.rename, []

    def killed(path, target):
        if len(done) == renamed:
            raise KeyboardInterrupt
        done.append(target)
        return rename(path, target)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Path, "rename", killed)
        publish(new, old)
    assert (old / "weights").read_text() == "old" if renamed == 0 else not old.exists()
    assert (new / "weights").read_text() == "new"
    publish(new, old)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (old / "weights").read_text() == "new"


def test_a_folder_gets_its_name_only_when_its_contents_are_on_the_disk(tmp_path, monkeypatch):
    folder = tmp_path / "out.partial"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "weights").write_text("new")
    flushed, flush = set(), os.fsync

    def watched(descriptor):
        flushed.add((os.fstat(descriptor).st_ino, (tmp_path / "out").exists()))
        flush(descriptor)

    inodes = {path.stat().st_ino for path in (folder, *folder.rglob("*"))}
    monkeypatch.setattr(os, "fsync", watched)
    publish(folder, tmp_path / "out")
    assert {(inode, False) for inode in inodes} <= flushed and len(inodes) == 3


# A full disk

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextmanager
def files_of_at_most(size):
    """Beyond this size writing fails as on a full disk, whoever writes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def full(*_, **settings):
    raise FULL


@pytest.mark.parametrize("place", ["the policy", "the counters", "the flush"])
def test_a_full_disk_while_saving_is_one_line_and_costs_no_earlier_checkpoint(tmp_path, monkeypatch, place):
    folder = tmp_path / "checkpoints" / "rl" / "step-000004"
    policy = Number()

    def disk(partial):
        if partial.name.startswith("step-000004"):
            if place == "the policy":
                raise FULL
            monkeypatch.setattr(*((Path, "write_text") if place == "the counters" else (os, "fsync")), full)

    policy.disk = disk
    with pytest.raises(CheckpointError) as caught:
        loop(tmp_path, "checkpoint.every=2", "checkpoint.keep=1", policy=policy)
    monkeypatch.undo()
    message = one_line(caught)
    assert str(folder) in message and "No space left on device" in message
    assert complete(folder.parent) == [folder.with_name("step-000002")]
    value, calls, seen = loop(tmp_path, "checkpoint.every=2", "checkpoint.keep=1", "checkpoint.resume=true")
    assert (value, calls) == (7, 14) and seen[4] == names(4)


def trainable(path, **settings):
    policy = Policy(ModelConfig(path=str(path)))
    defaults = {"lr": 1e-2, "weight_decay": 0.01, "grad_clip": 1.0, "max_nonfinite_steps": 3, "with_reference": False}
    policy.prepare_training(**defaults | settings)
    return policy


def take_step(policy, *, bad=False):
    """One update on ten tokens, or one whose gradient is not finite."""
    row = Row(list(range(5, 15)), [int(Role.ACT)] * 10, [1.0] * 10, [0.0] * 10)
    [batch] = policy.micro_batches([row], 1)
    logprobs, _ = policy.logprobs(batch, 1.0)
    policy.backward(sft_loss(logprobs, batch.weights) * (float("nan") if bad else 1.0))
    return policy.step(1e-2)


def saved_state(policy, folder):
    folder.mkdir()
    policy.save_state(folder)
    return folder


@pytest.fixture(scope="module")
def good(base, tmp_path_factory):
    """The state of a policy after one step."""
    policy = trainable(base)
    take_step(policy)
    return saved_state(policy, tmp_path_factory.mktemp("state") / "good")


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.bin"])
def test_whichever_file_the_disk_is_too_small_for_the_error_is_one_line(base, tmp_path, good, file):
    policy = trainable(base)
    take_step(policy)
    stage = Checkpoints(policy, settings(tmp_path), "rl", {})
    stage.save(1)
    before = contents(stage.root / "step-000001")
    with files_of_at_most((good / file).stat().st_size - 1000), pytest.raises(CheckpointError) as caught:
        stage.save(2)
    assert str(stage.root / "step-000002") in one_line(caught)
    assert complete(stage.root) == [stage.root / "step-000001"]
    assert contents(stage.root / "step-000001") == before
    stage.save(2)
    assert sorted(path.name for path in stage.root.iterdir()) == names(1, 2)


@pytest.mark.slow
def test_when_there_is_room_again_training_goes_on_as_if_nothing_had_been(base, tmp_path, straight_sft, monkeypatch):
    save = Policy.save_state

    def save_state(policy, folder):
        small = files_of_at_most(1000) if folder.name.startswith("step-000004") else nullcontext()
        with small:
            save(policy, folder)

    monkeypatch.setattr(Policy, "save_state", save_state)
    ends = partial(pytest.raises, CheckpointError, match="step-000004 cannot be written")
    train("sft", configure(base, tmp_path, "checkpoint.every=2"), ends=ends)
    monkeypatch.undo()
    monkeypatch.setitem(data.SOURCES, "demo", Numbered)
    monkeypatch.setitem(rewards.REWARDS, "goal", score)
    resumed = train("sft", configure(base, tmp_path, "checkpoint.every=2", "checkpoint.resume=true"))
    assert resumed.drawn == straight_sft.drawn[2:]
    assert_ends_equal(resumed, straight_sft)


@pytest.mark.parametrize(
    "error", [FULL, RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0\nframe #0: c10")]
)
def test_what_torch_says_of_a_full_disk_is_an_error_of_the_disk(base, tmp_path, monkeypatch, error):
    policy = trainable(base)

    def fail(*_):
        raise error

    monkeypatch.setattr(policy.accelerator, "save_state", fail)
    with pytest.raises(CheckpointError) as caught:
        Checkpoints(policy, settings(tmp_path), "rl", {}).save(1)
    assert str(tmp_path / "checkpoints" / "rl" / "step-000001") in one_line(caught)
    assert complete(tmp_path / "checkpoints" / "rl") == []


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json"])
def test_a_full_disk_while_the_model_is_exported_leaves_the_old_one_whole(base, tmp_path, file):
    policy = trainable(base)
    policy.save(tmp_path / "out")
    before = contents(tmp_path / "out")
    take_step(policy)
    if file == "tokenizer.json":  # smaller than the weights: the disk is full only when they are written
        save = policy.tokenizer.save_pretrained

        def save_pretrained(*arguments, **settings):
            with files_of_at_most(10_000):
                return save(*arguments, **settings)

        policy.tokenizer.save_pretrained = save_pretrained
    small = files_of_at_most(10_000) if file == "model.safetensors" else nullcontext()
    with small, pytest.raises(SaveError) as caught:
        policy.save(tmp_path / "out")
    assert str(tmp_path / "out") in one_line(caught)
    assert contents(tmp_path / "out") == before
    policy.tokenizer.__dict__.pop("save_pretrained", None)
    policy.save(tmp_path / "out")
    assert contents(tmp_path / "out") != before


# What does not fit is refused


def refusal(run_dir, *overrides, error=CheckpointError, policy=None, stateful=None):
    with pytest.raises(error) as caught:
        config = settings(run_dir, "checkpoint.resume=true", *overrides)
        Checkpoints(policy or Number(), config, "rl", stateful or {}).resume()
    return one_line(caught)


@pytest.mark.parametrize(
    ("key", "value", "before"),
    [
        ("rl.lr", "0.002", "1e-06"),
        ("seed", "5", "0"),
        ("model.path", "other/model", "some/model"),
        ("data.train_tasks", "64", "2048"),
        ("rollout.view", "separate", "shared"),
        ("policy.lora.r", "4", "0"),
        ("rl.role_weights", "{act: 0.5, rehearse: 1.0}", "{'act': 1.0, 'rehearse': 1.0}"),
        ("sampling.temperature", "0.5", "1.0"),
    ],
)
def test_another_setting_is_refused_with_both_values(tmp_path, key, value, before):
    loop(tmp_path, "checkpoint.every=2", steps=2)
    message = refusal(tmp_path, f"{key}={value}")
    now = {"rl.role_weights": "{'act': 0.5, 'rehearse': 1.0}"}.get(key, value)
    assert f"{key}={before}" in message and f"this run has {now}" in message and "step-000002" in message
    assert "more differ" not in message
    assert loop(tmp_path, "checkpoint.resume=true", steps=3)[:2] == (3, 6)


def test_of_several_other_settings_one_is_named_and_the_rest_counted(tmp_path):
    loop(tmp_path, "checkpoint.every=2", steps=2)
    message = refusal(tmp_path, "seed=5", "rl.lr=0.5", "rl.warmup=0.5")
    assert "rl.lr=1e-06" in message and "2 more differ" in message


@pytest.mark.parametrize(
    "change",
    [
        *("checkpoint.every=5", "checkpoint.keep=9", "policy.logprob_chunk=7", "policy.gradient_checkpointing=true"),
        *("rehearsal.n=3", "rehearsal.mode=parallel", "serve.port=80"),
        *("eval.every=3", "eval.samples=4", "eval.tasks=2", "eval.sampling.temperature=0", "eval.sampling.top_k=3"),
    ],
)
def test_settings_that_do_not_touch_the_training_may_change(tmp_path, change):
    loop(tmp_path, "checkpoint.every=2", steps=2)
    assert loop(tmp_path, "checkpoint.resume=true", change, steps=3)[:2] == (3, 6)


def test_a_setting_that_came_since_had_its_default_then(tmp_path):
    loop(tmp_path, "checkpoint.every=2", steps=2)
    file = tmp_path / "checkpoints" / "rl" / "step-000002" / "rank0.json"
    state = json.loads(file.read_text())
    assert state["settings"].pop("rl.keep") == "all"
    file.write_text(json.dumps(state))
    sizes = file.with_name("files.json")
    sizes.write_text(json.dumps(json.loads(sizes.read_text()) | {"rank0.json": file.stat().st_size}))
    assert "rl.keep=all, this run has consistent" in refusal(tmp_path, "rl.keep=consistent")
    assert loop(tmp_path, "checkpoint.resume=true", steps=3)[:2] == (3, 6)


def test_a_run_may_move_to_another_folder(tmp_path):
    loop(tmp_path / "here", "checkpoint.every=2", steps=2)
    (tmp_path / "here").rename(tmp_path / "there")
    assert loop(tmp_path / "there", "checkpoint.resume=true", steps=3)[:2] == (3, 6)


def test_every_setting_of_a_checkpoint_survives_the_file(tmp_path):
    odd = ["rl.lr=1.2345678901234567e-07", "seed=2147483647", "sft.roles=[rehearse]", "policy.lora.targets=[q_proj]"]
    loop(tmp_path, "checkpoint.every=2", *odd, steps=2)
    assert loop(tmp_path, "checkpoint.resume=true", *odd, steps=3)[:2] == (3, 6)


def test_another_number_of_processes_is_refused_with_both_numbers(tmp_path):
    loop(tmp_path, "checkpoint.every=2", steps=2)
    file = tmp_path / "checkpoints" / "rl" / "step-000002" / "rank0.json"
    for rank in (0, 1):
        message = refusal(tmp_path, policy=Number(rank, 2))
        assert "written by 1 processes" in message and "this run has 2" in message
    file.write_text(json.dumps(json.loads(file.read_text()) | {"world_size": 4}))
    message = refusal(tmp_path)
    assert "written by 4 processes" in message and "this run has 1" in message and str(file.parent) in message


HALF = object()


@pytest.mark.parametrize(
    "damage",
    [b"", HALF, b"\0" * 99, b"\xff\xfe{}", b"[]", b"3", b"{}", b'{"step": 2}', None],
    ids=["empty", "half", "zeros", "not text", "a list", "a number", "no fields", "few fields", "missing"],
)
def test_a_damaged_record_of_a_rank_is_one_line_that_names_it(tmp_path, damage):
    loop(tmp_path, "checkpoint.every=2", steps=4)
    file = tmp_path / "checkpoints" / "rl" / "step-000004" / "rank0.json"
    text = file.read_bytes()
    if damage is None:
        file.unlink()
    else:
        file.write_bytes(text[: len(text) // 2] if damage is HALF else damage)
    assert str(file.parent) in refusal(tmp_path)
    # As the message says: without that folder the one before it is the last.
    shutil.rmtree(file.parent)
    assert loop(tmp_path, "checkpoint.resume=true")[:2] == (7, 14)


@pytest.mark.parametrize("damage", ["missing", "empty", "half", "garbage"])
@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.bin", "random_states_0.pkl", "policy.json"])
def test_a_damaged_file_of_a_checkpoint_is_one_line(base, tmp_path, good, file, damage):
    folder = shutil.copytree(good, tmp_path / "bad")
    whole = (folder / file).read_bytes()
    if damage == "missing":
        (folder / file).unlink()
    else:
        (folder / file).write_bytes(
            {"empty": b"", "half": whole[: len(whole) // 2], "garbage": b"\0?\xff" * 99}[damage]
        )
    with pytest.raises(LoadError) as caught:
        trainable(base).load_state(folder)
    assert str(folder) in one_line(caught)


# What a policy keeps


def state_of(policy):
    moments = policy.optimizer.state_dict()["state"]
    values = [value for number in sorted(moments) for value in moments[number].values()]
    return [tensor.detach().clone() for tensor in (*policy.lm.parameters(), *values)]


def same(before, after):
    return len(before) == len(after) and all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_policy_is_what_it_was_and_draws_what_it_would_have_drawn(base, tmp_path):
    policy, other = trainable(base), trainable(base)
    take_step(policy)
    torch.rand(3)
    random.random()
    folder = saved_state(policy, tmp_path / "state")
    expected = torch.rand(4), random.random()
    take_step(policy)
    assert not same(state_of(other), state_of(policy))
    other.load_state(folder)
    drawn = torch.rand(4), random.random()
    take_step(other)
    assert same(state_of(other), state_of(policy))
    assert torch.equal(drawn[0], expected[0]) and drawn[1] == expected[1]
    # Control: without the state another draw and another step.
    assert not torch.equal(torch.rand(4), expected[0])
    fresh = trainable(base)
    take_step(fresh)
    assert not same(state_of(fresh), state_of(policy))


def test_steps_that_were_skipped_stay_counted(base, tmp_path):
    policy, resumed = trainable(base), trainable(base)
    take_step(policy, bad=True)
    take_step(policy)
    take_step(policy, bad=True)
    take_step(policy, bad=True)
    folder = saved_state(policy, tmp_path / "state")
    assert (resumed.skipped_steps, resumed.skipped_in_a_row) == (0, 0)
    resumed.load_state(folder)
    assert (resumed.skipped_steps, resumed.skipped_in_a_row) == (3, 2)
    resumed.check_progress()
    take_step(resumed, bad=True)
    with pytest.raises(Diverged, match="3 updates in a row"):
        resumed.check_progress()
    # Control: a run that had counted anew would go on.
    assert take_step(trainable(base), bad=True)["skipped"] == 1


# What is recorded around an interruption


def tracker(run_dir, name="rl", **rest):
    return Tracker(run_dir, settings(run_dir), name=name, total_steps=9, **rest)


def record_trajectories(run_dir, steps, stage="rl"):
    with (run_dir / "trajectories.jsonl").open("a") as file:
        for step in steps:
            for split in ("train", "train", "eval-real"):
                file.write(json.dumps({"stage": stage, "step": step, "split": split}) + "\n")


@pytest.fixture
def killed(tmp_path, monkeypatch):
    """The folder of a run that was killed in its sixth step, long after the checkpoint of the third."""
    clock = time.time
    monkeypatch.setattr(time, "time", lambda: clock() - 3600)  # TensorBoard orders files by their seconds
    with tracker(tmp_path, "sft") as sft:
        for step in range(9):
            sft.log(step, {"loss": 0.1})
    with tracker(tmp_path) as rl:
        for step in range(5):
            rl.log(step, {"loss": step + 0.25})
    record_trajectories(tmp_path, range(9), "sft")
    record_trajectories(tmp_path, range(6))
    for file in ("metrics.jsonl", "trajectories.jsonl"):
        with (tmp_path / file).open("a") as stream:
            stream.write('{"stage": "rl", "step": 5, "lo')
    monkeypatch.setattr(time, "time", clock)
    return tmp_path


def steps_in(path, stage="rl"):
    return [record["step"] for record in read_lines(path) if record["stage"] == stage]


def on_board(run_dir, stage="rl"):
    board = EventAccumulator(str(run_dir / "tensorboard" / stage)).Reload()
    return [(event.step, event.value) for event in board.Scalars("loss")]


@pytest.mark.parametrize("first", [3, 5, 0])
def test_after_a_resume_each_step_is_recorded_once_and_in_order(killed, first):
    with tracker(killed, first_step=first) as rl:
        assert steps_in(killed / "metrics.jsonl") == list(range(first))
        assert steps_in(killed / "trajectories.jsonl") == [step for step in range(first) for _ in range(3)]
        for step in range(first, 9):
            rl.log(step, {"loss": step + 0.75})
        record_trajectories(killed, range(first, 9))
    expected = [(step, step + (0.25 if step < first else 0.75)) for step in range(9)]
    records = [record for record in read_lines(killed / "metrics.jsonl") if record["stage"] == "rl"]
    assert [(record["step"], record["loss"]) for record in records] == expected
    assert on_board(killed) == expected
    assert steps_in(killed / "trajectories.jsonl") == [step for step in range(9) for _ in range(3)]
    # The other stage is left alone.
    assert steps_in(killed / "metrics.jsonl", "sft") == list(range(9))
    assert steps_in(killed / "trajectories.jsonl", "sft") == [step for step in range(9) for _ in range(3)]
    assert [step for step, _ in on_board(killed, "sft")] == list(range(9))


def test_half_an_event_at_the_end_does_not_hide_what_comes_after(killed):
    [file] = (killed / "tensorboard" / "rl").iterdir()
    file.write_bytes(file.read_bytes()[:-7])
    with tracker(killed, first_step=3) as rl:
        for step in range(3, 9):
            rl.log(step, {"loss": step + 0.75})
    assert [step for step, _ in on_board(killed)] == list(range(9))


def test_without_the_first_step_the_records_would_be_double(killed, monkeypatch):
    monkeypatch.setattr(Tracker, "_stays", lambda *_: True)
    with tracker(killed, first_step=3) as rl:
        for step in range(3, 9):
            rl.log(step, {"loss": 0.5})
    assert steps_in(killed / "metrics.jsonl") == [0, 1, 2, 3, 4, 3, 4, 5, 6, 7, 8]


def test_a_resume_from_the_very_last_step_keeps_everything(killed, log):
    lines = (killed / "metrics.jsonl").read_text().splitlines()[:-1]
    with tracker(killed, first_step=9):
        pass
    assert (killed / "metrics.jsonl").read_text().splitlines() == lines
    assert [step for step, _ in on_board(killed)] == list(range(5))
