"""Episodes under a checklist judge: outputs are scripted, the judge is a server on loopback that speaks real HTTP."""

import hashlib
import json
import random
import threading
from dataclasses import dataclass, replace

import pytest
from openai_server import OpenAIServer, Reply, error, verdict

from envace import endpoints
from envace import services as services_module
from envace.advantages import group_advantages
from envace.batching import output_table, rows_from_trajectories
from envace.chat import ChatFormat
from envace.checklist import FOCUS_ON, REPLY, TOOL_CALLS, TOOL_CONTENT, Checklist, Item
from envace.config import load_config
from envace.environments import Rehearsed
from envace.episodes import rollout
from envace.evaluation import assign_rewards
from envace.outage import EndpointError, EndpointOutage
from envace.prompts import to_json, tool_call_block, unusable_call_error
from envace.services import Services
from envace.types import Limits, Status, Task, ToolCall, Trajectory

pytestmark = pytest.mark.slow  # all together, though each alone is quick

LIMITS = Limits(max_rounds=6, max_parallel_calls=3, max_context_tokens=4000, max_new_tokens=120)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
CALL = tool_call_block(ToolCall("f", {"c": 1}))
RESPONSES = {"ok": to_json({"number": 1}), "error": to_json(unusable_call_error("X", "no"))}
MALFORMED = '<tool_call>\n{"name": "f", "arguments": {\n</tool_call>'
LONG = "far too long " * 120
GATED = {"status": Status.FINISHED, "reason": "gate"}
PATIENCE = 20.0  # seconds until a test that hangs fails


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(endpoints, "FIRST_BACKOFF", 0.01)
    monkeypatch.setattr(endpoints, "LONGEST_BACKOFF", 0.05)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture(scope="module")
def chat(demo_tokenizer):
    return ChatFormat(demo_tokenizer)


# The judge


def settings_for(*servers, reward="checklist", **judge):
    values = {"endpoints": [server.url for server in servers], "model": "judge", "retries": 1} | judge
    overrides = [f"judge.{name}={json.dumps(value)}" for name, value in values.items()]
    return load_config(None, ["model.path=m", "data.source=cm2", "data.path=d", f"reward.name={reward}", *overrides])


def block(body, name):
    """The rows of one block of what the judge is shown."""
    lines = body["messages"][1]["content"].split("\n")
    start, end = ([line.rpartition(" ")[0] for line in lines].index(f"{word} {name}") for word in ("BEGIN", "END"))
    return [json.loads(line) for line in lines[start + 1 : end]]


def asked_about(body):
    """(question of the item, step of the turn)"""
    [criterion] = block(body, "CRITERION")
    return criterion["question"], sum(message["role"] == "assistant" for message in block(body, "TURN"))


def last_reply(body):
    return block(body, "TURN")[-1]["reply"]


def by_question(decide):
    """A server script. decide: (question, step) -> True, False, or None for a reply without a verdict."""

    def script(number, body):
        answer = decide(*asked_about(body))
        return Reply("Hard to say.") if answer is None else Reply(verdict(answer))

    return script


def hashed(question, step):
    """A verdict that looks random and is the same every time: True in three of five cases."""
    return hashlib.sha256(f"{question} {step}".encode()).digest()[0] % 5 < 3


# The dialogues


def item(id, weight=1.0, *, required=False, dependence=(), focus_on=REPLY, question=""):
    return Item(id, question or f"Is {id} so?", focus_on, "yes", (), (), required, tuple(dependence), weight)


def task(name, *turns, dependence=False):
    """A task of one variant. turns: the items of each."""
    return task_of(name, Checklist((tuple(map(tuple, turns)),), dependence))


def task_of(name, goal):
    return Task(name, "", [TOOL], [f"Turn {turn} of {name}!" for turn in range(goal.num_turns)], goal=goal)


