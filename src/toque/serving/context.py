"""Context of a server's routes: the models and what writes with them."""

from __future__ import annotations

from dataclasses import dataclass

from toque.serving.batcher import Batcher
from toque.serving.limits import Limits
from toque.serving.metrics import Metrics
from toque.serving.served import ServedModels


@dataclass(frozen=True)
class Serving:
    """What routes work with."""

    models: ServedModels
    batcher: Batcher
    limits: Limits
    metrics: Metrics
