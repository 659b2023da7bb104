"""BFCL-v4: the official `bfcl generate` and `bfcl evaluate`.

The model goes by the name of an entry of BFCL's registry whose handler speaks plain OpenAI chat completions with tools
and takes the address from OPENAI_BASE_URL; in BFCL's own tables it has that entry's name. The handler writes dots in
names of tools as underscores, keeps what the server calls reasoning_content in the history, and evaluates calls of
multi-turn tasks as Python, so only checked calls reach it (`envace.serve.guard`).

Overall, of which a part that was not run counts as 0: 10 % each of non-live, live and irrelevance, 30 % multi-turn,
40 % agentic. The agentic parts want a web search account or further packages, and are run only where they are named.
"""

from __future__ import annotations

import csv
import json
from importlib import metadata
from pathlib import Path
from typing import Any

from envace.benchmarks.benchmark import Outcome, Part, Trial, run_harness
from envace.types import UserError

MODEL = "openbmb/MiniCPM-SALA-FC"
NON_LIVE = ("simple_python", "simple_java", "simple_javascript", "multiple", "parallel", "parallel_multiple")
LIVE = ("live_simple", "live_multiple", "live_parallel", "live_parallel_multiple")
IRRELEVANCE = ("irrelevance", "live_irrelevance")
MULTI_TURN = ("multi_turn_base", "multi_turn_miss_func", "multi_turn_miss_param", "multi_turn_long_context")
AGENTIC = ("memory_kv", "memory_vector", "memory_rec_sum", "web_search_base", "web_search_no_snippet")
GROUPS = {**dict.fromkeys((*NON_LIVE, "irrelevance"), "non_live"), **dict.fromkeys(MULTI_TURN, "multi_turn")}
NULL_SCORES = {part: 100.0 for part in IRRELEVANCE}  # in percent; an agent that does nothing has 0 elsewhere
NULL_OVERALL = 10.0
# What the harness writes in place of a result when a request failed, and what that says where the request was refused,
# as for a prompt that is too long: that is the model's own failure.
FAULT, REFUSED = "Error during inference:", "Error code: 4"
TOO_MANY = "Error code: 429"


class BFCL:
    name = "bfcl"
    served_as = MODEL
    parts = (*NON_LIVE, *LIVE, "live_relevance", *IRRELEVANCE, *MULTI_TURN, *AGENTIC)
    default_parts = tuple(part for part in parts if part not in AGENTIC)

    def version(self, home: Path) -> str:
        found = metadata.distributions(name="bfcl-eval", path=[str(path) for path in site_packages(home)])
        if not (versions := [distribution.version for distribution in found]):
            raise UserError(f"BFCL is not set up in {home}: run `make bench-setup-bfcl`")
        return versions[0]

    def tools(self, home: Path) -> list[str]:
        """Of all multi-turn tasks: the harness executes what it knows, and one gold answer needs a tool held back."""
        documents = sorted((data_folder(home) / "multi_turn_func_doc").glob("*.json"))
        return sorted({tool["name"] for document in documents for tool in read_lines(document)})

    def run(self, trial: Trial, parts: tuple[str, ...]) -> Outcome:
        selected = ["--test-category", ",".join(parts)]
        if tasks := trial.config.bench.tasks:
            write_ids(trial.folder / "test_case_ids_to_generate.json", Path(trial.config.bench.home), parts, tasks)
            selected = ["--run-ids"]
        for _ in range(1 + trial.config.bench.retries):
            self._bfcl(trial, "generate", *selected, *generation_options(trial))
            found = {part: take_faults(result_file(trial.folder, part)) for part in parts}
            if not any(found.values()):
                break
        scored = [part for part in parts if result_file(trial.folder, part).exists()]
        if scored:
            is_partial = bool(trial.config.bench.tasks) or any(found.values())
            options = ["--score-dir", "score", *(["--partial-eval"] if is_partial else [])]
            self._bfcl(trial, "evaluate", "--test-category", ",".join(scored), *options)
        return Outcome(
            {part: read_part(trial.folder, part, found[part]) for part in parts},
            read_overall(trial.folder / "score") if scored else {},
            missing=[part for part in self.parts if part not in scored],
        )

    def _bfcl(self, trial: Trial, command: str, *options: str) -> None:
        program = Path(trial.config.bench.home).resolve() / "bfcl" / "bin" / "bfcl"
        environment = {
            "BFCL_PROJECT_ROOT": str(trial.folder),
            "OPENAI_BASE_URL": trial.endpoint,
            "OPENAI_API_KEY": "none",
        }
        arguments = [str(program), command, "--model", MODEL, "--result-dir", "result", *options]
        run_harness(arguments, trial.folder / "bfcl.log", environment, trial.folder)


