"""Recorded dialogues as training sequences, what is refused or left out, and the order in which items are drawn."""

import logging
from collections import Counter

import pytest

from envace.chat import ChatFormat
from envace.data import Sampler, short_enough
from envace.demonstrations import DialogueError, demonstration
from envace.prompts import execution_result, tool_call_block
from envace.types import Evidence, RecordedCall, Role, Task, ToolCall, UserError

TASK = Task("d7", "Be brief.", [], ["q"])
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "hi"}
CALL = {"role": "assistant", "content": tool_call_block(ToolCall("f", {"c": 1}))}
TWO_CALLS = {"role": "assistant", "content": CALL["content"] + CALL["content"]}
BROKEN = {"role": "assistant", "content": "<tool_call>{</tool_call>"}
TOOL = {"role": "tool", "content": '{"ok": true}'}


@pytest.fixture(scope="module")
def chat(demo_tokenizer):
    return ChatFormat(demo_tokenizer)


# Demonstrations


def test_a_recorded_response_is_trained_and_known_to_be_observed(chat):
    built = demonstration(TASK, [SYSTEM, USER, TWO_CALLS, TOOL, TOOL, ANSWER, USER, ANSWER], chat)
    assert [(s.role, s.evidence) for s in built.outputs()] == [
        (Role.ACT, Evidence.CLAIMED),
        (Role.REHEARSE, Evidence.OBSERVED),
        (Role.REHEARSE, Evidence.OBSERVED),
        (Role.ACT, Evidence.CLAIMED),
        (Role.ACT, Evidence.CLAIMED),
    ]
    assert {s.finish_reason for s in built.outputs()} == {"stop"}
    assert not built.sequences[0].open


def test_messages_are_kept_in_order(chat):
    messages = [SYSTEM, USER, TWO_CALLS, TOOL, TOOL, ANSWER, USER, CALL, TOOL, ANSWER]
    for separate in (False, True):
        assert demonstration(TASK, messages, chat, separate=separate).messages == messages


def test_the_answer_to_a_call_that_cannot_be_read_is_context(chat):
    for separate in (False, True):
        built = demonstration(TASK, [USER, BROKEN, TOOL, CALL, TOOL, ANSWER], chat, separate=separate)
        assert [s.role for s in built.sequences[0].segments if s.evidence is Evidence.OBSERVED][0] is Role.CONTEXT
        assert [s.role for s in built.outputs()].count(Role.REHEARSE) == 1
        assert len(built.sequences) == 1 + separate


def test_the_separate_chat_of_a_call_sees_earlier_rounds_only(chat):
    responses = [{"role": "tool", "content": f'{{"number": {n}}}'} for n in range(3)]
    messages = [USER, CALL, responses[0], TWO_CALLS, *responses[1:], ANSWER]
    built = demonstration(TASK, messages, chat, separate=True)
    prompts = [chat.text(sequence.segments[0].ids) for sequence in built.sequences[1:]]
    assert [[n for n in range(3) if f'"number": {n}' in prompt] for prompt in prompts] == [[], [0], [0]]


@pytest.mark.parametrize("text", ["Not found.", "", "3", "null", '"{}"', "{'ok': 1}", '{"n": NaN}', '{"ok": true} so'])
def test_a_response_that_rehearse_could_not_write_is_context(chat, text):
    messages = [USER, TWO_CALLS, {"role": "tool", "content": text}, TOOL, ANSWER]
    shared, separate = (demonstration(TASK, messages, chat, separate=separate) for separate in (False, True))
    for built in (shared, separate):
        [first, *_] = [s for s in built.sequences[0].segments if s.evidence is Evidence.OBSERVED]
        assert (first.role, first.ids) == (Role.CONTEXT, chat.response(text))
        assert built.messages == messages
    # ACT sees the same in both views, and the other response is taught as ever.
    assert shared.sequences[0].ids == separate.sequences[0].ids
    assert [s.ids for s in shared.outputs() if s.role is Role.REHEARSE] == [chat.response(TOOL["content"])]
    [_, rehearsed] = separate.sequences
    assert rehearsed.segments[1].ids == chat.output(execution_result(TOOL["content"]))


@pytest.mark.parametrize("text", ['{"ok": true}', "[]", ' {"a": "x\ny"}\n'])
def test_a_json_object_or_array_is_taught_as_it_stands(chat, text):
    built = demonstration(TASK, [USER, CALL, {"role": "tool", "content": text}, ANSWER], chat)
    assert [s.ids for s in built.outputs() if s.role is Role.REHEARSE] == [chat.response(text)]


