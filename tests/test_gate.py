"""The dry run before a risky call: nothing real happens meanwhile; what is decided, told and scored."""

import json
import math

import pytest
from matplotlib.figure import Figure

import evaluate
from envace.chat import ChatFormat
from envace.config import ConfigError, load_config
from envace.demo.desk import SYSTEM, TOOLS, CallCounter, Desk
from envace.demo.source import DemoSource
from envace.environments import Real, Rehearsed, SchemaCheck
from envace.episodes import begin, drive, episode, gather
from envace.evaluation import environment_factory
from envace.gate import Gate, check_risks, risk_of, state_change, status_of
from envace.generation import CachedGenerator
from envace.metrics import prediction_metrics, reliability_bins
from envace.prompts import malformed_call_error, not_executed_error, not_recorded_error, to_json, tool_call_block
from envace.rehearsal import fork
from envace.report import calibration
from envace.rewards import Branch, Goal, TurnGoal, score
from envace.schemas import call_error
from envace.settings import GateConfig, SamplingConfig
from envace.team import Team
from envace.tracking import trajectory_record, without_nan
from envace.types import (
    CallStatus,
    Decision,
    Evidence,
    Exchange,
    Limits,
    Prediction,
    Request,
    Role,
    Segment,
    ServiceFault,
    Status,
    Task,
    ToolCall,
    UserError,
    content_hash,
)

LIMITS = Limits(max_rounds=9, max_parallel_calls=9, max_context_tokens=9999, max_new_tokens=999)
WORLD = {
    "customer": "K10",
    "orders": {
        "A10": {"customer_id": "K10", "status": "processing", "total": 40},
        "B20": {"customer_id": "K11", "status": "processing", "total": 50},
    },
    "customers": {"K10": {"tier": "gold", "last_order": "A10"}},
}
GET, CANCEL = ToolCall("get_order", {"order_id": "A10"}), ToolCall("cancel_order", {"order_id": "A10"})
FOREIGN = ToolCall("cancel_order", {"order_id": "B20"})
CANCELLED = {"order_id": "A10", "status": "cancelled"}
DENIED, INVALID = {"error": "not_permitted"}, {"error": "unknown_id"}
SUCCESS, PERMISSION, VALIDATION, UNKNOWN = CallStatus
in_both_views = pytest.mark.parametrize("separate", [False, True], ids=["shared", "separate"])


def settings(mode="log", samples=2, **others):
    return GateConfig(mode=mode, samples=samples, risk={"cancel_order": "high"}, **others)


def task(tools=TOOLS):
    goal = Goal((TurnGoal((Branch(writes=(CANCEL,)),)),), frozenset({"get_order", "get_customer"}))
    return Task("t", SYSTEM, tools, ["Cancel A10."], goal=goal, world=WORLD)


def calling(*calls):
    return "\n".join(map(tool_call_block, calls))


class WatchedDesk(Desk):
    """Counts its calls and tells the hash of its state."""

    def __init__(self):
        super().__init__(WORLD, CallCounter(), "test")

    @property
    def touched(self):
        return sum(self._counter.calls.values()), content_hash(self.state)


UNTOUCHED = WatchedDesk().touched


@pytest.fixture(scope="module")
def chat(demo_tokenizer):
    return ChatFormat(demo_tokenizer)


@pytest.fixture
def unfold(chat, scripted):
    """(trajectory, desk, requests) of an episode behind a gate. While REHEARSE is asked, nothing may touch the desk."""

    def run(gate_settings, *outputs, separate=False, ask=None, predictor=None, one=None, status=Status.FINISHED):
        desk = WatchedDesk()
        generate = scripted(chat, *outputs)
        touched_before = []

        def watched(requests):
            if any(request.role is Role.REHEARSE for request in requests):
                touched_before.append(desk.touched)
            return generate(requests)

        gate = Gate(Real(desk), predictor or Rehearsed(separate=separate, model="m"), gate_settings, ask)
        trajectory = drive(episode(one or task(), gate, chat, LIMITS), watched)
        assert generate.remaining == [] and trajectory.status is status, trajectory.reason
        run.touched_while_predicting = touched_before
        return trajectory, desk, generate.requests

    return run


def forks(trajectory, requests):
    return [r.sequence for r, _ in requests if r.sequence is not trajectory.sequences[0]]


def seen_by_act(trajectory):
    return [json.loads(m["content"]) for m in trajectory.messages if m["role"] == "tool"]


