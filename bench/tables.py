"""What the measurements of each case say, beside what they should: one row a comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

Runs = dict[str, list[dict[str, Any]]]  # variant -> what each repetition has measured


@dataclass(frozen=True)
class Row:
    """ours, other: medians, with units. is_met: None where there is no goal."""

    what: str
    ours: str
    other: str
    ratio: str
    goal: str = ""
    is_met: bool | None = None


def middle(runs: list[dict[str, Any]], *path: str) -> float:
    """The median of what lies at `path` in each repetition."""

    def at(found: Any) -> float:
        for key in path:
            found = found[key]
        return found

    return median(at(run) for run in runs)


def step(runs: Runs) -> Iterator[Row]:
    """Raises ValueError if the sides did not sample equally many tokens."""
    if len({run["sampled_tokens"] for measured in runs.values() for run in measured}) > 1:
        raise ValueError("the two sides did not sample equally many tokens")
    for threads in ("1 threads", "2 threads"):
        trl = runs[f"trl, {threads}"]
        for side, how in (("ours", "step"), ("ours, compiled", "step with compiled decoding")):
            for name, unit, goal in (("cpu_s", "CPU s", 0.5), ("wall_s", "s", None), ("peak_mib", "MiB", None)):
                a, b = middle(runs[f"{side}, {threads}"], name), middle(trl, name)
                what = f"GRPO {how} against TRL {trl[0]['trl']}, {threads.replace('1 threads', '1 thread')}, {unit}"
                goals = (f"at most {goal}", a / b <= goal) if goal else ()
                yield Row(what, f"{a:.2f}", f"{b:.2f}", f"{a / b:.2f}", *goals)


def kv(runs: Runs) -> Iterator[Row]:
    """Raises ValueError if the ways of generating wrote different tokens."""
    kept, prefilled = runs["kept"], runs["prefilled"]
    for cell in kept[0]:
        if len({run[cell]["written"] for run in [*kept, *prefilled]}) > 1:
            raise ValueError(f"{cell}: with and without the kept cache, different tokens were written")
        a, b = middle(kept, cell, "cpu_s"), middle(prefilled, cell, "cpu_s")
        goals = ("at most 0.5", a / b <= 0.5) if cell == "10 turns, 4096 tokens" else ()
        yield Row(f"cache kept against prefilled, {cell}, CPU s", f"{a:.2f}", f"{b:.2f}", f"{a / b:.2f}", *goals)
    share, low, high = turn_term(kept)
    yield Row(
        "seconds a token, cache kept: what 30 turns add to the fit a + b * context at 4096 tokens",
        f"{100 * share:+.1f} % [{100 * low:+.1f}, {100 * high:+.1f}]",
        "",
        "",
        "from 0 or below to at most +5 %",
        low <= 0 and high <= 0.05,
    )


def turn_term(kept: list[dict[str, Any]]) -> tuple[float, float, float]:
    """(share, low, high): 30 times the coefficient of the turn's number in seconds ~ 1 + context + turn, over the
    fitted seconds at 4096 tokens and turn 0, with a 95 % interval.

    Least squares over all cells, medians over repetitions; the first turn, which prefills the prompt, is left out.
    """
    rows, seconds = [], []
    for cell in kept[0]:
        for turn in range(1, len(kept[0][cell]["by_turn"])):
            rows.append([1.0, kept[0][cell]["by_turn"][turn][0], float(turn)])
            seconds.append(median(run[cell]["by_turn"][turn][1] for run in kept))
    x, y = np.array(rows), np.array(seconds)
    fit, *_ = np.linalg.lstsq(x, y, rcond=None)
    residual = y - x @ fit
    covariance = np.linalg.inv(x.T @ x) * (residual @ residual) / (len(y) - x.shape[1])
    base = fit[0] + 4096 * fit[1]
    share, half = 30 * fit[2] / base, 1.96 * 30 * covariance[2, 2] ** 0.5 / base
    return float(share), float(share - half), float(share + half)


def layout(runs: Runs) -> Iterator[Row]:
    sequence, outputs, equal = runs["sequence"], runs["outputs"], runs["equal"]
    for cell in sequence[0]:
        goals = {"tokens": 1 / 4, "cpu_s": 1 / 3} if cell == "10 turns" else {}
        for name, title in (("tokens", "tokens"), ("cpu_s", "CPU s"), ("added_mib", "MiB added")):
            a, b = middle(sequence, cell, name), middle(outputs, cell, name)
            goal = (f"at most {goals[name]:.2f}", a / b <= goals[name]) if name in goals else ()
            what = f"update, row a sequence against row an output, {cell}, {title}"
            yield Row(what, f"{a:.4g}", f"{b:.4g}", f"{a / b:.2f}" if b else "", *goal)
        difference = middle(equal, cell, "relative_difference")
        yield Row(
            f"their gradients, {cell}, relative difference", f"{difference:.1e}", "", "", "1e-5", difference < 1e-5
        )


def logprobs(runs: Runs) -> Iterator[Row]:
    chunks, whole = (middle(runs[name], "added_mib") for name in ("chunks", "whole"))
    ratio = chunks / whole
    title = "log-probabilities in chunks against whole logits, MiB added"
    yield Row(title, f"{chunks:.0f}", f"{whole:.0f}", f"{ratio:.2f}", "at most 0.25", ratio <= 0.25)


def judging(runs: Runs) -> Iterator[Row]:
    """Raises ValueError if the rollouts did other work."""
    if len({run["outputs"] for measured in runs.values() for run in measured}) > 1:
        raise ValueError("with and without the judge, not equally many outputs were written")
    judging, waited = (middle(runs["judged"], name) for name in ("judging_s", "waited_s"))
    hidden = 1 - waited / judging
    title = "a rollout's waiting for its judge against the time of judging, s; hidden:"
    yield Row(title, f"{waited:.2f}", f"{judging:.2f}", f"{100 * hidden:.0f} %", "at least 80 %", hidden >= 0.8)
    judged, alone = (middle(runs[name], "wall_s") for name in ("judged", "none"))
    yield Row("rollout with a judge against without, s", f"{judged:.2f}", f"{alone:.2f}", f"{judged / alone:.2f}")


def rehearsal(runs: Runs) -> Iterator[Row]:
    one = middle(runs["N=1"], "cpu_s")
    for name, goal in (("N=2", None), ("N=8", 4)):
        many = middle(runs[name], "cpu_s")
        goals = (f"at most {goal}", many / one <= goal) if goal else ()
        title = f"private rehearsals in one batch, {name} against N=1, CPU s"
        yield Row(title, f"{many:.2f}", f"{one:.2f}", f"{many / one:.2f}", *goals)


def driver(runs: Runs) -> Iterator[Row]:
    whole, generating = (middle(runs["rollout"], name) for name in ("cpu_s", "generating_s"))
    share = 1 - generating / whole
    title = "rollout of the demo against generating alone, CPU s; outside:"
    yield Row(title, f"{whole:.2f}", f"{generating:.2f}", f"{100 * share:.1f} %", "below 15 %", share < 0.15)


TABLES: dict[str, Callable[[Runs], Iterator[Row]]] = {
    "step": step,
    "kv": kv,
    "layout": layout,
    "logprobs": logprobs,
    "judging": judging,
    "rehearsal": rehearsal,
    "driver": driver,
}


def render(results: dict[str, Runs]) -> str:
    """A Markdown table of the cases that were measured."""
    head = ("what", "ours", "other", "ours / other, or share", "goal", "met")
    lines = [head, ("---",) * len(head)]
    for name, table in TABLES.items():
        if name in results:
            met = {True: "yes", False: "NO", None: ""}
            lines += [(r.what, r.ours, r.other, r.ratio, r.goal, met[r.is_met]) for r in table(results[name])]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
