"""Graphs that read one token of one row, with operators of onnxruntime. They are not for files.

Weights of linear layers are 8-bit integers with a scale per block of 32 inputs, as in Q8_0 of
llama.cpp. The operator rounds inputs the same way. The cache of keys and values is not copied:
each step writes one column of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper
from torch import Tensor

from toque.models.onnx.graph import Graph, Heads

INT8_BLOCKS: Final = "int8-blocks"
"""Linear layers with 8-bit weights and inputs."""
HEAD_SIZES: Final = 8
"""The operator for attention needs a head size that is a multiple of this number."""
COSINES: Final = "cosines"
SINES: Final = "sines"
"""Inputs [tokens of the cache, half of the rotated columns] of graphs with rotary positions."""
_FREQUENCIES: Final = 8  # the operator rotates multiples of this number of column pairs
_RUNTIME: Final = "com.microsoft"  # domain of onnxruntime's operators
_BLOCK: Final = 32  # inputs with one scale
_LARGEST: Final = 127
_ZERO: Final = 128  # unsigned integer for zero
_ROWS: Final = 256
"""Rows that are rounded at a time, so that they stay in the processor's cache."""


class Table(NamedTuple):
    """A matrix with one row per token or position."""

    input: str
    """Input of the graph for a row of the matrix, [1, 1, columns]."""
    rows: Tensor
    """The matrix."""
    ids: str
    """Input with the number of the row."""


