"""Episodes with scripted outputs: what enters the stream, who answers a call, how it ends, and how they are batched."""

import random

import pytest

from envace.chat import ChatFormat
from envace.environments import Constant, Real, Rehearsed
from envace.episodes import drive, episode, gather, rollout
from envace.prompts import execution_result, to_json, tool_call_block
from envace.types import (
    Completion,
    Evidence,
    Exchange,
    Limits,
    Role,
    ServiceFault,
    Status,
    Task,
    ToolCall,
    content_hash,
)

TOOL = {"name": "f", "description": "Look up.", "parameters": {"type": "object", "properties": {}}}
TASK = Task("t", "Be brief.", [{"type": "function", "function": TOOL}], ["q"])
TWO_TURNS = Task("t", "", [], ["q", "and then?"])
LIMITS = Limits(max_rounds=30, max_parallel_calls=20, max_context_tokens=9999, max_new_tokens=9999)
F, G = ToolCall("f", {"c": 1}), ToolCall("g", {"c": "查"})
CALL, OTHER_CALL = tool_call_block(F), tool_call_block(G)
BOTH = f"{CALL}\n{OTHER_CALL}"
MALFORMED = '<tool_call>\n{"name": "f", "arguments": {\n</tool_call>'
ONE, TWO = {"number": 1}, {"number": 2, "sky": "🌧"}


class World:
    """Gives the responses in order and notes the calls; an exception among them is raised."""

    def __init__(self, *responses):
        self.responses = list(responses)
        self.calls = []

    def execute(self, call):
        self.calls.append(call)
        response = self.responses.pop(0)
        if isinstance(response, Exception):
            raise response
        return response


@pytest.fixture(scope="module")
def chat(demo_tokenizer):
    return ChatFormat(demo_tokenizer)


@pytest.fixture
def unfold(scripted):
    def run(chat, environment, *outputs, task=TASK, limits=LIMITS):
        generate = scripted(chat, *outputs)
        trajectory = drive(episode(task, environment, chat, limits), generate)
        assert generate.remaining == [], "every output was asked for"
        check(trajectory)
        for request, prompt in generate.requests:
            ids = request.sequence.ids
            assert ids[: len(prompt)] == prompt, "history only grows"
        return trajectory, generate.requests

    return run


def check(trajectory):
    """What holds for every trajectory."""
    for sequence in trajectory.sequences:
        assert not sequence.open
        assert len(sequence) == len(sequence.ids) == len(sequence.role_ids)
        for segment in sequence.segments:
            if segment.role is Role.CONTEXT:
                assert segment.logprobs is None and segment.finish_reason is None
            else:
                assert len(segment.logprobs) == len(segment.ids)
                assert segment.finish_reason in ("stop", "length", "parse_error")
    finished = trajectory.status is Status.FINISHED
    assert (trajectory.reason == "") == finished
    assert (len(trajectory.answers) == len(trajectory.task.user_turns)) == finished
    assert trajectory.reward is None and trajectory.group_id


def spelled(chat, text, end):
    """Ids a sampler can emit for `text` though the tokenizer would not: one token or more for each character."""
    return [*(i for character in text for i in chat.encode(character)), end]


def kinds(sequence):
    return [(s.role.name, s.evidence.value) for s in sequence.segments]


# Token exactness


def test_sampled_ids_are_stored_as_they_were_sampled(qwen3_tokenizer, unfold):
    chat = ChatFormat(qwen3_tokenizer)
    call = [*chat.encode('<tool_call>\n{"name": "f", "arguments": {"c": 1'), 92, 532, 151658, 151645]
    response = [*chat.encode('{"a": {"b": 1'), 92, 532, 151666]
    answer = [383, 75, 385, 151645]
    assert chat.text(answer) == "hello" and chat.encode("hello") == [14990]
    for ids in (call, response, answer):
        assert chat.encode(chat.text(ids)) != ids[:-1]
    trajectory, _ = unfold(chat, Rehearsed(), call, response, answer)
    assert [s.ids for s in trajectory.outputs()] == [call, response, answer]
    assert trajectory.exchanges[0].call == F and trajectory.exchanges[0].response == {"a": {"b": 1}}
    assert trajectory.answers == ["hello"]
    assert [s.logprobs[:2] for s in trajectory.outputs()] == [[-0.5, -1.5]] * 3


