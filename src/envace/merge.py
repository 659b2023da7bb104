"""Merge a trained adapter into its base model, giving an ordinary Hugging Face folder.

python -m envace.merge ADAPTER OUTPUT [--dtype bfloat16]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from envace.console import add_options, command
from envace.policy import merge_adapter
from envace.settings import ModelConfig


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m envace.merge", description=__doc__.splitlines()[0])
    parser.add_argument("adapter", type=Path, help="folder of the adapter, such as runs/x/rl")
    parser.add_argument("output", type=Path, help="folder to write")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of the merged weights")
    add_options(parser)
    arguments = parser.parse_args()
    with command(arguments, interrupted="interrupted: nothing was written"):
        merge_adapter(arguments.adapter, arguments.output, ModelConfig(dtype=arguments.dtype))


if __name__ == "__main__":
    main()
