import io
import json
import math
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from fixtures.damage import no_file_above
from fixtures.updates import update
from toque.cli.console import ConsoleReporter
from toque.errors import CheckpointError
from toque.runs.history import read_metrics
from toque.runs.peak import Peak
from toque.runs.time_left import TimeLeft
from toque.training.callbacks import Best, RunEnd, RunStart, Saved
from toque.training.observers.live_progress import ConsoleProgress, Highlight, Summary
from toque.training.observers.metrics_log import MetricsLog
from toque.units import Duration, Progress

STOP = Duration(100, "steps")


def log_of(tmp_path, **options):
    log = MetricsLog(
        tmp_path / "run" / "metrics.jsonl", log_every=Duration(2, "steps"), **options
    )
    log.on_fit_start(RunStart(Progress(), STOP, ("a note",)))
    return log


def lines(log):
    return [json.loads(line) for line in log.path.read_text().splitlines()]


def test_the_events_and_fields_of_the_contract(tmp_path):
    log = log_of(
        tmp_path,
        about={"config_sha256": "c0"},
        flops_per_token=1e6,
        peak=Peak(1e9, "stated"),
    )
    for step in (1, 2, 3):
        log.on_step(update(step, loss=float(step)))
    log.on_evaluate(Progress(step=3), {"loss": 1.5, "perplexity": math.inf})
    log.on_before_save(Progress(step=3))
    log.on_save(
        Progress(step=3), Saved(tmp_path / "checkpoints" / "step-00000003", 3, 10, 0.5)
    )
    log.on_fit_end(RunEnd("finished", Progress(step=3, seconds=1.5), 9.0, Best(3, 1.5)))
    start, warning, one, two, evaluation, three, save, end = lines(log)
    assert start["event"] == "start"
    assert start["config_sha256"] == "c0"
    assert start["peak_origin"] == "stated"
    assert (warning["event"], warning["message"]) == ("warning", "a note")
    assert [one["step"], two["step"], three["step"]] == [1, 2, 3]
    assert two == {
        "event": "step", "step": 2, "epoch": 0.2, "loss": 2.0, "lr": 1e-3, "grad_norm": 0.5,
        "target_tokens": 60, "tokens": 100, "pad_fraction": pytest.approx(0.2), "seconds": 0.5,
        "tokens_per_second": 200.0, "data_wait_seconds": 0.1, "mfu": 0.2,
        "run_seconds": 1.0, "parts": {"data_wait": 0.1},
    }  # fmt: skip
    assert evaluation["metrics"] == {"loss": 1.5, "perplexity": None}
    assert (save["step"], save["path"]) == (3, "checkpoints/step-00000003")
    assert (end["reason"], end["seconds"]) == ("finished", 9.0)
    assert end["best"] == {"step": 3, "loss": 1.5}


def test_a_step_event_covers_the_updates_since_the_last(tmp_path):
    log = log_of(tmp_path)
    for step in range(1, 6):
        log.on_step(update(step))
    steps = [e for e in lines(log) if e["event"] == "step"]
    assert [(e["step"], e["tokens"]) for e in steps] == [(1, 100), (2, 100), (4, 200)]
    log.on_before_save(Progress(step=5))
    log.on_before_save(Progress(step=5))  # nothing since: nothing to write
    steps = [e for e in lines(log) if e["event"] == "step"]
    assert [(e["step"], e["tokens"]) for e in steps[3:]] == [(5, 100)]


def test_utilisation_above_one_is_never_printed_and_doubted_once(tmp_path):
    log = log_of(tmp_path, flops_per_token=1e9, peak=Peak(1e6, "measured, 8³ product"))
    for step in range(1, 9):
        log.on_step(update(step))
    steps = [e for e in lines(log) if e["event"] == "step"]
    assert {e["mfu"] for e in steps} == {None}
    doubts = [
        e for e in lines(log) if e["event"] == "warning" and "peak" in e["message"]
    ]
    assert len(doubts) == 1
    assert "measured, 8³ product" in doubts[0]["message"]
    assert "Other programs probably slowed the measurement" in doubts[0]["message"]
    assert "Training itself is not affected" in doubts[0]["message"]
    assert "%" not in doubts[0]["message"]  # "1069 % of the peak" stood on the page


