"""Length of a run: what a few tokens say of whole texts."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from toque.workflows.run_length import seconds_of_texts


def machine(*, loading: float, prompts: float, token: float) -> Callable[[int], float]:
    """Seconds of writing: the first time loads kernels, and every time reads the prompts."""
    calls: list[int] = []

    def timed(tokens: int) -> float:
        calls.append(tokens)
        return prompts + tokens * token + (loading if len(calls) == 1 else 0.0)

    return timed


@pytest.mark.parametrize(
    ("loading", "prompts", "token"),
    [(30.0, 1.1, 0.01), (3.0, 4.0, 0.02), (0.0, 0.0, 0.5), (9.0, 0.001, 0.001)],
)
def test_loading_and_reading_prompts_are_not_taken_for_tokens(
    loading: float, prompts: float, token: float
) -> None:
    """A text of 512 tokens was foreseen by two of the first: 20 to 60 times too long."""
    told = seconds_of_texts(machine(loading=loading, prompts=prompts, token=token), 512)
    assert told == pytest.approx(prompts + 512 * token, rel=0.5)
    disturbed = seconds_of_texts(lambda tokens: 2.0 if tokens < 10 else 1.0, 512)
    assert disturbed == pytest.approx(2.0 + 510 * 0.1)
