"""What a run leaves behind: a whole model, or an adapter; and what is said of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast

from torch import nn
from transformers import PreTrainedModel

from toque.config import RunConfig
from toque.data.store.token_store import TokenStore
from toque.models.flops import ParameterCounts
from toque.models.loading.export import save_adapter, save_model
from toque.models.lora.files import WEIGHTS
from toque.models.lora.layers import is_adapted
from toque.training.runtime import Runtime

WritingContext = Callable[[], AbstractContextManager[Any]]


def writing_in(model: nn.Module, runtime: Runtime) -> WritingContext:
    """The context in which a model in training can write texts.

    Whole models are float32 and need none; frozen weights beside an adapter may be held in the
    format autocast computes in, and then only work with it.
    """
    return runtime.autocast if is_adapted(model) else nullcontext


def keep_model(
    model: nn.Module, store: TokenStore, folder: Path, *, card: str, base_hash: str | None
) -> str:
    """Write the finished model, or the adapter alone, and say where it is and how large."""
    core, tokenizer = cast("PreTrainedModel", model), store.path / "tokenizer"
    if not is_adapted(model):
        save_model(core, tokenizer, folder, card=card)
        return f"The model is in {folder}"
    save_adapter(core, tokenizer, folder, card=card, base_hash=base_hash or "")
    size = (folder / WEIGHTS).stat().st_size / 1e6
    return (
        f"The adapter, {size:,.1f} MB, is in {folder}; `toque export {folder.parent} --to DIR` "
        "merges it into its base"
    )


def adapter_words(config: RunConfig, counts: ParameterCounts) -> str:
    """The trained share, for the lines a run begins with; nothing when all is trained."""
    if config.adapter is None:
        return ""
    base = counts.total - counts.trainable
    return (
        f"{config.adapter.kind} adapter of {counts.trainable:,} parameters "
        f"({counts.trainable / base:.2%}, {counts.trainable * 4 / 1e6:,.1f} MB), "
    )
