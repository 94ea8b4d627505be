"""ONNX graphs of decoder-only models, with the names of inputs that other programs expect."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Final

import torch
from onnx import ModelProto, TensorProto
from torch import Tensor
from transformers import PreTrainedModel

from toque.models.config_values import head_size
from toque.models.onnx.graph import Graph, Heads


def decoder_graph(model: PreTrainedModel, graph: Graph) -> ModelProto:
    """Build the graph of a decoder with a cache of keys and values.

    Inputs: input_ids [batch, tokens], attention_mask [batch, total], position_ids [batch, tokens]
    and past_key_values.N.key and .value [batch, key heads, past, size]. Outputs: logits
    [batch, tokens, vocabulary] and present.N.key and .value.

    Args:
        model: GPT-2, GPT-NeoX, or a model with the layers of Llama. It is on the CPU.
        graph: An empty graph, for a file or for a single row.
    """
    builder = {"gpt2": _Gpt2, "gpt_neox": _Neox}.get(model.config.model_type, _Llama)
    return builder(model, graph).build()


_BODY: Final = "model"  # name of the module below the head


class _Decoder:
    """Builder of the parts that all decoders share."""

    embedding_name: ClassVar[str]

    def __init__(self, model: PreTrainedModel, graph: Graph) -> None:
        self.config: Any = model.config
        self.weights = dict(model.named_parameters(remove_duplicate=False))
        self.graph = graph
        n_heads: int = self.config.num_attention_heads
        n_key_heads: int = getattr(self.config, "num_key_value_heads", n_heads)
        self.size = head_size(self.config)
        self.heads = Heads(n_heads, n_key_heads, self.size, self.size**-0.5)
        self.mask = ""
        self.positions = ""
        # Rows of a tied matrix are looked up, and the head multiplies by it.
        self.is_tied = (
            self.weights["lm_head.weight"] is model.get_input_embeddings().weight
        )
        rotary = getattr(model.base_model, "rotary_emb", None)
        self.frequencies: Tensor | None = getattr(rotary, "inv_freq", None)
        self.turns = ("", "")  # cosines and sines of the positions

    def build(self) -> ModelProto:
        """Build the graph."""
        g = self.graph
        ids = g.input("input_ids", ["batch", "tokens"])
        self.positions = g.input("position_ids", ["batch", "tokens"])
        n_layers = self.config.num_hidden_layers
        g.add_cache([str(n) for n in range(n_layers)], self.heads)
        if not g.is_single_row:  # a single row has no padding and no later tokens
            self.mask = self._mask(ids)

        if self.frequencies is not None and not g.attends_with_rotation(
            self.heads, self.frequencies
        ):
            self.turns = self._turns(self.frequencies)
        x = self.embed(ids)
        for n in range(n_layers):
            x = self.layer(x, n)
        logits = self.head(self.final_norm(x))
        g.output(logits, "logits", ["batch", "tokens", self.config.vocab_size])
        return g.model(self.config.model_type)

    def _mask(self, ids: str) -> str:
        """Compute the bias that hides padding and later tokens."""
        g = self.graph
        mask = g.input("attention_mask", ["batch", "total"])
        n_past = g.past_length("0")
        total = g.op("Add", n_past, g.length(ids, 1))
        seen = g.op("And", g.causal_mask(n_past, total), g.padding_mask(mask))
        return g.mask_bias(seen)

    def embed(self, ids: str) -> str:
        """Look up the embeddings [batch, tokens, width]."""
        name = self.embedding_name
        return self.graph.rows(name, self.weights[name], ids)

    def layer(self, x: str, n: int) -> str:
        """Add layer `n`."""
        raise NotImplementedError

    def final_norm(self, x: str) -> str:
        """Add the norm before the head."""
        raise NotImplementedError

    def head(self, x: str) -> str:
        """Compute the logits."""
        name = self.embedding_name if self.is_tied else "lm_head.weight"
        return self.graph.linear(x, name, self.weights["lm_head.weight"])

    def linear(self, x: str, name: str) -> str:
        """Add the linear layer `name`, with its bias if it has one."""
        weight = self.weights[f"{name}.weight"]
        return self.graph.linear(
            x, f"{name}.weight", weight, self.weights.get(f"{name}.bias")
        )

    def layer_norm(self, x: str, name: str, eps: float) -> str:
        """Add the layer norm `name`."""
        weight, bias = (self.weights[f"{name}.{part}"] for part in ("weight", "bias"))
        return self.graph.layer_norm(x, f"{name}.weight", weight, bias, eps)

    def attend(self, n: int, query: str, key: str, value: str) -> str:
        """Append keys and values [batch, tokens, heads * size] to the cache, and attend."""
        return self.graph.attend_to_cache(
            str(n),
            query,
            key,
            value,
            self.mask,
            heads=self.heads,
            prepare=[self.prepare(n, part) for part in ("q", "k")],
        )

    def prepare(self, n: int, part: str) -> Callable[[str], str] | None:
        """Return the operators on the queries ("q") or keys ("k") of layer `n`, if any."""
        return self.rotate if self.turns[0] else None

    def _turns(self, frequencies: Tensor) -> tuple[str, str]:
        """Compute the cosines and sines of the positions, [batch, 1, tokens, half]."""
        g = self.graph
        places = g.op("Cast", self.positions, to=TensorProto.FLOAT)
        column = g.op("Unsqueeze", places, g.constant([1, 3]))
        angles = g.op("Mul", column, g.vector("inv_freq", frequencies))
        return g.op("Cos", angles), g.op("Sin", angles)

    def rotate(self, x: str) -> str:
        """Rotate the first columns of each head by the positions (Su et al. 2021)."""
        g = self.graph
        assert self.frequencies is not None, "the model has rotary positions"
        half = len(self.frequencies)
        cos, sin = self.turns
        rest = self.size - 2 * half
        sizes = [half, half, rest] if rest else [half, half]
        first, second, *others = g.ops(
            "Split", x, g.constant(sizes), outputs=len(sizes), axis=-1
        )
        turned = (
            g.op("Sub", g.op("Mul", first, cos), g.op("Mul", second, sin)),
            g.op("Add", g.op("Mul", second, cos), g.op("Mul", first, sin)),
        )
        return g.op("Concat", *turned, *others, axis=-1)


class _Gpt2(_Decoder):
    embedding_name = "transformer.wte.weight"

    def embed(self, ids: str) -> str:
        g, name = self.graph, "transformer.wpe.weight"
        places = g.rows(name, self.weights[name], self.positions)
        return g.op("Add", super().embed(ids), places)

    def layer(self, x: str, n: int) -> str:
        g, block = self.graph, f"transformer.h.{n}"
        normed = self._norm(x, f"{block}.ln_1")
        fused = self.linear(normed, f"{block}.attn.c_attn")
        parts = g.ops("Split", fused, outputs=3, axis=-1, num_outputs=3)
        mixed = self.attend(n, *parts)
        x = g.op("Add", x, self.linear(mixed, f"{block}.attn.c_proj"))
        wide = self.linear(self._norm(x, f"{block}.ln_2"), f"{block}.mlp.c_fc")
        wide = g.activation(wide, self.config.activation_function)
        return g.op("Add", x, self.linear(wide, f"{block}.mlp.c_proj"))

    def final_norm(self, x: str) -> str:
        return self._norm(x, "transformer.ln_f")

    def _norm(self, x: str, name: str) -> str:
        return self.layer_norm(x, name, self.config.layer_norm_epsilon)

    def linear(self, x: str, name: str) -> str:
        weight, bias = (self.weights[f"{name}.{part}"] for part in ("weight", "bias"))
        # transformers stores [inputs, outputs].
        return self.graph.linear(x, f"{name}.weight", weight.T, bias)


class _Neox(_Decoder):
    embedding_name = "gpt_neox.embed_in.weight"

    def layer(self, x: str, n: int) -> str:
        g, block = self.graph, f"gpt_neox.layers.{n}"
        normed = self._norm(x, f"{block}.input_layernorm")
        fused = self._query_key_value(normed, f"{block}.attention.query_key_value")
        parts = g.ops("Split", fused, outputs=3, axis=-1, num_outputs=3)
        mixed = self.attend(n, *parts)
        attended = self.linear(mixed, f"{block}.attention.dense")
        after = g.op("Add", x, attended)
        before_mlp = x if self.config.use_parallel_residual else after
        normed = self._norm(before_mlp, f"{block}.post_attention_layernorm")
        wide = g.activation(
            self.linear(normed, f"{block}.mlp.dense_h_to_4h"), self.config.hidden_act
        )
        return g.op("Add", after, self.linear(wide, f"{block}.mlp.dense_4h_to_h"))

    def _query_key_value(self, x: str, name: str) -> str:
        """Add the linear layer `name`, with its outputs in the order (query/key/value, head)."""
        # transformers stores (head, query/key/value, column).
        order = torch.arange(3 * self.heads.queries * self.size)
        order = order.view(-1, 3, self.size).transpose(0, 1).flatten()
        weight = self.weights[f"{name}.weight"][order]
        bias = self.weights.get(f"{name}.bias")
        ordered = None if bias is None else bias[order]
        return self.graph.linear(x, f"{name}.weight", weight, ordered)

    def final_norm(self, x: str) -> str:
        return self._norm(x, "gpt_neox.final_layer_norm")

    def _norm(self, x: str, name: str) -> str:
        return self.layer_norm(x, name, self.config.layer_norm_eps)


class _Llama(_Decoder):
    """Llama, Mistral, Qwen2 and Qwen3."""

    embedding_name = f"{_BODY}.embed_tokens.weight"

    def layer(self, x: str, n: int) -> str:
        g, block = self.graph, f"{_BODY}.layers.{n}"
        normed = self._norm(x, f"{block}.input_layernorm")
        parts = [self.linear(normed, f"{block}.self_attn.{p}_proj") for p in "qkv"]
        mixed = self.attend(n, *parts)
        x = g.op("Add", x, self.linear(mixed, f"{block}.self_attn.o_proj"))

        normed = self._norm(x, f"{block}.post_attention_layernorm")
        gate = g.activation(
            self.linear(normed, f"{block}.mlp.gate_proj"), self.config.hidden_act
        )
        wide = g.op("Mul", gate, self.linear(normed, f"{block}.mlp.up_proj"))
        return g.op("Add", x, self.linear(wide, f"{block}.mlp.down_proj"))

    def final_norm(self, x: str) -> str:
        return self._norm(x, f"{_BODY}.norm")

    def prepare(self, n: int, part: str) -> Callable[[str], str] | None:
        rotate = super().prepare(n, part)
        norm = f"{_BODY}.layers.{n}.self_attn.{part}_norm"
        if f"{norm}.weight" not in self.weights:
            return rotate
        # Qwen3 normalises queries and keys.
        if rotate is None:
            return partial(self._norm, name=norm)
        return lambda x: rotate(self._norm(x, norm))

    def _norm(self, x: str, name: str) -> str:
        weight = self.weights[f"{name}.weight"]
        return self.graph.rms_norm(
            x, f"{name}.weight", weight, self.config.rms_norm_eps
        )
