"""Models with several end tokens: texts stop at each of them, and training learns the first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import httpx
import pytest
from transformers import AutoTokenizer

import toque
from fixtures.kitchens import TINY
from fixtures.servers import in_a_thread
from fixtures.spoken import byte_tokenizer, speaking
from toque.data.prepare.conversation_rows import UNENDED
from toque.data.store.token_store import TokenStore
from toque.errors import DataError
from toque.models.generation.options import GenerationOptions
from toque.serving.gate import Limits
from toque.serving.model_app import build_model_app
from toque.serving.server import Server
from toque.workflows.inference.open_model import open_model
from toque.workflows.inference.open_served import open_models
from toque.workflows.inference.talk import open_talk
from toque.workflows.trained_model.model_codec import find_chat_template

SPECIAL = ("<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>", "<|call|>")
ENDOFTEXT, USER, ASSISTANT, END, CALL = range(256, 261)
PHI = (  # the text ends behind the last turn alone
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}"
    "{% endif %}"
)
GLM = (  # a turn ends where the next one begins
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TWO_WAYS = (  # an earlier answer loses its last word
    "{% for m in messages %}<|{{ m.role }}|>\n"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content[:-4] }}{% else %}{{ m.content }}"
    "{% endif %}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def base(
    folder: Path,
    *,
    ends: Any = (ENDOFTEXT, END),
    template: str = PHI,
    stop: int = END,
    **more: Any,
) -> Path:
    """A model that answers "Yes!", the token `stop`, and, if it does not end there, "No"."""
    tokenizer = byte_tokenizer(SPECIAL)
    says = [*tokenizer.encode("Yes!").ids, stop, CALL, *tokenizer.encode("No").ids]
    ends = ends if isinstance(ends, int) else list(ends)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    settings |= {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
    files = {
        "generation_config": {"eos_token_id": ends},
        "config": {"eos_token_id": ENDOFTEXT},
    }
    return speaking(folder, tokenizer, says, tokenizer_config=settings, **files | more)


PLACES = {
    "generation_config": {},
    "config": {
        "generation_config": {"eos_token_id": ENDOFTEXT},
        "config": {"eos_token_id": [END]},
    },
    "tokenizer": {"stop": ENDOFTEXT, "ends": END},
}


@pytest.mark.parametrize("place", PLACES)
def test_texts_end_at_every_end_that_the_files_name(place, tmp_path):
    folder = base(tmp_path / "base", **PLACES[place])
    written = toque.generate(
        folder, ["Hi", "Hello"], temperature=0.0, max_new_tokens=20
    )
    assert [(one.text, one.tokens) for one in written] == [("Yes!", 4)] * 2
    best = toque.generate(folder, "Hi", best_of=2, temperature=0.5, max_new_tokens=20)
    assert best[0].text == "Yes!"


def test_an_exported_base_names_the_end_of_its_tokenizer_too(tmp_path):
    folder = base(tmp_path / "base", ends=END, config={"eos_token_id": END})
    done = toque.export(folder, tmp_path / "copy")
    ends = json.loads((done.folder / "generation_config.json").read_text())[
        "eos_token_id"
    ]
    assert ends == [ENDOFTEXT, END]


def test_special_tokens_are_not_shown(tmp_path):
    folder = base(tmp_path / "base", stop=USER)
    [written] = toque.generate(folder, "Hi", temperature=0.0, max_new_tokens=8)
    assert (written.text, written.tokens) == ("Yes!No", 8)
    pieces: list[str] = []
    talk = open_talk(folder, system=None, device="cpu")
    talk.ask("Hi", GenerationOptions(max_new_tokens=8), on_text=pieces.append)
    assert "".join(pieces) == "Yes!No"
    assert open_model(folder).codec.decode([USER, *b"\x23", END]) == "<|user|>D<|end|>"


def test_chat_and_the_server_stop_too(tmp_path):
    folder = base(tmp_path / "base")
    talk = open_talk(folder, system=None, device="cpu")
    assert talk.ask("Hi", GenerationOptions(max_new_tokens=20), on_text=str) == "Yes!"
    limits = Limits()
    server = Server(build_model_app(open_models({"m": folder}), limits=limits), limits)
    with in_a_thread(server, lambda: setattr(server, "should_exit", True)) as address:
        asked = {"model": "m", "max_tokens": 20, "temperature": 0}
        for path, prompt in (
            ("chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
            ("completions", {"prompt": "Hi"}),
        ):
            [choice] = httpx.post(f"{address}/v1/{path}", json=asked | prompt).json()[
                "choices"
            ]
            text = choice["text"] if "text" in choice else choice["message"]["content"]
            assert (text, choice["finish_reason"]) == ("Yes!", "stop")


def test_a_text_of_a_form_may_end_at_each_end(tmp_path):
    pytest.importorskip("llguidance")
    folder = base(tmp_path / "base", stop=END)
    # The model would go on with "Yes!" and is allowed to, unless its own end is allowed, too.
    schema = {"type": "string", "pattern": "^(Yes!)+$"}
    [written] = toque.generate(
        folder, "Hi", schema=schema, temperature=0.0, max_new_tokens=40
    )
    assert json.loads(written.text).startswith("Yes!")
    assert not written.is_cut


def chats(folder: Path) -> Path:
    words = ("rice", "beans", "leeks", "eggs", "pears", "oats")
    lines = [
        [
            {"role": role, "content": f"{text} {word} {n}"}
            for n in range(2)
            for role, text in (("user", "What of"), ("assistant", "Stew"))
        ]
        for word in words
    ]
    file = folder / "chats.jsonl"
    file.write_text(
        "\n".join(json.dumps({"messages": turns}) for turns in lines) + "\n"
    )
    return file


def configured(folder: Path, start: Path, **data: Any) -> toque.RunConfig:
    given = {"sources": [{"path": str(chats(folder))}], "store": str(folder / "store")}
    return toque.configure(
        TINY | {"model": {"family": "auto", "start_from": str(start)}},
        run_dir=str(folder / "run"),
        data=given | {"max_prompt_tokens": 100, "max_target_tokens": 100} | data,
        train={"stop_after": "2 steps", "batch": "4 examples"},
    )


def test_training_learns_the_first_end_of_each_turn_and_exports_name_it(tmp_path):
    start = base(tmp_path / "base", ends=(ENDOFTEXT, ASSISTANT, END))
    run = toque.train(configured(tmp_path, start))
    store, theirs = (
        TokenStore.open(tmp_path / "store"),
        AutoTokenizer.from_pretrained(start),
    )
    for row in range(store.n_rows):
        learnt = store.learnt_ids(row).tolist()
        word = theirs.decode(learnt).split()[1]
        assert theirs.decode(learnt) == f"Stew {word} 0<|end|>Stew {word} 1<|end|>"
    codec = store.codec()
    assert (codec.eos_id, codec.end_ids) == (END, {ENDOFTEXT, ASSISTANT, END})
    done = toque.export(run, tmp_path / "out")
    ends = json.loads((done.folder / "generation_config.json").read_text())[
        "eos_token_id"
    ]
    assert {*ends} == {ENDOFTEXT, ASSISTANT, END}
    ours, turns = (
        AutoTokenizer.from_pretrained(done.folder),
        [{"role": "user", "content": "Hi"}],
    )
    turns.append({"role": "assistant", "content": "Yes"})
    ids = [one.apply_chat_template(turns)["input_ids"] for one in (ours, theirs)]
    assert ids[0] == ids[1]
    again = open_model(done.folder)
    assert (again.codec.eos_id, again.codec.end_ids) == (END, codec.end_ids)
    made = toque.export(run, tmp_path / "soup", form="gguf")
    fields = gguf.GGUFReader(made.folder / made.file).fields
    named = [
        fields[f"tokenizer.ggml.{end}_token_id"].contents()
        for end in ("eos", "eot", "eom")
    ]
    assert named == [END, ENDOFTEXT, ASSISTANT]
    stops = (made.folder / "Modelfile").read_text().splitlines()[-4:-1]
    assert stops == [f'PARAMETER stop "{SPECIAL[i - 256]}"' for i in named]


def test_a_turn_may_end_where_the_next_begins(tmp_path):
    start = base(tmp_path / "base", template=GLM, ends=(ENDOFTEXT, USER), stop=USER)
    store = toque.prepare(configured(tmp_path, start)).store
    text = AutoTokenizer.from_pretrained(start).decode(store.learnt_ids(0))
    assert text.count("<|user|>") == 2
    assert text.endswith("1<|user|>")
    model = open_model(start)
    assert find_chat_template(model.codec, model.provenance) is not None
    assert model.codec.eos_id == USER


def test_an_answer_that_is_written_in_two_ways_is_still_refused(tmp_path):
    start = base(tmp_path / "base", template=TWO_WAYS)
    with pytest.raises(DataError, match="writes the first 2 messages differently"):
        toque.prepare(configured(tmp_path, start))


def test_answers_that_only_the_end_of_the_text_ends_are_counted(tmp_path):
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{% if not loop.last %}\n{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}\nassistant: {% else %}{{ eos_token }}"
        "{% endif %}"
    )
    start = base(tmp_path / "base", template=template)
    made = toque.prepare(configured(tmp_path, start))
    assert made.report.notes[UNENDED] == made.report.kept
