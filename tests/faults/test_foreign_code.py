"""Code that a stranger's run names: no command imports it unless the person says so."""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import toque
from toque.cli import main
from toque.config import load_config
from toque.errors import ConfigError
from toque.workflows.configure import configure

PLANTED = """
from pathlib import Path
Path("executed").touch()
class Watcher:
    def on_train_begin(self, state): Path("watched").touch()
def score(predictions, references): return {"planted": 1.0}
"""
NAMES = {
    "evaluation.metrics": ["auto", "planted:score"],
    "observe.callbacks": ["planted:Watcher"],
}


@pytest.fixture(scope="module")
def trained(kitchen, tmp_path_factory) -> Path:
    """A folder with a whole run of this machine, called "theirs"."""
    folder = tmp_path_factory.mktemp("strangers")
    words = ["train", str(kitchen / "run.yaml"), f"run_dir={folder}/theirs"]
    assert main([*words, "train.stop_after=4 steps", "evaluation.generate=1"]) == 0
    return folder / "theirs"


@pytest.fixture
def theirs(trained, tmp_path, monkeypatch) -> Iterator[Path]:
    """Its copy in the working directory, naming code that leaves a file where it runs."""
    shutil.copytree(trained, tmp_path / "theirs")
    plant(tmp_path / "theirs")
    (tmp_path / "planted.py").write_text(PLANTED)
    monkeypatch.chdir(tmp_path)
    yield Path("theirs")
    sys.modules.pop("planted", None)
    sys.path[:] = [path for path in sys.path if path != str(tmp_path)]


def plant(run: Path, *, metrics: str = "[auto, planted:score]") -> None:
    lines = (run / "config.yaml").read_text().splitlines()
    new = {
        "  metrics: ": metrics,
        "  callbacks: ": "[planted:Watcher]",
        "run_dir: ": "theirs",
    }
    for i, line in enumerate(lines):
        for begin, value in new.items():
            if line.startswith(begin):
                lines[i] = begin + value
    (run / "config.yaml").write_text("\n".join(lines))


def ran() -> bool:
    return (
        Path("executed").exists()
        or Path("watched").exists()
        or "planted" in sys.modules
    )


REFUSED = {
    "evaluate theirs": ("evaluation.metrics",),
    "evaluate theirs theirs/config.yaml": ("evaluation.metrics",),
    "train theirs/config.yaml": ("evaluation.metrics", "observe.callbacks"),
    "train theirs/config.yaml run_dir=mine": (
        "evaluation.metrics",
        "observe.callbacks",
    ),
    "ablate theirs/config.yaml --seeds 2 --steps 2": (
        "evaluation.metrics",
        "observe.callbacks",
    ),
}


@pytest.mark.usefixtures("theirs")
@pytest.mark.parametrize("words", REFUSED)
def test_fault_57_code_a_run_names_is_refused_with_its_name_and_file(words, capsys):
    assert main(words.split()) == 2
    said = capsys.readouterr().err
    assert not ran()
    for setting in REFUSED[words]:
        assert f"{NAMES[setting][-1]} ({setting}, theirs/config.yaml:" in said
    assert f"of {Path.cwd() / 'planted.py'}" in said
    assert "--trust-code" in said


@pytest.mark.parametrize("verb", ["train", "plan"])
def test_fault_57_an_optimizer_is_code_too(theirs, verb, capsys):
    config = theirs / "config.yaml"
    plain = config.read_text().replace("[auto, planted:score]", "auto")
    plain = plain.replace("[planted:Watcher]", "[]")
    assert "  name: adamw\n" in plain
    config.write_text(plain.replace("  name: adamw\n", "  name: planted:optimizer\n"))
    assert main([verb, str(config)]) == 2
    assert (
        "planted:optimizer (optim.name, theirs/config.yaml:" in capsys.readouterr().err
    )
    assert not ran()


