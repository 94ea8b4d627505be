"""The arithmetic of docs/explanation/scaling.md: worked cases, and the tables that stand there."""

import sys
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch

from toque.training.distributed.exchange import exchange_of

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(REPOSITORY / "bench"))
    import cluster

    assert sys.modules["cluster"] is cluster
    return cluster


def model_of(cluster, **facts):
    """768 weights, 512 of them in two blocks."""
    layers = torch.nn.ModuleList(torch.nn.Linear(16, 16, bias=False) for _ in range(2))
    small = torch.nn.ModuleDict({"table": torch.nn.Embedding(16, 16), "layers": layers})
    exchange = partial(exchange_of, small, dtype=torch.bfloat16)
    return cluster.Model("small", exchange, 768, layers=2, **facts)


def test_what_each_gpu_sends_in_a_case_worked_by_hand(cluster):
    model = model_of(cluster, flops_per_token=6.0, tokens=4)
    sent = {
        (gpus, strategy): (u.inside_bytes, u.between_bytes, u.state_bytes)
        for gpus in (8, 16)
        for strategy in cluster.STRATEGIES
        for u in [cluster.update(model, strategy, gpus)]
    }
    # Gradients are 3,072 bytes, gathered weights twice 1,024 and once 1,024; six numbers beside.
    assert sent[8, "ddp"] == (2 * 7 / 8 * 3096, 0.0, 12288.0)
    assert sent[8, "fsdp"] == (7 / 8 * 6144, 0.0, 1536.0)
    assert sent[16, "ddp"] == (2 * 15 / 16 * 3096, 2 * 1 / 2 * 3096 / 8, 12288.0)
    assert sent[16, "fsdp"] == (15 / 16 * 6144, 1 / 2 * 6144 / 8, 768.0)


def test_seconds_hide_behind_products_until_there_are_more_of_them(cluster):
    much = model_of(cluster, flops_per_token=6e9, tokens=1000)
    assert cluster.update(much, "ddp", 64).efficiency == 1.0
    little = model_of(cluster, flops_per_token=6.0, tokens=1)
    u = cluster.update(little, "fsdp", 64)
    assert u.seconds == pytest.approx(u.gather_seconds + u.reduce_seconds)


def test_the_page_holds_the_tables(cluster):
    page = (REPOSITORY / "docs" / "explanation" / "scaling.md").read_text()
    for model in cluster.models():
        for line in cluster.table(model):
            assert line in page, model.name
