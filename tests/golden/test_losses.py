"""Golden losses: 20 updates of tiny models in float32, to 1e-5.

A change that claims to change no numbers leaves `losses.json` untouched; one that changes them
says why in the changelog. `pytest --regenerate tests/golden` rewrites it; the diff is reviewed.
"""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from toque.data.loader.batch_stream import BatchStream
from toque.data.loader.collate import Layout
from toque.data.loader.epoch_plan import EpochPlan
from toque.data.loader.packing import RowShape
from toque.keyed_random import key_of
from toque.models.forward.loss import loss_sum
from toque.models.loading.pretrained import build_model
from toque.training.autotune.oom_fallback import OomFallback
from toque.training.callbacks import Callback, Callbacks
from toque.training.checkpoint.store import CheckpointStore
from toque.training.events import StepInfo
from toque.training.guards.update_guard import UpdateGuard
from toque.training.lr_schedules import make_schedule
from toque.training.optim.factory import build_optimizer
from toque.training.runtime import Runtime
from toque.training.schedule import Schedule
from toque.training.trainer import Trainer
from toque.units import Duration

GOLDEN = Path(__file__).parent / "losses.json"
VOCAB, PAD, EOS, STEPS = 97, 0, 1, 20
SHAPES: dict[str, dict[str, object]] = {
    "t5": {
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 64,
        "num_layers": 2,
        "num_heads": 4,
        "dropout_rate": 0.1,
        "feed_forward_proj": "gated-gelu",
    },
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "neox": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "max_position_embeddings": 64,
    },
}


class Counted:
    """Examples that can be learnt: the target repeats the prompt and counts on."""

    def prompt(self, row: int, /) -> np.ndarray:
        length = 2 + key_of(row) % 9
        return np.array([3 + (row * 7 + i) % (VOCAB - 3) for i in range(length)] + [EOS])

    def target(self, row: int, /) -> np.ndarray:
        length = 3 + key_of(row, 1) % 20
        return np.array([3 + (row * 7 + i) % (VOCAB - 3) for i in range(length)] + [EOS])


class Losses(Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_step(self, info: StepInfo) -> None:
        self.seen.append(float(info.loss))


def losses(family: str, folder: Path) -> list[float]:
    encoder, examples, n = family == "t5", Counted(), 150
    p = np.array([len(examples.prompt(i)) for i in range(n)])
    t = np.array([len(examples.target(i)) for i in range(n)])
    shape = RowShape(32, 64) if encoder else RowShape(0, 64)
    plan = EpochPlan(
        examples=np.arange(n),
        source_lengths=p if encoder else np.zeros_like(p),
        target_lengths=t if encoder else p + t - 1,
        shape=shape,
        seed=11,
        update_rows=4,
        window=64,
    )
    model = build_model(
        family=family,
        shape=SHAPES[family],
        vocab_size=VOCAB,
        pad_id=PAD,
        eos_id=EOS,
        bos_id=None,
        seed=11,
    )
    watch, stop = Losses(), Duration(STEPS, "steps")
    runtime = Runtime.detect(device="cpu", precision="float32")
    Trainer(
        model=model,
        optimizer=build_optimizer(model, weight_decay=0.1),
        batches=BatchStream(plan, Layout(examples, shape=shape, pad_id=PAD), p, t),
        loss_fn=partial(loss_sum, smoothing=0.05),
        lr_at=make_schedule("cosine", peak_lr=3e-3, warmup=Duration(4, "steps"), stop_after=stop),
        evaluator=dict,
        checkpoints=CheckpointStore(folder / "checkpoints"),
        callbacks=Callbacks([watch]),
        runtime=runtime,
        schedule=Schedule(stop),
        oom_fallback=OomFallback(2),
        guard=UpdateGuard(runtime),
        max_grad_norm=1.0,
        seed=11,
    ).fit()
    return watch.seen


@pytest.mark.golden
@pytest.mark.parametrize("family", SHAPES)
def test_losses_are_as_they_were(
    family: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    found = losses(family, tmp_path)
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    if request.config.getoption("--regenerate"):
        golden[family] = [round(loss, 7) for loss in found]
        GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")
    assert len(found) == STEPS
    assert found[-1] < found[0]
    assert found == pytest.approx(golden[family], abs=1e-5)
