"""Runtime: device, precision, loss scaling, seeds and the optimizer step.

The only object of the loop that asks about hardware. Randomness is a function of (seed, step):
nothing about it is saved, and evaluating, logging or resuming between two steps cannot change the
next one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Self

import torch
from torch import Tensor

from toque.config.schema import TrainConfig
from toque.errors import ConfigError
from toque.hardware.devices import device_named
from toque.hardware.memory import held_by_others
from toque.hardware.short_waits import shorten_waits_when_busy
from toque.keyed_random import key_of
from toque.models.families import DTYPES, Family
from toque.models.forward.keyed_dropout import UPDATE
from toque.models.glibc_malloc import keep_freed_memory
from toque.models.onednn import (
    EMULATED_BF16,
    has_fast_bf16,
    keep_fewer_kernels,
    onednn_is_faster,
)
from toque.training.distributed.collectives import Ranks
from toque.training.distributed.data_parallel import full_tensor
from toque.training.optim.factory import step_if
from toque.training.phases import Phases
from toque.training.state_values import number_in

Precision = Literal["bf16", "fp16", "float32"]
PrecisionChoice = Literal["auto", "bf16", "fp16", "float32"]
_LEAST_SCALE: Final = 2.0**-10
"""A float16 loss scale below this means every step overflows, not that the scale is too high."""


@dataclass
class Runtime:
    """Device, precision, seeds and the optimizer step. Make one with `Runtime.detect`."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    precision: Precision = "float32"
    deterministic: bool = True
    ranks: Ranks = field(default_factory=Ranks)  # the processes that share every update
    warnings: tuple[str, ...] = ()  # sentences for the user about the choices made
    scaler: torch.amp.GradScaler | None = None
    phases: Phases = field(default_factory=Phases)
    """Told of backward, clip and update as they happen."""

    @classmethod
    def detect(
        cls,
        *,
        device: str = "auto",
        precision: PrecisionChoice = "auto",
        deterministic: bool = True,
        fp16_is_safe: bool = True,
        ranks: Ranks | None = None,
    ) -> Self:
        """Choose device ("auto", "cpu", "cuda", "cuda:N") and precision, and set torch accordingly.

        The precision "auto" takes bf16 where the machine computes it fast, else fp16 on CUDA when
        the model can bear it, else float32. T5 cannot: its activations overflow float16.
        Deterministic is the same bits from the same run; slower on CUDA.

        Raises:
            ConfigError: the device is absent, or the precision cannot work on it.
        """
        if ranks is None:
            ranks, world_size = Ranks(), os.environ.get("WORLD_SIZE", "1")
            if world_size != "1":
                raise ConfigError(
                    f"WORLD_SIZE is {world_size}, and only `toque train` shares its work between "
                    "processes; this would do the same work in each. Start it without torchrun, or "
                    "unset WORLD_SIZE."
                )
        own = ranks.local_rank if ranks.is_distributed else None
        chosen = device_named(device, local_rank=own)
        kind, warnings = precision_on(precision, chosen, fp16_is_safe=fp16_is_safe)
        if taken := held_by_others(chosen):
            warnings.append(f"on {chosen} {taken}; rows at once go by what they leave")
        set_deterministic(deterministic)
        if chosen.type == "cpu":
            shorten_waits_when_busy()
            keep_fewer_kernels()
            if not ranks.is_distributed:  # of several, the strategy says
                keep_freed_memory()
        scaler = torch.amp.GradScaler(chosen.type) if kind == "fp16" else None
        return cls(chosen, kind, deterministic, ranks, warnings=tuple(warnings), scaler=scaler)

    @classmethod
    def from_settings(cls, train: TrainConfig, family: Family, ranks: Ranks | None = None) -> Self:
        """The device and precision that the settings choose for a family; raises as `detect`."""
        return cls.detect(
            precision=train.precision,
            deterministic=train.deterministic,
            fp16_is_safe=family.fp16_is_safe,
            ranks=ranks,
        )

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of matrix products."""
        return DTYPES[self.precision]

    @property
    def numerics(self) -> dict[str, str]:
        """Facts of how products are computed that a checkpoint records, besides software versions.

        The number rises whenever our own operators for bf16 on a CPU compute other last bits.
        """
        if self.device.type != "cpu":
            return {}
        if self.precision == "bf16":
            return {"bf16 on a CPU": "6"}
        return {"float32 on a CPU": "oneDNN"} if onednn_is_faster() else {}

    def autocast(self) -> AbstractContextManager[Any]:
        """The context in which the forward pass runs."""
        if self.precision == "float32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def seed(self, seed: int, step: int) -> None:
        """Make every random number of update `step` a function of (seed, step, rank).

        Those of dropout are functions of (seed, step), example and place (`keyed_dropout.py`).
        """
        UPDATE.set(key_of(seed, step))
        torch.manual_seed(key_of(seed, step, self.ranks.rank))

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of `loss` to the parameters' gradients."""
        scaled = loss if self.scaler is None else self.scaler.scale(loss)
        with self.phases("backward"):
            torch.autograd.backward(scaled)

    def clip_gradients(
        self, optimizer: torch.optim.Optimizer, max_grad_norm: float | None
    ) -> Tensor:
        """Scale the gradients down where they are longer than `max_grad_norm` (None or 0: never).

        Returns:
            [] length of the whole gradient before clipping, perhaps not finite.
        """
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)
        with self.phases("clip"):
            gradients = [p.grad for p in _parameters(optimizer) if p.grad is not None]
            norm = full_tensor(torch.nn.utils.get_total_norm(gradients))
            if max_grad_norm:
                torch.nn.utils.clip_grads_with_norm_(_parameters(optimizer), max_grad_norm, norm)
        return norm

    def optimizer_step(
        self, optimizer: torch.optim.Optimizer, *, lr: float, only_if: Tensor
    ) -> None:
        """Update the weights at the rate `lr`, and clear the gradients.

        Where `only_if` ([] bool) is False, weights and optimizer state stay as they are.
        """
        for group in optimizer.param_groups:
            group["lr"] = lr
        with self.phases("update"):
            step_if(optimizer, only_if, self.device)
        # Fused optimizers change weights without counting, and copies of weights go by the count.
        torch.autograd.graph.increment_version(list(_parameters(optimizer)))
        if self.scaler is not None:
            self.scaler.update()  # halves the scale when unscaling met an infinity
        optimizer.zero_grad(set_to_none=True)

    @property
    def scale_is_hopeless(self) -> bool:
        """True if float16 overflows at any loss scale; waits for the device."""
        return self.scaler is not None and self.scaler.get_scale() < _LEAST_SCALE

    def state_dict(self) -> dict[str, Any]:
        """JSON that a restart cannot recompute: the float16 loss scale."""
        return {"scaler": self.scaler.state_dict() if self.scaler is not None else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`'s result."""
        held = state["scaler"]
        if self.scaler is None or held is None:
            return
        own = self.scaler.state_dict()
        for name in own:
            number_in(held, name, least=0.0 if name == "_growth_tracker" else 2.0**-126)
        self.scaler.load_state_dict({name: held[name] for name in own})


def set_deterministic(on: bool) -> None:  # noqa: FBT001 - the name is the argument
    """Ask torch for the same bits from the same program."""
    torch.use_deterministic_algorithms(on)
    # Filling every new tensor would hide reads of uninitialised memory; we have none, and it costs.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = not on


@contextmanager
def torch_as_before() -> Iterator[None]:
    """Torch's settings and random numbers are again as they were when the block ends.

    For what is called from a program, which goes on afterwards.
    """
    seed, cpu, cuda = torch.initial_seed(), torch.get_rng_state(), None
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        cuda = torch.cuda.get_rng_state_all()
    mode, benchmark = torch.get_deterministic_debug_mode(), torch.backends.cudnn.benchmark
    of_new = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        torch.backends.cudnn.benchmark = benchmark
        torch.utils.deterministic.fill_uninitialized_memory = of_new  # type: ignore[attr-defined]
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
        elif torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            # By the block; the program's seed had waited for it.
            torch.cuda.manual_seed_all(seed)
        torch.set_rng_state(cpu)


def _parameters(optimizer: torch.optim.Optimizer) -> Iterable[torch.nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def precision_on(
    asked: str, device: torch.device, *, fp16_is_safe: bool
) -> tuple[Precision, list[str]]:
    """The precision that is meant on a device, and sentences about it; raises as `detect`."""
    if asked == "fp16" and not fp16_is_safe:
        raise ConfigError(
            "precision fp16 was asked for T5, whose activations overflow float16 and turn the loss "
            "into NaN, or for a type of model that was not tried in it. Use bf16 or float32."
        )
    if asked == "fp16" and device.type != "cuda":
        raise ConfigError(
            f"precision fp16 needs CUDA, the device is {device}. Use bf16 or float32."
        )
    if asked == "auto":
        on_gpu = "fp16" if device.type == "cuda" and fp16_is_safe else "float32"
        asked = "bf16" if has_fast_bf16(device) else on_gpu
    if asked == "bf16" and not has_fast_bf16(device):
        return "bf16", [EMULATED_BF16.format(device=device.type)]
    return asked, []  # type: ignore[return-value]  # checked against the choices above