# Risk


@pytest.mark.parametrize(
    ("annotations", "risk"),
    [
        ({"destructiveHint": True}, "high"),
        ({"readOnlyHint": True}, "low"),
        ({"destructiveHint": False}, "medium"),
        ({"readOnlyHint": False}, "medium"),
        ({"destructiveHint": True, "readOnlyHint": True}, "high"),
        ({"destructiveHint": "true"}, "medium"),
        ({}, "medium"),
        (None, "medium"),
        ("destructive", "medium"),
    ],
)
def test_annotations_tell_the_risk_on_the_tool_or_on_its_function(annotations, risk):
    other = {"function": {"name": "other", "annotations": {"destructiveHint": True}}}
    on_tool = [other, {"annotations": annotations, "function": {"name": "cancel"}}]
    on_function = [other, {"function": {"name": "cancel", "annotations": annotations}}]
    assert risk_of("cancel", on_tool, {}) == risk_of("cancel", on_function, {}) == risk
    for configured in ("low", "medium", "high"):
        assert risk_of("cancel", on_tool, {"cancel": configured, "other": "low"}) == configured


def test_a_tool_that_nothing_is_said_about_is_medium():
    assert risk_of("cancel_order", TOOLS, {}) == risk_of("no_such_tool", TOOLS, {}) == "medium"


@pytest.mark.parametrize(("at", "predicted"), [("low", [GET, CANCEL]), ("medium", [GET, CANCEL]), ("high", [CANCEL])])
def test_calls_from_a_risk_on_are_predicted_and_no_others(unfold, at, predicted):
    imagined = [to_json(CANCELLED)] * (2 * len(predicted))
    outputs = [calling(GET), *imagined[2:], calling(CANCEL), *imagined[:2], "Done."]
    trajectory, desk, _ = unfold(settings(at=at), *outputs)
    assert [p.call for p in trajectory.predictions] == predicted
    assert [p.risk for p in trajectory.predictions] == ["medium", "high"][-len(predicted) :]
    assert desk.touched[0] == 2


# What a response says


@pytest.mark.parametrize(
    ("response", "status"),
    [
        ({"order_id": "A10", "status": "cancelled"}, SUCCESS),
        ([], SUCCESS),
        ({}, SUCCESS),
        ({"error": None, "message": "invalid"}, SUCCESS),
        ({"errors": [], "data": {"text": "permission denied"}}, SUCCESS),
        ({"note": "not permitted"}, SUCCESS),
        (None, UNKNOWN),
        ("cancelled", UNKNOWN),
        # The desk
        ({"error": "not_permitted"}, PERMISSION),
        ({"error": "forbidden_state"}, PERMISSION),
        ({"error": "unknown_tool"}, VALIDATION),
        ({"error": "invalid_argument"}, VALIDATION),
        ({"error": "unknown_id"}, VALIDATION),
        # Ours
        (malformed_call_error("a call needs a name"), VALIDATION),
        (call_error(TOOLS, ToolCall("no_tool", {})), VALIDATION),
        (call_error(TOOLS, ToolCall("get_order", {})), VALIDATION),
        (not_executed_error("blocked", "unknown"), PERMISSION),
        (not_recorded_error(), UNKNOWN),
        # Others
        ({"error": {"code": 403, "message": "no"}}, PERMISSION),
        ({"error": {"code": "404", "message": "no"}}, VALIDATION),
        ({"error": {"code": 4030, "message": "no"}}, UNKNOWN),
        ({"error": "PermissionDenied"}, PERMISSION),
        ({"error": "ResourceNotFound"}, VALIDATION),
        ({"error": {"message": "You are not allowed: invalid token", "code": "INVALID_PARAMETERS"}}, VALIDATION),
        ({"error": "It is unauthorized.", "status": "invalid"}, PERMISSION),
        ({"error_message": "Missing field amount"}, VALIDATION),
        ({"error": True, "message": "Access denied"}, PERMISSION),
        ({"isError": True, "content": [{"type": "text", "text": "No such order"}]}, VALIDATION),
        ({"success": False, "reason": "amount must be positive"}, VALIDATION),
        ({"status": "error", "message": "Forbidden"}, PERMISSION),
        ({"error": "unknown error"}, UNKNOWN),
        ({"error": "timeout"}, UNKNOWN),
        ({"error": "supermild"}, UNKNOWN),
        ({"error": "漢字 (a+)+$"}, UNKNOWN),
    ],
    ids=str,
)
def test_what_a_response_says_about_the_call(response, status):
    assert status_of(response) is status


