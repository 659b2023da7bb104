"""FinMCP-Bench: dialogues in Chinese with tools of a fund platform; which tools are called is compared with the record.

The official script that scores, DianJin-TIR/eval/evaluation.py, is run as it is: precision (TP) and recall (TR) of the
names of called tools as multisets; arguments do not count. Its script that asks the model is not: it needs the vendor's
live tools and an account. Here the same dialogue is held (`continuation`): at each turn of the user the model is given
the recorded history and goes on from there, with at most 20 calls or a few more, as there. A call gets the response
that is on record in that dialogue for the same tool and arguments, and otherwise the word for a failed call.

TF1 is the harmonic mean of the reported TP and TR, as in the published tables. The published ones do not say whether
they are micro or macro means, so there are both. A sample whose request is refused counts as zero; the official script
leaves it out. One that is not answered stops the run: what is done stays done.
"""

from __future__ import annotations

import ast
import json
import logging
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from hashlib import sha256
from pathlib import Path
from threading import Event
from typing import Any

from envace.benchmarks.benchmark import Outcome, Part, Trial, drop_unfinished, is_set_up, run_harness
from envace.benchmarks.relay import Refused, Unanswered, complete, message_of
from envace.chat import decode_json
from envace.cm2.files import read_rows
from envace.types import UserError, canonical_json

logger = logging.getLogger("envace")

PARTS = ("single_step", "multi_step", "multi_turn")
COMMIT = "fd9b511"
MOST_CALLS = 20  # in a turn of the user; looked at after each round of calls
FAILED_CALL = "调用失败"  # what the official script says of a call that failed
SCRIPT = Path("finmcp") / "DianJin-TIR" / "eval" / "evaluation.py"
NEEDED = ("id", "task", "scenery", "diff_level", "messages")
TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
Message = dict[str, Any]
Say = Callable[[list[Message]], Message]  # what the model answers after a history


class FinMCP:
    name = "finmcp"
    served_as = ""
    parts: tuple[str, ...] = PARTS
    default_parts: tuple[str, ...] = PARTS

    def version(self, home: Path) -> str:
        if not is_set_up(home, self.name):
            raise UserError(f"FinMCP-Bench is not set up in {home}: run `make bench-setup-finmcp`")
        return f"DianJin-TIR ({COMMIT})"

    def tools(self, home: Path) -> None:
        """Every call counts, whatever it names; none is executed."""

    def run(self, trial: Trial, parts: tuple[str, ...]) -> Outcome:
        bench = trial.config.bench
        samples = read_samples(bench.data)
        tools, origin = tool_schemas(samples, bench.tool_schemas)
        chosen = [one for part in parts for one in of_part(samples, part)[: bench.tasks or None]]
        if not chosen:
            raise UserError(f"bench.data={bench.data} holds no sample of {', '.join(parts)}")
        answers = answer_all(trial, chosen, tools)
        eval_data = trial.folder / "eval_data.json"
        scored = [sample | {"messages_pred": answers[str(sample["id"])]} for sample in chosen]
        eval_data.write_text(json.dumps(scored, ensure_ascii=False), encoding="utf-8")
        overall, by_part = score(trial, eval_data)
        if overall["N"] != len(chosen):
            log = trial.folder / "evaluation.log"
            raise UserError(f"{overall['N']} of {len(chosen)} samples were scored: {log} says why")
        about = {"tools": origin, "data_sha256": digest(samples)}
        refused = {part: sum(not answers[str(s["id"])] for s in of_part(chosen, part)) for part in parts}
        found = {part: part_of(by_part.get(part), about | {"refused": refused[part]}) for part in parts}
        missing = [part for part in PARTS if part not in found or found[part].score is None]
        return Outcome(found, aggregates(overall), missing)


def read_samples(data: str) -> list[dict[str, Any]]:
    """The tasks, checked. Raises UserError that says where they come from."""
    samples = []
    for file, number, row in read_rows(data):
        if not isinstance(row, dict) or (lacking := [name for name in NEEDED if name not in row]):
            raise UserError(f"{file}, row {number} is no sample of FinMCP-Bench: it lacks {', '.join(lacking)}")
        if part_name(row) not in PARTS:
            raise UserError(f"{file}, row {number}: task {row['task']!r} is none of {', '.join(PARTS)}")
        samples.append(row)
    ids = {str(sample["id"]) for sample in samples}
    if len(ids) < len(samples):
        twice = len(samples) - len(ids)
        raise UserError(f"bench.data={data}: {twice} ids occur twice; name benchmark_final.json alone")
    return samples


def part_name(sample: dict[str, Any]) -> str:
    return str(sample["task"]).replace(" ", "_")


