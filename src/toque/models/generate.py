"""Batched generation with a key-value cache, for both kinds of models.

Letters: R rows of the batch, S prompt width, K keys in the cache, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel

from toque.errors import ConfigError
from toque.models.attention import for_model, left_padded_causal, same_segment
from toque.models.compile import eagerly
from toque.models.families import family_of, max_positions, unwrapped
from toque.models.forward import output_head, scale_decoder_outputs
from toque.models.sampling import TokenChooser


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
    batch_rows: int = 16,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[list[int]]:
    """The tokens a model writes after each prompt, without the end token.

    Prompts run in batches of similar length, longest first; a finished one leaves its batch.
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
        batch_rows: Prompts at a time. Changes speed and memory, not what is written.
        on_progress: Called with (finished prompts, all prompts).

    Raises:
        ConfigError: an empty prompt, one that leaves no room, or settings out of range.
    """
    core = unwrapped(model)
    chooser = TokenChooser(strategy, temperature, top_k, top_p, seed)
    limits = _limits(core, prompts, max_new_tokens)
    if batch_rows < 1:
        raise ConfigError(f"batch_rows is {batch_rows}; it must be at least 1.")
    answers: list[list[int]] = [[] for _ in prompts]
    order = sorted(range(len(prompts)), key=lambda i: (-len(prompts[i]), i))
    decoding = _EncoderDecoder if family_of(core.config).is_encoder_decoder else _DecoderOnly
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    done = 0
    try:
        with torch.inference_mode(), eagerly(model):
            for start in range(0, len(order), batch_rows):
                numbers = order[start : start + batch_rows]
                rows = decoding(core, [prompts[i] for i in numbers], pad_id=pad_id)
                for finished in _write(rows, numbers, answers, limits, chooser, eos_id):
                    done += finished
                    if on_progress is not None:
                        on_progress(done, len(prompts))
    finally:
        for module, training in modes:
            module.training = training
    return answers


class _Rows(Protocol):
    """A batch of prompts that is being continued."""

    def first(self) -> Tensor:
        """Read the prompts: logits [R, V] of the first new token."""

    def following(self, tokens: Tensor) -> Tensor:
        """Read one more token a row, [R]: logits [R, V] of the next."""

    def keep(self, rows: Tensor) -> None:
        """Drop all rows but these."""


def _write(
    rows: _Rows,
    alive: list[int],
    answers: list[list[int]],
    limits: Sequence[int],
    chooser: TokenChooser,
    eos_id: int,
) -> Iterator[int]:
    """Fill the answers of the prompts numbered `alive`; yields how many finish, when some do."""
    logits = rows.first()
    for position in range(max(limits[number] for number in alive)):
        tokens = chooser.choose(logits, prompts=alive, position=position)
        going: list[int] = []
        for row, token in enumerate(tokens.tolist()):
            number = alive[row]
            if token == eos_id:
                continue
            answers[number].append(token)
            if len(answers[number]) < limits[number]:
                going.append(row)
        if len(going) < len(alive):
            yield len(alive) - len(going)
            if not going:
                return
            kept = torch.tensor(going, device=tokens.device)
            rows.keep(kept)
            tokens = tokens[kept]
            alive = [alive[row] for row in going]
        logits = rows.following(tokens)


class _DecoderOnly:
    """Prompts end together at the right edge; padding is on their left, and masked."""

    def __init__(self, core: PreTrainedModel, prompts: list[Sequence[int]], *, pad_id: int) -> None:
        self.core = core
        width = max(map(len, prompts))
        padded = [[pad_id] * (width - len(p)) + list(p) for p in prompts]
        self.tokens = torch.tensor(padded, device=core.device)
        self.lengths = torch.tensor([len(p) for p in prompts], device=core.device)
        self.even = all(len(p) == width for p in prompts)  # then causality is the whole mask
        self.width = width
        self.cache = DynamicCache(config=core.config)

    def first(self) -> Tensor:
        columns = torch.arange(self.width, device=self.core.device)
        positions = (columns[None, :] - (self.width - self.lengths)[:, None]).clamp(min=0)
        return self._read(self.tokens, positions, left_padded_causal(self.lengths, self.width))

    def following(self, tokens: Tensor) -> Tensor:
        new = self.cache.get_seq_length() - self.width
        columns = torch.arange(self.width + new + 1, device=tokens.device)
        seen = columns[None, :] >= (self.width - self.lengths)[:, None]
        return self._read(tokens[:, None], (self.lengths + new)[:, None], seen[:, None, None, :])

    def keep(self, rows: Tensor) -> None:
        self.lengths = self.lengths[rows]
        self.cache.batch_select_indices(rows)

    def _read(self, tokens: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        # Embeddings instead of tokens: without a mask GPT-2 would look for padding among them.
        output = self.core.base_model(
            inputs_embeds=self.core.get_input_embeddings()(tokens),
            attention_mask=None if self.even else for_model(mask, self.core),
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
        )
        return F.linear(output.last_hidden_state[:, -1], *output_head(self.core))


class _EncoderDecoder:
    """Prompts are encoded once; answers grow from the start token, all at the same position."""

    def __init__(self, core: PreTrainedModel, prompts: list[Sequence[int]], *, pad_id: int) -> None:
        self.core = core
        width = max(map(len, prompts))
        padded = [list(p) + [pad_id] * (width - len(p)) for p in prompts]
        self.tokens = torch.tensor(padded, device=core.device)
        lengths = torch.tensor([len(p) for p in prompts], device=core.device)
        self.real = torch.arange(width, device=core.device)[None, :] < lengths[:, None]  # [R, S]
        start = core.config.decoder_start_token_id
        self.start = pad_id if start is None else int(start)
        # Without a config: it would count the encoder's layers, and the decoder may have more.
        self.cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        self.source = torch.empty(0)

    def first(self) -> Tensor:
        self.source = self.core.get_submodule("encoder")(
            input_ids=self.tokens,
            attention_mask=for_model(same_segment(self.real.int()), self.core),
        ).last_hidden_state
        return self.following(torch.full_like(self.tokens[:, 0], self.start))

    def following(self, tokens: Tensor) -> Tensor:
        output = self.core.get_submodule("decoder")(
            input_ids=tokens[:, None],
            encoder_hidden_states=self.source,
            encoder_attention_mask=for_model(self.real[:, None, None, :], self.core),
            past_key_values=self.cache,
            use_cache=True,
        )
        hidden = scale_decoder_outputs(self.core, output.last_hidden_state[:, -1])
        return F.linear(hidden, *output_head(self.core))

    def keep(self, rows: Tensor) -> None:
        self.real, self.source = self.real[rows], self.source[rows]
        self.cache.batch_select_indices(rows)


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
