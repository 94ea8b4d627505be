r"""Portable tokenizer files, which give a codec's ids and texts in plain transformers.

A codec does more than its `tokenizer.json`. The portable files do the same work with the steps of
the tokenizers library, so that `AutoTokenizer` gives the ids of training and the texts of Toque:

* The line-break marker is an ordinary token "\n".
* The normalizer does the work of `Codec.normalise`, and the post-processor adds the ids before and
  after a prompt.
* Only tokens that texts do not show are special. A vocabulary with tokens for conversations
  (`<|im_start|>`) keeps all its special tokens, because chat templates need them.

The files have a chat template only if the model was trained on conversations. The base model's
template would write prompts that the model was not trained on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import msgspec
from tokenizers import Tokenizer

from toque.data.tokenizer.codec import Codec
from toque.models.loading.provenance import FOLDER, Provenance

PRIVATE = "\ue123"  # a character of private use, which learnt vocabularies do not have
PROBES = (
    "Fold\n\n- 2 eggs\n1. Stir.",
    "Generate recipe for: Crème brûlée using ingredients: 1½ cups jalapeños, {salt}",
    " two  spaces\n at the\tbeginning ",
    "<unk> </s> <|endoftext|> <extra_id_0><extra_id_99> <newline>",
    "½ – “quoted” ﬁne e\u0301 µg 180 °C 中文 🍲 \u200b",
    "",
)
"""Texts for which a portable tokenizer must give the same ids as the codec."""
_MAX_SHOWN = 40  # maximum number of characters of a text in a message
_RECIPE = """Generate recipe for: Grandma's Crème Brûlée using ingredients: 1½ cups milk
Ingredients:
- 2 (15 ounce) cans chickpeas, drained & rinsed
- 250 ml (8½ fl oz) crème fraîche, at 180 °C / 350 °F

Instructions:
1. Preheat; whisk "gently" – don't boil.
2. Bake 20-25 minutes\tuntil golden..."""

Json = dict[str, Any]


def portable_files(
    codec: Codec, *, begin: int | None, end: int | None, talks: bool = False
) -> dict[str, str] | None:
    """Make the two tokenizer files for plain transformers. None if they would give other ids.

    Args:
        codec: The codec of a model.
        begin: Id before a prompt.
        end: Id after a prompt.
        talks: Whether the model was trained on conversations. If so, the files have its chat
            template.

    Returns:
        The texts of the files by file name.
    """
    state = json.loads(codec.tokenizer_json)
    added = state["added_tokens"]
    # A special token that is not among these is for conversations.
    usual = {*codec.silent, codec.unk_id, codec.newline_id, *codec.sentinels()}
    is_for_chat = talks or any(t["special"] and t["id"] not in usual for t in added)

    _add_line_break(state, codec)
    if not is_for_chat:
        _make_ordinary(state, codec)
    state["normalizer"] = _normalizer(state["normalizer"], codec)
    state["post_processor"] = _post_processor(
        state["post_processor"], codec, begin, end
    )
    text = json.dumps(state, ensure_ascii=False)
    if not _has_same_ids(text, codec, begin, end):
        return None

    config = _tokenizer_config(codec, talks=talks)
    if is_for_chat:
        special = [t["content"] for t in state["added_tokens"] if t["special"]]
        others = [name for name in special if name not in config.values()]
        config["additional_special_tokens"] = others
    elif codec.unk_id not in codec.silent:
        config.pop("unk_token", None)  # AutoTokenizer would make it special
    config |= {
        "model_input_names": ["input_ids", "attention_mask"],
        "padding_side": "right" if end == codec.eos_id else "left",
        # "</s>" in a prompt is text, but a chat template must be able to write such tokens.
        "split_special_tokens": not is_for_chat,
    }
    return {"tokenizer.json": text, "tokenizer_config.json": _as_json(config)}


def files_of_model(
    codec: Codec, record: Provenance, *, begin: int | None, end: int | None
) -> tuple[dict[str, str], bool]:
    """Make the tokenizer files of a model folder.

    Returns:
        The texts of the files by path, and whether plain transformers can read the tokenizer.
    """
    talks = record.form == "conversations"
    files = codec.files()
    portable = portable_files(codec, begin=begin, end=end, talks=talks)
    if portable is None:
        files["tokenizer_config.json"] = _as_json(_tokenizer_config(codec, talks=talks))
        return {**files, **record.files()}, False
    digest = hashlib.sha256(portable["tokenizer.json"].encode()).hexdigest()
    files = {f"{FOLDER}/{name}": text for name, text in files.items()}
    record = msgspec.structs.replace(record, tokenizer_json_sha256=digest)
    return {**portable, **files, **record.files()}, True


def _tokenizer_config(codec: Codec, *, talks: bool) -> Json:
    """Read a codec's tokenizer_config.json, without the chat template unless `talks` is set."""
    config: Json = json.loads(codec.files()["tokenizer_config.json"])
    if not talks:
        config.pop("chat_template", None)
    return config