def of_part(samples: list[dict[str, Any]], part: str) -> list[dict[str, Any]]:
    return [sample for sample in samples if part_name(sample) == part]


def digest(samples: list[dict[str, Any]]) -> str:
    return sha256(canonical_json(samples).encode()).hexdigest()


def tool_schemas(samples: list[dict[str, Any]], path: str) -> tuple[list[dict[str, Any]], str]:
    """(tools in OpenAI's format, where they are from). Raises UserError if the file holds none."""
    if not path:
        logger.warning(
            "bench.tool_schemas is empty: tools have the names and arguments that the dialogues show, no descriptions; "
            "the vendor has the schemas, at qieman.com/mcp/tools"
        )
        return shown_tools(samples), "as the dialogues show them"
    try:
        content = Path(path).read_bytes()
        tools = json.loads(content)
        names = [tool["function"]["name"] for tool in tools]
    except (OSError, json.JSONDecodeError, TypeError, KeyError) as error:
        raise UserError(f"bench.tool_schemas={path} is no JSON list of tools in OpenAI's format ({error})") from None
    return tools, f"{len(names)} tools, sha256 {sha256(content).hexdigest()}"


def shown_tools(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every tool that is called anywhere, with every argument that it ever has."""
    found: dict[str, dict[str, Any]] = {}
    for sample in samples:
        for call in calls_in(sample["messages"]):
            properties = found.setdefault(call["function"]["name"], {})
            for name, value in arguments_of(call).items():
                properties.setdefault(name, {"type": TYPES[type(value)]} if type(value) in TYPES else {})
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": "",
                "parameters": {"type": "object", "properties": properties},
            },
        }
        for name, properties in sorted(found.items())
    ]


def calls_in(messages: list[Message]) -> Iterable[dict[str, Any]]:
    return (call for message in messages for call in message.get("tool_calls") or [])


def arguments_of(call: dict[str, Any]) -> dict[str, Any]:
    """Those that cannot be read are none."""
    arguments = call["function"].get("arguments") or "{}"
    if isinstance(arguments, str):
        text = arguments
        try:
            arguments, end = decode_json(text, 0)
        except ValueError:
            return {}
        if text[end:].strip():
            return {}
    return arguments if isinstance(arguments, dict) else {}


def recorded_responses(messages: list[Message]) -> dict[str, str]:
    """Call -> its response; of the same call twice the first."""
    asked = {call["id"]: call_key(call) for call in calls_in(messages) if "id" in call}
    responses: dict[str, str] = {}
    for message in messages:
        if message["role"] == "tool" and message.get("tool_call_id") in asked:
            responses.setdefault(asked[message["tool_call_id"]], str(message["content"]))
    return responses


def call_key(call: dict[str, Any]) -> str:
    return canonical_json([call["function"]["name"], arguments_of(call)])


def answer_all(trial: Trial, samples: list[dict[str, Any]], tools: list[dict[str, Any]]) -> dict[str, list[Message]]:
    """id -> what is said and called in each dialogue; [] where a request was refused. Goes on with answers.jsonl."""
    path = trial.folder / "answers.jsonl"
    done = read_answers(path)
    left = [sample for sample in samples if str(sample["id"]) not in done]
    unanswered: list[str] = []
    stopped = Event()

    def say(messages: list[Message]) -> Message:
        if stopped.is_set():
            raise Unanswered("interrupted")
        return ask(trial, messages, tools)

    pool, tries = ThreadPoolExecutor(trial.config.bench.concurrency), 1 + trial.config.bench.retries
    try:
        with path.open("a", encoding="utf-8") as lines:
            futures = {pool.submit(attempt, say, sample["messages"], tries): str(sample["id"]) for sample in left}
            for future in as_completed(futures):
                messages, reason = future.result()
                if messages is None:
                    unanswered.append(reason)
                    continue
                done[futures[future]] = messages
                lines.write(json.dumps({"id": futures[future], "messages": messages, "refused": reason}) + "\n")
                lines.flush()
    finally:
        # What is being asked when the run is interrupted ends with the model's server, which the caller ends next.
        stopped.set()
        pool.shutdown(wait=False, cancel_futures=True)
    if unanswered:
        raise UserError(
            f"{len(unanswered)} of {len(samples)} samples of FinMCP-Bench were not answered ({unanswered[-1]}): run "
            "the same command again when the model's server answers"
        )
    return done


def read_answers(path: Path) -> dict[str, list[Message]]:
    """A line that was being written when the run was cut off is left out, and from the file too. Raises UserError."""
    if not path.exists():
        return {}
    drop_unfinished(path)
    answers = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            record = json.loads(line)
            answers[record["id"]] = record["messages"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise UserError(
                f"{path}, line {number} is no answer: remove that line, and the same command asks again"
            ) from None
    return answers


def attempt(say: Say, messages: list[Message], tries: int) -> tuple[list[Message] | None, str]:
    """(the dialogue, ""), ([], why it was refused) or (None, why there was no answer)."""
    reason = ""
    for _ in range(tries):
        try:
            return dialogue(say, messages), ""
        except Refused as error:
            return [], str(error)
        except Unanswered as error:
            reason = str(error)
    return None, reason


def dialogue(say: Say, messages: list[Message]) -> list[Message]:
    """Every turn of system and user, and what the model makes of each after the recorded history before it."""
    responses = recorded_responses(messages)
    said: list[Message] = []
    for i, message in enumerate(messages):
        if message["role"] in ("system", "user"):
            said.append(message)
        if message["role"] == "user":
            said += continuation(say, [without_nulls(m) for m in messages[: i + 1]], responses)
    return said


def without_nulls(message: Message) -> Message:
    return {key: value for key, value in message.items() if value is not None}


def continuation(say: Say, history: list[Message], responses: dict[str, str]) -> list[Message]:
    """The model's messages and the responses to its calls, until it makes none or has made enough."""
    new, made = [say(history)], 0
    while (calls := new[-1].get("tool_calls")) and made <= MOST_CALLS:
        made += len(calls)
        for call in calls:
            response = responses.get(call_key(call), FAILED_CALL)
            new.append({"role": "tool", "tool_call_id": call["id"], "content": response})
        new.append(say(history + new))
    return new


def ask(trial: Trial, messages: list[Message], tools: list[dict[str, Any]]) -> Message:
    """Raises Refused; Unanswered too for what no server of this API says, whatever its model wrote."""
    sampling = trial.config.eval.sampling
    body = {
        "model": trial.model,
        "messages": messages,
        "tools": tools,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": trial.config.serve.max_new_tokens,
    }
    message = message_of(complete(trial.endpoint, body))
    content, calls = message.get("content") or "", message.get("tool_calls") or []
    if not isinstance(content, str) or not isinstance(calls, list) or not all(is_call(call) for call in calls):
        raise Unanswered("what was answered is no chat completion: content or calls are not as they should be")
    return {"role": "assistant", "content": content} | ({"tool_calls": calls} if calls else {})


def is_call(call: Any) -> bool:
    """Whether it has what every call has. The text of its arguments is the model's and may be anything."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return False
    return all(isinstance(value, str) for value in (call.get("id"), function.get("name"), function.get("arguments")))


def score(trial: Trial, eval_data: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """(metrics of all samples, metrics by part), as the official script prints them."""
    home = Path(trial.config.bench.home).resolve()
    log = trial.folder / "evaluation.log"
    log.unlink(missing_ok=True)
    command = [str(home / "finmcp" / "bin" / "python"), str(home / SCRIPT), f"--eval_data_path={eval_data}"]
    run_harness(command, log, {"PYTHONUTF8": "1"}, trial.folder)
    text = log.read_text(encoding="utf-8")
    overall = re.findall(r"^((?:macro|micro)_\w+|N|consist_mean) ([\d.]+)$", text, re.M)
    by_part = re.findall(rf"^({'|'.join(PARTS)}) (\{{.*\}})$", text, re.M)
    if not overall:
        raise UserError(f"{log} holds no scores")
    numbers = {name: ast.literal_eval(value) for name, value in overall}
    return numbers, {part: ast.literal_eval(metrics) for part, metrics in by_part}


def part_of(metrics: dict[str, Any] | None, about: dict[str, Any]) -> Part:
    """Its score is TF1, micro."""
    if metrics is None:
        return Part(None, 0, 0, 0.0, about)
    found = aggregates(metrics)
    # The script's own mean of the F1 of each sample, which is no harmonic mean of the two others.
    by_sample = {"f1_of_samples": 100 * metrics["macro_F1"], "same_order": 100 * metrics["consist_mean"]}
    return Part(found["tf1_micro"], metrics["N"], 0, 0.0, {**found, **by_sample, **about})


def aggregates(metrics: dict[str, Any]) -> dict[str, float]:
    found: dict[str, float] = {}
    for mean in ("micro", "macro"):
        tp, tr = 100 * metrics[f"{mean}_Precision"], 100 * metrics[f"{mean}_Recall"]
        tf1 = 2 * tp * tr / (tp + tr) if tp + tr else 0.0
        found |= {f"tp_{mean}": tp, f"tr_{mean}": tr, f"tf1_{mean}": tf1}
    return found
