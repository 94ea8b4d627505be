"""Model export: a Hugging Face folder that any transformers program loads; read back, compared."""

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

from toque.errors import CheckpointError, argument
from toque.models.loading.pretrained import load_model, load_with_adapter
from toque.models.loading.provenance import FOLDER, RECORD, WRITTEN, Provenance
from toque.models.lora.adapter_files import (
    CONFIG,
    WEIGHTS,
    is_adapter_folder,
    merged,
    write_adapter,
)
from toque.storage.atomic import atomic_folder, link_or_copy

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
_CHAT = "chat_template.jinja"
_KEPT: Final = (
    *("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "use_cache"),
    *("temperature", "top_k", "top_p", "min_p", "typical_p", "length_penalty"),
)
"""Settings of generation that a base hands on to what is trained from it: those of the second line
do nothing before somebody asks for samples or beams."""


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
    """Write model, adapters merged, tokenizer and card; the folder is whole or as it was before.

    For a T5 whose outputs are not scaled (v1.1, FLAN) the config says `tie_word_embeddings: false`,
    and the head is in the file even when it equals the embedding: by that flag every version of
    transformers decides the scaling. `files`, texts by their place, replace those of
    `codec_folder`; `record` tells `model.generate` its defaults, by which it writes the likeliest
    text whatever the base asked for, and `end_ids` end its texts, too. A model that is already
    there is replaced at the last moment, and files that Toque does not write stay; CheckpointError
    if that fails, or if `folder` holds something else.
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
    """Write an adapter, as `save_model` a model; `base_hash` is `base_sha256` of its base."""
    write = partial(write_adapter, model, base_hash=base_hash)
    _write_folder(folder, write, None, {**files, "README.md": card})


def _write_folder(
    folder: Path, write: Callable[[Path], None], codec_folder: Path | None, files: Mapping[str, str]
) -> None:
    is_model = any((folder / mark).exists() for mark in ("config.json", "adapter_config.json"))
    if not is_model and any((folder / name).exists() for name in WRITTEN):
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
            _keep_users_files(folder, writer.folder)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"The model could not be written to {folder}: {error}. "
            "What was there before is unchanged."
        ) from error


def _keep_users_files(folder: Path, new: Path) -> None:
    """Give the files of the user's in a model folder a place in the folder that replaces it."""
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if name.as_posix() not in WRITTEN and not path.is_dir():
            (new / name).parent.mkdir(parents=True, exist_ok=True)
            link_or_copy(path, new / name)


def _write_model(
    model: PreTrainedModel, folder: Path, *, record: Provenance | None, end_ids: Sequence[int]
) -> None:
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = model.dtype
    table = cast("nn.Embedding", model.get_input_embeddings()).weight
    shared = model.get_parameter("lm_head.weight") is table
    # False only for a T5 that does not: then the flag that ties must not be true.
    scales_outputs = bool(getattr(config, "scale_decoder_outputs", True))
    config.tie_word_embeddings = shared and scales_outputs
    config.save_pretrained(folder)
    if model.generation_config is not None:
        generation = copy.deepcopy(model.generation_config)
        if record is not None:
            generation = _greedy(generation)
            generation.max_new_tokens = record.max_new_tokens
            if size := record.no_repeat_ngram_size:
                # For a decoder transformers bans the prompt's runs, too, as our engine does not.
                generation.no_repeat_ngram_size = size
        known = generation.eos_token_id
        listed = known if isinstance(known, list) else [known]
        ends = [*end_ids, *(token for token in listed if token is not None)]
        if not {*ends} <= {*listed}:
            generation.eos_token_id = [*dict.fromkeys(ends)]
        # Not save_pretrained, which refuses fields that another one makes idle, such as a
        # temperature without do_sample; many published models have them, and keep them.
        generation.to_json_file(folder / "generation_config.json", keys_to_pop=["compile_config"])
    # One that two places share only once, by the embedding's name, which transformers ties from.
    tensors = {name: p.detach() for name, p in model.named_parameters()}
    kept = set(model.state_dict())
    tensors |= {name: b for name, b in model.named_buffers() if name in kept}
    if not scales_outputs:
        tensors["lm_head.weight"] = model.get_parameter("lm_head.weight").detach().clone()
    held = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})


def _greedy(generation: GenerationConfig) -> GenerationConfig:
    """A base's settings without those that change the likeliest text, as a repetition_penalty."""
    plain = GenerationConfig()  # type: ignore[no-untyped-call]
    for name in _KEPT:
        setattr(plain, name, getattr(generation, name, None))
    return plain