def test_a_full_disk_costs_records_and_says_how_many(tmp_path):
    log = log_of(tmp_path)
    size = log.path.stat().st_size
    with no_file_above(size + 20):
        for step in range(1, 5):
            log.on_step(update(step))
    log.on_step(update(6))
    log.on_fit_end(RunEnd("finished", Progress(step=6), 1.0))
    events = read_metrics(log.path)
    assert [e["event"] for e in events] == ["start", "warning", "step", "end"]
    assert events[-1]["dropped_records"] == 3


def test_a_file_that_cannot_be_opened_is_refused(tmp_path):
    (tmp_path / "run").write_text("a file where the folder should be")
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl cannot be written"):
        log_of(tmp_path)


TEXT = "Ingredients:\n" + "- 2 cups of flour\n" * 20


def watched(*, terminal, evaluated=(3, 4)):
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=80, color_system=None)
    progress = ConsoleProgress(
        log_every=Duration(2, "steps"), reporter=ConsoleReporter(console),
        highlight=lambda: Highlight("recipe score", 0.25, TEXT),
    )  # fmt: skip
    progress.on_fit_start(RunStart(Progress(), Duration(4, "steps"), ("mind the gap",)))
    for step in (1, 2, 3, 4):
        progress.on_before_step(Progress(step=step - 1))
        progress.on_step(update(step, loss=9.0 - step))
        if step in evaluated:
            progress.on_evaluate(
                Progress(step, step / 10), {"loss": 5.0 - step, "n": 5.0}
            )
    progress.on_save(Progress(step=3), Saved(None, 3, 1, 0.0))
    progress.on_warning(Progress(step=4), "the disk is full")
    progress.on_fit_end(RunEnd("early_stopping", Progress(step=4), 75.0, Best(4, 1.5)))
    return out.getvalue()


def test_a_row_per_evaluation_without_a_terminal():
    text = watched(terminal=False)
    assert "\x1b" not in text
    lines = text.splitlines()
    cut = "Ingredients: - 2 cups of flour - 2 cups of flour - 2 cups of flou ..."
    assert lines[:4] == [
        "note: mind the gap",
        "   step   epoch      loss  held-out  recipe score  generated text",
        f"      3    0.30    7.0000    2.0000        0.2500  {cut}",
        f"      4    0.40    5.0000    1.0000        0.2500  {cut}",
    ]
    assert len(lines[2]) == 120
    assert lines[4:] == [
        "warning: the disk is full",
        "early stopping at step 4 after 1:15; saved up to step 3, best loss 1.5000 at step 4",
    ]


def test_one_live_line_and_rows_as_wide_as_the_terminal():
    text = watched(terminal=True)
    assert "\x1b" in text
    assert "        0.2500  Ingredients: - 2 cups of ..." in text
    assert "early stopping at step 4" in text


def epochs(n_epochs, *, evaluated=()):
    """The rows and the log of a run of ten updates an epoch."""
    heard = Heard()
    progress = ConsoleProgress(
        log_every=Duration(50, "steps"), reporter=heard, clock=lambda: 0.0,
        highlight=lambda: Highlight("recipe score", 0.25, TEXT),
    )  # fmt: skip
    progress.on_fit_start(RunStart(Progress(), Duration(n_epochs, "epochs")))
    for step in range(1, 10 * n_epochs + 1):
        at = Progress(step, step / 10)
        before = Progress(step - 1, (step - 1) / 10)
        progress.on_before_step(before)
        progress.on_step(
            replace(update(step, loss=float(step)), before=before, progress=at)
        )
        if step in evaluated:
            progress.on_evaluate(at, {"loss": 1.5})
    progress.on_fit_end(RunEnd("finished", at, 1.0))
    return [text.split()[:5] for text in heard.notices[:-1]], heard.details


