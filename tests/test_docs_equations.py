"""docs/algorithm.md: each equation stands in the docstring of the function that it names, and in no other docstring."""

import ast
import re
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENT = ROOT / "docs" / "algorithm.md"
SOURCES = sorted([*(ROOT / "src").rglob("*.py"), *ROOT.glob("*.py")])
SECTION = re.compile(
    r"^#{3,4} (?P<name>.+)\n\n`(?P<file>\S+)`: `(?P<function>\w+)`\n\n(?P<equation>(?: {4}.+\n)+)", re.M
)


class Equation(NamedTuple):
    name: str
    file: str
    function: str
    lines: list[str]


def equations(text: str) -> list[Equation]:
    return [
        Equation(m["name"], m["file"], m["function"], [line.strip() for line in m["equation"].splitlines()])
        for m in SECTION.finditer(text)
    ]


def docstrings(paths: list[Path]) -> dict[tuple[str, str], str]:
    """(file, function or class; "" for the module) -> docstring."""
    found = {}
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
                name = "" if isinstance(node, ast.Module) else node.name
                found[path.relative_to(ROOT).as_posix(), name] = ast.get_docstring(node) or ""
    return found


def places(text: str, known: dict[tuple[str, str], str]) -> list[tuple[str, str]]:
    """Whose docstring holds a text, as a term of its own: k3 is not found in k3_ratio, nor at the end of a word."""
    pattern = re.compile(rf"(?<!\w){re.escape(text)}(?![\w^])")
    return [place for place, docstring in known.items() if pattern.search(docstring)]


EQUATIONS = equations(DOCUMENT.read_text(encoding="utf-8"))
DOCSTRINGS = docstrings(SOURCES)


def test_every_section_with_an_equation_is_read():
    text = DOCUMENT.read_text(encoding="utf-8")
    assert len(EQUATIONS) == len(re.findall(r"^`\S+\.py`: `", text, re.M)) > 20
    assert len({equation.name for equation in EQUATIONS}) == len(EQUATIONS)


@pytest.mark.parametrize("equation", EQUATIONS, ids=lambda e: e.name)
def test_searching_an_equation_lands_on_the_one_function_that_computes_it(equation):
    home = (equation.file, equation.function)
    assert home in DOCSTRINGS, "there is no such function"
    assert places(equation.name, DOCSTRINGS) == [home], "its name"
    for line in equation.lines:
        found = [place for place, text in DOCSTRINGS.items() if starts_a_line(line, text)]
        assert found == [home], line


def starts_a_line(equation: str, docstring: str) -> bool:
    """Whether a line of the docstring is the equation: alone, behind a name, or before a remark on its letters."""
    return any(
        re.fullmatch(rf"(?:[^=]*: )?{re.escape(equation)}(?:, .*)?", line.strip()) for line in docstring.split("\n")
    )


def test_the_functions_of_the_step_table_exist():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    [table] = re.findall(r"^\| stage \|.*?\n\n", text, re.M | re.S)
    named = {name for line in table.strip().splitlines()[2:] for name in re.findall(r"`([\w.]+)`", line.split("|")[2])}
    code = "".join(path.read_text(encoding="utf-8") for path in SOURCES)
    functions = {name for _, name in DOCSTRINGS}
    constants = {name for name in named if name.isupper() and f"\n{name} = " in code}
    assert {name.rpartition(".")[2] for name in named - constants} <= functions and len(named) > 10


def test_an_equation_that_is_missing_or_stands_twice_is_found():
    known = {("a.py", "f"): "Gap: g = a - b", ("a.py", "g"): "See Gap.", ("b.py", "h"): "k3_ratio: r = k * x"}
    assert places("Gap", known) == [("a.py", "f"), ("a.py", "g")]
    assert places("k3", known) == []
    assert starts_a_line("g = a - b", "Gap: g = a - b") and starts_a_line("g = a - b", "\n    g = a - b\n")
    assert not starts_a_line("g = a - b", "g = a - b + c") and not starts_a_line("r = k", "k3_ratio: r = k * x")
    [read] = equations("### Gap\n\n`a.py`: `f`\n\n    g = a - b\n    h = g\n\ntext\n")
    assert read == Equation("Gap", "a.py", "f", ["g = a - b", "h = g"])
