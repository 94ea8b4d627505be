"""Shards written while later files are still coming: the same store, whatever came when."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from store_checks import content, whole_shards
from toque.data.prepare.pipeline import prepare
from toque.data.prepare.settings import PrepareSettings
from toque.data.tokenizer.train import train_codec
from toque.errors import DataError
from toque.sources import files as source_files
from toque.sources.plain_text import TextReader
from toque.sources.records import Source
from toque.sources.token_arrays import TokenReader
from toque.storage.located import Coming, Located

READER = TextReader()


@pytest.fixture
def kitchen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four texts, each a group of its own, and a tokenizer."""
    monkeypatch.setattr(source_files, "GROUP_BYTES", 1)
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text(f"Onions, {number} spoons of butter. " * 9)
    (tmp_path / "tokenizer").mkdir()
    codec = train_codec(["Onions and butter, fried slowly."] * 4, vocab_size=300, kind="bpe")
    codec.save(tmp_path / "tokenizer")
    return tmp_path


def settings(kitchen: Path, **more: object) -> PrepareSettings:
    given = {"tokenizer": str(kitchen / "tokenizer"), "max_target_tokens": 8, **more}
    return PrepareSettings(family_kind="decoder", validation_fraction=0.2, dedup="none", **given)


def here(kitchen: Path) -> tuple[Located, ...]:
    return tuple(Located(str(p), p) for p in sorted(kitchen.glob("*.txt")))


def coming(kitchen: Path, wait: object, source: Source) -> Source:
    """`source` as it is while its files are fetched: `wait(number)` for each, then itself."""
    files = tuple(
        Located(file.name, file.path, coming=Coming(file.path.stat().st_size, partial(wait, n)))
        for n, file in enumerate(here(kitchen))
    )

    def judged() -> Source:
        for number in range(len(files)):
            wait(number)
        return source

    return Source(str(kitchen), READER, files, judged=judged)


@pytest.mark.parametrize("limits", [{"max_prompt_tokens": 8}, {"max_prompt_tokens": None}])
def test_shards_are_there_before_the_last_file_and_the_store_is_the_same(kitchen, limits):
    source = Source(str(kitchen), READER, here(kitchen))
    asked = settings(kitchen, room=64 if limits["max_prompt_tokens"] is None else None, **limits)
    prepare([source], store=kitchen / "plain", settings=asked, workers=1)
    seen: list[tuple[int, int]] = []

    def wait(number: int) -> str:
        seen.append((number, len(whole_shards(kitchen / "ahead"))))
        return "0" * 64

    store = kitchen / "ahead"
    result = prepare([coming(kitchen, wait, source)], store=store, settings=asked, workers=1)
    assert seen[:4] == [(0, 0), (1, 0), (2, 1), (3, 2)]
    assert not result.reused
    assert content(store) == content(kitchen / "plain")
    again = prepare([coming(kitchen, wait, source)], store=store, settings=asked, workers=1)
    assert again.reused


def test_nothing_is_written_ahead_where_all_files_decide(kitchen):
    source = Source(str(kitchen), READER, here(kitchen))

    def wait(_: int) -> str:
        assert whole_shards(kitchen / "store") == []
        return "0" * 64

    for name, more in (("a", {"tokenizer": "trained:400"}), ("b", {"max_examples": 2})):
        asked = settings(kitchen, **more)
        prepare([source], store=kitchen / name, settings=asked, workers=1)
        store = kitchen / f"ahead-{name}"
        prepare([coming(kitchen, wait, source)], store=store, settings=asked, workers=1)
        assert content(store) == content(kitchen / name)


def test_a_format_that_was_promised_wrongly_costs_time_and_changes_nothing(kitchen):
    np.save(kitchen / "1.npy", np.arange(40) + 20)
    (kitchen / "1.npy").rename(kitchen / "1.txt")
    files = here(kitchen)
    true = Source(str(kitchen), READER, files, {files[1].name: TokenReader()})
    prepare([true], store=kitchen / "plain", settings=settings(kitchen), workers=1)
    source = coming(kitchen, lambda _: "0" * 64, true)
    prepare([source], store=kitchen / "ahead", settings=settings(kitchen), workers=1)
    assert content(kitchen / "ahead") == content(kitchen / "plain")


def test_a_file_that_does_not_come_leaves_shards_that_the_next_start_keeps(kitchen):
    source = Source(str(kitchen), READER, here(kitchen))
    store = kitchen / "store"

    def wait(number: int) -> str:
        if number == 3:
            raise DataError("3.txt did not come")
        return "0" * 64

    with pytest.raises(DataError, match=r"^3.txt did not come$"):
        prepare([coming(kitchen, wait, source)], store=store, settings=settings(kitchen), workers=1)
    kept = {p: p.stat().st_mtime_ns for p in whole_shards(store)}
    assert len(kept) == 2
    assert not (store / "manifest.json").exists()
    prepare([source], store=store, settings=settings(kitchen), workers=1)
    assert {p: p.stat().st_mtime_ns for p in kept} == kept
    prepare([source], store=kitchen / "plain", settings=settings(kitchen), workers=1)
    assert content(store) == content(kitchen / "plain")


def test_a_shard_of_other_text_is_written_again(kitchen):
    source = Source(str(kitchen), READER, here(kitchen))
    with pytest.raises(KeyboardInterrupt):
        prepare([source], store=kitchen / "s", settings=settings(kitchen), progress=stop, workers=1)
    assert whole_shards(kitchen / "s")
    (kitchen / "0.txt").write_text("Salt alone. " * 9)
    changed = Source(str(kitchen), READER, here(kitchen))
    prepare([changed], store=kitchen / "s", settings=settings(kitchen), workers=1)
    prepare([changed], store=kitchen / "plain", settings=settings(kitchen), workers=1)
    assert content(kitchen / "s") == content(kitchen / "plain")


def stop(_done: int, _total: int, message: str) -> None:
    if message.endswith("examples"):
        raise KeyboardInterrupt
