"""What a run is made of stays what it says: its sources, its store, its settings, its end."""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import toque
from toque.cli import main
from toque.config import load_config
from toque.cooking.cookbook.recipes import write_cookbook
from toque.data.store.store_manifest import read_manifest
from toque.errors import CheckpointError, DataError
from toque.storage.atomic import sha256_of
from toque.workflows.diagnosis.training_session import Session
from toque.workflows.train import train
from toque.workflows.training_child import train_in_child

Train = Callable[..., tuple[int, str]]


@pytest.fixture
def own(kitchen, tmp_path) -> Path:
    """A copy of the kitchen's source, store and configuration, to be changed."""
    for name in ("a.jsonl", "run.yaml"):
        shutil.copy(kitchen / name, tmp_path / name)
    shutil.copytree(kitchen / "store", tmp_path / "store")
    config = (tmp_path / "run.yaml").read_text().replace(str(kitchen), str(tmp_path))
    (tmp_path / "run.yaml").write_text(config)
    return tmp_path


@pytest.fixture
def go(own, capfd) -> Train:
    """`go(words...)`: exit code and words of `toque train`."""

    def command(*words: str) -> tuple[int, str]:
        code = main(["train", str(own / "run.yaml"), f"run_dir={own / 'run'}", *words])
        said = capfd.readouterr()
        return code, " ".join((said.out + said.err).split())

    return command


SHORT = "train.stop_after=3 steps"


def others(folder: Path, name: str = "b.jsonl") -> str:
    write_cookbook(folder / name, n=60, seed=4)
    return f"data.sources=[{{path: {folder / name}}}]"


def test_fault_48_other_sources_than_the_stores_are_refused(go, own):
    code, said = go(others(own), SHORT)
    assert code == 3, said
    assert "b.jsonl" in said
    assert "a.jsonl" in said
    assert "data.sources=[]" in said
    assert not (own / "run").exists()


def test_fault_48_a_source_that_has_changed_since(go, own):
    with (own / "a.jsonl").open("a") as file:
        file.write((own / "a.jsonl").read_text().splitlines()[0] + "\n")
    code, said = go(SHORT)
    assert code == 3, said
    assert "a.jsonl" in said


def test_fault_48_one_source_more_or_read_in_another_way(go, own):
    more = others(own).replace("[{", f"[{{path: {own / 'a.jsonl'}}}, {{")
    assert go(more, SHORT)[0] == 3
    code, said = go(f"data.sources=[{{path: {own / 'a.jsonl'}, format: text}}]", SHORT)
    assert code == 3, said


def test_fault_48_the_same_content_elsewhere_is_the_same_source(go, own):
    (own / "moved").mkdir()
    (own / "a.jsonl").rename(own / "moved" / "a.jsonl")
    assert go(f"data.sources=[{{path: {own / 'moved'}}}]", SHORT)[0] == 0


def test_fault_48_a_store_alone_is_enough(go, own):
    """The raw files stay on the machine that prepared them; or are not named at all."""
    shutil.rmtree(own / "store")
    assert main(["prepare", str(own / "run.yaml")]) == 0
    (own / "a.jsonl").unlink()
    assert go(SHORT)[0] == 0
    shutil.rmtree(own / "run")
    code, said = go("data.sources=[]", SHORT)
    assert code == 0, said
    assert str(own / "a.jsonl") in (own / "run" / "model" / "README.md").read_text()
    shutil.rmtree(own / "run")
    code, said = go("data.sources=[{path: elsewhere/c.jsonl}]", SHORT)
    assert code == 3
    assert "c.jsonl" in said


def test_fault_48_an_absent_store_is_prepared_first_and_said(go, own):
    shutil.rmtree(own / "store")
    code, said = go("--no-prepare", SHORT)
    assert code == 3
    assert "toque prepare" in said
    assert not (own / "run").exists()
    code, said = go(SHORT)
    assert code == 0, said
    assert f"{own / 'store'} is not prepared yet" in said
    assert read_manifest(own / "store").splits.train > 0


def words_of(folder: Path) -> dict[str, object]:
    """What a tokenizer knows; an exported one besides says where a text begins and ends."""
    return json.loads((folder / "tokenizer.json").read_text())["model"]


class At:
    """Does something once, at a step."""

    def __init__(self, step: int, act: Callable[[], object]) -> None:
        self.step, self.act = step, act

    def on_step_end(self, run):
        if run.step == self.step:
            self.act()


def test_fault_49_a_store_is_not_replaced_under_a_run(own):
    resolved = load_config(str(own / "run.yaml"), [f"run_dir={own / 'run'}"])
    changed = load_config(str(own / "run.yaml"), ["model.tokenizer=trained:600"]).config
    before = words_of(own / "store" / "tokenizer")
    refused: list[str] = []

    def replace() -> None:
        try:
            toque.prepare(changed, replace=True)
        except DataError as error:
            refused.append(str(error))

    run = train(resolved, callbacks=[At(3, replace)])
    assert run.reason == "finished"
    assert "a run trains on it" in refused[0]
    assert words_of(own / "store" / "tokenizer") == before
    assert words_of(own / "run" / "model") == before
    assert not toque.prepare(changed, replace=True).reused  # nobody holds it any more


