"""Adapter folders in peft's format: writing, loading, and merging into the base."""

from __future__ import annotations

import copy
import itertools
import json
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save
from torch import Tensor, nn
from transformers import PreTrainedModel

from toque.errors import CheckpointError, ConfigError
from toque.models.families import vocabulary_rows
from toque.models.lora.frozen import FORMATS, FrozenFormat, base_sha256, format_of
from toque.models.lora.layers import ADAPTER, import_peft, is_adapted
from toque.models.lora.tables import refuse_other_modules, trained_tables
from toque.storage.array_headers import open_weights, sort_metadata
from toque.storage.no_follow import refuse_endless_files, write_new

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
# Keys in the metadata of the weights file.
BASE_KEY = "toque_base_sha256"  # SHA-256 of the base's weights
ROWS_KEY = "toque_vocabulary"  # rows of the base's embedding, which may have grown
FORMAT_KEY = "toque_base_format"  # format of the base's matrices in training
# Weights of a complete model.
_BASE: Final = ("model*.safetensors*", "pytorch_model*.bin*")
_PREFIX = "base_model.model."  # peft's prefix of the wrapped model's parameter names
_PLAIN_STARTS: Final = ("gaussian", "eva", "orthogonal", "mica")
"""Values of init_lora_weights that do not change the base.

pissa, olora, corda, loftq and lora_ga subtract the initial B A from the base, and the changed base
is not stored.
"""
_UNSUPPORTED: Final = (
    "alora_invocation_tokens",
    "lora_bias",
    "kasa_config",
    "layer_replication",
)
"""Settings of adapters that do more than add a product of two matrices to the base."""

_TENSOR_NAMES: Final = (
    ".lora_A.",
    ".lora_B.",
    ".lora_magnitude_vector",
    ".trainable_tokens_delta",
)
"""Parts of the names of supported tensors.

Other tensors are LoRA on an embedding and weights of the base itself. Of these, only the embedding
and the head are supported.
"""


def is_adapter_folder(folder: Path) -> bool:
    """True if a folder contains an adapter and no model's weights. It may have a config.json."""
    if not (folder / CONFIG).exists():
        return False
    return not any(any(folder.glob(pattern)) for pattern in _BASE)


def adapter_tensors(model: PreTrainedModel, name: str = ADAPTER) -> dict[str, Tensor]:
    """Return the tensors of an adapter by their names in peft's files, without a copy."""
    # peft's own function may request a config from the hub, and does not distinguish adapters with
    # and without trained tokens. A test compares the names with it.
    tensors = {}
    for path, parameter in model.named_parameters():
        parts = path.split(".")
        if name in parts and (".lora_" in path or ".trainable_tokens_delta." in path):
            parts.remove(name)
            if parts[-2:] == ["lora_magnitude_vector", "weight"]:
                parts.pop()
            tensors[_PREFIX + ".".join(parts)] = parameter.detach()
    return tensors | _table_tensors(model, name)


def _table_tensors(model: PreTrainedModel, name: str) -> dict[str, Tensor]:
    """Return the matrices that an adapter trained entirely, by their names in peft's files."""
    tables = trained_tables(model, saved_modules(model.peft_config[name]))
    return {_PREFIX + path: table.detach() for path, table in tables.items()}


def write_adapter(model: PreTrainedModel, folder: Path, *, base_hash: str) -> None:
    """Write an adapter's config and weights to an existing folder.

    Equal adapters give bitwise identical files.
    """
    config: Any = copy.deepcopy(model.peft_config[ADAPTER])
    config.inference_mode = True
    for name, value in vars(config).items():
        if isinstance(value, set):  # the order of a set differs between processes
            setattr(config, name, sorted(value))
    config.save_pretrained(str(folder))
    tensors = {
        # safetensors refuses modules that share a matrix.
        key: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for key, tensor in adapter_tensors(model).items()
    }
    metadata = {
        "format": "pt",
        BASE_KEY: base_hash,
        ROWS_KEY: str(vocabulary_rows(model)),
        FORMAT_KEY: str(format_of(model)),
    }
    write_new(folder / WEIGHTS, sort_metadata(save(tensors, metadata)))


