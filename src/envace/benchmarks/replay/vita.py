"""VitaBench's expected orders as a script for all three roles: agent, user and judge. It keeps no state.

The user's first message names its task to the agent, which then makes what the task expects: orders, bookings and
reservations that are new are created and paid, those that were there before are paid, changed or cancelled. The judge
reads from the windows what state the responses of the tools lead to, and finds every rubric met if and only if that is
the expected one; from window to window it hands this state on in its own justifications.

Only of delivery and instore; the expected states of the other domains need tools that are not scripted here.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from envace.benchmarks.replay.script import Answer, Script, ScriptError, silent
from envace.benchmarks.vita import LANGUAGES, tasks_file
from envace.types import ToolCall, UserError

SCRIPTED = ("delivery", "instore")
PLACES = ("orders", "books", "reservations")  # of the records in a task's world
STOP = Answer("###STOP###")
DONE = Answer("Done.")
INSTRUCTIONS = re.compile(r"<instructions>\n\s*(.*?)\s*\n\s*</instructions>", re.S)
RUBRICS = re.compile(r"<current_rubrics>\s*(.*?)\s*</current_rubrics>", re.S)
STATUS = re.compile(r"status[:=]([\w-]+)")
WINDOW = re.compile(r"<window_content>\s*(.*?)\s*</window_content>", re.S)
# kind -> name of its id, and the tools that pay and cancel it; a reservation costs nothing.
TOOLS = {
    "delivery": ("order_id", "pay_delivery_order", "cancel_delivery_order"),
    "instore": ("order_id", "pay_instore_order", "instore_cancel_order"),
    "book": ("book_id", "pay_instore_book", "instore_cancel_book"),
    "reservation": ("reservation_id", "", "instore_cancel_reservation"),
}
CREATED = re.compile(r"(?:Order\(order_id:|BookInfo\(book_id=|ReservationInfo\(reservation_id=)(\w+)")
CHANGED = re.compile(r"(pay|cancel)\w*\([a-z]+_id='(\w+)'\)|instore_(cancel)_\w+\([a-z]+_id='(\w+)'\)")


class Thing(NamedTuple):
    """An order, a booking or a reservation. items: (product, how many), sorted. customers: how many."""

    kind: str
    place: str
    items: tuple[tuple[str, int], ...]
    time: str
    customers: int


@dataclass(frozen=True)
class Gold:
    """before, expected: the records by id, as the task starts and as it shall end."""

    id: str
    instructions: str
    time: str
    user: str
    before: dict[str, dict[str, Any]]
    expected: dict[str, dict[str, Any]]


def oracle(home: Path, parts: Iterable[str]) -> Script:
    """For agent and user. Raises UserError at a part that is not scripted, and ScriptError at what fits no task."""
    golds = {gold.id: gold for part in parts for gold in read_golds(home, part)}

    def answer(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> Answer:
        if told := INSTRUCTIONS.search(messages[0]["content"]):
            if any(message["role"] == "assistant" for message in messages):
                return STOP  # the agent has answered
            return Answer(one(golds, lambda g: g.instructions == told[1]).id)
        return agent(messages, golds)

    return answer


def null(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> Answer:
    """An agent that does nothing, and a user who leaves after its answer."""
    if not INSTRUCTIONS.search(messages[0]["content"]):
        return silent(messages, tools)
    return STOP if any(message["role"] == "assistant" for message in messages) else Answer("Please help me.")


def judge(home: Path, parts: Iterable[str]) -> Script:
    """Raises as `oracle` does."""
    golds = {gold.id: gold for part in parts for gold in read_golds(home, part)}

    def answer(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> Answer:
        told, asked = messages[0]["content"], messages[-1]["content"]
        if not (rubrics := RUBRICS.search(asked)):
            raise ScriptError("no rubrics are there to be judged")
        return verdict(json.loads(rubrics[1]), asked, one(golds, lambda gold: gold.instructions in told))

    return answer


def one(golds: dict[str, Gold], fits: Callable[[Gold], bool]) -> Gold:
    """Tasks with the same instructions are not told apart."""
    fitting = [gold for gold in golds.values() if fits(gold)]
    if not fitting:
        raise ScriptError("no task fits what is asked")
    return max(fitting, key=lambda gold: len(gold.instructions))


def agent(messages: list[dict[str, Any]], golds: dict[str, Gold]) -> Answer:
    """The next call that the task wants; DONE when all were made."""
    named = next(message["content"] for message in messages if message["role"] == "user")
    if named not in golds:
        raise ScriptError(f"no task is called {named[:40]!r}")
    responses = [message["content"] for message in messages if message["role"] == "tool"]
    for call, pay in calls_of(golds[named]):
        if not responses:
            return Answer(calls=[call])
        response = responses.pop(0)
        created = CREATED.search(response)
        if pay and created and re.search(r"status[:=]unpaid", response):
            if not responses:
                return Answer(calls=[ToolCall(pay, {TOOLS[kind_of_payment(pay)][0]: created[1]})])
            responses.pop(0)
    return DONE


def kind_of_payment(tool: str) -> str:
    return next(kind for kind, (_, pay, _) in TOOLS.items() if pay == tool)


def calls_of(gold: Gold) -> Iterable[tuple[ToolCall, str]]:
    """(call, the tool that pays for what it creates, or "")."""
    for key, record in gold.expected.items():
        kind = thing_of(record).kind
        name, pay, cancel = TOOLS[kind]
        if key not in gold.before and record["status"] == "cancelled":
            continue  # made and undone again comes to nothing
        if key not in gold.before:
            paid = pay if record["status"] != "unpaid" else ""
            yield from ((call, paid) for call in creations(record, gold))
            continue
        before = gold.before[key]
        if record["status"] != before["status"]:
            if record["status"] == "cancelled":
                yield ToolCall(cancel, {name: key}), ""
            elif before["status"] == "unpaid" and pay:
                yield ToolCall(pay, {name: key}), ""
        elif kind == "reservation" and thing_of(record) != thing_of(before):
            changed = {"time": record["reservation_time"], "customer_count": record["customer_count"]}
            yield ToolCall("instore_modify_reservation", {name: key, **changed}), ""
        elif kind == "delivery" and record["note"] != before["note"]:
            yield ToolCall("modify_delivery_order", {name: key, "note": record["note"]}), ""


def creations(record: dict[str, Any], gold: Gold) -> Iterable[ToolCall]:
    """An order in a shop has one product each."""
    thing = thing_of(record)
    where = {"user_id": gold.user, "shop_id": thing.place}
    if thing.kind == "book":
        yield ToolCall("instore_book", {**where, "time": thing.time, "customer_count": thing.customers})
    elif thing.kind == "reservation":
        yield ToolCall("instore_reservation", {**where, "time": thing.time, "customer_count": thing.customers})
    elif thing.kind == "instore":
        for product, quantity in thing.items:
            arguments = {**where, "product_id": product, "quantity": quantity}
            yield ToolCall("create_instore_product_order", arguments)
    else:
        arguments = {
            "user_id": gold.user,
            "store_id": thing.place,
            "product_ids": [product["product_id"] for product in record["products"]],
            "product_cnts": [product["quantity"] for product in record["products"]],
            "address": record["location"]["address"],
            "dispatch_time": max((record.get("dispatch_time") or "").strip(), gold.time),
            "attributes": [product.get("attributes") or "" for product in record["products"]],
            "note": record.get("note") or "",
        }
        yield ToolCall("create_delivery_order", arguments)


def verdict(rubrics: list[dict[str, Any]], asked: str, gold: Gold) -> Answer:
    """State in the justification: id -> [thing, status], of what the windows so far have shown."""
    state = {key: [thing_of(record), record["status"]] for key, record in gold.before.items()}
    if rubrics[0]["justification"].startswith("{"):
        known = json.loads(rubrics[0]["justification"])
        state |= {key: [read_thing(thing), status] for key, (thing, status) in known.items()}
    follow(found(WINDOW, asked), state)
    said = {"justification": json.dumps(state), "meetExpectation": is_expected(gold, state)}
    return Answer(json.dumps([{"rubric_idx": rubric["rubric_idx"], **said} for rubric in rubrics]))


def found(pattern: re.Pattern[str], text: str) -> str:
    """What the pattern's group holds. Raises ScriptError."""
    match = pattern.search(text)
    if match is None:
        raise ScriptError(f"nothing like {pattern.pattern} in what the harness sent")
    return match[1]


