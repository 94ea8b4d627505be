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
from toque.hardware.memory import BESIDE_TRAINING, free_bytes, is_out_of_memory, release_memory
from toque.models.families import family_of, max_positions, unwrapped, vocabulary_rows
from toque.models.forward.blocks import compile_disabled
from toque.models.generation.constraints import HeldText
from toque.models.generation.kv_cache import SPARE, cache_dtype, cache_shape, layer_devices
from toque.models.generation.live_rows import LiveRows, NewToken, Order
from toque.models.generation.options import GenerationOptions, Precision
from toque.models.generation.packed_products import with_packed_products
from toque.models.lora.frozen import computing, format_of
from toque.models.onednn import EMULATED_BF16, has_fast_bf16
from toque.reporter import Count, uncounted

MOST_ROWS: Final = {"cpu": 160, "cuda": 256}
"""More rows gain nothing on a CPU (products with 64 rows reach 60 to 80 % of the rate of those with
150, those with 256 no more); the number for CUDA is a guess."""


def generate(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    options: GenerationOptions,
    *,
    eos_id: int | Collection[int],
    pad_id: int,
    held: Sequence[HeldText] = (),
    places: Sequence[str] = (),
    on_progress: Count = uncounted,
    on_token: Callable[[int, int | None], object] | None = None,
    on_logprob: Callable[[int, float], object] | None = None,
    on_notice: Callable[[str], object] = lambda _: None,
) -> list[list[int]]:
    """The tokens a model writes after each prompt, without the end token.

    Prompts run together, longest first, and the next takes the place of a finished one; at most
    MOST_ROWS where `batch_rows` is None. A decoder-only model also stops where its positions end: a
    prompt of P tokens gets at most `max_position_embeddings - P + 1` new ones. An empty prompt, one
    that leaves no room, a text that its form leaves no token, or too little memory for one row
    raises ConfigError.

    Args:
        model: Left in the mode it came in; its dropout is off meanwhile.
        prompts: Token ids as the store has them: [bos if any] + text for a decoder-only model,
            text + [eos] for an encoder-decoder.
        options: How they are written; `max_new_tokens` is set.
        eos_id: Token that ends an answer, or several of them.
        pad_id: Fills the short prompts of a batch; starts an encoder-decoder's answer.
        held: The form that each answer is held to; see `constraints.py`. Empty for none.
        places: Where each prompt stands, for errors; empty where its number says it.
        on_progress: Told finished prompts, all prompts and the share of the work in tokens.
        on_token: Told a prompt's number and its next token, and None once the answer has ended.
        on_logprob: Told a prompt's number and the log-probability of its next token, in nats and
            before temperature and filters; of the end token, too.
        on_notice: Told in a sentence where memory ran out and fewer rows are written at a time.
    """
    core, longest = unwrapped(model), options.max_new_tokens
    if longest is None:
        raise ConfigError(f"{argument('max_new_tokens')} is missing; it must be at least 1.")
    limits = _limits(core, prompts, longest, places)
    encoder = family_of(core.config).is_encoder_decoder  # whose cache holds answers alone
    lengths = ((0 if encoder else len(p)) + n for p, n in zip(prompts, limits, strict=True))
    columns = max(lengths, default=0)
    pairs = enumerate(zip(prompts, limits, strict=True))
    told = None if on_logprob is None else 0
    orders = [
        Order(prompt, limit, options, number, told, held=held[number] if held else None)
        for number, (prompt, limit) in pairs
    ]
    answers: list[list[int]] = [[] for _ in limits]
    done, covered, tell = 0, 0, on_token or (lambda *_: None)
    on_progress(0, len(answers), 0.0)
    with torch.inference_mode(), compile_disabled(model), evaluating(model), computing(core):
        core = with_packed_products(core, precision_here(options.precision, core))
        n_rows = options.batch_rows
        if n_rows is None:
            most = MOST_ROWS["cuda" if core.device.type == "cuda" else "cpu"]
            most = min(most, _affordable_rows(core, prompts, columns))
            # The most that fill every batch alike: 300 prompts go as 150 + 150.
            n_rows = -(-len(prompts) // -(-len(prompts) // most)) if prompts else most
        begin = partial(LiveRows, core, columns=columns, eos_id=eos_id, pad_id=pad_id)
        for news in _written(begin, orders, answers, min(n_rows, len(prompts) or 1), on_notice):
            for new in news:
                number, answer = new.order.number, answers[new.order.number]
                if new.end == "stuck" and new.order.held is not None:
                    name = _name_of(number, places)
                    raise ConfigError(f"{name} has a text that {new.order.held.fault}")
                if on_logprob is not None and new.logprob is not None:
                    on_logprob(number, new.logprob)
                covered += 1 if new.end is None else limits[number] - len(answer)
                if new.end != "stop":
                    answer.append(new.token)
                    tell(number, new.token)
                if new.end is not None:
                    done += 1
                    tell(number, None)
            on_progress(done, len(answers), covered / sum(limits))
    return answers


def precision_here(asked: Precision, model: PreTrainedModel) -> Literal["bf16", "float32"]:
    """Precision that a request means; a model held in 16 bits is written with as it is."""
    in_16_bits = model.dtype == torch.bfloat16 or format_of(model).dtype != torch.float32
    if asked == "float32" or in_16_bits:
        return "float32"
    return "bf16" if asked == "bf16" or has_fast_bf16(model.device) else "float32"


def emulation_in_words(asked: Precision, model: PreTrainedModel) -> str:
    """A notice where a request means products in bf16 that are slower than float32's, else ""."""
    held = format_of(model).dtype == torch.bfloat16
    is_bf16 = held or precision_here(asked, model) == "bf16"
    is_slow = is_bf16 and not has_fast_bf16(model.device)
    return EMULATED_BF16.format(device=model.device.type) if is_slow else ""


def _written(
    begin: Callable[..., LiveRows],
    orders: Sequence[Order],
    answers: Sequence[Sequence[int]],
    n_rows: int,
    on_notice: Callable[[str], object],
) -> Iterator[list[NewToken]]:
    """Tokens of each step, until all orders are answered.

    A prefill of one costs about as much as one of a few. Where memory runs out, half as many rows
    go on.
    """
    rows, waiting = begin(rows=n_rows), sorted(orders, key=lambda order: -len(order.prompt))
    while waiting or rows.orders:
        try:
            free = n_rows - len(rows.orders)
            if waiting and free >= (n_rows + 7) // 8:
                rows.admit(waiting[:free])
                waiting = waiting[free:]
            news = rows.step()
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            if not is_out_of_memory(error):
                raise
            reason = str(error).splitlines()[0]
        else:
            yield news
            continue
        # Here what the failed step had computed, which the exception held, is freed.
        if n_rows == 1:
            raise ConfigError(
                f"One text at a time does not fit into memory: {reason} Ask for a shorter one "
                f"({argument('max_new_tokens')}), or end what else uses the memory."
            )
        unfinished = [replace(o, begun=tuple(answers[o.number])) for o in rows.orders]
        waiting = sorted([*unfinished, *waiting], key=lambda order: -len(order.prompt))
        on_notice(
            f"Memory ran out while {n_rows} texts were written at a time ({reason}). From here on "
            f"{n_rows // 2} are: the texts stay the same."
        )
        n_rows //= 2
        rows = begin(rows=n_rows)
        release_memory()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """A context with dropout off; afterwards every module is in the mode it came in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _affordable_rows(core: PreTrainedModel, prompts: Sequence[Sequence[int]], columns: int) -> int:
    """Rows to generate at once: their memory may take BESIDE_TRAINING of what is free."""
    if not prompts:
        return 1
    layers, heads, size = cache_shape(core)
    if family_of(core.config).is_encoder_decoder:
        columns += max(map(len, prompts))  # of the source
    # A buffer that has grown is up to a quarter larger than its contents.
    per_row = 2 * layers * heads * size * cache_dtype(core).itemsize * (columns * 5 // 4 + SPARE)
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
    """Most tokens that each prompt may get."""
    empty = [number for number, prompt in enumerate(prompts) if not prompt]
    if empty:
        raise ConfigError(
            f"{_name_of(empty[0], places)} holds no tokens, and a model needs one to begin from. "
            "Write something, or give the tokenizer's beginning or end token."
        )
    rows, largest = vocabulary_rows(core), max((max(prompt) for prompt in prompts), default=0)
    if largest >= rows:
        raise ConfigError(
            f"A prompt has token {largest}, and the model has those up to {rows - 1}: its "
            "tokenizer is another one's, or damaged. Put back the one it was trained with."
        )
    room = max_positions(core.config)
    if room is None or family_of(core.config).is_encoder_decoder:
        return [max_new_tokens] * len(prompts)
    for number, prompt in enumerate(prompts):
        if len(prompt) > room:
            raise ConfigError(
                f"{_name_of(number, places)} has {len(prompt)} tokens, and this model's positions "
                f"end at {room}. Shorten the prompt."
            )
    # The last new token is never read back, so it needs no position.
    return [min(max_new_tokens, room - len(prompt) + 1) for prompt in prompts]
