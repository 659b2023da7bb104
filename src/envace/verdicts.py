"""What a judge said: to read the verdict in a reply, and to keep verdicts."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from envace.chat import THINK_CLOSE, THINK_OPEN
from envace.checklist import ANSWER, VERDICT_SCHEMA, Verdict
from envace.outage import EndpointError

logger = logging.getLogger("envace")


def read_verdict(text: str) -> Verdict:
    """The verdict in a reply: the `answer` of the JSON object in it, whatever fences or prose stand around that.

    What a think block holds is a draft, also one that is never closed. Where an object ends is decided by a JSON
    decoder. None without an object with a boolean `answer`, or if there are several that disagree; those with every
    field of the schema are preferred.
    """
    _, _, visible = text.rpartition(THINK_CLOSE)
    visible, _, _ = visible.partition(THINK_OPEN)
    found = [value for value in _json_objects(visible) if isinstance(value.get(ANSWER), bool)]
    complete = [value for value in found if value.keys() >= set(VERDICT_SCHEMA["required"])]
    answers = {value[ANSWER] for value in complete or found}
    return answers.pop() if len(answers) == 1 else None


def _json_objects(text: str) -> list[dict[str, Any]]:
    """The outermost JSON objects in a text, in order."""
    objects, decoder, position = [], json.JSONDecoder(), text.find("{")
    while position >= 0:
        try:
            value, end = decoder.raw_decode(text, position)
            objects.append(value)
        except (ValueError, RecursionError):  # a brace that opens no JSON, or braces without end
            end = position + 1
        position = text.find("{", end)
    return objects


class VerdictCache:
    """Verdicts by content hash; if there is a path, in a file with one {"key", "answer"} a line.

    Lines are only ever appended, so several processes may share a file. A damaged line, such as the last one of a run
    that was killed, is skipped and reported. Raises EndpointError if the file cannot be read or written.
    """

    def __init__(self, path: str):
        self._path = Path(path) if path else None
        self._answers: dict[str, bool] = {}
        self._separator = ""
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            content = self._path.read_bytes() if self._path.exists() else b""
        except OSError as error:
            raise EndpointError(f"cannot read the judge's cache {self._path}: {error.strerror or error}") from None
        lines = content.decode("utf-8", "replace").split("\n")
        damaged = sum(not self._read(line) for line in lines if line)
        if lines[-1]:
            self._separator = "\n"  # or the first new line would be damaged too
        if damaged:
            logger.warning("judge: skipped %d damaged lines of %s (asked again if needed)", damaged, self._path)

    def get(self, key: str) -> Verdict:
        return self._answers.get(key)

    def add(self, key: str, answer: bool) -> None:
        self._answers[key] = answer
        if self._path is None:
            return
        line = json.dumps({"key": key, ANSWER: answer}) + "\n"
        try:
            with self._path.open("a", encoding="utf-8") as stream:
                stream.write(self._separator + line)
        except OSError as error:
            raise EndpointError(f"cannot write the judge's cache {self._path}: {error.strerror or error}") from None
        self._separator = ""

    def _read(self, line: str) -> bool:
        try:
            value = json.loads(line)
        except ValueError:
            return False
        if not isinstance(value, dict) or not isinstance(value.get(ANSWER), bool):
            return False
        self._answers[str(value.get("key"))] = value[ANSWER]
        return True
