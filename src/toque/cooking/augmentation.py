"""Augmentation of a store's examples by rules: texts that differ from epoch to epoch.

An augmented example is a function of (seed, epoch, example): the rules read its words and a 64-bit
key. Only requests for a whole recipe are changed: other tasks' labels hold for the original text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from toque.config.schema_methods import AugmentationConfig
from toque.cooking.prompts import ASKS_FOR, PROMPT_FORMATS, WITH_INGREDIENTS
from toque.cooking.substitutions import BREAK, Edit, spliced, substitution, words_of
from toque.data.loader.epoch_plan import Sides, Varied
from toque.data.store.token_column import Ids
from toque.data.store.token_store import TokenStore
from toque.data.tokenizer.codec import prompt_bounds
from toque.keyed_random import key_of

_AUGMENT = 4  # sets these keys apart from those of the order
_SAMPLE = 1024  # examples in the sample that `in_words` reports on; it takes a tenth of a second


Fate = Literal["plain", "left", "changed"]  # left: too long, or it cannot be read back


class Rewriting:
    """Training examples, `rows` of a store, augmented: a function of (row, epoch key).

    What would be longer than the longest row stays as it is, so that positions and memory suffice.
    """

    def __init__(
        self,
        rules: AugmentationConfig,
        store: TokenStore,
        rows: NDArray[np.int64],
        *,
        encoder: bool,
    ) -> None:
        codec = store.codec()
        self._rules, self._store, self._encoder = rules, store, encoder
        self._codec, self._eos = codec, codec.eos_id
        self._bounds = prompt_bounds(codec, "encoder-decoder" if encoder else "decoder")
        prompts, targets = store.prompt_lengths[rows], store.target_lengths[rows]
        self._most = int(prompts.max()), int(targets.max()), int((prompts + targets).max())

    @property
    def varied(self) -> Varied:
        """The examples for an epoch plan."""
        return Varied(self, encoder=self._encoder)

    def in_words(self, rows: NDArray[np.int64], *, seed: int) -> str:
        """A sentence on the effect of augmentation on a sample of `rows` in the first epoch."""
        sample = rows[np.linspace(0, len(rows) - 1, min(len(rows), _SAMPLE)).astype(np.int64)]
        changed, left = self.counts(sample, key_of(seed, 0))
        return (
            f"augmentation: of {len(sample):,} examples looked at {changed:,} are changed in the "
            f"first epoch, {left:,} stay plain that would become longer than the longest stored or "
            "cannot be read back word by word"
        )

    def __call__(self, row: int, key: int) -> Sides:
        """Prompt and target of a store row in the epoch of this key."""
        return self._rewritten(row, key)[0]

    def counts(self, rows: NDArray[np.int64], key: int) -> tuple[int, int]:
        """Number of `rows` changed in an epoch, and of those left that a rule drew."""
        fates = Counter(self._rewritten(row, key)[1] for row in rows.tolist())
        return fates["changed"], fates["left"]

    def _rewritten(self, row: int, key: int) -> tuple[Sides, Fate]:
        prompt, target = self._store.prompt(row), self._store.target(row)
        if self._store.spans(row):  # places in a conversation, which an edit would move
            return (prompt, target), "plain"
        head, asks, tail = _divided(prompt, *self._bounds)
        _, writes, close = _divided(target, None, self._eos)
        in_prompt, in_target = edits_of(
            self._rules,
            words_of(self._codec, asks),
            words_of(self._codec, writes),
            key=key_of(key, row, _AUGMENT),
            whole=bool(len(close)),
        )
        if not in_prompt and not in_target:
            return (prompt, target), "plain"
        asked = spliced(self._codec, asks, in_prompt)
        written = spliced(self._codec, writes, in_target)
        p, t = len(head) + len(asked) + len(tail), len(written) + len(close)
        longest = self._most
        fits = t <= longest[1] and p <= longest[0] if self._encoder else p + t <= longest[2]
        if not fits or (asked is asks and written is writes):
            return (prompt, target), "left"
        sides = np.concatenate([head, asked, tail]), np.concatenate([written, close])
        return sides, "changed"


def _divided(ids: Ids, begin: int | None, end: int | None) -> tuple[Ids, Ids, Ids]:
    first = int(begin is not None and len(ids) > 0 and ids[0] == begin)
    last = len(ids) - int(end is not None and len(ids) > first and ids[-1] == end)
    return ids[:first], ids[first:last], ids[last:]


_FORMAT, _CONNECTION, _PARAPHRASE, _SUBSTITUTE, _TIP = range(5)
_ASKS: Final = tuple(ASKS_FOR.split())
_WITH: Final = tuple(WITH_INGREDIENTS.split())
_FORMATS: Final = (_ASKS, *(tuple(form.partition("{text}")[0].split()) for form in PROMPT_FORMATS))
_TARGET_BEGINS: Final = "Ingredients:"
_STEPS_BEGIN: Final = "Instructions:"

Edits = list[Edit]


def edits_of(
    rules: AugmentationConfig,
    prompt: Sequence[str],
    target: Sequence[str],
    *,
    key: int,
    whole: bool,
) -> tuple[Edits, Edits]:
    """The edits of each side of an example; `whole` if the target has the true end of its text."""

    def drawn(technique: int, probability: float) -> bool:
        return key_of(key, technique, 2) / 2.0**64 < probability

    if not target or target[0] != _TARGET_BEGINS:
        return [], []
    asked: Edits = []
    written: Edits = []
    ends = range(len(_WITH), len(prompt))  # of "using ingredients:", before the first name
    names_at = next((at for at in ends if tuple(prompt[at - len(_WITH) : at]) == _WITH), None)
    if tuple(prompt[: len(_ASKS)]) == _ASKS:
        form = _FORMATS[key_of(key, _FORMAT) % len(_FORMATS)]
        if rules.prompt_formats and form != _ASKS:
            asked.append(Edit(0, len(_ASKS), form))
        if names_at and drawn(_CONNECTION, rules.instructions):
            words = CONNECTIONS[key_of(key, _CONNECTION, 1) % len(CONNECTIONS)]
            asked.append(Edit(names_at - len(_WITH), names_at, tuple(words.split())))
    if names_at and drawn(_SUBSTITUTE, rules.substitute):
        swapped = substitution(prompt, target, names_at, key=key_of(key, _SUBSTITUTE, 1))
        asked += swapped[0]
        written += swapped[1]
    if drawn(_PARAPHRASE, rules.paraphrase):
        written += _paraphrased(target, key)
    if whole and drawn(_TIP, rules.tips):
        tip = TIPS[key_of(key, _TIP, 1) % len(TIPS)]
        written.append(Edit(len(target), len(target), (BREAK, "Tip:", *tip.split())))
    kept: Edits = []
    for edit in sorted(written):  # without those that overlap an earlier one
        if not kept or edit.start >= kept[-1].end:
            kept.append(edit)
    return sorted(asked), kept


def _paraphrased(target: Sequence[str], key: int) -> Edits:
    """Replace verbs that begin a sentence of the steps; keeping the verb is one of the choices."""
    edits: Edits = []
    first = target.index(_STEPS_BEGIN) + 1 if _STEPS_BEGIN in target else len(target)
    for at in range(first, len(target)):
        others = VERBS.get(target[at]) if target[at - 1].endswith(".") else None
        choice = key_of(key, _PARAPHRASE, 3, at) % (len(others) + 1) if others else 0
        if others and choice:
            edits.append(Edit(at, at + 1, tuple(others[choice - 1].split())))
    return edits


CONNECTIONS: Final[tuple[str, ...]] = (  # for "using ingredients:" between dish and foods
    "with", "using:", "with these ingredients:", "made from", "I have", "that uses",
)  # fmt: skip

VERBS: Final[dict[str, tuple[str, ...]]] = {  # verbs that begin a sentence of a recipe
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
)  # tips that hold for any dish
