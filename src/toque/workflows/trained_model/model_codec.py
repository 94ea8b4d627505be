"""Tokenizer and chat template of a trained model, and the files that contain them."""

from __future__ import annotations

from pathlib import Path

from toque.data.tokenizer.chat import ChatTemplate, chat_template_of
from toque.data.tokenizer.codec import Codec, FamilyKind, generation_bounds, load_codec
from toque.data.tokenizer.portable import files_of_model
from toque.data.tokenizer.tokenizer_folder import end_ids_in, resolve_tokenizer
from toque.errors import CheckpointError, DataError
from toque.models.loading.provenance import Provenance
from toque.workflows.trained_model.folders import find_base
from toque.workflows.trained_model.training_record import FOREIGN


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
    end_ids = end_ids_in(find_base(folder) or folder)
    codec.add_ends(end_ids, ordinary=record is FOREIGN)
    return codec


def find_chat_template(codec: Codec, record: Provenance) -> ChatTemplate | None:
    """Return the chat template for prompts, or None for a model that answers single requests.

    Toque trains its own models on single requests, unless the data are conversations. The template
    also lets the codec's texts end at the end of a turn.
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
