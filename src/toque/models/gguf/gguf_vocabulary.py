"""GGUF vocabulary: the tokens of a tokenizer.json as llama.cpp's own tokenizers take them.

Three of these are of our families: `gpt2`, byte-level BPE by merges, whose words are cut as
`tokenizer.ggml.pre` says; `llama`, SentencePiece's BPE, where the piece of the highest score is
merged first; `t5`, its Unigram. What Toque rewrites before it encodes (`½`, `ñ`) is not among them.
"""

from __future__ import annotations

import base64
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
_CUTS: Final[dict[str, tuple[str, ...]]] = {
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
"""Patterns by which llama.cpp cuts words, by their name in `tokenizer.ggml.pre`.

A pattern divides each part that the one before it left into its matches and the text between them.
llama.cpp has more names for the same patterns.
"""
_IGNORES_MERGES: Final = ("llama-bpe",)  # a whole word that is in the vocabulary is a token
_FRAGMENTS: Final = (
    *("stir", "A", "MiX", "é", "Ж", "中文", "の", "한", "ก", "क", "ि", "\u0301", "ß", "\u2126"),
    *("1", "22", "333", "4444", "½", "٣", "²", " ", " ", "  ", "   ", "\t", "\n", "\r\n", "\n\n"),
    *("\u00a0", "\u3000", ".", ",", "!", "?", "-", "_", "(", "[", '"', "…", "。", "，", "'", "’"),
    *("'s", "'S", "'re", "'LL", "$", "+", "=", "<", "~", "|", "`", "^", "🍲", "\u200d", "\u200b"),
)
_SAMPLES: Final = 1500  # texts by which two ways of cutting words are compared
MOST_ENDS: Final = 3  # tokens that a file can name as ends of a text
_BYTE: Final = re.compile("<0x[0-9A-F]{2}>")
_UNUSED_SCORE: Final = -1000.0
_NO_BOS: Final = "{%- set bos_token = '' -%}"
_COMPOSING: Final = "NFC"  # llama.cpp leaves it out; only texts of decomposed letters differ
_BLANK: Final = "▁"  # what SentencePiece writes for a blank


@dataclass(frozen=True)
class Asking:
    """Tokens around a prompt, beside the vocabulary itself."""

    begin: int | None  # the token before a prompt; None for none
    bos: int | None  # the token that a template calls `bos_token`; None for none
    ends: Sequence[int]  # the tokens that end a text, first the one that training writes
    pad: int
    unk: int | None
    newline: int | None  # the token that stands for a line break where the vocabulary holds none
    ends_with_eos: bool  # True if a prompt ends with the first end, as an encoder's does
    template: str | None  # Jinja that makes a prompt of `messages`; None for none


def write_vocabulary(
    writer: gguf.GGUFWriter, tokenizer_json: str, asking: Asking, *, rows: int
) -> None:
    """Write the fields `tokenizer.*`; rows of the embedding without a token count as unused."""
    state = json.loads(tokenizer_json)
    model = state["model"]
    steps = {step["type"]: step for step in _steps(state["pre_tokenizer"])}
    scores: list[float] | None = None
    if model["type"] == "BPE" and "ByteLevel" in steps:
        pieces = {number: piece for piece, number in model["vocab"].items()}
        writer.add_tokenizer_model("gpt2")
        _refuse_rewriting(state)
        writer.add_tokenizer_pre(_pre_tokenizer(tokenizer_json, model))
        writer.add_token_merges([_merge(merge) for merge in model["merges"]])
        writer.add_add_space_prefix(bool(steps["ByteLevel"].get("add_prefix_space")))
    elif model["type"] == "BPE" and model.get("byte_fallback"):
        pieces = {number: piece for piece, number in model["vocab"].items()}
        scores = _merge_scores(model, rows)
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_add_space_prefix(_begins_with_blank(state))
    elif model["type"] == "Unigram":
        pieces = {number: piece for number, (piece, _) in enumerate(model["vocab"])}
        scores = [score for _, score in model["vocab"]]
        scores += [_UNUSED_SCORE] * (rows - len(scores))
        writer.add_tokenizer_model("t5")
        writer.add_tokenizer_pre("default")
        writer.add_add_space_prefix(True)
        writer.add_remove_extra_whitespaces(True)
        _write_unigram_normalizer(writer, state)
    else:
        raise _unknown(f"{model['type']} over {', '.join(steps) or 'whole texts'}")
    in_bytes = bool(model.get("byte_fallback"))
    tokens, types = _tokens(pieces, state["added_tokens"], asking, rows=rows, in_bytes=in_bytes)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if scores is not None:
        writer.add_token_scores(scores)
    bos = asking.bos if asking.begin is None else asking.begin
    # Left out, llama.cpp would take ids of its own for begin and end.
    writer.add_bos_token_id(asking.ends[0] if bos is None else bos)
    # llama.cpp ends texts at each of these three.
    ends = (writer.add_eos_token_id, writer.add_eot_token_id, writer.add_eom_token_id)
    for add, token in zip(ends, asking.ends, strict=False):
        add(token)
    writer.add_pad_token_id(asking.pad)
    if asking.unk is not None:
        writer.add_unk_token_id(asking.unk)
    writer.add_add_bos_token(asking.begin is not None)
    writer.add_add_eos_token(asking.ends_with_eos)
    template = asking.template
    if template is not None and bos is None and "bos_token" in template:
        template = _NO_BOS + template  # which would write the one above
    if template is not None:
        writer.add_chat_template(template)


def _steps(step: Any) -> Iterator[dict[str, Any]]:
    """The steps of a pre-tokenizer or normalizer, those inside a sequence one by one."""
    if step is None:
        return
    inner = step.get("pretokenizers") or step.get("normalizers")
    for one in inner or ():
        yield from _steps(one)
    if not inner:
        yield step


def composes_letters(tokenizer_json: str) -> bool:
    """True if a tokenizer composes letters (Unicode NFC), which llama.cpp's tokenizers do not."""
    state = json.loads(tokenizer_json)
    return any(step["type"] == _COMPOSING for step in _steps(state["normalizer"]))


def _write_unigram_normalizer(writer: gguf.GGUFWriter, state: Mapping[str, Any]) -> None:
    """Write SentencePiece's own table of replacements; refuse steps that llama.cpp lacks."""
    for step in _steps(state["normalizer"]):
        joins_blanks = step["type"] == "Replace" and step["pattern"] == {"Regex": " {2,}"}
        if step["type"] == "Precompiled":
            writer.add_precompiled_charsmap(base64.b64decode(step["precompiled_charsmap"]))
        # `remove_extra_whitespaces` joins blanks and strips texts.
        elif not joins_blanks and step["type"] not in (_COMPOSING, "Strip"):
            raise _unknown(f"Unigram after the normalizer {step['type']}")


def _begins_with_blank(state: Mapping[str, Any]) -> bool:
    """True if a SentencePiece BPE reads a text as if a blank stood before it."""
    adds = False
    for step in _steps(state["normalizer"]):
        if step["type"] == "Prepend" and step["prepend"] == _BLANK:
            adds = True
        elif step != {"type": "Replace", "pattern": {"String": " "}, "content": _BLANK}:
            raise _unknown(f"SentencePiece BPE after the normalizer {step['type']}")
    for step in _steps(state["pre_tokenizer"]):
        if step["type"] == "Metaspace":
            adds |= step.get("prepend_scheme", "always") != "never"
    return adds


def _pre_tokenizer(tokenizer_json: str, model: Mapping[str, Any]) -> str:
    """llama.cpp's name for a tokenizer that cuts words like that, as sample texts show."""
    own = Tokenizer.from_str(tokenizer_json)
    drawn = random.Random(0)
    texts = ["".join(drawn.choices(_FRAGMENTS, k=12)) for _ in range(_SAMPLES)]
    ignores = bool(model.get("ignore_merges"))
    for name, patterns in _CUTS.items():
        steps = [Split(Regex(pattern), "isolated") for pattern in patterns]
        bytewise = ByteLevel(add_prefix_space=False, use_regex=False)
        theirs = Steps([*steps, bytewise])
        same = all(_words(own.pre_tokenizer, text) == _words(theirs, text) for text in texts)
        if same and (ignores == (name in _IGNORES_MERGES) or _merges_make_all(model)):
            return name
    kinds = [step["type"] for step in _steps(json.loads(tokenizer_json)["pre_tokenizer"])]
    raise _unknown(
        f"byte-level BPE that cuts words by {', then '.join(kinds)}, otherwise than all of "
        f"{', '.join(_CUTS)}"
    )


def _words(cut: Any, text: str) -> list[str]:
    return [word for word, _ in cut.pre_tokenize_str(text)]


def _merges_make_all(model: Mapping[str, Any]) -> bool:
    """True if merges alone make every piece, so that taking whole words changes no ids."""
    state = {"version": "1.0", "model": {**model, "ignore_merges": False}, "added_tokens": []}
    bare = Tokenizer.from_str(json.dumps(state))
    pieces = [*model["vocab"]]
    made = bare.encode_batch(pieces, add_special_tokens=False)
    return all(one.tokens == [piece] for one, piece in zip(made, pieces, strict=True))


def _refuse_rewriting(state: Mapping[str, Any]) -> None:
    """Refuse a byte-level BPE with steps that llama.cpp's tokenizer of this kind does not have."""
    odd = [s["type"] for s in _steps(state["normalizer"]) if s["type"] != _COMPOSING]
    if odd:
        raise _unknown(f"byte-level BPE after the normalizer {', '.join(odd)}")
    model = state["model"]
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name):
            raise _unknown(f"byte-level BPE with {name} {model[name]!r}")


