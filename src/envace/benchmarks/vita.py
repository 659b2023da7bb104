"""VitaBench: the official `vita run`, a domain at a time.

Two more models take part, one that plays the user (bench.user) and one that judges rubrics over windows of the dialogue
(bench.judge); a task counts if every rubric is met, so a score is as good as its judge. All three are reached through
`envace.benchmarks.relay`, so that no key is in a file.

A task that raises an error has no reward, and the harness leaves it out of its average. Here it is tried again
bench.retries times; then it is a fault, in no score, and named in the details: what raised may be a judge who cannot be
read as well as the model. If in the last try one of the models left requests unanswered, the user's and the judge's
refusals included, the run stops: what is done stays done.
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import yaml

from envace.benchmarks.benchmark import Outcome, Part, Trial, is_set_up, run_harness
from envace.benchmarks.relay import Relayed, relaying
from envace.keys import secret
from envace.settings import BenchConfig
from envace.types import UserError

logger = logging.getLogger("envace")

DOMAINS = {  # part -> what the harness calls it
    "delivery": "delivery",
    "instore": "instore",
    "ota": "ota",
    "cross_domain": "delivery,instore,ota",
}
PARTS = tuple(DOMAINS)
REPOSITORY = "https://github.com/meituan-longcat/vitabench"
COMMIT = "96f3b85"
LANGUAGES = {"chinese": "tasks.json", "english": "tasks_en.json"}


@dataclass(frozen=True)
class Models:
    """path: the file that names the three models for the harness. relays: by role."""

    path: Path
    relays: dict[str, Relayed]

    def unanswered(self) -> dict[str, Relayed]:
        return {role: relay for role, relay in self.relays.items() if relay.unanswered}


class Vita:
    name = "vita"
    served_as = ""
    parts: tuple[str, ...] = PARTS
    default_parts: tuple[str, ...] = PARTS

    def version(self, home: Path) -> str:
        if not is_set_up(home, self.name):
            raise UserError(f"VitaBench is not set up in {home}: run `make bench-setup-vita`")
        return f"0.0.1 ({COMMIT})"

    def tools(self, home: Path) -> None:
        """A call to an unknown tool is answered with an error, as a part of the task."""

    def run(self, trial: Trial, parts: tuple[str, ...]) -> Outcome:
        bench = trial.config.bench
        check_partners(bench)
        data = {part: existing_file(Path(bench.home), part, bench.language) for part in parts}
        with serving_models(trial) as models:
            found = {part: run_part(trial, part, path, models) for part, path in data.items()}
        scores = {name: part.score for name, part in found.items() if part.score is not None}
        missing = [part for part in PARTS if part not in scores]
        tasks = sum(found[name].tasks for name in scores)
        overall = {
            "macro": sum(scores.values()) / len(scores),
            "weighted": sum(score * found[name].tasks for name, score in scores.items()) / tasks,
        }
        return Outcome(found, {} if missing else overall, missing)


def check_partners(bench: BenchConfig) -> None:
    for role, partner in (("user", bench.user), ("judge", bench.judge)):
        if not partner.url:
            raise UserError(f"VitaBench needs a model as {role}: set bench.{role}.url and bench.{role}.model")


def tasks_file(home: Path, part: str, language: str) -> Path:
    return home / "vita" / "data" / "vita" / "domains" / part / LANGUAGES[language]


def existing_file(home: Path, part: str, language: str) -> Path:
    """The tasks of a part. Raises UserError if they are not there: the largest files are not in every copy."""
    path = tasks_file(home, part, language)
    if not path.exists():
        name = path.relative_to(home / "vita").as_posix()
        raise UserError(
            f"VitaBench's {part} in {language} has no data here: get {REPOSITORY}/raw/{COMMIT}/{name} and save it as "
            f"{path}, or leave that part out (bench.parts), or set bench.language"
        )
    return path


@contextmanager
def serving_models(trial: Trial) -> Iterator[Models]:
    bench, config = trial.config.bench, trial.config
    served = {
        "agent": (trial.endpoint, trial.model, ""),
        "user": (bench.user.url, bench.user.model, secret(bench.user.key_env, "bench.user.key_env")),
        "judge": (bench.judge.url, bench.judge.model, secret(bench.judge.key_env, "bench.judge.key_env")),
    }
    sampling = {
        "agent": {
            "temperature": config.eval.sampling.temperature,
            "top_p": config.eval.sampling.top_p,
            "max_tokens": config.serve.max_new_tokens,
        },
        "user": {"temperature": bench.user.temperature},
        "judge": {"temperature": bench.judge.temperature},
    }
    with ExitStack() as stack:
        relays = {
            role: stack.enter_context(relaying(*where, takes_refusals=role == "agent"))
            for role, where in served.items()
        }
        entries = [
            {"name": role, "base_url": relay.url, "headers": {}, **sampling[role]} for role, relay in relays.items()
        ]
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        path = folder / "models.yaml"
        path.write_text(yaml.safe_dump({"default": {}, "models": entries}), encoding="utf-8")
        yield Models(path, relays)


def run_part(trial: Trial, part: str, data: Path, models: Models) -> Part:
    """What is left of the part's tasks, again where that failed."""
    content = data.read_bytes()
    wanted = [task["id"] for task in json.loads(content)][: trial.config.bench.tasks or None]
    for _ in range(1 + trial.config.bench.retries):
        done = read_done(trial.folder, part)
        if left := [task for task in wanted if task not in done]:
            for relay in models.relays.values():
                relay.reset()  # what the last try was told decides
            run_tasks(trial, part, left, models)
    done = read_done(trial.folder, part)
    failed = [task for task in wanted if task not in done]
    if not done:
        raise UserError(f"no task of {part} was run to its end: {trial.folder / 'vita.log'} says why")
    if failed and (silent := models.unanswered()):
        said = "; ".join(f"the {role} {relay.unanswered} ({relay.last})" for role, relay in silent.items())
        raise UserError(
            f"{len(failed)} tasks of {part} have no score, and requests were not answered: {said}; run the same "
            "command again when all models answer"
        )
    return part_of({task: done[task] for task in wanted if task in done}, failed, sha256(content).hexdigest())


