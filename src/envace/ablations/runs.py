"""Which runs the ablations consist of, with which settings, and which of them are done.

A variant is a file in configs/ablations. Those of CORE run with every seed and the budget of configs/demo.yaml, and so
do those of REMEDIES, which might mend what rehearsal gets wrong; every other one runs once and shorter, which shows
that it works and not what it is worth. All runs of a seed start from the same SFT. What each leaves in its folder
<root>/<variant>/seed<k> is what train_rl.py and evaluate.py write, and result.json: its settings and what the report
needs of it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from envace import records
from envace.checkpoints import FREE, OTHER_STAGE
from envace.config import ConfigError, load_config, settings_of
from envace.settings import Config

CONFIGS = Path("configs/ablations")
BASE = "configs/demo.yaml"
ROOTS = {False: Path("runs/ablations"), True: Path("runs/ablations_quick")}  # by whether it is quick
CORE = ("envace", "grpo", "per_role_policy", "shared_baseline", "constant_response")
REMEDIES = ("mixed_10", "verifier_filter", "act_only")
COMPARED = (*CORE, *REMEDIES)
FROM_BASE = ("no_sft",)  # these start from the model that SFT starts from
SMOKE = ("rl.steps=10",)
# So little SFT that nothing is solved, and just enough that most episodes have a call that is answered.
QUICK = (
    *("data.demonstrations=256", "data.train_tasks=32", "data.eval_tasks=8", "eval.tasks=4"),
    *("sft.steps=60", "sft.batch_size=8", "rl.steps=2", "rl.prompts_per_step=4", "rl.group_size=4"),
)
QUICK_SEPARATE = ("sft.steps=8",)  # a step of it sees nine times the tokens


@dataclass(frozen=True)
class WarmUp:
    """The SFT that all runs of one seed and one view start from, and the untrained model that it starts from."""

    seed: int
    view: str
    quick: bool

    @property
    def run_dir(self) -> Path:
        name = "sft" if self.view == "shared" else f"sft_{self.view}"
        return ROOTS[self.quick] / name / f"seed{self.seed}"

    @property
    def name(self) -> str:
        return f"SFT for view {self.view}, seed {self.seed}"

    @property
    def needs(self) -> tuple[WarmUp, ...]:
        """What has to be done before: one warm-up of a seed builds the model from which they all start."""
        return () if self.view == "shared" else (replace(self, view="shared"),)

    @property
    def console(self) -> Path:
        return self.run_dir / "console.log"

    @property
    def record(self) -> Path:
        return self.run_dir / "done.json"

    @property
    def base(self) -> Path:
        return ROOTS[self.quick] / "sft" / f"seed{self.seed}" / "base"

    @property
    def model(self) -> Path:
        return self.run_dir / "sft"

    @cached_property
    def training(self) -> Config:
        own = [f"rollout.view={self.view}", f"model.path={self.base}", f"run_dir={self.run_dir}"]
        shorter = QUICK_SEPARATE if self.quick and self.view == "separate" else ()
        return load_config(BASE, [*_common(self.seed, self.quick), *shorter, *own, "checkpoint.every=100"])

    def settings(self) -> dict[str, Any]:
        """What the SFT depends on: a change of the reinforcement learning leaves it good."""
        free = (*FREE, OTHER_STAGE["sft"])
        return {"training": {k: v for k, v in settings_of(self.training).items() if not k.startswith(free)}}


@dataclass(frozen=True)
class Run:
    """One variant with one seed: training, then evaluation of the result."""

    variant: str
    seed: int
    quick: bool = False

    @property
    def run_dir(self) -> Path:
        return ROOTS[self.quick] / self.variant / f"seed{self.seed}"

    @property
    def name(self) -> str:
        return f"{self.variant}, seed {self.seed}"

    @property
    def needs(self) -> tuple[WarmUp, ...]:
        return (*self.warm_up.needs, self.warm_up)

    @property
    def console(self) -> Path:
        return self.run_dir / "console.log"

    @property
    def record(self) -> Path:
        return self.run_dir / "result.json"

    @property
    def warm_up(self) -> WarmUp:
        """REHEARSE has to have learned its role in the view in which it is to play it."""
        return WarmUp(self.seed, self._written.rollout.view, self.quick)

    @property
    def training(self) -> Config:
        """A frozen model that plays the environment is the SFT of the seed, from which the policy starts, too."""
        config, start = self._written, self.warm_up.base if self.variant in FROM_BASE else self.warm_up.model
        simulator = str(self.warm_up.model) if config.simulator.path else ""
        return replace(
            config,
            model=replace(config.model, path=str(start)),
            simulator=replace(config.simulator, path=simulator),
            checkpoint=replace(config.checkpoint, every=10),
        )

    @property
    def evaluation(self) -> Config:
        config = self.training
        rehearse = str(self.run_dir / "rl_rehearse") if config.rl.team == "per_role" else ""
        return replace(
            config,
            model=replace(config.model, path=str(self.run_dir / "rl"), rehearse_path=rehearse),
            eval=replace(config.eval, samples=2, tasks=0),
        )

    def settings(self) -> dict[str, Any]:
        return {"training": settings_of(self.training), "evaluation": settings_of(self.evaluation)}

    @cached_property
    def _written(self) -> Config:
        """What its file says, with this run's seed, budget and folder."""
        shorter = () if self.quick or self.variant in COMPARED else SMOKE
        own = [*_common(self.seed, self.quick), *shorter, f"run_dir={self.run_dir}"]
        return load_config(str(CONFIGS / f"{self.variant}.yaml"), own)