def load_adapter(model: PreTrainedModel, folder: Path, *, name: str = ADAPTER) -> None:
    """Load the adapter of `folder` into a float32 `model` and activate it.

    Other adapters of the model remain loaded.

    Raises:
        ConfigError: The adapter is not LoRA, does not fit the model or changes its embedding.
        CheckpointError: The folder is damaged, or the adapter was trained on another base.
    """
    refuse_shared_base([folder])
    refuse_another_base(folder, lambda: base_sha256(model))
    add_adapter(folder, model, name=name)


def refuse_another_base(folder: Path, base_hash: Callable[[], str]) -> None:
    """Raise a CheckpointError if an adapter was trained on weights with another hash."""
    recorded = _metadata(folder / WEIGHTS).get(BASE_KEY)
    if recorded and recorded != base_hash():
        raise CheckpointError(
            f"The adapter {folder} was trained on other weights than this base: the hashes differ. "
            f"Its base is {read_config(folder).base_model_name_or_path}. Use this base in "
            "model.start_from, or restore it if it was changed. If the base was moved, set "
            "base_model_name_or_path in adapter_config.json."
        )


def add_adapter(folder: Path, model: PreTrainedModel, *, name: str = ADAPTER) -> None:
    """Add the adapter of `folder` to `model` and activate it, without checking the base's hash.

    The model's matrices are not read, so they do not need memory. `fill_tables` completes an
    adapter that replaces the embedding or the head.

    Raises:
        ConfigError: The adapter is not LoRA or does not fit the model.
        CheckpointError: The folder is damaged.
    """
    peft = import_peft()
    config = read_config(folder)
    # The file has all values. Some initial values would be computed from the base's matrices.
    config.init_lora_weights = False
    tables = saved_modules(config)
    if tables:
        refuse_other_modules(model, tables, folder)
        config.modules_to_save = None  # peft would copy the modules
    try:
        with warnings.catch_warnings():
            # A model may have several adapters.
            warnings.filterwarnings("ignore", message="Already found a `peft_config`")
            peft.inject_adapter_in_model(config, model, name)
    except ValueError as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"The adapter {folder} does not fit a {model.config.model_type} model: {reason} Load "
            f"it on {config.base_model_name_or_path}."
        ) from error
    config.modules_to_save = tables or None
    fill_adapter(model, folder, name=name)
    model.train(mode=False)
    use_adapter(model, name)


@torch.no_grad()
def fill_adapter(model: PreTrainedModel, folder: Path, *, name: str = ADAPTER) -> None:
    """Copy the weights of `folder` into the attached adapter `name`, without whole matrices.

    Raises:
        CheckpointError: The folder is damaged, or the names or shapes differ.
    """
    parameters = adapter_tensors(model, name)
    tables = _table_tensors(model, name)
    with _opened(folder / WEIGHTS) as file:
        keys = file.keys()
        shapes = {key: tuple(file.get_slice(key).get_shape()) for key in keys}
        _refuse_other_shapes(parameters, shapes, file=folder / WEIGHTS)
        for key in parameters.keys() - tables.keys():
            parameters[key].copy_(file.get_tensor(key))


@torch.no_grad()
def fill_tables(model: PreTrainedModel, folder: Path, *, name: str = ADAPTER) -> None:
    """Copy the embedding and head of `folder` into a model with the attached adapter `name`.

    This changes the base, so its hash must be computed first.

    Raises:
        ConfigError: Modules that share a matrix have different ones in the file.
    """
    filled: dict[int, str] = {}
    with _opened(folder / WEIGHTS) as file:
        for key, table in _table_tensors(model, name).items():
            stored = file.get_tensor(key).to(table)
            other = filled.setdefault(table.data_ptr(), key)
            if other != key and not torch.equal(table, stored):
                raise ConfigError(
                    f"{key} and {other} in {folder / WEIGHTS} differ, but they are one matrix in "
                    "the base. Merge the adapter with peft (merge_and_unload) and use the merged "
                    "model."
                )
            table.copy_(stored)


