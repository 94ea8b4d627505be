import re
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toque.reports.svg_charts import (
    Frame,
    Series,
    choose_ticks,
    draw_bars,
    draw_histogram,
    draw_lines,
    format_number,
)

SCRIPT = '</title><script>alert("1")</script>&'


def drawing_of(page: str) -> ET.Element:
    """The drawing, parsed as strictly as XML is; what follows it is the legend."""
    return ET.fromstring(page[: page.index("</svg>") + 6])  # noqa: S314 - our own drawing


def test_a_histogram_has_a_bar_for_each_bin_as_high_as_its_count():
    drawn = drawing_of(
        draw_histogram(
            "Lengths", [0, 10, 20, 30], [1, 4, 2], unit="tokens", noun="rows"
        )
    )
    heights = [float(bar.get("height")) for bar in drawn.iter("rect")]
    assert heights[1] == pytest.approx(4 * heights[0], abs=0.2)
    assert heights[1] == pytest.approx(2 * heights[2], abs=0.2)
    assert [t.text for bar in drawn.iter("rect") for t in bar][
        1
    ] == "10 to 20 tokens: 4 rows"
    words = [text.text for text in drawn.iter("text")]
    assert {"tokens", "rows"} <= set(words)
    assert "7 rows from 0 to 30 tokens, most between 10 and 20" in drawn.get(
        "aria-label"
    )


def test_bars_of_several_parts_lie_end_to_end():
    page = draw_bars(
        "Label",
        [("a", (3, 1)), ("b", (0, 2))],
        noun="rows",
        part_names=("given", "guessed"),
    )
    first, second, *_ = list(drawing_of(page).iter("rect"))
    end = float(first.get("x")) + float(first.get("width"))
    assert end == pytest.approx(float(second.get("x")), abs=0.2)
    assert float(first.get("width")) == pytest.approx(
        3 * float(second.get("width")), abs=0.3
    )
    assert re.findall(r"</span>(\w+)</li>", page) == ["given", "guessed"]


def test_a_missing_value_breaks_the_line():
    ys = [1.0, 2.0, None, 3.0, float("nan"), 5.0, 4.0]
    page = draw_lines(
        "Loss", [Series("train", range(7), ys)], x_name="step", y_name="nats"
    )
    drawn = drawing_of(page)
    assert [len(line.get("points").split()) for line in drawn.iter("polyline")] == [
        2,
        2,
    ]
    assert len(list(drawn.iter("circle"))) == 1  # a point alone
    assert "nan" not in page.lower().replace("train", "")


def test_nothing_to_draw_is_said():
    for page in (
        draw_lines(
            "Loss", [Series("train", [1], [None])], x_name="step", y_name="nats"
        ),
        draw_histogram("Lengths", [], [], unit="tokens", noun="rows"),
        draw_bars("Labels", [], noun="rows"),
    ):
        assert "nothing to show" in page


def test_what_comes_from_data_is_escaped():
    for page in (
        draw_histogram(SCRIPT, [0, 1], [3], unit=SCRIPT, noun=SCRIPT),
        draw_bars(SCRIPT, [(SCRIPT, (3, 1))], noun=SCRIPT, part_names=(SCRIPT, SCRIPT)),
        draw_lines(
            SCRIPT, [Series(SCRIPT, [1, 2], [1, 2])] * 2, x_name=SCRIPT, y_name=SCRIPT
        ),
    ):
        assert "<script" not in page
        drawing_of(page)


@given(
    st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=30),
    st.sampled_from([Frame(), Frame(1000, 330)]),
)
def test_lines_stay_inside_their_frame(ys, frame):
    page = draw_lines(
        "L", [Series("s", range(len(ys)), ys)], x_name="x", y_name="y", frame=frame
    )
    for line in drawing_of(page).iter("polyline"):
        for point in line.get("points").split():
            x, y = map(float, point.split(","))
            assert 0 <= x <= frame.width
            assert 0 <= y <= frame.height


@given(st.floats(-1e12, 1e12), st.floats(1e-6, 1e12))
def test_ticks_are_few_and_inside(least, size):
    most = least + size
    if most - least < 1e-9 * abs(least):
        return
    found = choose_ticks(least, most)
    assert len(found) <= 12
    slack = 1e-6 * (most - least)
    assert all(least - slack <= tick <= most + slack for tick in found)
    assert found == sorted(set(found))


def test_neighbouring_ticks_are_written_differently():
    for least, most in ((0, 0.001), (2.31, 2.34), (0, 5e7), (1e-5, 9e-5), (0.5, 3.5)):
        values = choose_ticks(least, most)
        shown = [format_number(v, step=values[1] - values[0]) for v in values]
        assert len(set(shown)) == len(shown), shown
