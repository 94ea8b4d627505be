import gzip
import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
)

from toque.data.tokenizer.codec import Codec, TextStream, load_codec
from toque.data.tokenizer.tokenizer_folder import resolve_tokenizer
from toque.data.tokenizer.tokenizer_training import train_codec
from toque.data.tokenizer.word_cache import Encoded
from toque.errors import DataError

FAMILIES = ["decoder", "encoder-decoder"]
LOADED: dict[str, Codec] = {}


@pytest.fixture(params=FAMILIES)
def codec(request: pytest.FixtureRequest, tokenizers_at: dict[str, Path]) -> Codec:
    if request.param not in LOADED:
        LOADED[request.param] = load_codec(tokenizers_at[request.param])
    return LOADED[request.param]


def one_space(text: str) -> str:
    return "\n".join(re.sub(r"\s+", " ", line).strip() for line in text.split("\n"))


@pytest.mark.parametrize(
    "text", ["", "a", "\n", "\n\n", "a\nb", "a\n\n- b\n1. c\n", " a  b \n c"]
)
def test_line_breaks_survive(codec: Codec, text: str) -> None:
    assert one_space(codec.decode(codec.encode(codec.normalise(text)))) == one_space(
        text
    )


def test_the_marker_is_the_highest_spare_token_as_written(codec: Codec) -> None:
    if codec.bos_id is not None:
        assert codec.newline_id is None
        return
    assert (codec.pad_id, codec.eos_id, codec.unk_id) == (0, 1, 2)
    assert codec.newline_id == codec.vocab_size - 100
    assert codec.encode("\n\n") == [codec.newline_id] * 2


def test_no_sentinel_stands_for_the_line_breaks_of_another_model(
    tokenizers_at: dict[str, Path],
) -> None:
    folder = tokenizers_at["encoder-decoder"]
    codec = load_codec(folder)
    marker = codec.newline_id
    codec.use_plain_rules()
    plain = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert codec.encode("a\nb") == plain.encode("a\nb", add_special_tokens=False).ids
    assert codec.encode_flat(["a\nb"]).flat.tolist() == codec.encode("a\nb")
    shown = codec.decode([*codec.encode("salt"), marker], skip_special_tokens=True)
    assert shown == "salt"


def test_special_tokens_are_silent_in_text(codec: Codec) -> None:
    ids = [codec.pad_id, *codec.encode("add salt"), codec.eos_id, codec.pad_id]
    assert codec.decode(ids) == "add salt"


@pytest.mark.parametrize(
    "text", ["end </s> of", "<|endoftext|>", "<pad><extra_id_99> <unk>"]
)
def test_a_written_special_token_is_text(codec: Codec, text: str) -> None:
    ids = set(codec.encode(codec.normalise(text)))
    assert ids.isdisjoint((codec.pad_id, codec.eos_id, codec.bos_id, codec.newline_id))


CHARACTERS = "aab1'.,½ñe\u0301 \n  \n\t\u00a0\u2003<{\x00\x01\x02\x03\x1c"
TEXTS = st.lists(st.text(st.sampled_from(CHARACTERS), max_size=30))


def rows(encoded: Encoded) -> list[list[int]]:
    return [row.tolist() for row in np.split(encoded.flat, encoded.ends[:-1])][
        : len(encoded.ends)
    ]


@pytest.mark.parametrize("family", FAMILIES)
@given(texts=TEXTS)
def test_the_fast_way_gives_the_tokenizers_own_ids(
    tokenizers_at: dict[str, Path], family: str, texts: list[str]
) -> None:
    codec = LOADED.setdefault(family, load_codec(tokenizers_at[family]))
    right = [codec.encode(codec.normalise(text)) for text in texts]
    found = codec.encode_flat(texts)
    assert rows(found) == right
    # The sample taken by encode_flat would hide a wrong table.
    assert not found.disagreed
    # What is odd goes the long way; common texts must not.
    assert codec._words is not None
    common = "stir  the   soup\n- 1½ eggs \n1. Mix.\n\n2. Go.  "
    assert not len(codec._words.encode([common])[1])


def test_characters_that_are_lost_are_counted_each_time(
    tokenizers_at: dict[str, Path],
) -> None:
    codec = load_codec(tokenizers_at["encoder-decoder"])
    found = codec.encode_flat(["add 鍋 salt", "salt", " 鍋鍋"] * 70)
    assert found.lost == {"鍋": 210}
    assert codec.unk_id in found.flat


