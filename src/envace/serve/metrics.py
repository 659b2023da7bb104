"""What Prometheus reads at /metrics."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from envace.serve.engine import Prepared

SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)


class Metrics:
    """Of one server; /health and /metrics themselves are not counted. tokens: of replies as their usage says."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        options: dict[str, Any] = {"registry": self.registry}
        self.requests = Counter(
            "envace_requests", "Requests by HTTP status; 499: the client left", ["status"], **options
        )
        self.in_flight = Gauge("envace_requests_in_flight", "Requests that are being answered", **options)
        self.latency = Histogram(
            "envace_request_seconds", "From the request to the end of its answer", buckets=SECONDS, **options
        )
        self.tokens = Counter("envace_tokens", "Tokens: prompt, completion, rehearsal (sampled)", ["kind"], **options)
        self.rehearsals = Counter("envace_rehearsals", "Imagined trajectories", **options)
        self.memories = Counter("envace_memories", "Conversations that got a memory", ["cached"], **options)
        self.retries = Counter("envace_backend_retries", "Requests sent once more, as the line broke", **options)
        self.refused_calls = Counter("envace_refused_calls", "Replies whose calls were made text", **options)
        self.batches = Histogram("envace_batch_jobs", "Jobs generated together", buckets=ROWS, **options)

    def used(self, usage: Any) -> None:
        """usage: of a reply; that of another server may be anything."""
        for kind in ("prompt", "completion"):
            tokens = usage.get(f"{kind}_tokens") if isinstance(usage, dict) else None
            if isinstance(tokens, int) and tokens >= 0:
                self.tokens.labels(kind).inc(tokens)

    def rehearsed(self, memory: Prepared, *, is_cached: bool) -> None:
        self.memories.labels(str(is_cached).lower()).inc()
        if not is_cached:
            self.rehearsals.inc(memory.n)
            self.tokens.labels("rehearsal").inc(memory.sampled_tokens)

    def text(self) -> bytes:
        return generate_latest(self.registry)
