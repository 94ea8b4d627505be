"""Rule-based augmentation of training examples, so that texts differ between epochs.

An augmented example is a function of seed, epoch and example. Only requests for recipes are
changed, because the labels of other tasks belong to the original text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from toque.config.schema_methods import AugmentationConfig
from toque.cooking.prompts import ASKS_FOR, PROMPT_FORMATS, WITH_INGREDIENTS
from toque.cooking.substitutions import BREAK, Edit, splice, substitution, words_of
from toque.data.loader.epoch_plan import Sides, Varied
from toque.data.store.token_column import Ids
from toque.data.store.token_store import TokenStore
from toque.data.tokenizer.codec import prompt_bounds
from toque.keyed_random import key_of

_AUGMENT = 4
"""Component of random keys that separates augmentation from the data order."""
_SAMPLE = 1024
"""Examples in the sample of `describe_effect`. It takes a tenth of a second."""

Outcome = Literal["plain", "rejected", "changed"]
"""Outcome for an example. plain: the rules made no edits. rejected: the edited text is too long, or
the tokenizer does not reproduce the text."""


class Rewriting:
    """Augmented training examples of a store, as a function of row and epoch key.

    An example that would become longer than the store's longest row is not changed, so that it fits
    into memory and into the model's context length.

    Args:
        rules: The probabilities of the rules.
        store: Store with the examples.
        rows: Training rows of the store.
        encoder: True for an encoder-decoder model. It limits prompt and target separately.
    """

    def __init__(
        self,
        rules: AugmentationConfig,
        store: TokenStore,
        rows: NDArray[np.int64],
        *,
        encoder: bool,
    ) -> None:
        self._rules = rules
        self._store = store
        self._encoder = encoder
        self._codec = store.codec()
        self._bounds = prompt_bounds(
            self._codec, "encoder-decoder" if encoder else "decoder"
        )
        prompt_lengths = store.prompt_lengths[rows]
        target_lengths = store.target_lengths[rows]
        self._max_prompt = int(prompt_lengths.max())
        self._max_target = int(target_lengths.max())
        self._max_length = int((prompt_lengths + target_lengths).max())

    @property
    def varied(self) -> Varied:
        """Examples for an epoch plan."""
        return Varied(self, encoder=self._encoder)

    def describe_effect(self, rows: NDArray[np.int64], *, seed: int) -> str:
        """Describe the effect on a sample of `rows` in the first epoch."""
        n_sampled = min(len(rows), _SAMPLE)
        sample = rows[np.linspace(0, len(rows) - 1, n_sampled).astype(np.int64)]
        changed, rejected = self.counts(sample, key_of(seed, 0))
        return (
            f"augmentation: in the first epoch, {changed:,} of {len(sample):,} sampled examples "
            f"are changed. {rejected:,} stay unchanged because they would become too long, or "
            "because the tokenizer does not reproduce their text"
        )

    def __call__(self, row: int, key: int) -> Sides:
        """Return prompt and target of a row in the epoch with this key."""
        return self._rewrite(row, key)[0]

    def counts(self, rows: NDArray[np.int64], key: int) -> tuple[int, int]:
        """Count the changed rows, and the rows that stay unchanged although a rule applies."""
        outcomes = Counter(self._rewrite(row, key)[1] for row in rows.tolist())
        return outcomes["changed"], outcomes["rejected"]

    def _rewrite(self, row: int, key: int) -> tuple[Sides, Outcome]:
        """Return prompt and target of a row after the rules, and the outcome."""
        prompt, target = self._store.prompt(row), self._store.target(row)
        # An edit would shift the token spans of a conversation.
        if self._store.spans(row):
            return (prompt, target), "plain"

        head, request, tail = _split_special_tokens(prompt, *self._bounds)
        _, text, end = _split_special_tokens(target, None, self._codec.eos_id)
        prompt_edits, target_edits = edits_of(
            self._rules,
            words_of(self._codec, request),
            words_of(self._codec, text),
            key=key_of(key, row, _AUGMENT),
            is_complete=bool(len(end)),
        )
        if not prompt_edits and not target_edits:
            return (prompt, target), "plain"

        new_request = splice(self._codec, request, prompt_edits)
        new_text = splice(self._codec, text, target_edits)
        if new_request is request and new_text is text:
            return (prompt, target), "rejected"
        new_prompt = np.concatenate([head, new_request, tail])
        new_target = np.concatenate([new_text, end])
        if not self._fits(len(new_prompt), len(new_target)):
            return (prompt, target), "rejected"
        return (new_prompt, new_target), "changed"

    def _fits(self, n_prompt: int, n_target: int) -> bool:
        """Check that an example with these tokens is not longer than the store's longest row."""
        if self._encoder:
            return n_prompt <= self._max_prompt and n_target <= self._max_target
        return n_prompt + n_target <= self._max_length


def _split_special_tokens(
    ids: Ids, begin: int | None, end: int | None
) -> tuple[Ids, Ids, Ids]:
    """Split a text into its begin token, its other tokens and its end token."""
    has_begin = begin is not None and len(ids) > 0 and ids[0] == begin
    first = 1 if has_begin else 0
    has_end = end is not None and len(ids) > first and ids[-1] == end
    last = len(ids) - 1 if has_end else len(ids)
    return ids[:first], ids[first:last], ids[last:]


