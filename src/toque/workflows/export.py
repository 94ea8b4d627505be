"""Export of a run's model, merged, for use elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from toque.data.tokenizer.codec import load_codec
from toque.data.tokenizer.folder import is_toques
from toque.errors import CheckpointError, ConfigError, argument
from toque.models.loading.card_usage import with_usage
from toque.models.loading.hub import resolve_folder
from toque.workflows.asking.provenance import (
    UNKNOWN,
    example_prompt,
    model_files,
    provenance_in,
)
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
    record = provenance_in(given)
    if record is UNKNOWN and not is_toques(source):  # of another's model nothing is known to add
        return export_model(source, Path(to), card=card)
    codec, encoder = load_codec(source), _has_encoder(source)
    files, portable = model_files(codec, record, encoder=encoder)
    card = with_usage(
        card,
        prompt=example_prompt(record),
        encoder=encoder,
        max_new_tokens=record.max_new_tokens,
        portable=portable,
    )
    most = record.max_new_tokens
    return export_model(source, Path(to), card=card, files=files, max_new_tokens=most)


def _has_encoder(source: Path) -> bool:
    """Whether the model of a folder, or the base of an adapter, is an encoder-decoder."""
    from toque.models.loading.from_scratch import config_in
    from toque.models.lora.files import is_adapter_folder, read_config

    if is_adapter_folder(source):
        source = resolve_folder(str(read_config(source).base_model_name_or_path))
    return bool(config_in(source).is_encoder_decoder)
