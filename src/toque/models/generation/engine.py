"""Batched generation with a KV cache, for decoder-only and encoder-decoder models."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from toque.errors import ConfigError, argument, needing
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
from toque.models.onnx.row_program import RowProgram
from toque.reporter import Count, uncounted

_PACKED_TOKENS: Final = 128
"""Number of tokens that a model reads in the time of packing its weights."""
OnToken = Callable[[int, int | None], object]
"""Function called with a prompt's index and its next token, or None after the last token."""
OnLogprob = Callable[[int, float], object]
"""Function called with a prompt's index and the log-probability of its next token."""
MAX_ROWS: Final = {"cpu": 160, "cuda": 256}
"""Maximum number of rows per device type.

On a CPU, matmuls with 64 rows reach 60 to 80 % of the throughput with 150 rows, and 256 rows are
not faster. The number for CUDA is not measured.
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
    draws: Sequence[int] = (),
    on_progress: Count = uncounted,
    on_token: OnToken | None = None,
    on_logprob: OnLogprob | None = None,
    on_notice: Callable[[str], object] = lambda _: None,
) -> list[list[int]]:
    """Generate an answer to each prompt, as token ids without the end token.

    Prompts run in a batch, the longest first, and the next prompt replaces a finished one. The
    batch has at most MAX_ROWS rows if `batch_rows` is None. A decoder-only model is limited by its
    context length: a prompt of P tokens gets at most `max_position_embeddings - P + 1` new tokens.

    Args:
        model: Model to generate with. Its dropout is off during generation.
        prompts: Token ids in the format of the store: [bos if any] + text for a decoder-only model,
            text + [eos] for an encoder-decoder.
        options: Generation options, with `max_new_tokens` set.
        eos_id: Token or tokens that end an answer.
        pad_id: Padding of a batch, and the first token of an encoder-decoder's answer.
        constraints: The form of each answer (`constraints.py`). Empty for free answers.
        places: The origin of each prompt, for errors. If empty, errors contain the prompt's index.
        draws: Number of each answer, for its random numbers. If empty, it is the prompt's index.
        on_progress: Receives the number of finished prompts, the number of all prompts, and the
            finished fraction of the tokens.
        on_token: Receives a prompt's index and its next token, or None after the last token.
        on_logprob: Receives a prompt's index and the log-probability of its next token (including
            the end token), in nats, before temperature and filters.
        on_notice: Receives a message if memory runs out and the batch shrinks.

    Raises:
        ConfigError: A prompt is empty or too long, no token fits a form, or one row does not fit
            into memory.
    """
    core = unwrapped(model)
    # 0 requests the log-probability of the generated token only.
    n_top_logprobs = None if on_logprob is None else 0
    limits = _check_and_limit(core, prompts, options, places)
    forms: Sequence[Constraint | None] = constraints or [None for _ in prompts]
    orders = [
        Order(
            prompt, limit, options, number, n_top_logprobs, constraint=form, draw=draw
        )
        for number, (prompt, limit, draw, form) in enumerate(
            zip(prompts, limits, draws or range(len(prompts)), forms, strict=True)
        )
    ]

    answers = _Answers(orders, places, on_token, on_logprob)
    on_progress(0, len(orders), 0.0)
    if not orders:
        return answers.tokens
    with (
        torch.inference_mode(),
        compile_disabled(model),
        evaluating(model),
        computing(core),
    ):
        open_program = choose_program(options.precision, core)
        n_read = sum(len(order.prompt) for order in orders)
        is_alone = len(orders) == 1 or options.batch_rows == 1
        # The program does not read packed weights.
        if open_program is None or not is_alone or n_read >= _PACKED_TOKENS:
            precision = resolve_precision(options.precision, core)
            core = with_packed_products(core, precision)
        # The cache of an encoder-decoder contains answers only.
        has_prompts = not family_of(core.config).is_encoder_decoder
        columns = max(
            order.max_tokens + (len(order.prompt) if has_prompts else 0)
            for order in orders
        )
        n_rows = _choose_n_rows(core, orders, columns, options.batch_rows)
        begin = partial(
            LiveRows,
            core,
            columns=columns,
            eos_id=eos_id,
            pad_id=pad_id,
            open_program=open_program,
        )
        for new_tokens in _run_orders(begin, orders, answers.tokens, n_rows, on_notice):
            for new in new_tokens:
                answers.add(new)
            on_progress(answers.n_finished, len(orders), answers.finished_share)
    return answers.tokens


def _check_and_limit(
    core: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    options: GenerationOptions,
    places: Sequence[str],
) -> list[int]:
    """Check the arguments of `generate`. Return the maximum number of new tokens per prompt."""
    if options.max_new_tokens is None:
        raise ConfigError(
            f"{argument('max_new_tokens')} is missing; it must be at least 1."
        )
    _check_tokens(core, prompts, places)
    if max(options.logit_bias, default=0) >= core.config.vocab_size:
        raise ConfigError(
            f"logit_bias has the token {max(options.logit_bias)}, but the vocabulary has ids from "
            f"0 to {core.config.vocab_size - 1:,}."
        )
    return limit_answers(core, prompts, options.max_new_tokens, places)


@dataclass
class _Answers:
    """Answers to orders while they are generated. Each new token is reported to callbacks."""

    orders: Sequence[Order]
    places: Sequence[str]
    on_token: OnToken | None
    on_logprob: OnLogprob | None

    def __post_init__(self) -> None:
        self.tokens: list[list[int]] = [[] for _ in self.orders]
        self.n_finished = 0
        # Generated tokens, and tokens that short answers did not need.
        self._n_covered = 0

    @property
    def finished_share(self) -> float:
        """Finished fraction of the maximum number of tokens."""
        return self._n_covered / sum(order.max_tokens for order in self.orders)

    def add(self, new: NewToken) -> None:
        """Add a token to its answer.

        Raises:
            ConfigError: No token fits the form of the answer.
        """
        order = new.order
        number = order.number
        answer = self.tokens[number]
        if new.end == "stuck" and order.constraint is not None:
            name = _name_of(number, self.places)
            raise ConfigError(f"{name} has a text that {order.constraint.fault}")
        if self.on_logprob is not None and new.logprob is not None:
            self.on_logprob(number, new.logprob)
        self._n_covered += 1 if new.end is None else order.max_tokens - len(answer)
        report = self.on_token or (lambda *_: None)
        if new.end != "stop":
            answer.append(new.token)
            report(number, new.token)
        if new.end is not None:
            self.n_finished += 1
            report(number, None)


def resolve_precision(
    requested: Precision, model: PreTrainedModel
) -> Literal["bf16", "float32"]:
    """Resolve a requested precision. A model in 16 bits is used without conversion ("float32").

    int8 is the precision of a single row (`choose_program`). Several rows have the precision auto.
    """
    in_16_bits = (
        model.dtype == torch.bfloat16 or format_of(model).dtype != torch.float32
    )
    if requested == "float32" or in_16_bits:
        return "float32"
    return "bf16" if requested == "bf16" or has_fast_bf16(model.device) else "float32"


def choose_program(
    requested: Precision, model: PreTrainedModel
) -> Callable[[], RowProgram] | None:
    """Return what opens the int8 program of a single row, or None for another precision.

    Raises:
        ConfigError: The processor or the model does not support int8, or a package is missing.
    """
    if requested != "int8":
        return None
    name = argument("precision=int8")
    with needing("onnx", name, otherwise=f", or use {argument('precision=auto')}"):
        from toque.models.onnx.single_row import SingleRow, find_obstacle
    if problem := find_obstacle(model):
        raise ConfigError(
            f"{name} cannot be used, because {problem}. Use {argument('precision=auto')}."
        )
    return partial(SingleRow, model)


def describe_emulation(requested: Precision, model: PreTrainedModel) -> str:
    """Return a notice if the device emulates the requested bf16, which is slow, otherwise ""."""
    is_bf16_model = format_of(model).dtype == torch.bfloat16
    is_bf16 = is_bf16_model or resolve_precision(requested, model) == "bf16"
    is_slow = is_bf16 and not has_fast_bf16(model.device)
    return EMULATED_BF16.format(device=model.device.type) if is_slow else ""


def _run_orders(
    begin: Callable[..., LiveRows],
    orders: Sequence[Order],
    answers: Sequence[Sequence[int]],
    n_rows: int,
    on_notice: Callable[[str], object],
) -> Iterator[list[NewToken]]:
    """Generate all orders, and yield the tokens of each step. The caller adds them to `answers`.

    When memory runs out, continue with half the rows.
    """
    rows = begin(rows=n_rows)
    waiting = _sort_longest_first(orders)
    while waiting or rows.orders:
        try:
            n_free = n_rows - len(rows.orders)
            # Prefilling one prompt costs about as much as prefilling a few, so wait until an eighth
            # of the rows are free.
            if waiting and n_free >= (n_rows + 7) // 8:
                rows.admit(waiting[:n_free])
                waiting = waiting[n_free:]
            new_tokens = rows.step()
        except RuntimeError as error:  # includes torch.OutOfMemoryError
            if not is_out_of_memory(error):
                raise
            reason = str(error).splitlines()[0]
        else:
            yield new_tokens
            continue

        # Outside of the except block, the tensors of the failed step are freed.
        if n_rows == 1:
            raise ConfigError(
                f"One text at a time does not fit into memory: {reason} Request a shorter text "
                f"({argument('max_new_tokens')}), or stop other programs that use the memory."
            )
        unfinished = [
            replace(order, prefix=tuple(answers[order.number])) for order in rows.orders
        ]
        waiting = _sort_longest_first([*unfinished, *waiting])
        on_notice(
            f"Memory ran out with {n_rows} texts at a time ({reason}). Generation continues with "
            f"{n_rows // 2} texts at a time, which does not change the texts."
        )
        n_rows //= 2
        rows = begin(rows=n_rows)
        release_memory()


def _sort_longest_first(orders: Sequence[Order]) -> list[Order]:
    return sorted(orders, key=lambda order: -len(order.prompt))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, and restore the mode of every module afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _choose_n_rows(
    core: PreTrainedModel,
    orders: Sequence[Order],
    columns: int,
    batch_rows: int | None,
) -> int:
    """Choose the number of rows of a batch. The default divides the orders into equal batches."""
    if batch_rows is not None:
        return min(batch_rows, len(orders))
    affordable_rows = _count_affordable_rows(core, orders, columns)
    max_rows = min(MAX_ROWS[core.device.type], affordable_rows)
    n_batches = -(-len(orders) // max_rows)
    return -(-len(orders) // n_batches)  # 150 + 150 for 300 orders, not 160 + 140


def _count_affordable_rows(
    core: PreTrainedModel, orders: Sequence[Order], columns: int
) -> int:
    """Compute the number of rows that fit into the fraction BESIDE_TRAINING of the free memory."""
    longest_prompt = max(len(order.prompt) for order in orders)
    free = min(map(free_bytes, {core.device, *layer_devices(core)}))
    row = row_bytes(core, columns, longest_prompt, cache_dtype(core).itemsize)
    return max(1, int(BESIDE_TRAINING * free / row))


def row_bytes(
    core: PreTrainedModel, columns: int, longest_prompt: int, itemsize: int
) -> int:
    """Return the bytes of a row's keys, values and logits.

    Args:
        core: Model. Only its shape is used.
        columns: Tokens in the cache of the longest row. A decoder's cache includes the prompt.
        longest_prompt: Tokens of the longest prompt.
        itemsize: Bytes per number in the cache.
    """
    layers, heads, size = cache_shape(core)
    if family_of(core.config).is_encoder_decoder:
        # The cross-attention has keys and values of the prompt.
        columns += longest_prompt
    # A buffer that grows is up to a quarter larger than its content.
    allocated_columns = columns * 5 // 4 + SPARE
    column_bytes = 2 * layers * heads * size * itemsize
    # Two float32 vectors: the logits, and a copy for sampling.
    logits_bytes = 2 * 4 * int(core.config.vocab_size)
    return column_bytes * allocated_columns + logits_bytes


def _name_of(number: int, places: Sequence[str]) -> str:
    """Return the subject of a message about a prompt."""
    return f"The prompt at {places[number]}" if places else f"Prompt {number + 1}"


def _check_tokens(
    core: PreTrainedModel, prompts: Sequence[Sequence[int]], places: Sequence[str]
) -> None:
    """Check the token ids of prompts.

    Raises:
        ConfigError: A prompt is empty, or has ids that are not in the vocabulary.
    """
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise ConfigError(
                f"{_name_of(number, places)} has no tokens, but a model needs at least one. Add "
                "text, or the tokenizer's start or end token."
            )
    vocabulary_size = vocabulary_rows(core)
    largest = max((max(prompt) for prompt in prompts), default=0)
    if largest >= vocabulary_size:
        raise ConfigError(
            f"A prompt contains token id {largest}, but the model's last token id is "
            f"{vocabulary_size - 1}. The tokenizer is damaged or belongs to another model. Restore "
            "the tokenizer that the model was trained with."
        )


def cut_to_half(
    prompts: Sequence[Sequence[int]], core: PreTrainedModel
) -> list[list[int]]:
    """Cut prompts to half of the context of a model, so that the rest is free for new tokens."""
    limit = max_positions(core.config)
    n_kept = None if limit is None else max(1, limit // 2)
    return [list(prompt[:n_kept]) for prompt in prompts]


def limit_answers(
    core: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    places: Sequence[str],
) -> list[int]:
    """Compute the maximum number of new tokens per prompt.

    Raises:
        ConfigError: A prompt is too long.
    """
    context_length = max_positions(core.config)
    if context_length is None or family_of(core.config).is_encoder_decoder:
        return [max_new_tokens for _ in prompts]
    for number, prompt in enumerate(prompts):
        if len(prompt) > context_length:
            raise ConfigError(
                f"{_name_of(number, places)} has {len(prompt)} tokens, but this model's context "
                f"length is {context_length}. Shorten the prompt."
            )
    # The model does not read the last new token, so that token needs no position.
    return [min(max_new_tokens, context_length - len(prompt) + 1) for prompt in prompts]
