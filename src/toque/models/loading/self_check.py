"""Self-check of models of any type: Toque's forward against transformers', on the model's weights.

A config does not show everything that a model does with attention, positions and logits, and a
mistake would be silent: slightly wrong numbers. The check computes two short texts packed in one
row, and token by token, and compares them with transformers' forward of each text alone. Sliding
windows are three tokens wide in the check, so that they have an effect.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from toque.batch import DecoderBatch
from toque.errors import ConfigError
from toque.models.config_values import window_of
from toque.models.families import CAUSAL, family_of, unwrapped, vocabulary_rows
from toque.models.forward.loss import capped
from toque.models.forward.packed import hidden_states, logit_cap, output_head
from toque.models.forward.varlen_attention import attending_by, configs_of
from toque.models.generation.causal import CausalDecoding
from toque.models.generation.engine import evaluating
from toque.models.lora.frozen import PLAIN, computing, format_of

_LENGTHS: Final = (7, 5)
_WINDOW: Final = 3
_LARGEST: Final = {True: 1e-3, False: 2e-2}
"""Largest difference, as a share of the largest logit, in float32 (True) and in fewer bits."""


def refuse_wrong_forward(model: PreTrainedModel) -> None:
    """Raise a ConfigError for a model of the family `CAUSAL` with a different forward here."""
    core = unwrapped(model)
    if family_of(core.config) != CAUSAL:
        return
    try:
        with torch.no_grad(), evaluating(core), computing(core), _narrow_windows(core):
            problem = _difference(core)
    except (
        Exception
    ) as error:  # a model may raise anything if its forward gets our arguments
        message = " ".join(str(error).split())[:300]
        raise _unsuitable(
            core, f"its forward raises {type(error).__name__}: {message}"
        ) from error
    if problem:
        raise _unsuitable(core, problem)


def _unsuitable(core: PreTrainedModel, problem: str) -> ConfigError:
    return ConfigError(
        f"Toque cannot train this {core.config.model_type} model: {problem}. Its attention, "
        "positions or output do not work with transformers' AttentionInterface. Use another model. "
        "docs/reference/models.md lists tested ones."
    )


@contextmanager
def _narrow_windows(core: Any) -> Iterator[None]:
    """Context in which sliding windows are `_WINDOW` tokens wide, and the head is not wrapped."""
    head: Any = getattr(core, "lm_head", None)
    if hasattr(head, "token_adapter"):  # peft's wrapper ignores the bias
        core.lm_head = head.original_module
    holders: list[Any] = []
    if window_of(core.config) is not None:
        holders = [*core.modules(), *configs_of(core)]
    holders = [
        each
        for each in holders
        if isinstance(getattr(each, "sliding_window", None), int)
    ]
    windows = [holder.sliding_window for holder in holders]
    try:
        for holder in holders:
            holder.sliding_window = _WINDOW
        yield
    finally:
        if head is not None:
            core.lm_head = head
        for holder, window in zip(holders, windows, strict=True):
            holder.sliding_window = window


def _difference(core: PreTrainedModel) -> str:
    """Describe a difference between Toque's forward and transformers'; "" without one."""
    if (
        "position_ids"
        not in inspect.signature(type(core.base_model).forward).parameters
    ):
        return "it counts positions from the beginning of a row"
    if not hasattr(core, "lm_head"):
        return "it has no plain linear output head with the name lm_head"

    random = torch.Generator().manual_seed(0)
    n_rows = vocabulary_rows(core)
    texts = [
        torch.randint(n_rows, (1, n), generator=random).to(core.device)
        for n in _LENGTHS
    ]
    with attending_by(configs_of(core), "eager"):  # only this attention applies caps
        alone = [
            core(input_ids=text, use_cache=False).logits[0].float() for text in texts
        ]
        shorter = core(input_ids=texts[0][:, :-1], use_cache=False).logits[0].float()
    largest = _LARGEST[core.dtype == torch.float32 and format_of(core) == PLAIN]
    weight, bias = output_head(core)

    def error_of(hidden: Tensor, expected: Tensor) -> float:
        logits = functional.linear(hidden.float(), weight.float(), bias)
        return relative_error(capped(logits, logit_cap(core)), expected)

    # `not <=` also finds NaN.
    if not relative_error(shorter, alone[0][:-1]) <= largest:
        return "its tokens attend to later tokens, so it cannot generate text"
    error = error_of(hidden_states(core, _one_row(texts))[0], torch.cat(alone))
    if not error <= largest:
        return (
            f"two texts packed in one row get other logits ({error:.1e} of the largest)"
        )

    decoding = CausalDecoding(core, rows=2, columns=max(_LENGTHS) + 1, pad_id=0)
    decoding.admit([text[0, :-2].tolist() for text in texts])
    for position in (-3, -2, -1):
        hidden = decoding.step(torch.stack([text[0, position] for text in texts]))
        error = error_of(hidden, torch.stack([logits[position] for logits in alone]))
        if not error <= largest:
            return f"token by token it gets other logits ({error:.1e} of the largest)"
    return ""


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference as a share of the largest value of `theirs`."""
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-30))


def _one_row(texts: list[Tensor]) -> DecoderBatch:
    tokens = torch.cat(texts, 1)
    numbers = torch.cat(
        [torch.full_like(text, i) for i, text in enumerate(texts, start=1)], 1
    )
    positions = [torch.arange(text.shape[1], device=text.device) for text in texts]
    ids = (tuple(range(len(texts))),)
    return DecoderBatch(tokens, ids, tokens, numbers.int(), torch.cat(positions)[None])
