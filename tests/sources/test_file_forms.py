"""Every form of rows that other trainers read: no field's text is lost in silence."""

import pytest

from fixtures.row_forms import FORMS, read_form
from workflows.test_chat_bases import chat_base

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


@pytest.mark.parametrize("name", USED)
def test_every_field_is_read_or_named(name, tmp_path):
    found = read_form(name, 12, tmp_path)
    assert "refused" not in found, found
    assert (found["read"], found["lost"]) == (12, [])
    read = {field for field, place in found["places"].items() if place == "12 of 12"}
    assert read == USED[name]


def test_preferences_are_read_for_a_model_that_can_write(tokenizers_at, tmp_path):
    base = chat_base(
        tmp_path / "base", tokenizers_at["decoder"], end="<|endoftext|>", template=None
    )
    found = read_form("preferences", 12, tmp_path, start_from=base)
    assert "refused" not in found, found
    assert found["lost"] == []
    assert {*found["places"].values()} == {"12 of 12"}
    assert {*FORMS} == {*USED, "preferences"}
