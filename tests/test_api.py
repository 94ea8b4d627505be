import re
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import toque
from conftest import REPOSITORY
from fixtures.kitchens import Notices, tiny_config
from fixtures.processes import python
from toque.cooking.cookbook.recipes import write_cookbook
from toque.errors import CheckpointError, ConfigError, ToqueError
from toque.hardware.onednn import has_fast_bf16
from toque.runs.history import METRICS


def test_importing_is_light_and_every_name_is_there():
    code = (
        "import sys, toque\n"
        "assert not {'torch', 'pydantic', 'numpy'} & set(sys.modules)\n"
        "for name in toque.__all__: getattr(toque, name)\n"
        "assert 'torch' not in sys.modules\n"
        "assert not hasattr(toque, 'nothing')\n"
    )
    run = python("-c", code)
    assert run.returncode == 0, run.stderr


def test_sections_are_merged_and_lists_replaced(tmp_path):
    base = toque.configure("demo", optim={"peak_lr": 1e-4})
    assert (base.optim.peak_lr, str(base.optim.warmup)) == (1e-4, "5 %")
    changed = toque.configure(
        base, data={"sources": [{"path": tmp_path / "a.jsonl"}]}, seed=3
    )
    assert [s.path for s in changed.data.sources] == [str(tmp_path / "a.jsonl")]
    assert (changed.seed, changed.optim.peak_lr, base.seed) == (3, 1e-4, 17)
    again = toque.configure(
        toque.configure(observe={"webhook": "https://example.org/t"}), seed=4
    )
    assert again.observe.webhook == "https://example.org/t"
    with pytest.raises(ConfigError, match=r"peak_lr"):
        toque.configure(optim={"peak_lrr": 1.0})


def test_a_section_of_another_configuration_replaces_the_whole_one():
    shape = {"n_embd": 32, "n_head": 2}
    other = toque.configure(
        model={"family": "gpt2", "shape": shape},
        optim={"name": "torch.optim:NAdam"},
        train={"early_stopping": {"patience": 2}},
        observe={"webhook": "https://example.org/t"},
        data={"sources": [{"path": "a.jsonl"}]},
    )
    base = toque.configure(
        "demo", model={"family": "gpt2", "shape": {"n_layer": 3}}, seed=3
    )
    for first in (base, None, base.model_dump(mode="json")):
        parts = ("model", "optim", "train", "observe", "data", "evaluation")
        found = toque.configure(first, **{name: getattr(other, name) for name in parts})
        assert found.model.shape == shape
        assert {name: getattr(found, name) for name in parts} == {
            name: getattr(other, name) for name in parts
        }
    inner = toque.configure(base, train={"early_stopping": other.train.early_stopping})
    assert inner.train.early_stopping == other.train.early_stopping
    assert inner.train.stop_after == base.train.stop_after


@pytest.fixture(scope="module")
def kitchen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with recipes, to work in."""
    folder = tmp_path_factory.mktemp("api")
    write_cookbook(folder / "a.jsonl", n=60, seed=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


def configuration() -> toque.RunConfig:
    return tiny_config(evaluation={"generate": 1})


@pytest.fixture(scope="module")
def run(kitchen: Path) -> toque.TrainedRun:  # noqa: ARG001
    return toque.train(configuration())  # prepares first


RECIPE = """Ingredients:
- 2 large eggs
- 1 tablespoon butter

