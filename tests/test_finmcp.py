"""FinMCP-Bench's adapter: the dialogue that is held, what is scored, and what is not quietly left out."""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from envace.benchmarks import finmcp
from envace.benchmarks.benchmark import Trial
from envace.benchmarks.finmcp import FAILED_CALL, PARTS, FinMCP, aggregates, read_samples, shown_tools, tool_schemas
from envace.benchmarks.relay import Refused, Unanswered
from envace.benchmarks.replay import finmcp as script
from envace.benchmarks.replay.script import Answer, ScriptError, silent
from envace.benchmarks.verify import report, verify
from envace.config import load_config
from envace.interrupts import sigterm_interrupts
from envace.types import ToolCall, UserError

# Prints what the official script prints: of all samples, then by scenery, difficulty and task.
SCORER = """
import json, sys
from collections import Counter
data = json.load(open(sys.argv[1].removeprefix("--eval_data_path=")))
names = lambda messages: Counter(c["function"]["name"] for m in messages for c in m.get("tool_calls") or [])
def metrics(rows):
    pairs = [(names(row["messages_pred"]), names(row["messages"])) for row in rows]
    same, said, gold = (sum(f(p, g) for p, g in pairs) for f in (
        lambda p, g: (p & g).total(), lambda p, g: p.total(), lambda p, g: g.total()))
    p, r = same / said if said else 0, same / gold if gold else 0
    return dict(macro_Precision=round(p, 4), macro_Recall=round(r, 4), macro_F1=0.25, micro_Precision=round(p, 4),
                micro_Recall=round(r, 4), micro_F1=0, N=len(rows), consist_mean=0)
show = lambda d: [print(k, v) for k, v in d.items()]
rows = [row for row in data if row["scenery"] != "dropped"]
print("eval data Num:", len(rows))
show(metrics(rows))
show({"A": metrics(rows)})
show({"easy": metrics(rows)})
tasks = sorted({row["task"].replace(" ", "_") for row in rows})
show({task: metrics([row for row in rows if row["task"].replace(" ", "_") == task]) for task in tasks})
"""