@pytest.fixture
def players(scripted, chat):
    """players({task id: [outputs of its first sample, of its second, ...]}): a `generate` for many episodes.

    batches: which tasks spoke in each call.
    """

    def build(scripts, listen=None):
        streams = {}
        remaining = {name: iter(samples) for name, samples in scripts.items()}

        def speaker(sequence):
            if id(sequence) not in streams:
                text = chat.tokenizer.decode(sequence.ids)
                name = next(name for name in scripts if f"of {name}!" in text)
                streams[id(sequence)] = name, scripted(chat, *next(remaining[name])), sequence
            return streams[id(sequence)]

        def generate(requests):
            assert requests, "nobody is asked for nothing"
            generate.batches.append([speaker(request.sequence)[0] for request in requests])
            if listen is not None:
                listen(generate.batches[-1], {name for name, _, sequence in streams.values() if sequence.open})
            return [speaker(request.sequence)[1]([request])[0] for request in requests]

        generate.batches = []
        generate.unused = lambda: sum(len(script.remaining) for _, script, _ in streams.values())
        return generate

    return build


@pytest.fixture
def roll_out(chat, players):
    """(trajectories with their rewards, `generate`) of tasks with one script for each sample."""

    def run(services, scripts, *, samples=1, limits=LIMITS, listen=None):
        """scripts: [(task, [outputs of a sample, ...])]. listen: told who speaks next and whose streams are open."""
        generate = players({task.id: outputs for task, outputs in scripts}, listen)
        tasks = [task for task, _ in scripts]
        trajectories = rollout(
            tasks, generate, lambda task: Rehearsed(), chat, limits, end_turn=services.end_turn, samples=samples
        )
        assign_rewards(trajectories, "checklist")
        return trajectories, generate

    return run


def run_one(roll_out, decide, one, *outputs, **settings):
    """(trajectory, what was asked) of a single episode."""
    limits = settings.pop("limits", LIMITS)
    with OpenAIServer(by_question(decide)) as server, Services(settings_for(server, **settings)) as services:
        [trajectory], _ = roll_out(services, [(one, [list(outputs)])], limits=limits)
        return trajectory, [asked_about(request.body) for request in server.log]


# The reward of many episodes, against a slow loop that is written straight from the rules


@dataclass(frozen=True)
class Play:
    """One user turn as it is acted. calls: for each output that calls, the kinds of its responses."""

    calls: tuple[tuple[str, ...], ...]
    ending: str = "answer"  # or "malformed", "long"

    def outputs(self):
        acted = [text for kinds in self.calls for text in ("\n".join([CALL] * len(kinds)), *map(RESPONSES.get, kinds))]
        return [*acted, {"answer": "It is done.", "malformed": MALFORMED, "long": LONG}[self.ending]]


def random_case(rng, name):
    """(task, what is acted in each turn)"""
    num_turns, num_variants, dependence = rng.randint(1, 3), rng.randint(1, 3), rng.random() < 0.5

    def items(variant, turn):
        ids = [f"C{i}" for i in range(rng.randint(1, 3))]
        cuts = sorted(rng.random() for _ in ids[1:])
        weights = [b - a for a, b in zip([0.0, *cuts], [*cuts, 1.0], strict=True)]
        return tuple(
            item(
                id,
                weight,
                required=rng.random() < 0.3,
                dependence=rng.sample(ids[:i], rng.randint(0, i)),
                focus_on=rng.choice(FOCUS_ON),
                question=f"{name}, variant {variant}, turn {turn}: {id}?",
            )
            for i, (id, weight) in enumerate(zip(ids, weights, strict=True))
        )

    lists = tuple(tuple(items(v, t) for t in range(num_turns)) for v in range(num_variants))
    plays = [
        Play(
            tuple(tuple(rng.choices(["ok", "error"], [3, 1], k=rng.randint(1, 2))) for _ in range(rng.randint(0, 2))),
            rng.choices(["answer", "malformed", "long"], [12, 1, 1])[0],
        )
        for _ in range(num_turns)
    ]
    return task_of(name, Checklist(lists, dependence)), plays


