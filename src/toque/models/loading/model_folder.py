"""Checks of a model folder before a model is built from it: sizes, headers and lengths.

A folder may come from anyone. A vocabulary of 2^40 is refused within milliseconds, and transformers
would first allocate terabytes.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from toque.errors import CheckpointError
from toque.storage.array_headers import open_weights
from toque.storage.no_follow import refuse_endless_files

if TYPE_CHECKING:
    from torch import Tensor

# Bytes of a config.json; 1 MiB is enough for names of 20,000 classes.
_MAX_BYTES: Final = 8 << 20
_MAX_LAYERS: Final = 1_000
_LARGEST: Final = (1 << 31) - 1
_SIZE = re.compile(
    r"(?:.*_)?(?:n|num|d)_.*|.*_(?:size|dim|positions)|max_position_embeddings"
)
_LAYERS = re.compile(r"n_layers?|(?:num_)?(?:hidden_|decoder_)?layers")
_SHARE = re.compile(r".*(?:dropout|pdrop)(?:_rate|_prob)?|dropout_rate")
_SMALL = re.compile(r".*_(?:eps|epsilon)")
_DAMAGED: Final = "It is damaged or malicious. Copy the model from its source again."


def read_config_json(folder: Path) -> dict[str, Any]:
    """Read a model's config.json. Raise a CheckpointError if it is not a readable object."""
    refuse_endless_files(folder)
    file = folder / "config.json"
    try:
        n_bytes = file.stat().st_size
        if n_bytes > _MAX_BYTES:
            raise CheckpointError(
                f"{file} has {n_bytes:,} bytes. The limit for a config.json is {_MAX_BYTES:,}. "
                f"{_DAMAGED}"
            )
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise CheckpointError(
            f"{file} cannot be read as JSON: {error}. Copy it again."
        ) from error
    if not isinstance(raw, dict):
        raise CheckpointError(
            f"{file} must contain an object, not a {type(raw).__name__}. Copy it again."
        )
    return raw


def check_config(raw: Mapping[str, Any], file: Path, n_weights: int | None) -> None:
    """Raise a CheckpointError for an impossible size or share, or too few weights in the files."""
    if raw.get("quantization_config") is not None:
        raise CheckpointError(
            f"{file} has a quantization_config, but Toque reads weights of 16 or 32 bits only. Use "
            "the model that was quantised."
        )
    _check_tokens(raw, file)
    entries = _size_entries(raw)
    for name, value in entries.items():
        if _SIZE.fullmatch(name) and value is not None:
            largest = _MAX_LAYERS if _LAYERS.fullmatch(name) else _LARGEST
            if type(value) is not int or not 1 <= value <= largest:
                raise _out_of_range(
                    file, name, value, f"a whole number from 1 to {largest:,}"
                )
        elif allowed := allowed_share(name, value):
            raise _out_of_range(file, name, value, allowed)
        elif isinstance(value, float) and not math.isfinite(value):
            raise _out_of_range(file, name, value, "a finite number")
    if not entries:
        return
    needed = _min_weights(entries)
    if n_weights is not None and needed > n_weights:
        raise too_few_weights(file, needed, n_weights)


def too_few_weights(file: Path, needed: int, stored: int) -> CheckpointError:
    """Build the error about a config that needs more weights than its folder has."""
    return CheckpointError(
        f"{file} describes a model of at least {needed:,} weights ({needed * 4 / 1e9:,.1f} GB "
        f"in float32), but the folder has {stored:,}. {_DAMAGED}"
    )


def _check_tokens(raw: Mapping[str, Any], file: Path) -> None:
    """Check entries that count things outside the model: its tokens, and names of classes."""
    labels = raw.get("num_labels", 1)
    if not (type(labels) is int and 0 <= labels <= _MAX_BYTES):
        raise _out_of_range(
            file, "num_labels", labels, f"a whole number from 0 to {_MAX_BYTES:,}"
        )
    for name in (name for name in raw if name.endswith("_token_id")):
        ids = raw[name] if isinstance(raw[name], list) else [raw[name]]
        if not all(i is None or (type(i) is int and -1 <= i <= _LARGEST) for i in ids):
            raise _out_of_range(
                file, name, raw[name], f"null or a token id below {_LARGEST:,}"
            )


