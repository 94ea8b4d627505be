"""Tokenizer folders of Hugging Face: download, safety checks, reading and hashing.

A folder may be untrusted. Thirty-four steps of a `tokenizer.json` that each double a letter turn it
into 16 GiB, and the tokenizers library ends the process when it runs out of memory. So the growth
of a text is bounded before the first text is encoded.
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
from toque.storage.json_files import read_json, read_json_object

_COPIED_SETTINGS = ("model_max_length", "chat_template", "toque_words_cut")
"""Settings of `tokenizer_config.json` that are copied to the store and the trained model."""
MAX_GAPS = 1 << 16  # unused ids, in addition to one per entry
END_IDS = "toque_end_ids"
"""Setting with the ids that end texts, starting with the end token of training."""
CHAT = "chat_template.jinja"  # file of the template since transformers 4.43
_NEEDED: Final = ("tokenizer.json",)
_OPTIONAL: Final = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    CHAT,
    f"{FOLDER}/*.json",
    "generation_config.json",
    "config.json",
)
_ENDS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<eos>", "[SEP]")
# Bytes that one byte may become; 15,246 in our export of T5.
_MAX_GROWTH: Final = 1 << 16
_MAX_TEXT: Final = 256  # characters that a step may insert; usually a space or a mark
_MAX_ENTRY: Final = 1 << 14  # characters of an entry of the vocabulary
_GROWING_STEPS: Final = ("BertNormalizer", "ByteLevel", "NFC", "NFD", "NFKC", "NFKD")
_STEP_GROWTH: Final = 11.0  # largest growth by one of these steps, NFKC's
_LETTERS: Final = [chr(code) for code in (*range(32, 127), *range(161, 256))]
_MAX_LETTER_GROWTH: Final = 32  # characters that one of these letters may become
_ONE_OF: Final = re.compile(r"\[[^\[\]]+\]")  # a class, which matches single characters
_CHARSMAP: Final = "precompiled_charsmap"
_read_object: Final = partial(
    read_json_object, error=DataError, advice="Download the tokenizer again."
)


@dataclass(frozen=True)
class TokenizerFolder:
    """Tokenizer with the text of its file and the settings of its folder."""

    name: str
    json: str
    tokenizer: Tokenizer
    special_tokens: dict[str, str]
    """Special tokens by the names of tokenizer_config.json, such as "eos_token"."""
    settings: dict[str, Any]
    end_ids: tuple[int, ...] = ()
    """Ids that end texts, from the files of the model or store."""
    eos_id: int | None = None
    """Id of the end token of training, if it may differ from `eos_token`."""


class _Model(msgspec.Struct):
    """Vocabulary of a `tokenizer.json`, and the texts that the model inserts."""

    vocab: dict[str, int] | list[Any] = []
    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None


class TextSteps(msgspec.Struct):
    """Parts of a `tokenizer.json` that change or cut texts."""

    normalizer: Any = None
    pre_tokenizer: Any = None
    decoder: Any = None
    added_tokens: Any = None


class _Parts(TextSteps, kw_only=True):
    """Parts of a `tokenizer.json` that may use up the memory."""

    model: _Model


def read_folder(folder: Path, *, plain: bool = False) -> TokenizerFolder:
    """Read a `tokenizer.json` and the files next to it.

    A model of Toque has two tokenizers. `plain` reads the tokenizer for plain transformers.

    Raises:
        DataError: The folder has no tokenizer, or the tokenizer is damaged or malicious.
    """
    model_ends = end_ids_in(folder)
    folder = folder if plain else tokenizer_files_in(folder)
    path = folder / "tokenizer.json"
    if not folder.is_dir():
        raise DataError(
            f"The tokenizer folder {folder} does not exist. Give a folder with a tokenizer.json, "
            'the name of a tokenizer on the hub, or "trained:8192" to train one on the data.'
        )
    if not path.is_file():
        slow = sorted(
            p.name for p in folder.iterdir() if p.suffix in {".model", ".vocab"}
        )
        hint = f"Convert {', '.join(slow)} with" if slow else "Write it with"
        raise DataError(
            f"{folder} has no tokenizer.json. {hint} "
            f"transformers.AutoTokenizer.from_pretrained(NAME).save_pretrained({str(folder)!r})."
        )

    try:
        text = path.read_text(encoding="utf-8")
        _refuse_harmful(text, path)
        tokenizer = Tokenizer.from_str(text)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}.") from error
    except BaseException as error:
        if not _is_of_library(error):
            raise
        raise DataError(
            f"{path} is not a tokenizer that this version of the tokenizers library reads: {error}."
            " It may be truncated or written by a newer version. Download it again."
        ) from error

    config = _read_object(folder / "tokenizer_config.json")
    tokens = _read_object(folder / "special_tokens_map.json") | config
    settings = {name: config[name] for name in _COPIED_SETTINGS if name in config}
    if (chat := folder / CHAT).is_file():
        try:
            settings["chat_template"] = chat.read_text(encoding="utf-8")
        except (ValueError, OSError) as error:
            raise DataError(
                f"{chat} cannot be read: {error}. Download the tokenizer again."
            ) from error
    # In a store the folder is always called "tokenizer", so the settings have the name.
    name = str(config.get("toque_name", folder.name))
    settings["toque_name"] = name
    store_ends = _ids(config.get(END_IDS))
    return TokenizerFolder(
        name,
        text,
        tokenizer,
        _find_specials(tokenizer, tokens, folder),
        settings,
        end_ids=(*model_ends, *store_ends),
        eos_id=store_ends[0] if store_ends else None,
    )


def end_ids_in(folder: Path) -> tuple[int, ...]:
    """Collect the `eos_token_id` of a model's generation_config.json and config.json.

    Damaged files are ignored, because loading the model reports them.
    """
    files = ("generation_config.json", "config.json")
    configs = [read_json(folder / name, dict[str, Any]) or {} for name in files]
    return tuple(
        number for config in configs for number in _ids(config.get("eos_token_id"))
    )


def _ids(value: Any) -> list[int]:
    """List the token ids of a setting: an id or a list of ids. Anything else is ignored."""
    values = value if isinstance(value, list) else [value]
    return [
        number for number in values if type(number) is int and 0 <= number < 1 << 32
    ]


def _refuse_harmful(text: str, path: Path) -> None:
    """Refuse a `tokenizer.json` that may use up the memory."""
    try:
        parts = msgspec.json.decode(text, type=_Parts)
    except (msgspec.DecodeError, RecursionError):
        return  # the library reports the error
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
        raise DataError(
            f"The tokenizer {name} cannot be used: the tokenizers library fails on it "
            f"({' '.join(str(error).split())[:300]}). It is damaged or malicious. Download it "
            "again, or set model.tokenizer to another tokenizer."
        ) from error


def _is_of_library(error: BaseException) -> bool:
    """Check if the tokenizers library raised an error: a bare Exception, or a panic of Rust."""
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
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
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
    return folder_here(name, needs=_NEEDED, also=_OPTIONAL)


def _find_specials(
    tokenizer: Tokenizer, config: dict[str, Any], folder: Path
) -> dict[str, str]:
    """Find the begin, end, padding and unknown tokens of a vocabulary."""

    def find(key: str, *usual: str) -> str | None:
        entry = config.get(key)
        content = entry.get("content") if isinstance(entry, dict) else entry
        for token in (content, *usual):
            # Half a surrogate pair makes the library fail.
            if not isinstance(token, str) or any(
                "\ud800" <= c <= "\udfff" for c in token
            ):
                continue
            if tokenizer.token_to_id(token) is not None:
                return token
        return None

    eos = find("eos_token", *_ENDS)
    if eos is None:
        raise DataError(
            f"The vocabulary in {folder} has no end token: tokenizer_config.json does not name "
            f"one, and {', '.join(_ENDS)} are not in the vocabulary. Name the end token as "
            "eos_token in tokenizer_config.json."
        )
    pad = find("pad_token", "<pad>", "[PAD]", eos)
    # Without tokenizer_config.json, "<s>" or GPT-2's only special token begins a text.
    usual = () if "eos_token" in config else ("<s>", "<|endoftext|>")
    specials = {
        "eos_token": eos,
        "pad_token": pad,
        "bos_token": find("bos_token", *usual),
        "unk_token": find("unk_token", "<unk>"),
    }
    return {name: token for name, token in specials.items() if token is not None}


def _describe_harm(parts: _Parts) -> str | None:
    """Describe a part that may use up the memory. None if the tokenizer is safe."""
    model = parts.model
    vocab = model.vocab
    max_id = max(vocab.values(), default=0) if isinstance(vocab, dict) else 0
    if max_id > 2 * len(vocab) + MAX_GAPS:  # the library makes tables of this length
        return f"has {len(vocab):,} entries but an id of {max_id:,}"

    sides = (parts.normalizer, parts.pre_tokenizer, parts.decoder)
    growth = max(map(_growth, sides))
    if growth > _MAX_GROWTH:
        return f"may turn one byte into {growth:,.0f} bytes, but {_MAX_GROWTH:,} is the limit"

    steps = [step for side in sides for step in steps_of(side)]
    inserted = [
        text for step in steps for key, text in step.items() if key != _CHARSMAP
    ]
    inserted += [model.continuing_subword_prefix, model.end_of_word_suffix]
    entries = [*vocab] if isinstance(vocab, dict) else [entry[0] for entry in vocab]
    entries += [token["content"] for token in parts.added_tokens or ()]
    for what, texts, limit in (
        ("a text", inserted, _MAX_TEXT),
        ("an entry", entries, _MAX_ENTRY),
    ):
        longest = max((len(text) for text in texts if isinstance(text, str)), default=0)
        if longest > limit:
            return f"has {what} of {longest:,} characters, but {limit:,} is the limit"

    state = {
        "model": {"type": "BPE", "vocab": {}, "merges": []},
        "normalizer": parts.normalizer,
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


def steps_of(side: Any) -> Iterator[dict[str, Any]]:
    """Yield the steps of a normalizer, pre-tokenizer or decoder in order, without sequences."""
    stack = [side] if side else []
    while stack:
        step = stack.pop()
        if step["type"] != "Sequence":
            yield step
            continue
        for key in ("normalizers", "pretokenizers", "decoders"):
            stack += reversed(step.get(key, []))


def _growth(side: Any) -> float:
    """Bound the bytes that one byte may become.

    The growth of a replacement multiplies if it may match text that an earlier replacement has
    inserted. Otherwise only the largest growth counts, as for a hundred accents that are replaced
    by a hundred letters.
    """
    growth = 1.0
    largest = 1.0  # growth by a replacement that does not multiply
    inserted = ""
    for step in steps_of(side):
        if step["type"] == "Replace":
            size = len(step["content"].encode())
            text = step["pattern"].get("String")
            step_growth = max(1.0, size / len(text.encode()) if text else size + 1.0)
            if _may_match(step["pattern"], inserted):
                growth *= step_growth
            else:
                largest = max(largest, step_growth)
            inserted += step["content"]
        elif step["type"] == "Prepend":
            inserted += step["prepend"]
        else:
            step_growth = _STEP_GROWTH if step["type"] in _GROWING_STEPS else 1.0
            if (
                _CHARSMAP in step
            ):  # SentencePiece's replacements, after an index of their texts
                table = base64.b64decode(step[_CHARSMAP])
                replacements = table[4 + int.from_bytes(table[:4], "little") :].split(
                    b"\0"
                )
                step_growth = max(1.0, *map(len, replacements))
            growth *= largest * step_growth
            largest = 1.0
            inserted = ""
    return growth * largest


def _may_match(pattern: dict[str, str], text: str) -> bool:
    """Check if a pattern may match inside `text` or across its end."""
    if string := pattern.get("String"):
        return not set(string).isdisjoint(text)
    if not _ONE_OF.fullmatch(pattern["Regex"]):
        return bool(text)
    return bool(Replace(Regex(pattern["Regex"]), "").normalize_str(text) != text)
