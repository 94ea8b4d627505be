"""Content of a model folder, checked before anything is built from it: sizes, headers, lengths.

It may come from anyone: a vocabulary of 2^40 is refused in milliseconds, where transformers would
first ask for its terabytes.
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
from toque.storage.array_headers import opened_weights
from toque.storage.no_follow import refuse_endless_files

if TYPE_CHECKING:
    from torch import Tensor

_MOST_BYTES: Final = 8 << 20  # of a config.json; with names of 20,000 classes one has 1 MiB
_MOST_LAYERS: Final = 1_000
_LARGEST: Final = (1 << 31) - 1
_SIZE = re.compile(r"(?:.*_)?(?:n|num|d)_.*|.*_(?:size|dim|positions)|max_position_embeddings")
_LAYERS = re.compile(r"n_layers?|(?:num_)?(?:hidden_|decoder_)?layers")
_SHARE = re.compile(r".*(?:dropout|pdrop)(?:_rate|_prob)?|dropout_rate")
_SMALL = re.compile(r".*_(?:eps|epsilon)")
_AGAIN: Final = "It is damaged or made to harm: copy the model from its source again."


def read_config_json(folder: Path) -> dict[str, Any]:
    """The object in a model's config.json; CheckpointError where there is none to be read."""
    refuse_endless_files(folder)
    file = folder / "config.json"
    try:
        if file.stat().st_size > _MOST_BYTES:
            raise CheckpointError(
                f"{file} is {file.stat().st_size:,} bytes long; no model's is above "
                f"{_MOST_BYTES:,}. {_AGAIN}"
            )
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read as JSON: {error}. Copy it again.") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{file} holds a {type(raw).__name__}, not an object. Copy it again.")
    return raw


def check_config(raw: Mapping[str, Any], file: Path, n_weights: int | None) -> None:
    """Refuse, by name, sizes and shares that no model has, and more weights than the files hold."""
    if raw.get("quantization_config") is not None:
        raise CheckpointError(
            f"{file} says that the weights are quantised (quantization_config), and only weights "
            "of 16 or 32 bits are read here. Take the model they were made from."
        )
    _check_tokens(raw, file)
    values = _own_entries(raw)
    for name, value in values.items():
        if _SIZE.fullmatch(name) and value is not None:
            most = _MOST_LAYERS if _LAYERS.fullmatch(name) else _LARGEST
            if type(value) is not int or not 1 <= value <= most:
                raise _outside(file, name, value, f"a whole number from 1 to {most:,}")
        elif allowed := allowed_share(name, value):
            raise _outside(file, name, value, allowed)
        elif isinstance(value, float) and not math.isfinite(value):
            raise _outside(file, name, value, "a finite number")
    if not values:
        return
    needed = _least_weights(values)
    if n_weights is not None and needed > n_weights:
        raise too_few_weights(file, needed, n_weights)


def too_few_weights(file: Path, needed: int, there: int) -> CheckpointError:
    """The error about a config of more weights than the files beside it hold."""
    return CheckpointError(
        f"{file} describes a model of at least {needed:,} weights ({needed * 4 / 1e9:,.1f} GB "
        f"in float32), and the files beside it hold {there:,}. {_AGAIN}"
    )


def _check_tokens(raw: Mapping[str, Any], file: Path) -> None:
    """The entries that count what is outside the model: its tokens, and names of classes."""
    labels = raw.get("num_labels", 1)
    if not (type(labels) is int and 0 <= labels <= _MOST_BYTES):
        raise _outside(file, "num_labels", labels, f"a whole number from 0 to {_MOST_BYTES:,}")
    for name in (name for name in raw if name.endswith("_token_id")):
        ids = raw[name] if isinstance(raw[name], list) else [raw[name]]
        if not all(i is None or (type(i) is int and -1 <= i <= _LARGEST) for i in ids):
            raise _outside(file, name, raw[name], f"null or a number of a token below {_LARGEST:,}")


