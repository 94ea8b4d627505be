"""Checks of a model folder before a model is built from it: sizes, headers and lengths.

A folder may be untrusted. A vocabulary of 2^40 tokens is rejected within milliseconds, and
transformers would first allocate terabytes.
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

# Largest config.json in bytes. 1 MiB is enough for the names of 20,000 classes.
_MAX_BYTES: Final = 8 << 20
_MAX_LAYERS: Final = 1_000
_LARGEST: Final = (1 << 31) - 1  # largest size or token id
# Names of entries by their allowed values.
_SIZE = re.compile(
    r"(?:.*_)?(?:n|num|d)_.*|.*_(?:size|dim|positions)|max_position_embeddings"
)
_LAYERS = re.compile(r"n_layers?|(?:num_)?(?:hidden_|decoder_)?layers")
_SHARE = re.compile(r".*(?:dropout|pdrop)(?:_rate|_prob)?|dropout_rate")
_SMALL = re.compile(r".*_(?:eps|epsilon)")
_DAMAGED: Final = "It is damaged or malicious. Copy the model from its source again."


def describe_adapter(folder: Path) -> str:
    """Describe an adapter that `model.start_from` names in place of a model, and the remedy."""
    return (
        f"{folder} contains an adapter, not a model. Set model.start_from to the model that the "
        "adapter was trained on. To continue its training, also set adapter.start_from to this "
        "folder."
    )


def read_config_json(folder: Path) -> dict[str, Any]:
    """Read a model's config.json. Raise a CheckpointError if it is not a readable object."""
    refuse_endless_files(folder)
    file = folder / "config.json"
    try:
        n_bytes = file.stat().st_size
        if n_bytes > _MAX_BYTES:
            raise CheckpointError(
                f"{file} has {n_bytes:,} bytes. The limit for a config.json is {_MAX_BYTES:,} "
                f"bytes. {_DAMAGED}"
            )
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise CheckpointError(
            f"{file} cannot be read as JSON: {error}. Copy it again."
        ) from error
    if not isinstance(raw, dict):
        raise CheckpointError(
            f"{file} must contain a JSON object, not a {type(raw).__name__}. Copy it again."
        )
    return raw


def check_config(raw: Mapping[str, Any], file: Path, n_weights: int | None) -> None:
    """Check the entries of a config.json, and the number of weights in the files if it is given.

    Raises:
        CheckpointError: A size or probability is impossible, or the files have too few weights.
    """
    if raw.get("quantization_config") is not None:
        raise CheckpointError(
            f"{file} has a quantization_config, but Toque reads weights of 16 or 32 bits only. Use "
            "the original, unquantised model."
        )
    _check_token_entries(raw, file)
    entries = _size_entries(raw)
    for name, value in entries.items():
        if allowed := _allowed_values(name, value):
            raise _out_of_range(file, name, value, allowed)
    if not entries or n_weights is None:
        return
    needed = _min_weights(entries)
    if needed > n_weights:
        raise too_few_weights(file, needed, n_weights)


def _allowed_values(name: str, value: object) -> str:
    """Describe the allowed values of an entry if its value is not allowed; else return ""."""
    if _SIZE.fullmatch(name) and value is not None:
        largest = _MAX_LAYERS if _LAYERS.fullmatch(name) else _LARGEST
        is_allowed = type(value) is int and 1 <= value <= largest
        return "" if is_allowed else f"a whole number from 1 to {largest:,}"
    if allowed := allowed_share(name, value):
        return allowed
    is_infinite = isinstance(value, float) and not math.isfinite(value)
    return "a finite number" if is_infinite else ""


def too_few_weights(file: Path, needed: int, stored: int) -> CheckpointError:
    """Build the error about a config that describes more weights than its folder has."""
    return CheckpointError(
        f"{file} describes a model of at least {needed:,} weights ({needed * 4 / 1e9:,.1f} GB "
        f"in float32), but the folder has {stored:,}. {_DAMAGED}"
    )


def _check_token_entries(raw: Mapping[str, Any], file: Path) -> None:
    """Check the token ids of a config.json, and its number of classes."""
    labels = raw.get("num_labels", 1)
    # transformers creates a name for each class. A file cannot have more than its bytes.
    if not (type(labels) is int and 0 <= labels <= _MAX_BYTES):
        raise _out_of_range(
            file, "num_labels", labels, f"a whole number from 0 to {_MAX_BYTES:,}"
        )
    for name, value in raw.items():
        if not name.endswith("_token_id"):
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(map(_is_token_id, ids)):
            raise _out_of_range(
                file, name, value, f"null or a token id below {_LARGEST:,}"
            )


def _is_token_id(value: object) -> bool:
    """True for null and token ids. Some configs have -1 instead of null."""
    return value is None or (type(value) is int and -1 <= value <= _LARGEST)


