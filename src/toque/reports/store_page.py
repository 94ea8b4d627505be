"""Page of a store: the data report as tables, plots and texts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import attrgetter
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
from toque.reports.svg_charts import draw_bars, draw_histogram

MAX_FILES: Final = 30
"""Maximum number of source files in the table. Above it, files are summed by source and schema.
"""
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
"""Caption of the plot and unit of its axis ("" for labels), by column."""
_LABELS: Final[Mapping[str, Sequence[str]]] = {
    "difficulty": DIFFICULTIES,
    "nutrition": NUTRITION_CLASSES,
    "cuisine": CUISINES,
}
_RANKED: Final = frozenset({"cuisine"})
"""Columns of labels that have no order. The most frequent label comes first."""
_MAX_CLASSES: Final = 8
"""Maximum number of classes in a line for the terminal. The remaining classes are summed."""
_MAX_HEADING: Final = 110
"""Maximum length of the heading of a folded example, in characters."""
_NOTABLE_CUT: Final = 0.02
"""Fraction of cut target tokens above which the page warns."""
_NOTABLE_LOSS: Final = 0.1
"""Fraction of dropped records above which the page warns."""
_ORIGINS: Final = {
    "difficulty": ("by rule", "as the source says"),
    "nutrition": (
        "estimated from ingredients",
        "from the source's numbers",
        "as the source says",
    ),
}
"""Meaning of each code in the column `X_from` (`cooking.examples`)."""
_UNKNOWN: Final = "255"
"""Value of a missing label (`cooking.examples`)."""


def build_store_page(folder: Path, report: Report) -> Page:
    """Build the page of a store."""
    used = [_fold_excerpt(excerpt) for excerpt in report.kept_examples]
    dropped = [_fold_excerpt(excerpt) for excerpt in report.dropped_examples]
    repaired = [(what, f"{count:,}") for what, count in sorted(report.notes.items())]
    left_out = list(report.left_out.items())
    losses = [*report.describe_losses(), report.describe_split()]
    sections = (
        Section("warnings", "", _list_warnings(report)),
        Section("kept", f"{len(used)} kept, as the model reads them", used),
        Section("lost", f"{len(dropped)} dropped, as they were", dropped),
        Section("sources", "Sources", [_make_source_grid(report)]),
        Section("dropped", "Dropped", [_make_dropped_grid(report)]),
        Section("notes", "Repaired or noted", [Grid(("what", "times"), repaired)]),
        Section("left_out", "Files left out", [Grid(("file", "because"), left_out)]),
        Section("lengths", "Lengths", _show_lengths(report)),
        Section("columns", "What the examples are like", _show_columns(report)),
        Section("cut", "Cut and split", list(map(Sentence, losses))),
    )
    return Page(_make_head(folder, report), sections, f"{folder}/report.json")


def _make_head(folder: Path, report: Report) -> PageHead:
    facts = [
        ("examples", f"{report.examples:,}"),
        ("to train on", f"{report.train:,}"),
        ("held out", f"{report.validation:,}"),
        ("prompt tokens", f"{report.prompt_tokens:,}"),
        ("target tokens", f"{report.target_tokens:,}"),
        ("tokenizer", report.tokenizer),
        ("prepared in", f"{report.seconds:,.1f} s"),
    ]
    counted = f"{report.describe_counts()} Every record is counted."
    return PageHead("Data report", folder.resolve().name, counted, facts)


def _show_lengths(report: Report) -> list[Grid | Figures]:
    plots = [
        _plot_histogram("Prompt lengths", report.prompt_histogram, "tokens"),
        _plot_histogram("Target lengths", report.target_histogram, "tokens"),
    ]
    return [_make_length_grid(report), Figures(plots)]


def _show_columns(report: Report) -> list[Grid | Figures]:
    """Plot the columns with known values, and describe all columns in a table."""
    plots = [
        _plot_column(column)
        for column in report.columns
        if column.known and (_has_classes(column) or column.name not in _LABELS)
    ]
    return [Figures(plots), _make_column_grid(report)]


def _list_warnings(report: Report) -> list[Sentence]:
    """List what to look at first: cut targets, dropped records, other encodings and leaks."""
    warnings = []
    n_cut = report.cut.get("target_tokens", 0)
    cut_share = n_cut / max(1, report.target_tokens + n_cut)
    if cut_share > _NOTABLE_CUT:
        warnings.append(
            f"data.max_target_tokens cut off {cut_share:.1%} of all target tokens. Raise it, or "
            "leave long examples out with data.on_overlong=drop."
        )
    dropped_share = report.lost / max(1, report.kept + report.lost)
    if dropped_share > _NOTABLE_LOSS:
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
    return [Sentence(text, "warn") for text in warnings]


def _make_source_grid(report: Report) -> Grid:
    """Make the table of the sources: a row per file, or sums if there are many files."""
    heads = ("source", "schema", "read", "used by its reader", "share")
    notes = []
    if len(report.sources) <= MAX_FILES:
        rows = [
            _make_source_row(file.path, file.schema, [file]) for file in report.sources
        ]
    else:
        rows = _sum_source_rows(report.sources)
        notes.append(
            f"{len(report.sources):,} files, summed by source and schema. report.json lists them."
        )
    shares = _describe_example_shares(report)
    if len(shares) > 1:
        notes.append(f"Of the examples, {', '.join(shares)}.")
    notes += describe_unused_fields(report.sources)
    return Grid(heads, rows, " ".join(notes))


def _sum_source_rows(files: Sequence[SourceReport]) -> list[tuple[str, ...]]:
    rows = []
    by_source_and_schema = attrgetter("source", "schema")
    ordered = sorted(files, key=by_source_and_schema)
    for (_, schema), group in groupby(ordered, key=by_source_and_schema):
        members = list(group)
        name = f"{_find_common_folder(members)}: {len(members):,} files"
        rows.append(_make_source_row(name, schema, members))
    return rows


def _describe_example_shares(report: Report) -> list[str]:
    """Describe each source's examples after the removal of duplicates and the limits."""
    shares = []
    for source in report.source_rows:
        files = [file for file in report.sources if file.source == source.source]
        name = (
            Path(files[0].path).name if len(files) == 1 else _find_common_folder(files)
        )
        n = source.train + source.validation
        shares.append(f"{n:,} ({n / max(1, report.examples):.1%}) are from {name}")
    return shares


