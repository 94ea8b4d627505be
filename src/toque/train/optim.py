"""The optimizer, and its state as named tensors.

State is keyed by parameter name, not by position, so that a checkpoint says whose it is and an
optimizer with another grouping can read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor, nn

from toque.errors import ConfigError
from toque.train.tensors import refuse

OPTIMIZERS: Final = ("adamw",)
_STEP: Final = "step"


def build_optimizer(
    model: nn.Module,
    *,
    name: str = "adamw",
    weight_decay: float = 0.01,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
) -> torch.optim.Optimizer:
    """An optimizer over the trainable parameters; the loop sets its learning rate at every step.

    AdamW: Loshchilov & Hutter 2019, algorithm 2. Vectors (biases, norms' scales) are not decayed:
    they are few, and pulling a scale towards zero is no regularisation.

    Raises:
        ConfigError: the name is unknown, or nothing is trainable.
    """
    if name not in OPTIMIZERS:
        raise ConfigError(f"{name!r} is no optimizer. Use {', '.join(OPTIMIZERS)}.")
    trainable = [p for p in model.parameters() if p.requires_grad]
    if not trainable:
        raise ConfigError("The model has no trainable parameter: everything is frozen.")
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=0.0, betas=betas, eps=eps, fused=True
    )


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """The optimizer's state as `<parameter name>/<entry>`, e.g. `wte.weight/exp_avg`."""
    return {
        f"{name}/{entry}": value
        for name, parameter in model.named_parameters()
        for entry, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


@torch.no_grad()
def load_optimizer_tensors(
    optimizer: torch.optim.Optimizer, model: nn.Module, tensors: Mapping[str, Tensor], *, where: str
) -> None:
    """Give the optimizer the state that `optimizer_tensors` named.

    Raises:
        CheckpointError: a name or a shape belongs to another model; nothing is changed.
    """
    own = {p for group in optimizer.param_groups for p in group["params"]}
    parameters = {name: p for name, p in model.named_parameters() if p in own}
    state: dict[nn.Parameter, dict[str, Tensor]] = {}
    wrong: list[str] = []
    for key, value in tensors.items():
        name, _, entry = key.rpartition("/")
        parameter = parameters.get(name)
        if parameter is None:
            wrong.append(f"{key} is unknown to the optimizer")
        elif entry == _STEP:
            state.setdefault(parameter, {})[entry] = _count(optimizer, parameter, value)
        elif value.shape != parameter.shape:
            wrong.append(f"{key} is {tuple(value.shape)}, the parameter {tuple(parameter.shape)}")
        else:
            # The parameter's own layout in memory: the fused kernels walk both alike.
            copy = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
            state.setdefault(parameter, {})[entry] = copy
    entries = {name for held in state.values() for name in held}
    for name, parameter in parameters.items():
        held = state.get(parameter)
        if held is not None and held.keys() != entries:
            wrong.append(f"{name} lacks {', '.join(sorted(entries - held.keys()))}")
    refuse(wrong, where=where, what="the optimizer")
    optimizer.state.clear()
    for parameter, held in state.items():
        optimizer.state[parameter] = held


def _count(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, value: Tensor) -> Tensor:
    # Fused and capturable kernels count on the device; the plain ones on the CPU.
    on_device = bool(optimizer.defaults.get("fused") or optimizer.defaults.get("capturable"))
    return value.to(parameter.device if on_device else "cpu").clone()
