"""BFCL-v4: the official `bfcl generate` and `bfcl evaluate`.

The model goes by the name of an entry of BFCL's registry whose handler speaks plain OpenAI chat completions with tools
and takes the address from OPENAI_BASE_URL; in BFCL's own tables it has that entry's name. The handler writes dots in
names of tools as underscores, keeps what the server calls reasoning_content in the history, and evaluates calls of
multi-turn tasks as Python, so only checked calls reach it (`envace.serve.guard`).

Overall, of which a part that was not run counts as 0: 10 % each of non-live, live and irrelevance, 30 % multi-turn,
40 % agentic. The agentic parts are run only where they are named; those that want a web search account, or packages
which the set-up does not have, are refused.

BFCL scores a task of irrelevance right unless a call can be read, so also one whose request was refused. Here such a
task is wrong, in the part and in the overall score.
"""

from __future__ import annotations

import csv
import json
from importlib import metadata
from pathlib import Path
from typing import Any

from envace.benchmarks.benchmark import Outcome, Part, Trial, drop_unfinished, is_set_up, run_harness
from envace.benchmarks.relay import REFUSALS
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
OVERALL_SHARE = {part: 0.05 for part in IRRELEVANCE}
# Nothing that an account needs is passed on, and the other one wants sentence-transformers and FAISS.
UNAVAILABLE = {part: "a web search account" for part in AGENTIC if part.startswith("web_search_")}
UNAVAILABLE |= {"memory_vector": "packages that the set-up does not install"}
# What the harness writes in place of a result when a request failed, and what that says where the request was refused,
# as for a prompt that is too long: that is the model's own failure. A model can say the first words too, but only the
# harness adds the traceback.
ERROR, TRACEBACK = "Error during inference:", "traceback"
REFUSED = tuple(f"Error code: {status}" for status in REFUSALS)
MESSAGE_CHARS = 200


class BFCL:
    name = "bfcl"
    served_as = MODEL
    parts: tuple[str, ...] = (*NON_LIVE, *LIVE, "live_relevance", *IRRELEVANCE, *MULTI_TURN, *AGENTIC)
    default_parts: tuple[str, ...] = tuple(part for part in parts if part not in AGENTIC)

    def version(self, home: Path) -> str:
        found = metadata.distributions(name="bfcl-eval", path=[str(path) for path in site_packages(home)])
        versions = [distribution.version for distribution in found]
        if not versions or not is_set_up(home, self.name):
            raise UserError(f"BFCL is not set up in {home}: run `make bench-setup-bfcl`")
        return versions[0]

    def tools(self, home: Path) -> list[str]:
        """Of all multi-turn tasks: the harness executes what it knows, and one gold answer needs a tool held back."""
        documents = sorted((data_folder(home) / "multi_turn_func_doc").glob("*.json"))
        return sorted({tool["name"] for document in documents for tool in read_lines(document)})

    def run(self, trial: Trial, parts: tuple[str, ...]) -> Outcome:
        check_available(parts)
        for path in sorted(trial.folder.glob("result/**/BFCL_v4_*_result.json")):
            drop_unfinished(path)
        selected = ["--test-category", ",".join(parts)]
        if tasks := trial.config.bench.tasks:
            write_ids(trial.folder / "test_case_ids_to_generate.json", Path(trial.config.bench.home), parts, tasks)
            selected = ["--run-ids"]
        for _ in range(1 + trial.config.bench.retries):
            self._bfcl(trial, "generate", *selected, *generation_options(trial))
            found = {part: take_faults(result_file(trial.folder, part)) for part in parts}
            if not any(found.values()):
                break
        refused = count_refused(trial.folder, parts)
        scored = [part for part in parts if result_file(trial.folder, part).exists()]
        if scored:
            is_partial = bool(trial.config.bench.tasks) or any(found.values())
            options = ["--score-dir", "score", *(["--partial-eval"] if is_partial else [])]
            self._bfcl(trial, "evaluate", "--test-category", ",".join(scored), *options)
        read = {part: read_part(trial.folder, part, found[part], refused[part]) for part in parts}
        overall = read_overall(trial.folder / "score", read) if scored else {}
        return Outcome(read, overall, missing=[part for part in self.parts if part not in scored])

    def _bfcl(self, trial: Trial, command: str, *options: str) -> None:
        program = Path(trial.config.bench.home).resolve() / "bfcl" / "bin" / "bfcl"
        environment = {
            "BFCL_PROJECT_ROOT": str(trial.folder),
            "OPENAI_BASE_URL": trial.endpoint,
            "OPENAI_API_KEY": "none",
        }
        arguments = [str(program), command, "--model", MODEL, "--result-dir", "result", *options]
        run_harness(arguments, trial.folder / "bfcl.log", environment, trial.folder)


