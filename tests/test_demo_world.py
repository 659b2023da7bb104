"""The embedded world: a desk that really executes, tasks that can be solved, clerks that err, a model that is built."""

import copy
import hashlib
import random
import re
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from envace.chat import THINK_CLOSE, THINK_OPEN, TOOL_TOKENS, TURN_TOKENS, ChatFormat, parse_action
from envace.config import load_config
from envace.demo import demonstrations
from envace.demo.agents import call_at_random, do_nothing
from envace.demo.demonstrations import HABITS, make_demonstrations
from envace.demo.desk import DAYS, TIERS, TOOLS, CallCounter, Desk
from envace.demo.model import build_model
from envace.demo.source import DemoSource
from envace.demo.tasks import TRAIN_KINDS, UNSEEN_KINDS, make_task, make_tasks
from envace.environments import Real
from envace.episodes import rollout
from envace.evaluation import success
from envace.rewards import score
from envace.settings import Config
from envace.types import Completion, Limits, ToolCall

ROOT = Path(__file__).parent.parent
LIMITS = Limits(max_rounds=6, max_parallel_calls=4, max_context_tokens=2048, max_new_tokens=512)
KINDS = [(kind, held_out) for held_out, kinds in ((False, TRAIN_KINDS), (True, UNSEEN_KINDS)) for kind in kinds]
KINDS += [(kind, True) for kind in TRAIN_KINDS]


# The desk


def world():
    return {
        "customer": "K10",
        "orders": {
            "A10": {"customer_id": "K10", "status": "processing", "total": 84},
            "B20": {"customer_id": "K10", "status": "shipped", "total": 30},
            "C30": {"customer_id": "K10", "status": "delivered", "total": 50},
            "D40": {"customer_id": "L99", "status": "processing", "total": 20},
        },
        "customers": {"K10": {"tier": "gold", "last_order": "C30"}},
    }


def open_desk():
    return Desk(world(), CallCounter(), "test")


def run(desk, name, **arguments):
    return desk.execute(ToolCall(name, arguments))


def test_reads_return_what_the_world_holds_and_change_nothing():
    desk = open_desk()
    before = copy.deepcopy(desk.state)
    assert run(desk, "get_order", order_id="A10") == {"order_id": "A10", "status": "processing", "total": 84}
    assert run(desk, "get_customer", customer_id="K10") == {"customer_id": "K10", "tier": "gold", "last_order": "C30"}
    assert run(desk, "get_order", order_id="D40")["status"] == "processing"
    assert desk.state == before


def test_writes_change_the_state_that_later_reads_see():
    desk = open_desk()
    assert run(desk, "cancel_order", order_id="A10") == {"order_id": "A10", "status": "cancelled"}
    assert run(desk, "get_order", order_id="A10")["status"] == "cancelled"
    assert run(desk, "refund_order", order_id="C30", amount=20) == {"order_id": "C30", "refunded": 20}
    assert desk.state["orders"]["C30"]["refunded"] == 20
    ticket = {"order_id": "B20", "topic": "damage"}
    assert run(desk, "open_ticket", **ticket) == {**ticket, "opened": True}
    run(desk, "open_ticket", **ticket)
    assert desk.state["tickets"] == [ticket]


def test_an_order_moves_to_a_day():
    desk = open_desk()
    assert run(desk, "move_order", order_id="A10", day=DAYS[2]) == {"order_id": "A10", "day": DAYS[2]}
    assert desk.state["orders"]["A10"]["day"] == DAYS[2]


def test_the_world_passed_in_is_left_alone():
    given = world()
    desks = [Desk(given, CallCounter(), "test") for _ in range(2)]
    run(desks[0], "cancel_order", order_id="A10")
    run(desks[0], "open_ticket", order_id="A10", topic="other")
    assert given == world()
    assert run(desks[1], "get_order", order_id="A10")["status"] == "processing"