def slow_oracle(checklist, plays, says):
    """(reward, [(question, step) that has to be asked], user turns that are completed)"""
    total, questions, completed = 0.0, [], 0
    for number, play in enumerate(plays):
        if play.ending != "answer":
            break
        completed += 1
        closed, score = 0, 0.0
        for variant in checklist.variants:
            met_at = {}
            for step in range(1, len(play.calls) + 2):
                responses = play.calls[step - 1] if step <= len(play.calls) else ()
                for it in variant[number]:
                    if "error" in responses and it.focus_on in (TOOL_CALLS, TOOL_CONTENT):
                        continue
                    questions.append((it.question, step))
                    ready = all(met_at.get(before, 99) < step for before in it.dependence)
                    if says(it.question, step) and (ready or not checklist.dependence):
                        met_at.setdefault(it.id, step)
            score += sum(it.weight for it in variant[number] if it.id in met_at)
            closed += any(it.required_for_next_turn and it.id not in met_at for it in variant[number])
        total += score / len(checklist.variants)
        if closed > len(checklist.variants) / 2:
            break
    return total / len(plays), questions, completed


@pytest.mark.slow
def test_rewards_and_questions_are_those_of_a_slow_loop_over_the_rules(roll_out):
    rng = random.Random(3)
    cases = [random_case(rng, f"case{i:02}") for i in range(36)]
    expected = [slow_oracle(task.goal, plays, hashed) for task, plays in cases]
    scripts = [(task, [[text for play in plays for text in play.outputs()]] * 2) for task, plays in cases]
    with OpenAIServer(by_question(hashed)) as server, Services(settings_for(server)) as services:
        trajectories, _ = roll_out(services, scripts, samples=2)
        metrics = services.end_step()
    asked = sorted(asked_about(request.body) for request in server.log)
    contents = [request.body["messages"][1]["content"] for request in server.log]
    wanted = [question for _, questions, _ in expected for question in questions]

    for (task, plays), (reward, _, completed), *samples in zip(
        cases, expected, trajectories[::2], trajectories[1::2], strict=True
    ):
        for trajectory in samples:
            assert trajectory.task is task
            assert trajectory.reward == pytest.approx(reward, abs=1e-12)
            assert len(trajectory.verdicts) == len(trajectory.answers) == completed
            left_out = trajectory.status is Status.FINISHED and completed < len(plays)
            assert (trajectory.reason == "gate") == left_out
    assert asked == sorted(wanted), "steps x items of the turns that were played, but for tool errors"
    assert len(set(contents)) == len(contents), "the second sample says the same, so nothing is asked about it"
    assert metrics["judge/asked"] == 2 * len(wanted) and metrics["judge/requests"] == len(wanted)
    # The cases tell the rules apart.
    assert {len(task.goal.variants) for task, _ in cases} == {1, 2, 3}
    ends = {(t.status, t.reason) for t in trajectories}
    assert {(Status.FINISHED, ""), (Status.FINISHED, "gate"), (Status.TRUNCATED, "new_tokens")} < ends
    assert any(status is Status.PARSE_ERROR for status, _ in ends)
    undecided = [
        slow_oracle(replace(task.goal, dependence=not task.goal.dependence), plays, hashed)[0] != pytest.approx(reward)
        for (task, plays), (reward, _, _) in zip(cases, expected, strict=True)
    ]
    assert sum(undecided) > 3, "dependence makes a difference"


def test_nothing_is_asked_about_an_item_that_a_tool_error_fails(roll_out):
    items = [item(focus, 0.25, focus_on=focus) for focus in FOCUS_ON]
    play = Play((("ok", "error"), ("ok",)))
    trajectory, asked = run_one(roll_out, lambda *_: True, task("t", items), *play.outputs())
    failed = {(item(focus).question, 1) for focus in (TOOL_CALLS, TOOL_CONTENT)}
    assert sorted(asked) == sorted({(item(focus).question, step) for focus in FOCUS_ON for step in (1, 2, 3)} - failed)
    assert trajectory.verdicts == [[[[f not in (TOOL_CALLS, TOOL_CONTENT) for f in FOCUS_ON], [True] * 4, [True] * 4]]]
    assert trajectory.reward == 1.0, "another step has met them"


# How an episode ends


def test_a_closed_gate_leaves_the_later_turns_unplayed_and_unasked(roll_out):
    first, second = [item("A", 0.7), item("B", 0.3, required=True)], [item("C")]
    three = task("t", first, second, second)
    trajectory, asked = run_one(roll_out, lambda question, _: "A" in question, three, "hi")
    assert vars(trajectory).items() >= GATED.items() and trajectory.answers == ["hi"]
    assert sorted(asked) == [(item("A").question, 1), (item("B").question, 1)]
    assert trajectory.reward == pytest.approx(0.7 / 3)
    assert trajectory.reward_parts == {"turns": pytest.approx(1 / 3), "items": 0.5}


