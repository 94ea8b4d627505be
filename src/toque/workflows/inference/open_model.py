"""Loading of models for inference, from a run folder (finished or not) or a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch
from transformers import PreTrainedModel

from toque.config import RunConfig, load_config
from toque.data.store.token_store import TokenStore, check_tokenizer
from toque.data.tokenizer.chat import prompt_ids
from toque.data.tokenizer.codec import Codec, FamilyKind
from toque.data.tokenizer.portable import tokenizer_differences
from toque.errors import CheckpointError, DataError
from toque.hardware.devices import device_named
from toque.hardware.glibc_malloc import keep_freed_memory
from toque.hardware.short_waits import shorten_waits_when_busy
from toque.models.families import DTYPES
from toque.models.forward.attention import use_attention
from toque.models.generation.engine import describe_emulation
from toque.models.generation.options import Precision
from toque.models.loading.device_map import (
    memory_for_weights,
    placement_note,
    placement_of,
)
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
from toque.models.lora.adapter_files import (
    is_adapter_folder,
    load_adapter,
    merge_adapter,
    use_adapter,
)
from toque.models.lora.frozen import PLAIN, FrozenFormat, format_of
from toque.models.lora.layers import ADAPTER
from toque.reporter import SILENT, Reporter
from toque.storage.no_follow import refuse_links
from toque.training.checkpoint.saved import Checkpoint, verify_checkpoint
from toque.training.checkpoint.store import CheckpointStore
from toque.training.runtime import PrecisionChoice, choose_precision
from toque.workflows.build import model_to_train
from toque.workflows.run_folder.continuation import refuse_another_store
from toque.workflows.run_folder.weights import load_weights, refuse_another_base
from toque.workflows.saved_steps import config_of, list_steps, run_of
from toque.workflows.trained_model.model_codec import open_codec
from toque.workflows.trained_model.training_record import build_record, read_record

_ATTEMPTS: Final = 3
"""Number of attempts to read a run's best or newest model, which training may replace meanwhile."""
_COMPARED_ROWS: Final = 32
"""Number of a store's texts that are encoded to compare two tokenizers."""


@dataclass(frozen=True)
class OpenedModel:
    """A model with its tokenizer, and the configuration of its run if it has one."""

    model: PreTrainedModel
    codec: Codec
    config: RunConfig | None
    step: int | None
    """Step of an unfinished run's checkpoint; None for a finished model."""
    provenance: Provenance
    """Record of the model's training."""

    @property
    def family_kind(self) -> FamilyKind:
        """Kind of the model's family."""
        return "encoder-decoder" if self.model.config.is_encoder_decoder else "decoder"

    def prompt_ids(self, prompt: str, *, raw: bool = False) -> list[int]:
        """Encode a prompt. Do not apply the chat template to a `raw` prompt."""
        form = self.provenance.form
        return prompt_ids(self.codec, prompt, self.family_kind, form, raw=raw)

    def with_adapter(
        self, number: int, folder: Path, record: Provenance
    ) -> OpenedModel:
        """Activate one of the model's adapters, and return the model with the adapter's record.

        If the adapter's folder has a tokenizer, it replaces the model's tokenizer.
        """
        use_adapter(self.model, f"adapter_{number}")
        has_tokenizer = (folder / "tokenizer.json").is_file()
        codec = open_codec(folder, record) if has_tokenizer else self.codec
        return replace(self, codec=codec, provenance=record)

    def check_tokenizer(self, store: TokenStore) -> None:
        """Check that a store was prepared with the model's tokenizer.

        Two files of the same tokenizer may differ, so the ids of some texts are compared.

        Raises:
            DataError: The tokenizers differ.
        """
        stored = store.manifest.tokenizer
        if stored.sha256 == self.codec.sha256:
            return
        codec = store.codec()
        rows = store.rows("train")[:_COMPARED_ROWS].tolist()
        texts = [codec.decode(store.target(row)) for row in rows]
        differences = tokenizer_differences(codec, self.codec, texts)
        if differences:
            raise DataError(
                f"The store {store.path} was prepared with the tokenizer {stored.name}, which "
                f"differs from the model's tokenizer {self.codec.name}: {'; '.join(differences)}. "
                '("One" is the store\'s tokenizer, "the other" the model\'s.) Prepare a store '
                "with model.tokenizer set to the model."
            )


