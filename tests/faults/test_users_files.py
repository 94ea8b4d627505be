"""Files of the user's in a folder that is named for a run, and in the folder of a run."""

import shutil
from pathlib import Path

import pytest

from toque.cli import main
from toque.config.user_code import HEADER
from toque.errors import ConfigError, DataError
from toque.models.loading.provenance import provenance_of
from toque.runs.run_files import refuse_users_address, refuse_users_folder
from toque.storage.atomic import sha256_of
from toque.workflows.final_model import set_users_model_aside

MINE = b"# what no one has a copy of\n"
WOULD_BE_WRITTEN = (
    "best/mine.txt",
    "checkpoints/epoch-1/weights.bin",
    "end.json",
    "evaluation.json",
    "metrics.jsonl",
    "model/config.json",
    "model/notes.txt",
    "resources.json",
    "samples.jsonl",
    "scores_by_text.json",
    "training.log",
)


def content(folder: Path) -> dict[str, str]:
    """Every file and folder, with hashes."""
    paths = sorted(folder.rglob("*"))
    return {
        str(p.relative_to(folder)): sha256_of(p) if p.is_file() else "" for p in paths
    }


def put(folder: Path, name: str, data: bytes = MINE) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(data)


def said(capfd) -> str:
    return " ".join(capfd.readouterr().err.split())


