"""What a set-up takes of a repository: only the version that is named, from the network or from a folder."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from envace.benchmarks import setup
from envace.benchmarks.checkout import Checkout, check_source, copy_folders, fetched, fingerprint, git_id
from envace.benchmarks.setup import CHECKOUTS, HARNESSES, set_up
from envace.types import UserError

# What stands for pip: it "downloads" a package whose files are given as the last argument, or fails without one.
PIP = """
import sys, zipfile, json, pathlib
files = json.loads(sys.argv[1])
if not files:
    sys.exit("no index")
with zipfile.ZipFile(pathlib.Path(sys.argv[sys.argv.index("--dest") + 1]) / "p.whl", "w") as package:
    for name, text in files.items():
        package.writestr(name, text)
"""


def pip(**files):
    return [sys.executable, "-c", PIP, json.dumps({f"pkg/data/b/{name}.json": text for name, text in files.items()})]


@pytest.fixture
def source(tmp_path):
    """A repository with code and data."""
    folder = tmp_path / "source"
    for name, text in (
        ("src/x/run.py", "run()\n"),
        ("data/a/one.json", "there"),
        ("other/secret.txt", "no"),
        ("root", ""),
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def checkout(source):
    return Checkout(
        url="https://example.org/x",
        tag="v1.2",
        code="src/x",
        fingerprint=fingerprint(source / "src/x"),
        copied=("src/x", "data/a", "data/b"),
        needed=("data/a/one.json", "data/b/two.json"),
        stand_in="other==3",
        stand_in_root="pkg/",
        stand_in_files=(("data/b/two.json", git_id(b"two")),),
    )


def git(folder, *words):
    command = ["git", "-C", str(folder), "-c", "user.name=x", "-c", "user.email=x@example.org", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_what_git_calls_a_file():
    assert git_id(b"hello\n") == "ce013625030ba8dba906f756967f9e9ca394464a"


def test_another_version_is_refused_and_so_is_none(tmp_path, source, checkout):
    (source / "src/x/__pycache__").mkdir()
    (source / "src/x/__pycache__/run.pyc").write_text("compiled")
    check_source(checkout, source)
    (source / "src/x/run.py").write_text("run(everything=True)\n")
    with pytest.raises(UserError, match="is not a checkout of .* at v1.2: src/x is not what it must be"):
        check_source(checkout, source)
    with pytest.raises(UserError, match="is not a checkout of .* at v1.2: src/x is not there"):
        check_source(checkout, tmp_path / "nowhere")


def test_a_file_that_is_missing_comes_from_the_package(tmp_path, source, checkout):
    home = tmp_path / "home"
    copy_folders(checkout, source, home, pip(two="two"), tmp_path / "log")
    assert (home / "data/b/two.json").read_text() == "two" and (home / "data/a/one.json").read_text() == "there"
    assert (home / "src/x/run.py").exists() and not (home / "other").exists() and not (source / "data/b").exists()


def test_another_content_is_refused(tmp_path, source, checkout):
    with pytest.raises(UserError, match="other==3 has another data/b/two.json than v1.2"):
        copy_folders(checkout, source, tmp_path / "home", pip(two="three"), tmp_path / "log")
    assert not (tmp_path / "home/data/b/two.json").exists()


def test_what_cannot_be_had_is_named_with_where_it_is(tmp_path, source, checkout):
    home, log = tmp_path / "home", tmp_path / "log"
    with pytest.raises(UserError, match="lacks data/b/two.json: https://example.org/x at v1.2 has it, and so has"):
        copy_folders(checkout, source, home, pip(), log)
    alone = replace(checkout, stand_in_files=())
    with pytest.raises(UserError, match="lacks data/b/two.json: https://example.org/x at v1.2 has it; put it there"):
        copy_folders(alone, source, home, pip(two="two"), log)


@pytest.mark.parametrize("by", ["tag", "commit"])
def test_what_is_fetched_has_the_version_and_is_gone_afterwards(tmp_path, source, checkout, by):
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"], ["tag", "v1.2"]):
        git(source, *words)
    wanted = "v1.2" if by == "tag" else git(source, "rev-parse", "HEAD")
    (source / "src/x/run.py").write_text("run(everything=True)\n")
    git(source, "commit", "-qam", "y")
    with fetched(replace(checkout, url=source.as_uri(), tag=wanted), None, tmp_path / "log") as folder:
        assert (folder / "data/a/one.json").exists() and (folder / "src/x/run.py").read_text() == "run()\n"
        assert (folder / "root").exists() and not (folder / "other").exists()
    assert not folder.exists()


def test_a_repository_that_cannot_be_reached_is_said(tmp_path, checkout):
    gone = replace(checkout, url=(tmp_path / "no").as_uri())
    with pytest.raises(UserError, match="fetch .* failed .* needs the network once, or --source FOLDER"):
        with fetched(gone, None, tmp_path / "log"):
            pass


def test_a_folder_for_what_comes_from_the_index(tmp_path):
    with pytest.raises(UserError, match="bfcl comes from the package index"):
        set_up("bfcl", tmp_path, tmp_path)


@pytest.mark.parametrize("name", CHECKOUTS)
def test_a_wrong_folder_leaves_what_is_there(tmp_path, name):
    (tmp_path / name).mkdir()
    (tmp_path / name / "kept").write_text("")
    with pytest.raises(UserError, match="is not a checkout"):
        set_up(name, tmp_path, tmp_path / "nowhere")
    assert (tmp_path / name / "kept").exists()


@pytest.mark.parametrize("is_package", [True, False])
def test_a_set_up_is_done_once(tmp_path, source, checkout, monkeypatch, is_package):
    monkeypatch.setitem(CHECKOUTS, "finmcp", replace(checkout, needed=(), is_package=is_package))
    commands = []
    monkeypatch.setattr(setup, "run_step", lambda command, log, hint: commands.append(command[1:]))
    assert not HARNESSES["finmcp"].packages
    home = tmp_path / "home"
    set_up("finmcp", home, source)
    venv, *installs = commands
    assert venv == ["-m", "venv", str(home / "finmcp")] and (home / "finmcp/src/x/run.py").exists()
    assert [Path(words[-1]) for words in installs] == ([source] if is_package else [])
    set_up("finmcp", home, source)
    assert len(commands) == 1 + is_package
