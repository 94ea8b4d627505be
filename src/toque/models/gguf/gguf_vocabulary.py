"""GGUF vocabulary: the tokens of a tokenizer.json for llama.cpp's tokenizers.

Three of llama.cpp's tokenizers are supported. `gpt2` is byte-level BPE with merges, and
`tokenizer.ggml.pre` names its pre-tokenizer. `llama` is SentencePiece's BPE, which merges the piece
with the highest score first. `t5` is SentencePiece's Unigram. Toque's own changes of a text before
encoding (`½`, `ñ`) are not part of a GGUF file.
"""

from __future__ import annotations

import base64
import itertools
import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import gguf
from tokenizers import Regex, Tokenizer
from tokenizers.pre_tokenizers import ByteLevel, Split
from tokenizers.pre_tokenizers import Sequence as Steps

from toque.errors import ConfigError

_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3: Final = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CJK: Final = r"[一-龥\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK: Final = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_REGEXES: Final[dict[str, tuple[str, ...]]] = {
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "llama-bpe": (_LLAMA3,),
    "dbrx": (_LLAMA3,),
    "qwen2": (_LLAMA3.replace("{1,3}", ""),),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"),
    "deepseek-coder": (
        r"[\r\n]",
        r"\s?\p{L}+",
        r"\s?\p{P}+",
        r"[一-龥\u0800-一가-\ud7ff]+",
        r"\p{N}",
    ),
    "deepseek-v3": (r"\p{N}{1,3}", _CJK, _DEEPSEEK),
    "bloom": (r" ?[^(\s|.,!?…。，、।۔،)]+",),
}
"""llama.cpp's pre-tokenizer regexes, by their name in `tokenizer.ggml.pre`.

Each regex splits the pieces from the previous regex into matches and the text between them.
llama.cpp has more names for the same regexes.
"""
# Pre-tokenizers after which a word in the vocabulary is always one token.
_IGNORES_MERGES: Final = ("llama-bpe",)
# Texts that pre-tokenizers divide differently.
_FRAGMENTS: Final = (
    *"stir A MiX é Ж 中文 の 한 ก क ि \u0301 ß \u2126 1 22 333 4444 ½ ٣ ²".split(" "),  # noqa: SIM905
    *(" ", " ", "  ", "   ", "\t", "\n", "\r\n", "\n\n", "\u00a0", "\u3000"),
    *". , ! ? - _ ( [ \" … 。 ， ' ’ 's 'S 're 'LL $ + = < ~ | ` ^ 🍲 \u200d \u200b".split(" "),  # noqa: SIM905
)  # fmt: skip
_SAMPLES: Final = 1500  # texts on which two pre-tokenizers are compared
MAX_ENDS: Final = 3  # end tokens that a file can name
_BYTE: Final = re.compile("<0x[0-9A-F]{2}>")
_UNUSED_SCORE: Final = -1000.0
_NO_BOS: Final = "{%- set bos_token = '' -%}"
# llama.cpp does not compose letters. This changes only texts with decomposed letters.
_COMPOSING: Final = "NFC"
_BLANK: Final = "▁"  # SentencePiece's symbol for a space
_REPLACES_BLANKS: Final = {
    "type": "Replace",
    "pattern": {"String": " "},
    "content": _BLANK,
}


@dataclass(frozen=True)
class PromptTokens:
    """Tokens around a prompt, and the template of prompts."""

    begin: int | None  # token before a prompt; None for no token
    bos: int | None  # token with the name `bos_token` in a template; None for no token
    ends: Sequence[int]  # tokens that end a text; the first is the end in training
    pad: int
    unk: int | None
    newline: int | None  # token for a line break, if it is not in the vocabulary
    ends_with_eos: bool  # True if prompts end with the first end, as for an encoder
    template: str | None  # Jinja template that makes a prompt from `messages`


def write_vocabulary(
    writer: gguf.GGUFWriter,
    tokenizer_json: str,
    prompt_tokens: PromptTokens,
    *,
    rows: int,
) -> None:
    """Write the fields `tokenizer.*`. Embedding rows without a token are marked as unused.

    Raises:
        ConfigError: llama.cpp does not have the tokenizer.
    """
    state = json.loads(tokenizer_json)
    model = state["model"]
    steps = {step["type"]: step for step in _flatten(state["pre_tokenizer"])}
    is_bpe = model["type"] == "BPE"
    scores: list[float] | None = None
    if model["type"] == "Unigram":
        scores = [score for _, score in model["vocab"]]
        scores += itertools.repeat(_UNUSED_SCORE, rows - len(scores))
        _write_unigram(writer, state)
    elif is_bpe and "ByteLevel" in steps:
        _write_byte_level_bpe(writer, tokenizer_json, state, steps["ByteLevel"])
    elif is_bpe and model.get("byte_fallback"):
        scores = _merge_scores(model, rows)
        _write_sentencepiece_bpe(writer, state)
    else:
        cut = ", ".join(steps) or "whole texts"
        raise _unsupported(f"{model['type']} over {cut}")

    has_bytes = bool(model.get("byte_fallback"))
    pieces = _pieces_by_id(model)
    tokens, types = _list_tokens(
        pieces, state["added_tokens"], prompt_tokens, rows=rows, has_bytes=has_bytes
    )
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if scores is not None:
        writer.add_token_scores(scores)
    _write_prompt_tokens(writer, prompt_tokens)


