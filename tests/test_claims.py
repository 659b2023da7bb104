"""Which facts of an answer were only imagined: what is flagged with which source, and what supports a fact."""

import pytest

from envace.chat import ChatFormat
from envace.claims import unsupported_claims
from envace.environments import Rehearsed
from envace.episodes import drive, episode
from envace.prompts import MEMORY_HEADER, to_json, tool_call_block
from envace.types import Evidence, Exchange, Limits, Role, Segment, Sequence, Task, ToolCall, Trajectory

LIMITS = Limits(max_rounds=9, max_parallel_calls=9, max_context_tokens=9999, max_new_tokens=999)
CALL = ToolCall("get_order", {"order_id": "A10"})
SEEN, IMAGINED = Evidence.OBSERVED, Evidence.REHEARSED


def exchange(response, evidence, turn=0, call=CALL):
    return Exchange(call, response, turn, 0, evidence)


def trajectory(*exchanges, answers=(), user_turns=("Where is it?", "And now?"), system="Be brief.", tools=()):
    task = Task("t", system, list(tools), list(user_turns))
    return Trajectory(task, "g", exchanges=list(exchanges), answers=list(answers))


def rehearsal(*responses):
    return trajectory(*(exchange(response, IMAGINED) for response in responses))


def facts(committed, *rehearsals):
    return [(claim.fact, claim.turn) for claim in unsupported_claims(committed, list(rehearsals))]


def flagged(answer, response, *exchanges, **settings):
    """The facts flagged in a one-turn answer after one rehearsal with this response."""
    committed = trajectory(*exchanges, answers=[answer], **settings)
    return [fact for fact, _ in facts(committed, rehearsal(response))]


@pytest.mark.parametrize("separate", [False, True], ids=["shared", "separate"])
def test_a_claim_names_the_segment_that_it_came_from(demo_tokenizer, scripted, separate):
    chat = ChatFormat(demo_tokenizer)
    task = Task("t", "Be brief.", [{"type": "function", "function": {"name": "get_order"}}], ["Where is A10?"])
    rehearsals = []
    for response in ({"status": "lost"}, {"status": "shipped", "total": 77}):
        again = [] if response["status"] == "lost" else [tool_call_block(CALL), to_json({"other": "x9"})]
        outputs = [*again, tool_call_block(CALL), to_json(response), "Done."]
        steps = episode(task, Rehearsed(separate=separate, model="m"), chat, LIMITS, memory=MEMORY_HEADER)
        rehearsals.append(drive(steps, scripted(chat, *outputs)))
    committed = trajectory(answers=["It is shipped and costs 77."])
    claims = unsupported_claims(committed, rehearsals)
    assert [(c.fact, c.turn, c.rehearsal) for c in claims] == [("shipped", 0, 1), ("77", 0, 1)]
    for claim in claims:
        segment = rehearsals[1].sequences[claim.sequence].segments[claim.segment]
        assert "shipped" in chat.tokenizer.decode(segment.ids) and "x9" not in chat.tokenizer.decode(segment.ids)
        assert segment.evidence is Evidence.REHEARSED and segment.provenance == claim.provenance
        assert claim.provenance["model"] == "m" and len(claim.provenance["prompt_hash"]) == 16


def test_the_first_rehearsal_with_the_fact_is_its_source_and_each_turn_is_flagged_once():
    committed = trajectory(answers=["shipped, shipped", "Shipped."])
    claims = unsupported_claims(committed, [rehearsal({"s": "lost"}), rehearsal({"s": "shipped"}, ["SHIPPED"])] * 2)
    assert [(c.fact, c.turn, c.rehearsal, c.segment) for c in claims] == [
        ("shipped", 0, 1, None),
        ("shipped", 1, 1, None),
    ]


@pytest.mark.parametrize(
    "support",
    [
        {"system": "Orders may be shipped."},
        {"user_turns": ["Was it shipped?"]},
        {"tools": [{"function": {"name": "find", "parameters": {"enum": ["shipped"]}}}]},
        {"tools": [{"function": {"name": "find", "parameters": {"properties": {"shipped": {}}}}}]},
    ],
    ids=["system", "user", "tool value", "tool key"],
)
def test_what_was_given_supports_a_fact(support):
    assert flagged("It is shipped.", {"status": "shipped"}) == ["shipped"]
    assert flagged("It is shipped.", {"status": "shipped"}, **support) == []


@pytest.mark.parametrize(
    ("evidence", "is_support"),
    [
        (Evidence.OBSERVED, True),
        (Evidence.REHEARSED, False),
        (Evidence.SIMULATED, False),
        (Evidence.GIVEN, False),
        (Evidence.CLAIMED, False),
    ],
)
def test_only_observed_responses_support_a_fact(evidence, is_support):
    response = exchange({"orders": [{"status": "It was shipped today"}]}, evidence)
    assert flagged("shipped", {"status": "shipped"}, response) == ([] if is_support else ["shipped"])
    key = exchange({"shipped": True}, evidence)
    assert flagged("shipped", {"status": "shipped"}, key) == ([] if is_support else ["shipped"])


