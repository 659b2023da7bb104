"""BFCL: what is read from the official harness, and its scores of gold actions and of doing nothing, end to end."""

import json
import stat
import sys
from pathlib import Path

import pytest

from envace.benchmarks.benchmark import Trial
from envace.benchmarks.bfcl import (
    AGENTIC,
    BFCL,
    IRRELEVANCE,
    MODEL,
    drop_unfinished,
    group,
    is_fault,
    read_overall,
    read_part,
    result_file,
    take_faults,
    write_ids,
)
from envace.benchmarks.replay.bfcl import Gold, fingerprint, first_allowed, fits, read_call, read_python_call, turns_of
from envace.benchmarks.replay.script import ScriptError
from envace.benchmarks.verify import Check, check, report, verify
from envace.config import load_config
from envace.types import ToolCall, UserError

MULTI = ("multi_turn_miss_func",)
SINGLE = ("simple_python", "parallel_multiple", "live_multiple", "irrelevance")
HOME = Path(__file__).parent.parent / ".bench"
REFUSED = "Error during inference: Error code: 400 - {'error': {'code': 'context_length_exceeded'}}"
BUSY = "Error during inference: Error code: 429 - {'error': {}}"
BROKEN = "Error during inference: Error code: 502 - {'error': {}}"
UNREACHED = "Error during inference: Connection error."

# What `bfcl generate` and `bfcl evaluate` do, as far as the adapter sees it. `plan` says what becomes of each part.
HARNESS = """#!{python}
import json, os, sys
from pathlib import Path
options = dict(zip(sys.argv[2::2], sys.argv[3::2]))
plan = json.load(open(Path(sys.argv[0]).with_name("plan.json")))
here = Path(os.environ["BFCL_PROJECT_ROOT"])
for part in options["--test-category"].split(","):
    group = "live" if part.startswith("live") else "non_live"
    path = here / "result" / options["--model"].replace("/", "_") / group / f"BFCL_v4_{{part}}_result.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    done = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    if sys.argv[1] == "generate":
        left = [entry for entry in plan[part] if entry["id"] not in [one["id"] for one in done]]
        path.open("a").write("".join(json.dumps(entry) + chr(10) for entry in left))
        continue
    right = sum(isinstance(entry["result"], str) for entry in done)
    head = dict(accuracy=right / len(done), correct_count=right, total_count=len(done))
    score = here / "score" / path.relative_to(here / "result").with_name(f"BFCL_v4_{{part}}_score.json")
    score.parent.mkdir(parents=True, exist_ok=True)
    score.write_text(json.dumps(head))
    titles = "Overall Acc,Multi Turn Acc,Live Acc,Non-Live AST Acc"
    (here / "score" / "data_overall.csv").write_text(titles + chr(10) + "10.00%,0.00%,0.00%,0.00%")
"""


@pytest.fixture
def irrelevance(tmp_path):
    """A function that runs both parts of irrelevance with these results, with a stand-in for the harness."""
    program = tmp_path / "bench" / "bfcl" / "bin" / "bfcl"
    program.parent.mkdir(parents=True)
    program.write_text(HARNESS.format(python=sys.executable))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "trial0").mkdir()
    config = load_config(None, ["model.path=", f"bench.home={tmp_path / 'bench'}", "bench.retries=0"])
    trial = Trial(tmp_path / "trial0", "http://127.0.0.1:9/v1", MODEL, 0, config)

    def run(non_live, live):
        given = dict(zip(IRRELEVANCE, (non_live, live), strict=True))
        plan = {part: [entry(f"{part}_{k}", r) for k, r in enumerate(results)] for part, results in given.items()}
        program.with_name("plan.json").write_text(json.dumps(plan))
        return BFCL().run(trial, IRRELEVANCE)

    return run


def entry(key, result):
    """A task as a result file has it; with errors the harness writes its traceback."""
    is_error = isinstance(result, str) and result.startswith("Error during inference:")
    return {"id": key, "result": result} | ({"traceback": "Traceback ..."} if is_error else {})


def tool(name, *parameters):
    properties = {parameter: {"type": "string"} for parameter in parameters}
    function = {"name": name, "parameters": {"type": "object", "properties": properties}}
    return {"type": "function", "function": function}


