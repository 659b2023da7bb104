"""Results of long comparisons: a record is complete or absent, and tells with which settings it was made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from envace.config import default_settings
from envace.tracking import without_nan
from envace.types import UserError


def is_done(record: Path, settings: dict[str, dict[str, Any]]) -> bool:
    """Whether a record exists. Raises UserError if it was made with other settings than these, {stage: {key: value}}.

    A setting that came since had its default then.
    """
    if not record.exists():
        return False
    before = read_record(record)["settings"]
    now = json.loads(json.dumps(settings))
    differing = [
        f"{stage} {key}={was.get(key)}, now it is {now[stage].get(key)}"
        for stage in now
        for was in [default_settings() | before[stage]]
        for key in sorted(before[stage].keys() | now[stage].keys())
        if was.get(key) != now[stage].get(key)
    ]
    if differing:
        more = f" ({len(differing) - 1} more differ)" if len(differing) > 1 else ""
        raise UserError(f"{record} was made with {differing[0]}{more}: restore the settings, or delete {record.parent}")
    return True


def write_record(record: Path, settings: dict[str, dict[str, Any]], **found: Any) -> None:
    partial = record.with_suffix(".partial")
    text = json.dumps(without_nan({"settings": settings, **found}), indent=2, ensure_ascii=False)
    partial.write_text(text + "\n", encoding="utf-8")
    partial.replace(record)


def read_record(record: Path) -> dict[str, Any]:
    return json.loads(record.read_text(encoding="utf-8"))
