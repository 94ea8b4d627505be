"""Adapter folders as peft reads them: writing, loading, and merging into the base."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable
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
from toque.models.lora.layers import ADAPTER, _peft, is_adapted
from toque.storage.array_headers import opened_weights, with_sorted_metadata
from toque.storage.no_follow import refuse_endless_files, write_new

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
BASE_KEY = "toque_base_sha256"  # metadata of the weights file: SHA-256 of the base's weights
ROWS_KEY = "toque_vocabulary"  # metadata: rows of the base's embedding, which may have grown
FORMAT_KEY = "toque_base_format"  # metadata: format of the base's matrices, as it was trained
_BASE: Final = ("model*.safetensors*", "pytorch_model*.bin*")  # weights of a whole model
_PREFIX = "base_model.model."  # peft's prefix of the wrapped model's parameter names
_STARTS: Final = ("gaussian", "eva", "orthogonal", "mica")
"""Words of init_lora_weights that leave the base as it is; pissa, olora, corda, loftq and lora_ga
take away from it what the adapter starts with, and no file holds the rest."""
_NO_SUM: Final = ("alora_invocation_tokens", "lora_bias", "kasa_config", "layer_replication")
"""Settings of adapters that are more than a product of two matrices beside the base's own."""

_PARTS: Final = (".lora_A.", ".lora_B.", ".lora_magnitude_vector", ".trainable_tokens_delta")
"""Parts of the names of an adapter's tensors. Others are LoRA on an embedding, which is computed
otherwise, and weights of the base itself."""


def is_adapter_folder(folder: Path) -> bool:
    """True if `folder` holds an adapter and not a whole model; some lay its config.json beside."""
    return (folder / CONFIG).exists() and not any(map(any, map(folder.glob, _BASE)))


def adapter_tensors(model: PreTrainedModel, name: str = ADAPTER) -> dict[str, Tensor]:
    """The tensors of adapter `name` as peft calls them in its file; the model's own, not copies."""
    # Not peft's own function: it may ask the hub for a config, and cannot tell adapters with
    # trained tokens from those without. That the names agree is tested.
    found = {}
    for own, parameter in model.named_parameters():
        parts = own.split(".")
        if name in parts and (".lora_" in own or ".trainable_tokens_delta." in own):
            parts.remove(name)
            if parts[-2:] == ["lora_magnitude_vector", "weight"]:
                parts.pop()
            found[_PREFIX + ".".join(parts)] = parameter.detach()
    return found


def write_adapter(model: PreTrainedModel, folder: Path, *, base_hash: str) -> None:
    """Write an adapter's two files into `folder`, which exists; equal adapters are equal files."""
    config: Any = copy.deepcopy(model.peft_config[ADAPTER])
    config.inference_mode = True
    for name, value in vars(config).items():
        if isinstance(value, set):  # which peft writes in an order that every process draws anew
            setattr(config, name, sorted(value))
    config.save_pretrained(str(folder))
    tensors = {key: tensor.contiguous().cpu() for key, tensor in adapter_tensors(model).items()}
    metadata = {"format": "pt", BASE_KEY: base_hash, ROWS_KEY: str(vocabulary_rows(model))}
    metadata[FORMAT_KEY] = str(format_of(model))
    write_new(folder / WEIGHTS, with_sorted_metadata(save(tensors, metadata)))


def load_adapter(model: PreTrainedModel, folder: Path, *, name: str = ADAPTER) -> None:
    """Load the adapter of `folder` into `model`, beside any others, and make it the active one.

    The base is in float32, read once for all adapters and changed in place (`use_adapter`). Raises
    what `add_from` and `refuse_another_base` do.
    """
    refuse_another_base(folder, lambda: base_sha256(model))
    add_from(folder, model, name=name)


