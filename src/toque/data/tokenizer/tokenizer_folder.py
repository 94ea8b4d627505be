"""Tokenizer folders of Hugging Face: download, safety checks, reading and hashing.

A folder may be untrusted. Thirty-four steps of a `tokenizer.json` that each double a letter turn it
into 16 GiB, and the tokenizers library ends the process when it runs out of memory. So this module
bounds the growth of a text before the first text is encoded.
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
from typing import Any

import msgspec
from tokenizers import Regex, Tokenizer
from tokenizers.normalizers import Replace

from toque.errors import DataError
from toque.models.loading.hub import find_local_folder, resolve_folder
from toque.models.loading.provenance import FOLDER, tokenizer_files_in
from toque.storage.atomic import sha256_of
from toque.storage.json_files import read_json, read_json_object

_COPIED_SETTINGS = ("model_max_length", "chat_template", "toque_words_cut")
"""Settings of `tokenizer_config.json` that are copied to the store and the trained model."""
MAX_GAPS = 1 << 16  # unused ids, in addition to one per entry
END_IDS = "toque_end_ids"
"""Setting with the ids that end a text. The first one is the end token of training."""
CHAT = "chat_template.jinja"  # file of the chat template since transformers 4.43
_SPECIALS_MAP = "special_tokens_map.json"
_NEEDED = ("tokenizer.json",)
_OPTIONAL = (
    "tokenizer_config.json",
    _SPECIALS_MAP,
    CHAT,
    f"{FOLDER}/*.json",
    "generation_config.json",
    "config.json",
)
_ENDS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<eos>", "[SEP]")
# Maximum number of bytes that one byte may become. Our export of T5 has 15,246.
_MAX_GROWTH = 1 << 16
_MAX_TEXT = 256  # maximum number of characters that a step may insert; usually a space or a mark
_MAX_ENTRY = 1 << 14  # maximum number of characters per entry of the vocabulary
_MAX_ERROR = 300  # maximum number of characters of the library's error in a message
_GROWING_STEPS = ("BertNormalizer", "ByteLevel", "NFC", "NFD", "NFKC", "NFKD")
_STEP_GROWTH = 11.0  # largest growth by one of these steps, which is NFKC's
_LETTERS = [chr(code) for code in (*range(32, 127), *range(161, 256))]
_MAX_LETTER_GROWTH = 32  # characters that one of these letters may become
# A character class, which matches single characters.
_CHAR_CLASS = re.compile(r"\[[^\[\]]+\]")
_CHARSMAP = "precompiled_charsmap"
Json = dict[str, Any]
_read_object = partial(
    read_json_object, error=DataError, advice="Download the tokenizer again."
)


@dataclass(frozen=True)
class TokenizerFolder:
    """Tokenizer with the text of its file, and the settings of its folder."""

    name: str
    json: str
    tokenizer: Tokenizer
    special_tokens: dict[str, str]
    """Special tokens by the names of tokenizer_config.json, such as "eos_token"."""
    settings: Json
    end_ids: tuple[int, ...] = ()
    """Ids that end a text, from the files of the model or store."""
    eos_id: int | None = None
    """Id of the end token of training. None means `eos_token`."""


class _Model(msgspec.Struct):
    """Vocabulary of a `tokenizer.json`, and the texts that the model inserts."""

    vocab: dict[str, int] | list[Any] = []
    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None


class TextSteps(msgspec.Struct):
    """Parts of a `tokenizer.json` that change or split texts."""

    normalizer: Any = None
    pre_tokenizer: Any = None
    decoder: Any = None
    added_tokens: Any = None


class _Parts(TextSteps, kw_only=True):
    """Parts of a `tokenizer.json` that may exhaust the memory."""

    model: _Model


def read_folder(folder: Path, *, plain: bool = False) -> TokenizerFolder:
    """Read a `tokenizer.json` and the files next to it.

    A model of Toque has two tokenizers. `plain` selects the tokenizer for plain transformers.

    Raises:
        DataError: The folder has no tokenizer, or the tokenizer is damaged or malicious.
    """
    model_ends = end_ids_in(folder)
    files_folder = folder if plain else tokenizer_files_in(folder)
    path = files_folder / "tokenizer.json"
    _refuse_missing(path)
    text, tokenizer = _read_tokenizer(path)

    config = _read_object(files_folder / "tokenizer_config.json")
    specials = _read_object(files_folder / _SPECIALS_MAP) | config
    settings = {name: config[name] for name in _COPIED_SETTINGS if name in config}
    chat = files_folder / CHAT
    if chat.is_file():
        try:
            settings["chat_template"] = chat.read_text(encoding="utf-8")
        except (ValueError, OSError) as error:
            raise DataError(
                f"{chat} cannot be read: {error}. Download the tokenizer again."
            ) from error
    # In a store the folder is always called "tokenizer", so the settings have the name.
    name = str(config.get("toque_name", files_folder.name))
    settings["toque_name"] = name
    store_ends = _ids(config.get(END_IDS))
    return TokenizerFolder(
        name,
        text,
        tokenizer,
        _find_specials(tokenizer, specials, files_folder),
        settings,
        end_ids=(*model_ends, *store_ends),
        eos_id=store_ends[0] if store_ends else None,
    )


def _refuse_missing(path: Path) -> None:
    """Refuse a folder without a `tokenizer.json`, and explain how to write the file."""
    folder = path.parent
    if not folder.is_dir():
        raise DataError(
            f"The tokenizer folder {folder} does not exist. Give a folder with a tokenizer.json, "
            'the name of a tokenizer on the hub, or "trained:8192" to train one on the data.'
        )
    if not path.is_file():
        old_files = sorted(
            p.name for p in folder.iterdir() if p.suffix in {".model", ".vocab"}
        )
        hint = f"Convert {', '.join(old_files)} with" if old_files else "Write it with"
        raise DataError(
            f"{folder} has no tokenizer.json. {hint} "
            f"transformers.AutoTokenizer.from_pretrained(NAME).save_pretrained({str(folder)!r})."
        )


def _read_tokenizer(path: Path) -> tuple[str, Tokenizer]:
    """Read and check a `tokenizer.json`. Return its text and the tokenizer."""
    try:
        text = path.read_text(encoding="utf-8")
        _refuse_harmful(text, path)
        return text, Tokenizer.from_str(text)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}.") from error
    except BaseException as error:
        if not _is_of_library(error):
            raise
        raise DataError(
            f"{path} is not a tokenizer that this version of the tokenizers library can read: "
            f"{error}. It may be truncated or written by a newer version. Download it again."
        ) from error


def end_ids_in(folder: Path) -> tuple[int, ...]:
    """Collect the `eos_token_id` of a model's generation_config.json and config.json.

    Damaged files are ignored, because loading the model reports them.
    """
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        config = read_json(folder / name, Json) or {}
        ids += _ids(config.get("eos_token_id"))
    return tuple(ids)


def _ids(value: Any) -> list[int]:
    """List the token ids of a setting: an id or a list of ids. Anything else is ignored."""
    values = value if isinstance(value, list) else [value]
    return [i for i in values if type(i) is int and 0 <= i < 1 << 32]


def _refuse_harmful(text: str, path: Path) -> None:
    """Refuse a `tokenizer.json` that may exhaust the memory."""
    try:
        parts = msgspec.json.decode(text, type=_Parts)
    except (msgspec.DecodeError, RecursionError):
        return  # the library will report the error
    try:
        harm = _describe_harm(parts)
    except (ValueError, TypeError, LookupError, AttributeError):
        harm = "has a step of unknown form"
    if harm is not None:
        raise DataError(
            f"{path} {harm}. It is damaged or malicious. Download it again, or set model.tokenizer "
            "to another tokenizer."
        )


@contextmanager
def tokenizer_faults(name: str) -> Iterator[None]:
    """Convert errors and panics of the tokenizers library into a DataError."""
    try:
        yield
    except BaseException as error:
        if not _is_of_library(error):
            raise
        reason = " ".join(str(error).split())[:_MAX_ERROR]
        raise DataError(
            f"The tokenizer {name} cannot be used: the tokenizers library fails on it ({reason}). "
            "It is damaged or malicious. Download it again, or set model.tokenizer to another "
            "tokenizer."
        ) from error


def _is_of_library(error: BaseException) -> bool:
    """Check if the tokenizers library raised an error: a bare Exception, or a Rust panic."""
    return type(error) is Exception or type(error).__name__ == "PanicException"


def is_toques(folder: Path) -> bool:
    """Check if a folder's tokenizer is from a store."""
    return "toque_name" in _read_object(folder / "tokenizer_config.json")


