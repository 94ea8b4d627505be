"""ONNX graphs of a T5: an encoder, and a decoder with a cache."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from onnx import ModelProto, TensorProto
from transformers import PreTrainedModel

from toque.models.config_values import scales_outputs
from toque.models.forward.packed import bias_by_distance
from toque.models.onnx.graph import Graph


class _Cached(NamedTuple):
    """Keys and values of a decoder layer: of the text, and of the prompt."""

    decoder_key: str
    decoder_value: str
    encoder_key: str
    encoder_value: str


class _Source(NamedTuple):
    """States of the encoder."""

    states: str
    is_cached: str
    """True if their keys and values are in the cache."""


class _Stack:
    """Builder of the encoder or the decoder."""

    def __init__(self, model: PreTrainedModel, kind: str, name: str) -> None:
        self.config: Any = model.config
        self.weights = dict(model.named_parameters(remove_duplicate=False))
        self.graph = Graph(kind)
        self.name = name
        attention: Any = model.get_submodule(f"{name}.block.0.layer.0.SelfAttention")
        most = self.config.relative_attention_max_distance
        self.bias = bias_by_distance(attention, torch.arange(-most, most + 1)).T

    def embed(self, ids: str) -> str:
        """Look up the embeddings [batch, tokens, width]."""
        return self.graph.rows("shared.weight", self.weights["shared.weight"], ids)

    def linear(self, x: str, name: str) -> str:
        """Add a linear layer."""
        name = f"{self.name}.{name}.weight"
        return self.graph.linear(x, name, self.weights[name])

    def heads(self, x: str, name: str) -> str:
        """Add a linear layer, and split its columns [batch, heads, tokens, size]."""
        return self.graph.split_heads(
            self.linear(x, name), self.config.num_heads, self.config.d_kv
        )

    def norm(self, x: str, name: str) -> str:
        """Add a norm."""
        name = f"{self.name}.{name}.weight"
        return self.graph.rms_norm(
            x, name, self.weights[name], self.config.layer_norm_epsilon
        )

    def attend(
        self, x: str, name: str, query: str, key: str, value: str, bias: str
    ) -> str:
        """Add attention without a scale, its last matrix and the residual."""
        heads, size = self.config.num_heads, self.config.d_kv
        mixed = self.graph.attention(
            query, key, value, bias, heads=(heads, heads), size=size, scale=1.0
        )
        return self.graph.op("Add", x, self.linear(mixed, f"{name}.o"))

    def feed_forward(self, x: str, name: str) -> str:
        """Add the feed-forward block and the residual."""
        g = self.graph
        normed = self.norm(x, f"{name}.layer_norm")
        name = f"{name}.DenseReluDense"
        kind = self.config.dense_act_fn
        if self.config.is_gated_act:
            gate = g.activation(self.linear(normed, f"{name}.wi_0"), kind)
            wide = g.op("Mul", gate, self.linear(normed, f"{name}.wi_1"))
        else:
            wide = g.activation(self.linear(normed, f"{name}.wi"), kind)
        return g.op("Add", x, self.linear(wide, f"{name}.wo"))

    def position_bias(self, past: str, total: str) -> str:
        """Return the bias by distance [1, heads, new tokens, total]."""
        g = self.graph
        most = self.config.relative_attention_max_distance
        queries = g.op("Unsqueeze", g.range(past, total), g.constant([1]))
        distances = g.op("Sub", g.range(g.constant([0]), total), queries)
        column = g.op(
            "Add",
            g.op("Clip", distances, g.constant(-most), g.constant(most)),
            g.constant(most),
        )
        table = g.vector("bias_of_distance", self.bias)
        return g.op("Unsqueeze", g.op("Gather", table, column, axis=1), g.constant([0]))


def encoder_graph(model: PreTrainedModel, kind: str) -> ModelProto:
    """Build the encoder: input_ids and attention_mask [batch, source] to last_hidden_state.

    Args:
        model: A T5 on the CPU.
        kind: Type of the matrices, of `stored_types.TYPES`.
    """
    stack = _Stack(model, kind, "encoder")
    g = stack.graph
    ids = g.input("input_ids", ["batch", "source"])
    mask = g.input("attention_mask", ["batch", "source"])
    positions = stack.position_bias(g.constant([0]), g.length(ids, 1))
    bias = g.op("Add", positions, g.mask_bias(g.padding_mask(mask)))
    x = stack.embed(ids)
    for n in range(stack.config.num_layers):
        block = f"block.{n}.layer.0"
        normed = stack.norm(x, f"{block}.layer_norm")
        block += ".SelfAttention"
        query, key, value = (stack.heads(normed, f"{block}.{p}") for p in "qkv")
        x = stack.attend(x, block, query, key, value, bias)
        x = stack.feed_forward(x, f"block.{n}.layer.1")
    g.output(
        stack.norm(x, "final_layer_norm"),
        "last_hidden_state",
        ["batch", "source", stack.config.d_model],
    )
    return g.model("t5-encoder")


def t5_decoder_graph(
    model: PreTrainedModel, kind: str, *, with_source: bool = True
) -> ModelProto:
    """Build the decoder with a cache of keys and values.

    Inputs: input_ids [batch, tokens], encoder_attention_mask [batch, source], encoder_hidden_states
    [batch, source, width], past_key_values.N.decoder.key and .value [batch, heads, past, size],
    past_key_values.N.encoder.key and .value [batch, heads, source, size], and use_cache_branch [1].
    If the last is false, the keys and values of the encoder are computed from its states. Outputs:
    logits [batch, tokens, vocabulary] and present.N....

    Args:
        model: A T5 on the CPU.
        kind: Type of the matrices, of `stored_types.TYPES`.
        with_source: False for a graph without encoder_hidden_states and use_cache_branch, which
            always reads the keys and values of the encoder.
    """
    stack = _Stack(model, kind, "decoder")
    g, config = stack.graph, stack.config
    ids = g.input("input_ids", ["batch", "tokens"])
    source_mask = g.input("encoder_attention_mask", ["batch", "source"])
    source: _Source | None = None
    if with_source:
        shape: list[int | str] = ["batch", "source", config.d_model]
        source = _Source(g.input("encoder_hidden_states", shape, TensorProto.FLOAT), "")
    past = [
        _Cached(*(_cache_input(g, config, n, part) for part in _Cached._fields))
        for n in range(config.num_decoder_layers)
    ]
    if source is not None:
        flag = g.input("use_cache_branch", [1], TensorProto.BOOL)
        source = source._replace(is_cached=flag)

    n_past = g.length(past[0].decoder_key, 2)
    total = g.op("Add", n_past, g.length(ids, 1))
    bias = g.op(
        "Add",
        stack.position_bias(n_past, total),
        g.mask_bias(g.causal_mask(n_past, total)),
    )
    source_bias = g.mask_bias(g.padding_mask(source_mask))

    x = stack.embed(ids)
    for n, cached in enumerate(past):
        x, present = _decoder_layer(stack, x, n, cached, (bias, source_bias), source)
        for part, value in present._asdict().items():
            if source is None and part.startswith("encoder"):
                continue
            length = "source" if part.startswith("encoder") else "total"
            g.output(
                value,
                f"present.{n}.{part.replace('_', '.')}",
                ["batch", config.num_heads, length, config.d_kv],
            )

    x = stack.norm(x, "final_layer_norm")
    if scales_outputs(config):
        x = g.op("Mul", x, g.constant(config.d_model**-0.5, np.float32))
    head = stack.weights["lm_head.weight"]
    is_tied = head is stack.weights["shared.weight"]
    logits = g.linear(x, "shared.weight" if is_tied else "lm_head.weight", head)
    g.output(logits, "logits", ["batch", "tokens", config.vocab_size])
    return g.model("t5-decoder")


def _cache_input(g: Graph, config: Any, n: int, part: str) -> str:
    length = "cached_source" if part.startswith("encoder") else "past"
    shape = ["batch", config.num_heads, length, config.d_kv]
    return g.input(
        f"past_key_values.{n}.{part.replace('_', '.')}", shape, TensorProto.FLOAT
    )


def _choose_source(stack: _Stack, name: str, cached: str, source: _Source) -> str:
    """Return cached keys or values of the encoder, or compute them with the layer `name`."""
    # Outside of the branch, so that a program converts the weight once.
    weight = f"decoder.{name}.weight"
    stack.graph.transposed(weight, stack.weights[weight])
    compute = partial(stack.heads, source.states, name)
    return stack.graph.choose(source.is_cached, cached, compute)


def _decoder_layer(
    stack: _Stack,
    x: str,
    n: int,
    past: _Cached,
    biases: tuple[str, str],
    source: _Source | None,
) -> tuple[str, _Cached]:
    """Add a layer of the decoder, and return its output and its cache."""
    g = stack.graph
    block = f"block.{n}.layer.0"
    normed = stack.norm(x, f"{block}.layer_norm")
    block += ".SelfAttention"
    query, key, value = (stack.heads(normed, f"{block}.{p}") for p in "qkv")
    key = g.op("Concat", past.decoder_key, key, axis=2)
    value = g.op("Concat", past.decoder_value, value, axis=2)
    x = stack.attend(x, block, query, key, value, biases[0])

    block = f"block.{n}.layer.1"
    query = stack.heads(
        stack.norm(x, f"{block}.layer_norm"), f"{block}.EncDecAttention.q"
    )
    block += ".EncDecAttention"
    source_key, source_value = past.encoder_key, past.encoder_value
    if source is not None:
        source_key = _choose_source(stack, f"{block}.k", source_key, source)
        source_value = _choose_source(stack, f"{block}.v", source_value, source)
    x = stack.attend(x, block, query, source_key, source_value, biases[1])
    x = stack.feed_forward(x, f"block.{n}.layer.2")
    return x, _Cached(key, value, source_key, source_value)
