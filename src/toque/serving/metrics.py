"""Metrics of a server, for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from toque.serving.batcher import Batcher

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """Counts and times of requests.

    Args:
        batcher: Whose queue and rows are told.
    """

    def __init__(self, batcher: Batcher) -> None:
        registry = self._registry = CollectorRegistry()
        self.requests = Counter(
            "toque_requests",
            "Answered requests by path and status.",
            ("path", "status"),
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "toque_prompt_tokens", "Tokens of prompts.", ("model",), registry=registry
        )
        self.tokens = Counter("toque_tokens", "Tokens written.", ("model",), registry=registry)
        self.gone = Counter(
            "toque_clients_gone", "Requests whose client went away.", registry=registry
        )
        self.first_token = Histogram(
            "toque_first_token_seconds",
            "From a request's arrival to its first token.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.seconds = Histogram(
            "toque_request_seconds",
            "From a request's arrival to its last token.",
            buckets=_SECONDS,
            registry=registry,
        )
        waiting = Gauge("toque_waiting_texts", "Texts in the queue.", registry=registry)
        waiting.set_function(lambda: batcher.n_waiting)
        live = Gauge("toque_live_texts", "Texts being written.", registry=registry)
        live.set_function(lambda: batcher.n_live)

    def answered(self, path: str, status: int) -> None:
        """Count an answer."""
        self.requests.labels(path, status).inc()

    def page(self) -> bytes:
        """All of them in the text format."""
        return generate_latest(self._registry)
