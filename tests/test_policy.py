"""The policy: learning rates, updates that do not depend on how a batch is split, bad gradients, saving, loading."""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from envace.batching import Row, total_weight
from envace.chat import TOOL_TOKENS, TURN_TOKENS, TokenizerError
from envace.demo.demonstrations import make_demonstrations
from envace.demo.desk import CallCounter
from envace.demo.model import CHAT_TEMPLATE, build_model
from envace.losses import policy_loss, sft_loss
from envace.policy import Diverged, LoadError, Policy, SaveError, check_output, learning_rate
from envace.settings import ModelConfig, SamplingConfig
from envace.types import Evidence, Request, Role, Segment, Sequence

SETTINGS = {"lr": 1e-2, "weight_decay": 0.01, "grad_clip": 1.0, "max_nonfinite_steps": 3, "with_reference": False}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A model of one layer in an ordinary folder."""
    path = tmp_path_factory.mktemp("policy") / "base"
    recorded = make_demonstrations(16, 0, CallCounter())
    build_model(path, [(task.tools, messages) for task, messages in recorded], seed=0, hidden=32, layers=1)
    return path


def trainable(path, **settings):
    policy = Policy(ModelConfig(path=str(path)))
    policy.prepare_training(**SETTINGS | settings)
    return policy


def make_rows(lengths=(3, 9, 4, 7, 2)):
    """Rows that share a prompt of four tokens, as the rollouts of one task do, and differ in length."""
    draw = torch.Generator().manual_seed(0)
    rows = []
    for n in lengths:
        ids = [5, 6, 7, 8, *torch.randint(10, 300, (n,), generator=draw).tolist()]
        roles = [int(Role.CONTEXT)] * 4 + [int(Role.ACT)] * (n - 1) + [int(Role.REHEARSE)]
        rows.append(Row(ids, roles, [0.0] * 4 + [1.0] * n, [0.0] * 4 + [0.5 - n % 2] * n))
    return rows


def accumulate(policy, rows, size, *, loss=sft_loss):
    """The gradient of `rows` in micro-batches of at most `size`. Returns the loss."""
    denominator = total_weight(rows)
    total = 0.0
    for batch in policy.accumulating(policy.micro_batches(rows, size)):
        logprobs, _ = policy.logprobs(batch, temperature=1.0)
        if loss is sft_loss:
            value = sft_loss(logprobs, batch.weights, denominator=denominator)
        else:
            value, _ = policy_loss(logprobs, None, None, batch.advantages, batch.weights, denominator=denominator)
        policy.backward(value)
        total += float(value.detach())
    return total


def gradients(policy):
    found = [parameter.grad.clone() for parameter in policy.model.parameters()]
    policy.optimizer.zero_grad()
    return found


def snapshot(policy):
    """Weights and optimizer state, copied."""
    state = policy.optimizer.state_dict()["state"]
    moments = [value.clone() for number in sorted(state) for value in state[number].values()]
    return [parameter.detach().clone() for parameter in policy.model.parameters()] + moments


def same(before, after):
    return len(before) == len(after) and all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


# Learning rate


def rates(steps, **settings):
    settings = {"peak": 2.0, "warmup": 0.1, "schedule": "cosine"} | settings
    return [learning_rate(step, steps=steps, **settings) for step in range(steps)]


def test_half_way_through_the_warm_up_the_rate_is_half_the_peak():
    schedule = rates(100)
    assert schedule[4] == 1.0
    assert schedule[:10] == pytest.approx([2.0 * k / 10 for k in range(1, 11)])
    assert min(schedule[:10]) > 0


def test_after_the_warm_up_a_cosine_falls_to_almost_nothing():
    schedule = rates(100)
    assert schedule[10] == 2.0
    assert schedule[10:] == sorted(schedule[10:], reverse=True)
    assert schedule[55] == pytest.approx(1.0, abs=1e-9)
    assert 0 < schedule[-1] < 0.002


def test_a_constant_schedule_stays_at_the_peak():
    assert rates(100, schedule="constant")[9:] == [2.0] * 91
    assert rates(3, schedule="constant", warmup=0.0) == [2.0] * 3


@pytest.mark.parametrize("schedule", ["cosine", "constant"])
@pytest.mark.parametrize("warmup", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_no_step_of_a_short_run_is_lost(steps, warmup, schedule):
    assert all(0 < rate <= 2.0 for rate in rates(steps, warmup=warmup, schedule=schedule))


@pytest.mark.parametrize("size", [8, 2])
def test_the_rate_counts_optimizer_steps_however_many_micro_batches_they_have(base, size):
    policy, rows = trainable(base), make_rows(range(2, 10))
    for step in range(5):
        assert len(policy.micro_batches(rows, size)) == 8 // size
        accumulate(policy, rows, size)
        policy.step(learning_rate(step, steps=100, peak=2e-3, warmup=0.1, schedule="cosine"))
    assert [group["lr"] for group in policy.optimizer.param_groups] == [pytest.approx(1e-3)]


# Gradients


@pytest.mark.parametrize("loss", [sft_loss, policy_loss])
@pytest.mark.parametrize("lengths", [(3, 9, 4, 7), (3, 9, 4, 7, 2), (5, 5, 5, 5)])
def test_the_split_into_micro_batches_changes_neither_loss_nor_gradient(base, lengths, loss):
    policy, rows = trainable(base), make_rows(lengths)
    results = {}
    for size in (len(rows), 2, 3, 1):
        results[size] = accumulate(policy, rows, size, loss=loss), gradients(policy)
    whole_loss, whole = results[len(rows)]
    assert any(gradient.abs().max() > 1e-3 for gradient in whole)
    for split_loss, split in results.values():
        assert split_loss == pytest.approx(whole_loss, abs=1e-6)
        for a, b in zip(split, whole, strict=True):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=0)


def test_logprobs_do_not_depend_on_the_other_rows_of_a_batch(base):
    policy, rows = trainable(base), make_rows((3, 9, 4))
    together = policy.micro_batches(rows, 3)[0]
    alone = [batch for row in rows for batch in policy.micro_batches([row], 1)]
    for batch in alone:
        width = batch.input_ids.shape[1]
        [i] = [i for i in range(3) if torch.equal(together.input_ids[i, :width], batch.input_ids[0])]
        spoken = batch.weights[0] > 0
        for one, many in zip(policy.logprobs(batch, 0.7), policy.logprobs(together, 0.7), strict=True):
            torch.testing.assert_close(one[0, spoken], many[i, :width][spoken], atol=1e-5, rtol=0)


def test_nothing_to_train_on_makes_no_batch(base):
    assert trainable(base).micro_batches([], 4) == []


def test_the_reference_stays_where_training_started(base):
    policy, rows = trainable(base, with_reference=True), make_rows()
    [batch] = policy.micro_batches(rows, len(rows))
    before = policy.ref_logprobs(batch, 1.0)
    assert torch.equal(before, policy.logprobs(batch, 1.0)[0].detach())
    accumulate(policy, rows, len(rows))
    policy.step(1e-2)
    assert torch.equal(policy.ref_logprobs(batch, 1.0), before)
    assert not torch.equal(policy.logprobs(batch, 1.0)[0], before)
    assert not any(parameter.requires_grad for parameter in policy.reference.parameters())


# Gradients that are not finite


def poison(policy, value):
    accumulate(policy, make_rows(), 5)
    parameter = next(policy.model.parameters())
    parameter.grad[0, 0] = value


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing_and_shows(base, value):
    policy = trainable(base)
    accumulate(policy, make_rows(), 5)
    policy.step(1e-2)
    before = snapshot(policy)
    poison(policy, value)
    result = policy.step(1e-2)
    assert same(snapshot(policy), before)
    assert result["skipped"] == 1 and not math.isfinite(result["grad_norm"])
    assert policy.skipped_steps == policy.skipped_in_a_row == 1


def test_a_loss_that_is_nan_is_a_gradient_that_is_nan(base):
    policy = trainable(base)
    before = snapshot(policy)
    [batch] = policy.micro_batches(make_rows(), 5)
    logprobs, _ = policy.logprobs(batch, 1.0)
    policy.backward(sft_loss(logprobs * float("nan"), batch.weights))
    assert math.isnan(policy.step(1e-2)["grad_norm"])
    assert same(snapshot(policy), before)


def test_a_good_step_after_a_bad_one_is_the_step_it_would_have_been(base):
    unharmed, policy = trainable(base), trainable(base)
    poison(policy, float("nan"))
    policy.step(1e-2)
    for each in (unharmed, policy):
        accumulate(each, make_rows(), 5)
        assert each.step(1e-2)["skipped"] == 0
    assert same(snapshot(policy), snapshot(unharmed))
    assert policy.skipped_in_a_row == 0 and policy.skipped_steps == 1


def test_too_many_bad_steps_in_a_row_end_the_training(base):
    policy = trainable(base, max_nonfinite_steps=3)
    for value in (float("nan"), float("inf")):
        poison(policy, value)
        policy.step(1e-2)
    accumulate(policy, make_rows(), 5)
    policy.step(1e-2)
    for _ in range(2):
        poison(policy, float("nan"))
        policy.step(1e-2)
    policy.check_progress()
    poison(policy, float("nan"))
    policy.step(1e-2)
    with pytest.raises(Diverged, match="3 updates in a row"):
        policy.check_progress()


# Several ranks

# How many of the rows there are: dealt to two ranks they are 3 and 2, 2 and 2, in the end 1 and none.
COUNTS = (5, 4, 1)


def train_in_shares(path, output):
    """Gradients on each of COUNTS, an update, and one with a bad loss on the last rank; written to `output`."""
    policy, rows = trainable(path), make_rows()
    found = {"gradients": [], "weights": []}
    for count in COUNTS:
        accumulate(policy, rows[:count], 2)
        found["gradients"].append([parameter.grad.clone() for parameter in policy.model.parameters()])
        if count != COUNTS[-1]:
            policy.optimizer.zero_grad()
    # Adam magnifies rounding where a gradient is tiny, in proportion to the rate.
    found["grad_norm"] = policy.step(1e-4)["grad_norm"]
    found["weights"].append([parameter.detach().clone() for parameter in policy.model.parameters()])

    [batch] = policy.micro_batches(rows, 5)
    logprobs, _ = policy.logprobs(batch, 1.0)
    bad = float("nan") if policy.rank == policy.world_size - 1 else 1.0
    policy.backward(sft_loss(logprobs * bad, batch.weights))
    policy.step(1e-2)
    found["weights"].append([parameter.detach() for parameter in policy.model.parameters()])
    found |= {
        "rank": (policy.rank, policy.world_size, policy.is_main),
        "skipped": policy.skipped_steps,
        "random": torch.rand(1).item(),
        "sum": policy.sum_over_ranks(policy.rank + 1),
    }
    torch.save(found, Path(output) / f"{policy.rank}.pt")
    policy.save(Path(output) / "saved")


def launch(script, *arguments):
    """Run `script` on two ranks that have only CPUs."""
    paths = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]
    done = subprocess.run(
        [*command, *map(str, arguments)], env=environment, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
def test_two_ranks_with_uneven_shares_train_as_one_process(base, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import sys, test_policy\ntest_policy.train_in_shares(*sys.argv[1:])\n")
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    train_in_shares(base, folders[0])
    launch(script, base, folders[1])
    one = torch.load(folders[0] / "0.pt")
    two = [torch.load(folders[1] / f"{rank}.pt") for rank in range(2)]

    assert [found["rank"] for found in (one, *two)] == [(0, 1, True), (0, 2, True), (1, 2, False)]
    assert [found["sum"] for found in (one, *two)] == [1.0, 3.0, 3.0]
    for a, b in zip([*one["gradients"], one["weights"][0]], [*two[0]["gradients"], two[0]["weights"][0]], strict=True):
        assert any(tensor.any() for tensor in a)
        for tensor, other in zip(a, b, strict=True):
            torch.testing.assert_close(tensor, other, atol=1e-6, rtol=0)
    assert two[0]["grad_norm"] == two[1]["grad_norm"] == pytest.approx(one["grad_norm"], abs=1e-5)
    assert two[0]["random"] != two[1]["random"]
    for found in (one, *two):
        assert found["skipped"] == 1
        assert same(*found["weights"])
    assert same(two[0]["weights"][0], two[1]["weights"][0])
    saved = AutoModelForCausalLM.from_pretrained(folders[1] / "saved")
    assert same([parameter.detach() for parameter in saved.parameters()], two[0]["weights"][0])


# Sampling and saving


def sample(policy, sampling, n=12):
    ids = policy.chat.prompt([{"role": "user", "content": "Where is order A10 ?"}])
    stream = Sequence([Segment(Role.CONTEXT, ids, Evidence.GIVEN)])
    with policy.generating(sampling) as generate:
        [completion] = generate([Request(stream, Role.ACT, frozenset(), n)])
    return completion.ids


def test_the_seed_decides_what_is_sampled(base):
    def sampled(seed):
        return sample(Policy(ModelConfig(path=str(base)), seed=seed), SamplingConfig())

    assert sampled(3) == sampled(3) != sampled(4)


def test_a_rollout_phase_leaves_the_model_as_it_was(base):
    policy = trainable(base)
    for training in (True, False):
        policy.model.train(training)
        with pytest.raises(RuntimeError, match="stop"), policy.generating(SamplingConfig()):
            raise RuntimeError("stop")
        assert policy.model.training is training


def test_a_saved_policy_is_an_ordinary_folder_with_the_weights_it_had(base, tmp_path):
    policy = trainable(base)
    accumulate(policy, make_rows(), 5)
    policy.step(1e-2)
    policy.save(tmp_path / "runs" / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "runs" / "saved")
    assert same([p.detach() for p in loaded.parameters()], [p.detach() for p in policy.model.parameters()])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "runs" / "saved")
    assert tokenizer.get_vocab() == policy.tokenizer.get_vocab()
    assert [file.name for file in (tmp_path / "runs").iterdir()] == ["saved"]


def test_saving_replaces_what_an_interrupted_save_left(base, tmp_path):
    policy = Policy(ModelConfig(path=str(base)))
    for name in ("saved", "saved.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "leftover.txt").write_text("old")
    policy.save(tmp_path / "saved")
    assert not (tmp_path / "saved.partial").exists()
    assert not (tmp_path / "saved" / "leftover.txt").exists()
    assert (tmp_path / "saved" / "model.safetensors").exists()


def test_a_folder_that_is_no_model_is_never_replaced(base, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("{}")
    with pytest.raises(SaveError, match="is no model"):
        Policy(ModelConfig(path=str(base))).save(tmp_path / "run")
    assert (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_result_may_not_replace_what_it_starts_from(tmp_path):
    for name in ("base", "adapter"):
        (tmp_path / name).mkdir()
    config = {"base_model_name_or_path": str(tmp_path / "base")}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    for output in ("base", "adapter", "."):
        with pytest.raises(SaveError, match="would replace"):
            check_output(tmp_path / output, str(tmp_path / "adapter"))
    check_output(tmp_path / "other", str(tmp_path / "adapter"))
    check_output(tmp_path / "base" / "sft", str(tmp_path / "base"))


def test_an_interrupted_save_leaves_the_old_folder_whole(base, tmp_path, monkeypatch):
    policy = Policy(ModelConfig(path=str(base)))
    policy.save(tmp_path / "saved")
    before = {file.name: file.read_bytes() for file in (tmp_path / "saved").iterdir()}

    def fail(*arguments, **settings):
        raise OSError("disk full")

    monkeypatch.setattr(policy.tokenizer, "save_pretrained", fail)
    with pytest.raises(SaveError, match="disk full"):
        policy.save(tmp_path / "saved")
    assert {file.name: file.read_bytes() for file in (tmp_path / "saved").iterdir()} == before


def test_the_generation_settings_of_the_checkpoint_are_kept_and_not_used(base, tmp_path):
    greedy = SamplingConfig(temperature=0.0)
    expected = sample(Policy(ModelConfig(path=str(base))), greedy)
    folder = shutil.copytree(base, tmp_path / "base")
    settings = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [2, 0]}
    settings["suppress_tokens"] = expected[:1]
    (folder / "generation_config.json").write_text(json.dumps(settings))
    policy = Policy(ModelConfig(path=str(folder)))
    assert sample(policy, greedy) == expected
    policy.save(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "generation_config.json").read_text())
    assert saved | settings == saved


# Loading


def refusal(path, error=LoadError, **settings):
    with pytest.raises(error) as caught:
        Policy(ModelConfig(path=str(path), **settings))
    message = str(caught.value)
    assert "\n" not in message and len(message) < 600
    return message


@pytest.mark.parametrize("path", ["/no/such/folder", "runs/no/such/folder", "./nothing", "~/nothing"])
def test_a_missing_folder_is_called_missing(path):
    message = refusal(path)
    assert f"model.path {path!r} is no folder" in message


@pytest.mark.parametrize(
    ("lost", "reason"),
    [
        (["model.safetensors"], "no file named model.safetensors"),
        (["config.json", "model.safetensors"], "Unrecognized model"),
        (["tokenizer.json", "tokenizer_config.json"], "has no tokenizer"),
    ],
)
def test_an_incomplete_folder_is_named_with_what_it_lacks(base, tmp_path, lost, reason):
    folder = shutil.copytree(base, tmp_path / "base")
    for name in lost:
        (folder / name).unlink()
    message = refusal(folder)
    assert str(folder) in message and reason in message


@pytest.mark.parametrize("broken", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_broken_file_is_one_clear_line(base, tmp_path, broken):
    folder = shutil.copytree(base, tmp_path / "base")
    (folder / broken).write_text("{")
    assert f"model.path {str(folder)!r} cannot be loaded" in refusal(folder)


def test_weights_of_another_shape_are_refused(base, tmp_path):
    folder = shutil.copytree(base, tmp_path / "base")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": 64}))
    assert "cannot be loaded" in refusal(folder)


@pytest.fixture
def plain_gpt2(tmp_path):
    """A model and a byte-level tokenizer that know nothing of turns and tools, with a template that uses them."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator([], trainers.BpeTrainer(special_tokens=["<|endoftext|>"], initial_alphabet=alphabet))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|endoftext|>")
    tokenizer.chat_template = CHAT_TEMPLATE
    config = GPT2Config(vocab_size=len(tokenizer), n_embd=16, n_layer=1, n_head=2, n_positions=256)
    config.bos_token_id = config.eos_token_id = tokenizer.eos_token_id
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    tokenizer.save_pretrained(tmp_path / "gpt2")
    return tmp_path / "gpt2"