def test_a_gate_that_closes_behind_the_last_turn_leaves_nothing_out(roll_out):
    two = task("t", [item("A")], [item("B", required=True)])
    trajectory, _ = run_one(roll_out, lambda question, _: "A" in question, two, "hi", "bye")
    assert (trajectory.status, trajectory.reason, trajectory.reward) == (Status.FINISHED, "", 0.5)


@pytest.mark.parametrize(("unmet", "reason"), [(1, ""), (2, "gate")])
def test_more_than_half_of_the_variants_must_close_the_gate(roll_out, unmet, reason):
    variants = tuple(((item(f"V{v}", required=True),), (item("last"),)) for v in range(3))
    one, outputs = task_of("t", Checklist(variants)), ["hi", "bye"][: 1 + (reason == "")]
    closed = {item(f"V{v}").question for v in range(unmet)}
    trajectory, _ = run_one(roll_out, lambda question, _: question not in closed, one, *outputs)
    assert trajectory.reason == reason and trajectory.answers == outputs
    assert trajectory.reward == pytest.approx(((3 - unmet) / 3 + (reason == "")) / 2)


@pytest.mark.parametrize(
    ("outputs", "status", "reason"),
    [
        ([MALFORMED], Status.PARSE_ERROR, "act: "),
        ([CALL, "It worked."], Status.PARSE_ERROR, "rehearse: "),
        ([LONG], Status.TRUNCATED, "new_tokens"),
        ([CALL, LONG], Status.TRUNCATED, "new_tokens"),
        ([*[CALL, RESPONSES["ok"]] * 6, CALL], Status.TRUNCATED, "rounds"),
        (["\n".join([CALL] * 4)], Status.TRUNCATED, "parallel_calls"),
    ],
)
def test_a_turn_that_breaks_off_costs_its_own_score_and_keeps_the_earlier_one(roll_out, outputs, status, reason):
    three = task("t", [item("A", 0.4), item("B", 0.6)], [item("A")], [item("A")])
    trajectory, asked = run_one(roll_out, lambda question, _: "A" in question, three, "hi", *outputs)
    assert trajectory.status is status and trajectory.reason.startswith(reason)
    assert trajectory.reward == pytest.approx(0.4 / 3) and len(trajectory.verdicts) == 1
    assert len(asked) == 2, "nothing is asked about a turn without an answer"


# Unknown verdicts


def test_an_unknown_verdict_leaves_the_reward_unknown_and_the_dialogue_goes_on_if_the_gate_is_certain(roll_out):
    two = task("t", [item("A", 0.5, required=True), item("B", 0.5)], [item("C")])
    trajectory, _ = run_one(
        roll_out, lambda question, _: None if "B" in question else True, two, "hi", "bye", retries=0
    )
    assert trajectory.verdicts == [[[[True, None]]], [[[True]]]]
    assert (trajectory.status, trajectory.reason, trajectory.reward) == (Status.FINISHED, "", None)


def test_a_gate_that_hangs_on_an_unknown_verdict_ends_the_dialogue(roll_out):
    two = task("t", [item("A", required=True)], [item("C")])
    trajectory, asked = run_one(roll_out, lambda *_: None, two, "hi", retries=0)
    assert vars(trajectory).items() >= GATED.items() and trajectory.reward is None
    assert asked == [(item("A").question, 1)]


def test_an_unknown_verdict_does_not_matter_where_another_step_or_a_closed_gate_decides(roll_out):
    play = Play((("ok",),)).outputs()
    met, _ = run_one(roll_out, lambda _, step: None if step == 1 else True, task("t", [item("A")]), *play, retries=0)
    assert met.verdicts == [[[[None], [True]]]] and met.reward == 1.0
    late = task("t", [item("A", 0.5, required=True), item("B", 0.5, dependence=["A"])], [item("C")], dependence=True)
    gated, _ = run_one(roll_out, lambda question, _: None if "B" in question else False, late, "hi", retries=0)
    assert gated.verdicts == [[[[False, None]]]] and gated.reward == 0.0, "B's prerequisite was not met before"