def test_the_change_is_what_differs_from_what_was_last_observed_of_the_same_thing():
    def seen(call, response, evidence=Evidence.OBSERVED):
        return Exchange(call, response, 0, 0, evidence)

    order = {"order_id": "A10", "status": "processing", "total": 40}
    response = {"order_id": "A10", "status": "cancelled", "total": 40.0, "fee": 1}
    assert state_change(CANCEL, response, []) == response
    assert state_change(CANCEL, response, [seen(GET, order)]) == {"status": "cancelled", "fee": 1}
    # The last one counts; another order's and what nobody observed do not.
    later = [seen(GET, order), seen(GET, order | {"status": "cancelled"})]
    assert state_change(CANCEL, response, later) == {"fee": 1}
    other = seen(FOREIGN, {"order_id": "B20", "status": "cancelled"})
    assert state_change(CANCEL, response, [seen(GET, order), other]) == {"status": "cancelled", "fee": 1}
    rehearsed = seen(GET, response, Evidence.REHEARSED)
    assert state_change(CANCEL, response, [rehearsed, seen(GET, None), seen(GET, [1])]) == response
    assert state_change(CANCEL, [response], []) == {}


# Predictions and the world


@in_both_views
@pytest.mark.parametrize("mode", ["log", "block"])
def test_nothing_real_happens_while_a_call_is_predicted(unfold, mode, separate):
    outputs = [calling(GET), calling(CANCEL), *[to_json(CANCELLED)] * 2, "Done."]
    trajectory, desk, requests = unfold(settings(mode), *outputs, separate=separate)
    counts = [count for count, _ in unfold.touched_while_predicting]
    assert counts == [1] and unfold.touched_while_predicting[0][1] == UNTOUCHED[1], "after GET, before CANCEL"
    assert desk.touched[0] == 2 and desk.state["orders"]["A10"]["status"] == "cancelled"
    assert trajectory.predictions == [
        Prediction(
            CANCEL,
            exchange=1,
            turn=0,
            round=1,
            risk="high",
            status=SUCCESS,
            confidence=1.0,
            response=CANCELLED,
            change={"status": "cancelled"},
            decision=Decision.EXECUTED,
            happened=SUCCESS,
            agreement=(2, 2),
        )
    ]
    # Samples are asked for together, each on a stream of its own that is closed afterwards.
    asked = forks(trajectory, requests)
    assert len(set(asked)) == 2 and not any(sequence.open for sequence in asked)
    assert len(trajectory.sequences) == 1 and [o.role for o in trajectory.outputs()] == [Role.ACT] * 3


@in_both_views
def test_a_gate_leaves_the_real_stream_as_it_is_without_one(chat, scripted, unfold, separate):
    outputs = [calling(GET), calling(CANCEL, FOREIGN), "Done."]
    plain = drive(episode(task(), Real(WatchedDesk()), chat, LIMITS), scripted(chat, *outputs))
    imagined = [to_json(DENIED), "no JSON"] * 2
    gated, _, requests = unfold(settings(), *outputs[:2], *imagined, outputs[2], separate=separate)
    assert gated.sequences[0].ids == plain.sequences[0].ids
    assert gated.messages == plain.messages and gated.exchanges == plain.exchanges
    assert [s.finish_reason for s in gated.outputs()] == ["stop"] * 3
    assert len(gated.predictions) == 2
    if not separate:
        # REHEARSE writes in the very slot where the real response stands then.
        prompts = [prompt for request, prompt in requests if request.role is Role.REHEARSE]
        assert all(prompt == plain.sequences[0].ids[: len(prompt)] for prompt in prompts)
        assert len(prompts[0]) == len(prompts[1]) < len(prompts[2]), "the second call sees the first result"


