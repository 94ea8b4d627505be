"""Every command once, on one small run: what it prints and how it ends."""

import json
import os
import re
import signal
from pathlib import Path

import pytest

from conftest import REPOSITORY
from fixtures.kitchens import tiny_config
from toque.cli import main
from toque.config.dump import to_yaml
from toque.storage.atomic import atomic_folder


@pytest.fixture(scope="module")
def kitchen(shared_kitchen: Path) -> Path:
    """A folder with a cookbook, its store, and a run by a command."""
    (shared_kitchen / "run.yaml").write_text(
        to_yaml(tiny_config(evaluation={"generate": 1}))
    )
    (shared_kitchen / "prompts.json").write_text("[]")
    (shared_kitchen / "not.json").write_text('{"not": {}}')
    assert main(["train", "run.yaml"]) == 0
    return shared_kitchen


COMMANDS = {
    "prepare run.yaml": ("Reused store.", ""),
    "train run.yaml": ("", "continuing from step 3"),
    "train run.yaml seed=5": ("", "`toque generate run --prompt"),
    "evaluate run": ("held-out loss", ""),
    "evaluate run evaluation.generate=0": ("held-out loss", ""),
    "evaluate run run.yaml": ("1 generated texts", ""),
    "generate run --prompt soup --max-new-tokens 4": ("Generate recipe for: soup", ""),
    "generate run --prompt soup --choices yes --choices no": ("yes 0.", ""),
    "pairs run --to own.jsonl --limit 4": ("own.jsonl: 4 pairs from", ""),
    "report run": ("The report is run/report.html", ""),
    "export run --to merged": ("merged holds the model, read back and compared", ""),
    "verify store": ("store: store of 60 examples", ""),
    "verify run": ("checkpoint of step 3", ""),
    "check run.yaml --examples 2": ("One loss and one gradient", ""),
    "show run": ("run_dir: ", ""),
    "show-batch run.yaml --most 1": ("more examples. To see more, raise --most.", ""),
    "presets": ("demo ", ""),
    "cookbook --out b.jsonl --n 3": ("3 synthetic recipes in b.jsonl", ""),
    "cookbook c.jsonl --n 3": ("3 synthetic recipes in c.jsonl", ""),
}
REFUSED = {
    "train run.yaml --from run": "--from begins a new run",
    "evaluate merged": "Add one: toque evaluate MODEL my.yaml",
    "generate run --n 0 --prompt x": "--n is 0; it must be at least 1",
    "generate run": 'Give --prompt "lentil soup" or --file prompts.txt',
    "generate run --file none.txt": "--file none.txt cannot be read",
    "generate run --task title --prompt x": "was not trained for --task title: its data.tasks is",
    "generate run --choices a --prompt x": "--choices Healthy --choices Indulgent",
    "generate run --task difficulty --adapter x --prompt x": "--adapter applies only",
    "generate run --task difficulty --precision bf16 --prompt x": "one model in float32",
    "generate run --choices a --choices b --precision auto --prompt x": "--precision applies",
    "generate run --task difficulty --best-of 4 --prompt x": "--best-of applies only",
    "generate run --choices a --choices b --n 2 --prompt x": "--n applies only",
    "generate run --choices a --choices b --max-new-tokens 9 --prompt x": "max-new-tokens applies",
    "generate run --task difficulty --temperature 0 --prompt x": "--temperature applies",
    "generate run --choices a --choices b --top-p 0.5 --prompt x": "--top-p applies only",
    "generate run --choices a --choices b --no-repeat-ngram-size 0 --prompt x": "--no-repeat-ngram",
    "generate run --choices a --choices b --seed 1 --prompt x": "--seed applies only",
    "generate run --temperature nan --prompt x": "--temperature is nan; use 0 or more",
    "generate run --by form --prompt x": "Add --best-of 8",
    "generate run --task difficulty --must-use --prompt x": "--must-use applies only",
    "generate run --task difficulty --schema recipe --prompt x": "--schema applies only",
    "generate run --must-use --schema recipe --prompt x": "--must-use and --schema cannot be",
    "generate run --schema none.json --prompt x": "The schema none.json cannot be read",
    "generate run --schema prompts.json --prompt x": "is a JSON list, not an object. --schema must",
    "generate run --schema run.yaml --prompt x": "The schema run.yaml is not JSON",
    "generate run --schema not.json --prompt x": "The JSON schema is not supported",
    "pairs run --to run": "must end with .jsonl",
    "pairs run --to x.jsonl --chosen best --samples 1": "at least 2 for --chosen best",
    "pairs run --to x.jsonl --by taste": "'taste' is not a score",
    "export run --to run": "Choose another folder with --to",
    "export run --to x --format mlx": "--format must be one of hf",
    "report run --out run": "Name another file with --out",
    "check run.yaml --examples 1": "--examples must be at least 2",
    "drill run --steps 3": "--steps must be at least 8 and --kills at least 0",
    "ablate run.yaml --seeds 1": "--seeds must be at least 2",
    "ablate run.yaml --steps 0": "--steps must be at least 1",
    "show-batch run.yaml --step 0": "--step must be at least 1",
    "prepare run.yaml data.max_target_tokens=99": "replace the store: run prepare with --replace",
    "train run.yaml data.max_target_tokens=99": "another data.store or with --replace",
}
CODES = {
    "train run.yaml --from run": 4,
    "export run --to run": 4,
    "generate run --file none.txt": 3,
}


