"""Keys are named by settings, stand in the environment, and nowhere else."""

from __future__ import annotations

import os

from envace.types import UserError


def secret(name: str, setting: str) -> str:
    """The value of the environment variable `name`; "" if none is named. `setting` named it."""
    value = os.environ.get(name, "").strip() if name else ""
    if name and not (value and value.isascii() and value.isprintable()):
        raise UserError(f"{setting} must NAME an environment variable that holds the key: export it, or name none")
    return value
