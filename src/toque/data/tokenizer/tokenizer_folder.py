"""Tokenizer folders of Hugging Face: read, bounded, hashed, and found behind a hub name.

A folder may be anyone's. The steps of a `tokenizer.json` follow one another, so that thirty-four
which each double a letter make 16 GiB of it, and the tokenizers library ends the process that has
no memory for them. So what the steps may make of a text is bounded before they are used.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
from tokenizers import Regex, Tokenizer
from tokenizers.normalizers import Replace

from toque.errors import DataError
from toque.models.loading.hub import folder_here, resolve_folder
from toque.models.loading.provenance import FOLDER, tokenizer_files_in
from toque.storage.atomic import sha256_of
from toque.storage.json_files import json_object, read_json

_KEPT = ("model_max_length", "chat_template", "toque_words_cut")
"""Settings of a `tokenizer_config.json` worth carrying into the store and the trained model."""
MOST_GAPS = 1 << 16  # ids without an entry, besides as many as the entries
END_IDS = "toque_end_ids"  # ids that end texts, first the one that training writes
CHAT = "chat_template.jinja"  # where newer releases of transformers keep the template
_NEEDED: Final = ("tokenizer.json",)
_WORTH_HAVING: Final = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    CHAT,
    f"{FOLDER}/*.json",
    "generation_config.json",
    "config.json",
)
_ENDS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<eos>", "[SEP]")
_MOST: Final = 1 << 16  # bytes that one byte may become; in T5's file for transformers 15,246
_MOST_TEXT: Final = 256  # characters that a step puts in; usually a space or a mark
_MOST_ENTRY: Final = 1 << 14  # characters of an entry: a token of an answer
_WIDENING: Final = ("BertNormalizer", "ByteLevel", "NFC", "NFD", "NFKC", "NFKD")
_WIDEST: Final = 11.0  # bytes that NFKC, the worst of those, makes of one
_ORDINARY: Final = [chr(code) for code in (*range(32, 127), *range(161, 256))]
_MOST_ORDINARY: Final = 32
_ONE_OF: Final = re.compile(r"\[[^\[\]]+\]")  # it finds single characters, whatever is around them
_CHARSMAP: Final = "precompiled_charsmap"
_object: Final = partial(json_object, error=DataError, todo="Fetch the tokenizer again.")


@dataclass(frozen=True)
class SpecialForms:
    """The written forms; None where the vocabulary has none."""

    eos: str
    pad: str
    bos: str | None
    unk: str | None


@dataclass(frozen=True)
class TokenizerFolder:
    """A tokenizer with its file's text, and what its folder says about it."""

    name: str
    json: str
    tokenizer: Tokenizer
    specials: SpecialForms
    settings: dict[str, Any]
    end_ids: tuple[int, ...] = ()
    """Ids that end texts, as the files of the model or store name them."""
    eos_id: int | None = None
    """Id that training ends texts with, where it may be another than that of `eos_token`."""


class _Model(msgspec.Struct):
    """The part of a tokenizer's model that gives ids and puts texts in."""

    vocab: dict[str, int] | list[Any] = []
    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None


class TextSteps(msgspec.Struct):
    """The parts of a `tokenizer.json` that change texts or cut them."""

    normalizer: Any = None
    pre_tokenizer: Any = None
    decoder: Any = None
    added_tokens: Any = None


class _Parts(TextSteps, kw_only=True):
    """Those parts, and the one with the entries."""

    model: _Model


