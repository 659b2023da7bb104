"""tau2-bench v1.0.1: the official `tau2 run`, a domain at a time, and what its results file says.

Another model plays the user (bench.user; telecom's user calls tools). Retail also has natural-language assertions,
which a third one judges (bench.judge). tau2 asks for its judge by the fixed name JUDGE at temperature 0, so what
bench.judge.url serves must go by that name, whichever model it is. Retail's scores hang on it, and on the release:
older ones score what was communicated instead.

A task's reward is the product of its checks, and 0 unless user or agent ended the dialogue. tau2 calls everything that
raises an infrastructure error, tries it again up to three times and leaves it out. Here an empty message of the agent,
calls that cannot be read and a request that the model's server refuses, as a prompt that is too long, are the model's
own failures: reward 0, at the first try. All else is a fault, tried again bench.retries times and then in no score.
A key goes to the harness in its environment, never in an argument, as arguments stand in the results file.
"""

from __future__ import annotations

import json
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any

from envace.benchmarks.benchmark import Outcome, Part, Trial, is_set_up, run_harness
from envace.keys import secret
from envace.settings import BenchConfig
from envace.types import UserError

PARTS = ("airline", "retail", "telecom")
JUDGE = "gpt-4.1-2025-04-14"
NULL_RIGHT = {"airline": (23, 50), "retail": (11, 114), "telecom": (0, 114)}  # by doing nothing, of all tasks
NULL_SCORES = {part: 100 * right / tasks for part, (right, tasks) in NULL_RIGHT.items()}  # in percent
MAX_STEPS, MAX_ERRORS = 200, 10
USER_KEY = "ENVACE_TAU2_USER_KEY"
FAULT, OWN_FAILURE = "infrastructure_error", "agent_error"
# How tau2's orchestrator goes wrong, as its tracebacks have it: the agent was asked, and what it said was looked at.
ASKED_AGENT, CHECKED_AGENT = "self.agent.generate_next_message(", "agent_msg.validate()"
# Errors of asking the agent that are not the infrastructure's: a refused request, or calls that cannot be read.
REFUSED = ("BadRequestError", "ContextWindowExceededError", "ContentPolicyViolationError", "UnprocessableEntityError")
UNREADABLE = ("JSONDecodeError", "ValidationError")


class Tau2:
    name = "tau2"
    served_as = ""
    parts: tuple[str, ...] = PARTS
    default_parts: tuple[str, ...] = PARTS

    def version(self, home: Path) -> str:
        site_packages = (home / "tau2" / "lib").glob("python3*/site-packages")
        found = metadata.distributions(name="tau2", path=[str(path) for path in site_packages])
        versions = [distribution.version for distribution in found]
        if not versions or not is_set_up(home, self.name):
            raise UserError(f"tau2 is not set up in {home}: run `make bench-setup-tau2`")
        return versions[0]

    def tools(self, home: Path) -> None:
        """A call to an unknown tool is answered with an error, of which ten end a task."""

    def run(self, trial: Trial, parts: tuple[str, ...]) -> Outcome:
        check_partners(trial.config.bench, parts)
        found = {part: run_part(trial, part) for part in parts}
        missing = [part for part in self.parts if part not in found or found[part].score is None]
        return Outcome(found, {} if missing else overall(found), missing)


def check_partners(bench: BenchConfig, parts: tuple[str, ...]) -> None:
    """Raises UserError unless there is a model for every role."""
    if not bench.user.url:
        raise UserError("tau2 needs a model that plays the user: set bench.user.url and bench.user.model")
    if "retail" not in parts:
        return
    if not bench.judge.url:
        others = ",".join(part for part in PARTS if part != "retail")
        raise UserError(f"tau2's retail needs a judge: set bench.judge.url, or leave it out: bench.parts=[{others}]")
    if bench.judge.model != JUDGE:
        raise UserError(
            f"bench.judge.model={bench.judge.model!r}: tau2 asks for its judge as {JUDGE}, so serve the judge under "
            "that name (vLLM: --served-model-name) and set bench.judge.model to it"
        )


def run_part(trial: Trial, part: str) -> Part:
    """Raises UserError if the harness fails."""
    results = trial.folder / part / "results.json"
    settle(results)  # what a run that was interrupted has left
    for _ in range(1 + trial.config.bench.retries):
        run_harness(command(trial, part), trial.folder / f"tau2-{part}.log", environment(trial), trial.folder)
        if not settle(results):
            break
    return read_part(results, None if trial.config.bench.tasks else NULL_SCORES[part])


