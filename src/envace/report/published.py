"""What is published about EnvACE's results, each number once and with its source. None: not known to us.

Sources: PG, the project page; S2 and S3, two articles about the paper (arXiv 2608.06197), whose own text was not at
hand. In percent. `NOTES` names what is odd or derived, by (table, row, column).
"""

from __future__ import annotations

from typing import NamedTuple

Scores = dict[str, float | None]  # column -> number

MAIN = "EnvACE-8B"  # whose rehearsals Table 3 and Figure 6 are about
BASE = "Qwen3-8B"  # what MAIN was trained from; "base" in Table 3 is presumably this one


class Rehearsal(NamedTuple):
    """A way to rehearse. by: "itself", or the name of another model that rehearses."""

    mode: str
    n: int
    by: str


NO_REHEARSAL = Rehearsal("none", 0, "")

# PG. The rows of EnvACE-8B, EnvScaler-8B and AWM-14B also in S2 and S3.
TABLE_1: dict[str, Scores] = {
    "Qwen3-1.7B": {"bfcl": 30.89, "tau2": 10.4, "vita": 1.9, "overall": 14.41},
    "Qwen3-4B": {"bfcl": 41.80, "tau2": 27.9, "vita": 9.6, "overall": 26.43},
    "Qwen3-8B": {"bfcl": 44.04, "tau2": 30.0, "vita": 11.4, "overall": 28.48},
    "Simulator-8B": {"bfcl": 19.78, "tau2": 38.5, "vita": 1.8, "overall": 20.03},
    "TOUCAN-7B": {"bfcl": 35.33, "tau2": 22.4, "vita": 2.8, "overall": 20.18},
    "AWM-8B": {"bfcl": 44.29, "tau2": 31.2, "vita": 10.2, "overall": 28.56},
    "AWM-14B": {"bfcl": 47.32, "tau2": 30.7, "vita": 19.6, "overall": 32.54},
    "EnvScaler-8B": {"bfcl": 47.07, "tau2": 32.9, "vita": 15.8, "overall": 31.92},
    "ScaleEnv-8B": {"bfcl": None, "tau2": 38.5, "vita": 15.0, "overall": None},
    "EnvACE-1.7B": {"bfcl": 31.81, "tau2": 15.3, "vita": 3.2, "overall": 16.77},
    "EnvACE-8B": {"bfcl": 46.04, "tau2": 36.7, "vita": 16.0, "overall": 32.91},
}

# EnvACE: S2, S3 and the README of the released code. The others: S3 prints EnvACE's gains over them, 4.28 and 3.10.
TABLE_2: dict[str, Scores] = {
    "AWM-8B": {"tp": None, "tr": None, "tf1": 42.50},
    "EnvScaler-8B": {"tp": None, "tr": None, "tf1": 43.68},
    "EnvACE-8B": {"tp": 54.04, "tr": None, "tf1": 46.78},
}

# PG; delta as printed there.
TABLE_3: dict[Rehearsal, Scores] = {
    NO_REHEARSAL: {"tau2": 31.4, "multi_turn": 41.9, "overall": 36.7, "delta": None},
    Rehearsal("parallel", 2, BASE): {"tau2": 32.2, "multi_turn": 41.4, "overall": 36.8, "delta": 0.1},
    Rehearsal("parallel", 2, "itself"): {"tau2": 38.0, "multi_turn": 43.9, "overall": 40.9, "delta": 4.2},
    Rehearsal("sequential", 2, BASE): {"tau2": 31.0, "multi_turn": 38.8, "overall": 34.9, "delta": -1.8},
    Rehearsal("sequential", 2, "itself"): {"tau2": 34.8, "multi_turn": 42.3, "overall": 38.5, "delta": 2.4},
}

# tau2-bench by training variant, besides EnvACE itself (Table 1). 8B: S2, and S3 prints the gaps 5.5 and 1.2. 1.7B:
# only that EnvACE is best.
FIGURE_3: dict[str, float | None] = {"GRPO-8B": 31.2, "Per-role-8B": 35.5, "GRPO-1.7B": None, "Per-role-1.7B": None}

# tau2-bench by RL step: S2 and S3, which call it rising with fluctuations.
FIGURE_5: dict[float, float] = {50: 30.0, 470: 36.7}

NOTES: dict[tuple[int, str | Rehearsal, str], str] = {
    (1, "Qwen3-1.7B", "overall"): "Printed 14.41; the mean of the three is 14.40.",
    (1, "Qwen3-1.7B", "tau2"): "Below what an agent that does nothing gets, whichever mean over domains is taken.",
    (1, "EnvACE-1.7B", "tau2"): (
        "Below what an agent that does nothing gets in the plain mean over domains, above it in the mean weighted by "
        "tasks; which of the two is printed is not known."
    ),
    (1, "EnvACE-8B", "tau2"): "Table 3 has 31.4 for the same model without rehearsal; why is not known.",
    (2, "AWM-8B", "tf1"): "Calculated from a printed gain of 4.28.",
    (2, "EnvScaler-8B", "tf1"): "Calculated from a printed gain of 3.10.",
    (2, "EnvACE-8B", "tr"): "Not printed; 41.24 if TF1 is the harmonic mean of TP and TR.",
    (3, NO_REHEARSAL, "tau2"): "Table 1 has 36.7 for the same model; why is not known.",
    (3, NO_REHEARSAL, "overall"): "The mean of this row; that Table 1 has 36.7 on tau2-bench alone is a coincidence.",
    (3, Rehearsal("parallel", 2, BASE), "tau2"): f"By an untrained base model; that it is {BASE} is inferred.",
    (3, Rehearsal("sequential", 2, "itself"), "delta"): "Printed +2.4; 38.5 - 36.7 is +1.8.",
}
