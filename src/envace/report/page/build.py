"""Runs -> one HTML file. Style, script and data stand in it; a Content-Security-Policy allows nothing else.

Trajectories are gzipped JSON in base64, CHUNK of them in one block that the page inflates when it needs one. So no text
of a model is ever part of the HTML: base64 has no character that HTML could take for markup.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

from envace.report.page.runs import Run
from envace.tracking import without_nan
from envace.types import UserError

CHUNK = 100
STYLES = ("vendor/uplot.min.css", "page.css")
SCRIPTS = ("vendor/uplot.min.js", "text.js", "data.js", "curves.js", "settings.js", "trajectory.js", "browser.js")
LISTED = ("stage", "step", "split", "task", "kind", "status", "reward", "execution")
TOOL_CALL = re.compile(r'<tool_call>\s*\{\s*"name":\s*"([^"\\]{1,100})"')


def write_page(runs: list[Run], out: Path) -> int:
    """Returns the size in bytes. Beside the target first: an open page is never half a page. Raises UserError."""
    if out.is_dir():
        raise UserError(f"{out} is a folder: name a file, such as {out / 'report.html'}")
    data = page(runs).encode()
    partial = out.with_name(out.name + ".partial")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(data)
        partial.replace(out)
    except OSError as error:
        raise UserError(f"cannot write {error.filename or out}: {error.strerror or error}") from error
    return len(data)


def page(runs: list[Run]) -> str:
    static = files("envace.report.page").joinpath("static")
    style = "\n".join(static.joinpath(name).read_text(encoding="utf-8") for name in STYLES)
    script = "\n".join(static.joinpath(name).read_text(encoding="utf-8") for name in SCRIPTS)
    trajectories = [(number, t) for number, run in enumerate(runs) for t in run.trajectories]
    blocks = {
        "runs": [
            {"name": r.name, "metrics": r.metrics, "settings": r.settings, "versions": r.versions, "events": r.events}
            for r in runs
        ],
        "index": [index_entry(run, trajectory) for run, trajectory in trajectories],
    }
    for start in range(0, len(trajectories), CHUNK):
        blocks[f"chunk{start // CHUNK}"] = [t for _, t in trajectories[start : start + CHUNK]]
    holes = {
        "policy": f"default-src 'none'; script-src {source(script)}; style-src {source(style)}; base-uri 'none'",
        "style": style,
        "script": script,
        "data": "\n".join(block(name, value) for name, value in blocks.items()),
    }
    template = static.joinpath("page.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda hole: holes[hole[1]], template)


def source(text: str) -> str:
    """What a Content-Security-Policy calls exactly this inline text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def block(name: str, value: Any) -> str:
    packed = gzip.compress(json.dumps(without_nan(value), separators=(",", ":")).encode(), mtime=0)
    return f'<script type="application/octet-stream" id="{name}">{base64.b64encode(packed).decode()}</script>'


def index_entry(run: int, trajectory: dict[str, Any]) -> dict[str, Any]:
    """What the list shows and filters by before any text is inflated. tools: those that ACT called, in order."""
    written = "\n".join(s.get("text", "") for s in trajectory.get("segments", []) if s.get("role") == "act")
    turns = trajectory.get("user_turns") or [""]
    return {
        "run": run,
        **{key: trajectory.get(key) for key in LISTED},
        "tools": list(dict.fromkeys(TOOL_CALL.findall(written))),
        "bad": trajectory.get("status") == "parse_error"
        or any(s.get("finish_reason") == "parse_error" for s in trajectory.get("segments", [])),
        "start": str(turns[0])[:120],
    }