@pytest.mark.parametrize("adapter", ["", "adapter"])
def test_fault_49_a_store_replaced_all_the_same_ends_the_run(kitchen, own, adapter):
    """On a disk without locks, or by other means than `prepare`."""
    words = [f"run_dir={own / 'run'}"]
    if adapter:
        assert (
            main(["train", str(kitchen / "run.yaml"), f"run_dir={own / 'base'}", SHORT])
            == 0
        )
        words += [
            f"model.start_from={own / 'base' / 'model'}",
            "model.shape={}",
            "adapter={}",
        ]
        words += ["model.tokenizer=trained:512"]
    other = own / "other"
    changed = ["model.tokenizer=trained:600", f"data.store={other}"]
    toque.prepare(load_config(str(own / "run.yaml"), changed).config)

    def replace() -> None:
        (own / "store").rename(own / "aside")
        other.rename(own / "store")

    with pytest.raises(DataError, match=r"was replaced while this run trained on it"):
        train(load_config(str(own / "run.yaml"), words), callbacks=[At(3, replace)])
    steps = sorted(path.name for path in (own / "run" / "checkpoints").glob("step-*"))
    assert steps == ["step-00000002"]
    assert not (own / "run" / "model").exists()
    # With the store back in its place the run goes on.
    (own / "store").rename(other)
    (own / "aside").rename(own / "store")
    run = train(load_config(str(own / "run.yaml"), words))
    assert run.reason == "finished"
    written = words_of(run.model)
    assert written == words_of(own / "store" / "tokenizer")


def test_fault_49_a_replacement_while_the_final_model_is_written(own, monkeypatch):
    """The tokenizer is the one trained with, though another lies in the store by now."""
    from toque.workflows import final_model

    changed = ["model.tokenizer=trained:600", f"data.store={own / 'other'}"]
    toque.prepare(load_config(str(own / "run.yaml"), changed).config)
    trained_with = words_of(own / "store" / "tokenizer")
    real = final_model.write_model

    def late(*arguments, **named):
        (own / "store").rename(own / "aside")
        (own / "other").rename(own / "store")
        return real(*arguments, **named)

    monkeypatch.setattr(final_model, "write_model", late)
    run = train(load_config(str(own / "run.yaml"), [f"run_dir={own / 'run'}", SHORT]))
    assert words_of(run.model) == trained_with


