"""Every form of rows that other trainers read: no field's text is lost in silence."""

import runpy
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
USED = {
    "Alpaca with input": {"instruction", "input", "output"},
    "Alpaca without input": {"instruction", "output"},
    "Dolly": {"instruction", "context", "response"},
    "SQuAD": {"context", "question", "answers"},
    "messages": {"system", "user", "answer", "user2", "answer2"},
    "ShareGPT": {"system", "user", "answer", "user2", "answer2"},
    "prompt and completion as messages": {"system", "user", "answer"},
    "CSV": {"question", "answer"},
    "saved Dataset": {"system", "user", "answer", "user2", "answer2"},
    "DatasetDict": {"instruction", "input", "output"},
    "list": {"system", "user", "answer", "user2", "answer2"},
    "DataFrame": {"instruction", "context", "response"},
}


@pytest.fixture
def forms(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(BENCH), *sys.path])
    return runpy.run_path(str(BENCH / "quality" / "file_forms.py"))


@pytest.mark.parametrize("name", USED)
def test_every_field_is_read_or_named(forms, name, tmp_path):
    found = forms["read_form"](name, 12, tmp_path)
    assert "refused" not in found, found
    assert (found["read"], found["lost"]) == (12, [])
    read = {field for field, place in found["places"].items() if place == "12 of 12"}
    assert read == USED[name]


def test_preferences_are_refused_in_words(forms, tmp_path):
    found = forms["read_form"]("preferences", 12, tmp_path)
    assert "chosen and rejected" in found["refused"]
    assert {*forms["FORMS"]} == {*USED, "preferences"}
