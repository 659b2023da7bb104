"""What a custom environment is, and how it is loaded from the folder that data.path names."""

from __future__ import annotations

import importlib.util
import random
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Protocol

from envace.custom.dialogue import Dialogue
from envace.custom.tools import Tools
from envace.types import Task, UserError, content_hash, first_line


class MakeTasks(Protocol):
    def __call__(self, n: int, seed: int, *, held_out: bool) -> list[Task]:
        """At most `n` tasks, the same for the same arguments; training and held-out ones have no id in common."""


@dataclass(frozen=True)
class CustomEnvironment:
    """tools: what can be called, and the worlds behind it. make_tasks: problems, each with its goal and its world.

    expert: works through a dialogue that SFT imitates; it may be wrong at times, and draws from the generator only.
    """

    tools: Tools
    make_tasks: MakeTasks
    expert: Callable[[Dialogue, random.Random], None]


def load_environment(path: str | Path) -> CustomEnvironment:
    """ENVIRONMENT of the package in the folder `path`. This runs the code there: name only what you trust.

    Raises UserError, also for whatever the code raises.
    """
    folder = Path(path).resolve()
    file = folder / "__init__.py"
    if not folder.name.isidentifier() or not file.is_file():
        raise UserError(f"{path} is no environment: a folder that is named like a Python package, with an __init__.py")
    name = f"envace_env_{folder.name}_{content_hash(str(folder))}"
    environment = vars(_imported(name, file)).get("ENVIRONMENT")
    if not isinstance(environment, CustomEnvironment):
        _forget(name)
        raise UserError(f"{file}: ENVIRONMENT must be an envace.custom.environment.CustomEnvironment")
    return environment


def _imported(name: str, file: Path) -> ModuleType:
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=[str(file.parent)])
    assert spec is not None and spec.loader is not None  # a .py file has both
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # of any kind: the code is not ours
        _forget(name)
        if isinstance(error, UserError):
            raise
        raise UserError(f"{_where(error, file)}: {type(error).__name__}: {first_line(error)}") from error
    return module


def _forget(name: str) -> None:
    """What cannot be used is not kept, so that it is read again when it is put right."""
    for module in [key for key in sys.modules if f"{key}.".startswith(f"{name}.")]:
        del sys.modules[module]


def _where(error: Exception, file: Path) -> str:
    """File and line of the last frame in the environment's own code."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith(str(file.parent))]
    return f"{frames[-1].filename}, line {frames[-1].lineno}" if frames else str(file)
