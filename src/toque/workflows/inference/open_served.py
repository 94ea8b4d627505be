"""Loading of a server's models. Adapters on the same base share its weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel

from toque.cooking.prompts import Task
from toque.data.tokenizer.codec import Codec
from toque.hardware.devices import device_named
from toque.models.families import vocabulary_rows
from toque.models.loading.hub import resolve_folder
from toque.models.loading.pretrained import formats_in_use, load_with_adapters
from toque.models.loading.provenance import Provenance
from toque.models.lora.adapter_files import (
    is_adapter_folder,
    load_adapter,
    read_config,
    required_rows,
    saved_modules,
)
from toque.reporter import SILENT, Reporter
from toque.serving.batcher import ServedModel, ServedModels
from toque.workflows.inference.open_model import describe_format, open_model
from toque.workflows.trained_model.folders import find_base, finished_model
from toque.workflows.trained_model.model_codec import find_chat_template, open_codec
from toque.workflows.trained_model.prompt_format import format_prompt
from toque.workflows.trained_model.training_record import (
    read_adapter_record,
    writes_recipes,
)


def open_models(
    folders: Mapping[str, Path], *, device: str = "cpu", reporter: Reporter = SILENT
) -> ServedModels:
    """Open models and adapters; see `open_model`.

    If only one adapter uses a base, it is opened as `generate` opens it. Several adapters share one
    copy of their base, even if the base itself is served. The base has the format that the adapters
    were trained with, or float32 if their formats differ.

    Args:
        folders: Folder of each model or adapter, by its name.
        device: auto (the GPU, if present), cpu, cuda or cuda:N.
        reporter: Receives a note about each model that is not in float32 on one device.
    """
    target = device_named(device)
    weights = {name: finished_model(folder) for name, folder in folders.items()}
    bases = {
        name: find_base(folder) or _resolve_weights(folder)
        for name, folder in weights.items()
    }
    adapters = {name for name, folder in weights.items() if is_adapter_folder(folder)}
    # An adapter that replaces the embedding or the head needs its own copy of the base.
    alone = {name for name in adapters if saved_modules(read_config(weights[name]))}
    n_users = Counter(base for name, base in bases.items() if name not in alone)
    models_by_base: dict[Path, list[ServedModel]] = {}
    served: dict[str, ServedModel] = {}

    # Models come before the adapters that share their weights.
    for name in sorted(folders, key=lambda name: name in adapters):
        if name in alone:
            served[name] = _open_alone(name, folders[name], device, reporter)
            continue
        base = bases[name]
        loaded = models_by_base.setdefault(base, [])
        if name in adapters and n_users[base] > 1:
            base_adapters = {
                other: weights[other]
                for other in adapters - alone
                if bases[other] == base
            }
            model = _add_adapter(base, loaded, base_adapters, name=name, device=target)
            if all(other.model is not model.model for other in loaded):
                _report_format(model, reporter)
        else:
            model = _open_alone(name, folders[name], device, reporter)
        loaded.append(model)
        served[name] = model
    return ServedModels([served[name] for name in folders])


def _open_alone(
    name: str, folder: Path, device: str, reporter: Reporter
) -> ServedModel:
    """Open a model, or an adapter with its own copy of its base, as `generate` opens it."""
    opened = open_model(folder, device=device)
    served = _to_served(name, opened.model, opened.codec, opened.provenance)
    _report_format(served, reporter)
    return served


def _report_format(served: ServedModel, reporter: Reporter) -> None:
    """Report a model that is not in float32 on one device."""
    note = describe_format(served.model)
    if note is not None:
        reporter.notice(f"note: {served.name}: {note}")


def _add_adapter(
    base: Path,
    loaded: Sequence[ServedModel],
    adapters: Mapping[str, Path],
    *,
    name: str,
    device: torch.device,
) -> ServedModel:
    """Add an adapter to loaded weights of its vocabulary size, or load the weights.

    Args:
        base: Folder of the base.
        loaded: Models on this base that are already loaded.
        adapters: Folders of all adapters on this base, by name.
        name: Name of the adapter.
        device: Device for new weights.
    """
    adapter = adapters[name]
    n_rows = required_rows(adapter)
    compatible = [
        other
        for other in loaded
        if n_rows in (None, vocabulary_rows(other.model))
        and not hasattr(other.model, "hf_device_map")
    ]
    if compatible:
        model = compatible[0].model
    else:
        # With all adapters of this vocabulary size, because a quantised base accepts none later.
        same_size = {
            _module_name(other): path
            for other, path in adapters.items()
            if required_rows(path) == n_rows
        }
        formats = formats_in_use(same_size.values(), device)
        model = load_with_adapters(same_size, formats, device, base=str(base))
    if _module_name(name) not in getattr(model, "peft_config", {}):
        load_adapter(model, adapter, name=_module_name(name))

    record = read_adapter_record(adapter, base)
    served = _to_served(name, model, open_codec(adapter, record), record)
    base_names = [other.name for other in compatible if other.adapter is None]
    base_name = base_names[0] if base_names else None
    return replace(served, adapter=_module_name(name), base=base_name)


def _to_served(
    name: str, model: PreTrainedModel, codec: Codec, record: Provenance
) -> ServedModel:
    """Describe a loaded model or adapter for the server."""
    task: Task | None = "write" if writes_recipes(record) else None
    return ServedModel(
        name=name,
        model=model,
        codec=codec,
        record=record,
        to_prompt=partial(format_prompt, task=task),
        chat=find_chat_template(codec, record),
    )


def _module_name(name: str) -> str:
    """Return the adapter's name inside the model, in hex: a dot would divide a module's path."""
    return "served_" + name.encode().hex()


def _resolve_weights(model: Path) -> Path:
    """Return the folder of a complete model. Two names of the same model have the same folder."""
    return resolve_folder(str(model), setting="the model").resolve()
