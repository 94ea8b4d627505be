"""`toque init`: what it finds, what it writes, and that the result trains."""

import gzip
import json
import re
import zipfile
from pathlib import Path

import numpy as np
import pytest

import toque
from tiny import shape_of
from toque.cli import main
from toque.config import load_config
from toque.cooking.cookbook.recipes import write_cookbook
from toque.data.tokenizer.codec import Codec, load_codec
from toque.errors import ConfigError, DataError
from toque.hardware.processor import ProcessorUse
from toque.models.loading.from_scratch import build_model
from toque.models.loading.model_export import save_model
from toque.reporter import millions
from toque.workflows.first_config.init_base import NOT_SEEN
from toque.workflows.first_config.model_sizes import SIZES, Size
from toque.workflows.first_config.source_survey import DOCUMENTS, PAIRS, RECIPES, TOKENS


def rate(size: Size, characters: float, tokenizer: str) -> float:
    """Tokens a second of a machine that is nobody's: one of the larger, the slower."""
    assert characters > 0
    assert tokenizer
    return 6e9 / size.parameters


WRITING = 700.0  # tokens per second that the same machine writes


@pytest.fixture
def kitchen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("toque.workflows.first_config.sizing.measure_rate", rate)
    monkeypatch.setattr(
        "toque.workflows.first_config.init.measure_writing_rate",
        lambda *_about: WRITING,
    )
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
    assert (
        str(resolved.config.train.stop_after) == "6 epochs"
    )  # more would be learnt by heart
    assert str(resolved.config.train.time_limit) == "1 hours"
    assert "in 6 passes over the texts and needs only about " in said
    assert " of the 1 hour: the time is enough for " in said
    assert resolved.config.optim.name == "muon"
    assert resolved.config.optim.weight_decay > 0.1  # which is ten times the usual one
    assert "Forecast: held-out loss " in said
    assert main(["init", "a.jsonl", "--for", "16 seconds", "--replace"]) == 0
    assert str(load_config("my.yaml").config.train.stop_after) == "16 seconds total"
    assert main(["train", "my.yaml", *SHORT]) == 0
    assert Path("runs/my/model/config.json").exists()