@in_both_views
@pytest.mark.parametrize(
    "predicted",
    [DENIED, INVALID, {"error": "timeout"}, "no JSON", '{"cut'],
    ids=["denied", "invalid", "?", "text", "cut"],
)
def test_a_call_whose_success_is_not_predicted_is_blocked_and_act_is_told(chat, unfold, predicted, separate):
    text = predicted if isinstance(predicted, str) else to_json(predicted)
    outputs = [calling(CANCEL), *[text] * 2, "I could not."]
    trajectory, desk, requests = unfold(settings("block"), *outputs, separate=separate)
    assert desk.touched == UNTOUCHED
    [prediction] = trajectory.predictions
    assert prediction.decision is Decision.BLOCKED and prediction.confidence == 1.0
    assert prediction.status is (status_of(predicted) if isinstance(predicted, dict) else UNKNOWN)
    assert prediction.response == (predicted if isinstance(predicted, dict) else None)
    assert prediction.change == {} and prediction.happened is None and prediction.agreement is None
    error = not_executed_error("blocked", prediction.status)
    assert trajectory.exchanges == [Exchange(CANCEL, error, 0, 0, Evidence.GIVEN)]
    assert seen_by_act(trajectory) == [error] and to_json(error) in chat.tokenizer.decode(requests[-1][1])
    assert trajectory.answers == ["I could not."] and trajectory.executed == []


def test_a_response_that_is_too_long_or_a_full_context_is_no_prediction(chat, scripted):
    for limits, asked in ((Limits(9, 9, 9999, 60), True), (Limits(9, 9, 1, 999), False)):
        trajectory = begin(task(), chat)
        gate = Gate(Real(WatchedDesk()), Rehearsed(), settings("block"))
        generate = scripted(chat, *[to_json({"x": "y " * 100})] * (2 * asked))
        observation = drive(gate.respond(trajectory, CANCEL, chat, limits), generate)
        assert generate.remaining == [] and observation.evidence is Evidence.GIVEN
        assert trajectory.status is Status.FINISHED and trajectory.predictions[0].status is UNKNOWN


@in_both_views
def test_of_parallel_calls_each_is_decided_on_its_own(unfold, separate):
    outputs = [calling(FOREIGN, GET, CANCEL), *[to_json(DENIED)] * 2, *[to_json(CANCELLED)] * 2, "Done."]
    trajectory, desk, requests = unfold(settings("block"), *outputs, separate=separate)
    assert [p.decision for p in trajectory.predictions] == [Decision.BLOCKED, Decision.EXECUTED]
    assert [p.exchange for p in trajectory.predictions] == [0, 2]
    assert [e.evidence for e in trajectory.exchanges] == [Evidence.GIVEN, Evidence.OBSERVED, Evidence.OBSERVED]
    assert [e.call for e in trajectory.executed] == [GET, CANCEL] and desk.touched[0] == 2
    assert len(seen_by_act(trajectory)) == 3 and not any(s.open for s in forks(trajectory, requests))
    assert desk.state["orders"]["B20"]["status"] == "processing"


@pytest.mark.parametrize(
    ("imagined", "status", "confidence", "response"),
    [
        ([CANCELLED, CANCELLED, DENIED, INVALID], SUCCESS, 0.5, CANCELLED),
        ([CANCELLED, CANCELLED, DENIED, DENIED], PERMISSION, 0.5, DENIED),  # as many: the bad news
        ([CANCELLED, DENIED, INVALID, None], PERMISSION, 0.25, DENIED),
        ([{"a": 1}, {"b": 1}, {"b": 1.0}, DENIED], SUCCESS, 0.75, {"b": 1}),  # of those alike the most frequent
        ([None, None, None, CANCELLED], UNKNOWN, 0.75, None),
        ([None, {"error": "timeout"}, CANCELLED, CANCELLED], UNKNOWN, 0.5, {"error": "timeout"}),
    ],
)
def test_the_most_frequent_status_is_predicted_with_its_share(unfold, imagined, status, confidence, response):
    texts = ["nothing" if value is None else to_json(value) for value in imagined]
    trajectory, _, _ = unfold(settings(samples=4), calling(CANCEL), *texts, "Done.")
    [prediction] = trajectory.predictions
    assert (prediction.status, prediction.confidence, prediction.response) == (status, confidence, response)
    assert prediction.decision is Decision.EXECUTED and prediction.happened is SUCCESS, "only logged"


def test_what_really_happened_is_recorded_beside_the_prediction(unfold):
    outputs = [calling(FOREIGN), *[to_json({"order_id": "B20", "status": "cancelled"})] * 2, "Done."]
    trajectory, _, _ = unfold(settings(), *outputs)
    [prediction] = trajectory.predictions
    assert (prediction.status, prediction.happened, prediction.agreement) == (SUCCESS, PERMISSION, (0, 3))
    record = json.loads(json.dumps(without_nan(trajectory_record(trajectory)), allow_nan=False))
    assert record["predictions"] == [
        {
            "call": {"name": "cancel_order", "arguments": {"order_id": "B20"}},
            **{"exchange": 0, "turn": 0, "round": 0, "risk": "high", "status": "success", "confidence": 1.0},
            "response": {"order_id": "B20", "status": "cancelled"},
            "change": {"order_id": "B20", "status": "cancelled"},
            **{"decision": "executed", "happened": "permission_error", "agreement": [0, 3]},
        }
    ]


