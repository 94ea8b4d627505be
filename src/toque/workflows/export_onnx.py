"""Export of a model as ONNX files, alone or with a web page."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from toque.data.tokenizer.codec import FamilyKind
from toque.errors import ConfigError, argument
from toque.models.loading.card_usage import with_onnx_usage
from toque.models.loading.model_export import put_files
from toque.models.loading.provenance import FOLDER, Provenance
from toque.models.onnx.stored_types import TYPES
from toque.models.onnx_files import onnx_export
from toque.models.onnx_files.onnx_export import ExportedOnnx
from toque.storage.atomic import FolderWriter
from toque.user_paths import named_path
from toque.workflows.compared_prompts import has_encoder, sample_prompts
from toque.workflows.export_web import WebPage
from toque.workflows.trained_model.model_codec import (
    find_tokenizer,
    model_files,
    open_codec,
)
from toque.workflows.trained_model.prompt_format import example_prompt
from toque.workflows.trained_model.training_record import FOREIGN


def export_onnx(
    source: Path,
    to: Path,
    kind: str,
    card: str,
    record: Provenance,
    open_page: Callable[[], WebPage] | None = None,
) -> ExportedOnnx:
    """Export a folder with ONNX files and the tokenizer, and the files of a page.

    Raises:
        ConfigError: The type is unknown, or no graph exists for the model.
        CheckpointError: `to` exists or cannot be written, or the files differ from the model.
    """
    if kind not in TYPES:
        raise ConfigError(
            f"{argument('dtype')} must be one of {', '.join(TYPES)} in the formats onnx and web, "
            f"not {kind}."
        )
    page = None if open_page is None else open_page()
    codec = open_codec(source, record)
    encoder = has_encoder(source)
    family: FamilyKind = "encoder-decoder" if encoder else "decoder"
    files: dict[str, str] = {}
    if record is not FOREIGN:
        files, _ = model_files(codec, record, encoder=encoder)
    # Only Toque reads its record, and it does not read ONNX files.
    texts = {name: text for name, text in files.items() if not name.startswith(FOLDER)}
    prompts = sample_prompts(codec, family, record)
    card = with_onnx_usage(
        card,
        kind=kind,
        prompt=example_prompt(record),
        encoder=encoder,
        max_new_tokens=record.max_new_tokens,
    )

    def add_files(writer: FolderWriter) -> None:
        put_files(writer, find_tokenizer(source), {**texts, "README.md": card})
        if page is not None:
            page.write(writer, codec, prompts)

    return onnx_export.export_onnx(
        source,
        to,
        kind=kind,
        prompts=list(prompts.values()),
        ends=codec.ordered_ends,
        pad=codec.pad_id,
        record=None if record is FOREIGN else record,
        add_files=add_files,
        is_page=page is not None,
    )


def export_web(
    source: Path,
    to: Path,
    kind: str,
    card: str,
    record: Provenance,
    packages: str | Path | None,
) -> ExportedOnnx:
    """Export a web page. For the errors see `export_onnx` and `WebPage`."""
    folder = None if packages is None else named_path(packages)
    open_page = partial(WebPage, to.name, record, folder)
    return export_onnx(source, to, kind, card, record, open_page)
