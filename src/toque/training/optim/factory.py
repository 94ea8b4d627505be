"""The optimizer, and its state as named tensors.

State is keyed by parameter name, not by position, so that a checkpoint says whose it is and an
optimizer with another grouping can read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from toque.errors import ConfigError
from toque.training.checkpoint.state_tensors import refuse
from toque.training.optim.adafactor import Adafactor
from toque.training.optim.adamw8bit import AdamW8bit
from toque.training.optim.muon import MuonWithAdamW
from toque.training.optim.skippable import SkippableOptimizer

OPTIMIZERS: Final = ("adamw", "adafactor", "muon", "adamw8bit")
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

    adamw: Loshchilov & Hutter 2019, algorithm 2, fused. Vectors (biases, norms' scales) are never
    decayed: they are few, and pulling a scale towards zero is no regularisation. The others stand
    in files of their own: `adafactor`, `muon` (with AdamW for tables and vectors), `adamw8bit`.

    Raises:
        ConfigError: the name is unknown, or nothing is trainable.
    """
    if name not in OPTIMIZERS:
        raise ConfigError(f"{name!r} is no optimizer. Use {', '.join(OPTIMIZERS)}.")
    tables = _tables(model)
    kinds: dict[str, list[nn.Parameter]] = {"matrices": [], "tables": [], "vectors": []}
    for parameter in model.parameters():
        if parameter.requires_grad:
            inner = parameter.ndim == 2 and id(parameter) not in tables
            large = "matrices" if inner else "tables"
            kinds[large if parameter.ndim >= 2 else "vectors"].append(parameter)
    if not any(kinds.values()):
        raise ConfigError("The model has no trainable parameter: everything is frozen.")

    def groups(*wanted: str, **options: Any) -> list[dict[str, Any]]:
        parameters = [p for kind in wanted for p in kinds[kind]]
        decay = 0.0 if wanted == ("vectors",) else weight_decay
        return [{"params": parameters, "weight_decay": decay, **options}] if parameters else []

    vectors = groups("vectors")
    if name == "muon":
        rest = [*groups("tables"), *vectors]
        return MuonWithAdamW(groups("matrices"), rest, betas=betas, eps=eps)
    if name == "adamw8bit":
        held = [*groups("matrices"), *groups("tables", exact=True), *vectors]
        return AdamW8bit(held, betas=betas, eps=eps)
    decayed = [p for p in model.parameters() if p.requires_grad and p.ndim >= 2]
    plain = [{"params": decayed, "weight_decay": weight_decay}] if decayed else []
    if name == "adafactor":
        return Adafactor([*plain, *vectors])
    return torch.optim.AdamW([*plain, *vectors], lr=0.0, betas=betas, eps=eps, fused=True)


def _tables(model: nn.Module) -> set[int]:
    """Parameters whose rows stand for tokens, positions or distances, the output head included."""
    found = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for name, parameter in model.named_parameters():
        if name.endswith("lm_head.weight"):
            found.add(id(parameter))
    return found


def state_shapes(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of what the optimizer keeps for `parameter` once it was updated."""
    if isinstance(optimizer, SkippableOptimizer):
        return optimizer.state_shapes(parameter)
    shape = tuple(parameter.shape)
    return {_STEP: (), "exp_avg": shape, "exp_avg_sq": shape}


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes the optimizer's state takes once every parameter was updated."""
    total = 0
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        for name, shape in state_shapes(optimizer, parameter).items():
            own = optimizer.state_dtype(name) if isinstance(optimizer, SkippableOptimizer) else None
            dtype = own or parameter.dtype
            total += torch.Size(shape).numel() * dtype.itemsize
    return total


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
        CheckpointError: a name or a shape belongs to another model or optimizer; nothing is
            changed.
    """
    own = {p for group in optimizer.param_groups for p in group["params"]}
    parameters = {name: p for name, p in model.named_parameters() if p in own}
    shapes = {name: state_shapes(optimizer, p) for name, p in parameters.items()}
    state: dict[nn.Parameter, dict[str, Tensor]] = {}
    wrong: list[str] = []
    for key, value in tensors.items():
        name, _, entry = key.rpartition("/")
        expected = shapes.get(name, {}).get(entry)
        if expected is None:
            wrong.append(f"{key} is unknown to the optimizer")
        elif tuple(value.shape) != expected:
            wrong.append(f"{key} is {tuple(value.shape)}, the optimizer's {expected}")
        else:
            parameter = parameters[name]
            state.setdefault(parameter, {})[entry] = _placed(optimizer, parameter, entry, value)
    for name, parameter in parameters.items():
        held = state.get(parameter)
        if held is not None and held.keys() != shapes[name].keys():
            missing = shapes[name].keys() - held.keys()
            wrong.append(f"{name} lacks {', '.join(sorted(missing))}")
    refuse(wrong, where=where, what="the optimizer")
    optimizer.state.clear()
    for parameter, held in state.items():
        optimizer.state[parameter] = held


def _placed(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, entry: str, value: Tensor
) -> Tensor:
    """A copy where the optimizer keeps it, in the memory layout its kernels walk."""
    if entry == _STEP:
        # Fused and capturable kernels and ours count on the device; the plain ones on the CPU.
        on_device = isinstance(optimizer, SkippableOptimizer) or bool(
            optimizer.defaults.get("fused") or optimizer.defaults.get("capturable")
        )
        return value.to(parameter.device if on_device else "cpu").clone()
    if value.shape == parameter.shape:
        return torch.empty_like(parameter, dtype=value.dtype).copy_(value)
    return value.to(parameter.device).clone()
