"""Real ZeRO-3 on two CPU processes is the same training as plain PyTorch on one: every weight is partitioned here."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import zero3_worker
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from zero3_worker import KL_COEF, SETTINGS, UPDATES, make_rows

from envace.checkpoints import exports
from envace.demo.demonstrations import make_demonstrations
from envace.demo.desk import CallCounter
from envace.demo.model import build_model
from envace.policy import REFERENCE, Policy, merge_adapter
from envace.settings import ModelConfig

pytestmark = pytest.mark.slow
RUNS = [f"{kind}-{model}-{size}" for kind in ("sft", "rl") for model in ("base", "adapter") for size in (1, 4)]


def launch(script, *arguments, processes=2, timeout=500):
    """Run `script` on CPU processes. Returns what it wrote."""
    paths = [str(Path(__file__).parents[1] / "src"), str(Path(__file__).parents[1]), str(Path(__file__).parent)]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    # torchrun ends its workers when it is asked to end, not when it is killed.
    limit = ["timeout", "--kill-after", "10", str(timeout)]
    torchrun = [
        *limit,
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        str(processes),
    ]
    command = [*torchrun, str(script), *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder with a model of one layer, and an adapter for it whose B is not 0, as after an SFT."""
    folder = tmp_path_factory.mktemp("zero3")
    recorded = make_demonstrations(16, 0, CallCounter())
    build_model(folder / "base", [(task.tools, said) for task, said in recorded], seed=0, hidden=32, layers=1)
    bare = AutoModelForCausalLM.from_pretrained(folder / "base")
    adapters = get_peft_model(bare, LoraConfig(r=4, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"))
    with torch.no_grad():
        torch.manual_seed(0)
        for name, weight in adapters.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.02)
    adapters.save_pretrained(folder / "adapter")
    AutoTokenizer.from_pretrained(folder / "base").save_pretrained(folder / "adapter")
    return folder


@pytest.fixture(scope="module")
def ranks(models):
    """ranks(scenario) -> what each of the two ranks found. All scenarios run in one launch."""
    launch(Path(zero3_worker.__file__), models, *zero3_worker.SCENARIOS)
    return lambda scenario: [torch.load(models / f"{scenario}.{rank}.pt") for rank in range(2)]


# The oracle: one process, one sequence at a time, all logits, loops


def load(models, model):
    if model == "base":
        return AutoModelForCausalLM.from_pretrained(models / "base")
    bare = AutoModelForCausalLM.from_pretrained(models / "base")
    return PeftModel.from_pretrained(bare, models / "adapter", is_trainable=True)


def sequence_logprobs(lm, row):
    logits = lm(input_ids=torch.tensor([row.ids])).logits[0].double()
    return [logits[t - 1].log_softmax(-1)[row.ids[t]] for t in range(1, len(row.ids))]


def plain_loss(lm, reference, kind):
    rows = make_rows()
    total = sum(sum(row.weights) for row in rows)
    loss = 0.0
    for row in rows:
        with torch.no_grad():
            fixed = sequence_logprobs(reference, row)
        for t, logprob in enumerate(sequence_logprobs(lm, row), 1):
            per_token = -logprob
            if kind == "rl":
                x = fixed[t - 1] - logprob
                per_token = -(logprob - logprob.detach()).exp() * row.advantages[t] + KL_COEF * (x.exp() - x - 1)
            loss = loss + row.weights[t] * per_token / total
    return loss


@pytest.fixture(scope="module")
def plain(models):
    """plain(kind, model) -> (gradients before the first step, weights at the start, weights after UPDATES), by name."""
    known = {}

    def train(kind, model):
        if (kind, model) in known:
            return known[kind, model]
        lm, reference = load(models, model), load(models, model)
        named = {name: p for name, p in lm.named_parameters() if p.requires_grad}
        start = {name: p.detach().clone() for name, p in named.items()}
        optimizer = torch.optim.AdamW(named.values(), lr=SETTINGS["lr"], weight_decay=SETTINGS["weight_decay"])
        gradients = None
        for _ in range(UPDATES):
            optimizer.zero_grad()
            plain_loss(lm, reference, kind).backward()
            gradients = gradients or {name: p.grad.clone() for name, p in named.items()}
            torch.nn.utils.clip_grad_norm_(named.values(), SETTINGS["grad_clip"])
            optimizer.step()
        known[kind, model] = gradients, start, {name: p.detach().clone() for name, p in named.items()}
        return known[kind, model]

    return train


def relative(found, expected):
    """Norm of the difference over the norm of what is expected."""
    assert found.keys() == expected.keys()
    difference = torch.cat([(found[name] - expected[name]).flatten().double() for name in expected]).norm()
    return float(difference / torch.cat([value.flatten().double() for value in expected.values()]).norm())


def change(start, end):
    return {name: end[name] - start[name] for name in end}


# The same training


@pytest.mark.parametrize("run", RUNS)
def test_gradients_and_five_updates_equal_plain_pytorch(ranks, plain, run):
    kind, model, _ = run.split("-")
    gradients, start, end = plain(kind, model)
    for found in ranks(run):
        assert relative(found["gradients"], gradients) < 1e-5
        assert relative(found["start"], start) == 0
        assert relative(change(found["start"], found["end"]), change(start, end)) < 1e-3


@pytest.mark.parametrize("broken", ["doubled", "dropped"])
def test_a_wrong_denominator_or_a_lost_rank_shows_in_the_gradients(ranks, plain, broken):
    gradients, _, _ = plain("rl", "base")
    assert relative(ranks(broken)[0]["gradients"], gradients) > 0.1


@pytest.mark.parametrize("option", ["packed", "recomputed", "offloaded"])
def test_packing_recomputation_and_an_offloaded_reference_change_nothing(ranks, plain, option):
    gradients, _, _ = plain("rl", "base")
    assert relative(ranks(option)[0]["gradients"], gradients) < 1e-5


def test_a_rank_without_a_row_joins_with_weight_zero(ranks, models):
    one, other = ranks("idle_rank")
    policy = Policy(ModelConfig(path=str(models / "base")), training=True)
    policy.prepare_training(**SETTINGS, with_reference=True)
    zero3_worker.accumulate(policy, make_rows()[:1], "rl", 1)
    alone = {name.removeprefix("lm."): p.grad for name, p in policy.scorer.named_parameters()}
    assert relative(one["gradients"], alone) < 1e-5
    assert relative(other["gradients"], alone) < 1e-5


def test_shares_are_contiguous_and_gathering_undoes_them(ranks):
    one, other = ranks("shares")
    assert (one["share"], other["share"]) == ([0, 1], [2, 3, 4])
    assert one["gathered"] == other["gathered"] == [0, 1, 2, 3, 4]
    assert one["any"] and other["any"]
    assert one["random"] != other["random"], "ranks sample different rollouts, reference or not"


@pytest.mark.parametrize("scenario", ["lora-new", "lora-adapter-bfloat16"])
def test_adapters_start_at_their_reference_and_leave_it(ranks, scenario):
    for found in ranks(scenario):
        before, after = found["kl"]
        assert before == 0 and after > 1e-4
        assert found["trained"] and all("lora" in name and REFERENCE not in name for name in found["trained"])


def test_a_step_without_a_backward_pass_changes_nothing(ranks):
    for found in ranks("nothing"):
        assert found["unchanged"] and found["skipped"] == 0


# Generation


def greedy(models, start, end, prompt, budgets):
    """Greedy decoding without batch or cache, by the weights after the update."""
    lm = AutoModelForCausalLM.from_pretrained(models / "base")
    lm.load_state_dict(end, strict=False)
    ids, turns = list(prompt), []
    for budget in budgets:
        output = []
        for _ in range(budget):
            output.append(int(lm(input_ids=torch.tensor([ids + output])).logits[0, -1].argmax()))
        ids += [*output, 9, 8]
        turns.append(output)
    return turns


@pytest.mark.parametrize("weights", ["gathered", "partitioned"])
def test_ranks_may_have_one_turn_and_three_and_then_train_on(ranks, weights):
    one, other = ranks(weights)
    assert [len(output) for turn in one["turns"] for output in turn] == [2]
    assert [len(output) for turn in other["turns"] for output in turn] == [5, 5, 3, 3, 4, 4]
    # A rank that ended early joins in until the last one has ended, or does nothing more if it holds all weights.
    assert one["forwards"] == (other["forwards"] if weights == "partitioned" else 3)
    assert one["grad_norm"] == other["grad_norm"]
    assert one["grad_norm"] == pytest.approx(ranks("no_generation")[0]["grad_norm"], rel=1e-6)


def test_both_ways_of_generating_sample_the_same(ranks):
    for gathered, partitioned in zip(ranks("gathered"), ranks("partitioned"), strict=True):
        assert gathered["turns"] == partitioned["turns"]


# Saving


@pytest.mark.parametrize("model", ["base", "adapter"])
def test_what_is_saved_loads_anywhere_with_every_weight_whole(ranks, models, model):
    found = ranks("save" if model == "base" else "save_adapter")[0]
    saved = models / f"saved-{model}"
    if model == "adapter":
        merge_adapter(saved, models / "merged", ModelConfig())
        saved = models / "merged"
    lm = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
    assert all(p.numel() > 0 for p in lm.parameters())
    row = make_rows()[0]
    with torch.no_grad():
        expected = sequence_logprobs(lm, row)[3:]
        before = sequence_logprobs(AutoModelForCausalLM.from_pretrained(models / "base"), row)[3:]
    torch.testing.assert_close(found["logprobs"][0, 4:].double(), torch.stack(expected), atol=2e-5, rtol=0)
    assert (torch.stack(expected) - torch.stack(before)).abs().max() > 0.01


# Going on after an interruption


def records(path):
    """The lines of a file without what no two runs share."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(("time", "throughput"))} for line in lines]


@pytest.mark.parametrize("step", [3, 4])
@pytest.mark.parametrize("stage", ["sft", "rl"])
def test_a_run_that_was_stopped_and_resumed_equals_the_uninterrupted_one(ranks, models, stage, step):
    assert [found["exit"] for found in ranks(f"{stage}-stopped-{step}")] == [0, 0], "SIGTERM came to one rank only"
    assert [found["exit"] for found in ranks(f"{stage}-resumed-{step}")] == [None, None]
    equals_the_uninterrupted_run(ranks, models, stage, f"{stage}-at-{step}")


def test_a_run_that_lost_its_judge_on_one_rank_goes_on_as_if_it_had_not(ranks, models):
    assert [found["exit"] for found in ranks("rl-judge-gone")] == ["the judge is gone"] * 2
    assert (models / "rl-without-judge" / "checkpoints" / "rl" / "step-000002").is_dir()
    assert [found["exit"] for found in ranks("rl-judge-back")] == [None, None]
    equals_the_uninterrupted_run(ranks, models, "rl", "rl-without-judge")


def equals_the_uninterrupted_run(ranks, models, stage, run):
    straight, resumed = models / f"{stage}-straight", models / run
    assert [found["exit"] for found in ranks(f"{stage}-straight")] == [None, None]
    expected = records(straight / "metrics.jsonl")
    assert [line["step"] for line in expected] == [0, 1, 2, 3, 4]
    assert records(resumed / "metrics.jsonl") == expected
    one, other = (load_file(folder / stage / "model.safetensors") for folder in (straight, resumed))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    if stage == "rl":
        assert list(exports(straight)) == list(exports(resumed)) == [2, 4]
        one, other = (load_file(exports(folder)[4] / "model.safetensors") for folder in (straight, resumed))
        assert all(torch.equal(one[name], other[name]) and one[name].numel() > 0 for name in one)
        assert records(resumed / "trajectories.jsonl") == records(straight / "trajectories.jsonl")
        assert all(line["loss/kl"] > 0 for line in expected[2:])
        assert any(line["advantage/act_abs_max"] > 0 for line in expected)


def test_groups_may_straddle_ranks(ranks, models):
    ranks("rl-straight")
    first = [
        t for t in records(models / "rl-straight" / "trajectories.jsonl") if (t["step"], t["split"]) == (0, "train")
    ]
    assert len(first) == 6
    assert sorted(Counter(t["group_id"] for t in first).values()) == [3, 3]


# What goes wrong


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_bad_gradient_on_one_rank_skips_the_step_on_all_and_several_in_a_row_stop_the_run(ranks, dtype):
    for found in ranks(f"bad-{dtype}"):
        assert found["good"]["skipped"] == found["again"]["skipped"] == 0
        assert found["bad"]["skipped"] == 1 and found["skipped"] == 1
        assert found["unchanged"] and found["moved"]
        assert found["infinite"] == 2
        assert "3 updates in a row" in found["stopped"]
