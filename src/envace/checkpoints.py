"""Checkpoints of a training: complete or absent, found again, and asked for by SIGTERM.

<run_dir>/checkpoints/<stage>/step-000030 holds all that the next step depends on: weights, optimizer and random states
(written by `Policy.save_state`), and in rank*.json the position in the data and the counters. The folder gets its name
when it is complete, so a kill at any moment leaves the one before it usable. The learning rate follows from the step.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from envace.config import default_settings, settings_of
from envace.model_folders import base_of
from envace.rules import ENDPOINT_SECTIONS
from envace.settings import Config
from envace.types import Interruption, UserError

# Where a model behind endpoints is and how it is reached, but not which one it is.
REACHED = (
    *("endpoints", "key_env", "concurrency", "timeout", "retries", "cache"),
    *("max_unknown_share", "max_outage_minutes"),
)
# Settings that a resumed run may change: they touch what is trained by rounding at most. Those of the other stage, too.
FREE = (
    *("checkpoint.", "eval.", "rehearsal.", "serve.", "data.eval", "run_dir", "record_tokens"),
    *("policy.logprob_chunk", "policy.gradient_checkpointing"),
    *(f"{section}.{name}" for section in ENDPOINT_SECTIONS for name in REACHED),
)
OTHER_STAGE = {"sft": "rl.", "rl": "sft."}
FIELDS = {"step", "world_size", "settings", "start", "stateful"}
FILES = "files.json"
SHARED = "run_dir must be on a file system that all machines share"
PARTIAL = ".partial"
logger = logging.getLogger("envace")


class CheckpointError(UserError):
    """A checkpoint cannot be written, or does not belong to this run; the message says which and what to do."""


class Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Shards(Protocol):
    """The part of a policy that checkpoints need."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def save_state(self, folder: Path) -> None: ...

    def load_state(self, folder: Path) -> None: ...

    def randomness(self) -> Any: ...

    def restore_randomness(self, states: Any) -> None: ...

    def any_rank(self, flag: bool) -> bool: ...

    def sum_over_ranks(self, value: float) -> float: ...

    def wait(self) -> None: ...


