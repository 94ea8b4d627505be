"""The layers of a model exchanged for those that compute in bfloat16 on a CPU."""

from __future__ import annotations

import torch
from torch import nn
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXAttention
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm
from transformers.models.t5.modeling_t5 import T5Attention, T5DenseGatedActDense, T5LayerNorm
from transformers.pytorch_utils import Conv1D

from toque.models.forward.bf16.attention import (
    GPT2Attention16,
    GPTNeoXAttention16,
    LlamaAttention16,
    T5Attention16,
)
from toque.models.forward.bf16.gated import LlamaMLP16, T5DenseGatedActDense16
from toque.models.forward.bf16.linear import Conv1D16, Linear16
from toque.models.forward.bf16.norms import LayerNorm16, LlamaRMSNorm16, T5LayerNorm16

_CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: Linear16,
    Conv1D: Conv1D16,
    LlamaRMSNorm: LlamaRMSNorm16,
    T5LayerNorm: T5LayerNorm16,
    nn.LayerNorm: LayerNorm16,
    LlamaMLP: LlamaMLP16,
    T5DenseGatedActDense: T5DenseGatedActDense16,
    LlamaAttention: LlamaAttention16,
    T5Attention: T5Attention16,
    GPT2Attention: GPT2Attention16,
    GPTNeoXAttention: GPTNeoXAttention16,
}


def use_bf16_layers(model: nn.Module) -> int:
    """Let the layers of a model on a CPU compute in bfloat16; returns how many do.

    Only within bfloat16 autocast: elsewhere they are what they were. Weights, names and what is
    saved stay the same. Frozen weights are bfloat16 already and need no copy.
    """
    found = 0
    for module in model.modules():
        other = _CLASSES.get(type(module))
        if other is not None and all(p.device.type == "cpu" for p in module.parameters()):
            if isinstance(module, nn.Linear) and module.weight.dtype != torch.float32:
                continue
            module.__class__ = other
            found += 1
    return found
