"""Figures: the right numbers reach the curve, what was not measured says so, the table rounds and averages right."""

import json
import math

import pytest
from matplotlib.figure import Figure

from envace.report.figures import learning_curve, markdown_table

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were saved, for a look at their lines."""
    figures, save = [], Figure.savefig

    def savefig(figure, path, **settings):
        figures.append(figure)
        save(figure, path, **settings)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return figures


def write(path, records, stage="rl"):
    path.write_text("".join(json.dumps({"stage": stage, "time": 1.0, **record}) + "\n" for record in records))
    return path


def rewards(*values):
    return [{"step": step, "reward/mean": value} for step, value in enumerate(values)]


def lines(axes):
    return [list(zip(*line.get_data(), strict=True)) for line in axes.get_lines()]


def test_a_run_gives_a_picture_with_all_four_curves(tmp_path, drawn):
    records = rewards(0.1, 0.2, 0.4)
    for record, real, rehearsed in ((records[0], 0.3, 0.5), (records[2], 0.6, 0.7)):
        record |= {"eval/real_success": real, "eval/rehearsed_success": rehearsed}
        record |= {"eval/imagination_gap": rehearsed - real}
    learning_curve(write(tmp_path / "metrics.jsonl", records), tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(PNG)
    reward, success, gap = drawn[0].axes
    assert lines(reward) == [[(0, 0.1), (1, 0.2), (2, 0.4)]]
    assert lines(success) == [[(0, 0.5), (2, 0.7)], [(0, 0.3), (2, 0.6)]]
    assert [text.get_text() for text in success.get_legend().get_texts()] == ["rehearsed", "real"]
    assert gap.get_lines()[0].get_ydata() == pytest.approx([0.2, 0.1])


def test_the_mean_of_seeds_covers_the_steps_they_share(tmp_path, drawn):
    paths = [
        write(tmp_path / "0.jsonl", rewards(0.0, 0.25, 1.0)),
        write(tmp_path / "1.jsonl", rewards(0.5, 0.75)),
    ]
    learning_curve(paths, tmp_path / "curve.png")
    thin, other, mean = drawn[0].axes[0].get_lines()
    assert mean.get_xydata().tolist() == [[0, 0.25], [1, 0.5]]
    assert mean.get_linewidth() > 2 * thin.get_linewidth() == 2 * other.get_linewidth()
    assert "2 seeds" in drawn[0].get_supxlabel()


def test_other_stages_are_left_out_and_a_repeated_step_counts_as_it_was_last(tmp_path, drawn):
    path = write(tmp_path / "metrics.jsonl", [*rewards(0.1, 0.2), {"step": 1, "reward/mean": 0.9}])
    sft = write(tmp_path / "sft.jsonl", rewards(0.5, 0.5, 0.5), stage="sft")
    path.write_text(sft.read_text() + path.read_text())
    learning_curve(path, tmp_path / "curve.png")
    assert lines(drawn[0].axes[0]) == [[(0, 0.1), (1, 0.9)]]
    with pytest.raises(ValueError, match=r"sft.jsonl has no metrics of stage 'rl'"):
        learning_curve(sft, tmp_path / "curve.png")


def test_nan_is_a_gap_and_missing_evaluations_say_so(tmp_path, drawn):
    paths = [write(tmp_path / f"{seed}.jsonl", rewards(0.1, "NaN" if seed else 0.2, 0.3)) for seed in range(2)]
    learning_curve(paths, tmp_path / "curve.png")
    reward, success, gap = drawn[0].axes
    assert [math.isnan(y) for y in reward.get_lines()[-1].get_ydata()] == [False, True, False]
    assert [axes.texts[0].get_text() for axes in (success, gap)] == ["not measured"] * 2


def run(seed, **rl):
    return {
        "seeds": [seed],
        "sft": {"real_success": 0.5, "greedy": 0.55, "ci": [0.45, 0.551]},
        "rl": {"real_success": 0.75, "greedy": 0.8, "ci": (0.7, 0.8), "rehearsed_success": 0.77}
        | {"fidelity_by_round": {0: 0.7, 1: math.nan}}
        | rl,
        "gain": {"ci": [0.2, 0.3]},
        "controls": {"nothing": 0.05, "random": 0.01, "constant_response": 0.2},
        "env_calls_in_training": 0,
        "seconds": {"sft": 100.25, "rl": 300, "eval": 50.0},
        "peak_rss_gb": 1.93,
    }


def read_tables(path):
    """One dict a table: {first cell: other cells}."""
    tables = [block.splitlines() for block in path.read_text().split("\n\n") if block.startswith("|")]
    cells = [[[cell.strip() for cell in line.strip("|").split("|")] for line in table] for table in tables]
    return [{line[0]: line[1:] for line in table} for table in cells]


def test_the_table_of_one_run(tmp_path):
    markdown_table(run(0), tmp_path / "table.md")
    success, controls, fidelity, cost = read_tables(tmp_path / "table.md")
    assert dict(zip(success["seed"], success["0"], strict=True)) == {
        "SFT": "50.0",
        "SFT 95% CI": "[45.0, 55.1]",
        "RL": "75.0",
        "RL 95% CI": "[70.0, 80.0]",
        "gain": "25.0",
        "gain 95% CI": "[20.0, 30.0]",
        "SFT greedy": "55.0",
        "RL greedy": "80.0",
        "RL rehearsed": "77.0",
    }
    assert controls["seed"] == ["nothing", "random", "constant_response"]
    assert controls["0"] == ["5.0", "1.0", "20.0"]
    assert fidelity["0"] == ["70.0", "nan"]
    assert cost["0"] == ["0", "100.2", "300", "50.0", "1.9"]


def test_several_seeds_get_a_row_each_and_a_mean(tmp_path):
    deeper = run(4, real_success=0.8, fidelity_by_round={"0": 0.9, "1": 0.5, "2": 1.0})
    markdown_table({"seeds": [3, 4], "runs": [run(3), deeper]}, tmp_path / "table.md")
    success, _, fidelity, _ = read_tables(tmp_path / "table.md")
    assert list(success) == ["seed", "---:", "3", "4", "mean"]
    assert success["mean"] == ["50.0", "", "77.5", "", "27.5", "", "55.0", "80.0", "77.0"]
    # Seed 3 never reached round 2, so there is no mean over both.
    assert fidelity["seed"] == ["round 0", "round 1", "round 2"]
    assert fidelity["3"] == ["70.0", "nan", ""] and fidelity["mean"] == ["80.0", "nan", ""]