Instructions:
1. Whisk the eggs with a pinch of salt.
2. Melt the butter and cook the eggs gently, stirring, for 4 minutes.
"""
ASKED = "Generate recipe for: Scrambled Eggs using ingredients: eggs, butter"


def test_texts_of_any_writer_have_the_scores_of_an_evaluation(capfd):
    found = toque.score([RECIPE, "Eggs"], [RECIPE, RECIPE], prompts=[ASKED, ASKED])
    page = (REPOSITORY / "docs" / "reference" / "metrics.md").read_text(
        encoding="utf-8"
    )
    assert set(found.metrics) <= set(re.findall(r"`(\w+)`", page))
    assert {"bleu", "rougeL", "recipe_score", "distinct_1"} <= set(found.metrics)
    assert found.each["rougeL"].values[0].tolist() == [1.0, 1.0]
    assert found.metrics["ingredient_coverage"] == 0.75
    assert "  recipe score                 0.5" in str(found)
    alone = toque.score([RECIPE]).metrics
    assert alone["completeness"] == 1.0  # without a prompt it is a recipe all the same
    assert not {"bleu", "rougeL", "ingredient_coverage"} & set(alone)
    assert (
        "recipe_score" not in toque.score(["So it was."], prompts=["Once upon"]).metrics
    )
    assert capfd.readouterr() == ("", "")
    for wrong in (([],), (RECIPE,), ([RECIPE], []), ([RECIPE], RECIPE)):
        with pytest.raises(
            ConfigError, match=r"(texts|references) (is empty|is one text|has length 0)"
        ):
            toque.score(*wrong)
    for wrong in ((None,), (["a", None],), (["a", 2],), (["a"], [float("nan")]), (3,)):
        with pytest.raises(
            ConfigError, match=r"(texts|references)(, number \d,)? must be a text|is a "
        ):
            toque.score(*wrong)


def test_texts_to_score_may_stand_in_any_column():
    texts, references = ["Cut the leeks.", "Eggs"], ["Cut two leeks.", "Two eggs"]
    expected = toque.score(texts, references, prompts=references).metrics
    for kind in (np.array, pd.Series, iter, tuple):
        found = toque.score(kind(texts), kind(references), prompts=kind(references))
        assert found.metrics == expected
    some = toque.score(texts, [None, "Two eggs"]).overall
    assert some["rouge1"].n == 1


class Watcher:
    def __init__(self) -> None:
        self.seen: list[tuple[int, float]] = []

    def on_step_end(self, state):
        self.seen.append((state.step, state.loss))


def test_the_whole_job_from_python_prints_nothing(kitchen, capfd):
    config, watcher = configuration(), Watcher()
    config = toque.configure(config, run_dir="silent")
    run = toque.train(config, callbacks=[watcher])  # prepares first
    assert toque.prepare(config).reused
    assert (run.step, run.reason, run.losses) == (3, "finished", watcher.seen)
    scored = toque.evaluate(run)
    assert scored.metrics["loss"] == run.metrics["loss"]
    (text,) = toque.generate(run, "soup: lentils", max_new_tokens=4, temperature=0.0)
    assert text.prompt == "Generate recipe for: soup using ingredients: lentils"
    assert text.tokens <= 4
    (answer,) = toque.classify(run, "Is it hot?", choices=["yes", "no"])
    assert sum(answer.probabilities.values()) == pytest.approx(1.0)
    assert toque.export(run, kitchen / "exported").folder == kitchen / "exported"
    assert (
        len(toque.verify(run).parts) == 3
    )  # the checkpoint, the best model, the store
    assert toque.report(run).file == kitchen / "silent" / "report.html"
    assert toque.report("store", out="store.html").bytes > 1000
    assert toque.check(config, examples=2).passed
    assert capfd.readouterr() == ("", "")
    with pytest.raises(ConfigError, match="not a run folder"):
        toque.evaluate(run.model)


def test_a_program_finds_torch_as_it_was(run):
    torch.use_deterministic_algorithms(
        False
    )  # as commands of other tests may have left it
    drawn = []
    for verb in (
        lambda: toque.train(toque.configure(configuration(), run_dir="as_before")),
        lambda: toque.evaluate(run),
        lambda: None,
    ):
        torch.manual_seed(4)
        verb()
        assert not torch.are_deterministic_algorithms_enabled()
        drawn.append(torch.rand(3).tolist())
    assert drawn[1:] == drawn[:-1]


def test_scores_and_history_are_those_of_the_folder_now(run, tmp_path, monkeypatch):
    moved = replace(run, folder=shutil.copytree(run.folder, tmp_path / "moved"))
    assert (moved.metrics, moved.history) == (run.metrics, run.history)
    assert moved.metrics["loss"] > 0
    (moved.folder / "evaluation.json").write_text(
        '{"heldout": {"loss": 2}, "generated": {}}'
    )
    with (moved.folder / METRICS).open("a") as file:
        file.write('{"event": "warning", "step": 3}\n')
    assert moved.metrics == {"loss": 2}
    assert len(moved.history) == len(run.history) + 1
    before = run.losses
    monkeypatch.chdir(tmp_path)
    assert run.losses == before  # wherever the program goes
    shutil.rmtree(moved.folder)
    for name in ("metrics", "history", "losses"):
        with pytest.raises(CheckpointError, match=r"does not exist.*moved"):
            getattr(moved, name)


@pytest.mark.usefixtures("run")
def test_of_two_threads_one_trains_after_the_other():
    """And a callback may train within, which is not waited for."""
    config, order = toque.configure(configuration(), run_dir="threads"), list[str]()

    def refused(name: str) -> None:
        with pytest.raises(ConfigError, match="prepare=False"):
            toque.train(config, data=[], prepare=False)
        order.append(name)

    second = threading.Thread(target=refused, args=("second",))

    class Meanwhile:
        def on_step_end(self, state):
            if state.step == 1:
                second.start()
                second.join(0.2)
                refused("within")
            order.append("first")

    toque.train(config, callbacks=[Meanwhile()])
    second.join()
    assert order == ["within", "first", "first", "first", "second"]


def test_what_only_commands_show_is_a_value_too(run, capfd):
    from toque.config import load_config
    from toque.workflows.diagnosis.show_batch import show_batch

    resolved = load_config(run.folder / "config.yaml")
    assert str(show_batch(resolved.config)).startswith("step 1: ")
    assert capfd.readouterr() == ("", "")


@pytest.mark.usefixtures("run")
def test_a_reporter_hears_what_a_command_prints(capfd):
    class Heard(toque.Reporter):
        def __init__(self):
            self.notices, self.details = [], []

        def line(self, text):
            raise AssertionError("training has no result to print")

        def notice(self, text):
            self.notices.append(text)

        def detail(self, text):
            self.details.append(text)

    heard = Heard()
    toque.train(toque.configure(configuration(), run_dir="heard"), reporter=heard)
    assert heard.notices[0].startswith("toque ")
    assert any(detail.startswith("step 3  epoch ") for detail in heard.details)
    assert any("The model is in heard/model" in notice for notice in heard.notices)
    assert heard.notices[-1].startswith(
        ("What limits this run:", "The texts are still poor")
    )
    assert capfd.readouterr() == ("", "")
    toque.train(configuration(), reporter=toque.ConsoleReporter())  # finished already
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("run is finished: it was trained to step 3")
    assert "What limits this run" not in err


def drawn(run: toque.TrainedRun, precision: str, reporter: toque.Reporter) -> list[str]:
    """Draws from nearly even probabilities, which rounding moves."""
    texts = toque.generate(
        run, "soup", n=16, temperature=2.0, max_new_tokens=48, precision=precision,
        reporter=reporter,
    )  # fmt: skip
    return [each.text for each in texts]


def test_precision_is_that_of_the_products(run, monkeypatch):
    heard = Notices()
    exact, rounded = drawn(run, "float32", heard), drawn(run, "bf16", heard)
    assert exact != rounded
    fast = has_fast_bf16(torch.device("cpu"))
    assert drawn(run, "auto", heard) == (rounded if fast else exact)
    # What a processor without these instructions does.
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    heard.notices.clear()
    assert drawn(run, "auto", heard) == exact
    assert heard.notices == []
    assert drawn(run, "bf16", heard) != exact
    assert "This cpu has no bf16 in hardware" in heard.notices[0]


REFUSED = {
    "temperature": lambda run: toque.generate(run, "x", temperature=-1.0),
    "top_p": lambda run: toque.generate(run, "x", top_p=0.0),
    "precision": lambda run: toque.generate(run, "x", precision="fp8"),
    "prompts": toque.generate,
    "form": lambda run: toque.export(run, "elsewhere", form="mlx"),
    "examples": lambda _: toque.check(configuration(), examples=1),
    "kills": lambda run: toque.drill(run, kills=-1),
    "start": lambda run: toque.train(configuration(), start=run.folder),
    "n": lambda run: toque.generate(run, "x", n=1.5),
    "best_of": lambda run: toque.generate(run, "x", best_of="2"),
    "max_new_tokens": lambda run: toque.generate(run, "x", max_new_tokens="5"),
    "prompts, number 2": lambda run: toque.generate(run, ["x", None]),
    "prompts, number 1": lambda run: toque.generate(run, 3),
    "replace": lambda _: toque.prepare(
        toque.configure(configuration(), data={"max_target_tokens": 99})
    ),
}
"""Others are refused in the same words as commands refuse them (tests/cli/test_commands.py)."""


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_argument_is_named_as_python_names_it(name, run, capfd):
    with pytest.raises(ToqueError, match=rf"\b{name}\b") as caught:
        REFUSED[name](run)
    named: set[str] = set()
    caught.value.message(lambda text: named.add(text.partition("=")[0]) or text)
    assert name.partition(",")[0] in named
    assert "--" not in str(caught.value)
    assert "\0" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_what_python_writes_otherwise_is_understood_or_refused_in_words(run):
    found = toque.configure(seed=np.int64(3), optim={"betas": np.array([0.5, 0.75])})
    assert (found.seed, found.optim.betas) == (3, (0.5, 0.75))
    assert len(toque.generate(run, "x", n=np.int64(1), max_new_tokens=np.int32(2))) == 1
    with pytest.raises(
        CheckpointError,
        match=r"The checkpoint '.*step-9' is not in .* Checkpoints: step-",
    ):
        toque.train(configuration(), resume=Path("run/checkpoints/step-9"))
    with pytest.raises(ConfigError, match=r"^callbacks must be a list, not a Watcher"):
        toque.train(configuration(), callbacks=Watcher())
    with pytest.raises(ConfigError, match=r"compare\(run, other\) in Python"):
        toque.compare([run, run])


FORKED = """
import json, sys, toque
from test_api import configuration
if sys.argv[1] == "drill":
    found = toque.drill("long", kills=1, steps=8)
    assert not found.failed, found
