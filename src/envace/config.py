"""Every setting of a run, typed and documented; YAML files with `inherits`, then `key=value` overrides.

OmegaConf does the parsing, merging and type checks (structured configs over dataclasses). The comment behind a field
is its documentation, and what `--help` prints. A user's mistake is a ConfigError: one line with the key, where it was
set and the nearest valid name. No heavy library is imported here, so that a mistake shows at once.
"""

from __future__ import annotations

import argparse
import inspect
import io
import json
import math
import platform
import subprocess
import tokenize
from collections.abc import Iterator
from dataclasses import is_dataclass
from difflib import SequenceMatcher, get_close_matches
from functools import cache
from importlib import metadata
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast, get_args, get_origin, get_type_hints

import yaml
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from envace.rules import COMBINATIONS, MAY_BE_ZERO, RULES, SECRET, Rule
from envace.settings import Config

COMMAND_LINE = "command line"
LIBRARIES = ("torch", "transformers", "accelerate", "deepspeed", "peft", "datasets", "numpy", "omegaconf")


class ConfigError(Exception):
    """A mistake in a user's settings, said in one line."""


def load_config(path: str | None, overrides: list[str]) -> Config:
    """The defaults, then the file (what it inherits first), then `key=value` overrides; the later one wins."""
    config, origins = OmegaConf.structured(Config), {}
    layers = _read(Path(path)) if path is not None else []
    for source, values in layers + [_parse(text) for text in overrides]:
        for key, value in _flatten(values, source):
            _set(config, key, value, source)
            origins[key] = source
    if missing := sorted(OmegaConf.missing_keys(config)):
        raise ConfigError(f"{missing[0]} must be set ({path or COMMAND_LINE}): add it or pass {missing[0]}=...")
    result = cast(Config, OmegaConf.to_object(config))
    validate(result, origins)
    return result


def validate(config: Config, origins: dict[str, str] | None = None) -> None:
    """Refuse values that cannot work. `origins` says where a key was set, for the message."""
    for key, holds, advice in [*_rules_by_type(), *RULES]:
        value = attrgetter(key)(config)
        if not holds(value):
            shown = "..." if key in SECRET else value
            raise ConfigError(f"{key}={shown} ({(origins or {}).get(key, 'default')}): {advice}")
    for key, is_met, advice in COMBINATIONS:
        if not is_met(config):
            raise ConfigError(f"{key}={attrgetter(key)(config)} ({(origins or {}).get(key, 'default')}): {advice}")


