"""Weights of a checkpoint for a new run or a finished model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from torch import nn

from toque.data.store.store_manifest import read_manifest
from toque.data.store.token_store import TokenStore
from toque.data.tokenizer.codec import load_codec
from toque.data.tokenizer.portable import tokenizer_differences
from toque.data.tokenizer.tokenizer_folder import resolve_tokenizer
from toque.errors import CheckpointError, DataError, in_shell
from toque.storage.atomic import sha256_of
from toque.training.checkpoint.resume import load_model_tensors, model_tensors
from toque.training.checkpoint.saved import MANIFEST, Checkpoint, verify_checkpoint
from toque.training.checkpoint.store import CheckpointStore
from toque.training.trainer import Trainer
from toque.workflows.results import Model, model_folder, refuse_absent_start

_BASE_HASH = "base_sha256"
"""Key in a checkpoint's state for the hash of the frozen weights below an adapter."""


def start_folder(start: Model) -> Path:
    """Return the checkpoint that a new run gets its weights from.

    If `start` is a run, return its newest checkpoint.
    """
    refuse_absent_start(start)
    path = model_folder(start)
    newest = CheckpointStore(path / "checkpoints").newest_valid()
    return path if newest is None else newest.path


def load_start_weights(
    trainer: Trainer, store: TokenStore, start: Path, say: Callable[[str], None]
) -> None:
    """Load the weights of a checkpoint into a new run.

    The tokenizer and the frozen weights below an adapter must be the same as in the run of the
    checkpoint. If a comparison is impossible, report that through `say`.

    Raises:
        CheckpointError: The tokenizer or the frozen weights differ.
    """
    checkpoint = verify_checkpoint(start)
    trainer.begun_from = sha256_of(start / MANIFEST)
    base = trainer.base_sha256
    refuse_another_base(checkpoint, base)
    if base is not None and _BASE_HASH not in checkpoint.state():
        say(
            f"note: {checkpoint.path} does not record the frozen weights below its adapter, so "
            "they could not be compared with model.start_from"
        )
    _refuse_another_tokenizer(checkpoint, store, say)
    load_weights(trainer.model, checkpoint)


def refuse_another_base(checkpoint: Checkpoint, base: str | None) -> None:
    """Compare the frozen weights below an adapter with the weights of the checkpoint's run.

    A best model does not record its frozen weights, so it is accepted.

    Args:
        checkpoint: Checkpoint of the adapter.
        base: SHA-256 of the frozen weights, or None without an adapter.

    Raises:
        CheckpointError: The weights differ.
    """
    recorded = checkpoint.state().get(_BASE_HASH, base)
    if recorded != base:
        raise CheckpointError(
            f"{checkpoint.path} was trained with other frozen weights (SHA-256 {recorded}, now "
            f"{base}; None means no adapter), so it cannot be used with the current weights. Set "
            "model.start_from and adapter as in that run."
        )


def _refuse_another_tokenizer(
    checkpoint: Checkpoint, store: TokenStore, say: Callable[[str], None]
) -> None:
    """Raise a CheckpointError if the checkpoint and the store have different tokenizers.

    If the checkpoint's tokenizer is not on this machine, skip the check and report that through
    `say`.
    """
    if checkpoint.manifest.data_fingerprint == store.fingerprint:
        return
    folder = _tokenizer_folder(checkpoint)
    if folder is None:
        say(
            f"note: {checkpoint.path} has no store and no finished model on this machine, so its "
            f"tokenizer could not be compared with the tokenizer of {store.path}"
        )
        return
    differing = tokenizer_differences(load_codec(folder), store.codec())
    if differing:
        raise CheckpointError(
            f'{checkpoint.path} was trained with another tokenizer ("one") than {store.path} '
            f'("the other"): {"; ".join(differing)}. Prepare another store with the tokenizer of '
            f"the checkpoint: {in_shell(f'model.tokenizer={folder}')} data.store=stores/another."
        )


def _tokenizer_folder(checkpoint: Checkpoint) -> Path | None:
    """Return the folder of a checkpoint's tokenizer: in its store, or in its run's model."""
    data = checkpoint.manifest.settings.get("data")
    store = data.get("store") if isinstance(data, dict) else None
    if isinstance(store, str):
        # The store may have been prepared again since, or with an older version of Toque.
        with suppress(DataError, ValueError):
            fingerprint = read_manifest(Path(store)).fingerprint
            if fingerprint == checkpoint.manifest.data_fingerprint:
                return Path(store) / "tokenizer"
    model = checkpoint.path.absolute().parent.parent / "model"
    with suppress(DataError):
        return resolve_tokenizer(str(model)) if model.is_dir() else None
    return None


def load_weights(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Load the weights of a checkpoint: all weights, or only the trainable weights."""
    stored = checkpoint.tensors("model", model_tensors(model).get)
    load_model_tensors(model, stored, where=str(checkpoint.path))