@pytest.mark.usefixtures("kitchen")
@pytest.mark.parametrize("words", COMMANDS)
def test_a_command_prints_its_result(words, capsys):
    assert main(words.split()) == 0
    printed, noticed = COMMANDS[words]
    out, err = capsys.readouterr()
    assert printed in out
    assert noticed in err


@pytest.mark.usefixtures("kitchen")
@pytest.mark.parametrize("words", REFUSED)
def test_a_refusal_names_the_flag(words, capsys):
    code = 3 if "max_target_tokens" in words else CODES.get(words, 2)
    assert main(words.split()) == code
    out, err = capsys.readouterr()
    assert err.startswith("toque: ")
    assert REFUSED[words] in err
    assert "\0" not in err
    assert out == ""


MISTYPED = {
    "": "trian run.yaml",
    "train": "train",
    "generate": "generate run --promt soup",
    "cookbook": "cookbook --n many --out c.jsonl",
    "report": "report run out.html",
}


@pytest.mark.parametrize("verb", MISTYPED)
def test_wrong_usage_is_one_paragraph_like_every_error(verb, capsys):
    """No box drawn around it, and the words to type next."""
    assert main(MISTYPED[verb].split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("toque: ")
    assert err.count("\n") == 1
    assert f"`toque {verb} --help`".replace("  ", " ") in err


def test_help_lists_every_exit_code(capsys):
    assert main(["--help"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    page = (REPOSITORY / "docs" / "reference" / "exit-codes.md").read_text()
    codes = [
        line.split("|")[1].strip()
        for line in page.splitlines()
        if line.startswith("| ")
    ]
    for code in codes:
        if code.isdecimal():
            assert re.search(rf"\b{code} [a-z`]", said), code


def test_generated_texts_as_json(kitchen, capsys):
    (kitchen / "prompts.txt").write_text("soup\n\ncake\n")
    words = "generate run --file prompts.txt --n 2 --json --max-new-tokens 4 --temperature 0"
    assert main(words.split()) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [f["prompt"].removeprefix("Generate recipe for: ")[:4] for f in found] == [
        *("soup", "soup", "cake", "cake")
    ]
    assert all({"text", "tokens", "metrics"} < f.keys() for f in found)


@pytest.mark.usefixtures("kitchen")
def test_a_text_must_use_what_its_prompt_asks_for(capsys):
    pytest.importorskip("llguidance")
    words = [
        "generate",
        "run",
        "--prompt",
        "soup: leeks, brown rice",
        "--json",
        "--seed",
        "2",
    ]
    assert main(words) == 0
    assert main([*words, "--must-use"]) == 0
    free, held = map(json.loads, capsys.readouterr().out.splitlines())
    assert free["metrics"]["ingredient_coverage"] == 0.0
    assert held["metrics"]["ingredient_coverage"] == 1.0
    listed = held["text"].partition("\n\n")[0].splitlines()
    assert listed[0] == "Ingredients:"
    assert all(
        any(name in line for line in listed[1:3]) for name in ("leek", "brown rice")
    )


@pytest.mark.usefixtures("kitchen")
def test_a_text_is_json_of_a_schema_or_said_to_be_cut(capsys):
    pytest.importorskip("llguidance")
    whole = {"enum": [["soup"], ["cake"]]}
    Path("whole.json").write_text(json.dumps(whole))
    words = ["generate", "run", "--prompt", "soup", "--n", "2", "--json", "--schema"]
    assert main([*words, "whole.json"]) == 0
    out, err = capsys.readouterr()
    for record in map(json.loads, out.splitlines()):
        assert json.loads(record["text"]) in whole["enum"]
        assert record["metrics"] == {}  # the scores read no JSON
    assert err == ""
    assert main([*words, "recipe", "--max-new-tokens", "9"]) == 0
    out, err = capsys.readouterr()
    assert all(
        json.loads(line)["text"].startswith('{"@con') for line in out.splitlines()
    )
    assert (
        "2 of 2 texts reached the maximum length before their JSON was complete" in err
    )


@pytest.mark.usefixtures("kitchen")
def test_preparing_names_its_parts_in_a_pipe(capsys):
    assert main(["prepare", "run.yaml", "data.store=store2"]) == 0
    assert capsys.readouterr().err.splitlines() == [
        "training a tokenizer of 512 entries",
        "finding duplicates, splitting and writing the report",
    ]


def test_a_file_that_the_system_refuses_is_a_paragraph(capsys, monkeypatch):
    def refused(*_words, **_options):
        raise PermissionError(13, "Permission denied", "/root/of/another")

    monkeypatch.setattr("toque.cli.app.app", refused)
    assert main(["presets"]) == 1
    said = capsys.readouterr().err
    assert said.startswith(
        "toque: /root/of/another: Permission denied. Check that the path exists"
    )
    assert said.count("\n") == 1
    with pytest.raises(PermissionError):
        main(["presets", "--traceback"])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_no_temporary_folder(number, tmp_path, monkeypatch, request):
    before = signal.signal(number, signal.SIG_DFL)  # nohup ignores SIGHUP
    request.addfinalizer(lambda: signal.signal(number, before))

    def export(_model: str, to: str, **_: object) -> None:
        with atomic_folder(Path(to)):
            os.kill(os.getpid(), number)

    monkeypatch.setattr("toque.workflows.export.export", export)
    with pytest.raises(SystemExit) as caught:
        main(["export", "run", "--to", str(tmp_path / "model")])
    assert caught.value.code == 128 + number
    assert not [*tmp_path.iterdir()]
    assert signal.getsignal(number) is signal.SIG_DFL
