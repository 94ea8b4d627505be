"""Time of an update's generated texts: measured on this machine with random weights, or guessed."""

from __future__ import annotations

import copy
import time
from dataclasses import replace
from functools import partial
from typing import Final

from transformers import PreTrainedModel

from toque.models.families import family_of, unwrapped
from toque.models.flops import parameter_counts
from toque.models.generation.engine import MAX_ROWS, generate
from toque.models.generation.options import GenerationOptions, Precision
from toque.models.loading.from_scratch import construct
from toque.runs.estimate import Estimator
from toque.runs.estimate_parts import Machine, Memory, Time
from toque.runs.generated_texts import GeneratedTexts
from toque.runs.typical_speeds import GENERATION_SHARE
from toque.training.micro_batch import shortest_time

_FEW_TOKENS: Final = 2
_MORE_TOKENS: Final = 18
"""Lengths of the texts in the two measurements that are compared."""
_MAX_PARAMETERS: Final = 1_000_000_000
"""Parameters above which no model is built for a measurement."""


def add_generation(
    plan_time: Time, estimator: Estimator, model: PreTrainedModel, memory: Memory
) -> Time:
    """Add the time to generate the texts of each update.

    The call may generate texts, so make it outside `outlining`.

    Args:
        plan_time: Time of the updates without their texts, unless it was measured in a run.
        estimator: Estimator of all ranks.
        model: The outlined model.
        memory: The estimated memory.
    """
    work, machine = estimator.work, estimator.machine
    texts = work.texts
    if texts is None or plan_time.measured:
        return plan_time
    is_small = parameter_counts(model).total < _MAX_PARAMETERS
    if machine.card is None and memory.fits and is_small:
        rank_texts = texts.of_rank(estimator.ranks)
        rate = estimator.ranks * _measure_rate(model, rank_texts, machine)
        how = "measured just now with random weights"
    else:
        rate = GENERATION_SHARE * work.tokens_per_update / plan_time.update_seconds
        how = f"a guess: {GENERATION_SHARE:.0%} of the speed of the update"

    seconds = texts.tokens / rate
    run_seconds = plan_time.run_seconds
    steps = work.totals.get("steps")
    if run_seconds is not None and steps is not None and work.seconds is None:
        run_seconds += steps * seconds
    return replace(
        plan_time,
        update_seconds=plan_time.update_seconds + seconds,
        run_seconds=run_seconds,
        generation_seconds=seconds,
        generation_how=how,
    )


def _measure_rate(
    model: PreTrainedModel, texts: GeneratedTexts, machine: Machine
) -> float:
    """Generate texts with random weights. Return the tokens per second of the texts of an update.

    Only the shape of `model` is used.
    """
    config = copy.deepcopy(unwrapped(model).config)
    real_model = construct(family_of(config), config)
    real_model.to(machine.where)  # type: ignore[arg-type]  # transformers annotates it away
    n_texts = min(texts.n_texts, MAX_ROWS[machine.where])
    prompt = [0 for _ in range(max(1, round(texts.mean_prompt)))]
    precision: Precision = "bf16" if machine.precision == "bf16" else "float32"

    def time_texts(n_tokens: int) -> float:
        options = GenerationOptions(
            max_new_tokens=n_tokens, temperature=1.0, precision=precision
        )
        began = time.perf_counter()
        generate(
            real_model,
            [prompt for _ in range(n_texts)],
            options,
            eos_id=(),
            pad_id=0,
            on_logprob=lambda *_: None,
        )
        return time.perf_counter() - began

    few = shortest_time(partial(time_texts, _FEW_TOKENS))
    more = shortest_time(partial(time_texts, _MORE_TOKENS), at_least=1)
    per_token = (more - few) / (_MORE_TOKENS - _FEW_TOKENS)
    if more <= few:  # a disturbed measurement
        per_token = more / _MORE_TOKENS
    mean_tokens = max(texts.mean_tokens, _FEW_TOKENS)
    seconds = few + per_token * (mean_tokens - _FEW_TOKENS)
    return n_texts * mean_tokens / seconds