def open_model(
    folder: Path,
    *,
    device: str = "cpu",
    adapters: Sequence[Path] = (),
    reporter: Reporter = SILENT,
) -> OpenedModel:
    """Open a run's finished model, or its best or newest checkpoint, or any other model.

    A finished model that does not fit into one GPU is loaded in bf16, or divided over all GPUs. An
    adapter is merged into a float32 base. A base in another format stays separate.

    Args:
        folder: A run, a checkpoint or a Hugging Face model.
        device: auto (the GPU, if present), cpu, cuda or cuda:N.
        adapters: Adapter folders to load as "adapter_0", "adapter_1" and so on.
        reporter: Receives a note about a model that is not in float32 on one device.
    """
    target = device_named(device)
    if target.type == "cpu":
        shorten_waits_when_busy()

    def place(checked: CheckedFolder) -> Placement | None:
        return placement_of(checked, memory_for_weights(target))

    opened = _open(folder, place if target.type == "cuda" else None, target, adapters)
    device_map = getattr(opened.model, "hf_device_map", None)
    if device_map is None:
        opened.model.to(target)  # type: ignore[arg-type]  # transformers hides its annotation
    elif len(set(device_map.values())) > 1:
        # The other implementations of attention do not move their masks between devices.
        use_attention(opened.model, "dense")
    if (note := describe_format(opened.model)) is not None:
        reporter.notice(f"note: {note}")
    return opened


def open_to_generate(
    folder: Path,
    precision: Precision,
    *,
    device: str,
    adapters: Sequence[Path] = (),
    reporter: Reporter = SILENT,
) -> OpenedModel:
    """Open a model to generate texts; see `open_model`. Report a precision that is emulated."""
    opened = open_model(folder, device=device, adapters=adapters, reporter=reporter)
    if opened.model.device.type == "cpu":
        keep_freed_memory()
    if note := describe_emulation(precision, opened.model):
        reporter.notice(note)
    return opened


def describe_format(model: PreTrainedModel) -> str | None:
    """Describe a model that is not in float32 on one device, or return None."""
    if (base_format := format_of(model)) != PLAIN:
        return (
            f"the adapter is not merged into its base, which is in {base_format} "
            f"on {model.device}"
        )
    return placement_note(model)


def _open(
    folder: Path, place: Place | None, device: torch.device, adapters: Sequence[Path]
) -> OpenedModel:
    """Open a model, and load adapters as "adapter_0", "adapter_1" and so on.

    A plain model is on the CPU, or where `place` puts it. A base in the format that its adapter was
    trained with is on the device.
    """
    adapters_by_name = {f"adapter_{i}": adapter for i, adapter in enumerate(adapters)}
    config = None
    location = folder
    config_file = config_of(folder)
    if config_file.exists():
        refuse_links(config_file.parent, CheckpointError)
        config = load_config(config_file).config
        location = folder / "model"
        if not (location / "config.json").exists() and not is_adapter_folder(location):
            # An unfinished run, or a checkpoint.
            opened = _open_checkpoint(folder, config, device).merge_adapter(config)
            for name, adapter in adapters_by_name.items():
                load_adapter(opened.model, adapter, name=name)
            return opened

    weights = resolve_folder(str(location), setting="the model to open")
    if adapters:
        formats = formats_in_use(adapters, device)
        base = str(weights)
        model = load_with_adapters(adapters_by_name, formats, device, base=base)
    elif is_adapter_folder(location):
        formats = formats_in_use([weights], device, _base_format(config, device))
        model = load_with_adapters({ADAPTER: weights}, formats, device, merge=True)
    else:
        model = load_model(str(weights), place=place)
    record = read_record(folder)
    return OpenedModel(model, open_codec(weights, record), config, None, record)


