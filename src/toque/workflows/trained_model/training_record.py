"""Record of a model's training: the form of its data, its tasks and the length of its texts."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from toque.config import RunConfig, load_config
from toque.data.store.store_manifest import StoreManifest, form_of, read_manifest
from toque.data.tokenizer.tokenizer_folder import is_toques
from toque.errors import ConfigError, DataError
from toque.models.loading.hub import resolve_folder
from toque.models.loading.provenance import OwnTask, Provenance, provenance_of
from toque.workflows.saved_steps import run_of
from toque.workflows.trained_model.folders import find_base

UNKNOWN = Provenance(form="recipes", max_new_tokens=256)
"""Record for a model folder that has one of Toque's tokenizers but no record."""
FOREIGN = Provenance(form="documents", max_new_tokens=256)
"""Record for a model that Toque did not train. Such a model continues its prompts."""


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
    """Return the maximum target length in tokens, from the store if it records the limit."""
    settings = {} if manifest is None else manifest.settings
    stored_limit = settings.get("max_target_tokens")
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
        return _read_model_record(folder)
    record = provenance_of(folder / "model")
    if record is not None:
        return record
    config = load_config(folder / "config.yaml").config
    return build_record(config, read_manifest(Path(config.data.store)))


def _read_model_record(folder: Path) -> Provenance:
    """Read the record of a model folder, an adapter folder or a hub name."""
    if not folder.exists():
        with suppress(ConfigError, DataError):  # opening the model reports the error
            folder = resolve_folder(str(folder))
    base = find_base(folder)
    if base is not None:
        return read_adapter_record(folder, base)
    return provenance_of(folder) or (UNKNOWN if is_toques(folder) else FOREIGN)


def read_adapter_record(adapter: Path, base: Path) -> Provenance:
    """Read the record of an adapter. Without one, read the record of its base.

    A model with an adapter takes prompts in the adapter's format, which its base may not know.
    """
    record = provenance_of(adapter)
    if record is not None:
        return record
    return UNKNOWN if is_toques(adapter) else read_record(base)


def writes_recipes(record: Provenance) -> bool:
    """Return whether Toque rewrites "dish: a, b, c" as a request for a recipe."""
    return record.knows_recipes and (not record.tasks or "write" in record.tasks)
