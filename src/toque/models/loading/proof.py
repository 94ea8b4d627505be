"""Proof that a model of any type computes here what it computes by itself, on its own weights.

What a model does with its attention, positions and logits cannot be read off its config, and a
mistake would be silent: numbers a little wrong. So two short texts are computed packed into one
row, and written token by token, and compared with transformers' own forward of each alone. Sliding
windows are three tokens wide meanwhile, so that they matter.
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
from toque.models.families import CAUSAL, family_of, unwrapped, vocabulary_rows, window_of
from toque.models.forward.loss import capped
from toque.models.forward.packed import hidden_states, logit_cap, output_head
from toque.models.forward.varlen_attention import attending_by, configs_of
from toque.models.generation.causal import CausalDecoding
from toque.models.generation.engine import evaluating
from toque.models.lora.frozen import PLAIN, computing, format_of

_LENGTHS: Final = (7, 5)
_WINDOW: Final = 3
_LARGEST: Final = {True: 1e-3, False: 2e-2}
"""Differences allowed, as shares of the largest logit, in float32 and in formats of fewer bits."""


def refuse_unproven(model: PreTrainedModel) -> None:
    """Refuse, with a ConfigError, a model of no family of its own that computes otherwise here."""
    core = unwrapped(model)
    if family_of(core.config) != CAUSAL:
        return
    try:
        with torch.no_grad(), evaluating(core), computing(core), _for_a_proof(core):
            wrong = _otherwise(core)
    except Exception as error:  # whatever a model that was not made for this raises
        words = " ".join(str(error).split())[:300]
        raise _unfit(core, f"its forward ends in {type(error).__name__}: {words}") from error
    if wrong:
        raise _unfit(core, wrong)


def _unfit(core: PreTrainedModel, why: str) -> ConfigError:
    return ConfigError(
        f"This {core.config.model_type} model cannot be trained here: {why}. Its attention, "
        "positions or output are of a kind that transformers' AttentionInterface does not carry. "
        "Take another model; docs/reference/models.md lists those that were tried."
    )


@contextmanager
def _for_a_proof(core: Any) -> Iterator[None]:
    """A context in which sliding windows are `_WINDOW` tokens wide, and the head is the base's."""
    head: Any = getattr(core, "lm_head", None)
    if hasattr(head, "token_adapter"):  # peft's, whose own forward leaves out the bias
        core.lm_head = head.original_module
    holders: list[Any] = [*core.modules(), *configs_of(core)] * (window_of(core.config) is not None)
    holders = [one for one in holders if isinstance(getattr(one, "sliding_window", None), int)]
    before = [one.sliding_window for one in holders]
    try:
        for one in holders:
            one.sliding_window = _WINDOW
        yield
    finally:
        if head is not None:
            core.lm_head = head
        for one, window in zip(holders, before, strict=True):
            one.sliding_window = window


def _otherwise(core: PreTrainedModel) -> str:
    """A sentence on what the model computes otherwise here; "" for nothing."""
    if "position_ids" not in inspect.signature(type(core.base_model).forward).parameters:
        return "it counts positions by itself, from the beginning of a row"
    if not hasattr(core, "lm_head"):
        return "its output head is no plain linear layer called lm_head"
    drawn, rows = torch.Generator().manual_seed(0), vocabulary_rows(core)
    texts = [torch.randint(rows, (1, n), generator=drawn).to(core.device) for n in _LENGTHS]
    with attending_by(configs_of(core), "eager"):  # the only one that knows caps
        alone = [core(input_ids=text, use_cache=False).logits[0].float() for text in texts]
        shorter = core(input_ids=texts[0][:, :-1], use_cache=False).logits[0].float()
    largest = _LARGEST[core.dtype == torch.float32 and format_of(core) == PLAIN]
    weight, bias = output_head(core)

    def off(hidden: Tensor, expected: Tensor) -> float:
        logits = capped(functional.linear(hidden.float(), weight.float(), bias), logit_cap(core))
        return _apart(logits, expected)

    if not _apart(shorter, alone[0][:-1]) <= largest:
        return "its tokens see later ones, so it cannot learn to write them"
    apart = off(hidden_states(core, _one_row(texts))[0], torch.cat(alone))
    if not apart <= largest:
        return f"two texts in one row get other logits than each alone ({apart:.1e} of the largest)"
    decoding = CausalDecoding(core, rows=2, columns=max(_LENGTHS) + 1, pad_id=0)
    decoding.admit([text[0, :-2].tolist() for text in texts])
    for place in (-3, -2, -1):
        hidden = decoding.step(torch.stack([text[0, place] for text in texts]))
        apart = off(hidden, torch.stack([each[place] for each in alone]))
        if not apart <= largest:
            return f"token by token it gets other logits than at once ({apart:.1e} of the largest)"
    return ""


def _apart(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-30))


def _one_row(texts: list[Tensor]) -> DecoderBatch:
    tokens = torch.cat(texts, 1)
    numbers = torch.cat([torch.full_like(text, i) for i, text in enumerate(texts, start=1)], 1)
    places = [torch.arange(text.shape[1], device=text.device) for text in texts]
    ids = (tuple(range(len(texts))),)
    return DecoderBatch(tokens, ids, tokens, numbers.int(), torch.cat(places)[None])
