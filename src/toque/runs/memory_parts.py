"""Bytes of single parts of a run's memory, from the shapes of its outlined model."""

from __future__ import annotations

from typing import Final, cast

import psutil
from torch import Tensor
from transformers import PreTrainedModel

from toque.config import RunConfig
from toque.models.families import family_of
from toque.models.flops import parameter_counts
from toque.models.forward.outline import OutlinedRows, Where
from toque.models.generation.kv_cache import cache_shape
from toque.models.lora.frozen import frozen_matrices
from toque.models.lora.layers import is_adapted
from toque.models.lora.quantised import quantised_layers

_TENSOR_SHARE: Final = {"cpu": 0.65, "cuda": 0.9}
"""Fraction of the allocator's memory that live tensors use (CPU: lab/notes.md). The rest is gaps,
and freed blocks that glibc's heap retains for later tensors of the same size.
"""
_LIBRARY_BYTES: Final = 320 << 20
"""Bytes that libraries allocate during computation, e.g. for oneDNN's compiled matmuls. A rough
estimate from the demo, which has small tensors."""


def overhead_bytes(tensors: int, where: Where) -> dict[str, int]:
    """Return the bytes that the allocator and libraries take in addition to the tensors."""
    allocated = round(tensors / _TENSOR_SHARE[where])
    overhead = {"the allocator's share": allocated - tensors}
    if where == "cpu":
        resident = int(psutil.Process().memory_info().rss)
        overhead["Python and its libraries"] = resident + _LIBRARY_BYTES
    return overhead


def text_bytes(config: RunConfig, model: PreTrainedModel, row: OutlinedRows) -> int:
    """Return the bytes of the float32 KV cache for the final evaluation's batch of texts."""
    layers, heads, size = cache_shape(model)
    # An encoder-decoder has cross-attention to the prompt. A decoder caches the prompt itself.
    tokens = row.source + row.target
    bytes_per_token = 2 * 4 * layers * heads * size  # keys and values, each in float32
    return bytes_per_token * tokens * config.evaluation.generate


def split_weights(model: PreTrainedModel, total: int) -> dict[str, int]:
    """Split the weights' bytes into quantised matrices, their constants, the adapter and the rest.

    `total` is the bytes of all weights.
    """
    quantised = [layer.stored_bytes() for _, layer in quantised_layers(model)]
    parts = {
        "quantised matrices": sum(sizes["codes"] for sizes in quantised),
        "constants of their blocks": sum(sizes["constants"] for sizes in quantised),
    }
    if is_adapted(model):
        trained = (p for p in model.parameters() if p.requires_grad)
        parts["adapter"] = sum(p.numel() * p.element_size() for p in trained)
    return {"weights": total - sum(parts.values())} | parts


def host_bytes(config: RunConfig, model: PreTrainedModel) -> int:
    """Return the bytes of host memory needed to load the model, in float32."""
    if config.adapter is None or config.adapter.kind == "dora":
        return 4 * parameter_counts(model).total

    # With an adapter, frozen matrices are loaded one by one, so only the largest one adds memory.
    layers = frozen_matrices(model).values()
    matrices = [cast("Tensor", layer.weight) for layer in layers]
    sizes = [matrix.numel() for matrix in matrices]
    sizes += [layer.shape.numel() for _, layer in quantised_layers(model)]
    frozen_ids = {id(matrix) for matrix in matrices}
    remaining = sum(p.numel() for p in model.parameters() if id(p) not in frozen_ids)
    return 4 * (remaining + max(sizes))


def block_input_bytes(model: PreTrainedModel, row: OutlinedRows, rows: int) -> int:
    """Return the bytes of the float32 inputs of all blocks except the largest input."""
    shape = model.config
    if family_of(shape).is_encoder_decoder:
        hidden_size = shape.d_model
        positions = (
            shape.num_layers * row.source
            + shape.num_decoder_layers * row.target
            - max(row.source, row.target)
        )
    else:
        hidden_size = shape.hidden_size
        positions = (shape.num_hidden_layers - 1) * row.target
    return 4 * int(hidden_size) * rows * int(positions)
