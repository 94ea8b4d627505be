r"""Portable tokenizer files: a codec's ids and texts, in plain transformers.

A codec does more than its `tokenizer.json`. Here all of it is written into the file, so that
`AutoTokenizer` gives the ids a model was trained on and the text that Toque shows:

* the marker of line breaks is an ordinary token that is spelled "\n";
* `Codec.normalise` is in the normalizer, what begins and ends a prompt in the post-processor;
* only the tokens that Toque leaves out of texts are special. A vocabulary with tokens for
  conversations (`<|im_start|>`) keeps all of its own: whoever sets a chat template needs them.

A chat template is written where training rendered conversations by it; a base's would else ask for
what was not trained.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec
from tokenizers import Tokenizer

from toque.data.tokenizer.codec import Codec
from toque.models.loading.provenance import FOLDER, Provenance

PRIVATE: Final = "\ue123"  # a character of private use: no learnt vocabulary holds it
PROBES: Final = (
    "Fold\n\n- 2 eggs\n1. Stir.",
    "Generate recipe for: Crème brûlée using ingredients: 1½ cups jalapeños, {salt}",
    " two  spaces\n at the\tbeginning ",
    "<unk> </s> <|endoftext|> <extra_id_0><extra_id_99> <newline>",
    "½ – “quoted” ﬁne e\u0301 µg 180 °C 中文 🍲 \u200b",
    "",
)
"""Texts on which the portable tokenizer must agree with the codec, or it is not used."""
_SHOWN: Final = 40  # characters of a text that an error shows
_RECIPE: Final = """Generate recipe for: Grandma's Crème Brûlée using ingredients: 1½ cups milk
Ingredients:
- 2 (15 ounce) cans chickpeas, drained & rinsed
- 250 ml (8½ fl oz) crème fraîche, at 180 °C / 350 °F

Instructions:
1. Preheat; whisk "gently" – don't boil.
2. Bake 20-25 minutes\tuntil golden..."""


def portable_files(
    codec: Codec, *, begin: int | None, end: int | None, talks: bool = False
) -> dict[str, str] | None:
    """Texts of plain transformers' two files, by name; None for ids that cannot be had this way.

    `talks`: the model was trained on conversations, whose template is kept.
    """
    state = json.loads(codec.tokenizer_json)
    # Special tokens that texts are not written with are there for conversations.
    usual = {*codec.silent, codec.unk_id, codec.newline_id, *codec.sentinels()}
    converses = talks or any(t["special"] and t["id"] not in usual for t in state["added_tokens"])
    _spell_line_breaks(state, codec)
    if not converses:
        # Only begin, end and padding stay special; no text matches the others, which are written.
        vocab, added = state["model"]["vocab"], state["added_tokens"]
        shown = {t["id"] for t in added if t["special"] and t["id"] not in codec.silent}
        if isinstance(vocab, dict):
            for token in added:
                vocab.setdefault(token["content"], token["id"])
        else:
            shown &= _appended(state, shown, codec)
        state["added_tokens"] = [token for token in added if token["id"] not in shown]
    state["normalizer"] = _normalizer(state["normalizer"], codec)
    state["post_processor"] = _post_processor(state["post_processor"], codec, begin, end)
    text = json.dumps(state, ensure_ascii=False)
    if not _agrees(text, codec, begin, end):
        return None
    config = json.loads(codec.files()["tokenizer_config.json"])
    if not talks:
        config.pop("chat_template", None)
    if codec.unk_id not in codec.silent and not converses:
        config.pop("unk_token", None)  # named, it would be made special again
    if converses:
        names = [token["content"] for token in state["added_tokens"] if token["special"]]
        more = [name for name in names if name not in config.values()]
        config["additional_special_tokens"] = more
    config |= {
        "model_input_names": ["input_ids", "attention_mask"],
        "padding_side": "right" if end == codec.eos_id else "left",
        # "</s>" in a prompt is text. A chat's template writes such tokens, and must be able to.
        "split_special_tokens": not converses,
    }
    written = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    return {"tokenizer.json": text, "tokenizer_config.json": written}


def files_of_model(
    codec: Codec, record: Provenance, *, begin: int | None, end: int | None
) -> tuple[dict[str, str], bool]:
    """A model's tokenizer files by place; and True if a form that transformers reads is there."""
    talks, files = record.form == "conversations", codec.files()
    portable = portable_files(codec, begin=begin, end=end, talks=talks)
    if portable is None:
        config = json.loads(files["tokenizer_config.json"])
        if not talks:
            config.pop("chat_template", None)
        files["tokenizer_config.json"] = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
        return {**files, **record.files()}, False
    digest = hashlib.sha256(portable["tokenizer.json"].encode()).hexdigest()
    own = {f"{FOLDER}/{name}": text for name, text in files.items()}
    record = msgspec.structs.replace(record, tokenizer_json_sha256=digest)
    return {**portable, **own, **record.files()}, True


