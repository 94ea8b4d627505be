"""GGUF vocabulary: the tokens of a tokenizer.json for llama.cpp's tokenizers.

Three of llama.cpp's tokenizers are supported. `gpt2` is byte-level BPE with merges, and
`tokenizer.ggml.pre` names its division into words. `llama` is SentencePiece's BPE, which merges the
piece with the highest score first. `t5` is SentencePiece's Unigram. Toque's own changes before
encoding (`½`, `ñ`) are not part of a GGUF file.
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
"""llama.cpp's pre-tokenizer regexes, by their name in `tokenizer.ggml.pre`.

Each regex splits the pieces from the previous regex into matches and the text between them.
llama.cpp has more names for the same regexes.
"""
_IGNORES_MERGES: Final = ("llama-bpe",)  # a word in the vocabulary is always one token
_FRAGMENTS: Final = (
    *(
        "stir",
        "A",
        "MiX",
        "é",
        "Ж",
        "中文",
        "の",
        "한",
        "ก",
        "क",
        "ि",
        "\u0301",
        "ß",
        "\u2126",
    ),
    *(
        "1",
        "22",
        "333",
        "4444",
        "½",
        "٣",
        "²",
        " ",
        " ",
        "  ",
        "   ",
        "\t",
        "\n",
        "\r\n",
        "\n\n",
    ),
    *(
        "\u00a0",
        "\u3000",
        ".",
        ",",
        "!",
        "?",
        "-",
        "_",
        "(",
        "[",
        '"',
        "…",
        "。",
        "，",
        "'",
        "’",
    ),
    *(
        "'s",
        "'S",
        "'re",
        "'LL",
        "$",
        "+",
        "=",
        "<",
        "~",
        "|",
        "`",
        "^",
        "🍲",
        "\u200d",
        "\u200b",
    ),
)
_SAMPLES: Final = 1500  # texts to compare two divisions into words
MAX_ENDS: Final = 3  # end tokens that a file can name
_BYTE: Final = re.compile("<0x[0-9A-F]{2}>")
_UNUSED_SCORE: Final = -1000.0
_NO_BOS: Final = "{%- set bos_token = '' -%}"
_COMPOSING: Final = (
    "NFC"  # llama.cpp leaves it out, which changes only texts of decomposed letters
)
_BLANK: Final = "▁"  # SentencePiece's symbol for a blank


@dataclass(frozen=True)
class PromptTokens:
    """Tokens around a prompt, and their template."""

    begin: int | None  # token before a prompt; None for no token
    bos: int | None  # token with the name `bos_token` in a template; None for no token
    ends: Sequence[int]  # tokens that end a text; the first is the end in training
    pad: int
    unk: int | None
    newline: int | None  # token for a line break, if it is not in the vocabulary
    ends_with_eos: (
        bool  # True if a prompt ends with the first end, as an encoder's does
    )
    template: str | None  # Jinja template that makes a prompt from `messages`


def write_vocabulary(
    writer: gguf.GGUFWriter,
    tokenizer_json: str,
    prompt_tokens: PromptTokens,
    *,
    rows: int,
) -> None:
    """Write the fields `tokenizer.*`. Rows of the embedding without a token count as unused."""
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
    tokens, types = _tokens(
        pieces, state["added_tokens"], prompt_tokens, rows=rows, in_bytes=in_bytes
    )
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if scores is not None:
        writer.add_token_scores(scores)

    bos = prompt_tokens.bos if prompt_tokens.begin is None else prompt_tokens.begin
    # Without these fields, llama.cpp would use its own ids for begin and end.
    writer.add_bos_token_id(prompt_tokens.ends[0] if bos is None else bos)
    # llama.cpp ends texts at each of these three tokens.
    ends = (writer.add_eos_token_id, writer.add_eot_token_id, writer.add_eom_token_id)
    for add, token in zip(ends, prompt_tokens.ends, strict=False):
        add(token)
    writer.add_pad_token_id(prompt_tokens.pad)
    if prompt_tokens.unk is not None:
        writer.add_unk_token_id(prompt_tokens.unk)
    writer.add_add_bos_token(prompt_tokens.begin is not None)
    writer.add_add_eos_token(prompt_tokens.ends_with_eos)

    template = prompt_tokens.template
    if template is not None:
        if bos is None and "bos_token" in template:
            # The template would write the end as its bos_token.
            template = _NO_BOS + template
        writer.add_chat_template(template)


def _steps(step: Any) -> Iterator[dict[str, Any]]:
    """Yield the steps of a pre-tokenizer or normalizer, and each step of a sequence."""
    if step is None:
        return
    inner = step.get("pretokenizers") or step.get("normalizers")
    for each in inner or ():
        yield from _steps(each)
    if not inner:
        yield step


def composes_letters(tokenizer_json: str) -> bool:
    """True if a tokenizer composes letters (Unicode NFC). llama.cpp's tokenizers do not."""
    state = json.loads(tokenizer_json)
    return any(step["type"] == _COMPOSING for step in _steps(state["normalizer"]))


