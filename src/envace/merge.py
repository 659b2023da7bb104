"""Merge a trained adapter into its base model, giving an ordinary Hugging Face folder.

python -m envace.merge ADAPTER OUTPUT [--dtype bfloat16]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from envace.policy import merge_adapter
from envace.settings import ModelConfig
from envace.types import UserError


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m envace.merge", description=__doc__.splitlines()[0])
    parser.add_argument("adapter", type=Path, help="folder of the adapter, such as runs/x/rl")
    parser.add_argument("output", type=Path, help="folder to write")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of the merged weights")
    arguments = parser.parse_args()
    try:
        merge_adapter(arguments.adapter, arguments.output, ModelConfig(dtype=arguments.dtype))
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
