"""Export of a run's model, merged, for use elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from toque.errors import CheckpointError, ConfigError, argument
from toque.workflows.results import Model, existing_folder

if TYPE_CHECKING:
    from toque.models.loading.verify_export import Exported


def export(run_or_model: Model, to: str | Path, *, form: str = "hf") -> Exported:
    """Write a model for use elsewhere, an adapter merged; read it back and compare.

    Args:
        run_or_model: a run, a model or an adapter folder.
        to: the folder to write; nothing may lie there.
        form: hf, a Hugging Face folder.

    Raises:
        ConfigError: neither a run nor a model, or a format that is not known.
        CheckpointError: the run is not finished, or what was written is not the same model.
    """
    from toque.models.loading.verify_export import export_model  # with torch
    from toque.models.lora.files import is_adapter_folder

    if form != "hf":
        raise ConfigError(
            f"{argument('form')} is {form!r}. Use hf, the only format of this version."
        )
    source = given = existing_folder(run_or_model)
    if (source / "config.yaml").exists():
        source = source / "model"
        if not source.exists():
            raise CheckpointError(
                f"The run {given} has no finished model yet. Let `toque train` end, then export."
            )
    if not ((source / "config.json").exists() or is_adapter_folder(source)):
        raise ConfigError(
            f"{given} is neither a run, a model folder nor an adapter folder. Name a run "
            "such as runs/cookbook."
        )
    readme = source / "README.md"
    card = readme.read_text(encoding="utf-8") if readme.exists() else f"# {Path(to).name}\n"
    return export_model(source, Path(to), card=card)
