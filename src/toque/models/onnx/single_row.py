"""Decoding steps of a single row in onnxruntime, with int8 matmuls.

A step of a small model in torch takes longer to call its operators than to compute them. In
onnxruntime one call computes the step, with the operators of `row_graph.py`.
"""

from __future__ import annotations

import platform
from typing import Any, Final

import onnxruntime
import torch
from torch import Tensor
from transformers import PreTrainedModel

from toque.hardware.onednn import has_vnni
from toque.models.config_values import head_size
from toque.models.lora.frozen import PLAIN, format_of, is_added
from toque.models.onnx.decoders import decoder_graph
from toque.models.onnx.row_graph import (
    COSINES,
    HEAD_SIZES,
    INT8_BLOCKS,
    SINES,
    RowGraph,
)
from toque.models.onnx.row_program import States
from toque.models.onnx.session import open_session
from toque.models.onnx.supported_models import find_unsupported
from toque.models.onnx.t5 import t5_decoder_graph

_MIN_COLUMNS: Final = 256
"""Minimum number of columns of a cache."""
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
    return find_unsupported(model) or _find_head_size(model)


def _find_head_size(model: PreTrainedModel) -> str:
    config = model.config
    size = config.d_kv if config.is_encoder_decoder else head_size(config)
    if size % HEAD_SIZES == 0:
        return ""
    return f"its heads have {size} columns, which is not a multiple of {HEAD_SIZES}"


class SingleRow:
    """Decoder of a model on the CPU, for one row. It has its own cache of keys and values."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Build the graph and open it. The weights are copied, with 9 bits each."""
        graph = RowGraph(INT8_BLOCKS)
        self._is_t5 = bool(model.config.is_encoder_decoder)
        build = t5_decoder_graph if self._is_t5 else decoder_graph
        self._session = open_session(
            build(model, graph).SerializeToString(),
            threads=torch.get_num_threads(),
            weights=graph.weights,
        )
        self._binding = self._session.io_binding()
        self._inputs: dict[str, Tensor] = {}  # onnxruntime does not keep their memory
        self._tables = [
            (
                table,
                self._bind_input(table.input, torch.empty(1, 1, table.rows.shape[1])),
            )
            for table in graph.tables
        ]
        self._frequencies = graph.frequencies
        self._token = self._bind_input("input_ids", torch.zeros(1, 1).long())
        self._position = self._bind_input("position_ids", torch.zeros(1, 1).long())
        self._logits = torch.empty(1, 1, model.config.vocab_size)
        self._binding.bind_ortvalue_output("logits", _share(self._logits))
        self._cache: list[tuple[Tensor, Tensor]] = []
        """Keys and values of each layer, [1, H, tokens, d] each, with free columns at the end."""
        self._length = 0

    def begin(self, states: States, source: States = ()) -> None:
        """Copy the cache of a row, and for a T5 the cache of its source."""
        self._length = states[0][0].shape[1]
        self._allocate(states)
        for layer, pair in enumerate(source):
            for part, tensor in zip(("key", "value"), pair, strict=True):
                name = f"past_key_values.{layer}.encoder.{part}"
                self._bind_input(name, tensor.float().contiguous()[None])

    def step(self, token: int) -> Tensor:
        """Read a token, and return the logits [1, vocabulary] of the next one.

        The next step overwrites them.
        """
        if self._length == self._cache[0][0].shape[2]:
            self._allocate(self.states())
        self._token.fill_(token)
        self._position.fill_(self._length)
        for table, row in self._tables:
            number = token if table.ids == "input_ids" else self._length
            row.copy_(table.rows[number])
        self._session.run_with_iobinding(self._binding)
        self._length += 1
        return self._logits[:, -1]

    def states(self) -> States:
        """Return the keys and values of the row. The next step overwrites them."""
        return [
            (keys[0, :, : self._length], values[0, :, : self._length])
            for keys, values in self._cache
        ]

    def _allocate(self, states: States) -> None:
        """Allocate twice the columns of `states`, and copy the states."""
        n_columns = max(_MIN_COLUMNS, 2 * self._length)
        middle = ".decoder" if self._is_t5 else ""
        self._cache = []
        for layer, pair in enumerate(states):
            keys, values = (
                torch.zeros(1, len(state), n_columns, state.shape[2]) for state in pair
            )
            self._cache.append((keys, values))
            for part, buffer, state in zip(
                ("key", "value"), (keys, values), pair, strict=True
            ):
                buffer[0, :, : self._length] = state
                # Each step writes one column of the same memory.
                self._bind_input(f"past_key_values.{layer}{middle}.{part}", buffer)
                present = f"present.{layer}{middle}.{part}"
                self._binding.bind_ortvalue_output(present, _share(buffer))
        if self._frequencies is not None:
            angles = torch.arange(n_columns)[:, None] * self._frequencies.float()
            self._bind_input(COSINES, angles.cos())
            self._bind_input(SINES, angles.sin())

    def _bind_input(self, name: str, tensor: Tensor) -> Tensor:
        """Make a step read an input from a tensor. Return the tensor."""
        self._inputs[name] = tensor
        self._binding.bind_ortvalue_input(name, _share(tensor))
        return tensor


def _share(tensor: Tensor) -> Any:
    """Return a value of onnxruntime with the memory of a contiguous tensor."""
    return onnxruntime.OrtValue.ortvalue_from_numpy(tensor.numpy())
