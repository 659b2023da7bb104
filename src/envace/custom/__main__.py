"""Write the template of an executable environment of your own.

python -m envace.custom NAME [--tools python|mcp]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from envace.custom.new import TEMPLATES, new_environment
from envace.types import UserError


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m envace.custom", description=__doc__.splitlines()[0])
    parser.add_argument("name", help="of the environment: a Python identifier")
    parser.add_argument("--tools", default="python", metavar="|".join(TEMPLATES), help="where its tools come from")
    arguments = parser.parse_args()
    try:
        written = new_environment(arguments.name, arguments.tools, Path.cwd())
    except UserError as error:
        sys.exit(f"error: {error}")
    print(*(path.relative_to(Path.cwd()) for path in written), sep="\n")


if __name__ == "__main__":
    main()
