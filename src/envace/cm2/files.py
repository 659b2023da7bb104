"""Files -> rows, exactly as written: .json (a list of rows), .jsonl, .parquet, folders of them, sets on the hub."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from envace.types import UserError, first_line

SUFFIXES = (".json", ".jsonl", ".parquet")


class FileError(UserError):
    """A path that is missing, of another kind, or cannot be read; the message says which and what to do."""


def read_rows(path: str | Path) -> Iterator[tuple[str, int, Any]]:
    """(file, row number from 1, row) for every row, exactly as written, before any check. Raises FileError."""
    readers = {".json": _json_rows, ".jsonl": _jsonl_rows, ".parquet": _parquet_rows}
    for file in _files(str(path)):
        try:
            for number, row in readers[file.suffix](file):
                yield str(file), number, row
        except json.JSONDecodeError as error:
            hint = "; if each line is a row, name the file .jsonl" if error.msg == "Extra data" else ""
            reason = f"line {error.lineno}: not valid JSON, {error.msg} at column {error.colno}{hint}"
            raise FileError(f"{file}, {reason}") from None
        except UnicodeDecodeError as error:
            raise FileError(f"{file}: not UTF-8 at byte {error.start}; save it as UTF-8") from None
        except RecursionError:
            raise FileError(f"{file}: JSON is nested too deeply") from None
        except OSError as error:
            raise FileError(f"{file} cannot be read: {error.strerror or first_line(error)}") from None


# JSON is read by the json module: Arrow, on which `datasets` is built, gives all objects of a column the same keys and
# so adds nulls to whatever lacks one. A parquet file holds such columns anyway, and JSON strings pass through unharmed.


def _json_rows(file: Path) -> Iterator[tuple[int, Any]]:
    rows = json.loads(file.read_text(encoding="utf-8-sig"))
    if not isinstance(rows, list):
        raise FileError(f"{file} holds one JSON value that is no list: put the rows in [...], or name it .jsonl")
    yield from enumerate(rows, start=1)


def _jsonl_rows(file: Path) -> Iterator[tuple[int, Any]]:
    # Not splitlines(): a JSON string may hold other line separators as they are.
    for number, line in enumerate(file.read_text(encoding="utf-8-sig").split("\n"), start=1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except json.JSONDecodeError as error:
                reason = f"line {number}: not valid JSON, {error.msg} at column {error.colno}"
                raise FileError(f"{file}, {reason}") from None


def _parquet_rows(file: Path) -> Iterator[tuple[int, Any]]:
    import datasets  # slow to import, and only parquet needs it

    try:
        # Streamed: nothing is copied to a cache, in which a file that changed could go unnoticed.
        rows = datasets.load_dataset("parquet", data_files=[str(file)], split="train", streaming=True)
        # No field is ever null, so a null stands for a key that the row did not have.
        yield from ((number, _without_nulls(row)) for number, row in enumerate(rows, start=1))
    except (ValueError, RuntimeError, NotImplementedError) as error:
        raise FileError(f"{file} cannot be read as parquet: {first_line(error)}") from None


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    return [_without_nulls(v) for v in value] if isinstance(value, list) else value


def _files(path: str) -> list[Path]:
    local, pattern = Path(path), "*"
    if local.is_file():
        if local.suffix not in SUFFIXES:
            raise FileError(f"{path}: expected a file that ends in {', '.join(SUFFIXES)}, or a folder of such files")
        return [local]
    if not local.exists():
        hub = re.fullmatch(r"(\w[\w.-]*/\w[\w.-]*)(?::(.+))?", path)
        if not hub or local.suffix in SUFFIXES and not hub[2]:
            raise FileError(f"{path} is missing: give a file, a folder, or OWNER/NAME of a data set on the hub")
        pattern = hub[2] or pattern
        local = _download(hub[1], pattern)
    inside = {file: file.relative_to(local) for file in sorted(local.rglob("*")) if file.suffix in SUFFIXES}
    files = [
        f for f, name in inside.items() if fnmatch(name.as_posix(), pattern) and not name.as_posix().startswith(".")
    ]
    if not files:
        raise FileError(f"{path} holds no file that ends in {', '.join(SUFFIXES)}")
    return files


def _download(name: str, pattern: str) -> Path:
    from huggingface_hub import snapshot_download  # only data sets on the hub need it

    # The files themselves, so that they are read like local ones; `datasets` would pass JSON files through Arrow.
    wanted = [f"*{suffix}" for suffix in SUFFIXES] if pattern == "*" else [pattern]
    try:
        return Path(snapshot_download(name, repo_type="dataset", allow_patterns=wanted))
    except (OSError, ValueError, RuntimeError) as error:
        reason = f"no such file or folder here, and the hub does not give the data set ({first_line(error)})"
        raise FileError(f"{name}: {reason}; check the path, the name and the network") from None
