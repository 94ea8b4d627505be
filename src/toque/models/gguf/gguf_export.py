"""GGUF export: one file for llama.cpp and Ollama, read back and compared with the model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from toque.errors import CheckpointError, ConfigError
from toque.models.config_values import head_size
from toque.models.generation.engine import cut_to_half, generate
from toque.models.generation.options import GenerationOptions
from toque.models.gguf.gguf_vocabulary import (
    MAX_ENDS,
    PromptTokens,
    composes_letters,
    write_vocabulary,
)
from toque.models.gguf.layout import (
    StoredWeight,
    architecture_of,
    remove_output_scale,
    replace_weight,
    rotary_frequencies,
    stored_weights,
)
from toque.models.loading.model_export import refuse_nonempty
from toque.models.loading.pretrained import load_model, load_with_adapter
from toque.models.lora.adapter_files import is_adapter_folder
from toque.storage.atomic import atomic_folder

_Type = gguf.GGMLQuantizationType
TYPES: Final = {  # types that the gguf package writes; it only reads llama.cpp's k-quants
    "f32": (_Type.F32, gguf.LlamaFileType.ALL_F32),
    "f16": (_Type.F16, gguf.LlamaFileType.MOSTLY_F16),
    "bf16": (_Type.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "q8_0": (_Type.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
    "q5_1": (_Type.Q5_1, gguf.LlamaFileType.MOSTLY_Q5_1),
    "q5_0": (_Type.Q5_0, gguf.LlamaFileType.MOSTLY_Q5_0),
    "q4_1": (_Type.Q4_1, gguf.LlamaFileType.MOSTLY_Q4_1),
    "q4_0": (_Type.Q4_0, gguf.LlamaFileType.MOSTLY_Q4_0),
}
_T5_CONTEXT: Final = 512  # context length in the file of a T5 without `n_positions`
# Names of tensors in a file.
_POSITIONS: Final = "position_embd.weight"
_POSITION_BIAS: Final = "attn_rel_b.weight"
_ROTARY: Final = "rope_freqs.weight"
_LARGEST: Final = {_Type.F32: math.inf, _Type.BF16: torch.finfo(torch.bfloat16).max}
"""Largest value of a type. The other types have the range of float16, in their scales."""
_UNQUANTISED: Final = (_Type.F32, _Type.F16, _Type.BF16)
N_TOKENS: Final = 32  # number of greedy tokens per prompt that are compared
_UNNAMED: Final = (
    f" A GGUF file can name {MAX_ENDS} end tokens, and this model has {{n}} more. llama.cpp may "
    "continue after them, so use them as stop strings."
)
_WIDENED: Final = (
    " {n} weights are stored in float32, because they have values beyond the range of the type. "
    "The first is {first}."
)
_UNCOMPOSED: Final = (
    " The model's tokenizer composes letters (Unicode NFC) and llama.cpp's does not. Send é as one "
    "character, not as e and an accent."
)
_OPTIONS: Final = GenerationOptions(max_new_tokens=N_TOKENS)


@dataclass(frozen=True)
class ExportedGguf:
    """Folder with a GGUF file that generates the same tokens as the source."""

    folder: Path
    file: str
    prompts: int  # number of prompts with which the file was compared with the rounded source
    unchanged: int  # number of prompts with the same tokens before rounding
    was_adapter: bool
    unnamed_ends: int = 0  # end tokens of the source that the file cannot name
    # Names of weights in float32, because they exceed the range of the type.
    widened: tuple[str, ...] = ()
    composes: bool = False
    """True if the source's tokenizer composes letters (Unicode NFC)."""

    def __str__(self) -> str:
        """Describe the file and the comparison."""
        merged = "merged into its base, " if self.was_adapter else ""
        text = (
            f"{self.folder / self.file} holds the model, {merged}read back and compared: for "
            f"{self.prompts} prompts it generates the same tokens as the rounded model, and for "
            f"{self.unchanged} of them the same tokens as the model before rounding."
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
    refuse_nonempty(to)
    was_adapter = is_adapter_folder(source)
    model = load_with_adapter(source) if was_adapter else load_model(str(source))
    architecture_of(model.config)  # rejects models that llama.cpp does not compute
    prompts = cut_to_half(prompts, model)
    generate_all = partial(
        generate,
        model,
        prompts,
        _OPTIONS,
        eos_id=tokens.ends,
        pad_id=tokens.pad,
    )
    before = generate_all()
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
            widened = _round_weights(model, kind)
            expected = generate_all()
            _erase_weights(model)
            read_weights(model, path)
            texts = generate_all()
            _check_texts(texts, expected, source, kind)
            for name, text in files.items():
                writer.put(name, text.encode())
    except OSError as error:
        raise CheckpointError(f"Cannot write the model to {to}: {error}.") from error
    return ExportedGguf(
        to,
        file,
        prompts=len(texts),
        unchanged=_count_equal(texts, before),
        was_adapter=was_adapter,
        unnamed_ends=max(0, len(tokens.ends) - MAX_ENDS),
        widened=tuple(widened),
        composes=composes_letters(tokenizer_json),
    )


def _check_texts(
    texts: Sequence[object], expected: Sequence[object], source: Path, kind: str
) -> None:
    """Raise a CheckpointError if a file's texts differ from the texts of the rounded model."""
    n_different = len(texts) - _count_equal(texts, expected)
    if n_different:
        raise CheckpointError(
            f"The GGUF file of {source} generates different tokens from the model for "
            f"{n_different} of {len(texts)} prompts, so it was deleted. Try a type other than "
            f"{kind}, or format hf, and please report this bug."
        )


def _round_weights(model: PreTrainedModel, kind: str) -> list[str]:
    """Round a model's weights to their values in a file. Return the names that stay float32."""
    widened = []
    for stored in stored_weights(model):
        data = _quantise(stored, kind)
        expected_type = _type_of(stored, kind, data.shape)
        if data.stored_type == _Type.F32 and expected_type != data.stored_type:
            widened.append(stored.name)
        rounded = gguf.dequantize(data.array, data.stored_type)
        replace_weight(stored, rounded, data.shape)
    return widened


def _erase_weights(model: PreTrainedModel) -> None:
    """Set all weights to NaN, so that a weight that is missing from the file changes the tokens."""
    for weight in model.parameters():
        weight.detach().fill_(float("nan"))
    if (frequencies := rotary_frequencies(model)) is not None:
        scaled, _ = frequencies
        scaled.fill_(float("nan"))


def _count_equal(texts: Sequence[object], others: Sequence[object]) -> int:
    return sum(text == other for text, other in zip(texts, others, strict=True))


def gguf_name(to: Path, kind: str) -> str:
    """Return the file's name: the folder's name and the type, such as soup-Q8_0.gguf."""
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
    """Write a model on the CPU, without output scale, and its training tokenizer to a file.

    Args:
        model: Model to write.
        path: Path of the file.
        name: Name of the model in the file.
        kind: Key of `TYPES`.
        tokenizer_json: The training tokenizer.
        tokens: Tokens around a prompt.
    """
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
        for stored in stored_weights(model):
            data = _quantise(stored, kind)
            writer.add_tensor(stored.name, data.array, raw_dtype=data.stored_type)
        if (frequencies := rotary_frequencies(model)) is not None:
            scaled, unscaled = frequencies
            writer.add_tensor(_ROTARY, (unscaled / scaled).numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def read_weights(model: PreTrainedModel, path: Path) -> None:
    """Read a file's weights into a model without output scale.

    Raises:
        CheckpointError: The file's names differ from the model's.
    """
    reader = gguf.GGUFReader(path)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    if (frequencies := rotary_frequencies(model)) is not None and _ROTARY in tensors:
        scaled, unscaled = frequencies
        factors = torch.from_numpy(np.array(tensors.pop(_ROTARY).data))
        scaled.copy_(unscaled / factors)

    expected = list(stored_weights(model))
    if sorted(tensors) != sorted(stored.name for stored in expected):
        raise CheckpointError(
            f"{path} contains different weights from the exported model. Please report this bug, "
            "and export the model with format hf."
        )
    for stored in expected:
        tensor = tensors[stored.name]
        # A file lists dimensions in reverse order.
        shape = [int(size) for size in reversed(tensor.shape.tolist())]
        data = gguf.dequantize(tensor.data, tensor.tensor_type)
        replace_weight(stored, data, shape)


def _write_shape(writer: gguf.GGUFWriter, config: Any) -> None:
    """Write the sizes and constants of the architecture."""
    kind = config.model_type
    writer.add_vocab_size(config.vocab_size)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)

    if kind == "t5":
        _write_t5_shape(writer, config)
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


def _write_t5_shape(writer: gguf.GGUFWriter, config: Any) -> None:
    # A T5 has no limit. llama.cpp allocates this context length by default.
    writer.add_context_length(getattr(config, "n_positions", _T5_CONTEXT))
    writer.add_feed_forward_length(config.d_ff)
    writer.add_decoder_block_count(config.num_decoder_layers)
    writer.add_key_length(config.d_kv)
    writer.add_value_length(config.d_kv)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)
    writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
    writer.add_relative_attn_buckets_count(config.relative_attention_num_buckets)
    writer.add_decoder_start_token_id(config.decoder_start_token_id)


