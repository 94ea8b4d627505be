"""The texts of an update are shown without reading the model's weights."""

from pathlib import Path

import pytest

import toque
from fixtures.kitchens import TINY, tiny_config
from toque.data.store.token_store import TokenStore
from toque.units import Cursor
from toque.workflows.build import build_language_model, build_stream
from toque.workflows.diagnosis.show_batch import show_batch


@pytest.mark.usefixtures("own_kitchen")
@pytest.mark.parametrize("adapter", [None, {"kind": "lora", "r": 2}])
def test_no_weight_is_read_and_the_batch_is_the_runs(adapter):
    run = toque.train(tiny_config())
    model = {"family": "auto", "start_from": str(run.model)}
    changes = {
        "model": model,
        "adapter": adapter,
        "data": TINY["data"] | {"store": "second"},
    }
    config = toque.configure(TINY | changes)
    toque.prepare(config)
    store = TokenStore.open(Path("second"))
    stream = build_stream(config, store, build_language_model(config, store))
    (run.model / "model.safetensors").unlink()
    shown = str(show_batch(config, max_examples=1000))
    batch = stream.at(Cursor()).batch
    rows = [row for packed in batch.example_ids for row in packed]
    assert shown.startswith(f"step 1: {len(rows)} examples in {batch.n_rows} rows")
    found = [
        int(line.split()[3].rstrip(","))
        for line in shown.splitlines()
        if "store row" in line
    ]
    assert found == rows
