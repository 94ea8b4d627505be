"""Augmented examples of a store: texts that differ from epoch to epoch."""

from __future__ import annotations

from collections import Counter
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray

from toque.config.schema_methods import AugmentationConfig
from toque.cooking.augmentation.augment import Augmentation
from toque.data.loader.epoch_transforms import Ids, Sides, Varied
from toque.data.prepare.example_rows import prompt_bounds
from toque.data.store.token_store import TokenStore
from toque.data.tokenizer.word_edits import splicer_for
from toque.keyed_random import key_of

_AUGMENT = 4
"""Sets these keys apart from those of the order."""
_SAMPLE = 1024
"""Examples looked at to say in a line what augmentation does; a tenth of a second."""


Fate = Literal["plain", "left", "changed"]
"""Outcome for an example: nothing was drawn; it would be too long or cannot be read back; changed.
"""


class Rewriting:
    """The training examples through augmentation; a function of (row, epoch key).

    An example that would become longer than the longest of `rows` stays as it is, so that rows,
    positions and memory suffice.

    Args:
        rules: how often each technique is applied.
        store: holds the examples.
        rows: store rows to train on.
        encoder: whether prompts are read on a side of their own.
    """

    def __init__(
        self, rules: Augmentation, store: TokenStore, rows: NDArray[np.int64], *, encoder: bool
    ) -> None:
        codec = store.codec()
        self._rules, self._store, self._encoder = rules, store, encoder
        self._splicer, self._eos = splicer_for(codec), codec.eos_id
        self._bounds = prompt_bounds(codec, "encoder-decoder" if encoder else "decoder")
        prompts, targets = store.prompt_lengths[rows], store.target_lengths[rows]
        self._most = int(prompts.max()), int(targets.max()), int((prompts + targets).max())

    @classmethod
    def from_settings(
        cls,
        section: AugmentationConfig | None,
        store: TokenStore,
        rows: NDArray[np.int64],
        *,
        encoder: bool,
    ) -> Self | None:
        """The training examples (`rows` of the store) through augmentation; None without it."""
        if section is None:
            return None
        return cls(Augmentation(**section.model_dump()), store, rows, encoder=encoder)

    @property
    def varied(self) -> Varied:
        """The examples for an epoch plan."""
        return Varied(self, encoder=self._encoder)

    def in_words(self, rows: NDArray[np.int64], *, seed: int) -> str:
        """A line on what augmentation does to a sample of `rows` in the first epoch."""
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
        """How many of `rows` are changed in an epoch, and how many should be and are not."""
        fates = Counter(self._rewritten(row, key)[1] for row in rows.tolist())
        return fates["changed"], fates["left"]

    def _rewritten(self, row: int, key: int) -> tuple[Sides, Fate]:
        prompt, target = self._store.prompt(row), self._store.target(row)
        head, asks, tail = _divided(prompt, *self._bounds)
        _, writes, close = _divided(target, None, self._eos)
        in_prompt, in_target = self._rules.edits(
            self._splicer.words(asks),
            self._splicer.words(writes),
            key=key_of(key, row, _AUGMENT),
            whole=bool(len(close)),
        )
        if not in_prompt and not in_target:
            return (prompt, target), "plain"
        asked = self._splicer.spliced(asks, in_prompt)
        written = self._splicer.spliced(writes, in_target)
        p, t = len(head) + len(asked) + len(tail), len(written) + len(close)
        longest = self._most
        fits = t <= longest[1] and p <= longest[0] if self._encoder else p + t <= longest[2]
        if not fits or (asked is asks and written is writes):
            return (prompt, target), "left"
        sides = np.concatenate([head, asked, tail]), np.concatenate([written, close])
        return sides, "changed"


def _divided(ids: Ids, begin: int | None, end: int | None) -> tuple[Ids, Ids, Ids]:
    """The tokens before a text, its own, and those after it."""
    first = int(begin is not None and len(ids) > 0 and ids[0] == begin)
    last = len(ids) - int(end is not None and len(ids) > first and ids[-1] == end)
    return ids[:first], ids[first:last], ids[last:]