def check_available(parts: tuple[str, ...]) -> None:
    if out_of_reach := [part for part in parts if part in UNAVAILABLE]:
        part = out_of_reach[0]
        raise UserError(f"bench.parts: {part} needs {UNAVAILABLE[part]} and cannot be run here; leave it out")


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
    kept = [result for result in results if not is_fault(result)]
    if len(kept) < len(results):
        path.write_text("".join(json.dumps(result) + "\n" for result in kept), encoding="utf-8")
    if not kept:
        path.unlink()
    return len(results) - len(kept)


def is_fault(entry: dict[str, Any]) -> bool:
    """Whether no answer of the model was had. A request that the server refused is an answer: it cannot be made."""
    return is_error(entry) and not is_refused(entry)


def is_refused(entry: dict[str, Any]) -> bool:
    return is_error(entry) and any(refused in entry["result"] for refused in REFUSED)


def is_error(entry: dict[str, Any]) -> bool:
    result = entry["result"]
    return TRACEBACK in entry and isinstance(result, str) and result.startswith(ERROR)


def count_refused(folder: Path, parts: tuple[str, ...]) -> dict[str, int]:
    """Refused tasks by part. Raises UserError if a part has no others: then it is the server that is not right."""
    counts, refused_whole = {}, {}
    for part in parts:
        path = result_file(folder, part)
        results = read_lines(path) if path.exists() else []
        refused = [result["result"] for result in results if is_refused(result)]
        counts[part] = len(refused)
        if refused and len(refused) == len(results):
            refused_whole[part] = " ".join(refused[0].removeprefix(ERROR).split())[:MESSAGE_CHARS]
            path.unlink()  # so that the next run asks again
    if refused_whole:
        part, said = next(iter(refused_whole.items()))
        raise UserError(
            f"every request of {', '.join(refused_whole)} was refused ({part}: {said}): correct what the server "
            "objects to, or leave that out (bench.parts)"
        )
    return counts


def read_part(folder: Path, part: str, faults: int, refused: int) -> Part:
    """details: tasks that are right, and those refused."""
    path = folder / "score" / MODEL.replace("/", "_") / group(part) / f"BFCL_v4_{part}_score.json"
    null = NULL_SCORES.get(part, 0.0)
    if not path.exists():
        return Part(None, 0, faults, null)
    head = read_lines(path)[0]
    right, tasks = head["correct_count"], head["total_count"]
    if part in IRRELEVANCE:
        right -= refused  # each of which the harness has as right
    return Part(100 * right / tasks, tasks, faults, null, {"right": right, "refused": refused})


def read_overall(folder: Path, parts: dict[str, Part]) -> dict[str, float]:
    """The harness's own aggregates, of which parts that were not run count as 0; refused tasks are wrong here too."""
    wanted = {"Overall Acc": "overall", "Multi Turn Acc": "multi_turn", "Live Acc": "live", "Non-Live AST Acc": "ast"}
    with (folder / "data_overall.csv").open(encoding="utf-8", newline="") as lines:
        [row] = csv.DictReader(lines)
    found = {name: float(row[title].removesuffix("%")) for title, name in wanted.items() if row[title] != "N/A"}
    for name, share in OVERALL_SHARE.items():
        if name in parts and parts[name].tasks:
            found["overall"] -= share * 100 * parts[name].details["refused"] / parts[name].tasks
    return found