def hash_of_folder(folder: Path) -> str:
    """Compute the SHA-256 of the files from which a codec is made.

    Raises:
        DataError: The folder has no tokenizer.
    """
    if not (folder / "tokenizer.json").is_file():
        read_folder(folder)  # raises the error
    folder = tokenizer_files_in(folder)
    digest = hashlib.sha256()
    for name in ("tokenizer.json", "tokenizer_config.json", _SPECIALS_MAP):
        path = folder / name
        digest.update((sha256_of(path) if path.is_file() else "").encode())
    return digest.hexdigest()


def resolve_tokenizer(name: str) -> Path:
    """Find the folder of a tokenizer. Download it first if it is on the hub."""
    return resolve_folder(
        name, setting="model.tokenizer", needs=_NEEDED, also=_OPTIONAL, error=DataError
    )


def tokenizer_here(name: str) -> Path | None:
    """Find the folder of a tokenizer without a download. None if it needs one."""
    return find_local_folder(name, needs=_NEEDED, also=_OPTIONAL)


def _find_specials(tokenizer: Tokenizer, config: Json, folder: Path) -> dict[str, str]:
    """Find the begin, end, padding and unknown tokens of a vocabulary."""

    def is_entry(token: object) -> bool:
        """Check if a token is in the vocabulary. Half a surrogate pair makes the library fail."""
        if not isinstance(token, str) or any("\ud800" <= c <= "\udfff" for c in token):
            return False
        return tokenizer.token_to_id(token) is not None

    def find(key: str, *usual: str) -> str | None:
        entry = config.get(key)
        content = entry.get("content") if isinstance(entry, dict) else entry
        return next(filter(is_entry, (content, *usual)), None)

    eos = find("eos_token", *_ENDS)
    if eos is None:
        raise DataError(
            f"The vocabulary in {folder} has no end token: tokenizer_config.json does not name "
            f"one, and {', '.join(_ENDS)} are not in the vocabulary. Name the end token as "
            "eos_token in tokenizer_config.json."
        )
    pad = find("pad_token", "<pad>", "[PAD]", eos)
    # Without tokenizer_config.json, "<s>" or GPT-2's only special token is the begin token.
    usual = () if "eos_token" in config else ("<s>", "<|endoftext|>")
    specials = {
        "eos_token": eos,
        "pad_token": pad,
        "bos_token": find("bos_token", *usual),
        "unk_token": find("unk_token", "<unk>"),
    }
    return {name: token for name, token in specials.items() if token is not None}


