"""Export of a model or adapter as a Hugging Face folder, verified by reading it back."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Final, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from toque.errors import CheckpointError, ConfigError, argument
from toque.models.config_values import scales_outputs
from toque.models.loading.pretrained import load_model, load_with_adapter
from toque.models.loading.provenance import FOLDER, RECORD, WRITTEN, Provenance
from toque.models.loading.self_check import relative_error
from toque.models.lora.adapter_files import (
    CONFIG,
    WEIGHTS,
    is_adapter_folder,
    merge_adapter,
    write_adapter,
)
from toque.storage.atomic import FolderWriter, atomic_folder, link_or_copy

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
_CHAT = "chat_template.jinja"
_INHERITED_SETTINGS: Final = (
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "decoder_start_token_id",
    "use_cache",
    # The other settings have no effect until the user requests sampling or beams.
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "length_penalty",
)
"""Generation settings that a trained model inherits from its base."""


def save_model(
    model: PreTrainedModel,
    codec_folder: Path | None,
    folder: Path,
    *,
    card: str,
    files: Mapping[str, str] = MappingProxyType({}),
    record: Provenance | None = None,
    end_ids: Sequence[int] = (),
) -> None:
    """Write a model with merged adapters, its tokenizer and its card, all or nothing.

    A model in `folder` is replaced. Files that Toque does not write remain.

    A T5 without scaled outputs (v1.1, FLAN) gets `tie_word_embeddings: false` and a head in the
    file, even if the head equals the embedding, because all transformers versions derive the
    scaling from that flag.

    Args:
        model: Model to write.
        codec_folder: Source of the tokenizer files.
        folder: Destination.
        card: Text of README.md.
        files: Texts by path in the folder. They replace files from `codec_folder`.
        record: Record with defaults for transformers' `generate`, which then decodes greedily.
        end_ids: Tokens that end a text, in addition to the model's own.

    Raises:
        CheckpointError: Writing failed, or `folder` contains something other than a model.
    """
    write = partial(_write_model, model, record=record, end_ids=end_ids)
    _write_folder(folder, write, codec_folder, {**files, "README.md": card})


def save_adapter(
    model: PreTrainedModel,
    folder: Path,
    *,
    card: str,
    base_hash: str,
    files: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Write an adapter and its card, all or nothing. `base_hash` is the `base_sha256` of its base.

    The arguments and errors are the same as for `save_model`.
    """
    write = partial(write_adapter, model, base_hash=base_hash)
    _write_folder(folder, write, None, {**files, "README.md": card})


def _write_folder(
    folder: Path,
    write: Callable[[Path], None],
    codec_folder: Path | None,
    files: Mapping[str, str],
) -> None:
    """Write weights, tokenizer files, texts and the user's files to a folder, in one step.

    Args:
        folder: Destination.
        write: Writes the weights and their config to a folder.
        codec_folder: Source of the tokenizer files, if there are any.
        files: Texts by path in the folder.

    Raises:
        CheckpointError: Writing failed, or `folder` contains something other than a model.
    """
    names = ("config.json", "adapter_config.json")
    is_model = any((folder / name).exists() for name in names)
    if not is_model and any((folder / name).exists() for name in WRITTEN):
        raise CheckpointError(
            f"{folder} exists and does not contain a model, so it is not replaced. Choose another "
            "folder, or remove this one."
        )
    try:
        with atomic_folder(folder) as writer:
            write(writer.folder)
            put_files(writer, codec_folder, files)
            _link_users_files(folder, writer.folder)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"Cannot write the model to {folder}: {error}. The previous content is unchanged."
        ) from error


def put_files(
    writer: FolderWriter, codec_folder: Path | None, files: Mapping[str, str]
) -> None:
    """Write tokenizer files and texts.

    Args:
        writer: Writer of the folder.
        codec_folder: Source of the tokenizer files, if there are any.
        files: Texts by path in the folder. They replace files from `codec_folder`.
    """
    tokenizer_files: list[Path] = []
    if codec_folder is not None:
        tokenizer_files.append(codec_folder / _CHAT)
        # Next to another tokenizer.json, these files would describe the wrong tokenizer.
        if "tokenizer.json" not in files:
            tokenizer_files += [codec_folder / name for name in _TOKENIZER_FILES]
    for file in tokenizer_files:
        if file.exists():
            writer.put(file.name, file.read_bytes())
    for path, text in files.items():
        (writer.folder / path).parent.mkdir(exist_ok=True)
        writer.put(path, text.encode())


