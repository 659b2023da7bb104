"""The paper's tables and figures: what of our own runs reaches which cell, what does not, and that names stay names."""

import json
import re
import sys
from pathlib import Path

import pytest

from envace import tables as entry
from envace.benchmarks import finmcp
from envace.benchmarks.bfcl import AGENTIC, BFCL, MULTI_TURN
from envace.benchmarks.sizes import TASKS
from envace.report.paper_figures import budget, dynamics, scaling, variants
from envace.report.published import NO_REHEARSAL, TABLE_1, TABLE_2, TABLE_3
from envace.report.render import Cell, Table, latex, markdown, printable
from envace.report.results import FINMCP, TAU2, VITA, mean_of, measured, read_results
from envace.report.tables import PARTIAL, own_runs, shown, table_1, table_2, table_3
from envace.tables import names_of, write
from envace.types import UserError

DOMAINS = {"airline": 50, "retail": 114, "telecom": 114}
PLAIN = {"mode": "none", "n": 2, "path": "", "verify": "none", "select": "all", "shuffle": False}


def part(score, tasks, faults=0, null=0.0):
    return {"score": score, "tasks": tasks, "faults": faults, "null": null, "details": {}}


def trial(overall, parts, missing=()):
    return {"number": 0, "seed": 0, "parts": parts, "overall": overall, "missing": list(missing)}


def tau2_trial(macro, **changed):
    parts = {domain: part(macro, tasks) for domain, tasks in DOMAINS.items()}
    return trial({"macro": macro, "weighted": macro}, parts | changed)


def bfcl_trial(overall, multi_turn, missing=()):
    parts = {name: part(50.0, TASKS["bfcl"].get(name, 200)) for name in BFCL.parts if name not in missing}
    return trial({"overall": overall, "multi_turn": multi_turn}, parts, missing)


def vita_trial(macro):
    return trial({"macro": macro}, {name: part(macro, 100) for name in ("delivery", "instore", "ota", "cross_domain")})


def put(run, benchmark, trials, name="EnvACE-8B", *, limit="all", folder="", **rehearsal):
    """A results.json as evaluate.py writes it, as far as the tables read it."""
    record = {
        "benchmark": benchmark,
        "harness": {"name": benchmark, "version": "1.0"},
        "model": {"name": name, **({"path": folder, "sha256": {}} if folder else {"backend": "http://host/v1"})},
        "rehearsal": PLAIN | rehearsal,
        "user": {"url": "http://user/v1", "model": "a-user"} if benchmark == "tau2" else None,
        "judge": None,
        "tasks_per_part": limit,
        "trials": trials,
    }
    (Path(run) / benchmark).mkdir(parents=True)
    (Path(run) / benchmark / "results.json").write_text(json.dumps(record))
    return Path(run)


def cells(table, *key):
    """{column: text with marks} of the row that starts so."""
    [row] = [row for row in table.rows if tuple(cell.text for cell in row[: len(key)]) == key]
    texts = [cell.text + (f" {cell.marks}" if cell.marks else "") for cell in row]
    return dict(zip(table.columns, texts, strict=True))


def test_without_a_run_every_cell_of_ours_is_empty():
    for table, printed in ((table_1([]), TABLE_1), (table_2([]), TABLE_2), (table_3([]), TABLE_3)):
        floor, *rows = table.rows
        assert len(rows) == len(printed) and floor[0].text.startswith("floor")
        ours = [i for i, column in enumerate(table.columns) if ", ours" in column]
        assert ours and all(row[i] == Cell("") for row in rows for i in ours)


