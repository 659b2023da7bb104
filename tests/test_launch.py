"""What the launcher starts: its command line, and the one line it says where nothing can be started."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from envace.config import load_config
from envace.elastic import PORT_IN_USE
from envace.launch import LaunchError, Machines, arguments, environment, processes_per_node

ROOT = Path(__file__).parent.parent
SCRIPT = ["train_rl.py", "--config", "c.yaml", "rl.steps=3"]
SHARDED = "policy.deepspeed=configs/deepspeed/zero3.json"


def settings(*overrides):
    return load_config(None, ["model.path=m", *overrides])


def start(*command, **options):
    # As on a machine without GPUs, also where there are some.
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        [sys.executable, "-m", "envace.launch", *command],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def launch(*command):
    process = start(*command)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


class TestProcesses:
    @pytest.mark.parametrize(
        "overrides, gpus, asked, expected",
        [
            ([], 0, None, 1),
            ([], 1, None, 1),
            ([], 8, None, 8),
            ([], 8, 2, 2),
            ([SHARDED], 1, None, 1),
            ([SHARDED], 8, None, 8),
            ([SHARDED, "policy.cpu=true"], 0, None, 1),
            ([SHARDED, "policy.cpu=true"], 0, 2, 2),
        ],
    )
    def test_one_per_gpu_or_as_many_as_asked_for(self, overrides, gpus, asked, expected):
        assert processes_per_node(settings(*overrides), gpus, asked) == expected

    @pytest.mark.parametrize(
        "overrides, gpus, asked, message",
        [
            ([SHARDED], 0, None, "no NVIDIA GPU found.*policy.deepspeed=configs/deepspeed/zero3.json.*make demo"),
            ([], 0, 2, "no NVIDIA GPU found, 2 asked for"),
            ([], 4, 8, "8 GPUs asked for with --gpus, 4 found"),
        ],
    )
    def test_too_few_gpus(self, overrides, gpus, asked, message):
        with pytest.raises(LaunchError, match=message):
            processes_per_node(settings(*overrides), gpus, asked)


class TestCommandLine:
    def test_one_process_is_the_script_itself(self):
        assert arguments(SCRIPT, 1, Machines(), cores=8) == SCRIPT

    def test_several_gpus_of_one_machine(self):
        command = arguments(SCRIPT, 4, Machines(port=1234), cores=18)
        assert command[:3] == ["-m", "envace.elastic", "--multi_gpu"]
        assert " ".join(command[3:]) == (
            "--num_processes 4 --num_machines 1 --machine_rank 0 --main_process_ip 127.0.0.1 --main_process_port 1234 "
            "--gpu_ids all --mixed_precision no --dynamo_backend no --num_cpu_threads_per_process 4 "
            "train_rl.py --config c.yaml rl.steps=3"
        )

    def test_several_machines_with_one_gpu_each(self):
        command = arguments(SCRIPT, 1, Machines(nodes=2, rank=1, address="10.0.0.1", port=29500), cores=4)
        assert " ".join(command[3:]).startswith(
            "--num_processes 2 --num_machines 2 --machine_rank 1 --main_process_ip 10.0.0.1 --main_process_port 29500"
        )

    def test_accelerate_takes_no_value_from_a_default(self, tmp_path, monkeypatch):
        from accelerate.commands import launch as accelerate

        monkeypatch.setattr(accelerate, "default_config_file", str(tmp_path / "none.yaml"))
        warned = []
        monkeypatch.setattr(accelerate.logger, "warning", warned.append)
        command = arguments(SCRIPT, 2, Machines(), cores=2)
        parsed, _, _ = accelerate._validate_launch_command(accelerate.launch_command_parser().parse_args(command[2:]))
        assert warned == []
        assert (parsed.training_script, parsed.training_script_args) == (SCRIPT[0], SCRIPT[1:])

    def test_the_users_own_accelerate_settings_change_nothing(self, tmp_path, monkeypatch):
        from accelerate.commands import launch as accelerate

        theirs = tmp_path / "default_config.yaml"
        theirs.write_text(
            "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nmixed_precision: bf16\n"
            "num_processes: 7\nnum_machines: 3\nmachine_rank: 2\nmain_process_ip: 9.9.9.9\nmain_process_port: 9\n"
            "gpu_ids: '5,6'\ndeepspeed_config: {zero_stage: 2}\n"
        )
        monkeypatch.setattr(accelerate, "default_config_file", str(theirs))
        monkeypatch.setattr("accelerate.commands.config.config_args.default_config_file", str(theirs))
        command = arguments(SCRIPT, 2, Machines(), cores=2)
        parsed, _, _ = accelerate._validate_launch_command(accelerate.launch_command_parser().parse_args(command[2:]))
        assert parsed.multi_gpu and not parsed.use_deepspeed
        assert (parsed.num_processes, parsed.num_machines, parsed.machine_rank) == (2, 1, 0)
        assert (parsed.main_process_ip, parsed.gpu_ids, parsed.mixed_precision) == ("127.0.0.1", "all", "no")


class TestEnvironment:
    def test_workers_get_time_to_finish_their_step(self):
        assert int(environment(settings(), 2, Machines())["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) >= 600

    def test_a_single_process_needs_ranks_only_for_deepspeed(self):
        assert environment(settings(), 1, Machines()) == {}
        ranks = environment(settings(SHARDED), 1, Machines(port=1234))
        assert (ranks["RANK"], ranks["WORLD_SIZE"], ranks["MASTER_PORT"]) == ("0", "1", "1234")


class TestPortInUse:
    @pytest.mark.parametrize(
        "message",
        [
            "Tried to launch distributed communication on port `29500`, but another process is utilizing it.",
            "The server socket has failed to listen on any local network address. port: 29500, useIpv6: false, "
            "code: -98, name: EADDRINUSE, message: address already in use",
            "[Errno 98] Address already in use",
        ],
    )
    def test_it_is_recognised(self, message):
        assert PORT_IN_USE.search(message)

    @pytest.mark.parametrize("message", ["the transport was closed", "not supported", "could not import NCCL"])
    def test_other_words_are_not(self, message):
        assert not PORT_IN_USE.search(message)


@pytest.mark.slow
class TestWithoutGPU:
    def test_a_sharded_config_is_refused_in_one_line(self):
        code, out, err = launch("train_rl.py", "--config", "configs/qwen3_1.7b.yaml")
        assert (code, out) == (1, "")
        assert err.count("\n") == 1 and "no NVIDIA GPU found" in err and "make demo" in err

    def test_a_mistake_in_the_settings_is_reported_as_by_the_script(self):
        code, out, err = launch("train_rl.py", "--config", "configs/demo.yaml", "rl.lrr=1")
        assert (code, out) == (2, "")
        assert err == "error: unknown key 'rl.lrr' (command line): did you mean rl.lr?\n"

    @pytest.mark.parametrize(
        "options, message",
        [
            (["--nodes", "2"], "--nodes 2 needs --main-address"),
            (["--nodes", "2", "--node-rank", "2", "--main-address", "x"], "--node-rank 2: must be 0 to 1"),
        ],
    )
    def test_machines_that_cannot_find_each_other(self, options, message):
        code, _, err = launch(*options, "train_rl.py", "--config", "configs/demo.yaml")
        assert code == 1 and err.count("\n") == 1 and message in err

    def test_the_script_runs_with_its_own_arguments_and_exit_code(self, tmp_path):
        script = tmp_path / "script.py"
        script.write_text("import sys\nprint(sys.argv[1:])\nsys.exit(7)")
        arguments = ["--config", "configs/demo.yaml", "rl.steps=3"]
        assert launch(str(script), *arguments) == (7, f"{arguments}\n", "")


@pytest.mark.slow
def test_sigterm_reaches_the_workers_and_they_may_take_their_time(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, pathlib, signal, time\n"
        "here, rank = pathlib.Path(__file__).parent, os.environ['RANK']\n"
        "def stop(*_):\n"
        "    time.sleep(3)\n"
        "    (here / f'saved{rank}').touch()\n"
        "    raise SystemExit(0)\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "(here / f'ready{rank}').touch()\n"
        "time.sleep(120)\n"
    )
    process = start("--gpus", "2", str(script), "--config", "configs/demo.yaml", SHARDED, "policy.cpu=true")
    try:
        deadline = time.monotonic() + 90
        while len(list(tmp_path.glob("ready*"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    finally:
        process.kill()
    assert sorted(path.name for path in tmp_path.glob("saved*")) == ["saved0", "saved1"]
    assert process.returncode == 0
