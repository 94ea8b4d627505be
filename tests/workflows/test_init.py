"""`toque init`: what it finds, what it writes, and that the result trains."""

import json
from pathlib import Path

import numpy as np
import pytest

import toque
from toque.cli import main
from toque.config import load_config
from toque.cooking.cookbook.recipes import write_cookbook
from toque.errors import ConfigError, DataError
from toque.workflows.init import DOCUMENTS, PAIRS, RECIPES, TOKENS


@pytest.fixture
def kitchen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_cookbook(Path("a.jsonl"), n=80, seed=3)
    return tmp_path


SHORT = (
    "train.stop_after=2 steps",
    "model.shape.hidden_size=16",
    "model.shape.num_hidden_layers=1",
    "model.shape.intermediate_size=16",
    "evaluation.max_examples=2",
    "evaluation.generate=1",
    "model.tokenizer=trained:512",
    "train.compile=false",
)


@pytest.mark.usefixtures("kitchen")
def test_what_it_writes_trains(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "a.jsonl"]) == 0
    said = capsys.readouterr().out
    assert "a.jsonl: json-lines, 80 recipes" in said
    assert "toque train my.yaml" in said
    text = Path("my.yaml").read_text()
    assert "    - path: a.jsonl           # json-lines, 80 recipes" in text
    resolved = load_config("my.yaml")
    assert resolved.config.run_dir == "runs/my"
    assert str(resolved.config.train.stop_after) == "30 minutes"
    assert main(["train", "my.yaml", *SHORT]) == 0
    assert Path("runs/my/model/config.json").exists()