def test_an_epoch_has_a_row_of_its_own_unless_an_evaluation_has_it():
    rows, log = epochs(3, evaluated=(5, 20, 30))
    assert rows == [
        ["step", "epoch", "loss", "held-out", "recipe"],
        ["5", "0.50", "3.0000", "1.5000", "0.2500"],
        ["10", "1.00", "8.0000", "-", "-"],
        ["20", "2.00", "15.5000", "1.5000", "0.2500"],
        ["30", "3.00", "25.5000", "1.5000", "0.2500"],
    ]
    assert [line for line in log if line.startswith("epoch")] == [
        f"epoch {n} ended at step {10 * n}: mean training loss {10 * n - 4.5:.4f}; "
        f"newest evaluation: held-out loss 1.5000, recipe score 0.2500 (step {at})"
        for n, at in ((1, 5), (2, 20), (3, 30))
    ]


def test_of_many_epochs_without_an_evaluation_four_are_on_the_screen():
    rows, log = epochs(12)
    assert [row[0] for row in rows[1:]] == ["30", "60", "90", "120"]
    assert [row[2] for row in rows[1:]] == ["15.5000", "45.5000", "75.5000", "105.5000"]
    assert len([line for line in log if line.startswith("epoch")]) == 12


class Heard:
    """A reporter that keeps what it was told."""

    lost, columns = None, 120

    def __init__(self):
        self.progressed, self.notices, self.details = [], [], []

    def detail(self, text):
        self.details.append(text)

    def notice(self, text):
        self.notices.append(text)

    def progress(self, text, *, done=0, total=0, keep=False):
        self.progressed.append((text, keep))


def test_the_live_line_is_of_now_and_not_of_the_last_logged_step():
    heard, now = Heard(), iter(float(second) for second in range(100))
    progress = ConsoleProgress(
        log_every=Duration(50, "steps"), reporter=heard, clock=lambda: next(now)
    )
    progress.on_fit_start(RunStart(Progress(), STOP))
    for step in range(1, 5):
        progress.on_step(update(step, loss=9.0 - step, seconds=0.5 * step))
    # Rates are over the updates since the last logged line, and the first update is logged.
    assert [text.split("  ")[:6] for text, _ in heard.progressed] == [
        [
            f"step {step}",
            f"epoch {step / 10:.2f}",
            f"loss {9 - step:.4f}",
            "lr 1.00e-03",
            *speed,
        ]
        for step, *speed in (
            (1, "2 steps/s", "200 tokens/s"),
            (2, "1 steps/s", "100 tokens/s"),
            (3, "0.8 steps/s", "80 tokens/s"),
            (4, "0.667 steps/s", "67 tokens/s"),
        )
    ]
    assert heard.details == [
        heard.progressed[0][0]
    ]  # the first update has a line of the log


def measuring(step, **measured):
    """An update with measurements. Slashes in their names are written as two underscores."""
    tensors = {name.replace("__", "/"): torch.tensor(v) for name, v in measured.items()}
    return replace(update(step), measured=tensors)


def test_reward_replaces_the_loss():
    heard = Heard()
    progress = ConsoleProgress(
        log_every=Duration(1, "steps"), reporter=heard, clock=lambda: 0.0,
        highlight=lambda: Highlight("recipe score", 0.25, TEXT),
    )  # fmt: skip
    progress.on_fit_start(RunStart(Progress(), Duration(4, "steps")))
    for step in range(1, 5):
        progress.on_step(measuring(step, reward=0.1 * step))
        if step in (2, 4):
            progress.on_evaluate(Progress(step, step / 10), {"loss": 1.5})
    progress.on_fit_end(RunEnd("finished", Progress(step=4), 1.0, Best(2, 1.5)))
    status = [text for text, _ in heard.progressed if text]
    assert [line.split("  ")[2] for line in status] == [
        "reward 0.1000", "reward 0.2000", "reward 0.3000", "reward 0.4000",
    ]  # fmt: skip
    assert not [line for line in status if "loss" in line or "best" in line]
    heading, first, second, end = heard.notices
    assert heading.split()[:4] == ["step", "epoch", "reward", "held-out"]
    # The mean of the updates since the previous row.
    assert [row.split()[2] for row in (first, second)] == ["0.1500", "0.3500"]
    assert max(map(len, heard.notices)) <= heard.columns
    # The lowest held-out loss of such a run is at its beginning.
    assert "best" not in end


