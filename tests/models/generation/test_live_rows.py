"""Rows that come and go for a long time, as a server's do."""

import random

import pytest

from tiny import EOS, PAD, VOCAB, model_of
from toque.models.generation import kv_cache
from toque.models.generation.live_rows import LiveRows, Order
from toque.models.generation.options import GenerationOptions
from written import generate

NEW = 8


@pytest.fixture
def buffers(monkeypatch):
    """Every buffer that a KV cache has allocated."""
    made = []

    class Noted(kv_cache.Columns):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(kv_cache, "Columns", Noted)
    return made


@pytest.mark.parametrize(
    "every", [pytest.param(NEW, id="one at a time"), pytest.param(3, id="never empty")]
)
@pytest.mark.parametrize("family", ["t5", "gpt2"])
def test_short_texts_touch_the_columns_of_short_texts_however_many(
    family, every, buffers
):
    """A server is asked for short texts for days: its cache must not fill with columns long left.

    Pages of a buffer take memory once they are written to.
    """
    model = model_of(family)
    drawn = random.Random(0)
    prompts = [
        drawn.choices(range(2, VOCAB), k=drawn.randint(1, 12)) for _ in range(60)
    ]
    rows = LiveRows(model, rows=4, columns=500, eos_id=EOS, pad_id=PAD)
    answers: list[list[int]] = [[] for _ in prompts]
    n_live = []
    for number, prompt in enumerate(prompts):
        rows.admit([Order(prompt, NEW, GenerationOptions(), number)])
        for _ in range(every):
            for new in rows.step():
                answers[new.order.number].append(new.token)
        n_live.append(len(rows.orders))
    while rows.orders:
        for new in rows.step():
            answers[new.order.number].append(new.token)
    assert (max(n_live) == 0) if every == NEW else (min(n_live) > 0)

    longest = NEW if family == "t5" else NEW - 1 + max(map(len, prompts))
    most = longest if every == NEW else 2 * longest + kv_cache.SPARE
    wide = [
        buffer
        for buffer in buffers
        if buffer.data.shape[2] > len(prompts) * every > most
    ]
    assert wide, "the cache should be made for long texts"
    touched = [
        int(buffer.data.abs().sum((0, 1, 3)).nonzero().max()) + 1 for buffer in wide
    ]
    assert 0 < max(touched) <= most

    alone = generate(
        model, prompts, max_new_tokens=NEW, eos_id=EOS, pad_id=PAD, batch_rows=1
    )
    assert answers == alone, "no text ends early, or one is changed"