def _pieces_by_id(model: Mapping[str, Any]) -> dict[int, str]:
    vocabulary = model["vocab"]
    if model["type"] == "Unigram":
        return {number: piece for number, (piece, _) in enumerate(vocabulary)}
    return {number: piece for piece, number in vocabulary.items()}


def _write_prompt_tokens(writer: gguf.GGUFWriter, tokens: PromptTokens) -> None:
    """Write the ids of special tokens, and the chat template."""
    bos = tokens.bos if tokens.begin is None else tokens.begin
    # Without these fields, llama.cpp would use its own ids for begin and end.
    writer.add_bos_token_id(tokens.ends[0] if bos is None else bos)
    # llama.cpp ends texts at each of these three tokens.
    ends = (writer.add_eos_token_id, writer.add_eot_token_id, writer.add_eom_token_id)
    for add, token in zip(ends, tokens.ends, strict=False):
        add(token)
    writer.add_pad_token_id(tokens.pad)
    if tokens.unk is not None:
        writer.add_unk_token_id(tokens.unk)
    writer.add_add_bos_token(tokens.begin is not None)
    writer.add_add_eos_token(tokens.ends_with_eos)

    template = tokens.template
    if template is not None:
        if bos is None and "bos_token" in template:
            # The template would write the end token as its bos_token.
            template = _NO_BOS + template
        writer.add_chat_template(template)