@pytest.mark.parametrize("separate", [False, True])
def test_odd_tokenizations_survive_in_both_views(tokenizer, unfold, separate):
    chat = ChatFormat(tokenizer)
    text = execution_result(to_json(TWO)) if separate else f"{to_json(TWO)}\n"
    # Tags are single tokens; only what stands between them is spelled out.
    call = [*chat.encode("<tool_call>"), *spelled(chat, CALL[11:-12], chat.encode("</tool_call>")[0]), chat.turn_end]
    response = spelled(chat, text, chat.turn_end if separate else chat.response_end)
    answer = spelled(chat, "好 🌧 fine", chat.turn_end)
    trajectory, _ = unfold(chat, Rehearsed(separate=separate), call, response, answer)
    assert sorted(s.ids for s in trajectory.outputs()) == sorted([call, response, answer])
    assert trajectory.exchanges == [Exchange(F, TWO, 0, 0, Evidence.REHEARSED)]
    assert trajectory.answers == ["好 🌧 fine"]


def test_rehearsed_and_real_responses_are_the_same_tokens(chat, unfold):
    rehearsed, asked_rehearsed = unfold(chat, Rehearsed(), BOTH, to_json(ONE), to_json(TWO), CALL, to_json(ONE), "hi")
    real, asked_real = unfold(chat, Real(World(ONE, TWO, ONE)), BOTH, CALL, "hi")
    constant, _ = unfold(chat, Constant(ONE), BOTH, CALL, "hi")
    in_tags = [execution_result(to_json(value)) for value in (ONE, TWO)]
    separate, _ = unfold(chat, Rehearsed(separate=True), BOTH, *in_tags, CALL, to_json(ONE), "hi")
    assert rehearsed.sequences[0].ids == real.sequences[0].ids == separate.sequences[0].ids
    assert len(constant.sequences[0]) < len(real.sequences[0])
    act_prompts = [prompt for request, prompt in asked_rehearsed if request.role is Role.ACT]
    assert act_prompts == [prompt for _, prompt in asked_real]
    assert rehearsed.messages == real.messages == separate.messages
    assert rehearsed.answers == real.answers
    assert [(e.call, e.response, e.turn, e.round) for e in rehearsed.exchanges] == [
        (e.call, e.response, e.turn, e.round) for e in real.exchanges
    ]


# Who knows what


def test_in_view_shared_a_later_call_sees_the_earlier_result(chat, unfold):
    _, requests = unfold(chat, Rehearsed(), BOTH, to_json(ONE), to_json(TWO), "hi")
    roles = [request.role for request, _ in requests]
    assert roles == [Role.ACT, Role.REHEARSE, Role.REHEARSE, Role.ACT]
    seen = [chat.tokenizer.decode(prompt) for _, prompt in requests]
    assert [to_json(ONE) in prompt for prompt in seen] == [False, False, True, True]
    assert [to_json(TWO) in prompt for prompt in seen] == [False, False, False, True]
    assert seen[2].endswith(f"{to_json(ONE)}\n</tool_response>\n<tool_response>\n")
    assert len({id(request.sequence) for request, _ in requests}) == 1


def test_in_view_separate_the_calls_of_one_output_do_not_see_each_other(chat, unfold):
    results = [execution_result(to_json(value)) for value in (ONE, TWO, ONE)]
    trajectory, requests = unfold(chat, Rehearsed(separate=True), BOTH, *results[:2], CALL, results[2], "hi")
    chats = [chat.tokenizer.decode(prompt) for request, prompt in requests if request.role is Role.REHEARSE]
    assert [(to_json(ONE) in text, to_json(TWO) in text) for text in chats] == [(False, False)] * 2 + [(True, True)]
    assert [text.split("# Pending call")[1].count('"name": "g"') for text in chats] == [0, 1, 0]
    acts = [prompt for request, prompt in requests if request.role is Role.ACT]
    assert to_json(ONE) in chat.tokenizer.decode(acts[1]) and to_json(TWO) in chat.tokenizer.decode(acts[1])


