"""`toque export`: a run's model, merged, for use elsewhere."""

from __future__ import annotations

from pathlib import Path

from toque.errors import CheckpointError, ConfigError
from toque.models.loading.verify_export import export_model
from toque.models.lora.files import is_adapter_folder


def run_export(path: str, *, to: Path, form: str) -> str:
    """Write the finished model of a run, an adapter merged, and say how it was checked.

    Raises:
        ConfigError: a format that is not known, or neither a run nor a model.
        CheckpointError: the run is not finished, or what was written is not the same model.
    """
    if form != "hf":
        raise ConfigError(f"--format is {form!r}. Use hf, the only format of this version.")
    source = Path(path)
    if (source / "config.yaml").exists():
        source = source / "model"
        if not source.exists():
            raise CheckpointError(
                f"The run {path} has no finished model yet. Let `toque train` end, then export."
            )
    if not ((source / "config.json").exists() or is_adapter_folder(source)):
        raise ConfigError(
            f"{path} is neither a run, a model folder nor an adapter folder. Name a run such as "
            "runs/cookbook."
        )
    readme = source / "README.md"
    card = readme.read_text(encoding="utf-8") if readme.exists() else f"# {to.name}\n"
    done = export_model(source, to, card=card)
    how = "merged into its base, " if done.was_adapter else ""
    return (
        f"{done.folder} holds the model, {how}read back and compared: logits differ by at most "
        f"{done.difference:.1e} of the largest."
    )