def _unknown(what: str) -> ConfigError:
    return ConfigError(
        f"The model's tokenizer is {what}. Toque does not write this kind as GGUF. Export the "
        "model in the format hf."
    )


def _merge(merge: str | list[str]) -> str:
    return merge if isinstance(merge, str) else " ".join(merge)


def _merge_scores(model: dict[str, Any], rows: int) -> list[float]:
    """Scores that merge in the order of the merges: a piece's is minus the first that makes it."""
    scores = [0.0] * rows
    for rank, merge in reversed(list(enumerate(model["merges"]))):
        piece = _merge(merge).replace(" ", "")
        if piece in model["vocab"]:
            scores[model["vocab"][piece]] = -float(rank)
    return scores


def _tokens(
    pieces: Mapping[int, str],
    added: list[dict[str, Any]],
    asking: Asking,
    *,
    rows: int,
    in_bytes: bool,
) -> tuple[list[str], list[gguf.TokenType]]:
    """Every row's text, and what kind of token it is.

    `pieces` are by id, `added` tokens as tokenizer.json lists them; with `in_bytes` the pieces
    <0x00> to <0xFF> stand for bytes.
    """
    extra = {token["id"]: token for token in added}
    tokens, types = [], []
    for number in range(rows):
        kind = gguf.TokenType.NORMAL
        piece = pieces.get(number)
        if number in extra:
            piece = extra[number]["content"]
            special = extra[number]["special"]
            kind = gguf.TokenType.CONTROL if special else gguf.TokenType.USER_DEFINED
        elif piece is None:
            kind, piece = gguf.TokenType.UNUSED, f"[PAD{number}]"
        elif in_bytes and _BYTE.fullmatch(piece):
            kind = gguf.TokenType.BYTE
        if number == asking.unk:
            kind = gguf.TokenType.UNKNOWN
        if number == asking.newline:
            kind, piece = gguf.TokenType.USER_DEFINED, "\n"
        tokens.append(piece)
        types.append(kind)
    return tokens, types
