"""Scores of two runs over the same held-out texts, with the interval of each difference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import msgspec

from toque.errors import in_shell
from toque.evaluation.by_text import FILE, ByText, TextTable, from_json
from toque.evaluation.differences import Interval, over_texts
from toque.storage.bucket_errors import BucketError
from toque.storage.json_files import decode_json
from toque.watching.places import Place, content

LOWER_IS_BETTER: Final = frozenset(
    {"loss", "bits_per_byte", "repetition", "hallucinated_ingredients"}
)
PRIMARY: Final = ("loss", "bits_per_byte", "recipe_score")
"""What the sentence looks at; the second in place of the first where tokens differ."""


@dataclass(frozen=True)
class Scored:
    """The final scores of a run."""

    values: dict[str, float]
    """By name, those of evaluation.json."""
    by_text: ByText | None
    why_not: str
    """Why there are none by text; "" where there are."""


@dataclass(frozen=True)
class Difference:
    """One measure of a run against the first one's."""

    measure: str
    first: float
    other: float
    interval: Interval

    @property
    def other_is_better(self) -> bool | None:
        """Whether the other run is better; None where the interval holds zero."""
        if not self.interval.decided:
            return None
        return (self.interval.mean < 0) == (self.measure in LOWER_IS_BETTER)

    def record(self) -> dict[str, Any]:
        """As JSON."""
        better = self.other_is_better
        return {
            "first": self.first,
            "other": self.other,
            **asdict(self.interval),
            "decided": self.interval.decided,
            "better": None if better is None else ("other" if better else "first"),
        }


class _Evaluation(msgspec.Struct):
    step: int | None = None
    heldout: dict[str, float | None] = {}
    generated: dict[str, float | None] = {}


def scores_of(place: Place) -> Scored:
    """What evaluating left of a run; anything may be missing."""
    run, again = place.address, "a run writes them at its end, and copies them there."
    if place.folder is not None:
        again = f"`toque evaluate {in_shell(run)}` writes them."
    try:
        data = content(place, "evaluation.json")
        if data is None:
            return Scored({}, None, f"{run} has no final scores yet: {again}")
        found = decode_json(data, _Evaluation)
    except (OSError, BucketError, msgspec.DecodeError) as error:
        return Scored({}, None, f"{run}/evaluation.json cannot be read ({error}): {again}")
    pairs = {**found.heldout, **found.generated}
    values = {name: value for name, value in pairs.items() if value is not None}
    try:
        data = content(place, FILE)
        if data is None:
            return Scored(values, None, f"{run} has no scores by text: {again}")
        by_text = from_json(data)
    except (OSError, BucketError, ValueError) as error:
        return Scored(values, None, f"{run}/{FILE} cannot be read ({error}): {again}")
    if by_text.step != found.step:
        return Scored(values, None, f"{run}/{FILE} is of another step: {again}")
    return Scored(values, by_text, "")


def differences_of(first: ByText, other: ByText) -> tuple[list[Difference], list[str]]:
    """Measures that both have over the same texts, and sentences about what was not compared."""
    notes: list[str] = []
    examples = _paired(first.examples, other.examples, "held-out examples", notes)
    texts = _paired(first.texts, other.texts, "prompts that texts were written for", notes)
    found: list[Difference] = []
    if examples is not None:
        left_out = _losses_left_out(*examples, notes)
        found += _differences(*examples, left_out)
    if texts is not None:
        found += _differences(*texts, ())
    order = {name: place for place, name in enumerate(PRIMARY)}
    return sorted(found, key=lambda d: order.get(d.measure, len(order))), notes


def _paired(
    first: TextTable, other: TextTable, what: str, notes: list[str]
) -> tuple[TextTable, TextTable] | None:
    """Both in one order; None, and a sentence, where they are not the same texts."""
    if not first.keys and not other.keys:
        return None
    ours, theirs = set(first.keys), set(other.keys)
    if ours == theirs and len(ours) == len(first.keys) == len(other.keys):
        return first, other.in_order(first.keys)
    if ours == theirs:  # a text may be held out twice; it then stands twice in both
        keys = sorted(ours)
        return first.in_order(keys), other.in_order(keys)
    notes.append(
        f"The two were scored on different {what}: {len(ours):,} and {len(theirs):,}, of which "
        f"{len(ours & theirs):,} are the same. So no difference is given there. Score both on the "
        "same: `toque evaluate RUN my.yaml` with one configuration."
    )
    return None


def _losses_left_out(first: TextTable, other: TextTable, notes: list[str]) -> Sequence[str]:
    """The loss is per token: of two tokenizers it says nothing, and bits per byte does."""
    ours, theirs = first.measures.get("loss"), other.measures.get("loss")
    if ours is None or theirs is None:
        return ("bits_per_byte",)
    if (ours.values[:, 1] == theirs.values[:, 1]).all():
        return ("bits_per_byte",)  # the same order by another unit
    notes.append(
        "The two count tokens, or weigh examples, differently: bits per byte stand in place of the "
        "loss per token."
    )
    return ("loss",)


def _differences(first: TextTable, other: TextTable, left_out: Sequence[str]) -> list[Difference]:
    found = []
    for name, ours in first.measures.items():
        theirs = other.measures.get(name)
        if theirs is None or name in left_out or ours.values.shape != theirs.values.shape:
            continue
        interval = over_texts(theirs, ours)
        if interval is None:
            continue
        both = ours.applies & theirs.applies
        mine, its = (float(m.score((m.values * both[:, None]).sum(axis=0))) for m in (ours, theirs))
        found.append(Difference(name, mine, its, interval))
    return found
