"""Write the template of an executable environment of your own.

python -m envace.custom NAME [--tools python|mcp]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from envace.console import add_options, command
from envace.custom.new import TEMPLATES, new_environment


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m envace.custom", description=__doc__.splitlines()[0])
    parser.add_argument("name", help="of the environment: a Python identifier")
    parser.add_argument("--tools", default="python", metavar="|".join(TEMPLATES), help="where its tools come from")
    add_options(parser)
    arguments = parser.parse_args()
    with command(arguments, interrupted="interrupted"):
        written = new_environment(arguments.name, arguments.tools, Path.cwd())
        print(*(path.relative_to(Path.cwd()) for path in written), sep="\n")


if __name__ == "__main__":
    main()
