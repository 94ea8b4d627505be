"""Messages of encoded prompts: what a chat template writes is read back."""

from pathlib import Path

import pytest

from toque.data.tokenizer.chat import TEMPLATES, ChatTemplate
from toque.data.tokenizer.chat_messages import MessageReader
from toque.data.tokenizer.codec import Codec, load_codec

SYSTEM_IN_QUESTION = (
    "{% set system = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% for m in messages if m.role != 'system' %}{% if m.role == 'user' %}[INST] "
    "{% if system and loop.first %}<<SYS>>{{ system }}<</SYS>> {% endif %}{{ m.content }} [/INST] "
    "{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}"
    "{{ m.role }}: {{ m.content | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
ALL = {**TEMPLATES, "system in question": SYSTEM_IN_QUESTION, "no system": NO_SYSTEM}
QUESTIONS = ["Is rice\nrinsed?", "Why?", "- 2 eggs\n\n1. Stir."]


def talk(n_questions: int, *, system: str = "") -> list[dict[str, str]]:
    turns = [{"role": "system", "content": system}] if system else []
    for question in QUESTIONS[:n_questions]:
        turns.append({"role": "user", "content": question})
        turns.append({"role": "assistant", "content": f"About {question}, yes."})
    return turns[:-1]


@pytest.fixture(scope="module")
def codec(tokenizers_at: dict[str, Path]) -> Codec:
    return load_codec(tokenizers_at["decoder"])


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("n_questions", [1, 2, 3])
def test_messages_of_a_prompt(codec, name, n_questions):
    template = ChatTemplate(ALL[name], codec)
    reader = MessageReader(template)
    systems = [""] if name == "no system" else ["", "You cook.\nWell."]
    for system in systems:
        turns = talk(n_questions, system=system)
        assert reader.read(template.ids(turns).result()) == turns


def test_prompts_that_the_template_does_not_write(codec):
    template = ChatTemplate(TEMPLATES["chatml"], codec)
    reader = MessageReader(template)
    ids = template.ids(talk(2)).result()
    assert reader.read(ids[1:]) is None
    assert reader.read(ids[:-1]) is None
    assert reader.read([]) is None
    trimming = MessageReader(ChatTemplate(NO_SYSTEM, codec))
    assert trimming.read(codec.encode("user: rice \nassistant: ")) is None


def test_template_without_marks_reads_nothing(codec):
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", codec)
    assert MessageReader(template).read(template.ids(talk(1)).result()) is None