def test_in_view_separate_the_act_stream_comes_first_then_a_sequence_for_each_call(chat, unfold):
    results = [execution_result(to_json(value)) for value in (ONE, TWO)]
    trajectory, _ = unfold(chat, Rehearsed(separate=True, model="m"), BOTH, *results, "hi")
    act, *rehearsals = trajectory.sequences
    assert kinds(act) == [
        ("CONTEXT", "given"),
        ("ACT", "claimed"),
        ("CONTEXT", "given"),
        ("CONTEXT", "rehearsed"),
        ("CONTEXT", "given"),
        ("CONTEXT", "rehearsed"),
        ("CONTEXT", "given"),
        ("ACT", "claimed"),
    ]
    assert [kinds(s) for s in rehearsals] == [[("CONTEXT", "given"), ("REHEARSE", "rehearsed")]] * 2
    assert [chat.text(s.segments[1].ids) for s in rehearsals] == results
    for sequence in rehearsals:
        prompt, output = sequence.segments
        assert output.provenance == {"model": "m", "prompt_hash": content_hash(prompt.ids)}
    assert [s.role for s in trajectory.outputs()] == [Role.ACT, Role.ACT, Role.REHEARSE, Role.REHEARSE]


def test_only_the_slot_inside_the_stream_ends_at_the_response_tag(chat, unfold):
    for separate in (False, True):
        _, requests = unfold(chat, Rehearsed(separate=separate), CALL, to_json(ONE), "hi")
        act, rehearse, _ = [request.stop_ids for request, _ in requests]
        assert act == chat.act_stops
        assert rehearse == (chat.act_stops if separate else chat.rehearse_stops)


# Evidence and provenance


def test_rehearsed_segments_name_their_author_and_prompt(chat, unfold):
    trajectory, requests = unfold(chat, Rehearsed(model="m"), CALL, to_json(ONE), "hi")
    given, claimed = ("CONTEXT", "given"), ("ACT", "claimed")
    assert kinds(trajectory.sequences[0]) == [given, claimed, given, ("REHEARSE", "rehearsed"), given, claimed]
    rehearsed = trajectory.outputs()[1]
    assert rehearsed.provenance == {"model": "m", "prompt_hash": content_hash(requests[1][1])}
    assert trajectory.exchanges == [Exchange(F, ONE, 0, 0, Evidence.REHEARSED)]


def test_observed_segments_carry_the_hash_of_their_payload(chat, unfold):
    trajectory, _ = unfold(chat, Real(World(ONE, TWO)), CALL, CALL, "hi")
    observed = [s for s in trajectory.sequences[0].segments if s.evidence is Evidence.OBSERVED]
    assert [s.role for s in observed] == [Role.CONTEXT] * 2
    assert [s.provenance for s in observed] == [{"payload_hash": content_hash(to_json(v))} for v in (ONE, TWO)]
    assert [e.evidence for e in trajectory.exchanges] == [Evidence.OBSERVED] * 2


def test_a_constant_response_is_simulated_and_costs_no_tokens(chat, unfold):
    trajectory, requests = unfold(chat, Constant({"ok": True}), BOTH, "hi")
    assert [request.role for request, _ in requests] == [Role.ACT, Role.ACT]
    simulated = [s for s in trajectory.sequences[0].segments if s.evidence is Evidence.SIMULATED]
    assert [s.ids for s in simulated] == [chat.response('{"ok": true}')] * 2
    assert [e.response for e in trajectory.exchanges] == [{"ok": True}] * 2


# Several user turns


def test_user_turns_follow_each_other_in_one_stream(chat, unfold):
    outputs = [CALL, to_json(ONE), "hi", BOTH, to_json(ONE), to_json(TWO), OTHER_CALL, to_json(TWO), "bye"]
    trajectory, _ = unfold(chat, Rehearsed(), *outputs, task=TWO_TURNS)
    assert trajectory.status is Status.FINISHED
    assert trajectory.answers == ["hi", "bye"]
    assert trajectory.rounds == 3
    assert [(e.call, e.turn, e.round) for e in trajectory.exchanges] == [(F, 0, 0), (F, 1, 1), (G, 1, 1), (G, 1, 2)]
    written = [m["content"] for m in trajectory.messages]
    assert written == ["q", *outputs[:3], "and then?", *outputs[3:]]
    assert "".join(m["role"][0] for m in trajectory.messages) == "uatauattata"


