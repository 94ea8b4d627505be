"""GGUF file: a model's shape, vocabulary and weights in one file that llama.cpp and Ollama read."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from toque.errors import CheckpointError
from toque.models.families import head_size
from toque.models.gguf.gguf_vocabulary import Asking, write_vocabulary
from toque.models.gguf.layout import architecture_of, places, put

_Type = gguf.GGMLQuantizationType
TYPES: Final = {
    "f32": (_Type.F32, gguf.LlamaFileType.ALL_F32),
    "f16": (_Type.F16, gguf.LlamaFileType.MOSTLY_F16),
    "bf16": (_Type.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "q8_0": (_Type.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
    "q5_1": (_Type.Q5_1, gguf.LlamaFileType.MOSTLY_Q5_1),
    "q5_0": (_Type.Q5_0, gguf.LlamaFileType.MOSTLY_Q5_0),
    "q4_1": (_Type.Q4_1, gguf.LlamaFileType.MOSTLY_Q4_1),
    "q4_0": (_Type.Q4_0, gguf.LlamaFileType.MOSTLY_Q4_0),
}
"""Types that the gguf package writes in pure Python; llama.cpp's k-quants it can only read."""
_T5_POSITIONS: Final = 512
_POSITIONS: Final = "position_embd.weight"
_POSITION_BIAS: Final = "attn_rel_b.weight"
_PLAIN: Final = (_Type.F32, _Type.F16, _Type.BF16)


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
            weight = place.to_file(place.weight).float().contiguous()
            stored = _stored_as(place.name, weight, TYPES[kind][0])
            writer.add_tensor(place.name, _packed(weight, stored), raw_dtype=stored)
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
    if set(found) != {place.name for place in wanted} or len(found) != len(wanted):
        raise CheckpointError(f"{path} was read back and holds other weights than were written.")
    for place in wanted:
        held = found[place.name]
        data = gguf.dequantize(held.data, held.tensor_type)
        shape = tuple(int(size) for size in reversed(held.shape.tolist()))
        put(place, torch.from_numpy(np.array(data)).reshape(shape))


def round_weights(model: PreTrainedModel, kind: str) -> None:
    """Round the weights of a model that `suit` has seen as a file of a kind stores them."""
    for place in places(model):
        weight = place.to_file(place.weight).float().contiguous()
        stored = _stored_as(place.name, weight, TYPES[kind][0])
        data = gguf.dequantize(_packed(weight, stored), stored)
        put(place, torch.from_numpy(np.array(data)).reshape(weight.shape))


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


def _packed(weight: Tensor, stored: gguf.GGMLQuantizationType) -> NDArray[Any]:
    return gguf.quantize(weight.numpy(), stored)


def _stored_as(name: str, weight: Tensor, asked: gguf.GGMLQuantizationType) -> Any:
    """The type of one weight: vectors stay float32, and rows that no block divides float16."""
    if weight.ndim < 2 or name == _POSITIONS or name.endswith(_POSITION_BIAS):
        return _Type.F32
    if asked in _PLAIN or weight.shape[-1] % gguf.GGML_QUANT_SIZES[asked][0] == 0:
        return asked
    return _Type.F16