def test_an_unknown_tool_is_refused():
    for name in ("delete_order", "", "execute", "_cancel_order", "__init__", "GET_ORDER"):
        assert run(open_desk(), name, order_id="A10") == {"error": "unknown_tool"}


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("get_order", {}),
        ("get_order", {"id": "A10"}),
        ("get_order", {"order_id": "A10", "verbose": True}),
        ("get_order", {"order_id": 10}),
        ("refund_order", {"order_id": "C30"}),
        ("refund_order", {"order_id": "C30", "amount": "50"}),
        ("refund_order", {"order_id": "C30", "amount": 1.5}),
        ("refund_order", {"order_id": "C30", "amount": True}),
        ("refund_order", {"order_id": "C30", "amount": 0}),
        ("refund_order", {"order_id": "C30", "amount": -50}),
        ("move_order", {"order_id": "A10", "day": 3}),
        ("move_order", {"order_id": "A10", "day": "Someday"}),
        ("open_ticket", {"order_id": "A10", "topic": "weather"}),
        ("open_ticket", {"order_id": "A10", "topic": None}),
    ],
)
def test_arguments_outside_the_schema_are_invalid(name, arguments):
    desk = open_desk()
    before = copy.deepcopy(desk.state)
    assert run(desk, name, **arguments) == {"error": "invalid_argument"}
    assert desk.state == before


def test_an_id_that_does_not_exist_is_unknown():
    desk = open_desk()
    assert run(desk, "get_order", order_id="Z99") == {"error": "unknown_id"}
    assert run(desk, "get_customer", customer_id="A10") == {"error": "unknown_id"}
    assert run(desk, "cancel_order", order_id="a10") == {"error": "unknown_id"}


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("cancel_order", {}),
        ("refund_order", {"amount": 1}),
        ("move_order", {"day": DAYS[0]}),
        ("open_ticket", {"topic": "other"}),
    ],
)
def test_nobody_changes_the_order_of_somebody_else(name, more):
    desk = open_desk()
    assert run(desk, name, order_id="D40", **more) == {"error": "not_permitted"}
    assert desk.state == world() | {"tickets": []}


def test_no_more_than_the_total_is_ever_refunded():
    desk = open_desk()
    assert run(desk, "refund_order", order_id="C30", amount=51) == {"error": "not_permitted"}
    assert run(desk, "refund_order", order_id="C30", amount=30)["refunded"] == 30
    assert run(desk, "refund_order", order_id="C30", amount=21) == {"error": "not_permitted"}
    assert run(desk, "refund_order", order_id="C30", amount=20)["refunded"] == 20
    assert run(desk, "refund_order", order_id="C30", amount=1) == {"error": "not_permitted"}


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("cancel_order", {"order_id": "B20"}),
        ("cancel_order", {"order_id": "C30"}),
        ("move_order", {"order_id": "B20", "day": DAYS[0]}),
        ("refund_order", {"order_id": "A10", "amount": 84}),
        ("refund_order", {"order_id": "B20", "amount": 30}),
    ],
)
def test_a_change_the_status_does_not_allow_is_forbidden(name, arguments):
    desk = open_desk()
    assert run(desk, name, **arguments) == {"error": "forbidden_state"}
    assert desk.state == world() | {"tickets": []}


def test_a_cancelled_order_cannot_be_cancelled_or_moved():
    desk = open_desk()
    run(desk, "cancel_order", order_id="A10")
    assert run(desk, "cancel_order", order_id="A10") == {"error": "forbidden_state"}
    assert run(desk, "move_order", order_id="A10", day=DAYS[0]) == {"error": "forbidden_state"}


HOSTILE = [None, True, -1, 10**400, 1e308, "", "\x00", "A10\n", "Ä" * 10_000, [], ["A10"], {}, {"$ref": "#"}]
HOSTILE += [{"a": {"b": [{"c": None}]}}, [[[[]]]]]


@pytest.mark.parametrize("name", [tool["function"]["name"] for tool in TOOLS])
def test_hostile_arguments_are_answered_with_an_error(name):
    desk = open_desk()
    before = copy.deepcopy(desk.state)
    properties = next(t["function"]["parameters"]["properties"] for t in TOOLS if t["function"]["name"] == name)
    good = {"order_id": "C30", "customer_id": "K10", "amount": 10, "day": DAYS[0], "topic": "other"}
    for value in HOSTILE:
        for field in properties:
            response = run(desk, name, **{key: good[key] for key in properties} | {field: value})
            assert response["error"] in ("invalid_argument", "unknown_id", "not_permitted", "forbidden_state")
        assert desk.execute(ToolCall(name, value)) == {"error": "invalid_argument"}
    assert desk.state == before


