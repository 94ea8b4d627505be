"""Damaged files of every kind, a few of each: done, or refused in one paragraph with its exit code.

`tests/fuzzing` has the valid files, the damage and the checks. A failure prints its seed. Set
TOQUE_FUZZ_CASES to run this number of further cases of each kind.
"""

import os
import shutil
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuzzing import entrances, originals
from toque.cli import main
from toque.data.tokenizer.codec import load_codec
from toque.errors import DataError

MORE_CASES = int(os.environ.get("TOQUE_FUZZ_CASES", "0"))
FOLDERS = ("config", "store", "checkpoint", "dataset", "run", "model", "resume")
SOURCES = (
    "json", "json-nested", "json-ld", "jsonl", "pairs", "documents", "csv", "tsv", "foodcom",
    "html", "text", "npy", "npz", "npz-rows", "parquet", "arrow", "arrow-stream", "xlsx", "gz",
    "zst",
)  # fmt: skip
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def areas(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    pytest.importorskip("datasets")
    work = tmp_path_factory.mktemp("originals")

    def toque(*words: str) -> None:
        assert main(list(words)) == 0

    originals.make(work, toque)
    return entrances.areas(work)


def test_there_is_a_case_for_every_area(areas: dict[str, Any]) -> None:
    assert {*FOLDERS, *SOURCES} == set(areas)


@pytest.mark.parametrize("area", [*FOLDERS, *SOURCES])
def test_damage_ends_well_or_in_words(
    area: str, areas: dict[str, Any], tmp_path: Path
) -> None:
    met = 0

    @settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow])
    @given(seed=st.integers(0, 2**32))
    def one(seed: int) -> None:
        nonlocal met
        folder = tmp_path / "case"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        met += areas[area].case(Random(seed), folder)

    one()
    for seed in range(MORE_CASES):
        one.hypothesis.inner_test(seed)
    assert met > 0  # not everything is refused, so the damage reaches what lies behind


@pytest.mark.parametrize(
    "name",
    ["config.json", "tokenizer.json", "generation_config.json", "adapter_config.json",
     "model.safetensors.index.json"],
)  # fmt: skip
def test_endless_brackets_in_a_model_folder(
    areas: dict[str, Any], name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(areas["model"].original, folder)
    (folder / name).write_text("[" * 100_000)
    if name.startswith("model."):
        (folder / "model.safetensors").unlink()
    code = main(
        ["generate", str(folder), "--prompt", "Lentils", "--max-new-tokens", "2"]
    )
    assert code in (2, 3, 4)
    assert str(folder) in capsys.readouterr().err


def test_endless_brackets_in_a_stores_tokenizer(
    areas: dict[str, Any], tmp_path: Path
) -> None:
    folder = tmp_path / "tokenizer"
    shutil.copytree(areas["store"].original / "tokenizer", folder)
    (folder / "tokenizer_config.json").write_text("[" * 100_000)
    with pytest.raises(
        DataError, match=r"tokenizer_config\.json cannot be read as JSON"
    ):
        load_codec(folder)
