"""Tokenizers saved again are the same; those that give other ids are not, and are told apart."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from fixtures.stores import Made
from toque.data.tokenizer.codec import load_codec
from toque.data.tokenizer.portable import tokenizer_differences
from toque.data.tokenizer.tokenizer_folder import hash_of_folder
from toque.errors import DataError

KINDS = ["decoder", "encoder-decoder"]
REAL = ["tokenizers/t5", "tokenizers/gpt2", "tokenizers/gpt_neox", "models/stories15m"]


def saved_again(source: Path, to: Path) -> Path:
    """As a newer library does: other bytes."""
    AutoTokenizer.from_pretrained(source).save_pretrained(to)
    held = json.loads((to / "tokenizer.json").read_text())
    (to / "tokenizer.json").write_text(json.dumps(held, indent=1))
    assert hash_of_folder(to) != hash_of_folder(source)
    return to


def with_swapped_words(source: Path, to: Path) -> Path:
    """The same pieces, two of which have changed places."""
    shutil.copytree(source, to)
    held = json.loads((to / "tokenizer.json").read_text())
    vocab = held["model"]["vocab"]
    if isinstance(vocab, dict):
        a, b = sorted(vocab, key=vocab.get)[300:302]
        vocab[a], vocab[b] = vocab[b], vocab[a]
    else:
        vocab[20][0], vocab[21][0] = vocab[21][0], vocab[20][0]
    (to / "tokenizer.json").write_text(json.dumps(held))
    return to


@pytest.mark.parametrize("name", REAL)
def test_real_ones_saved_again_are_the_same(
    name: str, shared: Path, tmp_path: Path
) -> None:
    again = saved_again(shared / name, tmp_path / "x")
    assert tokenizer_differences(load_codec(shared / name), load_codec(again)) == []


def test_another_end_token_is_told(
    tokenizers_at: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(tokenizers_at["encoder-decoder"], tmp_path / "x")
    config = json.loads((tmp_path / "x" / "tokenizer_config.json").read_text())
    config |= {"eos_token": "<pad>"}
    (tmp_path / "x" / "tokenizer_config.json").write_text(json.dumps(config))
    one, other = (
        load_codec(tokenizers_at["encoder-decoder"]),
        load_codec(tmp_path / "x"),
    )
    assert "the eos token is 1 in one and 0 in the other" in tokenizer_differences(
        one, other
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_is_reused_with_its_tokenizer_saved_again(
    made: Made, kind: str, tokenizers_at: dict[str, Path], tmp_path: Path
) -> None:
    first = made("s", kind)
    again = saved_again(tokenizers_at[kind], tmp_path / "again")
    result = made("s", kind, tokenizer=str(again))
    assert result.reused
    assert result.store.fingerprint == first.store.fingerprint
    other = with_swapped_words(tokenizers_at[kind], tmp_path / "other")
    with pytest.raises(
        DataError, match=r"its tokenizer was .* and is .*other \(2 of .* entries"
    ):
        made("s", kind, tokenizer=str(other))


def test_one_that_changed_in_its_place_is_said_to_have_changed(
    made: Made, tokenizers_at: dict[str, Path], tmp_path: Path
) -> None:
    """Not "its tokenizer was X and is X"."""
    own = tmp_path / "own"
    shutil.copytree(tokenizers_at["decoder"], own)
    made("s", tokenizer=str(own))
    changed = with_swapped_words(own, tmp_path / "changed")
    shutil.rmtree(own)
    changed.rename(own)
    with pytest.raises(DataError) as refused:
        made("s", tokenizer=str(own))
    assert f"its tokenizer {own} has changed since (2 of " in str(refused.value)
    assert " and is " not in str(refused.value)