def generation_options(trial: Trial) -> list[str]:
    temperature, threads = trial.config.eval.sampling.temperature, trial.config.bench.concurrency
    return ["--temperature", str(temperature), "--num-threads", str(threads)]


def site_packages(home: Path) -> list[Path]:
    return sorted((home / "bfcl" / "lib").glob("python3*/site-packages"))


def data_folder(home: Path) -> Path:
    """BFCL's tasks, as its package has them. Raises UserError."""
    BFCL().version(home)
    return site_packages(home)[0] / "bfcl_eval" / "data"


def read_lines(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def write_ids(path: Path, home: Path, parts: tuple[str, ...], tasks: int) -> None:
    """The first tasks of each part, for `bfcl generate --run-ids`."""
    if agentic := [part for part in parts if part in AGENTIC]:
        raise UserError(f"bench.tasks: the tasks of {agentic[0]} build on each other, so set it to 0 or leave it out")
    data = data_folder(home)
    ids = {part: [task["id"] for task in read_lines(data / f"BFCL_v4_{part}.json")[:tasks]] for part in parts}
    path.write_text(json.dumps(ids), encoding="utf-8")


def group(part: str) -> str:
    """The folder that the harness keeps a part in."""
    if part.startswith("memory_"):
        return f"agentic/memory/{part.removeprefix('memory_')}"
    return GROUPS.get(part, "agentic" if part in AGENTIC else "live")


def result_file(folder: Path, part: str) -> Path:
    return folder / "result" / MODEL.replace("/", "_") / group(part) / f"BFCL_v4_{part}_result.json"


def take_faults(path: Path) -> int:
    """Remove what the infrastructure ended, so that the harness runs it again; how many that were."""
    if not path.exists():
        return 0
    results = read_lines(path)
    kept = [result for result in results if not is_fault(result["result"])]
    if len(kept) < len(results):
        path.write_text("".join(json.dumps(result) + "\n" for result in kept), encoding="utf-8")
    if not kept:
        path.unlink()
    return len(results) - len(kept)


def is_fault(result: Any) -> bool:
    """Whether no answer of the model was had. A request that the server refused is an answer: it cannot be made."""
    if not isinstance(result, str) or not result.startswith(FAULT):
        return False
    return REFUSED not in result or TOO_MANY in result


def read_part(folder: Path, part: str, faults: int) -> Part:
    path = folder / "score" / MODEL.replace("/", "_") / group(part) / f"BFCL_v4_{part}_score.json"
    null = NULL_SCORES.get(part, 0.0)
    if not path.exists():
        return Part(None, 0, faults, null)
    head = read_lines(path)[0]
    return Part(100 * head["accuracy"], head["total_count"], faults, null, {"right": head["correct_count"]})


def read_overall(folder: Path) -> dict[str, float]:
    """The harness's own aggregates, of which parts that were not run count as 0."""
    wanted = {"Overall Acc": "overall", "Multi Turn Acc": "multi_turn", "Live Acc": "live", "Non-Live AST Acc": "ast"}
    with (folder / "data_overall.csv").open(encoding="utf-8", newline="") as lines:
        [row] = csv.DictReader(lines)
    return {name: float(row[title].removesuffix("%")) for title, name in wanted.items() if row[title] != "N/A"}
