"""Bases that converse: what training and export leave of their special tokens and template."""

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import gguf
import pytest
from tokenizers import AddedToken, Tokenizer
from transformers import AutoTokenizer

import toque
from fixtures.kitchens import TINY
from tiny import model_of, shape_of
from toque.cli import main
from toque.config.dump import to_yaml
from toque.cooking.cookbook.recipes import write_cookbook
from toque.data.tokenizer.codec import load_codec
from toque.errors import CheckpointError
from toque.storage.atomic import FolderWriter
from toque.workflows.export import _SAMPLE as SAMPLE
from toque.workflows.final_model import NO_TEMPLATE

CHAT_TOKENS = ["<|im_start|>", "<|im_end|>", "<tool_call>"]
TEMPLATE = (
    "{% for turn in messages %}<|im_start|>{{ turn.role }}\n{{ turn.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TURNS = [{"role": "user", "content": "lentil soup"}]
KINDS = {"bpe": ("decoder", "<|endoftext|>"), "unigram": ("encoder-decoder", "</s>")}


def chat_base(
    folder: Path, source: Path, *, end: str, template: str | None = TEMPLATE
) -> Path:
    """A model folder of transformers whose tokenizer has tokens for conversations."""
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    added = [AddedToken(name, special=True, normalized=False) for name in CHAT_TOKENS]
    tokenizer.add_special_tokens(added)
    shape = shape_of("gpt2", positions=512, width=16, layers=1, heads=2)
    model_of("gpt2", vocab=tokenizer.get_vocab_size(), shape=shape).save_pretrained(
        folder
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    config |= {"pad_token": end, "additional_special_tokens": CHAT_TOKENS}
    config |= {"chat_template": template} if template else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module", params=KINDS)
def tuned(
    request: pytest.FixtureRequest,
    tokenizers_at: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, Path, str]:
    """A base, the run of two updates that began from it, and what was said."""
    work = tmp_path_factory.mktemp("chat")
    kind, end = KINDS[request.param]
    base = chat_base(work / "base", tokenizers_at[kind], end=end)
    write_cookbook(work / "a.jsonl", n=30, seed=3)
    config = toque.configure(
        TINY | {"model": {"family": "auto", "start_from": str(base)}},
        run_dir=str(work / "run"),
        data={
            "sources": [{"path": str(work / "a.jsonl")}],
            "store": str(work / "store"),
        },
        train={"stop_after": "2 steps"},
    )
    (work / "run.yaml").write_text(to_yaml(config))
    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        assert main(["train", str(work / "run.yaml")]) == 0
    return base, work / "run", " ".join(said.getvalue().split())


def test_a_tuned_model_keeps_every_special_token_and_no_template(
    tuned: tuple[Path, Path, str], tmp_path: Path
) -> None:
    base, run, said = tuned
    done = toque.export(run, tmp_path / "out")
    before = AutoTokenizer.from_pretrained(base)
    special = {
        t.content: n for n, t in before.added_tokens_decoder.items() if t.special
    }
    special.pop(
        "<extra_id_99>", None
    )  # the line break's marker, which is spelled as one
    for folder in (run / "model", done.folder):
        after = AutoTokenizer.from_pretrained(folder)
        assert after.chat_template is None
        kept = {
            t.content: n for n, t in after.added_tokens_decoder.items() if t.special
        }
        assert special.items() <= kept.items()
        for name, number in special.items():
            assert after.encode(name, add_special_tokens=False) == [number], name
        assert set(before.all_special_tokens) <= set(after.all_special_tokens)
        # Whoever gives it the base's template gets that template's ids.
        ids = after.apply_chat_template(TURNS, chat_template=TEMPLATE)["input_ids"]
        assert [ids.count(special[name]) for name in CHAT_TOKENS] == [1, 1, 0]
        typed = "Fold\n\n- 2 eggs"
        own = load_codec(folder)
        assert own.encode(typed) == after.encode(typed, add_special_tokens=False)
        assert NO_TEMPLATE in (folder / "README.md").read_text()
    assert NO_TEMPLATE in said


def test_a_gguf_of_it_has_the_same_special_tokens_and_is_asked_as_it_was_trained(
    tuned: tuple[Path, Path, str], tmp_path: Path
) -> None:
    _, run, _ = tuned
    done = toque.export(run, tmp_path / "soup", form="gguf", dtype="f16")
    fields = gguf.GGUFReader(done.folder / done.file).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    types = fields["tokenizer.ggml.token_type"].contents()
    for name in CHAT_TOKENS:
        assert types[tokens.index(name)] == gguf.TokenType.CONTROL
    assert "<|im_start|>" not in fields["tokenizer.chat_template"].contents()


def compared(folder: Path) -> list[int]:
    """What transformers makes of the conversation that `export` compares by."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids: list[int] = tokenizer.apply_chat_template(SAMPLE, add_generation_prompt=True)[
        "input_ids"
    ]
    return ids


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_of_another_keeps_its_template_which_is_compared(
    kind: str, tokenizers_at: dict[str, Path], tmp_path: Path
) -> None:
    family, end = KINDS[kind]
    base = chat_base(tmp_path / "base", tokenizers_at[family], end=end)
    done = toque.export(base, tmp_path / "out")
    made = [
        AutoTokenizer.from_pretrained(folder).apply_chat_template(TURNS)["input_ids"]
        for folder in (base, done.folder)
    ]
    assert made[0] == made[1]
    assert f"produces the same {len(compared(done.folder))} tokens" in str(done)
    named = json.loads((base / "tokenizer_config.json").read_text())
    several = [
        {"name": "tools", "template": "-"},
        {"name": "default", "template": TEMPLATE},
    ]
    named["chat_template"] = several  # as tokenizers with more than one have it
    (base / "tokenizer_config.json").write_text(json.dumps(named))
    gguf_done = toque.export(base, tmp_path / "soup", form="gguf", dtype="f16")
    fields = gguf.GGUFReader(gguf_done.folder / gguf_done.file).fields
    assert fields["tokenizer.chat_template"].contents() == TEMPLATE


def test_an_export_whose_template_writes_other_tokens_is_removed(
    tokenizers_at: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = chat_base(tmp_path / "base", tokenizers_at["decoder"], end="<|endoftext|>")
    put = FolderWriter.put

    def forgetful(writer: FolderWriter, name: str, data: bytes) -> object:
        forgotten = b"<|im_start|>" if name == "tokenizer.json" else b"\0"
        return put(writer, name, data.replace(forgotten, b"<|other|>"))

    monkeypatch.setattr(FolderWriter, "put", forgetful)
    with pytest.raises(CheckpointError, match="produces different tokens"):
        toque.export(base, tmp_path / "out")
    assert not (tmp_path / "out").exists()
