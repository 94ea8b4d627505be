from dataclasses import replace

import numpy as np
import pytest
import torch

from tiny import Listed, stream_of
from toque.batch import IGNORE, DecoderBatch, EncoderDecoderBatch
from toque.data.loader.batch_stream import BatchStream, Prefetch, Step
from toque.data.loader.collate import decoder_batch, encoder_decoder_batch
from toque.data.loader.packing import RowShape
from toque.units import Cursor

TWO = Listed([([7, 8], [9, 2]), ([5], [6, 2]), ([], [4, 3, 2])])
X = IGNORE


def test_decoder_rows_as_written_in_the_docstring() -> None:
    batch = decoder_batch(TWO, [(0, 1), (2,)], length=8, pad_id=0)
    assert batch.tokens.tolist() == [[7, 8, 9, 5, 6, 0, 0, 0], [4, 3, 0, 0, 0, 0, 0, 0]]
    assert batch.labels.tolist() == [[X, 9, 2, 6, 2, X, X, X], [3, 2, X, X, X, X, X, X]]
    assert batch.segments.tolist() == [
        [1, 1, 1, 2, 2, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 0],
    ]
    assert batch.positions.tolist() == [
        [0, 1, 2, 0, 1, 0, 0, 0],
        [0, 1, 0, 0, 0, 0, 0, 0],
    ]
    assert (batch.n_targets, batch.n_tokens, batch.n_computed) == (6, 7, 16)


def test_encoder_decoder_rows_are_shifted_right_per_example() -> None:
    batch = encoder_decoder_batch(
        TWO, [(0, 1)], shape=RowShape(4, 5), pad_id=0, start_id=1
    )
    assert batch.source_tokens.tolist() == [[7, 8, 5, 0]]
    assert batch.source_segments.tolist() == [[1, 1, 2, 0]]
    assert batch.target_tokens.tolist() == [[1, 9, 1, 6, 0]]
    assert batch.labels.tolist() == [[9, 2, 6, 2, X]]
    assert batch.target_segments.tolist() == [[1, 1, 2, 2, 0]]
    assert (batch.n_targets, batch.n_tokens, batch.n_computed) == (4, 7, 9)


def test_an_example_without_input_moves_no_label() -> None:
    """One token to predict and no prompt: nothing to predict it from."""
    examples = Listed([([7], [9, 2]), ([], [4]), ([5], [6])])
    batch = decoder_batch(examples, [(0, 1, 2)], length=4, pad_id=3)
    assert batch.tokens.tolist() == [[7, 9, 5, 3]]
    assert batch.labels.tolist() == [[9, 2, 6, X]]
    assert batch.segments.tolist() == [[1, 1, 3, 0]]


def test_padding_is_the_tokenizers() -> None:
    batch = encoder_decoder_batch(
        TWO, [(1,)], shape=RowShape(3, 4), pad_id=8, start_id=1
    )
    assert batch.source_tokens.tolist() == [[5, 8, 8]]
    assert batch.target_tokens.tolist() == [[1, 6, 8, 8]]
    assert batch.labels.tolist() == [[6, 2, X, X]]


def stream(*, encoder: bool, **options: object) -> BatchStream:
    """Updates of six rows; some of the 90 examples of a decoder have no prompt."""
    rng = np.random.default_rng(1)
    pairs = [
        (
            rng.integers(3, 50, rng.integers(0, 9)).tolist()
            or ([3] if encoder else []),
            [*rng.integers(3, 50, n), 2],
        )
        for n in rng.integers(1, 20, 90)
    ]
    family, sizes = (
        "t5" if encoder else "gpt2",
        {"update_rows": 6, "window": 32, "seed": 5},
    )
    return stream_of(pairs, family, shape=(16, 40, 48), **sizes, **options)


def first(s: BatchStream, n: int) -> list[Step]:
    steps, cursor = [], Cursor()
    for _ in range(n):
        steps.append(s.at(cursor))
        cursor = steps[-1].cursor
    return steps


@pytest.mark.parametrize("encoder", [False, True])
def test_counts_from_lengths_equal_counts_from_tensors(encoder: bool) -> None:
    for step in first(stream(encoder=encoder), 12):
        assert step.n_targets == step.batch.n_targets
        assert step.n_tokens == step.batch.n_tokens
        assert step.n_examples == sum(map(len, step.batch.example_ids))
        assert step.n_computed == step.batch.n_computed


@pytest.mark.parametrize("encoder", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_an_update_is_the_same_in_turn_and_by_itself(
    encoder: bool, packed: bool
) -> None:
    """Across the ends of windows and passes."""
    in_turn = first(stream(encoder=encoder, packed=packed), 20)
    assert in_turn[-1].cursor.epoch >= 1
    for begins, step in zip(
        [Cursor()] + [s.cursor for s in in_turn], in_turn, strict=False
    ):
        alone = stream(encoder=encoder, packed=packed).at(begins)
        assert replace(alone, batch=step.batch) == step
        assert alone.batch.example_ids == step.batch.example_ids
        for a, b in zip(
            alone.batch.tensors().values(), step.batch.tensors().values(), strict=True
        ):
            assert torch.equal(a, b)


@pytest.mark.parametrize("encoder", [False, True])
def test_unpacked_updates_hold_the_same_examples(encoder: bool) -> None:
    packed, alone = (first(stream(encoder=encoder, packed=p), 8) for p in (True, False))
    for a, b in zip(packed, alone, strict=True):
        assert [(e,) for row in a.batch.example_ids for e in row] == list(
            b.batch.example_ids
        )
        assert (a.n_targets, a.n_tokens, a.cursor) == (
            b.n_targets,
            b.n_tokens,
            b.cursor,
        )
        assert b.batch.n_targets == b.n_targets


@pytest.mark.parametrize("encoder", [False, True])
def test_ranks_share_an_update_and_agree_on_its_counts(encoder: bool) -> None:
    whole = first(stream(encoder=encoder), 8)
    ranks = [first(stream(encoder=encoder, rank=r, world_size=3), 8) for r in range(3)]
    for step, *shares in zip(whole, *ranks, strict=True):
        for share in shares:
            assert replace(share, batch=step.batch, n_computed=step.n_computed) == step
        together = [row for share in shares for row in share.batch.example_ids]
        assert sorted(together) == sorted(step.batch.example_ids)


@pytest.mark.parametrize("kind", [DecoderBatch, EncoderDecoderBatch])
def test_splitting_keeps_every_row_in_order(kind: type) -> None:
    batch = first(stream(encoder=kind is EncoderDecoderBatch), 1)[0].batch
    assert isinstance(batch, kind)
    parts = batch.split(4)
    assert [part.n_rows for part in parts] == [4, 2]
    assert torch.equal(torch.cat([part.labels for part in parts]), batch.labels)
    assert sum((part.example_ids for part in parts), ()) == batch.example_ids
    assert sum(part.n_targets for part in parts) == batch.n_targets


def test_several_readers_make_the_batches_of_one() -> None:
    shared = stream(encoder=False)
    shared.readers = 4
    with Prefetch(shared, Cursor()) as ahead:
        for expected in first(stream(encoder=False), 25):
            planned, batch = ahead.next()
            assert (planned.cursor, planned.n_targets) == (
                expected.cursor,
                expected.n_targets,
            )
            assert torch.equal(batch.labels, expected.batch.labels)
            assert batch.example_ids == expected.batch.example_ids
