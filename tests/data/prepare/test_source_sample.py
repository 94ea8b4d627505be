"""Length limits chosen from the data, and unknown tokens that are told of."""

import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import toque
from fixtures.stores import Made
from line_reader import LineReader
from store_checks import content, many_lines
from toque.cooking.cookbook.recipes import write_cookbook
from toque.data.prepare import source_sample
from toque.data.prepare.finalize import FEWER_ENTRIES
from toque.data.prepare.pipeline import PrepareResult, prepare
from toque.data.prepare.source_sample import every_nth_record
from toque.data.prepare.store_plan import PrepareSettings
from toque.errors import DataError
from toque.sources.documents import TextReader
from toque.sources.records import Block, BlockExamples, Example, Source

Make = Callable[..., PrepareSettings]
OPEN = {"max_prompt_tokens": None, "max_target_tokens": None}
LINE = "stir the soup and add salt pepper flour butter sugar 2 eggs cups of milk until smooth"
WORDS = LINE.split()


@pytest.fixture
def long_file(tmp_path: Path) -> Path:
    """Two hundred answers of 100 to 900 words, a few much longer."""
    rng = random.Random(3)
    sizes = [rng.randrange(100, 700) for _ in range(199)] + [6000]
    lines = [
        json.dumps(
            {
                "prompt": f"Dish {i} with salt",
                "target": " ".join(rng.choices(WORDS, k=n)),
            }
        )
        for i, n in enumerate(sizes)
    ]
    path = tmp_path / "long.jsonl"
    path.write_text("\n".join(lines))
    return path


def chosen(result: PrepareResult) -> tuple[int, int]:
    settings = result.store.manifest.settings
    return settings["max_prompt_tokens"], settings["max_target_tokens"]


