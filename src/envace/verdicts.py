"""The judge without its requests: to read a verdict, to keep verdicts, and when to stop for lack of them."""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from envace.chat import THINK_CLOSE, THINK_OPEN
from envace.checklist import ANSWER, VERDICT_SCHEMA, Verdict
from envace.types import Interruption, UserError

logger = logging.getLogger("envace")

WARN_AFTER = 3  # failures of an endpoint in a row until it is called down


class JudgeError(UserError):
    """The judge cannot be used as it is configured. One line: what, where, what to do."""


class JudgeOutage(Interruption):
    """The judge does not work well enough to go on; save a checkpoint and stop."""


class Outage:
    """When to wait and when to stop. It reads no clock: `now` is in seconds, from any origin.

    An endpoint is failing from its first failure until it answers. As long as another one answers the run goes on;
    only when all have been failing for `max_minutes` does `check` raise.
    """

    def __init__(self, endpoints: Sequence[str], *, max_unknown_share: float, max_minutes: float):
        self.max_unknown_share = max_unknown_share
        self.max_minutes = max_minutes
        self._endpoints = list(dict.fromkeys(endpoints))  # one may be named twice, to get more of the requests
        self._since: dict[str, float] = {}
        self._failures: Counter[str] = Counter()

    def answered(self, endpoint: str) -> None:
        if self._failures[endpoint] >= WARN_AFTER:
            logger.warning("judge: %s answers again", endpoint)
        self._since.pop(endpoint, None)
        self._failures[endpoint] = 0

    def failed(self, endpoint: str, now: float, reason: str) -> None:
        self._since.setdefault(endpoint, now)
        self._failures[endpoint] += 1
        if self._failures[endpoint] == WARN_AFTER:
            hope = f"waiting up to {self.max_minutes:g} minutes" if self.all_failing else "the others take over"
            logger.error("judge: %s is down (%s); %s", endpoint, reason, hope)

    def is_failing(self, endpoint: str) -> bool:
        return endpoint in self._since

    @property
    def all_failing(self) -> bool:
        return len(self._since) == len(self._endpoints)

    def remaining(self, now: float) -> float:
        """Seconds until an outage of all endpoints has lasted too long; infinite while one of them works."""
        return max(self._since.values()) + 60 * self.max_minutes - now if self.all_failing else math.inf

    def check(self, now: float) -> None:
        """Raises JudgeOutage if no endpoint has worked for `max_minutes`."""
        if self.remaining(now) <= 0:
            raise JudgeOutage(
                f"judge: {', '.join(self._endpoints)} down for {self.max_minutes:g} minutes: start it again and resume"
            )

    def check_step(self, asked: int, unknown: int, reason: str) -> None:
        """Raises JudgeOutage if too large a share of a step's questions has no verdict; warns from half of that."""
        share = unknown / asked if asked else 0.0
        message = f"judge: {unknown} of {asked} questions of this step have no verdict (last: {reason})"
        if share > self.max_unknown_share:
            raise JudgeOutage(f"{message}, more than max_unknown_share={self.max_unknown_share:g}: mend it and resume")
        if share > self.max_unknown_share / 2:
            logger.warning("%s; the run stops above max_unknown_share=%g", message, self.max_unknown_share)


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
    that was killed, is skipped and reported. Raises JudgeError if the file cannot be read or written.
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
            raise JudgeError(f"cannot read the judge's cache {self._path}: {error.strerror or error}") from None
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
            raise JudgeError(f"cannot write the judge's cache {self._path}: {error.strerror or error}") from None
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
