"""The model that a harness talks to: `envace.serve` as a process of its own, over a checkpoint or another server."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families

from envace.benchmarks.benchmark import STOP_SECONDS, ending
from envace.config import save_config
from envace.interrupts import end
from envace.settings import Config
from envace.types import UserError

ADDRESS = re.compile(r"serving on (http://\S+)/v1")
TICK_SECONDS = 0.1


@dataclass(frozen=True)
class Served:
    """url: without /v1. model: the name it goes by."""

    url: str
    model: str

    def tokens(self) -> dict[str, int]:
        """prompt, completion and rehearsal tokens so far."""
        counted = {"prompt": 0, "completion": 0, "rehearsal": 0}
        with urlopen(f"{self.url}/metrics") as answer:
            text = answer.read().decode()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == "envace_tokens_total":
                    counted[sample.labels["kind"]] = int(sample.value)
        return counted


@contextmanager
def serving(config: Config, folder: Path, name: str, also_callable: list[str] | None) -> Iterator[Served]:
    """Serve what the settings say, on a free port of this machine alone, until the block ends.

    name: that the model goes by; "": its own. also_callable: tools that a reply may call though they are not offered;
    None lets every call through. Its settings and its log stay in `folder`. Raises UserError, with its last words, if
    it does not come up.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings, log = folder / "serve.yaml", folder / "serve.log"
    private = replace(
        config.serve,
        host="127.0.0.1",
        port=0,
        key_env="",
        name=name,
        only_offered_calls=also_callable is not None,
        also_callable=also_callable or [],
    )
    save_config(replace(config, serve=private), settings)
    with listening([sys.executable, "-u", "-m", "envace.serve", "--config", str(settings)], log) as url:
        yield Served(url, name or config.serve.backend_model or Path(config.model.path).name)


@contextmanager
def listening(command: list[str], log: Path) -> Iterator[str]:
    """A server of this project as a process until the block ends: its address without /v1. Raises UserError."""
    with log.open("wb") as said:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
    try:
        yield _address(process, log)
    finally:
        end(process, STOP_SECONDS)


def _address(process: subprocess.Popen[Any], log: Path) -> str:
    """Where it listens, once it does: however long a model takes to load, either that or its end comes."""
    while True:
        if found := ADDRESS.search(log.read_text(encoding="utf-8", errors="replace")):
            return found[1]
        if process.poll() is not None:
            raise UserError(f"a server did not start; {log} ends with: {ending(log)}")
        time.sleep(TICK_SECONDS)
