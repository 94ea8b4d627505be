"""Models that others made: prompts begin as their tokenizer begins them, and simply go on."""

import asyncio
import json
import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer

import toque
from serving.alone import client_of, sent
from tiny import model_of, shape_of
from toque.serving.completions import ChatRequest
from toque.workflows.inference.open_served import open_models

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


def write_model(folder: Path, source: Path, *, begins: bool) -> Path:
    """A plain folder of transformers, with nothing of Toque's; `begins`: with a begin token."""
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    if begins:
        tokenizer.post_processor = TemplateProcessing(
            single=f"{END} $A", special_tokens=[(END, tokenizer.token_to_id(END))]
        )
    family = "llama" if begins else "gpt2"
    shape = shape_of(family, positions=128, initializer_range=0.3)
    model_of(
        family, vocab=tokenizer.get_vocab_size(), shape=shape, seed=3
    ).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    named = dict.fromkeys(("bos_token", "eos_token", "pad_token"), END)
    kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind | named))
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
        written[0, len(ids) :],
        skip_special_tokens=True,
        clean_up_tokenization_spaces=False,
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
    with serving(models) as address, client_of(address) as client:
        settings = {"model": "other", "temperature": 0, "max_tokens": 12}
        found = client.completions.create(prompt=TYPED, **settings)
        assert found.choices[0].text == expected
        # It was not trained to converse: what the user says last goes on, too.
        said = client.chat.completions.create(
            messages=[*TURNS[:3], user(TYPED)], **settings
        )
        assert said.choices[0].message.content == expected


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_the_page_talks_to_a_model_with_a_template_and_continues_texts_with_others(
    tmp_path, tokenizers_at, serving
):
    plain = write_model(tmp_path / "plain", tokenizers_at["decoder"], begins=True)
    talks = shutil.copytree(plain, tmp_path / "talks")
    (talks / "chat_template.jinja").write_text(CHAT)
    with serving(open_models({"plain": plain, "talks": talks})) as address:
        found = json.loads(sent(address, "GET", "/api/models").body)["models"]
    assert [model["form"] for model in found] == ["documents", "conversations"]


REFUSED = {
    "refuses": (
        "{{ raise_exception('roles must alternate.') }}",
        r"roles must alternate\.(?!\.)",
    ),
    "reaches-out": ("{{ ().__class__.__base__.__subclasses__() }}", "unsafe"),
    "changes": ("{{ messages.append(1) }}", "unsafe"),
    "unfinished": ("{% for", "template"),
    "divides": ("{{ 1 / 0 }}", "division"),
}


@pytest.fixture(scope="module")
def conversing(tokenizers_at, serving, tmp_path_factory):
    """A client of one model under several templates, and the folder of each."""
    whole = write_model(
        tmp_path_factory.mktemp("foreign") / "config",
        tokenizers_at["decoder"],
        begins=True,
    )
    templates = {"config": CHAT, "jinja": CHAT} | {
        name: row[0] for name, row in REFUSED.items()
    }
    folders = {name: whole.with_name(name) for name in templates}
    for name, template in templates.items():
        if name != "config":
            shutil.copytree(whole, folders[name])
        if name == "jinja":
            (folders[name] / "chat_template.jinja").write_text(template)
    for name, template in templates.items():
        if name != "jinja":
            file = folders[name] / "tokenizer_config.json"
            file.write_text(
                json.dumps(json.loads(file.read_text()) | {"chat_template": template})
            )
    models = open_models(folders)
    with serving(models) as address, client_of(address) as client:
        yield client, folders, models


@pytest.mark.parametrize("name", ["config", "jinja"])
def test_a_conversation_is_read_whole_by_the_models_template(name, conversing):
    client, folders, models = conversing
    tokenizer = AutoTokenizer.from_pretrained(folders[name])
    ids = tokenizer.apply_chat_template(TURNS, add_generation_prompt=True)["input_ids"]
    assert ids.count(tokenizer.eos_token_id) == 5, (
        "the tokens that the template writes are tokens"
    )
    asked = ChatRequest(model=name, messages=TURNS)
    assert asyncio.run(asked.prompt_ids(models[name])) == [ids]
    developers = [
        TURNS[0] | {"role": "developer"},
        *TURNS[1:],
    ]  # OpenAI's name, as in training
    asked = ChatRequest(model=name, messages=developers)
    assert asyncio.run(asked.prompt_ids(models[name])) == [ids]
    settings = {"model": name, "temperature": 0, "max_tokens": 12}
    found = client.chat.completions.create(messages=TURNS, **settings)
    assert found.choices[0].message.content == plainly(folders[name], ids)
    assert found.usage.prompt_tokens == len(ids)


@pytest.mark.parametrize("name", REFUSED)
def test_a_template_that_refuses_or_reaches_out_is_a_bad_request(name, conversing):
    client, _, _ = conversing
    with pytest.raises(openai.BadRequestError, match=REFUSED[name][1]) as error:
        client.chat.completions.create(model=name, messages=TURNS)
    assert error.value.param == "messages"
    client.completions.create(model=name, prompt=TYPED, max_tokens=2)