def test_a_trajectory_with_an_unknown_reward_is_in_neither_the_loss_nor_the_baseline(roll_out):
    answers = ["yes", "unclear", "no", "yes, sure"]

    def script(number, body):
        reply = last_reply(body)
        return Reply("?") if reply == "unclear" else Reply(verdict(reply.startswith("yes")))

    with OpenAIServer(script) as server, Services(settings_for(server, retries=0)) as services:
        scripts = [(task("t", [item("A")]), [[answer] for answer in answers])]
        trajectories, _ = roll_out(services, scripts, samples=4)
    assert [t.reward for t in trajectories] == [1.0, None, 0.0, 1.0]
    rewards, groups, _, _ = output_table(trajectories)
    assert rewards.isnan().tolist() == [False, True, False, False]
    advantages = group_advantages(rewards, groups)
    assert advantages.tolist() == pytest.approx([0.5774, 0, -1.1547, 0.5774], abs=1e-4)
    others = [t for t in trajectories if t.reward is not None]
    rewards_of_others, groups_of_others, _, _ = output_table(others)
    assert advantages[[0, 2, 3]].equal(group_advantages(rewards_of_others, groups_of_others))
    rows = rows_from_trajectories(
        trajectories, advantages, loss_aggregation="token_mean", role_weights={"act": 1.0, "rehearse": 1.0}
    )
    assert [row.ids for row in rows] == [t.sequences[0].ids for t in others]


# Judging and generation side by side


def test_generation_goes_on_while_a_verdict_is_pending(roll_out):
    """The judge is silent until the other episode has spoken again: who waits for the verdict first waits in vain."""
    spoke_again, in_time = threading.Event(), []

    def script(number, body):
        if asked_about(body)[0] == item("first").question:
            in_time.append(spoke_again.wait(PATIENCE))
        return Reply(verdict(True))

    def listen(speakers, still_open):
        if speakers == ["acts"]:
            spoke_again.set()

    waits, acts = task("waits", [item("first")], [item("second")]), task("acts", [item("third")])
    scripts = [(waits, [["hi", "bye"]]), (acts, [Play((("ok",), ("ok",))).outputs()])]
    with OpenAIServer(script) as server, Services(settings_for(server)) as services:
        trajectories, generate = roll_out(services, scripts, listen=listen)
    assert in_time == [True]
    assert [t.reward for t in trajectories] == [1.0, 1.0]
    both = ["waits", "acts"]
    assert generate.batches == [both, ["acts"], both, ["acts"], ["acts"]], "it sits out one round after each answer"


def test_nobody_waits_for_the_last_verdict_of_another_episode(roll_out):
    """The judge is silent until the other episode has come to its end, several rounds later."""
    came_to_its_end, in_time, opened = threading.Event(), [], []

    def script(number, body):
        if asked_about(body)[0] == item("last").question:
            in_time.append(came_to_its_end.wait(PATIENCE))
        return Reply(verdict(True))

    def listen(speakers, still_open):
        opened.append(still_open)
        if len(opened) == 5:
            came_to_its_end.set()

    ends, acts = task("ends", [item("last")]), task("acts", [item("other")])
    scripts = [(ends, [["hi"]]), (acts, [Play((("ok",), ("ok",))).outputs()])]
    with OpenAIServer(script) as server, Services(settings_for(server)) as services:
        trajectories, generate = roll_out(services, scripts, listen=listen)
    assert in_time == [True]
    assert [t.reward for t in trajectories] == [1.0, 1.0]
    assert generate.batches == [["ends", "acts"], *[["acts"]] * 4]
    assert opened == [{"ends", "acts"}, *[{"acts"}] * 4], "its stream is closed, so that no cache is kept for it"


def test_episodes_that_all_wait_ask_for_nothing_in_between(roll_out):
    scripts = [(task(name, [item(f"{name}1")], [item(f"{name}2")]), [["hi", "bye"]]) for name in ("a", "b")]
    with OpenAIServer(by_question(hashed)) as server, Services(settings_for(server)) as services:
        _, generate = roll_out(services, scripts)
    assert generate.batches == [["a", "b"], ["a", "b"]] and generate.unused() == 0