def _describe_harm(parts: _Parts) -> str | None:
    """Describe a part that may exhaust the memory. None if the tokenizer is safe."""
    vocab = parts.model.vocab
    max_id = max(vocab.values(), default=0) if isinstance(vocab, dict) else 0
    if max_id > 2 * len(vocab) + MAX_GAPS:  # the library makes tables of this length
        return f"has {len(vocab):,} entries but an id of {max_id:,}"

    sides = (parts.normalizer, parts.pre_tokenizer, parts.decoder)
    growth = max(map(_bound_growth, sides))
    if growth > _MAX_GROWTH:
        return f"may turn one byte into {growth:,.0f} bytes, but {_MAX_GROWTH:,} is the limit"
    return _describe_long_text(parts) or _describe_letter_growth(parts.normalizer)


def _describe_long_text(parts: _Parts) -> str | None:
    """Describe an entry, or a text that a step inserts, that is too long."""
    model = parts.model
    vocab = model.vocab
    inserted = [model.continuing_subword_prefix, model.end_of_word_suffix]
    for side in (parts.normalizer, parts.pre_tokenizer, parts.decoder):
        for step in steps_of(side):
            inserted += [text for key, text in step.items() if key != _CHARSMAP]
    entries = [*vocab] if isinstance(vocab, dict) else [entry[0] for entry in vocab]
    entries += [token["content"] for token in parts.added_tokens or ()]
    for kind, texts, limit in (
        ("a text", inserted, _MAX_TEXT),
        ("an entry", entries, _MAX_ENTRY),
    ):
        longest = max((len(text) for text in texts if isinstance(text, str)), default=0)
        if longest > limit:
            return f"has {kind} of {longest:,} characters, but {limit:,} is the limit"
    return None


