"""Exponential average of the weights, as an entry of the optimizer's state.

Checkpoints, shards and estimates of memory therefore include it.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from toque.training.distributed.data_parallel import local_part

AVERAGE: Final = "average_weight"
"""Entry with the average of a parameter, of the parameter's shape."""
_DECAY: Final = "ema_decay"


def keep_average(optimizer: torch.optim.Optimizer, decay: float | None) -> None:
    """Keep an average of the weights from the next update on, unless `decay` is None."""
    optimizer.defaults[_DECAY] = decay


def keeps_average(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer keeps an average of the weights."""
    return optimizer.defaults.get(_DECAY) is not None


@torch.no_grad()
def update_average(
    optimizer: torch.optim.Optimizer, step: int, condition: Tensor
) -> None:
    """Add the weights to their average, if `condition` [] is true and the optimizer keeps one.

    With update t, counted from 0, the average is a = d a + (1 - d) w. The decay d is the smaller of
    `ema_decay` and (1 + t) / (10 + t), so that a short run forgets its first weights, as in
    tf.train.ExponentialMovingAverage. The average begins as the weights after the first update.

    Call it after the update and before the gradients are cleared.
    """
    if not keeps_average(optimizer):
        return
    decay = min(optimizer.defaults[_DECAY], (1 + step) / (10 + step))
    share = torch.where(condition, 1 - decay, 0.0)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state = optimizer.state[parameter]
            if AVERAGE in state:
                local_part(state[AVERAGE]).lerp_(local_part(parameter), share)
            else:
                state[AVERAGE] = parameter.detach().clone()
