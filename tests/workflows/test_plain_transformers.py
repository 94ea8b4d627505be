"""A finished model in plain transformers: the ids Toque reads, and the text Toque shows."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer

import toque
from plain_transformers import FAMILIES, PROMPTS, model_folder, plain
from toque.data.tokenizer.codec import Codec, generation_bounds, load_codec
from toque.errors import CheckpointError


@pytest.fixture(params=["learnt", "real"])
def tokenizer_of(
    request: pytest.FixtureRequest, tokenizers_at: dict[str, Path]
) -> Callable[[str], Codec]:
    def of(family: str) -> Codec:
        _, kind, real = FAMILIES[family]
        if request.param == "learnt":
            return load_codec(tokenizers_at[kind])
        return load_codec(request.getfixturevalue("shared") / real)

    return of


def ours(folder: Path, prompts: list[str], *, most: int) -> list[str]:
    written = toque.generate(
        folder, prompts, temperature=0, max_new_tokens=most, raw=True
    )
    return [one.text for one in written]


@pytest.mark.parametrize("family", FAMILIES)
def test_fault_69_plain_transformers_writes_what_toque_writes(
    family: str, tokenizer_of: Callable[[str], Codec], tmp_path: Path
) -> None:
    codec = tokenizer_of(family)
    folder = model_folder(tmp_path, family, codec)
    expected = ours(folder, PROMPTS, most=32)
    assert len(set(expected)) > 10, "the texts must differ by prompt to tell anything"
    found = plain(folder, PROMPTS, encoder=family == "t5", most=32)
    same = sum(a == b for a, b in zip(found, expected, strict=True))
    assert (same, found) == (len(PROMPTS), expected)


@pytest.mark.parametrize("form", ["recipes", "documents"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_ids_read_are_those_of_training(
    family: str, form: str, tokenizer_of: Callable[[str], Codec], tmp_path: Path
) -> None:
    codec = tokenizer_of(family)
    tokenizer = AutoTokenizer.from_pretrained(
        model_folder(tmp_path, family, codec, form)
    )
    begin, end = generation_bounds(codec, FAMILIES[family][1], form)
    rng = random.Random(5)
    letters = "abc eggs \n\t½ñé{<|unk>}🍲中–“\u200b\u0301"
    for text in [*PROMPTS, *("".join(rng.choices(letters, k=60)) for _ in range(200))]:
        own = [
            i
            for i in (begin, *codec.encode(codec.normalise(text)), end)
            if i is not None
        ]
        assert tokenizer(text)["input_ids"] == own, text
        assert tokenizer.decode(own, skip_special_tokens=True) == codec.decode(own), (
            text
        )


def test_toque_reads_its_own_tokenizer_back_unchanged(
    tokenizers_at: dict[str, Path], tmp_path: Path
) -> None:
    """What a store holds and what a fingerprint covers stay what they were."""
    from toque.data.tokenizer.tokenizer_folder import hash_of_folder

    for family in ("t5", "gpt2"):
        source = tokenizers_at[FAMILIES[family][1]]
        codec = load_codec(source)
        folder = model_folder(tmp_path, family, codec)
        again = load_codec(folder)
        assert (again.sha256, again.name, again.word_kind) == (
            codec.sha256, codec.name, codec.word_kind,
        )  # fmt: skip
        assert hash_of_folder(folder) == hash_of_folder(source)


@pytest.mark.parametrize("family", ["t5", "gpt2"])
def test_a_folder_that_transformers_saved_again_is_read_by_its_tokenizer_json(
    family: str, tokenizers_at: dict[str, Path], tmp_path: Path
) -> None:
    """The record no longer speaks of that file; its ids are the same."""
    codec = load_codec(tokenizers_at[FAMILIES[family][1]])
    folder = model_folder(tmp_path, family, codec)
    AutoTokenizer.from_pretrained(folder).save_pretrained(folder)
    held = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(held, indent=3))
    again = load_codec(folder)
    for text in PROMPTS:
        ids = codec.encode(codec.normalise(text))
        assert again.encode(again.normalise(text)) == ids
        assert again.decode(ids) == codec.decode(ids)
    assert (again.eos_id, again.pad_id, again.bos_id) == (
        codec.eos_id,
        codec.pad_id,
        codec.bos_id,
    )


@pytest.mark.parametrize("family", ["t5", "gpt2"])
def test_the_program_on_the_card_writes_what_toque_writes(
    family: str, tokenizers_at: dict[str, Path], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    folder = model_folder(
        tmp_path, family, load_codec(tokenizers_at[FAMILIES[family][1]])
    )
    card = (folder / "README.md").read_text()
    program = card.split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(folder)
    capsys.readouterr()
    exec(compile(program, "README.md", "exec"), {})  # noqa: S102  # the card's own text
    expected = ours(folder, PROMPTS[:1], most=40)[0]
    assert capsys.readouterr().out == expected + "\n"


def test_a_stray_record_is_an_error_in_a_paragraph(
    tokenizers_at: dict[str, Path], tmp_path: Path
) -> None:
    folder = model_folder(tmp_path, "gpt2", load_codec(tokenizers_at["decoder"]))
    (folder / "toque" / "model.json").write_text(
        '{"form": "songs", "max_new_tokens": 4}'
    )
    with pytest.raises(CheckpointError, match=r"value 'songs' - at .*form"):
        toque.generate(folder, "soup")