def test_the_system_prompt_and_the_tools_stand_in_the_first_prompt(chat, unfold):
    trajectory, [(_, prompt)] = unfold(chat, Rehearsed(), "hi")
    assert trajectory.messages[0] == {"role": "system", "content": "Be brief."}
    assert prompt == chat.prompt(trajectory.messages[:2], TASK.tools)
    text = chat.tokenizer.decode(prompt)
    assert "Be brief." in text and '"name": "f"' in text


def test_an_episode_that_fails_in_its_second_turn_keeps_the_first_answer(chat, unfold):
    trajectory, _ = unfold(chat, Rehearsed(), "hi", MALFORMED, task=TWO_TURNS)
    assert trajectory.status is Status.PARSE_ERROR and trajectory.answers == ["hi"]


# Caps


def limits(**changes):
    return Limits(**{**vars(LIMITS), **changes})


def assert_truncated(trajectory, reason, answers=()):
    assert (trajectory.status, trajectory.reason) == (Status.TRUNCATED, reason)
    assert trajectory.answers == list(answers)


def test_rounds_are_capped_over_the_whole_trajectory(chat, unfold):
    two = limits(max_rounds=2)
    trajectory, _ = unfold(chat, Constant(ONE), CALL, CALL, CALL, limits=two)
    assert_truncated(trajectory, "rounds")
    assert trajectory.rounds == len(trajectory.exchanges) == 2
    trajectory, _ = unfold(chat, Constant(ONE), CALL, CALL, "hi", limits=two)
    assert trajectory.status is Status.FINISHED
    trajectory, _ = unfold(chat, Constant(ONE), CALL, "hi", CALL, CALL, task=TWO_TURNS, limits=two)
    assert_truncated(trajectory, "rounds", ["hi"])


def test_malformed_calls_to_a_real_environment_count_as_rounds(chat, unfold):
    trajectory, _ = unfold(chat, Real(World()), *[MALFORMED] * 3, limits=limits(max_rounds=2))
    assert_truncated(trajectory, "rounds")


def test_too_many_parallel_calls_are_not_run_at_all(chat, unfold):
    world = World(ONE, TWO)
    trajectory, _ = unfold(chat, Real(world), BOTH, limits=limits(max_parallel_calls=1))
    assert_truncated(trajectory, "parallel_calls")
    assert world.calls == [] and trajectory.exchanges == []
    trajectory, _ = unfold(chat, Real(world), BOTH, "hi", limits=limits(max_parallel_calls=2))
    assert trajectory.status is Status.FINISHED and world.calls == [F, G]


@pytest.mark.parametrize("separate", [False, True])
def test_every_prompt_stays_below_the_context_cap(chat, unfold, separate):
    outputs = [BOTH, to_json(ONE), to_json(TWO), "hi"]
    environment = Rehearsed(separate=separate)
    _, requests = unfold(chat, environment, *outputs)
    lengths = [len(prompt) for _, prompt in requests]
    for cap in sorted(set(lengths)):
        allowed = next(i for i, length in enumerate(lengths) if length >= cap)
        trajectory, asked = unfold(chat, environment, *outputs[:allowed], limits=limits(max_context_tokens=cap))
        assert_truncated(trajectory, "context_tokens")
        assert [len(prompt) for _, prompt in asked] == lengths[:allowed]
    trajectory, _ = unfold(chat, environment, *outputs, limits=limits(max_context_tokens=max(lengths) + 1))
    assert trajectory.status is Status.FINISHED