def _link_users_files(folder: Path, new: Path) -> None:
    """Link the user's files in a model folder into the folder that replaces it."""
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if name.as_posix() not in WRITTEN and not path.is_dir():
            (new / name).parent.mkdir(parents=True, exist_ok=True)
            link_or_copy(path, new / name)


def write_config(
    model: PreTrainedModel,
    folder: Path,
    *,
    record: Provenance | None,
    end_ids: Sequence[int],
) -> None:
    """Write config.json and generation_config.json. For the arguments see `save_model`."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = model.dtype
    head = model.get_parameter("lm_head.weight")
    is_tied = head is cast("nn.Embedding", model.get_input_embeddings()).weight
    # A T5 without scaled outputs must not set the flag that ties.
    config.tie_word_embeddings = is_tied and scales_outputs(config)
    config.save_pretrained(folder)

    if model.generation_config is not None:
        generation = _generation_config(model.generation_config, record, end_ids)
        # save_pretrained rejects settings without effect, such as a temperature without do_sample.
        # Many published models have such settings, and they are retained.
        generation.to_json_file(
            folder / "generation_config.json", keys_to_pop=["compile_config"]
        )


def _write_model(
    model: PreTrainedModel,
    folder: Path,
    *,
    record: Provenance | None,
    end_ids: Sequence[int],
) -> None:
    """Write config.json, generation_config.json and model.safetensors."""
    write_config(model, folder, record=record, end_ids=end_ids)
    # named_parameters lists a shared tensor once, by the embedding's name, as transformers expects.
    tensors = {name: p.detach() for name, p in model.named_parameters()}
    persistent = set(model.state_dict())
    tensors |= {name: b for name, b in model.named_buffers() if name in persistent}
    if not scales_outputs(model.config):
        head = model.get_parameter("lm_head.weight")
        tensors["lm_head.weight"] = head.detach().clone()
    on_cpu = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
    save_file(on_cpu, folder / "model.safetensors", metadata={"format": "pt"})


def _generation_config(
    base: GenerationConfig, record: Provenance | None, end_ids: Sequence[int]
) -> GenerationConfig:
    """Build a model's generation settings. With a `record` they decode greedily."""
    generation = copy.deepcopy(base)
    if record is not None:
        # Other settings, such as repetition_penalty, would change greedy decoding.
        generation = GenerationConfig()  # type: ignore[no-untyped-call]
        for name in _INHERITED_SETTINGS:
            setattr(generation, name, getattr(base, name, None))
        generation.max_new_tokens = record.max_new_tokens
        if record.no_repeat_ngram_size:
            # For a decoder, transformers also bans n-grams of the prompt. Toque's engine does not.
            generation.no_repeat_ngram_size = record.no_repeat_ngram_size

    base_ends = generation.eos_token_id
    if not isinstance(base_ends, list):
        base_ends = [] if base_ends is None else [base_ends]
    if not set(end_ids) <= set(base_ends):
        generation.eos_token_id = [*dict.fromkeys((*end_ids, *base_ends))]
    return generation


TOLERANCE = 1e-4
"""Largest allowed difference in a logit, as a fraction of the largest logit.

Merging changes the order of float32 sums, which changes logits by about 1e-6.
"""
DTYPES: Final = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
_SAMPLE_SHAPE: Final = (4, 32)  # number of rows and tokens in the compared forward pass


@dataclass(frozen=True)
class Exported:
    """An exported folder, verified to compute the same logits as its source."""

    folder: Path
    difference: float
    """Largest change that merging, rounding and saving made in a logit, relative to the largest.
    """
    was_adapter: bool
    template: str = ""  # remark about the chat template, if any

    def __str__(self) -> str:
        """Describe the export in one or two sentences."""
        if is_adapter_folder(self.folder):
            content = "the adapter alone"
        elif self.was_adapter:
            content = "the model, merged into its base"
        else:
            content = "the model"
        return (
            f"{self.folder} holds {content}, read back and compared: logits differ by at most "
            f"{self.difference:.1e} of the largest.{self.template}"
        )


