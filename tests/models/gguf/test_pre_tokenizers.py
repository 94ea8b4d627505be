"""Pre-tokenizers: llama.cpp's name for each that cuts words alike, and refusals of all others."""

import json
from typing import Any

import gguf
import pytest
from tokenizers import Regex, Tokenizer, models, normalizers
from tokenizers.pre_tokenizers import (
    ByteLevel,
    Digits,
    Punctuation,
    Sequence,
    Split,
    Whitespace,
)

from fixtures.spoken import byte_tokenizer
from models.gguf.test_gguf import ASKING
from tiny import make
from toque.errors import ConfigError
from toque.models.gguf.gguf_vocabulary import write_vocabulary

PLAIN, BYTES = ByteLevel(add_prefix_space=False), ByteLevel(False, use_regex=False)
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*"
WORDS += r"|\s*[\r\n]+|\s+(?!\S)|\s+"
V3 = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
V3 += r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def split(pattern: str, behavior: str = "isolated") -> Split:
    return Split(Regex(pattern), behavior)


def words(digits: str) -> list[Any]:
    return [split(WORDS.replace("DIGITS", digits)), BYTES]


CUTS = {
    "gpt-2": [PLAIN],
    "smollm": [Digits(individual_digits=True), PLAIN],
    "llama-bpe": words(r"\p{N}{1,3}"),
    "qwen2": words(r"\p{N}"),
    "deepseek-v3": [split(r"\p{N}{1,3}"), split("[一-龥぀-ゟ゠-ヿ]+"), split(V3), BYTES],
}
OTHERS = {
    "whitespace": [Whitespace(), BYTES],
    "digits in runs": [Digits(individual_digits=False), PLAIN],
    "two digits": words(r"\p{N}{1,2}"),
    "removed blanks": [split(r"\s+", "removed"), PLAIN],
    "punctuation": [Punctuation(), PLAIN],
    "a blank before": [ByteLevel(add_prefix_space=True)],
}


def fields(tokenizer: Tokenizer, tmp_path, **model: Any) -> dict[str, Any]:
    state = json.loads(tokenizer.to_str())
    state["model"] |= model
    writer = gguf.GGUFWriter(tmp_path / "v.gguf", "llama")
    write_vocabulary(
        writer, json.dumps(state), ASKING, rows=make("llama").config.vocab_size
    )
    return {
        name: value.value for data in writer.kv_data for name, value in data.items()
    }


def cut_by(steps: list[Any]) -> Tokenizer:
    tokenizer = byte_tokenizer(["<|endoftext|>"])
    tokenizer.pre_tokenizer = Sequence(steps) if len(steps) > 1 else steps[0]
    return tokenizer


@pytest.mark.parametrize("name", CUTS)
def test_a_tokenizer_has_the_name_of_its_cuts(name, tmp_path):
    more = {"ignore_merges": name == "llama-bpe"}
    assert fields(cut_by(CUTS[name]), tmp_path, **more)["tokenizer.ggml.pre"] == name


@pytest.mark.parametrize("other", OTHERS)
def test_other_cuts_are_refused_as_what_toque_does_not_write(other, tmp_path):
    with pytest.raises(
        ConfigError, match="Toque cannot write this kind of tokenizer as GGUF"
    ):
        fields(cut_by(OTHERS[other]), tmp_path)


def test_whole_words_of_the_vocabulary_are_taken_where_the_name_takes_them(tmp_path):
    alphabet = json.loads(byte_tokenizer([]).to_str())["model"]["vocab"]
    vocab = {**alphabet, "ab": 256, "abc": 257}
    unreachable = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b")]))
    reachable = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b"), ("ab", "c")]))
    for tokenizer in (unreachable, reachable):
        tokenizer.pre_tokenizer = Sequence(words(r"\p{N}{1,3}"))
    for ignores, name in ((True, "llama-bpe"), (False, "dbrx")):
        found = fields(unreachable, tmp_path, ignore_merges=ignores)
        assert found["tokenizer.ggml.pre"] == name
    for tokenizer in (unreachable, reachable):
        tokenizer.pre_tokenizer = PLAIN
    assert (
        fields(reachable, tmp_path, ignore_merges=True)["tokenizer.ggml.pre"] == "gpt-2"
    )
    with pytest.raises(ConfigError, match="Toque cannot write"):
        fields(unreachable, tmp_path, ignore_merges=True)


def test_texts_that_are_rewritten_first_are_refused(tmp_path):
    tokenizer = cut_by([PLAIN])
    tokenizer.normalizer = normalizers.NFC()
    assert fields(tokenizer, tmp_path)["tokenizer.ggml.pre"] == "gpt-2"
    tokenizer.normalizer = normalizers.Lowercase()
    with pytest.raises(
        ConfigError, match="byte-level BPE after the normalizer Lowercase"
    ):
        fields(tokenizer, tmp_path)
