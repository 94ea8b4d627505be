"""Prompts of a run and texts of its model, for preference pairs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from toque.data.array_types import Ints
from toque.data.store.store_manifest import form_of
from toque.data.store.token_store import TokenStore
from toque.data.tokenizer.chat import chat_template_of
from toque.data.tokenizer.chat_messages import MessageReader
from toque.data.tokenizer.codec import generation_bounds
from toque.errors import ConfigError
from toque.keyed_random import key_of, shuffle
from toque.models.generation.engine import generate, limit_answers
from toque.models.generation.options import GenerationOptions
from toque.reporter import Count, Reporter, counting
from toque.sources.documents import plain_text
from toque.workflows.inference.open_model import OpenedModel
from toque.workflows.trained_model.prompt_reader import ReadPrompt

_CHUNK_TEXTS: Final = 4096
"""Number of texts that are generated before they are compared. Each needs about 10 kB of memory."""
OTHER_TOKENS: Final = "the prompt has other tokens when it is encoded again"
# Separates these random numbers from the random numbers of other commands.
_SEED: Final = key_of(0x7061697273)


@dataclass(frozen=True)
class Prompt:
    """A prompt for which texts are generated."""

    ids: list[int]
    text: str
    """Prompt in the format that the model expects."""
    content: Any
    """Value of the field `prompt` in the file: a text, or a list of messages."""
    where: str
    """Origin of the prompt, for messages."""
    target: str | None = None
    """Text that was written for the prompt."""
    is_cut: bool = False
    """True if the target was cut to the maximum length when the data were prepared."""


def encode_lines(lines: Sequence[ReadPrompt], opened: OpenedModel) -> list[Prompt]:
    """Encode the prompts of a file."""
    has_messages = opened.provenance.form == "conversations"
    prompts = []
    for line in lines:
        content: Any = line.text
        if has_messages:
            content = [{"role": "user", "content": line.text}]
        ids = opened.prompt_ids(line.text)
        prompts.append(Prompt(ids, line.text, content, line.where, line.target))
    return prompts


def sample_prompts(
    store: TokenStore,
    opened: OpenedModel,
    problem_of: Callable[[Prompt], str],
    dropped: Counter[str],
    limit: int,
    seed: int,
) -> list[Prompt]:
    """Read training prompts in random order.

    Args:
        store: Store of the run.
        opened: Model of the run.
        problem_of: Function that returns the reason for dropping a prompt, or "".
        dropped: Number of dropped prompts by reason, which this call increases.
        limit: Maximum number of prompts.
        seed: Seed of the order.

    Raises:
        ConfigError: The store has no prompts.
    """
    reader = _PromptReader(store, opened)
    rows = _find_rows(store)
    prompts: list[Prompt] = []
    for number in shuffle(len(rows), key=key_of(_SEED, seed)).tolist():
        if len(prompts) == limit:
            break
        prompt = reader.read(int(rows[number]))
        problem = OTHER_TOKENS if prompt is None else problem_of(prompt)
        if prompt is None or problem:
            dropped[problem] += 1
        else:
            prompts.append(prompt)
    return prompts


def _find_rows(store: TokenStore) -> Ints:
    """List the training rows with a prompt.

    Raises:
        ConfigError: No row has a prompt.
    """
    rows = store.wanted_rows("train")
    documents = [
        entry.source
        for entry in store.manifest.sources
        if form_of([entry.reader]) == "documents"
    ]
    is_document = np.isin(store.column("source")[rows], documents)
    rows = rows[~is_document & (store.prompt_lengths[rows] > 0)]
    if not len(rows):
        raise ConfigError(
            f"The store {store.path} has no prompts, but a preference pair has two answers to a "
            "prompt. Name a run with prompts and targets, with conversations or with recipes."
        )
    return rows


class _PromptReader:
    """Reader of a store's prompts, in a form that another store encodes to the same ids."""

    def __init__(self, store: TokenStore, opened: OpenedModel) -> None:
        self._store = store
        self._opened = opened
        form = opened.provenance.form
        # The id between a prompt and its answer.
        _, self._end = generation_bounds(opened.codec, opened.family_kind, form)
        self._messages: MessageReader | None = None
        if form == "conversations":
            template = chat_template_of(opened.codec)
            assert template is not None, "the codec of a conversation store has one"
            self._messages = MessageReader(template)

    def read(self, row: int) -> Prompt | None:
        """Read the prompt and the target of a row. None if the prompt would get other ids."""
        codec = self._opened.codec
        prompt_ids, answer = self._store.prompt_and_answer(row)
        ids: list[int] = prompt_ids.tolist()
        if self._messages is not None:
            text = codec.decode(ids)
            content: Any = self._messages.read(ids)
        else:
            text = codec.decode(ids[:-1] if ids[-1] == self._end else ids)
            content = plain_text(text, Counter())
            if self._opened.prompt_ids(content) != ids:
                content = None
        if content is None:
            return None
        return Prompt(
            ids,
            text,
            content,
            where=f"row {row} of {self._store.path}",
            target=codec.decode(answer, skip_special_tokens=True),
            is_cut=int(answer[-1]) not in codec.end_ids,
        )