def test_fault_57_the_module_of_the_report(theirs, monkeypatch, capsys):
    import pty

    spawned = []
    monkeypatch.setattr(pty, "spawn", lambda *given: spawned.append(given) or 0)
    plant(theirs, metrics='["pty:spawn"]')
    assert main(["evaluate", "theirs"]) == 2
    assert (
        "pty:spawn (evaluation.metrics, theirs/config.yaml:" in capsys.readouterr().err
    )
    assert spawned == []


@pytest.mark.parametrize(
    "words",
    [
        "generate theirs --prompt soup --max-new-tokens 2",
        "report theirs",
        "export theirs --to merged",
        "verify theirs",
        "show theirs",
        "show-batch theirs/config.yaml --most 1",
        "check theirs/config.yaml --examples 2",
        "prepare theirs/config.yaml",
        "evaluate theirs evaluation.metrics=auto",
        "drill theirs --kills 0 --steps 8",
    ],
)
def test_fault_57_what_needs_no_such_code_runs_without_it(theirs, words):
    if words.startswith("drill"):  # forks; its sessions train as `toque train` does
        from toque.workflows.diagnosis.drill import QUIET

        settings = load_config(theirs / "config.yaml", QUIET).config
        assert (settings.evaluation.metrics, settings.observe.callbacks) == ("auto", ())
        return
    assert main(words.split()) == 0
    assert not ran()


@pytest.mark.usefixtures("theirs")
def test_fault_57_said_so_the_code_runs(capsys):
    assert main(["evaluate", "theirs", "--trust-code", "evaluation.generate=1"]) == 0
    assert "planted" in capsys.readouterr().out
    words = ["train", "theirs/config.yaml", "train.stop_after=5 steps", "run_dir=mine"]
    assert main([*words, "--trust-code"]) == 0
    assert Path("watched").exists()


def test_fault_57_code_that_the_user_names_needs_no_word(theirs):
    (theirs / "config.yaml").rename("my.yaml")
    assert main(["evaluate", "theirs/model", "my.yaml", "evaluation.generate=1"]) == 0
    assert ran()


@pytest.mark.usefixtures("theirs")
def test_fault_57_on_the_command_line_too():
    words = [
        "evaluate",
        "theirs",
        "evaluation.metrics=[planted:score]",
        "evaluation.generate=1",
    ]
    assert main(words) == 0
    assert ran()


@pytest.mark.usefixtures("theirs")
def test_fault_57_from_python():
    with pytest.raises(ConfigError, match=r"planted:score .*trust_code=True"):
        toque.evaluate("theirs")
    with pytest.raises(ConfigError, match="planted:Watcher"):
        toque.train("theirs/config.yaml")
    changed = configure("theirs/config.yaml", train={"stop_after": "6 steps"})
    with pytest.raises(ConfigError, match="planted:Watcher"):
        toque.train(configure(changed, seed=18, run_dir="mine"))
    assert not ran()
    own = configure(changed, evaluation={"metrics": ["auto", "planted:score"]})
    assert (
        toque.evaluate("theirs", own).metrics["planted"] == 1.0
    )  # named by this program


@pytest.mark.usefixtures("theirs")
def test_fault_57_a_run_is_known_however_it_is_reached(monkeypatch, capsys):
    Path("mine.yaml").symlink_to("theirs/config.yaml")
    assert main(["train", "mine.yaml"]) == 2
    monkeypatch.chdir("theirs")
    assert main(["train", "config.yaml"]) == 2
    for name in ("metrics.jsonl", "evaluation.json", "samples.jsonl", "resources.json"):
        Path(name).unlink(missing_ok=True)
    for name in ("model", "checkpoints", "best"):
        shutil.rmtree(name, ignore_errors=True)
    assert main(["train", "config.yaml"]) == 2  # by its first line
    assert main(["evaluate", "."]) == 2
    assert capsys.readouterr().err.count("--trust-code") == 4
    assert not ran()
