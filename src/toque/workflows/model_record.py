"""Record of a model: its kind of training, tokenizer and base."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Final

from toque.config import RunConfig, load_config
from toque.data.store.store_manifest import StoreManifest, form_of, read_manifest
from toque.data.tokenizer.chat import ChatTemplate, chat_template_of
from toque.data.tokenizer.codec import Codec, FamilyKind, generation_bounds, load_codec
from toque.data.tokenizer.portable import files_of_model
from toque.data.tokenizer.tokenizer_folder import (
    end_ids_in,
    is_toques,
    resolve_tokenizer,
)
from toque.errors import CheckpointError, ConfigError, DataError
from toque.models.loading.hub import resolve_folder
from toque.models.loading.provenance import OwnTask, Provenance, provenance_of
from toque.workflows.results import Model, existing_folder
from toque.workflows.saved_steps import run_of

UNKNOWN: Final = Provenance(form="recipes", max_new_tokens=256)
"""Record of a model folder that has one of Toque's tokenizers but no record."""
FOREIGN: Final = Provenance(form="documents", max_new_tokens=256)
"""Record of a model that Toque did not train. It continues its prompts."""


def build_record(config: RunConfig, manifest: StoreManifest) -> Provenance:
    """Build the record of a run's model from its configuration and store."""
    form = form_of(entry.reader for entry in manifest.sources)
    return Provenance(
        form="gaps" if config.span_corruption is not None else form,
        max_new_tokens=find_max_target_tokens(config, manifest),
        tasks=[*config.data.tasks] if form == "recipes" else [],
        own_tasks=[
            OwnTask(name, task.prompt, task.classes)
            for name, task in config.data.own_tasks.items()
        ],
    )


def find_max_target_tokens(config: RunConfig, manifest: StoreManifest | None) -> int:
    """Return the longest target in tokens, from the store if it records the limit."""
    stored_limit = (
        None if manifest is None else manifest.settings.get("max_target_tokens")
    )
    if isinstance(stored_limit, int):
        return stored_limit
    limit = config.data.max_target_tokens
    return UNKNOWN.max_new_tokens if limit == "auto" else limit


def read_record(folder: Path) -> Provenance:
    """Read the record of a run, checkpoint, model folder or hub name.

    The record of an unfinished run is built from its configuration and store.
    """
    folder = run_of(folder) or folder
    if not (folder / "config.yaml").is_file():
        if not folder.exists():
            with suppress(
                ConfigError, DataError
            ):  # opening the model reports the error
                folder = resolve_folder(str(folder))
        base = find_base(folder)
        if base is not None:
            return read_adapter_record(folder, base)
        return provenance_of(folder) or (UNKNOWN if is_toques(folder) else FOREIGN)
    record = provenance_of(folder / "model")
    if record is not None:
        return record
    config = load_config(folder / "config.yaml").config
    return build_record(config, read_manifest(Path(config.data.store)))


def check_model(model: Model) -> Path:
    """Return the folder or hub name of a model, or raise an error before torch is loaded.

    Raises:
        ConfigError: The folder does not exist, and the hub has no such model.
        CheckpointError: The folder has no run, model or adapter.
    """
    folder = existing_folder(model)
    if run_of(folder) is not None:
        return folder  # reading the checkpoint reports any error in it
    names = ("config.yaml", "config.json", "adapter_config.json", "manifest.json")
    resolved = resolve_folder(str(folder), setting="the model to open")
    if not any((resolved / name).is_file() for name in names):
        raise CheckpointError(
            f"{folder} has no run (config.yaml), model (config.json) or adapter "
            "(adapter_config.json). Name a run folder such as runs/cookbook, or a Hugging Face "
            "model folder."
        )
    return folder


def finished_model(folder: Path) -> Path:
    """Return the folder of a run's finished model, or the folder itself."""
    inner = folder / "model"
    is_finished_run = (folder / "config.yaml").exists() and inner.is_dir()
    return inner if is_finished_run else folder


def find_base(folder: Path) -> Path | None:
    """Return the folder of an adapter's base, or None for a complete model.

    Raises:
        ConfigError: The base is an adapter itself.
    """
    if not (folder / "adapter_config.json").is_file():
        return None
    # Reading an adapter's settings loads torch.
    from toque.models.lora.adapter_files import is_adapter_folder, read_config

    base_name = (
        read_config(folder).base_model_name_or_path
        if is_adapter_folder(folder)
        else None
    )
    if not base_name:
        return None
    base = resolve_folder(str(base_name), setting="the base").resolve()
    if is_adapter_folder(base):
        raise ConfigError(
            f"The adapter {folder} names {base} as its base, which is an adapter itself. Export "
            "that adapter as a complete model, and write its folder in adapter_config.json."
        )
    return base


def read_adapter_record(adapter: Path, base: Path) -> Provenance:
    """Read the record of an adapter. Without one, read the record of its base.

    A model with an adapter takes prompts in the adapter's format, which its base may not know.
    """
    return provenance_of(adapter) or (
        UNKNOWN if is_toques(adapter) else read_record(base)
    )


def find_tokenizer(folder: Path) -> Path:
    """Return the folder of a model's tokenizer. An adapter without one uses its base's."""
    base = None if (folder / "tokenizer.json").is_file() else find_base(folder)
    return resolve_tokenizer(str(base or folder))


def open_codec(folder: Path, record: Provenance) -> Codec:
    """Open the tokenizer of a model folder, ready to generate.

    Texts end at every end token in the files of the model or of an adapter's base.

    Raises:
        CheckpointError: The tokenizer cannot be read.
    """
    try:
        codec = load_codec(find_tokenizer(folder))
    except DataError as error:
        raise CheckpointError(str(error)) from error
    if record is FOREIGN:
        codec.use_plain_rules()
    codec.add_ends(end_ids_in(find_base(folder) or folder), ordinary=record is FOREIGN)
    return codec


def find_chat_template(codec: Codec, record: Provenance) -> ChatTemplate | None:
    """Return the chat template for prompts, or None for a model trained on single requests.

    Toque trained every model of its own on single requests, unless on conversations.
    """
    talks = record is FOREIGN or record.form == "conversations"
    template = chat_template_of(codec) if talks else None
    if template is not None:
        template.set_end_of_codec()
    return template


def model_files(
    codec: Codec, record: Provenance, *, encoder: bool
) -> tuple[dict[str, str], bool]:
    """Return the files of a model folder next to its weights; see `files_of_model`."""
    kind: FamilyKind = "encoder-decoder" if encoder else "decoder"
    begin, end = generation_bounds(codec, kind, record.form)
    return files_of_model(codec, record, begin=begin, end=end)


def writes_recipes(record: Provenance) -> bool:
    """Return whether "dish: a, b, c" is rewritten as a request for a recipe."""
    return record.knows_recipes and (not record.tasks or "write" in record.tasks)
