"""Tasks of the service desk from seeded templates.

A kind is one function: rng -> Draft. It fixes what the user says, the world behind it, and what is right. The user's
words hint at the state of an order, so a rehearsed response can be plausible without the data base.

Held-out tasks use other ids and amounts than training tasks, and the kinds of UNSEEN_KINDS besides.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from envace.demo.desk import DAYS, READ_TOOLS, STATUSES, SYSTEM, TIERS, TOOLS
from envace.rewards import Branch, Goal, Says, Seen, TurnGoal
from envace.types import Task, ToolCall

HINTS = {
    "processing": ("I ordered it an hour ago.", "I just ordered it."),
    "shipped": ("It is on its way.", "It was sent off."),
    "delivered": ("It came yesterday.", "It arrived today."),
}
OUTCOMES = ("cancelled", "refunded", "moved", "cannot")


class Values:
    """Draws ids, amounts and days. Training and held-out draws never share an id or an amount."""

    def __init__(self, rng: random.Random, *, held_out: bool):
        self.rng = rng
        self.held_out = held_out

    def _draw(self, firsts: str, seconds: str) -> str:
        # One pair in seven is held out, on a diagonal: every character occurs in training, but not every pair.
        pairs = [(i, k) for i in range(len(firsts)) for k in range(len(seconds))]
        i, k = self.rng.choice([(i, k) for i, k in pairs if ((i + k) % 7 == 3) == self.held_out])
        return firsts[i] + seconds[k]

    def order_id(self) -> str:
        return self._draw("ABCDEFGHJKLMNPQR", "0123456789")

    def customer_id(self) -> str:
        return self._draw("STUVWXYZ", "0123456789")

    def total(self) -> int:
        # Whole tens; every third one is held out.
        return self.rng.choice([n for n in range(10, 100, 10) if (n % 30 == 20) == self.held_out])

    def day(self) -> str:
        return self.choice(DAYS)

    def choice(self, options: Any) -> Any:
        return self.rng.choice(list(options))

    def two_orders(self) -> tuple[str, str]:
        first, second = self.order_id(), self.order_id()
        return (first, second) if first != second else self.two_orders()


@dataclass
class Draft:
    """A task in the making. `orders`: id -> (status, owned by the customer)."""

    turns: list[str]
    goals: list[TurnGoal]
    orders: dict[str, tuple[str, bool]] = field(default_factory=dict)
    last_order: str | None = None
    customer: str | None = None


def get_order(order_id: str | Seen) -> ToolCall:
    return ToolCall("get_order", {"order_id": order_id})


def state_status(order_id: str | Seen) -> TurnGoal:
    """Look up, then say the status that was seen."""
    read = get_order(order_id)
    return TurnGoal((Branch(says=(Says(Seen(read, "status"), STATUSES, about=order_id),)),), (read,))


def change_if(order_id: str | Seen, allowed: str, write: ToolCall, outcome: str) -> TurnGoal:
    """Look up; if the status seen is `allowed`, write and say `outcome`; otherwise write nothing and say cannot."""
    read = get_order(order_id)
    status = Seen(read, "status")
    others = tuple(s for s in STATUSES if s != allowed)
    return TurnGoal(
        (
            Branch(((status, (allowed,)),), (write,), (Says(outcome, OUTCOMES),)),
            Branch(((status, others),), (), (Says("cannot", OUTCOMES),)),
        ),
        (read,),
    )


def cancel(order_id: str | Seen) -> TurnGoal:
    return change_if(order_id, "processing", ToolCall("cancel_order", {"order_id": order_id}), "cancelled")


def refund(order_id: str) -> TurnGoal:
    write = ToolCall("refund_order", {"order_id": order_id, "amount": Seen(get_order(order_id), "total")})
    return change_if(order_id, "delivered", write, "refunded")


def move(order_id: str, day: str) -> TurnGoal:
    return change_if(order_id, "processing", ToolCall("move_order", {"order_id": order_id, "day": day}), "moved")


def ticket(order_id: str, topic: str) -> TurnGoal:
    call = ToolCall("open_ticket", {"order_id": order_id, "topic": topic})
    return TurnGoal((Branch(writes=(call,), says=(Says("ticket"),)),), (get_order(order_id),))


def refuse() -> TurnGoal:
    return TurnGoal((Branch(says=(Says("cannot", OUTCOMES),)),))


def _status(v: Values) -> Draft:
    order = v.order_id()
    text = v.choice([f"Where is order {order} ?", f"What is the status of order {order} ?"])
    return Draft([text], [state_status(order)], {order: (v.choice(STATUSES), True)})


def _status_of_two(v: Values) -> Draft:
    first, second = v.two_orders()
    reads = (get_order(first), get_order(second))
    says = tuple(Says(Seen(read, "status"), STATUSES, about=read.arguments["order_id"]) for read in reads)
    goal = TurnGoal((Branch(says=says),), reads)
    orders = {order: (v.choice(STATUSES), True) for order in (first, second)}
    return Draft([f"Where are orders {first} and {second} ?"], [goal], orders)


def _status_twice(v: Values) -> Draft:
    first, second = v.two_orders()
    orders = {order: (v.choice(STATUSES), True) for order in (first, second)}
    turns = [f"Where is order {first} ?", f"Where is order {second} ?"]
    return Draft(turns, [state_status(first), state_status(second)], orders)


def _mistyped(v: Values) -> Draft:
    order = v.order_id()
    read = get_order(order)
    goal = TurnGoal((Branch(((Seen(read, "error"), ("unknown_id",)),), (), (Says("unknown"),)),), (read,))
    return Draft([f"Where is order {order} ? I may have mistyped it."], [goal])


def _tier(v: Values) -> Draft:
    customer = v.customer_id()
    read = ToolCall("get_customer", {"customer_id": customer})
    goal = TurnGoal((Branch(says=(Says(Seen(read, "tier"), TIERS),)),), (read,))
    return Draft([f"I am customer {customer} . What is my tier?"], [goal], customer=customer)


def _cancel(v: Values) -> Draft:
    order, status = v.order_id(), v.choice(STATUSES[:2])
    ask = v.choice([f"Cancel order {order} .", f"I do not want order {order} any more."])
    return Draft([f"{ask} {v.choice(HINTS[status])}"], [cancel(order)], {order: (status, True)})


def _refund(v: Values) -> Draft:
    order, status = v.order_id(), v.choice(["delivered", "delivered", "shipped"])
    ask = v.choice([f"I want my money back for order {order} .", f"Refund order {order} ."])
    return Draft([f"{ask} {v.choice(HINTS[status])}"], [refund(order)], {order: (status, True)})


def _move(v: Values) -> Draft:
    order, day, status = v.order_id(), v.day(), v.choice(["processing", "processing", "shipped"])
    ask = v.choice([f"Bring order {order} on {day} .", f"Move order {order} to {day} ."])
    return Draft([f"{ask} {v.choice(HINTS[status])}"], [move(order, day)], {order: (status, True)})


def _broken(v: Values) -> Draft:
    order = v.order_id()
    text = v.choice([f"Order {order} arrived broken.", f"The box of order {order} is damaged."])
    return Draft([text], [ticket(order, "damage")], {order: ("delivered", True)})


def _late(v: Values) -> Draft:
    order = v.order_id()
    text = v.choice([f"Order {order} is late.", f"I still wait for order {order} ."])
    return Draft([text], [ticket(order, "delivery")], {order: ("shipped", True)})


def _neighbour(v: Values) -> Draft:
    order = v.order_id()
    text = v.choice(["Cancel order {} . It belongs to my neighbour.", "My neighbour has order {} . Cancel it."])
    return Draft([text.format(order)], [refuse()], {order: (v.choice(STATUSES), False)})


def _cancel_last(v: Values) -> Draft:
    customer, order, status = v.customer_id(), v.order_id(), v.choice(STATUSES[:2])
    read = ToolCall("get_customer", {"customer_id": customer})
    text = f"I am customer {customer} . Cancel my last order. {v.choice(HINTS[status])}"
    return Draft([text], [cancel(Seen(read, "last_order"))], {order: (status, True)}, order, customer)


def _status_then_cancel(v: Values) -> Draft:
    order, status = v.order_id(), v.choice(STATUSES[:2])
    turns = [f"Where is order {order} ? {v.choice(HINTS[status])}", "Then cancel it."]
    return Draft(turns, [state_status(order), cancel(order)], {order: (status, True)})


def _status_then_refund(v: Values) -> Draft:
    order, status = v.order_id(), v.choice(STATUSES[1:])
    turns = [f"Where is order {order} ? {v.choice(HINTS[status])}", "Then refund it."]
    return Draft(turns, [state_status(order), refund(order)], {order: (status, True)})


def _status_then_move(v: Values) -> Draft:
    order, day = v.order_id(), v.day()
    turns = [f"Where is order {order} ? {v.choice(HINTS['processing'])}", f"Then move it to {day} ."]
    return Draft(turns, [state_status(order), move(order, day)], {order: ("processing", True)})


def _status_of_last(v: Values) -> Draft:
    customer, order = v.customer_id(), v.order_id()
    read = ToolCall("get_customer", {"customer_id": customer})
    text = f"I am customer {customer} . Where is my last order ?"
    return Draft([text], [state_status(Seen(read, "last_order"))], {order: (v.choice(STATUSES), True)}, order, customer)


# kind -> (function, weight). The kinds whose demonstrations are usually wrong stand in demonstrations.HABITS.
TRAIN_KINDS = {
    "status": (_status, 1.0),
    "status_of_two": (_status_of_two, 1.0),
    "status_twice": (_status_twice, 0.75),
    "mistyped": (_mistyped, 0.5),
    "tier": (_tier, 1.0),
    "cancel": (_cancel, 2.0),
    "refund": (_refund, 2.0),
    "move": (_move, 2.0),
    "broken": (_broken, 1.5),
    "late": (_late, 0.75),
    "neighbour": (_neighbour, 0.5),
    "cancel_last": (_cancel_last, 2.0),
    "status_then_cancel": (_status_then_cancel, 1.0),
    "status_then_refund": (_status_then_refund, 1.0),
}
UNSEEN_KINDS = {"status_then_move": (_status_then_move, 0.5), "status_of_last": (_status_of_last, 0.5)}


def make_tasks(n: int, seed: int, *, held_out: bool) -> list[Task]:
    """`n` tasks. The same (n, seed, held_out) gives the same tasks; the first of a longer list are the same too."""
    kinds = {**TRAIN_KINDS, **UNSEEN_KINDS} if held_out else TRAIN_KINDS
    split = "held-out" if held_out else "train"
    rng = random.Random(f"{split}-{seed}")
    weights = [weight for _, weight in kinds.values()]
    return [
        make_task(rng.choices(list(kinds), weights)[0], f"{split}-{seed}-{i}", rng, held_out=held_out) for i in range(n)
    ]


def make_task(kind: str, task_id: str, rng: random.Random, *, held_out: bool) -> Task:
    values = Values(rng, held_out=held_out)
    function, _ = {**TRAIN_KINDS, **UNSEEN_KINDS}[kind]
    draft: Draft = function(values)
    return Task(
        id=task_id,
        system=SYSTEM,
        tools=TOOLS,
        user_turns=draft.turns,
        kind=kind,
        goal=Goal(tuple(draft.goals), READ_TOOLS),
        world=_world(draft, values),
    )


def _world(draft: Draft, v: Values) -> dict[str, Any]:
    customer = draft.customer or v.customer_id()
    orders = {
        order_id: {"customer_id": customer if own else "other", "status": status, "total": v.total()}
        for order_id, (status, own) in draft.orders.items()
    }
    last = draft.last_order or v.order_id()
    customers = {customer: {"tier": v.choice(TIERS), "last_order": last}}
    return {"customer": customer, "orders": orders, "customers": customers}