def run_tasks(trial: Trial, part: str, tasks: list[str], models: Models) -> None:
    """One call of the harness, which asks before it goes on with a file: each call writes one of its own.

    Without a single finished task it ends with an error of its own making, so that alone says nothing.
    """
    files = {int(path.stem.rpartition("-")[2]) for path in trial.folder.glob(f"{part}-*.json")}
    written = trial.folder / f"{part}-{max(files, default=-1) + 1}.json"
    bench = trial.config.bench
    home = Path(bench.home).resolve() / "vita"
    command = [str(home / "bin" / "python"), "-m", "vita.cli", "run", "--domain", DOMAINS[part]]
    command += ["--agent-llm", "agent", "--user-llm", "user", "--evaluator-llm", "judge"]
    command += ["--language", bench.language, "--seed", str(trial.seed), "--log-level", "INFO"]
    command += ["--max-concurrency", str(bench.concurrency), "--save-to", str(written), "--task-ids", *tasks]
    more = {"VITA_MODEL_CONFIG_PATH": str(models.path), "PYTHONPATH": str(home / "src"), "PYTHONUTF8": "1"}
    try:
        run_harness(command, trial.folder / "vita.log", more, trial.folder)
    except UserError as error:
        if not written.exists():  # it did not even begin
            raise
        logger.warning("%s: %s", part, error)


def read_done(folder: Path, part: str) -> dict[str, dict[str, Any]]:
    """The finished runs of a part, by task. A file that was being written when the run was cut off is left out."""
    done: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob(f"{part}-*.json")):
        try:
            runs = json.loads(path.read_text(encoding="utf-8"))["simulations"]
        except json.JSONDecodeError:
            logger.warning("%s is not whole: its tasks are run again", path)
            continue
        done |= {run["task_id"]: run for run in runs if run["reward_info"] is not None}
    return done


def part_of(done: dict[str, dict[str, Any]], failed: list[str], data: str) -> Part:
    """details: each known reward, the tasks that have none, the ends of dialogues, which data."""
    rewards = {task: run["reward_info"]["reward"] for task, run in done.items()}
    details = {
        "rewards": rewards,
        "failed": failed,
        "ends": dict(Counter(run["termination_reason"] for run in done.values())),
        "data_sha256": data,
    }
    return Part(100 * sum(rewards.values()) / len(rewards), len(rewards), len(failed), 0.0, details)
