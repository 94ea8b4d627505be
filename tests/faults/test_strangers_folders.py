"""Folders of strangers: links in a run or a store, where Toque would write or read."""

import os
import shutil
from pathlib import Path

import pytest

from toque.cli import main
from toque.errors import CheckpointError
from toque.models.loading.model_folder import read_config_json
from toque.models.lora.adapter_files import read_config
from toque.storage.atomic import atomic_file, atomic_write, sweep_files
from toque.storage.json_files import append_json_lines
from toque.storage.no_follow import LINK, open_append, write_new

SECRET = b"alias ls='ls -l'\n"


@pytest.fixture
def victim(tmp_path) -> Path:
    """A file of the user's, elsewhere."""
    path = tmp_path / "home" / ".bashrc"
    path.parent.mkdir()
    path.write_bytes(SECRET)
    return path


def said(capfd) -> str:
    return " ".join(capfd.readouterr().err.split())


def linked(run: Path, tmp_path: Path, name: str, to: Path) -> Path:
    """A copy of the run in which `name` is a link."""
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    place = copy / name
    if place.is_dir():
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)
    place.symlink_to(to)
    return copy


@pytest.mark.parametrize(
    "name",
    [
        "metrics.jsonl",
        "report.html",
        "checkpoints/.lock.lease",
        "checkpoints",
        "outbox",
    ],
)
def test_fault_58_a_link_in_a_run_is_refused_and_what_it_leads_to_is_untouched(
    whole_run, kitchen, tmp_path, victim, name, capfd
):
    to = victim if "." in name else victim.parent
    copy = linked(whole_run, tmp_path, name, to)
    (victim.parent / "temp-of-mine").mkdir()
    train = ["train", str(kitchen / "run.yaml"), f"run_dir={copy}"]
    for words in (train, ["evaluate", str(copy)], ["report", str(copy)]):
        assert main(words) == 4
        text = said(capfd)
        assert f"{copy / name} is a symbolic link to {to}" in text
        assert "Remove it" in text
    assert victim.read_bytes() == SECRET
    assert sorted(p.name for p in victim.parent.iterdir()) == [
        ".bashrc",
        "temp-of-mine",
    ]


@pytest.mark.parametrize(
    "name", [".lock", "split.npy", "report.json", "shards", "tokenizer"]
)
def test_fault_58_a_link_in_a_store_is_refused(kitchen, tmp_path, victim, name, capfd):
    to = victim.parent if name in ("shards", "tokenizer") else victim
    store = linked(kitchen / "store", tmp_path, name, to)
    config = [str(kitchen / "run.yaml"), f"data.store={store}"]
    for words in (
        ["prepare", *config, "--replace"],
        ["train", *config, f"run_dir={tmp_path / 'new'}"],
        ["report", str(store)],
    ):
        assert main(words) == 3
        assert f"{store / name} is a symbolic link" in said(capfd)
    assert victim.read_bytes() == SECRET
    assert not (tmp_path / "new").exists()


def test_fault_58_the_folder_itself_may_be_a_link_and_other_programs_may_link(
    whole_run, kitchen, tmp_path
):
    copy = tmp_path / "disk"
    shutil.copytree(whole_run, copy)
    (copy / "wandb").mkdir()
    (copy / "wandb" / "latest-run").symlink_to(tmp_path)
    (tmp_path / "run").symlink_to(copy)
    words = [
        f"run_dir={tmp_path / 'run'}",
        "train.optimisations.background_saves=false",
    ]
    assert main(["train", str(kitchen / "run.yaml"), *words]) == 0


def test_fault_58_a_link_that_comes_after_the_look_is_not_written_through(
    tmp_path, victim
):
    link = tmp_path / "metrics.jsonl"
    link.symlink_to(victim)
    refused = append_json_lines(link, [b"{}"])
    assert refused is not None
    assert refused.strerror == LINK
    with pytest.raises(FileExistsError):
        write_new(link, b"{}")
    atomic_write(link, b"{}")  # takes the link's place
    assert victim.read_bytes() == SECRET
    assert (link.is_symlink(), link.read_bytes()) == (False, b"{}")


def test_fault_58_temporary_names_cannot_be_foreseen_and_leftovers_are_swept(tmp_path):
    names = set()
    for _ in range(3):
        with atomic_file(tmp_path / "a.json") as file:
            file.write(b"1")
            names |= {p.name for p in tmp_path.iterdir() if p.name != "a.json"}
    assert len(names) == 3
    for name in (*names, ".mine.partial"):
        (tmp_path / name).write_bytes(b"half")
    assert set(sweep_files(tmp_path)) == names
    assert sorted(p.name for p in tmp_path.iterdir()) == [".mine.partial", "a.json"]


def test_fault_58_a_file_with_a_second_name_is_copied_before_it_is_appended_to(
    tmp_path, victim
):
    path = tmp_path / "metrics.jsonl"
    os.link(victim, path)
    os.write(descriptor := open_append(path), b"{}\n")
    os.close(descriptor)
    assert victim.read_bytes() == SECRET
    assert path.read_bytes() == SECRET + b"{}\n"


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "README.md"])
@pytest.mark.parametrize("kind", ["a pipe", "a device"])
def test_a_model_folder_with_a_file_that_never_ends_is_refused(tmp_path, name, kind):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).unlink(missing_ok=True)
    if kind == "a pipe":
        os.mkfifo(tmp_path / name)
    else:
        (tmp_path / name).symlink_to("/dev/zero")
    for read in (read_config_json, read_config):
        with pytest.raises(CheckpointError, match=f"{name} is a pipe or a device"):
            read(tmp_path)


def test_a_text_of_gigabytes_in_a_model_folder_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(2 << 30)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is longer than"):
        read_config_json(tmp_path)


def test_an_export_copies_no_file_that_a_link_leads_to(
    whole_run, tmp_path, victim, capfd
):
    model = tmp_path / "model"
    shutil.copytree(whole_run / "model", model)
    (model / "README.md").unlink()
    (model / "README.md").symlink_to(victim)
    assert main(["export", str(model), "--to", str(tmp_path / "out")]) == 4
    assert f"README.md is a symbolic link to {victim}" in " ".join(
        capfd.readouterr().err.split()
    )
    assert not (tmp_path / "out").exists()
    (model / "README.md").unlink()
    (model / "real.md").write_text("# mine\n")
    (model / "README.md").symlink_to("real.md")
    assert main(["export", str(model), "--to", str(tmp_path / "out")]) == 0


def test_verify_refuses_a_run_whose_configuration_never_ends(
    whole_run, tmp_path, capfd
):
    run = linked(whole_run, tmp_path, "config.yaml", Path("/dev/zero"))
    assert main(["verify", str(run)]) == 4
    assert "config.yaml is a symbolic link to /dev/zero" in said(capfd)
