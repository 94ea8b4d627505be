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
from toque.models.onnx.graph import Graph, Heads


class _Source(NamedTuple):
    """States of the encoder."""

    states: str
    is_cached: str
    """True if their keys and values are in the cache."""


class _Stack:
    """Builder of the encoder or the decoder."""

    def __init__(self, model: PreTrainedModel, graph: Graph, name: str) -> None:
        self.config: Any = model.config
        self.weights = dict(model.named_parameters(remove_duplicate=False))
        self.graph = graph
        self.name = name
        n_heads: int = self.config.num_heads
        # T5's query initialiser includes the scale (Raffel et al. 2020).
        self.heads = Heads(n_heads, n_heads, self.config.d_kv, 1.0)
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

    def split(self, x: str, name: str) -> str:
        """Add a linear layer, and split its columns [batch, heads, tokens, size]."""
        return self.graph.split_heads(
            self.linear(x, name), self.heads.queries, self.heads.size
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
        mixed = self.graph.attention(query, key, value, bias, heads=self.heads)
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


def encoder_graph(model: PreTrainedModel, graph: Graph) -> ModelProto:
    """Build the encoder: input_ids and attention_mask [batch, source] to last_hidden_state.

    Args:
        model: A T5 on the CPU.
        graph: An empty graph for a file.
    """
    stack = _Stack(model, graph, "encoder")
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
        query, key, value = (stack.split(normed, f"{block}.{p}") for p in "qkv")
        x = stack.attend(x, block, query, key, value, bias)
        x = stack.feed_forward(x, f"block.{n}.layer.1")
    g.output(
        stack.norm(x, "final_layer_norm"),
        "last_hidden_state",
        ["batch", "source", stack.config.d_model],
    )
    return g.model("t5-encoder")


def t5_decoder_graph(model: PreTrainedModel, graph: Graph) -> ModelProto:
    """Build the decoder with a cache of keys and values.

    Inputs: input_ids [batch, tokens], encoder_attention_mask [batch, source], encoder_hidden_states
    [batch, source, width], past_key_values.N.decoder.key and .value [batch, heads, past, size],
    past_key_values.N.encoder.key and .value [batch, heads, source, size], and use_cache_branch [1].
    If the last is false, the keys and values of the encoder are computed from its states. Outputs:
    logits [batch, tokens, vocabulary] and present.N....

    The graph of a single row always reads the keys and values of the encoder. It has no
    encoder_attention_mask, encoder_hidden_states and use_cache_branch.

    Args:
        model: A T5 on the CPU.
        graph: An empty graph, for a file or for a single row.
    """
    stack = _Stack(model, graph, "decoder")
    g, config = stack.graph, stack.config
    ids = g.input("input_ids", ["batch", "tokens"])
    source: _Source | None = None
    source_bias = ""
    if not g.is_single_row:
        source_mask = g.input("encoder_attention_mask", ["batch", "source"])
        source_bias = g.mask_bias(g.padding_mask(source_mask))
        shape: list[int | str] = ["batch", "source", config.d_model]
        states = g.input("encoder_hidden_states", shape, TensorProto.FLOAT)
        flag = g.input("use_cache_branch", [1], TensorProto.BOOL)
        source = _Source(states, flag)
    layers = range(config.num_decoder_layers)
    g.add_cache([f"{n}.decoder" for n in layers], stack.heads)

    n_past = g.past_length("0.decoder")
    total = g.op("Add", n_past, g.length(ids, 1))
    bias = g.op(
        "Add",
        stack.position_bias(n_past, total),
        g.mask_bias(g.causal_mask(n_past, total)),
    )
    x = stack.embed(ids)
    for n in layers:
        x = _decoder_layer(stack, x, n, (bias, source_bias), source)

    x = stack.norm(x, "final_layer_norm")
    if scales_outputs(config):
        x = g.op("Mul", x, g.constant(config.d_model**-0.5, np.float32))
    head = stack.weights["lm_head.weight"]
    is_tied = head is stack.weights["shared.weight"]
    logits = g.linear(x, "shared.weight" if is_tied else "lm_head.weight", head)
    g.output(logits, "logits", ["batch", "tokens", config.vocab_size])
    return g.model("t5-decoder")


def _read_source(
    stack: _Stack, x: str, n: int, part: str, source: _Source | None
) -> str:
    """Return the keys or values of the encoder for layer `n`: cached, or computed from states.

    Args:
        stack: The decoder.
        x: Name of the cross-attention.
        n: Index of the layer.
        part: "key" or "value".
        source: States of the encoder. None means that the keys and values are always cached.
    """
    g, heads = stack.graph, stack.heads
    shape: list[int | str] = ["batch", heads.keys, "cached_source", heads.size]
    name = f"{n}.encoder.{part}"
    cached = g.input(f"past_key_values.{name}", shape, TensorProto.FLOAT)
    if source is None:
        return cached

    # Outside of the branch, so that a program converts the weight once.
    layer = f"{x}.{part[0]}"
    weight = f"decoder.{layer}.weight"
    g.transposed(weight, stack.weights[weight])
    compute = partial(stack.split, source.states, layer)
    states = g.choose(source.is_cached, cached, compute)
    g.output(states, f"present.{name}", ["batch", heads.keys, "source", heads.size])
    return states


def _decoder_layer(
    stack: _Stack, x: str, n: int, biases: tuple[str, str], source: _Source | None
) -> str:
    """Add a layer of the decoder, and return its output."""
    g = stack.graph
    block = f"block.{n}.layer.0"
    normed = stack.norm(x, f"{block}.layer_norm")
    block += ".SelfAttention"
    query, key, value = (stack.linear(normed, f"{block}.{p}") for p in "qkv")
    mixed = g.attend_to_cache(
        f"{n}.decoder", query, key, value, biases[0], heads=stack.heads
    )
    x = g.op("Add", x, stack.linear(mixed, f"{block}.o"))

    block = f"block.{n}.layer.1"
    normed = stack.norm(x, f"{block}.layer_norm")
    block += ".EncDecAttention"
    query = stack.split(normed, f"{block}.q")
    key = _read_source(stack, block, n, "key", source)
    value = _read_source(stack, block, n, "value", source)
    x = stack.attend(x, block, query, key, value, biases[1])
    return stack.feed_forward(x, f"block.{n}.layer.2")