def _describe_letter_growth(normalizer_state: Any) -> str | None:
    """Describe a letter that a normalizer turns into too many characters."""
    state = {
        "model": {"type": "BPE", "vocab": {}, "merges": []},
        "normalizer": normalizer_state,
    }
    normalizer = Tokenizer.from_str(json.dumps(state)).normalizer
    for letter in _LETTERS if normalizer else ():
        size = len(normalizer.normalize_str(letter))
        if size > _MAX_LETTER_GROWTH:
            return (
                f"turns {letter!r} into {size:,} characters, but "
                f"{_MAX_LETTER_GROWTH} is the limit"
            )
    return None


def steps_of(side: Any) -> Iterator[Json]:
    """Yield the steps of a normalizer, pre-tokenizer or decoder in order. Flatten sequences."""
    stack = [side] if side else []
    while stack:
        step = stack.pop()
        if step["type"] != "Sequence":
            yield step
            continue
        for key in ("normalizers", "pretokenizers", "decoders"):
            stack += reversed(step.get(key, []))


def _bound_growth(side: Any) -> float:
    """Compute an upper bound of the bytes that one byte may become.

    The growth of a replacement multiplies if it may match text that an earlier replacement has
    inserted. Otherwise only the largest growth counts, as for a hundred accents that are replaced
    by a hundred letters.
    """
    growth = 1.0
    largest = 1.0  # growth by a replacement that does not multiply
    inserted = ""
    for step in steps_of(side):
        if step["type"] == "Replace":
            step_growth = _replacement_growth(step)
            if _may_match(step["pattern"], inserted):
                growth *= step_growth
            else:
                largest = max(largest, step_growth)
            inserted += step["content"]
        elif step["type"] == "Prepend":
            inserted += step["prepend"]
        else:
            # A step of another kind may change all bytes, including inserted text. So its growth
            # always multiplies, and later replacements are bounded separately.
            step_growth = _STEP_GROWTH if step["type"] in _GROWING_STEPS else 1.0
            if _CHARSMAP in step:
                step_growth = _charsmap_growth(step[_CHARSMAP])
            growth *= largest * step_growth
            largest = 1.0
            inserted = ""
    return growth * largest


def _replacement_growth(step: Json) -> float:
    """Compute an upper bound of the growth by one replacement. A regex may match nothing."""
    size = len(step["content"].encode())
    text = step["pattern"].get("String")
    return max(1.0, size / len(text.encode()) if text else size + 1.0)


def _charsmap_growth(charsmap: str) -> float:
    """Compute an upper bound of the growth by SentencePiece's replacements.

    The decoded map has the size of an index, the index, and the replacements separated by 0.
    """
    table = base64.b64decode(charsmap)
    index_size = int.from_bytes(table[:4], "little")
    replacements = table[4 + index_size :].split(b"\0")
    return max(1.0, *map(len, replacements))


def _may_match(pattern: dict[str, str], text: str) -> bool:
    """Check if a pattern may match inside `text` or across its end."""
    if string := pattern.get("String"):
        return not set(string).isdisjoint(text)
    if not _CHAR_CLASS.fullmatch(pattern["Regex"]):
        return bool(text)
    return bool(Replace(Regex(pattern["Regex"]), "").normalize_str(text) != text)
