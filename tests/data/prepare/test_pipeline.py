import gzip
import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from fixtures.processes import python
from fixtures.stores import Made
from line_reader import ForgetfulReader, LineReader, ReaderOfTasks
from store_checks import READER, content
from toque.cooking.schemas.reader import RecipeReader
from toque.data.prepare.pipeline import prepare
from toque.data.prepare.store_plan import PrepareSettings
from toque.data.store.token_store import TokenStore
from toque.errors import ConfigError, DataError
from toque.sources.documents import TextReader
from toque.sources.records import Block, Source

Make = Callable[..., PrepareSettings]

pytestmark = pytest.mark.usefixtures("small_groups")


def test_read_is_kept_plus_dropped(made: Made) -> None:
    report = made("s").report
    assert (report.read, report.kept) == (33, 30)
    assert report.dropped == {"duplicate": 1, "not JSON": 2}
    assert report.lines == {"not JSON": ["recipes.jsonl:8", "recipes.jsonl:33"]}
    assert report.examples == report.train + report.validation == 30
    assert (report.leaked_bodies, report.leaked_titles) == (0, 0)
    assert report.cut == {
        "prompts": 0,
        "prompt_tokens": 0,
        "targets": 0,
        "target_tokens": 0,
    }
    assert report.describe_counts() == "Read 33 records: kept 30, dropped 3."


@pytest.mark.parametrize("family", ["decoder", "encoder-decoder"])
def test_processes_change_nothing(made: Made, tmp_path: Path, family: str) -> None:
    alone, several = (made(name, family, workers=n) for name, n in (("a", 1), ("b", 2)))
    assert len(alone.store.manifest.shards) > 20
    assert content(tmp_path / "a") == content(tmp_path / "b")
    assert alone.store.fingerprint == several.store.fingerprint


def test_the_same_inputs_reuse_the_store(
    made: Made, lines_file: Path, tmp_path: Path
) -> None:
    first = made("s")
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "s").rglob("*.npy")}
    moved = tmp_path / "elsewhere.jsonl"
    lines_file.rename(moved)
    again = made("s", of=moved)
    assert (first.reused, again.reused) == (False, True)
    assert again.report == first.report
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "s").rglob("*.npy")} == before


def test_other_inputs_are_refused_with_what_differs(
    made: Made, lines_file: Path, tmp_path: Path
) -> None:
    store = tmp_path / "s"
    made(store)
    before = content(store)
    with pytest.raises(DataError, match=r"was 400 and is 99\. .* replace=True"):
        made(store, max_target_tokens=99)
    with pytest.raises(
        DataError, match="family_kind was decoder and is encoder-decoder"
    ):
        made(store, "encoder-decoder")
    with pytest.raises(DataError, match=r"its tokenizer was .*bpe and is trained:400"):
        made(store, tokenizer="trained:400")
    lines_file.write_text(
        lines_file.read_text() + "\n".join(lines_file.read_text().split("\n")[:1])
    )
    with pytest.raises(DataError, match=r"recipes\.jsonl is new or has changed since"):
        made(store)
    assert content(store) == before
    assert not made(store, replace=True).reused
    assert content(store) != before
    TokenStore.open(store, verify=True)


@pytest.mark.parametrize("family", ["decoder", "encoder-decoder"])
def test_a_tokenizer_is_learnt_and_kept(
    made: Made, tmp_path: Path, family: str
) -> None:
    first, second = (made(name, family, tokenizer="trained:420") for name in "ab")
    assert content(tmp_path / "a") == content(tmp_path / "b")
    assert first.store.manifest.tokenizer.name == "trained:420"
    assert (
        first.store.codec().vocab_size
        == second.store.manifest.tokenizer.vocab_size
        <= 420
    )
    assert made("a", family, tokenizer="trained:420").reused
    assert first.report.unknown.get("target", 0) == 0


