"""Dialogues that teach the embedded model to rehearse: what they are built on, what they say, how they are laid out."""

import copy
import hashlib
import random
import re
from pathlib import Path

import pytest

from envace.chat import ChatFormat, parse_action
from envace.config import load_config
from envace.demo import rehearsals
from envace.demo.demonstrations import HABITS, Clerk, make_demonstrations
from envace.demo.desk import CallCounter, Desk
from envace.demo.model import build_model, build_tokenizer
from envace.demo.rehearsals import evaluation, imagined, make_rehearsals
from envace.demo.source import DemoSource
from envace.demo.tasks import TRAIN_KINDS, make_task, make_tasks
from envace.demonstrations import demonstration
from envace.environments import Rehearsed
from envace.episodes import drive
from envace.prompts import EVALUATE, MEMORY_HEADER, USER_DONE, call_text, execution_result, to_json
from envace.rehearsal import Rehearser, verdict_of
from envace.rewards import gold_calls, score
from envace.settings import Config, RehearsalConfig
from envace.types import Evidence, Exchange, Limits, Task, ToolCall, Trajectory

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def chat(demo_tokenizer):
    return ChatFormat(demo_tokenizer)


@pytest.fixture(scope="module")
def recorded():
    return make_rehearsals(120, 0, CallCounter())


def clerk_of(task, habit_share=0.0):
    clerk = Clerk(task, random.Random(0), CallCounter(), habit_share, slip_share=0.0)
    clerk.work()
    return clerk


def calls_of(clerk):
    return [call_text(exchange.call) for exchange in clerk.exchanges]


def calls_in(messages):
    outputs = [m["content"] for m in messages if m["role"] == "assistant" and m["content"].startswith("<tool_call>")]
    return [call_text(call) for text in outputs for call in parse_action(text).calls]


def notes_of(messages):
    """[(times, what happened, evaluation)] of the note of a dialogue."""
    text = messages[0].get("note", "")
    lines = text.removeprefix(MEMORY_HEADER).split("\n")[1:]
    return [re.fullmatch(r"- (\d)x (.*): (good|bad\. Right: .*)", line).groups() for line in lines]


def is_rehearsal(messages):
    return messages[-2]["content"] == EVALUATE


def test_rehearsals_are_the_same_for_the_same_seed(recorded):
    assert make_rehearsals(120, 0, CallCounter()) == recorded
    assert make_rehearsals(20, 0, CallCounter()) == recorded[:20]
    assert make_rehearsals(20, 1, CallCounter()) != recorded[:20]


def test_they_are_of_training_tasks_that_no_demonstration_is_of(recorded):
    tasks = [task for task, _ in recorded]
    assert tasks == make_tasks(120, 1_000_000, held_out=False)
    assert not {task.id for task in tasks} & {task.id for task in make_tasks(120, 0, held_out=False)}


def test_held_out_ids_and_amounts_never_occur(monkeypatch):
    monkeypatch.setattr(rehearsals, "SLIP_SHARE", 0.0)  # a slip is a random digit
    held_out = [task.world for task in make_tasks(1000, 0, held_out=True)]
    ids = {i for world in held_out for i in [*world["orders"], *world["customers"]]}
    amounts = {str(order["total"]) for world in held_out for order in world["orders"].values()}
    assert len(ids) > 20 and len(amounts) == 3
    told = " ".join(
        text
        for _, messages in make_rehearsals(120, 0, CallCounter())
        for m in messages
        for text in map(str, m.values())
    )
    assert len(set(re.findall(r"\b[A-Z]\d\b", told))) > 80 and "Right:" in told
    assert not ids & set(re.findall(r"\b[A-Z]\d\b", told))
    assert not amounts & set(re.findall(r"\b\d\d\b", told))


def test_one_half_judges_a_rehearsal_and_the_other_follows_a_memory(recorded):
    judging, following = recorded[::2], recorded[1::2]
    assert all(notes_of(messages) and not is_rehearsal(messages) for _, messages in following)
    broken_off = [m for _, m in judging if not is_rehearsal(m)]
    assert len(broken_off) < 6 and all("malformed_call" in str(messages) for messages in broken_off)
    assert 0.3 < sum(bool(notes_of(m)) for _, m in judging) / len(judging) < 0.7
    for task, messages in judging:
        turns = [m for m in messages if m["role"] == "user"]
        if is_rehearsal(messages):
            assert [m["content"] for m in turns] == [*task.user_turns, "", EVALUATE]
            assert [bool(m.get("imagined")) for m in turns] == [False, *[True] * len(task.user_turns), False]
            assert verdict_of(messages[-1]["content"]) is not None
    for task, messages in following:
        assert [m["content"] for m in messages if m["role"] == "user"] == task.user_turns
        assert not any(m.get("imagined") for m in messages)
    # Rehearsals see earlier ones in full, as `sequential` shows them; the committed run sees calls alone.
    assert all(" -> " in what for _, m in judging for _, what, _ in notes_of(m) if what != "no call" and "{" in what)
    assert not any(" -> " in what for _, m in following for _, what, _ in notes_of(m))


