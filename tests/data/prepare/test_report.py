import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fixtures.stores import Made
from toque.cli import main
from toque.data.prepare.data_report import (
    Excerpt,
    Histogram,
    Report,
    column_reports,
    sample_excerpts,
    spread_over_reasons,
)
from toque.data.prepare.shards import SIDECAR, ShardResult
from toque.data.prepare.store_plan import PrepareSettings
from toque.sources.documents import TextReader
from toque.sources.records import MAX_CHARS, shortened
from toque.storage.json_files import read_json

Make = Callable[..., PrepareSettings]

pytestmark = pytest.mark.usefixtures("small_groups")


def test_histograms_count_every_example(made: Made) -> None:
    report = made("s").report
    for shape in (report.prompt_histogram, report.target_histogram):
        assert sum(shape.counts) == report.examples
    columns = {column.name: column for column in report.columns}
    assert sorted(columns) == ["id", "quality"]
    assert (columns["quality"].known, columns["quality"].missing) == (30, 0)
    assert sum(columns["quality"].histogram.counts) == 30
    (rows,) = report.source_rows
    assert (rows.train, rows.validation) == (report.train, report.validation)
    assert rows.tokens == report.prompt_tokens + report.target_tokens


def test_twenty_kept_examples_are_the_stores_own(made: Made, lines_file: Path) -> None:
    result = made("s")
    targets = {
        json.loads(x)["target"]
        for x in lines_file.read_text().splitlines()
        if x[0] == "{" and x[1] == '"'
    }
    kept = result.report.kept_examples
    assert len(kept) == len({e.text for e in kept}) == 20
    assert {e.text for e in kept} <= targets
    assert {e.reason for e in kept} <= {"train", "validation"}


def test_records_left_out_are_shown_with_their_reason(
    made: Made, lines_file: Path
) -> None:
    report = made("s", min_quality=0.8).report
    reasons = [e.reason for e in report.dropped_examples]
    # The duplicate is of a poor record, so it is poor before it is a duplicate.
    assert set(reasons) == {"quality below 0.8"}
    report = made("t").report
    (shown,) = report.dropped_examples  # this reader shows nothing of what is not JSON
    (first, second) = [
        x for x in lines_file.read_text().splitlines() if '"Dish 3"' in x
    ]
    assert shown.reason == "duplicate"
    assert first == second
    assert shown.text == json.loads(first)["target"]
    report = made("u", dedup="none", max_examples=12).report
    assert {e.reason for e in report.dropped_examples} <= {"beyond max_examples"}


def test_documents_have_a_report_without_columns(made: Made, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("stir the soup and add salt\n" * 300)
    report = made("s", of=tmp_path / "book.txt", reader=TextReader()).report
    assert (report.columns, report.dropped_examples) == ([], [])
    assert [source.schema for source in report.sources] == ["text"]
    assert report.kept_examples


def test_a_report_of_another_version_is_none(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text('{"store": "s", "read": 3}')
    assert Report.read_from(tmp_path) is None


def test_a_rare_reason_is_shown_beside_a_common_one() -> None:
    dropped = [Excerpt("no steps", f"a:{i}", "{}") for i in range(1000)]
    dropped.append(Excerpt("not JSON", "a:1001", "{"))
    sample = sample_excerpts(dropped)
    assert sample == sample_excerpts(reversed(dropped))
    assert [e.reason for e in sample] == ["no steps"] * 5 + ["not JSON"]
    assert [e.reason for e in spread_over_reasons(sample, 3)] == [
        "no steps",
        "no steps",
        "not JSON",
    ]


def test_texts_are_cut_and_fit_for_json() -> None:
    assert len(shortened("x" * 10_000)) == MAX_CHARS + 1
    assert shortened(b"\xff" * 9_000) == "\ufffd" * MAX_CHARS + "…"
    assert shortened("a\ud800b") == "a\ufffdb"


def test_labels_are_told_by_where_they_come_from() -> None:
    columns = {
        "size": np.array([0, 1, 1, 255, np.nan], np.float32),
        "size_coverage": np.array([0.5, 1, 0.25, 1, np.nan], np.float32),
        "size_from": np.array([0, 1, 0, 255, np.nan], np.float32),
    }
    size, coverage = column_reports(columns, columns.__getitem__)
    assert size.values == {"0": 1, "1": 2, "255": 1}
    assert size.origins == {"0": {"0": 1, "1": 1}, "1": {"1": 1}, "255": {"255": 1}}
    assert (size.known, size.missing) == (4, 1)
    assert (coverage.known, coverage.least, coverage.most) == (2, 0.25, 0.5)


@pytest.mark.parametrize(
    ("values", "edges"),
    [
        (np.array([0.0, 0.4, 1.0]), (0.0, 1.0)),
        (np.array([3, 3, 3]), (3.0, 4.0)),
        (np.array([0, 512]), (0.0, 520.0)),
        (np.array([-0.31, 0.2]), (-0.32, 0.2)),
    ],
)
def test_histograms_end_at_round_numbers(
    values: np.ndarray, edges: tuple[float, float]
) -> None:
    shape = Histogram.from_values(values)
    assert (shape.edges[0], shape.edges[-1]) == edges
    assert sum(shape.counts) == len(values)
    assert len(shape.counts) <= 33


def damaged(data: bytes, at: int) -> bytes:
    """`data` with the high bit of a byte flipped, which is no UTF-8."""
    return data[:at] + bytes([data[at] ^ 0x80]) + data[at + 1 :]


def test_fault_67_a_flipped_high_bit_of_a_report_or_a_shard_is_damage(
    made: Made,
) -> None:
    store = made("s").store.path
    sidecar = store / "shards" / "00000" / SIDECAR
    for file, read in (
        (store / "report.json", lambda: Report.read_from(store)),
        (sidecar, lambda: read_json(sidecar, ShardResult)),
    ):
        data = file.read_bytes()
        assert read() is not None
        for at in range(0, len(data), 41):
            file.write_bytes(damaged(data, at))
            assert read() is None
        file.write_bytes(data)
    made(store)  # with a damaged sidecar, too


def test_fault_67_the_page_of_a_store_with_a_flipped_bit_names_the_file(
    made: Made, capsys: pytest.CaptureFixture[str]
) -> None:
    store = made("s").store.path
    for name in ("report.json", "manifest.json"):
        data = (store / name).read_bytes()
        (store / name).write_bytes(damaged(data, 40))
        assert main(["report", str(store)]) == 3
        assert name in capsys.readouterr().err.replace("\n", "")
        (store / name).write_bytes(data)
    assert main(["report", str(store)]) == 0
