import math

import pytest

from toque.evaluation.classification import calibration_error, class_scores

CLASSES = ["easy", "medium", "hard"]


def test_scores_by_hand():
    truths = ["easy"] * 4 + ["medium"] * 2 + ["hard"]
    answers = ["easy", "Easy ", "medium", "hard", "medium", "easy", "hard"]
    scores = class_scores(answers, truths, CLASSES)
    assert scores.confusion.tolist() == [[2, 1, 1], [1, 1, 0], [0, 0, 1]]
    assert scores.accuracy == 4 / 7
    assert scores.majority == 4 / 7
    assert scores.f1 == {"easy": 4 / 7, "medium": 2 / 4, "hard": 2 / 3}
    assert scores.macro_f1 == pytest.approx((4 / 7 + 1 / 2 + 2 / 3) / 3)
    meant = class_scores(
        ["easy", "hard"], ["easy", "easy"], CLASSES
    )  # nobody meant "hard"
    assert meant.macro_f1 == pytest.approx(2 / 3)
    easy = scores.lines()[1].split(maxsplit=4)
    assert (
        easy == ["easy", "4", "2", "0.571", "hard 1, medium 1"]
        or easy[4] == "medium 1, hard 1"
    )


def test_classes_that_differ_in_case_alone_are_two():
    scores = class_scores(
        ["polish", "Polish "], ["Polish", "Polish"], ["polish", "Polish"]
    )
    assert scores.confusion.tolist() == [[0, 0], [1, 1]]


def test_what_cannot_be_scored_is_refused():
    with pytest.raises(ValueError, match="0 answers"):
        class_scores([], [], CLASSES)
    for answer, truth in (("easy", "tricky"), ("tricky", "easy")):
        with pytest.raises(ValueError, match="'tricky' is not one of the classes"):
            class_scores([answer], [truth], CLASSES)


def test_calibration_by_hand():
    # Bins of ten: two answers at 0.95 (one right), one at 0.3 (wrong), one at 0 (wrong).
    found = calibration_error([0.95, 0.95, 0.3, 0.0], [True, False, False, False])
    assert found == pytest.approx(2 / 4 * 0.45 + 1 / 4 * 0.3)
    assert calibration_error([1.0, 1.0], [True, True]) == 0.0

    for sure in (1.1, -0.1, math.nan):
        with pytest.raises(ValueError, match="must be between 0 and 1"):
            calibration_error([sure], [True])