def save_config(config: Config, path: str | Path) -> None:
    """Write every setting as YAML that `load_config` reads back to an equal config."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(OmegaConf.structured(config), path)


def settings_of(config: Config) -> dict[str, Any]:
    """Every setting by its dotted key."""
    keys = [key for key, setting in schema().items() if not is_dataclass(setting.kind)]
    return {key: attrgetter(key)(config) for key in keys}


@cache
def default_settings() -> dict[str, Any]:
    """What every setting is if nobody sets it, as JSON has it.

    A setting that came after a file was written had its default then: a new one's default changes nothing.
    """
    return json.loads(json.dumps(settings_of(load_config(None, ["model.path="]))))


def versions() -> dict[str, str]:
    """Versions of Python and of the libraries that decide the numbers; in a git clone the commit too."""
    found = {d.name: d.version for d in metadata.distributions() if d.name in LIBRARIES}
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        found["git_commit"] = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        pass  # no git, or no clone: the versions still say what ran
    return {"python": platform.python_version(), **found}


def settings_parser(description: str) -> argparse.ArgumentParser:
    """The command line of an entry point that takes settings: --config PATH and key=value, every key in its --help."""
    keys = [
        f"  {key}={'(must be set)' if default == MISSING else default}\n      {doc} ({_expected(kind)})"
        for key, (kind, default, doc) in schema().items()
        if not is_dataclass(kind)
    ]
    parser = argparse.ArgumentParser(
        description=description,
        epilog="\n".join(["keys and their defaults:", *keys]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="PATH", help="YAML file; `inherits: other.yaml` in it names its base")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that win over the file")
    return parser


class Setting(NamedTuple):
    kind: Any
    default: Any
    doc: str


@cache
def schema() -> dict[str, Setting]:
    """Every dotted key, sections included."""

    def walk(section: Any, prefix: str) -> Iterator[tuple[str, Setting]]:
        tokens = tokenize.generate_tokens(io.StringIO(inspect.getsource(type(section))).readline)
        docs = {t.line.split(":")[0].strip(): t.string[1:].strip() for t in tokens if t.type == tokenize.COMMENT}
        for name, kind in get_type_hints(type(section)).items():
            value = getattr(section, name)
            yield prefix + name, Setting(kind, value, docs.get(name, ""))
            if is_dataclass(kind):
                yield from walk(value, f"{prefix}{name}.")

    return dict(walk(Config(), ""))


def nearest(key: str) -> str:
    """What a wrong key was probably meant to be: the keys that end in the same name, else the most similar one."""

    def similarity(valid: str) -> float:
        pairs = [(key, valid), (_name(key), _name(valid))]
        return sum(SequenceMatcher(None, a, b).ratio() for a, b in pairs)

    same_name = [valid for valid in schema() if _name(valid) == _name(key)]
    ranked = sorted(same_name or schema(), key=similarity, reverse=True)
    return " or ".join(ranked[: 3 if same_name else 1])


def _name(key: str) -> str:
    return key.rpartition(".")[2]


def _expected(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    if is_dataclass(kind):
        return "a section of keys"
    return kind.__name__ if isinstance(kind, type) else str(kind)


def _reason(error: Exception) -> str:
    problem = error.problem if isinstance(error, yaml.MarkedYAMLError) else None
    return problem or str(error).partition("\n")[0]


def _rules_by_type() -> Iterator[Rule]:
    for key, setting in schema().items():
        if setting.kind is int:
            least = 0 if _name(key) in MAY_BE_ZERO else 1
            yield key, least.__le__, f"must be >= {least}"
        elif setting.kind is float:
            yield key, math.isfinite, "must be a finite number"


def _read(path: Path, heirs: tuple[Path, ...] = ()) -> list[tuple[str, dict[Any, Any]]]:
    """(file, its settings) for a file and everything it inherits, base first."""
    if path.resolve() in [heir.resolve() for heir in heirs]:
        raise ConfigError(f"inherits goes round in a circle: {' -> '.join(map(str, [*heirs, path]))}")
    try:
        text = path.read_bytes()
    except OSError as error:
        asked_by = f"inherits in {heirs[-1]}" if heirs else f"{COMMAND_LINE}, --config"
        close = get_close_matches(path.name, [file.name for file in path.parent.glob("*.y*ml")], n=1, cutoff=0)
        hint = f": did you mean {path.parent / close[0]}?" if close else ""
        raise ConfigError(f"cannot read {path} ({asked_by}), {str(error.strerror).lower()}{hint}") from None
    try:
        root = yaml.compose(text, yaml.SafeLoader)
        if not isinstance(root, yaml.MappingNode | None):  # OmegaConf would take a lone word for a key
            raise ConfigError(f"{path}: expected a mapping of keys to values, such as 'seed: 0'")
        settings = cast(dict[Any, Any], OmegaConf.to_container(OmegaConf.load(io.BytesIO(text))))
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
        line = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{path}{line}: invalid YAML, {_reason(error)}") from None
    base = settings.pop("inherits", None)
    if base is not None and not isinstance(base, str):
        raise ConfigError(f"inherits={base!r} ({path}): expected the name of one YAML file")
    inherited = _read(path.parent / base, (*heirs, path)) if base else []
    return [*inherited, (str(path), settings)]


def _parse(override: str) -> tuple[str, dict[Any, Any]]:
    key, equals, value = override.partition("=")
    if not equals:
        raise ConfigError(f"'{key}' has no '=' ({COMMAND_LINE}): write key=value; did you mean {nearest(key)}?")
    try:
        return COMMAND_LINE, cast(dict[Any, Any], OmegaConf.to_container(OmegaConf.from_dotlist([override])))
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeError) as error:
        raise ConfigError(f"{key}={value} ({COMMAND_LINE}): invalid YAML, {_reason(error)}") from None


def _flatten(values: dict[Any, Any], source: str, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys down to the fields; the value of a field may be a mapping itself."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        if "." in str(name):
            raise ConfigError(f"'{key}' ({source}): nest the names, dots are for the command line")
        if isinstance(value, dict) and value and (key not in schema() or is_dataclass(schema()[key].kind)):
            yield from _flatten(value, source, f"{key}.")
        else:
            yield key, value


def _set(config: DictConfig, key: str, value: Any, source: str) -> None:
    if key not in schema():
        raise ConfigError(f"unknown key '{key}' ({source}): did you mean {nearest(key)}?")
    if "${" in str(value):  # OmegaConf would look it up, also in the environment; here a value is what it says
        raise ConfigError(f"{key}={value!r} ({source}): references with ${{...}} are not supported, write the value")
    kind = schema()[key].kind
    value = "" if value is None and kind is str else value  # `key=` empties it
    shown = "..." if key in SECRET else repr(value)
    expected = ConfigError(f"{key}={shown} ({source}): expected {_expected(kind)}")
    if is_dataclass(kind) and value != {}:  # _flatten goes into sections, so this is no section
        raise expected
    try:
        OmegaConf.update(config, key, value)
    except OmegaConfBaseException:
        raise expected from None
