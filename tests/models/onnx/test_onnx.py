"""ONNX files compute the model, with a cache and with padding, or are refused."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch

from tiny import EOS, EVERY_KIND, PAD, make
from toque.errors import CheckpointError, ConfigError
from toque.models.loading.model_export import save_model
from toque.models.onnx.stored_types import round_weights
from toque.models.onnx.supported_models import find_unsupported
from toque.models.onnx_files import onnx_export as exporting
from toque.models.onnx_files.onnx_export import ExportedOnnx, export_onnx
from toque.models.onnx_files.runtime import DECODER, ENCODER, T5_DECODER

PROMPTS = [[5 + i, 9, 13 + i, 7, EOS] for i in range(20)]


def export(source: Path, to: Path, kind: str = "f32") -> ExportedOnnx:
    return export_onnx(
        source,
        to,
        kind=kind,
        prompts=PROMPTS,
        ends=[EOS],
        pad=PAD,
        record=None,
        add_files=lambda writer: writer.put("README.md", b"# Soup\n"),
    )


def saved(model: Any, to: Path) -> Path:
    save_model(model, None, to, card="")
    return to


@pytest.mark.parametrize(
    ("kind", "stored"),
    [(kind, "f32") for kind in EVERY_KIND]
    + [(kind, stored) for kind in ("t5-v1.1", "gpt2") for stored in ("f16", "int8")],
)
def test_onnxruntime_generates_the_same_tokens(
    kind: str, stored: str, tmp_path: Path
) -> None:
    done = export(saved(make(kind), tmp_path / "model"), tmp_path / "soup", stored)
    assert done.prompts == 20
    assert (done.loss_after == done.loss_before) == (stored == "f32")
    names = {p.name for p in (tmp_path / "soup" / "onnx").iterdir()}
    assert names == ({ENCODER, T5_DECODER} if kind.startswith("t5") else {DECODER})
    with pytest.raises(CheckpointError, match="not empty"):
        export(tmp_path / "model", tmp_path / "soup")


def run(session: Any, **inputs: Any) -> dict[str, Any]:
    """Run a file with an empty cache."""
    cache = {
        item.name: np.zeros((2, item.shape[1], 0, item.shape[3]), np.float32)
        for item in session.get_inputs()
        if item.name.startswith("past")
    }
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, cache | inputs), strict=True))


@pytest.mark.parametrize("kind", ["gpt2", "llama", "t5"])
def test_padding_changes_no_logit(kind: str, tmp_path: Path) -> None:
    """Other programs send batches with padding: on the left for decoders, on the right for T5."""
    model = make(kind)
    folder = export(saved(model, tmp_path / "m"), tmp_path / "soup").folder / "onnx"
    short, long = torch.arange(7, 12), torch.arange(9, 18)
    gap = torch.full((4,), PAD)
    order = [gap, short] if kind != "t5" else [short, gap]
    ids = torch.stack([torch.cat(order), long]).numpy()
    mask = (ids != PAD).astype(np.int64)
    with torch.no_grad():
        if kind == "t5":
            start = np.full((2, 1), model.config.decoder_start_token_id)
            expected = [
                model(input_ids=i[None], decoder_input_ids=torch.from_numpy(start[:1]))
                for i in (short, long)
            ]
            encoder = onnxruntime.InferenceSession(folder / ENCODER)
            states = run(encoder, input_ids=ids, attention_mask=mask)
            logits = run(
                onnxruntime.InferenceSession(folder / T5_DECODER),
                input_ids=start,
                encoder_attention_mask=mask,
                encoder_hidden_states=states["last_hidden_state"],
                use_cache_branch=np.array([False]),
            )["logits"]
        else:
            expected = [model(input_ids=i[None]) for i in (short, long)]
            positions = np.maximum(mask.cumsum(1) - 1, 0)
            decoder = onnxruntime.InferenceSession(folder / DECODER)
            logits = run(
                decoder, input_ids=ids, attention_mask=mask, position_ids=positions
            )["logits"]
    for row, output in zip(logits, expected, strict=True):
        last = output.logits[0, -1].numpy()
        np.testing.assert_allclose(row[-1], last, atol=1e-4 * abs(last).max())


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    model = make("gpt2")
    with torch.no_grad():
        model.get_parameter("transformer.wte.weight")[3] = torch.nan
    with pytest.raises(
        ConfigError, match=r"weight transformer\.wte\.weight has infinite"
    ):
        export(saved(model, tmp_path / "model"), tmp_path / "soup")
    assert not (tmp_path / "soup").exists()


def test_a_short_context_is_compared_as_far_as_it_goes(tmp_path: Path) -> None:
    model = make("llama")
    model.config.max_position_embeddings = 12
    assert export(saved(model, tmp_path / "model"), tmp_path / "soup").prompts == 20


def test_files_that_compute_something_else_are_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = exporting.decoder_graph

    def build_other(_: Any, kind: str) -> Any:
        return build(make("gpt2", seed=1), kind)

    monkeypatch.setattr(exporting, "decoder_graph", build_other)
    with pytest.raises(CheckpointError, match="another token than the model"):
        export(saved(make("gpt2"), tmp_path / "model"), tmp_path / "soup")
    assert not (tmp_path / "soup").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "opt"}, "type opt, and the allowed types are t5, gpt2"),
        ({"hidden_act": "mish"}, "hidden_act=mish"),
        ({"sliding_window": 4}, "sliding_window=4"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type=yarn"),
    ],
)
def test_a_model_without_a_graph_is_refused(
    change: dict[str, Any], message: str
) -> None:
    config = SimpleNamespace(**make("llama").config.to_dict() | change)
    assert re.search(message, find_unsupported(SimpleNamespace(config=config)))
    assert not find_unsupported(make("llama"))


def test_int8_keeps_the_largest_value_of_each_output() -> None:
    model, rounded = make("gpt2"), make("gpt2")
    round_weights(rounded, "int8")
    for name in ("transformer.h.0.mlp.c_fc.weight", "transformer.wte.weight"):
        before, after = model.get_parameter(name), rounded.get_parameter(name)
        axis = 0 if "c_fc" in name else 1
        largest = before.abs().amax(axis)
        torch.testing.assert_close(after.abs().amax(axis), largest)
        assert (after - before).abs().max() <= largest.max() / 254 * 1.01
        assert not torch.equal(after, before)
