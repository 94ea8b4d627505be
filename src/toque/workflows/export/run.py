"""Export of a run's model, merged, for use elsewhere."""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from toque.data.tokenizer.chat import chat_template_of
from toque.data.tokenizer.codec import Codec
from toque.data.tokenizer.tokenizer_folder import is_toques, read_folder
from toque.errors import CheckpointError, ConfigError, DataError, argument
from toque.models.loading.card_usage import with_usage
from toque.models.loading.hub import resolve_folder
from toque.models.loading.push import push, refuse_push
from toque.workflows.asking.provenance import (
    FOREIGN,
    codec_in,
    example_prompt,
    model_files,
    provenance_in,
)
from toque.workflows.export.gguf_folder import export_gguf_folder
from toque.workflows.results import Model, existing_folder

if TYPE_CHECKING:
    from toque.models.gguf.export import ExportedGguf
    from toque.models.loading.verify_export import Exported

DEFAULT_DTYPES: Final = {"hf": "f32", "gguf": "f16"}
_SAMPLE: Final = (
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "1. Two eggs,\n  beaten."},
    {"role": "user", "content": "And then?"},
)
"""A conversation by which chat templates are compared."""


def export(
    run_or_model: Model,
    to: str | Path,
    *,
    form: str = "hf",
    dtype: str | None = None,
    push_to: str | None = None,
) -> Exported | ExportedGguf:
    """Write a model for use elsewhere, an adapter merged; read it back and compare.

    Args:
        run_or_model: a run, a model or an adapter folder.
        to: the folder to write; nothing may lie there.
        form: hf, a Hugging Face folder; or gguf, a file for llama.cpp and Ollama.
        dtype: of the weights: f32, bf16 or f16; in the format gguf also q8_0, q5_1, q5_0, q4_1 or
            q4_0. None for f32 in the format hf and f16 in the format gguf.
        push_to: a repository on the hub, owner/name, that gets a copy once it has passed; made
            private where it does not exist. None for none.

    Raises:
        ConfigError: neither a run nor a model, a format or type that is not known, a model that
            the format cannot hold, or no permission to push.
        CheckpointError: the run is not finished, or what was written is not the same model.
    """
    if form not in DEFAULT_DTYPES:
        known = " or ".join(DEFAULT_DTYPES)
        raise ConfigError(f"{argument('form')} is {form!r}. Use {known}.")
    if push_to is not None:
        refuse_push(push_to)
    made = _written(_source_of(run_or_model), Path(to), form, (dtype or DEFAULT_DTYPES[form]))
    if push_to is not None:
        push(made.folder, push_to)
    return made


def _source_of(run_or_model: Model) -> tuple[Path, Path]:
    """The folder that was named, and that of its model or adapter."""
    from toque.models.lora.files import is_adapter_folder

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
    return given, source


def _written(
    folders: tuple[Path, Path], to: Path, form: str, dtype: str
) -> Exported | ExportedGguf:
    from toque.models.loading.verify_export import DTYPES, export_model  # with torch

    given, source = folders
    readme = source / "README.md"
    card = readme.read_text(encoding="utf-8") if readme.exists() else f"# {to.name}\n"
    record = provenance_in(given)
    another = record is FOREIGN and not is_toques(source)
    if form == "gguf":
        return export_gguf_folder(
            source,
            to,
            kind=dtype.lower(),
            card=card,
            record=record,
            codec=codec_in(source, record),
            encoder=_has_encoder(source),
        )
    if dtype not in DTYPES:
        raise ConfigError(
            f"{argument('dtype')} is {dtype}. Use {', '.join(DTYPES)} in the format hf."
        )
    if another:  # of another's model nothing is known to add
        return _compared(source, export_model(source, to, card=card, dtype=dtype))
    codec, encoder = codec_in(source, record), _has_encoder(source)
    files, portable = model_files(codec, record, encoder=encoder)
    card = with_usage(
        card,
        prompt=example_prompt(record),
        encoder=encoder,
        max_new_tokens=record.max_new_tokens,
        portable=portable,
    )
    most = record.max_new_tokens
    made = export_model(source, to, card=card, dtype=dtype, files=files, max_new_tokens=most)
    return _compared(source, made)


def _compared(source: Path, made: Exported) -> Exported:
    """An exported folder whose chat template, if any, writes the tokens that the source's writes.

    Raises:
        CheckpointError: it writes others; the folder is removed.
    """
    there, here = _conversation_in(made.folder), _conversation_in(source)
    if there is None and (here is None or is_toques(source)):  # older runs had their base's
        return made
    if there is None or there != here:
        shutil.rmtree(made.folder, ignore_errors=True)
        raise CheckpointError(
            f"The chat template in {made.folder} writes other tokens than that of {source}, so it "
            "was removed. Please report this."
        )
    told = f" Its chat template was compared, too: it writes the same {len(there)} tokens."
    return replace(made, template=told)


def _conversation_in(folder: Path) -> list[int] | None:
    """What transformers' `apply_chat_template` makes of a sample; None where it makes nothing."""
    if not (folder / "tokenizer.json").is_file():
        return None
    with suppress(DataError):  # it refuses the sample, or Toque cannot read its tokenizer
        template = chat_template_of(Codec(read_folder(folder, plain=True)))
        return None if template is None else template.ids(_SAMPLE).result()
    return None


def _has_encoder(source: Path) -> bool:
    """Whether the model of a folder, or the base of an adapter, is an encoder-decoder."""
    from toque.models.loading.from_scratch import config_in
    from toque.models.lora.files import is_adapter_folder, read_config

    if is_adapter_folder(source):
        source = resolve_folder(str(read_config(source).base_model_name_or_path))
    return bool(config_in(source).is_encoder_decoder)
