"""Model in use, opened from a run folder (finished or not) or a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from toque.config import RunConfig, load_config
from toque.data.store.token_store import TokenStore, check_tokenizer
from toque.data.tokenizer.chat import prompt_ids
from toque.data.tokenizer.codec import Codec, FamilyKind
from toque.data.tokenizer.portable import tokenizer_differences
from toque.errors import CheckpointError, DataError
from toque.hardware.devices import device_named
from toque.hardware.short_waits import shorten_waits_when_busy
from toque.models.families import DTYPES
from toque.models.forward.attention import use_attention
from toque.models.loading.device_map import free_memory, placement_note, placement_of
from toque.models.loading.hub import resolve_folder
from toque.models.loading.pretrained import (
    CPU,
    CheckedFolder,
    Place,
    Placement,
    formats_in_use,
    load_model,
    load_with_adapters,
)
from toque.models.loading.provenance import Provenance, provenance_of
from toque.models.loading.trainable import family_to_train
from toque.models.lora.adapter_files import is_adapter_folder, load_adapter, merged, use_adapter
from toque.models.lora.frozen import PLAIN, FrozenFormat, format_of
from toque.models.lora.layers import ADAPTER
from toque.reporter import SILENT, Reporter
from toque.storage.no_follow import refuse_links
from toque.training.checkpoint.saved import Checkpoint, verify_checkpoint
from toque.training.checkpoint.store import CheckpointStore
from toque.training.runtime import PrecisionChoice, choose_precision
from toque.workflows.asking import codec_in, provenance_in, provenance_of_run
from toque.workflows.build import model_to_train
from toque.workflows.run_folder import load_weights, refuse_another_base, refuse_another_store
from toque.workflows.saved_steps import config_of, run_of, steps_in_words

_TRIES = 3  # to read the best model of a run, which a better one may replace meanwhile
_COMPARED = 32  # rows of a store whose texts two tokenizers are compared by


@dataclass(frozen=True)
class OpenedModel:
    """A model with its tokenizer, and the run's configuration when it came from a run."""

    model: PreTrainedModel
    codec: Codec
    config: RunConfig | None
    step: int | None
    provenance: Provenance  # record of the prompts it was trained on

    def prompt_ids(self, prompt: str, *, raw: bool = False) -> list[int]:
        """A prompt as the model reads it; a `raw` one without the template of a conversation."""
        kind: FamilyKind = "encoder-decoder" if self.model.config.is_encoder_decoder else "decoder"
        return prompt_ids(self.codec, prompt, kind, self.provenance.form, raw=raw)

    def with_adapter(self, number: int, folder: Path, record: Provenance) -> OpenedModel:
        """The same model with one of its adapters active, by its record and its own tokenizer.

        One that has no tokenizer reads and writes by that of the model.
        """
        use_adapter(self.model, f"adapter_{number}")
        own = (folder / "tokenizer.json").is_file()
        return replace(
            self, codec=codec_in(folder, record) if own else self.codec, provenance=record
        )

    def check_tokenizer(self, store: TokenStore) -> None:
        """Raise a DataError for a store of another tokenizer; one saved again is no other."""
        theirs = store.manifest.tokenizer
        if theirs.sha256 == self.codec.sha256:
            return
        codec = store.codec()
        some = [codec.decode(store.target(row)) for row in store.rows("train")[:_COMPARED].tolist()]
        found = tokenizer_differences(codec, self.codec, some)
        if found:
            raise DataError(
                f"The store {store.path} was prepared with another tokenizer ({theirs.name}) than "
                f"the model's ({self.codec.name}): {'; '.join(found)}, where one is the store's. "
                "Prepare a store with model.tokenizer set to the model's folder."
            )


def open_model(
    folder: Path,
    *,
    device: str = "cpu",
    adapters: Sequence[Path] = (),
    reporter: Reporter = SILENT,
) -> OpenedModel:
    """The finished model of a run, else its best or newest; a checkpoint; or a Hugging Face model.

    `device` is auto, the GPU where there is one; or cpu, cuda, cuda:N. A finished model that one
    GPU has no memory for is held in bf16, or goes over all of them. An adapter is merged, or used
    beside a base in the format of its training; `adapters` lie on the model as "adapter_0" and so
    on. The reporter hears of what is not in float32.
    """
    where = device_named(device)
    if where.type == "cpu":
        shorten_waits_when_busy()

    def place(found: CheckedFolder) -> Placement | None:
        return placement_of(found, free_memory(where))

    opened = _opened(folder, place if where.type == "cuda" else None, where, adapters)
    placed = getattr(opened.model, "hf_device_map", None)
    if placed is None:
        opened.model.to(where)  # type: ignore[arg-type]  # transformers annotates it away
    elif len(set(placed.values())) > 1:
        use_attention(opened.model, "dense")  # masks alone go from device to device by themselves
    if (note := held_in_words(opened.model)) is not None:
        reporter.notice(f"note: {note}")
    return opened


def held_in_words(model: PreTrainedModel) -> str | None:
    """A sentence about a model that is not in float32 on one device; None for one that is."""
    if (held := format_of(model)) != PLAIN:
        return f"the adapter is used beside its base, which is held on {model.device} in {held}"
    return placement_note(model)


