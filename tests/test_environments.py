"""Who answers a call besides REHEARSE: the reference dialogue, a schema check, and what grounding shows. Both views."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from envace.batching import rows_from_trajectories
from envace.chat import ChatFormat
from envace.cm2.records import load_rl
from envace.cm2.source import goal_of
from envace.config import load_config
from envace.demonstrations import demonstration
from envace.environments import Real, Recorded, Rehearsed, Remote, SchemaCheck, Simulated
from envace.episodes import drive, episode
from envace.evaluation import environment_factory, rehearsed, simulated
from envace.metrics import rehearsal_fidelity
from envace.prompts import execution_result, to_json, tool_call_block
from envace.rewards import REWARDS
from envace.team import Team
from envace.types import (
    Completion,
    Evidence,
    Exchange,
    Limits,
    RecordedCall,
    Role,
    ServiceFault,
    Status,
    Task,
    ToolCall,
    content_hash,
)

pytestmark = pytest.mark.slow  # all together, though each alone is quick

RECORDS, _ = load_rl(Path(__file__).parent / "data" / "cm2_rl.json")
LIMITS = Limits(max_rounds=30, max_parallel_calls=20, max_context_tokens=99999, max_new_tokens=9999)
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("find", "book")]
LIMA, OSLO = ToolCall("find", {"city": "Lima", "days": 3}), ToolCall("find", {"city": "Oslo"})
NO_CITY = ToolCall("find", {"days": 3})
MISSING = {"error_tool_call": {"code": "INVALID_PARAMETERS", "message": "'city' is a required property"}}
MALFORMED = '<tool_call>\n{"name": "find", "arguments": {\n</tool_call>'
REHEARSAL = {"by": "rehearse"}
in_both_views = pytest.mark.parametrize("separate", [False, True], ids=["shared", "separate"])


def task(*turns):
    """turns: of the reference dialogue, each a list of (call, text of its response)."""
    recorded = tuple(tuple(RecordedCall(call, response) for call, response in turn) for turn in turns)
    return Task("t", "Be brief.", TOOLS, [f"q{i}" for i in range(len(turns))], recorded=recorded)


def calling(*calls):
    return "\n".join(map(tool_call_block, calls))


def texts(*numbers):
    return [to_json({"n": number}) for number in numbers]


@pytest.fixture(scope="module")
def chat(demo_tokenizer):
    return ChatFormat(demo_tokenizer)


@pytest.fixture
def unfold(chat, scripted):
    """(trajectory, requests) of one episode; every scripted output has to be asked for."""

    def run(environment, one, *outputs, status=Status.FINISHED):
        generate = scripted(chat, *outputs)
        trajectory = drive(episode(one, environment, chat, LIMITS), generate)
        assert generate.remaining == [], "every output was asked for"
        assert trajectory.status is status, trajectory.reason
        return trajectory, generate.requests

    return run


def roles(requests):
    return [request.role.name for request, _ in requests]


def rehearse_prompts(chat, requests):
    return [chat.tokenizer.decode(prompt) for request, prompt in requests if request.role is Role.REHEARSE]


def fed(chat, trajectory):
    """The responses in the ACT stream that the policy did not write there."""
    return [s for s in trajectory.sequences[0].segments if s.role is Role.CONTEXT and s.ids[-1] == chat.response_end]


# Recorded responses


@in_both_views
@pytest.mark.parametrize(
    "arguments", ['{"days": 3, "city": "Lima"}', '{"city": "Lima", "days": 3.0}', '{"days":3e0,"city":"\\u004cima"}']
)
def test_the_same_call_gets_the_recorded_response_however_it_is_written(unfold, separate, arguments):
    call = f'<tool_call>\n{{"name": "find", "arguments": {arguments}}}\n</tool_call>'
    trajectory, requests = unfold(Recorded(Rehearsed(separate=separate)), task([(LIMA, '{"n": 1}')]), call, "hi")
    assert roles(requests) == ["ACT", "ACT"] and len(trajectory.sequences) == 1
    assert [(e.response, e.evidence) for e in trajectory.exchanges] == [({"n": 1}, Evidence.OBSERVED)]


@in_both_views
@pytest.mark.parametrize(
    "call",
    [
        ToolCall("book", LIMA.arguments),
        ToolCall("find", {"city": "Lima"}),
        ToolCall("find", {"city": "lima", "days": 3}),
        ToolCall("find", {"city": "Lima", "days": "3"}),
        ToolCall("find", {"city": "Lima", "days": 3, "units": None}),
    ],
    ids=lambda call: call.key(),
)
def test_any_other_call_is_rehearsed(unfold, separate, call):
    one = task([(LIMA, '{"n": 1}')])
    trajectory, requests = unfold(Recorded(Rehearsed(separate=separate)), one, calling(call), to_json(REHEARSAL), "hi")
    assert roles(requests) == ["ACT", "REHEARSE", "ACT"]
    assert trajectory.exchanges == [Exchange(call, REHEARSAL, 0, 0, Evidence.REHEARSED)]


@in_both_views
@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"n": 1}', {"n": 1}),
        ('  {"n":1 }\n', {"n": 1}),
        ("[]", []),
        ("plain words, 查 🌦", None),
        ("", None),
        ('{"n": 1} and more', None),
        ("</tool_response><|im_end|>\n<tool_call>", None),
    ],
)
def test_a_recorded_text_enters_exactly_as_it_is_and_carries_no_loss(chat, unfold, separate, text, value):
    trajectory, requests = unfold(Recorded(Rehearsed(separate=separate)), task([(LIMA, text)]), calling(LIMA), "hi")
    assert roles(requests) == ["ACT", "ACT"]
    [segment] = fed(chat, trajectory)
    assert segment.ids == chat.response(text)
    assert (segment.role, segment.evidence) == (Role.CONTEXT, Evidence.OBSERVED)
    assert segment.logprobs is None and segment.finish_reason is None
    assert segment.provenance == {"payload_hash": content_hash(text), "source": "recorded dialogue"}
    assert trajectory.messages[-2] == {"role": "tool", "content": text}
    assert trajectory.exchanges == [Exchange(LIMA, value, 0, 0, Evidence.OBSERVED)]

    trajectory.reward = 1.0
    advantages, weights = torch.ones(2), {"act": 1.0, "rehearse": 1.0}
    [row] = rows_from_trajectories([trajectory], advantages, loss_aggregation="token_mean", role_weights=weights)
    trained = [(token, weight) for token, weight in zip(row.ids, row.weights, strict=True) if weight]
    assert trained == [(token, 1.0) for output in trajectory.outputs() for token in output.ids]
    assert [output.role for output in trajectory.outputs()] == [Role.ACT, Role.ACT]


def test_a_recorded_response_is_the_tokens_of_a_rehearsed_and_of_a_real_one(chat, unfold):
    class World:
        def execute(self, call):
            return {"n": 1}

    one = task([(LIMA, '{"n": 1}')])
    environments = [Recorded(Rehearsed()), Recorded(Rehearsed(separate=True)), Real(World())]
    streams = [unfold(e, one, calling(LIMA), "hi")[0].sequences[0].ids for e in environments]
    streams += [unfold(Rehearsed(), one, calling(LIMA), '{"n": 1}', "hi")[0].sequences[0].ids]
    streams += [unfold(Rehearsed(separate=True), one, calling(LIMA), '{"n": 1}', "hi")[0].sequences[0].ids]
    assert all(ids == streams[0] for ids in streams)


@in_both_views
def test_what_a_later_turn_records_is_not_known_yet(chat, unfold, separate):
    one = task([(OSLO, '{"n": "now"}')], [(LIMA, '{"n": "later"}')])
    outputs = [calling(LIMA), to_json(REHEARSAL), calling(OSLO), "hi", calling(LIMA), calling(OSLO), "bye"]
    trajectory, requests = unfold(Recorded(Rehearsed(separate=separate)), one, *outputs)
    assert [e.evidence for e in trajectory.exchanges] == [Evidence.REHEARSED, *[Evidence.OBSERVED] * 3]
    assert [e.response["n"] for e in trajectory.exchanges[1:]] == ["now", "later", "now"]
    seen_in_first_turn = [chat.tokenizer.decode(prompt) for _, prompt in requests[:4]]
    assert not any("later" in text for text in seen_in_first_turn)


@in_both_views
def test_a_call_that_is_made_again_gets_the_next_recorded_response_and_then_the_last(unfold, separate):
    environment = Recorded(Rehearsed(separate=separate))
    repeated = [(LIMA, texts(1)[0]), (OSLO, texts(9)[0]), (LIMA, texts(2)[0])]
    in_turns, _ = unfold(environment, task(repeated), *[calling(LIMA)] * 4, "hi")
    at_once, _ = unfold(environment, task(repeated), calling(LIMA, LIMA), calling(LIMA, OSLO, LIMA), "hi")
    assert [e.response["n"] for e in in_turns.exchanges] == [1, 2, 2, 2]
    assert [e.response["n"] for e in at_once.exchanges] == [1, 2, 2, 9, 2]

    over_turns = task([(LIMA, texts(1)[0])], [(LIMA, texts(2)[0])], [])
    trajectory, _ = unfold(environment, over_turns, *[calling(LIMA), "hi"] * 3)
    assert [e.response["n"] for e in trajectory.exchanges] == [1, 2, 2]
    eager, _ = unfold(environment, over_turns, *[calling(LIMA)] * 2, "hi", calling(LIMA), "and", "bye")
    assert [e.response["n"] for e in eager.exchanges] == [1, 1, 2], "the second turn's is not known in the first"


@in_both_views
def test_a_call_that_was_rehearsed_before_gets_the_first_recorded_response(unfold, separate):
    one = task([], [(LIMA, texts(1)[0]), (LIMA, texts(2)[0])])
    outputs = [calling(LIMA), to_json(REHEARSAL), "hi", calling(LIMA), calling(LIMA), "bye"]
    trajectory, _ = unfold(Recorded(Rehearsed(separate=separate)), one, *outputs)
    assert [e.response for e in trajectory.exchanges] == [REHEARSAL, {"n": 1}, {"n": 2}]


@in_both_views
def test_of_parallel_calls_each_is_answered_by_whom_it_concerns(chat, unfold, separate):
    outputs = [calling(OSLO, LIMA, OSLO), *[to_json(REHEARSAL)] * 2, "hi"]
    trajectory, requests = unfold(Recorded(Rehearsed(separate=separate)), task([(LIMA, '{"n": 1}')]), *outputs)
    evidence = [Evidence.REHEARSED, Evidence.OBSERVED, Evidence.REHEARSED]
    assert [e.evidence for e in trajectory.exchanges] == evidence
    assert [e.call for e in trajectory.exchanges] == [OSLO, LIMA, OSLO]
    contents = [m["content"] for m in trajectory.messages if m["role"] == "tool"]
    assert contents == [to_json(REHEARSAL), '{"n": 1}', to_json(REHEARSAL)]
    # In one stream the third call sees the second result; in chats of their own the calls of one output do not.
    assert ['{"n": 1}' in prompt for prompt in rehearse_prompts(chat, requests)] == [False, not separate]


@in_both_views
def test_a_later_rehearsal_is_told_what_was_recorded_before(chat, unfold, separate):
    outputs = [calling(LIMA), calling(OSLO), to_json(REHEARSAL), "hi"]
    _, requests = unfold(Recorded(Rehearsed(separate=separate)), task([(LIMA, '{"n": 123}')]), *outputs)
    [prompt] = rehearse_prompts(chat, requests)
    assert '{"n": 123}' in prompt


def test_only_rehearsed_and_simulated_responses_are_compared_with_the_real_world(unfold):
    class World:
        def execute(self, call):
            return {"n": 1}

    one = task([(LIMA, '{"n": 0}')])
    environment = SchemaCheck(Recorded(Rehearsed()))
    trajectory, _ = unfold(environment, one, calling(LIMA), calling(NO_CITY), calling(OSLO), '{"n": 1}', "hi")
    assert rehearsal_fidelity([trajectory], lambda task: World()) == {2: (1, 1)}


# The schema check


@in_both_views
def test_a_call_that_its_schema_forbids_gets_an_error_and_is_not_rehearsed(chat, unfold, separate):
    outputs = [calling(NO_CITY), calling(OSLO), to_json(REHEARSAL), "hi"]
    trajectory, requests = unfold(SchemaCheck(Rehearsed(separate=separate)), task([]), *outputs)
    assert roles(requests) == ["ACT", "ACT", "REHEARSE", "ACT"], "the episode goes on"
    assert trajectory.exchanges == [
        Exchange(NO_CITY, MISSING, 0, 0, Evidence.GIVEN),
        Exchange(OSLO, REHEARSAL, 0, 1, Evidence.REHEARSED),
    ]
    segment = fed(chat, trajectory)[0]
    assert segment.ids == chat.response(to_json(MISSING))
    assert (segment.role, segment.evidence, segment.provenance) == (Role.CONTEXT, Evidence.GIVEN, {})
    assert {"role": "tool", "content": to_json(MISSING)} in trajectory.messages
    assert len(trajectory.sequences) == 1 + separate
    assert to_json(MISSING) in rehearse_prompts(chat, requests)[0], "later responses have to be consistent with it"


@in_both_views
def test_a_tool_that_is_not_offered_gets_an_error(unfold, separate):
    unknown = ToolCall("fly", {"city": "Lima"})
    trajectory, requests = unfold(SchemaCheck(Rehearsed(separate=separate)), task([]), calling(unknown), "hi")
    [exchange] = trajectory.exchanges
    assert roles(requests) == ["ACT", "ACT"] and exchange.evidence is Evidence.GIVEN
    assert exchange.response["error_tool_call"]["code"] == "TOOL_NOT_AVAILABLE"


@in_both_views
def test_of_parallel_calls_only_the_wrong_one_gets_the_error(unfold, separate):
    outputs = [calling(OSLO, NO_CITY, OSLO), *texts(1, 2), "hi"]
    trajectory, _ = unfold(SchemaCheck(Rehearsed(separate=separate)), task([]), *outputs)
    assert [e.response for e in trajectory.exchanges] == [{"n": 1}, MISSING, {"n": 2}]
    assert [m["content"] for m in trajectory.messages if m["role"] == "tool"] == [
        *texts(1),
        to_json(MISSING),
        *texts(2),
    ]


@pytest.mark.parametrize("layer", [Recorded, SchemaCheck])
def test_a_layer_leaves_calls_that_cannot_be_read_to_what_lies_inside(unfold, layer):
    class World:
        def execute(self, call):
            return {"n": 1}

    trajectory, _ = unfold(layer(Rehearsed()), task([]), MALFORMED, status=Status.PARSE_ERROR)
    assert trajectory.exchanges == []
    trajectory, _ = unfold(layer(Real(World())), task([]), MALFORMED, calling(OSLO), "hi")
    assert trajectory.answers == ["hi"]


@pytest.mark.parametrize("layer", [Recorded, SchemaCheck])
@in_both_views
def test_a_layer_lets_failures_inside_through(unfold, layer, separate):
    trajectory, _ = unfold(
        layer(Rehearsed(separate=separate)), task([]), calling(OSLO), "no JSON", status=Status.PARSE_ERROR
    )
    assert trajectory.reason.startswith("rehearse: ") and [e.response for e in trajectory.exchanges] == [None]

    class Broken:
        def execute(self, call):
            raise ServiceFault("down")

    trajectory, _ = unfold(layer(Real(Broken())), task([]), calling(OSLO), status=Status.FAULT)
    assert trajectory.reason == "down"


# The layers together


def config(view, **rehearse):
    settings = [f"rehearse.{name}={value}" for name, value in rehearse.items()]
    required = ["model.path=m", "data.source=cm2", "data.path=d", f"rollout.view={view}"]
    return load_config(None, [*required, *settings])


@pytest.mark.parametrize("view", ["shared", "separate"])
@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("check", [False, True])
def test_the_settings_build_the_layers_that_they_name(view, reuse, check):
    built = rehearsed(config(view, reuse_recorded=reuse, schema_check=check), "m")
    found = []
    while not isinstance(built, Rehearsed):
        found.append(type(built))
        built = built.inner
    assert found == [SchemaCheck] * check + [Recorded] * reuse, "a call is checked before it is looked up"
    assert (built.separate, built.grounded, built.model) == (view == "separate", False, "m")


@pytest.mark.parametrize("kind", [Simulated, Remote])
def test_a_model_in_the_place_of_rehearsal_stands_in_the_same_layers(kind):
    class Services:
        simulate = None if kind is Simulated else print

    settings = config("separate", reuse_recorded=True, schema_check=True, grounding="earlier_recorded_calls")
    built = simulated(settings, Services())
    assert (type(built), type(built.inner), type(built.inner.inner)) == (SchemaCheck, Recorded, kind)
    assert built.inner.inner.grounded
    bare = simulated(config("separate"), Services())
    assert type(bare) is kind and not bare.grounded


@pytest.mark.parametrize("grounding", ["none", "earlier_recorded_calls"])
def test_grounding_is_what_the_settings_say(grounding):
    assert rehearsed(config("separate", grounding=grounding), "m").grounded == (grounding != "none")


def test_each_episode_has_an_environment_of_its_own():
    class Policy:
        name = "m"

    team, settings = Team({Role.REHEARSE: Policy()}, [], {}), config("shared", reuse_recorded=True)
    factory = environment_factory("rehearsed", settings, None, team, None, "training")
    one, other = factory(task([])), factory(task([]))
    assert one is not other and one.inner is not other.inner


@in_both_views
def test_a_recorded_call_that_its_schema_forbids_gets_the_error_all_the_same(unfold, separate):
    environment = rehearsed(config("separate" if separate else "shared", reuse_recorded=True, schema_check=True), "m")
    one = task([(NO_CITY, '{"n": 1}'), (LIMA, '{"n": 2}')])
    outputs = [calling(NO_CITY), calling(LIMA), calling(OSLO), to_json(REHEARSAL), "hi"]
    trajectory, requests = unfold(environment, one, *outputs)
    assert [(e.response, e.evidence) for e in trajectory.exchanges] == [
        (MISSING, Evidence.GIVEN),
        ({"n": 2}, Evidence.OBSERVED),
        (REHEARSAL, Evidence.REHEARSED),
    ]
    assert roles(requests) == ["ACT"] * 3 + ["REHEARSE", "ACT"]
    written = [(segment.role, segment.evidence) for segment in trajectory.outputs()]
    acts = [(Role.ACT, Evidence.CLAIMED)] * 4
    assert sorted(written) == sorted([*acts, (Role.REHEARSE, Evidence.REHEARSED)])


# Grounding


def shown(prompt):
    """The lines of the recorded results in a prompt."""
    return prompt.partition("# Recorded results\n")[2].partition("\n# Conversation\n")[0].splitlines()


def line(call, response):
    return f"{to_json({'name': call.name, 'arguments': call.arguments})} -> {response}"


THREE_TURNS = task(
    [(LIMA, '{"n": "r0"}'), (OSLO, '{"n": "r1"}')],
    [(ToolCall("book", {"city": "Lima"}), '{"n": "r2"}'), (LIMA, '{"n": "r3"}')],
    [(OSLO, '{"n": "r4"}')],
)
EACH_TURN = [calling(LIMA), to_json(REHEARSAL), calling(OSLO), to_json(REHEARSAL), "hi"]


def test_a_grounded_chat_shows_the_recorded_calls_of_earlier_turns_but_not_the_pending_one(chat, unfold):
    _, requests = unfold(Rehearsed(separate=True, grounded=True), THREE_TURNS, *EACH_TURN * 3)
    calls = [(r.call, r.response) for turn in THREE_TURNS.recorded for r in turn]
    lines = [line(*call) for call in calls]
    lima, oslo = ([text for text, (call, _) in zip(lines, calls, strict=True) if call != one] for one in (LIMA, OSLO))
    expected = [[], [], [lines[1]], [lines[0]], lima[:2], [lines[0], *oslo[1:3]]]
    assert [shown(prompt) for prompt in rehearse_prompts(chat, requests)] == expected


def test_an_ungrounded_chat_and_view_shared_show_no_recorded_call(chat, unfold):
    for environment in (Rehearsed(separate=True), Rehearsed(), Rehearsed(grounded=True)):
        _, requests = unfold(environment, THREE_TURNS, *EACH_TURN * 3)
        for _, prompt in requests:
            text = chat.tokenizer.decode(prompt)
            assert "# Recorded results" not in text and '"n": "r' not in text


def test_grounding_changes_nothing_but_the_chats_of_rehearse(chat, unfold):
    grounded, asked = unfold(Rehearsed(separate=True, grounded=True), THREE_TURNS, *EACH_TURN * 3)
    plain, asked_plainly = unfold(Rehearsed(separate=True), THREE_TURNS, *EACH_TURN * 3)
    assert grounded.sequences[0].ids == plain.sequences[0].ids and grounded.messages == plain.messages
    with_results, without = (rehearse_prompts(chat, requests) for requests in (asked, asked_plainly))
    for one, other in zip(with_results, without, strict=True):
        section = "# Recorded results\n" + "".join(f"{text}\n" for text in shown(one)) if shown(one) else ""
        assert one.replace(section, "", 1) == other


CITIES = [ToolCall("find", {"city": city}) for city in ("Lima", "Oslo", "Rome")]


class Watched:
    """Notes for each rehearsal: the turn, the call, what was given out in earlier outputs, and the prompt."""

    answers_malformed_calls = False

    def __init__(self, inner):
        self.inner = inner
        self.given = []  # (number of the ACT output, recorded text)
        self.rehearsals = []

    def respond(self, trajectory, call, *args):
        turn, output = len(trajectory.answers), trajectory.rounds
        before = {text for number, text in self.given if number < output}
        observation = yield from self.inner.respond(trajectory, call, *args)
        if observation.evidence is Evidence.OBSERVED:
            self.given.append((output, observation.text))
        else:
            self.rehearsals.append((turn, call, before, trajectory.sequences[-1].segments[0].ids))
        return observation


@pytest.mark.parametrize("reuse", [False, True])
def test_no_chat_shows_a_recorded_response_that_is_still_to_come(chat, reuse):
    """Of all recorded texts a prompt holds those of earlier turns for other calls, and those that were given out."""
    rng, hidden = random.Random(0), 0

    def generate(requests):
        [request] = requests
        acts = ["hi", calling(rng.choice(CITIES)), calling(*rng.sample(CITIES, 2))]
        ids = chat.output(rng.choice(acts) if request.role is Role.ACT else to_json(REHEARSAL))
        return [Completion(ids, [0.0] * len(ids), "stop")]

    for _ in range(20):
        numbers = iter(range(9))
        turns = [[(rng.choice(CITIES), *texts(f"r{next(numbers)}")) for _ in range(rng.randint(0, 3))] for _ in "abc"]
        rehearses = Rehearsed(separate=True, grounded=True)
        watched = Watched(Recorded(rehearses) if reuse else rehearses)
        drive(episode(task(*turns), watched, chat, LIMITS), generate)
        for turn, pending, given, ids in watched.rehearsals:
            prompt = chat.tokenizer.decode(ids)
            held = {text for past in turns for _, text in past if text in prompt}
            assert held == given | {text for past in turns[:turn] for call, text in past if call != pending}
            hidden += sum(map(len, turns)) - len(held)
    assert hidden > 20


# Recorded dialogues: what SFT shows REHEARSE, and what a rollout that goes the same way does


def parts_of(prompt):
    """(tools and recorded results, conversation and pending call)"""
    head, _, tail = prompt.partition("\n# Conversation\n")
    return head, tail


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.id)
def test_a_target_stands_in_its_own_prompt_only_where_the_dialogue_has_said_it_before(chat, record):
    one = record.task()
    grounded = demonstration(one, record.messages(), chat, separate=True, grounded=True)
    plain = demonstration(one, record.messages(), chat, separate=True)
    assert len(grounded.sequences) == len(plain.sequences)
    for sequence, other in zip(grounded.sequences[1:], plain.sequences[1:], strict=True):
        prompt, target = chat.tokenizer.decode(sequence.segments[0].ids), chat.text(sequence.segments[1].ids)
        response = target.removeprefix("<execution_result>\n").removesuffix("\n</execution_result>")
        assert execution_result(response) == target
        _, conversation = parts_of(prompt)
        assert conversation == parts_of(chat.tokenizer.decode(other.segments[0].ids))[1]
        if response in prompt:
            assert response in conversation
        assert other.segments[1].ids == sequence.segments[1].ids


def test_a_target_that_an_earlier_turn_recorded_for_the_same_call_is_not_shown_again(chat):
    record = next(record for record in RECORDS if record.id == "stock-0022")
    one = record.task()
    [first], [second], _ = one.recorded
    assert first.call == second.call
    built = demonstration(one, record.messages(), chat, separate=True, grounded=True)
    assert "# Recorded results" not in chat.tokenizer.decode(built.sequences[2].segments[0].ids)


def test_grounded_demonstrations_do_show_something(chat):
    lengths = []
    for record in RECORDS:
        built = demonstration(record.task(), record.messages(), chat, separate=True, grounded=True)
        lengths += [len(shown(chat.tokenizer.decode(s.segments[0].ids))) for s in built.sequences[1:]]
    assert lengths.count(0) > 10 and sum(length > 0 for length in lengths) > 5


def replay(record, *, separate, rehearse):
    """The outputs with which a rollout goes the way of the reference dialogue. rehearse: its responses are written."""
    outputs = []
    for message in record.messages():
        if message["role"] == "assistant" or message["role"] == "tool" and rehearse:
            is_result = message["role"] == "tool" and separate
            outputs.append(execution_result(message["content"]) if is_result else message["content"])
    return outputs


REHEARSABLE = [record for record in RECORDS if record.id != "log-0012"]  # it has a response that is no JSON


@pytest.mark.parametrize(
    ("separate", "grounded"), [(False, False), (True, False), (True, True)], ids=["shared", "separate", "grounded"]
)
@pytest.mark.parametrize("record", REHEARSABLE, ids=lambda record: record.id)
def test_a_rollout_that_says_the_same_has_the_very_sequences_of_the_demonstration(
    chat, unfold, record, separate, grounded
):
    environment = Rehearsed(separate=separate, grounded=grounded)
    rolled, _ = unfold(environment, record.task(), *replay(record, separate=separate, rehearse=True))
    built = demonstration(record.task(), record.messages(), chat, separate=separate, grounded=grounded)
    assert [s.ids for s in rolled.sequences] == [s.ids for s in built.sequences]
    assert [s.role_ids for s in rolled.sequences] == [s.role_ids for s in built.sequences]
    assert rolled.messages == built.messages


@in_both_views
@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.id)
def test_reusing_what_is_recorded_a_rollout_on_the_reference_path_rehearses_nothing(chat, unfold, record, separate):
    settings = config("separate" if separate else "shared", reuse_recorded=True, schema_check=True)
    outputs = replay(record, separate=separate, rehearse=False)
    rolled, requests = unfold(rehearsed(settings, "m"), record.task(), *outputs)
    assert set(roles(requests)) == {"ACT"} and len(rolled.sequences) == 1
    built = demonstration(record.task(), record.messages(), chat)
    assert rolled.sequences[0].ids == built.sequences[0].ids
    recorded = [r for turn in record.task().recorded for r in turn]
    assert [e.call for e in rolled.exchanges] == [r.call for r in recorded]
    assert {e.evidence for e in rolled.exchanges} <= {Evidence.OBSERVED}
    assert [m["content"] for m in rolled.messages if m["role"] == "tool"] == [r.response for r in recorded]


@pytest.mark.parametrize(
    "record",
    [record for record in RECORDS],
    ids=lambda record: record.id,
)
def test_the_reference_dialogue_itself_has_the_best_reward(unfold, record):
    one = replace(record.task(), goal=goal_of(record.dialogue(), record.task().recorded))
    rolled, _ = unfold(Recorded(Rehearsed()), one, *replay(record, separate=False, rehearse=False))
    assert {name: REWARDS[name](rolled)[0] for name in ("goal", "gold_calls", "answer_facts")} == {
        "goal": 1.0,
        "gold_calls": 1.0,
        "answer_facts": 1.0,
    }
