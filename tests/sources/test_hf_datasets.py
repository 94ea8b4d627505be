"""Hugging Face datasets: saved folders, names, records of text, and what is damaged."""

import json
from pathlib import Path

import numpy as np
import pytest

from toque.cooking.schemas.reader import RecipeReader, reader_for
from toque.errors import ConfigError, DataError
from toque.sources.layouts import TextRecordsError, is_columnar
from toque.sources.source_files import dataset_files, saved_files

datasets = pytest.importorskip("datasets")
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
STEPS = ["Rinse the lentils in cold water.", "Simmer until soft, then serve."]


def rows(n: int) -> list[dict[str, object]]:
    return [
        {"title": f"Pot {i}", "ingredients": [f"{i + 1} cups rice", "salt"], "directions": STEPS}
        for i in range(n)
    ]


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


def saved(folder: Path, records: list[dict[str, object]], **how: int) -> Path:
    datasets.Dataset.from_list(records).save_to_disk(folder, **how)
    return folder


def test_a_saved_folder_is_read_in_order(tmp_path, read_file):
    files = saved_files(saved(tmp_path / "d", rows(700), num_shards=2))
    assert files is not None
    assert [file.suffix for file in files] == [".arrow", ".arrow"]
    assert [RecipeReader().schema(file) for file in files] == ["arrow", "arrow"]
    titles = [recipe.title for file in files for recipe in read_file(file).recipes]
    assert titles == [f"Pot {i}" for i in range(700)]


def test_named_columns_and_pictures(tmp_path, read_file):
    records = [
        {"dish": r["title"], "what": r["ingredients"], "how": r["directions"], "photo": b"\xff" * 9}
        for r in rows(3)
    ]
    (file,) = saved_files(saved(tmp_path / "d", records)) or []
    columns = {"title": "dish", "ingredients": "what", "steps": "how"}
    assert read_file(file, columns).kept == 3
    with pytest.raises(DataError, match="a table of Arrow without a column of ingredients"):
        RecipeReader().schema(file)
    with pytest.raises(DataError, match="without the column named for title: no"):
        RecipeReader({"title": "no"}).schema(file)


def test_an_arrow_file_of_the_other_kind(tmp_path, read_file):
    arrow = pytest.importorskip("pyarrow")
    table = arrow.Table.from_pylist(rows(4))
    path = tmp_path / "table.arrow"
    with arrow.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table)
    assert read_file(path).kept == 4


def test_records_of_text_are_documents(tmp_path):
    records = [{"Text": f"Soup {i}.\r\nStir.\x00", "n": i} for i in range(5)] + [{"Text": " "}]
    (arrow,) = saved_files(saved(tmp_path / "d", records)) or []
    lines = tmp_path / "lines.jsonl"
    lines.write_text("\n".join(json.dumps(record) for record in records))
    for path in (arrow, lines):
        with pytest.raises(TextRecordsError, match=r"columns: \{text: Text\}") as caught:
            RecipeReader().schema(path)
        reader = reader_for(caught.value.columns)
        given = [reader.examples(block) for block in reader.blocks(path)]
        texts = [example.target for one in given for example in one.examples]
        assert texts == [f"Soup {i}.\nStir." for i in range(5)]
        assert all(e.document and e.prompt == "" for one in given for e in one.examples)
        assert [one.dropped for one in given if one.dropped] == [{"no text": [6]}]
        assert sum(one.notes.get("control characters removed", 0) for one in given) == 5
    assert is_columnar(arrow)
    assert not is_columnar(lines)
    with pytest.raises(ConfigError, match="for documents text alone"):
        reader_for({"text": "a", "title": "b"})
    with pytest.raises(DataError, match="without the column named for text: body"):
        list(reader_for({"text": "body"}).blocks(arrow))


def test_several_splits_must_be_chosen(tmp_path):
    one = datasets.Dataset.from_list(rows(2))
    datasets.DatasetDict(train=one, test=one).save_to_disk(tmp_path / "d")
    with pytest.raises(DataError, match=r"has the splits train, test.*/d/train"):
        saved_files(tmp_path / "d")
    with pytest.raises(DataError, match="has the splits train, test"):
        dataset_files(f"hf:{tmp_path}/d")
    named = dataset_files(f"hf:{tmp_path}/d:test")
    assert [file.path for file in named] == saved_files(tmp_path / "d" / "test")
    datasets.DatasetDict(train=one).save_to_disk(tmp_path / "single")
    assert saved_files(tmp_path / "single") == saved_files(tmp_path / "single" / "train")


