"""What libraries and the system say when memory, disk or another process fails: one line, cause and remedy."""

import errno
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from envace.batching import Row
from envace.config import schema
from envace.console import command
from envace.demo.demonstrations import make_demonstrations
from envace.demo.desk import CallCounter
from envace.demo.model import build_model
from envace.elastic import ended_by
from envace.failures import KNOBS, OutOfMemory, explained, in_memory
from envace.policy import LoadError, Policy
from envace.serve.__main__ import bound
from envace.settings import LoraConfig, ModelConfig, PolicyConfig, SamplingConfig
from envace.types import Evidence, Request, Role, Segment, Sequence, UserError

ROOT = Path(__file__).parent.parent
ON_GPU = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.15 GiB of which 3 GiB is free."
)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    path = tmp_path_factory.mktemp("failures") / "base"
    recorded = make_demonstrations(64, 0, CallCounter())
    build_model(path, [(task.tools, messages) for task, messages in recorded], seed=0, hidden=32, layers=1)
    return path


def allocate(*_, **__):
    """More than any machine has: torch's own error of the CPU."""
    return torch.empty(1 << 50, dtype=torch.uint8)


def raise_on_gpu(*_, **__):
    raise ON_GPU


# Memory


@pytest.mark.parametrize("fail", [allocate, raise_on_gpu])
def test_a_rollout_that_does_not_fit_names_its_knobs(base, monkeypatch, fail):
    policy = Policy(ModelConfig(path=str(base)))
    monkeypatch.setattr(type(policy.model), "forward", fail)
    prompt = Sequence([Segment(Role.CONTEXT, [5, 6, 7], Evidence.GIVEN)])
    with pytest.raises(OutOfMemory) as caught, policy.generating(SamplingConfig()) as generate:
        generate([Request(prompt, Role.ACT, frozenset(), 4)])
    assert "out of memory in a rollout (" in one_line(caught) and "lower rollout.batch_size" in one_line(caught)


@pytest.mark.parametrize("fail", [allocate, raise_on_gpu])
def test_an_update_that_does_not_fit_names_its_knobs(base, monkeypatch, fail):
    policy = Policy(ModelConfig(path=str(base)))
    settings = {"lr": 1e-3, "weight_decay": 0.0, "grad_clip": 1.0, "max_nonfinite_steps": 3, "with_reference": False}
    policy.prepare_training(**settings)
    [batch] = policy.micro_batches([Row([5, 6, 7], [1] * 3, [1.0] * 3, [0.0] * 3)], 1)
    monkeypatch.setattr(type(policy.scorer), "forward", fail)
    with pytest.raises(OutOfMemory) as caught:
        policy.logprobs(batch, 1.0)
    assert "out of memory in an update (" in one_line(caught) and "lower rl.micro_batch_size" in one_line(caught)


@pytest.mark.parametrize("fail", [allocate, raise_on_gpu])
def test_a_model_that_does_not_fit_names_its_knobs(base, monkeypatch, fail):
    monkeypatch.setattr("envace.policy.AutoModelForCausalLM.from_pretrained", fail)
    with pytest.raises(OutOfMemory) as caught:
        Policy(ModelConfig(path=str(base)))
    assert "out of memory while the model was loaded (" in one_line(caught)
    assert "model.dtype=bfloat16" in one_line(caught)


def one_line(caught):
    message = str(caught.value)
    assert "\n" not in message and len(message) < 600
    return message


def test_other_errors_stay_what_they_are():
    for error in (RuntimeError("shapes do not fit"), ValueError("no"), RuntimeError("Connection reset by peer")):
        with pytest.raises(type(error)) as caught, in_memory("update"):
            raise error
        assert caught.value is error and explained(error) is None


def test_memory_that_ends_elsewhere_is_one_line_too():
    try:
        allocate()
    except RuntimeError as error:
        said = explained(error)
    assert said.startswith("out of memory (DefaultCPUAllocator: can't allocate memory: you tried to allocate 11258999")
    assert explained(ON_GPU).startswith("out of memory (CUDA out of memory. Tried to allocate 20.00 GiB): `make ")


@pytest.mark.parametrize("phase", KNOBS)
def test_the_knobs_exist(phase):
    keys = re.findall(r"\b(?:rl|sft|policy|rollout|model)(?:\.[a-z_]+)+", KNOBS[phase])
    assert len(keys) >= 2 and set(keys) <= schema().keys()
    for file in re.findall(r"configs/\S+json", KNOBS[phase]):
        assert (ROOT / file).is_file()


# Disk


