"""Every kind of reader: its recorded name and the store's fingerprint stay as 0.1.0 wrote them.

A version that was raised since is given as 0.1.0 had it.
"""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from toque.cooking.schemas import RecipeReader
from toque.data.prepare.pipeline import PrepareResult, prepare
from toque.data.prepare.plan import plan_of
from toque.data.prepare.settings import PrepareSettings
from toque.errors import DataError
from toque.sources.plain_text import TextReader
from toque.sources.prompt_target import PairReader
from toque.sources.records import RecordReader, Source
from toque.sources.text_records import DocumentReader
from toque.sources.token_arrays import TokenReader
from toque.workflows.prepare import in_a_line

READERS: list[tuple[RecordReader, str, str]] = [
    (
        RecipeReader(version=3),
        "toque.cooking.formats:recipe_reader",
        "f0b2b8b414e6a77cee546211f46a14adf0c15e354837841e876027d9053f0bed",
    ),
    (
        RecipeReader({"title": "Naïve: name", "steps": "how, exactly"}, version=3),
        'toque.cooking.formats:columns={"steps": "how, exactly", "title": "Na\\u00efve: name"}',
        "a228fe6e74b624fa45260e7d0d776e88d5d4cba2dca8b8b58ac01fe62deff5d9",
    ),
    (
        DocumentReader("body of it"),
        "toque.cooking.formats:text=body of it",
        "50955f602c23d94d3174a0e02958d0fc3a1a64d1f8fe5010e1a7e5a364051794",
    ),
    (
        PairReader("question", "réponse"),
        'toque.cooking.formats:pairs={"prompt": "question", "target": "r\\u00e9ponse"}',
        "00b3da5ef54b17b4040084e9601bc6ec99ec941c69a28cf555c11fdcf7d63915",
    ),
    (
        TextReader(),
        "toque.data.text:text_reader",
        "339e3cd99878587f15ebc95ea26f2443117bfc882223ac44641e668ef2db38b0",
    ),
    (
        TokenReader(),
        "toque.data.token_files:token_reader",
        "7b732b1052fbca3c6dea5b6bd53bdbdc27719553ea505f6d7b35a23f260e8cf7",
    ),
]


@pytest.mark.parametrize(("reader", "name", "fingerprint"), READERS)
def test_names_and_fingerprints_are_those_of_0_1_0(
    tmp_path: Path, reader: RecordReader, name: str, fingerprint: str
) -> None:
    assert reader.recorded_name == name
    path = tmp_path / "source"
    path.write_bytes(b"one source of fixed bytes\n")
    settings = PrepareSettings(family_kind="decoder", tokenizer="trained:400")
    assert (
        plan_of([Source(str(path), reader)], tmp_path / "s", settings).fingerprint(settings)
        == fingerprint
    )


@pytest.mark.parametrize(("reader", "name", "fingerprint"), READERS)
def test_a_reader_travels_to_a_worker_as_it_is(
    reader: RecordReader, name: str, fingerprint: str
) -> None:
    del name, fingerprint
    assert pickle.loads(pickle.dumps(reader)) == reader  # noqa: S301 - our own bytes


SOUP = (
    b'{"title": "Pea Soup", "ingredients": ["2 cups peas", "1 onion", "Garnish: mint"], '
    b'"directions": ["Boil the peas and the onion for ten minutes.", "Blend and serve it hot."]}\n'
)


def test_a_store_of_an_older_reader_is_reused_and_said_to_be(tmp_path: Path) -> None:
    path, store = tmp_path / "soups.jsonl", tmp_path / "s"
    path.write_bytes(b"".join(SOUP.replace(b"ten", b"%d" % n) for n in range(40)))
    settings = PrepareSettings(family_kind="decoder", tokenizer="trained:300")

    def prepared(version: int, *, replace: bool = False) -> PrepareResult:
        sources = [Source(str(path), RecipeReader(version=version))]
        return prepare(sources, store=store, settings=settings, workers=1, replace=replace)

    first = prepared(3)
    before = (store / "manifest.json").read_bytes()
    later = prepared(4)
    assert (first.older_reader, later.reused, later.older_reader) == (False, True, True)
    assert (store / "manifest.json").read_bytes() == before
    assert "earlier release" in in_a_line(later, "local")
    assert "earlier release" not in in_a_line(prepared(3), "local")
    with pytest.raises(DataError, match="made from something else"):  # a newer one than ours
        prepared(2)
    anew = prepared(4, replace=True)
    assert (anew.reused, anew.older_reader) == (False, False)
    assert (store / "manifest.json").read_bytes() != before


def test_a_damaged_store_of_an_older_reader_is_not_made_anew_unasked(tmp_path: Path) -> None:
    path, store = tmp_path / "soups.jsonl", tmp_path / "s"
    path.write_bytes(b"".join(SOUP.replace(b"ten", b"%d" % n) for n in range(40)))
    settings = PrepareSettings(family_kind="decoder", tokenizer="trained:300")
    prepare([Source(str(path), RecipeReader(version=3))], store=store, settings=settings, workers=1)
    next(store.glob("shards/*/target_ids.bin"), next(store.glob("shards/*/*.npy"))).unlink()
    with pytest.raises(DataError, match=r"earlier release .* anew"):
        prepare([Source(str(path), RecipeReader())], store=store, settings=settings, workers=1)