# Components of random keys, one per rule. A further number separates the choices of a rule.
_FORMAT, _CONNECTION, _PARAPHRASE, _SUBSTITUTE, _TIP = range(5)
_ASKS = tuple(ASKS_FOR.split())
_WITH = tuple(WITH_INGREDIENTS.split())
_FORMATS = (
    _ASKS,
    *(tuple(form.partition("{text}")[0].split()) for form in PROMPT_FORMATS),
)
_TARGET_BEGINS = "Ingredients:"
_STEPS_BEGIN = "Instructions:"

Edits = list[Edit]


def edits_of(
    rules: AugmentationConfig,
    prompt: Sequence[str],
    target: Sequence[str],
    *,
    key: int,
    is_complete: bool,
) -> tuple[Edits, Edits]:
    """Return the edits of an example's prompt and target. A target without a recipe has no edits.

    Args:
        rules: The probabilities of the rules.
        prompt: Words of the prompt.
        target: Words of the target.
        key: Key of the example in this epoch.
        is_complete: True if the target was not cut at the maximum length.
    """

    def applies(rule: int, probability: float) -> bool:
        return key_of(key, rule, 2) / 2.0**64 < probability

    if not target or target[0] != _TARGET_BEGINS:
        return [], []
    prompt_edits: Edits = []
    target_edits: Edits = []
    names_at = _index_of_names(prompt)

    if tuple(prompt[: len(_ASKS)]) == _ASKS:
        form = _FORMATS[key_of(key, _FORMAT) % len(_FORMATS)]
        if rules.prompt_formats and form != _ASKS:
            prompt_edits.append(Edit(0, len(_ASKS), form))
        if names_at and applies(_CONNECTION, rules.instructions):
            words = CONNECTIONS[key_of(key, _CONNECTION, 1) % len(CONNECTIONS)]
            start = names_at - len(_WITH)
            prompt_edits.append(Edit(start, names_at, tuple(words.split())))

    if names_at and applies(_SUBSTITUTE, rules.substitute):
        swap_key = key_of(key, _SUBSTITUTE, 1)
        in_prompt, in_target = substitution(prompt, target, names_at, key=swap_key)
        prompt_edits += in_prompt
        target_edits += in_target

    if applies(_PARAPHRASE, rules.paraphrase):
        target_edits += _paraphrase(target, key)

    if is_complete and applies(_TIP, rules.tips):
        tip = TIPS[key_of(key, _TIP, 1) % len(TIPS)]
        end = len(target)
        target_edits.append(Edit(end, end, (BREAK, "Tip:", *tip.split())))

    return sorted(prompt_edits), _drop_overlaps(sorted(target_edits))


def _index_of_names(prompt: Sequence[str]) -> int | None:
    """Return the index of the word after "using ingredients:", or None without these words."""
    for index in range(len(_WITH), len(prompt)):
        if tuple(prompt[index - len(_WITH) : index]) == _WITH:
            return index
    return None


def _drop_overlaps(edits: Edits) -> Edits:
    """Drop each edit that overlaps with an earlier one: a verb in a name may have a synonym."""
    disjoint: Edits = []
    for edit in edits:
        if not disjoint or edit.start >= disjoint[-1].end:
            disjoint.append(edit)
    return disjoint


def _paraphrase(target: Sequence[str], key: int) -> Edits:
    """Replace each verb that begins a sentence by a random synonym, or keep it."""
    edits: Edits = []
    first = target.index(_STEPS_BEGIN) + 1 if _STEPS_BEGIN in target else len(target)
    for index in range(first, len(target)):
        synonyms = VERBS.get(target[index])
        if synonyms is None or not target[index - 1].endswith("."):
            continue
        choice = key_of(key, _PARAPHRASE, 3, index) % (len(synonyms) + 1)
        if choice:
            edits.append(Edit(index, index + 1, tuple(synonyms[choice - 1].split())))
    return edits


CONNECTIONS: tuple[str, ...] = (  # replacements of "using ingredients:"
    "with", "using:", "with these ingredients:", "made from", "I have", "that uses",
)  # fmt: skip

VERBS: dict[str, tuple[str, ...]] = {  # synonyms of verbs that begin a sentence
    "Add": ("Put in",), "Arrange": ("Lay out",), "Beat": ("Whisk",), "Blend": ("Mix",),
    "Chill": ("Refrigerate",), "Combine": ("Mix", "Mix together"), "Drain": ("Strain",),
    "Garnish": ("Decorate",), "Heat": ("Warm",), "Mix": ("Combine", "Stir together"),
    "Place": ("Put", "Set"), "Put": ("Place",), "Refrigerate": ("Chill",),
    "Sauté": ("Fry gently",), "Simmer": ("Boil gently",), "Sprinkle": ("Scatter",),
    "Stir": ("Mix",), "Toss": ("Mix",), "Transfer": ("Move",), "Whisk": ("Beat",),
}  # fmt: skip

TIPS: tuple[str, ...] = (
    "Read the whole recipe before you begin.",
    "Measure everything out before you start.",
    "Ovens and stoves differ, so look before the time is up.",
    "Leftovers keep best in a closed container in the refrigerator.",
    "A sharp knife makes the work quicker and safer.",
    "Clean up as you go, and there is little left to do at the end.",
)
"""Tips for any dish."""
