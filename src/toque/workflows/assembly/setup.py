"""Setup of a run: what its model is trained and scored with."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel

from toque.config import RunConfig
from toque.data.loader.batch_stream import BatchStream
from toque.data.store.token_store import TokenStore
from toque.training.distributed.sharing import Sharing
from toque.training.runtime import Runtime


@dataclass(frozen=True)
class Setup:
    """A model with its data, and how and where it is computed."""

    config: RunConfig
    store: TokenStore
    model: PreTrainedModel
    """On its device."""
    stream: BatchStream
    """The training batches; how they are laid out says how the model reads examples."""
    runtime: Runtime
    sharing: Sharing | None = None
    """How the ranks of a run hold the model; None where this process alone does."""

    @property
    def sharded(self) -> Sharing | None:
        """`sharing`, where every rank holds a part of the weights and all compute together."""
        return self.sharing if self.sharing is not None and self.sharing.is_sharded else None