def _make_source_row(
    name: str, schema: str, files: Sequence[SourceReport]
) -> tuple[str, ...]:
    n_read = sum(file.read for file in files)
    n_kept = sum(file.kept for file in files)
    share = f"{n_kept / n_read:.1%}" if n_read else "-"
    return name, schema or "-", f"{n_read:,}", f"{n_kept:,}", share


def _find_common_folder(files: Sequence[SourceReport]) -> str:
    """Return the folder of all files, or "" if only some paths are absolute."""
    folders = [str(Path(file.path).parent) for file in files]
    kinds_of_paths = {Path(folder).is_absolute() for folder in folders}
    return os.path.commonpath(folders) if len(kinds_of_paths) == 1 else ""


def _make_dropped_grid(report: Report) -> Grid:
    """List the reasons, the most frequent first, with the positions of some records."""
    rows = []
    for reason, count in sorted(
        report.dropped.items(), key=lambda item: (-item[1], item[0])
    ):
        share = f"{count / max(1, report.read):.2%}"
        places = ", ".join(report.lines.get(reason, [])[:3])
        rows.append((reason, f"{count:,}", share, places))
    return Grid(("because", "records", "of all", "first at"), rows)


def _make_length_grid(report: Report) -> Grid:
    heads = ("tokens per example", "mean", "half below", "90 %", "99 %", "longest")
    rows = []
    sides = {"prompt": report.prompt_lengths, "target": report.target_lengths}
    for name, lengths in sides.items():
        counts = (lengths.p50, lengths.p90, lengths.p99, lengths.longest)
        rows.append((name, f"{lengths.mean:,.1f}", *(f"{n:,}" for n in counts)))
    return Grid(heads, rows)


def _make_column_grid(report: Report) -> Grid:
    """Describe each column in one line, for the terminal."""
    rows = []
    for column in report.columns:
        title, _ = _NAMES.get(column.name, (column.name, ""))
        # The mean of a label's codes has no meaning.
        if _has_classes(column) or column.name in _LABELS:
            values = _describe_class_shares(column)
        else:
            values = f"mean {column.mean:.3g}, {_describe_range(column)}"
        rows.append((title, f"{column.known:,}", values))
    return Grid(("column", "examples", "values"), rows, summary="In a line each")


