"""Pages of runs with objectives other than imitation, as their readers see them."""

import re
from pathlib import Path

import pytest

from toque.reports.figures import (
    plot_all_learning,
    plot_curves,
    plot_learning,
    plot_run,
)
from toque.reports.run_page import build_run_page
from toque.runs.places import FolderPlace
from toque.runs.run_record import RunRecord
from watching.written_run import WrittenRun

REWARDED = {
    "reward": 0.4, "reward_std": 0.1, "equal_groups": 0.5, "cut_texts": 0.25, "entropy": 2.0,
    "text_tokens": 30.0, "parts": {"rollouts": 1.0},
}  # fmt: skip
PAIRS = {
    "rewards/accuracies": 0.75, "rewards/margins": 0.2, "logps/chosen": -20.0,
    "logps/rejected": -30.0,
}  # fmt: skip


@pytest.fixture
def runs(tmp_path: Path) -> dict[str, RunRecord]:
    """A run per objective."""
    for name, measured in (("sft", {}), ("dpo", PAIRS), ("grpo", REWARDED)):
        written = WrittenRun(tmp_path / name)
        held_out = PAIRS if name == "dpo" else {}
        for step in (1, 2, 3):
            written.step(step, **measured)
            changing = {key: value + step for key, value in held_out.items()}
            written.evaluation(step, 2.0 / step, **changing)
    records = {
        name: RunRecord(FolderPlace(tmp_path / name)) for name in ("sft", "dpo", "grpo")
    }
    for record in records.values():
        record.read_whole()
    return records


def legend(svg: str) -> list[str]:
    return re.findall(r"</span>([^<]+)</li>", svg)


def test_reward_is_plotted_with_its_spread_and_the_texts(runs):
    history = runs["grpo"].history
    reward = plot_learning(history)
    assert reward.title == "Reward"
    assert legend(reward.svg)[-2:] == [
        "one standard deviation above", "one standard deviation below",
    ]  # fmt: skip
    assert "reward by step" in reward.svg
    figures = {figure.title: figure.svg for figure in plot_run(history)}
    assert legend(figures["Equal rewards and cut texts"]) == [
        "prompts with equal rewards", "texts at the maximum length",
    ]  # fmt: skip
    assert {"Entropy", "Length of texts", "Generating texts", "Held-out loss"} <= set(
        figures
    )
    assert "Accuracy of pairs" not in figures


def test_pairs_are_plotted_in_training_and_held_out(runs):
    history = runs["dpo"].history
    loss = plot_learning(history)
    assert loss.title == "Training and held-out loss of pairs"
    assert "nats per pair" in loss.svg
    figures = plot_run(history)
    titles = [figure.title for figure in figures]
    assert titles[:3] == [
        "Accuracy of pairs", "Margin of pairs", "Log-probability of answers",
    ]  # fmt: skip
    assert legend(figures[0].svg) == ["training", "held out"]
    assert len(legend(figures[2].svg)) == 4
    assert not [title for title in titles if "/" in title or title == "Entropy"]


def test_run_that_imitates_has_no_plots_of_other_objectives(runs):
    history = runs["sft"].history
    assert plot_learning(history).title == "Training and held-out loss"
    titles = [figure.title for figure in plot_run(history)]
    assert titles == [
        "Learning rate", "Gradient norm", "Speed", "Waiting for data", "Padding",
    ]  # fmt: skip


def test_different_quantities_are_not_in_one_plot(runs):
    histories = {name: record.history for name, record in runs.items()}
    assert [figure.title for figure in plot_all_learning(histories)] == [
        "Training loss, smoothed", "Training loss of pairs, smoothed", "Reward, smoothed",
    ]  # fmt: skip
    held_out = {figure.title: figure.svg for figure in plot_curves(histories)}
    assert legend(held_out["Held-out loss"]) == ["sft", "grpo"]
    assert "dpo" in held_out["Held-out loss of pairs"]
    # A run keeps the colour of its place.
    assert 'class="line three"' in held_out["Held-out loss"]


def test_page_names_what_a_run_measures(runs):
    pages = {name: build_run_page(run, name) for name, run in runs.items()}
    facts = {name: dict(page.head.facts) for name, page in pages.items()}
    assert facts["sft"]["lowest held-out loss"] == "0.6667 at step 3"
    assert facts["dpo"]["lowest held-out loss of pairs"] == "0.6667 at step 3"
    assert facts["dpo"]["held-out accuracy of pairs"] == "375.0%"
    assert facts["grpo"]["reward"] == "0.4000"
    assert not [name for name in facts["grpo"] if "loss" in name]
    headings = {one.name: one.heading for one in pages["grpo"].sections}
    assert headings["loss"] == "Reward"
