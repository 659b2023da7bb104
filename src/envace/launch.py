"""Start a training script on every GPU that it is given.

    python -m envace.launch [--gpus N] [--nodes M --node-rank R --main-address IP] train_rl.py --config ... [key=value]

One process runs the script itself; several are started by accelerate, one per GPU. Whether and how the model is sharded
is the config's business (policy.deepspeed): the script sets DeepSpeed up, the launcher only says who is which rank. On
several machines, run the same command on each with its own --node-rank.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass

import psutil
import torch

from envace.config import load_config, settings_parser
from envace.console import add_options, command
from envace.settings import Config
from envace.types import UserError

# Where a scheduler sends SIGTERM to every process, torch's own launcher would kill the workers this many seconds later;
# by default 30. A training first finishes its step, which may take minutes, and then saves a checkpoint.
SHUTDOWN_SECONDS = 1800
MAIN_PORT = 29500


class LaunchError(UserError):
    """The script cannot be started as asked, said in one line."""


@dataclass(frozen=True)
class Machines:
    """nodes: how many. rank: which one this is. address, port: where rank 0 of all processes listens."""

    nodes: int = 1
    rank: int = 0
    address: str = "127.0.0.1"
    port: int = MAIN_PORT


def main() -> None:
    options = _parse(sys.argv[1:])
    # From here on the command line is the script's, mistakes and --help included.
    sys.argv = [options.script, *options.arguments]
    parser = settings_parser(f"{options.script}, started by envace.launch on every GPU")
    add_options(parser)
    of_script, unknown = parser.parse_known_intermixed_args()
    with command(of_script):
        config = load_config(of_script.config, of_script.overrides + unknown)
        processes = processes_per_node(config, torch.cuda.device_count(), options.gpus)
        machines = _machines(options)
    started = [sys.executable, *arguments(sys.argv, processes, machines, os.cpu_count() or 1)]
    variables = os.environ | environment(config, processes, machines)
    if processes * machines.nodes == 1:
        os.execve(sys.executable, started, variables)
    sys.exit(run_workers(started, variables))


def run_workers(command: list[str], variables: dict[str, str]) -> int:
    """Run a launcher of several workers; returns its exit code.

    SIGTERM goes to the workers alone: they save and end with exit code 0, and then the launcher does. Given to the
    launcher it would end in a traceback and exit code 1.
    """
    launcher: subprocess.Popen[bytes] | None = None

    def pass_on(*_: object) -> None:
        if launcher is None:
            sys.exit(128 + signal.SIGTERM)
        with suppress(psutil.NoSuchProcess):  # it may just have ended
            parent = psutil.Process(launcher.pid)
            for process in parent.children() or [parent]:
                process.terminate()

    signal.signal(signal.SIGTERM, pass_on)
    signal.signal(signal.SIGHUP, pass_on)  # the terminal was closed
    # In a session of its own no signal to this process group reaches it by another way; interrupts are passed on, too.
    launcher = subprocess.Popen(command, env=variables, start_new_session=True)
    signal.signal(signal.SIGINT, lambda *_: launcher.send_signal(signal.SIGINT))
    return launcher.wait()


def processes_per_node(config: Config, gpus: int, asked: int | None) -> int:
    """One per GPU, or fewer if asked for. Without a GPU one, or on the CPU as many as asked for.

    Raises LaunchError when there are too few GPUs.
    """
    if gpus == 0:
        if config.policy.deepspeed and not config.policy.cpu:
            raise LaunchError(
                "no NVIDIA GPU found, and this config shards the model over GPUs with DeepSpeed (policy.deepspeed="
                f"{config.policy.deepspeed}): run it where there is one; `make demo` needs none"
            )
        if asked and not config.policy.cpu:
            raise LaunchError(f"no NVIDIA GPU found, {asked} asked for with --gpus: leave it out to run on the CPU")
    elif asked and asked > gpus:
        raise LaunchError(f"{asked} GPUs asked for with --gpus, {gpus} found")
    return asked or max(gpus, 1)


def arguments(script: list[str], processes: int, machines: Machines, cores: int) -> list[str]:
    """What follows the interpreter on the command line. script: the script and its own arguments.

    Every value that accelerate would otherwise take from a default, with a warning, or from the user's own accelerate
    settings is given. DeepSpeed is not: the script makes its own plugin.
    """
    if processes * machines.nodes == 1:
        return script
    return [
        *["-m", "envace.elastic", "--multi_gpu"],
        *["--num_processes", str(processes * machines.nodes)],
        *["--num_machines", str(machines.nodes)],
        *["--machine_rank", str(machines.rank)],
        *["--main_process_ip", machines.address],
        *["--main_process_port", str(machines.port)],
        *["--gpu_ids", "all"],
        *["--mixed_precision", "no"],
        *["--dynamo_backend", "no"],
        # An optimizer that is offloaded to the CPU is worth threads.
        *["--num_cpu_threads_per_process", str(max(1, cores // processes))],
        *script,
    ]


def environment(config: Config, processes: int, machines: Machines) -> dict[str, str]:
    """Variables that the child needs besides those of this process."""
    if processes * machines.nodes > 1:
        return {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SHUTDOWN_SECONDS)}
    if not config.policy.deepspeed:
        return {}
    # DeepSpeed wants to know the ranks even of one process. `accelerate launch` would not say, and would not pass
    # SIGTERM on either.
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    return ranks | {"MASTER_ADDR": machines.address, "MASTER_PORT": str(machines.port)}


def _machines(options: argparse.Namespace) -> Machines:
    if options.nodes == 1:
        if options.node_rank or options.main_address:
            raise LaunchError("--node-rank and --main-address are for several machines: say how many with --nodes")
        return Machines(port=options.main_port or _free_port())
    if not options.main_address:
        raise LaunchError(
            f"--nodes {options.nodes} needs --main-address, the address of the machine with --node-rank 0"
        )
    if not 0 <= options.node_rank < options.nodes:
        raise LaunchError(
            f"--node-rank {options.node_rank}: must be 0 to {options.nodes - 1} with --nodes {options.nodes}"
        )
    return Machines(options.nodes, options.node_rank, options.main_address, options.main_port or MAIN_PORT)


def _free_port() -> int:
    """So that two trainings on one machine do not meet."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m envace.launch", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("--gpus", type=_count, metavar="N", help="GPUs to use on each machine (default: all)")
    parser.add_argument("--nodes", type=_count, default=1, metavar="M", help="machines (default 1)")
    parser.add_argument(
        "--node-rank", type=int, default=0, metavar="R", help="which of them this is, from 0 (default 0)"
    )
    parser.add_argument("--main-address", metavar="IP", help="address of the machine with --node-rank 0")
    parser.add_argument(
        "--main-port", type=_count, metavar="PORT", help=f"a free one, or {MAIN_PORT} on several machines"
    )
    parser.add_argument("script", help="train_sft.py or train_rl.py")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="of the script")
    return parser.parse_args(argv)


def _count(text: str) -> int:
    if int(text) < 1:
        raise ValueError
    return int(text)


if __name__ == "__main__":
    main()
