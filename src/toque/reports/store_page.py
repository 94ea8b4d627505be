"""Page of a store: the data report as tables, plots and texts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Final

from toque.cooking.labels.origins import CUISINES
from toque.cooking.recipe import DIFFICULTIES, NUTRITION_CLASSES
from toque.data.prepare.data_report import (
    ENCODING_HINT,
    ColumnReport,
    Excerpt,
    Histogram,
    Report,
    SourceReport,
    describe_unused_fields,
    is_of_another_encoding,
)
from toque.reports.page import (
    Figure,
    Figures,
    Folded,
    Grid,
    Page,
    PageHead,
    Passage,
    Section,
    Sentence,
)
from toque.reports.svg_charts import bars, histogram

MAX_FILES: Final = 30
"""Source files in the table. More files are summed by source and schema."""
_NAMES: Final = {
    "quality": ("Quality", "score from 0 to 1"),
    "difficulty": ("Difficulty", ""),
    "nutrition": ("Nutrition", ""),
    "nutrition_coverage": (
        "Coverage of estimated nutrition",
        "share of the ingredients' weight that was measured and found",
    ),
    "n_ingredients": ("Ingredients", "ingredients of a recipe"),
    "n_steps": ("Steps", "steps of a recipe"),
    "cuisine": ("Cuisine", ""),
}
"""Caption of the plot and name of the axis, by column."""
_LABELS: Final[Mapping[str, Sequence[str]]] = {
    "difficulty": DIFFICULTIES,
    "nutrition": NUTRITION_CLASSES,
    "cuisine": CUISINES,
}
_RANKED: Final = frozenset({"cuisine"})
"""Columns of labels without an order. The most frequent label comes first."""
_MAX_CLASSES: Final = 8
"""Classes in a line for the terminal. More classes are summed."""
_ORIGINS: Final = {
    "difficulty": ("by rule", "as the source says"),
    "nutrition": (
        "estimated from ingredients",
        "from given figures",
        "as the source says",
    ),
}
"""Names of the numbers in the column `X_from` (`cooking.examples`)."""
_UNKNOWN: Final = "255"
"""Value of a missing label (`cooking.examples`)."""


def store_page(folder: Path, report: Report) -> Page:
    """Make the page of a store."""
    counted = f"{report.describe_counts()} Every record is counted."
    facts = [
        ("examples", f"{report.examples:,}"),
        ("to train on", f"{report.train:,}"),
        ("held out", f"{report.validation:,}"),
        ("prompt tokens", f"{report.prompt_tokens:,}"),
        ("target tokens", f"{report.target_tokens:,}"),
        ("tokenizer", report.tokenizer),
        ("prepared in", f"{report.seconds:,.1f} s"),
    ]

    head = PageHead("Data report", folder.resolve().name, counted, facts)
    used = [_folded(excerpt) for excerpt in report.kept_examples]
    dropped = [_folded(excerpt) for excerpt in report.dropped_examples]

    lengths = [
        _histogram("Prompt lengths", report.prompt_histogram, "tokens"),
        _histogram("Target lengths", report.target_histogram, "tokens"),
    ]
    columns = [
        _column(column)
        for column in report.columns
        if column.known and (_is_counted(column) or column.name not in _LABELS)
    ]

    left_out = list(report.left_out.items())
    repaired = [(what, f"{count:,}") for what, count in sorted(report.notes.items())]

    sections = (
        Section("warnings", "", [Sentence(text, "warn") for text in _warnings(report)]),
        Section("kept", f"{len(used)} kept, as the model reads them", used),
        Section("lost", f"{len(dropped)} dropped, as they were", dropped),
        Section("sources", "Sources", [_sources(report)]),
        Section("dropped", "Dropped", [_dropped(report)]),
        Section("notes", "Repaired or noted", [Grid(("what", "times"), repaired)]),
        Section("left_out", "Files left out", [Grid(("file", "because"), left_out)]),
        Section("lengths", "Lengths", [_lengths(report), Figures(lengths)]),
        Section(
            "columns", "What the examples are like", [Figures(columns), _labels(report)]
        ),
        Section(
            "cut",
            "Cut and split",
            [*map(Sentence, (*report.describe_losses(), report.describe_split()))],
        ),
    )

    return Page(head, sections, f"{folder}/report.json")


def _warnings(report: Report) -> list[str]:
    warnings = []
    n_cut = report.cut.get("target_tokens", 0)
    cut_share = n_cut / (report.target_tokens + n_cut) if n_cut else 0.0
    if cut_share > 0.02:
        warnings.append(
            f"{cut_share:.1%} of all target tokens were cut off by data.max_target_tokens. Raise "
            "it, or leave long examples out with data.on_overlong=drop."
        )
    dropped_share = report.lost / max(1, report.kept + report.lost)
    if dropped_share > 0.1:
        warnings.append(
            f"{dropped_share:.0%} of the records were dropped. The reasons and examples are below."
        )
    if (notice := report.unknown_notice()) is not None:
        warnings.append(notice)
    if is_of_another_encoding(report.read, report.dropped, report.notes):
        warnings.append(ENCODING_HINT)
    if report.leaked_bodies:
        warnings.append(
            f"{report.leaked_bodies:,} held-out examples have the body of a training example."
        )
    return warnings


def _sources(report: Report) -> Grid:
    heads = ("source", "schema", "read", "used by its reader", "share")
    ordered = sorted(report.sources, key=lambda s: (s.source, s.schema))
    if len(ordered) <= MAX_FILES:
        rows = [_source_row(s.path, s.schema, [s]) for s in report.sources]
        note = ""
    else:
        rows = []
        for (_, schema), group in groupby(ordered, key=lambda s: (s.source, s.schema)):
            files = list(group)
            rows.append(
                _source_row(f"{_folder(files)}: {len(files):,} files", schema, files)
            )
        note = f"{len(ordered):,} files, summed by source and schema. report.json lists them."

    # Examples of each source after the removal of duplicates and the limits.
    shares = []
    for source in report.source_rows:
        files = [s for s in report.sources if s.source == source.source]
        name = Path(files[0].path).name if len(files) == 1 else _folder(files)
        n = source.train + source.validation
        shares.append(f"{n:,} ({n / max(1, report.examples):.1%}) are from {name}")
    notes = [note]
    if len(shares) > 1:
        notes.append(f"Of the examples, {', '.join(shares)}.")
    return Grid(
        heads, rows, " ".join([*notes, *describe_unused_fields(report.sources)]).strip()
    )


def _source_row(
    name: str, schema: str, files: Sequence[SourceReport]
) -> tuple[str, ...]:
    n_read, n_kept = sum(f.read for f in files), sum(f.kept for f in files)
    share = f"{n_kept / n_read:.1%}" if n_read else "-"
    return name, schema or "-", f"{n_read:,}", f"{n_kept:,}", share


def _folder(files: Sequence[SourceReport]) -> str:
    folders = [str(Path(file.path).parent) for file in files]
    return (
        os.path.commonpath(folders)
        if len({Path(f).is_absolute() for f in folders}) == 1
        else ""
    )


def _dropped(report: Report) -> Grid:
    rows = [
        (
            reason,
            f"{count:,}",
            f"{count / max(1, report.read):.2%}",
            ", ".join(report.lines.get(reason, [])[:3]),
        )
        for reason, count in sorted(
            report.dropped.items(), key=lambda item: (-item[1], item[0])
        )
    ]
    return Grid(("because", "records", "of all", "first at"), rows)


def _lengths(report: Report) -> Grid:
    heads = ("tokens per example", "mean", "half below", "90 %", "99 %", "longest")
    rows = []
    for name, side in (
        ("prompt", report.prompt_lengths),
        ("target", report.target_lengths),
    ):
        counts = (side.p50, side.p90, side.p99, side.longest)
        rows.append((name, f"{side.mean:,.1f}", *(f"{n:,}" for n in counts)))
    return Grid(heads, rows)


def _labels(report: Report) -> Grid:
    """Format scores and labels in one line each, for the terminal."""
    rows = []
    for column in report.columns:
        title, _ = _NAMES.get(column.name, (column.name, ""))
        if (
            _is_counted(column) or column.name in _LABELS
        ):  # a mean of codes has no meaning
            values = _shares(column)
        else:
            values = (
                f"mean {column.mean:.3g}, from {column.least:.4g} to {column.most:.4g}"
            )
        rows.append((title, f"{column.known:,}", values))
    return Grid(("column", "examples", "values"), rows, summary="In a line each")


def _is_counted(column: ColumnReport) -> bool:
    """Check whether the values of a column are shown one by one."""
    return bool(column.values) and (column.histogram is None or column.name in _LABELS)


def _values(column: ColumnReport) -> list[tuple[str, int]]:
    """List the values and their counts in order, or the most frequent first and unknown last."""
    values = list(column.values.items())
    if column.name in _RANKED:
        values.sort(key=lambda item: (item[0] == _UNKNOWN, -item[1], item[0]))
    return values


def _shares(column: ColumnReport) -> str:
    labels, values = _LABELS.get(column.name, ()), _values(column)
    unknown = [item for item in values if item[0] == _UNKNOWN and labels]
    named = [item for item in values if item not in unknown]
    shown = named if len(named) <= _MAX_CLASSES + 1 else named[:_MAX_CLASSES]
    pairs = [(_label(value, labels), count) for value, count in shown]
    if rest := named[len(shown) :]:
        pairs.append((f"{len(rest)} others", sum(count for _, count in rest)))
    pairs += [(_label(value, labels), count) for value, count in unknown]
    return ", ".join(f"{name} {count / column.known:.1%}" for name, count in pairs)


def _histogram(title: str, shape: Histogram, unit: str, note: str = "") -> Figure:
    drawn = histogram(title, shape.edges, shape.counts, unit=unit, of="examples")
    return Figure(title, drawn, note)


def _column(column: ColumnReport) -> Figure:
    title, unit = _NAMES.get(column.name, (column.name, column.name))
    note = f"{column.missing:,} examples lack it." if column.missing else ""
    if column.histogram is not None and not _is_counted(column):
        mean = f"Mean {column.mean:.3g}, from {column.least:.4g} to {column.most:.4g}."
        return _histogram(
            title, column.histogram, unit or title, f"{mean} {note}".strip()
        )
    labels = _LABELS.get(column.name, ())
    origins = {k: counts for k, counts in column.origins.items() if k != _UNKNOWN}
    unknown = column.origins.get(_UNKNOWN, {})
    parts = list(origins.values()) if len(origins) > 1 else []
    rows = [
        (
            _label(value, labels),
            [*(part.get(value, 0) for part in parts), unknown.get(value, 0)]
            if parts
            else [count],
        )
        for value, count in _values(column)
    ]
    words = _ORIGINS.get(column.name, ())
    named = [words[int(k)] if int(k) < len(words) else f"origin {k}" for k in origins]
    drawn = bars(title, rows, of="examples", parts_named=named if parts else ())
    if len(named) == 1:
        note = f"All {named[0]}. {note}".strip()
    return Figure(title, drawn, note)


def _label(value: str, labels: Sequence[str]) -> str:
    if not labels:
        return value
    if value == _UNKNOWN:
        return "unknown"
    return labels[int(value)] if int(value) < len(labels) else value


def _folded(excerpt: Excerpt) -> Folded:
    tags = [tag for tag in (excerpt.reason, excerpt.place) if tag]
    opening = " ".join((excerpt.prompt or excerpt.text).split())
    heading = opening if len(opening) <= 110 else opening[:110] + "…"
    prompt = [Passage(excerpt.prompt, "prompt")] if excerpt.prompt else []
    target = Passage(excerpt.text, "target" if excerpt.prompt else "")
    return Folded(heading, [*prompt, target], tags)