def read_folder(folder: Path, *, plain: bool = False) -> TokenizerFolder:
    """Read a `tokenizer.json` and its neighbours; `plain` takes transformers' of a model's two."""
    model_ends = end_ids_in(folder)
    folder = folder if plain else tokenizer_files_in(folder)
    path = folder / "tokenizer.json"
    if not folder.is_dir():
        raise DataError(
            f"There is no tokenizer folder {folder}. Give a folder that holds a tokenizer.json, "
            'the name of a tokenizer on the hub, or "trained:8192" to learn one from the data.'
        )
    if not path.is_file():
        slow = sorted(p.name for p in folder.iterdir() if p.suffix in {".model", ".vocab"})
        hint = f" {', '.join(slow)} can be converted:" if slow else " It can be written with"
        raise DataError(
            f"{folder} holds no tokenizer.json.{hint} "
            f"transformers.AutoTokenizer.from_pretrained(NAME).save_pretrained({str(folder)!r})."
        )
    try:
        text = path.read_text(encoding="utf-8")
        _refuse_harm(text, path)
        tokenizer = Tokenizer.from_str(text)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}.") from error
    except BaseException as error:
        if not _is_refusal(error):
            raise
        raise DataError(
            f"{path} is not a tokenizer this version of the tokenizers library reads: {error}. "
            "It may be cut short, or written by a newer version; fetch it again."
        ) from error
    config = _object(folder / "tokenizer_config.json")
    specials = _specials(tokenizer, _object(folder / "special_tokens_map.json") | config, folder)
    settings = {name: config[name] for name in _KEPT if name in config}
    if (chat := folder / CHAT).is_file():
        try:
            settings["chat_template"] = chat.read_text(encoding="utf-8")
        except (ValueError, OSError) as error:
            why = f"{chat} cannot be read: {error}. Fetch the tokenizer again."
            raise DataError(why) from error
    # A folder inside a store is called "tokenizer": its own name was kept in the settings.
    name = str(config.get("toque_name", folder.name))
    settings["toque_name"] = name
    own_ends = _ids(config.get(END_IDS))
    return TokenizerFolder(
        name,
        text,
        tokenizer,
        specials,
        settings,
        end_ids=(*model_ends, *own_ends),
        eos_id=own_ends[0] if own_ends else None,
    )


def end_ids_in(folder: Path) -> tuple[int, ...]:
    """Every `eos_token_id` of a model's generation_config.json and config.json.

    Damaged files name none: the code that loads the model refuses them.
    """
    files = ("generation_config.json", "config.json")
    objects = [read_json(folder / name, dict[str, Any]) or {} for name in files]
    return tuple(number for one in objects for number in _ids(one.get("eos_token_id")))


def _ids(value: Any) -> list[int]:
    """The token ids in a setting that is one id, a list of ids, or anything else."""
    listed = value if isinstance(value, list) else [value]
    return [one for one in listed if type(one) is int and 0 <= one < 1 << 32]


def _refuse_harm(text: str, path: Path) -> None:
    """Refuse what takes all memory: ids far beyond the number of entries, texts that multiply."""
    try:
        parts = msgspec.json.decode(text, type=_Parts)
    except (msgspec.DecodeError, RecursionError):
        return  # the library says what is wrong
    try:
        does = _harm(parts)
    except (ValueError, TypeError, LookupError, AttributeError):
        does = "has a step of no known form"
    if does is not None:
        raise DataError(
            f"{path} {does}. It is damaged or made to harm: take another in model.tokenizer, or "
            "fetch it again."
        )


@contextmanager
def tokenizer_faults(name: str) -> Iterator[None]:
    """Turn what the tokenizers library raises as it works, panics too, into a DataError."""
    try:
        yield
    except BaseException as error:
        if not _is_refusal(error):
            raise
        raise DataError(
            f"The tokenizer {name} cannot be used: the tokenizers library fails on it "
            f"({' '.join(str(error).split())[:300]}). It is damaged or made to harm: take another "
            "in model.tokenizer, or fetch it again."
        ) from error


def _is_refusal(error: BaseException) -> bool:
    """True if the tokenizers library raised it: the bare class, or a panic of Rust."""
    return type(error) is Exception or type(error).__name__ == "PanicException"


def is_toques(folder: Path) -> bool:
    """True if a folder's tokenizer came out of a store."""
    return "toque_name" in _object(folder / "tokenizer_config.json")


def hash_of_folder(folder: Path) -> str:
    """SHA-256 over the files a codec is made from; DataError where there is no tokenizer."""
    if not (folder / "tokenizer.json").is_file():
        read_folder(folder)  # says what is missing
    folder = tokenizer_files_in(folder)
    digest = hashlib.sha256()
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        path = folder / name
        digest.update((sha256_of(path) if path.is_file() else "").encode())
    return digest.hexdigest()


def resolve_tokenizer(name: str) -> Path:
    """The folder of tokenizer `name`: a folder as it stands, else downloaded from the hub."""
    return resolve_folder(
        name, setting="model.tokenizer", needs=_NEEDED, also=_WORTH_HAVING, error=DataError
    )


def tokenizer_here(name: str) -> Path | None:
    """The folder of tokenizer `name` where nothing needs to be downloaded for it, else None."""
    return folder_here(name, needs=_NEEDED, also=_WORTH_HAVING)


