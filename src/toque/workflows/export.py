"""Export of a run's model, merged, for use elsewhere."""

from __future__ import annotations

from pathlib import Path

from toque.errors import CheckpointError, ConfigError, argument
from toque.models.loading.verify_export import Exported, export_model
from toque.models.lora.files import is_adapter_folder


def export(run_or_model: str | Path, *, to: Path, form: str = "hf") -> Exported:
    """Write the finished model of a run, an adapter merged; read it back and compare.

    Arguments and errors are those of `toque.api.export`.
    """
    if form != "hf":
        raise ConfigError(
            f"{argument('form')} is {form!r}. Use hf, the only format of this version."
        )
    source = Path(run_or_model)
    if (source / "config.yaml").exists():
        source = source / "model"
        if not source.exists():
            raise CheckpointError(
                f"The run {run_or_model} has no finished model yet. Let `toque train` end, then "
                "export."
            )
    if not ((source / "config.json").exists() or is_adapter_folder(source)):
        raise ConfigError(
            f"{run_or_model} is neither a run, a model folder nor an adapter folder. Name a run "
            "such as runs/cookbook."
        )
    readme = source / "README.md"
    card = readme.read_text(encoding="utf-8") if readme.exists() else f"# {to.name}\n"
    return export_model(source, to, card=card)
