"""Bounds of a model's `config.json`, checked before anything is built from it.

The folder may come from anyone. Every size must be a whole number within reason, and the weights
that the sizes come to must be in the folder's own files: a vocabulary of 2^40 is refused in
milliseconds, where transformers would first ask for its terabytes.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from toque.errors import CheckpointError

MOST_BYTES: Final = 8 << 20
"""Of a config.json; those with a name for each of 20,000 classes have one."""
MOST_LAYERS: Final = 1_000
_LARGEST: Final = (1 << 31) - 1
_SIZE = re.compile(r"(?:.*_)?(?:n|num|d)_.*|.*_(?:size|dim|positions)|max_position_embeddings")
_LAYERS = re.compile(r"n_layer|num_(?:hidden_|decoder_)?layers")
_SHARE = re.compile(r".*(?:dropout|pdrop)(?:_rate|_prob)?|dropout_rate")
_SMALL = re.compile(r".*_(?:eps|epsilon)")
_AGAIN: Final = "It is damaged or made to harm: copy the model from its source again."


def read_config_json(folder: Path) -> dict[str, Any]:
    """The object in a model's config.json.

    Raises:
        CheckpointError: it cannot be read, or is none.
    """
    file = folder / "config.json"
    try:
        if file.stat().st_size > MOST_BYTES:
            raise CheckpointError(
                f"{file} is {file.stat().st_size:,} bytes long; no model's is above "
                f"{MOST_BYTES:,}. {_AGAIN}"
            )
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read as JSON: {error}. Copy it again.") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{file} holds a {type(raw).__name__}, not an object. Copy it again.")
    return raw


def check_config(raw: Mapping[str, Any], file: Path, n_weights: int | None) -> None:
    """Refuse sizes and shares that no model has.

    Args:
        raw: the object of a config.json.
        file: where it lies, for the message.
        n_weights: numbers in the folder's weight files; None where there are none to compare.

    Raises:
        CheckpointError: naming the entry, what it is and what is allowed.
    """
    if raw.get("quantization_config") is not None:
        raise CheckpointError(
            f"{file} says that the weights are quantised (quantization_config), and only weights "
            "of 16 or 32 bits are read here. Take the model they were made from."
        )
    _check_tokens(raw, file)
    values = _own_entries(raw)
    for name, value in values.items():
        if _SIZE.fullmatch(name) and value is not None:
            most = MOST_LAYERS if _LAYERS.fullmatch(name) else _LARGEST
            if type(value) is not int or not 1 <= value <= most:
                raise _outside(file, name, value, f"a whole number from 1 to {most:,}")
        elif _SHARE.fullmatch(name) and not _is_between(value, 0, 1):
            raise _outside(file, name, value, "a number from 0 to 1")
        elif _SMALL.fullmatch(name) and not _is_between(value, 1e-30, 1):
            raise _outside(file, name, value, "a number above 0 and up to 1")
        elif isinstance(value, float) and not math.isfinite(value):
            raise _outside(file, name, value, "a finite number")
    if not values:
        return
    needed = least_weights(values)
    if n_weights is not None and needed > n_weights:
        raise CheckpointError(
            f"{file} describes a model of at least {needed:,} weights ({needed * 4 / 1e9:,.1f} GB "
            f"in float32), and the files beside it hold {n_weights:,}. The two do not belong "
            "together. Copy the model from its source again."
        )


def _check_tokens(raw: Mapping[str, Any], file: Path) -> None:
    """The entries that count what is outside the model: its tokens, and names of classes."""
    labels = raw.get("num_labels", 1)
    if not (type(labels) is int and 0 <= labels <= MOST_BYTES):
        raise _outside(file, "num_labels", labels, f"a whole number from 0 to {MOST_BYTES:,}")
    for name in (name for name in raw if name.endswith("_token_id")):
        ids = raw[name] if isinstance(raw[name], list) else [raw[name]]
        if not all(i is None or (type(i) is int and -1 <= i <= _LARGEST) for i in ids):
            raise _outside(file, name, raw[name], f"null or a number of a token below {_LARGEST:,}")


def least_weights(values: Mapping[str, Any]) -> int:
    """Weights that a model of these sizes has at least: embeddings and matrices, no head.

    Of the 124,439,808 weights of GPT-2 (Radford et al. 2019) only biases and norms are left out:

    >>> least_weights({"n_embd": 768, "n_layer": 12, "vocab_size": 50257, "n_positions": 1024})
    124318464
    """

    def of(*names: str, default: int = 0) -> int:
        return next((int(values[n]) for n in names if values.get(n) is not None), default)

    width = of("n_embd", "hidden_size", "d_model")
    inner = of("n_inner", "intermediate_size", "d_ff", default=4 * width)
    heads = of("num_attention_heads", "n_head", "num_heads", default=1)
    head = of("head_dim", "d_kv", default=width // heads)
    shared = of("num_key_value_heads", default=heads)
    # Queries and outputs, keys and values, and the two matrices after them.
    layer = 2 * width * heads * head + 2 * width * shared * head + 2 * width * inner
    layers = of("n_layer", "num_hidden_layers", "num_layers", default=1)
    if "d_kv" in values:  # the decoder's have attention to the source besides
        layers += of("num_decoder_layers", default=layers)
    positions = of("n_positions") if "n_embd" in values else 0
    buckets = of("relative_attention_num_buckets") * heads
    return width * (of("vocab_size") + positions) + layers * layer + buckets


def _own_entries(raw: Mapping[str, Any]) -> dict[str, Any]:
    """What decides the model's size, defaults included; nothing of a kind that is not known."""
    from transformers import PretrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from toque.models.families import MODEL_TYPES

    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in MODEL_TYPES:
        return {}
    of_kind: Any = CONFIG_MAPPING[kind]
    base = set(PretrainedConfig.__dataclass_fields__)
    own = {
        name: field.default
        for name, field in of_kind.__dataclass_fields__.items()
        if name not in base and isinstance(field.default, int | float | None)
    }
    given = {of_kind.attribute_map.get(name, name): value for name, value in raw.items()}
    return {name: given.get(name, default) for name, default in own.items()}


def _is_between(value: object, low: float, high: float) -> bool:
    return isinstance(value, int | float) and type(value) is not bool and low <= value <= high


def _outside(file: Path, name: str, value: object, allowed: str) -> CheckpointError:
    shown = repr(value)
    shown = shown if len(shown) <= 60 else f"{shown[:60]}..."
    return CheckpointError(f"{file} says {name} is {shown}. Allowed: {allowed}. {_AGAIN}")
