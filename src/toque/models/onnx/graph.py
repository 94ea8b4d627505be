"""Builder of ONNX graphs: weights in a stored type, and the layers that models share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper, numpy_helper
from torch import Tensor

from toque.models.onnx.stored_types import Stored, to_stored

OPSET: Final = 21
_IR_VERSION: Final = 10  # the version of opset 21
_FLOAT: Final = TensorProto.FLOAT
_MASKED: Final = float(np.finfo(np.float32).min)
_TANH_GELU: Final = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
ACTIVATIONS: Final = ("relu", "silu", "swish", "gelu", *_TANH_GELU)
"""Activations, by their names in config.json."""


class Heads(NamedTuple):
    """Heads of an attention."""

    queries: int
    """Number of query heads."""
    keys: int
    """Number of key heads."""
    size: int
    """Columns of a head."""
    scale: float
    """Factor of the products of queries and keys."""


class Graph:
    """An ONNX graph that is built node by node. A value is the name of a tensor."""

    is_single_row: ClassVar[bool] = False
    """True for graphs that read one token of one row; see `row_graph.py`."""

    def __init__(self, kind: str) -> None:
        self.kind = kind  # type of the matrices, a key of `stored_types.TYPES`
        self._nodes: list[Any] = []
        self._initializers: dict[str, Any] = {}
        self._inputs: list[Any] = []
        self._outputs: list[Any] = []
        self._stored: dict[str, Stored] = {}
        self._matrices: dict[str, str] = {}
        self._transposed: dict[str, str] = {}
        self._opsets = [helper.make_opsetid("", OPSET)]
        self._count = 0  # number of operators

    def input(
        self, name: str, shape: Sequence[int | str], kind: int = TensorProto.INT64
    ) -> str:
        """Add an input once. A text in `shape` names a size that is known at run time."""
        if all(known.name != name for known in self._inputs):
            self._inputs.append(helper.make_tensor_value_info(name, kind, shape))
        return name

    def output(self, value: str, name: str, shape: Sequence[int | str]) -> None:
        """Make a float32 value an output of the graph."""
        self._nodes.append(helper.make_node("Identity", [value], [name]))
        self._declare_output(name, shape)

    def _declare_output(self, name: str, shape: Sequence[int | str]) -> None:
        self._outputs.append(helper.make_tensor_value_info(name, _FLOAT, shape))

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """Add an operator with one output, and return it."""
        (value,) = self.ops(kind, *inputs, outputs=1, **attributes)
        return value

    def ops(
        self, kind: str, *inputs: str, outputs: int, **attributes: Any
    ) -> list[str]:
        """Add an operator, and return its outputs."""
        self._count += 1
        names = [f"{kind}_{self._count}_{n}" for n in range(outputs)]
        self._nodes.append(helper.make_node(kind, list(inputs), names, **attributes))
        return names

    def choose(self, condition: str, then: str, otherwise: Callable[[], str]) -> str:
        """Return the value `then` if the condition is true, or else compute `otherwise`."""
        name = f"If_{len(self._nodes)}"
        outer = self._nodes
        self._nodes = []
        result = otherwise()
        computed, self._nodes = self._nodes, outer
        branches = {
            "then_branch": _branch(f"{name}_then", [], then),
            "else_branch": _branch(f"{name}_else", computed, result),
        }
        self._nodes.append(helper.make_node("If", [condition], [name], **branches))
        return name

    def constant(self, value: Any, kind: type = np.int64) -> str:
        """Add a constant. Equal constants are one."""
        array: NDArray[Any] = np.asarray(value, kind)
        name = f"c_{array.dtype}_{array.shape}_{array.tolist()}"
        return self._initialize(name, array)

    def _initialize(self, name: str, array: NDArray[Any]) -> str:
        if name not in self._initializers:
            self._initializers[name] = numpy_helper.from_array(array, name)
        return name

    def vector(self, name: str, tensor: Tensor) -> str:
        """Add a weight in float32, such as a norm or a bias."""
        return self.weight(name, tensor.detach().float().numpy())

    def weight(self, name: str, array: NDArray[Any]) -> str:
        """Add an array of weights."""
        return self._initialize(name, array)

    def matrix(self, name: str, tensor: Tensor) -> str:
        """Add a matrix [rows, columns] in the stored type, and return it in float32."""
        if name not in self._matrices:
            self._matrices[name] = self._read(name, tensor, lambda stored: stored)
        return self._matrices[name]

    def rows(self, name: str, tensor: Tensor, ids: str) -> str:
        """Look up rows of a matrix: the embeddings of `ids`."""
        return self._read(name, tensor, lambda stored: self.op("Gather", stored, ids))

    def _read(self, name: str, tensor: Tensor, select: Callable[[str], str]) -> str:
        """Store a matrix once, and convert what `select` takes of it to float32."""
        if name not in self._stored:
            self._stored[name] = to_stored(tensor, self.kind)
        stored = self._stored[name]
        values = select(self.weight(name, stored.values))
        if stored.values.dtype != np.float32:
            values = self.op("Cast", values, to=_FLOAT)
        if stored.scales is not None:
            scales = self.weight(f"{name}.scales", stored.scales)
            values = self.op("Mul", values, select(scales))
        return values

    def transposed(self, name: str, tensor: Tensor) -> str:
        """Add a matrix, and return its transpose in float32."""
        if name not in self._transposed:
            matrix = self.matrix(name, tensor)
            self._transposed[name] = self.op("Transpose", matrix, perm=[1, 0])
        return self._transposed[name]

    def linear(
        self, x: str, name: str, weight: Tensor, bias: Tensor | None = None
    ) -> str:
        """Multiply by `weight` [columns, rows] transposed, and add the bias."""
        product = self.op("MatMul", x, self.transposed(name, weight))
        if bias is None:
            return product
        return self.op("Add", product, self.vector(f"{name}.bias", bias))

    def layer_norm(
        self, x: str, name: str, weight: Tensor, bias: Tensor, eps: float
    ) -> str:
        """Add a layer norm."""
        scale = self.vector(name, weight)
        shift = self.vector(f"{name}.bias", bias)
        return self.op("LayerNormalization", x, scale, shift, epsilon=eps)

    def rms_norm(self, x: str, name: str, weight: Tensor, eps: float) -> str:
        """Divide by the root of the mean square, and multiply by `weight`."""
        square = self.op("Mul", x, x)
        mean = self.op("ReduceMean", square, self.constant([-1]))
        root = self.op("Sqrt", self.op("Add", mean, self.constant(eps, np.float32)))
        scaled = self.op("Div", x, root)
        return self.op("Mul", scaled, self.vector(name, weight))

    def activation(self, x: str, kind: str) -> str:
        """Add an activation of `ACTIVATIONS`."""
        if kind == "relu":
            return self.op("Relu", x)
        if kind in ("silu", "swish"):
            return self.op("Mul", x, self.op("Sigmoid", x))
        form = "tanh" if kind in _TANH_GELU else "none"
        return self.op("Gelu", x, approximate=form)

    def split_heads(self, x: str, heads: int, size: int) -> str:
        """Reshape [batch, tokens, heads * size] to [batch, heads, tokens, size]."""
        grid = self.op("Reshape", x, self.constant([0, 0, heads, size]))
        return self.op("Transpose", grid, perm=[0, 2, 1, 3])

    def add_cache(self, names: Sequence[str], heads: Heads) -> None:
        """Add the inputs for the cached keys and values of the layers `names`."""
        for name in names:
            for part in ("key", "value"):
                shape = self._cache_shape(heads)
                self.input(f"past_key_values.{name}.{part}", shape, _FLOAT)

    def _cache_shape(self, heads: Heads) -> list[int | str]:
        """Return the shape of the cached keys and values of a layer."""
        return ["batch", heads.keys, "past", heads.size]

    def past_length(self, name: str) -> str:
        """Return the number of cached tokens of the layer `name`, [1]."""
        return self.length(f"past_key_values.{name}.key", 2)

    def attends_with_rotation(self, heads: Heads, frequencies: Tensor) -> bool:
        """Return whether `attend_to_cache` rotates queries and keys by these frequencies."""
        return False

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
        """Append keys and values to the cache of a layer, and attend to the cache.

        Args:
            name: Name of the layer in the names of inputs and outputs.
            query: Queries [batch, tokens, heads * size].
            key: Keys [batch, tokens, key heads * size].
            value: Values [batch, tokens, key heads * size].
            bias: Bias of the scores; see `attention`.
            heads: Heads of the layer.
            prepare: Operators on queries and on keys [batch, heads, tokens, size].

        Returns:
            Value [batch, tokens, heads * size].
        """
        numbers = (heads.queries, heads.keys, heads.keys)
        query, key, value = (
            self.split_heads(x, number, heads.size)
            for x, number in zip((query, key, value), numbers, strict=True)
        )
        query, key = (
            x if change is None else change(x)
            for x, change in zip((query, key), prepare, strict=True)
        )
        key = self.op("Concat", f"past_key_values.{name}.key", key, axis=2)
        value = self.op("Concat", f"past_key_values.{name}.value", value, axis=2)
        shape: list[int | str] = ["batch", heads.keys, "total", heads.size]
        self.output(key, f"present.{name}.key", shape)
        self.output(value, f"present.{name}.value", shape)
        return self.attention(query, key, value, bias, heads=heads)

    def attention(
        self, query: str, key: str, value: str, bias: str, *, heads: Heads
    ) -> str:
        """Compute softmax(scale * query * key + bias) * value.

        Args:
            query: Queries [batch, heads, tokens, size].
            key: Keys [batch, key heads, total, size].
            value: Values [batch, key heads, total, size].
            bias: Bias [batch or 1, 1 or heads, tokens, total], with the mask. "" for no bias.
            heads: Heads of the layer.

        Returns:
            Value [batch, tokens, heads * size].
        """
        n_heads, n_keys, size, scale = heads
        is_grouped = n_heads != n_keys
        if is_grouped:  # [batch, key heads, queries per key, tokens, size]
            grid = self.constant([0, n_keys, n_heads // n_keys, -1, size])
            query = self.op("Reshape", query, grid)
            axis = self.constant([2])
            key = self.op("Unsqueeze", key, axis)
            value = self.op("Unsqueeze", value, axis)
            bias = bias and self.op("Unsqueeze", bias, axis)
        last = [0, 1, 2, 4, 3] if is_grouped else [0, 1, 3, 2]
        scores = self.op("MatMul", query, self.op("Transpose", key, perm=last))
        if scale != 1.0:
            scores = self.op("Mul", scores, self.constant(scale, np.float32))
        if bias:
            scores = self.op("Add", scores, bias)
        shares = self.op("Softmax", scores, axis=-1)
        mixed = self.op("MatMul", shares, value)
        if is_grouped:
            mixed = self.op("Reshape", mixed, self.constant([0, n_heads, -1, size]))
        together = self.op("Transpose", mixed, perm=[0, 2, 1, 3])
        return self.op("Reshape", together, self.constant([0, 0, n_heads * size]))

    def length(self, value: str, axis: int) -> str:
        """Return the size of an axis, [1]."""
        return self.op("Shape", value, start=axis, end=axis + 1)

    def range(self, start: str, end: str) -> str:
        """Return the integers from `start` [1] to before `end` [1]."""
        first, last = (self.op("Squeeze", value) for value in (start, end))
        return self.op("Range", first, last, self.constant(1))

    def causal_mask(self, past: str, total: str) -> str:
        """Return which keys the new tokens see, as booleans [new tokens, total]."""
        queries = self.op("Unsqueeze", self.range(past, total), self.constant([1]))
        return self.op("LessOrEqual", self.range(self.constant([0]), total), queries)

    def padding_mask(self, mask: str) -> str:
        """Convert an attention mask [batch, total] to booleans [batch, 1, 1, total]."""
        seen = self.op("Cast", mask, to=TensorProto.BOOL)
        return self.op("Unsqueeze", seen, self.constant([1, 2]))

    def mask_bias(self, seen: str) -> str:
        """Convert booleans to a bias: 0 for keys that are seen."""
        zero, least = (self.constant(n, np.float32) for n in (0.0, _MASKED))
        return self.op("Where", seen, zero, least)

    def model(self, name: str) -> ModelProto:
        """Return the graph as a model."""
        graph = helper.make_graph(
            self._nodes,
            name,
            self._inputs,
            self._outputs,
            [*self._initializers.values()],
        )
        return helper.make_model(
            graph,
            opset_imports=self._opsets,
            ir_version=_IR_VERSION,
            producer_name="toque",
        )


def _branch(name: str, nodes: Sequence[Any], value: str) -> Any:
    """Return a graph without inputs that returns `value`."""
    result = helper.make_node("Identity", [value], [name])
    output = helper.make_tensor_value_info(name, _FLOAT, None)
    return helper.make_graph([*nodes, result], name, [], [output])
