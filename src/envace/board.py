"""TensorBoard: the metrics of a stage, its settings with the final metrics (HParams), and a few trajectories to read.

A stage that goes on from a checkpoint takes out of its event files what an earlier run wrote behind that: every tag has
each step once, in rising order, whatever reads the files.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

FIRST_TRAJECTORIES = 3  # of each step and split
TEXT_CHARS = 6000  # of one trajectory; the middle of a longer one is left out, and says so
INDENT = "    "


class Board:
    """Writes the event files of one stage. Every method raises OSError.

    settings: by dotted key. headline: metrics for the HParams table that the first step may not have.
    first_step: what is there from this step on is replaced.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], headline: tuple[str, ...], first_step: int):
        forget(folder, first_step)
        self.settings = {
            key: value if isinstance(value, int | float) else str(value) for key, value in settings.items()
        }
        self.headline = headline
        self._session: Any = None
        self._writer: Any = SummaryWriter(str(folder))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        if self._session is None:
            metrics = dict.fromkeys([*self.headline, *values], 0.0)
            experiment, start, self._session = hparams(self.settings, metrics)
            for summary in (experiment, start):
                self._writer.file_writer.add_summary(summary)
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)
        # Its writer is a thread, whose failure would come to light much later.
        self._writer.flush()

    def texts(self, step: int, split: str, records: list[dict[str, Any]]) -> None:
        """records: see `trajectory_record`."""
        for number, record in enumerate(records[:FIRST_TRAJECTORIES]):
            self._writer.add_text(f"{split}/{number}", as_code(readable(record)), step)

    def close(self, *, complete: bool = True) -> None:
        """complete: the stage has come to its end."""
        if complete and self._session is not None:
            self._writer.file_writer.add_summary(self._session)
        self._writer.close()


def forget(folder: Path, first_step: int) -> None:
    """Remove the events of `first_step` and later steps, and half an event that a killed run has left.

    No other file in the folder is touched. Raises OSError.
    """
    for file in sorted(folder.glob("events.out.tfevents.*")):
        if first_step == 0:
            file.unlink()
            continue
        events = list(RawEventFileLoader(str(file)).Load())
        # Beside it first: a kill in the middle must not cost the records.
        rewritten = file.with_name(f"{file.name.replace('events', 'rewritten', 1)}.partial")
        with rewritten.open("wb") as stream:
            writer = RecordWriter(stream)
            for event in events:
                if Event.FromString(event).step < first_step:
                    writer.write(event)
        rewritten.replace(file)


def readable(record: dict[str, Any]) -> str:
    lines = [f"task {record['task']}, status {record['status']}, reward {record['reward']} {record['reward_parts']}"]
    for segment in record["segments"]:
        lines += [f"[{segment['role']}, {segment['evidence']}]", segment["text"]]
    return "\n".join(lines)


def as_code(text: str) -> str:
    """Markdown that shows `text` as it is. TensorBoard renders Markdown, and the text is a model's.

    Every line is indented, whatever ends a line, so nothing leaves the block; what is invisible shows as an escape.
    """
    if len(text) > TEXT_CHARS:
        half, more = TEXT_CHARS // 2, len(text) - TEXT_CHARS
        text = f"{text[:half]}\n[... {more} more characters: see trajectories.jsonl ...]\n{text[-half:]}"
    return "\n".join(INDENT + "".join(map(_visible, line)) for line in text.split("\n"))


def _visible(character: str) -> str:
    """Control, format (right-to-left marks) and other characters that show nothing or move what is shown."""
    hidden = unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
    return character.encode("unicode_escape").decode("ascii") if hidden else character