def test_a_broken_environment_leaves_the_prediction_without_an_outcome(chat, scripted):
    class Broken:
        def execute(self, call):
            raise ServiceFault("down")

    gate = Gate(Real(Broken()), Rehearsed(), settings())
    generate = scripted(chat, calling(CANCEL), *[to_json(CANCELLED)] * 2)
    trajectory = drive(episode(task(), gate, chat, LIMITS), generate)
    assert (trajectory.status, trajectory.reason, trajectory.exchanges) == (Status.FAULT, "down", [])
    [prediction] = trajectory.predictions
    assert (prediction.decision, prediction.happened, prediction.agreement) == (Decision.EXECUTED, None, None)


def test_an_interrupt_in_a_prediction_closes_the_forks_and_touches_nothing(chat):
    desk, asked = WatchedDesk(), []
    trajectory = begin(task(), chat)

    def interrupted(requests):
        asked.extend(request.sequence for request in requests)
        raise KeyboardInterrupt

    steps = Gate(Real(desk), Rehearsed(), settings()).respond(trajectory, CANCEL, chat, LIMITS)
    with pytest.raises(KeyboardInterrupt):
        drive(steps, interrupted)
    steps.close()
    assert len(asked) == 2 and not any(sequence.open for sequence in asked)
    assert trajectory.sequences[0].open and desk.touched == UNTOUCHED and trajectory.predictions == []


def test_a_schema_check_is_a_predictor_too_and_asks_nobody(unfold):
    wrong = ToolCall("cancel_order", {})
    trajectory, desk, _ = unfold(settings("block"), calling(wrong), "Sorry.", predictor=SchemaCheck(Rehearsed()))
    assert trajectory.predictions[0].status is VALIDATION and desk.touched == UNTOUCHED


def test_calls_that_cannot_be_read_are_left_to_what_lies_inside(unfold):
    malformed = '<tool_call>\n{"name": "cancel_order", "arguments": {\n</tool_call>'
    trajectory, desk, _ = unfold(settings("block"), malformed, "Sorry.")
    assert trajectory.answers == ["Sorry."] and trajectory.predictions == [] and desk.touched == UNTOUCHED
    assert not Gate(Rehearsed(), Rehearsed(), settings()).answers_malformed_calls


def test_a_fork_of_a_trajectory_has_predictions_of_its_own(unfold):
    trajectory, _, _ = unfold(settings(), calling(CANCEL), *[to_json(CANCELLED)] * 2, "Done.")
    copy = fork(trajectory)
    copy.predictions.append(None)
    assert len(trajectory.predictions) == 1


# Asking


@pytest.mark.parametrize("predicted", [CANCELLED, DENIED], ids=["success", "error"])
@pytest.mark.parametrize(
    ("reply", "decision"),
    [(True, Decision.APPROVED), (False, Decision.DECLINED), (None, Decision.DECLINED), ("yes", Decision.DECLINED)],
    ids=str,
)
def test_whoever_is_asked_decides_whatever_is_predicted(unfold, reply, decision, predicted):
    asked = []

    def ask(call, prediction):
        asked.append((call, prediction.status, prediction.confidence, prediction.response))
        return reply

    outputs = [calling(CANCEL), *[to_json(predicted)] * 2, "Done."]
    trajectory, desk, _ = unfold(settings("ask"), *outputs, ask=ask)
    assert asked == [(CANCEL, status_of(predicted), 1.0, predicted)]
    [prediction] = trajectory.predictions
    assert prediction.decision is decision
    if decision is Decision.APPROVED:
        assert desk.touched[0] == 1 and seen_by_act(trajectory) == [CANCELLED] and prediction.happened is SUCCESS
    else:
        assert desk.touched == UNTOUCHED and prediction.happened is None
        assert seen_by_act(trajectory) == [not_executed_error("declined", status_of(predicted))]