def _describe_range(column: ColumnReport) -> str:
    return f"from {column.least:.4g} to {column.most:.4g}"


def _has_classes(column: ColumnReport) -> bool:
    """Check whether the values of a column are shown one by one, not as a histogram."""
    return bool(column.values) and (column.histogram is None or column.name in _LABELS)


def _sort_values(column: ColumnReport) -> list[tuple[str, int]]:
    """List the values and their counts in order.

    The values of a ranked column are sorted by their counts, the unknown value last.
    """
    values = list(column.values.items())
    if column.name in _RANKED:
        values.sort(key=lambda item: (item[0] == _UNKNOWN, -item[1], item[0]))
    return values


def _count_parts(
    column: ColumnReport, value: str, total: int, codes: Sequence[str]
) -> list[int]:
    """Count a value per origin, then with an unknown origin. Without origins, return the total."""
    if not codes:
        return [total]
    return [column.origins.get(code, {}).get(value, 0) for code in (*codes, _UNKNOWN)]


def _describe_class_shares(column: ColumnReport) -> str:
    """Describe the fraction of each class. Rare classes are summed, and "unknown" comes last."""
    labels = _LABELS.get(column.name, ())
    classes: list[tuple[str, int]] = []
    unknown: list[tuple[str, int]] = []
    for value, count in _sort_values(column):
        is_unknown = value == _UNKNOWN and bool(labels)
        group = unknown if is_unknown else classes
        group.append((_format_label(value, labels), count))

    shown = classes
    # A sum of a single class would not save space.
    if len(classes) > _MAX_CLASSES + 1:
        rest = classes[_MAX_CLASSES:]
        n_rest = sum(count for _, count in rest)
        shown = [*classes[:_MAX_CLASSES], (f"{len(rest)} others", n_rest)]
    return ", ".join(
        f"{name} {count / column.known:.1%}" for name, count in [*shown, *unknown]
    )


def _plot_histogram(title: str, shape: Histogram, unit: str, note: str = "") -> Figure:
    svg = draw_histogram(title, shape.edges, shape.counts, unit=unit, noun="examples")
    return Figure(title, svg, note)


def _plot_column(column: ColumnReport) -> Figure:
    """Plot a column of numbers as a histogram, or a column of classes as bars."""
    title, unit = _NAMES.get(column.name, (column.name, column.name))
    missing = f" {column.missing:,} examples lack it." if column.missing else ""
    if column.histogram is not None and not _has_classes(column):
        note = f"Mean {column.mean:.3g}, {_describe_range(column)}.{missing}"
        return _plot_histogram(title, column.histogram, unit or title, note)

    codes = [code for code in column.origins if code != _UNKNOWN]
    names = [_name_origin(column.name, int(code)) for code in codes]
    note = missing
    if len(codes) == 1:
        note = f"All {names[0]}.{missing}"
        codes, names = [], []  # a single origin does not divide the bars
    labels = _LABELS.get(column.name, ())
    rows = [
        (_format_label(value, labels), _count_parts(column, value, count, codes))
        for value, count in _sort_values(column)
    ]
    svg = draw_bars(title, rows, noun="examples", part_names=names)
    return Figure(title, svg, note.strip())


def _name_origin(column_name: str, code: int) -> str:
    names = _ORIGINS.get(column_name, ())
    return names[code] if code < len(names) else f"origin {code}"


def _format_label(value: str, labels: Sequence[str]) -> str:
    """Return the label of a code, or the value itself if the column has no labels."""
    if not labels:
        return value
    if value == _UNKNOWN:
        return "unknown"
    return labels[int(value)] if int(value) < len(labels) else value


def _fold_excerpt(excerpt: Excerpt) -> Folded:
    tags = [tag for tag in (excerpt.reason, excerpt.place) if tag]
    heading = " ".join((excerpt.prompt or excerpt.text).split())
    if len(heading) > _MAX_HEADING:
        heading = heading[:_MAX_HEADING] + "…"
    passages = []
    target_label = ""
    if excerpt.prompt:
        passages.append(Passage(excerpt.prompt, "prompt"))
        target_label = "target"
    passages.append(Passage(excerpt.text, target_label))
    return Folded(heading, passages, tags)
