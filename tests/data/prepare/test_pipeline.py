import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

import toque
from line_reader import ForgetfulReader, LineReader, ReaderOfTasks
from store_checks import READER, content, prepared
from toque.cooking.schemas.reader import RecipeReader
from toque.data.prepare.pipeline import prepare
from toque.data.prepare.store_plan import PrepareSettings
from toque.data.store.token_store import TokenStore
from toque.errors import ConfigError, DataError
from toque.sources.documents import TextReader
from toque.sources.records import Block, Source

Make = Callable[..., PrepareSettings]

pytestmark = pytest.mark.usefixtures("small_groups")


def test_read_is_kept_plus_dropped(lines_file: Path, tmp_path: Path, settings_for: Make) -> None:
    report = prepared(lines_file, tmp_path / "s", settings_for()).report
    assert (report.read, report.kept) == (33, 30)
    assert report.dropped == {"duplicate": 1, "not JSON": 2}
    assert report.lines == {"not JSON": ["recipes.jsonl:8", "recipes.jsonl:33"]}
    assert report.examples == report.train + report.validation == 30
    assert (report.leaked_bodies, report.leaked_titles) == (0, 0)
    assert report.cut == {"prompts": 0, "prompt_tokens": 0, "targets": 0, "target_tokens": 0}
    assert report.counted() == "Read 33 records: kept 30, dropped 3."


@pytest.mark.parametrize("family", ["decoder", "encoder-decoder"])
def test_processes_change_nothing(
    lines_file: Path, tmp_path: Path, settings_for: Make, family: str
) -> None:
    settings = settings_for(family)
    alone = prepared(lines_file, tmp_path / "a", settings, workers=1)
    several = prepared(lines_file, tmp_path / "b", settings, workers=2)
    assert len(alone.store.manifest.shards) > 20
    assert content(tmp_path / "a") == content(tmp_path / "b")
    assert alone.store.fingerprint == several.store.fingerprint


def test_the_same_inputs_reuse_the_store(
    lines_file: Path, tmp_path: Path, settings_for: Make
) -> None:
    first = prepared(lines_file, tmp_path / "s", settings_for())
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "s").rglob("*.npy")}
    moved = tmp_path / "elsewhere.jsonl"
    lines_file.rename(moved)
    again = prepared(moved, tmp_path / "s", settings_for())
    assert (first.reused, again.reused) == (False, True)
    assert again.report == first.report
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "s").rglob("*.npy")} == before


def test_other_inputs_are_refused_with_what_differs(
    lines_file: Path, tmp_path: Path, settings_for: Make
) -> None:
    store = tmp_path / "s"
    prepared(lines_file, store, settings_for())
    before = content(store)
    with pytest.raises(DataError, match=r"was 400 and is 99\. .* replace=True"):
        prepared(lines_file, store, settings_for(max_target_tokens=99))
    with pytest.raises(DataError, match="family_kind was decoder and is encoder-decoder"):
        prepared(lines_file, store, settings_for("encoder-decoder"))
    with pytest.raises(DataError, match=r"its tokenizer was .*bpe and is trained:400"):
        prepared(lines_file, store, settings_for(tokenizer="trained:400"))
    lines_file.write_text(
        lines_file.read_text() + "\n".join(lines_file.read_text().split("\n")[:1])
    )
    with pytest.raises(DataError, match=r"recipes\.jsonl is new or has changed since"):
        prepared(lines_file, store, settings_for())
    assert content(store) == before
    assert not prepared(lines_file, store, settings_for(), replace=True).reused
    assert content(store) != before
    TokenStore.open(store, verify=True)


