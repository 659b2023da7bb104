"""Writes a new environment from the template: a folder envs/NAME and its test, tests/test_NAME.py."""

from __future__ import annotations

import keyword
import os
from pathlib import Path

from envace.types import UserError

HERE = Path(__file__).parent
# What the tools are -> the folders whose files make the environment; the later one wins.
TEMPLATES = {"python": ("template",), "mcp": ("template", "template_mcp")}
TEST = "test_environment.py"


def new_environment(name: str, tools: str, root: Path) -> list[Path]:
    """The files written below `root`. tools: a key of TEMPLATES.

    Raises UserError if the name is none for a Python package, if something of that name is there, or if it cannot be
    written.
    """
    if not name.isidentifier() or keyword.iskeyword(name) or name.startswith("_"):
        raise UserError(f"NAME={name!r}: take a Python identifier, such as NAME=my_shop")
    if tools not in TEMPLATES:
        raise UserError(f"TOOLS={tools}: take one of {', '.join(TEMPLATES)}")
    folder, test = root / "envs" / name, root / "tests" / f"test_{name}.py"
    for path in (folder, test):
        if os.path.lexists(path):
            raise UserError(f"{path.relative_to(root)} is there already: take another NAME, or remove it first")
    files: dict[str, Path] = {}
    for template in TEMPLATES[tools]:
        files |= {path.name: path for path in sorted((HERE / template).iterdir()) if path.is_file()}
    if tools == "mcp":
        files["__init__.py"] = HERE / "template" / "__init__.py"
    targets = {test if file == TEST else folder / file: path for file, path in files.items()}
    try:
        for target, path in targets.items():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(path.read_text(encoding="utf-8").replace("NAME", name), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {error.filename or folder}: {error.strerror or error}") from error
    return list(targets)