@pytest.mark.slow
def test_what_is_generated_together_does_not_depend_on_the_speed_of_the_judge(roll_out):
    rng = random.Random(1)
    cases = [random_case(rng, f"case{i:02}") for i in range(8)]
    scripts = [(task, [[text for play in plays for text in play.outputs()]]) for task, plays in cases]

    def unfolded(delay):
        def script(number, body):
            return replace(by_question(hashed)(number, body), delay=delay())

        with OpenAIServer(script) as server, Services(settings_for(server)) as services:
            trajectories, generate = roll_out(services, scripts)
        return generate.batches, [t.reward for t in trajectories], [t.sequences[0].ids for t in trajectories]

    slow = random.Random(0)
    fast = unfolded(lambda: 0.0)
    assert len(fast[0]) > 8 and max(map(len, fast[0])) > min(map(len, fast[0]))
    assert unfolded(lambda: slow.uniform(0, 0.1)) == fast


# A judge that is gone


def gone(question):
    """A server script: no service as soon as this is asked."""

    def script(number, body):
        return error(503) if asked_about(body)[0] == question else Reply(verdict(True))

    return script


def test_an_outage_in_the_rollout_makes_faults_and_stops_the_step_at_its_end(roll_out):
    one, two = task("one", [item("A")]), task("two", [item("A")], [item("B")])
    settings = {"retries": 0, "max_outage_minutes": 0.0}
    with OpenAIServer(gone(item("B").question)) as server, Services(settings_for(server, **settings)) as services:
        trajectories, generate = roll_out(services, [(one, [["hi"]]), (two, [["hi", "bye"]])])
        assert [t.status for t in trajectories] == [Status.FINISHED, Status.FAULT]
        assert [t.reward for t in trajectories] == [1.0, None]
        assert "down for 0 minutes" in trajectories[1].reason and trajectories[1].reward_parts == {}
        assert not any(sequence.open for t in trajectories for sequence in t.sequences)
        with pytest.raises(EndpointOutage, match="down for 0 minutes"):
            services.end_step()
        assert services.end_step()["judge/asked"] == 0


def test_a_refused_key_stops_the_step_in_the_same_way(roll_out):
    with OpenAIServer(lambda *_: error(401)) as server, Services(settings_for(server)) as services:
        [trajectory], _ = roll_out(services, [(task("t", [item("A")]), [["hi"]])])
        assert trajectory.status is Status.FAULT and trajectory.reward is None
        with pytest.raises(EndpointOutage, match="HTTP 401"):
            services.end_step()


def test_too_many_unknown_verdicts_stop_the_step(roll_out):
    with OpenAIServer(by_question(lambda *_: None)) as server, Services(settings_for(server, retries=0)) as services:
        [trajectory], _ = roll_out(services, [(task("t", [item("A")]), [["hi"]])])
        assert trajectory.status is Status.FINISHED and trajectory.reward is None
        with pytest.raises(EndpointOutage, match="1 of 1 questions"):
            services.end_step()


