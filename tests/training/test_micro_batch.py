import json
import weakref

import pytest
import torch

from toque.batch import IGNORE
from toque.hardware.memory import HEADROOM
from toque.runs.estimate import even_rows, largest_rows
from toque.training.autotune import _read_cache, _write_cache
from toque.training.micro_batch import Probe, WorstBatch, least_of
from toque.training.resources import Resources
from toque.training.runtime import Runtime


def test_updates_are_divided_evenly():
    assert [even_rows(30, n) for n in (1, 4, 16, 29, 30, 99)] == [1, 4, 15, 15, 30, 30]
    assert all(
        -(-n // even_rows(n, m)) == -(-n // m)
        for n in range(1, 40)
        for m in range(1, 40)
    )


@pytest.mark.parametrize(
    ("room", "rows"), [(10_000, 30), (900, 6), (450, 3), (280, 2), (150, 1)]
)
def test_the_most_that_fit_on_a_device(room, rows):
    tried = []

    def peak(rows):
        tried.append(rows)
        needed = (
            50 + 100 * rows + (10 * rows if rows > 4 else 0)
        )  # worse than two sizes tell
        return needed if needed <= room else None

    assert (
        largest_rows(peak, update_rows=30, available_bytes=lambda: HEADROOM * room)
        == rows
    )
    assert peak(rows) is not None


@pytest.mark.parametrize("sides", [(0, 21, 0, 8), (12, 21, 6, 8), (12, 6, 3, 6)])
def test_the_worst_batch_is_full_of_the_longest_examples(sides):
    source, target, longest_source, longest_target = sides
    batch = WorstBatch(*sides, vocab_size=5)(3)
    assert (batch.n_rows, batch.n_computed) == (3, 3 * (source + target))
    assert batch.n_tokens == batch.n_computed
    assert not bool((batch.labels == IGNORE).any())
    assert int(batch.labels.max()) < 5
    numbers = batch.target_segments if source else batch.segments
    assert int(numbers[0].bincount()[1:].max()) <= longest_target
    if source:
        assert int(batch.source_segments[0].bincount()[1:].max()) <= longest_source
        assert batch.source_segments.unique().tolist() == numbers.unique().tolist()
    else:
        starts = batch.positions[0] == 0
        assert int(starts.sum()) == len(numbers[0].unique())
        assert bool((numbers[0][1:].diff()[starts[2:]] == 1).all())


def test_a_measurement_that_takes_too_long_is_not_repeated():
    times = [9.0, 1.0, 2.0]
    measured = iter(times)
    assert least_of(lambda: next(measured), most_seconds=5.0) == 9.0
    measured = iter(times)
    assert least_of(lambda: next(measured), budget_seconds=0.0) == 1.0


def loss_fn(model, batch):
    return model(batch.tokens).square().sum()


def test_the_probe_counts_what_is_kept_and_leaves_no_trace(tiny_model):
    probe = Probe(tiny_model, loss_fn, Runtime(), WorstBatch(0, 16, 0, 16, 61))
    one, two, three = (probe.activation_bytes(n, 10**9) for n in (1, 2, 3))
    assert 0 < one < two < three
    assert three - two == two - one
    assert probe.activation_bytes(1, one) == one
    assert probe.activation_bytes(1, one - 1) is None
    assert probe.seconds(2) > 0
    assert all(p.grad is None for p in tiny_model.parameters())

    def failing(_model, _batch):
        raise torch.OutOfMemoryError("no room")

    assert (
        Probe(tiny_model, failing, Runtime(), probe.worst).activation_bytes(1, 10**9)
        is None
    )


def test_counting_activations_keeps_none_of_them(tiny_model):
    seen = []

    def exponential(model, batch):
        shares = model(batch.tokens).exp()  # it saves its own result
        seen.append(weakref.ref(shares))
        return shares.sum()

    probe = Probe(tiny_model, exponential, Runtime(), WorstBatch(0, 16, 0, 16, 61))
    assert probe.activation_bytes(1, 10**9)
    assert [found() for found in seen] == [None]


def test_measurements_are_kept_apart_by_what_they_are_of(tmp_path, monkeypatch):
    monkeypatch.setenv("TOQUE_CACHE", str(tmp_path / "a"))
    assert _read_cache({"rows": 1}) is None
    _write_cache({"rows": 1, "shape": [2, 3]}, {"seconds": 0.5})
    assert _read_cache({"shape": [2, 3], "rows": 1}) == {"seconds": 0.5}
    assert _read_cache({"rows": 2, "shape": [2, 3]}) is None
    (file,) = (tmp_path / "a").rglob("*.json")
    file.write_text("{torn")
    assert _read_cache({"rows": 1, "shape": [2, 3]}) is None
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TOQUE_CACHE", str(tmp_path / "file"))
    _write_cache({}, {})  # cannot be written, and that is no error


def test_a_runs_resources_are_read_back(tmp_path):
    chosen = Resources(8, True, False, {"threads": 2}, {7: 4})
    assert Resources.load(tmp_path) is None
    chosen.save(tmp_path / "run")
    assert Resources.load(tmp_path / "run") == chosen
    record = json.loads((tmp_path / "run" / "resources.json").read_text())
    (tmp_path / "run" / "resources.json").write_text(
        json.dumps({**record, "unknown": 1})
    )
    assert Resources.load(tmp_path / "run") is None