def test_a_large_vocabulary_takes_four_bytes(made: Made, tmp_path: Path) -> None:
    words = {"</s>": 0} | {f"w{i}": i for i in range(1, 70_000)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="</s>"))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    (tmp_path / "words").mkdir()
    tokenizer.save(str(tmp_path / "words" / "tokenizer.json"))
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps({"prompt": "w1", "target": "w69999 w2"}))
    store = made("s", of=path, tokenizer=str(tmp_path / "words")).store
    assert store.target(0).dtype == np.uint32
    assert store.target(0).tolist() == [69_999, 2, 0]


def test_a_source_that_breaks_a_reader_of_ones_own_is_named(
    made: Made, tmp_path: Path
) -> None:
    class GzipReader(LineReader):
        def blocks(self, path: Path) -> Iterator[Block]:
            yield Block(0, str(path), 1, gzip.decompress(path.read_bytes()))

    path = tmp_path / "lines.gz"
    path.write_bytes(gzip.compress(b"stir the soup\n" * 5000, mtime=0)[:-20])
    with pytest.raises(DataError, match=r"lines\.gz cannot be read to its end"):
        made("s", of=path, reader=GzipReader())


def test_preparing_needs_neither_torch_nor_transformers() -> None:
    """Workers import what the main process imports: seconds each, were torch among it."""
    script = (
        "import sys, toque.data.prepare.pipeline, toque.sources.documents;"
        "import toque.cooking.schemas.reader;"
        "print([m for m in ('torch', 'transformers', 'huggingface_hub', 'pyarrow', 'pandas')"
        " if m in sys.modules])"
    )
    assert python("-c", script).stdout == "[]\n"


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("absent.jsonl", None, r"source file .*absent\.jsonl does not exist"),
        ("empty.jsonl", b"", r"empty\.jsonl is empty \(0 bytes\)"),
        (
            "none.jsonl",
            b'{"prompt": "a", "target": ""}\n',
            "None of the 1 records in none.jsonl",
        ),
        (
            "bad.jsonl",
            b"{\n{\n{\n",
            r"3 of the 3 records in bad\.jsonl cannot be used, more than",
        ),
    ],
)
def test_sources_that_give_nothing_are_refused(
    made: Made, tmp_path: Path, name: str, data: bytes | None, message: str
) -> None:
    if data is not None:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=message):
        made("s", of=tmp_path / name)
    assert not (tmp_path / "s" / "manifest.json").exists()


def test_folders_patterns_and_several_sources(
    tmp_path: Path, settings_for: Make
) -> None:
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
        prepare(
            [Source("nowhere/*.jsonl", READER)],
            store=tmp_path / "t",
            settings=settings_for(),
        )
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


def test_records_and_examples_are_both_counted(made: Made, tmp_path: Path) -> None:
    report = made("s", of=two_tasks(tmp_path)).report
    assert (report.read, report.kept, report.examples) == (4, 2, 3)
    assert report.dropped == {"duplicate": 1, "no target": 1}
    assert report.notes == {"examples left out: no target": 1}


def test_a_reader_is_given_the_tasks_and_found_if_it_loses_count(
    made: Made, tmp_path: Path
) -> None:
    path = two_tasks(tmp_path)
    assert made("s", of=path, reader=ReaderOfTasks()).report.kept == 2
    with pytest.raises(DataError, match="has wrong counts"):
        made("t", of=path, reader=ForgetfulReader())


@pytest.mark.parametrize("on_overlong", ["truncate", "auto"])
def test_what_is_too_long_is_cut_and_counted(made: Made, on_overlong: str) -> None:
    result = made("s", max_target_tokens=10, on_overlong=on_overlong)
    store = result.store
    assert store.target_lengths.max() == 10
    eos = store.codec().eos_id
    assert all(store.target(row)[-1] != eos for row in range(store.n_rows))
    assert result.report.cut["targets"] == 30  # and not the duplicate's
    assert result.report.cut["target_tokens"] > 0
    assert result.report.cut == result.store.manifest.cut
    assert not any(column.name.endswith("_lost") for column in result.report.columns)