def refuse_another_base(folder: Path, base_hash: Callable[[], str]) -> None:
    """CheckpointError for an adapter that was trained on other weights than those of this hash."""
    recorded = _metadata(folder / WEIGHTS).get(BASE_KEY)
    if recorded and recorded != base_hash():
        raise CheckpointError(
            f"The adapter {folder} was trained on other weights than those of its base "
            f"{read_config(folder).base_model_name_or_path}: their hashes differ. Restore that "
            "model, or name the right one in adapter_config.json."
        )


def add_from(folder: Path, model: PreTrainedModel, *, name: str = ADAPTER) -> None:
    """Put the adapter of `folder` into `model`, whose matrices may not be read yet; activate it.

    ConfigError for one that is no LoRA or has other shapes; CheckpointError for a damaged folder.
    """
    peft, config = _peft(), read_config(folder)
    config.init_lora_weights = False  # the file fills them all; others would ask the base's matrix
    with _opened(folder / WEIGHTS) as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  # not a mapping
    try:
        with warnings.catch_warnings():  # several adapters are intended
            warnings.filterwarnings("ignore", message="Already found a `peft_config`")
            peft.inject_adapter_in_model(config, model, name)
    except ValueError as error:
        raise ConfigError(
            f"The adapter {folder} does not fit a {model.config.model_type} model: "
            f"{' '.join(str(error).split())[:300]} Load it on {config.base_model_name_or_path}."
        ) from error
    _fill(adapter_tensors(model, name), tensors, where=folder / WEIGHTS)
    model.train(mode=False)
    use_adapter(model, name)


@torch.no_grad()
def _fill(own: dict[str, Tensor], tensors: dict[str, Tensor], *, where: Path) -> None:
    """Copy `tensors` into `own`; names and shapes must be the same."""
    wrong = [f"{key} is missing" for key in own.keys() - tensors.keys()]
    wrong += [f"{key} is not one of the adapter's" for key in tensors.keys() - own.keys()]
    wrong += [
        f"{key} is {tuple(tensors[key].shape)}, the model has {tuple(tensor.shape)}"
        for key, tensor in own.items()
        if key in tensors and tensors[key].shape != tensor.shape
    ]
    if wrong:
        shown = "; ".join(sorted(wrong)[:3])
        raise CheckpointError(
            f"{where} does not fit its base and its configuration in {len(wrong)} places: {shown}. "
            "Copy the folder again, or load it on the model it was trained on."
        )
    for key, tensor in own.items():
        tensor.copy_(tensors[key])


def use_adapter(model: PreTrainedModel, name: str | None) -> None:
    """Make the loaded adapter `name` the active one; None for the base alone."""
    loaded = getattr(model, "peft_config", {})
    if name is not None and name not in loaded:
        there = ", ".join(loaded) or "none"
        raise ConfigError(f"No adapter is loaded under the name {name!r}; there are {there}.")
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    for module in model.modules():
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
            inner: Any = getattr(module, "token_adapter", module)
            parts = (getattr(inner, kind, ()) for kind in ("lora_A", "trainable_tokens_delta"))
            if name is not None and any(name in part for part in parts):
                module.enable_adapters(True)
                module.set_adapter(name)
            else:
                module.enable_adapters(False)
    for parameter in model.parameters():
        parameter.requires_grad_(False)  # set_adapter makes it trainable


def merged(model: PreTrainedModel) -> PreTrainedModel:
    """`model` with its adapter merged into float32 weights, in place (Hu et al. 2021, 4.1)."""
    if not is_adapted(model):
        return model
    coarse = sorted({str(p.dtype) for p in model.parameters() if p.dtype != torch.float32})
    if coarse:
        raise ConfigError(
            f"An adapter is merged into float32 weights only, and these are {', '.join(coarse)}. "
            "Load the model again and merge it before anything else."
        )
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if isinstance(head, BaseTunerLayer) and head.weight is model.get_input_embeddings().weight:
        # What is added to the head is not added to the embedding that shares its matrix.
        own: Any = head.get_base_layer()
        own.weight = nn.Parameter(own.weight.detach().clone(), requires_grad=False)
    # A table that two sides share is found under each of its names.
    places = list(model.named_modules(remove_duplicate=False))
    plain: dict[int, Any] = {}
    for path, module in places:
        if not isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
            continue
        if ".token_adapter" in f".{path}":
            continue  # its wrapper unpacks it
        if id(module) not in plain:
            if hasattr(module, "unload_and_optionally_merge_module"):
                plain[id(module)] = module.unload_and_optionally_merge_module(
                    merge=True, safe_merge=True, adapter_names=None
                )
            else:
                module.merge(safe_merge=True)
                plain[id(module)] = module.get_base_layer()
        parent, _, last = path.rpartition(".")
        setattr(model.get_submodule(parent), last, plain[id(module)])
    del model.peft_config
    return model


