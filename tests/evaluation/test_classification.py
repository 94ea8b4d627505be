from __future__ import annotations

import math

import pytest

from toque.evaluation.classification import calibration, class_scores

CLASSES = ["easy", "medium", "hard"]


def test_scores_by_hand():
    truths = ["easy"] * 4 + ["medium"] * 2 + ["hard"]
    answers = ["easy", "Easy ", "medium", "what?", "medium", "easy", "hard"]
    scores = class_scores(answers, truths, CLASSES)
    assert scores.confusion.tolist() == [[2, 1, 0, 1], [1, 1, 0, 0], [0, 0, 1, 0]]
    assert scores.accuracy == 4 / 7
    assert scores.majority == 4 / 7
    assert scores.f1 == {"easy": 4 / 7, "medium": 2 / 4, "hard": 1.0}
    assert scores.macro_f1 == pytest.approx((4 / 7 + 1 / 2 + 1) / 3)
    assert "(other)" in scores.table()
    assert scores.table().splitlines()[1].split() == ["easy", "2", "1", "0", "1"]


def test_a_class_nobody_meant_does_not_count():
    assert class_scores(["easy", "hard"], ["easy", "easy"], CLASSES).macro_f1 == pytest.approx(
        2 / 3
    )


def test_what_cannot_be_scored_is_refused():
    with pytest.raises(ValueError, match="0 answers"):
        class_scores([], [], CLASSES)
    with pytest.raises(ValueError, match="'tricky' is not one of the classes"):
        class_scores(["easy"], ["tricky"], CLASSES)


def test_calibration_by_hand():
    # Bins of ten: two answers at 0.95 (one right), one at 0.3 (wrong), one at 0 (wrong).
    found = calibration([0.95, 0.95, 0.3, 0.0], [True, False, False, False])
    assert found.ece == pytest.approx(2 / 4 * 0.45 + 1 / 4 * 0.3)
    assert [b.n for b in found.bins] == [1, 0, 1, 0, 0, 0, 0, 0, 0, 2]
    assert calibration([1.0, 1.0], [True, True]).ece == 0.0


@pytest.mark.parametrize("sure", [[1.1], [-0.1], [math.nan]])
def test_a_confidence_is_a_probability(sure):
    with pytest.raises(ValueError, match="outside 0 to 1"):
        calibration(sure, [True])
