"""The sample that a tokenizer is learnt from, and lengths are measured in."""

from __future__ import annotations

from pathlib import Path

import pytest

import toque
from toque.cooking.cookbook.recipes import write_cookbook
from toque.data.prepare import source_sample
from toque.data.prepare.source_sample import every_nth_record
from toque.sources.records import Example


def examples(*tasks: int) -> list[Example]:
    return [
        Example(prompt=str(i), target="", key=i, title_key=0, record_key=0, task=task)
        for i, task in enumerate(tasks)
    ]


@pytest.mark.parametrize(
    ("tasks", "n", "kept"),
    [
        ((0, 0, 0, 0, 0), 2, "024"),  # one task: every second example
        ((0, 2, 0, 2, 0, 2, 0, 2), 2, "0145"),
        ((1, 0, 1, 1, 0), 2, "03"),  # records that lack a task
        ((0, 1, 2), 1, "012"),
        ((3, 4), 5, "01"),
        ((), 3, ""),
    ],
)
def test_records_are_taken_whole(tasks: tuple[int, ...], n: int, kept: str) -> None:
    assert "".join(e.prompt for e in every_nth_record(examples(*tasks), n)) == kept


def test_every_task_is_in_the_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With two tasks an even stride over examples would meet one of them alone."""
    write_cookbook(tmp_path / "a.jsonl", n=120, seed=3)
    learnt: list[str] = []
    measured: list[str] = []
    train, lengths = source_sample.train_codec, source_sample._lengths

    def remembered(texts, **settings):
        learnt.extend(texts)
        return train(learnt, **settings)

    def remembered_lengths(codec, texts):
        measured.extend(texts)
        return lengths(codec, texts)

    monkeypatch.setattr(source_sample, "train_codec", remembered)
    monkeypatch.setattr(source_sample, "_lengths", remembered_lengths)
    monkeypatch.setattr(source_sample, "MAX_EXAMPLES", 60)
    monkeypatch.setattr(source_sample, "SAMPLED", 60)
    (tmp_path / "a.yaml").write_text(
        "model: {family: t5, tokenizer: 'trained:600'}\n"
        f"data: {{sources: [{{path: {tmp_path}/a.jsonl}}], store: {tmp_path}/store, "
        "tasks: [nutrition, difficulty], validation_fraction: 0.2}\n"
    )
    toque.prepare(tmp_path / "a.yaml")
    for texts in (learnt, measured):
        asked = [sum(word in text for text in texts) for word in ("healthy", "difficult")]
        assert sum(asked) < 120
        assert min(asked) > 10