def follow(window: str, state: dict[str, list[Any]]) -> None:
    """What the calls and responses of a window change."""
    changing: tuple[str, str] | None = None
    for message in re.split(r"\n(?=\[\d+\] (?:assistant|user|tool): )", window):
        head, _, text = message.partition(": ")
        if head.endswith("assistant"):
            change = CHANGED.search(text)
            changing = (change[1] or change[3], change[2] or change[4]) if change else None
        elif head.endswith("tool"):
            for line in text.splitlines():
                if created := CREATED.match(line):
                    state[created[1]] = [shown_thing(line), found(STATUS, line)]
            if changing and changing[1] in state and not text.startswith("Error"):
                state[changing[1]][1] = "paid" if changing[0] == "pay" else "cancelled"


def is_expected(gold: Gold, state: dict[str, list[Any]]) -> bool:
    """Whether what was there has its expected end, and what is new is there as often as it is expected."""
    wanted: Counter[tuple[Thing, bool]] = Counter()
    there: Counter[tuple[Thing, bool]] = Counter()
    for key, record in gold.expected.items():
        if key in gold.before:
            is_cancelled = record["status"] == "cancelled"
            if is_cancelled != (state[key][1] == "cancelled"):
                return False
            if not is_cancelled and thing_of(record) != state[key][0]:
                return False
        elif record["status"] != "cancelled":
            is_paid = record["status"] != "unpaid"
            wanted.update((single, is_paid) for single in singles(thing_of(record)))
    for key, (thing, status) in state.items():
        if key not in gold.before and status != "cancelled":
            there.update((single, status != "unpaid") for single in singles(thing))
    return wanted == there