class Checkpoints:
    """A context manager around the loop of one stage. Inside it SIGTERM means: save after this step, then exit 0.

    An Interruption that leaves it undoes the step it came in and saves what was before, so the step is done anew.

    stateful: what has to go on where it stood, besides the policy, by name; each rank keeps its own.
    """

    def __init__(self, policy: Shards, config: Config, stage: str, stateful: Mapping[str, Stateful]):
        self.policy = policy
        self.config = config
        self.root = Path(config.run_dir) / "checkpoints" / stage
        self.free = (*FREE, OTHER_STAGE[stage])
        self.stateful = stateful
        self._asked_to_stop = False
        self._undo = lambda: 0
        self._started_from: dict[str, str] | None = None

    def resume(self) -> int:
        """The step to go on with; 0 for a new run. Raises CheckpointError if the last one does not fit this run."""
        done = self._resume()
        self._remember(done)
        return done

    def _resume(self) -> int:
        folder = latest(self.root)
        found = -1 if folder is None else int(folder.name.removeprefix("step-"))
        if self.policy.any_rank(self.policy.sum_over_ranks(found) != found * self.policy.world_size):
            raise CheckpointError(f"processes find different checkpoints in {self.root}: {SHARED}")
        if not self.config.checkpoint.resume:
            if folder is not None:
                raise CheckpointError(
                    f"{folder} is of an earlier run: set checkpoint.resume=true to go on from it, "
                    f"or another run_dir, or delete {self.root}"
                )
            return 0
        if folder is None:
            logger.info("no checkpoint in %s: starting from the beginning", self.root)
            return 0
        state = self._read(folder)
        self._check(folder, state)
        _check_files(folder)
        if self.policy.any_rank(self.policy.rank == 0 and state["start"] != self._start()):
            differing = {name for name, _ in state["start"].items() ^ self._start().items()}
            raise CheckpointError(
                f"{folder} belongs to a run that started from other files ({', '.join(sorted(differing))}): "
                "restore them, or begin a new run"
            )
        self.policy.load_state(folder)
        for name, item in self.stateful.items():
            item.load_state_dict(state["stateful"][name])
        logger.info("going on after step %d from %s", state["step"], folder)
        return state["step"]

    def after_step(self, step: int, last: int) -> None:
        """Save if it is time, or if SIGTERM came on any rank; then also end the program, with exit code 0."""
        done, every = step + 1, self.config.checkpoint.every
        stop = self.policy.any_rank(self._asked_to_stop) and done < last
        # With one at the end, a finished run that is started again ends at once.
        at_end = done == last and (every > 0 or self.config.checkpoint.resume)
        if stop or at_end or (every > 0 and done % every == 0):
            self.save(done)
        if stop:
            logger.info("SIGTERM: stopped after step %d; go on with checkpoint.resume=true", done)
            raise SystemExit(0)
        self._remember(done)

    def save(self, done: int) -> None:
        """Write the checkpoint of `done` steps; all ranks call it. The old ones stay until it is complete."""
        folder = self._folder(done)
        partial = folder.with_name(folder.name + PARTIAL)
        main = self.policy.rank == 0
        with self._writing(folder):
            if main:
                for unfinished in self.root.glob(f"*{PARTIAL}"):
                    shutil.rmtree(unfinished)
                partial.mkdir(parents=True)
            self.policy.wait()
            self.policy.save_state(partial)
            state = {
                "step": done,
                "world_size": self.policy.world_size,
                "settings": settings_of(self.config),
                "start": self._start() if main else {},
                "stateful": {name: item.state_dict() for name, item in self.stateful.items()},
            }
            (partial / f"rank{self.policy.rank}.json").write_text(json.dumps(state, indent=2), encoding="utf-8")
            self.policy.wait()
            if main:
                self._check_ranks(partial)
                (partial / FILES).write_text(json.dumps(_sizes(partial)), encoding="utf-8")
                publish(partial, folder)
                for old in complete(self.root)[: -self.config.checkpoint.keep]:
                    shutil.rmtree(old)
            self.policy.wait()

    def __enter__(self) -> Checkpoints:
        def ask_to_stop(*_: object) -> None:
            self._asked_to_stop = True

        self._before = signal.signal(signal.SIGTERM, ask_to_stop)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        signal.signal(signal.SIGTERM, self._before)
        if kind is not None and issubclass(kind, Interruption):
            done = self._undo()
            if done > 0 and latest(self.root) != self._folder(done):
                self.save(done)
            logger.info("stopped after step %d; go on with checkpoint.resume=true", done)

    def _remember(self, done: int) -> None:
        """What a step changes before its first update: the position in the data, the counters and what is random."""
        before = {name: item.state_dict() for name, item in self.stateful.items()}
        randomness = self.policy.randomness()

        def undo() -> int:
            for name, item in self.stateful.items():
                item.load_state_dict(before[name])
            self.policy.restore_randomness(randomness)
            return done

        self._undo = undo

    def _folder(self, done: int) -> Path:
        return self.root / f"step-{done:06d}"

    def _start(self) -> dict[str, str]:
        """{setting/file: SHA-256} of what the run started from: weights of every model, DeepSpeed's settings."""
        if self._started_from is None:
            config = self.config
            models = {
                "model.path": config.model.path,
                "model.rehearse_path": config.model.rehearse_path,
                "simulator.path": config.simulator.path,
            }
            models |= {f"base of {name}": base_of(path) for name, path in models.items() if base_of(path) != path}
            deepspeed = config.policy.deepspeed
            files = {f"policy.deepspeed/{Path(deepspeed).name}": Path(deepspeed)} if deepspeed else {}
            for name, folder in models.items():
                weights = Path(folder).glob("*.safetensors") if folder else ()
                files |= {f"{name}/{path.name}": path for path in sorted(weights)}
            self._started_from = {name: _sha256(path) for name, path in files.items()}
        return self._started_from

    def _check_ranks(self, partial: Path) -> None:
        missing = [rank for rank in range(self.policy.world_size) if not (partial / f"rank{rank}.json").exists()]
        if missing:
            raise CheckpointError(f"checkpoint {partial} has nothing of process {missing[0]}: {SHARED}")

    def _read(self, folder: Path) -> dict[str, Any]:
        path = folder / f"rank{self.policy.rank}.json"
        # A checkpoint of fewer ranks has no file for this one; the first rank's says so.
        path = path if path.exists() else folder / "rank0.json"
        try:
            state = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read ({error}); delete {folder} to use an older one") from error
        if not isinstance(state, dict) or not FIELDS <= state.keys():
            raise CheckpointError(f"{path} is no record of a checkpoint; delete {folder} to use an older one")
        return state

    def _check(self, folder: Path, state: dict[str, Any]) -> None:
        if state["world_size"] != self.policy.world_size:
            raise CheckpointError(
                f"{folder} was written by {state['world_size']} processes and this run has {self.policy.world_size}: "
                "start as many, or begin a new run from an exported model"
            )
        ours, theirs = settings_of(self.config), default_settings() | state["settings"]
        differing = {
            key: (theirs.get(key), ours.get(key))
            for key in sorted(ours.keys() | state["settings"].keys())
            if not key.startswith(self.free) and ours.get(key) != theirs.get(key)
        }
        if differing:
            key, (theirs, mine) = next(iter(differing.items()))
            more = f" and {len(differing) - 1} more differ" if len(differing) > 1 else ""
            raise CheckpointError(
                f"{folder} was written with {key}={theirs}, this run has {mine}{more}: "
                "use the same settings, or another run_dir"
            )

    @contextmanager
    def _writing(self, folder: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"checkpoint {folder} cannot be written ({error.strerror or error}); earlier ones are untouched"
            ) from error


