"""Everything a run leaves behind: settings, metrics, trajectories and what the console shows.

    run_dir/<name>.config.yaml      every setting, resolved
    run_dir/<name>.versions.json    versions of Python and the libraries
    run_dir/metrics.jsonl           {"stage", "step", "time", <metric>: number, ...}, one line a step
    run_dir/trajectories.jsonl      one trajectory a line; see `trajectory_record`
    run_dir/tensorboard/<name>      the same metrics, the settings and some trajectories for TensorBoard

A stage that runs again in the same folder replaces its own earlier lines, and says so. JSON has no NaN: such numbers
are written as the strings "NaN", "Infinity" and "-Infinity", which `float` reads back.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor
from tqdm import tqdm

from envace.board import Board
from envace.config import save_config, settings_of, versions
from envace.console import one_line, progress
from envace.failures import failed
from envace.settings import Config
from envace.types import Role, Trajectory, UserError, first_line

logger = logging.getLogger("envace")


class TrackingError(UserError):
    """A file of the run cannot be written, or is damaged; the message names it and says why."""


class Tracker:
    """Writes one stage of a run. A context manager: leaving it closes the files.

    name: of the stage, such as "sft" or "rl"; it marks each line and names the files.
    total_steps: how many steps the stage has, for the console.
    headline: {label: metric} of what the console shows, where a step has it. None of them: no line.
    decode: token ids -> text, special tokens kept. None: trajectories are written without text.
    first_step: what an earlier run recorded from this step on is replaced; a resumed run keeps what came before.
    enabled: False turns every method into one that does nothing (all ranks but the first).
    Every method raises TrackingError when a file cannot be written.
    """

    def __init__(
        self,
        run_dir: str | Path,
        config: Config,
        *,
        name: str,
        total_steps: int,
        headline: Mapping[str, str] = MappingProxyType({}),
        decode: Callable[[list[int]], str] | None = None,
        enabled: bool = True,
        first_step: int = 0,
    ):
        self.run_dir = Path(run_dir)
        self.name = name
        self.total_steps = total_steps
        self.headline = headline
        self.first_step = first_step
        self._started = time.monotonic()
        self.decode = decode
        self.record_tokens = config.record_tokens
        self.enabled = enabled
        if not enabled:
            return
        with _writing(self.run_dir):
            self._remove_records(first_step)
            save_config(config, self.run_dir / f"{name}.config.yaml")
            (self.run_dir / f"{name}.versions.json").write_text(json.dumps(versions(), indent=2) + "\n")
            board = self.run_dir / "tensorboard" / name
            self._board = Board(board, settings_of(config), tuple(self.headline.values()), first_step)

    def log(self, step: int, metrics: Mapping[str, float | Tensor]) -> None:
        """Record the metrics of a step: finite numbers or not, scalar tensors too. Steps count from 0."""
        if not self.enabled:
            return
        values = {key: float(value) for key, value in metrics.items()}
        self._append("metrics.jsonl", [{"stage": self.name, "step": step, "time": round(time.time(), 3), **values}])
        with _writing(self.run_dir / "tensorboard"):
            self._board.scalars(step, values)
        if shown := [f"{label} {values[key]:.4g}" for label, key in self.headline.items() if key in values]:
            logger.info(one_line([f"{self.name} {step + 1}/{self.total_steps}", *self._remaining(step), *shown]))

    def trajectories(
        self,
        step: int,
        split: str,
        trajectories: list[Trajectory],
        limit: int | None = None,
        advantages: Tensor | None = None,
        updated_logprobs: list[list[float]] | None = None,
        executions: list[int] | None = None,
    ) -> None:
        """Append trajectories, only the first `limit` if given. split: such as "train" or "eval-real".

        The first `record_tokens` have every token of the policy with its logprob.
        advantages: (N,), one entry for each output in the order of `for t in trajectories for output in t.outputs()`.
        updated_logprobs: of those that have tokens, in the same order; see `Team.output_logprobs`.
        executions: for each trajectory; a private rehearsal and the execution that it prepared have the same number.
        """
        if not self.enabled:
            return
        where = {"stage": self.name, "step": step, "split": split}
        remaining = None if advantages is None else iter(advantages.tolist())
        updated = None if updated_logprobs is None else iter(updated_logprobs)
        records = [
            where
            | ({} if executions is None else {"execution": executions[number]})
            | trajectory_record(
                t,
                self.decode,
                advantages=remaining,
                updated_logprobs=updated,
                with_tokens=number < self.record_tokens,
            )
            for number, t in enumerate(trajectories[:limit])
        ]
        self._append("trajectories.jsonl", records)
        if self.decode is not None:
            with _writing(self.run_dir / "tensorboard"):
                self._board.texts(step, split, records)

    def progress(self, work: Collection[Any] | int, label: str) -> tqdm[Any]:
        """See `envace.console.progress`."""
        return progress(work, label, enabled=self.enabled)

    def phase(self, total: int, label: str) -> tqdm[Any]:
        """A bar for a part of a step, on a terminal; elsewhere nothing, as the line of the step is enough there."""
        return progress(total, label, enabled=self.enabled, only_terminal=True)

    def close(self, *, complete: bool = True) -> None:
        """complete: the stage has come to its end."""
        if self.enabled:
            with _writing(self.run_dir / "tensorboard"):
                self._board.close(complete=complete)

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close(complete=kind is None)
        except TrackingError as error:
            # A full disk fails twice; what failed first tells more.
            if kind is None:
                raise
            logger.error("%s", error)

    def _remove_records(self, first_step: int) -> None:
        removed = 0
        for file in (self.run_dir / "metrics.jsonl", self.run_dir / "trajectories.jsonl"):
            if file.exists():
                lines = file.read_bytes().splitlines(keepends=True)
                # A run that was killed may have left half a line.
                kept = [
                    line
                    for number, line in enumerate(lines, 1)
                    if line.endswith(b"}\n") and self._stays(line, first_step, f"{file}, line {number}")
                ]
                removed += len(lines) - len(kept)
                # Beside it first: a kill in the middle must not cost the records.
                rewritten = file.with_suffix(".partial")
                rewritten.write_bytes(b"".join(kept))
                rewritten.replace(file)
        if removed:
            logger.info("%s: replaced %d records of an earlier run of stage %s", self.run_dir, removed, self.name)

    def _remaining(self, step: int) -> list[str]:
        """As long as the steps of this process so far have taken on average, evaluations included."""
        if (left := self.total_steps - step - 1) <= 0:
            return []
        seconds = (time.monotonic() - self._started) / (step + 1 - self.first_step) * left
        return [f"{tqdm.format_interval(seconds)} left"]

    def _stays(self, line: bytes, first_step: int, where: str) -> bool:
        try:
            record = json.loads(line)
            return record["stage"] != self.name or record["step"] < first_step
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise TrackingError(
                f"{where} is damaged ({type(error).__name__}: {first_line(error)}): repair or delete that line, or set "
                "run_dir to another folder"
            ) from error

    def _append(self, file: str, records: list[dict[str, Any]]) -> None:
        lines = [json.dumps(without_nan(record), allow_nan=False) + "\n" for record in records]
        with _writing(self.run_dir / file), (self.run_dir / file).open("a", encoding="utf-8") as stream:
            stream.writelines(lines)


def places(config: Config, name: str, **more: str | Path) -> dict[str, str]:
    """For the final summary of a stage: where its records are. more: what else it says, in front of them."""
    run_dir = Path(config.run_dir)
    files = {
        "metrics": run_dir / "metrics.jsonl",
        "trajectories": run_dir / "trajectories.jsonl",
        "TensorBoard": run_dir / "tensorboard",
        "config": run_dir / f"{name}.config.yaml",
    }
    return {key: str(value) for key, value in [*more.items(), *files.items()] if Path(value).exists()}


def trajectory_record(
    trajectory: Trajectory,
    decode: Callable[[list[int]], str] | None = None,
    *,
    advantages: Iterator[float] | None = None,
    updated_logprobs: Iterator[list[float]] | None = None,
    with_tokens: bool = False,
) -> dict[str, Any]:
    """A trajectory as JSON: how it was judged, and who wrote each segment on what evidence.

    verdicts: [turn][variant][step][item], of a checklist judge. predictions: of calls to risky tools, by a gate.
    provenance: the payload hash of an observed response; the model and the prompt hash of a rehearsed one.
    sequence: which token stream a segment stands in (0 is ACT's). tokens: how many it has.
    advantage: of an output; taken from `advantages`, which is at the first output of this trajectory.
    token_texts, logprobs: of each token of an output, at sampling, if `with_tokens`. Tokens are decoded one by one, so
    a character of several tokens shows as replacement characters there; `text` has it whole.
    updated_logprobs: the same tokens under the weights behind the update, if given.
    """
    segments = []
    for number, sequence in enumerate(trajectory.sequences):
        for segment in sequence.segments:
            record = {
                "sequence": number,
                "role": segment.role.name.lower(),
                "evidence": segment.evidence,
                "tokens": len(segment.ids),
                "finish_reason": segment.finish_reason,
                "provenance": segment.provenance,
            }
            if decode is not None:
                record["text"] = decode(segment.ids)
            updated = []
            if segment.role is not Role.CONTEXT:
                if advantages is not None:
                    record["advantage"] = next(advantages)
                if updated_logprobs is not None and with_tokens:
                    updated = next(updated_logprobs)
            if with_tokens and decode is not None and segment.logprobs is not None:
                record["token_texts"] = [decode([token]) for token in segment.ids]
                record["logprobs"] = [round(logprob, 4) for logprob in segment.logprobs]
                if updated:
                    record["updated_logprobs"] = [round(logprob, 4) for logprob in updated]
            segments.append(record)
    return {
        "task": trajectory.task.id,
        "kind": trajectory.task.kind,
        "group_id": trajectory.group_id,
        "status": trajectory.status,
        "reason": trajectory.reason,
        "reward": trajectory.reward,
        "reward_parts": trajectory.reward_parts,
        "verdicts": trajectory.verdicts,
        "predictions": [asdict(prediction) for prediction in trajectory.predictions],
        "user_turns": trajectory.task.user_turns,
        "segments": segments,
    }


def without_nan(value: Any) -> Any:
    """JSON has no word for numbers that are not finite: they become text."""
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_nan(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TrackingError(failed(error, "cannot write", path)) from error
