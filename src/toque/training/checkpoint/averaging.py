"""Averages of the weights of a run, read from its checkpoints one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from toque.errors import CheckpointError
from toque.training.checkpoint.tensor_files import StoredTensors
from toque.training.optim.weight_average import AVERAGE


class MeanTensors(Mapping[str, Tensor]):
    """Means of the tensors with the same name in several checkpoints.

    Each access reads one tensor from every checkpoint and sums it in float64. The mean of equal
    tensors is bitwise identical to them. Integer tensors are not averaged: the first checkpoint's
    tensor is returned.

    Args:
        paths: Paths of the checkpoints, for messages.
        checkpoints: Open tensors of each checkpoint.

    Raises:
        CheckpointError: The checkpoints have tensors with different names.
    """

    def __init__(
        self, paths: Sequence[object], checkpoints: Sequence[StoredTensors]
    ) -> None:
        self._paths = paths
        self._checkpoints = checkpoints
        for path, tensors in zip(paths, checkpoints, strict=True):
            differing = tensors.keys() ^ checkpoints[0].keys()
            if differing:
                raise CheckpointError(
                    f"{path} and {paths[0]} cannot be averaged: only one of them has "
                    f"{min(differing)}. They belong to different models."
                )

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self._checkpoints[0])

    def __len__(self) -> int:
        """Return the number of tensors."""
        return len(self._checkpoints[0])

    def __getitem__(self, name: str) -> Tensor:
        """Return the mean in the tensors' own type.

        Raises:
            CheckpointError: A file is damaged, or the tensors differ in shape or type.
        """
        first = self._checkpoints[0][name].read()
        if not first.is_floating_point():
            return first
        total = first.to(torch.float64)
        for path, tensors in zip(self._paths[1:], self._checkpoints[1:], strict=True):
            tensor = tensors[name].read()
            if (tensor.shape, tensor.dtype) != (first.shape, first.dtype):
                raise CheckpointError(
                    f"{path} and {self._paths[0]} cannot be averaged: {name} differs in its shape "
                    "or type. They belong to different models."
                )
            total += tensor
        return (total / len(self._checkpoints)).to(first.dtype)


class ExponentialAverage(Mapping[str, Tensor]):
    """Exponential average of the weights of a run, in one of its checkpoints.

    Tensors without an average are the checkpoint's own: buffers, and weights that no update has
    changed.

    Args:
        weights: Open tensors of the model.
        state: Open tensors of the optimizer.
    """

    def __init__(self, weights: StoredTensors, state: StoredTensors) -> None:
        self._weights = weights
        self._state = state

    @property
    def exists(self) -> bool:
        """True if the run has kept an average."""
        return any(_average_of(name) in self._state for name in self._weights)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self._weights)

    def __len__(self) -> int:
        """Return the number of tensors."""
        return len(self._weights)

    def __getitem__(self, name: str) -> Tensor:
        """Read an average.

        Raises:
            CheckpointError: A file is damaged.
        """
        stored = self._state.get(_average_of(name), self._weights[name])
        return stored.read()


def _average_of(name: str) -> str:
    return f"{name}/{AVERAGE}"
