"""The documents against the code: their commands, their settings, their links, and the walk-through of the README."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
from docs_commands import COMMANDS, RUN, SMALL, NotRun

from envace.config import load_config, schema
from envace.serve.requests import parse_request, read_json

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
FENCE = re.compile(r"^(?P<indent> *)```(?P<kind>\w*)\n(?P<body>.*?)^(?P=indent)```$", re.M | re.S)
SHELL = ("", "bash", "sh", "console")  # fenced blocks of these kinds hold commands and nothing else
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")
SETTING = re.compile(r"`([a-z]\w*(?:\.[a-z]\w*)+)(?:=[^`]*)?`")
# Written elsewhere and not there yet.


def blocks(text: str, *kinds: str) -> list[str]:
    return [dedent(m["body"]) for m in FENCE.finditer(text) if m["kind"] in kinds]


def commands_of(block: str) -> list[str]:
    """One a line, as it is typed: without comments, on one line."""
    lines = [re.sub(r"(^|\s+)#\s.*$", "", line) for line in block.replace("\\\n", " ").splitlines()]
    return [" ".join(line.split()) for line in lines if line.strip()]


def documented() -> dict[str, list[str]]:
    """command -> the documents that show it."""
    found: dict[str, list[str]] = {}
    for path in DOCUMENTS:
        for block in blocks(path.read_text(encoding="utf-8"), *SHELL):
            for command in commands_of(block):
                found.setdefault(command, []).append(path.name)
    return found


def recipe(command: str, folder: Path) -> list[str]:
    """What `make` would run, word by word. STAMP: as if everything was installed."""
    asked = [*shlex.split(command), "-n", "--no-print-directory", "STAMP=Makefile"]
    result = subprocess.run(asked, cwd=folder, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    return shlex.split(result.stdout.replace("\\\n", " "))


def test_every_command_has_an_entry_and_every_entry_is_documented():
    found = documented()
    assert not found.keys() - COMMANDS.keys(), "commands without an entry in docs_commands.py"
    assert not COMMANDS.keys() - found.keys(), "entries that no document shows"


def test_what_is_named_as_its_test_exists():
    named = {check.covered_by for check in COMMANDS.values() if isinstance(check, NotRun) and check.covered_by}
    assert named and all((ROOT / "tests" / file).is_file() for file in named)


@pytest.mark.parametrize("command", [c for c, check in COMMANDS.items() if check != RUN])
def test_a_command_that_is_not_run_is_well_formed(command):
    assert subprocess.run(["bash", "-n", "-c", command], timeout=60).returncode == 0
    words = recipe(command, ROOT) if command.startswith("make ") else shlex.split(command)
    if command.startswith("make "):
        check_python(words)
    elif words[0] == "curl":
        body = words[words.index("-d") + 1]
        assert parse_request(read_json(body.encode()), model="m").messages


def check_python(words: list[str]) -> None:
    """Its script or module exists and knows its options; its config exists, and every override is a setting of it."""
    assert words[0] == ".venv/bin/python"
    sources = [ROOT / "src/envace/config.py"]
    for flag, name in zip(words, words[1:], strict=False):
        if flag == "-m" and name.startswith(("envace", "bench")):
            sources.append(module_file(name))
    scripts = [word for word in words[1:] if re.fullmatch(r"\w+\.py", word)]
    assert all((ROOT / script).is_file() for script in scripts)
    text = "".join(source.read_text() for source in sources)
    for option in [word for word in words if word.startswith("--") and "=" not in word and len(sources) > 1]:
        assert f'"{option}"' in text, f"{words}: no option {option}"
    if "--config" in words:
        at = words.index("--config")
        load_config(str(ROOT / words[at + 1]), with_a_model(words[at + 2 :]))


def module_file(name: str) -> Path:
    """What `python -m NAME` runs."""
    inside = ROOT / "src" if name.startswith("envace") else ROOT
    path = inside.joinpath(*name.split("."))
    file = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    assert file.is_file(), f"there is no module {name}"
    return file


def with_a_model(overrides: list[str]) -> list[str]:
    return overrides if any(word.startswith("model.path=") for word in overrides) else ["model.path=x", *overrides]


def test_a_command_that_is_wrong_is_found():
    for command, fault in [
        ("make sft CONFIG=configs/qwen3_9b.yaml", "cannot read .*qwen3_9b"),
        ('make rl ARGS="rl.clip_epsilon=0.1"', "unknown key 'rl.clip_epsilon'"),
        ('make rl ARGS="rl.lr=high"', "rl.lr='high'"),
        ('make tts ARGS="--number 1"', "no option --number"),
        ("make sftt", "No rule to make target"),
    ]:
        with pytest.raises(Exception, match=fault):
            test_a_command_that_is_not_run_is_well_formed(command)


def test_commands_are_read_as_they_are_typed():
    block = 'make a   # why\n\nmake b ARGS="x=1 \\\n    y=2"\n# only a comment\nmake c X=#1\n'
    assert commands_of(block) == ["make a", 'make b ARGS="x=1 y=2"', "make c X=#1"]
    assert blocks("1. text\n\n   ```\n   make a\n   ```\n\n```yaml\nb: 1\n```\n", *SHELL) == ["make a\n"]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_python_and_yaml_that_is_shown_can_be_read(path):
    text = path.read_text(encoding="utf-8")
    for block in blocks(text, "python"):
        compile(dedent(block), path.name, "exec")
    for block in blocks(text, "json"):
        json.loads(block)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    targets = [link for link in LINK.findall(path.read_text(encoding="utf-8")) if "://" not in link]
    places = {(path.parent / link).resolve().relative_to(ROOT.resolve()).as_posix() for link in targets}
    assert not {place for place in places if not (ROOT / place).exists()}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_settings_that_are_named_exist(path):
    sections = {key.partition(".")[0] for key in schema() if "." in key}
    named = [key for key in SETTING.findall(path.read_text(encoding="utf-8")) if key.partition(".")[0] in sections]
    files = {f"{stem}.{end}" for stem in sections for end in ("md", "py", "json", "yaml", "png")}
    assert not set(named) - schema().keys() - files


# Running them


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """The repository as somebody would have it who follows the README: the code can be changed, nothing was run."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("Makefile", "train_sft.py", "train_rl.py", "evaluate.py"):
        shutil.copy(ROOT / name, folder)
    for name in ("src", "configs", "tests/data"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / ".venv").symlink_to(sys.prefix)
    return folder


