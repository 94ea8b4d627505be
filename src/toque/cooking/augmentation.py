"""Augmentation of a store's examples by rules: texts that change from epoch to epoch.

An augmented example is a function of seed, epoch and example. Only requests for recipes are
changed, because the labels of other tasks belong to the original text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final, Literal

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

_AUGMENT: Final = 4
"""Part of the keys that makes them different from the keys of the order."""
_SAMPLE: Final = 1024
"""Examples in the sample that `in_words` reports, which takes a tenth of a second."""

Outcome = Literal["plain", "left", "changed"]
"""Outcome of the rules for an example. left: changed, but too long or not readable again."""


class Rewriting:
    """Augmented training examples of a store, as a function of row and epoch key.

    An example that would become longer than the longest row stays unchanged, so that it fits in
    memory and in the model's positions.

    Args:
        rules: The probabilities of the rules.
        store: The store.
        rows: The training rows of the store.
        encoder: True for an encoder-decoder model.
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
        prompt_lengths, target_lengths = (
            store.prompt_lengths[rows],
            store.target_lengths[rows],
        )
        self._max_prompt = int(prompt_lengths.max())
        self._max_target = int(target_lengths.max())
        self._max_length = int((prompt_lengths + target_lengths).max())

    @property
    def varied(self) -> Varied:
        """Examples for an epoch plan."""
        return Varied(self, encoder=self._encoder)

    def in_words(self, rows: NDArray[np.int64], *, seed: int) -> str:
        """Describe the effect on a sample of `rows` in the first epoch."""
        sample = rows[
            np.linspace(0, len(rows) - 1, min(len(rows), _SAMPLE)).astype(np.int64)
        ]
        changed, left = self.counts(sample, key_of(seed, 0))
        return (
            f"augmentation: in the first epoch, {changed:,} of {len(sample):,} sampled examples "
            f"are changed. {left:,} stay unchanged because they would become too long, or because "
            "the tokenizer does not reproduce their text"
        )

    def __call__(self, row: int, key: int) -> Sides:
        """Return prompt and target of a row in the epoch with this key."""
        return self._rewrite(row, key)[0]

    def counts(self, rows: NDArray[np.int64], key: int) -> tuple[int, int]:
        """Count the changed rows, and the rows that stay unchanged although a rule applies."""
        outcomes = Counter(self._rewrite(row, key)[1] for row in rows.tolist())
        return outcomes["changed"], outcomes["left"]

    def _rewrite(self, row: int, key: int) -> tuple[Sides, Outcome]:
        prompt, target = self._store.prompt(row), self._store.target(row)
        if self._store.spans(
            row
        ):  # positions in a conversation, which an edit would shift
            return (prompt, target), "plain"
        head, request, tail = _split_off(prompt, *self._bounds)
        _, text, end = _split_off(target, None, self._codec.eos_id)
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
        n_prompt = len(head) + len(new_request) + len(tail)
        n_target = len(new_text) + len(end)
        if self._encoder:
            fits = n_prompt <= self._max_prompt and n_target <= self._max_target
        else:
            fits = n_prompt + n_target <= self._max_length
        if not fits or (new_request is request and new_text is text):
            return (prompt, target), "left"
        sides = (
            np.concatenate([head, new_request, tail]),
            np.concatenate([new_text, end]),
        )
        return sides, "changed"


def _split_off(ids: Ids, begin: int | None, end: int | None) -> tuple[Ids, Ids, Ids]:
    """Split off the special tokens at the beginning and the end of a text."""
    first = int(begin is not None and len(ids) > 0 and ids[0] == begin)
    last = len(ids) - int(end is not None and len(ids) > first and ids[-1] == end)
    return ids[:first], ids[first:last], ids[last:]


