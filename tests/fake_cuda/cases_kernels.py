"""What the tests of FlexAttention's blocks run in the process with the fake card."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.attention.flex_attention import flex_attention

from fake_cuda import card as fake
from fake_cuda.cases import small_model
from tiny import examples, pack
from toque.models.forward import flex_attention as ours
from toque.models.forward.attention import AttentionChoice, attention_of, use_attention
from toque.models.forward.flex_attention import kernels_on
from toque.models.forward.loss import loss_sum
from toque.workflows.diagnosis.machine_checks import attention_on

CUDA = torch.device("cuda")


def too_large(kernel: str) -> RuntimeError:
    """As torch's loader of kernels says it, and Inductor around it."""
    return RuntimeError(
        "RuntimeError: No valid triton configs. OutOfMemoryError: out of resource: "
        f"triton_tem_fused_{kernel}_0 Required: 246784 Hardware limit:232448 "
        "Reducing block sizes or `num_stages` may help."
    )


def tried(found: Sequence[Exception | float]) -> tuple[Any, str, list[Any]]:
    """Options, words and all options tried, where the n-th try fails or is off by a number."""
    asked: list[Any] = []

    def distance(_device: Any, _dtype: Any, _size: int, by: Any, **_: Any) -> float:
        asked.append(by)
        one = [*found, 0.0][min(len(asked) - 1, len(found))]
        if isinstance(one, Exception):
            raise one
        return one

    kernels_on.cache_clear()
    with fake.fake_card(), patch.object(ours, "_largest_error", distance):
        chosen = kernels_on(CUDA, torch.bfloat16, 64, biased=True)
    kernels_on.cache_clear()
    return chosen.options, str(chosen), asked


def blocks(options: Mapping[str, int] | None) -> tuple[Any, ...]:
    """Queries and keys of forward's blocks and of backward's; None for torch's own."""
    of = options or {}
    return tuple(of.get(f"BLOCK_{name}") for name in ("M", "N", "M1", "N1", "M2", "N2"))


def _biased_are_small(*_: Any, biased: bool, **__: Any) -> ours.KernelChoice:
    if biased:
        return ours.KernelChoice({**ours._TORCH_BLOCKS, **ours._FORWARD[1]}, "reasons")
    return ours.KernelChoice(ours._TORCH_BLOCKS)


def made_by(
    family: str, *, dropout: float
) -> tuple[AttentionChoice, set[tuple[str, bool]]]:
    """What is chosen for a model, and whether kernels made by some blocks had a bias."""
    seen = set()

    def kernel(*inputs: Any, kernel_options: Any, **how: Any) -> Any:
        with_bias = any(t.dim() == 4 for t in fake._tensors_in(how["score_mod"]))
        seen.add((str(kernel_options.get("BLOCK_M", "torch's")), with_bias))
        return fake._flex(*inputs, **how)

    def compiled(function: Any) -> Any:
        return kernel if function is flex_attention else fake._compiled(function)

    model = small_model(family)
    batch = pack(family, [examples(9)[:5], examples(9)[5:]])
    with (
        fake.fake_card(),
        patch.object(ours, "kernels_on", _biased_are_small),
        patch.object(ours, "_compiled", compiled),
    ):
        fake.to_card(model)
        use_attention(model, "auto")
        model.train(dropout > 0)
        loss_sum(model, batch.to(CUDA)).backward()
        return attention_of(model, CUDA), seen


def choice_where(fails: str) -> AttentionChoice:
    """What is chosen for a T5 where kernels with or without a bias fail."""

    def kernels(*_: Any, biased: bool, **__: Any) -> ours.KernelChoice:
        failing = biased == (fails == "biased")
        return ours.KernelChoice(None, "no luck") if failing else ours.KernelChoice({})

    model = small_model("t5")
    with fake.fake_card(), patch.object(ours, "kernels_on", kernels):
        return attention_of(fake.to_card(model), CUDA)


def checked() -> tuple[str, str]:
    """What `toque doctor` says of attention on the card, where a bias needs small blocks."""
    with fake.fake_card(), patch.object(ours, "kernels_on", _biased_are_small):
        check = attention_on(CUDA)
    return check.state, check.found
