"""Parser of times in records and steps: "1 1/2 hours", "45-60 min", "1h30", "PT1H20M"."""

from __future__ import annotations

import re

from toque.cooking.ingredients.tokens import number, replace_glyphs

# "1 1/2", "1-1/2", "3/4", "1.5" or "20". It begins with a digit, so that a search is fast.
_REST = r"\d*+(?:[ -]\d{1,2}/[1-9]\d?+|/[1-9]\d?+|\.\d++)?+"
_NUMBER = rf"([0-9](?<![0-9/][0-9]){_REST})(?:\s*+(?:-|to|or)\s*+(\d{_REST}))?"
_IN_STEPS = re.compile(
    rf"{_NUMBER}\s*+(?:more |additional )?+(hours?|hrs?|minutes?|mins?)\b",
    re.IGNORECASE,
)
_DAYS = re.compile(rf"{_NUMBER}\s*+d(?:ays?)?+\b", re.IGNORECASE)
# In "1h30", a number without a unit is in minutes.
_HOURS = re.compile(
    rf"{_NUMBER}\s*+h[a-z]*+\.?+(?:\s*+(\d{{1,2}}+)(?!\s*+[a-z\d/.]))?", re.IGNORECASE
)
_MINUTES = re.compile(rf"{_NUMBER}\s*+m", re.IGNORECASE)
_CLOCK = re.compile(r"(\d{1,3}):([0-5]\d)(?::[0-5]\d)?")
_ISO = re.compile(
    r"P(?:0+Y)?+(?:0+M(?=\d|T))?+(?:(\d{1,9})W)?+(?:(\d{1,9}(?:\.\d++)?+)D)?+T?+"
    r"(?:(\d{1,9}(?:\.\d++)?+)H)?+(?:(\d{1,9}(?:\.\d++)?+)M)?+(?:(\d{1,9}(?:\.\d++)?+)S)?+",
    re.IGNORECASE,
)
_MINUTES_PER_HOUR = 60.0
_MINUTES_PER_DAY = 1440.0
_ISO_MINUTES = (
    7 * _MINUTES_PER_DAY,
    _MINUTES_PER_DAY,
    _MINUTES_PER_HOUR,
    1.0,
    1 / 60.0,
)
"""Minutes per week, day, hour, minute and second, in the order of the groups of `_ISO`."""


def minutes_in_step(text: str) -> list[float]:
    """List the times in a step, in minutes. A range counts as its longer time.

    >>> minutes_in_step("Rest 1/2 hour, bake for 1½ to 2 hours, keep for 3 days.")
    [30.0, 120.0]
    """
    return [
        number(high or low) * (_MINUTES_PER_HOUR if unit[0] in "hH" else 1.0)
        for low, high, unit in _IN_STEPS.findall(replace_glyphs(text))
    ]


def minutes_of(text: str) -> float | None:
    """Parse a time, including h:mm and ISO 8601. Return minutes, or None without a unit.

    >>> minutes_of("1½ hours"), minutes_of("1h30"), minutes_of("2 days 1 hour"), minutes_of("0:45")
    (90.0, 90.0, 2940.0, 45.0)
    >>> minutes_of("PT1H20M"), minutes_of("P0Y0M0DT0H45M0.000S"), minutes_of("PT1800S")
    (80.0, 45.0, 30.0)
    """
    text = replace_glyphs(text).strip()
    if iso := _ISO.fullmatch(text):
        parts = zip(iso.groups(), _ISO_MINUTES, strict=True)
        return sum(float(part or 0) * minutes for part, minutes in parts)
    if clock := _CLOCK.fullmatch(text):
        return _MINUTES_PER_HOUR * int(clock[1]) + int(clock[2])

    days, hours, minutes = (
        pattern.search(text) for pattern in (_DAYS, _HOURS, _MINUTES)
    )
    if not (days or hours or minutes):
        return None
    matches = ((days, _MINUTES_PER_DAY), (hours, _MINUTES_PER_HOUR), (minutes, 1.0))
    total = sum(
        number(match[2] or match[1]) * factor for match, factor in matches if match
    )
    if hours and not minutes:
        total += int(hours[3] or 0)  # the minutes of "1h30"
    return total