else:
    found = toque.ablate(configuration(), seeds=2, steps=2, out="ablation")
    assert set(found.record["effects"]) == {"label smoothing"}, found.record
    assert found.record["failed"] == []
"""


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["drill", "ablate"])
def test_what_forks_prints_nothing(verb, kitchen):
    toque.train(
        toque.configure(
            configuration(), run_dir="long", train={"stop_after": "9 steps"}
        )
    )
    # In a process of its own: one that has computed must not be forked.
    code = "import toque.workflows.improvements as p; p.IMPROVEMENTS = p.IMPROVEMENTS[1:2]\n"
    done = python("-c", f"{code}{FORKED}", verb, cwd=kitchen)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_rows_and_models_in_the_wrong_place_are_answered_in_a_paragraph() -> None:
    rows = [{"prompt": "a" * 500, "target": "b"}] * 20
    for given in (rows, iter(rows), 7):
        with pytest.raises(
            ConfigError, match=r"not a \w+\. Pass rows .* train\(config, data=rows\)"
        ) as e:
            toque.train(given)
        assert len(str(e.value)) < 300
    with pytest.raises(ConfigError, match="neither a file nor a preset") as absent:
        toque.train("x" * 5000)
    assert len(str(absent.value)) < 1000
    pair = (object(), object())
    calls = [
        lambda: toque.train("demo", start=pair), lambda: toque.generate(pair, ["soup"]),
        lambda: toque.evaluate(pair), lambda: toque.export(pair, "out"),
        lambda: toque.serve([pair]), lambda: toque.report(pair),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(ConfigError, match=r"not a tuple\..*'start_from': model"):
            call()
