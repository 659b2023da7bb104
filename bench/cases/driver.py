"""What a rollout of the demo's training costs besides generating: the episodes, their parsing, their environments.

    python -m bench.cases.driver MODEL_FOLDER

Generating is what happens inside the `generate` callable; `in_model_s` is the part of it inside Hugging Face's
`generate`, which the prefill of the prompts is not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from bench.measure import peak_mib, seconds, tell
from envace.config import load_config
from envace.data import open_source
from envace.evaluation import unfold
from envace.generation import CachedGenerator
from envace.services import Services
from envace.team import evaluation_team


class Timed:
    """A callable that adds up its CPU seconds."""

    def __init__(self, inner: Callable[..., Any]):
        self.inner = inner
        self.cpu_s = 0.0

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        with seconds() as found:
            result = self.inner(*arguments, **options)
        self.cpu_s += found["cpu_s"]
        return result


def main() -> None:
    torch.set_num_threads(1)
    config = load_config("configs/demo.yaml", [f"model.path={sys.argv[1]}"])
    team, source = evaluation_team(config), open_source(config)
    tasks = source.train_tasks()
    model = team.lead.model

    def roll_out(first: int) -> int:
        _, sampled = unfold(
            team,
            tasks[first : first + config.rl.prompts_per_step],
            config,
            source,
            Services(config),
            environment="rehearsed",
            purpose="training",
            sampling=config.sampling,
            samples=config.rl.group_size,
        )
        return sampled

    roll_out(0)
    generate, in_model = Timed(CachedGenerator.__call__), Timed(model.generate)
    model.generate = in_model
    CachedGenerator.__call__ = lambda self, requests: generate(self, requests)
    with seconds() as found:
        sampled = roll_out(config.rl.prompts_per_step)
    tell(
        {
            **found,
            "generating_s": generate.cpu_s,
            "in_model_s": in_model.cpu_s,
            "outside_share": 1 - generate.cpu_s / found["cpu_s"],
            "sampled_tokens": sampled,
            "peak_mib": peak_mib(),
        }
    )


if __name__ == "__main__":
    main()
