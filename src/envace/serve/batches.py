"""One thread owns the models; what waits together and samples alike is generated in one batch.

Batch by batch: what arrives meanwhile waits for the next one. The oldest job is always in the next batch, so none
starves whatever the others ask for.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from envace.episodes import drive, gather
from envace.settings import SamplingConfig
from envace.team import Team
from envace.types import Result, Steps

WINDOW = 0.01  # seconds that the oldest job waits for others to arrive


@dataclass(frozen=True)
class Kind:
    """What jobs of one batch have in common. A job with a seed is alone in its batch, so that it can be repeated."""

    team: Team
    sampling: SamplingConfig
    seed: int | None = None


@dataclass(eq=False)
class _Job:
    """rows: sequences that it generates at once."""

    kind: Kind
    steps: Steps[Any]
    rows: int
    future: Future[Any] = field(default_factory=Future)


class _Abandoned(Exception):
    """Nobody waits for the batch any longer."""


class BatchWorker:
    """max_rows: most sequences in one batch; a job with more has one of its own.

    on_batch: called in the thread before each batch with the number of its jobs.
    """

    def __init__(self, max_rows: int, on_batch: Callable[[int], object] = lambda n: None):
        self.max_rows = max_rows
        self.on_batch = on_batch
        self._waiting: list[_Job] = []
        self._running: list[_Job] = []
        self._changed = threading.Condition()
        self._is_closed = False
        # A daemon, so that a server that fails to start does not hang.
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)
        self._thread.start()

    async def run(self, kind: Kind, steps: Steps[Result], rows: int = 1) -> Result:
        """What `steps` come to. Cancelled, they are not begun, or not gone on with."""
        job = _Job(kind, steps, rows)
        with self._changed:
            self._waiting.append(job)
            self._changed.notify()
        return await asyncio.wrap_future(job.future)

    async def close(self) -> None:
        """Give up everything and end the thread."""
        with self._changed:
            self._is_closed = True
            for job in self._waiting + self._running:
                job.future.cancel()
            self._changed.notify()
        await asyncio.to_thread(self._thread.join)

    # From here on everything runs in the thread.

    def _run(self) -> None:
        while self._next_batch():
            self.on_batch(len(self._running))
            self._generate(self._running)

    def _next_batch(self) -> bool:
        """Wait for jobs and choose those that run next; whether there are any."""
        with self._changed:
            self._running = []
            while not self._is_closed and not self._running:
                self._changed.wait_for(lambda: self._is_closed or self._waiting)
                self._changed.wait_for(lambda: self._is_closed, timeout=WINDOW)
                self._waiting = [job for job in self._waiting if not job.future.cancelled()]
                self._running = self._choose()
                self._waiting = [job for job in self._waiting if job not in self._running]
            return bool(self._running) and not self._is_closed

    def _choose(self) -> list[_Job]:
        """The oldest job and, in order, those like it for which there is room."""
        chosen = self._waiting[:1]
        for job in self._waiting[1:]:
            if job.kind == chosen[0].kind and job.kind.seed is None:
                if sum(j.rows for j in chosen) + job.rows > self.max_rows:
                    break
                chosen.append(job)
        return chosen

    def _generate(self, batch: list[_Job]) -> None:
        kind = batch[0].kind
        try:
            with ExitStack() as stack:
                if kind.seed is not None:
                    stack.enter_context(kind.team.lead.own_randomness())
                    torch.manual_seed(kind.seed)
                stack.enter_context(_stopping_when_abandoned(kind.team, batch))
                generate = stack.enter_context(kind.team.generating(kind.sampling))
                drive(gather([_work(job) for job in batch]), generate)
        except _Abandoned:
            pass
        except Exception as error:  # whatever it is, those who wait must hear of it, and the next batch may do better
            for job in batch:
                _settle(job.future, error=error)


def _work(job: _Job) -> Steps[None]:
    """The job's steps until it is cancelled; what they come to is handed over at once. It never raises."""
    completions = None
    while not job.future.cancelled():
        try:
            requests = job.steps.send(completions)
        except StopIteration as stop:
            _settle(job.future, stop.value)
            return
        except Exception as error:  # of one job: the others of the batch go on
            _settle(job.future, error=error)
            return
        completions = yield requests
    job.steps.close()


def _settle(future: Future[Any], result: Any = None, error: Exception | None = None) -> None:
    with suppress(InvalidStateError):  # cancelled, or settled before the batch failed
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)


@contextmanager
def _stopping_when_abandoned(team: Team, batch: list[_Job]) -> Iterator[None]:
    """Raises _Abandoned before the next forward pass once every job of the batch is cancelled."""

    def check(*_: object) -> None:
        if all(job.future.cancelled() for job in batch):
            raise _Abandoned

    models = {policy.model for policy in team.writers.values()}
    handles = [model.register_forward_pre_hook(check) for model in models]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