def test_accuracy_of_pairs_is_next_to_the_loss():
    heard = Heard()
    progress = ConsoleProgress(
        log_every=Duration(1, "steps"), reporter=heard, clock=lambda: 0.0
    )
    progress.on_fit_start(RunStart(Progress(), STOP))
    progress.on_step(measuring(1, rewards__accuracies=0.625))
    metrics = {"loss": 0.5, "rewards/accuracies": 0.75, "rewards/margins": 1.25}
    progress.on_evaluate(Progress(step=1), metrics)
    assert "  loss 2.0000  accuracy 62%  lr" in heard.progressed[0][0]
    assert heard.details[-1].endswith(
        "evaluation  loss 0.5000  rewards/accuracies 0.750  rewards/margins 1.2500"
    )


def test_the_loss_is_read_for_a_line_that_can_be_seen():
    class Read(float):
        n = 0

        def __float__(self):
            Read.n += 1
            return 2.0

    heard = Heard()
    progress = ConsoleProgress(
        log_every=Duration(50, "steps"),
        reporter=heard,
        clock=lambda: 7.0,  # no time passes
    )
    progress.on_fit_start(RunStart(Progress(), STOP))
    for step in range(1, 60):
        progress.on_step(replace(update(step), loss=Read()))
    assert len(heard.progressed) == Read.n == 2  # the first and the logged one


def test_the_time_left_is_until_the_command_ends():
    heard = Heard()
    clock = iter([0.0, 5.0, 9.0, 14.0, 18.0])
    time_left = TimeLeft(
        STOP, Duration(50, "steps"), training_seconds=50.0, final_seconds=30.0, n_texts=2,
        evaluation_seconds=1.0,
    )  # fmt: skip
    progress = ConsoleProgress(
        log_every=Duration(50, "steps"), reporter=heard, clock=lambda: next(clock),
        time_left=time_left,
    )  # fmt: skip
    progress.on_fit_start(RunStart(Progress(), STOP))
    progress.on_before_step(Progress())
    (said,) = heard.notices
    assert said.startswith(
        "about 1:22 in all: 0:50 of training, 0:02 for 2 evaluations, and up to"
    )
    assert said.endswith("0:30 to score the model and generate 2 texts at the end")
    progress.on_step(update(50))
    assert heard.progressed[-1][0].endswith("50%  0:56 left")  # 25 + 1 + 30
    progress.on_before_evaluate(Progress(step=50))
    progress.on_before_step(Progress(step=50))  # the evaluation took 5 seconds
    progress.on_step(update(60))
    assert heard.progressed[-1][0].endswith("60%  0:55 left")  # 20 + 5 + 30


def test_a_wrong_forecast_is_corrected_on_the_screen():
    """The demo was forecast at 0:54, without the optimizer; only its log had the corrected 1:44."""
    heard = Heard()
    time_left = TimeLeft(STOP, training_seconds=25.0)
    progress = ConsoleProgress(
        log_every=Duration(50, "steps"),
        reporter=heard,
        clock=lambda: 0.0,
        time_left=time_left,
    )
    progress.on_fit_start(RunStart(Progress(), STOP))
    for step in range(1, 12):
        at, before = (Progress(step=n, seconds=0.5 * n) for n in (step, step - 1))
        progress.on_step(replace(update(step), before=before, progress=at))
    assert heard.notices == ["corrected by the first 10 updates: about 0:45 left"]


def test_a_long_update_is_shown_by_its_micro_batches_and_they_leave_the_line_to_it():
    heard, now = Heard(), [0.0]
    progress = ConsoleProgress(
        log_every=Duration(50, "steps"), reporter=heard, clock=lambda: now[0]
    )
    progress.on_fit_start(RunStart(Progress(), STOP))
    for step in (1, 2, 3):
        for done in (1, 2):
            now[0] += 3.0
            progress.on_micro_batch(Progress(step=step - 1), done, 2)
        now[0] += 0.1  # clipping and the optimizer
        progress.on_step(update(step))
    lines = [text.split("  ")[0] for text, _ in heard.progressed if "(" not in text]
    assert lines == ["step 1: 1 of 2 micro-batches", "step 1", "step 2", "step 3"]
    (second, third) = (text for text, _ in heard.progressed if "(" in text)
    assert second.startswith("step 1  epoch 0.10  loss 2.0000")
    assert third.endswith("left  (step 3: 1 of 2 micro-batches)")


