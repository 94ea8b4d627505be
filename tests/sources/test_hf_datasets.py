"""Hugging Face datasets: saved folders, names, records of text, and what is damaged."""

import json
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import constants

import toque
from fixtures.hub_datasets import DatasetsHub, datasets_hub
from toque.cooking.schemas.reader import RecipeReader, reader_for
from toque.errors import ConfigError, DataError
from toque.sources.hub_datasets import dataset_files, saved_files
from toque.sources.layouts import TextRecordsError, is_columnar
from toque.storage.download import CACHE_VARIABLE

datasets = pytest.importorskip("datasets")
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
STEPS = ["Rinse the lentils in cold water.", "Simmer until soft, then serve."]


def rows(n: int) -> list[dict[str, object]]:
    return [
        {
            "title": f"Pot {i}",
            "ingredients": [f"{i + 1} cups rice", "salt"],
            "directions": STEPS,
        }
        for i in range(n)
    ]


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "toque"))
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
        {
            "dish": r["title"],
            "what": r["ingredients"],
            "how": r["directions"],
            "photo": b"\xff" * 9,
        }
        for r in rows(3)
    ]
    (file,) = saved_files(saved(tmp_path / "d", records)) or []
    columns = {"title": "dish", "ingredients": "what", "steps": "how"}
    assert read_file(file, columns).kept == 3
    with pytest.raises(
        DataError, match="an Arrow table without a column of ingredients"
    ):
        RecipeReader().schema(file)
    with pytest.raises(DataError, match="has no column for title: no"):
        RecipeReader({"title": "no"}).schema(file)


def test_an_arrow_file_of_the_other_kind(tmp_path, read_file):
    arrow = pytest.importorskip("pyarrow")
    table = arrow.Table.from_pylist(rows(4))
    path = tmp_path / "table.arrow"
    with arrow.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table)
    assert read_file(path).kept == 4


def test_records_of_text_are_documents(tmp_path):
    records = [{"Text": f"Soup {i}.\r\nStir.\x00", "n": i} for i in range(5)] + [
        {"Text": " "}
    ]
    (arrow,) = saved_files(saved(tmp_path / "d", records)) or []
    lines = tmp_path / "lines.jsonl"
    lines.write_text("\n".join(json.dumps(record) for record in records))
    for path in (arrow, lines):
        with pytest.raises(
            TextRecordsError, match=r"columns: \{text: Text\}"
        ) as caught:
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
    with pytest.raises(ConfigError, match="only text for documents"):
        reader_for({"text": "a", "title": "b"})
    with pytest.raises(DataError, match="has no column for text: body"):
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
    assert saved_files(tmp_path / "single") == saved_files(
        tmp_path / "single" / "train"
    )


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
    with pytest.raises(
        DataError, match=r"has the splits train, test, not vali\. Name one"
    ):
        dataset_files(f"hf:{folder}:vali")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("hf:", "must have the form hf:NAME"),
        ("hf:name@:train", "must have the form hf:NAME"),
        ("hf:name:train[5:]", r"read only the first rows.*:train\[:5000\]"),
        (
            "hf:nobody/nothing",
            "cannot be loaded: .*HF_HUB_OFFLINE=1, only cached datasets",
        ),
    ],
)
def test_names_that_stand_for_nothing(path, words):
    with pytest.raises(DataError, match=words):
        dataset_files(path)


def test_a_reader_that_finds_no_first_row_is_told_in_words(monkeypatch):
    def none(*_: object, **__: object) -> object:
        return next(iter(()))

    monkeypatch.setattr("datasets.load_dataset_builder", none)
    with pytest.raises(DataError, match="cannot be loaded: its files have no rows"):
        dataset_files("hf:some/name")


OLD, NEW = "a" * 40, "b" * 40
CARD = b"""---
configs:
- config_name: main
  data_files:
  - {split: train, path: [main/a.jsonl, main/b.jsonl]}
  - {split: test, path: main/test.jsonl}
- config_name: other
  data_files: other.jsonl
---
"""


def files_of(word: str) -> dict[str, bytes]:
    """A dataset of two configurations, the first of two splits; `word` is in every prompt."""

    def lines(name: str, n: int) -> bytes:
        rows = (
            {"prompt": f"{word} {name} {i}", "target": f"{i} spoons"} for i in range(n)
        )
        return "".join(json.dumps(row) + "\n" for row in rows).encode()

    made = {
        "main/a.jsonl": 30,
        "main/b.jsonl": 10,
        "main/test.jsonl": 3,
        "other.jsonl": 5,
    }
    return {"README.md": CARD} | {name: lines(name, n) for name, n in made.items()}


@pytest.fixture
def served(monkeypatch):
    commits = {OLD: files_of("old"), NEW: files_of("new")}
    with datasets_hub(
        "org/soups", commits, {"main": NEW, "v1": OLD}, monkeypatch
    ) as hub:
        yield hub


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize(
    ("asked", "commit", "prompt", "n"),
    [
        ("hf:org/soups:main:train", NEW, "new main/a.jsonl 0", 40),
        ("hf:org/soups@v1:main:train", OLD, "old main/a.jsonl 0", 40),
        (f"hf:org/soups@{OLD}:main:test", OLD, "old main/test.jsonl 0", 3),
        ("hf:org/soups:main:train[:35]", NEW, "new main/a.jsonl 0", 35),
        ("hf:org/soups@v1:other:train[:50]", OLD, "old other.jsonl 0", 5),
    ],
)
def test_a_dataset_of_the_hub_is_read_at_a_commit_that_is_named(
    asked, commit, prompt, n
):
    said: list[str] = []
    (file,) = dataset_files(asked, said.append)
    assert file.name == f"{asked}/{commit}/{file.path.name}"
    found = datasets.Dataset.from_file(str(file.path))
    assert (len(found), found[0]["prompt"]) == (n, prompt)
    assert said[-1] == f"{asked} is read at commit {commit}."
    amount = f"{n} rows, the entire split"
    if n >= 35:
        amount = f"the first {n} rows, which are not a random sample"
    assert [line for line in said if "streamed" in line] == (
        [f"{asked}: streamed {amount}."] if "[" in asked else []
    )


