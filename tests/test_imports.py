"""Dependencies point one way: no module imports one of a higher layer, and a few files are stricter still."""

import ast
import sys
from importlib.util import resolve_name
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "envace"
FILES = sorted([*PACKAGE.rglob("*.py"), *ROOT.glob("*.py")])

BASE = {"types", "settings", "rules", "config", "model_folders", "__init__"}
PURE = {"advantages", "losses", "batching", "checklist", "rewards", "metrics"}
LAYERS = [
    BASE,
    {"prompts"} | PURE,
    {
        "chat",
        "schemas",
        "filters",
        "claims",
        "environments",
        "scoring",
        "attention",
        "kv_cache",
        "checkpoints",
        "memory",
    }
    | {"outage", "endpoints", "interrupts", "keys", "failures", "console", "board"},
    {"episodes", "demonstrations"},
    {"rehearsal", "gate", "generation", "demo", "cm2", "custom"},
    {"policy", "data", "verdicts", "tracking", "report", "judge", "simulator", "services", "team"}
    | {"records", "benchmarks"},
    {
        "evaluation",
        "committed",
        "doctor",
        "launch",
        "elastic",
        "merge",
        "ablations",
        "dynamics",
        "tts",
        "tables",
        "serve",
    },
    {"entry point"},
]
LAYER = {module: height for height, layer in enumerate(LAYERS) for module in layer}
ENGINES = ("accelerate", "deepspeed", "peft", "torch.distributed")


def module_of(path: Path) -> str:
    """The name in LAYERS: files of a sub-package count as that package, scripts as entry points."""
    if path.parent == ROOT or path.name == "__main__.py":
        return "entry point"
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_names(path: Path) -> set[str]:
    """Dotted names imported anywhere in a file, also inside functions; `from a import b` gives a and a.b."""
    package = ".".join(path.parent.parts[len(PACKAGE.parent.parts) :])
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            source = resolve_name("." * node.level + (node.module or ""), package)
            names |= {source, *(f"{source}.{alias.name}" for alias in node.names)}
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path):
    module, names = module_of(path), imported_names(path)
    ours = {name.split(".")[1] for name in names if name.startswith("envace.")}
    foreign = {name.split(".")[0] for name in names} - {"envace"}
    assert {module} | ours <= LAYER.keys(), "a new module needs a place in LAYERS"
    assert not {other for other in ours if LAYER[other] > LAYER[module]}, "imports a higher layer"
    if module in BASE:
        assert ours <= {"settings", "rules"}
    if module in PURE:
        assert ours <= {"types", "checklist"} and foreign <= {"torch", *sys.stdlib_module_names}
    if module == "demo":
        assert ours <= BASE | {"demo", "prompts", "chat", "environments", "rewards"}
    if module != "policy":
        assert not {name for name in names if f"{name}.".startswith(tuple(f"{engine}." for engine in ENGINES))}
