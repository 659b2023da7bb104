"""tau2's gold actions as a script for both roles, agent and user, and for its judge. It keeps no state.

The user is told its scenario, by which it knows its task; its first message names that to the agent. From then on agent
and user take turns at the gold actions, in the order of the task's list. Scenarios of telecom fit several tasks, which
differ in the state of phone and line: there the user looks first (and reseats its SIM card, behind which its state
hides), then the agent, and what they see is compared with what the tasks set up.
"""

from __future__ import annotations

import ast
import json
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envace.benchmarks.replay.script import Answer, Script, ScriptError, silent
from envace.benchmarks.tau2 import PARTS, data_folder
from envace.types import ToolCall, UserError

SCENARIO = re.compile(r"<scenario>(.*)</scenario>", re.S)
STOP = Answer("###STOP###")
USER_LOOKS = [
    *(ToolCall("check_network_status", {}), ToolCall("reseat_sim_card", {}), ToolCall("check_sim_status", {})),
    *(ToolCall("check_network_mode_preference", {}), ToolCall("check_data_restriction_status", {})),
    *(ToolCall("check_apn_settings", {}), ToolCall("check_wifi_calling_status", {}), ToolCall("check_vpn_status", {})),
    ToolCall("check_app_permissions", {"app_name": "messaging"}),
]
AGENT_LOOKS = [ToolCall("get_details_by_id", {"id": "L1002"})]
# How what a task sets up begins (function and arguments) -> the tool that shows it, and what its response then has.
USER_SIGNS = {
    "turn_airplane_mode_on": ("check_network_status", r"Airplane Mode: ON"),
    "turn_data_off": ("check_network_status", r"Mobile Data Enabled: No"),
    "turn_roaming_on": ("check_network_status", r"Data Roaming Enabled: Yes"),
    "unseat_sim_card": ("check_network_status", r"SIM Card Status: missing"),
    "lock_sim_card": ("check_sim_status", r"locked with a PIN"),
    "set_network_mode_preference": ("check_network_mode_preference", r"2g_only"),
    "turn_data_saver_mode_on": ("check_data_restriction_status", r"is ON"),
    "break_apn_settings": ("check_apn_settings", r"APN Name: broken"),
    "break_apn_mms_setting": ("check_apn_settings", r"MMSC URL .*: Not Set"),
    "set_wifi_calling": ("check_wifi_calling_status", r"turned ON"),
    "break_vpn": ("check_vpn_status", r"VPN is ON"),
    "remove_app_permission messaging sms": ("check_app_permissions", r"^(?!.*\bsms\b)"),
    "remove_app_permission messaging storage": ("check_app_permissions", r"^(?!.*\bstorage\b)"),
}
AGENT_SIGNS = {
    "set_data_usage": ("get_details_by_id", r'"data_used_gb": 15\.1'),
    "disable_roaming": ("get_details_by_id", r'"roaming_enabled": false'),
    "suspend_line_for_overdue_bill": ("get_details_by_id", r'"status": "Suspended"'),
}


@dataclass(frozen=True)
class Gold:
    """rounds: the agent's calls and then the user's, turn by turn. facts: what the agent must say.

    set_up: what the task does to phone and line before.
    """

    id: str
    scenario: str
    set_up: frozenset[str]
    rounds: list[tuple[list[ToolCall], list[ToolCall]]]
    facts: list[str]


