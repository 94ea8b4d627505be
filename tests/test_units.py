import pytest
from hypothesis import given
from hypothesis import strategies as st

from toque.errors import ConfigError
from toque.units import UNITS, Duration, Progress

PARSED = [
    ("3 epochs", 3, "epochs"), ("1 epoch", 1, "epochs"), ("0.5 EPOCHS", 0.5, "epochs"),
    ("200steps", 200, "steps"), ("1_000 examples", 1000, "examples"), ("5e6 tokens", 5e6, "tokens"),
    ("10%", 10, "%"), (" 10 % ", 10, "%"), ("30 minutes", 30, "minutes"),
    ("1 second", 1, "seconds"), ("90 seconds", 90, "seconds"), ("1 hour", 1, "hours"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "amount", "unit"), PARSED)
def test_parse(text, amount, unit):
    assert Duration.parse(text) == Duration(amount, unit)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "3",
        "epochs",
        "-3 epochs",
        "3 days",
        "3 %s",
        "three epochs",
        "3 4 epochs",
        "nan steps",
    ],
)
def test_what_is_no_duration_is_refused(text):
    with pytest.raises(ConfigError, match="Write a number and a unit"):
        Duration.parse(text)


@given(
    st.one_of(
        st.integers(0, 10**12).map(float), st.floats(0, 1e4).map(lambda x: round(x, 2))
    ),
    st.sampled_from(UNITS),
)
def test_text_reads_back(amount, unit):
    duration = Duration(amount, unit)
    assert Duration.parse(str(duration)) == duration


def test_measure_in_each_unit():
    progress = Progress(
        step=7, epoch=1.25, examples=50, tokens=900, target_tokens=400, seconds=90
    )
    measured = {
        unit: Duration(1, unit).measure(progress) for unit in UNITS if unit != "%"
    }
    expected = {"steps": 7, "epochs": 1.25, "tokens": 900, "examples": 50}
    assert measured == expected | {"hours": 0.025, "minutes": 1.5, "seconds": 90}
    assert Duration(1, "%").measure(progress, Duration(28, "steps")) == 25.0


@pytest.mark.parametrize("whole", [None, Duration(50, "%")])
def test_a_share_needs_a_whole(whole):
    with pytest.raises(ConfigError, match="length of the run is unknown"):
        Duration(10, "%").measure(Progress(step=1), whole)


@given(st.integers(1, 50), st.integers(0, 300))
def test_every_multiple_is_crossed_once(every, until):
    duration = Duration(every, "steps")
    crossed = [
        step
        for step in range(1, until + 1)
        if duration.crossed(Progress(step=step - 1), Progress(step=step))
    ]
    assert crossed == list(range(every, until + 1, every))


def test_a_jump_over_a_multiple_counts_once():
    every = Duration(100, "tokens")
    assert every.crossed(Progress(tokens=90), Progress(tokens=410))
    assert not every.crossed(Progress(tokens=110), Progress(tokens=199))


def test_zero_is_never_crossed_and_always_reached():
    zero = Duration(0, "steps")
    assert not zero.crossed(Progress(step=0), Progress(step=5))
    assert zero.reached(Progress())
    assert zero.fraction(Progress()) == 1.0


def test_reached_and_fraction():
    whole = Duration(4, "epochs")
    assert not whole.reached(Progress(epoch=3.999))
    assert whole.reached(Progress(epoch=4.0))
    assert whole.fraction(Progress(epoch=1.0)) == 0.25
    assert whole.fraction(Progress(epoch=9.0)) == 1.0


@pytest.mark.parametrize(
    "text", ["10 minutes total", "90 seconds total", "1 minute TOTAL"]
)
def test_a_total_is_the_time_of_a_whole_command(text):
    found = Duration.parse(text)
    assert found.total
    assert Duration.parse(str(found)) == found
    assert found != Duration(found.amount, found.unit)


@pytest.mark.parametrize("text", ["3 epochs total", "10 % total", "5 steps total"])
def test_only_time_has_a_total(text):
    with pytest.raises(
        ConfigError, match="only hours, minutes, seconds can be a total"
    ):
        Duration.parse(text)


def test_seconds_and_minutes_compare():
    at = Progress(seconds=45.0)
    assert Duration.parse("45 seconds").reached(at)
    assert not Duration.parse("46 seconds").reached(at)
    assert Duration.parse("90 seconds").in_minutes() == Duration.parse("1.5 minutes")
    assert Duration.parse("2 hours total").in_minutes() == Duration.parse(
        "120 minutes total"
    )
    assert Duration.parse("2 minutes").seconds == 120.0
    assert Duration.parse("2 epochs").seconds is None