class RowGraph(Graph):
    """Graph of a decoder for one token of one row.

    Inputs: input_ids [1, 1], position_ids [1, 1], a row of each of `tables`, and
    past_key_values.N.key and .value [1, key heads, tokens of the cache, size]. The outputs
    present.N.key and .value must have the same memory as these inputs.
    """

    is_single_row: ClassVar[bool] = True

    def __init__(self, kind: str) -> None:
        """Begin a graph of the kind `INT8_BLOCKS`, or "f32" for exact matmuls."""
        super().__init__(kind)
        self.weights: dict[str, NDArray[Any]] = {}
        """Weights by name. The graph has their shapes only."""
        self.tables: list[Table] = []
        """Matrices that the graph does not have."""
        self.frequencies: Tensor | None = None
        """Frequencies of `COSINES` and `SINES`, if the graph reads these inputs."""
        self._opsets.append(helper.make_opsetid(_RUNTIME, 1))
        self._positions = self.input("position_ids", [1, 1])
        last = self.op("Reshape", self._positions, self.constant([1]))
        self._last = self.op("Cast", last, to=TensorProto.INT32)
        self._total = self.op("Add", self._last, self.constant([1], np.int32))

    def weight(self, name: str, array: NDArray[Any]) -> str:
        """Add an array of weights. The program gives it to onnxruntime without a copy in a file."""
        if name not in self.weights:
            self.weights[name] = np.ascontiguousarray(array)
            data = helper.np_dtype_to_tensor_dtype(array.dtype)
            tensor = TensorProto(name=name, dims=array.shape, data_type=data)
            tensor.data_location = TensorProto.EXTERNAL
            tensor.external_data.add(key="location", value="memory")
            self._initializers[name] = tensor
        return name

    def rows(self, name: str, tensor: Tensor, ids: str) -> str:
        """Add the input for one row of a matrix, which the program copies."""
        table = Table(f"{name}.row", tensor, ids)
        self.tables.append(table)
        return self.input(table.input, [1, 1, tensor.shape[1]], TensorProto.FLOAT)

    def linear(
        self, x: str, name: str, weight: Tensor, bias: Tensor | None = None
    ) -> str:
        """Multiply by `weight` [columns, rows] transposed, and add the bias."""
        if self.kind != INT8_BLOCKS:
            return super().linear(x, name, weight, bias)
        integers, scales = round_blocks(weight.detach().float().numpy())
        inputs = [
            x,
            self.weight(f"{name}.integers", integers),
            self.weight(f"{name}.scales", scales),
        ]
        if bias is not None:
            # The inputs between are zero points and an order of the columns.
            inputs += ["", "", self.vector(f"{name}.bias", bias)]
        n_outputs, n_inputs = weight.shape
        return self.op(
            "MatMulNBits",
            *inputs,
            domain=_RUNTIME,
            N=n_outputs,
            K=n_inputs,
            bits=8,
            block_size=_BLOCK,
            accuracy_level=4,  # products of 8-bit integers
        )

    def rms_norm(self, x: str, name: str, weight: Tensor, eps: float) -> str:
        """Divide by the root of the mean square, and multiply by `weight`."""
        scale = self.vector(name, weight)
        return self.op("SimplifiedLayerNormalization", x, scale, axis=-1, epsilon=eps)

    def _cache_shape(self, heads: Heads) -> list[int | str]:
        """Return the shape of the cached keys and values, with free columns at the end."""
        return [1, heads.keys, "cache", heads.size]

    def past_length(self, name: str) -> str:
        """Return the number of cached tokens of any layer, [1]."""
        return self.op("Reshape", self._positions, self.constant([1]))

    def attends_with_rotation(self, heads: Heads, frequencies: Tensor) -> bool:
        """Return whether `attend_to_cache` rotates queries and keys by these frequencies."""
        half = len(frequencies)
        if half % _FREQUENCIES or heads.size % (2 * _FREQUENCIES):
            return False
        self.frequencies = frequencies
        for name in (COSINES, SINES):
            self.input(name, ["cache", half], TensorProto.FLOAT)
        return True

    def attend_to_cache(
        self,
        name: str,
        query: str,
        key: str,
        value: str,
        bias: str,
        *,
        heads: Heads,
        prepare: Sequence[Callable[[str], str] | None] = (None, None),
    ) -> str:
        """Write a key and a value into the cache of a layer, and attend; see `Graph`."""
        query = self._prepare(query, heads.queries, heads.size, prepare[0])
        key = self._prepare(key, heads.keys, heads.size, prepare[1])
        turns = ["", ""] if self.frequencies is None else [COSINES, SINES]
        inputs = [
            *(query, key, value),
            *(f"past_key_values.{name}.{part}" for part in ("key", "value")),
            *(self._last, self._total, *turns),
        ]
        if bias:
            inputs += ["", bias]  # the input between is for position ids
        present = [f"present.{name}.{part}" for part in ("key", "value")]
        for output in present:
            self._declare_output(output, self._cache_shape(heads))
        mixed = f"{name}.mixed"
        node = helper.make_node(
            "GroupQueryAttention",
            inputs,
            [mixed, *present],
            domain=_RUNTIME,
            num_heads=heads.queries,
            kv_num_heads=heads.keys,
            do_rotary=int(self.frequencies is not None),
            scale=heads.scale,
        )
        self._nodes.append(node)
        return mixed

    def _prepare(
        self, x: str, n: int, size: int, change: Callable[[str], str] | None
    ) -> str:
        """Apply an operator on heads [1, n, 1, size] to a vector [1, 1, n * size]."""
        if change is None:
            return x
        heads = change(self.op("Reshape", x, self.constant([1, n, 1, size])))
        return self.op("Reshape", heads, self.constant([1, 1, n * size]))


def round_blocks(
    weight: NDArray[np.float32],
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Round a matrix [rows, columns] to 8 bits, with one scale per block of columns.

    numpy uses one thread. On a busy computer, the threads of torch wait for each other after each
    of the many small operations.

    Returns:
        Integers [rows, blocks, block], which are 128 for zero, and scales [rows, blocks]. Missing
        columns of the last block are zeros.
    """
    n_rows, n_columns = weight.shape
    n_blocks = -(-n_columns // _BLOCK)
    integers = np.empty((n_rows, n_blocks, _BLOCK), np.uint8)
    scales = np.empty((n_rows, n_blocks), np.float32)
    for first in range(0, n_rows, _ROWS):
        rows = slice(first, first + _ROWS)
        part = weight[rows]
        missing = n_blocks * _BLOCK - n_columns
        if missing:
            part = np.pad(part, ((0, 0), (0, missing)))
        blocks = part.reshape(len(part), n_blocks, _BLOCK)
        values = np.abs(blocks)
        scale = np.maximum(values.max(2) / _LARGEST, np.finfo(np.float32).tiny)
        np.divide(blocks, scale[:, :, None], out=values)
        np.rint(values, out=values)
        values += _ZERO
        integers[rows] = values
        scales[rows] = scale
    return integers, scales