@pytest.mark.parametrize("header", ["", HEADER])
def test_fault_88_the_configuration_that_is_named_is_not_overwritten(
    kitchen, tmp_path, monkeypatch, header, capfd
):
    text = header + (kitchen / "run.yaml").read_text().replace(
        str(kitchen / "unused"), "."
    )
    (tmp_path / "config.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    before = content(tmp_path)
    for store in (kitchen / "store", tmp_path / "new-store"):
        assert (
            main(["train", "config.yaml", f"data.store={store}"])
            == ConfigError.exit_code
        )
        text = said(capfd)
        assert (
            ". has files that no run wrote and that a run would overwrite: config.yaml"
            in text
        )
        assert "Choose another folder" in text
    assert content(tmp_path) == before


@pytest.mark.parametrize("name", WOULD_BE_WRITTEN)
def test_fault_88_a_folder_with_a_file_that_a_run_writes_is_refused(tmp_path, name):
    put(tmp_path, "data.jsonl")
    refuse_users_folder(tmp_path)
    put(tmp_path, name)
    with pytest.raises(ConfigError, match=name.partition("/")[0]):
        refuse_users_folder(tmp_path)


def test_fault_88_evaluate_writes_no_scores_into_a_folder_that_is_not_a_run(
    kitchen, whole_run, tmp_path, capfd
):
    shutil.copytree(whole_run / "model", tmp_path / "model")
    shutil.copy(kitchen / "run.yaml", tmp_path / "config.yaml")
    put(tmp_path, "evaluation.json")
    before = content(tmp_path)
    assert main(["evaluate", str(tmp_path)]) == ConfigError.exit_code
    assert "a run would overwrite: evaluation.json." in said(capfd)
    assert content(tmp_path) == before


def test_fault_88_a_run_is_recognised_at_every_stage(whole_run, tmp_path):
    for folder in (tmp_path / "absent", tmp_path, whole_run):
        refuse_users_folder(folder)
    (tmp_path / "checkpoints").mkdir()  # as a container mounts it
    refuse_users_folder(tmp_path)
    for name in (
        "checkpoints/.lock",
        "training.log",
        "resources.json",
        "metrics.jsonl",
    ):
        put(tmp_path, name)  # killed before its first save
        refuse_users_folder(tmp_path)
    copied = tmp_path / "copied"  # by `cp -r run/* copied`, without hidden files
    shutil.copytree(whole_run, copied, ignore=shutil.ignore_patterns(".*", "step-*"))
    refuse_users_folder(copied)


def test_fault_88_a_refused_run_does_not_make_a_run_of_a_users_folder(
    kitchen, tmp_path, capfd
):
    put(tmp_path, "data.jsonl")
    words = [
        "train",
        str(kitchen / "run.yaml"),
        f"run_dir={tmp_path}",
        "train.best_by=rougeL",
    ]
    assert main(words) == ConfigError.exit_code
    assert "rougeL" in said(capfd)
    assert content(tmp_path).keys() == {"data.jsonl"}


def test_fault_88_a_users_configuration_and_model_in_a_run_are_not_overwritten(
    kitchen, whole_run, tmp_path, capfd
):
    run = tmp_path / "run"
    shutil.copytree(whole_run, run, ignore=shutil.ignore_patterns("model", "end.json"))
    put(run, "model/notes.txt")
    refuse_users_folder(run)
    put(run, "model/config.json")
    put(run, "config.yaml")
    before = content(run)
    assert (
        main(["train", str(kitchen / "run.yaml"), f"run_dir={run}"])
        == ConfigError.exit_code
    )
    assert "overwrite: config.yaml, model/" in said(capfd)
    assert content(run) == before


def test_fault_88_a_users_file_next_to_the_finished_model_stays(
    kitchen, whole_run, tmp_path
):
    run = tmp_path / "run"
    shutil.copytree(whole_run, run)
    for name in ("model/notes.txt", "model/ollama/Modelfile", "model/toque/mine.json"):
        put(run, name)
    (run / "model" / "generation_config.json").unlink()
    words = ["train.stop_after=14 steps", "train.optimisations.background_saves=false"]
    assert main(["train", str(kitchen / "run.yaml"), f"run_dir={run}", *words]) == 0
    for name in ("model/notes.txt", "model/ollama/Modelfile", "model/toque/mine.json"):
        assert (run / name).read_bytes() == MINE
    assert content(run / "model").keys() > content(whole_run / "model").keys()
    assert provenance_of(run / "model") is not None


def test_fault_88_a_model_that_came_while_training_is_set_aside(whole_run, tmp_path):
    put(tmp_path, "model/config.json")
    aside = set_users_model_aside(tmp_path)
    assert aside is not None
    assert aside.is_relative_to(tmp_path / "set-aside")
    assert (aside / "config.json").read_bytes() == MINE
    put(tmp_path, "model/notes.txt")
    assert set_users_model_aside(tmp_path) is None
    shutil.copytree(whole_run / "model", tmp_path / "model", dirs_exist_ok=True)
    assert set_users_model_aside(tmp_path) is None


@pytest.mark.parametrize("name", ["config.yaml", "model/config.json", "lock.json"])
def test_fault_88_a_buckets_address_with_a_users_object_is_refused(
    kitchen, tmp_path, remote, name, capfd
):
    remote.put("data.jsonl", MINE)
    refuse_users_address(remote)
    remote.put(name, MINE)
    names = remote.names()
    words = [f"run_dir={tmp_path / 'run'}", f"checkpoint.upload={remote.address}"]
    assert main(["train", str(kitchen / "run.yaml"), *words]) == ConfigError.exit_code
    assert f"{remote.address} has files that no run wrote" in said(capfd)
    assert (remote.names(), remote.read(name)) == (names, MINE)


def test_fault_88_a_runs_own_address_is_recognised(remote):
    remote.put(
        "checkpoints/step-00000002/model.safetensors", b""
    )  # killed while uploading
    refuse_users_address(remote)
    remote.put("metrics.jsonl", b'{"event": "start"}')
    refuse_users_address(remote)


def test_fault_88_an_ablation_writes_over_no_file_of_the_users(
    kitchen, tmp_path, capfd
):
    for name in ("ablation.yaml", "ablation.json"):
        out = tmp_path / name
        put(out, name)
        words = ["ablate", str(kitchen / "run.yaml"), "--out", str(out), "--seeds", "2"]
        assert main(words) == ConfigError.exit_code
        assert f"{out / name} already exists, but no ablation wrote it" in said(capfd)
        assert content(out).keys() == {name}


def test_fault_88_a_building_json_of_the_users_makes_no_store(kitchen, tmp_path, capfd):
    for name in ("building.json", "shards/mine.txt", "tokenizer/mine.json"):
        put(tmp_path, name, b'{"what": "my house"}')
    before = content(tmp_path)
    words = ["prepare", str(kitchen / "run.yaml"), f"data.store={tmp_path}"]
    for more in ([], ["--replace"]):
        assert main([*words, *more]) == DataError.exit_code
        assert "has files but no token store" in said(capfd)
    assert content(tmp_path) == before


def test_fault_88_an_export_replaces_neither_a_file_nor_a_link(
    whole_run, tmp_path, capfd
):
    put(tmp_path, "file")
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("file", "link"):
        assert main(["export", str(whole_run), "--to", str(tmp_path / name)]) == 4
        assert "exists and is not a folder" in said(capfd)
    assert (tmp_path / "file").read_bytes() == MINE