def test_the_rest_of_a_stream_is_not_fetched_and_its_rows_are_kept(
    served: DatasetsHub,
) -> None:
    path = "hf:org/soups:main:train[:7]"
    (file,) = dataset_files(path)
    assert served.sent["main/a.jsonl"] > 0
    assert "main/b.jsonl" not in served.sent
    assert "main/test.jsonl" not in served.sent
    served.sent.clear()
    assert dataset_files(path) == (file,)
    assert served.sent == {}
    served.revisions["main"] = OLD  # a new commit is read anew
    (other,) = dataset_files(path)
    assert other.path != file.path
    assert (
        datasets.Dataset.from_file(str(other.path))[6]["prompt"] == "old main/a.jsonl 6"
    )


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (
            "hf:org/soups",
            r"configurations main, other\. Name one.*\"hf:org/soups:main:train\"",
        ),
        (
            "hf:org/soups:other",
            r"Name one configuration before.*\"hf:org/soups:other:train\"",
        ),
        (
            "hf:org/soups:man:test",
            r"main, other, not man\. .*\"hf:org/soups:main:test\"",
        ),
        (
            "hf:org/soups:main:dev",
            r"train, test, not dev\. .*\"hf:org/soups:main:train\"",
        ),
        ("hf:org/soups@v2:main:train", "Revision 'v2' doesn't exist"),
    ],
)
def test_what_a_dataset_lacks_is_said_with_what_it_has(asked, words):
    with pytest.raises(DataError, match=words) as caught:
        dataset_files(asked)
    assert "\n" not in str(caught.value)


def test_without_a_network_a_revision_is_that_which_was_fetched(served, monkeypatch):
    assert served.revisions["main"] == NEW
    (fetched,) = dataset_files("hf:org/soups:main:train")
    for module in (constants, datasets.config):
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", True)
    assert dataset_files("hf:org/soups:main:train") == (fetched,)
    (same,) = dataset_files(f"hf:org/soups@{NEW}:main:train")
    assert same.path == fetched.path
    for other in (OLD, "v1"):
        with pytest.raises(
            DataError, match=f"does not respond, and the cache has only {NEW}"
        ):
            dataset_files(f"hf:org/soups@{other}:main:train")


@pytest.mark.usefixtures("served")
def test_a_store_is_of_a_commit_and_another_at_another_revision(
    tmp_path, tokenizers_at
):
    def prepared(path: str):
        config = toque.configure(
            "demo",
            data={"sources": [{"path": path}], "store": str(tmp_path / "store")},
            model={"tokenizer": str(tokenizers_at["decoder"])},
        )
        return toque.prepare(config)

    made = prepared("hf:org/soups@v1:main:train[:20]")
    (entry,) = made.store.manifest.sources
    assert entry.path.startswith(f"hf:org/soups@v1:main:train[:20]/{OLD}/")
    assert entry.read == 20
    assert prepared("hf:org/soups@v1:main:train[:20]").reused
    with pytest.raises(DataError, match="is new or has changed since"):
        prepared("hf:org/soups:main:train[:20]")


def test_no_code_of_a_dataset_is_run(tmp_path):
    folder = tmp_path / "soups"
    folder.mkdir()
    (folder / "soups.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    (folder / "train.jsonl").write_text(json.dumps(rows(1)[0]))
    with pytest.raises(
        DataError, match=r"scripts are no longer supported.*does not run the code"
    ):
        dataset_files(f"hf:{folder}:train")
    assert not (tmp_path / "ran").exists()


def test_a_folder_has_no_revision_and_a_saved_one_is_read_whole(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text(json.dumps(rows(1)[0]))
    with pytest.raises(DataError, match="is a folder, and a folder has no revision"):
        dataset_files(f"hf:{tmp_path}/data@v1:train")
    (file,) = dataset_files(f"hf:{tmp_path}/data:train[:9]")
    assert len(datasets.Dataset.from_file(str(file.path))) == 1
    saved(tmp_path / "kept@home", rows(2))
    assert len(dataset_files(f"hf:{tmp_path}/kept@home")) == 1
    for more in (":train", ":train[:1]", ":main:train"):
        with pytest.raises(DataError, match="by save_to_disk and is read in full"):
            dataset_files(f"hf:{tmp_path}/kept@home{more}")


def test_damaged_folders_are_refused(tmp_path, read_file):
    folder = saved(tmp_path / "d", rows(300))
    (file,) = saved_files(folder) or []
    whole = file.read_bytes()
    for data in (
        whole[: len(whole) // 2],
        whole[:-8],
        whole[:200],
        whole[:8] + b"?" * 500,
    ):
        file.write_bytes(data)
        with pytest.raises(DataError, match="is a damaged or truncated Arrow file"):
            read_file(file)
    state = json.loads((folder / "state.json").read_text())
    for name, words in (
        ("../x.arrow", "is not in the folder"),
        ("gone.arrow", "gone.arrow"),
    ):
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
    file.write_bytes(
        data.replace(offsets, hostile)
    )  # pyarrow would read there, and crash
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
    "name",
    ["x" * 5000, "é" * 150, "\ud800", "..", "a/b", "", "nul\0", 3, {"a": [1]}, None],
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