def test_golden_table_1(tmp_path):
    run = put(tmp_path / "a", "bfcl", [bfcl_trial(46.0, 40.0), bfcl_trial(47.0, 41.0)])
    put(run, "tau2", [tau2_trial(30.0), tau2_trial(40.0)])
    put(run, "vita", [vita_trial(10.0), vita_trial(12.0)])
    table = table_1(read_results([run], {}))
    assert cells(table, "EnvACE-8B") == {
        "model": "EnvACE-8B",
        "BFCL-v4, paper": "46.04",
        "BFCL-v4, ours": "46.50 [40.15, 52.85], 2 × 5425",
        "τ²-bench, paper": "36.7 d",
        "τ²-bench, ours": "35.0 [-28.5, 98.5], 2 × 278",
        "VitaBench, paper": "16.0",
        "VitaBench, ours": "11.0 [-1.7, 23.7], 2 × 400",
        "Overall, paper": "32.91",
        # (46+30+10)/3 and (47+40+12)/3: 28.67 and 33.
        "Overall, ours": "30.83 [3.30, 58.36]",
    }
    floor = cells(table, "floor: an agent that does nothing")
    assert [floor[f"{name}, ours"] for name in ("BFCL-v4", "τ²-bench", "VitaBench")] == ["10.00", "18.5", "0.0"]
    assert floor["Overall, ours"] == "9.52" and floor["Overall, paper"] == ""
    assert cells(table, "Qwen3-8B")["BFCL-v4, ours"] == ""


def test_a_model_that_the_paper_does_not_have_gets_a_row_of_its_own(tmp_path):
    run = put(tmp_path / "a", "tau2", [tau2_trial(20.0)], name="demo")
    table = table_1(read_results([run], {}))
    assert table.rows[-1][0].text == "demo" and len(table.rows) == len(TABLE_1) + 2
    row = cells(table, "demo")
    assert row["τ²-bench, ours"] == "20.0 [-], 1 × 278"
    assert [row[column] for column in table.columns if "paper" in column] == [""] * 4
    assert row["Overall, ours"] == ""
    named = table_1(read_results([run], {run: "Qwen3-4B"}))
    assert cells(named, "Qwen3-4B")["τ²-bench, ours"] == "20.0 [-], 1 × 278"


@pytest.mark.parametrize(
    ("trials", "limit", "shown_as", "reason"),
    [
        ([tau2_trial(20.0)], 10, "20.0 [-], 1 × 278 †", "only the first 10 tasks of each part"),
        (
            [trial({"macro": 20.0}, {"airline": part(20.0, 50), "retail": part(20.0, 114)}, ["telecom"])],
            "all",
            "20.0 [-], 1 × 164 †",
            "without telecom",
        ),
        (
            [tau2_trial(20.0, telecom=part(None, 0, 114))],
            "all",
            "20.0 [-], 1 × 164 †",
            "without telecom; 114 tasks ended by faults",
        ),
        (
            [tau2_trial(20.0, airline=part(20.0, 48, 2)), tau2_trial(20.0)],
            "all",
            "20.0 [20.0, 20.0], 2 × 276–278 †",
            "2 tasks ended by faults",
        ),
        (
            [tau2_trial(20.0), trial({}, {})],
            "all",
            "20.0 [-], 1 × 278 †",
            "without airline, retail, telecom; 1 of 2 trials",
        ),
    ],
)
def test_a_partial_run_is_marked_and_nothing_is_calculated_from_it(tmp_path, trials, limit, shown_as, reason):
    run = put(tmp_path / "a", "tau2", trials, limit=limit)
    put(run, "bfcl", [bfcl_trial(46.0, 40.0)])
    put(run, "vita", [vita_trial(10.0)])
    table = table_1(read_results([run], {}))
    row = cells(table, "EnvACE-8B")
    assert row["τ²-bench, ours"] == shown_as and row["Overall, ours"] == ""
    assert (PARTIAL, f"τ²-bench {reason}: EnvACE-8B.") in table.notes
    assert PARTIAL in markdown(table) and "$\\dagger$" in latex(table)


def test_bfcl_without_its_agentic_parts_is_partial_but_its_multi_turn_is_whole(tmp_path):
    run = put(tmp_path / "a", "bfcl", [bfcl_trial(40.0, 41.0, missing=AGENTIC)])
    put(run, "tau2", [tau2_trial(30.0)])
    results = read_results([run], {})
    assert cells(table_1(results), "EnvACE-8B")["BFCL-v4, ours"] == "40.00 [-], 1 × 4425 †"
    assert (PARTIAL, f"BFCL-v4 without {', '.join(AGENTIC)}: EnvACE-8B.") in table_1(results).notes
    row = cells(table_3(results), "EnvACE-8B", "none", "0")
    assert row["BFCL multi-turn, ours"] == f"41.0 [-], 1 × {200 * len(MULTI_TURN)}"
    assert row["Overall, ours"] == "35.5 [-]"