def read_config(folder: Path) -> Any:
    """The adapter's configuration; ConfigError if it is none of the base with a plain LoRA."""
    refuse_endless_files(folder)
    file = folder / CONFIG
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read as JSON: {error}. Copy it again.") from error
    if not isinstance(raw, dict) or raw.get("peft_type") != "LORA":
        kind = raw.get("peft_type") if isinstance(raw, dict) else type(raw).__name__
        raise ConfigError(
            f"{folder} holds an adapter of type {kind}; only LORA and its variants (rsLoRA, DoRA) "
            "are used here. Merge it with peft first and name the merged model."
        )
    start = raw.get("init_lora_weights", True)
    other = {name: raw[name] for name in _NO_SUM if raw.get(name)}
    if isinstance(start, str) and start.lower() not in _STARTS:
        other["init_lora_weights"] = start
    said = f"{file} says {_shown(other)}" if other else _more_than_sums(folder / WEIGHTS, raw)
    if said:
        raise ConfigError(
            f"{said}. Adapters are used here that add a product of two matrices to linear layers "
            "of their base as it is: LoRA, rsLoRA and DoRA. Merge it with peft (merge_and_unload) "
            "and name the merged model; what peft does not merge is used with peft alone."
        )
    try:
        return _peft().LoraConfig.from_pretrained(str(folder))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{file} is not a LoRA configuration: {error}.") from error


def _more_than_sums(weights: Path, config: dict[str, Any]) -> str:
    """Words for the first tensor of an adapter's file that is no part of a sum; "" for none."""
    if not weights.exists():  # said where it is read
        return ""
    with _opened(weights) as file:
        keys = sorted(file.keys())
    own = [key for key in keys if not any(part in key for part in _PARTS)]
    if not own:
        return ""
    asked = {name: config.get(name) for name in ("modules_to_save", "bias")}
    asked = {name: value for name, value in asked.items() if value and value != "none"}
    by = _shown(asked) or "an embedding or the output head among target_modules"
    return f"{weights} holds {own[0]}, as peft writes for {by}"


def _shown(settings: dict[str, Any]) -> str:
    return ", ".join(f"{name} {json.dumps(value)[:40]}" for name, value in settings.items())


def rows_needed(folder: Path) -> int | None:
    """Rows the base's embedding must have: as recorded, else for the tokens the adapter trained."""
    recorded = _metadata(folder / WEIGHTS).get(ROWS_KEY)
    if recorded is not None and recorded.isdecimal():
        return int(recorded)
    indices = read_config(folder).trainable_token_indices
    listed = indices.values() if isinstance(indices, dict) else [indices or []]
    return max((int(i) + 1 for ids in listed for i in ids), default=None)


def trained_beside(folder: Path) -> FrozenFormat | None:
    """Format of the base's matrices as the adapter was trained; None where that is not recorded."""
    return FORMATS.get(_metadata(folder / WEIGHTS).get(FORMAT_KEY, ""))


def _metadata(file: Path) -> dict[str, str]:
    """Metadata of an adapter's weights, none of which are read."""
    with _opened(file) as opened:
        return opened.metadata() or {}


def _opened(file: Path) -> AbstractContextManager[Any]:
    why = "Adapters are read from safetensors only; a pickle (adapter_model.bin) can run code while"
    return opened_weights(file, missing=f". {why} it loads.")