@pytest.mark.parametrize("separate", [False, True])
def test_an_output_that_reaches_its_budget_is_neither_run_nor_read(chat, unfold, separate):
    environment = Rehearsed(separate=separate)
    call, answer = len(chat.output(CALL)), len(chat.output("hi"))
    assert answer < call
    trajectory, _ = unfold(chat, environment, CALL, limits=limits(max_new_tokens=call - 1))
    assert_truncated(trajectory, "new_tokens")
    [output] = trajectory.outputs()
    assert output.ids == chat.output(CALL)[:-1] and output.finish_reason == "length"
    assert trajectory.exchanges == []

    trajectory, _ = unfold(chat, environment, CALL, to_json({"a": "b" * 400}), limits=limits(max_new_tokens=call))
    assert_truncated(trajectory, "new_tokens")
    assert [s.finish_reason for s in trajectory.outputs()] == ["stop", "length"]
    assert trajectory.exchanges == []

    trajectory, _ = unfold(chat, environment, "hi", limits=limits(max_new_tokens=answer - 1))
    assert_truncated(trajectory, "new_tokens")
    trajectory, _ = unfold(chat, environment, "hi", limits=limits(max_new_tokens=answer))
    assert trajectory.answers == ["hi"]


# Outputs that cannot be read


@pytest.mark.parametrize("text", [MALFORMED, CALL + MALFORMED, "<think>hm", '<tool_call>{"name": "f"}</tool_call>'])
def test_a_malformed_call_ends_a_rehearsal_and_runs_nothing(chat, unfold, text):
    for environment in (Rehearsed(), Rehearsed(separate=True), Constant(ONE)):
        trajectory, _ = unfold(chat, environment, text)
        assert trajectory.status is Status.PARSE_ERROR and trajectory.reason.startswith("act: ")
        assert trajectory.exchanges == [] and trajectory.answers == [] and trajectory.rounds == 0
        assert [s.finish_reason for s in trajectory.outputs()] == ["parse_error"]


def test_a_real_environment_answers_a_malformed_call_with_its_error(chat, unfold):
    world = World(ONE)
    trajectory, requests = unfold(chat, Real(world), f"{CALL}\n{MALFORMED}", CALL, "hi")
    assert trajectory.status is Status.FINISHED and trajectory.answers == ["hi"]
    assert world.calls == [F], "the readable half of the first output was not run either"
    assert [e.round for e in trajectory.exchanges] == [1] and trajectory.rounds == 2
    told = chat.tokenizer.decode(requests[1][1])
    assert '<tool_response>\n{"error": "malformed_call", "message": "not valid JSON' in told
    assert [s.finish_reason for s in trajectory.outputs()] == ["stop"] * 3


@pytest.mark.parametrize("text", ["It worked.", '{"a": 1', "3", "", '{"a": 1} done', '{"a": NaN}', "<think>{}"])
@pytest.mark.parametrize("separate", [False, True])
def test_a_response_that_is_not_json_ends_the_trajectory(chat, unfold, separate, text):
    trajectory, _ = unfold(chat, Rehearsed(separate=separate), BOTH, text)
    assert trajectory.status is Status.PARSE_ERROR and trajectory.reason.startswith("rehearse: ")
    assert [e.response for e in trajectory.exchanges] == [None] and trajectory.answers == []
    reasons = {s.role: s.finish_reason for s in trajectory.outputs()}
    assert reasons == {Role.ACT: "stop", Role.REHEARSE: "parse_error"}


def test_a_response_in_the_stream_must_end_with_its_own_tag(chat, unfold):
    wrong_end = chat.output(to_json(ONE))
    trajectory, _ = unfold(chat, Rehearsed(), CALL, wrong_end)
    assert trajectory.status is Status.PARSE_ERROR
    assert trajectory.reason == "rehearse: the response does not end with </tool_response>"
    assert trajectory.outputs()[1].ids == wrong_end and trajectory.exchanges[0].response is None
    trajectory, _ = unfold(chat, Rehearsed(separate=True), CALL, wrong_end, "hi")
    assert trajectory.status is Status.FINISHED


def test_a_response_may_think_before_it_answers(chat, unfold):
    for separate in (False, True):
        thoughtful = '<think>\n{"a": 0}?\n</think>\n\n{"a": 1}'
        trajectory, _ = unfold(chat, Rehearsed(separate=separate), CALL, thoughtful, "hi")
        assert trajectory.exchanges[0].response == {"a": 1}
        assert {"role": "tool", "content": '{"a": 1}'} in trajectory.messages


# Faults of a service


def test_a_broken_service_leaves_the_reward_unknown(chat, unfold):
    world = World(ONE, ServiceFault("desk is down"), TWO)
    trajectory, _ = unfold(chat, Real(world), BOTH)
    assert (trajectory.status, trajectory.reason) == (Status.FAULT, "desk is down")
    assert [e.response for e in trajectory.exchanges] == [ONE]
    assert trajectory.answers == []