def test_a_run_without_the_score_of_a_column_is_told_of(tmp_path):
    run = put(tmp_path / "a", "tau2", [trial({}, {"airline": part(None, 0, 50)}, ["airline"])])
    table = table_1(read_results([run], {}))
    assert cells(table, "EnvACE-8B")["τ²-bench, ours"] == ""
    assert [text for _, text in table.notes if "empty cell" in text] == [
        f"{run / 'tau2' / 'results.json'}: no τ²-bench without airline, retail, telecom: an empty cell."
    ]


def finmcp_trial(tp, tr, tf1):
    overall = {f"{name}_{mean}": value for mean in ("micro", "macro") for name, value in (("tp", tp), ("tr", tr))}
    overall |= {"tf1_micro": tf1, "tf1_macro": tf1 + 1}
    parts = {"single_step": part(1.0, 145), "multi_step": part(1.0, 249), "multi_turn": part(1.0, 219)}
    return trial(overall, parts)


def test_table_2_has_both_means(tmp_path):
    run = put(tmp_path / "a", "finmcp", [finmcp_trial(50.0, 40.0, 44.44)])
    row = cells(table_2(read_results([run], {})), "EnvACE-8B")
    assert row["TP, paper"] == "54.04" and row["TR, paper"] == " c" and row["TF1, paper"] == "46.78"
    assert row["TF1, ours micro"] == "44.44 [-], 1 × 613" and row["TF1, ours macro"] == "45.44 [-], 1 × 613"
    assert row["TP, ours micro"] == row["TP, ours macro"] == "50.00 [-], 1 × 613"


def rehearsing(tmp_path, tag, tau2, multi_turn, **rehearsal):
    run = put(tmp_path / tag, "tau2", [tau2_trial(value) for value in tau2], **rehearsal)
    return put(run, "bfcl", [bfcl_trial(0.0, value) for value in multi_turn], **rehearsal)


def test_golden_table_3(tmp_path):
    runs = [
        rehearsing(tmp_path, "none", [30.0, 32.0], [40.0, 42.0]),
        rehearsing(tmp_path, "self", [36.0, 38.0], [43.0, 44.0], mode="parallel", n=2),
        rehearsing(tmp_path, "base", [31.0], [40.0, 41.0], mode="sequential", n=2, path="models/Qwen3-8B/"),
        rehearsing(tmp_path, "more", [33.0, 33.0], [44.0, 44.0], mode="parallel", n=8, shuffle=True),
    ]
    table = table_3(read_results(runs, {}))
    assert cells(table, "EnvACE-8B", "parallel", "2", "itself") == {
        "model": "EnvACE-8B",
        "rehearsal": "parallel",
        "N": "2",
        "by": "itself",
        "τ²-bench, paper": "38.0",
        "τ²-bench, ours": "37.0 [24.3, 49.7], 2 × 278",
        "BFCL multi-turn, paper": "43.9",
        "BFCL multi-turn, ours": "43.5 [37.1, 49.9], 2 × 800",
        "Overall, paper": "40.9",
        # 39.5 and 41 against 35 and 37.
        "Overall, ours": "40.2 [30.7, 49.8]",
        "gain, paper": "+4.2",
        "gain, ours": "+4.2 [+1.1, +7.4]",
    }
    plain = cells(table, "EnvACE-8B", "none", "0")
    assert plain["τ²-bench, paper"] == "31.4 a" and plain["gain, ours"] == ""
    # Two trials of one and one of the other cannot be paired.
    base = cells(table, "EnvACE-8B", "sequential", "2", "Qwen3-8B")
    assert base["Overall, ours"] == "35.8 [-]" and base["gain, ours"] == "-0.2 [-]"
    control = cells(table, "EnvACE-8B", "parallel, of another task", "8", "itself")
    assert control["gain, paper"] == "" and control["gain, ours"].startswith("+2.5 [")
    assert "+1.8" in dict(table.notes)[cells(table, "EnvACE-8B", "sequential", "2", "itself")["gain, paper"][-1]]


