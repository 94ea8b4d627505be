"""Types of the weights in an ONNX file."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

TYPES: Final = ("f32", "f16", "int8")
_FLOAT32: Final = "relative_attention_bias.weight"
_LARGEST_INT8: Final = 127
_LARGEST_F16: Final = torch.finfo(torch.float16).max


class Stored(NamedTuple):
    """A matrix in a file."""

    values: NDArray[Any]
    """Values [rows, columns]."""
    scales: NDArray[np.float32] | None
    """Factors of the rows [rows, 1]. None means 1."""

    def to_float(self) -> Tensor:
        """Return the float32 matrix that a program reads from the file."""
        values = self.values.astype(np.float32)
        return torch.from_numpy(values if self.scales is None else values * self.scales)


def to_stored(matrix: Tensor, kind: str) -> Stored:
    """Convert a matrix [rows, columns] to a type of `TYPES`.

    A matrix with values beyond the range of float16 stays float32.
    """
    matrix = matrix.detach().float()
    if kind == "int8":
        # Symmetric, one scale per row (Jacob et al. 2018, arXiv 1712.05877, section 2.1).
        largest = matrix.abs().amax(1, keepdim=True)
        scales = (largest / _LARGEST_INT8).clamp(min=torch.finfo(torch.float32).tiny)
        return Stored((matrix / scales).round().to(torch.int8).numpy(), scales.numpy())
    if kind == "f16" and matrix.abs().max() <= _LARGEST_F16:
        return Stored(matrix.half().numpy(), None)
    return Stored(matrix.contiguous().numpy(), None)


@torch.no_grad()
def round_weights(model: PreTrainedModel, kind: str) -> None:
    """Round the matrices of a model to their values in a file."""
    for name, weight in model.named_parameters():
        if weight.ndim == 2 and not name.endswith(_FLOAT32):
            # GPT-2's linear layers are transposed, and files have one scale per output.
            is_transposed = _is_conv1d(model, name)
            matrix = weight.T if is_transposed else weight
            rounded = to_stored(matrix, kind).to_float()
            weight.copy_(rounded.T if is_transposed else rounded)


def _is_conv1d(model: PreTrainedModel, name: str) -> bool:
    """Return whether a matrix is [inputs, outputs], as in GPT-2."""
    is_layer = name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight"))
    return model.config.model_type == "gpt2" and is_layer
