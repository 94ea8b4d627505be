"""Batched generation with a KV cache, for decoder-only and encoder-decoder models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Literal

import psutil
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from toque.errors import ConfigError
from toque.models.families import family_of, max_positions, unwrapped
from toque.models.forward.compile import compile_disabled
from toque.models.forward.packed import output_head
from toque.models.generation.base import Decoding, cache_dtype, cache_shape, layer_devices
from toque.models.generation.causal import CausalDecoding
from toque.models.generation.constraints import Constraint
from toque.models.generation.int8_argmax import WORTHWHILE_STEPS, Int8Argmax, supports_int8
from toque.models.generation.kv_cache import SPARE
from toque.models.generation.packed_products import with_bf16_products, with_fast_products
from toque.models.generation.sampling import TokenChooser
from toque.models.generation.t5 import T5Decoding
from toque.reporter import Count, uncounted

OnToken = Callable[[int, int | None], object]
Precision = Literal["float32", "bf16"]

MOST_ROWS: Final = {"cpu": 160, "cuda": 256}
"""More rows gain nothing on a CPU (measured); the number for CUDA is a guess.

On a CPU, products with 64 rows reach 60 to 80 % of the rate of those with 150 (weights are read
from memory at every step), those with 256 no more.
"""


def generate(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    eos_id: int,
    pad_id: int,
    strategy: Literal["greedy", "sample"] = "greedy",
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int = 0,
    batch_rows: int | None = None,
    precision: Precision = "float32",
    constraint: Constraint | None = None,
    on_progress: Count = uncounted,
    on_token: OnToken | None = None,
) -> list[list[int]]:
    """The tokens a model writes after each prompt, without the end token.

    Continuous batching: prompts run together, longest first, and the next prompt takes the place
    of a finished one, so the batch stays full while any wait.
    A decoder-only model also stops where its positions end: a prompt of P tokens gets at most
    `max_position_embeddings - P + 1` new ones.

    Args:
        model: Left in the mode it came in; dropout is off meanwhile.
        prompts: Token ids as the store has them: [bos if any] + text for a decoder-only model,
            text + [eos] for an encoder-decoder.
        max_new_tokens: The longest answer.
        eos_id: Ends an answer.
        pad_id: Fills the short prompts of a batch; starts an encoder-decoder's answer.
        strategy: The likeliest token every time, or draws.
        temperature: Divides the logits; below 1 sharpens. Only for draws, as the next three.
        top_k: Draw from the k likeliest tokens.
        top_p: Draw from the likeliest tokens whose probabilities reach p.
        seed: With a prompt's number and the position, decides the draws.
        batch_rows: Prompts at a time; None for as many as a quarter of the free memory holds, at
            most MOST_ROWS. Changes speed and memory; what is written only in bf16 (see there).
        precision: Of the matrix products and the KV cache. float32 is the model as it is (under
            autocast, as that has it). bf16 is faster where the hardware has it. Where two tokens
            are about equally likely, a text may then part from float32's, and from its own with
            other rows beside it: the sums of a product depend on how many rows it has.
        constraint: Takes away tokens that may not come next; see `constraints.py`.
        on_progress: Called after every token with (finished prompts, all prompts, share of the
            work); the share counts tokens, and every answer as the longest until it has ended.
        on_token: Called with a prompt's number and its next token as soon as it is written, and
            with None once the answer has ended.

    Raises:
        ConfigError: an empty prompt, one that leaves no room, or settings out of range.
    """
    core = unwrapped(model)
    chooser = TokenChooser(strategy, temperature, top_k, top_p, seed)
    limits = _limits(core, prompts, max_new_tokens)
    if batch_rows is not None and batch_rows < 1:
        raise ConfigError(f"batch_rows is {batch_rows}; it must be at least 1.")
    answers: list[list[int]] = [[] for _ in prompts]
    done, covered, whole = 0, 0, sum(limits)
    on_progress(0, len(prompts), 0.0)
    with torch.inference_mode(), compile_disabled(model), _evaluating(model):
        core = with_bf16_products(core) if precision == "bf16" else with_fast_products(core)
        if batch_rows is None:
            batch_rows = evened(affordable_rows(core, prompts, limits), len(prompts))
        family = T5Decoding if family_of(core.config).is_encoder_decoder else CausalDecoding
        rows = family(
            core,
            rows=min(batch_rows, len(prompts) or 1),
            columns=_longest(core, prompts, limits),
            pad_id=pad_id,
        )
        told = on_token or _untold
        steps = _write(
            rows, core, prompts, answers, limits, chooser, eos_id, batch_rows, told, constraint
        )
        for finished, tokens in steps:
            done, covered = done + finished, covered + tokens
            on_progress(done, len(prompts), covered / whole)
    return answers


def _untold(_number: int, _token: int | None) -> None:
    """The `on_token` of those who wait for whole answers."""


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Dropout off; afterwards every module is in the mode it came in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _write(
    rows: Decoding,
    core: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    answers: list[list[int]],
    limits: Sequence[int],
    chooser: TokenChooser,
    eos_id: int,
    batch_rows: int,
    on_token: OnToken,
    constraint: Constraint | None,
) -> Iterator[tuple[int, int]]:
    """Fill the answers; yields after each token (answers finished, tokens nearer to all limits).

    Prompts are admitted several at a time: a prefill of one costs about as much as one of a few.
    """
    n_rows = min(batch_rows, len(prompts))
    head = Head(core, n_rows)
    pays = chooser.strategy == "greedy" and max(limits, default=0) >= WORTHWHILE_STEPS
    by_int8 = pays and constraint is None and supports_int8(head.weight, head.bias)
    argmax = Int8Argmax(head.weight, rows=n_rows) if by_int8 else None
    waiting = sorted(range(len(prompts)), key=lambda i: (-len(prompts[i]), i))
    alive: list[int] = []
    tokens: list[int] = []
    while waiting or alive:
        if waiting and batch_rows - len(alive) >= (batch_rows + 7) // 8:
            new, waiting = waiting[: batch_rows - len(alive)], waiting[batch_rows - len(alive) :]
            tokens += rows.admit([prompts[number] for number in new])
            alive += new
        hidden = rows.step(torch.tensor(tokens, device=core.device))
        if argmax is not None:
            tokens = argmax(hidden).tolist()
        else:
            logits, so_far = head(hidden), [answers[number] for number in alive]
            if constraint is not None:
                logits = constraint(logits, prompts=alive, answers=so_far)
            places = list(map(len, so_far))
            tokens = chooser.choose(logits, prompts=alive, positions=places).tolist()
        over: list[int] = []
        covered = len(alive)
        for row, (number, token) in enumerate(zip(alive, tokens, strict=True)):
            left = limits[number] - len(answers[number])
            if token != eos_id:
                answers[number].append(token)
                on_token(number, token)
            if token == eos_id or len(answers[number]) == limits[number]:
                on_token(number, None)
                over.append(row)
                covered += left - 1
        for row in reversed(over):
            rows.drop(row)
            for column in (alive, tokens):
                column[row] = column[-1]
                column.pop()
        yield len(over), covered


class Head:
    """The output head, which writes its logits into one buffer on a CPU.

    A CPU's allocator takes these megabytes from the system and gives them back every time;
    touching fresh pages cost a third of the product (45 ms against 32 ms for 64 rows of 50,257
    logits).
    """

    def __init__(self, core: PreTrainedModel, rows: int) -> None:
        self.weight, self.bias = output_head(core)
        on_cpu = core.device.type == "cpu" and not torch.is_autocast_enabled("cpu")
        self.buffer = self.weight.new_empty(rows, len(self.weight)) if on_cpu else None

    def __call__(self, hidden: Tensor) -> Tensor:
        """[n, D] -> [n, V], good until the next call."""
        if self.buffer is None:
            return F.linear(hidden, self.weight, self.bias)
        logits = torch.mm(hidden, self.weight.T, out=self.buffer[: len(hidden)])
        return logits if self.bias is None else logits.add_(self.bias)


def evened(rows: int, prompts: int) -> int:
    """The most rows, up to `rows`, that fill every batch alike: 300 prompts go as 150 + 150.

    >>> evened(64, 65)
    33
    """
    return -(-prompts // -(-prompts // rows)) if prompts else rows


def affordable_rows(
    core: PreTrainedModel, prompts: Sequence[Sequence[int]], limits: Sequence[int]
) -> int:
    """Rows to generate at once: their memory may take a quarter of what is free.

    Args:
        core: The model, on its device.
        prompts: As `generate` takes them.
        limits: The longest answer of each.
    """
    if not prompts:
        return 1
    layers, heads, size = cache_shape(core)
    columns = _longest(core, prompts, limits)
    if family_of(core.config).is_encoder_decoder:
        columns += max(map(len, prompts))  # of the source
    # A buffer that has grown is up to a quarter larger than its contents.
    per_row = 2 * layers * heads * size * cache_dtype(core).itemsize * (columns * 5 // 4 + SPARE)
    per_row += 8 * core.config.vocab_size  # logits, and the memory to sample from them
    on_cuda = core.device.type == "cuda"
    devices = {core.device, *layer_devices(core)}
    free = (
        min(torch.cuda.mem_get_info(device)[0] for device in devices)
        if on_cuda
        else psutil.virtual_memory().available
    )
    return max(1, min(MOST_ROWS["cuda" if on_cuda else "cpu"], int(free // 4 // per_row)))


def _longest(core: PreTrainedModel, prompts: Sequence[Sequence[int]], limits: Sequence[int]) -> int:
    """Columns of the KV cache that the longest row needs."""
    if family_of(core.config).is_encoder_decoder:
        return max(limits, default=0)
    return max((len(p) + limit for p, limit in zip(prompts, limits, strict=True)), default=0)


def _limits(
    core: PreTrainedModel, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> list[int]:
    """How many tokens each prompt may get."""
    if max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens is {max_new_tokens}; it must be at least 1.")
    empty = [number for number, prompt in enumerate(prompts) if not prompt]
    if empty:
        raise ConfigError(
            f"Prompt {empty[0]} holds no tokens, and a model needs one to begin from. Write "
            "something, or give the tokenizer's beginning or end token."
        )
    room = max_positions(core.config)
    if room is None or family_of(core.config).is_encoder_decoder:
        return [max_new_tokens] * len(prompts)
    for number, prompt in enumerate(prompts):
        if len(prompt) > room:
            raise ConfigError(
                f"Prompt {number} has {len(prompt)} tokens, and this model's positions end at "
                f"{room}. Shorten the prompt."
            )
    # The last new token is never read back, so it needs no position.
    return [min(max_new_tokens, room - len(prompt) + 1) for prompt in prompts]
