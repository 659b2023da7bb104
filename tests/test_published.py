"""The published numbers: every aggregate is recomputed from its parts, so that a slip of the pen shows."""

from statistics import fmean

import pytest

from envace.report.ablations import CLAIMS
from envace.report.published import (
    BASE,
    FIGURE_3,
    FIGURE_5,
    NO_REHEARSAL,
    NOTES,
    TABLE_1,
    TABLE_2,
    TABLE_3,
    Rehearsal,
)
from envace.report.results import TAU2, TAU2_WEIGHTED

# Where the print itself is off: what it should be.
RECOMPUTED_1 = {"Qwen3-1.7B": 14.40}
RECOMPUTED_GAIN = {Rehearsal("sequential", 2, "itself"): 1.8}


@pytest.mark.parametrize("name", [name for name, row in TABLE_1.items() if row["overall"] is not None])
def test_overall_of_table_1_is_the_mean_of_the_three(name):
    row = TABLE_1[name]
    mean = fmean(row[key] for key in ("bfcl", "tau2", "vita"))
    assert round(mean, 2) == pytest.approx(RECOMPUTED_1.get(name, row["overall"]), abs=0.0051)
    assert row["overall"] == pytest.approx(mean, abs=0.015)


def test_only_a_row_with_a_gap_has_no_overall():
    gaps = {name for name, row in TABLE_1.items() if None in (row["bfcl"], row["tau2"], row["vita"])}
    assert gaps == {name for name, row in TABLE_1.items() if row["overall"] is None} == {"ScaleEnv-8B"}
    assert len(TABLE_1) == 11


@pytest.mark.parametrize("rehearsal", TABLE_3, ids=str)
def test_overall_and_gain_of_table_3(rehearsal):
    row = TABLE_3[rehearsal]
    assert row["overall"] == pytest.approx(fmean([row["tau2"], row["multi_turn"]]), abs=0.051)
    if rehearsal != NO_REHEARSAL:
        gain = RECOMPUTED_GAIN.get(rehearsal, row["delta"])
        assert row["overall"] - TABLE_3[NO_REHEARSAL]["overall"] == pytest.approx(gain, abs=0.01)


def test_the_gain_that_is_printed_wrong_has_a_note_and_no_other_has():
    assert TABLE_3[Rehearsal("sequential", 2, "itself")]["delta"] == 2.4
    assert {key[1] for key in NOTES if key[0] == 3 and key[2] == "delta"} == set(RECOMPUTED_GAIN)
    assert {key[1] for key in NOTES if key[0] == 1 and key[2] == "overall"} == set(RECOMPUTED_1)


def test_gains_that_are_printed_elsewhere():
    assert TABLE_2["EnvACE-8B"]["tf1"] - TABLE_2["EnvScaler-8B"]["tf1"] == pytest.approx(3.10)
    assert TABLE_2["EnvACE-8B"]["tf1"] - TABLE_2["AWM-8B"]["tf1"] == pytest.approx(4.28)
    tau2 = TABLE_1["EnvACE-8B"]["tau2"]
    assert tau2 - FIGURE_3["GRPO-8B"] == pytest.approx(5.5) == CLAIMS["grpo"]
    assert tau2 - FIGURE_3["Per-role-8B"] == pytest.approx(1.2) == CLAIMS["per_role_policy"]
    assert TABLE_1["EnvACE-8B"]["bfcl"] - TABLE_1["EnvACE-1.7B"]["bfcl"] == pytest.approx(14.23)
    assert tau2 - TABLE_1["EnvACE-1.7B"]["tau2"] == pytest.approx(21.4)


def test_the_precision_and_f1_of_finmcp_say_what_the_recall_would_be():
    tp, tf1 = TABLE_2["EnvACE-8B"]["tp"], TABLE_2["EnvACE-8B"]["tf1"]
    assert tp * tf1 / (2 * tp - tf1) == pytest.approx(41.24, abs=0.005)
    assert "41.24" in NOTES[2, "EnvACE-8B", "tr"] and TABLE_2["EnvACE-8B"]["tr"] is None


def test_what_the_notes_claim():
    assert {key[1:] for key in NOTES if key[0] == 1} <= {(name, column) for name in TABLE_1 for column in TABLE_1[name]}
    assert {key[1:] for key in NOTES if key[0] == 2} <= {(name, column) for name in TABLE_2 for column in TABLE_2[name]}
    assert {key[1:] for key in NOTES if key[0] == 3} <= {(way, column) for way in TABLE_3 for column in TABLE_3[way]}
    assert TABLE_1["Qwen3-1.7B"]["tau2"] < TAU2_WEIGHTED < TABLE_1["EnvACE-1.7B"]["tau2"] < TAU2.floor
    assert TABLE_3[NO_REHEARSAL]["tau2"] == 31.4 and TABLE_1["EnvACE-8B"]["tau2"] == 36.7
    assert {way.by for way in TABLE_3} == {"", "itself", BASE} and BASE in TABLE_1
    # At step 50 it is what the untrained model has, and at the end the trained one's.
    assert FIGURE_5 == {50: TABLE_1[BASE]["tau2"], 470: TABLE_1["EnvACE-8B"]["tau2"]}


def test_floors():
    assert (round(TAU2.floor, 1), round(TAU2_WEIGHTED, 1)) == (18.5, 12.2)
