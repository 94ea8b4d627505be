"""Models of a server: each opened once, and adapters laid beside each other on one base."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel

from toque.data.tokenizer.codec import Codec
from toque.hardware.devices import device_named
from toque.models.families import vocabulary_rows
from toque.models.loading.hub import resolve_folder
from toque.models.loading.pretrained import formats_in_use, load_with_adapters
from toque.models.loading.provenance import Provenance
from toque.models.lora.adapter_files import (
    is_adapter_folder,
    load_adapter,
    rows_needed,
)
from toque.reporter import SILENT, Reporter
from toque.serving.batcher import ServedModel, ServedModels
from toque.workflows.asking import (
    base_of,
    codec_in,
    model_in,
    record_on,
    template_asked_by,
    trained_prompt,
    writes_recipes,
)
from toque.workflows.inference.open_model import held_in_words, open_model


def open_models(
    folders: Mapping[str, Path], *, device: str = "cpu", reporter: Reporter = SILENT
) -> ServedModels:
    """Open the models and adapters of some folders by their names, on a device as `open_model`.

    Adapters share the weights of a base that is served, in float32, or has several: then in the
    format that they were trained beside, if it is one. One alone is opened as `generate` does. The
    reporter hears of each that is not in float32.
    """
    where = device_named(device)
    inner = {name: model_in(folder) for name, folder in folders.items()}
    adapters = {name for name, folder in inner.items() if is_adapter_folder(folder)}
    bases = {name: base_of(folder) or _weights_of(folder) for name, folder in inner.items()}
    sharing = Counter(bases.values())
    shared: dict[Path, list[ServedModel]] = {}
    found: dict[str, ServedModel] = {}
    # Models before adapters, which are laid on them.
    for name in sorted(folders, key=lambda name: name in adapters):
        beside = shared.setdefault(bases[name], [])
        if name in adapters and sharing[bases[name]] > 1:
            own = {n: inner[n] for n in adapters if bases[n] == bases[name]}
            model = _laid_on(bases[name], beside, own, name=name, device=where)
        else:
            opened = open_model(folders[name], device=device)
            model = _served(name, opened.model, opened.codec, opened.provenance)
        is_new = all(one.model is not model.model for one in beside)
        if is_new and (note := held_in_words(model.model)) is not None:
            reporter.notice(f"note: {name}: {note}")
        beside.append(model)
        found[name] = model
    return ServedModels([found[name] for name in folders])


def _laid_on(
    base: Path,
    beside: Sequence[ServedModel],
    adapters: Mapping[str, Path],
    *,
    name: str,
    device: torch.device,
) -> ServedModel:
    """One of a base's adapters, on weights that are loaded already if these have as many rows.

    Else it is loaded with the others of as many: a base that is quantised takes none later.
    """
    adapter, rows = adapters[name], rows_needed(adapters[name])
    fitting = [
        one
        for one in beside
        if rows in (None, vocabulary_rows(one.model)) and not hasattr(one.model, "hf_device_map")
    ]
    if fitting:
        model = fitting[0].model
    else:
        alike = {_inner(n): one for n, one in adapters.items() if rows_needed(one) == rows}
        formats = formats_in_use(alike.values(), device)
        model = load_with_adapters(alike, formats, device, base=str(base))
    if _inner(name) not in getattr(model, "peft_config", {}):
        load_adapter(model, adapter, name=_inner(name))
    record = record_on(adapter, base)
    codec = codec_in(adapter, record)
    plain = next((one.name for one in fitting if one.adapter is None), None)
    return replace(_served(name, model, codec, record), adapter=_inner(name), base=plain)


def _served(name: str, model: PreTrainedModel, codec: Codec, record: Provenance) -> ServedModel:
    recipes = writes_recipes(record)
    chat = template_asked_by(codec, record)
    asked = partial(trained_prompt, task="write" if recipes else None)
    return ServedModel(
        name=name, model=model, codec=codec, record=record, to_prompt=asked, chat=chat
    )


def _inner(name: str) -> str:
    """The adapter's name inside the model, where a dot would part a module's path."""
    return "served_" + name.encode().hex()


def _weights_of(model: Path) -> Path:
    """The folder of a whole model's weights, one for all of its names."""
    return resolve_folder(str(model), setting="the model").resolve()