def test_alike_notes_are_one_note_with_a_count(recorded):
    counts = []
    for _, messages in recorded:
        notes = notes_of(messages)
        assert len({note[1:] for note in notes}) == len(notes)
        counts += [sum(int(times) for times, _, _ in notes)] if notes else []
    assert set(counts) <= set(range(1, 9)) and len(set(counts)) > 5


def masked(calls):
    """What is called and how, whatever the ids and amounts: those differ between imagined worlds."""
    return re.sub(r'"amount": \d+', '"amount": 0', re.sub(r"\b[A-Z]\d\b", "A0", calls))


def told(task):
    """Everything that a policy knows of a task before it acts."""
    return task.system, task.tools, task.user_turns[0]


@pytest.mark.parametrize("kind", sorted(TRAIN_KINDS))
def test_an_imagined_world_keeps_what_is_said_and_draws_anew_what_is_not(kind):
    rng = random.Random(0)
    task = make_task(kind, "t", rng, held_out=False)
    before = copy.deepcopy(task)
    worlds = [imagined(task, rng) for _ in range(30)]
    assert task == before
    assert all(told(world) == told(task) for world in worlds)
    # Each is a task of its own that a flawless clerk solves in its own world.
    for world in worlds:
        clerk = clerk_of(world)
        assert score(Trajectory(world, "g", exchanges=clerk.exchanges, answers=clerk.answers))[0] == 1.0
    drawn = {to_json(world.world) for world in worlds}
    assert len(drawn) > 5
    if kind in ("cancel", "refund", "move"):  # a hint tells the status, and the right calls depend on it
        assert {masked(" ; ".join(calls_of(clerk_of(world)))) for world in worlds} == {
            masked(" ; ".join(calls_of(clerk_of(task))))
        }
    if kind in ("cancel_last", "status_twice"):  # the id that decides is not told
        assert len({" ".join(calls_of(clerk_of(world))) for world in worlds}) > 5


@pytest.mark.parametrize("overlooked", [rehearsals.OVERLOOKED, 0.6])
def test_a_committed_clerk_does_what_all_notes_approve_of(monkeypatch, overlooked):
    # With more of them, and fewer rehearsals that have to agree, habits are approved more often.
    monkeypatch.setattr(rehearsals, "OVERLOOKED", overlooked)
    if overlooked == 0.6:
        monkeypatch.setattr(rehearsals, "MOST_REHEARSALS", 2)
    monkeypatch.setattr(rehearsals, "SLIP_SHARE", 0.0)
    seen = {True: 0, False: 0}
    for task, messages in make_rehearsals(160, 0, CallCounter())[1::2]:
        right, habit = calls_of(clerk_of(task)), calls_of(clerk_of(task, habit_share=1.0))
        approved = all(
            verdict == "good" and masked(what) == masked(" ; ".join(habit) or "no call")
            for _, what, verdict in notes_of(messages)
        )
        assert calls_in(messages) == (habit if approved else right), (task.kind, messages[0])
        if task.kind in HABITS and habit != right:
            seen[approved] += 1
            named = [verdict for _, _, verdict in notes_of(messages) if verdict != "good"]
            assert all(masked(verdict) == masked(f"bad. Right: {' ; '.join(right)}") for verdict in named)
    assert seen[False] > 5 and (seen[True] > 5 or overlooked == rehearsals.OVERLOOKED < 0.2)


def is_accepted(task, calls):
    """Whether the scorer takes the calls, made in order on a fresh desk, for right in some division into user turns."""
    turns, flawless = len(task.user_turns), clerk_of(task)

    def made(cut):
        desk = Desk(task.world, CallCounter(), "test")
        exchanges = [
            Exchange(call, desk.execute(call), 0 if i < cut else turns - 1, i, Evidence.OBSERVED)
            for i, call in enumerate(calls)
        ]
        return Trajectory(task, "g", exchanges=exchanges, answers=flawless.answers)

    return any(gold_calls(made(cut))[0] == 1.0 for cut in range(len(calls) + 1))


def test_the_calls_that_a_bad_evaluation_names_are_right_when_made(recorded):
    named = 0
    for task, messages in recorded:
        if is_rehearsal(messages) and (text := messages[-1]["content"]) != "good":
            listed = text.removeprefix("bad. Right: ")
            calls = [] if listed == "no call" else [parsed(call) for call in listed.split(" ; ")]
            assert is_accepted(task, calls), (task.kind, text)
            named += 1
    assert named > 5
    # The check can fail.
    task = next(task for task, _ in recorded if task.kind == "cancel")
    assert not is_accepted(task, [ToolCall("open_ticket", {"order_id": "A1", "topic": "other"})])


