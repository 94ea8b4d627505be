"""Batched generation with a KV cache, for decoder-only and encoder-decoder models."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Final, Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from toque.errors import ConfigError, argument
from toque.hardware.memory import (
    BESIDE_TRAINING,
    free_bytes,
    is_out_of_memory,
    release_memory,
)
from toque.hardware.onednn import EMULATED_BF16, has_fast_bf16
from toque.models.config_values import max_positions
from toque.models.families import family_of, unwrapped, vocabulary_rows
from toque.models.forward.blocks import compile_disabled
from toque.models.generation.constraints import Constraint
from toque.models.generation.kv_cache import (
    SPARE,
    cache_dtype,
    cache_shape,
    layer_devices,
)
from toque.models.generation.live_rows import LiveRows, NewToken, Order
from toque.models.generation.options import GenerationOptions, Precision
from toque.models.generation.packed_products import with_packed_products
from toque.models.lora.frozen import computing, format_of
from toque.reporter import Count, uncounted

MOST_ROWS: Final = {"cpu": 160, "cuda": 256}
"""Maximum number of rows per device type.

On a CPU, products with 64 rows reach 60 to 80 % of the rate with 150 rows, and 256 rows are not
faster. The number for CUDA is not measured.
"""


def generate(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    options: GenerationOptions,
    *,
    eos_id: int | Collection[int],
    pad_id: int,
    constraints: Sequence[Constraint] = (),
    places: Sequence[str] = (),
    on_progress: Count = uncounted,
    on_token: Callable[[int, int | None], object] | None = None,
    on_logprob: Callable[[int, float], object] | None = None,
    on_notice: Callable[[str], object] = lambda _: None,
) -> list[list[int]]:
    """Generate the answer of a model to each prompt, as tokens without the end token.

    Prompts run in a batch, the longest first, and the next prompt replaces a finished one. The
    batch has at most MOST_ROWS rows if `batch_rows` is None. A decoder-only model is limited by its
    positions: a prompt of P tokens gets at most `max_position_embeddings - P + 1` new tokens.

    Args:
        model: The model. Dropout is off while it generates.
        prompts: Token ids in the format of the store: [bos if any] + text for a decoder-only model,
            text + [eos] for an encoder-decoder.
        options: Options of generation with `max_new_tokens`.
        eos_id: Token or tokens that end an answer.
        pad_id: Padding of a batch, and the first token of an encoder-decoder's answer.
        constraints: The form of each answer (`constraints.py`). Empty for free answers.
        places: The origin of each prompt, for errors. Empty to use its number.
        on_progress: Receives finished prompts, all prompts and the finished share of the tokens.
        on_token: Receives a prompt's number and its next token, and None after the last token.
        on_logprob: Receives a prompt's number and the log-probability of its next token (including
            the end token), in nats, before temperature and filters.
        on_notice: Receives a message if memory runs out and the batch shrinks.

    Raises:
        ConfigError: A prompt is empty or too long, no token fits a form, or one row does not fit
            into memory.
    """
    core, longest = unwrapped(model), options.max_new_tokens
    if longest is None:
        raise ConfigError(
            f"{argument('max_new_tokens')} is missing; it must be at least 1."
        )
    limits = _limits(core, prompts, longest, places)
    is_encoder_decoder = family_of(core.config).is_encoder_decoder
    columns = 0
    n_likeliest = None if on_logprob is None else 0
    orders = []
    for number, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
        # The cache of an encoder-decoder contains answers only.
        columns = max(columns, limit if is_encoder_decoder else len(prompt) + limit)
        form = constraints[number] if constraints else None
        orders.append(
            Order(prompt, limit, options, number, n_likeliest, constraint=form)
        )

    answers: list[list[int]] = [[] for _ in limits]
    n_finished = 0
    n_covered = 0
    report_token = on_token or (lambda *_: None)
    on_progress(0, len(answers), 0.0)
    with (
        torch.inference_mode(),
        compile_disabled(model),
        evaluating(model),
        computing(core),
    ):
        core = with_packed_products(core, precision_here(options.precision, core))
        n_rows = options.batch_rows
        if n_rows is None:
            limit = MOST_ROWS["cuda" if core.device.type == "cuda" else "cpu"]
            limit = min(limit, _affordable_rows(core, prompts, columns))
            # Batches of equal size: 300 prompts run as 150 + 150.
            n_rows = -(-len(prompts) // -(-len(prompts) // limit)) if prompts else limit
        begin = partial(LiveRows, core, columns=columns, eos_id=eos_id, pad_id=pad_id)
        n_rows = min(n_rows, len(prompts) or 1)

        for new_tokens in _run_orders(begin, orders, answers, n_rows, on_notice):
            for new in new_tokens:
                number = new.order.number
                answer = answers[number]
                if new.end == "stuck" and new.order.constraint is not None:
                    name = _name_of(number, places)
                    raise ConfigError(
                        f"{name} has a text that {new.order.constraint.fault}"
                    )
                if on_logprob is not None and new.logprob is not None:
                    on_logprob(number, new.logprob)
                n_covered += 1 if new.end is None else limits[number] - len(answer)
                if new.end != "stop":
                    answer.append(new.token)
                    report_token(number, new.token)
                if new.end is not None:
                    n_finished += 1
                    report_token(number, None)
            on_progress(n_finished, len(answers), n_covered / sum(limits))
    return answers


def precision_here(
    requested: Precision, model: PreTrainedModel
) -> Literal["bf16", "float32"]:
    """Resolve a requested precision. A model in 16 bits is used without conversion ("float32")."""
    in_16_bits = (
        model.dtype == torch.bfloat16 or format_of(model).dtype != torch.float32
    )
    if requested == "float32" or in_16_bits:
        return "float32"
    return "bf16" if requested == "bf16" or has_fast_bf16(model.device) else "float32"


def emulation_in_words(requested: Precision, model: PreTrainedModel) -> str:
    """Return a notice if the device emulates the requested bf16, which is slow, else ""."""
    is_bf16_model = format_of(model).dtype == torch.bfloat16
    is_bf16 = is_bf16_model or precision_here(requested, model) == "bf16"
    is_slow = is_bf16 and not has_fast_bf16(model.device)
    return EMULATED_BF16.format(device=model.device.type) if is_slow else ""


def _run_orders(
    begin: Callable[..., LiveRows],
    orders: Sequence[Order],
    answers: Sequence[Sequence[int]],
    n_rows: int,
    on_notice: Callable[[str], object],
) -> Iterator[list[NewToken]]:
    """Yield the tokens of each step until all orders are finished.

    Prompts are admitted in groups, because prefilling one costs about as much as a few. When memory
    runs out, continue with half the rows.
    """
    rows = begin(rows=n_rows)
    waiting = sorted(orders, key=lambda order: -len(order.prompt))
    while waiting or rows.orders:
        try:
            free = n_rows - len(rows.orders)
            if waiting and free >= (n_rows + 7) // 8:
                rows.admit(waiting[:free])
                waiting = waiting[free:]
            new_tokens = rows.step()
        except RuntimeError as error:  # includes torch.OutOfMemoryError
            if not is_out_of_memory(error):
                raise
            reason = str(error).splitlines()[0]
        else:
            yield new_tokens
            continue

        # Outside the except block, the tensors of the failed step are freed.
        if n_rows == 1:
            raise ConfigError(
                f"One text at a time does not fit into memory: {reason} Request a shorter text "
                f"({argument('max_new_tokens')}), or stop other programs that use the memory."
            )
        unfinished = [replace(o, begun=tuple(answers[o.number])) for o in rows.orders]
        waiting = sorted([*unfinished, *waiting], key=lambda order: -len(order.prompt))
        on_notice(
            f"Memory ran out with {n_rows} texts at a time ({reason}). Generation continues with "
            f"{n_rows // 2} texts at a time, which does not change the texts."
        )
        n_rows //= 2
        rows = begin(rows=n_rows)
        release_memory()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Turn dropout off in a context, and restore the mode of every module afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _affordable_rows(
    core: PreTrainedModel, prompts: Sequence[Sequence[int]], columns: int
) -> int:
    """Compute the number of rows that fit into the share BESIDE_TRAINING of the free memory."""
    if not prompts:
        return 1
    layers, heads, size = cache_shape(core)
    if family_of(core.config).is_encoder_decoder:
        columns += max(map(len, prompts))  # tokens of the source
    # A buffer that grows is up to a quarter larger than its content.
    per_row = (
        2
        * layers
        * heads
        * size
        * cache_dtype(core).itemsize
        * (columns * 5 // 4 + SPARE)
    )
    per_row += 8 * core.config.vocab_size  # logits, and the memory to sample from them
    free = min(map(free_bytes, {core.device, *layer_devices(core)}))
    return max(1, int(BESIDE_TRAINING * free / per_row))


def _name_of(number: int, places: Sequence[str]) -> str:
    return f"The prompt at {places[number]}" if places else f"Prompt {number + 1}"


def _limits(
    core: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    places: Sequence[str],
) -> list[int]:
    """Compute the maximum number of new tokens per prompt."""
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise ConfigError(
                f"{_name_of(number, places)} has no tokens, but a model needs at least one. Add "
                "text, or the tokenizer's start or end token."
            )
    rows = vocabulary_rows(core)
    largest = max((max(prompt) for prompt in prompts), default=0)
    if largest >= rows:
        raise ConfigError(
            f"A prompt contains token {largest}, but the model's last token is {rows - 1}. The "
            "tokenizer is damaged or belongs to another model. Restore the tokenizer that the "
            "model was trained with."
        )

    limit = max_positions(core.config)
    if limit is None or family_of(core.config).is_encoder_decoder:
        return [max_new_tokens] * len(prompts)
    for number, prompt in enumerate(prompts):
        if len(prompt) > limit:
            raise ConfigError(
                f"{_name_of(number, places)} has {len(prompt)} tokens, but this model has "
                f"{limit} positions. Shorten the prompt."
            )
    # The model does not read the last new token, so that token needs no position.
    return [min(max_new_tokens, limit - len(prompt) + 1) for prompt in prompts]
