import pytest
import torch

from toque.errors import ConfigError
from toque.training.checkpoint.saved import verify_checkpoint

CPU = "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: 9 bytes"


def short_of_memory(trainer, *, step, fits, error=None):
    """Steps from `step` on have room for `fits` rows only; it runs out after some gradients."""
    loss_fn = trainer.loss_fn

    def limited(model, batch):
        loss = loss_fn(model, batch)
        if trainer.progress.step >= step and batch.n_rows > fits:
            torch.autograd.backward(loss * 3.0)  # what a half-done try leaves behind
            raise error or torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2 GiB"
            )
        return loss

    trainer.loss_fn = limited


@pytest.mark.parametrize("error", [None, RuntimeError(CPU)])
def test_the_same_update_is_computed_with_fewer_rows(make_run, error):
    whole = make_run(folder=make_run.folder / "whole", micro_batch_rows=1, steps=3)
    whole.trainer.fit()
    run = make_run(micro_batch_rows=4, steps=3)
    short_of_memory(run.trainer, step=0, fits=1, error=error)
    run.trainer.fit()
    assert run.losses == whole.losses
    assert all(torch.equal(w, whole.weights()[n]) for n, w in run.weights().items())
    assert run.trainer.oom_fallback.smaller_from == {0: 1}
    assert (
        "step 0 ran out of memory with 4 rows per micro-batch"
        in run.recorder.warnings[0]
    )
    assert len(run.recorder.warnings) == 2  # 4 -> 2 -> 1


def test_a_resumed_run_splits_every_step_as_it_was(make_run):
    run = make_run(micro_batch_rows=4, steps=9, save_every="3 steps")
    remembered = []
    run.trainer.oom_fallback.remember = lambda smaller: remembered.append(dict(smaller))
    short_of_memory(run.trainer, step=5, fits=2)
    run.trainer.fit()
    assert remembered == [{5: 2}]
    again = make_run(micro_batch_rows=4, steps=9, keep_last=9)
    again.trainer.load(
        verify_checkpoint(run.trainer.checkpoints.folder / "step-00000003")
    )
    again.trainer.oom_fallback.smaller_from.update(remembered[-1])
    again.trainer.fit()
    assert again.losses == run.losses[3:]
    assert again.recorder.warnings == []
    assert all(torch.equal(w, run.weights()[n]) for n, w in again.weights().items())


def test_one_row_that_does_not_fit_is_refused_and_other_errors_pass(make_run):
    run = make_run(micro_batch_rows=2, steps=3)
    short_of_memory(run.trainer, step=1, fits=0)
    with pytest.raises(
        ConfigError, match=r"Step 1 does not fit.*one row.*Tried to allocate"
    ):
        run.trainer.fit()
    other = make_run(folder=make_run.folder / "other", steps=3)
    short_of_memory(
        other.trainer, step=1, fits=0, error=RuntimeError("shapes do not fit")
    )
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        other.trainer.fit()
