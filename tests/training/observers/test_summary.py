"""The summary of a stretch of updates."""

from __future__ import annotations

import torch

from fixtures.updates import update
from toque.reporter import Reporter
from toque.runs.outlined_update import Peak
from toque.training.callbacks import RunStart, StepInfo
from toque.training.observers.live_progress import Summary
from toque.units import Duration, Progress


class Told(Reporter):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def notice(self, text: str) -> None:
        self.texts.append(text)


def summaries(steps: list[StepInfo], uploads=None, **computing) -> list[dict[str, str]]:
    told = Told()
    summary = Summary(
        Duration(2, "steps"), told, torch.device("cpu"), compiled=False, micro_batch_rows=3,
        uploads=uploads, **computing,
    )  # fmt: skip
    summary.on_fit_start(RunStart(Progress(), Duration(10, "steps")))
    for step in steps:
        summary.on_step(step)
    return [
        {line[2:16].strip(): line[16:] for line in text.splitlines()[1:]} for text in told.texts
    ]


def test_rates_are_of_the_stretch_alone() -> None:
    first, second = summaries(
        [update(1), update(2), *(update(n, loss=1.0, lr=lr) for n, lr in ((3, 5e-4), (4, 4e-4)))],
        flops_per_token=1e6, peak=Peak(1e9, "as stated"), uploads=lambda: "2 uploaded",
    )  # fmt: skip
    assert first["speed"] == "2.00 steps/s, 200 tokens/s"
    assert first["utilisation"].startswith("20.0% of the peak, 1e+09 FLOP/s (as stated); ")
    assert first["utilisation"].endswith("waiting for data 20.0%")
    assert first["batch"].startswith("4.0 examples and 100 tokens an update (effective), 3 rows")
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


def test_bad_signs_and_impossible_numbers_are_said() -> None:
    first, second = summaries(
        [update(1), update(2), update(3, loss=3.0, norm=9.0), update(4, norm=9.0)],
        flops_per_token=1e8, peak=Peak(1e9, "as stated"), ranks=2, alone_seconds=0.4,
    )  # fmt: skip
    assert first["utilisation"] == "not known: the peak is too low"
    assert first["scaling"].startswith("2 ranks, efficiency about 80%: a rank")
    assert "NOT falling; gradient norm 9.00 on average, above 5" in second["signs"]
    assert summaries([update(1), update(2)])[0]["utilisation"] == "not measured"
    (alone,) = summaries([update(1), update(2)], ranks=2)
    assert alone["scaling"] == "2 ranks; efficiency not measured"


def test_the_gpus_use_is_that_of_the_stretch() -> None:
    told, device = Told(), torch.device("cpu")
    summary = Summary(Duration(1, "steps"), told, device, compiled=False, micro_batch_rows=3)
    summary.on_fit_start(RunStart(Progress(), Duration(3, "steps")))
    for step, percents in enumerate(([80, 90], [None], [10]), start=1):
        summary.take({"event": "step", "step": step})
        gpus = [{"utilisation_percent": percent} for percent in percents]
        summary.take({"event": "system", "step": step, "gpus": gpus})
        summary.on_step(update(step))
    lines = [next(li for li in text.splitlines() if "utilisation" in li) for text in told.texts]
    assert [line.partition("; ")[2] for line in lines] == [
        "GPU busy 85 % of the time", "", "GPU busy 10 % of the time",
    ]  # fmt: skip