def _refuse_other_shapes(
    parameters: dict[str, Tensor], shapes: dict[str, tuple[int, ...]], *, file: Path
) -> None:
    """Raise a CheckpointError if names or shapes of a file's tensors and parameters differ."""
    problems = []
    for key in parameters.keys() | shapes.keys():
        if key not in shapes:
            problems.append(f"{key} is missing")
        elif key not in parameters:
            problems.append(f"{key} is not in the model")
        elif shapes[key] != tuple(parameters[key].shape):
            expected = tuple(parameters[key].shape)
            problems.append(f"{key} is {shapes[key]}, the model has {expected}")
    if problems:
        examples = "; ".join(sorted(problems)[:3])
        raise CheckpointError(
            f"{file} does not fit its base and its configuration ({len(problems)} tensors): "
            f"{examples}. Copy the folder again, or load the adapter on the model that it was "
            "trained on."
        )


def use_adapter(model: PreTrainedModel, name: str | None) -> None:
    """Activate the loaded adapter `name`, or only the base if `name` is None."""
    loaded = getattr(model, "peft_config", {})
    if name is not None and name not in loaded:
        raise ConfigError(
            f"The adapter {name!r} is not loaded. Loaded adapters: {', '.join(loaded) or 'none'}."
        )
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    for module in model.modules():
        if not isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
            continue
        inner: Any = getattr(module, "token_adapter", module)
        lora = getattr(inner, "lora_A", ())
        tokens = getattr(inner, "trainable_tokens_delta", ())
        # Adapters need not adapt the same layers.
        if name is not None and (name in lora or name in tokens):
            module.enable_adapters(True)
            module.set_adapter(name)
        else:
            module.enable_adapters(False)
    for parameter in model.parameters():
        parameter.requires_grad_(False)  # set_adapter makes it trainable


def merge_adapter(model: PreTrainedModel) -> PreTrainedModel:
    """Merge a model's adapter into its float32 weights, in place (Hu et al. 2021, section 4.1).

    Raises:
        ConfigError: The base is not in float32.
    """
    if not is_adapted(model):
        return model
    other_dtypes = sorted(
        {str(p.dtype) for p in model.parameters() if p.dtype != torch.float32}
    )
    if other_dtypes:
        raise ConfigError(
            f"The base must be in float32 to merge an adapter, not {', '.join(other_dtypes)}. "
            "Load the model again and merge the adapter first."
        )
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    table: Any = model.get_input_embeddings()
    if isinstance(head, BaseTunerLayer) and head.weight is table.weight:
        # The embedding shares the head's matrix and must not change.
        base_layer: Any = head.get_base_layer()
        weight = base_layer.weight.detach().clone()
        base_layer.weight = nn.Parameter(weight, requires_grad=False)

    # A module that encoder and decoder share is listed once per name, and merged once.
    merged_layers: dict[int, Any] = {}
    for path, module in list(model.named_modules(remove_duplicate=False)):
        if not isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
            continue
        if ".token_adapter" in f".{path}":
            continue  # merged by its wrapper
        if id(module) not in merged_layers:
            merged_layers[id(module)] = _merge_layer(module)
        parent, _, last = path.rpartition(".")
        setattr(model.get_submodule(parent), last, merged_layers[id(module)])
    del model.peft_config
    return model


def _merge_layer(layer: Any) -> Any:
    """Merge the adapter of a peft layer. Return the base layer."""
    if hasattr(layer, "unload_and_optionally_merge_module"):  # trained tokens
        return layer.unload_and_optionally_merge_module(
            merge=True, safe_merge=True, adapter_names=None
        )
    layer.merge(safe_merge=True)
    return layer.get_base_layer()


