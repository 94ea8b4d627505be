"""The layers that a CPU computes fastest in a run's precision."""

from __future__ import annotations

from torch import nn

from toque.models.forward.bf16.layers import use_bf16_layers
from toque.models.forward.float32_linear import use_float32_layers


def use_cpu_layers(model: nn.Module, precision: str) -> int:
    """Exchange layers of a model on a CPU; returns how many. Nothing changes elsewhere.

    Args:
        model: Its weights, their names and what is saved stay the same.
        precision: Of the run's products: bf16 or float32.
    """
    return use_bf16_layers(model) if precision == "bf16" else use_float32_layers(model)
