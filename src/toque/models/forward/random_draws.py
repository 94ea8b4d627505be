"""Random draws of a model that no key decides, found by the state of PyTorch's generators.

Keyed dropout (`keyed_dropout.py`) draws nothing from a generator. A model that moves one, such as
one with LayerDrop (Fan et al. 2019), has losses that depend on how rows are grouped.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from toque.errors import ConfigError
from toque.models.families import unwrapped
from toque.models.forward.blocks import is_compiled
from toque.models.forward.keyed_dropout import drop_rates, masks_of


@contextmanager
def refuse_unkeyed_draws(model: nn.Module, device: torch.device) -> Iterator[None]:
    """A context for a training forward of a model with keyed dropout; nothing for other models.

    Raises:
        ConfigError: the forward drew a random number from PyTorch's generator of the CPU or of
            `device`. The message names the innermost module that did, unless it is compiled.
    """
    core = unwrapped(model)
    if masks_of(core) is None:
        yield
        return
    watch = _Watch(device)
    # A hook would make the compiler begin again. Without one the place is not known.
    named = [] if is_compiled(core) else list(core.named_modules())
    handles: list[Any] = []
    for path, module in named:
        handles.append(module.register_forward_pre_hook(watch.enter))
        handles.append(module.register_forward_hook(partial(watch.leave, path)))
    before = watch.states()
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    if not _equal(watch.states(), before):
        raise ConfigError(
            f"{watch.place or 'The model'} draws random numbers of its own while it trains"
            f"{watch.settings}. They depend on train.micro_batch_rows and on the number of ranks, "
            "which must not change a run. Turn them off (in the model's config.json such a setting "
            "is 0), or accept that with train.optimisations.dropout=false."
        )


class _Watch:
    """The innermost module that moves a generator."""

    def __init__(self, device: torch.device) -> None:
        self.place = ""
        self.settings = ""
        self._device = device
        self._entered: list[list[Tensor]] = []

    def states(self) -> list[Tensor]:
        """States of the generators that a forward may draw from."""
        states = [torch.get_rng_state()]
        if self._device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self._device))
        return states

    def enter(self, *_: Any) -> None:
        """Note the states at which a module begins."""
        self._entered.append(self.states())

    def leave(self, path: str, module: nn.Module, *_: Any) -> None:
        """Name a module that moved a generator, if none of its parts did."""
        before = self._entered.pop()
        if self.place or _equal(self.states(), before):
            return
        self.place = f"{path or 'The model'} ({type(module).__name__})"
        rates = [f"{name}={rate:g}" for name, rate in drop_rates(module).items() if name != "p"]
        self.settings = f" (it has {', '.join(rates)})" if rates else ""


def _equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))