def parsed(text):
    name, arguments = text.split(" ", 1)
    action = parse_action(f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>')
    assert not action.error
    return action.calls[0]


def test_one_wrong_rehearsal_in_ten_is_overlooked_and_no_right_one_is_called_bad():
    tasks = [task for task in make_tasks(200, 3, held_out=False) if task.kind in HABITS]
    wrong, right, rng = [], [], random.Random(0)
    for task in tasks:
        for habit_share in (0.0, 1.0):
            clerk = clerk_of(task, habit_share)
            reward, _ = score(Trajectory(task, "g", exchanges=clerk.exchanges, answers=clerk.answers))
            verdicts = [evaluation(clerk, rng, CallCounter()) for _ in range(10)]
            (right if reward == 1.0 else wrong).extend(verdicts)
    assert len(right) > 300 and set(right) == {"good"}
    assert len(wrong) > 300
    assert 0.06 < wrong.count("good") / len(wrong) < 0.14


@pytest.mark.parametrize("separate", [False, True])
def test_every_taught_rehearsal_is_one_that_a_rehearser_would_lay_out(chat, scripted, recorded, separate):
    judged = [(task, messages) for task, messages in recorded[:24] if is_rehearsal(messages)]
    assert any(len(task.user_turns) > 1 for task, _ in judged) and any("note" in m[0] for _, m in judged)
    for task, messages in judged:
        taught = demonstration(task, messages, chat, separate=separate)
        outputs = []
        for message in messages:
            text = message["content"]
            if message["role"] == "tool":
                outputs.append(execution_result(text) if separate else text)
            elif message["role"] == "assistant":
                outputs.append(text)
            elif message.get("imagined"):
                outputs.append(chat.output(text or (USER_DONE if separate else "")))
        generate = scripted(chat, *outputs)
        only_first = Task(task.id, task.system, task.tools, task.user_turns[:1])
        settings = RehearsalConfig(mode="sequential")
        imagine = {"imagine": lambda task: Rehearsed(separate=separate), "separate": separate}
        rehearser = Rehearser(settings, chat, Limits(9, 9, 9999, 9999), **imagine)
        rehearsal = drive(rehearser.rehearse(only_first, messages[0].get("note", "")), generate)
        assert generate.remaining == [] and rehearsal.evaluation == messages[-1]["content"]
        assert [s.ids for s in rehearsal.trajectory.sequences] == [s.ids for s in taught.sequences]
        assert [s.role_ids for s in rehearsal.trajectory.sequences] == [s.role_ids for s in taught.sequences]


def test_a_taught_note_is_what_a_rehearser_would_remember(chat, recorded):
    """Of the rehearsals that a note is on: the same header, order, counts and words."""
    settings = RehearsalConfig(memory_tokens=9999)
    rehearser = Rehearser(settings, chat, Limits(9, 9, 9999, 9999), imagine=lambda task: Rehearsed())
    for _, messages in recorded:
        if notes := notes_of(messages):
            alike = {((what,), said, verdict_of(said)): int(times) for times, what, said in notes}
            assert rehearser._text(list(alike), alike) == messages[0]["note"]


def test_the_longest_taught_sequence_fits_the_context_of_the_demo(recorded):
    limits = load_config(str(ROOT / "configs" / "demo.yaml"), []).rollout
    budget = load_config(str(ROOT / "configs" / "rehearsal.yaml"), []).rehearsal.memory_tokens
    # The tokenizer that the embedded model gets with these settings.
    taught = make_demonstrations(512, 0, CallCounter()) + make_rehearsals(512, 0, CallCounter())
    chat = ChatFormat(build_tokenizer((task.tools, messages) for task, messages in taught))
    assert limits.max_context_tokens == 1200
    for task, messages in recorded:
        built = demonstration(task, messages, chat)
        assert max(map(len, built.sequences)) < limits.max_context_tokens
        assert all(len(segment.ids) <= limits.max_new_tokens for segment in built.outputs()), messages
        assert len(chat.literal(messages[0].get("note", ""))) <= budget


def hashes(folder):
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}


@pytest.mark.slow
def test_without_rehearsals_everything_is_as_it_was(tmp_path):
    def source(rehearsals):
        config = Config()
        config.data.demonstrations, config.data.rehearsals = 24, rehearsals
        return DemoSource(config)

    plain = make_demonstrations(24, 0, CallCounter())
    assert make_rehearsals(0, 0, CallCounter()) == []
    assert source(0).demonstrations() == plain
    with_rehearsals = source(6).demonstrations()
    assert with_rehearsals == plain + make_rehearsals(6, 0, CallCounter())
    build_model(tmp_path / "before", [(task.tools, messages) for task, messages in plain], seed=1)
    source(0).build_embedded_model(tmp_path / "now", 1)
    source(6).build_embedded_model(tmp_path / "taught", 1)
    before, now, taught = (hashes(tmp_path / name) for name in ("before", "now", "taught"))
    assert now == before and taught != before