def test_runs_with_rehearsal_are_in_table_3_alone_and_a_gain_wants_the_same_model_without(tmp_path):
    runs = [
        rehearsing(tmp_path, "a", [36.0], [43.0], mode="parallel", name="other"),
        rehearsing(tmp_path, "b", [30.0], [40.0], name="third"),
    ]
    results = read_results(runs, {})
    assert [row[0].text for row in table_1(results).rows if row[0].text in ("other", "third")] == ["third"]
    row = cells(table_3(results), "other", "parallel", "2", "itself")
    assert row["Overall, ours"] == "39.5 [-]" and row["gain, ours"] == ""
    assert "third" not in {row[0].text for row in table_3(results).rows}


@pytest.mark.parametrize("setting", [{"n": 0, "mode": "parallel"}, {"mode": "none", "n": 8}])
def test_no_rehearsals_are_none_however_they_are_set(tmp_path, setting):
    [result] = read_results([put(tmp_path / "a", "tau2", [tau2_trial(1.0)], **setting)], {})
    assert result.rehearsal == NO_REHEARSAL


def test_every_part_of_every_run_is_listed_with_its_floor(tmp_path):
    run = put(tmp_path / "a", "tau2", [tau2_trial(50.0, airline=part(52.0, 48, 2, 46.0))], mode="parallel", n=4)
    rows = [[cell.text for cell in row] for row in own_runs(read_results([run], {})).rows]
    head = [str(run / "tau2"), "EnvACE-8B", "parallel N=4 by itself"]
    tail = ["tau2 1.0", "a-user", "", "all"]
    assert rows[0] == [*head, "airline", "52.00 [-], 1 × 48", "2", "46.0", *tail]
    assert rows[-1] == [*head, "all: weighted", "50.00 [-]", "", "", *tail]
    assert len(rows) == 5


def test_a_rounded_zero_has_no_minus(tmp_path):
    [result] = read_results([put(tmp_path / "a", "tau2", [tau2_trial(-0.01)])], {})
    assert shown(measured(result, TAU2), 1, sign="+").startswith("+0.0")


def test_two_runs_for_one_cell_are_refused(tmp_path):
    first = put(tmp_path / "a", "tau2", [tau2_trial(1.0)])
    second = put(tmp_path / "b", "tau2", [tau2_trial(2.0)])
    with pytest.raises(UserError, match="are both 'EnvACE-8B': tell them apart with --name RUN=NAME"):
        read_results([first, second], {})
    assert len(read_results([first, second, first], {second: "again"})) == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [("{", "is no result of a benchmark"), ('{"trials": []}', "'model'"), ("[]", "is no result of a benchmark")],
)
def test_a_file_that_is_no_result_is_named(tmp_path, text, said):
    (tmp_path / "a" / "bfcl").mkdir(parents=True)
    (tmp_path / "a" / "bfcl" / "results.json").write_text(text)
    with pytest.raises(UserError, match=said) as caught:
        read_results([tmp_path / "a"], {})
    assert "bfcl/results.json" in str(caught.value)


def test_a_run_without_results_and_a_name_without_a_run_are_refused(tmp_path):
    with pytest.raises(UserError, match="has no results such as bfcl/results.json"):
        read_results([tmp_path], {})
    run = put(tmp_path / "a", "tau2", [tau2_trial(1.0)])
    with pytest.raises(UserError, match="that is none of the runs"):
        read_results([run], {tmp_path / "b": "x"})
    with pytest.raises(UserError, match="write RUN=NAME"):
        names_of(["runs/a"])
    assert names_of(["runs/a/=x = y"]) == {Path("runs/a"): "x = y"}


HOSTILE = "a|b `rm` <script>alert(1)</script> \\input{x} 50%_&#$~^\n| c\x1b[2J \u202egpj"