def call(name, key, **arguments):
    return {"id": key, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def user(text):
    return {"role": "user", "content": text}


def calling(*calls):
    return {"role": "assistant", "tool_calls": list(calls)}


def response(key, text):
    return {"role": "tool", "tool_call_id": key, "content": text}


def said(text):
    return {"role": "assistant", "content": text, "tool_calls": None}


SINGLE = [user("news?"), calling(call("News", "c1", word="a")), response("c1", "none"), said("There is none.")]
TURNS = [
    {"role": "system", "content": "You advise."},
    *(user("hello"), said("Hello.")),
    *(user("funds?"), calling(call("Funds", "c1", n=1), call("Risk", "c2", code="x")), response("c1", "F1")),
    *(response("c2", "low"), calling(call("Funds", "c3", n=1)), response("c3", "F2"), said("F1, low risk.")),
    user("thanks"),
]


def sample(key, task, messages, **more):
    return {"id": key, "task": task, "scenery": "A-B", "diff_level": {"level": "easy"}, "messages": messages} | more


SAMPLES = [sample(1, "single step", SINGLE), sample(2, "multi turn", TURNS)]


@pytest.fixture
def model(monkeypatch):
    """A function that puts a script in the place of the model; the requests that it got are in its list."""
    requests = []

    def play(answer):
        def complete(url, body):
            requests.append(body)
            found = answer(body["messages"], body["tools"])
            calls = [call(one.name, f"new{len(requests)}-{k}", **one.arguments) for k, one in enumerate(found.calls)]
            message = {"role": "assistant", "content": found.content, "tool_calls": calls}
            return json.dumps({"choices": [{"message": message}]}).encode()

        monkeypatch.setattr(finmcp, "complete", complete)
        return requests

    return play


@pytest.fixture
def trial(tmp_path):
    """A function that makes a trial over samples, with a stand-in for the official script."""
    script_file = tmp_path / "bench" / finmcp.SCRIPT
    script_file.parent.mkdir(parents=True)
    script_file.write_text(SCORER)
    (tmp_path / "bench" / "finmcp" / "bin").mkdir()
    (tmp_path / "bench" / "finmcp" / "bin" / "python").symlink_to(sys.executable)
    (tmp_path / "trial0").mkdir()

    def make(samples, *settings):
        (tmp_path / "data.json").write_text(json.dumps(samples))
        paths = [f"bench.home={tmp_path / 'bench'}", f"bench.data={tmp_path / 'data.json'}"]
        config = load_config(None, ["model.path=", "bench.concurrency=1", "bench.retries=1", *paths, *settings])
        return Trial(tmp_path / "trial0", "http://model/v1", "m", 0, config)

    return make


def test_the_model_goes_on_from_the_recorded_history_at_each_turn(trial, model):
    requests = model(script.of_samples(SAMPLES))
    outcome = FinMCP().run(trial(SAMPLES, "eval.sampling.temperature=0.3", "serve.max_new_tokens=55"), PARTS)
    assert outcome.overall == {f"{name}_{mean}": 100.0 for name in ("tp", "tr", "tf1") for mean in ("micro", "macro")}
    assert outcome.missing == ["multi_step"] and outcome.parts["multi_step"].score is None
    assert [(part.score, part.tasks, part.null) for part in outcome.parts.values()] == [
        (100.0, 1, 0.0),
        (None, 0, 0.0),
        (100.0, 1, 0.0),
    ]
    first = requests[0]
    assert (first["model"], first["temperature"], first["top_p"], first["max_tokens"]) == ("m", 0.3, 0.95, 55)
    assert {tool["function"]["name"] for tool in first["tools"]} == {"News", "Funds", "Risk"}
    # The second turn of the dialogue: its history is the record, not what the model said before.
    beginnings = [request["messages"] for request in requests if request["messages"][-1] == user("funds?")]
    assert beginnings == [[TURNS[0], TURNS[1], {"role": "assistant", "content": "Hello."}, TURNS[3]]]
    # Its two calls get their recorded responses, then it calls again.
    going_on = next(request["messages"] for request in requests if request["messages"][-1].get("content") == "low")
    assert [message["content"] for message in going_on[-2:]] == ["F1", "low"]
    assert going_on[-2]["tool_call_id"] == going_on[-3]["tool_calls"][0]["id"]


def test_an_agent_that_does_nothing_has_nothing(trial, model):
    model(silent)
    outcome = FinMCP().run(trial(SAMPLES), PARTS)
    assert set(outcome.overall.values()) == {0.0} and outcome.parts["single_step"].score == 0.0


def test_a_call_that_is_not_on_record_fails_and_a_loop_ends(trial, model):
    requests = model(lambda messages, tools: Answer(calls=[ToolCall("News", {"word": "other"})]))
    FinMCP().run(trial(SAMPLES[:1]), ("single_step",))
    # 21 rounds of one call: after the first 20 it is still <= 20; then one more answer, whose call is not made.
    assert len(requests) == 22 and requests[-1]["messages"][-1]["content"] == FAILED_CALL
    scored = json.loads(Path(trial(SAMPLES[:1]).folder / "eval_data.json").read_text())
    assert sum(len(m.get("tool_calls") or []) for m in scored[0]["messages_pred"]) == 22


def test_arguments_do_not_count_but_names_do_as_often_as_they_are_called(trial, model):
    def answer(messages, tools):
        if messages[-1]["role"] != "user":
            return Answer("done")
        return Answer(calls=[ToolCall("News", {}), ToolCall("News", {}), ToolCall("Other", {})])

    model(answer)
    part = FinMCP().run(trial(SAMPLES[:1]), ("single_step",)).parts["single_step"]
    assert part.details["tp_micro"] == pytest.approx(33.33) and part.details["tr_micro"] == 100.0
    assert part.score == pytest.approx(2 * 33.33 * 100 / 133.33)
    assert part.details["f1_of_samples"] == 25.0 and part.details["tools"] == "as the dialogues show them"


def test_a_refused_sample_counts_as_zero_and_an_unanswered_one_stops_the_run(trial, model, monkeypatch):
    requests = model(script.of_samples(SAMPLES))
    answered, tries = finmcp.complete, []

    def refuse(url, body):
        if body["messages"][0] == user("news?"):
            tries.append(body)
            raise failure
        return answered(url, body)

    monkeypatch.setattr(finmcp, "complete", refuse)
    failure = Unanswered("HTTP 502: gone")
    with pytest.raises(UserError, match=r"1 of 2 samples of FinMCP-Bench were not answered \(HTTP 502: gone\)"):
        FinMCP().run(trial(SAMPLES), PARTS)
    assert len(tries) == 2  # bench.retries=1
    before = len(requests)
    failure = Refused(400, "too long")
    outcome = FinMCP().run(trial(SAMPLES), PARTS)
    assert len(requests) == before and len(tries) == 3  # what was answered is not asked for again
    single = outcome.parts["single_step"]
    assert single.score == 0.0 and single.tasks == 1 and single.details["refused"] == 1
    assert outcome.overall["tr_micro"] == pytest.approx(75.0) and outcome.overall["tp_micro"] == 100.0
    monkeypatch.setattr(finmcp, "complete", answered)
    FinMCP().run(trial(SAMPLES), PARTS)
    assert len(requests) == before  # a refusal is not tried again


def test_a_line_that_was_cut_off_is_asked_for_again(trial, model):
    requests = model(silent)
    given = trial(SAMPLES[:1])
    (given.folder / "answers.jsonl").write_text('{"id": "1", "mess')
    FinMCP().run(given, ("single_step",))
    assert len(requests) == 1
    [line] = (given.folder / "answers.jsonl").read_text().splitlines()
    assert json.loads(line)["id"] == "1"


def test_a_bad_line_among_the_answers_is_named(trial, model):
    model(silent)
    given = trial(SAMPLES[:1])
    path = given.folder / "answers.jsonl"
    good = '{"id": "7", "messages": []}'
    for bad in ("{not json", "[]", '{"id": "1"}', "[" * 100_000):
        path.write_text(f"{good}\n{bad}\n{good}\n")
        with pytest.raises(UserError, match=r"answers.jsonl, line 2 is no answer: remove that line"):
            FinMCP().run(given, ("single_step",))


def test_an_interrupt_ends_dialogues_and_keeps_what_is_done(trial, model, monkeypatch):
    requests = model(silent)
    answered, release = finmcp.complete, threading.Event()
    given = trial([sample(1, "single step", SINGLE), sample(2, "single step", [user("slow?")])], "bench.concurrency=2")
    answers, slow = given.folder / "answers.jsonl", []

    def complete(url, body):
        if body["messages"][0] == user("news?"):
            slow.append(body)
            deadline = time.monotonic() + 20
            while not (answers.exists() and answers.read_text()) and time.monotonic() < deadline:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGTERM)
            release.wait(5)
            message = {"content": "", "tool_calls": [call("News", "n1", word="a")]}
            return json.dumps({"choices": [{"message": message}]}).encode()
        return answered(url, body)

    monkeypatch.setattr(finmcp, "complete", complete)
    begun = {thread for thread in threading.enumerate()}
    with sigterm_interrupts(), pytest.raises(KeyboardInterrupt):
        FinMCP().run(given, ("single_step",))
    assert not release.is_set() and any(t not in begun for t in threading.enumerate())  # it has not waited
    release.set()
    for thread in set(threading.enumerate()) - begun:
        thread.join(20)
    assert len(slow) == 1 and len(requests) == 1  # the dialogue did not go on
    assert [json.loads(line)["id"] for line in answers.read_text().splitlines()] == ["2"]


