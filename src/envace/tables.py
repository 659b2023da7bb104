"""Tables 1 to 3 and Figures 3 to 6 of the paper, with our own runs beside what is published.

    python -m envace.tables runs/a runs/b [--name runs/a=EnvACE-8B] [--out runs/tables]

Each run is the run_dir of evaluate.py with benchmark=...; all its <benchmark>/results.json are read. Writes tables.md,
tables.tex and figure3.png to figure6.png. A row is the name of the run's model (its folder, or its name at a server),
or what --name says; with a name that the paper has, such as EnvACE-8B, it stands in that line. Names such as GRPO-8B,
Per-role-1.7B and EnvACE-4B put it in Figures 3 and 4 too. An exported checkpoint (step-000010) belongs to the training
above its folder `exports`, or to the one that --name says, and is in Figure 5. Without any run only the published
numbers are there.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from envace.console import add_options, command, conclude
from envace.report.paper_figures import draw_all
from envace.report.render import Table, latex, markdown
from envace.report.results import read_results
from envace.report.tables import tables
from envace.types import UserError

SUBJECT = "EnvACE (arXiv 2608.06197): published numbers and our own runs"
FIGURES = {
    "figure3.png": "Figure 3. Training variants",
    "figure4.png": "Figure 4. Sizes",
    "figure5.png": "Figure 5. Over RL steps",
    "figure6.png": "Figure 6. Number of rehearsals",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m envace.tables",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="*", type=Path, help="run_dir folders of benchmarks")
    parser.add_argument("--name", action="append", default=[], metavar="RUN=NAME", help="what a run's row is called")
    parser.add_argument("--out", type=Path, default=Path("runs/tables"), help="folder to write (default runs/tables)")
    add_options(parser)
    arguments = parser.parse_args()
    with command(arguments, interrupted="interrupted"):
        write(arguments.runs, names_of(arguments.name), arguments.out)


def names_of(pairs: list[str]) -> dict[Path, str]:
    """Raises UserError for what is no RUN=NAME."""
    names = {}
    for pair in pairs:
        run, _, name = pair.partition("=")
        if not run or not name.strip():
            raise UserError(f"--name {pair}: write RUN=NAME, such as runs/a=EnvACE-8B")
        names[Path(run)] = name.strip()
    return names


def write(runs: list[Path], names: dict[Path, str], out: Path) -> None:
    """Raises UserError."""
    results = read_results(runs, names)
    made = tables(results)
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "tables.md").write_text(in_markdown(made), encoding="utf-8")
        (out / "tables.tex").write_text(in_latex(made), encoding="utf-8")
        draw_all(results, out)
    except OSError as error:
        raise UserError(f"cannot write {error.filename or out}: {error.strerror or error}") from error
    conclude({f"{len(results)} results": f"{out / 'tables.md'}, {out / 'tables.tex'} and figures 3 to 6"})


def in_markdown(made: list[Table]) -> str:
    figures = [f"## {caption}\n\n![{caption}]({file})\n" for file, caption in FIGURES.items()]
    return "\n".join([f"# {SUBJECT}\n", *map(markdown, made), *figures])


def in_latex(made: list[Table]) -> str:
    r"""For \input; the table of all runs is long and stays in Markdown."""
    head = f"% {SUBJECT}. Needs no package. Names with other letters than ASCII want LuaLaTeX or XeLaTeX.\n"
    return "\n".join([head, *map(latex, made[:-1])])


if __name__ == "__main__":
    main()