@pytest.mark.parametrize(
    ("measure", "parts", "flaw"),
    [
        (TAU2, {"airline": part(1.0, 50), "retail": part(1.0, 113), "telecom": part(1.0, 114)}, "277 of 278 tasks"),
        (FINMCP["micro"]["tf1"], {name: part(1.0, 2) for name in finmcp.PARTS}, "6 of 613 tasks"),
        (VITA, vita_trial(1.0)["parts"] | {"delivery": part(1.0, 99, faults=1)}, "1 tasks ended by faults"),
    ],
)
def test_fewer_tasks_than_there_are_and_tasks_that_raised_are_said(tmp_path, measure, parts, flaw):
    run = put(tmp_path / "a", measure.benchmark, [trial({measure.score: 1.0}, parts)])
    [result] = read_results([run], {})
    [found] = measured(result, measure).flaws
    assert found.startswith(flaw)


@pytest.mark.parametrize("score", [float("nan"), "1", None])
def test_a_score_that_is_no_number_is_no_result(tmp_path, score):
    run = put(tmp_path / "a", "tau2", [trial({"macro": score}, tau2_trial(1.0)["parts"])])
    with pytest.raises(UserError, match="results.json is no result of a benchmark .a score is no number"):
        read_results([run], {})


def test_a_hostile_name_stays_in_its_cell():
    table = Table("Table 9", "caption", ["model", "x"], [[Cell(HOSTILE), Cell("1", PARTIAL)]])
    heading, _, head, rule, row, *_ = markdown(table).splitlines()
    assert row.startswith(r"| a\|b \`rm\` \<script\>alert(1)\</script\> \\input\{x\} 50%\_\&\#\$\~^ \| c")
    assert len(re.findall(r"(?<!\\)\|", row)) == len(re.findall(r"(?<!\\)\|", head)) == 3
    assert "<script>" not in markdown(table) and not {"\x1b", "\u202e"} & set(markdown(table))
    [line] = [line for line in latex(table).splitlines() if line.startswith(r"a\textbar{}b")]
    assert r"\textbackslash{}input\{x\} 50\%\_\&\#\$\textasciitilde{}\textasciicircum{}" in line
    assert len(re.findall(r"(?<!\\)&", line)) == 1 and line.endswith(r"1\textsuperscript{$\dagger$} \\")
    assert printable("a\tb\n c\x00") == "a b c�"


def test_latex_is_well_formed(tmp_path):
    run = put(tmp_path / "a", "tau2", [tau2_trial(1.0)], name=HOSTILE)
    for make in (table_1, table_2, table_3):
        table = make(read_results([run], {}))
        text = latex(table)
        assert all(ord(character) < 128 or character == "�" for character in text)
        for line in text.splitlines():
            if line.endswith("\\\\"):
                assert len(re.findall(r"(?<!\\)&", line)) == len(table.columns) - 1
        bare = re.sub(r"\\[{}\\$&%#_]", "", text)
        assert bare.count("{") == bare.count("}") and bare.count("$") % 2 == 0
        assert text.count("\\begin") == text.count("\\end") == 2


def points(axes):
    """{label: [(x, y)]} of what is drawn with a legend."""
    handles, labels = axes.get_legend_handles_labels()
    lines = [handle.lines[0] if hasattr(handle, "lines") else handle for handle in handles]
    return {label: [tuple(point) for point in line.get_xydata()] for label, line in zip(labels, lines, strict=True)}


def test_figures_hold_the_published_points_and_ours(tmp_path):
    runs = [
        put(tmp_path / "grpo", "tau2", [tau2_trial(30.0), tau2_trial(32.0)], name="GRPO-1.7B"),
        put(tmp_path / "small", "tau2", [tau2_trial(25.0)], name="EnvACE-4B", limit=5),
        put(tmp_path / "other", "tau2", [tau2_trial(26.0)], name="something"),
    ]
    results = read_results(runs, {})
    drawn = points(variants(results).axes[0])
    # 1.7B, 4B and 8B, each GRPO, Per-role and EnvACE from the left.
    assert drawn["published"] == [(2, 15.3), (10, 36.7), (8, 31.2), (9, 35.5)]
    assert drawn["ours"] == [(0.2, 31.0)] and drawn["ours (partial)"] == [(6.2, 25.0)]
    bfcl, tau2 = scaling(results).axes
    assert points(bfcl) == {"floor": [(0, 10.0), (1, 10.0)], "published": [(1.7, 31.81), (8.0, 46.04)]}
    assert points(tau2)["published"] == [(1.7, 15.3), (8.0, 36.7)] and points(tau2)["ours (partial)"] == [(4.2, 25.0)]


