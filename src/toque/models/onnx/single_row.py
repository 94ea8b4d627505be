"""Decoding steps of a single row in onnxruntime, with int8 matmuls.

A step of a small model in torch takes longer to call its operators than to compute them. In
onnxruntime one call computes the step. Weights and inputs of linear layers are rounded to 8 bits:
a weight with a scale per output, an input with one scale.
"""

from __future__ import annotations

import platform
from typing import Final

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from toque.hardware.onednn import has_vnni
from toque.models.lora.frozen import PLAIN, format_of, is_added
from toque.models.onnx.decoders import decoder_graph
from toque.models.onnx.row_program import States
from toque.models.onnx.session import Arrays, DecoderSession
from toque.models.onnx.stored_types import INT8_PRODUCTS
from toque.models.onnx.supported_models import find_unsupported
from toque.models.onnx.t5 import t5_decoder_graph

_ARM: Final = ("arm64", "aarch64")


def has_exact_int8() -> bool:
    """True for processors on which sums of int8 products cannot overflow: AVX512-VNNI and ARM."""
    return has_vnni() or platform.machine() in _ARM


def find_obstacle(model: PreTrainedModel) -> str:
    """Describe why a model cannot be opened here; "" if it can."""
    if model.device.type != "cpu":
        return f"the model is on {model.device}"
    if format_of(model) != PLAIN:
        return "the weights of the model are already quantised"
    if any(is_added(name) for name, _ in model.named_parameters()):
        return "the adapter is not merged into the model (`toque export`)"
    if not has_exact_int8():
        return "this processor has no AVX512-VNNI"
    return find_unsupported(model)


class SingleRow:
    """Decoder of a model on the CPU, for one row. It has its own cache of keys and values."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Build the graph and open it. The weights are copied, with one byte each."""
        self._is_t5 = bool(model.config.is_encoder_decoder)
        if self._is_t5:
            graph = t5_decoder_graph(model, INT8_PRODUCTS, with_source=False)
        else:
            graph = decoder_graph(model, INT8_PRODUCTS)
        # Threads that wait in a loop would take time from torch's threads.
        self._session = DecoderSession(
            graph.SerializeToString(), threads=torch.get_num_threads()
        )
        self._middle = ".decoder" if self._is_t5 else ""
        self._cache: Arrays = {}
        self._source: Arrays = {}

    def begin(self, states: States, source: States = ()) -> None:
        """Copy the cache of a row, and for a T5 the cache of its source."""
        self._cache = _to_arrays(states, self._middle)
        self._source = {}
        if self._is_t5:
            self._source = _to_arrays(source, ".encoder")
            length = source[0][0].shape[1]
            self._source["encoder_attention_mask"] = np.ones((1, length), np.int64)

    def step(self, token: int, position: int) -> Tensor:
        """Read a token, and return the logits [1, vocabulary] of the next one."""
        inputs = (
            {"input_ids": np.array([[token]], np.int64)} | self._cache | self._source
        )
        if not self._is_t5:
            inputs["position_ids"] = np.array([[position]], np.int64)
            inputs["attention_mask"] = np.ones((1, position + 1), np.int64)
        logits, self._cache = self._session.step(inputs)
        return torch.from_numpy(logits)[:, -1]

    def newest(self) -> list[tuple[Tensor, Tensor]]:
        """Return the keys and values of the last token for each layer, [1, H, d] each."""
        newest = {
            name: torch.from_numpy(v)[:, :, -1] for name, v in self._cache.items()
        }
        return [
            (
                newest[f"past_key_values.{n}{self._middle}.key"],
                newest[f"past_key_values.{n}{self._middle}.value"],
            )
            for n in range(len(newest) // 2)
        ]


def _to_arrays(states: States, middle: str) -> Arrays:
    return {
        f"past_key_values.{n}{middle}.{part}": tensor.float().contiguous()[None].numpy()
        for n, pair in enumerate(states)
        for part, tensor in zip(("key", "value"), pair, strict=True)
    }