_FORMAT, _CONNECTION, _PARAPHRASE, _SUBSTITUTE, _TIP = range(5)
_ASKS: Final = tuple(ASKS_FOR.split())
_WITH: Final = tuple(WITH_INGREDIENTS.split())
_FORMATS: Final = (
    _ASKS,
    *(tuple(form.partition("{text}")[0].split()) for form in PROMPT_FORMATS),
)
_TARGET_BEGINS: Final = "Ingredients:"
_STEPS_BEGIN: Final = "Instructions:"

Edits = list[Edit]


def edits_of(
    rules: AugmentationConfig,
    prompt: Sequence[str],
    target: Sequence[str],
    *,
    key: int,
    is_complete: bool,
) -> tuple[Edits, Edits]:
    """Return the edits of the prompt and of the target of an example.

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
    # Position of the first name, after "using ingredients:".
    positions = range(len(_WITH), len(prompt))
    names_at = next(
        (at for at in positions if tuple(prompt[at - len(_WITH) : at]) == _WITH), None
    )
    if tuple(prompt[: len(_ASKS)]) == _ASKS:
        form = _FORMATS[key_of(key, _FORMAT) % len(_FORMATS)]
        if rules.prompt_formats and form != _ASKS:
            prompt_edits.append(Edit(0, len(_ASKS), form))
        if names_at and applies(_CONNECTION, rules.instructions):
            words = CONNECTIONS[key_of(key, _CONNECTION, 1) % len(CONNECTIONS)]
            prompt_edits.append(
                Edit(names_at - len(_WITH), names_at, tuple(words.split()))
            )
    if names_at and applies(_SUBSTITUTE, rules.substitute):
        swaps = substitution(prompt, target, names_at, key=key_of(key, _SUBSTITUTE, 1))
        prompt_edits += swaps[0]
        target_edits += swaps[1]
    if applies(_PARAPHRASE, rules.paraphrase):
        target_edits += _paraphrase(target, key)
    if is_complete and applies(_TIP, rules.tips):
        tip = TIPS[key_of(key, _TIP, 1) % len(TIPS)]
        target_edits.append(
            Edit(len(target), len(target), (BREAK, "Tip:", *tip.split()))
        )

    disjoint_edits: Edits = []
    for edit in sorted(target_edits):
        if not disjoint_edits or edit.start >= disjoint_edits[-1].end:
            disjoint_edits.append(edit)
    return sorted(prompt_edits), disjoint_edits


def _paraphrase(target: Sequence[str], key: int) -> Edits:
    """Replace verbs at the beginning of sentences by a random synonym, or keep them."""
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


CONNECTIONS: Final[tuple[str, ...]] = (  # replacements of "using ingredients:"
    "with", "using:", "with these ingredients:", "made from", "I have", "that uses",
)  # fmt: skip

VERBS: Final[dict[str, tuple[str, ...]]] = {  # synonyms of verbs that begin a sentence
    "Add": ("Put in",), "Arrange": ("Lay out",), "Beat": ("Whisk",), "Blend": ("Mix",),
    "Chill": ("Refrigerate",), "Combine": ("Mix", "Mix together"), "Drain": ("Strain",),
    "Garnish": ("Decorate",), "Heat": ("Warm",), "Mix": ("Combine", "Stir together"),
    "Place": ("Put", "Set"), "Put": ("Place",), "Refrigerate": ("Chill",),
    "Sauté": ("Fry gently",), "Simmer": ("Boil gently",), "Sprinkle": ("Scatter",),
    "Stir": ("Mix",), "Toss": ("Mix",), "Transfer": ("Move",), "Whisk": ("Beat",),
}  # fmt: skip

TIPS: Final[tuple[str, ...]] = (
    "Read the whole recipe before you begin.",
    "Measure everything out before you start.",
    "Ovens and stoves differ, so look before the time is up.",
    "Leftovers keep best in a closed container in the refrigerator.",
    "A sharp knife makes the work quicker and safer.",
    "Clean up as you go, and there is little left to do at the end.",
)
"""Tips for any dish."""
