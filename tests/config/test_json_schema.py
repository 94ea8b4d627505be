"""The JSON schema of the configuration, as an editor uses it."""

from __future__ import annotations

import json

import jsonschema
import pytest

from toque.cli import main
from toque.config import presets
from toque.config.json_schema import schema_text
from toque.config.resolve import PRESETS
from toque.config.yaml_reader import read_yaml


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    schema = json.loads(schema_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.parametrize("name", presets())
def test_every_preset_is_valid(validator, name):
    text = (PRESETS / f"{name}.yaml").read_text(encoding="utf-8")
    assert [e.message for e in validator.iter_errors(read_yaml(text, name).value)] == []


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ({"optim": {"peak_lrr": 1e-3}}, "'peak_lrr' was unexpected"),
        ({"trainn": {}}, "'trainn' was unexpected"),
        ({"adapter": {"rank": 8}}, "is not valid"),
        (
            {"data": {"sources": [{"path": "a", "kolumns": {}}]}},
            "'kolumns' was unexpected",
        ),
        ({"train": {"precision": "bf32"}}, "'bf32' is not one of"),
    ],
)
def test_what_is_no_setting_is_refused(validator, written, words):
    assert any(words in error.message for error in validator.iter_errors(written))


def test_settings_have_their_help_and_durations_their_form(validator):
    train = validator.schema["$defs"]["TrainConfig"]["properties"]
    assert train["batch"]["default"] == "16384 tokens"
    assert "64 examples" in train["batch"]["description"]


def test_the_command_prints_it_and_init_names_it(capsys, tmp_path, monkeypatch):
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(schema_text())
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some.txt").write_text("A text of some words. " * 40)
    assert main(["init", "some.txt"]) == 0
    first, *_ = (tmp_path / "my.yaml").read_text().splitlines()
    named = first.partition("$schema=")[2]
    assert (tmp_path / named).read_text() == schema_text()
