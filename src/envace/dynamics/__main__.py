"""Evaluate every model that a training exported: success over its steps, and how errors accumulate within an episode.

    python -m envace.dynamics --config configs/demo.yaml [key=value ...]

Give it the settings of the training, which had checkpoint.export_every > 0. Each export is evaluated as evaluate.py
does, in <run_dir>/dynamics/step-000010 and so on. Writes <run_dir>/dynamics.json and dynamics.png: real and rehearsed
success over the steps with 95% bootstrap intervals over tasks, and of the last export the rehearsal fidelity by
interaction round and the real success by number of rounds.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import evaluate
from envace.checkpoints import exports
from envace.console import conclude, run
from envace.data import ExecutableSource, open_source
from envace.report.dynamics import draw
from envace.settings import Config
from envace.tracking import logger, without_nan
from envace.types import UserError

CURVE = ("real_success", "ci", "rehearsed_success", "rehearsed_ci", "imagination_gap", "fidelity_by_round")


def main(config: Config) -> dict[str, Any]:
    run_dir = Path(config.run_dir)
    if not isinstance(open_source(config), ExecutableSource):
        raise UserError(f"data.source={config.data.source} has no executable environment to evaluate in")
    if not (found := exports(run_dir)):
        raise UserError(f"{run_dir} has no exports: train with checkpoint.export_every=10, or set run_dir")
    curve = []
    for step, folder in found.items():
        results = evaluate.main(of_export(config, folder))
        logger.info("step %d: real success %.3f", step, results["real_success"])
        curve.append({"step": step, **{key: results[key] for key in CURVE}})
    report = {
        "tasks": results["tasks"],
        "samples": results["samples"],
        "curve": curve,
        "last": {key: results[key] for key in ("fidelity_by_round", "success_by_rounds")},
    }
    text = json.dumps(without_nan(report), indent=2, ensure_ascii=False)
    (run_dir / "dynamics.json").write_text(text + "\n", encoding="utf-8")
    draw(report, run_dir / "dynamics.png")
    conclude({"report": f"{run_dir / 'dynamics.json'} and {run_dir / 'dynamics.png'}"})
    return report


def of_export(config: Config, folder: Path) -> Config:
    """The settings of its evaluation, beside the run's own records."""
    rehearse = folder.with_name(f"{folder.name}_rehearse") if config.rl.team == "per_role" else ""
    return replace(
        config,
        model=replace(config.model, path=str(folder), rehearse_path=str(rehearse)),
        run_dir=str(Path(config.run_dir) / "dynamics" / folder.name),
    )


if __name__ == "__main__":
    run(main, __doc__)
