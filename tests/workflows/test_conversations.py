"""Conversations from a file to a model in use: the same ids everywhere, loss on answers alone."""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

import toque
from fixtures.kitchens import TINY
from toque.batch import IGNORE
from toque.data.loader.epoch_plan import Varied
from toque.data.prepare.conversation_rows import CUT_TURNS, DATED, LEARNT, TOKENS
from toque.data.prepare.store_plan import LIMITS
from toque.data.store.token_store import TokenStore
from toque.data.tokenizer.chat import TEMPLATES, fix_date, prompt_ids
from toque.errors import ConfigError, DataError
from toque.serving.completions import ChatRequest, CompletionRequest
from toque.serving.request_body import parse_request
from toque.serving.request_errors import RequestError
from toque.sources.conversations import NOT_LEARNT, UNWRITTEN
from toque.units import Cursor
from toque.workflows.build import build_language_model, build_stream
from toque.workflows.diagnosis.show_batch import show_batch
from toque.workflows.inference.open_served import open_models
from toque.workflows.trained_model.model_codec import find_chat_template
from workflows.test_chat_bases import TEMPLATE, chat_base

FOODS = ("rice", "beans", "leeks", "eggs", "pears", "oats", "figs", "kale")
UNENDED = "{% for turn in messages %}{{ turn.role }}: {{ turn.content }}\n{% endfor %}"
FORGETS = (  # what was answered before, as models that reason do
    "{% for turn in messages %}{% if turn.role != 'assistant' or loop.last %}<|im_start|>"
    "{{ turn.role }}\n{{ turn.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def conversation(n: int, *, answers: int = 2) -> list[dict[str, str]]:
    """A conversation of so many answers; every third has a system text."""
    turns = [{"role": "system", "content": "You cook."}] if n % 3 == 0 else []
    for k in range(answers):
        food = FOODS[(n + k) % len(FOODS)]
        turns.append({"role": "user", "content": f"What of {food}, {n}?"})
        turns.append(
            {
                "role": "assistant",
                "content": f"Stew {food} for {n + k} minutes.\nThen eat.",
            }
        )
    return turns


@pytest.fixture(scope="module")
def base(
    tokenizers_at: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("chat") / "base"
    return chat_base(folder, tokenizers_at["decoder"], end="<|endoftext|>")


def configured(
    base: Path, folder: Path, *, n: int = 40, **data: Any
) -> toque.RunConfig:
    folder.mkdir(exist_ok=True)
    file = folder / "chats.jsonl"
    lines = [
        json.dumps({"messages": conversation(i, answers=1 + i % 3)}) for i in range(n)
    ]
    file.write_text("\n".join(lines) + "\n")
    given = {"sources": [{"path": str(file)}], "store": str(folder / "store")}
    limits = {"max_prompt_tokens": 256, "max_target_tokens": 256}
    return toque.configure(
        TINY | {"model": {"family": "auto", "start_from": str(base)}},
        run_dir=str(folder / "run"),
        data=given | limits | data,
        train={"stop_after": "3 steps", "batch": "8 examples"},
    )


def ids_of(store: TokenStore, row: int) -> list[int]:
    return [*store.prompt(row).tolist(), *store.target(row).tolist()]


def test_rows_are_what_transformers_writes_and_answers_alone_are_learnt(base, tmp_path):
    config = configured(base, tmp_path)
    made = toque.prepare(config)
    store, tokenizer = made.store, AutoTokenizer.from_pretrained(base)
    line_break = tokenizer.encode("\n", add_special_tokens=False)
    written = {}
    for n in range(40):
        turns = conversation(n, answers=1 + n % 3)
        written[tuple(tokenizer.apply_chat_template(turns)["input_ids"])] = turns
    learnt = 0
    for row in range(store.n_rows):
        # The template's last line break, behind the end, is nothing that a model should write.
        turns = written[(*ids_of(store, row), *line_break)]
        answers = [turn["content"] for turn in turns if turn["role"] == "assistant"]
        assert tokenizer.decode(store.learnt_ids(row)) == "".join(
            f"{a}<|im_end|>" for a in answers
        )
        assert store.learnt_lengths[row] == len(store.learnt_ids(row))
        assert (
            tokenizer.decode(store.prompt_and_answer(row)[1])
            == f"{answers[-1]}<|im_end|>"
        )
        learnt += len(store.learnt_ids(row))
    assert store.n_rows == 40
    assert (made.report.notes[LEARNT], made.report.notes[TOKENS]) == (
        learnt, sum(len(ids_of(store, row)) for row in range(40)),
    )  # fmt: skip
    stream = build_stream(config, store, build_language_model(config, store))
    step = stream.at(Cursor())
    labels = step.batch.labels[step.batch.labels != IGNORE]
    assert step.n_targets == len(labels) == step.batch.n_targets
    # Augmentation leaves conversations as they are; what is only read of them stays unlearnt.
    plain = Varied(lambda row, _: (store.prompt(row), store.target(row)), encoder=False)
    varied = replace(stream, varied=plain).at(Cursor())
    assert varied.n_targets == varied.batch.n_targets == step.n_targets
    rows = [row for packed in step.batch.example_ids for row in packed]
    expected = torch.from_numpy(
        np.concatenate([store.learnt_ids(row) for row in rows]).astype(np.int64)
    )
    assert torch.equal(labels, expected)
    shown = str(show_batch(config, max_examples=8))
    assert "\n[<|im_start|>user\nWhat of " in shown
    # The same update by transformers' own forward, each conversation alone.
    assert toque.check(config).passed


DATES = TEMPLATE.replace("{%", "{{ strftime_now('%d %b %Y, %H:%M:%S') }}\n{%", 1)


@pytest.mark.parametrize("day", ["2024-07-26", "2026-01-31"])
def test_a_template_writes_one_day_in_the_store_and_whenever_the_model_is_asked(
    day, base, tmp_path
):
    (tmp_path / "dates.jinja").write_text(DATES)
    settings = {"chat_template": str(tmp_path / "dates.jinja"), "chat_date": day}
    made = toque.prepare(configured(base, tmp_path, n=8, **settings))
    assert made.report.notes[DATED.format(day)] == 8
    assert made.store.manifest.settings["chat_date"] == day
    codec = made.store.codec()
    written = f"{dt.date.fromisoformat(day):%d %b %Y}, 00:00:00\n"
    texts = [codec.decode(made.store.prompt(row).tolist()) for row in range(8)]
    assert all(text.startswith(written) for text in texts)
    # Plain transformers, which reads the clock, writes the same day by the store's template.
    tokenizer = AutoTokenizer.from_pretrained(base)
    asked = [{"role": "user", "content": "Rice?"}]
    text = tokenizer.apply_chat_template(
        asked, chat_template=codec.settings["chat_template"], tokenize=False
    )
    assert text.startswith(written)
    assert (
        fix_date(codec.settings["chat_template"], day)
        == codec.settings["chat_template"]
    )
    assert fix_date(TEMPLATE, day) == TEMPLATE
    ids = prompt_ids(codec, "Rice?", "decoder", "conversations")
    assert codec.decode(ids).startswith(written)


def test_a_fixed_date_keeps_two_percent_signs_as_strftime_does(base):
    tokenizer = AutoTokenizer.from_pretrained(base)
    form = "%d, %%d, %%%d, %%"
    template = fix_date(f"\n{{{{ strftime_now('{form}') }}}}", "2024-07-26")
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Rice?"}], chat_template=template, tokenize=False
    )
    assert text == f"\n{dt.date(2024, 7, 26):{form}}"


def test_marked_answers_are_not_learnt_and_unwritten_fields_are_counted(base, tmp_path):
    config = configured(base, tmp_path)
    ask, burn = (
        {"role": "user", "content": "Rice?"},
        {"role": "assistant", "content": "Burn it."},
    )
    first = [{"role": "user", "content": f"Rice, {k}?"} for k in range(8)]
    boil = {"role": "assistant", "content": "Boil it.", "name": "Ann"}
    lines = [
        json.dumps(
            {
                "messages": [
                    first[k],
                    {**burn, "weight": 0},
                    ask,
                    boil,
                    ask,
                    {**boil, "n": k},
                ]
            }
        )
        for k in range(8)
    ]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    made = toque.prepare(config)
    tokenizer = AutoTokenizer.from_pretrained(base)
    for row in range(8):
        assert tokenizer.decode(made.store.learnt_ids(row)) == "Boil it.<|im_end|>" * 2
        assert "Burn it." in tokenizer.decode(ids_of(made.store, row))
    notes = made.report.notes
    assert notes[NOT_LEARNT.format("'weight'")] == 8
    assert notes[UNWRITTEN.format("'name'")] == 16
    assert notes[UNWRITTEN.format("'n'")] == 8


def test_a_served_chat_model_refuses_fields_that_it_would_not_read(base):
    served = open_models({"base": base})["base"]
    ask, answer = (
        {"role": "user", "content": "Rice?"},
        {"role": "assistant", "content": "Yes."},
    )
    empty = {
        "refusal": None,
        "tool_calls": [],
        "annotations": [],
        "audio": None,
        "name": "",
    }

    def ids(**fields: Any) -> list[list[int]]:
        body = json.dumps(
            {"model": "base", "messages": [ask, {**answer, **fields}, ask]}
        )
        return asyncio.run(parse_request(ChatRequest, body.encode()).prompt_ids(served))

    plain = ids()
    assert ids(**empty) == plain
    calls = [
        {
            "id": "1",
            "type": "function",
            "function": {"name": "weigh", "arguments": "{}"},
        }
    ]
    single = replace(served, chat=None)
    for name, value in (
        ("tool_calls", calls),
        ("reasoning_content", "Hm."),
        ("prefix", True),
    ):
        with pytest.raises(RequestError, match=f"does not render the field '{name}'"):
            ids(**{name: value})
    served = single
    with pytest.raises(
        RequestError, match="does not support 'tool_calls' in message 2"
    ):
        ids(tool_calls=calls)


def test_a_model_is_asked_and_leaves_in_the_form_it_was_trained_in(base, tmp_path):
    config = configured(base, tmp_path)
    run = toque.train(config)
    asked = [{"role": "user", "content": "What of rice?"}]
    done = toque.export(run, tmp_path / "out")
    before, after = (
        AutoTokenizer.from_pretrained(folder) for folder in (base, done.folder)
    )
    assert after.chat_template == TEMPLATE
    store = TokenStore.open(tmp_path / "store")
    for n in range(0, 40, 2):
        turns = conversation(n, answers=1 + n % 3)
        ids = after.apply_chat_template(turns)["input_ids"]
        assert ids == before.apply_chat_template(turns)["input_ids"]
        assert any(
            ids_of(store, row) == ids[: len(ids_of(store, row))] for row in range(40)
        )
    [written] = toque.generate(
        run, asked[0]["content"], temperature=0.0, max_new_tokens=8
    )
    model = toque.workflows.inference.open_model.open_model(run.folder)
    prompt = before.apply_chat_template(asked, add_generation_prompt=True)["input_ids"]
    assert model.prompt_ids(asked[0]["content"]) == prompt
    theirs = model.model.generate(
        torch.tensor([prompt]), max_new_tokens=8, do_sample=False,
        eos_token_id=before.convert_tokens_to_ids("<|im_end|>"), pad_token_id=0,
    )  # fmt: skip
    assert written.text == model.codec.decode(theirs[0, len(prompt) :].tolist())
    # A raw prompt goes to the model without the template, as plain transformers reads a text.
    plain = after(asked[0]["content"])["input_ids"]
    assert model.codec.decode(plain) == asked[0]["content"]
    [written] = toque.generate(
        run, asked[0]["content"], temperature=0.0, max_new_tokens=8, raw=True
    )
    theirs = model.model.generate(
        torch.tensor([plain]), max_new_tokens=8, do_sample=False,
        eos_token_id=before.convert_tokens_to_ids("<|im_end|>"), pad_token_id=0,
    )  # fmt: skip
    assert written.text == model.codec.decode(theirs[0, len(plain) :].tolist())
    served = open_models({"run": run.folder})["run"]
    for request, ids in (
        (CompletionRequest(model="run", prompt=asked[0]["content"]), plain),
        (ChatRequest(model="run", messages=asked), prompt),
    ):
        assert asyncio.run(request.prompt_ids(served)) == [ids]
    shares = [
        toque.classify(run, asked[0]["content"], choices=["a", "b"], raw=r)
        for r in (0, 1)
    ]
    assert shares[0] != shares[1]
    file = toque.export(run, tmp_path / "soup", form="gguf")
    fields = gguf.GGUFReader(file.folder / file.file).fields
    assert fields["tokenizer.chat_template"].contents() == TEMPLATE
    assert "toque chat" in (run.folder / "model" / "README.md").read_text()


def test_a_template_ends_turns_with_a_token_of_its_own(base, tmp_path):
    """As Gemma's does, whose tokenizer ends texts with another."""
    work = shutil.copytree(base, tmp_path / "base")
    told = json.loads((work / "tokenizer_config.json").read_text()) | {
        "eos_token": "<tool_call>"
    }
    (work / "tokenizer_config.json").write_text(json.dumps(told))
    config = configured(work, tmp_path)
    run = toque.train(config)
    store, tokenizer = (
        TokenStore.open(tmp_path / "store"),
        AutoTokenizer.from_pretrained(work),
    )
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert store.codec().eos_id == end
    assert all(store.target(row)[-1] == end for row in range(store.n_rows))
    done = toque.export(run, tmp_path / "out")
    after = AutoTokenizer.from_pretrained(done.folder)
    turns = conversation(3)
    ids = [one.apply_chat_template(turns)["input_ids"] for one in (after, tokenizer)]
    assert ids[0] == ids[1]
    assert after.eos_token_id == end
    ends = json.loads((done.folder / "generation_config.json").read_text())[
        "eos_token_id"
    ]
    assert end in (ends if isinstance(ends, list) else [ends])
    # The base itself is talked to in the same form.
    opened = toque.workflows.inference.open_model.open_model(work)
    assert find_chat_template(opened.codec, opened.provenance) is not None
    assert opened.codec.eos_id == end


def test_the_last_answer_alone_can_be_learnt(base, tmp_path):
    store = toque.prepare(configured(base, tmp_path, loss_on="last_answer")).store
    tokenizer = AutoTokenizer.from_pretrained(base)
    assert not any(store.spans(row) for row in range(store.n_rows))
    texts = {tokenizer.decode(store.target(row)) for row in range(store.n_rows)}
    answers = (conversation(n, answers=1 + n % 3)[-1]["content"] for n in range(40))
    assert texts == {f"{answer}<|im_end|>" for answer in answers}


@pytest.mark.parametrize("name", TEMPLATES)
def test_named_templates_keep_what_a_conversation_says(base, tmp_path, name):
    store = toque.prepare(configured(base, tmp_path, chat_template=name)).store
    tokenizer = AutoTokenizer.from_pretrained(store.path / "tokenizer")
    assert tokenizer.chat_template == TEMPLATES[name]
    texts = [tokenizer.decode(ids_of(store, row)) for row in range(store.n_rows)]
    for n in range(40):
        said = [turn["content"] for turn in conversation(n, answers=1 + n % 3)]
        assert any(all(text in whole for text in said) for whole in texts)


@pytest.mark.parametrize(
    ("template", "error", "words"),
    [
        (UNENDED, DataError, "does not end an answer"),
        ("{{ raise_exception('no') }}", DataError, "the chat template refuses it: no"),
        (FORGETS, DataError, r"data.loss_on=last_answer to train only on the last"),
    ],
)
def test_a_template_that_cannot_be_learnt_is_refused(
    base, tmp_path, template, error, words
):
    file = tmp_path / "own.jinja"
    file.write_text(template)
    with pytest.raises(error, match=words):
        toque.prepare(configured(base, tmp_path, chat_template=str(file)))
    if template == FORGETS:
        forgets = configured(
            base, tmp_path, chat_template=str(file), loss_on="last_answer"
        )
        assert toque.prepare(forgets, replace=True).store.n_rows == 40


def test_settings_of_conversations_are_refused_where_there_are_none(base, tmp_path):
    config = configured(base, tmp_path, chat_template="plain")
    (tmp_path / "chats.jsonl").write_text('{"prompt": "a", "target": "b"}\n' * 2)
    with pytest.raises(
        ConfigError, match=r"no source in data.sources has conversations"
    ):
        toque.prepare(config)
    with pytest.raises(ConfigError, match=r"must be .*plain, chatml.*not 'nowhere'"):
        toque.prepare(configured(base, tmp_path, chat_template="nowhere"))


def test_another_template_is_another_store(base, tmp_path):
    toque.prepare(configured(base, tmp_path))
    with pytest.raises(DataError, match="chat_template was auto and is plain"):
        toque.prepare(configured(base, tmp_path, chat_template="plain"))
    with pytest.raises(DataError, match="loss_on was answers and is last_answer"):
        toque.train(configured(base, tmp_path, loss_on="last_answer"))


def test_an_encoder_decoder_is_told_to_take_pairs(base, tmp_path):
    t5 = {"family": "t5", "start_from": "scratch", "tokenizer": "trained:512"}
    config = configured(base, tmp_path).model_copy(
        update={"model": toque.configure(model=t5).model}
    )
    with pytest.raises(ConfigError, match=r"decoder-only.*prompt: ..., target: ..."):
        toque.prepare(config)


def test_turns_behind_the_longest_conversation_are_left_out_and_counted(base, tmp_path):
    limits = {
        "max_prompt_tokens": 16,
        "max_target_tokens": 100,
    }  # one question is longer than 16
    made = toque.prepare(configured(base, tmp_path, **limits))
    assert made.report.notes[CUT_TURNS] > 0
    assert made.report.kept == made.report.read
    whole = TokenStore.open(
        toque.prepare(configured(base, tmp_path / "whole")).store.path
    )
    longer = whole.prompt_lengths + whole.target_lengths - 116
    assert made.report.cut["targets"] == (longer > 0).sum()
    lost = whole.target_lengths.sum() - made.store.target_lengths.sum()
    assert made.report.cut["target_tokens"] == lost
    assert made.store.prompt_lengths.max() > 16
    for row in range(made.store.n_rows):
        assert len(made.store.prompt(row)) + len(made.store.target(row)) <= 116
        assert made.store.target(row)[-1] == made.store.codec().eos_id
    with pytest.raises(
        DataError, match=r"conversation has more than 116 tokens, the sum"
    ):
        toque.prepare(
            configured(base, tmp_path, on_overlong="error", **limits), replace=True
        )
    dropped = toque.prepare(
        configured(base, tmp_path, on_overlong="drop", **limits), replace=True
    )
    assert dropped.report.dropped["conversation over 116 tokens"] > 0


def lopsided(folder: Path, *, n: int, words: int) -> dict[str, Any]:
    """Short questions with long answers, and long ones with short answers: `words` in all."""
    ask = ["stir", "the", "soup", "and", "add", "salt", "pepper", "flour"]
    text = [" ".join(ask[(i + k) % 8] for k in range(words)) for i in range(n)]
    lines = [
        [
            {
                "role": "user",
                "content": f"{i} " + one[: len(one) * (1 + i % 2 * 8) // 10],
            },
            {"role": "assistant", "content": one[len(one) * (1 + i % 2 * 8) // 10 :]},
        ]
        for i, one in enumerate(text)
    ]
    (folder / "lopsided.jsonl").write_text(
        "\n".join(json.dumps({"messages": m}) for m in lines)
    )
    return {"sources": [{"path": str(folder / "lopsided.jsonl")}], "dedup": "none"}


@pytest.mark.parametrize("words", [300, 540])
def test_a_conversation_that_the_model_reads_whole_is_kept_whole(base, tmp_path, words):
    """A limit of either side may not be what one side of some conversation takes."""
    data = lopsided(tmp_path, n=40, words=words) | dict.fromkeys(LIMITS, "auto")
    made = toque.prepare(configured(base, tmp_path, **data))
    limits = [made.store.manifest.settings[name] for name in LIMITS]
    (said,) = made.report.limits
    assert sum(limits) == 513
    assert said.startswith(
        "Longest conversation: 513 tokens, chosen from the data: 99 % of 40 "
    )
    assert made.report.kept == 40
    rows = made.store.prompt_lengths + made.store.target_lengths
    whole = [
        made.store.target(row)[-1] == made.store.codec().eos_id for row in range(40)
    ]
    if words == 300:
        assert rows.max() > max(limits)
        assert all(whole)
        assert "cuts" not in said
    else:
        assert rows.max() == 513
        assert made.report.cut["targets"] == 40
        with pytest.raises(
            ConfigError, match="but the sources have conversations: the second half"
        ):
            toque.prepare(
                configured(base, tmp_path, **data, on_overlong="split"), replace=True
            )
        assert not any(whole)
        assert (
            "The model's context length is only 512 tokens for prompt and target"
            in said
        )
