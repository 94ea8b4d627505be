"""GGUF export: one file for llama.cpp and Ollama, read back and compared with the model."""

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
from toque.models.config_values import head_size, max_positions
from toque.models.generation.engine import generate
from toque.models.generation.options import GenerationOptions
from toque.models.gguf.gguf_vocabulary import (
    MAX_ENDS,
    PromptTokens,
    composes_letters,
    write_vocabulary,
)
from toque.models.gguf.layout import (
    Place,
    architecture_of,
    places,
    put,
    remove_output_scale,
    rotary,
)
from toque.models.loading.model_export import refuse_taken
from toque.models.loading.pretrained import load_model, load_with_adapter
from toque.models.lora.adapter_files import is_adapter_folder
from toque.storage.atomic import atomic_folder

_Type = gguf.GGMLQuantizationType
TYPES: Final = {  # types that the gguf package writes; it can only read llama.cpp's k-quants
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
"""Largest value of a type. The blocks of other types have scales in float16."""
_PLAIN: Final = (_Type.F32, _Type.F16, _Type.BF16)
N_TOKENS: Final = 32  # greedy tokens of each prompt that are compared
_UNNAMED: Final = (
    f" A GGUF file can name {MAX_ENDS} end tokens, and this model has {{n}} more. llama.cpp may "
    "continue after them: use them as stop strings."
)
_WIDENED: Final = (
    " {n} weights are stored in float32, the first is {first}: they have values beyond the range "
    "of the type."
)
_UNCOMPOSED: Final = (
    " The model's tokenizer composes letters (Unicode NFC) and llama.cpp's does not: send é as one "
    "character, not as e and an accent."
)
_OPTIONS: Final = GenerationOptions(max_new_tokens=N_TOKENS)


@dataclass(frozen=True)
class ExportedGguf:
    """Folder with a GGUF file that generates the same tokens as the source."""

    folder: Path
    file: str
    prompts: int  # prompts for which the file was compared with the rounded source
    unchanged: int  # prompts with the same tokens before rounding
    was_adapter: bool
    unnamed_ends: int = 0  # end tokens of the source that the file cannot name
    widened: tuple[
        str, ...
    ] = ()  # weights in float32, because they exceed the range of the type
    # True if the tokenizer of the source composes letters (Unicode NFC)
    composes: bool = False

    def __str__(self) -> str:
        """Describe the file and the comparison."""
        merged = "merged into its base, " if self.was_adapter else ""
        text = (
            f"{self.folder / self.file} holds the model, {merged}read back and compared: it "
            f"generates the same tokens for {self.prompts} prompts as the weights as stored, and "
            f"for {self.unchanged} also the same as the model before rounding."
        )
        if self.unnamed_ends:
            text += _UNNAMED.format(n=self.unnamed_ends)
        if self.widened:
            text += _WIDENED.format(n=len(self.widened), first=self.widened[0])
        return text + _UNCOMPOSED if self.composes else text


def export_gguf(
    source: Path,
    to: Path,
    *,
    kind: str,
    tokenizer_json: str,
    tokens: PromptTokens,
    prompts: Sequence[Sequence[int]],
    files: Mapping[str, str] = MappingProxyType({}),
) -> ExportedGguf:
    """Write a model or adapter as a GGUF file, read it back and compare.

    The folder appears only if the file's model generates the same tokens as the source with rounded
    weights, for each prompt.

    Args:
        source: Folder of the model or adapter.
        to: Folder to create.
        kind: Type of the weights, a key of `TYPES`.
        tokenizer_json: The tokenizer in training.
        tokens: Tokens around a prompt.
        prompts: Token ids of prompts to compare.
        files: Texts of other files, by name.

    Raises:
        ConfigError: llama.cpp does not compute this model, or does not have its tokenizer.
        CheckpointError: `to` exists or cannot be written, or the file's model is different.
    """
    refuse_taken(to)
    adapted = is_adapter_folder(source)
    model = load_with_adapter(source) if adapted else load_model(str(source))
    architecture_of(model.config)
    limit = max_positions(model.config)
    if limit is not None:
        prompts = [prompt[: max(1, limit // 2)] for prompt in prompts]
    write = partial(
        generate,
        model,
        [list(prompt) for prompt in prompts],
        _OPTIONS,
        eos_id=tokens.ends,
        pad_id=tokens.pad,
    )
    before = write()
    remove_output_scale(model)
    file = gguf_name(to, kind)
    try:
        with atomic_folder(to) as writer:
            path = writer.folder / file
            write_gguf(
                model,
                path,
                name=to.name,
                kind=kind,
                tokenizer_json=tokenizer_json,
                tokens=tokens,
            )
            widened = list[str]()
            for place in places(model):
                data, stored, shape = _stored(place, kind)
                if stored == _Type.F32 and _type_of(place, kind, shape) != stored:
                    widened.append(place.name)
                put(place, gguf.dequantize(data, stored), shape)
            expected = write()

            for weight in model.parameters():  # a missing weight shows as NaN
                weight.detach().fill_(float("nan"))
            if (frequencies := rotary(model)) is not None:
                frequencies[0].fill_(float("nan"))
            read_weights(model, path)
            texts = write()
            if texts != expected:
                n_different = sum(a != b for a, b in zip(expected, texts, strict=True))
                raise CheckpointError(
                    f"The GGUF file of {source} generates other tokens than the model for "
                    f"{n_different} of {len(texts)} prompts, so it was deleted. Try another type "
                    f"than {kind}, or format hf, and please report this."
                )
            for name, text in files.items():
                writer.put(name, text.encode())
    except OSError as error:
        raise CheckpointError(
            f"The model could not be written to {to}: {error}."
        ) from error
    n_same = sum(a == b for a, b in zip(before, texts, strict=True))
    n_unnamed = max(0, len(tokens.ends) - MAX_ENDS)
    composes = composes_letters(tokenizer_json)
    return ExportedGguf(
        to, file, len(texts), n_same, adapted, n_unnamed, tuple(widened), composes
    )


def gguf_name(to: Path, kind: str) -> str:
    """Return the name of the file in its folder: soup-Q8_0.gguf."""
    return f"{to.name}-{kind.upper()}.gguf"


def write_gguf(
    model: PreTrainedModel,
    path: Path,
    *,
    name: str,
    kind: str,
    tokenizer_json: str,
    tokens: PromptTokens,
) -> None:
    """Write a model on the CPU, without output scale, and its tokenizer in training."""
    config: Any = model.config
    arch = architecture_of(config)
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    try:
        writer.add_name(name)
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        writer.add_file_type(TYPES[kind][1])
        _write_shape(writer, config)
        rows = int(config.vocab_size)
        write_vocabulary(writer, tokenizer_json, tokens, rows=rows)
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
    """Read the weights of a file into a model without output scale."""
    reader = gguf.GGUFReader(path)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    expected = list(places(model))
    if (frequencies := rotary(model)) is not None and _ROTARY in tensors:
        scaled, plain = frequencies
        scaled.copy_(plain / torch.from_numpy(np.array(tensors.pop(_ROTARY).data)))
    if set(tensors) != {place.name for place in expected} or len(tensors) != len(
        expected
    ):
        raise CheckpointError(
            f"{path} has other weights than were written. Please report this, and export the model "
            "with format hf."
        )
    for place in expected:
        tensor = tensors[place.name]
        shape = [int(size) for size in reversed(tensor.shape.tolist())]
        put(place, gguf.dequantize(tensor.data, tensor.tensor_type), shape)


def _write_shape(writer: gguf.GGUFWriter, config: Any) -> None:
    """Write sizes and constants of the architecture."""
    kind = config.model_type
    writer.add_vocab_size(config.vocab_size)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)

    if kind == "t5":
        # A T5 has no limit. llama.cpp allocates this many positions by default.
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
    """Return a weight in the format of a file, its type, and its shape.

    Vectors stay float32, and so do weights beyond the type's range. Rows that blocks do not divide
    are float16.

    Raises:
        ConfigError: The weight has values that are infinite or not numbers.
    """
    weight = place.to_file(place.weight).float().contiguous()
    largest = float(weight.abs().max())
    if not math.isfinite(largest):
        raise ConfigError(
            f"The weight {place.name} has values that are infinite or not numbers, so it cannot be "
            "exported. Export an earlier checkpoint, or train again with a lower optim.peak_lr."
        )
    stored = _type_of(place, kind, weight.shape)
    if largest > _LARGEST.get(stored, torch.finfo(torch.float16).max):
        stored = _Type.F32
    return gguf.quantize(weight.numpy(), stored), stored, weight.shape


def _type_of(place: Place, kind: str, shape: Sequence[int]) -> Any:
    """Return the type of a weight with this shape in a file. It does not depend on the values."""
    stored = TYPES[kind][0]
    if (
        len(shape) < 2
        or place.name == _POSITIONS
        or place.name.endswith(_POSITION_BIAS)
    ):
        return _Type.F32
    if stored not in _PLAIN and shape[-1] % gguf.GGML_QUANT_SIZES[stored][0] != 0:
        return _Type.F16
    return stored
