"""Models of a server. Adapters of the same base share its weights."""

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
    required_rows,
)
from toque.reporter import SILENT, Reporter
from toque.serving.batcher import ServedModel, ServedModels
from toque.workflows.inference.open_model import describe_format, open_model
from toque.workflows.model_record import (
    find_base,
    find_chat_template,
    finished_model,
    open_codec,
    read_adapter_record,
    writes_recipes,
)
from toque.workflows.prompts import format_prompt


def open_models(
    folders: Mapping[str, Path], *, device: str = "cpu", reporter: Reporter = SILENT
) -> ServedModels:
    """Open models and adapters by their names; see `open_model`.

    A single adapter is opened as `generate` opens it. Several adapters share their base, in the
    format that they were trained with if it is the same, otherwise in float32. So does an adapter
    with a base that is served itself.

    Args:
        folders: Folder of each model or adapter.
        device: auto (the GPU, if present), cpu, cuda or cuda:N.
        reporter: Receives a note about each model that is not in float32 on one device.
    """
    target = device_named(device)
    inner = {name: finished_model(folder) for name, folder in folders.items()}
    bases = {
        name: find_base(folder) or _resolve_weights(folder)
        for name, folder in inner.items()
    }
    adapters = {name for name, folder in inner.items() if is_adapter_folder(folder)}
    n_users = Counter(bases.values())
    models_by_base: dict[Path, list[ServedModel]] = {}
    served: dict[str, ServedModel] = {}

    # Models come before the adapters that share their weights.
    for name in sorted(folders, key=lambda name: name in adapters):
        base = bases[name]
        loaded = models_by_base.setdefault(base, [])
        if name in adapters and n_users[base] > 1:
            base_adapters = {n: inner[n] for n in adapters if bases[n] == base}
            model = _add_adapter(base, loaded, base_adapters, name=name, device=target)
        else:
            opened = open_model(folders[name], device=device)
            model = _to_served(name, opened.model, opened.codec, opened.provenance)
        is_new = all(other.model is not model.model for other in loaded)
        if is_new and (note := describe_format(model.model)) is not None:
            reporter.notice(f"note: {name}: {note}")
        loaded.append(model)
        served[name] = model
    return ServedModels([served[name] for name in folders])


def _add_adapter(
    base: Path,
    loaded: Sequence[ServedModel],
    adapters: Mapping[str, Path],
    *,
    name: str,
    device: torch.device,
) -> ServedModel:
    """Add an adapter to loaded weights with the same number of vocabulary rows, or load them.

    Weights are loaded with all adapters of this size, because a quantised base accepts none later.
    """
    adapter = adapters[name]
    n_rows = required_rows(adapter)
    fitting = [
        other
        for other in loaded
        if n_rows in (None, vocabulary_rows(other.model))
        and not hasattr(other.model, "hf_device_map")
    ]
    if fitting:
        model = fitting[0].model
    else:
        alike = {
            _inner(n): path
            for n, path in adapters.items()
            if required_rows(path) == n_rows
        }
        formats = formats_in_use(alike.values(), device)
        model = load_with_adapters(alike, formats, device, base=str(base))
    if _inner(name) not in getattr(model, "peft_config", {}):
        load_adapter(model, adapter, name=_inner(name))

    record = read_adapter_record(adapter, base)
    served = _to_served(name, model, open_codec(adapter, record), record)
    base_name = next((other.name for other in fitting if other.adapter is None), None)
    return replace(served, adapter=_inner(name), base=base_name)


def _to_served(
    name: str, model: PreTrainedModel, codec: Codec, record: Provenance
) -> ServedModel:
    task: Task | None = "write" if writes_recipes(record) else None
    return ServedModel(
        name=name,
        model=model,
        codec=codec,
        record=record,
        to_prompt=partial(format_prompt, task=task),
        chat=find_chat_template(codec, record),
    )


def _inner(name: str) -> str:
    """Return the adapter's name inside the model. A dot would split a module's path."""
    return "served_" + name.encode().hex()


def _resolve_weights(model: Path) -> Path:
    """Return the folder of a complete model, the same for all of its names."""
    return resolve_folder(str(model), setting="the model").resolve()