def test_a_folder_of_other_things_is_left_alone(
    lines_file: Path, tmp_path: Path, settings_for: Make
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(DataError, match="is not empty and holds no token store"):
        prepared(lines_file, tmp_path / "mine", settings_for())
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["letter.txt"]


@pytest.mark.parametrize("family", ["decoder", "encoder-decoder"])
def test_a_tokenizer_is_learnt_and_kept(
    lines_file: Path, tmp_path: Path, settings_for: Make, family: str
) -> None:
    settings = settings_for(family, tokenizer="trained:420")
    first = prepared(lines_file, tmp_path / "a", settings)
    second = prepared(lines_file, tmp_path / "b", settings)
    assert content(tmp_path / "a") == content(tmp_path / "b")
    assert first.store.manifest.tokenizer.name == "trained:420"
    assert first.store.codec().vocab_size == second.store.manifest.tokenizer.vocab_size <= 420
    assert prepared(lines_file, tmp_path / "a", settings).reused
    assert first.report.unknown.get("target", 0) == 0


def test_a_large_vocabulary_takes_four_bytes(tmp_path: Path, settings_for: Make) -> None:
    words = {"</s>": 0} | {f"w{i}": i for i in range(1, 70_000)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="</s>"))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    (tmp_path / "words").mkdir()
    tokenizer.save(str(tmp_path / "words" / "tokenizer.json"))
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps({"prompt": "w1", "target": "w69999 w2"}))
    settings = settings_for(tokenizer=str(tmp_path / "words"))
    store = prepared(path, tmp_path / "s", settings).store
    assert store.target(0).dtype == np.uint32
    assert store.target(0).tolist() == [69_999, 2, 0]


def test_a_source_that_breaks_a_reader_of_ones_own_is_named(
    tmp_path: Path, settings_for: Make
) -> None:
    class GzipReader(LineReader):
        def blocks(self, path: Path) -> Iterator[Block]:
            yield Block(0, str(path), 1, gzip.decompress(path.read_bytes()))

    path = tmp_path / "lines.gz"
    path.write_bytes(gzip.compress(b"stir the soup\n" * 5000, mtime=0)[:-20])
    with pytest.raises(DataError, match=r"lines\.gz cannot be read to its end"):
        prepare([Source(str(path), GzipReader())], store=tmp_path / "s", settings=settings_for())


def test_preparing_needs_neither_torch_nor_transformers() -> None:
    """Workers import what the main process imports: seconds each, were torch among it."""
    script = (
        "import sys, toque.data.prepare.pipeline, toque.sources.documents;"
        "import toque.cooking.schemas.reader;"
        "print([m for m in ('torch', 'transformers', 'huggingface_hub', 'pyarrow', 'pandas')"
        " if m in sys.modules])"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(toque.__file__).parents[1])}
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment
    )
    assert found.stdout == "[]\n"


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("absent.jsonl", None, r"There is no source file .*absent\.jsonl"),
        ("empty.jsonl", b"", r"empty\.jsonl is empty \(0 bytes\)"),
        ("none.jsonl", b'{"prompt": "a", "target": ""}\n', "None of the 1 records in none.jsonl"),
        ("bad.jsonl", b"{\n{\n{\n", r"3 of the 3 records in bad\.jsonl cannot be used, more than"),
    ],
)
def test_sources_that_give_nothing_are_refused(
    tmp_path: Path, settings_for: Make, name: str, data: bytes | None, message: str
) -> None:
    if data is not None:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=message):
        prepared(tmp_path / name, tmp_path / "s", settings_for())
    assert not (tmp_path / "s" / "manifest.json").exists()


def test_too_many_bad_lines_are_refused_with_their_places(
    lines_file: Path, tmp_path: Path, settings_for: Make
) -> None:
    with pytest.raises(DataError, match=r"2 not JSON \(first at recipes.jsonl:8, recipes.jsonl:33"):
        prepared(lines_file, tmp_path / "s", settings_for(max_bad_share=0.01))
    prepared(lines_file, tmp_path / "s", settings_for(max_bad_share=0.1))