class TestFaults:
    @pytest.mark.parametrize(("result", "fault"), [(REFUSED, False), (BUSY, True), (BROKEN, True), (UNREACHED, True)])
    def test_only_the_infrastructure_is_at_fault(self, result, fault):
        assert is_fault(entry(0, result)) is fault

    def test_an_answer_is_no_fault_whatever_it_says(self):
        assert not is_fault(entry(0, [[UNREACHED]])) and not is_fault(entry(0, "I got an " + UNREACHED))
        # A model that says the harness's words does not leave the count: the harness adds its traceback.
        assert not is_fault({"id": 0, "result": UNREACHED, "latency": 1.0})

    def test_faults_leave_the_file_and_are_counted(self, tmp_path):
        path = tmp_path / "r.json"
        results = [entry(k, r) for k, r in enumerate(["answer", UNREACHED, REFUSED, BROKEN])]
        path.write_text("".join(json.dumps(result) + "\n" for result in results))
        assert take_faults(path) == 2
        assert [json.loads(line)["id"] for line in path.read_text().splitlines()] == [0, 2]
        assert take_faults(path) == 0

    def test_where_nothing_else_is_left_no_file_is(self, tmp_path):
        path = tmp_path / "r.json"
        path.write_text(json.dumps(entry(0, BROKEN)) + "\n")
        assert take_faults(path) == 1 and not path.exists() and take_faults(path) == 0

    def test_a_line_that_was_cut_off_is_run_again(self, tmp_path, caplog, irrelevance):
        path = result_file(tmp_path / "trial0", "irrelevance")
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(entry("irrelevance_0", "before")) + '\n{"id": "irrelevance_1", "res')
        assert irrelevance(["new", "new"], ["new"]).parts["irrelevance"].details == {"right": 2, "refused": 0}
        assert [json.loads(line)["result"] for line in path.read_text().splitlines()] == ["before", "new"]
        assert f"{path}: the last line is not whole" in caplog.text
        before = path.read_text()
        drop_unfinished(path)
        assert path.read_text() == before


class TestRefusals:
    def test_a_refused_task_of_irrelevance_is_wrong(self, irrelevance):
        outcome = irrelevance(["no", "no", REFUSED, [{"f": "{}"}]], ["no", REFUSED])
        first, second = (outcome.parts[part] for part in IRRELEVANCE)
        assert (first.score, first.tasks, first.details) == (50.0, 4, {"right": 2, "refused": 1})
        assert (second.score, second.tasks, second.details) == (50.0, 2, {"right": 1, "refused": 1})
        # Each part is 5 % of the overall score, in which the harness has them as right.
        assert outcome.overall["overall"] == pytest.approx(10 - 0.05 * 25 - 0.05 * 50)

    def test_a_server_that_refuses_every_request_is_an_error_and_is_asked_again(self, irrelevance):
        said = (
            r"every request of irrelevance, live_irrelevance was refused \(irrelevance: Error code: 400.*context_length"
        )
        with pytest.raises(UserError, match=said):
            irrelevance([REFUSED, REFUSED], [REFUSED])
        assert irrelevance(["no", "no"], ["no"]).parts["irrelevance"].score == 100.0

    def test_faults_beside_refusals_are_still_faults(self, irrelevance):
        part = irrelevance(["no", REFUSED, BROKEN], ["no"]).parts["irrelevance"]
        assert (part.score, part.tasks, part.faults) == (50.0, 2, 1)


@pytest.mark.parametrize(
    ("part", "needs"),
    [("web_search_base", "a web search account"), ("web_search_no_snippet", "account"), ("memory_vector", "packages")],
)
def test_parts_that_cannot_be_run_are_refused(tmp_path, part, needs):
    trial = Trial(tmp_path, "", MODEL, 0, load_config(None, ["model.path="]))
    with pytest.raises(UserError, match=f"bench.parts: {part} needs .*{needs}.* leave it out"):
        BFCL().run(trial, ("simple_python", part))


class TestScores:
    def test_a_part(self, tmp_path):
        path = result_file(tmp_path, "multi_turn_base")
        assert path.parent == tmp_path / "result" / "openbmb_MiniCPM-SALA-FC" / "multi_turn"
        score = tmp_path / "score" / MODEL.replace("/", "_") / "multi_turn" / "BFCL_v4_multi_turn_base_score.json"
        score.parent.mkdir(parents=True)
        score.write_text('{"accuracy": 0.125, "correct_count": 1, "total_count": 8}\n{"id": "x"}\n')
        part = read_part(tmp_path, "multi_turn_base", 2, 3)
        assert (part.score, part.tasks, part.faults, part.null) == (12.5, 8, 2, 0.0)
        assert part.details == {"right": 1, "refused": 3}

    def test_without_a_score_it_is_unknown_not_zero(self, tmp_path):
        part = read_part(tmp_path, "irrelevance", 3, 0)
        assert (part.score, part.tasks, part.faults, part.null) == (None, 0, 3, 100.0)

    def test_the_aggregates_are_the_harness_s(self, tmp_path):
        (tmp_path / "data_overall.csv").write_text(
            "Rank,Overall Acc,Model,Multi Turn Acc,Live Acc,Non-Live AST Acc\n1,7.50%,x,25.00%,0.00%,N/A\n"
        )
        assert read_overall(tmp_path, {}) == {"overall": 7.5, "multi_turn": 25.0, "live": 0.0}

    def test_groups(self):
        assert [group(p) for p in ("memory_kv", "web_search_base", "live_simple", "irrelevance", "live_relevance")] == [
            "agentic/memory/kv",
            "agentic",
            "live",
            "non_live",
            "live",
        ]
        assert not set(BFCL.default_parts) & set(AGENTIC) and len(BFCL.parts) == 22