def test_grounded_chats_show_the_recorded_calls_of_earlier_turns(chat):
    # Each call stands with its result. The third call was made before: that result would be the answer.
    turns = [[(1, 100), (2, 101)], [(1, 102), (3, 103)], [(4, 104)]]
    recorded = tuple(tuple(RecordedCall(ToolCall("f", {"c": c}), f'{{"n": {n}}}') for c, n in turn) for turn in turns)
    messages = [SYSTEM]
    for turn in recorded:
        messages.append(USER)
        for r in turn:
            messages.append({"role": "assistant", "content": tool_call_block(r.call)})
            messages.append({"role": "tool", "content": r.response})
        messages.append(ANSWER)
    task = Task("d8", "Be brief.", [], ["q"] * 3, recorded=recorded)

    def known(grounded):
        built = demonstration(task, messages, chat, separate=True, grounded=grounded)
        prompts = [chat.text(sequence.segments[0].ids) for sequence in built.sequences[1:]]
        return [p.partition("# Recorded results\n")[2].partition("# Conversation")[0].splitlines() for p in prompts]

    lines = [f'{{"name": "f", "arguments": {{"c": {c}}}}} -> {{"n": {n}}}' for turn in turns for c, n in turn]
    assert known(True) == [[], [], lines[1:2], lines[:2], lines[:4]]
    assert known(False) == [[]] * 5


def test_view_shared_is_the_same_grounded_or_not(chat):
    recorded = ((RecordedCall(ToolCall("f", {}), "{}"),),) * 2
    task = Task("d9", "", [], ["q", "q"], recorded=recorded)
    messages = [USER, CALL, TOOL, ANSWER, USER, CALL, TOOL, ANSWER]
    plain, grounded = (demonstration(task, messages, chat, grounded=grounded) for grounded in (False, True))
    assert [s.ids for s in plain.sequences] == [s.ids for s in grounded.sequences]


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ([SYSTEM], "no user message"),
        ([SYSTEM, ANSWER], "no user message"),
        ([USER, CALL], "a call is not followed by its tool message"),
        ([USER, CALL, ANSWER], "a call is not followed by its tool message"),
        ([USER, CALL, USER, ANSWER], "a call is not followed by its tool message"),
        ([USER, TWO_CALLS, TOOL], "a call is not followed by its tool message"),
        ([USER, TWO_CALLS, TOOL, ANSWER], "a call is not followed by its tool message"),
        ([USER, BROKEN, ANSWER], "a call is not followed by its tool message"),
        ([USER, CALL, TOOL, TOOL, ANSWER], "unexpected tool message"),
        ([USER, BROKEN, TOOL, TOOL, ANSWER], "unexpected tool message"),
        ([USER, ANSWER, TOOL], "unexpected tool message"),
        ([USER, TOOL, ANSWER], "unexpected tool message"),
        ([USER, ANSWER, ANSWER], "unexpected assistant message"),
        ([USER, USER, ANSWER], "unexpected user message"),
        ([USER, CALL, TOOL, USER], "unexpected user message"),
        ([USER, ANSWER, SYSTEM, USER, ANSWER], "unexpected system message"),
    ],
)
def test_a_dialogue_out_of_order_is_refused_by_name(chat, messages, error):
    with pytest.raises(DialogueError, match=f"dialogue d7: {error}"):
        demonstration(TASK, messages, chat)


# Lengths


def test_what_is_too_long_is_left_out_whole_and_counted(caplog):
    caplog.set_level(logging.INFO, logger="envace")
    words = ["aaa", "a", "aaaa", "aa", "aaa"]
    assert short_enough(words, len, 3, "dialogues") == ["aaa", "a", "aa", "aaa"]
    assert caplog.messages == ["left out 1 of 5 dialogues that are longer than 3 tokens"]
    caplog.clear()
    assert short_enough(words, len, 4, "dialogues") == words
    assert not caplog.messages


def test_limit_0_keeps_everything_unmeasured(caplog):
    caplog.set_level(logging.INFO, logger="envace")

    def length(item):
        raise AssertionError("measured")

    assert short_enough(["a", "b"], length, 0, "tasks") == ["a", "b"]
    assert not caplog.messages


def test_nothing_short_enough_is_one_clear_line():
    with pytest.raises(UserError, match=r"^none of 2 tasks has at most 3 tokens: raise the limit, or .*$") as raised:
        short_enough(["aaaa", "aaaaa"], len, 3, "tasks")
    assert "\n" not in str(raised.value)


# Sampler


def test_an_epoch_holds_every_item_once():
    sampler = Sampler(list(range(10)), seed=0)
    drawn = [sampler.next(3) for _ in range(10)]
    flat = [item for items in drawn for item in items]
    epochs = [flat[start : start + 10] for start in range(0, 30, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_more_than_an_epoch_can_be_drawn_at_once():
    assert set(Counter(Sampler(list("abc"), seed=0).next(12)).values()) == {4}


def test_the_order_follows_the_seed():
    def drawn(seed):
        return Sampler(list(range(50)), seed).next(120)

    assert drawn(1) == drawn(1) != drawn(2)
    assert Sampler(list(range(50)), 1).next(50) != list(range(50))


def test_a_position_in_other_data_is_refused():
    state = Sampler(list("abc"), 0, ids="abc").state_dict()
    Sampler(list("abc"), 0, ids="abc").load_state_dict(state)
    for other in ("abd", "acb", "ab"):
        with pytest.raises(UserError, match="other data"):
            Sampler(list(other), 0, ids=other).load_state_dict(state)


@pytest.mark.parametrize("done", [0, 3, 9, 10, 17])
def test_a_sampler_continues_from_the_number_drawn(done):
    whole = Sampler(list(range(10)), seed=4).next(40)
    resumed = Sampler(list(range(10)), seed=4)
    resumed.drawn = done
    assert resumed.next(20) == whole[done : done + 20]
