"""How close judging comes to its ideal time: 64 trajectories x 10 checks, a judge that takes 200 ms and fails 5 %.

    python bench/judge_speed.py

Against the scripted HTTP server of the tests, at concurrency 16. Ideal: every try takes the latency, 16 at once, and
the retries wait once. The second ratio takes the server's own times, so that a busy machine does not count.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
os.environ.setdefault("NO_PROXY", "127.0.0.1")

from test_judge import CONCURRENCY, LATENCY, judge_all  # noqa: E402

from envace.endpoints import FIRST_BACKOFF  # noqa: E402


def main() -> None:
    seconds, log = judge_all(LATENCY)
    ideal = len(log) * LATENCY / CONCURRENCY + FIRST_BACKOFF
    served = sum(request.finished - request.arrived for request in log) / CONCURRENCY + FIRST_BACKOFF
    print(f"{len(log)} tries in {seconds:.2f} s; ideal {ideal:.2f} s, ratio {seconds / ideal:.3f}")
    print(f"by the server's own times {served:.2f} s, ratio {seconds / served:.3f}")


if __name__ == "__main__":
    main()
