"""`toque check` passes what is right, and fails on the faults it exists for."""

from dataclasses import replace

import pytest
import torch

from fixtures.kitchens import kitchen_in
from tiny import FAMILIES, shape_of
from toque.config import load_config
from toque.data.loader import collate as layout
from toque.errors import CheckFailed
from toque.training.trainer import Trainer
from toque.workflows.diagnosis.check import check


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    """Family -> a configuration with its store prepared."""
    folder, paths = tmp_path_factory.mktemp("check"), {}
    for family in FAMILIES:
        (folder / family).mkdir()
        shape = shape_of(family, width=16, layers=1, heads=2, inner=24, positions=512)
        model = {"family": family, "tokenizer": "trained:512", "shape": shape}
        optim = {"label_smoothing": 0.1}
        paths[family] = kitchen_in(folder / family, n=30, model=model, optim=optim)
    return paths


def checked(path):
    config = load_config(str(path), []).config
    return check(config, examples=8)


def verdicts(found):
    return {outcome.name: outcome.verdict for outcome in found.outcomes}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_way_gives_one_update(family, configs):
    found = checked(configs[family])
    assert found.passed, str(found)
    found.raise_if_failed()
    assert "One loss and one gradient" in str(found)
    computed = [o for o in found.outcomes if o.found is not None]
    assert len(computed) >= 7
    rows = next(o.name for o in computed if o.name.startswith("packed in"))
    assert int(rows.split()[2]) < found.examples, "rows must hold several examples"
    assert all(o.reason for o in found.outcomes if o.verdict == "skipped")


@pytest.mark.parametrize("family", ["t5", "gpt2"])
def test_a_mean_of_means_is_caught(family, configs, monkeypatch):
    def planted(self, parts, n_targets):
        total = torch.zeros(())
        for part in parts:
            loss = self.loss_fn(self.model, part) / part.n_targets / len(parts)
            self.runtime.backward(loss)
            total += loss.detach() * n_targets
        return total

    monkeypatch.setattr(Trainer, "forward_backward", planted)
    found = checked(configs[family])
    assert not found.passed
    seen = verdicts(found)
    assert seen["one example per row, all rows together"] == "same"
    assert seen["one example per row, one at a time"] == "DIFFERENT"


def joined(batch):
    """All examples of a row as one: they see each other."""
    names = [
        n
        for n in ("segments", "source_segments", "target_segments")
        if hasattr(batch, n)
    ]
    return replace(batch, **{n: (getattr(batch, n) > 0).int() for n in names})


def shifted(batch):
    """Every label one position too late."""
    return replace(batch, labels=batch.labels.roll(1, dims=1))


@pytest.mark.parametrize("family", ["t5", "gpt2"])
@pytest.mark.parametrize("fault", [joined, shifted])
def test_a_leak_and_a_wrong_shift_are_caught(family, fault, configs, monkeypatch):
    for name in ("decoder_batch", "encoder_decoder_batch"):
        right = getattr(layout, name)
        monkeypatch.setattr(
            layout,
            name,
            lambda *given, right=right, **named: fault(right(*given, **named)),
        )
    found = checked(configs[family])
    with pytest.raises(CheckFailed, match="Do not train this way"):
        found.raise_if_failed()
    assert "DIFFERENT" in str(found)
    alone = verdicts(found)["one example per row, all rows together"]
    # Without company there is nobody to leak to; a wrong shift is wrong everywhere.
    assert alone == ("same" if fault is joined else "DIFFERENT")