def test_checkpoints_are_a_line_over_their_steps(tmp_path):
    runs = []
    for training, step, score in (("x", 20, 30.0), ("x", 10, 20.0), ("y", 10, 25.0)):
        path = f"runs/{training}/exports/step-{step:06d}"
        runs.append(put(tmp_path / f"{training}{step}", "tau2", [tau2_trial(score)], f"step-{step:06d}", folder=path))
    results = read_results(runs, {runs[2]: "named"})
    [axes] = dynamics(results).axes
    assert points(axes) == {
        "floor": [(0, TAU2.floor), (1, TAU2.floor)],
        "published": [(50, 30.0), (470, 36.7)],
        "x": [(10, 20.0), (20, 30.0)],
        "named": [(10, 25.0)],
    }
    assert {"x, step 10", "x, step 20", "named, step 10"} <= {row[0].text for row in table_1(results).rows}
    put(tmp_path / "x20", "bfcl", [bfcl_trial(40.0, 30.0)], "step-000020", folder="runs/x/exports/step-000020")
    assert len(dynamics(read_results(runs, {})).axes) == 3


def test_rehearsals_are_lines_from_the_point_without(tmp_path):
    runs = [
        rehearsing(tmp_path, "none", [30.0], [40.0], name="m"),
        rehearsing(tmp_path, "two", [30.0], [42.0], name="m", mode="parallel", n=2),
        rehearsing(tmp_path, "four", [30.0], [41.0], name="m", mode="parallel", n=4),
        rehearsing(tmp_path, "base", [30.0], [39.0], name="m", mode="parallel", n=2, path="base"),
    ]
    drawn = points(budget(read_results(runs, {})).axes[0])
    assert drawn["m, parallel"] == [(0.1, 40.0), (2.1, 42.0), (4.1, 41.0)] and "m, sequential" not in drawn
    assert drawn["published, none"] == [(0, 41.9)]
    assert (drawn["published, parallel"], drawn["published, sequential"]) == ([(2, 43.9)], [(2, 42.3)])


def test_the_mean_of_nothing_whole_is_nothing():
    assert mean_of([None]) is None


def test_all_files_are_written(tmp_path, caplog):
    run = put(tmp_path / "a", "tau2", [tau2_trial(20.0)], name="a$b$ _c_")
    put(run, "bfcl", [bfcl_trial(40.0, 41.0)], name="a$b$ _c_", mode="sequential")
    write([run], {}, tmp_path / "out")
    files = {path.name: path for path in (tmp_path / "out").iterdir()}
    assert set(files) == {"tables.md", "tables.tex", *(f"figure{number}.png" for number in (3, 4, 5, 6))}
    assert all(files[name].read_bytes().startswith(b"\x89PNG") for name in files if name.endswith("png"))
    assert files["tables.md"].read_text().count("\n## Table") == 3 and "![Figure 6" in files["tables.md"].read_text()
    assert files["tables.tex"].read_text().count("\\begin{tabular}") == 3


def test_a_mistake_is_said_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("envace.console.setup_logging", lambda **_: None)
    monkeypatch.setattr(sys, "argv", ["tables", str(tmp_path)])
    with pytest.raises(SystemExit, match="^1$"):
        entry.main()
    assert capsys.readouterr().err.startswith(f"error: {tmp_path} has no results")
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(sys, "argv", ["tables", "--out", str(tmp_path / "file")])
    with pytest.raises(SystemExit, match="^1$"):
        entry.main()
    assert capsys.readouterr().err.startswith("error: cannot write")