def test_folders_patterns_and_several_sources(tmp_path: Path, settings_for: Make) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / "data" / name).mkdir(parents=True)
        record = json.dumps({"prompt": name, "target": f"soup {name}"})
        (tmp_path / "data" / name / "one.jsonl").write_text(record + "\n")
    (tmp_path / "data" / ".hidden").write_text("x")
    sources = [
        Source(str(tmp_path / "data" / "[ab]" / "*.jsonl"), READER),
        Source(str(tmp_path / "data"), READER),
    ]
    result = prepare(sources, store=tmp_path / "s", settings=settings_for())
    assert [s.read for s in result.report.sources] == [1] * 5
    assert result.report.dropped == {"duplicate": 2}
    assert result.store.column("source").tolist() == [0, 0, 1, 1, 1]
    assert (result.store.split == 255).tolist() == [False, False, True, True, False]
    with pytest.raises(DataError, match="No file matches the source"):
        prepare([Source("nowhere/*.jsonl", READER)], store=tmp_path / "t", settings=settings_for())
    with pytest.raises(DataError, match=r"data\.sources is empty"):
        prepare([], store=tmp_path / "t", settings=settings_for())


def two_tasks(tmp_path: Path) -> Path:
    path = tmp_path / "tasks.jsonl"
    records = [
        {"prompt": "a", "target": "soup", "extra": "easy"},
        {"prompt": "b", "target": "soup", "extra": "easy"},
        {"prompt": "c", "target": "stew", "extra": ""},
        {"prompt": "d", "target": "", "extra": ""},
    ]
    path.write_text("\n".join(map(json.dumps, records)))
    return path


def test_records_and_examples_are_both_counted(tmp_path: Path, settings_for: Make) -> None:
    report = prepared(two_tasks(tmp_path), tmp_path / "s", settings_for()).report
    assert (report.read, report.kept, report.examples) == (4, 2, 3)
    assert report.dropped == {"duplicate": 1, "no target": 1}
    assert report.notes == {"examples left out: no target": 1}


def test_a_reader_is_given_the_tasks(tmp_path: Path, settings_for: Make) -> None:
    source = Source(str(two_tasks(tmp_path)), ReaderOfTasks())
    assert prepare([source], store=tmp_path / "s", settings=settings_for()).report.kept == 2


def test_a_reader_that_loses_count_is_found(tmp_path: Path, settings_for: Make) -> None:
    source = Source(str(two_tasks(tmp_path)), ForgetfulReader())
    with pytest.raises(DataError, match="it lost count"):
        prepare([source], store=tmp_path / "s", settings=settings_for())


@pytest.mark.parametrize(
    ("on_overlong", "kept", "cut"), [("truncate", 30, 30), ("auto", 30, 30), ("drop", 0, 0)]
)
def test_what_is_too_long_is_cut_or_dropped_and_counted(
    lines_file: Path, tmp_path: Path, settings_for: Make, on_overlong: str, kept: int, cut: int
) -> None:
    settings = settings_for(max_target_tokens=10, on_overlong=on_overlong)
    if not kept:
        with pytest.raises(DataError, match="31 target over 10 tokens"):
            prepared(lines_file, tmp_path / "s", settings)
        return
    result = prepared(lines_file, tmp_path / "s", settings)
    store = result.store
    assert store.target_lengths.max() == 10
    eos = store.codec().eos_id
    assert all(store.target(row)[-1] != eos for row in range(store.n_rows))
    assert result.report.cut["targets"] == cut + 1  # the duplicate's too
    assert result.report.cut["target_tokens"] > 0


def test_an_error_or_a_split_of_pairs_is_said(
    lines_file: Path, tmp_path: Path, settings_for: Make
) -> None:
    settings = settings_for(max_target_tokens=10, on_overlong="error")
    with pytest.raises(DataError, match='target of "Dish 0…" has more than 10 tokens'):
        prepared(lines_file, tmp_path / "s", settings)
    with pytest.raises(ConfigError, match="the second half of a recipe has no prompt"):
        prepared(lines_file, tmp_path / "t", settings_for(on_overlong="split"))


def test_poor_recipes_are_left_out(lines_file: Path, tmp_path: Path, settings_for: Make) -> None:
    result = prepared(lines_file, tmp_path / "s", settings_for(min_quality=0.5))
    assert result.report.dropped["quality below 0.5"] == 16  # 15 and the duplicate of one of them
    assert result.store.column("quality").min() >= 0.5


