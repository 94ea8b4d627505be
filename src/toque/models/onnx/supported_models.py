"""Models for which ONNX graphs can be built."""

from __future__ import annotations

from typing import Any, Final

from transformers import PreTrainedModel

from toque.models.config_values import window_of
from toque.models.onnx.graph import ACTIVATIONS

MODEL_TYPES: Final = ("t5", "gpt2", "gpt_neox", "llama", "mistral", "qwen2", "qwen3")
_FIXED: Final[dict[str, dict[str, Any]]] = {
    "gpt2": {
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
}
"""Entries of config.json with one value in a graph, by model type."""


def find_unsupported(model: PreTrainedModel) -> str:
    """Describe why the graphs do not compute a model; "" if they do."""
    config: Any = model.config
    kind = config.model_type
    if kind not in MODEL_TYPES:
        return f"it has the type {kind}, and the allowed types are {', '.join(MODEL_TYPES)}"
    unsupported = [
        f"{name}={getattr(config, name)}"
        for name, value in _FIXED.get(kind, {}).items()
        if getattr(config, name, value) != value
    ]
    names = ("activation_function", "hidden_act", "dense_act_fn")
    activation = next(name for name in reversed(names) if hasattr(config, name))
    if getattr(config, activation) not in ACTIVATIONS:
        unsupported.append(f"{activation}={getattr(config, activation)}")
    rope = getattr(config, "rope_parameters", None) or {}
    # A graph has the frequencies of the model, but no factor for long texts.
    if rope.get("rope_type", "default") not in ("default", "llama3"):
        unsupported.append(f"rope_type={rope['rope_type']}")
    if (window := window_of(config)) is not None:
        unsupported.append(f"sliding_window={window}")
    return f"its config.json has {', '.join(unsupported)}" if unsupported else ""