def _least_weights(values: Mapping[str, Any]) -> int:
    """Weights that a model of these sizes has at least: embeddings and matrices, no head.

    Of the 124,439,808 weights of GPT-2 (Radford et al. 2019) only biases and norms are left out:

    >>> _least_weights({"n_embd": 768, "n_layer": 12, "vocab_size": 50257, "n_positions": 1024})
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
    """Entries that decide the model's size, defaults included; of other kinds numbers of layers."""
    from transformers import PretrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from toque.models.families import MODEL_TYPES

    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in MODEL_TYPES:
        return {name: value for name, value in raw.items() if _LAYERS.fullmatch(name)}
    of_kind: Any = CONFIG_MAPPING[kind]
    base = set(PretrainedConfig.__dataclass_fields__)
    own = {
        name: field.default
        for name, field in of_kind.__dataclass_fields__.items()
        if name not in base and isinstance(field.default, int | float | None)
    }
    given = {of_kind.attribute_map.get(name, name): value for name, value in raw.items()}
    return {name: given.get(name, default) for name, default in own.items()}


def allowed_share(name: str, value: object) -> str:
    """The range of a dropout or an epsilon of a config that is outside of it; else ""."""
    if _SHARE.fullmatch(name) and not _is_between(value, 0, 1):
        return "a number from 0 to 1"
    if _SMALL.fullmatch(name) and not _is_between(value, 1e-30, 1):
        return "a number above 0 and up to 1"
    return ""


def _is_between(value: object, low: float, high: float) -> bool:
    return isinstance(value, int | float) and type(value) is not bool and low <= value <= high


def _outside(file: Path, name: str, value: object, allowed: str) -> CheckpointError:
    shown = repr(value)
    shown = shown if len(shown) <= 60 else f"{shown[:60]}..."
    return CheckpointError(f"{file} says {name} is {shown}. Allowed: {allowed}. {_AGAIN}")


_INDEX: Final = "model.safetensors.index.json"
_PICKLES: Final = {".bin", ".pt", ".pth", ".pkl", ".ckpt"}


@dataclass(frozen=True)
class StoredWeights:
    """The tensors of a model folder, by the names that their files give them.

    A file is open only while a tensor is read: what is mapped of it counts as the process's memory.
    """

    files: Mapping[str, Path]
    shapes: Mapping[str, tuple[int, ...]]

    def name_of(self, parameter: str, prefix: str) -> str | None:
        """Name of a parameter in the files, with its base model's prefix or without (GPT-2's)."""
        bare = parameter.removeprefix(f"{prefix}.")
        names = (parameter, bare, f"{prefix}.{parameter}")
        return next((name for name in names if name in self.files), None)

    def float32(self, name: str) -> Tensor:
        """A tensor in float32 and memory of its own; CheckpointError if its file is damaged."""
        import torch  # answering a mistake in a config.json does without

        with opened_weights(self.files[name]) as tensors:
            tensor: Tensor = tensors.get_tensor(name)
            return tensor.to(torch.float32, copy=True)


def stored_weights(folder: Path) -> StoredWeights:
    """Weights of a model folder, headers and lengths checked; CheckpointError if one is damaged."""
    files: dict[str, Path] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for file in _weight_files(folder):
        with opened_weights(file, missing=f", and {folder / _INDEX} names it.") as tensors:
            for name in tensors.keys():  # noqa: SIM118  # not a mapping
                files[name] = file
                shapes[name] = tuple(tensors.get_slice(name).get_shape())
    return StoredWeights(files, shapes)


def _weight_files(folder: Path) -> list[Path]:
    if (folder / "model.safetensors").exists():  # before an index, as transformers reads it
        return [folder / "model.safetensors"]
    if (folder / _INDEX).exists():
        try:
            index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
            names = sorted(set(index["weight_map"].values()))
            outside = [name for name in names if not name or name != Path(name).name]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{folder / _INDEX} cannot be read: {error!r}.") from error
        if outside:
            raise CheckpointError(
                f"{folder / _INDEX} names the file {outside[0]!r}; only plain names in its folder "
                f"are allowed. {_AGAIN}"
            )
        return [folder / name for name in names]
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix in _PICKLES)
    if pickles:
        raise CheckpointError(
            f"{folder} holds its weights only as {', '.join(pickles)}, a pickle, which can run any "
            "code while it loads, so it is not read. Use a checkpoint with model.safetensors, or "
            "convert this one once on a machine you trust: from_pretrained, then save_pretrained."
        )
    raise CheckpointError(f"{folder} holds a config.json but no model.safetensors.")