def singles(thing: Thing) -> list[Thing]:
    return [thing._replace(items=(item,)) for item in thing.items] if thing.kind == "instore" else [thing]


def read_golds(home: Path, part: str) -> list[Gold]:
    """In every language that is there: their tasks have the same ids. Raises UserError if there is none."""
    if part not in SCRIPTED:
        raise UserError(f"vita: part {part!r} is not scripted; there are {' and '.join(SCRIPTED)}")
    files = {language: tasks_file(home, part, language) for language in LANGUAGES}
    if not (files := {language: path for language, path in files.items() if path.exists()}):
        raise UserError(f"VitaBench's {part} has no data in {home}")
    return [
        read_gold(task, language)
        for language, path in files.items()
        for task in json.loads(path.read_text(encoding="utf-8"))
    ]


def read_gold(task: dict[str, Any], language: str) -> Gold:
    world, states = task["environment"], task["evaluation_criteria"]["expected_states"]
    before = {key: record for name in PLACES for key, record in (world.get(name) or {}).items()}
    # Later states say the same again, or what became of it.
    expected = {key_of(record): record for state in states for record in flat(state["required_orders"])}
    name = f"{task['id']} {language}"
    return Gold(name, task["instructions"].strip(), world["time"], world["user_id"], before, expected)


def read_thing(fields: list[Any]) -> Thing:
    """As JSON has it."""
    kind, place, items, time, count = fields
    return Thing(kind, place, tuple((product, quantity) for product, quantity in items), time, count)


def flat(records: list[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    """Some orders of the data stand among the products of another one."""
    for record in records:
        products = record.get("products", [])
        yield record | {"products": [product for product in products if "order_id" not in product]}
        yield from flat([product for product in products if "order_id" in product])


def key_of(record: dict[str, Any]) -> str:
    return next(record[name] for name in ("order_id", "book_id", "reservation_id") if name in record)


def thing_of(record: dict[str, Any]) -> Thing:
    if "order_id" in record:
        items = sorted((product["product_id"], product["quantity"]) for product in record["products"])
        return Thing(record["order_type"], record["store_id"], tuple(items), "", 0)
    # Some records mix the names of the two.
    kind = "book" if "book_time" in record else "reservation"
    return Thing(kind, record["shop_id"], (), record[f"{kind}_time"], record["customer_count"])


def shown_thing(line: str) -> Thing:
    """As a tool shows it."""

    def value(name: str) -> str:
        found = re.search(rf"\b{name}[:=]([^,)]+)", line)
        return found[1] if found else ""

    if line.startswith("Order("):
        products, quantities = re.findall(r"product_id=(\w+)", line), re.findall(r"quantity=(\d+)", line)
        items = sorted(zip(products, map(int, quantities), strict=True))
        place = value("store_id") if value("order_type") == "delivery" else value("shop_id")
        return Thing(value("order_type"), place, tuple(items), "", 0)
    kind = "book" if line.startswith("BookInfo(") else "reservation"
    return Thing(kind, value("shop_id"), (), value(f"{kind}_time"), int(value("customer_count")))