def test_a_tokenizer_without_the_tokens_is_refused_with_what_to_do(plain_gpt2):
    message = refusal(plain_gpt2, TokenizerError)
    assert all(token in message for token in TURN_TOKENS + TOOL_TOKENS)
    assert "model.add_missing_tokens=true" in message


def test_missing_tokens_are_added_when_asked_for(plain_gpt2, tmp_path):
    policy = Policy(ModelConfig(path=str(plain_gpt2), add_missing_tokens=True))
    for token in TURN_TOKENS + TOOL_TOKENS:
        assert len(policy.tokenizer(token).input_ids) == 1
    assert policy.model.get_input_embeddings().num_embeddings == len(policy.tokenizer)
    assert len(sample(policy, SamplingConfig())) == 12
    policy.save(tmp_path / "saved")
    again = Policy(ModelConfig(path=str(tmp_path / "saved")))
    assert again.chat.turn_end == policy.chat.turn_end


def test_added_embeddings_are_the_same_on_every_rank_and_in_every_run(plain_gpt2):
    config = ModelConfig(path=str(plain_gpt2), add_missing_tokens=True)
    one, two = (Policy(config, seed=5).model.get_input_embeddings().weight for _ in range(2))
    assert torch.equal(one, two)


def test_nothing_is_added_to_a_tokenizer_that_has_the_tokens(base):
    plain, asked = (Policy(ModelConfig(path=str(base), add_missing_tokens=asked)) for asked in (False, True))
    assert asked.tokenizer.get_vocab() == plain.tokenizer.get_vocab()
    assert same([p.detach() for p in asked.model.parameters()], [p.detach() for p in plain.model.parameters()])


def test_code_that_ships_with_a_checkpoint_is_not_run_unless_asked_for(base, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    folder, witness = shutil.copytree(base, tmp_path / "base"), tmp_path / "it ran"
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "shipped", "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text(f"open({str(witness)!r}, 'w')\nraise ValueError('shipped code')\n")
    refusal(folder)
    assert not witness.exists()
    refusal(folder, trust_remote_code=True)
    assert witness.exists()


def test_the_dtype_of_the_config_is_that_of_the_weights(base):
    policy = Policy(ModelConfig(path=str(base), dtype="bfloat16"))
    assert {parameter.dtype for parameter in policy.model.parameters()} == {torch.bfloat16}