def _as_json(config: Json) -> str:
    return json.dumps(config, indent=2, ensure_ascii=False) + "\n"


def _add_line_break(state: Json, codec: Codec) -> None:
    r"""Turn the line-break marker into an ordinary added token "\n"."""
    if codec.newline_id is None:
        return
    marker = codec.piece(codec.newline_id)
    vocab = state["model"]["vocab"]
    if not isinstance(vocab, dict):
        state["model"]["vocab"] = [
            ["\n" if p == marker else p, score] for p, score in vocab
        ]
    elif marker in vocab:
        vocab["\n"] = vocab.pop(marker)

    added = [t for t in state["added_tokens"] if t["id"] != codec.newline_id]
    line_break = {
        "id": codec.newline_id,
        "content": "\n",
        "special": False,
        "normalized": False,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
    }
    state["added_tokens"] = sorted([*added, line_break], key=lambda token: token["id"])
    # The codec decodes each line alone, which drops the leading space of the line.
    strip = {"type": "Replace", "pattern": {"String": "\n "}, "content": "\n"}
    steps = [{"type": "Fuse"}, strip]
    if state["decoder"]:
        steps.insert(0, state["decoder"])
    state["decoder"] = {"type": "Sequence", "decoders": steps}


def _make_ordinary(state: Json, codec: Codec) -> None:
    """Turn the special tokens that texts show into ordinary entries, which no text matches."""
    vocab = state["model"]["vocab"]
    added = state["added_tokens"]
    shown = {t["id"] for t in added if t["special"] and t["id"] not in codec.silent}
    if isinstance(vocab, dict):
        for token in added:
            vocab.setdefault(token["content"], token["id"])
    else:
        # A token that cannot be appended stays an added token.
        ids = _append_tokens(state, shown, codec)
        shown &= ids
    state["added_tokens"] = [token for token in added if token["id"] not in shown]


def _append_tokens(state: Json, shown: set[int], codec: Codec) -> set[int]:
    """Append added tokens to a vocabulary with scores, and return the ids of all its entries.

    An entry's index is its id. A text may match any entry, so the "<" of a `shown` token becomes a
    private character, which `Codec.normalise` removes from texts. Decoding restores the "<".
    """
    vocab = state["model"]["vocab"]
    id_of_piece = {piece: number for number, (piece, _) in enumerate(vocab)}
    # A lower minimum would change which texts become unknown tokens.
    score = min(score for _, score in vocab)
    if codec.rewriter.drops(PRIVATE):
        for token in sorted(state["added_tokens"], key=lambda token: token["id"]):
            name = token["content"]
            if name in id_of_piece or token["id"] != len(vocab):
                continue
            is_hidden = token["id"] in shown and name.startswith("<")
            vocab.append([PRIVATE + name[1:] if is_hidden else name, score])
            id_of_piece[name] = token["id"]
    if any(piece.startswith(PRIVATE) for piece, _ in vocab):
        restore = {"type": "Replace", "pattern": {"String": PRIVATE}, "content": "<"}
        state["decoder"] = {"type": "Sequence", "decoders": [state["decoder"], restore]}
    return set(id_of_piece.values())


def _normalizer(original: Any, codec: Codec) -> Any:
    """Add the steps of `Codec.normalise` before and after the tokenizer's normalizer."""
    rewriter = codec.rewriter
    folding = [] if original is None else [original]

    def replacement(kind: str, pattern: str, content: str) -> Json:
        return {"type": "Replace", "pattern": {kind: pattern}, "content": content}

    before = [replacement("Regex", pattern, " ") for pattern in rewriter.gaps()]
    stand_ins = rewriter.stand_ins()
    after = [
        replacement("Regex", _char_class(chars), stand_in)
        for stand_in, chars in stand_ins.items()
    ]
    if after and rewriter.folds:
        # A stand-in may complete a pair of characters that folds again.
        after += folding
    # A space keeps a special token's name in the user's text from being read as the token.
    after += [
        replacement("String", name, f"{name[0]} {name[1:]}")
        for name in rewriter.misread
    ]
    if not before and not after:
        return original
    return {"type": "Sequence", "normalizers": [*before, *folding, *after]}


