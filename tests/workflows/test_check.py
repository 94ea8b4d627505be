"""`toque check` passes what is right, and fails on the faults it exists for."""

from dataclasses import replace

import pytest
import torch

import toque
from toque.config import load_config
from toque.cooking.cookbook.recipes import write_cookbook
from toque.data.loader import collate as layout
from toque.errors import CheckFailed
from toque.training.trainer import Trainer
from toque.workflows.check import check

ROTARY = (
    "{hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 24, "
    "max_position_embeddings: 512}"
)
SHAPES = {
    "t5": "{d_model: 16, d_kv: 8, d_ff: 24, num_layers: 1, num_heads: 2}",
    "gpt2": "{n_embd: 16, n_layer: 1, n_head: 2, n_positions: 512}",
    "neox": ROTARY,
    "llama": ROTARY,
}


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    """Family -> a configuration with its store prepared."""
    folder = tmp_path_factory.mktemp("check")
    write_cookbook(folder / "book.jsonl", n=30, seed=3)
    paths = {}
    for family, shape in SHAPES.items():
        store = folder / ("both" if family == "t5" else "one")
        paths[family] = folder / f"{family}.yaml"
        paths[family].write_text(
            f"run_dir: {folder / 'run'}\n"
            f'model: {{family: {family}, tokenizer: "trained:512", shape: {shape}}}\n'
            f'data: {{sources: [{{path: "{folder / "book.jsonl"}"}}], store: "{store}",\n'
            "  max_prompt_tokens: 48, max_target_tokens: 256}\n"
            'train: {stop_after: "2 steps", batch: "1024 tokens", precision: float32}\n'
            'optim: {warmup: "1 step", label_smoothing: 0.1}\n'
        )
        if family in {"t5", "gpt2"}:
            toque.prepare(paths[family])
    return paths


def checked(path):
    config = load_config(str(path), []).config
    return check(config, examples=8)


def verdicts(found):
    return {outcome.name: outcome.verdict for outcome in found.outcomes}


@pytest.mark.parametrize("family", SHAPES)
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
    assert seen["one example a row, all rows at once"] == "same"
    assert seen["one example a row, one at a time"] == "DIFFERENT"


def joined(batch):
    """All examples of a row as one: they see each other."""
    names = [n for n in ("segments", "source_segments", "target_segments") if hasattr(batch, n)]
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
            layout, name, lambda *given, right=right, **named: fault(right(*given, **named))
        )
    found = checked(configs[family])
    with pytest.raises(CheckFailed, match="Do not trust"):
        found.raise_if_failed()
    assert "DIFFERENT" in str(found)
    alone = verdicts(found)["one example a row, all rows at once"]
    # Without company there is nobody to leak to; a wrong shift is wrong everywhere.
    assert alone == ("same" if fault is joined else "DIFFERENT")