@pytest.mark.usefixtures("kitchen")
@pytest.mark.parametrize("written_per_second", [12.0, 500.0, 7_500.0])
def test_texts_take_their_share_of_the_time_at_most(
    written_per_second: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The share was promised of held-out losses, and texts took 59 % of the time."""
    monkeypatch.setattr(
        "toque.workflows.first_config.sizing.measure_rate", lambda *_about: 2_000.0
    )
    monkeypatch.setattr(
        "toque.workflows.first_config.init.measure_writing_rate",
        lambda *_about: written_per_second,
    )
    made = toque.init("a.jsonl", for_="40 seconds", size="300k")
    evaluation, (source,) = made.config.evaluation, made.sources
    each = source.tokens / source.records / written_per_second
    assert 10 * evaluation.texts * each <= 0.05 * 40.0
    assert evaluation.generate == 1 or evaluation.generate * each <= 0.05 * 40.0
    text = made.file.read_text()
    assert ("the end: at most 5% of the time" in text) is (
        evaluation.generate * each <= 0.05 * 24
    )


@pytest.mark.usefixtures("kitchen")
def test_few_texts_get_an_update_of_few(capsys: pytest.CaptureFixture[str]) -> None:
    """50 pairs were an epoch of one update of 16,384 tokens."""

    def pairs(n: int) -> str:
        lines = [{"prompt": f"What is {i}?", "completion": f"{i} is a number. " * 30}
                 for i in range(n)]  # fmt: skip
        Path(f"{n}.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in lines)
        )
        return f"{n}.jsonl"

    words = ["--start-from", "some/folder", "--replace"]
    assert main(["init", pairs(50), *words]) == 0
    assert str(load_config("my.yaml").config.train.batch) == "4 examples"
    assert main(["init", pairs(500), *words]) == 0
    examples = load_config("my.yaml").config.train.batch
    assert (examples.unit, 280 < 4 * 500 / examples.amount < 320) == ("examples", True)
    assert main(["init", pairs(20_000), *words]) == 0
    assert str(load_config("my.yaml").config.train.batch) == "16384 tokens"
    capsys.readouterr()


@pytest.mark.usefixtures("kitchen")
def test_few_texts_beside_a_bucket_are_not_taken_for_all(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert (
        main(["init", "a.jsonl", "s3://nowhere/more.jsonl", "--for", "5 minutes"]) == 0
    )
    assert "passes over the texts" not in capsys.readouterr().out
    train = load_config("my.yaml").config.train
    assert (str(train.stop_after), str(train.batch)) == (
        "5 minutes total",
        "2048 tokens",
    )


@pytest.mark.usefixtures("kitchen")
@pytest.mark.parametrize(
    ("length", "often"),
    [("5 minutes", "10 %"), ("1 hour", "10 %"), ("tonight", "10 minutes")],
)
def test_a_run_that_is_killed_loses_ten_minutes_at_most(
    length: str, often: str
) -> None:
    assert str(toque.init("a.jsonl", for_=length).config.train.save_every) == often


@pytest.mark.usefixtures("kitchen")
def test_a_run_of_few_updates_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    toque.init("a.jsonl")
    few = [*SHORT[1:], "train.stop_after=1 epochs", "train.batch=16384 tokens"]
    assert main(["train", "my.yaml", *few]) == 0
    assert (
        "  warning       the run has only about 2 updates, so"
        in capsys.readouterr().err
    )
    assert main(["train", "my.yaml", *SHORT, "run_dir=runs/other"]) == 0
    assert "learns little" not in capsys.readouterr().err  # so many were asked for


@pytest.mark.usefixtures("kitchen")
def test_data_that_teach_little_are_named_before_anything_is_trained() -> None:
    lines = Path("a.jsonl").read_text().splitlines()
    few = toque.init("a.jsonl", replace=True)
    assert f"{len(set(lines))} different records are few" in str(few)
    Path("same.jsonl").write_text(f"{lines[0]}\n" * 40 + "\n".join(lines[1:4]))
    same = str(toque.init("same.jsonl", replace=True))
    assert "39 of the 43 records of same.jsonl that were read are repeats" in same
    assert "4 different records are few" in same


@pytest.mark.usefixtures("kitchen")
@pytest.mark.parametrize(
    "name", ["many.jsonl", "many.jsonl.gz", "many.jsonl.zst", "many.parquet"]
)
def test_of_a_compressed_file_all_records_are_estimated_from_the_first(
    name, monkeypatch
):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    text = Path("a.jsonl").read_bytes() * 24
    Path("many.jsonl").write_bytes(text)
    if name.endswith("gz"):
        Path(name).write_bytes(gzip.compress(text))
    elif name.endswith("zst"):
        Path(name).write_bytes(arrow.Codec("zstd").compress(text, asbytes=True))
    elif name.endswith("parquet"):
        rows = [json.loads(line) for line in text.splitlines()]
        pictures = [bytes(1000)] * len(rows)  # as much again, which nobody reads
        table = arrow.Table.from_pylist(rows).append_column("image", [pictures])
        parquet.write_table(table, name, compression="zstd", use_dictionary=False)
    monkeypatch.setattr(
        "toque.workflows.first_config.source_survey._LOOK_BYTES", 1 << 19
    )
    (found,) = toque.init(name).sources
    assert not found.is_complete
    assert found.records == pytest.approx(24 * 80, rel=0.1)


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
    expected = {
        "a.jsonl": RECIPES,
        "book.txt": DOCUMENTS,
        "pairs.jsonl": PAIRS,
        "ids.npy": TOKENS,
    }
    for path, kind in expected.items():
        made = toque.init(
            path,
            to=f"{path}.yaml",
            tokenizer="some/tokenizer" if kind == TOKENS else "auto",
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
    lines = [
        json.dumps(line | {"title": f"{line['title']} {n}"}) for n in range(20_000)
    ]
    (kitchen / "large.jsonl").write_text("\n".join(lines))
    (found,) = toque.init("large.jsonl").sources
    assert not found.is_complete
    assert found.records == pytest.approx(20_000, rel=0.1)
    assert str(found).startswith("json-lines, about ")


@pytest.mark.usefixtures("kitchen")
@pytest.mark.parametrize("size", SIZES)
def test_sizes_are_as_large_as_they_say(size: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    from toque.models.flops import parameter_counts
    from toque.models.loading.from_scratch import build_model

    made = toque.init("a.jsonl", size=size)
    model = made.config.model
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
    counts = parameter_counts(built)
    assert counts.non_embedding == SIZES[size].parameters
    in_millions = float(size.replace("300k", "0.3m").removesuffix("m"))
    assert counts.total / 1e6 == pytest.approx(in_millions, rel=0.15)
    # One number: `train` begins with the same one, whatever the vocabulary.
    said = f"{millions(counts.total)} parameters (size {size})"
    assert f"Model: {said}" in made.forecast
    assert f"# {said}, from random weights" in made.file.read_text()


@pytest.mark.usefixtures("kitchen")
def test_from_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    made = toque.init("a.jsonl", start_from="some/folder", for_="10 minutes")
    assert (made.config.model.family, made.config.model.start_from) == (
        "auto",
        "some/folder",
    )
    assert str(made.config.train.stop_after) == "10 minutes total"
    assert made.config.optim.name == "adamw"
    assert not made.forecast
    assert "# adapter: {kind: lora, target_modules: all}" in made.file.read_text()
    assert made.remarks[-1] == NOT_SEEN.format(start="some/folder")
    assert (
        main(["init", "a.jsonl", "--to", "b.yaml", "--start-from", "x", "--size", "1m"])
        == 0
    )
    capsys.readouterr()


@pytest.mark.usefixtures("kitchen")
@pytest.mark.parametrize("name", ["a  # b", "it's", 'a "b"', "x: y", "- z", "ü[1]"])
def test_any_name_is_written_as_yaml_reads_it(name: str) -> None:
    Path(f"{name}.jsonl").write_text(Path("a.jsonl").read_text())
    made = toque.init(
        f"{name}.jsonl",
        to=f"{name}.yaml",
        start_from=f"{name}/model",
        tokenizer=f"{name}/t",
    )
    assert made.config.data.sources[0].path == f"{name}.jsonl"
    assert made.config.run_dir == f"runs/{name}"
    assert (made.config.model.start_from, made.config.model.tokenizer) == (
        f"{name}/model", f"{name}/t"
    )  # fmt: skip


@pytest.mark.usefixtures("kitchen")
def test_the_speed_is_measured_with_the_tokenizer_that_was_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = list[str]()

    def remembered(size: Size, characters: float, tokenizer: str) -> float:
        asked.append(tokenizer)
        return rate(size, characters, tokenizer)

    monkeypatch.setattr("toque.workflows.first_config.sizing.measure_rate", remembered)
    usual = toque.init("a.jsonl", size="300k")
    assert asked == [usual.config.model.tokenizer] == ["trained:2048"]
    assert (
        main(["prepare", "my.yaml", "model.tokenizer=trained:512", "data.store=few"])
        == 0
    )
    losses = list[str]()
    for name in ("few/tokenizer", "trained:512"):
        made = toque.init("a.jsonl", tokenizer=name, size="300k", replace=True)
        assert made.config.model.tokenizer == name
        losses.append(made.forecast.partition("held-out loss ")[2].partition(" ")[0])
    assert asked[1:] == ["few/tokenizer", "trained:512"]
    # Its tokens are shorter than any that was measured, and each is surer.
    assert float(losses[0]) < 0.95 * float(losses[1])
    elsewhere = toque.init(
        "a.jsonl", tokenizer="some/tokenizer", size="300k", replace=True
    )
    assert elsewhere.config.model.tokenizer == "some/tokenizer"
    assert asked[3:] == ["trained:2048"]
    assert (
        "some/tokenizer is not on this machine, so the speed was measured with"
        in str(elsewhere)
    )


PAIRS_OF_FOUR = [
    {
        "question": f"What is {n}?",
        "hint": f"it is near {n + 1}",
        "answer": f"A number, {n}.",
        "id": n,
    }
    for n in range(50)
]


def lines_of(file: str, records: list[dict[str, object]]) -> str:
    Path(file).write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


@pytest.mark.usefixtures("kitchen")
@pytest.mark.parametrize(
    ("record", "advice"),
    [
        (
            {"dish": "Soup", "stuff": "rice"},
            (
                "--columns ingredients=NAME --columns steps=NAME. If it contains other texts: "
                "--columns prompt=NAME --columns target=NAME for prompts"
            ),
        ),
        (
            {"question": "Why?", "answer": "So.", "choices": ["So."]},
            (
                "--columns 'prompt={question} {choices}' --columns target=answer with it, or "
                "--columns prompt=question --columns target=answer without"
            ),
        ),
    ],
)
def test_unknown_columns_are_to_be_named_by_the_flag(
    record: dict[str, object], advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lines_of("odd.jsonl", [record] * 3)
    assert main(["init", "odd.jsonl"]) == 3
    said = capsys.readouterr().err
    assert advice in said
    assert "columns: {" not in said


@pytest.mark.usefixtures("kitchen")
def test_fields_of_messages_are_named() -> None:
    answer = {
        "role": "assistant",
        "content": "Boil it.",
        "thinking": "Rice.",
        "weight": 0,
    }
    turns = [{"role": "user", "content": "Rice?", "thinking": ""}, answer]
    turns.append({"role": "user", "content": "And?"})
    record = {"messages": [*turns, {**answer, "weight": 1}]}
    Path("talks.jsonl").write_text(f"{json.dumps(record)}\n" * 9)
    said = str(toque.init("talks.jsonl", to="talks.yaml"))
    assert (
        "Other fields of the 36 messages of talks.jsonl that were read: 'thinking' (18)"
        in said
    )
    assert (
        "talks.jsonl: 9 answers that are read and not learnt, as their field 'weight'"
        in said
    )


@pytest.mark.usefixtures("kitchen")
def test_columns_are_the_users_and_every_other_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines_of("four.jsonl", PAIRS_OF_FOUR)
    words = [
        "init",
        "four.jsonl",
        "--replace",
        "--columns",
        "target=answer",
        "--columns",
    ]
    assert main([*words, "prompt=hint"]) == 0
    said = capsys.readouterr().out
    assert "Unused fields of four.jsonl: 'question', 'id'." in said
    assert load_config("my.yaml").config.data.sources[0].columns == {
        "prompt": "hint", "target": "answer",
    }  # fmt: skip
    assert main([*words, r"prompt={question}\n({hint})"]) == 0
    assert "Unused fields of four.jsonl: 'id'." in capsys.readouterr().out
    source = load_config("my.yaml").config.data.sources[0]
    assert source.columns["prompt"] == "{question}\n({hint})"
    assert main([*words, "promt=hint"]) == 2
    assert "--columns names 'promt'" in capsys.readouterr().err
    made = toque.init("four.jsonl", columns=source.columns, to="b.yaml")
    assert made.config.data.sources[0] == source
    assert main(["init", "a.jsonl", "--replace", "--columns", "text=title"]) == 0
    assert "'ingredients', 'directions'" in capsys.readouterr().out


@pytest.mark.usefixtures("kitchen")
def test_what_is_no_data_in_a_folder_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for folder, data in (("mixed", "a.jsonl"), ("texts", "a.txt")):
        Path(folder).mkdir()
        text = (
            Path("a.jsonl").read_text()
            if data == "a.jsonl"
            else "A dark and stormy night. " * 40
        )
        Path(folder, data).write_text(text)
        Path(folder, "README.md").write_text("# What this is")
        Path(folder, ".DS_Store").write_bytes(b"\0\0\0\1Bud1\0\0")
        Path(folder, "photo.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0")
        with zipfile.ZipFile(Path(folder, "old.docx"), "w") as archive:
            archive.writestr("word/document.xml", "<w/>")
        assert main(["init", folder, "--replace"]) == 0
        said = " ".join("".join(capsys.readouterr()).split())
        assert f"Hidden files of {folder} are not read: '.DS_Store'." in said
        assert "photo.png (no text, such as a picture)" in said
        assert "old.docx (a Word document (" in said
        as_text = (
            "Files of texts that look like documentation are read as text: 'README.md'."
        )
        assert (
            as_text in said
            if folder == "texts"
            else "README.md (documentation)" in said
        )


OWN = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}"
OWN += "{% if add_generation_prompt %}[assistant] {% endif %}"
ENDLESS = OWN.replace("{{ eos_token }}", "")


@pytest.fixture
def base(kitchen: Path, writers_of_json: dict[str, Codec]) -> Path:
    """A small model to start from, with 128 positions."""
    codec = writers_of_json["decoder"]
    model = build_model(
        family="llama", shape=shape_of("llama", positions=128), vocab_size=codec.vocab_size,
        pad_id=codec.pad_id, eos_id=codec.eos_id, bos_id=codec.bos_id, seed=0,
    )  # fmt: skip
    save_model(model, None, kitchen / "base", card="", files=codec.files())
    return kitchen / "base"


def test_a_model_learns_from_rewards_instead_of_texts(
    base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["init", "a.jsonl", "--start-from", str(base), "--for", "10 minutes"]
    assert main([*words, "--rewards", "cookable"]) == 0
    assert "each with 8 texts for each of 8 prompts, at " in capsys.readouterr().out
    config = load_config("my.yaml").config
    assert config.objective.kind == "grpo"
    assert dict(config.objective.rewards) == {"cookable": 1.0}
    assert str(config.train.batch) == "8 examples"
    assert str(config.train.stop_after) == "10 minutes total"

    assert main([*words, "--replace", "--rewards", "cookabel"]) == 2
    assert "--rewards names cookabel, which is not a score" in capsys.readouterr().err
    assert main(["init", "a.jsonl", "--replace", "--rewards", "cookable"]) == 2
    assert "so --start-from must name one" in capsys.readouterr().err
    lines_of("b.jsonl", [{"prompt": f"{n}?", "completion": "so"} for n in range(40)])
    words[1] = "b.jsonl"
    assert main([*words, "--replace", "--rewards", "cookable"]) == 2
    assert "cannot be used with prompts with answers" in capsys.readouterr().err


def test_lengths_cut_nothing_that_the_base_could_read(
    base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = [
        {"prompt": "salt " * (1 + n % 9), "completion": "milk. " * (1 + n)}
        for n in range(20)
    ]
    lines_of(
        "pairs.jsonl",
        [*pairs, *({"prompt": "a", "completion": "b"} for _ in range(400))],
    )
    assert main(["init", "pairs.jsonl", "--start-from", str(base)]) == 0
    out = capsys.readouterr().out
    data = load_config("my.yaml").config.data
    codec = load_codec(base)
    longest = max(len(codec.encode(pair["completion"])) + 1 for pair in pairs)
    assert longest <= data.max_target_tokens <= 64 + longest  # not 99 % of them: all
    assert " cuts " not in out
    assert data.max_prompt_tokens + data.max_target_tokens <= 129
    lines_of("long.jsonl", [{"prompt": "salt " * 90, "completion": "milk. " * 90}] * 20)
    assert main(["init", "long.jsonl", "--start-from", str(base), "--replace"]) == 0
    out = capsys.readouterr().out
    assert re.search(
        r"context length is only 128 tokens .*, so \d+\.\d% of the target tokens will be cut",
        out,
    )
    data = load_config("my.yaml").config.data
    assert data.max_prompt_tokens + data.max_target_tokens == 129


def test_the_length_of_a_run_counts_the_tokens_that_the_base_can_read(
    base: Path,
) -> None:
    """Half of the targets were cut, and init counted all of them: 2:52 of 5 minutes were used."""
    pairs = [
        {"prompt": f"{n} " + "salt " * (n % 40), "completion": "milk. " * (20 + 3 * n)}
        for n in range(200)
    ]
    made = toque.init(lines_of("pairs.jsonl", pairs), start_from=base)
    assert str(made.config.train.stop_after) == "4 epochs"
    assert str(made.config.train.time_limit) == "1 hours"
    tokens = toque.prepare("my.yaml").store.manifest.tokens
    trained = 4 * 0.95 * (tokens.prompt + tokens.target)
    assert 3 * trained < 4 * sum(len(pair["completion"]) / 4 for pair in pairs)
    stated = made.forecast.partition("The run reads ")[2].partition(" tokens")[0]
    assert float(stated.replace(",", "")) == pytest.approx(trained, rel=0.05)
    assert "needs only about" in made.forecast


def test_a_base_that_does_not_know_the_script_is_named(base: Path) -> None:
    """Byte tokens stand for letters that a tokenizer has not seen; Chinese recipes are short."""
    steps = [
        ["把肉切块，焯水。", f"加入酱油和糖，小火炖{n}分钟，直到肉软烂。"]
        for n in range(20)
    ]
    rows = [
        {"title": "红烧肉", "ingredients": ["五花肉 500克"], "steps": one}
        for one in steps
    ]
    Path("chinese.jsonl").write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    )
    made = toque.init("chinese.jsonl", start_from=base)
    assert made.sources[0].records == 20
    assert made.config.optim.peak_lr == 5e-4  # of the smallest models
    assert "tokens per character of these texts. It hardly covers their script" in str(
        made
    )


@pytest.mark.parametrize(
    ("template", "written", "why"),
    [
        (OWN, "auto", "the base's own"),
        (None, "auto", "headings; the base has no chat template"),
        (ENDLESS, "plain", "headings, because the base's own does not end its answers"),
    ],
)
def test_conversations_get_the_template_of_the_base(
    template: str | None, written: str, why: str, base: Path
) -> None:
    file = base / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    file.write_text(
        json.dumps(settings | ({"chat_template": template} if template else {}))
    )
    talk = [
        {"role": "user", "content": "salt?"},
        {"role": "assistant", "content": "milk."},
    ]
    lines_of("talks.jsonl", [{"messages": talk}] * 30)
    made = toque.init("talks.jsonl", start_from=base)
    assert made.config.data.chat_template == written
    (line,) = [
        one for one in made.file.read_text().splitlines() if "chat_template" in one
    ]
    assert line.endswith(f"# {why}")


def test_an_adapter_is_proposed_by_size_and_memory(
    base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def adapter(*words: str) -> object:
        assert (
            main(["init", "a.jsonl", "--start-from", str(base), "--replace", *words])
            == 0
        )
        return load_config("my.yaml").config.adapter

    assert adapter() is None
    assert "weights need" in Path("my.yaml").read_text()
    capsys.readouterr()
    monkeypatch.setattr("toque.workflows.first_config.init_base._ADAPTER_FROM", 1)
    found = adapter()
    assert (getattr(found, "kind", None), getattr(found, "target_modules", None)) == (
        "lora",
        "all",
    )
    assert "even with an adapter" not in capsys.readouterr().out
    monkeypatch.undo()
    monkeypatch.chdir(base.parent)
    monkeypatch.setattr(
        "toque.workflows.plan.run_estimate.free_bytes", lambda _: 1 << 20
    )
    assert getattr(adapter(), "kind", None) == "lora"
    assert "even with an adapter. `toque plan` lists" in capsys.readouterr().out


REFUSED = {
    "init": (2, "Name a file, a folder or a pattern"),
    "init nothing.jsonl": (3, "The source file nothing.jsonl does not exist"),
    "init a.jsonl --size huge": (2, "huge"),
    "init a.jsonl --for soon": (2, 'not "soon"'),
    "init a.jsonl --for 3epochs": (2, '--for must be a time such as "20 minutes"'),
    "init a.jsonl --for 0minutes": (2, 'not "0minutes"'),
    "init a.jsonl --for 1min": (2, 'not "1min"'),
    "init a.jsonl --for 5seconds": (2, "no time is left to train. Use at least --for"),
    "init a.jsonl --to a.jsonl": (2, "--to, or overwrite it with --replace"),
    "init ids.npy": (2, "Set model.tokenizer"),
    "init a.jsonl --columns title": (2, "--columns prompt=question"),
    "init a.jsonl --columns text=title --columns text=tags": (2, "once"),
    "init a.jsonl --columns dish=title": (2, "dish"),
    "init a.jsonl --columns text=nowhere": (3, "nowhere"),
    "init bad.jsonl": (3, "has no usable record"),
}


@pytest.mark.parametrize("words", REFUSED)
def test_refusals(
    words: str, kitchen: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(kitchen / "ids.npy", np.arange(600, dtype=np.uint16))
    (kitchen / "bad.jsonl").write_text(
        '{"title": "x", "ingredients": [], "directions": []}\n' * 3
    )
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
def test_a_file_in_an_old_encoding_leads_out_of_init(
    capsys: pytest.CaptureFixture[str],
) -> None:
    step = "Whisk the crème in a large bowl over hot water until it is set and serve it very cold."
    rows = "".join(f"Crème {n},{n} cups crème|2 eggs|salt,{step}\n" for n in range(40))
    Path("old.csv").write_text(
        f"title,ingredients,directions\n{rows}", encoding="cp1252"
    )
    assert main(["init", "old.csv"]) == 3
    error = capsys.readouterr().err
    assert "40 not UTF-8" in error
    assert "--encoding" in error
    assert main(["init", "old.csv", "--encoding", "cp1252"]) == 0
    assert load_config("my.yaml").config.data.encoding == "cp1252"
    assert main(["prepare", "my.yaml", "model.tokenizer=trained:512"]) == 0
    assert "not UTF-8" not in capsys.readouterr().out


def test_splits_of_a_saved_dataset_are_trained_on_and_held_out(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    rows = [{"question": f"What is {n}?", "answer": f"It is {n}."} for n in range(60)]
    ends = {"train": (0, 40), "test": (40, 50), "validation": (50, 60)}
    splits = {
        name: datasets.Dataset.from_list(rows[a:b]) for name, (a, b) in ends.items()
    }
    datasets.DatasetDict(splits).save_to_disk("data")
    made = toque.init(
        "data", to="a.yaml", columns={"prompt": "{question}", "target": "answer"}
    )
    assert [one.path for one in made.config.data.sources] == ["data/train"]
    assert [one.path for one in made.config.data.validation] == ["data/validation"]
    assert "Splits of data that are not read: 'test'." in str(made)
    report = toque.prepare("a.yaml").report
    assert (report.train, report.validation) == (40, 10)


@pytest.mark.usefixtures("kitchen")
@pytest.mark.parametrize(
    ("seconds", "busy", "named"),
    [(2.0, 3.0, True), (2.0, 1.6, False), (0.1, 3.0, False)],
)
def test_other_programs_are_named_that_computed_while_the_speed_was_measured(
    seconds: float, busy: float, named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = iter([ProcessorUse(0.0, 0.0, 0.0), ProcessorUse(seconds, busy, 1.4)])
    monkeypatch.setattr(ProcessorUse, "now", lambda: next(read))
    said = str(toque.init("a.jsonl"))
    assert ("Other programs kept" in said) is named
    assert (
        "\0" not in said
    )  # the mark of an argument, which errors alone put into words