def test_fault_49_an_unfinished_run_is_not_opened_with_another_store(own):
    resolved = load_config(str(own / "run.yaml"), [f"run_dir={own / 'run'}"])
    stop = At(3, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert train(resolved, callbacks=[stop]).interrupted
    assert len(toque.generate(own / "run", "soup: lentils", max_new_tokens=3)) == 1
    toque.prepare(
        load_config(str(own / "run.yaml"), ["model.tokenizer=trained:600"]).config,
        replace=True,
    )
    with pytest.raises(CheckpointError, match=r"was trained on another store"):
        toque.generate(own / "run", "soup: lentils", max_new_tokens=3)


@pytest.fixture
def training_child(own):
    """Skips where no forked child could train: torch with CUDA, in a process that trained."""

    def trained() -> int:
        torch.ones(1, requires_grad=True).sum().backward()
        return 0

    if Session(trained, own / "trained.log").wait() != 0:
        pytest.skip("a child of this process cannot train; run this test alone")


@pytest.mark.usefixtures("training_child")
def test_fault_50_two_runs_started_at_once_into_one_new_folder(own):
    """Real processes; the second comes while the first builds its model."""
    run, here, gone = own / "run", own / "first-is-here", own / "second-is-gone"

    def first() -> int:
        from toque.workflows import train as workflow

        build_run = workflow.build_run

        def slowly(*arguments, **named):
            here.touch()
            while not gone.exists():
                time.sleep(0.01)
            return build_run(*arguments, **named)

        workflow.build_run = slowly
        config = load_config(str(own / "run.yaml"), [f"run_dir={run}", SHORT])
        return train_in_child(config, own / "first.txt")

    def second() -> int:
        words = [f"run_dir={run}", SHORT, "optim.peak_lr=2e-2"]
        return train_in_child(
            load_config(str(own / "run.yaml"), words), own / "second.txt"
        )

    one = Session(first, own / "first.log")
    assert one.wait_until(here.exists)
    other = Session(second, own / "second.log")
    code = other.wait()
    gone.touch()
    assert one.wait() == 0, one.read_log() + (own / "first.txt").read_text()
    assert code == 4
    assert "in use by another training process" in (own / "second.txt").read_text()
    assert load_config(run / "config.yaml").config.optim.peak_lr == 1e-2


def test_fault_50_a_config_that_is_not_the_checkpoints_is_noticed(go, own):
    resolved = load_config(str(own / "run.yaml"), [f"run_dir={own / 'run'}"])
    stop = At(3, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert train(resolved, callbacks=[stop]).interrupted
    config = own / "run" / "config.yaml"
    config.write_text(config.read_text().replace("peak_lr: 0.01", "peak_lr: 0.02"))
    code, said = go("optim.peak_lr=2e-2")
    assert code == 4
    assert "optim.peak_lr: 0.01 -> 0.02" in said
    code, said = go()
    assert code == 0, said
    assert load_config(config).config.optim.peak_lr == 1e-2


@pytest.mark.usefixtures("training_child")
def test_fault_51_stopped_early_continued_and_killed_at_the_final_model(own):
    short = ["train.evaluate_every=1 steps", "train.stop_after=6 steps"]
    stopping = [*short, "train.early_stopping={patience: 1, min_delta: 100}"]

    def config(run: str, words: list[str]):
        return load_config(str(own / "run.yaml"), [f"run_dir={own / run}", *words])

    # A child of a process that trained could not train where torch is built with CUDA.
    def stopped() -> int:
        return int(train(config("run", stopping)).reason != "early_stopping")

    assert Session(stopped, own / "stopped.log").wait() == 0
    old = sha256_of(own / "run" / "model" / "model.safetensors")

    def killed() -> int:
        from toque.workflows import final_model

        def die(*_arguments, **_named):
            os.kill(os.getpid(), signal.SIGKILL)

        final_model.write_model = die
        return train_in_child(config("run", short), own / "log.txt")

    assert Session(killed, own / "killed.log").wait() == -signal.SIGKILL
    assert train(config("whole", short)).reason == "finished"
    run = train(config("run", short))
    assert (run.step, run.reason) == (6, "finished")
    for name in ("model/model.safetensors", "evaluation.json"):
        assert sha256_of(own / "run" / name) == sha256_of(own / "whole" / name), name
    assert sha256_of(own / "run" / "model" / "model.safetensors") != old
    # And a run that is done does nothing more.
    before = (own / "run" / "evaluation.json").stat().st_mtime_ns
    assert train(config("run", short)).step == 6
    assert (own / "run" / "evaluation.json").stat().st_mtime_ns == before


def test_fault_56_a_disk_on_which_the_first_save_can_never_fit(go, own, monkeypatch):

    real = shutil.disk_usage

    def small(path):
        return real(path)._replace(free=40_000)

    monkeypatch.setattr(shutil, "disk_usage", small)
    code, said = go()
    assert code == 4, said
    assert "40.0 kB" in said
    assert "train.keep_best" in said
    assert not (own / "run").exists()


def test_fault_56_a_disk_that_is_full_when_a_run_continues(own, monkeypatch):
    resolved = load_config(str(own / "run.yaml"), [f"run_dir={own / 'run'}"])
    stop = At(3, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert train(resolved, callbacks=[stop]).interrupted
    real = shutil.disk_usage

    def full(path):
        return real(path)._replace(free=0)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", full)
        with pytest.raises(CheckpointError, match=r"has 0 bytes free"):
            train(resolved)
    assert (own / "run" / "config.yaml").exists()  # what was there stays
    run = train(resolved)
    assert run.reason == "finished"
    with monkeypatch.context() as patch:  # nothing more is saved, so nothing is refused
        patch.setattr(shutil, "disk_usage", full)
        assert train(resolved).step == run.step


def test_fault_56_fewer_bytes_are_enough_without_best_models(go, monkeypatch):
    real = shutil.disk_usage
    free = 300_000  # a checkpoint, and not the best model besides

    def small(path):
        return real(path)._replace(free=free)

    monkeypatch.setattr(shutil, "disk_usage", small)
    words = [SHORT, "train.save_every=10 steps"]
    code, said = go(*words)
    assert code == 4, said
    code, said = go(*words, "train.keep_best=0")
    assert code == 0, said


@pytest.mark.parametrize("n", [1, 3])
def test_fault_68_one_example_or_all_the_same(own, capfd, n):
    for variant in range(12):  # one recipe or another is drawn for either side
        record = (own / "a.jsonl").read_text().splitlines()[variant]
        (own / "few.jsonl").write_text((record + "\n") * n)
        words = [
            f"data.sources=[{{path: {own / 'few.jsonl'}}}]",
            f"data.store={own / f'few-{variant}'}",
            f"run_dir={own / 'few-run'}",
            "data.dedup=none",
            "train.micro_batch_rows=auto",
        ]
        for verb in ("prepare", "train"):
            code = main([verb, str(own / "run.yaml"), *words])
            said = capfd.readouterr().err
            assert code in (2, 3), said
            assert "Traceback" not in said
            assert "at least one different" in " ".join(said.split())
        assert not (own / "few-run").exists()