def run(words: list[str], folder: Path) -> str:
    """PYTHONPATH: the changed code, and not what is installed."""
    environment = {
        "PYTHONPATH": str(folder / "src"),
        "PATH": "/usr/bin:/bin",
        "OMP_NUM_THREADS": "1",
        "HOME": str(folder),
    }
    result = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, f"{shlex.join(words)}\n{result.stdout[-2000:]}\n{result.stderr[-2000:]}"
    return result.stdout


def change_the_advantage(folder: Path) -> None:
    """What the README's walk-through says, with what it shows."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    function, entry, choice = blocks(text, "python")
    [settings] = blocks(text, "yaml")
    advantages, names = folder / "src/envace/advantages.py", folder / "src/envace/settings.py"
    before = advantages.read_text()
    after = re.sub(r"^BASELINES = .*\n", lambda _: f"{function}\n\n{entry}", before, flags=re.M)
    assert after != before
    advantages.write_text(after)
    before = names.read_text()
    after = re.sub(r"^    baseline: .*\n", lambda _: f"    {choice.strip()}\n", before, flags=re.M)
    assert after != before
    names.write_text(after)
    (folder / "configs/mine.yaml").write_text(settings)


@pytest.mark.slow
def test_commands_are_run(clone):
    """Every command that is marked so, in its order, in small: its own settings, and behind them those of SMALL."""
    import datasets

    change_the_advantage(clone)
    records = json.loads((ROOT / "tests/data/cm2_rl.json").read_text(encoding="utf-8"))
    parquet = clone / "data/cm2/rl_train.parquet"
    parquet.parent.mkdir(parents=True)
    datasets.Dataset.from_list(records[:1]).to_parquet(parquet)  # all of them mix types within a column
    for command in [c for c, check in COMMANDS.items() if check == RUN]:
        words = recipe(command, clone) if command.startswith("make ") else shlex.split(command)
        takes_settings = "--config" in words or "envace.demo" in words
        run([*words, *(small(command) if takes_settings else [])], clone)
        if command.startswith("make rl ARGS") and not (clone / "runs/tts").exists():
            shutil.copytree(clone / "runs/demo/rl", clone / "runs/tts/seed0/rl")
    assert "baseline: batch" in (clone / "runs/mine/rl.config.yaml").read_text()
    for folder in ("runs/demo/seed0/rl", "runs/mine"):
        assert "real_success" in json.loads((clone / folder / "evaluation.json").read_text())


def small(command: str) -> list[str]:
    exported = ["checkpoint.export_every=1"] if "export_every" in command else []
    samples = [] if command == "make demo" else ["eval.samples=1"]  # which it sets itself
    return [*SMALL.split(), *samples, *exported]
