"""What lies in the folder of a model, as Hugging Face and peft write it."""

from __future__ import annotations

import json
from pathlib import Path

ADAPTER_CONFIG = "adapter_config.json"


def is_model(folder: Path) -> bool:
    """Whether it is a model or an adapter as they are written here."""
    return (folder / "config.json").exists() or is_adapter(folder)


def is_adapter(folder: Path) -> bool:
    return (folder / ADAPTER_CONFIG).exists()


def base_of(path: str) -> str:
    """The folder or hub name of the model under the adapter at `path`; `path` itself if there is none."""
    adapter = Path(path) / ADAPTER_CONFIG
    if not adapter.exists():
        return path
    return json.loads(adapter.read_text(encoding="utf-8")).get("base_model_name_or_path") or path