def _spell_line_breaks(state: dict[str, Any], codec: Codec) -> None:
    r"""Make the marker an ordinary token "\n", found before words are cut."""
    if codec.newline_id is None:
        return
    old, vocab = codec.piece(codec.newline_id), state["model"]["vocab"]
    if not isinstance(vocab, dict):
        state["model"]["vocab"] = [["\n" if p == old else p, score] for p, score in vocab]
    elif old in vocab:
        vocab["\n"] = vocab.pop(old)
    added = [t for t in state["added_tokens"] if t["id"] != codec.newline_id]
    plain = {"id": codec.newline_id, "content": "\n", "special": False, "normalized": False}
    plain |= dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    state["added_tokens"] = sorted([*added, plain], key=lambda token: token["id"])
    # Lines are decoded one by one: the space that leads each is dropped.
    lines = {"type": "Replace", "pattern": {"String": "\n "}, "content": "\n"}
    steps = [state["decoder"], {"type": "Fuse"}, lines]
    state["decoder"] = {"type": "Sequence", "decoders": [step for step in steps if step]}


def _appended(state: dict[str, Any], shown: set[int], codec: Codec) -> set[int]:
    """Put added tokens into a vocabulary with scores, in which ids are places; its ids then.

    A piece of it is found anywhere in a text. So what is to be `shown` is spelled with a private
    character, which `Codec.normalise` takes out of every text, and its "<" is put back on decoding.
    """
    vocab, added = state["model"]["vocab"], sorted(state["added_tokens"], key=lambda t: t["id"])
    held = {piece: number for number, (piece, _) in enumerate(vocab)}
    lowest = min(score for _, score in vocab)  # another one would change what is unknown
    for token in added:
        name = token["content"]
        if name not in held and token["id"] == len(vocab) and codec.rewriter.drops(PRIVATE):
            hidden = token["id"] in shown and name.startswith("<")
            vocab.append([PRIVATE + name[1:] if hidden else name, lowest])
            held[name] = token["id"]
    if any(piece.startswith(PRIVATE) for piece, _ in vocab):
        back = {"type": "Replace", "pattern": {"String": PRIVATE}, "content": "<"}
        state["decoder"] = {"type": "Sequence", "decoders": [state["decoder"], back]}
    return set(held.values())


def _normalizer(own: Any, codec: Codec) -> Any:
    """The tokenizer's own normalizer with `Codec.normalise` before and after it."""
    rewriter, folding = codec.rewriter, [] if own is None else [own]

    def replaced(kind: str, pattern: str, content: str) -> dict[str, Any]:
        return {"type": "Replace", "pattern": {kind: pattern}, "content": content}

    before = [replaced("Regex", pattern, " ") for pattern in rewriter.gaps()]
    stand_ins = rewriter.stand_ins()
    after = [replaced("Regex", _class_of(chars), to) for to, chars in stand_ins.items()]
    # A stand-in can complete something that folds again.
    after += folding if after and rewriter.folds else []
    after += [replaced("String", name, f"{name[0]} {name[1:]}") for name in rewriter.misread]
    steps = [*before, *folding, *after]
    return {"type": "Sequence", "normalizers": steps} if before or after else own