def export_model(
    source: Path,
    to: Path,
    *,
    codec_folder: Path | None = None,
    card: str,
    dtype: str = "f32",
    files: Mapping[str, str] = MappingProxyType({}),
    record: Provenance | None = None,
    end_ids: Sequence[int] = (),
) -> Exported:
    """Write the model or adapter of `source` as a complete model, read it back and compare.

    Args:
        source: Folder of the model or adapter.
        to: Destination, a new or empty folder.
        codec_folder: Source of the tokenizer files; `source` by default.
        card: Text of README.md.
        dtype: Key of `DTYPES`.
        files: See `save_model`.
        record: See `save_model`.
        end_ids: See `save_model`.

    Raises:
        ConfigError: A weight has infinite or NaN values.
        CheckpointError: `to` is not empty, or the logits of the export differ from the logits of
            the source in `dtype`. Such an export is removed.
    """
    refuse_nonempty(to)
    was_adapter = is_adapter_folder(source)
    model = (
        load_with_adapter(source, merge=False)
        if was_adapter
        else load_model(str(source))
    )
    refuse_nonfinite(model)
    before = sample_logits(model)

    model = merge_adapter(model)
    model.to(DTYPES[dtype])  # type: ignore[arg-type]  # transformers annotates it away
    tokenizer = codec_folder or source
    save_model(
        model, tokenizer, to, card=card, files=files, record=record, end_ids=end_ids
    )
    model.to(torch.float32)  # type: ignore[arg-type]
    expected = before if dtype == "f32" else sample_logits(model)

    del model  # one model is in memory at a time
    after = sample_logits(load_model(str(to)))
    _remove_if_different(to, after, expected, source)
    return Exported(to, relative_error(after, before), was_adapter)


def export_adapter(source: Path, to: Path, *, card: str) -> Exported:
    """Copy the adapter of `source` with its tokenizer, read it back with its base and compare.

    Other files in `source` are not copied.

    Raises:
        CheckpointError: `to` is not empty, or the logits differ. Such an export is removed.
    """
    refuse_nonempty(to)
    # A bad adapter is rejected here, before it is copied.
    expected = sample_logits(load_with_adapter(source, merge=False))

    tokenizer = (*_TOKENIZER_FILES, _CHAT)
    recorded = [f"{FOLDER}/{name}" for name in (RECORD, *tokenizer)]
    with atomic_folder(to) as writer:
        for name in (CONFIG, WEIGHTS, *tokenizer, *recorded):
            if (source / name).is_file():
                (writer.folder / name).parent.mkdir(exist_ok=True)
                writer.put(name, (source / name).read_bytes())
        writer.put("README.md", card.encode())

    after = sample_logits(load_with_adapter(to, merge=False))
    _remove_if_different(to, after, expected, source)
    return Exported(to, relative_error(after, expected), was_adapter=False)


def _remove_if_different(
    to: Path, after: Tensor, expected: Tensor, source: Path
) -> None:
    """Remove an export if its logits differ from the expected logits.

    Raises:
        CheckpointError: The export was removed.
    """
    difference = relative_error(after, expected)
    if not difference <= TOLERANCE:  # also true for NaN
        shutil.rmtree(to, ignore_errors=True)
        raise CheckpointError(
            f"The exported model and {source} compute different logits: they differ by up to "
            f"{difference:.2g} of the largest logit, and the limit is {TOLERANCE:.0e}. The export "
            "was removed. Use the adapter with its base instead, and please report this bug."
        )


def refuse_nonfinite(model: PreTrainedModel) -> None:
    """Raise a ConfigError if a weight has infinite or NaN values."""
    for name, weight in model.named_parameters():
        if not bool(weight.isfinite().all()):
            raise ConfigError(
                f"The weight {name} has infinite or NaN values, so it cannot be exported. Export "
                "an earlier checkpoint, or train again with a lower optim.peak_lr."
            )


def refuse_nonempty(to: Path) -> None:
    """Raise a CheckpointError if a path exists and is not an empty folder."""
    if to.is_dir() and not any(to.iterdir()):
        return
    if os.path.lexists(to):
        problem = "is not empty" if to.is_dir() else "is not a folder"
        raise CheckpointError(
            f"{to} exists and {problem}. Choose another folder with {argument('to')}."
        )


@torch.no_grad()
def sample_logits(model: PreTrainedModel) -> Tensor:
    """Compute float32 logits [4, 32, V] for fixed pseudo-random tokens, in evaluation mode."""
    generator = torch.Generator().manual_seed(0)
    vocab_size = int(model.config.vocab_size)
    ids = torch.randint(vocab_size, _SAMPLE_SHAPE, generator=generator)
    inputs = {"input_ids": ids}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids.flip(1)
    logits: Tensor = model.train(mode=False)(**inputs).logits
    return logits.float()
