"""The store asked for against the one that is there: fingerprints, and differences in words."""

import pickle
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from fixtures.stores import Made
from toque.cooking.schemas.reader import RecipeReader
from toque.data.prepare.pipeline import prepare
from toque.data.prepare.store_plan import PrepareSettings, plan_of, store_differences
from toque.data.store.store_manifest import SourceEntry
from toque.errors import DataError
from toque.sources.documents import DocumentReader, PairReader, TextReader
from toque.sources.records import RecordReader, Source
from toque.sources.token_arrays import TokenReader

Make = Callable[..., PrepareSettings]
READERS: list[tuple[RecordReader, str, str]] = [
    (
        RecipeReader(version=3),
        "toque.cooking.formats:recipe_reader",
        "027e2358517ea44bd87aa328",
    ),
    (
        RecipeReader({"title": "Naïve: name", "steps": "how, exactly"}, version=3),
        'toque.cooking.formats:columns={"steps": "how, exactly", "title": "Na\\u00efve: name"}',
        "f0be2dda362c85d054ac4065",
    ),
    (
        DocumentReader("body of it", version=1),
        "toque.cooking.formats:text=body of it",
        "95dfb91e668304df7e7dd4e1",
    ),
    (
        PairReader("question", "réponse", version=1),
        'toque.cooking.formats:pairs={"prompt": "question", "target": "r\\u00e9ponse"}',
        "46d41f28e0e9527f03b43c8d",
    ),
    (TextReader(version=1), "toque.data.text:text_reader", "a635917691d1ad2fd1577fca"),
    (TokenReader(), "toque.data.token_files:token_reader", "847cdde26079bfab3e1eb643"),
]
"""Readers, their recorded names, and the beginnings of a plan's fingerprint with each."""


@pytest.mark.parametrize(("reader", "name", "fingerprint"), READERS)
def test_names_and_fingerprints_stay_and_readers_travel_to_workers(
    tmp_path: Path, reader: RecordReader, name: str, fingerprint: str
) -> None:
    assert reader.recorded_name == name
    assert pickle.loads(pickle.dumps(reader)) == reader  # noqa: S301 - our own bytes
    path = tmp_path / "source"
    path.write_bytes(b"one source of fixed bytes\n")
    settings = PrepareSettings(family_kind="decoder", tokenizer="trained:400")
    plan = plan_of([Source(str(path), reader)], tmp_path / "s", settings)
    assert plan.fingerprint(settings).startswith(fingerprint)


SOUP = (
    b'{"title": "Pea Soup", "ingredients": ["2 cups peas", "1 onion", "Garnish: mint"], '
    b'"directions": ["Boil the peas and the onion for ten minutes.", "Blend and serve it hot."]}\n'
)


def test_a_store_of_another_version_of_a_reader_is_refused_and_named(
    tmp_path: Path,
) -> None:
    path, store = tmp_path / "soups.jsonl", tmp_path / "s"
    path.write_bytes(b"".join(SOUP.replace(b"ten", b"%d" % n) for n in range(40)))
    settings = PrepareSettings(family_kind="decoder", tokenizer="trained:300")

    def made(version: int, *, replace: bool = False) -> bool:
        sources = [Source(str(path), RecipeReader(version=version))]
        found = prepare(
            sources, store=store, settings=settings, workers=1, replace=replace
        )
        return not found.reused

    assert made(3)
    assert not made(3)
    with pytest.raises(
        DataError, match=r"the version of each reader was \[3\] and is \[4\]"
    ):
        made(4)
    assert made(4, replace=True)


# Sources by name, where they are not on this machine


@pytest.fixture
def differing(made: Made, tmp_path: Path, settings_for: Make):
    """Differences of a store prepared from these (source, path) and sources that are away."""
    manifest = made("s").store.manifest

    def find(
        files: list[tuple[int, str]], *paths: str, then=None, now: tuple = ()
    ) -> list[str]:
        entries = [
            SourceEntry(path, "reader", number, "0" * 64, 9, 1, 1)
            for number, path in files
        ]
        recorded = manifest.settings | ({"max_files": then} if then else {})
        store = msgspec.structs.replace(manifest, sources=entries, settings=recorded)
        settings = settings_for(max_files=now)
        away = [(path, None) for path in paths]
        return store_differences(
            tmp_path / "s", store, settings, tokenizer=None, sources=away
        )

    return find