def _class_of(chars: Iterable[str]) -> str:
    r"""A character class of these characters, neighbours as ranges.

    >>> _class_of("cab~")
    '[\\x{61}-\\x{63}\\x{7e}]'
    """
    ranges: list[list[int]] = []
    for code in sorted(map(ord, chars)):
        if ranges and code == ranges[-1][1] + 1:
            ranges[-1][1] = code
        else:
            ranges.append([code, code])
    shown = (f"\\x{{{a:x}}}" + (f"-\\x{{{b:x}}}" if b > a else "") for a, b in ranges)
    return f"[{''.join(shown)}]"


def _post_processor(own: Any, codec: Codec, begin: int | None, end: int | None) -> dict[str, Any]:
    ids = {codec.piece(token): token for token in (begin, end) if token is not None}

    def special(token: int | None) -> list[Any]:
        return [] if token is None else [{"SpecialToken": {"id": codec.piece(token), "type_id": 0}}]

    def side(name: str) -> list[Any]:
        return [*special(begin), {"Sequence": {"id": name, "type_id": 0}}, *special(end)]

    template = {
        "type": "TemplateProcessing",
        "single": side("A"),
        "pair": [*side("A"), *side("B")],
        "special_tokens": {
            name: {"id": name, "ids": [token], "tokens": [name]} for name, token in ids.items()
        },
    }
    if own is not None and own["type"] == "ByteLevel":  # it trims offsets
        return {"type": "Sequence", "processors": [own, template]}
    return template


def _agrees(text: str, codec: Codec, begin: int | None, end: int | None) -> bool:
    try:
        portable = Tokenizer.from_str(text)
    except Exception:  # tokenizers raises the bare class  # noqa: BLE001
        return False
    portable.encode_special_tokens = True
    ours = {n: piece.replace(PRIVATE, "<") for piece, n in portable.get_vocab().items()}
    if _spelled(codec) != ours:
        return False
    added = portable.get_added_tokens_decoder()
    special = {number for number, token in added.items() if token.special}
    for probe in PROBES:
        plain = codec.encode(codec.normalise(probe))
        whole = [i for i in (begin, *plain, end) if i is not None]
        if portable.encode(probe).ids != whole:
            return False
        silent = sorted(codec.silent)
        for ids in (plain, [*silent, *plain, *plain, *silent]):
            shown = [token for token in ids if token not in special]
            if portable.decode(ids, skip_special_tokens=True) != codec.decode(shown):
                return False
    return True


def tokenizer_differences(one: Codec, other: Codec, texts: Iterable[str] = ()) -> list[str]:
    """Differences of two tokenizers, in words: of entries, special ids, and ids of sample texts."""
    if one.sha256 == other.sha256 and one.special_ids == other.special_ids:
        return []
    found = [
        f"{name} is {a} in one and {b} in the other"
        for (name, a), b in zip(one.special_ids.items(), other.special_ids.values(), strict=True)
        if a != b
    ]
    ours, theirs = _spelled(one), _spelled(other)
    apart = sorted(n for n in ours.keys() | theirs.keys() if ours.get(n) != theirs.get(n))
    if apart:
        first = apart[0]
        found.append(
            f"{len(apart):,} of {max(len(ours), len(theirs)):,} entries differ, the first is "
            f"{first}: {ours.get(first)!r} in one and {theirs.get(first)!r} in the other"
        )
    samples: Sequence[str] = [*PROBES, _RECIPE, *texts]
    for text in samples:
        if one.encode(one.normalise(text)) != other.encode(other.normalise(text)):
            found.append(f"they give other ids for {text[:_SHOWN]!r}")
            break
    return found


def _spelled(codec: Codec) -> dict[int, str]:
    """Every token by its id, those that the portable form spells otherwise as they were."""
    pieces = {number: piece.replace(PRIVATE, "<") for piece, number in codec.pieces().items()}
    if codec.newline_id is not None:
        pieces[codec.newline_id] = "\n"
    return pieces
