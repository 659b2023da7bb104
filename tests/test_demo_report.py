"""`python -m envace.demo` in miniature: every stage runs and the report has what it promises."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_the_demo_writes_its_report(tmp_path):
    settings = ["data.demonstrations=32", "data.train_tasks=8", "data.eval_tasks=4", "sft.steps=2", "rl.steps=1"]
    settings += [
        "eval.tasks=2",
        "rl.prompts_per_step=2",
        "rl.group_size=2",
        "rollout.max_new_tokens=8",
        f"run_dir={tmp_path}",
    ]
    command = [sys.executable, "-m", "envace.demo", "--seeds", "2", *settings]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]

    report = json.loads((tmp_path / "report.json").read_text())
    assert report["seeds"] == [0, 1] and len(report["runs"]) == 2
    for run in report["runs"]:
        for stage in ("sft", "rl"):
            assert 0 <= run[stage]["real_success"] <= 1
            assert 0 <= run[stage]["greedy"] <= 1
            low, high = run[stage]["ci"]
            assert low <= run[stage]["real_success"] <= high
        assert len(run["gain"]["ci"]) == 2
        assert {"nothing", "random", "constant_response"} <= run["controls"].keys()
        assert 0 <= run["rl"]["rehearsed_success"] <= 1
        assert isinstance(run["rl"]["fidelity_by_round"], dict)
        assert run["env_calls_in_training"] == 0
        assert {"sft", "rl", "eval"} <= run["seconds"].keys()
        assert 0 < run["peak_rss_gb"] < 4
    assert (tmp_path / "table.md").read_text().count("|") > 20
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_bad_setting_ends_the_demo_with_one_line():
    done = subprocess.run(
        [sys.executable, "-m", "envace.demo", "rl.stepz=1"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith("did you mean rl.steps?")