def test_a_limit_on_examples_is_counted(
    lines_file: Path, tmp_path: Path, settings_for: Make
) -> None:
    result = prepared(lines_file, tmp_path / "s", settings_for(max_examples=12))
    report = result.report
    # The fourth group holds the twelfth example and three more; the rest of the file is not read.
    assert (report.examples, report.dropped["beyond max_examples"], report.read) == (12, 3, 16)
    assert int((result.store.split != 255).sum()) == 12
    # Of the records that are not kept one is no JSON; three were only not asked for.
    assert report.lost == report.read - report.kept - 3 == 1
    assert report.counted().endswith("kept 12, dropped 1, left 3 beyond max_examples.")


@pytest.mark.parametrize("family", ["decoder", "encoder-decoder"])
def test_documents_become_pieces(tmp_path: Path, settings_for: Make, family: str) -> None:
    text = "\n".join(f"{i} stir the soup and add salt" for i in range(300))
    path = tmp_path / "book.txt.gz"
    path.write_bytes(gzip.compress(text.encode(), mtime=0))
    settings = settings_for(family, max_prompt_tokens=8, max_target_tokens=24)
    source = Source(str(path), TextReader())
    result = prepare([source], store=tmp_path / "s", settings=settings)
    store, codec = result.store, result.store.codec()
    assert (result.report.read, result.report.kept) == (1, 1)
    assert store.n_rows > 32
    assert len(store.rows("validation")) > 0
    rows = [(store.prompt(i).tolist(), store.target(i).tolist()) for i in range(store.n_rows)]
    if family == "decoder":
        tokens = [t for _, target in rows for t in target]
        assert rows[0][0] == [codec.bos_id]
        assert all(b[0] == [a[1][-1]] for a, b in pairwise(rows))
    else:
        tokens = [t for prompt, target in rows for t in prompt[:-1] + target]
    assert tokens == [*codec.encode(text), codec.eos_id]
    # Sixteen neighbours share their side of the split.
    sides = store.split.tolist()
    assert all(len(set(sides[at : at + 16])) == 1 for at in range(0, store.n_rows, 16))


def test_documents_and_recipes_in_one_store(
    lines_file: Path, tmp_path: Path, settings_for: Make
) -> None:
    (tmp_path / "book.txt").write_text("stir the soup\n" * 200)
    sources = [
        Source(str(lines_file), READER),
        Source(str(tmp_path / "book.txt"), TextReader()),
    ]
    settings = settings_for(max_target_tokens=200)
    result = prepare(sources, store=tmp_path / "s", settings=settings)
    quality = result.store.column("quality")
    source = result.store.column("source")
    assert bool((quality[source == 0] >= 0).all())
    assert bool((quality[source == 1] != quality[source == 1]).all())
    assert result.report.kept == 31


def test_a_vocabulary_is_a_number() -> None:
    trained = PrepareSettings(family_kind="decoder", tokenizer="trained:8k")
    with pytest.raises(ConfigError, match="after trained: comes the size"):
        _ = trained.trained_vocab_size


@pytest.mark.slow
@pytest.mark.parametrize(("family", "tokenizer"), [("encoder-decoder", "t5"), ("decoder", "gpt2")])
def test_real_recipes(shared: Path, tmp_path: Path, family: str, tokenizer: str) -> None:
    settings = PrepareSettings(family_kind=family, tokenizer=str(shared / "tokenizers" / tokenizer))
    path = shared / "data" / "recipes" / "allrecipes_epicurious_as_is.jsonl.gz"
    source = Source(str(path), RecipeReader())
    report = prepare([source], store=tmp_path / "s", settings=settings).report
    assert report.read == 68_004 == report.kept + sum(report.dropped.values())
    assert report.leaked_bodies == 0
    n_unknown = report.unknown.get("prompt", 0) + report.unknown.get("target", 0)
    assert n_unknown < 1e-4 * report.target_tokens
    assert prepare([source], store=tmp_path / "s", settings=settings).reused