def test_a_broken_service_ends_only_its_own_episode(chat, scripted):
    faults, works = World(ServiceFault("down")), World(ONE)
    live = [episode(TASK, Real(world), chat, LIMITS) for world in (faults, works)]
    one, other = drive(gather(live), scripted(chat, CALL, CALL, "hi"))
    assert (one.status, other.status) == (Status.FAULT, Status.FINISHED)


def test_any_other_exception_is_a_bug_and_is_raised(chat, scripted):
    with pytest.raises(KeyError):
        drive(episode(TASK, Real(World(KeyError("bug"))), chat, LIMITS), scripted(chat, CALL))


# Many episodes together


def tasks_of(number):
    return [Task(f"t{i}", "", [], [f"question {i}", "and then?"][: 1 + i % 2]) for i in range(number)]


def outputs_by_prompt(chat, sizes):
    """A `generate` whose outputs depend on the prompt alone; `sizes` notes how many requests came together."""

    def complete(request):
        rng = random.Random(str(request.sequence.ids))
        if request.role is Role.ACT:
            texts = [CALL, BOTH, BOTH, "hi", f"{rng.random()}", "x" * 30, MALFORMED]
            ids = chat.output(rng.choices(texts, [3, 3, 3, 3, 3, 0.5, 0.5])[0])
        else:
            text = rng.choices([to_json(ONE), to_json({"number": rng.random()}), "no"], [3, 3, 0.3])[0]
            ids = chat.response(text) if chat.response_end in request.stop_ids else chat.output(text)
        cut = ids[: request.max_new_tokens]
        return Completion(cut, [-rng.random() for _ in cut], "stop" if cut == ids else "length")

    def generate(requests):
        sizes.append(len(requests))
        return [complete(request) for request in requests]

    return generate


def content_of(trajectory):
    segments = [[(s.role, s.ids, s.logprobs, s.finish_reason) for s in seq.segments] for seq in trajectory.sequences]
    return segments, trajectory.status, trajectory.reason, trajectory.answers, trajectory.exchanges


@pytest.mark.parametrize("separate", [False, True])
def test_a_trajectory_does_not_depend_on_its_company(chat, separate):
    tasks, caps = tasks_of(60), limits(max_rounds=4, max_new_tokens=len(chat.output(BOTH)))

    def roll_out(ordered, batch_size):
        sizes = []
        generate = outputs_by_prompt(chat, sizes)
        rolled = rollout(
            ordered, generate, lambda task: Rehearsed(separate=separate), chat, caps, batch_size=batch_size
        )
        assert [t.task for t in rolled] == ordered
        assert max(sizes) <= batch_size
        return {t.task.id: content_of(t) for t in rolled}

    alone = roll_out(tasks, 1)
    assert roll_out(tasks, 7) == roll_out(tasks, 100) == alone
    assert roll_out(random.Random(0).sample(tasks, len(tasks)), 16) == alone
    assert {status for _, status, *_ in alone.values()} == {Status.FINISHED, Status.PARSE_ERROR, Status.TRUNCATED}


def test_the_rollouts_of_a_task_are_adjacent_and_one_group(chat, scripted):
    tasks, done = tasks_of(1) * 2 + tasks_of(2), []
    worlds = []

    def environment_for(task):
        worlds.append(task.id)
        return Constant(ONE)

    generate = outputs_by_prompt(chat, [])
    rolled = rollout(tasks, generate, environment_for, chat, LIMITS, samples=3, batch_size=5, on_done=done.append)
    assert [t.task.id for t in rolled] == ["t0"] * 9 + ["t1"] * 3 == worlds
    groups = [t.group_id for t in rolled]
    assert [groups[i : i + 3] for i in range(0, 12, 3)] == [[group] * 3 for group in groups[::3]]
    assert len(set(groups)) == 4, "a task that was drawn again is compared with itself only"
    assert done == [5, 5, 2]


def test_nothing_to_do_asks_for_nothing(chat):
    assert rollout([], None, None, chat, LIMITS) == []
    assert drive(gather([]), None) == []
