"""Models that others made: prompts begin as their tokenizer begins them, and simply go on."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer

import toque
from tiny import model_of, shape_of
from toque.serving.protocol import ChatRequest
from toque.workflows.open_served import open_models

openai = pytest.importorskip("openai")
END = "<|endoftext|>"
TYPED = "Lentil soup: rice, salt"
TURNS = [
    {"role": "system", "content": "You are a cook."},
    {"role": "user", "content": "rice"},
    {"role": "assistant", "content": "Boil it."},
    {"role": "user", "content": "and butter?"},
]
CHAT = (
    "{% for turn in messages %}{{ turn.role }}<|endoftext|>{{ turn.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant{{ eos_token }}{% endif %}"
)


def write_model(folder: Path, source: Path, *, begins: bool, **config: str) -> Path:
    """A plain folder of transformers, with nothing of Toque's; `begins`: with a begin token."""
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    if begins:
        tokenizer.post_processor = TemplateProcessing(
            single=f"{END} $A", special_tokens=[(END, tokenizer.token_to_id(END))]
        )
    family = "llama" if begins else "gpt2"
    shape = shape_of(family, positions=128, initializer_range=0.3)
    model_of(family, vocab=tokenizer.get_vocab_size(), shape=shape, seed=3).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    named = dict.fromkeys(("bos_token", "eos_token", "pad_token"), END)
    kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind | named | config))
    return folder


def plainly(folder: Path, ids: list[int]) -> str:
    """What transformers writes after these ids."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    written = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        max_new_tokens=12,
        do_sample=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    text: str = tokenizer.decode(
        written[0, len(ids) :], skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    return text


@pytest.mark.parametrize("begins", [False, True])
def test_a_prompt_goes_on_as_in_transformers(begins, tmp_path, tokenizers_at, serving):
    folder = write_model(tmp_path / "other", tokenizers_at["decoder"], begins=begins)
    ids = AutoTokenizer.from_pretrained(folder)(TYPED)["input_ids"]
    expected = plainly(folder, ids)
    (written,) = toque.generate(folder, TYPED, temperature=0, max_new_tokens=12)
    assert (written.prompt, written.text) == (TYPED, expected)
    models = open_models({"other": folder})
    assert models["other"].prompt_ids(TYPED) == ids
    with (
        serving(models) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client,
    ):
        settings = {"model": "other", "temperature": 0, "max_tokens": 12}
        found = client.completions.create(prompt=TYPED, **settings)
        assert found.choices[0].text == expected
        # It was not trained to converse: what the user says last goes on, too.
        said = client.chat.completions.create(messages=[*TURNS[:3], user(TYPED)], **settings)
        assert said.choices[0].message.content == expected


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@pytest.mark.parametrize("file", ["tokenizer_config.json", "chat_template.jinja"])
def test_a_conversation_is_read_whole_by_the_models_template(
    file, tmp_path, tokenizers_at, serving
):
    named = {"chat_template": CHAT} if file == "tokenizer_config.json" else {}
    folder = write_model(tmp_path / "other", tokenizers_at["decoder"], begins=True, **named)
    if not named:
        (folder / file).write_text(CHAT)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(TURNS, add_generation_prompt=True)["input_ids"]
    assert ids.count(tokenizer.eos_token_id) == 5, "the tokens that the template writes are tokens"
    models = open_models({"other": folder})
    asked = ChatRequest(model="other", messages=TURNS)
    assert asyncio.run(asked.prompt_ids(models["other"])) == [ids]
    with (
        serving(models) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client,
    ):
        found = client.chat.completions.create(
            model="other", messages=TURNS, temperature=0, max_tokens=12
        )
    assert found.choices[0].message.content == plainly(folder, ids)
    assert found.usage.prompt_tokens == len(ids)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ ().__class__.__base__.__subclasses__() }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% for", "template"),
        ("{{ 1 / 0 }}", "division"),
    ],
)
def test_a_template_that_refuses_or_reaches_out_is_a_bad_request(
    template, said, tmp_path, tokenizers_at, serving
):
    source = tokenizers_at["decoder"]
    folder = write_model(tmp_path / "other", source, begins=True, chat_template=template)
    with (
        serving(open_models({"other": folder})) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client,
    ):
        with pytest.raises(openai.BadRequestError, match=said) as error:
            client.chat.completions.create(model="other", messages=TURNS)
        assert error.value.param == "messages"
        client.completions.create(model="other", prompt=TYPED, max_tokens=2)
