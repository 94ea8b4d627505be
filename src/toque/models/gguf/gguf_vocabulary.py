"""GGUF vocabulary: the tokens of a tokenizer.json as llama.cpp's own tokenizers take them.

Three of these are of our families: `gpt2`, byte-level BPE by merges, whose words are cut as
`tokenizer.ggml.pre` says; `llama`, SentencePiece's BPE, where the piece of the highest score is
merged first; `t5`, its Unigram. What Toque rewrites before it encodes (`½`, `ñ`) is not among them.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import gguf

from toque.errors import ConfigError

_BYTE_LEVEL_REGEX: Final = "gpt-2"
_PRE: Final = {  # pattern that cuts words before byte-level BPE, and llama.cpp's name for it
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+": "llama-bpe",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+": "qwen2",
}
_BYTE: Final = re.compile("<0x[0-9A-F]{2}>")
_UNUSED_SCORE: Final = -1000.0
_NO_BOS: Final = "{%- set bos_token = '' -%}"
_BLANK: Final = "▁"  # what SentencePiece writes for a blank


@dataclass(frozen=True)
class Asking:
    """Tokens around a prompt, beside the vocabulary itself."""

    begin: int | None  # the token before a prompt; None for none
    bos: int | None  # the token that a template calls `bos_token`; None for none
    eos: int
    pad: int
    unk: int | None
    newline: int | None  # the token that stands for a line break where the vocabulary holds none
    ends_with_eos: bool  # True if a prompt ends with `eos`, as an encoder's does
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
        writer.add_tokenizer_pre(_pre_tokenizer(steps))
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
        for step in _steps(state["normalizer"]):  # SentencePiece's own table of replacements
            if step["type"] == "Precompiled":
                writer.add_precompiled_charsmap(base64.b64decode(step["precompiled_charsmap"]))
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
    writer.add_bos_token_id(asking.eos if bos is None else bos)
    writer.add_eos_token_id(asking.eos)
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


def _pre_tokenizer(steps: Mapping[str, dict[str, Any]]) -> str:
    split = steps.get("Split")
    if split is None and steps["ByteLevel"].get("use_regex", True) and len(steps) == 1:
        return _BYTE_LEVEL_REGEX
    pattern = (split or {}).get("pattern", {}).get("Regex", "")
    if pattern not in _PRE or len(steps) != 2:
        raise _unknown(f"byte-level BPE over {', '.join(steps)} with the pattern {pattern!r}")
    return _PRE[pattern]


def _unknown(what: str) -> ConfigError:
    return ConfigError(
        f"The model's tokenizer is {what}, which llama.cpp's tokenizers do not do, so no GGUF is "
        "written. Export the model in the format hf."
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
