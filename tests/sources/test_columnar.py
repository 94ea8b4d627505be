"""Parquet whose cells take far more memory than the file says or than a recipe may have."""

import pytest

from fixtures.processes import python
from toque.errors import DataError
from toque.sources.columnar import columnar_blocks, columnar_records
from toque.sources.decompress import MAX_RECORD_BYTES
from toque.sources.records import TOO_LONG, unpack

CELL = 160 << 20
READ = """
import re, sys
from pathlib import Path
from toque.errors import DataError
from toque.sources.columnar import columnar_blocks
try:
    n = sum(len(block.payload) for block in columnar_blocks(Path(sys.argv[1]), ["text"]))
    print(f"read {n:,} bytes")
except DataError as error:
    print(error)
print(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
"""


def written(path, *groups, **options):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    schema = arrow.schema([("text", arrow.large_string())])
    with parquet.ParquetWriter(path, schema, compression="snappy", **options) as writer:
        for texts in groups:
            writer.write_table(
                arrow.table({"text": arrow.array(texts, schema.field(0).type)})
            )
    return path


def read_in_a_child(path):
    said, peak = python("-c", READ, path).stdout.splitlines()
    return said, int(peak) << 10


@pytest.fixture(scope="module")
def huge(tmp_path_factory):
    path = tmp_path_factory.mktemp("parquet") / "huge.parquet"
    return written(path, ["Stir."] * 3, ["Fold.", "a" * CELL], use_dictionary=False)


def test_a_huge_cell_is_refused_before_it_is_decompressed(huge):
    assert huge.stat().st_size < CELL / 20
    said, peak = read_in_a_child(huge)
    assert "page of 167,772," in said
    assert "Row group 1" in said
    assert peak < CELL  # of which an interpreter with pyarrow takes a quarter


def test_the_files_own_word_about_its_size_is_not_believed(huge, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    told = (
        parquet.ParquetFile(huge)
        .metadata.row_group(1)
        .column(0)
        .total_uncompressed_size
    )
    numbers = [(2 * told >> shift & 127) | 128 for shift in range(0, 35, 7)]
    numbers[-1] &= 127
    whole = huge.read_bytes()
    assert whole.count(bytes(numbers)) > 0
    path = tmp_path / "liar.parquet"
    path.write_bytes(whole.replace(bytes(numbers), b"\x82\x80\x80\x80\x00"))
    assert (
        parquet.ParquetFile(path)
        .metadata.row_group(1)
        .column(0)
        .total_uncompressed_size
        == 1
    )
    said, peak = read_in_a_child(path)
    assert "page of 167,772," in said
    assert peak < CELL


def test_a_text_said_once_and_meant_many_times_is_read_a_few_rows_at_a_time(
    tmp_path, monkeypatch
):
    arrow = pytest.importorskip("pyarrow")
    path = written(
        tmp_path / "often.parquet",
        ["a" * (2 << 20)] * 40,
        dictionary_pagesize_limit=1 << 30,
    )
    assert path.stat().st_size < 1 << 20
    monkeypatch.setattr("toque.sources.columnar._BATCH_BYTES", 16 << 20)
    before = arrow.total_allocated_bytes()
    held = [
        arrow.total_allocated_bytes() - before for _ in columnar_blocks(path, ["text"])
    ]
    assert len(held) == 40  # a block each
    assert max(held) < 40 << 20  # of 80 MiB in all


@pytest.mark.parametrize("dictionary", [True, False])
def test_a_row_too_long_is_counted_and_its_neighbours_are_read(tmp_path, dictionary):
    texts = ["Fold."] * 5 + ["a" * (MAX_RECORD_BYTES + 1)] + ["Stir."] * 5
    path = written(tmp_path / "long.parquet", texts, use_dictionary=dictionary)
    found = {}
    for block in columnar_blocks(path, ["text"]):
        contents = unpack(block)
        if contents.kind == "unreadable":
            found[contents.first] = contents.meta["reason"]
        else:
            rows = columnar_records(contents)
            found |= {
                n: row if isinstance(row, str) else row["text"] for n, row in rows
            }
    assert found == {**dict(enumerate(texts, start=1)), 6: TOO_LONG}


def test_nonsense_where_a_page_begins_is_a_damaged_file(tmp_path):
    whole = written(tmp_path / "whole.parquet", ["Stir."] * 3).read_bytes()
    for nonsense in (b"\xff" * 12, b"\x1c" * 12, b"\x15\x80\x80\x80"):
        path = tmp_path / "nonsense.parquet"
        path.write_bytes(b"PAR1" + nonsense + whole[4 + len(nonsense) :])
        with pytest.raises(DataError, match="damaged or truncated Parquet"):
            list(columnar_blocks(path, ["text"]))


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_of_columns_of_one_name_the_last_counts(tmp_path, form):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = arrow.table(
        [["old"], ["Stir."], ["new"]], names=["answer", "text", "answer"]
    )
    path = tmp_path / "twice"
    if form == "parquet":
        parquet.write_table(table, path)
    else:
        with (
            arrow.OSFile(str(path), "wb") as sink,
            arrow.ipc.new_file(sink, table.schema) as file,
        ):
            file.write_table(table)
    (block,) = columnar_blocks(path, ["answer", "text"])
    assert list(columnar_records(unpack(block))) == [
        (1, {"answer": "new", "text": "Stir."})
    ]
