"""BFCL: what is read from the official harness, and its scores of gold actions and of doing nothing, end to end."""

import json
from pathlib import Path

import pytest

from envace.benchmarks.benchmark import Trial
from envace.benchmarks.bfcl import (
    AGENTIC,
    BFCL,
    MODEL,
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


def tool(name, *parameters):
    properties = {parameter: {"type": "string"} for parameter in parameters}
    function = {"name": name, "parameters": {"type": "object", "properties": properties}}
    return {"type": "function", "function": function}


class TestFaults:
    @pytest.mark.parametrize(("result", "fault"), [(REFUSED, False), (BUSY, True), (BROKEN, True), (UNREACHED, True)])
    def test_only_the_infrastructure_is_at_fault(self, result, fault):
        assert is_fault(result) is fault

    def test_an_answer_is_no_fault_whatever_it_says(self):
        assert not is_fault([[UNREACHED]]) and not is_fault("I got an " + UNREACHED)

    def test_faults_leave_the_file_and_are_counted(self, tmp_path):
        path = tmp_path / "r.json"
        results = [{"id": k, "result": r} for k, r in enumerate(["answer", UNREACHED, REFUSED, BROKEN])]
        path.write_text("".join(json.dumps(result) + "\n" for result in results))
        assert take_faults(path) == 2
        assert [json.loads(line)["id"] for line in path.read_text().splitlines()] == [0, 2]
        assert take_faults(path) == 0

    def test_where_nothing_else_is_left_no_file_is(self, tmp_path):
        path = tmp_path / "r.json"
        path.write_text(json.dumps({"id": 0, "result": BROKEN}) + "\n")
        assert take_faults(path) == 1 and not path.exists() and take_faults(path) == 0


class TestScores:
    def test_a_part(self, tmp_path):
        path = result_file(tmp_path, "multi_turn_base")
        assert path.parent == tmp_path / "result" / "openbmb_MiniCPM-SALA-FC" / "multi_turn"
        score = tmp_path / "score" / MODEL.replace("/", "_") / "multi_turn" / "BFCL_v4_multi_turn_base_score.json"
        score.parent.mkdir(parents=True)
        score.write_text('{"accuracy": 0.125, "correct_count": 1, "total_count": 8}\n{"id": "x"}\n')
        part = read_part(tmp_path, "multi_turn_base", 2)
        assert (part.score, part.tasks, part.faults, part.null, part.details) == (12.5, 8, 2, 0.0, {"right": 1})

    def test_without_a_score_it_is_unknown_not_zero(self, tmp_path):
        part = read_part(tmp_path, "irrelevance", 3)
        assert (part.score, part.tasks, part.faults, part.null) == (None, 0, 3, 100.0)

    def test_the_aggregates_are_the_harness_s(self, tmp_path):
        (tmp_path / "data_overall.csv").write_text(
            "Rank,Overall Acc,Model,Multi Turn Acc,Live Acc,Non-Live AST Acc\n1,7.50%,x,25.00%,0.00%,N/A\n"
        )
        assert read_overall(tmp_path) == {"overall": 7.5, "multi_turn": 25.0, "live": 0.0}

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
    assert "| oracle | a | 1 | 2 | 3 | 0 | NO |" in report([Check("oracle", "a", 1, 3, 2)])


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