def _char_class(chars: Iterable[str]) -> str:
    r"""Write a regex class of characters, with ranges.

    >>> _char_class("cab~")
    '[\\x{61}-\\x{63}\\x{7e}]'
    """
    ranges: list[list[int]] = []
    for code in sorted(map(ord, chars)):
        if ranges and code == ranges[-1][1] + 1:
            ranges[-1][1] = code
        else:
            ranges.append([code, code])
    parts = []
    for first, last in ranges:
        end = f"-\\x{{{last:x}}}" if last > first else ""
        parts.append(f"\\x{{{first:x}}}{end}")
    return f"[{''.join(parts)}]"


def _post_processor(
    original: Any, codec: Codec, begin: int | None, end: int | None
) -> Json:
    """Make a post-processor that adds the ids before and after a prompt."""
    ids = {codec.piece(token): token for token in (begin, end) if token is not None}

    def special(token: int | None) -> list[Any]:
        if token is None:
            return []
        return [{"SpecialToken": {"id": codec.piece(token), "type_id": 0}}]

    def side(name: str) -> list[Any]:
        sequence = {"Sequence": {"id": name, "type_id": 0}}
        return [*special(begin), sequence, *special(end)]

    template = {
        "type": "TemplateProcessing",
        "single": side("A"),
        "pair": [*side("A"), *side("B")],
        "special_tokens": {
            name: {"id": name, "ids": [token], "tokens": [name]}
            for name, token in ids.items()
        },
    }
    # ByteLevel only trims offsets, so it can precede the template.
    if original is not None and original["type"] == "ByteLevel":
        return {"type": "Sequence", "processors": [original, template]}
    return template


def _has_same_ids(text: str, codec: Codec, begin: int | None, end: int | None) -> bool:
    """Check if a portable `tokenizer.json` gives the codec's entries, ids and texts."""
    try:
        portable = Tokenizer.from_str(text)
    except Exception:  # tokenizers raises the bare class  # noqa: BLE001
        return False
    portable.encode_special_tokens = True
    portable_pieces = {
        n: piece.replace(PRIVATE, "<") for piece, n in portable.get_vocab().items()
    }
    if _pieces_by_id(codec) != portable_pieces:
        return False

    added = portable.get_added_tokens_decoder()
    special = {number for number, token in added.items() if token.special}
    silent = sorted(codec.silent)
    for probe in PROBES:
        text_ids = codec.encode(codec.normalise(probe))
        prompt_ids = [i for i in (begin, *text_ids, end) if i is not None]
        if portable.encode(probe).ids != prompt_ids:
            return False
        for ids in (text_ids, [*silent, *text_ids, *text_ids, *silent]):
            shown = [token for token in ids if token not in special]
            if portable.decode(ids, skip_special_tokens=True) != codec.decode(shown):
                return False
    return True


def tokenizer_differences(
    one: Codec, other: Codec, texts: Iterable[str] = ()
) -> list[str]:
    """Describe how two tokenizers differ: special ids, entries, and ids of sample texts."""
    if one.sha256 == other.sha256 and one.special_ids == other.special_ids:
        return []
    differences = []
    for name, id_of_one in one.special_ids.items():
        id_of_other = other.special_ids[name]
        if id_of_one != id_of_other:
            differences.append(
                f"{name} is {id_of_one} in one and {id_of_other} in the other"
            )

    pieces = _pieces_by_id(one)
    other_pieces = _pieces_by_id(other)
    numbers = pieces.keys() | other_pieces.keys()
    differing = sorted(n for n in numbers if pieces.get(n) != other_pieces.get(n))
    if differing:
        first = differing[0]
        differences.append(
            f"{len(differing):,} of {max(len(pieces), len(other_pieces)):,} entries differ. The "
            f"first is entry {first}: {pieces.get(first)!r} in one and "
            f"{other_pieces.get(first)!r} in the other"
        )
    for text in (*PROBES, _RECIPE, *texts):
        if one.encode(one.normalise(text)) != other.encode(other.normalise(text)):
            differences.append(f"{text[:_MAX_SHOWN]!r} has different ids")
            break
    return differences


def _pieces_by_id(codec: Codec) -> dict[int, str]:
    """Return the text of each token by id, without the changes of the portable files."""
    pieces = {
        number: piece.replace(PRIVATE, "<") for piece, number in codec.pieces().items()
    }
    if codec.newline_id is not None:
        pieces[codec.newline_id] = "\n"
    return pieces
