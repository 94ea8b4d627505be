"""Chat templates: fields of messages that they write, and answers that are only read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from toque.data.tokenizer.chat import ChatTemplate
from toque.data.tokenizer.codec import Codec, load_codec
from toque.errors import DataError
from toque.sources.records import Turn

TURN = "{% for m in messages %}{{ m.role }}:"
ANSWER = "{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}\n{% endfor %}"
ASKS = "{% if add_generation_prompt %}assistant:{% endif %}"
PLAIN = TURN + ANSWER + ASKS
THINKS = (
    "{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content "
    "}}</think>{% endif %}"
)
REASONS = TURN + THINKS + ANSWER + ASKS
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}assistant:{% generation %}{{ m.content }}"
    "{{ eos_token }}{% endgeneration %}{% else %}{{ m.role }}:{{ m.content }}{% endif %}\n"
    "{% endfor %}" + ASKS
)
THOUGHT = {"reasoning_content": "The rice is short and round."}


@pytest.fixture(scope="module")
def codec(tokenizers_at: dict[str, Path]) -> Codec:
    return load_codec(tokenizers_at["decoder"])


def talk(*answers: Turn) -> list[Turn]:
    return [turn for answer in answers for turn in (Turn("user", "Rice?"), answer)]


def learnt(
    codec: Codec, template: str, turns: Sequence[Turn], *, last: bool = False
) -> list[str]:
    """Texts of the spans that are learnt."""
    found = ChatTemplate(template, codec).conversation(turns, last=last)
    assert not isinstance(found, str)
    return [codec.decode(found.ids[a:b].tolist()) for a, b in found.answers]


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_an_answer_that_is_only_read_is_in_no_span(codec: Codec, template: str) -> None:
    turns = talk(
        Turn("assistant", "Burn it.", learnt=False), Turn("assistant", "Boil it.")
    )
    assert learnt(codec, template, turns) == ["Boil it."]
    assert learnt(codec, template, talk(*turns[1::2], Turn("assistant", "Eat."))) == [
        "Boil it.",
        "Eat.",
    ]
    assert learnt(codec, template, turns, last=True) == ["Boil it."]


def test_reasoning_is_learnt_if_the_template_writes_it(codec: Codec) -> None:
    turns = talk(Turn("assistant", "Arborio.", fields=THOUGHT))
    text = "<think>The rice is short and round.</think>Arborio."
    assert learnt(codec, REASONS, turns) == [text]
    other = talk(
        Turn(
            "assistant", "Arborio.", fields={"reasoning": THOUGHT["reasoning_content"]}
        )
    )
    assert learnt(codec, REASONS, other) == [text]


@pytest.mark.parametrize(
    ("template", "fields", "names"),
    [
        (PLAIN, THOUGHT, ["reasoning_content", "reasoning_content"]),
        (PLAIN, {"name": "Ann", "prefix": True, "note": ""}, ["name", "prefix"] * 2),
        (REASONS, THOUGHT, ["reasoning_content"]),  # left out of history
        (
            REASONS,
            THOUGHT | {"reasoning": "Another."},
            ["reasoning", "reasoning_content"],
        ),
        (REASONS, THOUGHT | {"reasoning": THOUGHT["reasoning_content"]}, None),
        (PLAIN.replace("{{ m.content }}", "{{ m | tojson }}"), {"name": "Ann"}, []),
    ],
)
def test_fields_that_the_template_does_not_write_are_named_by_message(
    codec: Codec, template: str, fields: dict[str, Any], names: list[str] | None
) -> None:
    answer = Turn("assistant", "Arborio.", fields=fields)
    found = ChatTemplate(template, codec).conversation(talk(answer, answer), last=True)
    assert not isinstance(found, str)
    if names is None:  # two names of one text, which the last message writes
        names = ["reasoning", "reasoning_content"]
    if template is REASONS and fields.get("reasoning") == "Another.":
        names = ["reasoning", "reasoning", "reasoning_content"]
    assert sorted(found.unwritten) == sorted(names)


def test_a_prompt_with_a_field_that_is_not_written_is_refused(codec: Codec) -> None:
    asked = [{"role": "user", "content": "Rice?"}]
    answer = {"role": "assistant", "content": "Arborio."}
    calls = {"tool_calls": [{"function": {"name": "weigh", "arguments": "{}"}}]}
    for template, fields in (
        (PLAIN, calls),
        (PLAIN, THOUGHT),
        (REASONS, {"name": "Ann"}),
    ):
        with pytest.raises(
            DataError, match=f"does not render the field '{next(iter(fields))}'"
        ):
            ChatTemplate(template, codec).ids(
                [*asked, {**answer, **fields}, *asked]
            ).result()
    talks = [[*asked, {**answer, **fields}, *asked] for fields in ({}, THOUGHT)]
    plain, reasoned = (ChatTemplate(REASONS, codec).ids(one).result() for one in talks)
    assert plain == reasoned, "the template leaves reasoning out of history"


def test_a_template_that_chooses_at_random_always_chooses_the_same(
    codec: Codec,
) -> None:
    template = "{{ range(99999) | random }} {{ lipsum(n=1) }}" + PLAIN
    texts = {tuple(ChatTemplate(template, codec).ids([]).result()) for _ in range(2)}
    assert len(texts) == 1