def summaries(steps, uploads=None, **computing):
    told = Heard()
    summary = Summary(
        Duration(2, "steps"), told, torch.device("cpu"), compiled=False, micro_batch_rows=3,
        uploads=uploads, **computing,
    )  # fmt: skip
    summary.on_fit_start(RunStart(Progress(), Duration(10, "steps")))
    for step in steps:
        summary.on_step(step)
    return [
        {line[2:16].strip(): line[16:] for line in text.splitlines()[1:]}
        for text in told.details
    ]


def test_rates_are_of_the_stretch_alone():
    first, second = summaries(
        [update(1), update(2), *(update(n, loss=1.0, lr=lr) for n, lr in ((3, 5e-4), (4, 4e-4)))],
        flops_per_token=1e6, peak=Peak(1e9, "as stated"), uploads=lambda: "2 uploaded",
    )  # fmt: skip
    assert first["speed"] == "2.00 steps/s, 200 tokens/s"
    assert first["utilisation"].startswith(
        "20.0% of the peak, 1e+09 FLOP/s (as stated); "
    )
    assert first["utilisation"].endswith("waiting for data 20.0%")
    assert first["batch"].startswith(
        "4.0 examples and 100 tokens per update (effective), 3 rows"
    )
    assert first["batch"].endswith("20.0% padding")
    assert first["compile"] == "not compiled"
    assert "GB resident" in first["memory"]
    assert "scaling" not in first
    assert first["signs"] == (
        "loss 2.0000; gradient norm 0.50 on average; learning rate 1.00e-03, constant; "
        "uploads: 2 uploaded"
    )
    assert second["signs"].startswith("loss 2.0000 -> 1.0000, falling; ")
    assert "learning rate 4.00e-04, from 5.00e-04" in second["signs"]


def test_bad_signs_and_impossible_numbers_are_said():
    first, second = summaries(
        [update(1), update(2), update(3, loss=3.0, norm=9.0), update(4, norm=9.0)],
        flops_per_token=1e8, peak=Peak(1e9, "as stated"), ranks=2, alone_seconds=0.4,
    )  # fmt: skip
    assert first["utilisation"] == "unknown, because updates are faster than the peak"
    assert first["scaling"].startswith("2 ranks, efficiency about 80%: a rank")
    assert "NOT falling; gradient norm 9.00 on average, above 5" in second["signs"]
    assert summaries([update(1), update(2)])[0]["utilisation"] == "not measured"
    (alone,) = summaries([update(1), update(2)], ranks=2)
    assert alone["scaling"] == "2 ranks; efficiency not measured"


def test_summary_shows_whether_the_reward_rises():
    rewards = (0.1, 0.3, 0.2, 0.1)
    first, second = summaries(
        [measuring(n, reward=reward) for n, reward in enumerate(rewards, start=1)]
    )
    assert first["signs"].startswith("reward 0.2000; gradient norm")
    assert second["signs"].startswith("reward 0.2000 -> 0.1500, NOT rising; ")


def test_the_gpus_use_is_that_of_the_stretch():
    told, device = Heard(), torch.device("cpu")
    summary = Summary(
        Duration(1, "steps"), told, device, compiled=False, micro_batch_rows=3
    )
    summary.on_fit_start(RunStart(Progress(), Duration(3, "steps")))
    for step, percents in enumerate(([80, 90], [None], [10]), start=1):
        summary.take({"event": "step", "step": step})
        gpus = [{"utilisation_percent": percent} for percent in percents]
        summary.take({"event": "system", "step": step, "gpus": gpus})
        summary.on_step(update(step))
    lines = [
        next(li for li in text.splitlines() if "utilisation" in li)
        for text in told.details
    ]
    assert [line.partition("; ")[2] for line in lines] == [
        "GPU busy 85 % of the time", "", "GPU busy 10 % of the time",
    ]  # fmt: skip
