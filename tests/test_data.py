"""Recorded dialogues as training sequences, what is refused in them, and the order in which items are drawn."""

from collections import Counter

import pytest

from envace.chat import ChatFormat
from envace.data import DialogueError, Sampler, demonstration
from envace.prompts import tool_call_block
from envace.types import Evidence, Role, Task, ToolCall

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


@pytest.mark.parametrize("done", [0, 3, 9, 10, 17])
def test_a_sampler_continues_from_the_number_drawn(done):
    whole = Sampler(list(range(10)), seed=4).next(40)
    resumed = Sampler(list(range(10)), seed=4)
    resumed.drawn = done
    assert resumed.next(20) == whole[done : done + 20]