def read_config(folder: Path) -> Any:
    """Read an adapter's configuration.

    Raises:
        ConfigError: The adapter is not a supported kind of LoRA.
        CheckpointError: The file is damaged.
    """
    refuse_endless_files(folder)
    file = folder / CONFIG
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{file} cannot be read as JSON: {error}. Copy it again."
        ) from error
    if not isinstance(raw, dict) or raw.get("peft_type") != "LORA":
        kind = raw.get("peft_type") if isinstance(raw, dict) else type(raw).__name__
        raise ConfigError(
            f"{folder} contains an adapter of type {kind}. Only LORA and its variants (rsLoRA, "
            "DoRA) are supported. Merge the adapter with peft and use the merged model."
        )
    if problem := _find_unsupported_part(folder, raw):
        raise ConfigError(
            f"{problem}. Only adapters that add a product of two matrices to linear layers of an "
            "unchanged base are supported: LoRA, rsLoRA and DoRA. Merge the adapter with peft "
            "(merge_and_unload) and use the merged model."
        )
    try:
        return import_peft().LoraConfig.from_pretrained(str(folder))
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"{file} is not a LoRA configuration: {error}. Copy it again."
        ) from error


def _find_unsupported_part(folder: Path, config: dict[str, Any]) -> str:
    """Describe the unsupported settings or the first unsupported tensor; "" without any."""
    settings = {name: config[name] for name in _UNSUPPORTED if config.get(name)}
    start = config.get("init_lora_weights", True)
    if isinstance(start, str) and start.lower() not in _PLAIN_STARTS:
        settings["init_lora_weights"] = start
    if settings:
        return f"{folder / CONFIG} sets {_join_settings(settings)}"
    return _find_unsupported_tensor(folder / WEIGHTS, config)


def _find_unsupported_tensor(weights: Path, config: dict[str, Any]) -> str:
    """Describe the first unsupported tensor of an adapter's file; "" without any."""
    if not weights.exists():  # reading the weights reports the missing file
        return ""
    with _opened(weights) as file:
        keys = sorted(file.keys())
    modules = config.get("modules_to_save") or ()
    tables = tuple(f"{name}.weight" for name in modules if isinstance(name, str))
    unsupported = [
        key
        for key in keys
        if not any(name in key for name in _TENSOR_NAMES) and not key.endswith(tables)
    ]
    if not unsupported:
        return ""
    settings = {name: config.get(name) for name in ("modules_to_save", "bias")}
    causes = {n: value for n, value in settings.items() if value and value != "none"}
    cause = "an embedding or the output head among target_modules"
    if causes:
        cause = _join_settings(causes)
    return f"{weights} contains {unsupported[0]}, which peft writes for {cause}"


def _join_settings(settings: dict[str, Any]) -> str:
    return ", ".join(
        f"{name} {json.dumps(value)[:40]}" for name, value in settings.items()
    )


def saved_modules(config: Any) -> list[str]:
    """Return the names of the modules that an adapter trains entirely, in order."""
    return sorted(config.modules_to_save or ())


def refuse_shared_base(folders: Sequence[Path]) -> None:
    """Raise a ConfigError for an adapter that replaces the embedding or head of a shared base."""
    for folder in folders:
        if modules := saved_modules(read_config(folder)):
            raise ConfigError(
                f"The adapter {folder} also changes {', '.join(modules)}, so its base cannot be "
                "shared with other adapters. Use it alone, or merge it into its base (`toque "
                "export`) and use the merged model."
            )


def required_rows(folder: Path) -> int | None:
    """Return the number of embedding rows that an adapter's base needs; None if unknown.

    An adapter that Toque wrote records the number. Another one needs its trained tokens.
    """
    recorded = _metadata(folder / WEIGHTS).get(ROWS_KEY)
    if recorded is not None and recorded.isdecimal():
        return int(recorded)
    indices = read_config(folder).trainable_token_indices or []
    if isinstance(indices, dict):  # ids by table
        indices = itertools.chain(*indices.values())
    return max((int(index) + 1 for index in indices), default=None)


def recorded_format(folder: Path) -> FrozenFormat | None:
    """Return the format of the base's matrices in training; None if it is not recorded."""
    return FORMATS.get(_metadata(folder / WEIGHTS).get(FORMAT_KEY, ""))


def _metadata(file: Path) -> dict[str, str]:
    """Read the metadata of an adapter's file without its weights."""
    with _opened(file) as opened:
        return opened.metadata() or {}


def _opened(file: Path) -> AbstractContextManager[Any]:
    hint = "Adapters must be in safetensors: loading a pickle (adapter_model.bin) can run code."
    return open_weights(file, missing=f". {hint}")
