"""Folders of a model: the finished model of a run, and the base of an adapter."""

from __future__ import annotations

from pathlib import Path

from toque.errors import CheckpointError, ConfigError
from toque.models.loading.hub import resolve_folder
from toque.workflows.results import Model, resolve_model
from toque.workflows.saved_steps import run_of


def check_model(model: Model) -> Path:
    """Return the folder or hub name of a model, or raise an error before torch is loaded.

    Raises:
        ConfigError: The folder does not exist, and the hub has no such model.
        CheckpointError: The folder has no run, model or adapter.
    """
    folder = resolve_model(model)
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
        ConfigError: The base is itself an adapter.
    """
    if not (folder / "adapter_config.json").is_file():
        return None
    # Reading an adapter's settings loads torch.
    from toque.models.lora.adapter_files import is_adapter_folder, read_config

    if not is_adapter_folder(folder):
        return None
    base_name = read_config(folder).base_model_name_or_path
    if not base_name:
        return None
    base = resolve_folder(str(base_name), setting="the base").resolve()
    if is_adapter_folder(base):
        raise ConfigError(
            f"The adapter {folder} names {base} as its base, which is an adapter itself. Export "
            "that adapter as a complete model, and write its folder in adapter_config.json."
        )
    return base