def test_what_is_observed_or_said_in_a_later_turn_does_not_support_an_earlier_answer():
    answers = ["It is shipped.", "It is shipped."]
    later = trajectory(exchange({"s": "shipped"}, SEEN, turn=1), answers=answers)
    assert facts(later, rehearsal({"s": "shipped"})) == [("shipped", 0)]
    earlier = trajectory(exchange({"s": "shipped"}, SEEN, turn=0), answers=answers)
    assert facts(earlier, rehearsal({"s": "shipped"})) == []
    said = trajectory(answers=answers, user_turns=["Where is it?", "Was it shipped?"])
    assert facts(said, rehearsal({"s": "shipped"})) == [("shipped", 0)]


def test_a_memory_and_an_own_claim_are_no_support():
    committed = trajectory(answers=["It is shipped."])
    memory = Segment(Role.CONTEXT, [1], Evidence.REHEARSED)
    committed.sequences.append(Sequence([memory]))
    committed.messages = [{"role": "system", "content": "# Rehearsed\nshipped"}, {"role": "user", "content": "?"}]
    committed.exchanges.append(exchange({"error": "no"}, SEEN, call=ToolCall("set", {"status": "shipped"})))
    assert facts(committed, rehearsal({"s": "shipped"})) == [("shipped", 0)]


def test_a_response_rehearsed_in_the_trajectory_itself_is_a_source_from_its_turn_on():
    own = [exchange({"s": "lost"}, IMAGINED, 0), exchange({"s": "shipped"}, IMAGINED, 1)]
    committed = trajectory(*own, answers=["lost or shipped", "lost or shipped"])
    claims = unsupported_claims(committed, [])
    assert [(c.fact, c.turn, c.rehearsal) for c in claims] == [
        ("lost", 0, None),
        ("lost", 1, None),
        ("shipped", 1, None),
    ]


@pytest.mark.parametrize(
    ("answer", "value", "is_stated"),
    [
        ("It costs 3.", 3, True),
        ("It costs 3.", 3.0, True),
        ("It costs 3.0 euros", 3, True),
        ("It costs 3.00.", 3.0, True),
        ("It costs 1.50.", 1.5, True),
        ("It costs 1,200 euros.", 1200, True),
        ("It costs 3.5.", 3.5, True),
        ("It costs 3.5.", 3, False),
        ("It costs 3.5.", 5, False),
        ("It costs 13.", 3, False),
        ("Order A3", 3, False),
        ("Version 1.0.5", 1.5, False),
        ("The ship left.", "shipped", False),
        ("It was reshipped.", "shipped", False),
        ("SHIPPED!", "shipped", True),
        ("on Monday, at noon", "Monday, at noon", True),
        ("It is b", "b", False),
        ("Room 7 it is", "7", True),
        ("true, false and null", True, False),
        ("None of it is null", None, False),
        ("- and -", "-", False),
        ("", "", False),
        ("Straße 4", "straße", True),
        ("漢字 is it", "漢字", True),
    ],
)
def test_how_a_fact_is_written(answer, value, is_stated):
    assert len(flagged(answer, {"key": [value]})) == is_stated
    # What states a fact in an answer supports it in an observation, too.
    assert flagged(answer, {"key": value}, exchange({"text": answer}, SEEN)) == []


def test_a_number_is_supported_by_the_same_number_only():
    assert flagged("It costs 3.0.", {"total": 3}, exchange({"n": 3.0}, SEEN)) == []
    assert flagged("It costs 3.", {"total": 3.0}, exchange({"n": 3}, SEEN)) == []
    assert flagged("It costs 3.", {"total": 3}, exchange({"n": 3.5}, SEEN)) == ["3"]
    assert flagged("It costs 3.", {"total": 3}, exchange({"n": 13}, SEEN)) == ["3"]


def test_keys_are_no_facts_and_a_response_that_could_not_be_read_has_none():
    assert flagged("The status is shipped", {"status": "lost", "shipped": True}) == []
    assert flagged("None", None) == []


def test_characters_of_regular_expressions_are_characters():
    for fact in ("a.c", "(a+)+$", "[", "a|b", "\\d", "^a", "$5*"):
        stated = fact if fact != "[" else "it is ["
        assert flagged(f"it is {stated} now", {"v": fact}) == ([] if fact == "[" else [fact])
        assert flagged("it is abc 7 a b now", {"v": fact}) == []


def test_huge_and_deep_responses_are_read_without_recursion(monkeypatch):
    deep = "shipped"
    for i in range(100_000):
        deep = [deep] if i % 2 else {"k": deep}
    assert flagged("It is shipped.", deep) == ["shipped"]
    assert flagged("It is shipped.", {"s": "shipped"}, exchange(deep, SEEN)) == []

    # Of many facts only those that stand somewhere in a text are looked at closely.
    looked_at = []
    monkeypatch.setattr("envace.claims.contains", lambda text, fact: looked_at.append(fact) or True)
    many = [f"value{i}" for i in range(20_000)] + [1e308, "x" * 1_000_000, "1." * 100_000, "9" * 100_000]
    assert flagged("It is value77.", many) == ["value7", "value77"]
    assert looked_at == ["value7", "value77"]