def _write_byte_level_bpe(
    writer: gguf.GGUFWriter,
    tokenizer_json: str,
    state: Mapping[str, Any],
    byte_level: Mapping[str, Any],
) -> None:
    """Write the name of the pre-tokenizer, the merges, and whether texts start with a space.

    Raises:
        ConfigError: The tokenizer has steps that llama.cpp does not have.
    """
    _refuse_rewriting(state)
    merges = [_join_merge(merge) for merge in state["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_find_pre_tokenizer(tokenizer_json, state))
    writer.add_token_merges(merges)
    writer.add_add_space_prefix(bool(byte_level.get("add_prefix_space")))


def _flatten(step: Any) -> Iterator[dict[str, Any]]:
    """Yield the steps of a pre-tokenizer or normalizer, which may be nested sequences."""
    if step is None:
        return
    inner = step.get("pretokenizers") or step.get("normalizers")
    if not inner:
        yield step
        return
    for each in inner:
        yield from _flatten(each)


def composes_letters(tokenizer_json: str) -> bool:
    """True if a tokenizer composes letters (Unicode NFC). llama.cpp's tokenizers do not."""
    state = json.loads(tokenizer_json)
    return any(step["type"] == _COMPOSING for step in _flatten(state["normalizer"]))


def _write_unigram(writer: gguf.GGUFWriter, state: Mapping[str, Any]) -> None:
    """Write SentencePiece's settings and its table of replacements.

    Raises:
        ConfigError: The tokenizer has steps that llama.cpp does not have.
    """
    writer.add_tokenizer_model("t5")
    writer.add_tokenizer_pre("default")
    writer.add_add_space_prefix(True)
    writer.add_remove_extra_whitespaces(True)
    for step in _flatten(state["normalizer"]):
        kind = step["type"]
        joins_blanks = kind == "Replace" and step["pattern"] == {"Regex": " {2,}"}
        if kind == "Precompiled":
            table = base64.b64decode(step["precompiled_charsmap"])
            writer.add_precompiled_charsmap(table)
        # `remove_extra_whitespaces` also joins spaces and strips texts.
        elif not joins_blanks and kind not in (_COMPOSING, "Strip"):
            raise _unsupported(f"Unigram after the normalizer {kind}")


def _write_sentencepiece_bpe(writer: gguf.GGUFWriter, state: Mapping[str, Any]) -> None:
    """Write the kind of tokenizer, and whether it adds a space before a text.

    Raises:
        ConfigError: The tokenizer has steps that llama.cpp does not have.
    """
    adds_blank = False
    for step in _flatten(state["normalizer"]):
        if step["type"] == "Prepend" and step["prepend"] == _BLANK:
            adds_blank = True
        elif step != _REPLACES_BLANKS:
            raise _unsupported(f"SentencePiece BPE after the normalizer {step['type']}")
    for step in _flatten(state["pre_tokenizer"]):
        if step["type"] == "Metaspace":
            adds_blank |= step.get("prepend_scheme", "always") != "never"
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_add_space_prefix(adds_blank)


def _find_pre_tokenizer(tokenizer_json: str, state: Mapping[str, Any]) -> str:
    """Return llama.cpp's name for a pre-tokenizer that divides sample texts into the same words.

    Raises:
        ConfigError: llama.cpp does not have such a pre-tokenizer.
    """
    pre_tokenizer = Tokenizer.from_str(tokenizer_json).pre_tokenizer
    generator = random.Random(0)
    texts = ["".join(generator.choices(_FRAGMENTS, k=12)) for _ in range(_SAMPLES)]
    for name, regexes in _REGEXES.items():
        splits = [Split(Regex(regex), "isolated") for regex in regexes]
        bytewise = ByteLevel(add_prefix_space=False, use_regex=False)
        candidate = Steps([*splits, bytewise])
        is_same = all(_words(pre_tokenizer, t) == _words(candidate, t) for t in texts)
        ignores_merges = name in _IGNORES_MERGES
        if is_same and _merges_alike(state["model"], ignores_merges=ignores_merges):
            return name
    kinds = [step["type"] for step in _flatten(state["pre_tokenizer"])]
    raise _unsupported(
        f"byte-level BPE with the pre-tokenizer {', then '.join(kinds)}, which divides words "
        f"differently from {', '.join(_REGEXES)}"
    )


def _words(pre_tokenizer: Any, text: str) -> list[str]:
    return [word for word, _ in pre_tokenizer.pre_tokenize_str(text)]


def _merges_alike(model: Mapping[str, Any], *, ignores_merges: bool) -> bool:
    """True if a BPE gives the same ids with this value of `ignore_merges`.

    The value has no effect if merges alone make every piece of the vocabulary.
    """
    if bool(model.get("ignore_merges")) == ignores_merges:
        return True
    state = {
        "version": "1.0",
        "model": {**model, "ignore_merges": False},
        "added_tokens": [],
    }
    tokenizer = Tokenizer.from_str(json.dumps(state))
    pieces = [*model["vocab"]]
    encodings = tokenizer.encode_batch(pieces, add_special_tokens=False)
    return [encoding.tokens for encoding in encodings] == [[p] for p in pieces]


def _refuse_rewriting(state: Mapping[str, Any]) -> None:
    """Raise a ConfigError for a byte-level BPE with steps that llama.cpp does not have."""
    steps = [step["type"] for step in _flatten(state["normalizer"])]
    steps = [kind for kind in steps if kind != _COMPOSING]
    if steps:
        raise _unsupported(f"byte-level BPE after the normalizer {', '.join(steps)}")
    model = state["model"]
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name):
            raise _unsupported(f"byte-level BPE with {name} {model[name]!r}")


def _unsupported(tokenizer: str) -> ConfigError:
    return ConfigError(
        f"The model's tokenizer is {tokenizer}. Toque cannot write this kind of tokenizer as GGUF. "
        "Export the model with format hf."
    )


def _join_merge(merge: str | list[str]) -> str:
    """Return a merge as "LEFT RIGHT". Newer files have lists."""
    return merge if isinstance(merge, str) else " ".join(merge)


def _merge_scores(model: dict[str, Any], rows: int) -> list[float]:
    """Compute a score per row: minus the index of a piece's first merge, 0 without a merge."""
    scores = list(itertools.repeat(0.0, rows))
    for rank, merge in reversed(list(enumerate(model["merges"]))):
        piece = _join_merge(merge).replace(" ", "")
        if piece in model["vocab"]:
            scores[model["vocab"][piece]] = -float(rank)
    return scores


def _list_tokens(
    pieces: Mapping[int, str],
    added: list[dict[str, Any]],
    prompt_tokens: PromptTokens,
    *,
    rows: int,
    has_bytes: bool,
) -> tuple[list[str], list[gguf.TokenType]]:
    """List each row's text and kind of token.

    Args:
        pieces: Pieces by id.
        added: Added tokens of tokenizer.json.
        prompt_tokens: Tokens around a prompt.
        rows: Rows of the embedding.
        has_bytes: True if the pieces <0x00> to <0xFF> are bytes.
    """
    added_by_id = {token["id"]: token for token in added}
    tokens, types = [], []
    for number in range(rows):
        kind = gguf.TokenType.NORMAL
        text = pieces.get(number)
        if number in added_by_id:
            token = added_by_id[number]
            text = token["content"]
            kind = gguf.TokenType.USER_DEFINED
            if token["special"]:
                kind = gguf.TokenType.CONTROL
        elif text is None:
            text = f"[PAD{number}]"
            kind = gguf.TokenType.UNUSED
        elif has_bytes and _BYTE.fullmatch(text):
            kind = gguf.TokenType.BYTE

        if number == prompt_tokens.unk:
            kind = gguf.TokenType.UNKNOWN
        if number == prompt_tokens.newline:
            text = "\n"
            kind = gguf.TokenType.USER_DEFINED
        tokens.append(text)
        types.append(kind)
    return tokens, types
