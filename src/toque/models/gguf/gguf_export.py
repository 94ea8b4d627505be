"""GGUF export: one file for llama.cpp and Ollama, read back and asked before anyone gets it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from toque.errors import CheckpointError, ConfigError
from toque.models.families import head_size, max_positions
from toque.models.generation.engine import generate
from toque.models.generation.options import GenerationOptions
from toque.models.gguf.gguf_vocabulary import (
    MOST_ENDS,
    Asking,
    composes_letters,
    write_vocabulary,
)
from toque.models.gguf.layout import Place, architecture_of, places, put, rotary, suit
from toque.models.loading.model_export import refuse_taken
from toque.models.loading.pretrained import load_model, load_with_adapter
from toque.models.lora.adapter_files import is_adapter_folder
from toque.storage.atomic import atomic_folder

_Type = gguf.GGMLQuantizationType
TYPES: Final = {  # that the gguf package writes; llama.cpp's k-quants it can only read
    "f32": (_Type.F32, gguf.LlamaFileType.ALL_F32),
    "f16": (_Type.F16, gguf.LlamaFileType.MOSTLY_F16),
    "bf16": (_Type.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "q8_0": (_Type.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
    "q5_1": (_Type.Q5_1, gguf.LlamaFileType.MOSTLY_Q5_1),
    "q5_0": (_Type.Q5_0, gguf.LlamaFileType.MOSTLY_Q5_0),
    "q4_1": (_Type.Q4_1, gguf.LlamaFileType.MOSTLY_Q4_1),
    "q4_0": (_Type.Q4_0, gguf.LlamaFileType.MOSTLY_Q4_0),
}
_T5_POSITIONS: Final = 512
_POSITIONS: Final = "position_embd.weight"
_POSITION_BIAS: Final = "attn_rel_b.weight"
_ROTARY: Final = "rope_freqs.weight"
_LARGEST: Final = {_Type.F32: math.inf, _Type.BF16: torch.finfo(torch.bfloat16).max}
"""Largest value of a type; the blocks of the others hold scales in float16."""
_PLAIN: Final = (_Type.F32, _Type.F16, _Type.BF16)
N_TOKENS: Final = 32  # greedy tokens of each prompt that are compared
_UNNAMED: Final = (
    f" A GGUF file names {MOST_ENDS} tokens that end texts, and this model has {{n}} more, behind "
    "which llama.cpp may go on writing: name them as stop strings."
)
_WIDENED: Final = (
    " {n} weights are stored in float32, the first is {first}: they hold values beyond the range "
    "of the type."
)
_UNCOMPOSED: Final = (
    " The model's tokenizer composes letters (Unicode NFC) and llama.cpp's does not: send é as one "
    "character, not as e and an accent."
)
_OPTIONS: Final = GenerationOptions(max_new_tokens=N_TOKENS)


@dataclass(frozen=True)
class ExportedGguf:
    """A folder with a GGUF file whose model writes what the source writes."""

    folder: Path
    file: str
    prompts: int  # whose greedy tokens were compared with those of the source, rounded as stored
    unchanged: int  # of these, answered with the same tokens before rounding
    was_adapter: bool
    unnamed_ends: int = 0  # tokens that end texts of the source, for which the file has no field
    widened: tuple[str, ...] = ()  # weights beyond the range of the type, which are float32
    composes: bool = False  # True if the tokenizer of the source composes letters (Unicode NFC)

    def __str__(self) -> str:
        """A sentence for people."""
        how = "merged into its base, " if self.was_adapter else ""
        return (
            f"{self.folder / self.file} holds the model, {how}read back and compared: the greedy "
            f"tokens of {self.prompts} prompts are those of the weights as stored, and of "
            f"{self.unchanged} also those of the model before it was rounded."
            + (_UNNAMED.format(n=self.unnamed_ends) if self.unnamed_ends else "")
            + (_WIDENED.format(n=len(self.widened), first=self.widened[0]) if self.widened else "")
            + (_UNCOMPOSED if self.composes else "")
        )


def export_gguf(
    source: Path,
    to: Path,
    *,
    kind: str,
    tokenizer_json: str,
    asking: Asking,
    prompts: Sequence[Sequence[int]],
    files: Mapping[str, str] = MappingProxyType({}),
) -> ExportedGguf:
    """Write the model or adapter of `source` as a GGUF file, read it back and compare.

    The folder appears when what is read back writes, token by token, what the source writes after
    each of `prompts` (ids) with its weights rounded as stored. `files` are texts of further files,
    by name. ConfigError where llama.cpp computes no such model, or has no such tokenizer;
    CheckpointError where `to` is taken or cannot be written, or another model was read back.
    """
    refuse_taken(to)
    adapted = is_adapter_folder(source)
    model = load_with_adapter(source) if adapted else load_model(str(source))
    architecture_of(model.config)
    room = max_positions(model.config)
    shown = [list(prompt if room is None else prompt[: max(1, room // 2)]) for prompt in prompts]
    write = partial(generate, model, shown, _OPTIONS, eos_id=asking.ends, pad_id=asking.pad)
    before = write()
    suit(model)
    file = gguf_name(to, kind)
    try:
        with atomic_folder(to) as writer:
            path = writer.folder / file
            write_gguf(
                model, path, name=to.name, kind=kind, tokenizer_json=tokenizer_json, asking=asking
            )
            widened = list[str]()
            for place in places(model):
                data, stored, shape = _stored(place, kind)
                if stored == _Type.F32 and _type_of(place, kind, shape) != stored:
                    widened.append(place.name)
                put(place, gguf.dequantize(data, stored), shape)
            expected = write()
            for weight in model.parameters():  # what is not read back is seen to be missing
                weight.detach().fill_(float("nan"))
            if (frequencies := rotary(model)) is not None:
                frequencies[0].fill_(float("nan"))
            read_weights(model, path)
            found = write()
            if found != expected:
                other = sum(a != b for a, b in zip(expected, found, strict=True))
                raise CheckpointError(
                    f"The GGUF file of {source} was read back and writes other tokens than the "
                    f"model for {other} of {len(found)} prompts, so it was not kept. Try another "
                    f"type than {kind}, or the format hf, and please report this."
                )
            for name, text in files.items():
                writer.put(name, text.encode())
    except OSError as error:
        raise CheckpointError(f"The model could not be written to {to}: {error}.") from error
    same = sum(a == b for a, b in zip(before, found, strict=True))
    unnamed = max(0, len(asking.ends) - MOST_ENDS)
    composes = composes_letters(tokenizer_json)
    return ExportedGguf(to, file, len(shown), same, adapted, unnamed, (*widened,), composes)


def gguf_name(to: Path, kind: str) -> str:
    """The file's name in its folder: soup-Q8_0.gguf."""
    return f"{to.name}-{kind.upper()}.gguf"