def raw(monkeypatch, *messages):
    """Put these messages, whatever they are, in the place of the model's; the last one is repeated."""
    requests = []

    def complete(url, body):
        requests.append(body)
        return json.dumps({"choices": [{"message": messages[min(len(requests), len(messages)) - 1]}]}).encode()

    monkeypatch.setattr(finmcp, "complete", complete)
    return requests


@pytest.mark.parametrize("arguments", ['{"word": ' + "[" * 100_000, "{not json", '{"word": "a"} more', "[]", ""])
def test_arguments_that_cannot_be_read_are_the_models_own_failure(trial, monkeypatch, arguments):
    odd = call("News", "n1") | {"function": {"name": "News", "arguments": arguments}}
    requests = raw(monkeypatch, {"content": None, "tool_calls": [odd]}, {"content": "done"})
    part = FinMCP().run(trial(SAMPLES[:1]), ("single_step",)).parts["single_step"]
    assert part.details["refused"] == 0 and part.score == 100.0  # names alone count
    assert requests[-1]["messages"][-1]["content"] == FAILED_CALL


@pytest.mark.parametrize(
    "message",
    [
        {"tool_calls": [{"type": "function", "function": {"name": "News", "arguments": "{}"}}]},
        {"tool_calls": [{"id": "n1", "function": {"name": "News", "arguments": {"word": "a"}}}]},
        {"tool_calls": [{"id": "n1", "function": {"arguments": "{}"}}]},
        {"tool_calls": [{"id": "n1", "function": None}]},
        {"tool_calls": ["News"]},
        {"tool_calls": {"News": {}}},
        {"content": [{"type": "text"}]},
        "done",
        None,
    ],
)
def test_what_no_server_says_is_no_answer(trial, monkeypatch, message):
    requests = raw(monkeypatch, message)
    with pytest.raises(UserError, match="1 of 1 samples of FinMCP-Bench were not answered .*no chat completion"):
        FinMCP().run(trial(SAMPLES[:1]), ("single_step",))
    assert len(requests) == 2  # bench.retries=1


