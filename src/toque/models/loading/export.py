"""Model export: a Hugging Face folder that any transformers program loads."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import cast

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from toque.errors import CheckpointError
from toque.models.lora.files import write_adapter
from toque.storage.atomic import atomic_folder

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
_CHAT = "chat_template.jinja"


def save_model(
    model: PreTrainedModel,
    codec_folder: Path | None,
    folder: Path,
    *,
    card: str,
    files: Mapping[str, str] = MappingProxyType({}),
    max_new_tokens: int | None = None,
) -> None:
    """Write model, tokenizer and model card; the folder is whole or as it was before.

    Weights are written in the model's dtype. For a T5 whose outputs are not scaled (v1.1, FLAN)
    the config says `tie_word_embeddings: false`, and the head is in the file even when it equals
    the embedding: that flag is what every version of transformers decides the scaling by.

    Args:
        model: A transformers model, adapters merged.
        codec_folder: A tokenizer folder, whose files are copied; None where `files` has them.
        folder: Where to; a model that is already there is replaced at the last moment.
        card: The text of README.md.
        files: Texts of further files, by their place in the folder; they replace copied ones.
        max_new_tokens: Longest text that `model.generate` writes when not told otherwise.

    Raises:
        CheckpointError: it cannot be written, for want of space or permission; or `folder` holds
            something other than a model.
    """
    write = partial(_write_model, model, max_new_tokens=max_new_tokens)
    _write_folder(folder, write, codec_folder, {**files, "README.md": card})


def save_adapter(
    model: PreTrainedModel,
    codec_folder: Path | None,
    folder: Path,
    *,
    card: str,
    base_hash: str,
    files: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Write the adapter of `model`, tokenizer and card; whole, or as it was before.

    Args:
        model: With an adapter attached.
        codec_folder: A tokenizer folder, whose files are copied; None where `files` has them.
        folder: Where to; a model or adapter that is already there is replaced.
        card: The text of README.md.
        base_hash: `base_sha256` of the weights it was trained beside.
        files: As of `save_model`.

    Raises:
        CheckpointError: it cannot be written; or `folder` holds something else.
    """
    write = partial(write_adapter, model, base_hash=base_hash)
    _write_folder(folder, write, codec_folder, {**files, "README.md": card})


def _write_folder(
    folder: Path, write: Callable[[Path], None], codec_folder: Path | None, files: Mapping[str, str]
) -> None:
    marks = ("config.json", "adapter_config.json")
    held = any((folder / mark).exists() for mark in marks)
    if folder.exists() and any(folder.iterdir()) and not held:
        raise CheckpointError(
            f"{folder} exists and does not hold a model, so it is not replaced. Choose another "
            "folder, or remove it."
        )
    try:
        with atomic_folder(folder) as writer:
            write(writer.folder)
            # What stands beside an older tokenizer.json would speak of that one.
            copied = (_CHAT,) if "tokenizer.json" in files else (*_TOKENIZER_FILES, _CHAT)
            for name in copied:
                if codec_folder is not None and (codec_folder / name).exists():
                    writer.put(name, (codec_folder / name).read_bytes())
            for place, text in files.items():
                (writer.folder / place).parent.mkdir(exist_ok=True)
                writer.put(place, text.encode())
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"The model could not be written to {folder}: {error}. "
            "What was there before is unchanged."
        ) from error


def tensors_to_save(model: PreTrainedModel) -> dict[str, Tensor]:
    """The model's weights by name, one that two places share only once.

    Of a shared weight the embedding's name is kept, which is the one transformers ties from.
    """
    tensors = {name: p.detach() for name, p in model.named_parameters()}  # shared: first name only
    kept = set(model.state_dict())
    tensors |= {name: b for name, b in model.named_buffers() if name in kept}
    if not _scales_outputs(model):
        tensors["lm_head.weight"] = model.get_parameter("lm_head.weight").detach().clone()
    return {name: t.contiguous().cpu() for name, t in tensors.items()}


def _write_model(model: PreTrainedModel, folder: Path, *, max_new_tokens: int | None) -> None:
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = model.dtype
    table = cast("nn.Embedding", model.get_input_embeddings()).weight
    shared = model.get_parameter("lm_head.weight") is table
    config.tie_word_embeddings = shared and _scales_outputs(model)
    config.save_pretrained(folder)
    if model.generation_config is not None:
        generation = copy.deepcopy(model.generation_config)
        if max_new_tokens is not None:
            generation.max_new_tokens = max_new_tokens
        generation.save_pretrained(folder)
    save_file(tensors_to_save(model), folder / "model.safetensors", metadata={"format": "pt"})


def _scales_outputs(model: PreTrainedModel) -> bool:
    """False only for a T5 that does not; whether the flag that ties may be true."""
    return bool(getattr(model.config, "scale_decoder_outputs", True))
