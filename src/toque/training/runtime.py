"""Runtime: device, precision, loss scaling, seeds and the optimizer step.

It is the only object of the training loop that depends on hardware. Random numbers are a function
of (seed, step). They are not saved, and an evaluation or resume cannot change the next update.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Self

import torch
from torch import Tensor

from toque.config.schema import TrainConfig
from toque.errors import ConfigError
from toque.hardware.devices import device_named
from toque.hardware.glibc_malloc import keep_freed_memory
from toque.hardware.memory import describe_other_use
from toque.hardware.onednn import (
    EMULATED_BF16,
    has_fast_bf16,
    keep_fewer_kernels,
    onednn_is_faster,
)
from toque.hardware.short_waits import shorten_waits_when_busy
from toque.keyed_random import key_of
from toque.models.families import DTYPES, Family
from toque.models.forward.keyed_dropout import UPDATE
from toque.training.distributed.collectives import Ranks
from toque.training.distributed.data_parallel import full_tensor
from toque.training.optim.factory import step_if
from toque.training.phases import Phases
from toque.training.state_values import number_in

Precision = Literal["bf16", "fp16", "float32"]
PrecisionChoice = Literal["auto", "bf16", "fp16", "float32"]
_MIN_SCALE: Final = 2.0**-10
"""Smallest useful loss scale of float16. If updates overflow below it, the model is the cause."""


@dataclass
class Runtime:
    """Device, precision, seeds and the optimizer step. Build it with `Runtime.detect`."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    precision: Precision = "float32"
    deterministic: bool = True
    ranks: Ranks = field(default_factory=Ranks)  # processes that share every update
    warnings: tuple[str, ...] = ()  # warnings for the user about device and precision
    scaler: torch.amp.GradScaler | None = None
    phases: Phases = field(default_factory=Phases)
    """Observers of the phases backward, clip and update."""

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
        """Choose the device and the precision, and configure torch accordingly.

        Args:
            device: "auto", "cpu", "cuda" or "cuda:N".
            precision: Precision of the matmuls. "auto" is bf16 if it is fast on this machine.
                Otherwise it is fp16 on CUDA if the model allows it, or float32.
            deterministic: Whether repeated runs are bitwise identical. This is slower on CUDA.
            fp16_is_safe: Whether the model works in fp16. The activations of T5 overflow.
            ranks: Processes of the run. None means a single process.

        Raises:
            ConfigError: The device is missing, or the precision does not work on it.
        """
        if ranks is None:
            _refuse_several_processes()
            ranks = Ranks()
        local_rank = ranks.local_rank if ranks.is_distributed else None
        torch_device = device_named(device, local_rank=local_rank)
        chosen, warnings = choose_precision(
            precision, torch_device, fp16_is_safe=fp16_is_safe
        )
        if other_use := describe_other_use(torch_device):
            warnings.append(
                f"on {torch_device} {other_use}. The micro-batch must fit into the rest"
            )

        set_deterministic(deterministic)
        if torch_device.type == "cpu":
            _configure_cpu(ranks)
        scaler = torch.amp.GradScaler(torch_device.type) if chosen == "fp16" else None
        return cls(
            torch_device,
            chosen,
            deterministic,
            ranks,
            warnings=tuple(warnings),
            scaler=scaler,
        )

    @classmethod
    def from_settings(
        cls, train: TrainConfig, family: Family, ranks: Ranks | None = None
    ) -> Self:
        """Build the runtime from the settings `train`. Raises the same errors as `detect`."""
        return cls.detect(
            precision=train.precision,
            deterministic=train.deterministic,
            fp16_is_safe=family.fp16_is_safe,
            ranks=ranks,
        )

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the matmuls."""
        return DTYPES[self.precision]

    @property
    def numerics(self) -> dict[str, str]:
        """Matmul implementations that checkpoints record in addition to software versions."""
        if self.device.type != "cpu":
            return {}
        if self.precision == "bf16":
            # Increase this number if a change to Toque's bf16 operators affects the last bits.
            return {"bf16 on a CPU": "6"}
        return {"float32 on a CPU": "oneDNN"} if onednn_is_faster() else {}

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context in which the forward pass uses the precision of the run."""
        if self.precision == "float32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def seed(self, seed: int, step: int) -> None:
        """Seed torch for update `step`: its random numbers are a function of (seed, step, rank).

        Keyed dropout depends on (seed, step), example and position instead.
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
        """Scale the gradients down if their norm exceeds `max_grad_norm`. None and 0 mean never.

        Returns:
            The norm of all gradients before clipping, []. It may be NaN or infinite.
        """
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)
        with self.phases("clip"):
            gradients = [p.grad for p in _parameters(optimizer) if p.grad is not None]
            norm = full_tensor(torch.nn.utils.get_total_norm(gradients))
            if max_grad_norm:
                torch.nn.utils.clip_grads_with_norm_(
                    _parameters(optimizer), max_grad_norm, norm
                )
        return norm

    def optimizer_step(
        self, optimizer: torch.optim.Optimizer, *, lr: float, only_if: Tensor, step: int
    ) -> None:
        """Make update `step` with the learning rate `lr`, and clear the gradients.

        If `only_if` ([] bool) is False, weights and optimizer state do not change.
        """
        for group in optimizer.param_groups:
            group["lr"] = lr
        with self.phases("update"):
            step_if(optimizer, only_if, self.device, step=step)
        # Fused optimizers do not increment the version counters of the weights. Cached copies of
        # the weights compare these counters.
        torch.autograd.graph.increment_version(_parameters(optimizer))
        if self.scaler is not None:
            self.scaler.update()  # halves the scale if unscaling met an infinity
        optimizer.zero_grad(set_to_none=True)

    @property
    def scale_is_hopeless(self) -> bool:
        """True if float16 overflows at every loss scale. Reading it waits for the device."""
        return self.scaler is not None and self.scaler.get_scale() < _MIN_SCALE

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a restart cannot recompute: the loss scale of float16."""
        return {"scaler": self.scaler.state_dict() if self.scaler is not None else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        saved = state["scaler"]
        if self.scaler is None or saved is None:
            return
        names = self.scaler.state_dict().keys()
        smallest_positive = torch.finfo(torch.float32).tiny
        for name in names:
            # The tracker counts updates from 0. All other values are factors or intervals.
            least = 0.0 if name == "_growth_tracker" else smallest_positive
            number_in(saved, name, least=least)
        self.scaler.load_state_dict({name: saved[name] for name in names})


def _refuse_several_processes() -> None:
    """Raise ConfigError if a launcher started several processes for a command that uses one."""
    world_size = os.environ.get("WORLD_SIZE", "1")
    if world_size != "1":
        raise ConfigError(
            f"WORLD_SIZE is {world_size}, but only `toque train` divides its work among "
            "processes. This command would repeat the work in each. Start it without "
            "torchrun, or unset WORLD_SIZE."
        )


def _configure_cpu(ranks: Ranks) -> None:
    """Configure thread waits, the cache of matmul kernels and the memory allocator."""
    shorten_waits_when_busy()
    keep_fewer_kernels()
    if not ranks.is_distributed:  # otherwise the model's strategy decides
        keep_freed_memory()


def set_deterministic(on: bool) -> None:  # noqa: FBT001 - the name is the argument
    """Turn torch's deterministic algorithms on or off."""
    torch.use_deterministic_algorithms(on)
    # In deterministic mode, torch fills every new tensor by default. This is slow and only hides
    # reads of uninitialised memory.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = not on


@contextmanager
def restoring_torch() -> Iterator[None]:
    """Restore torch's settings and random number generators at the end of the context.

    Functions of the Python interface must not change the torch of the program that calls them.
    """
    seed = torch.initial_seed()
    cpu_state = torch.get_rng_state()
    cuda_states = None
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        cuda_states = torch.cuda.get_rng_state_all()
    deterministic_mode = torch.get_deterministic_debug_mode()
    benchmark = torch.backends.cudnn.benchmark
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(deterministic_mode)
        torch.backends.cudnn.benchmark = benchmark
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
        if cuda_states is not None:
            torch.cuda.set_rng_state_all(cuda_states)
        elif torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            # CUDA was initialised inside the context, so an earlier state does not exist.
            # Without the context, CUDA would have started with the program's seed.
            torch.cuda.manual_seed_all(seed)
        torch.set_rng_state(cpu_state)


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def choose_precision(
    requested: PrecisionChoice, device: torch.device, *, fp16_is_safe: bool
) -> tuple[Precision, list[str]]:
    """Choose the precision for a device, and return it with warnings.

    Raises the same errors as `detect`.
    """
    if requested == "fp16" and not fp16_is_safe:
        raise ConfigError(
            "train.precision is fp16, but the activations of T5 overflow float16, and other types "
            "of models may be untested with it. Use bf16 or float32."
        )
    if requested == "fp16" and device.type != "cuda":
        raise ConfigError(
            f"precision fp16 needs CUDA, but the device is {device}. Use float32."
        )
    if requested == "auto":
        if has_fast_bf16(device):
            return "bf16", []
        can_use_fp16 = device.type == "cuda" and fp16_is_safe
        return "fp16" if can_use_fp16 else "float32", []
    if requested == "bf16" and not has_fast_bf16(device):
        return "bf16", [EMULATED_BF16.format(device=device.type)]
    return requested, []