@pytest.mark.parametrize(
    ("asked", "file"),
    [
        ("gs://pantry/a.jsonl", "gs://pantry/a.jsonl"),
        ("gs://pantry/dumps/", "gs://pantry/dumps/a.jsonl"),
        ("s3://pantry/dumps", "s3://pantry/dumps/2024/a.jsonl"),
        ("s3://pantry/dumps/*.jsonl", "s3://pantry/dumps/a.jsonl"),
        ("hf:org/recipes", "hf:org/recipes:train/data-00000.arrow"),
        ("hf:org/recipes:train", "hf:org/recipes:train/data-00000.arrow"),
        ("dumps/away.jsonl", "dumps/away.jsonl"),
        ("dumps-away", "dumps-away/a.jsonl"),
        ("dumps-away/*.jsonl", "dumps-away/a.jsonl"),
    ],
)
def test_what_is_away_is_compared_by_name_and_nothing_is_fetched(
    differing, asked, file
):
    assert differing([(0, file)], asked) == []
    others = (
        "gs://pantry/b.jsonl",
        "gs://pantry/dum",
        "hf:org/recipes:test",
        "dumps-away-2",
    )
    for other in (*others, "hf:org/recipe", "dumps/away"):
        (said,) = differing([(0, file)], other)
        assert f"data.sources[0] is {other}" in said
        assert file in said


def test_order_and_number_count(differing):
    files = [(0, "gs://p/a.jsonl"), (1, "gs://p/b.jsonl"), (1, "gs://p/c.jsonl")]
    assert differing(files, "gs://p/a.jsonl", "gs://p/[bc].jsonl") == []
    assert len(differing(files, "gs://p/[bc].jsonl", "gs://p/a.jsonl")) == 2
    (said,) = differing(files, "gs://p/a.jsonl")
    assert (
        "prepared from 2 sources (files such as gs://p/a.jsonl, gs://p/b.jsonl, gs://p/c.jsonl)"
        in said
    )
    assert "has 1 (gs://p/a.jsonl)" in said


@pytest.mark.parametrize(("then", "now"), [(None, 3), ([3], None), ([3], 4)])
def test_another_number_of_files_is_another_source(differing, then, now):
    files, same = [(0, "gs://p/a.npz")], tuple(then or ())
    assert differing(files, "gs://p/", then=then, now=same) == []
    (said,) = differing(files, "gs://p/", then=then, now=(now,) if now else ())
    assert said == f"max_files was {then} and is {[now] if now else None}"


def test_without_sources_the_store_is_taken_as_it_is(differing):
    assert differing([(0, "gs://p/a.jsonl")]) == []


# Sources by content, where they are here


def test_files_count_by_content_reader_and_order(
    tmp_path: Path, settings_for: Make
) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in "ab":
        (folder / f"{name}.txt").write_text(f"Stir {name} and serve it hot. " * 20)
    settings, store = settings_for(), tmp_path / "s"

    def found(reader: RecordReader, *names: str) -> list[str]:
        sources = [Source(str(folder / f"[{''.join(names)}].txt"), reader)]
        return plan_of(sources, store, settings).differences(manifest)

    sources = [Source(str(folder), TextReader())]
    manifest = prepare(
        sources, store=store, settings=settings, workers=1
    ).store.manifest
    assert found(TextReader(), "a", "b") == []
    (said,) = found(TextReader(), "a")
    assert "b.txt, from which it was prepared, is missing" in said
    (said,) = found(TextReader(encoding="cp1252"), "a", "b")
    assert "was read in another way (format, encoding, columns or tasks)" in said
    (folder / "a.txt").rename(folder / "c.txt")
    (said,) = found(TextReader(), "b", "c")
    assert "its files were in another order" in said
    (folder / "b.txt").write_text("Something else.")
    (said,) = found(TextReader(), "b", "c")
    assert f"{folder / 'b.txt'} is new or has changed since" in said