class Text(NamedTuple):
    """A text that the model generated."""

    text: str
    is_cut: bool
    """True if the text reached the maximum length."""
    logprobs: list[float]
    """Log-probabilities of the tokens, in nats."""


def generate_texts(
    opened: OpenedModel,
    prompts: Sequence[Prompt],
    samples: int,
    options: GenerationOptions,
    reporter: Reporter,
) -> Iterator[tuple[Prompt, list[Text]]]:
    """Yield each prompt with its texts."""
    options = opened.provenance.completed(options)
    n_repeats: Counter[tuple[int, ...]] = Counter()
    draws: list[int] = []
    for prompt in prompts:
        # Equal prompts get different texts.
        repeat = n_repeats[tuple(prompt.ids)]
        n_repeats[tuple(prompt.ids)] += 1
        draws += [key_of(_SEED, repeat, k, *prompt.ids) for k in range(samples)]

    n_total = len(draws)
    chunk_size = max(1, _CHUNK_TEXTS // samples)
    with counting(reporter, "writing", "texts") as count:
        for start in range(0, len(prompts), chunk_size):
            chunk = prompts[start : start + chunk_size]
            first = start * samples
            texts = _generate_chunk(
                opened,
                [prompt for prompt in chunk for _ in range(samples)],
                draws[first : first + len(chunk) * samples],
                options,
                _count_from(first, n_total, count),
                reporter,
            )
            for number, prompt in enumerate(chunk):
                yield prompt, texts[number * samples : (number + 1) * samples]


def _count_from(first: int, n_total: int, count: Count) -> Count:
    """Return the count of a chunk that begins with text `first` of `n_total`."""

    def count_chunk(done: int, n_texts: int, share: float | None = None, /) -> None:
        n_covered = done if share is None else share * n_texts
        count(first + done, n_total, (first + n_covered) / n_total)

    return count_chunk


def _generate_chunk(
    opened: OpenedModel,
    prompts: Sequence[Prompt],
    draws: Sequence[int],
    options: GenerationOptions,
    on_progress: Count,
    reporter: Reporter,
) -> list[Text]:
    """Generate a text for each prompt."""
    assert options.max_new_tokens is not None, "`Provenance.completed` sets it"
    codec = opened.codec
    ids = [prompt.ids for prompt in prompts]
    places = [prompt.where for prompt in prompts]
    limits = limit_answers(opened.model, ids, options.max_new_tokens, places)
    logprobs: list[list[float]] = [[] for _ in prompts]
    answers = generate(
        opened.model,
        ids,
        options,
        eos_id=codec.end_ids,
        pad_id=codec.pad_id,
        places=places,
        draws=draws,
        on_progress=on_progress,
        on_logprob=lambda number, logprob: logprobs[number].append(logprob),
        on_notice=reporter.notice,
    )
    return [
        Text(
            codec.decode(answer, skip_special_tokens=True),
            len(answer) == limit,
            logprobs[number],
        )
        for number, (answer, limit) in enumerate(zip(answers, limits, strict=True))
    ]
