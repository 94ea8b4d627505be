"""Golden losses: 20 updates of tiny models in float32, dropout on, to 1e-5.

A change that claims to change no numbers leaves `losses.json` untouched; one that changes them
says why in the changelog. `pytest --regenerate tests/golden` rewrites it; the diff is reviewed.
"""

import json
from functools import partial
from pathlib import Path

import pytest

from fixtures.trainers import Numbers
from tiny import EOS, Example, model_of, shape_of, stream_of
from toque.config.schema import OptimConfig
from toque.keyed_random import key_of
from toque.models.forward.keyed_dropout import use_keyed_dropout
from toque.models.forward.loss import loss_sum
from toque.training.callbacks import Callbacks
from toque.training.checkpoint.store import CheckpointStore
from toque.training.lr_schedules import make_schedule
from toque.training.micro_batch import OomFallback
from toque.training.optim.factory import build_optimizer
from toque.training.runtime import Runtime
from toque.training.trainer import Schedule, Trainer
from toque.training.update_guard import UpdateGuard
from toque.units import Duration

GOLDEN = Path(__file__).parent / "losses.json"
VOCAB, STEPS = 97, 20
SHAPES: dict[str, dict[str, object]] = {
    "t5": shape_of("t5", inner=64, dropout=0.1, feed_forward_proj="gated-gelu"),
    "gpt2": shape_of("gpt2"),
    "neox": shape_of("neox", inner=64),
}


def counted(row: int) -> Example:
    """An example that can be learnt: the target repeats the prompt and counts on."""
    lengths = 2 + key_of(row) % 9, 3 + key_of(row, 1) % 20
    prompt, target = (
        [3 + (row * 7 + i) % (VOCAB - 3) for i in range(n)] for n in lengths
    )
    return [*prompt, EOS], [*target, EOS]


def losses(family: str, folder: Path, rows_at_once: int) -> list[float]:
    pairs = [counted(row) for row in range(150)]
    stream = stream_of(
        pairs, family, shape=(32, 64, 64), seed=11, update_rows=4, window=64
    )
    model = model_of(family, vocab=VOCAB, seed=11, shape=SHAPES[family])
    use_keyed_dropout(model)
    watch, stop = Numbers(), Duration(STEPS, "steps")
    runtime = Runtime.detect(device="cpu", precision="float32")
    Trainer(
        model=model,
        optimizer=build_optimizer(model, weight_decay=0.1),
        batches=stream,
        loss_fn=partial(loss_sum, smoothing=0.05),
        lr_at=make_schedule(
            OptimConfig(peak_lr=3e-3, warmup=Duration(4, "steps")), stop
        ),
        evaluator=dict,
        checkpoints=CheckpointStore(folder / "checkpoints"),
        callbacks=Callbacks([watch]),
        runtime=runtime,
        schedule=Schedule(stop),
        oom_fallback=OomFallback(rows_at_once),
        guard=UpdateGuard(runtime),
        max_grad_norm=1.0,
        seed=11,
    ).fit()
    return watch.losses


@pytest.mark.golden
@pytest.mark.parametrize("rows_at_once", [2, 1, 4])
@pytest.mark.parametrize("family", SHAPES)
def test_losses_are_as_they_were(
    family: str, rows_at_once: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    found = losses(family, tmp_path, rows_at_once)
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    if request.config.getoption("--regenerate") and rows_at_once == 2:
        golden[family] = [round(loss, 7) for loss in found]
        GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")
    assert len(found) == STEPS
    assert found[-1] < found[0]
    assert found == pytest.approx(golden[family], abs=1e-5)
