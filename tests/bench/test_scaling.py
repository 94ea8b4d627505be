"""The arithmetic of docs/explanation/scaling.md: worked cases, and the tables that stand there."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(REPOSITORY / "bench"))
    import cluster

    assert sys.modules["cluster"] is cluster
    return cluster


def test_what_each_gpu_sends_in_a_case_worked_by_hand(cluster):
    model = cluster.Model("one", 800, in_layers=600, layers=2, flops_per_token=6.0, tokens=4)
    sent = {
        (gpus, strategy): (u.inside_bytes, u.between_bytes, u.state_bytes)
        for gpus in (8, 16)
        for strategy in cluster.STRATEGIES
        for u in [cluster.update(model, strategy, gpus)]
    }
    # Gradients are 3,200 bytes, gathered weights 1,600 and 1,200, and what is kept 12,800.
    assert sent[8, "ddp"] == (2 * 7 / 8 * 3200, 0.0, 12800.0)
    assert sent[8, "fsdp"] == (7 / 8 * 6000, 0.0, 1600.0)
    assert sent[16, "ddp"] == (2 * 15 / 16 * 3200, 2 * 1 / 2 * 3200 / 8, 12800.0)
    assert sent[16, "fsdp"] == (15 / 16 * 6000, 1 / 2 * 6000 / 8, 800.0)


def test_seconds_hide_behind_products_until_there_are_more_of_them(cluster):
    small = cluster.Model("small", 10, in_layers=10, layers=1, flops_per_token=6e9, tokens=1000)
    assert cluster.update(small, "ddp", 64).efficiency == 1.0
    large = cluster.Model("large", 10**10, in_layers=0, layers=1, flops_per_token=6e9, tokens=1)
    u = cluster.update(large, "fsdp", 64)
    assert u.seconds == pytest.approx(u.gather_seconds + u.reduce_seconds)


def test_the_page_holds_the_tables(cluster):
    page = (REPOSITORY / "docs" / "explanation" / "scaling.md").read_text()
    for model in cluster.models():
        for line in cluster.table(model):
            assert line in page, model.name