def command(trial: Trial, part: str) -> list[str]:
    """tau2 itself takes up what a results file lacks, its faults included; --max-retries=0: at most once in a run."""
    bench, sampling = trial.config.bench, trial.config.eval.sampling
    agent = {
        "api_base": trial.endpoint,
        "api_key": "none",
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        # With tau2's seed in each request, a model that is loaded here would answer them one by one.
        **({} if trial.config.serve.backend else {"additional_drop_params": ["seed"]}),
    }
    user = {
        "api_base": bench.user.url,
        "api_key": f"os.environ/{USER_KEY}",
        "temperature": bench.user.temperature,
    }
    options = {
        "--domain": part,
        "--agent-llm": f"openai/{trial.model}",
        "--agent-llm-args": json.dumps(agent),
        "--user-llm": f"openai/{bench.user.model}",
        "--user-llm-args": json.dumps(user),
        "--num-trials": 1,
        "--seed": trial.seed,
        "--max-steps": MAX_STEPS,
        "--max-errors": MAX_ERRORS,
        "--max-retries": 0,
        "--max-concurrency": bench.concurrency,
        "--save-to": trial.folder / part,
        **({"--num-tasks": bench.tasks} if bench.tasks else {}),
    }
    program = Path(bench.home).resolve() / "tau2" / "bin" / "tau2"
    return [str(program), "run", "--auto-resume", *(str(word) for option in options.items() for word in option)]


def environment(trial: Trial) -> dict[str, str]:
    bench = trial.config.bench
    needed = {
        "TAU2_DATA_DIR": str(data_folder(Path(bench.home).resolve())),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it is fetched from the web
        USER_KEY: secret(bench.user.key_env, "bench.user.key_env") or "none",
    }
    if not bench.judge.url:
        return needed
    judge = {"OPENAI_BASE_URL": bench.judge.url, "OPENAI_API_BASE": bench.judge.url}
    return needed | judge | {"OPENAI_API_KEY": secret(bench.judge.key_env, "bench.judge.key_env") or "none"}


def data_folder(home: Path) -> Path:
    return home / "tau2" / "data"


def settle(results: Path) -> int:
    """Write down the model's own failures as such, so that tau2 does not run them again; how many faults are left."""
    if not results.exists():
        return 0
    try:
        found = json.loads(results.read_text(encoding="utf-8"))
    except ValueError:  # also bytes that are no UTF-8
        raise UserError(
            f"{results} is not whole, as when a run was cut off while it was written: move it away, and the same "
            "command begins this part anew"
        ) from None
    failures = [run for run in found["simulations"] if is_own_failure(run)]
    for run in failures:
        run["termination_reason"] = OWN_FAILURE
        run["reward_info"] = {"reward": 0.0, "info": {"note": "the agent's own failure, not the infrastructure's"}}
    if failures:
        partial = results.with_suffix(".partial")
        partial.write_text(json.dumps(found, indent=2), encoding="utf-8")
        partial.replace(results)
    return sum(run["termination_reason"] == FAULT for run in found["simulations"])


def is_own_failure(run: dict[str, Any]) -> bool:
    """Whether tau2 blames the infrastructure for what the model did."""
    if run["termination_reason"] != FAULT:
        return False
    kind, traceback = run["info"]["error_type"], run["info"]["error_traceback"]
    if CHECKED_AGENT in traceback:
        return True
    return ASKED_AGENT in traceback and kind in (*REFUSED, *UNREADABLE)


def read_part(results: Path, null: float | None) -> Part:
    """Of settled results. details: the reward of each task that has one, and how the dialogues ended."""
    runs = json.loads(results.read_text(encoding="utf-8"))["simulations"]
    rewards = {run["task_id"]: run["reward_info"]["reward"] for run in runs if run["termination_reason"] != FAULT}
    ends = dict(Counter(run["termination_reason"] for run in runs))
    score = 100 * sum(rewards.values()) / len(rewards) if rewards else None
    return Part(score, len(rewards), ends.get(FAULT, 0), null, {"rewards": rewards, "ends": ends})


def overall(parts: dict[str, Part]) -> dict[str, float]:
    """macro: mean over domains. weighted: mean over tasks."""
    scores = [part.score for part in parts.values() if part.score is not None]
    rewards = [reward for part in parts.values() for reward in part.details["rewards"].values()]
    return {"macro": sum(scores) / len(scores), "weighted": 100 * sum(rewards) / len(rewards)}