class TestGold:
    def test_values_that_may_be_missing_are_left_out(self):
        gold = {"a": [1, 2], "b": ["", "x"], "c": [{"d": ["y"], "e": ["", 3]}], "f": [[{"g": [5]}, 6]]}
        assert first_allowed(gold) == {"a": 1, "c": {"d": "y"}, "f": [{"g": 5}, 6]}
        assert first_allowed(gold, ["a", "b"])["b"] == "x"
        assert first_allowed({"a": [""], "b": [{"c": 0.5, "d": []}]}, ["a"]) == {"a": "", "b": {"c": 0.5, "d": []}}

    def test_python_calls(self):
        tools = [tool("post_tweet", "content", "tags")]
        call = read_python_call("post_tweet('hi', tags=['#a', 'cd(x)'])", tools)
        assert call == ToolCall("post_tweet", {"content": "hi", "tags": ["#a", "cd(x)"]})
        assert read_python_call("tail(file_name='a')", []) == ToolCall("tail", {"file_name": "a"})
        with pytest.raises(ScriptError):
            read_python_call("a.b(1)", tools)
        with pytest.raises(ValueError):
            read_python_call("post_tweet(content=open('x'))", tools)

    def test_dots_are_written_as_the_harness_writes_them(self):
        assert read_call({"math.add": {"a": [1]}}, []) == ToolCall("math_add", {"a": 1})
        assert fingerprint([{"name": "math.add", "parameters": {"properties": {"a": {}}}}]) == {"math_add(a)"}

    def test_a_task_is_known_by_what_was_said_and_offered(self):
        first, second = [{"role": "user", "content": "one"}], [{"role": "user", "content": "two"}]
        messages = [*first, {"role": "assistant", "content": "Done."}, *second]
        said = turns_of(messages)
        assert said == [[("user", "one")], [("user", "two")]]
        assert fits(Gold("x", [first, second], None, []), said, frozenset())
        assert fits(Gold("x", [first, None, second], None, []), said, frozenset())  # the harness's own words
        assert not fits(Gold("x", [first], None, []), said, frozenset())
        assert not fits(Gold("x", [second, first], None, []), said, frozenset())
        assert not fits(Gold("x", [first, second], frozenset({"f()"}), []), said, frozenset())


def test_checks_tell_a_wrong_score():
    part = {"tasks": 258, "score": 100 * 256 / 258, "null": 0.0, "faults": 0}
    assert check("bfcl", "oracle", "live_simple", part, 0).holds
    assert not check("bfcl", "oracle", "live_simple", part, 258).holds
    assert not check("bfcl", "null", "live_simple", part, 0).holds
    assert check("bfcl", "null", "irrelevance", {"tasks": 3, "score": 100.0, "null": 100.0, "faults": 0}, 3).holds
    assert not check("bfcl", "oracle", "live_simple", part | {"faults": 1}, 0).holds
    assert "| oracle | a | 1 | 2 | 3 | 4 | 0 | NO |" in report([Check("oracle", "a", 1, 3, 2, 0, 4)])


class TestHarness:
    """With the official harness, where it is set up."""

    pytestmark = [
        pytest.mark.slow,
        pytest.mark.skipif(not (HOME / "bfcl").exists(), reason="BFCL is not set up: make bench-setup-bfcl"),
    ]

    def test_gold_actions_are_right(self, tmp_path):
        checks = verify("bfcl", "oracle", MULTI, 2, HOME, tmp_path / "multi")
        checks += verify("bfcl", "oracle", SINGLE, 3, HOME, tmp_path / "single")
        assert [(c.right, c.tasks) for c in checks] == [(2, 2), (3, 3), (3, 3), (3, 3), (3, 3)], report(checks)
        assert all(c.holds for c in checks), report(checks)

    def test_doing_nothing_is_right_only_where_nothing_can_be_done(self, tmp_path):
        checks = verify("bfcl", "null", (*MULTI, *SINGLE), 2, HOME, tmp_path)
        assert {c.part: c.right for c in checks} == dict.fromkeys((*MULTI, *SINGLE), 0) | {"irrelevance": 2}
        assert all(c.holds for c in checks), report(checks)

    def test_some_tasks_of_parts_that_build_on_each_other(self, tmp_path):
        with pytest.raises(UserError, match="memory_kv"):
            write_ids(tmp_path / "ids.json", HOME, ("memory_kv",), 2)

    def test_a_server_that_is_not_there_is_a_fault_and_no_score(self, tmp_path):
        config = load_config(None, ["model.path=", f"bench.home={HOME}", "bench.tasks=1", "bench.retries=0"])
        trial = Trial(tmp_path, "http://127.0.0.1:9/v1", MODEL, 0, config)
        outcome = BFCL().run(trial, ("simple_python",))
        assert (outcome.parts["simple_python"].score, outcome.parts["simple_python"].faults) == (None, 1)
        assert outcome.overall == {} and set(outcome.missing) == set(BFCL.parts)


def test_a_missing_harness_is_one_clear_line(tmp_path):
    with pytest.raises(UserError, match="BFCL is not set up in .*: run `make bench-setup-bfcl`"):
        BFCL().version(tmp_path)