TOLERANCE = 1e-4
"""Largest difference of logits allowed, as a share of the largest logit: float32 sums that merging
orders otherwise differ by about 1e-6."""
DTYPES: Final = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
_ROWS, _TOKENS = 4, 32


@dataclass(frozen=True)
class Exported:
    """An exported folder whose model computes what the source computes."""

    folder: Path
    difference: float
    """Largest difference of a logit to the model before merging, rounding and saving, in shares of
    the largest logit."""
    was_adapter: bool
    template: str = ""  # sentence about its chat template, where there is one

    def __str__(self) -> str:
        """A sentence for people, or two."""
        what = "the model, merged into its base," if self.was_adapter else "the model,"
        what = "the adapter alone," if is_adapter_folder(self.folder) else what
        return (
            f"{self.folder} holds {what} read back and compared: logits differ by at most "
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
    """Write the model or adapter of `source` as a whole model, read it back and compare.

    Its tokenizer is that of `codec_folder`, or the one in `source`, which not every adapter has.
    One that computes other logits than the source rounded to `dtype` is removed: CheckpointError,
    as where something lies in `to`.
    """
    refuse_taken(to)
    adapted = is_adapter_folder(source)
    model = load_with_adapter(source, merge=False) if adapted else load_model(str(source))
    before = sample_logits(model)
    whole = merged(model)
    whole.to(DTYPES[dtype])  # type: ignore[arg-type]  # transformers annotates it away
    beside = codec_folder or source
    save_model(whole, beside, to, card=card, files=files, record=record, end_ids=end_ids)
    whole.to(torch.float32)  # type: ignore[arg-type]
    expected = before if dtype == "f32" else sample_logits(whole)
    del model, whole  # one model is in memory at a time
    after = sample_logits(load_model(str(to)))
    _refuse_other(after, expected, to, source)
    return Exported(to, _apart(after, before), adapted)


def export_adapter(source: Path, to: Path, *, card: str) -> Exported:
    """Copy the adapter of `source` with its tokenizer, read it back beside its base and compare.

    Files that are none of an adapter's stay behind. One that computes other logits is removed.
    """
    refuse_taken(to)
    expected = sample_logits(load_with_adapter(source, merge=False))  # refused before it is copied
    beside = (*_TOKENIZER_FILES, _CHAT)
    with atomic_folder(to) as writer:
        for name in (CONFIG, WEIGHTS, *beside, *(f"{FOLDER}/{n}" for n in (RECORD, *beside))):
            if (source / name).is_file():
                (writer.folder / name).parent.mkdir(exist_ok=True)
                writer.put(name, (source / name).read_bytes())
        writer.put("README.md", card.encode())
    after = sample_logits(load_with_adapter(to, merge=False))
    _refuse_other(after, expected, to, source)
    return Exported(to, _apart(after, expected), was_adapter=False)


def _refuse_other(after: Tensor, expected: Tensor, to: Path, source: Path) -> None:
    """Remove a folder, with a CheckpointError, whose logits differ from the expected ones."""
    difference = _apart(after, expected)
    if not difference <= TOLERANCE:  # a NaN is no agreement
        shutil.rmtree(to, ignore_errors=True)
        raise CheckpointError(
            f"The exported model computes other logits than {source}: they differ by "
            f"{difference:.2g} of the largest, and {TOLERANCE:.0e} is allowed. It was removed. "
            "Use the adapter beside its base instead, and please report this."
        )


def refuse_taken(to: Path) -> None:
    """Refuse, with a CheckpointError, a folder in which something lies, and what is no folder."""
    if to.is_dir() and not any(to.iterdir()):
        return
    if os.path.lexists(to):
        what = "exists and is not empty" if to.is_dir() else "exists and is not a folder"
        raise CheckpointError(f"{to} {what}. Name another folder with {argument('to')}.")


def _apart(after: Tensor, before: Tensor) -> float:
    return float((after - before).abs().max() / before.abs().max().clamp_min(1e-30))


@torch.no_grad()
def sample_logits(model: PreTrainedModel) -> Tensor:
    """Float32 logits [4, 32, V] for fixed pseudo-random tokens, whatever the machine's state."""
    generator = torch.Generator().manual_seed(0)
    rows = int(model.config.vocab_size)
    ids = torch.randint(rows, (_ROWS, _TOKENS), generator=generator)
    extra = {"decoder_input_ids": ids.flip(1)} if model.config.is_encoder_decoder else {}
    logits: Tensor = model.train(mode=False)(input_ids=ids, **extra).logits
    return logits.float()