@pytest.mark.parametrize(
    "number, what, remedy",
    [
        (errno.ENOSPC, "write", "free some space"),
        (errno.EROFS, "write", "a folder that you may write to"),
        (errno.EACCES, "read or write", "allow it, or set run_dir to a folder that you may write to"),
    ],
)
def test_what_the_system_refuses_is_one_line_with_a_remedy(capsys, quiet_options, number, what, remedy):
    with pytest.raises(SystemExit) as ended, command(quiet_options):
        raise OSError(number, os.strerror(number), "runs/x/evaluation.json")
    said = capsys.readouterr().err
    assert ended.value.code == 1 and said.count("\n") == 1
    assert said.startswith(f"error: cannot {what} runs/x/evaluation.json: {os.strerror(number)}: ") and remedy in said


def test_a_file_that_the_program_expects_is_no_mistake_of_the_user():
    assert explained(FileNotFoundError(errno.ENOENT, "No such file or directory", "x")) is None


@pytest.fixture
def quiet_options():
    from argparse import Namespace

    return Namespace(quiet=True, debug=False)


def test_a_port_in_use_says_so():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(UserError) as caught:
            bound("127.0.0.1", port)
    assert one_line(caught) == (
        f"serve.host=127.0.0.1 serve.port={port}: Address already in use: take another port, or end what uses this one"
    )


# Models and devices


def test_flash_attention_where_there_is_none_says_what_to_set(base, monkeypatch):
    monkeypatch.setattr("envace.policy._has_flash_attention", lambda: False)
    with pytest.raises(LoadError, match="flash-attn: install it, or set model.attn_implementation=sdpa"):
        Policy(ModelConfig(path=str(base), attn_implementation="flash_attention_2"))


def test_bfloat16_on_a_gpu_that_has_none_says_what_to_set(base, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: False)
    from envace import policy

    with pytest.raises(LoadError, match="this GPU does not compute in bfloat16: set model.dtype=float32"):
        policy._load(ModelConfig(path=str(base), dtype="bfloat16"))


def test_a_lora_target_that_matches_nothing_names_what_there_is(base):
    sharding = PolicyConfig(lora=LoraConfig(r=4, targets=["query"]))
    with pytest.raises(LoadError) as caught:
        Policy(ModelConfig(path=str(base)), sharding, training=True)
    assert one_line(caught).startswith("policy.lora.targets=['query']: ")
    assert "This model has down_proj, gate_proj, k_proj" in one_line(caught)


def test_a_hub_model_without_the_network_says_so(monkeypatch):
    def offline(*_, **__):
        raise OSError("We couldn't connect to 'https://huggingface.co' to load the files.\nCheck your connection")

    monkeypatch.setattr("envace.policy.AutoTokenizer.from_pretrained", offline)
    with pytest.raises(LoadError) as caught:
        Policy(ModelConfig(path="owner/name"))
    assert "so the Hugging Face hub was asked: check the name and the network" in one_line(caught)


# Other processes

PAIR = """
import os, signal, sys, time
from datetime import timedelta
from envace import policy
from envace.console import run

policy.PATIENCE = timedelta(seconds=4)

def main(config):
    accelerator = policy._accelerator(config.model, config.policy)
    accelerator.wait_for_everyone()
    if accelerator.process_index == 1:
        {second}
    accelerator.wait_for_everyone()

run(main, "a pair")
"""


def pair(folder, second, *more):
    """Two processes on the CPU, of which the second one does something. Returns exit code and lines of stderr."""
    script = folder / "pair.py"
    script.write_text(PAIR.format(second=second))
    arguments = ["--gpus", "2", str(script), "model.path=x", "policy.cpu=true", *more]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    env["PYTHONPATH"] = str(ROOT / "src")
    ended = subprocess.run(
        [sys.executable, "-m", "envace.launch", *arguments], cwd=ROOT, env=env, capture_output=True, text=True
    )
    return ended.returncode, ended.stderr.splitlines()


@pytest.mark.slow
def test_a_rank_that_hangs_is_one_line_for_those_who_wait(tmp_path):
    code, lines = pair(tmp_path, "time.sleep(100)")
    assert code == 1
    assert [line.partition(" (")[0] for line in lines] == ["error: another process did not answer"]
    assert lines[0].endswith("start all of them again, with checkpoint.resume=true")


@pytest.mark.slow
def test_a_rank_that_is_killed_is_one_line_with_the_signal(tmp_path):
    code, lines = pair(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)")
    assert code == 1 and not [line for line in lines if "Traceback" in line]
    ends = [line for line in lines if line.startswith("error: process 1 was ended by SIGKILL: most likely")]
    assert len(ends) == 1 or lines == [], lines


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT, signal.SIGSEGV, signal.SIGHUP])
def test_a_signal_is_named_and_what_it_means(number):
    said = ended_by(3, number)
    assert said.startswith(f"process 3 was ended by {signal.Signals(number).name}: ") and "\n" not in said
