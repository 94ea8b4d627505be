import json
import math
from dataclasses import replace

import pytest

from fixtures.updates import update
from toque.data.loader.batch_stream import RewardedText
from toque.evaluation.evaluator import Evaluation
from toque.evaluation.sample_writer import (
    SampleWriter,
    format_rewarded,
    highlight,
)
from toque.evaluation.text_samples import Sample
from toque.reporter import SILENT, LogReporter, Reporter
from toque.units import Progress

SCORES = {"recipe_score": 0.75, "form": 1.0, "cookable": 0.5}
PASTA = Sample(
    "a pasta dish", "Ingredients:\n- pasta", 5, None, SCORES, asked="Recipe: pasta"
)
BREAKFAST = Sample("breakfast", "", 0, None, {})
HELD_OUT = Sample("Recipe: toast", "Bread.", 2, "Toast.", SCORES)
FIRST = Evaluation(
    texts={"bleu": 10.0, "rouge1": 0.5}, held_out=[HELD_OUT], users=[PASTA, BREAKFAST],
    seconds=4.0, texts_seconds=3.0,
)  # fmt: skip
SECOND = Evaluation(
    texts={"bleu": 12.5, "distinct_1": 0.25, "steps_listed": math.nan}, held_out=[HELD_OUT],
    failed={"mine:f": "KeyError: 3"}, seconds=2.0, texts_seconds=1.0,
)  # fmt: skip


class Given:
    def __init__(self, found):
        self.last = found


def writer_of(tmp_path, reporter, **options):
    return SampleWriter(
        Given(FIRST), tmp_path / "samples.jsonl", reporter=reporter, **options
    )


@pytest.mark.parametrize("with_log", [True, False])
def test_texts_are_kept_and_what_is_asked_for_by_name_is_logged(tmp_path, with_log):
    log = tmp_path / "log"
    log.touch()
    reporter = LogReporter(log) if with_log else SILENT
    writer = writer_of(tmp_path, reporter)
    writer.on_evaluate(Progress(step=1000), {})
    kept = [
        json.loads(line)
        for line in (tmp_path / "samples.jsonl").read_text().splitlines()
    ]
    prompts = ["Recipe: toast", "a pasta dish", "breakfast"]
    assert [(k["step"], k["prompt"]) for k in kept] == [
        (1000, prompt) for prompt in prompts
    ]
    assert [k.get("asked") for k in kept] == [None, "Recipe: pasta", None]
    expected = (
        "  1 text for held-out prompts:\n"
        "    BLEU, of 100             10.00\n"
        "    ROUGE-1 F1              0.5000\n"
        "  evaluated in 4.0 s, 3.0 s of it for texts\n"
        "step 1,000  a pasta dish\n"
        "  asked as: Recipe: pasta\n"
        "  quality: cookable 0.50, recipe score 0.75\n"
        "    Ingredients:\n"
        "    - pasta\n"
        "step 1,000  breakfast\n"
        "    (nothing)\n"
    )
    assert log.read_text() == (expected if with_log else "")


def test_scores_are_shown_with_their_change_and_what_the_run_goes_by_always(tmp_path):
    log, warned = tmp_path / "log", []
    writer = writer_of(
        tmp_path, LogReporter(log), watched=["loss", "steps_listed"],
        warn=lambda at, message: warned.append((at.step, message)),
    )  # fmt: skip
    writer.on_evaluate(Progress(step=1), {})
    log.unlink()
    writer.evaluator.last = SECOND
    writer.on_evaluate(Progress(step=2), {})
    writer.on_evaluate(Progress(step=3), {})
    first = log.read_text().splitlines()[:4]
    assert first == [
        "  1 text for held-out prompts:",
        "    BLEU, of 100             12.50  (+2.50)",
        "    steps listed          not measured",
        "  evaluated in 2.0 s, 1.0 s of it for texts",
    ]
    assert warned == [(2, "scores of texts: mine:f KeyError: 3")]


class Shown(Reporter):
    """A reporter with narrow lines that keeps notices."""

    columns = 70

    def __init__(self):
        self.notices = []

    def notice(self, text):
        self.notices.append(text)


def test_best_and_worst_text_of_the_newest_update_are_shown_and_kept(tmp_path):
    shown = Shown()
    writer = writer_of(tmp_path, shown)
    old = RewardedText("Say egg", "egg", 1, 1.0)
    best = RewardedText("Say salt", "salt\n" + "and pepper " * 20, 42, 1.5)
    worst = RewardedText("Say salt", "", 1, -0.25)
    for texts in ([old], [best, worst]):
        writer.on_step(replace(update(1), texts=texts))
    writer.on_evaluate(Progress(step=7), {})
    first, second = shown.notices
    assert first.startswith(
        '         best text for "Say salt", reward 1.5000: salt and'
    )
    assert len(first) <= 70
    assert second == "         worst text, reward -0.2500: (nothing)"
    lines = (tmp_path / "samples.jsonl").read_text().splitlines()[-2:]
    assert [json.loads(line) for line in lines] == [
        {"step": 7, "prompt": "Say salt", "text": text.text, "tokens": text.tokens,
         "metrics": {"reward": text.reward}}
        for text in (worst, best)
    ]  # fmt: skip


def test_one_text_stands_for_equal_rewards():
    text = RewardedText("Say salt", "egg", 1, 0.0)
    (line,) = format_rewarded([text], columns=80)
    assert line.strip() == 'equally good texts for "Say salt", reward 0.0000: egg'
    assert format_rewarded([], columns=80) == []


def test_row_of_pairs_has_their_accuracy():
    pairs = Evaluation(
        metrics={"loss": 0.5, "rewards/accuracies": 0.75},
        texts={"recipe_score": 0.25},
        held_out=[HELD_OUT],
    )
    assert highlight(pairs) == ("accuracy of pairs", 0.75, HELD_OUT.text)
    assert highlight(pairs, ["recipe_score"]) == ("recipe score", 0.25, HELD_OUT.text)


def test_a_row_has_the_score_that_the_run_selects_by_and_a_text_of_the_users_prompts_first():
    own = highlight(FIRST, ["rouge1"])
    assert own == ("rouge1", 0.5, PASTA.text)
    texts = {"bleu": 1.0, "recipe_score": 0.75, "cookable": 0.25}
    scored = Evaluation(texts=texts, held_out=[HELD_OUT])
    assert highlight(scored) == ("cookable", 0.25, HELD_OUT.text)
    assert highlight(Evaluation(metrics={"loss": 2.0, "bits_per_byte": 1.5})) == (
        "bits per byte", 1.5, "",
    )  # fmt: skip
    assert highlight(Evaluation(metrics={"loss": 2.0}))[::2] == ("", "")