@pytest.mark.parametrize("family", ["decoder", "encoder-decoder"])
def test_the_limit_is_the_99th_percentile_of_the_data(
    made: Made, long_file: Path, family: str
) -> None:
    result = made("s", family, of=long_file, **OPEN)
    codec = result.store.codec()
    records = map(json.loads, long_file.read_text().splitlines())
    lengths = [len(codec.encode(record["target"])) + 1 for record in records]
    ninety_nine = int(np.percentile(lengths, 99, method="higher"))
    assert chosen(result) == (64, -(-ninety_nine // 64) * 64)
    assert result.report.cut["targets"] == 1
    said = " ".join(result.report.describe_losses())
    assert f"Longest target: {chosen(result)[1]:,} tokens, chosen from the data" in said
    assert "512 would cut " in said


def test_the_choice_depends_on_the_data_alone(
    made: Made, long_file: Path, tmp_path: Path
) -> None:
    one = made("a", of=long_file, **OPEN, workers=1)
    two = made("b", of=long_file, **OPEN, workers=2)
    assert content(tmp_path / "a") == content(tmp_path / "b")
    assert one.store.fingerprint == two.store.fingerprint
    again = made("a", of=long_file, **OPEN)
    assert again.reused


def test_a_number_and_the_choice_of_it_make_one_store(
    made: Made, long_file: Path
) -> None:
    prompt, target = chosen(made("s", of=long_file, **OPEN))
    assert made(
        "s", of=long_file, max_prompt_tokens=prompt, max_target_tokens=target
    ).reused
    with pytest.raises(DataError, match=f"max_target_tokens was {target} and is 100"):
        made("s", of=long_file, max_prompt_tokens=prompt, max_target_tokens=100)
    made("own", of=long_file, max_prompt_tokens=64, max_target_tokens=99)
    with pytest.raises(DataError, match="max_target_tokens was 99 and is auto"):
        made("own", of=long_file, **OPEN)


def test_the_model_has_room_for_what_is_chosen(made: Made, long_file: Path) -> None:
    result = made("s", of=long_file, **OPEN, room=513)
    assert chosen(result) == (64, 449)
    limits = " ".join(result.report.limits)
    assert "The model's context length is only 512 tokens, so " in limits
    assert "of the target tokens will be cut. A limit of " in limits
    with pytest.raises(
        DataError, match="the model's maximum tokens per example was 513 and is 1025"
    ):
        made("s", of=long_file, **OPEN, room=1025)


def test_positions_are_divided_so_that_the_fewest_records_are_cut(
    made: Made, tmp_path: Path
) -> None:
    """Long prompts with short answers: a fixed share for prompts would cut every one."""
    lines = [
        json.dumps(
            {
                "prompt": " ".join(WORDS * 6)[: 320 + i],
                "target": f"{i} " + "salt " * (i % 9),
            }
        )
        for i in range(60)
    ]
    lines.append(json.dumps({"prompt": "Why?", "target": " ".join(WORDS * 20)}))
    (tmp_path / "asked.jsonl").write_text("\n".join(lines))
    result = made("s", of=tmp_path / "asked.jsonl", **OPEN, room=257)
    assert sum(chosen(result)) <= 257
    assert (result.report.cut["prompts"], result.report.cut["targets"]) == (0, 1)


def test_documents_are_split_as_ever(made: Made, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(" ".join(WORDS * 400))
    result = made("s", of=tmp_path / "a.txt", reader=TextReader(), **OPEN)
    assert chosen(result) == (256, 512)
    assert result.report.cut["target_tokens"] == 0


def foreign(tmp_path: Path, share: float) -> Path:
    """Records of which a share of words is in letters that no vocabulary here holds."""
    rng = random.Random(4)
    lines = [
        json.dumps({
            "prompt": f"Dish {i}",
            "target": " ".join("щ" if rng.random() < share else "eggs" for _ in range(80)),
        })
        for i in range(40)
    ]  # fmt: skip
    path = tmp_path / "foreign.jsonl"
    path.write_text("\n".join(lines))
    return path


def test_many_unknown_tokens_are_told_with_what_to_do(
    made: Made, tmp_path: Path
) -> None:
    path = foreign(tmp_path, 0.12)
    report = made("s", "encoder-decoder", of=path).report
    notice = report.unknown_notice()
    assert notice is not None
    named = re.search(r"'щ' \(cyrillic small letter shcha\) (\d+)%", notice)
    assert named is not None
    assert (
        int(named[1]) > 50
    )  # the rest are letters of "Dish", which this vocabulary lacks
    assert "model.tokenizer=trained:8192" in notice
    assert made("bytes", of=path).report.unknown_notice() is None


def test_a_store_of_unknown_tokens_is_refused(made: Made, tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"of all tokens are unknown.*No store is written"
    ):
        made("s", "encoder-decoder", of=foreign(tmp_path, 0.9))
    assert not (tmp_path / "s" / "manifest.json").exists()


# The sample that a tokenizer is learnt from, and lengths are measured in.


def examples(*per_record: int) -> BlockExamples:
    made = [
        Example(prompt=str(i), target="", key=i, title_key=0, record_key=0)
        for i in range(sum(per_record))
    ]
    n = len(per_record)
    return BlockExamples(made, n, n, per_record=[*per_record])


@pytest.mark.parametrize(
    ("per_record", "n", "kept"),
    [
        ((1, 1, 1, 1, 1), 2, "024"),  # one task: every second example
        ((2, 2, 2, 2), 2, "0145"),
        ((1, 2, 1, 1), 2, "03"),  # records that lack a task
        ((3,), 1, "012"),
        ((2,), 5, "01"),
        ((), 3, ""),
    ],
)
def test_records_are_taken_whole(
    per_record: tuple[int, ...], n: int, kept: str
) -> None:
    assert "".join(e.prompt for e in every_nth_record(examples(*per_record), n)) == kept


def test_every_task_is_in_the_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two tasks an even stride over examples would meet one of them alone."""
    write_cookbook(tmp_path / "a.jsonl", n=120, seed=3)
    learnt: list[str] = []
    measured: list[str] = []
    train, lengths = source_sample.train_codec, source_sample._count_tokens

    def remembered(texts, **settings):
        learnt.extend(texts)
        return train(learnt, **settings)

    def remembered_lengths(codec, texts):
        measured.extend(texts)
        return lengths(codec, texts)

    monkeypatch.setattr(source_sample, "train_codec", remembered)
    monkeypatch.setattr(source_sample, "_count_tokens", remembered_lengths)
    monkeypatch.setattr(source_sample, "MAX_EXAMPLES", 60)
    monkeypatch.setattr(source_sample, "SAMPLED", 60)
    (tmp_path / "a.yaml").write_text(
        "model: {family: t5, tokenizer: 'trained:600'}\n"
        f"data: {{sources: [{{path: {tmp_path}/a.jsonl}}], store: {tmp_path}/store, "
        "tasks: [nutrition, difficulty], validation_fraction: 0.2}\n"
    )
    toque.prepare(tmp_path / "a.yaml")
    for texts in (learnt, measured):
        asked = [
            sum(word in text for text in texts) for word in ("healthy", "difficult")
        ]
        assert sum(asked) < 120
        assert min(asked) > 10


@pytest.mark.parametrize("longest", [1, 900])
def test_a_vocabulary_is_learnt_from_as_much_text_of_small_files_as_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, longest: int
) -> None:
    """Of 60 short texts 12 were read, and with a long one beside them little of that."""
    learnt: list[str] = []
    train = source_sample.train_codec

    def remembered(texts, **settings):
        learnt.extend(texts)
        return train(learnt, **settings)

    monkeypatch.setattr(source_sample, "train_codec", remembered)
    monkeypatch.setattr(source_sample, "MAX_CHARACTERS", 80_000)
    for n in range(60):
        text = " ".join(f"word{(n * k) % 97}" for k in range(1, 60)) + "\n"
        (tmp_path / f"{n}.txt").write_text(text * (longest if n == 7 else 1))
    settings = PrepareSettings(
        family_kind="decoder",
        tokenizer="trained:4000",
        max_prompt_tokens=32,
        max_target_tokens=64,
    )
    source = [Source(f"{tmp_path}/*.txt", TextReader())]
    result = prepare(source, store=tmp_path / "store", settings=settings)
    fewer = 4000 - result.store.codec().vocab_size
    assert fewer > 0
    assert result.report.notes[FEWER_ENTRIES] == fewer
    assert sum(1 for text in learnt if text) == 60
    assert (max(map(len, learnt)) > 40_000) == (longest > 1)


class CountingReader(LineReader):
    """Counts the lines that are read from a file, block by block."""

    n_lines = 0

    def blocks(self, path: Path) -> Iterator[Block]:
        for block in super().blocks(path):
            CountingReader.n_lines += block.payload.count(b"\n")
            yield block


@pytest.mark.usefixtures("small_groups")
@pytest.mark.parametrize("max_examples", [20, 300])
def test_the_samples_of_a_trial_read_about_what_it_keeps(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_examples: int
) -> None:
    monkeypatch.setattr(source_sample, "_TRIAL_BYTES", 20_000)
    monkeypatch.setattr(CountingReader, "n_lines", 0)
    many = many_lines(tmp_path, 3000)
    result = made(
        "s", of=many, reader=CountingReader(), tokenizer="trained:300", max_examples=max_examples,
        workers=1, **OPEN,
    )  # fmt: skip
    assert result.report.examples == max_examples
    # Once to write and twice for each sample: to see how long examples are, and to take it.
    assert CountingReader.n_lines < 5 * max_examples + 200 < 3000
