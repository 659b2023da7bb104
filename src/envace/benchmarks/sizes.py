"""How many tasks the parts of each benchmark have, as far as it is known: fewer are a part of it, not all."""

from __future__ import annotations

from collections.abc import Iterable

from envace.benchmarks.tau2 import NULL_RIGHT

TASKS: dict[str, dict[str, int]] = {
    "bfcl": {
        **{"simple_python": 400, "simple_java": 100, "simple_javascript": 50},
        **{"multiple": 200, "parallel": 200, "parallel_multiple": 200, "irrelevance": 240},
        **{"live_simple": 258, "live_multiple": 1053, "live_parallel": 16, "live_parallel_multiple": 24},
        **{"live_relevance": 16, "live_irrelevance": 884},
        **{"multi_turn_base": 200, "multi_turn_miss_func": 200},
        **{"multi_turn_miss_param": 200, "multi_turn_long_context": 200},
    },
    "tau2": {part: tasks for part, (_, tasks) in NULL_RIGHT.items()},
    "vita": {"delivery": 100, "instore": 100},
}
FINMCP_TASKS = 613  # its three parts together


def known_tasks(benchmark: str, parts: Iterable[str]) -> int:
    """Of those of `parts` whose number is known, together."""
    return sum(TASKS.get(benchmark, {}).get(part, 0) for part in parts)