def test_a_wrong_fast_way_is_found_and_left(tokenizers_at: dict[str, Path]) -> None:
    codec = load_codec(tokenizers_at["decoder"])
    texts = ["stir the soup", "add salt"]
    right = rows(codec.encode_flat(texts))
    codec._words._table[b"the"] = codec._words._table[b"soup"]  # as if learnt wrongly
    found = codec.encode_flat(texts)
    assert rows(found) == right == [codec.encode(text) for text in texts]
    assert found.disagreed


@pytest.mark.parametrize("family", FAMILIES)
@given(text=st.text(max_size=40))
def test_normalising_twice_changes_nothing(
    tokenizers_at: dict[str, Path], family: str, text: str
) -> None:
    codec = LOADED.setdefault(family, load_codec(tokenizers_at[family]))
    once = codec.normalise(text)
    assert codec.normalise(once) == once
    assert once.count("\n") >= text.count("\n")


def test_what_the_vocabulary_lacks_becomes_readable() -> None:
    codec = train_codec(
        ["1/2 cup (8 oz) jalapeno - 350 degrees 'salt' 234567890"] * 9,
        vocab_size=300,
        kind="unigram",
    )
    shown = codec.normalise(
        "1½ cups jalapeño {8 oz} \u2014 350\u00b0 \u2019salt\u2019 1\u20442"
    )
    assert shown == "1 1/2 cups jalapeno (8 oz) - 350 degrees  'salt' 1/2"
    assert codec.rewriter.lost(["鍋 鍋 cups"]) == {}
    text = codec.normalise("鍋 鍋 salt")
    assert codec.rewriter.lost([text]) == {"鍋": 2}
    assert codec.encode(text).count(codec.unk_id) == 2


def test_saving_and_loading_keeps_everything(codec: Codec, tmp_path: Path) -> None:
    codec.save(tmp_path / "kept")
    again = load_codec(tmp_path / "kept")
    for name in (
        "name",
        "sha256",
        "vocab_size",
        "pad_id",
        "eos_id",
        "bos_id",
        "unk_id",
    ):
        assert getattr(again, name) == getattr(codec, name), name
    assert again.newline_id == codec.newline_id
    again.save(tmp_path / "again")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (
            tmp_path / "kept" / name
        ).read_bytes()


def test_transformers_reads_what_is_saved(codec: Codec, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    codec.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    line = "stir the soup and add 2 eggs"
    assert theirs(line, add_special_tokens=False)["input_ids"] == codec.encode(line)
    assert (theirs.eos_token_id, theirs.pad_token_id) == (codec.eos_id, codec.pad_id)
    assert len(theirs) == codec.vocab_size


def without_newline() -> Tokenizer:
    words = {"</s>": 0, "<unk>": 1, "fold": 2, "stir": 3}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def test_a_vocabulary_without_a_spare_token_grows_by_one(tmp_path: Path) -> None:
    without_newline().save(str(tmp_path / "tokenizer.json"))
    codec = load_codec(tmp_path)
    assert (codec.vocab_size, codec.newline_id) == (5, 4)
    assert codec.encode("fold\nstir") == [2, 4, 3]
    codec.save(tmp_path / "kept")
    again = load_codec(tmp_path / "kept")
    assert (again.vocab_size, again.newline_id, again.sha256) == (5, 4, codec.sha256)


def test_what_is_no_tokenizer_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"The tokenizer folder .* does not exist"):
        load_codec(tmp_path / "absent")
    (tmp_path / "spiece.model").write_bytes(b"x")
    with pytest.raises(
        DataError, match=r"no tokenizer\.json\. Convert spiece\.model with"
    ):
        load_codec(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(DataError, match="is not a tokenizer"):
        load_codec(tmp_path)
    endless = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))  # noqa: S106
    endless.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match="has no end token"):
        load_codec(tmp_path)


def test_a_name_that_leads_nowhere_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"model\.tokenizer is .*absent, but there is no such folder"
    ):
        resolve_tokenizer(str(tmp_path / "absent"))
    with pytest.raises(
        DataError,
        match=r"nobody/no-such-tokenizer: there is no such folder.*HF_HUB_OFFLINE is set",
    ):
        resolve_tokenizer("nobody/no-such-tokenizer")


def real_recipes(shared: Path, every: int) -> list[str]:
    path = shared / "data" / "recipes" / "allrecipes_epicurious_as_is.jsonl.gz"
    texts = []
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for i, line in enumerate(lines):
            if i % every == 0:
                record = json.loads(line)
                parts = (
                    (record["ingredients"] or []) + [""] + (record["directions"] or [])
                )
                texts.append("\n".join(parts))
    return texts


