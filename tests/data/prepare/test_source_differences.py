"""Sources of a configuration against those in a store's manifest, by name where they are away."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from toque.data.prepare.source_differences import source_differences
from toque.data.store.manifest import SourceEntry, StoreManifest, read_manifest
from toque.sources.files import SourceFile

STORE = Path(__file__).parents[2] / "golden" / "v0.1.0" / "store"


def manifest_of(*files: tuple[int, str]) -> StoreManifest:
    """A manifest of release 0.1.0, as if it had been prepared from these (source, path)."""
    entries = [SourceEntry(path, "reader", number, "0" * 64, 9, 1, 1) for number, path in files]
    return msgspec.structs.replace(read_manifest(STORE), sources=entries)


def never(_number: int) -> list[SourceFile]:
    raise AssertionError("nothing of it is on this machine")


def differing(manifest: StoreManifest, *paths: str) -> list[str]:
    return source_differences(manifest, paths, never)


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
def test_what_is_away_is_compared_by_name_and_nothing_is_fetched(asked, file):
    assert differing(manifest_of((0, file)), asked) == []
    for other in ("gs://pantry/b.jsonl", "hf:org/recipe", "dumps-away-2", "dumps/away"):
        (said,) = differing(manifest_of((0, file)), other)
        assert f"data.sources[0] is {other}" in said
        assert file in said


def test_a_split_or_a_folder_of_a_similar_name_is_another():
    assert differing(manifest_of((0, "hf:org/recipes:test/a.arrow")), "hf:org/recipes:train") != []
    assert differing(manifest_of((0, "gs://pantry/dumps2/a.jsonl")), "gs://pantry/dumps") != []


def test_order_and_number_count():
    manifest = manifest_of((0, "gs://p/a.jsonl"), (1, "gs://p/b.jsonl"), (1, "gs://p/c.jsonl"))
    assert differing(manifest, "gs://p/a.jsonl", "gs://p/[bc].jsonl") == []
    assert len(differing(manifest, "gs://p/[bc].jsonl", "gs://p/a.jsonl")) == 2
    (said,) = differing(manifest, "gs://p/a.jsonl")
    assert "prepared from 2 (files such as gs://p/a.jsonl, gs://p/b.jsonl, gs://p/c.jsonl)" in said
    assert "lists 1 (gs://p/a.jsonl)" in said


@pytest.mark.parametrize(("then", "now"), [(None, 3), ([3], None), ([3], 4)])
def test_another_number_of_files_is_another_source(then, now):
    entries = [SourceEntry("gs://p/a.npz", "reader", 0, "0" * 64, 9, 1, 1)]
    manifest = manifest_of()
    settings = manifest.settings | ({} if then is None else {"max_files": then})
    manifest = msgspec.structs.replace(manifest, sources=entries, settings=settings)
    before = then[0] if then else None
    assert source_differences(manifest, ["gs://p/"], never, max_files=[before]) == []
    (said,) = source_differences(manifest, ["gs://p/"], never, max_files=[now])
    assert said == (
        f"data.sources[0] is gs://p/ with max_files {now}, and it was prepared with {before}"
    )


def test_a_configuration_without_sources_takes_the_store_as_it_is():
    assert differing(manifest_of((0, "gs://p/a.jsonl"))) == []
