"""accelerate's launcher, which ends in one line where a worker failed: the worker itself has said why.

python -m envace.elastic --multi_gpu ... train_rl.py ...     (started by envace.launch)
"""

from __future__ import annotations

import logging
import re
import runpy
import signal
import sys
from typing import Any

LAUNCHER = "accelerate.commands.launch"
# How libraries say it; "transport" and "not supported" are something else.
PORT_IN_USE = re.compile(r"\bport\b|EADDRINUSE|address already in use", re.IGNORECASE)
FAILED = "ChildFailedError"  # what torch's launcher raises, by its name: only envace.policy imports what knows ranks
BY_SIGNAL = {
    signal.SIGKILL: "most likely the machine's memory ran out (`dmesg` says so); see docs/troubleshooting.md",
    signal.SIGABRT: "if NCCL's watchdog did it, another process hung or ended; look at what was printed above",
    signal.SIGSEGV: "a library crashed; `make doctor` checks what is installed",
}


def main() -> None:
    # Its reports of a failed worker are a page long.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        runpy.run_module(LAUNCHER, run_name="__main__", alter_sys=True)
    except Exception as raised:
        error: Any = raised
        if "--debug" in sys.argv:
            raise
        if type(error).__name__ == FAILED:
            # Those that SIGTERM ended were ended because another one had failed.
            codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
            causes = {rank: code for rank, code in codes.items() if code != -signal.SIGTERM} or codes
            rank, code = min(causes.items())
            sys.exit(code if code > 0 else f"error: {ended_by(rank, -code)}")
        if PORT_IN_USE.search(str(error)) and isinstance(error, ConnectionError | RuntimeError):
            sys.exit("error: the port of the processes is in use: end what uses it, or take another with --main-port")
        raise


def ended_by(rank: int, number: int) -> str:
    said = BY_SIGNAL.get(signal.Signals(number), "something outside ended it")
    return f"process {rank} was ended by {signal.Signals(number).name}: {said}; go on with checkpoint.resume=true"


if __name__ == "__main__":
    main()