REAL = {
    "tokenizers/t5": (32100, 0, 1, None, 32000),
    "tokenizers/gpt2": (50257, 50256, 50256, 50256, None),
    "tokenizers/gpt_neox": (50277, 0, 0, 0, None),
    "models/stories15m": (32000, 2, 2, 1, None),
}


@pytest.mark.slow
@pytest.mark.parametrize("where", REAL)
def test_real_recipes_come_back(shared: Path, where: str) -> None:
    codec = load_codec(shared / where)
    found = (
        codec.vocab_size,
        codec.pad_id,
        codec.eos_id,
        codec.bos_id,
        codec.newline_id,
    )
    assert found == REAL[where]
    raw = real_recipes(shared, every=40)
    texts = [codec.normalise(text) for text in raw]
    found = codec.encode_flat(raw)
    assert not found.disagreed
    assert rows(found) == [codec.encode(text) for text in texts]
    whole = [
        (r, t) for r, t in zip(rows(found), texts, strict=True) if codec.unk_id not in r
    ]
    assert len(whole) >= 0.998 * len(texts)
    for row, text in whole:
        assert one_space(codec.decode(row)) == one_space(text)


@pytest.mark.parametrize(("kind", "times"), [("bpe", 2), ("unigram", 6)])
def test_the_same_texts_give_the_same_vocabulary(kind: str, times: int) -> None:
    rng = random.Random(3)
    words = ["".join(rng.choices("abcdeñ½", k=rng.randint(1, 6))) for _ in range(40)]
    texts = [" ".join(rng.choices(words, k=30)) for _ in range(60)] + [
        "xyz XYZ 0123456789"
    ]
    learnt = [train_codec(texts, vocab_size=420, kind=kind) for _ in range(times)]
    assert len({codec.sha256 for codec in learnt}) == 1
    assert learnt[0].vocab_size <= 420


LETTERS = [*"abc", "\u2581a", "\u2581b", "\u2581", "\u00e9"]


@pytest.fixture
def byte_fallback(tmp_path: Path) -> Codec:
    """A tokenizer of Llama 2's kind, which spells what it lacks byte by byte."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *LETTERS,
    ]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))  # noqa: S106
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    special = [AddedToken(one, special=True, normalized=False) for one in pieces[:3]]
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return load_codec(tmp_path)


def streamed(codec: Codec, ids: list[int]) -> str:
    stream = TextStream(codec)
    return "".join([*map(stream.feed, ids), stream.flush()])


def test_bytes_that_make_no_character_end_no_stream(byte_fallback: Codec) -> None:
    codec, rng = byte_fallback, random.Random(1)
    named = codec.pieces()
    newline = [
        named[one] for one in ("a", "<0x0A>", "<0xF0>", "<0x9F>", "b", "\u2581a")
    ]
    assert codec.decode(newline) == "a\ufffd\ufffd\ufffdb a"
    assert streamed(codec, newline) == "a\n\ufffd\ufffdb a"
    for _ in range(200):
        ids = [named["a"]]
        expected = (
            "a"  # a pattern: letters as they are, and a character or more of each run
        )
        for _ in range(8):
            letters = rng.choices(LETTERS, k=rng.randint(1, 4))
            run = [f"<0x{rng.randrange(256):02X}>" for _ in range(rng.randint(1, 5))]
            ids += [named[one] for one in (*letters, *run)]
            written = re.escape("".join(letters).replace("\u2581", " "))
            expected += written + f".{{1,{len(run)}}}"
        assert re.fullmatch(expected, streamed(codec, ids), re.DOTALL)


@pytest.mark.parametrize("kind", ["decoder", "encoder-decoder", "fallback"])
def test_the_pieces_of_a_stream_are_the_text(
    kind: str, tokenizers_at: dict[str, Path], byte_fallback: Codec
) -> None:
    codec, rng = byte_fallback, random.Random(2)
    if kind != "fallback":
        codec = load_codec(tokenizers_at[kind])
    for _ in range(200):
        ids = [rng.randrange(codec.vocab_size) for _ in range(40)]
        if kind == "fallback":  # of whole characters
            ids = codec.encode(
                "".join(rng.choices("ab c\u00e9\n\U0001f372\u4e16", k=30))
            )
        assert streamed(codec, ids) == codec.decode(ids, skip_special_tokens=True)


def test_a_vocabulary_of_nothing_is_refused() -> None:
    with pytest.raises(DataError, match="sources have no text"):
        train_codec(["", ""], vocab_size=400, kind="unigram")