def test_asking_without_anybody_to_ask_says_what_to_do():
    with pytest.raises(UserError, match="gate.mode=ask: there is nobody to ask here, so set gate.mode=block"):
        Gate(Real(WatchedDesk()), Rehearsed(), settings("ask"))


# What follows from a call that was held back


@pytest.mark.parametrize(("predicted", "is_done"), [(CANCELLED, True), (DENIED, False)], ids=["executed", "blocked"])
def test_a_blocked_write_is_no_deed_for_the_reward_and_the_final_state(unfold, monkeypatch, predicted, is_done):
    outputs = [calling(CANCEL), *[to_json(predicted)] * 2, "Done."]
    trajectory, desk, _ = unfold(settings("block"), *outputs)
    assert score(trajectory)[1]["writes"] == is_done
    assert (desk.touched[0] == 1) is is_done
    right = WatchedDesk()
    right.execute(CANCEL)
    monkeypatch.setattr("envace.demo.source.right_final_state", lambda task, counter: right.state)
    assert DemoSource(config()).reaches_right_state(trajectory) is is_done


# A real model


def test_the_real_streams_of_a_model_with_a_cache_go_on_as_without_a_gate(chat, demo_tokenizer, tiny_model):
    """Random weights call no tool, so each ACT output is followed by the text of a call, as context."""
    model = tiny_model(len(demo_tokenizer))
    plans = [[GET, CANCEL], [CANCEL, FOREIGN], [GET, GET], []]
    limits = Limits(9, 9, 9999, 12)

    def acting(calls):
        left = list(calls)

        def act(trajectory, chat, limits):
            stream = trajectory.sequences[0]
            [completion] = yield [Request(stream, Role.ACT, chat.act_stops, limits.max_new_tokens)]
            stream.segments.append(Segment(Role.ACT, completion.ids, Evidence.CLAIMED, completion.logprobs))
            text = calling(left.pop(0)) if left else "Done."
            stream.segments.append(Segment(Role.CONTEXT, chat.output(text), Evidence.GIVEN))
            return text

        return act

    def run(environment_for):
        generate = CachedGenerator(model, chat.pad_id, SamplingConfig(temperature=0.0))
        desks = [WatchedDesk() for _ in plans]
        steps = [
            episode(task(), environment_for(desk), chat, limits, act=acting(calls))
            for desk, calls in zip(desks, plans, strict=True)
        ]
        return drive(gather(steps), generate), [desk.touched for desk in desks]

    plain, touched = run(Real)
    for separate in (False, True):
        gated, touched_too = run(lambda desk, s=separate: Gate(Real(desk), Rehearsed(separate=s), settings()))
        assert [t.sequences[0].ids for t in gated] == [t.sequences[0].ids for t in plain] and touched_too == touched
        assert [[p.call for p in t.predictions] for t in gated] == [[CANCEL], [CANCEL, FOREIGN], [], []]
        assert {p.status for t in gated for p in t.predictions} == {UNKNOWN}, "random weights write no JSON"
    outputs = [segment.ids for t in plain for segment in t.outputs()]
    assert len(outputs) == 10 and len(set(map(tuple, outputs))) > 5, "they say different things"


# Metrics


def predicted(confidence, status, happened, agreement=None, decision=Decision.EXECUTED):
    return Prediction(CANCEL, 0, 0, 0, "high", status, confidence, None, {}, decision, happened, agreement)


def test_golden_numbers_of_predictions():
    metrics = prediction_metrics(
        [
            predicted(1.0, SUCCESS, SUCCESS, (2, 2)),
            predicted(0.75, SUCCESS, PERMISSION, (0, 3)),
            predicted(0.75, PERMISSION, PERMISSION, (1, 1)),
            predicted(0.5, UNKNOWN, SUCCESS, None, Decision.APPROVED),
            predicted(0.5, SUCCESS, UNKNOWN, (9, 9)),  # nobody knows how it went
            predicted(1.0, PERMISSION, None, None, Decision.BLOCKED),
            predicted(1.0, SUCCESS, None, None, Decision.DECLINED),
            predicted(1.0, SUCCESS, None, None),  # the environment broke
        ]
    )
    bins = metrics.pop("bins")
    assert metrics == {
        "predictions": 8,
        "decisions": {"approved": 1, "blocked": 1, "declined": 1, "executed": 5},
        "scored": 4,
        "accuracy": 0.5,
        "brier": pytest.approx((0 + 0.5625 + 0.0625 + 0.25) / 4),
        "agreement": 0.5,
    }
    assert bins == [
        {"low": 0.5, "high": 0.6, "count": 1, "confidence": 0.5, "accuracy": 0.0},
        {"low": 0.7, "high": 0.8, "count": 2, "confidence": 0.75, "accuracy": 0.5},
        {"low": 0.9, "high": 1.0, "count": 1, "confidence": 1.0, "accuracy": 1.0},
    ]