def _write_unigram_normalizer(
    writer: gguf.GGUFWriter, state: Mapping[str, Any]
) -> None:
    """Write SentencePiece's table of replacements. Refuse steps that llama.cpp does not have."""
    for step in _steps(state["normalizer"]):
        joins_blanks = step["type"] == "Replace" and step["pattern"] == {
            "Regex": " {2,}"
        }
        if step["type"] == "Precompiled":
            writer.add_precompiled_charsmap(
                base64.b64decode(step["precompiled_charsmap"])
            )
        # `remove_extra_whitespaces` also joins blanks and strips texts.
        elif not joins_blanks and step["type"] not in (_COMPOSING, "Strip"):
            raise _unknown(f"Unigram after the normalizer {step['type']}")


def _begins_with_blank(state: Mapping[str, Any]) -> bool:
    """True if a SentencePiece BPE adds a blank before a text."""
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
    """Return llama.cpp's name for a tokenizer that divides sample texts into the same words."""
    tokenizer = Tokenizer.from_str(tokenizer_json)
    generator = random.Random(0)
    texts = ["".join(generator.choices(_FRAGMENTS, k=12)) for _ in range(_SAMPLES)]
    ignores_merges = bool(model.get("ignore_merges"))
    for name, patterns in _CUTS.items():
        steps = [Split(Regex(pattern), "isolated") for pattern in patterns]
        bytewise = ByteLevel(add_prefix_space=False, use_regex=False)
        theirs = Steps([*steps, bytewise])
        is_same = all(
            _words(tokenizer.pre_tokenizer, t) == _words(theirs, t) for t in texts
        )
        if is_same and (
            ignores_merges == (name in _IGNORES_MERGES) or _merges_make_all(model)
        ):
            return name
    kinds = [
        step["type"] for step in _steps(json.loads(tokenizer_json)["pre_tokenizer"])
    ]
    raise _unknown(
        f"byte-level BPE with the pre-tokenizer {', then '.join(kinds)}, which divides words "
        f"differently from {', '.join(_CUTS)}"
    )


def _words(cut: Any, text: str) -> list[str]:
    return [word for word, _ in cut.pre_tokenize_str(text)]


def _merges_make_all(model: Mapping[str, Any]) -> bool:
    """True if merges alone make every piece, so that ignoring merges changes no ids."""
    state = {
        "version": "1.0",
        "model": {**model, "ignore_merges": False},
        "added_tokens": [],
    }
    tokenizer = Tokenizer.from_str(json.dumps(state))
    pieces = [*model["vocab"]]
    encodings = tokenizer.encode_batch(pieces, add_special_tokens=False)
    return all(
        each.tokens == [piece] for each, piece in zip(encodings, pieces, strict=True)
    )


def _refuse_rewriting(state: Mapping[str, Any]) -> None:
    """Raise a ConfigError for a byte-level BPE with steps that llama.cpp does not have."""
    steps = [s["type"] for s in _steps(state["normalizer"]) if s["type"] != _COMPOSING]
    if steps:
        raise _unknown(f"byte-level BPE after the normalizer {', '.join(steps)}")
    model = state["model"]
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name):
            raise _unknown(f"byte-level BPE with {name} {model[name]!r}")


def _unknown(what: str) -> ConfigError:
    return ConfigError(
        f"The model's tokenizer is {what}. Toque does not write this kind as GGUF. Export the "
        "model with format hf."
    )


def _merge(merge: str | list[str]) -> str:
    return merge if isinstance(merge, str) else " ".join(merge)


def _merge_scores(model: dict[str, Any], rows: int) -> list[float]:
    """Compute scores in the order of the merges: minus the number of a piece's first merge."""
    scores = [0.0] * rows
    for rank, merge in reversed(list(enumerate(model["merges"]))):
        piece = _merge(merge).replace(" ", "")
        if piece in model["vocab"]:
            scores[model["vocab"][piece]] = -float(rank)
    return scores


def _tokens(
    pieces: Mapping[int, str],
    added: list[dict[str, Any]],
    prompt_tokens: PromptTokens,
    *,
    rows: int,
    in_bytes: bool,
) -> tuple[list[str], list[gguf.TokenType]]:
    """List the text and the kind of token of every row.

    Args:
        pieces: Pieces by id.
        added: Added tokens of tokenizer.json.
        prompt_tokens: Tokens around a prompt.
        rows: Rows of the embedding.
        in_bytes: True if the pieces <0x00> to <0xFF> are bytes.
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
        if number == prompt_tokens.unk:
            kind = gguf.TokenType.UNKNOWN
        if number == prompt_tokens.newline:
            kind, piece = gguf.TokenType.USER_DEFINED, "\n"
        tokens.append(piece)
        types.append(kind)
    return tokens, types
