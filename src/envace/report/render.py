"""A table as Markdown and as LaTeX. Text in it is data: whatever it holds, it stays in its cell and shows as itself."""

from __future__ import annotations

from dataclasses import dataclass, field

MARKDOWN_SPECIAL = frozenset("\\`*_{}[]<>|#~&$")
LATEX_SPECIAL = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "\\": "\\textbackslash{}",
    "~": "\\textasciitilde{}",
    "^": "\\textasciicircum{}",
    **{"<": "\\textless{}", ">": "\\textgreater{}", "|": "\\textbar{}"},
    **{"[": "{[}", "*": "{*}"},  # behind \\\\ they would be its arguments
    "†": "$\\dagger$",
    "τ": "$\\tau$",
    "²": "$^2$",
    "×": "$\\times$",
    "–": "--",
    "−": "$-$",
}


@dataclass(frozen=True)
class Cell:
    """marks: letters of notes, raised behind the text."""

    text: str
    marks: str = ""


@dataclass(frozen=True)
class Table:
    """rows: as many cells as columns. notes: (mark, text); "" for one that belongs to the whole table."""

    label: str
    caption: str
    columns: list[str]
    rows: list[list[Cell]]
    notes: list[tuple[str, str]] = field(default_factory=list)


def printable(text: str) -> str:
    """One line without control characters, which would break or disguise a table."""
    return "".join(character if character.isprintable() else "�" for character in " ".join(text.split()))


def markdown_text(text: str) -> str:
    return "".join(f"\\{c}" if c in MARKDOWN_SPECIAL else c for c in printable(text))


def latex_text(text: str) -> str:
    return "".join(LATEX_SPECIAL.get(c, c) for c in printable(text))


def markdown(table: Table) -> str:
    lines = [[markdown_text(column) for column in table.columns]]
    lines += [[":---", *["---:"] * (len(table.columns) - 1)]]
    lines += [[markdown_text(cell.text) + _raised(cell.marks) for cell in row] for row in table.rows]
    notes = [f"- {_raised(mark)}{' ' if mark else ''}{markdown_text(text)}" for mark, text in table.notes]
    heading = f"## {table.label}. {markdown_text(table.caption)}"
    return "\n".join([heading, "", *(f"| {' | '.join(line)} |" for line in lines), "", *notes]) + "\n"


def _raised(marks: str) -> str:
    return f"<sup>{marks}</sup>" if marks else ""


def latex(table: Table) -> str:
    """A table environment that needs no package; its notes stand below it."""
    rows = [[latex_text(column) for column in table.columns]]
    rows += [[latex_text(cell.text) + _superscript(cell.marks) for cell in row] for row in table.rows]
    head, *body = [f"{' & '.join(row)} \\\\" for row in rows]
    notes = [f"{_superscript(mark)}{' ' if mark else ''}{latex_text(text)}\\par" for mark, text in table.notes]
    return "\n".join(
        [
            f"% {table.label}",
            "\\begin{table}",
            "\\centering\\scriptsize",
            f"\\caption{{{latex_text(table.caption)}}}",
            f"\\begin{{tabular}}{{l{'r' * (len(table.columns) - 1)}}}",
            *("\\hline", head, "\\hline", *body, "\\hline"),
            "\\end{tabular}\\par",
            *notes,
            "\\end{table}",
            "",
        ]
    )


def _superscript(marks: str) -> str:
    return f"\\textsuperscript{{{latex_text(marks)}}}" if marks else ""
