"""A benchmark from start to end: serve the model, run the harness a number of times, write results.json.

    evaluate.py benchmark=bfcl model.path=FOLDER bench.trials=4
    evaluate.py benchmark=tau2 serve.backend=http://host:8000/v1 serve.backend_model=NAME model.path= ...

Each trial has a folder, a server and a seed of its own. One that is done is not run again; one that was interrupted
goes on with the tasks that its harness has not recorded.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from envace.benchmarks.benchmark import Benchmark, Outcome, Trial
from envace.benchmarks.bfcl import BFCL
from envace.benchmarks.finmcp import FinMCP
from envace.benchmarks.served import serving
from envace.benchmarks.tau2 import Tau2
from envace.benchmarks.vita import Vita
from envace.config import settings_of, versions
from envace.interrupts import sigterm_interrupts
from envace.metrics import pass_hat_k, t_interval
from envace.records import is_done, read_record, write_record
from envace.settings import Config
from envace.types import UserError, content_hash

logger = logging.getLogger("envace")

BENCHMARKS: dict[str, Benchmark] = {benchmark.name: benchmark for benchmark in (BFCL(), Tau2(), Vita(), FinMCP())}
# What says where and how fast, but not what is measured.
UNCOMPARED = ("run_dir", "bench.home", "bench.concurrency", "bench.trials", "bench.retries", "serve.timeout")
WEIGHTS = ("*.safetensors", "*.bin")


def evaluate_benchmark(config: Config) -> dict[str, Any]:
    """Every trial, then <run_dir>/results.json, which is also returned. Raises UserError."""
    benchmark = BENCHMARKS[config.benchmark]
    parts = chosen_parts(benchmark, config.bench.parts)
    harness = {"name": benchmark.name, "version": benchmark.version(Path(config.bench.home))}
    model = described_model(config)  # before the trials: these weights are what they are made with
    root = Path(config.run_dir) / benchmark.name
    root.mkdir(parents=True, exist_ok=True)
    try:
        with alone_in(root), sigterm_interrupts():
            trials = [run_trial(benchmark, config, parts, model, root, k) for k in range(config.bench.trials)]
    except KeyboardInterrupt:
        raise UserError("interrupted: the same command goes on where it was") from None
    results = {
        "benchmark": benchmark.name,
        "harness": harness,
        "versions": versions(),
        "model": model,
        "rehearsal": asdict(config.rehearsal),
        "sampling": asdict(config.eval.sampling),
        "user": described_partner(config.bench.user.url, config.bench.user.model),
        "judge": described_partner(config.bench.judge.url, config.bench.judge.model),
        "tasks_per_part": config.bench.tasks or "all",
        "trials": trials,
        "scores": over_trials(trials),
        "pass_hat": pass_hats(trials),
    }
    write_record(root / "results.json", {"run": settings_of(config)}, **results)
    logger.info("results: %s", root / "results.json")
    return results


def chosen_parts(benchmark: Benchmark, wanted: Iterable[str]) -> tuple[str, ...]:
    if unknown := [part for part in wanted if part not in benchmark.parts]:
        raise UserError(f"bench.parts: {benchmark.name} has no {unknown[0]!r}; it has {', '.join(benchmark.parts)}")
    return tuple(dict.fromkeys(wanted)) or benchmark.default_parts


@contextmanager
def alone_in(root: Path) -> Iterator[None]:
    """Two runs that write into the same folder would mix what they write. Raises UserError if there is another one."""
    with (root / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{root}: another run is at work there; wait for it, or set another run_dir") from None
        yield


def run_trial(
    benchmark: Benchmark, config: Config, parts: tuple[str, ...], model: dict[str, Any], root: Path, number: int
) -> dict[str, Any]:
    """One trial's record. Trial k is given seed + k, which not every harness sends on.

    model: see `described_model`; one that was retrained in place is another one.
    """
    config = replace(config, seed=config.seed + number)
    folder = root / f"trial{number}"
    record = folder / "trial.json"
    settings = {key: value for key, value in settings_of(config).items() if key not in UNCOMPARED}
    harness = benchmark.version(Path(config.bench.home))
    settings = {"trial": settings | {"bench.parts": list(parts), "harness": harness, "weights": content_hash(model)}}
    if is_done(record, settings):
        logger.info("trial %d: done before", number)
        return read_record(record)
    folder.mkdir(parents=True, exist_ok=True)
    begun = folder / "begun.json"  # so that what a harness goes on with was made with these settings too
    if not is_done(begun, settings):
        write_record(begun, settings)
    started = time.monotonic()
    with serving(config, folder, benchmark.served_as, benchmark.tools(Path(config.bench.home))) as served:
        trial = Trial(folder.resolve(), f"{served.url}/v1", served.model, config.seed, config)
        outcome = benchmark.run(trial, parts)
        tokens = served.tokens()
    seconds = time.monotonic() - started
    write_record(record, settings, number=number, seed=config.seed, seconds=seconds, tokens=tokens, **asdict(outcome))
    for name, score in scores_of(outcome).items():
        logger.info("trial %d: %s %.2f", number, name, score)
    return read_record(record)


def scores_of(outcome: Outcome) -> dict[str, float]:
    scored = {name: part.score for name, part in outcome.parts.items() if part.score is not None}
    return scored | outcome.overall


def over_trials(trials: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By part and aggregate: mean and 95 % interval over trials, by Student's t, and how many trials have it."""
    by_name: dict[str, list[float]] = {}
    for trial in trials:
        scored = {name: part["score"] for name, part in trial["parts"].items() if part["score"] is not None}
        for name, score in (scored | trial["overall"]).items():
            by_name.setdefault(name, []).append(score)
    return {
        name: {"mean": sum(values) / len(values), "interval": t_interval(values), "trials": len(values)}
        for name, values in by_name.items()
    }


def pass_hats(trials: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """By part and k: pass^k over trials, of parts that say what each task was rewarded with."""
    by_part: dict[str, dict[str, list[float]]] = {}
    for trial in trials:
        for name, part in trial["parts"].items():
            for task, reward in part["details"].get("rewards", {}).items():
                by_part.setdefault(name, {}).setdefault(task, []).append(reward)
    most = {name: max(map(len, rewards.values())) for name, rewards in by_part.items()}
    return {
        name: {str(k): 100 * pass_hat_k(rewards, k) for k in range(1, most[name] + 1)}
        for name, rewards in by_part.items()
    }


def described_model(config: Config) -> dict[str, Any]:
    """Which weights: the SHA-256 of a local checkpoint's files, or the name at a server, whose weights are its own."""
    if config.serve.backend:
        return {"backend": config.serve.backend, "name": config.serve.backend_model}
    folder = Path(config.model.path)
    files = sorted({file for pattern in WEIGHTS for file in folder.glob(pattern)})
    hashes = {file.name: _sha256(file) for file in files}
    return {"path": config.model.path, "name": folder.name, "sha256": hashes}


def described_partner(url: str, model: str) -> dict[str, str] | None:
    return {"url": url, "model": model} if url else None


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