def test_every_call_is_counted_under_its_purpose():
    counter = CallCounter()
    training, evaluation = (Desk(world(), counter, purpose) for purpose in ("training", "evaluation"))
    assert counter.calls["training"] == 0
    run(training, "get_order", order_id="A10")
    run(training, "no such tool")
    run(evaluation, "get_order", order_id={})
    assert counter.calls == {"training": 2, "evaluation": 1}


# Tasks


def test_tasks_are_seeded_and_a_longer_list_starts_with_the_shorter():
    for held_out in (False, True):
        tasks = make_tasks(60, 3, held_out=held_out)
        assert make_tasks(60, 3, held_out=held_out) == tasks
        assert make_tasks(20, 3, held_out=held_out) == tasks[:20]
        assert make_tasks(60, 4, held_out=held_out) != tasks
        assert len({task.id for task in tasks}) == 60


def ids_and_amounts(tasks):
    """What tasks are told apart by: the ids of orders and customers, named or found in the world, and the amounts."""
    found = defaultdict(set)
    for task in tasks:
        named = [read.arguments.values() for turn in task.goal.turns for read in turn.reads]
        found["ids"] |= {value for values in named for value in values if isinstance(value, str)}
        found["ids"] |= {*task.world["orders"], *task.world["customers"]}
        found["ids"] |= {customer["last_order"] for customer in task.world["customers"].values()}
        found["amounts"] |= {order["total"] for order in task.world["orders"].values()}
    return found


@pytest.fixture(scope="module")
def many_tasks():
    """(training, held-out)"""
    return make_tasks(2000, 0, held_out=False), make_tasks(2000, 0, held_out=True)


def test_held_out_tasks_share_no_id_and_no_amount_with_training(many_tasks):
    seen, unseen = map(ids_and_amounts, many_tasks)
    unseen_elsewhere = ids_and_amounts(make_tasks(300, 7, held_out=True))
    assert seen.keys() == unseen.keys() == {"ids", "amounts"}
    for what in seen:
        assert len(seen[what]) >= 6 and len(unseen[what]) >= 3
        assert not seen[what] & unseen[what]
        assert not seen[what] & unseen_elsewhere[what]


def test_every_character_of_a_held_out_id_occurs_in_training(many_tasks):
    seen, unseen = (ids_and_amounts(tasks)["ids"] for tasks in many_tasks)
    assert {letter for id in unseen for letter in id} <= {letter for id in seen for letter in id}


def test_some_kinds_are_only_held_out_and_all_others_are_in_both(many_tasks):
    seen, unseen = ({task.kind for task in tasks} for tasks in many_tasks)
    assert seen == set(TRAIN_KINDS)
    assert len(unseen - seen) >= 2
    assert seen < unseen


def test_some_tasks_have_several_user_turns_and_some_need_no_change():
    tasks = make_tasks(300, 0, held_out=True)
    oracles = [Recording(task) for task in tasks[:100]]
    assert any(len(task.user_turns) > 1 for task in tasks)
    assert any(not oracle.writes() for oracle in oracles) and any(oracle.writes() for oracle in oracles)


