"""Prometheus metrics of a server."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

from toque.models.generation.prefixes import PrefixCache

_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
"""Upper bounds of the histogram of seconds per token."""
_REQUEST_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
"""Upper bounds of the histograms of seconds per request."""


class _Batch(Protocol):
    """Numbers of a batch; see `Batcher`."""

    @property
    def n_waiting(self) -> int: ...

    @property
    def n_live(self) -> int: ...

    @property
    def prefixes(self) -> Sequence[PrefixCache]: ...


class BatchMetrics:
    """Prometheus metrics of requests, and of the queue and rows of a batcher."""

    def __init__(self, batcher: _Batch) -> None:
        self._registry = CollectorRegistry()
        count: Any = partial(Counter, registry=self._registry)
        time_of: Any = partial(Histogram, registry=self._registry)
        gauge: Any = partial(Gauge, registry=self._registry)

        self._answers = count(
            "toque_requests",
            "Answered requests by path and status.",
            ("path", "status"),
        )
        self._gone = count("toque_clients_gone", "Requests whose client went away.")
        self.prompt_tokens = count(
            "toque_prompt_tokens", "Tokens of prompts.", ("model",)
        )
        self.tokens = count("toque_tokens", "Tokens generated.", ("model",))

        self.first_token = time_of(
            "toque_first_token_seconds",
            "From a request's arrival to its first token.",
            buckets=_REQUEST_BUCKETS,
        )
        self.seconds = time_of(
            "toque_request_seconds",
            "From a request's arrival to its last token.",
            buckets=_REQUEST_BUCKETS,
        )
        self.token_seconds = time_of(
            "toque_time_per_output_token_seconds",
            "Mean time per token of a text after its first token; one value per text.",
            buckets=_TOKEN_BUCKETS,
        )

        waiting = gauge("toque_waiting_texts", "Texts in the queue.")
        waiting.set_function(lambda: batcher.n_waiting)
        live = gauge("toque_live_texts", "Texts being generated.")
        live.set_function(lambda: batcher.n_live)
        stored = gauge("toque_prefix_cache_bytes", "Memory of finished texts.")
        stored.set_function(lambda: sum(one.n_bytes for one in batcher.prefixes))
        reused = gauge(
            "toque_prefix_cache_reused_tokens", "Tokens that were not computed again."
        )
        reused.set_function(lambda: sum(one.n_reused for one in batcher.prefixes))

    def count_answer(self, path: str, status: int, /) -> None:
        """Count the answer to a request."""
        self._answers.labels(path, status).inc()

    def count_lost_client(self) -> None:
        """Count a client that disconnected before the end of its request."""
        self._gone.inc()

    def page(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)
