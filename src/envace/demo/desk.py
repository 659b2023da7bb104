"""The service desk: six tools over orders, customers and tickets, really executed on a state in memory."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

from jsonschema import Draft202012Validator

from envace.types import ToolCall

STATUSES = ("processing", "shipped", "delivered")
TIERS = ("basic", "silver", "gold")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday")
TOPICS = ("damage", "delivery", "other")

SYSTEM = (
    "Read an order before you change it. Cancel or move it only while it is processing. "
    "Refund it only when delivered. Never change the order of another person."
)

_ORDER_ID = {"order_id": {"type": "string"}}


def _tool(name: str, description: str, properties: dict[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = [
    _tool("get_order", "Read an order.", _ORDER_ID),
    _tool("get_customer", "Read a customer.", {"customer_id": {"type": "string"}}),
    _tool("cancel_order", "Cancel an order.", _ORDER_ID),
    _tool("refund_order", "Refund an order.", {**_ORDER_ID, "amount": {"type": "integer"}}),
    _tool("move_order", "Move an order.", {**_ORDER_ID, "day": {"type": "string"}}),
    _tool("open_ticket", "Open a ticket.", {**_ORDER_ID, "topic": {"type": "string", "enum": list(TOPICS)}}),
]
READ_TOOLS = frozenset({"get_order", "get_customer"})
_VALIDATORS = {
    t["function"]["name"]: Draft202012Validator(t["function"]["parameters"] | {"additionalProperties": False})
    for t in TOOLS
}


class CallCounter:
    """Calls executed by real environments, by purpose. The environment counts, so no caller can forget to."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def state_dict(self) -> dict[str, int]:
        return dict(self.calls)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.calls = Counter(state)


class Desk:
    """One episode's world. `world` is copied: {"customer": id, "orders": {...}, "customers": {...}}.

    Every response is a JSON object. Errors are {"error": code} with one of unknown_tool, invalid_argument, unknown_id,
    not_permitted (the order belongs to somebody else, or more money than its total) and forbidden_state.
    """

    def __init__(self, world: dict[str, Any], counter: CallCounter, purpose: str):
        self.state = copy.deepcopy(world) | {"tickets": []}
        self._counter = counter
        self._purpose = purpose

    def execute(self, call: ToolCall) -> dict[str, Any]:
        self._counter.calls[self._purpose] += 1
        if call.name not in _VALIDATORS:
            return {"error": "unknown_tool"}
        if not _VALIDATORS[call.name].is_valid(call.arguments):
            return {"error": "invalid_argument"}
        if call.name == "get_customer":
            return self._get_customer(**call.arguments)
        order = self.state["orders"].get(call.arguments["order_id"])
        if order is None:
            return {"error": "unknown_id"}
        if call.name == "get_order":
            return {"order_id": call.arguments["order_id"], "status": order["status"], "total": order["total"]}
        if order["customer_id"] != self.state["customer"]:
            return {"error": "not_permitted"}
        return _WRITES[call.name](self, order, **call.arguments)

    def _get_customer(self, customer_id: str) -> dict[str, Any]:
        customer = self.state["customers"].get(customer_id)
        return {"error": "unknown_id"} if customer is None else {"customer_id": customer_id, **customer}

    def _cancel_order(self, order: dict[str, Any], order_id: str) -> dict[str, Any]:
        if order["status"] != "processing":
            return {"error": "forbidden_state"}
        order["status"] = "cancelled"
        return {"order_id": order_id, "status": "cancelled"}

    def _refund_order(self, order: dict[str, Any], order_id: str, amount: int) -> dict[str, Any]:
        if amount < 1:
            return {"error": "invalid_argument"}
        if order["status"] != "delivered":
            return {"error": "forbidden_state"}
        if amount > order["total"] - order.get("refunded", 0):
            return {"error": "not_permitted"}
        order["refunded"] = order.get("refunded", 0) + amount
        return {"order_id": order_id, "refunded": amount}

    def _move_order(self, order: dict[str, Any], order_id: str, day: str) -> dict[str, Any]:
        if day not in DAYS:
            return {"error": "invalid_argument"}
        if order["status"] != "processing":
            return {"error": "forbidden_state"}
        order["day"] = day
        return {"order_id": order_id, "day": day}

    def _open_ticket(self, order: dict[str, Any], order_id: str, topic: str) -> dict[str, Any]:
        ticket = {"order_id": order_id, "topic": topic}
        # A ticket is a set member: opening the same one again changes nothing.
        if ticket not in self.state["tickets"]:
            self.state["tickets"].append(ticket)
        return {**ticket, "opened": True}


_WRITES: dict[str, Callable[..., dict[str, Any]]] = {
    "cancel_order": Desk._cancel_order,
    "refund_order": Desk._refund_order,
    "move_order": Desk._move_order,
    "open_ticket": Desk._open_ticket,
}
