"""Span corruption, assembled: examples with spans cut out."""

from __future__ import annotations

from toque.config import RunConfig
from toque.data.loader.epoch_transforms import InEpoch, Sides, Varied
from toque.data.loader.span_corruption import SpanCorruption
from toque.data.store.token_store import TokenStore
from toque.errors import ConfigError
from toque.keyed_random import key_of

_CORRUPT = 5
"""Sets these keys apart from those of the order and of augmentation."""
_HELD_OUT = key_of(0x7370616E73)
"""Held-out texts lose the same spans in every run and at every evaluation."""


def spans_of(config: RunConfig, store: TokenStore, *, encoder: bool) -> SpanCorruption | None:
    """How the run corrupts its texts; None when it does not.

    Raises:
        ConfigError: a model without an encoder, or a vocabulary with too few sentinels.
    """
    asked = config.span_corruption
    if asked is None:
        return None
    if not encoder:
        raise ConfigError(
            "span_corruption is set, and the model has no encoder to read what is left of a text. "
            "Take a T5 (model.family=t5), or set span_corruption to null: a decoder-only model is "
            "pretrained by predicting every token."
        )
    codec = store.codec()
    spans = SpanCorruption(asked.density, asked.mean_length, codec.sentinels(), codec.eos_id)
    longest = int((store.prompt_lengths.astype(int) + store.target_lengths.astype(int)).max())
    if not spans.sentinels or longest > spans.longest_text:
        raise ConfigError(
            f"span_corruption needs a token <extra_id_N> for each of a text's spans: this "
            f"vocabulary has {len(spans.sentinels)} to spare, and the longest text of the store "
            f"has {longest} tokens. Take a T5 tokenizer or trained:N, lower "
            "data.max_target_tokens and prepare again, or raise span_corruption.mean_length."
        )
    return spans


def corrupted(store: TokenStore, spans: SpanCorruption) -> Varied:
    """The examples of a store with other spans cut out in every epoch."""

    def vary(row: int, key: int) -> Sides:
        return spans(store.prompt(row), store.target(row), key_of(key, row, _CORRUPT))

    return Varied(vary, encoder=True)


def corrupted_held_out(store: TokenStore, spans: SpanCorruption) -> InEpoch:
    """The examples of a store as held-out loss is measured on them."""
    return corrupted(store, spans).at(_HELD_OUT)
