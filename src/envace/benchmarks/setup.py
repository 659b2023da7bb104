"""Put an official harness, at a pinned version, in a virtual environment of its own below .bench.

python -m envace.benchmarks.setup bfcl [--home .bench]
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

from envace.benchmarks.benchmark import ending
from envace.tracking import setup_logging
from envace.types import UserError

logger = logging.getLogger("envace")

STAMP = "installed.json"


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
}


def set_up(name: str, home: Path) -> None:
    """Does nothing where it was done before. Raises UserError."""
    harness = HARNESSES[name]
    folder = home / name
    wanted = hashlib.sha256(repr(harness).encode()).hexdigest()
    stamp = folder / STAMP
    if stamp.exists() and json.loads(stamp.read_text(encoding="utf-8"))["sha256"] == wanted:
        logger.info("%s is set up in %s", name, folder)
        return
    home.mkdir(parents=True, exist_ok=True)
    log = home / f"{name}-setup.log"
    log.unlink(missing_ok=True)
    logger.info("setting up %s in %s: some minutes, once", name, folder)
    shutil.rmtree(folder, ignore_errors=True)
    _run([interpreter(harness.python), "-m", "venv", str(folder)], log)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    _run([*pip, "--no-deps", *harness.alone], log)
    _run([*pip, *harness.packages], log)
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


def _run(command: list[str], log: Path) -> None:
    with log.open("ab") as said:
        status = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, check=False).returncode
    if status:
        raise UserError(
            f"`{' '.join(command[:4])} ...` failed ({log} ends with: {ending(log)}): it needs a package index once"
        )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m envace.benchmarks.setup", description=__doc__.splitlines()[0])
    parser.add_argument("benchmark", choices=HARNESSES)
    parser.add_argument("--home", type=Path, default=Path(".bench"), help="where it goes (default .bench)")
    arguments = parser.parse_args()
    setup_logging()
    try:
        set_up(arguments.benchmark, arguments.home)
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