def oracle(home: Path, parts: Iterable[str]) -> Script:
    """Raises UserError at an unknown part, and ScriptError at a request that fits no task."""
    golds = {f"{part} {gold.id}": gold for part in parts for gold in read_golds(home, part)}
    by_scenario: dict[str, list[str]] = defaultdict(list)
    for name, gold in golds.items():
        by_scenario[gold.scenario].append(name)

    def answer(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> Answer:
        if scenario := SCENARIO.search(messages[0]["content"]):
            return user_answer(messages, golds, by_scenario.get(squeezed(scenario[1]), []))
        return agent_answer(messages, golds)

    return answer


def null(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> Answer:
    """An agent that does nothing, and a user who leaves after its answer."""
    if not SCENARIO.search(messages[0]["content"]):
        return silent(messages, tools)
    return STOP if any(message["role"] == "assistant" for message in messages) else Answer("Please help me.")


def judge(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> Answer:
    """Every expected outcome is met."""
    outcomes = ast.literal_eval(messages[-1]["content"].rpartition("expectedOutcomes:")[2].strip())
    met = [{"expectedOutcome": outcome, "reasoning": "scripted", "metExpectation": True} for outcome in outcomes]
    return Answer(json.dumps({"results": met}))


def user_answer(messages: list[dict[str, Any]], golds: dict[str, Gold], names: list[str]) -> Answer:
    """names: of the tasks with the scenario that it was told."""
    heard, seen = said_by(messages, "user"), responses(messages)
    if len(heard) > 1:  # the agent has answered, and names the task
        gold, turn = named(golds, heard[-1]), len(heard) - 2
        return next_call(gold.rounds[turn][1], seen) or (STOP if turn == len(gold.rounds) - 1 else Answer("Done."))
    if len(names) > 1:
        if look := next_call(USER_LOOKS, seen):
            return look
        names = [name for name in names if is_seen(golds[name], USER_SIGNS, seen)]
    if not names:
        raise ScriptError("no task fits what the user is told and sees")
    return Answer("\n".join(names))


def agent_answer(messages: list[dict[str, Any]], golds: dict[str, Gold]) -> Answer:
    heard, seen = said_by(messages, "user"), responses(messages)
    names, turn = heard[0].splitlines(), len(heard) - 1
    if turn > 0:  # it has named the task itself
        names = [said_by(messages, "assistant")[-1]]
    elif len(names) > 1:
        if look := next_call(AGENT_LOOKS, seen):
            return look
        names = [name for name in names if is_seen(golds[name], AGENT_SIGNS, seen)]
        seen = seen[len(AGENT_LOOKS) :]
    if len(names) != 1:
        raise ScriptError(f"{len(names)} tasks fit: {', '.join(names)}")
    gold = named(golds, names[0])
    is_last = turn == len(gold.rounds) - 1
    said = [names[0].partition("\n")[0], *(gold.facts if is_last else ["Please go on."])]
    return next_call(gold.rounds[turn][0], seen) or Answer("\n".join(said))


def named(golds: dict[str, Gold], text: str) -> Gold:
    """The task that a text begins with."""
    name = text.partition("\n")[0]
    if name not in golds:
        raise ScriptError(f"no task is called {name!r}")
    return golds[name]


def said_by(messages: list[dict[str, Any]], role: str) -> list[str]:
    """Texts of one side, as the side that asks sees it."""
    return [message["content"] for message in messages if message["role"] == role and message["content"]]


def next_call(calls: list[ToolCall], seen: list[tuple[str, str]]) -> Answer | None:
    """One at a time; None when all were made."""
    return Answer(calls=[calls[len(seen)]]) if len(seen) < len(calls) else None


def responses(messages: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """(tool, response) of the calls made since the other side spoke last."""
    last = max(i for i, message in enumerate(messages) if message["role"] == "user")
    made = [m for m in messages[last:] if m["role"] in ("assistant", "tool")]
    return [
        (call["tool_calls"][0]["function"]["name"], response["content"])
        for call, response in zip(made[::2], made[1::2], strict=True)
    ]


def is_seen(gold: Gold, signs: dict[str, tuple[str, str]], seen: list[tuple[str, str]]) -> bool:
    """Whether all signs of what the task sets up are there, and no others."""
    by_tool = dict(seen)
    return all(
        any(before.startswith(what) for before in gold.set_up) == bool(re.search(pattern, by_tool[tool]))
        for what, (tool, pattern) in signs.items()
    )


def read_golds(home: Path, part: str) -> list[Gold]:
    if part not in PARTS:
        raise UserError(f"tau2 has no {part!r}; it has {', '.join(PARTS)}")
    folder = data_folder(home) / "tau2" / "domains" / part
    tasks = json.loads((folder / "tasks.json").read_text(encoding="utf-8"))
    base = set(json.loads((folder / "split_tasks.json").read_text(encoding="utf-8"))["base"])
    return [read_gold(task) for task in tasks if task["id"] in base]


def read_gold(task: dict[str, Any]) -> Gold:
    criteria = task["evaluation_criteria"]
    before = (task.get("initial_state") or {}).get("initialization_actions") or []
    return Gold(
        task["id"],
        scenario_of(task["user_scenario"]),
        frozenset(" ".join([call["func_name"], *map(str, call["arguments"].values())]) for call in before),
        rounds_of(criteria["actions"] or []),
        criteria["communicate_info"] or [],
    )


def rounds_of(actions: list[dict[str, Any]]) -> list[tuple[list[ToolCall], list[ToolCall]]]:
    """A round ends where the agent acts after the user. There is at least one."""
    rounds: list[tuple[list[ToolCall], list[ToolCall]]] = [([], [])]
    for action in actions:
        is_user = action.get("requestor") == "user"
        if rounds[-1][1] and not is_user:
            rounds.append(([], []))
        rounds[-1][is_user].append(ToolCall(action["name"], action["arguments"]))
    return rounds


def scenario_of(scenario: dict[str, Any]) -> str:
    """As the user is told it, apart from white space."""
    told = scenario["instructions"]
    titles = {
        "Persona": scenario.get("persona"),
        "Instructions: Domain": told["domain"],
        "Reason for call": told["reason_for_call"],
        "Known info": told.get("known_info"),
        "Unknown info": told.get("unknown_info"),
        "Task instructions": told["task_instructions"],
    }
    return squeezed(" ".join(f"{title}: {text}" for title, text in titles.items() if text is not None))


def squeezed(text: str) -> str:
    return " ".join(text.split())