@pytest.mark.parametrize(("limit", "n"), [({"max_examples": 2}, 2), ({}, 20)])
def test_what_was_cut_is_counted_in_the_rows_in_use(
    made: Made, tmp_path: Path, limit: dict[str, int], n: int
) -> None:
    """Other records are read, too: duplicates, and those of the last group beyond the examples."""
    words = " ".join(["salt"] * 60)
    lines = [
        json.dumps({"prompt": f"Dish {i % 20}", "target": f"{words} {i % 20}"})
        for i in range(400)
    ]
    (tmp_path / "many.jsonl").write_text("\n".join(lines))
    whole = made("whole", of=tmp_path / "many.jsonl", **limit)
    report = made("s", of=tmp_path / "many.jsonl", max_target_tokens=16, **limit).report
    text = whole.report.target_tokens - n  # without their ends
    lost = text - n * 16
    assert report.cut == {
        "prompts": 0, "prompt_tokens": 0, "targets": n, "target_tokens": lost,
    }  # fmt: skip
    assert (
        f"{n} targets were cut and lost {lost:,} tokens ({lost / text:.2%}"
        in " ".join(report.describe_losses())
    )


def test_dropping_all_an_error_or_a_split_of_pairs_is_said(made: Made) -> None:
    with pytest.raises(DataError, match="31 target over 10 tokens"):
        made("s", max_target_tokens=10, on_overlong="drop")
    with pytest.raises(DataError, match='target of "Dish 0…" has more than 10 tokens'):
        made("s", max_target_tokens=10, on_overlong="error")
    with pytest.raises(
        ConfigError, match="the second half of a long target would have no prompt"
    ):
        made("t", on_overlong="split")


def test_poor_recipes_are_left_out(made: Made) -> None:
    result = made("s", min_quality=0.5)
    assert (
        result.report.dropped["quality below 0.5"] == 16
    )  # 15 and the duplicate of one of them
    assert result.store.column("quality").min() >= 0.5


def test_a_limit_on_examples_is_counted(made: Made) -> None:
    result = made("s", max_examples=12)
    report = result.report
    # The fourth group holds the twelfth example and three more; the rest of the file is not read.
    assert (report.examples, report.dropped["beyond max_examples"], report.read) == (
        12,
        3,
        16,
    )
    assert int((result.store.split != 255).sum()) == 12
    # Of the records that are not kept one is no JSON; three were only not asked for.
    assert report.lost == report.read - report.kept - 3 == 1
    assert report.describe_counts().endswith(
        "kept 12, dropped 1, left 3 beyond max_examples."
    )


@pytest.mark.parametrize("family", ["decoder", "encoder-decoder"])
def test_documents_become_pieces(made: Made, tmp_path: Path, family: str) -> None:
    text = "\n".join(f"{i} stir the soup and add salt" for i in range(300))
    path = tmp_path / "book.txt.gz"
    path.write_bytes(gzip.compress(text.encode(), mtime=0))
    limits = {"max_prompt_tokens": 8, "max_target_tokens": 24}
    result = made("s", family, of=path, reader=TextReader(), **limits)
    store, codec = result.store, result.store.codec()
    assert (result.report.read, result.report.kept) == (1, 1)
    assert store.n_rows > 32
    assert len(store.rows("validation")) > 0
    rows = [
        (store.prompt(i).tolist(), store.target(i).tolist())
        for i in range(store.n_rows)
    ]
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


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("family", "tokenizer"), [("encoder-decoder", "t5"), ("decoder", "gpt2")]
)
def test_real_recipes(
    shared: Path, tmp_path: Path, family: str, tokenizer: str
) -> None:
    settings = PrepareSettings(
        family_kind=family, tokenizer=str(shared / "tokenizers" / tokenizer)
    )
    path = shared / "data" / "recipes" / "allrecipes_epicurious_as_is.jsonl.gz"
    source = Source(str(path), RecipeReader())
    report = prepare([source], store=tmp_path / "s", settings=settings).report
    assert report.read == 68_004 == report.kept + sum(report.dropped.values())
    assert report.leaked_bodies == 0
    n_unknown = report.unknown.get("prompt", 0) + report.unknown.get("target", 0)
    assert n_unknown < 1e-4 * report.target_tokens
    assert prepare([source], store=tmp_path / "s", settings=settings).reused