class Ranks:
    """Two threads in the place of two ranks: `total` sums over both, as an all-reduce does."""

    def __init__(self):
        self.values = {}
        self.barrier = threading.Barrier(2, timeout=PATIENCE)

    def total(self, rank):
        def total(value):
            self.values[rank] = float(value)
            self.barrier.wait()
            summed = sum(self.values.values())
            self.barrier.wait()
            return summed

        return total

    def run(self, *functions):
        """What each function, called with its `total`, returned or raised."""
        results = [None] * len(functions)

        def call(rank):
            try:
                results[rank] = functions[rank](self.total(rank))
            except Exception as raised:
                results[rank] = raised

        threads = [threading.Thread(target=call, args=[rank]) for rank in range(len(functions))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


def test_ranks_stop_together_when_the_judge_of_one_is_gone(roll_out):
    settings = {"retries": 0, "max_outage_minutes": 0.0}
    asks = [(task("t", [item("A")]), [["hi"]])]
    with (
        OpenAIServer(gone("nothing")) as up,
        OpenAIServer(gone(item("A").question)) as down,
        Services(settings_for(up, **settings)) as fine,
        Services(settings_for(down, **settings)) as broken,
    ):
        [good], _ = roll_out(fine, asks)
        [bad], _ = roll_out(broken, asks)
        assert (good.reward, bad.reward) == (1.0, None)
        raised = Ranks().run(fine.end_step, broken.end_step)
        assert [type(one) for one in raised] == [EndpointOutage, EndpointOutage]
        assert "another process" in str(raised[0]) and "down for" in str(raised[1])
        roll_out(fine, asks)
        counts = Ranks().run(fine.end_step, broken.end_step)
        assert [one["judge/asked"] for one in counts] == [1, 1], "it was said once, and a new step has begun"


def test_ranks_count_unknown_verdicts_together(roll_out):
    asks = [(task("t", [item(id, 0.25) for id in "ABCD"]), [["hi"]])]
    with (
        OpenAIServer(by_question(lambda question, _: None if "A" in question else True)) as doubtful,
        OpenAIServer(by_question(lambda *_: True)) as sure,
        Services(settings_for(doubtful, retries=0, max_unknown_share=0.2)) as one,
        Services(settings_for(sure, retries=0, max_unknown_share=0.2)) as other,
    ):
        roll_out(one, asks)
        roll_out(other, asks)
        counts = Ranks().run(one.end_step, other.end_step)
        assert [(c["judge/asked"], c["judge/unknown_share"]) for c in counts] == [(8, 0.125)] * 2
        roll_out(one, [(task("t", [item("A")]), [["hi"]])])
        assert [type(raised) for raised in Ranks().run(one.end_step, other.end_step)] == [EndpointOutage] * 2


# With and without a judge


def judge_threads():
    return [thread for thread in threading.enumerate() if thread.name == "judge"]


@pytest.mark.parametrize("reward", ["goal", "gold_calls", "answer_facts"])
def test_without_checklists_no_judge_is_opened(reward, monkeypatch, chat, players):
    monkeypatch.setattr(services_module, "Judge", None)
    with OpenAIServer(by_question(hashed)) as server, Services(settings_for(server, reward=reward)) as services:
        one = task("t", [item("A", required=True)], [item("B")])
        generate = players({"t": [["hi", "bye"]]})
        [trajectory] = rollout([one], generate, lambda _: Rehearsed(), chat, LIMITS, end_turn=services.end_turn)
        assert trajectory.answers == ["hi", "bye"] and trajectory.verdicts == []
        assert services.end_step() == {}
    assert server.log == []


def test_leaving_services_ends_the_judge(roll_out):
    before = judge_threads()
    with OpenAIServer(by_question(hashed)) as server:
        with Services(settings_for(server)) as services:
            assert len(judge_threads()) == len(before) + 1
            roll_out(services, [(task("t", [item("A")]), [["hi"]])])
        assert judge_threads() == before


@pytest.mark.parametrize(("name", "value"), [("endpoints", ["localhost:8000"]), ("key_env", "A_KEY_THAT_IS_NOT_SET")])
def test_a_judge_that_cannot_work_is_told_before_anything_is_done(name, value):
    config, before = settings_for(endpoints=["http://127.0.0.1:9/v1"]), judge_threads()
    setattr(config.judge, name, value)
    with pytest.raises(EndpointError, match=f"judge.{name}"):
        Services(config)
    assert judge_threads() == before


def test_each_turn_waits_once_and_says_whether_it_is_the_last(roll_out):
    with OpenAIServer(by_question(lambda *_: True)) as server, Services(settings_for(server)) as services:
        trajectory = Trajectory(task("t", [item("A")], [item("B")]), "g")
        for is_last in (False, True):
            trajectory.messages += [{"role": "user", "content": "q"}, {"role": "assistant", "content": "hi"}]
            before, steps = list(trajectory.verdicts), services.end_turn(trajectory)
            wait = next(steps)
            assert wait.is_last == is_last
            assert wait.future.result(PATIENCE) == [True] and trajectory.verdicts == before
            with pytest.raises(StopIteration) as stop:
                next(steps)
            assert stop.value.value is not is_last, "whether the next user turn comes"
    assert trajectory.verdicts == [[[[True]]], [[[True]]]]
