"""Self-check of models of any type: Toque's forward against transformers', on the model's weights.

A config does not show everything that a model does with attention, positions and logits, and a
difference would be silent: slightly wrong numbers. The check computes two short texts packed in one
row, and token by token. It compares the logits with transformers' forward of each text alone.
Sliding windows are three tokens wide in the check, so that they have an effect.
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

_LENGTHS: Final = (7, 5)  # numbers of tokens in the two texts
_WINDOW: Final = 3
# Largest difference, as a fraction of the largest logit.
_FLOAT32_TOLERANCE: Final = 1e-3
_LOW_PRECISION_TOLERANCE: Final = 2e-2


def refuse_wrong_forward(model: PreTrainedModel) -> None:
    """Raise a ConfigError if Toque's forward of a `CAUSAL` model differs from transformers'."""
    core = unwrapped(model)
    if family_of(core.config) != CAUSAL:
        return
    try:
        with torch.no_grad(), evaluating(core), computing(core), _narrow_windows(core):
            problem = _find_difference(core)
    except Exception as error:  # a forward may raise anything for Toque's arguments
        message = " ".join(str(error).split())[:300]
        reason = f"its forward raises {type(error).__name__}: {message}"
        raise _unsuitable(core, reason) from error
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
    candidates: list[Any] = []
    if window_of(core.config) is not None:
        candidates = [*core.modules(), *configs_of(core)]
    windows = [
        (holder, holder.sliding_window)
        for holder in candidates
        if isinstance(getattr(holder, "sliding_window", None), int)
    ]
    try:
        for holder, _ in windows:
            holder.sliding_window = _WINDOW
        yield
    finally:
        if head is not None:
            core.lm_head = head
        for holder, window in windows:
            holder.sliding_window = window


def _find_difference(core: PreTrainedModel) -> str:
    """Describe a difference between Toque's forward and transformers'; "" if they agree."""
    forward = inspect.signature(type(core.base_model).forward)
    if "position_ids" not in forward.parameters:
        return "it counts positions from the beginning of a row"
    if not hasattr(core, "lm_head"):
        return "it has no plain linear output head with the name lm_head"

    generator = torch.Generator().manual_seed(0)
    vocab_size = vocabulary_rows(core)
    texts = [
        torch.randint(vocab_size, (1, n), generator=generator).to(core.device)
        for n in _LENGTHS
    ]
    with attending_by(configs_of(core), "eager"):  # only this attention applies caps
        expected = [_transformers_logits(core, text) for text in texts]
        shorter = _transformers_logits(core, texts[0][:, :-1])

    # `not <=` also finds NaN.
    tolerance = _tolerance(core)
    if not relative_error(shorter, expected[0][:-1]) <= tolerance:
        return "its tokens attend to later tokens, so it cannot generate text"
    hidden = hidden_states(core, _pack_in_row(texts))[0]
    error = relative_error(_logits(core, hidden), torch.cat(expected))
    if not error <= tolerance:
        return (
            f"two texts packed in one row get other logits ({error:.1e} of the largest)"
        )
    error = _decoding_error(core, texts, expected)
    if not error <= tolerance:
        return f"token by token it gets other logits ({error:.1e} of the largest)"
    return ""


def _tolerance(core: PreTrainedModel) -> float:
    is_float32 = core.dtype == torch.float32 and format_of(core) == PLAIN
    return _FLOAT32_TOLERANCE if is_float32 else _LOW_PRECISION_TOLERANCE


def _transformers_logits(core: PreTrainedModel, text: Tensor) -> Tensor:
    """Compute float32 logits [T, V] of a text [1, T] with transformers' forward."""
    logits: Tensor = core(input_ids=text, use_cache=False).logits
    return logits[0].float()


def _logits(core: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Compute float32 logits [T, V] of hidden states [T, D]."""
    weight, bias = output_head(core)
    logits = functional.linear(hidden.float(), weight.float(), bias)
    return capped(logits, logit_cap(core))


def _decoding_error(
    core: PreTrainedModel, texts: list[Tensor], expected: list[Tensor]
) -> float:
    """Decode the last three tokens of each text. Return the largest relative error in a step."""
    decoding = CausalDecoding(core, rows=2, columns=max(_LENGTHS) + 1, pad_id=0)
    decoding.admit([text[0, :-2].tolist() for text in texts])
    errors = []
    for position in (-3, -2, -1):
        hidden = decoding.step(torch.stack([text[0, position] for text in texts]))
        logits = torch.stack([each[position] for each in expected])
        errors.append(relative_error(_logits(core, hidden), logits))
    # The maximum of a tensor is NaN if an error is NaN.
    return float(torch.tensor(errors, dtype=torch.float64).max())


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference as a fraction of the largest value of `theirs`."""
    largest = theirs.abs().max().clamp_min(1e-30)  # not zero
    return float((ours - theirs).abs().max() / largest)


def _pack_in_row(texts: list[Tensor]) -> DecoderBatch:
    """Pack texts [1, T] in one row."""
    tokens = torch.cat(texts, 1)
    segments = [torch.full_like(text, i) for i, text in enumerate(texts, start=1)]
    positions = [torch.arange(text.shape[1], device=text.device) for text in texts]
    return DecoderBatch(
        labels=tokens,
        example_ids=(tuple(range(len(texts))),),
        tokens=tokens,
        segments=torch.cat(segments, 1).int(),
        positions=torch.cat(positions)[None],
    )