class Recording:
    """A recorded dialogue, and how its outputs score on the real desk. Without one, a flawless clerk works."""

    def __init__(self, task, messages=None):
        clerk = demonstrations.Clerk(task, random.Random(0), CallCounter(), habit_share=0.0, slip_share=0.0)
        self.task, self.desk, self.messages = task, clerk.desk, messages or clerk.work()
        self.outputs = [m["content"] for m in self.messages if m["role"] == "assistant"]

    def writes(self):
        return [c for text in self.outputs for c in parse_action(text).calls if not c.name.startswith("get_")]

    def replay(self, chat):
        """The same outputs through an episode in the real environment."""
        texts = iter(self.outputs)

        def generate(requests):
            ids = [chat.output(next(texts)) for _ in requests]
            return [Completion(i, [0.0] * len(i), "stop") for i in ids]

        source = DemoSource(Config())
        real = Real(source.executable(self.task, "test"))
        [trajectory] = rollout([self.task], generate, lambda task: real, chat, LIMITS)
        trajectory.reward, trajectory.reward_parts = score(trajectory)
        return trajectory, real.executable


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The embedded model as the demo builds it."""
    return build(tmp_path_factory.mktemp("model") / "base", seed=0, demonstrations=512)


def build(path, seed, demonstrations=32):
    recorded = make_demonstrations(demonstrations, 0, CallCounter())
    build_model(path, [(task.tools, messages) for task, messages in recorded], seed=seed)
    return path


@pytest.fixture(scope="module")
def chat(base):
    return ChatFormat(AutoTokenizer.from_pretrained(base))


@pytest.mark.parametrize(("kind", "held_out"), KINDS)
def test_an_oracle_solves_every_kind_in_the_real_world(kind, held_out, chat):
    rng = random.Random(kind)
    for i in range(8):
        recording = Recording(make_task(kind, f"{kind}-{i}", rng, held_out=held_out))
        trajectory, desk = recording.replay(chat)
        assert trajectory.reward == 1.0, (recording.messages, trajectory.reward_parts)
        assert desk.state == recording.desk.state
        assert DemoSource(Config()).reaches_right_state(trajectory)


def test_the_right_state_is_reached_by_calls_and_not_by_claims(chat):
    source = DemoSource(Config())
    task = next(task for task in make_tasks(100, 0, held_out=False) if Recording(task).writes())
    trajectory, _ = Recording(task).replay(chat)
    assert source.reaches_right_state(trajectory)
    trajectory.exchanges = [e for e in trajectory.exchanges if e.call.name.startswith("get_")]
    assert not source.reaches_right_state(trajectory)


def real_success(agent, tasks, chat):
    source = DemoSource(Config())
    trajectories = rollout(tasks, agent, lambda task: Real(source.executable(task, "test")), chat, LIMITS)
    for trajectory in trajectories:
        trajectory.reward, _ = score(trajectory)
    return success(trajectories)


def test_doing_nothing_and_calling_at_random_hardly_ever_succeed(chat):
    tasks = make_tasks(300, 0, held_out=True)
    assert real_success(do_nothing(chat), tasks, chat) < 0.1
    assert real_success(call_at_random(chat, 0), tasks, chat) < 0.05


def test_prompts_do_not_tell_what_only_a_read_returns(chat):
    for task in make_tasks(300, 0, held_out=False) + make_tasks(300, 0, held_out=True):
        messages = [{"role": "system", "content": task.system}, {"role": "user", "content": "\n".join(task.user_turns)}]
        prompt = chat.tokenizer.decode(chat.prompt(messages, task.tools))
        for order in task.world["orders"].values():
            assert not re.search(rf"\b{order['total']}\b", prompt)
            assert not re.search(rf"\b{order['status']}\b", " ".join(task.user_turns))
        for customer in task.world["customers"].values():
            assert customer["last_order"] in task.world["orders"] or customer["last_order"] not in prompt
        assert not any(re.search(rf"\b{tier}\b", prompt) for tier in TIERS)


def test_the_last_order_of_a_customer_is_never_named(chat):
    for kind in ("cancel_last", "status_of_last"):
        for task in (make_task(kind, "t", random.Random(i), held_out=True) for i in range(50)):
            [customer] = task.world["customers"].values()
            assert customer["last_order"] in task.world["orders"]
            assert customer["last_order"] not in " ".join(task.user_turns)


# Demonstrations


def test_demonstrations_are_the_same_for_the_same_seed():
    recorded = make_demonstrations(40, 5, CallCounter())
    assert make_demonstrations(40, 5, CallCounter()) == recorded
    assert make_demonstrations(40, 6, CallCounter()) != recorded


def test_demonstrations_are_recorded_on_the_desk_and_of_training_tasks_only():
    counter = CallCounter()
    recorded = make_demonstrations(40, 0, counter)
    responses = sum(m["role"] == "tool" for _, messages in recorded for m in messages)
    assert set(counter.calls) == {"demonstrations"}
    assert responses >= counter.calls["demonstrations"] > 40
    assert [task for task, _ in recorded] == make_tasks(40, 0, held_out=False)


@pytest.mark.slow
def test_clerks_fail_by_habit_where_a_change_is_due_and_rarely_elsewhere(chat):
    recordings = [Recording(*recorded) for recorded in make_demonstrations(800, 1, CallCounter())]
    change_is_due = [bool(Recording(recording.task).writes()) for recording in recordings]
    rewards = defaultdict(list)
    for recording, due in zip(recordings, change_is_due, strict=True):
        trajectory, _ = recording.replay(chat)
        rewards[recording.task.kind, due].append(trajectory.reward)
    habitual = {kind: sum(rewards[kind, True]) / len(rewards[kind, True]) for kind in HABITS}
    other = [reward for (kind, _), values in rewards.items() if kind not in HABITS for reward in values]
    assert all(0 < share < 0.5 for share in habitual.values()), habitual
    assert 0.85 < sum(other) / len(other) < 1


def test_a_slip_is_recorded_as_it_happened(monkeypatch):
    monkeypatch.setattr(demonstrations, "SLIP_SHARE", 0.5)
    recordings = [Recording(*recorded) for recorded in make_demonstrations(60, 0, CallCounter())]
    errors = {m["content"] for r in recordings for m in r.messages if m["role"] == "tool" and "error" in m["content"]}
    assert any("malformed_call" in error for error in errors)
    assert any("unknown_id" in error for error in errors)


# The model


def hashes(folder):
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}


def test_the_same_seed_builds_the_same_files(tmp_path):
    first, again, other = (hashes(build(tmp_path / str(i), seed)) for i, seed in enumerate((0, 0, 1)))
    assert first == again
    assert {name for name in first if first[name] != other[name]} == {"model.safetensors"}


def test_building_leaves_the_random_state_alone(tmp_path):
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    build(tmp_path / "model", seed=3)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_the_folder_loads_like_any_other_and_survives_a_round_trip(base, tmp_path):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(base), AutoTokenizer.from_pretrained(base)
    assert 1e6 < model.num_parameters() < 5e6
    assert model.config.model_type == "qwen3"
    assert model.get_input_embeddings().num_embeddings == len(tokenizer)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    reloaded, retokenizer = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), reloaded.parameters(), strict=True))
    text = "<|im_start|>user\nWhere is order A10 ?<|im_end|>"
    assert retokenizer(text).input_ids == tokenizer(text).input_ids
    assert retokenizer.chat_template == tokenizer.chat_template
    assert (retokenizer.eos_token, retokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")


@pytest.mark.parametrize("token", ["<|endoftext|>", *TURN_TOKENS, *TOOL_TOKENS, THINK_OPEN, THINK_CLOSE])
def test_every_special_token_is_a_single_one(chat, token):
    ids = chat.tokenizer(f"a{token}1").input_ids
    assert len(ids) == 3 and ids[1] == chat.tokenizer.convert_tokens_to_ids(token)


def test_any_text_comes_back_from_the_tokenizer_byte_for_byte(chat):
    rng = random.Random(0)
    alphabet = list(map(chr, [*range(0x250), *range(0x4E00, 0x4E40), 0x1F600, 0x200D, 0xFFFD, 0x10FFFF]))
    texts = ["", "  two  spaces ", "\r\n\t\x00\x7f", "Straße\u0301 \u202e", "A10,B 20C", '{"a": "\\u00e9"}']
    texts += ["".join(rng.choices(alphabet, k=40)) for _ in range(50)]
    for text in texts:
        ids = chat.tokenizer(text, add_special_tokens=False).input_ids
        assert chat.tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


def test_each_digit_and_the_letter_of_an_id_are_tokens_of_their_own(chat):
    assert chat.tokenizer.tokenize("A10 B99")[:3] == ["A", "1", "0"]
    assert chat.tokenizer.tokenize("amount 84")[-2:] == ["8", "4"]


def test_a_conversation_of_the_demo_fits_its_context(chat):
    config = load_config(str(ROOT / "configs" / "demo.yaml"), [])
    for task, messages in make_demonstrations(100, 0, CallCounter()):
        rendered = chat.tokenizer.apply_chat_template(messages, tools=task.tools, tokenize=False)
        assert len(chat.encode(rendered)) < config.rollout.max_context_tokens
        written = [m["content"] for m in messages if m["role"] in ("assistant", "tool")]
        assert all(len(chat.encode(text)) < config.rollout.max_new_tokens for text in written)
