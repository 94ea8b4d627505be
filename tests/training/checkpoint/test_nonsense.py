"""Checkpoints whose hashes are right and whose state no training can have written."""

import json
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from fixtures.runs import RunMaker
from toque.errors import CheckpointError
from toque.storage.atomic import FileEntry, sha256_of
from toque.training.checkpoint.saved import MANIFEST, read_manifest
from toque.training.runtime import set_deterministic
from toque.training.stopping import Patience

STEP = 6


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The folder of a whole checkpoint of step 6."""
    run, before = (
        tmp_path_factory.mktemp("whole"),
        torch.are_deterministic_algorithms_enabled(),
    )
    RunMaker(run)(steps=STEP, **options()).trainer.fit()
    set_deterministic(before)
    return run / "checkpoints" / f"step-{STEP:08d}"


@pytest.fixture
def saved(make_run, whole) -> Path:
    """A copy of it, which a run continues from."""
    return Path(shutil.copytree(whole, make_run.folder / "checkpoints" / whole.name))


def options() -> dict[str, Any]:
    return {
        "callbacks": (Patience(patience=9),),
        "evaluate_every": "2 steps",
    }


def rehashed(folder: Path, **changes: Any) -> None:
    """Make the manifest fit the files, as whoever forges them can."""
    manifest = read_manifest(folder)
    files = tuple(
        FileEntry(e.file, (folder / e.file).stat().st_size, sha256_of(folder / e.file))
        for e in manifest.files
    )
    new = msgspec.structs.replace(manifest, files=files, self_sha256="", **changes)
    (folder / MANIFEST).write_bytes(new.to_json())


def with_state(
    folder: Path, change: Callable[[dict[str, Any]], Any], *, both: bool = True
) -> None:
    """`both`: the manifest repeats the changed progress and cursor, as the saver does."""
    path = folder / "state.json"
    state = json.loads(path.read_text())
    change(state)
    path.write_text(json.dumps(state))
    told = {
        n: state[n] for n in ("progress", "cursor") if isinstance(state.get(n), dict)
    }
    rehashed(folder, **(told if both and all(told.values()) else {}))


def with_tensors(
    folder: Path, stem: str, change: Callable[[dict[str, Any]], Any]
) -> None:
    path = folder / f"{stem}.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    rehashed(folder)


def refused(make_run, pattern: str) -> None:
    with pytest.raises(CheckpointError, match=pattern) as found:
        make_run(steps=18, **options())
    assert "\n" not in str(found.value)
    assert f"step-{STEP:08d}" in str(found.value)


@contextmanager
def put_back(folder: Path) -> Iterator[None]:
    before = {path: path.read_bytes() for path in folder.iterdir()}
    yield
    for path, data in before.items():
        path.write_bytes(data)


def setting(*place: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(state: dict[str, Any]) -> None:
        for name in place[:-1]:
            state = state[name]
        state[place[-1]] = value

    return change


NUMBERS = [-5, 1e30, "6", None, True, [], {}, 10**400]
PLACES = [
    *(
        ("progress", name)
        for name in ("step", "examples", "tokens", "target_tokens", "epoch")
    ),
    *(("cursor", name) for name in ("epoch", "window", "row", "stage", "updates")),
    ("best", "step"),
    ("callbacks", "Patience", "evaluations_without_improvement"),
]


@pytest.mark.parametrize("place", PLACES, ids="-".join)
def test_fault_64_numbers_of_another_type_or_range_are_refused(make_run, saved, place):
    for value in NUMBERS:
        with put_back(saved):
            with_state(saved, setting(*place, value=value))
            refused(make_run, r"step-00000006")
    make_run(steps=18, **options())


@pytest.mark.parametrize(
    "text",
    ["[]", "7", '"state"', "{}", "NaN", "[" * 9999, '{"progress": NaN}', "{\xff", ""],
)
def test_fault_64_a_state_of_another_form_is_refused(make_run, saved, text):
    (saved / "state.json").write_bytes(text.encode("latin-1"))
    rehashed(saved)
    refused(make_run, "state")


@pytest.mark.parametrize("name", ["progress", "cursor", "best", "callbacks", "runtime"])
@pytest.mark.parametrize("value", ["x", 5, [1], True])
def test_fault_64_parts_of_another_form_are_refused(make_run, saved, name, value):
    with_state(saved, setting(name, value=value))
    refused(make_run, "valid hashes but an invalid state")


def test_fault_64_another_step_or_place_than_the_manifests_is_refused(make_run, saved):
    for *place, value in (
        ("progress", "step", 7),
        ("progress", "tokens", 9999),
        ("cursor", "row", 0),
    ):
        with put_back(saved):
            with_state(saved, setting(*place, value=value), both=False)
            refused(make_run, "manifest")
    # In both, and no place that this data has after these epochs.
    for place in ({"row": 26}, {"row": 10**6}, {"epoch": 5}, {"epoch": 0, "row": 0}):
        with put_back(saved):
            with_state(saved, lambda state, p=place: state["cursor"].update(p))
            refused(make_run, "a position that this data does not have")


@pytest.mark.parametrize("step", [-5, 10**30])
def test_fault_64_a_manifest_with_an_impossible_step_is_refused(make_run, saved, step):
    text = (saved / MANIFEST).read_text().replace('"step": 6', f'"step": {step}')
    (saved / MANIFEST).write_text(text)
    refused(make_run, "None of the 1 checkpoints")


def fill(name: str, value: float) -> Callable[[dict[str, Any]], None]:
    return lambda tensors: tensors[name].fill_(value)


@pytest.mark.parametrize(
    ("stem", "change", "said"),
    [
        ("model", fill("embed.weight", 0.0), "embed.weight is all zero"),
        (
            "model",
            fill("mix.weight_hh_l0", math.nan),
            "weight_hh_l0 has numbers that are not",
        ),
        (
            "model",
            fill("norm.bias", math.inf),
            "norm.bias has numbers that are not finite",
        ),
        (
            "model",
            lambda t: t.update({"norm.bias": t["norm.bias"].double()}),
            "float64",
        ),
        ("optimizer", fill("embed.weight/step", -5.0), "counts -5 updates"),
        (
            "optimizer",
            fill("embed.weight/step", 7.0),
            "counts 7 updates, in a run of 6",
        ),
        ("optimizer", fill("embed.weight/step", 0.5), "counts 0.5 updates"),
        ("optimizer", fill("embed.weight/exp_avg", math.nan), "not finite"),
        ("optimizer", fill("embed.weight/exp_avg_sq", -1.0), "has negative numbers"),
        (
            "optimizer",
            lambda t: t.update({"norm.bias/exp_avg": t["norm.bias/exp_avg"].half()}),
            "is torch.float16, the optimizer's torch.float32",
        ),
    ],
)
def test_fault_64_tensors_that_no_training_can_have_made_are_refused(
    make_run, saved, stem, change, said
):
    with_tensors(saved, stem, change)
    refused(make_run, said)


def test_fault_64_zeros_that_a_run_begins_with_are_its_own(make_run, saved):
    with_tensors(saved, "model", fill("norm.bias", 0.0))
    make_run(steps=18, **options())