@dataclass(frozen=True)
class TrainedModel:
    """A model with the weights of a checkpoint. Its adapter is not merged."""

    model: PreTrainedModel
    codec: Codec
    record: Provenance
    step: int
    base_hash: str | None
    """SHA-256 of the base's weights; None for a model without an adapter."""

    def merge_adapter(self, config: RunConfig) -> OpenedModel:
        """Merge the adapter if the base is in float32, and return the model for inference."""
        model = (
            merge_adapter(self.model) if format_of(self.model) == PLAIN else self.model
        )
        return OpenedModel(model, self.codec, config, self.step, self.record)


def checkpoint_model(folder: Path, device: torch.device = CPU) -> TrainedModel:
    """Open the model of a checkpoint in float32, with the base of an adapter in its own format.

    Raises:
        CheckpointError: The checkpoint is damaged or was removed.
    """
    trained = _open_checkpoint(folder, load_config(config_of(folder)).config, device)
    trained.model.to(device)  # type: ignore[arg-type]  # transformers hides its annotation
    return trained


def _open_checkpoint(
    folder: Path, config: RunConfig, device: torch.device
) -> TrainedModel:
    """Open the model of a checkpoint, or of a run's best or newest checkpoint.

    A training run may remove a checkpoint while it is read. Then read the next one.

    Raises:
        CheckpointError: The checkpoint is damaged or was removed, or the run does not have one.
    """
    run = run_of(folder)
    for attempts_left in reversed(range(_ATTEMPTS)):
        if run is None:
            checkpoint = _find_best_or_newest(folder, config)
        else:
            checkpoint = verify_checkpoint(folder)
        try:
            return _read_checkpoint(run or folder, checkpoint, config, device)
        except CheckpointError as error:
            if checkpoint.path.is_dir():  # damaged, not removed
                raise
            if run is not None or not attempts_left:
                raise CheckpointError(
                    f"The run removed {checkpoint.path} while Toque read it. "
                    f"{list_steps(run or folder)} Name one of these."
                ) from error
    raise AssertionError


def _find_best_or_newest(run: Path, config: RunConfig) -> Checkpoint:
    """Return a run's best model, or its newest checkpoint if it has no best model."""
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
    """Load the model, tokenizer and record of a verified checkpoint."""
    codec, record = _open_tokenizer(run, checkpoint, config)
    base_hash = None
    to_train = model_to_train(config, codec)
    if config.adapter is None:
        model = to_train.in_float32()
    else:
        base = to_train.base()
        formats = formats_in_use([], device, _base_format(config, device))
        model, base_hash = base.placed(base.choose_format(formats, device), device)
        refuse_another_base(checkpoint, base_hash)
    load_weights(model, checkpoint)
    model.train(mode=False)
    return TrainedModel(model, codec, record, checkpoint.step, base_hash)


def _open_tokenizer(
    run: Path, checkpoint: Checkpoint, config: RunConfig
) -> tuple[Codec, Provenance]:
    """Return a run's tokenizer and record, from its store or its finished model.

    Raises:
        CheckpointError: Neither exists, or the store was prepared again since the training.
    """
    store = Path(config.data.store)
    finished = run / "model"
    if not (store / "manifest.json").exists():
        if (record := provenance_of(finished)) is not None:
            return open_codec(finished, record), record
        raise CheckpointError(
            f"{checkpoint.path} needs the tokenizer of its run, but the store {store}, which "
            "contains it, does not exist. Run the command in the folder where you trained, or "
            "restore the store."
        )
    prepared = TokenStore.open(store)
    refuse_another_store(run, checkpoint, prepared)
    check_tokenizer(prepared)
    return prepared.codec(), build_record(config, prepared.manifest)


def _base_format(config: RunConfig | None, device: torch.device) -> FrozenFormat | None:
    """Return the format of an adapter's base in the run's settings; None without an adapter."""
    if config is None or config.adapter is None:
        return None
    precision: PrecisionChoice = config.train.precision
    if device.type == "cpu":  # may not support the precision of the training's GPU
        precision = "auto"
    fp16_is_safe = family_to_train(config.model).fp16_is_safe
    name, _ = choose_precision(precision, device, fp16_is_safe=fp16_is_safe)
    return FrozenFormat(DTYPES[name], config.adapter.quantize_base)
