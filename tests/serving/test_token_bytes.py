"""Bytes of tokens: parts of characters in byte-level and SentencePiece vocabularies, and T5."""

import pytest
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
)

from toque.data.tokenizer.codec import TextStream, load_codec
from toque.serving.token_bytes import bytes_of_token

TEXT = "Soup 🍲 à la crème, 豆腐 и Щи. tofu"


def save_tokenizer(folder, vocabulary, *, byte_level):
    """A BPE tokenizer without merges, in the form of GPT-2 or of Llama 2."""
    ids = {piece: number for number, piece in enumerate(vocabulary)}
    made = Tokenizer(models.BPE(ids, [], byte_fallback=not byte_level))
    if byte_level:
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
    else:
        made.normalizer = normalizers.Replace(" ", "▁")
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        made.decoder = decoders.Sequence(steps)
    made.add_special_tokens([AddedToken("</s>", special=True)])
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    settings = '{"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "</s>"}'
    (folder / "tokenizer_config.json").write_text(settings)
    return load_codec(str(folder))


@pytest.fixture(params=["byte-level", "byte-fallback"])
def codec(request, tmp_path):
    if request.param == "byte-level":
        pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<unk>", "</s>"]
        return save_tokenizer(tmp_path / "byte-level", pieces, byte_level=True)
    spelled = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = ["<unk>", "</s>", *spelled, "▁", *"Soupaltfèé", "\ufffd"]
    return save_tokenizer(tmp_path / "byte-fallback", pieces, byte_level=False)


def bytes_by_token(codec, ids):
    stream = TextStream(codec)
    texts = [stream.feed(token) for token in ids]
    texts[-1] += stream.flush()
    return [bytes_of_token(codec, *one) for one in zip(ids, texts, strict=True)]


def test_bytes_of_all_tokens_are_the_text(codec):
    ids = codec.encode(TEXT)
    parts = bytes_by_token(codec, ids)
    assert b"".join(parts) == codec.decode(ids).encode() == TEXT.encode()
    assert {b"\xf0", b"\x9f", b"\x8d", b"\xb2"} <= set(parts)


def test_a_character_that_never_ends_leaves_its_neighbours_as_they_are(codec):
    ids = codec.encode("🍲")[:2] + codec.encode("S") + codec.encode("é")[:1]
    assert bytes_by_token(codec, ids)[:3] == [b"\xf0", b"\x9f", b"S"]


def test_a_token_that_was_not_chosen_has_its_own_bytes(codec):
    stream, ids = TextStream(codec), codec.encode("🍲")
    assert bytes_of_token(codec, ids[1], stream.decode_next(ids[1])) == b"\x9f"
    stream.feed(ids[0])
    for token, byte in zip(ids[1:], [b"\x9f", b"\x8d", b"\xb2"], strict=True):
        assert bytes_of_token(codec, token, stream.decode_next(token)) == byte
        other = codec.encode("S")[0]
        assert bytes_of_token(codec, other, stream.decode_next(other)) == b"S"
        stream.feed(token)
    end = codec.eos_id
    assert bytes_of_token(codec, end, stream.decode_next(end)) == b"</s>"


def test_the_replacement_character_of_a_vocabulary_keeps_its_bytes(codec):
    ids = codec.encode("S\ufffdS")
    assert b"".join(bytes_by_token(codec, ids)) == "S\ufffdS".encode()


def test_t5_and_its_line_breaks(codecs):
    codec = codecs["t5"]
    ids = codec.encode("Soup à la crème\nwith 2 eggs")
    assert b"".join(bytes_by_token(codec, ids)) == codec.decode(ids).encode()