def test_a_folder_of_data_files_is_built_without_a_network(tmp_path, read_file):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "train.jsonl").write_text("\n".join(json.dumps(row) for row in rows(5)))
    (folder / "test.jsonl").write_text("\n".join(json.dumps(row) for row in rows(2)))
    with pytest.raises(DataError, match=r"has the splits train, test"):
        dataset_files(f"hf:{folder}")
    (file,) = dataset_files(f"hf:{folder}:train")
    assert file.name == f"hf:{folder}:train/{file.path.name}"
    assert read_file(file.path).kept == 5
    with pytest.raises(DataError, match=r"cannot be loaded: .*vali"):
        dataset_files(f"hf:{folder}:vali")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("hf:", "not of the form hf:NAME"),
        ("hf:name:train[:5]", "use data.max_examples"),
        ("hf:nobody/nothing", "cannot be loaded: .*HF_HUB_OFFLINE=1, only what was fetched"),
    ],
)
def test_names_that_stand_for_nothing(path, words):
    with pytest.raises(DataError, match=words):
        dataset_files(path)


def test_damaged_folders_are_refused(tmp_path, read_file):
    folder = saved(tmp_path / "d", rows(300))
    (file,) = saved_files(folder) or []
    whole = file.read_bytes()
    for data in (whole[: len(whole) // 2], whole[:-8], whole[:200], whole[:8] + b"?" * 500):
        file.write_bytes(data)
        with pytest.raises(DataError, match="is a damaged or truncated Arrow file"):
            read_file(file)
    state = json.loads((folder / "state.json").read_text())
    for name, words in (("../x.arrow", "is not in the folder"), ("gone.arrow", "gone.arrow")):
        state["_data_files"] = [{"filename": name}]
        (folder / "state.json").write_text(json.dumps(state))
        with pytest.raises(DataError, match=words):
            saved_files(folder)
    state["_data_files"] = []
    (folder / "state.json").write_text(json.dumps(state))
    with pytest.raises(DataError, match="lists no files"):
        saved_files(folder)
    (folder / "state.json").write_text("{")
    with pytest.raises(DataError, match="cannot be read"):
        saved_files(folder)
    assert saved_files(tmp_path) is None


def test_offsets_that_point_outside_are_refused(tmp_path, read_file):
    (file,) = saved_files(saved(tmp_path / "d", rows(3))) or []
    data = file.read_bytes()
    offsets = np.array([0, 5, 10, 15], "<i4").tobytes()  # of the three titles
    assert data.count(offsets) == 1
    hostile = np.array([0, 5, 1 << 30, (1 << 30) + 5], "<i4").tobytes()
    file.write_bytes(data.replace(offsets, hostile))  # pyarrow would read there, and crash
    with pytest.raises(DataError, match="is a damaged or truncated Arrow file"):
        read_file(file)


def test_text_that_is_not_utf8_costs_its_rows(tmp_path, read_file):
    (file,) = saved_files(saved(tmp_path / "d", rows(3))) or []
    file.write_bytes(file.read_bytes().replace(b"Pot 1", b"Pot \xff"))
    assert read_file(file).counts == {"not UTF-8": 1}


def test_a_columns_name_that_is_not_utf8_is_refused(tmp_path):
    (file,) = saved_files(saved(tmp_path / "d", rows(3))) or []
    data = file.read_bytes()
    schema = data.index(b"title\0")
    file.write_bytes(data[:schema] + b"titl\xff" + data[schema + 5 :])
    with pytest.raises(DataError, match="is a damaged or truncated Arrow file"):
        RecipeReader().schema(file)


@pytest.mark.parametrize(
    "name", ["x" * 5000, "é" * 150, "\ud800", "..", "a/b", "", "nul\0", 3, {"a": [1]}, None]
)
@pytest.mark.parametrize("listed_in", ["state.json", "dataset_dict.json"])
def test_names_in_a_saved_folders_lists_are_plain(tmp_path, name, listed_in):
    folder = saved(tmp_path / "d", rows(3))
    if listed_in == "state.json":
        held = json.loads((folder / "state.json").read_text())
        held["_data_files"] = [{"filename": name}]
    else:
        held = {"splits": [name]}
    (folder / listed_in).write_text(json.dumps(held))
    with pytest.raises(DataError, match=f"its {listed_in} lists"):
        saved_files(folder)
