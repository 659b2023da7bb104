#!/usr/bin/env bash
# One pass over what only a GPU can show, in minutes on one GPU: the demo's first losses on CUDA against the CPU,
# and speed and memory at the shape of Qwen3-8B. Uses .venv or else the python3 that it finds (PYTHON=...), and installs
# nothing but wheels in bench/wheels, if it lacks some.
#
#     bench/gpu_check.sh [OUT]        writes OUT/gpu_check.md and OUT/gpu_check.json (default: runs/gpu_check)
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-$(test -x .venv/bin/python && echo .venv/bin/python || echo python3)}
OUT=${1:-runs/gpu_check}
export PYTHONPATH=src:.

missing=$("$PYTHON" - <<'PY'
from importlib.util import find_spec
needed = ("torch", "transformers", "accelerate", "peft", "omegaconf", "tensorboard", "tqdm", "safetensors")
print(" ".join(name for name in needed if find_spec(name) is None))
PY
)
if [ -n "$missing" ] && [ -d bench/wheels ]; then
    "$PYTHON" -m pip install --quiet --no-index --find-links bench/wheels $missing
elif [ -n "$missing" ]; then
    echo "error: $PYTHON lacks $missing; put their wheels into bench/wheels (pip download) or install them" >&2
    exit 1
fi
exec "$PYTHON" bench/gpu_check.py --out "$OUT"