def _min_weights(entries: Mapping[str, Any]) -> int:
    """Count the embeddings and matrices that a model of these sizes must have, without a head.

    GPT-2 has 124,439,808 weights (Radford et al. 2019). Only biases and norms do not count:

    >>> _min_weights({"n_embd": 768, "n_layer": 12, "vocab_size": 50257, "n_positions": 1024})
    124318464
    """

    def first(*names: str, default: int = 0) -> int:
        return next(
            (int(entries[n]) for n in names if entries.get(n) is not None), default
        )

    width = first("n_embd", "hidden_size", "d_model")
    inner = first("n_inner", "intermediate_size", "d_ff", default=4 * width)
    heads = first("num_attention_heads", "n_head", "num_heads", default=1)
    head = first("head_dim", "d_kv", default=width // heads)
    shared = first("num_key_value_heads", default=heads)
    # Queries and outputs, keys and values, and the two matrices after them.
    layer = 2 * width * heads * head + 2 * width * shared * head + 2 * width * inner
    layers = first("n_layer", "num_hidden_layers", "num_layers", default=1)
    if "d_kv" in entries:  # a T5 also has a decoder
        layers += first("num_decoder_layers", default=layers)
    positions = first("n_positions") if "n_embd" in entries else 0
    buckets = first("relative_attention_num_buckets") * heads
    return width * (first("vocab_size") + positions) + layers * layer + buckets


def _size_entries(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that decide the size of a model, with defaults.

    For a type that is not in `MODEL_TYPES`, these are numbers of layers only.
    """
    from transformers import PretrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from toque.models.families import MODEL_TYPES

    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in MODEL_TYPES:
        return {name: value for name, value in raw.items() if _LAYERS.fullmatch(name)}
    config_class: Any = CONFIG_MAPPING[kind]
    base = set(PretrainedConfig.__dataclass_fields__)
    defaults = {
        name: field.default
        for name, field in config_class.__dataclass_fields__.items()
        if name not in base and isinstance(field.default, int | float | None)
    }
    values = {
        config_class.attribute_map.get(name, name): value for name, value in raw.items()
    }
    return {name: values.get(name, default) for name, default in defaults.items()}


def allowed_share(name: str, value: object) -> str:
    """Return the allowed range of a dropout or epsilon if the value is outside of it; else ""."""
    if _SHARE.fullmatch(name) and not _is_between(value, 0, 1):
        return "a number from 0 to 1"
    if _SMALL.fullmatch(name) and not _is_between(value, 1e-30, 1):
        return "a number above 0 and up to 1"
    return ""


def _is_between(value: object, low: float, high: float) -> bool:
    return (
        isinstance(value, int | float)
        and type(value) is not bool
        and low <= value <= high
    )


def _out_of_range(
    file: Path, name: str, value: object, allowed: str
) -> CheckpointError:
    shown = repr(value)
    shown = shown if len(shown) <= 60 else f"{shown[:60]}..."
    return CheckpointError(f"{file}: {name} is {shown}. Allowed: {allowed}. {_DAMAGED}")


_INDEX: Final = "model.safetensors.index.json"
_PICKLES: Final = {".bin", ".pt", ".pth", ".pkl", ".ckpt"}


@dataclass(frozen=True)
class StoredWeights:
    """Tensors of a model folder by their names in its files.

    A file is open only while a tensor is read, because mapped parts of a file count as memory of
    the process.
    """

    files: Mapping[str, Path]
    shapes: Mapping[str, tuple[int, ...]]

    def name_of(self, parameter: str, prefix: str) -> str | None:
        """Return the name of a parameter in the files, with or without its base model's prefix."""
        bare = parameter.removeprefix(f"{prefix}.")
        names = (parameter, bare, f"{prefix}.{parameter}")
        return next((name for name in names if name in self.files), None)

    def float32(self, name: str) -> Tensor:
        """Read a tensor to new float32 memory. Raise a CheckpointError if its file is damaged."""
        import torch  # not needed for errors in a config.json

        with open_weights(self.files[name]) as tensors:
            tensor: Tensor = tensors.get_tensor(name)
            return tensor.to(torch.float32, copy=True)


def stored_weights(folder: Path) -> StoredWeights:
    """Check the weight files of a model folder. Raise a CheckpointError if one is damaged."""
    files: dict[str, Path] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for file in _weight_files(folder):
        with open_weights(
            file, missing=f", and {folder / _INDEX} names it."
        ) as tensors:
            for name in tensors.keys():  # noqa: SIM118  # not a mapping
                files[name] = file
                shapes[name] = tuple(tensors.get_slice(name).get_shape())
    return StoredWeights(files, shapes)


def _weight_files(folder: Path) -> list[Path]:
    if (
        folder / "model.safetensors"
    ).exists():  # transformers also prefers it to an index
        return [folder / "model.safetensors"]

    if (folder / _INDEX).exists():
        try:
            index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
            names = sorted(set(index["weight_map"].values()))
            outside = [name for name in names if not name or name != Path(name).name]
        except (
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            RecursionError,
        ) as error:
            raise CheckpointError(
                f"{folder / _INDEX} cannot be read: {error!r}. Copy the model again."
            ) from error
        if outside:
            raise CheckpointError(
                f"{folder / _INDEX} names the file {outside[0]!r}; only plain names in its folder "
                f"are allowed. {_DAMAGED}"
            )
        return [folder / name for name in names]

    pickles = sorted(p.name for p in folder.iterdir() if p.suffix in _PICKLES)
    if pickles:
        raise CheckpointError(
            f"{folder} has weights only in {', '.join(pickles)}, a pickle, which can run any code "
            "when it is loaded. Toque does not read pickles. Use a checkpoint with "
            "model.safetensors, or convert this one on a machine you trust: from_pretrained, then "
            "save_pretrained."
        )

    raise CheckpointError(
        f"{folder} has a config.json but no model.safetensors. Copy the model again."
    )
