"""Callbacks of transformers' Trainer, unchanged, on a run of Toque; and every update's loss."""

import pytest
from transformers import (
    EarlyStoppingCallback,
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
)

import toque
from fixtures.kitchens import tiny_config
from toque.errors import ConfigError

LENGTH = {"stop_after": "6 steps", "evaluate_every": "1 steps", "save_every": "3 steps"}


@pytest.fixture
def config(stocked, tmp_path, monkeypatch):
    monkeypatch.chdir(stocked)
    return tiny_config(
        run_dir=str(tmp_path / "run"), train=LENGTH, observe={"log_every": "4 steps"}
    )


class Recorder(TrainerCallback):
    def __init__(self):
        self.seen, self.losses = [], []

    def on_step_end(self, args, state, control, **kwargs):
        assert kwargs["model"] is None
        self.seen.append(("step", state.global_step, state.epoch > 0))
        control.should_save = state.global_step == 4
        control.should_training_stop = state.global_step == 5
        return control

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.seen.append(("log", state.global_step, sorted(logs)))

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        self.losses.append(metrics["eval_loss"])
        self.seen.append(("evaluate", state.global_step, state.best_metric))

    def on_save(self, args, state, control, **kwargs):
        self.seen.append(("save", state.global_step, args.output_dir))


def test_its_events_come_in_a_trainers_order_and_words(config):
    recorder = Recorder()
    run = toque.train(config, callbacks=[recorder])
    assert (run.step, run.reason) == (5, "callback")
    evaluated = [
        "epoch",
        "eval_bits_per_byte",
        "eval_loss",
        "eval_perplexity",
        "eval_target_tokens",
    ]
    bests = [None, *(min(recorder.losses[:n]) for n in range(1, 5))]
    expected = []
    for n in range(1, 6):
        expected.append(("step", n, True))
        expected += (
            [("log", 4, ["epoch", "grad_norm", "learning_rate", "loss"])]
            if n == 4
            else []
        )
        expected += [("log", n, evaluated), ("evaluate", n, bests[n - 1])]
    # Checkpoints are written in the background: of their order nothing is promised.
    assert [event for event in recorder.seen if event[0] != "save"] == expected
    saves = [event[2] for event in recorder.seen if event[0] == "save"]
    assert saves == [config.run_dir] * 3  # when due, when asked for, and at the end
    assert [step for step, _ in run.losses] == [1, 2, 3, 4, 5]
    every = tiny_config(
        run_dir=f"{config.run_dir}-2", train=LENGTH
    )  # logs each of them
    assert toque.train(every).losses[:5] == run.losses


def test_early_stopping_counts_through_a_resume_and_the_printer_prints(config, capsys):
    patient = toque.configure(config, train={"stop_after": "2 steps"})
    first = EarlyStoppingCallback(3, early_stopping_threshold=9.0)
    assert toque.train(patient, callbacks=[first]).step == 2
    assert (
        first.early_stopping_patience_counter == 1
    )  # the first evaluation is the best so far
    second = EarlyStoppingCallback(3, early_stopping_threshold=9.0)
    run = toque.train(config, callbacks=[second, PrinterCallback()])
    assert (run.step, run.reason) == (4, "callback")
    printed = capsys.readouterr().out
    assert "'eval_loss': '" in printed
    assert "'learning_rate': '" in printed


def test_events_that_no_run_has_are_refused(config):
    with pytest.raises(
        ConfigError, match="ProgressCallback overrides on_predict, on_prediction_step,"
    ):
        toque.train(config, callbacks=[ProgressCallback()])
