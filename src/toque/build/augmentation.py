"""From the configuration to examples that differ from epoch to epoch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from toque.config import RunConfig
from toque.cooking.augment import Augmentation
from toque.data.order import key_of
from toque.data.rows import prompt_bounds
from toque.data.splice import splicer_for
from toque.data.store import TokenStore
from toque.data.varied import Ids, Sides, Varied

_AUGMENT = 4
"""Sets these keys apart from those of the order."""


def varied_of(
    config: RunConfig, store: TokenStore, rows: NDArray[np.int64], *, encoder: bool
) -> Varied | None:
    """The training examples as augmentation leaves them; None when there is none.

    An example that would become longer than the longest of `rows` stays as it is, so that rows,
    positions and memory suffice.

    Args:
        config: says how often each technique is applied.
        store: holds the examples.
        rows: store rows to train on.
        encoder: whether prompts are read on a side of their own.
    """
    asked = config.augmentation
    if asked is None:
        return None
    rules = Augmentation(**asked.model_dump())
    codec = store.codec()
    splicer = splicer_for(codec)
    begin, end = prompt_bounds(codec, "encoder-decoder" if encoder else "decoder")
    prompts, targets = store.prompt_lengths[rows], store.target_lengths[rows]
    most = int(prompts.max()), int(targets.max()), int((prompts + targets).max())

    def vary(row: int, key: int) -> Sides:
        prompt, target = store.prompt(row), store.target(row)
        head, asks, tail = _divided(prompt, begin, end)
        _, writes, close = _divided(target, None, codec.eos_id)
        in_prompt, in_target = rules.edits(
            splicer.words(asks),
            splicer.words(writes),
            key=key_of(key, row, _AUGMENT),
            whole=bool(len(close)),
        )
        if not in_prompt and not in_target:
            return prompt, target
        new_prompt = np.concatenate([head, splicer.spliced(asks, in_prompt), tail])
        new_target = np.concatenate([splicer.spliced(writes, in_target), close])
        p, t = len(new_prompt), len(new_target)
        fits = t <= most[1] and p <= most[0] if encoder else p + t <= most[2]
        return (new_prompt, new_target) if fits else (prompt, target)

    return Varied(vary, encoder=encoder)


def _divided(ids: Ids, begin: int | None, end: int | None) -> tuple[Ids, Ids, Ids]:
    """The tokens before a text, its own, and those after it."""
    first = int(begin is not None and len(ids) > 0 and ids[0] == begin)
    last = len(ids) - int(end is not None and len(ids) > first and ids[-1] == end)
    return ids[:first], ids[first:last], ids[last:]