class _FileData(NamedTuple):
    """Data of a weight in a file."""

    array: NDArray[Any]
    stored_type: Any
    shape: Sequence[int]
    """Shape of the weight before quantisation."""


def _quantise(stored: StoredWeight, kind: str) -> _FileData:
    """Convert a weight to its data in a file.

    Weights with values beyond the type's range stay float32.

    Raises:
        ConfigError: The weight has infinite or NaN values.
    """
    weight = stored.to_file(stored.weight).float().contiguous()
    largest = float(weight.abs().max())
    if not math.isfinite(largest):
        raise ConfigError(
            f"The weight {stored.name} has infinite or NaN values, so it cannot be exported. "
            "Export an earlier checkpoint, or train again with a lower optim.peak_lr."
        )
    stored_type = _type_of(stored, kind, weight.shape)
    if largest > _LARGEST.get(stored_type, torch.finfo(torch.float16).max):
        stored_type = _Type.F32
    array = gguf.quantize(weight.numpy(), stored_type)
    return _FileData(array, stored_type, weight.shape)


def _type_of(stored: StoredWeight, kind: str, shape: Sequence[int]) -> Any:
    """Return the type of a weight in a file, by its name and shape.

    Vectors and positions stay float32. Rows that blocks do not divide are float16.
    """
    is_position = stored.name == _POSITIONS or stored.name.endswith(_POSITION_BIAS)
    if len(shape) < 2 or is_position:
        return _Type.F32
    requested, _ = TYPES[kind]
    block_size, _ = gguf.GGML_QUANT_SIZES[requested]
    if requested not in _UNQUANTISED and shape[-1] % block_size != 0:
        return _Type.F16
    return requested