def write_gguf(
    model: PreTrainedModel, path: Path, *, name: str, kind: str, tokenizer_json: str, asking: Asking
) -> None:
    """Write a model on the CPU that `suit` has seen, and its tokenizer as training read it."""
    config: Any = model.config
    arch = architecture_of(config)
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    try:
        writer.add_name(name)
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        writer.add_file_type(TYPES[kind][1])
        _write_shape(writer, config)
        rows = int(config.vocab_size)
        write_vocabulary(writer, tokenizer_json, asking, rows=rows)
        for place in places(model):
            data, stored, _ = _stored(place, kind)
            writer.add_tensor(place.name, data, raw_dtype=stored)
        if (frequencies := rotary(model)) is not None:
            scaled, plain = frequencies
            writer.add_tensor(_ROTARY, (plain / scaled).numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def read_weights(model: PreTrainedModel, path: Path) -> None:
    """Fill a model that `suit` has seen with the weights of a file of its like."""
    reader = gguf.GGUFReader(path)
    found = {tensor.name: tensor for tensor in reader.tensors}
    wanted = list(places(model))
    if (frequencies := rotary(model)) is not None and _ROTARY in found:
        scaled, plain = frequencies
        scaled.copy_(plain / torch.from_numpy(np.array(found.pop(_ROTARY).data)))
    if set(found) != {place.name for place in wanted} or len(found) != len(wanted):
        raise CheckpointError(f"{path} was read back and holds other weights than were written.")
    for place in wanted:
        held = found[place.name]
        shape = [int(size) for size in reversed(held.shape.tolist())]
        put(place, gguf.dequantize(held.data, held.tensor_type), shape)


def _write_shape(writer: gguf.GGUFWriter, config: Any) -> None:
    """Write sizes and constants of the architecture."""
    kind = config.model_type
    writer.add_vocab_size(config.vocab_size)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    if kind == "t5":
        # A T5 has no limit: llama.cpp allocates this many positions unless told otherwise.
        writer.add_context_length(getattr(config, "n_positions", _T5_POSITIONS))
        writer.add_feed_forward_length(config.d_ff)
        writer.add_decoder_block_count(config.num_decoder_layers)
        writer.add_key_length(config.d_kv)
        writer.add_value_length(config.d_kv)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
        writer.add_relative_attn_buckets_count(config.relative_attention_num_buckets)
        writer.add_decoder_start_token_id(config.decoder_start_token_id)
        return
    writer.add_context_length(config.max_position_embeddings)
    if kind == "gpt2":
        writer.add_feed_forward_length(config.n_inner or 4 * config.hidden_size)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        return
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if kind == "gpt_neox":
        share = config.rope_parameters["partial_rotary_factor"]
        writer.add_rope_dimension_count(int(head_size(config) * share))
        writer.add_layer_norm_eps(config.layer_norm_eps)
        writer.add_parallel_residual(config.use_parallel_residual)
        return
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(head_size(config))
    writer.add_key_length(head_size(config))
    writer.add_value_length(head_size(config))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def _stored(place: Place, kind: str) -> tuple[NDArray[Any], Any, Sequence[int]]:
    """A weight as a file of a kind stores it, its type, and its shape.

    Vectors stay float32, as do weights beyond the type's range, and rows that no block divides
    float16. Raises ConfigError for a weight that is infinite or not a number.
    """
    weight = place.to_file(place.weight).float().contiguous()
    largest = float(weight.abs().max())
    if not math.isfinite(largest):
        raise ConfigError(
            f"The weight {place.name} holds values that are infinite or not numbers, so no GGUF is "
            "written. Export an earlier checkpoint, or train again with a lower optim.peak_lr."
        )
    stored = _type_of(place, kind, weight.shape)
    if largest > _LARGEST.get(stored, torch.finfo(torch.float16).max):
        stored = _Type.F32
    return gguf.quantize(weight.numpy(), stored), stored, weight.shape


def _type_of(place: Place, kind: str, shape: Sequence[int]) -> Any:
    """The type in which a file of a kind stores a weight of this shape, whatever its values are."""
    stored = TYPES[kind][0]
    if len(shape) < 2 or place.name == _POSITIONS or place.name.endswith(_POSITION_BIAS):
        return _Type.F32
    if stored not in _PLAIN and shape[-1] % gguf.GGML_QUANT_SIZES[stored][0] != 0:
        return _Type.F16
    return stored
