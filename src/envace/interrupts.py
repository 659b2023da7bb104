"""SIGTERM, by which `kill` and batch systems ask for an end: taken as Ctrl-C is, and passed on."""

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Inside, SIGTERM raises KeyboardInterrupt; after it, what stood before stands again. Main thread only."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def end(process: subprocess.Popen[Any], patience: float) -> None:
    """Ask a process to end; one that has not after `patience` seconds is killed. A harness waits for its requests."""
    process.terminate()
    try:
        process.wait(patience)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    except BaseException:  # a second Ctrl-C has no patience
        process.kill()
        process.wait()
        raise