def _min_weights(entries: Mapping[str, Any]) -> int:
    """Count the embeddings and matrices that a model of these sizes must have, without a head.

    GPT-2 has 124,439,808 weights (Radford et al. 2019). Only biases and norms do not count:

    >>> _min_weights({"n_embd": 768, "n_layer": 12, "vocab_size": 50257, "n_positions": 1024})
    124318464
    """

    def first_of(*names: str, default: int = 0) -> int:
        values = (entries.get(name) for name in names)
        return next((int(value) for value in values if value is not None), default)

    width = first_of("n_embd", "hidden_size", "d_model")
    inner = first_of("n_inner", "intermediate_size", "d_ff", default=4 * width)
    heads = first_of("num_attention_heads", "n_head", "num_heads", default=1)
    head_width = first_of("head_dim", "d_kv", default=width // heads)
    key_heads = first_of("num_key_value_heads", default=heads)
    queries_and_outputs = 2 * width * heads * head_width
    keys_and_values = 2 * width * key_heads * head_width
    layer = queries_and_outputs + keys_and_values + 2 * width * inner

    layers = first_of("n_layer", "num_hidden_layers", "num_layers", default=1)
    if "d_kv" in entries:  # a T5 also has a decoder
        layers += first_of("num_decoder_layers", default=layers)
    table_rows = first_of("vocab_size")
    if "n_embd" in entries:  # a GPT-2 also has a table of positions
        table_rows += first_of("n_positions")
    buckets = first_of("relative_attention_num_buckets") * heads
    return width * table_rows + layers * layer + buckets


def _size_entries(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that decide the size of a model, with defaults.

    For a type that is not in `MODEL_TYPES`, these are numbers of layers only.
    """
    # These imports take seconds, and an error in the JSON needs none of them.
    from transformers import PretrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from toque.models.families import MODEL_TYPES

    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in MODEL_TYPES:
        return {name: value for name, value in raw.items() if _LAYERS.fullmatch(name)}

    config_class: Any = CONFIG_MAPPING[model_type]
    common = set(PretrainedConfig.__dataclass_fields__)
    defaults = {
        name: field.default
        for name, field in config_class.__dataclass_fields__.items()
        if name not in common and isinstance(field.default, int | float | None)
    }
    values = {
        config_class.attribute_map.get(name, name): value for name, value in raw.items()
    }
    return {name: values.get(name, default) for name, default in defaults.items()}


def allowed_share(name: str, value: object) -> str:
    """Describe the range of a dropout or epsilon if its value is outside of it; else return ""."""
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
    if len(shown) > 60:
        shown = f"{shown[:60]}..."
    return CheckpointError(f"{file}: {name} is {shown}. Allowed: {allowed}. {_DAMAGED}")


_INDEX: Final = "model.safetensors.index.json"
_PICKLES: Final = {".bin", ".pt", ".pth", ".pkl", ".ckpt"}


@dataclass(frozen=True)
class StoredWeights:
    """Tensors of a model folder by their names in its files.

    A file is open only while a tensor is read, because its mapped parts count as memory of the
    process.
    """

    files: Mapping[str, Path]
    shapes: Mapping[str, tuple[int, ...]]

    def name_of(self, parameter: str, prefix: str) -> str | None:
        """Return a parameter's name in the files, with or without the base model's prefix.

        Return None if the parameter is not in the files.
        """
        bare = parameter.removeprefix(f"{prefix}.")
        names = (parameter, bare, f"{prefix}.{parameter}")
        return next((name for name in names if name in self.files), None)

    def float32(self, name: str) -> Tensor:
        """Read a tensor and copy it to float32. Raise a CheckpointError if its file is damaged."""
        import torch  # only here, because errors in a config.json do not need it

        with open_weights(self.files[name]) as tensors:
            tensor: Tensor = tensors.get_tensor(name)
            return tensor.to(torch.float32, copy=True)


def stored_weights(folder: Path) -> StoredWeights:
    """Check the weight files of a model folder. Raise a CheckpointError if one is damaged."""
    files: dict[str, Path] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    # End of the error about a missing file.
    missing = f", and {folder / _INDEX} names it."
    for file in _weight_files(folder):
        with open_weights(file, missing=missing) as tensors:
            for name in tensors.keys():  # noqa: SIM118  # not a mapping
                files[name] = file
                shapes[name] = tuple(tensors.get_slice(name).get_shape())
    return StoredWeights(files, shapes)


def _weight_files(folder: Path) -> list[Path]:
    """List the weight files of a model folder. Raise a CheckpointError if it has no such file."""
    weights = folder / "model.safetensors"
    if weights.exists():  # transformers also prefers this file to an index
        return [weights]
    if (folder / _INDEX).exists():
        return [folder / name for name in _shard_names(folder / _INDEX)]

    pickles = sorted(p.name for p in folder.iterdir() if p.suffix in _PICKLES)
    if pickles:
        raise CheckpointError(
            f"{folder} has weights only as pickles ({', '.join(pickles)}), which can run arbitrary "
            "code when they are loaded. Toque does not read pickles. Use a checkpoint with "
            "model.safetensors, or convert this one on a machine you trust: from_pretrained, then "
            "save_pretrained."
        )
    raise CheckpointError(
        f"{folder} has a config.json but no model.safetensors. Copy the model again."
    )


def _shard_names(index_file: Path) -> list[str]:
    """Read the file names of an index of shards.

    Raises:
        CheckpointError: The index is damaged, or names a file outside of its folder.
    """
    try:
        index = json.loads(index_file.read_text(encoding="utf-8"))
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
            f"{index_file} cannot be read: {error!r}. Copy the model again."
        ) from error
    if outside:
        raise CheckpointError(
            f"{index_file} names the file {outside[0]!r}; only plain names in its folder are "
            f"allowed. {_DAMAGED}"
        )
    return names