@pytest.mark.usefixtures("kitchen")
def test_few_texts_get_an_update_of_few(capsys: pytest.CaptureFixture[str]) -> None:
    """50 pairs and three epochs were three updates of 16,384 tokens, and nothing was said."""

    def pairs(n: int) -> str:
        lines = [{"prompt": f"What is {i}?", "completion": f"{i} is a number. " * 30}
                 for i in range(n)]  # fmt: skip
        Path(f"{n}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return f"{n}.jsonl"

    words = ["--start-from", "some/folder", "--stop-after", "3 epochs", "--replace"]
    assert main(["init", pairs(50), *words]) == 0
    assert "updates" not in capsys.readouterr().out
    assert str(load_config("my.yaml").config.train.batch) == "4 examples"
    assert main(["init", pairs(30), *words]) == 0
    assert "the run has about 22 updates, which teach little" in capsys.readouterr().out
    assert main(["init", pairs(900), *words]) == 0
    examples = load_config("my.yaml").config.train.batch
    assert (examples.unit, 80 < 3 * 900 / examples.amount < 120) == ("examples", True)
    assert main(["init", pairs(6000), *words]) == 0
    assert str(load_config("my.yaml").config.train.batch) == "16384 tokens"
    assert str(toque.init("50.jsonl", replace=True).config.train.batch) == "6 examples"


@pytest.mark.usefixtures("kitchen")
def test_a_run_of_few_updates_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    toque.init("a.jsonl")
    few = [*SHORT[1:], "train.stop_after=1 epochs", "train.batch=16384 tokens"]
    assert main(["train", "my.yaml", *few]) == 0
    assert "  warning       the run has about 2 updates, which teach" in capsys.readouterr().err
    assert main(["train", "my.yaml", *SHORT, "run_dir=runs/other"]) == 0
    assert "which teach little" not in capsys.readouterr().err  # so many were asked for


@pytest.mark.usefixtures("kitchen")
def test_a_file_that_is_there_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    Path("my.yaml").write_text("mine")
    assert main(["init", "a.jsonl"]) == 2
    assert "--replace" in capsys.readouterr().err
    assert Path("my.yaml").read_text() == "mine"
    assert main(["init", "a.jsonl", "--to", "configs/other.yaml"]) == 0
    assert load_config("configs/other.yaml").config.data.store == "stores/other"
    assert main(["init", "a.jsonl", "--replace"]) == 0
    assert Path("my.yaml").read_text() != "mine"


def test_every_kind_of_source_is_recognised(kitchen: Path) -> None:
    (kitchen / "book.txt").write_text("It was a dark and stormy night. " * 50)
    pairs = [{"prompt": f"{n} plus 1?", "completion": str(n + 1)} for n in range(30)]
    (kitchen / "pairs.jsonl").write_text("".join(json.dumps(p) + "\n" for p in pairs))
    np.save(kitchen / "ids.npy", np.arange(600, dtype=np.uint16).reshape(6, 100) % 500)
    expected = {"a.jsonl": RECIPES, "book.txt": DOCUMENTS, "pairs.jsonl": PAIRS, "ids.npy": TOKENS}
    for path, kind in expected.items():
        made = toque.init(
            path, to=f"{path}.yaml", tokenizer="some/tokenizer" if kind == TOKENS else "auto"
        )
        assert [found.kind for found in made.sources] == [kind]
        assert (made.config.evaluation.generate > 0) is (kind in (RECIPES, PAIRS))
        assert load_config(made.file).config == made.config
    both = toque.init(["a.jsonl", kitchen / "book.txt"], to="both.yaml")
    assert [source.path for source in both.config.data.sources] == [
        "a.jsonl", str(kitchen / "book.txt")
    ]  # fmt: skip


def test_a_large_file_is_counted_by_a_part_of_it(kitchen: Path) -> None:
    line = json.loads((kitchen / "a.jsonl").read_text().splitlines()[0])
    lines = [json.dumps(line | {"title": f"{line['title']} {n}"}) for n in range(20_000)]
    (kitchen / "large.jsonl").write_text("\n".join(lines))
    (found,) = toque.init("large.jsonl").sources
    assert not found.whole
    assert found.records == pytest.approx(20_000, rel=0.1)
    assert str(found).startswith("json-lines, about ")


@pytest.mark.usefixtures("kitchen")
@pytest.mark.parametrize("size", ["tiny", "small", "medium"])
def test_sizes_are_as_large_as_they_say(size: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    from toque.models.flops import parameter_counts
    from toque.models.loading.from_scratch import build_model
    from toque.workflows.init import SIZES

    model = toque.init("a.jsonl", size=size).config.model
    with FakeTensorMode():
        built = build_model(
            family=model.family,
            shape=model.shape,
            vocab_size=int(model.tokenizer.partition(":")[2]),
            pad_id=0,
            eos_id=1,
            bos_id=None,
            seed=0,
        )
        millions = parameter_counts(built).total / 1e6
    assert f"{millions:.0f} million parameters" in SIZES[size].about


@pytest.mark.usefixtures("kitchen")
def test_from_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    made = toque.init("a.jsonl", start_from="some/folder", stop_after="2 epochs")
    assert (made.config.model.family, made.config.model.start_from) == ("auto", "some/folder")
    assert str(made.config.train.stop_after) == "2 epochs"
    assert "# adapter: {kind: lora}" in made.file.read_text()
    assert main(["init", "a.jsonl", "--to", "b.yaml", "--start-from", "x", "--size", "tiny"]) == 0
    capsys.readouterr()


@pytest.mark.usefixtures("kitchen")
@pytest.mark.parametrize("name", ["a  # b", "it's", 'a "b"', "x: y", "- z", "ü[1]"])
def test_any_name_is_written_as_yaml_reads_it(name: str) -> None:
    Path(f"{name}.jsonl").write_text(Path("a.jsonl").read_text())
    made = toque.init(
        f"{name}.jsonl", to=f"{name}.yaml", start_from=f"{name}/model", tokenizer=f"{name}/t"
    )
    assert made.config.data.sources[0].path == f"{name}.jsonl"
    assert made.config.run_dir == f"runs/{name}"
    assert (made.config.model.start_from, made.config.model.tokenizer) == (
        f"{name}/model", f"{name}/t"
    )  # fmt: skip


REFUSED = {
    "init": (2, "Name a file, a folder or a pattern"),
    "init nothing.jsonl": (3, "There is no source file nothing.jsonl"),
    "init a.jsonl --size huge": (2, "huge"),
    "init a.jsonl --stop-after soon": (2, "'soon' is not a duration"),
    "init a.jsonl --to a.jsonl": (2, "--to, or overwrite it with --replace"),
    "init ids.npy": (2, "Name the tokenizer"),
    "init bad.jsonl": (3, "holds no usable record"),
}


@pytest.mark.parametrize("words", REFUSED)
def test_refusals(words: str, kitchen: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(kitchen / "ids.npy", np.arange(600, dtype=np.uint16))
    (kitchen / "bad.jsonl").write_text('{"title": "x", "ingredients": [], "directions": []}\n' * 3)
    code, text = REFUSED[words]
    assert main(words.split()) == code
    assert text in " ".join(capsys.readouterr().err.split())
    assert not (kitchen / "my.yaml").exists()


def test_python_names_arguments(kitchen: Path) -> None:
    with pytest.raises(ConfigError, match=r"sources is empty"):
        toque.init([])
    with pytest.raises(DataError):
        toque.init(kitchen / "nothing")


@pytest.mark.usefixtures("kitchen")
def test_a_file_in_an_old_encoding_leads_out_of_init(capsys: pytest.CaptureFixture[str]) -> None:
    step = "Whisk the crème in a large bowl over hot water until it is set and serve it very cold."
    rows = "".join(f"Crème {n},{n} cups crème|2 eggs|salt,{step}\n" for n in range(40))
    Path("old.csv").write_text(f"title,ingredients,directions\n{rows}", encoding="cp1252")
    assert main(["init", "old.csv"]) == 3
    error = capsys.readouterr().err
    assert "40 not UTF-8" in error
    assert "--encoding" in error
    assert main(["init", "old.csv", "--encoding", "cp1252"]) == 0
    assert load_config("my.yaml").config.data.encoding == "cp1252"
    assert main(["prepare", "my.yaml", "model.tokenizer=trained:512"]) == 0
    assert "not UTF-8" not in capsys.readouterr().out