def _common(seed: int, quick: bool) -> list[str]:
    return [f"seed={seed}", f"data.seed={seed}", "checkpoint.resume=true", *(QUICK if quick else ())]


def variants() -> list[str]:
    """Those that are compared first, in their order, then the others by name."""
    names = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
    return [*COMPARED, *(name for name in names if name not in COMPARED)]


def plan(seeds: int, *, quick: bool = False, only: tuple[str, ...] = ()) -> list[Run]:
    """The runs in their order: seed by seed, so that an interrupted comparison has whole seeds. only: variants.

    Raises ConfigError if `only` names what there is not.
    """
    if unknown := [name for name in only if name not in variants()]:
        raise ConfigError(f"there is no variant {unknown[0]!r}: choose from {', '.join(variants())}")
    compared = [Run(variant, seed, quick) for group in (CORE, REMEDIES) for seed in range(seeds) for variant in group]
    others = [Run(variant, 0, quick) for variant in variants() if variant not in COMPARED]
    # Long warm-ups of their own first, so that the last hour has enough to do for all workers.
    others.sort(key=lambda run: run.warm_up.view == "shared")
    return [run for run in (*compared, *others) if not only or run.variant in only]


def with_warm_ups(runs: list[Run]) -> list[Run | WarmUp]:
    """The runs in their order, each behind what it needs; none twice."""
    works: list[Run | WarmUp] = []
    for run in runs:
        works += [*run.needs, run]
    return list(dict.fromkeys(works))


def recorded(quick: bool) -> list[Run]:
    """The runs that are done, by variant and seed, whoever asked for them."""
    folders = [folder for variant in variants() for folder in (ROOTS[quick] / variant).glob("seed*")]
    runs = [Run(folder.parent.name, int(folder.name.removeprefix("seed")), quick) for folder in folders]
    order = variants()
    return sorted((r for r in runs if r.record.exists()), key=lambda run: (order.index(run.variant), run.seed))


def is_done(work: Run | WarmUp) -> bool:
    """Whether its record exists. Raises UserError if that was made with other settings than it would have now."""
    return records.is_done(work.record, work.settings())


def training_costs(run_dir: Path) -> dict[str, float]:
    """What a training took, from the lines of its steps in metrics.jsonl: a resumed run counts whole.

    sampled_tokens: by what is trained; a simulator's are not among them. seconds: of rollouts and updates, without
    evaluations and start-up. env_calls: of the real environment, for training.
    """
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [record for record in map(json.loads, lines) if record["stage"] == "rl"]
    return {
        "sampled_tokens": sum(float(step["rollout/sampled_tokens"]) for step in steps),
        "seconds": sum(float(step["time/rollout"]) + float(step["time/update"]) for step in steps),
        "env_calls": float(steps[-1]["env_calls/training"]),
    }