def _opened(
    folder: Path, place: Place | None, device: torch.device, adapters: Sequence[Path]
) -> OpenedModel:
    config, model = None, folder
    named = {f"adapter_{i}": adapter for i, adapter in enumerate(adapters)}
    if (config_file := config_of(folder)).exists():
        refuse_links(config_file.parent, CheckpointError)
        config = load_config(config_file).config
        model = folder / "model"
        is_finished = (model / "config.json").exists() or is_adapter_folder(model)
        if not is_finished:  # or a checkpoint was named
            unfinished = _as_trained(folder, config, device).opened(config)
            for name, adapter in named.items():
                load_adapter(unfinished.model, adapter, name=name)
            return unfinished
    adapted = is_adapter_folder(model)
    if model.is_dir() and not adapted and not (model / "config.json").exists():
        raise CheckpointError(
            f"{model} holds neither a run (config.yaml), a model (config.json) nor an adapter "
            "(adapter_config.json). Name a run folder such as runs/cookbook, or a Hugging Face "
            "model folder."
        )
    model = resolve_folder(str(model), setting="the model to open")
    if adapters:
        formats = formats_in_use(adapters, device)
        loaded = load_with_adapters(named, formats, device, base=str(model))
    elif adapted:
        formats = formats_in_use([model], device, _format_of(config, device))
        loaded = load_with_adapters({ADAPTER: model}, formats, device, merge=True)
    else:
        loaded = load_model(str(model), place=place)
    record = provenance_in(folder)
    return OpenedModel(loaded, codec_in(model, record), config, None, record)


@dataclass(frozen=True)
class TrainedModel:
    """A model with the weights of a checkpoint, its adapter not merged."""

    model: PreTrainedModel
    codec: Codec
    record: Provenance
    step: int
    base_hash: str | None
    """`base_sha256` of the weights that an adapter was trained beside; None without an adapter."""

    def opened(self, config: RunConfig) -> OpenedModel:
        """The model to use, its adapter merged where it may be."""
        model = merged(self.model) if format_of(self.model) == PLAIN else self.model
        return OpenedModel(model, self.codec, config, self.step, self.record)


def checkpoint_model(folder: Path) -> TrainedModel:
    """The model of a checkpoint, in float32 on the CPU, or a CheckpointError."""
    return _as_trained(folder, load_config(config_of(folder)).config, CPU)


def _as_trained(folder: Path, config: RunConfig, device: torch.device) -> TrainedModel:
    """The model of a checkpoint, or of a run's best or newest one, which may be training."""
    run = run_of(folder)
    for tries_left in reversed(range(_TRIES)):
        checkpoint = _newest_of(folder, config) if run is None else verify_checkpoint(folder)
        try:
            return _read_checkpoint(run or folder, checkpoint, config, device)
        except CheckpointError as error:
            if checkpoint.path.is_dir():
                raise
            if run is not None or not tries_left:
                raise CheckpointError(
                    f"The run has removed {checkpoint.path}, while it was read. "
                    f"{steps_in_words(run or folder)} Name one of these."
                ) from error
    raise AssertionError


def _newest_of(run: Path, config: RunConfig) -> Checkpoint:
    """The best model of a run, else its newest checkpoint."""
    checkpoints = CheckpointStore(run / "checkpoints")
    checkpoint = checkpoints.best() or checkpoints.newest_valid()
    if checkpoint is None:
        raise CheckpointError(
            f"The run {run} has no checkpoint yet. Let it reach its first save "
            f"(train.save_every={config.train.save_every}), or name a finished run."
        )
    return checkpoint


def _read_checkpoint(
    run: Path, checkpoint: Checkpoint, config: RunConfig, device: torch.device
) -> TrainedModel:
    codec, record = _tokenizer_of_run(run, checkpoint, config)
    base_hash = None
    to_train = model_to_train(config, codec)
    if config.adapter is None:
        model = to_train.in_float32()
    else:
        base = to_train.base()
        formats = formats_in_use([], device, _format_of(config, device))
        model, base_hash = base.placed(base.fitting(formats, device), device)
        refuse_another_base(checkpoint, base_hash)
    load_weights(model, checkpoint)
    model.train(mode=False)
    return TrainedModel(model, codec, record, checkpoint.step, base_hash)


def _tokenizer_of_run(
    run: Path, checkpoint: Checkpoint, config: RunConfig
) -> tuple[Codec, Provenance]:
    """The tokenizer and record of a run: from its store, or where that is gone from its model."""
    store, finished = Path(config.data.store), run / "model"
    if not (store / "manifest.json").exists():
        if (record := provenance_of(finished)) is not None:
            return codec_in(finished, record), record
        raise CheckpointError(
            f"{checkpoint.path} needs the tokenizer of its run, which is in the store {store}, and "
            "there is no store. Give the command in the folder where the run was trained, or put "
            "the store back."
        )
    prepared = TokenStore.open(store)
    refuse_another_store(run, checkpoint, prepared)
    check_tokenizer(prepared)
    return prepared.codec(), provenance_of_run(config, prepared.manifest)


def _format_of(config: RunConfig | None, device: torch.device) -> FrozenFormat | None:
    """The format that a run's settings give the base of its adapter; None without both."""
    if config is None or config.adapter is None:
        return None
    asked: PrecisionChoice = "auto" if device.type == "cpu" else config.train.precision
    name, _ = choose_precision(
        asked, device, fp16_is_safe=family_to_train(config.model).fp16_is_safe
    )
    return FrozenFormat(DTYPES[name], config.adapter.quantize_base)
