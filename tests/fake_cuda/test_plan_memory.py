"""A plan's memory on a card held against the run's own code on one that is not there."""

from __future__ import annotations

import pytest

from fake_cuda import cases_memory, plan_cases
from fake_cuda.plan_cases import Compared
from toque.runs.outlined_update import outlining
from toque.workflows.plan.run_estimate import build_estimator

SLOW = [
    (preset, way) for preset in plan_cases.PRESETS for way in plan_cases.ways_of(preset)
]


def held(found: list[Compared]) -> None:
    worst = max(found, key=lambda each: abs(each.error))
    print(f"worst of {len(found)}: {worst}")
    far = [str(each) for each in found if abs(each.error) > plan_cases.LIMIT]
    assert far == [], "\n".join([plan_cases.HEAD, *map(str, found)])


@pytest.mark.parametrize(
    ("preset", "way"),
    [
        pytest.param("recipe-t5-small", "whole", marks=pytest.mark.slow),
        ("agi2-small", "whole"),
    ],
)
def test_a_plan_counts_what_a_run_on_a_card_takes(on_card, preset, way):
    found = [
        on_card(cases_memory.compared, case)
        for case in plan_cases.cases(preset, way, ["rtx-4090"])
    ]
    held(found)
    # A plan is made where no card can be, real or not: the same there.
    estimator, model_of, _ = build_estimator(found[0].case.config, "rtx-4090")
    with outlining():
        assert estimator.memory(model_of(estimator.config)).tensors == found[0].planned


@pytest.mark.parametrize("objective", sorted(plan_cases.OBJECTIVES))
@pytest.mark.parametrize(
    "preset",
    [pytest.param("recipe-t5-small", marks=pytest.mark.slow), "agi2-small"],
)
def test_a_plan_counts_pairs_copies_and_generated_texts(on_card, preset, objective):
    settings = plan_cases.OBJECTIVES[objective]
    case = plan_cases.Case(preset, "whole", "rtx-4090", False, settings)
    found = on_card(cases_memory.compared, case)
    print(found, found.generation)
    assert found.error == pytest.approx(0.0, abs=0.05), str(found)
    if found.generation is not None:
        planned, real = found.generation
        # Below the peak of the run, which is exact. For a T5 the plan is 8 % too high.
        assert 0.95 * real <= planned <= 1.1 * real


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("preset", "way"), SLOW)
def test_a_plan_counts_what_a_run_of_any_preset_takes(on_card, preset, way):
    held(
        [on_card(cases_memory.compared, case) for case in plan_cases.cases(preset, way)]
    )