def _specials(tokenizer: Tokenizer, config: dict[str, Any], folder: Path) -> SpecialForms:
    def named(key: str, *usual: str) -> str | None:
        entry = config.get(key)
        content = entry.get("content") if isinstance(entry, dict) else entry
        for token in (content, *usual):
            # Half a surrogate pair is no text that a tokenizer could hold.
            if not isinstance(token, str) or any("\ud800" <= c <= "\udfff" for c in token):
                continue
            if tokenizer.token_to_id(token) is not None:
                return token
        return None

    eos = named("eos_token", *_ENDS)
    if eos is None:
        raise DataError(
            f"The vocabulary in {folder} has no end token: tokenizer_config.json names none and it "
            f"holds none of {', '.join(_ENDS)}. Name one as eos_token in tokenizer_config.json."
        )
    pad = named("pad_token", "<pad>", "[PAD]", eos)
    # Without a tokenizer_config.json a "<s>" or GPT-2's single special token begins a text.
    usual = () if "eos_token" in config else ("<s>", "<|endoftext|>")
    return SpecialForms(eos, pad or eos, named("bos_token", *usual), named("unk_token", "<unk>"))


def _harm(parts: _Parts) -> str | None:
    """Description of what could take all memory; None where there is none."""
    vocab, model = parts.model.vocab, parts.model
    highest = max(vocab.values(), default=0) if isinstance(vocab, dict) else 0
    if highest > 2 * len(vocab) + MOST_GAPS:  # tables as long as the highest are made of them
        return f"has {len(vocab):,} entries, and the id {highest:,} among them"
    sides = (parts.normalizer, parts.pre_tokenizer, parts.decoder)
    growth, steps = max(map(_growth, sides)), [step for side in sides for step in steps_of(side)]
    if growth > _MOST:
        return f"may make {growth:,.0f} bytes of one, where {_MOST:,} are allowed"
    texts = [text for step in steps for key, text in step.items() if key != _CHARSMAP]
    texts += [model.continuing_subword_prefix, model.end_of_word_suffix]
    names = [*vocab] if isinstance(vocab, dict) else [entry[0] for entry in vocab]
    names += [token["content"] for token in parts.added_tokens or ()]
    for what, found, most in (("a text", texts, _MOST_TEXT), ("an entry", names, _MOST_ENTRY)):
        longest = max((len(text) for text in found if isinstance(text, str)), default=0)
        if longest > most:
            return f"puts in {what} of {longest:,} characters, where {most:,} are allowed"
    held = {"model": {"type": "BPE", "vocab": {}, "merges": []}, "normalizer": parts.normalizer}
    rewrites = Tokenizer.from_str(json.dumps(held)).normalizer
    for letter in _ORDINARY if rewrites else ():
        if (size := len(rewrites.normalize_str(letter))) > _MOST_ORDINARY:
            return f"makes {size:,} characters of {letter!r}, where {_MOST_ORDINARY} are allowed"
    return None


def steps_of(side: Any) -> Iterator[dict[str, Any]]:
    """The steps of a part in their order, those inside a sequence one by one."""
    left = [side] if side else []
    while left:
        step = left.pop()
        if step["type"] != "Sequence":
            yield step
            continue
        for inner in ("normalizers", "pretokenizers", "decoders"):
            left += reversed(step.get(inner, []))


def _growth(side: Any) -> float:
    """The bytes that one byte may become.

    Replacements multiply where one may find what those before it have put in. Those of a hundred
    accents by a hundred letters do not: of them the largest counts.
    """
    growth, apart, put_in = 1.0, 1.0, ""
    for step in steps_of(side):
        if step["type"] == "Replace":
            size, text = len(step["content"].encode()), step["pattern"].get("String")
            own = max(1.0, size / len(text.encode()) if text else size + 1.0)
            if _finds(step["pattern"], put_in):
                growth *= own
            else:
                apart = max(apart, own)
            put_in += step["content"]
        elif step["type"] == "Prepend":
            put_in += step["prepend"]
        else:
            own = _WIDEST if step["type"] in _WIDENING else 1.0
            if _CHARSMAP in step:  # SentencePiece's replacements, behind a table for finding them
                table = base64.b64decode(step[_CHARSMAP])
                replacements = table[4 + int.from_bytes(table[:4], "little") :].split(b"\0")
                own = max(1.0, *map(len, replacements))
            growth, apart, put_in = growth * apart * own, 1.0, ""
    return growth * apart


def _finds(pattern: dict[str, str], text: str) -> bool:
    """True if a replacement may find something in a text, or across its end."""
    if wanted := pattern.get("String"):
        return not set(wanted).isdisjoint(text)
    if not _ONE_OF.fullmatch(pattern["Regex"]):
        return bool(text)
    return bool(Replace(Regex(pattern["Regex"]), "").normalize_str(text) != text)