def test_records_with_odd_calls_are_read(trial, model):
    model(silent)
    odd = {"type": "function", "function": {"name": "News", "arguments": {"word": "a"}}}
    FinMCP().run(trial([sample(1, "single step", [user("news?"), calling(odd), said("none")])]), ("single_step",))
    assert shown_tools([sample(1, "single step", [calling(odd)])])[0]["function"]["parameters"]["properties"] == {
        "word": {"type": "string"}
    }


def test_a_sample_that_the_official_script_drops_is_an_error(trial, model):
    model(silent)
    with pytest.raises(UserError, match="1 of 2 samples were scored: .*evaluation.log says why"):
        FinMCP().run(trial([SAMPLES[0], sample(3, "single step", SINGLE, scenery="dropped")]), ("single_step",))


def test_only_the_first_of_each_part(trial, model):
    model(silent)
    samples = [*SAMPLES, sample(3, "single step", SINGLE), sample(4, "single step", SINGLE)]
    outcome = FinMCP().run(trial(samples, "bench.tasks=2"), ("single_step", "multi_turn"))
    assert [part.tasks for part in outcome.parts.values()] == [2, 1]


def test_tools_as_the_dialogues_show_them():
    odd = call("News", "c9")
    odd["function"]["arguments"] = "{not json"
    tools = shown_tools(
        [*SAMPLES, sample(3, "multi step", [calling(odd, call("News", "c8", deep={"a": 1}, flag=True))])]
    )
    by_name = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    assert by_name["News"] == {
        "type": "object",
        "properties": {"word": {"type": "string"}, "deep": {"type": "object"}, "flag": {"type": "boolean"}},
    }
    assert by_name["Funds"]["properties"] == {"n": {"type": "integer"}}


def test_the_vendors_schemas_are_used_where_they_are_given(tmp_path):
    path = tmp_path / "tools.json"
    path.write_text(json.dumps([{"type": "function", "function": {"name": "News", "parameters": {}}}]))
    tools, origin = tool_schemas(SAMPLES, str(path))
    assert [tool["function"]["name"] for tool in tools] == ["News"] and origin.startswith("1 tools, sha256 ")
    path.write_text('{"News": {}}')
    for name in (path, tmp_path / "missing.json"):
        with pytest.raises(UserError, match="is no JSON list of tools in OpenAI's format"):
            tool_schemas(SAMPLES, str(name))


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (
            [{"id": 1, "task": "single step"}],
            "row 1 is no sample of FinMCP-Bench: it lacks scenery, diff_level, messages",
        ),
        ([sample(1, "sing step", SINGLE)], "task 'sing step' is none of single_step"),
        ([SAMPLES[0], SAMPLES[0]], "1 ids occur twice"),
    ],
)
def test_data_that_is_not_the_benchmark_is_refused(tmp_path, rows, said):
    (tmp_path / "data.json").write_text(json.dumps(rows))
    with pytest.raises(UserError, match=said):
        read_samples(str(tmp_path / "data.json"))


def test_data_without_the_wanted_part_is_refused(trial, model):
    model(silent)
    with pytest.raises(UserError, match="holds no sample of multi_step"):
        FinMCP().run(trial(SAMPLES), ("multi_step",))


def test_tf1_is_the_harmonic_mean_of_what_is_reported():
    metrics = {"micro_Precision": 0.5404, "micro_Recall": 0.4124, "macro_Precision": 0.0, "macro_Recall": 0.0}
    found = aggregates(metrics)
    assert round(found["tf1_micro"], 2) == 46.78 and found["tf1_macro"] == 0.0


def test_it_must_be_set_up(tmp_path):
    with pytest.raises(UserError, match="make bench-setup-finmcp"):
        FinMCP().version(tmp_path)


def test_the_script_knows_only_recorded_questions():
    with pytest.raises(ScriptError, match="no record begins"):
        script.of_samples(SAMPLES)([user("weather?")], [])


HOME = Path(__file__).parent.parent / ".bench"


@pytest.mark.slow
@pytest.mark.skipif(not (HOME / finmcp.SCRIPT).exists(), reason="finmcp is not set up: make bench-setup-finmcp")
@pytest.mark.parametrize("mode", ["oracle", "null"])
def test_the_official_script_end_to_end(tmp_path, mode):
    """The six public records through serve and the official script: 100 with what is on record, 0 without calls."""
    checks = verify("finmcp", mode, PARTS, 0, HOME, tmp_path)
    assert all(c.holds for c in checks), report(checks)
    assert [(c.part, c.right, c.tasks) for c in checks] == [(part, 2 * (mode == "oracle"), 2) for part in PARTS]
    overall = json.loads((tmp_path / "finmcp" / "results.json").read_text())["trials"][0]["overall"]
    assert set(overall.values()) == {100.0 * (mode == "oracle")}