def complete(root: Path) -> list[Path]:
    """The checkpoints of a stage, oldest first."""
    return sorted(path for path in root.glob("step-*") if path.is_dir() and not path.suffix)


def latest(root: Path) -> Path | None:
    return next(iter(complete(root)[::-1]), None)


# Models that training leaves behind on its way, to look at how it went; nothing is resumed from them.


def export_folder(run_dir: str | Path, step: int) -> Path:
    """Where the model after `step` steps is exported to. In team per_role REHEARSE's stands beside it, as _rehearse."""
    return Path(run_dir) / "exports" / f"step-{step:06d}"


def exports(run_dir: str | Path) -> dict[int, Path]:
    """{steps: exported model}, in their order."""
    folders = (Path(run_dir) / "exports").glob("step-*")
    steps = (int(f.name.removeprefix("step-")) for f in folders if f.name.removeprefix("step-").isdecimal())
    return {step: export_folder(run_dir, step) for step in sorted(steps)}


def check_exports(config: Config) -> None:
    """Raise CheckpointError if exports of an earlier run would be taken for this run's."""
    found = exports(config.run_dir)
    if found and not config.checkpoint.resume:
        folder = next(iter(found.values()))
        raise CheckpointError(f"{folder} is of an earlier run: use another run_dir, or delete {folder.parent}")


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sizes(folder: Path) -> dict[str, int]:
    """Bytes of every file by its path in `folder`, but for the list itself."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != FILES)
    return {str(path.relative_to(folder)): path.stat().st_size for path in files}


def _check_files(folder: Path) -> None:
    """A sharded checkpoint that lacks a shard would be loaded without it. Raises CheckpointError."""
    advice = f"delete {folder} to use an older one"
    try:
        expected = json.loads((folder / FILES).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / FILES} cannot be read ({error}); {advice}") from error
    found = _sizes(folder)
    for name, size in expected.items():
        if found.get(name) != size:
            state = "is missing" if name not in found else f"has {found[name]} bytes instead of {size}"
            raise CheckpointError(f"{folder / name} {state}; {advice}")


def publish(partial: Path, folder: Path) -> None:
    """Give a complete folder its name. What had that name is moved aside just before, and then deleted."""
    _flush_to_disk(partial)
    replaced = folder.with_name(folder.name + ".replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if folder.exists():
        folder.rename(replaced)
    partial.rename(folder)
    _flush_to_disk(folder.parent, deep=False)
    shutil.rmtree(replaced, ignore_errors=True)


def _flush_to_disk(folder: Path, *, deep: bool = True) -> None:
    """Without it a new name may survive a power cut that the contents do not, or the other way round."""
    for path in [*folder.rglob("*"), folder] if deep else [folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
