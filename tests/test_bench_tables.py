"""What bench/ concludes from its measurements, on measurements whose conclusion is known."""

import pytest

from bench.measure import MARK, read
from bench.tables import TABLES, render, turn_term


def kept(per_turn, context=1e-6):
    """Measurements of `kv` where a token costs 1 ms + `context` a token of context + `per_turn` a turn."""
    dice = iter(range(10**6))

    def cell(turns, tokens):
        by_turn = []
        for turn in range(turns):
            before = tokens + 40 * turn
            noise = 1e-7 * ((next(dice) * 7919) % 11 - 5)
            by_turn.append((before, 1e-3 + context * before + per_turn * turn + noise))
        return {"cpu_s": 1.0, "wall_s": 1.0, "by_turn": by_turn, "written": "same"}

    return [{f"{turns} turns, {tokens} tokens": cell(turns, tokens) for turns in (5, 30) for tokens in (1024, 4096)}]


def test_a_cost_of_turns_is_found_and_one_of_context_is_not_taken_for_it():
    share, low, high = turn_term(kept(0.0))
    assert low <= 0 <= high and abs(share) < 0.01
    share, low, high = turn_term(kept(1e-4))
    assert share == pytest.approx(30e-4 / (1e-3 + 4096e-6), rel=0.01) and low > 0


def test_ratios_are_of_medians_and_goals_are_said():
    ours = [{"cpu_s": c, "wall_s": 1.0, "peak_mib": 1.0, "sampled_tokens": 2400} for c in (4.0, 5.0, 90.0)]
    trl = [{"cpu_s": c, "wall_s": 2.0, "peak_mib": 2.0, "sampled_tokens": 2400, "trl": "1"} for c in (9.0, 10.0, 11.0)]
    sides = (("ours", ours), ("ours, compiled", ours), ("trl", trl))
    runs = {f"{name}, {n} threads": measured for n in (1, 2) for name, measured in sides}
    [first, *_] = TABLES["step"](runs)
    assert (first.ours, first.other, first.ratio, first.is_met) == ("5.00", "10.00", "0.50", True)
    assert "| GRPO step against TRL 1, 1 thread, CPU s | 5.00 | 10.00 | 0.50 | at most 0.5 | yes |" in render(
        {"step": runs}
    )
    ours[1]["cpu_s"] = 5.1
    assert "| at most 0.5 | NO |" in render({"step": runs})


def test_a_term_that_noise_hides_does_not_meet_the_goal():
    """An interval that holds 0 because it is wide shows nothing."""
    noisy = kept(0.0)
    for cell in noisy[0].values():
        cell["by_turn"] = [(before, s + 2e-3 * (-1) ** n) for n, (before, s) in enumerate(cell["by_turn"])]
    for measured, is_met in ((kept(0.0), True), (noisy, False), (kept(1e-4), False)):
        *_, fit = TABLES["kv"]({"kept": measured, "prefilled": measured})
        assert fit.is_met is is_met


def test_memory_that_was_not_added_has_no_ratio():
    cell = {"tokens": 100, "cpu_s": 1.0, "added_mib": 0.0}
    runs = {"sequence": [{"5 turns": cell}], "outputs": [{"5 turns": cell}]}
    runs["equal"] = [{"5 turns": {"relative_difference": 1e-7}}]
    assert [row.ratio for row in TABLES["layout"](runs)] == ["1.00", "1.00", "", ""]


def test_sides_that_did_other_work_are_not_compared():
    side = [{"cpu_s": 1.0, "wall_s": 1.0, "peak_mib": 1.0, "sampled_tokens": 2400, "trl": "1"}]
    runs = {f"{name}, {n} threads": side for n in (1, 2) for name in ("ours", "ours, compiled", "trl")}
    runs["ours, 1 threads"] = [side[0] | {"sampled_tokens": 2399}]
    with pytest.raises(ValueError, match="equally many tokens"):
        list(TABLES["step"](runs))
    other = kept(0.0)
    other[0]["5 turns, 1024 tokens"] = other[0]["5 turns, 1024 tokens"] | {"written": "other"}
    judged = {"wall_s": 1.0, "judging_s": 1.0, "waited_s": 0.1, "outputs": 5}
    with pytest.raises(ValueError, match="not equally many outputs"):
        list(TABLES["judging"]({"none": [judged], "judged": [judged | {"outputs": 6}]}))
    with pytest.raises(ValueError, match="5 turns, 1024 tokens: .* different tokens"):
        list(TABLES["kv"]({"kept": kept(0.0), "prefilled": other}))


def test_numbers_are_read_behind_whatever_else_is_printed():
    assert read(f"noise\n{MARK}" + '{"cpu_s": 1}\nmore noise') == {"cpu_s": 1}
    with pytest.raises(ValueError, match="no numbers"):
        read("noise")
