"""Controls: mistakes that the fake card must find, or its other tests show nothing."""

import pytest

from fake_cuda import cases, cases_of_runs, hooks


@pytest.mark.parametrize(
    ("mistake", "found"),
    [
        (cases.reads_a_number, r"HostWaitError: a number is read at cases\.py"),
        (
            cases.copies_and_waits,
            r"HostWaitError: a copy from cpu to cuda blocks at cases\.py",
        ),
        (cases.adds_across_devices, "on the same device"),
        (
            cases_of_runs.reads_a_copy_too_soon,
            "StreamError: a copy from the card is read before",
        ),
        (cases_of_runs.leaves_state_in_memory, "device"),
    ],
)
def test_a_mistake_is_found(on_card, mistake, found):
    with pytest.raises(hooks.OnCardError, match=found):
        on_card(mistake)


@pytest.mark.parametrize(
    ("feed", "found"),
    [
        (
            cases_of_runs.UnrecordedFeed,
            "StreamError: memory of stream 1 may be given away",
        ),
        (
            cases_of_runs.HastyFeed,
            "StreamError: stream 0 reads what stream 1 may still be writing",
        ),
        (cases_of_runs.PageableFeed, r"AssertionError: \{1: \d\}"),
    ],
)
def test_a_careless_feed_is_found(on_card, feed, found):
    with pytest.raises(hooks.OnCardError, match=found):
        on_card(cases_of_runs.fed_batch, feed)