def test_bins_hold_their_lower_end_and_the_last_one_also_its_upper():
    for n in (10, 100):
        for i in range(n):
            [entry] = reliability_bins([(i / n, True)], n)
            assert (entry["low"], entry["high"]) == (i / n, (i + 1) / n)
    assert [(b["low"], b["count"]) for b in reliability_bins([(1.0, True), (0.99, False), (0.0, True)], 2)] == [
        (0.0, 1),
        (0.5, 2),
    ]


def test_what_could_not_be_measured_is_nan_and_gives_no_picture(tmp_path):
    for predictions in ([], [predicted(1.0, PERMISSION, None, decision=Decision.BLOCKED)]):
        metrics = prediction_metrics(predictions)
        assert all(math.isnan(metrics[name]) for name in ("accuracy", "brier", "agreement"))
        assert metrics["bins"] == [] and metrics["scored"] == 0 and metrics["predictions"] == len(predictions)
        picture = tmp_path / "calibration.png"
        picture.write_text("of an earlier evaluation")
        evaluate.draw_calibration({"gate": metrics}, picture)
        assert not picture.exists()
    evaluate.draw_calibration({}, tmp_path / "calibration.png")
    assert list(tmp_path.iterdir()) == []


def test_the_calibration_plot_shows_the_bins(tmp_path, monkeypatch):
    drawn, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, *a, **s: drawn.append(figure) or save(figure, *a, **s))
    bins = reliability_bins([(1.0, True), (1.0, False), (0.25, False)])
    calibration.draw(bins, tmp_path / "calibration.png")
    assert (tmp_path / "calibration.png").read_bytes().startswith(b"\x89PNG")
    diagonal, line = drawn[0].axes[0].get_lines()
    assert [*zip(*line.get_data(), strict=True)] == [(25, 0), (100, 50)]
    assert [text.get_text() for text in drawn[0].axes[0].texts] == ["1", "2"]


# Settings


def config(*overrides):
    return load_config(None, ["model.path=m", *overrides])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["gate.risk={cancel_order: severe}"], "gate.risk=.*must say low, medium, high for each tool"),
        (["gate.mode=maybe"], "gate.mode='maybe'.*expected one of none, log, block, ask"),
        (["gate.samples=0"], "gate.samples=0.*must be >= 1"),
        (["gate.mode=block", "data.source=cm2", "data.path=d"], "gate.mode=block.*set it to none"),
    ],
)
def test_settings_that_cannot_work_are_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        config(*overrides)
    assert config("gate.risk.cancel_order=high", "gate.mode=log").gate.risk == {"cancel_order": "high"}


def test_a_misspelt_tool_is_refused_as_it_would_guard_nothing():
    check_risks(GateConfig(risk={"cancel_order": "high"}), [task()])
    with pytest.raises(UserError, match="gate.risk: no task has a tool 'cancel'; there are cancel_order, get_customer"):
        check_risks(GateConfig(risk={"cancel": "high"}), [task()])


def test_the_gate_stands_before_real_environments_and_only_where_it_is_asked_for():
    class Writer:
        name = "writer"

    team = Team(dict.fromkeys((Role.ACT, Role.REHEARSE), Writer()), [], {})

    def built(name, *overrides):
        settings = config(*overrides)
        return environment_factory(name, settings, DemoSource(settings), team, None, "test")(task())

    assert isinstance(built("real"), Real)
    gate = built("real", "gate.mode=block", "rollout.view=separate", "gate.samples=3")
    assert isinstance(gate, Gate) and isinstance(gate.inner, Real) and gate.settings.samples == 3
    assert gate.predictor.separate and gate.predictor.model == "writer"
    assert not any(isinstance(built(name, "gate.mode=block"), Gate) for name in ("rehearsed", "constant"))
    mixed = ["rollout.environment=mixed", "rollout.mixture={real: 1.0}", "gate.mode=log"]
    assert isinstance(built("mixed", *mixed), Gate)
    with pytest.raises(UserError, match="nobody to ask"):
        built("real", "gate.mode=ask")
