"""Start weights of an adapter that continues an earlier one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from toque.config.schema_methods import AdapterConfig
from toque.errors import ConfigError
from toque.models.lora.adapter_files import (
    WEIGHTS,
    fill_adapter,
    fill_tables,
    is_adapter_folder,
    read_config,
    refuse_another_base,
    saved_modules,
)
from toque.models.lora.layers import ADAPTER
from toque.models.lora.tables import named_tables
from toque.storage.atomic import sha256_of
from toque.user_paths import named_path


def start_folder(adapter: AdapterConfig) -> Path | None:
    """Return the folder of the adapter that a new one continues, or None for new weights.

    Raises:
        ConfigError: The folder has no adapter.
    """
    if adapter.start_from is None:
        return None
    folder = named_path(adapter.start_from)
    for candidate in (folder, folder / "model"):  # a run has its adapter in `model`
        if is_adapter_folder(candidate):
            return candidate
    raise ConfigError(
        f"adapter.start_from is {adapter.start_from}, which has no adapter. Set it to the folder "
        "of an adapter or of a finished run that trained one, or to null for new weights."
    )


def with_values_of_start(adapter: AdapterConfig) -> AdapterConfig:
    """Return settings with the rank, scale, kind and layers of the adapter to continue.

    Raises:
        ConfigError: A setting differs from this adapter, or it has a rank of its own for a layer.
    """
    folder = start_folder(adapter)
    if folder is None:
        return adapter
    config = read_config(folder)
    has_other_layers = config.layers_to_transform or config.exclude_modules
    is_pattern = isinstance(config.target_modules, str)
    has_own_ranks = config.rank_pattern or config.alpha_pattern
    has_both = config.use_dora and config.use_rslora
    if has_own_ranks or has_other_layers or is_pattern or has_both:
        raise ConfigError(
            f"The adapter {folder} selects its layers by a pattern, or has different ranks or "
            "scales for some of them, so it cannot be continued. Export it as a complete model, "
            "and start from this model."
        )
    kind = "dora" if config.use_dora else "rslora" if config.use_rslora else "lora"
    values = {
        "kind": kind,
        "r": config.r,
        "alpha": config.lora_alpha,
        "target_modules": tuple(sorted(config.target_modules)),
    }
    for name in (adapter.model_fields_set | {"kind"}) & values.keys():
        value = getattr(adapter, name)
        chosen = tuple(sorted(value)) if isinstance(value, tuple) else value
        if chosen not in ("auto", values[name]):
            raise ConfigError(
                f"adapter.{name} is {value}, but the adapter {folder}, which adapter.start_from "
                f"continues, has {values[name]}. Set it to that."
            )
    # `load_start` compares `also_train`, because a shared matrix has two names.
    also_train = adapter.also_train or named_tables(saved_modules(config))
    return adapter.model_copy(update=values | {"also_train": also_train})


def load_start(model: PreTrainedModel, adapter: AdapterConfig) -> None:
    """Load the weights of the adapter to continue into an attached adapter.

    Raises:
        ConfigError: The adapter trained the rows of other tokens, or other whole matrices.
        CheckpointError: The weights do not fit the model.
    """
    folder = start_folder(adapter)
    is_outline = any(
        p.device.type == "meta" for p in model.parameters() if p.requires_grad
    )
    if folder is None or is_outline:
        return
    config: Any = model.peft_config[ADAPTER]
    start = read_config(folder)
    saved = saved_modules(start)
    if saved != (config.modules_to_save or []):
        raise ConfigError(
            f"adapter.also_train is [{', '.join(adapter.also_train)}], but the adapter {folder}, "
            f"which adapter.start_from continues, trained {', '.join(saved) or 'no matrix'} "
            "entirely. Remove adapter.also_train."
        )
    if config.trainable_token_indices != start.trainable_token_indices:
        raise ConfigError(
            f"The adapter {folder} trained the rows of other tokens. Use the tokenizer that it was "
            "trained with."
        )
    fill_adapter(model, folder)


def load_start_tables(model: PreTrainedModel, adapter: AdapterConfig | None) -> None:
    """Load the embedding and head of the adapter to continue, after the base was hashed.

    Raises:
        ConfigError: Copies of a shared matrix differ.
    """
    folder = None if adapter is None else start_folder(adapter)
    if folder is not None:
        fill_tables(model, folder)


def refuse_base_of_other(
    adapter: AdapterConfig | None, base_hash: Callable[[], str]
) -> None:
    """Raise a CheckpointError if the adapter to continue was trained on another base."""
    folder = None if adapter is None else start_folder(adapter)
    if folder is not None:
        refuse_another_base(folder, base_hash)


def start_hash(adapter: AdapterConfig | None, base_hash: str | None) -> str | None:
    """Return the hash of a base and the adapter to continue. Without one, it is the base's."""
    folder = None if adapter is None else start_folder(adapter)
    if folder is None:
        return base_hash
    return f"{base_hash} {sha256_of(folder / WEIGHTS)}"
