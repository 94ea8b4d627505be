"""Preference pairs from a file or a program to a store, and to a first configuration."""

import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pytest

import toque
from fixtures.kitchens import TINY, tiny_config
from toque.cli import main
from toque.data.prepare.conversation_rows import CUT_ANSWERS
from toque.data.prepare.preference_rows import CUT_PAIRS
from toque.data.store.token_store import TokenStore
from toque.errors import ConfigError, DataError
from toque.storage.download import CACHE_VARIABLE
from toque.workflows.diagnosis.show_batch import show_batch
from toque.workflows.prepare import prepare_store
from toque.workflows.prepared_store import open_store
from workflows.test_chat_bases import chat_base

ROWS = [
    {
        "prompt": f"What of rice, {n}?",
        "chosen": f"Stew it for {n} minutes.",
        "rejected": f"Fry {n} of it.",
        "score": n,
    }
    for n in range(24)
]


def messages_of(row: dict[str, Any], side: str, *, n_before: int = 0) -> list[dict]:
    turns = []
    for n in range(n_before):
        turns.append({"role": "user", "content": f"Hello {n}"})
        turns.append({"role": "assistant", "content": "Yes?"})
    turns.append({"role": "user", "content": row["prompt"]})
    return [*turns, {"role": "assistant", "content": row[side]}]


def talks(*, n_before: int = 0) -> list[dict[str, Any]]:
    return [
        {
            side: messages_of(row, side, n_before=n_before)
            for side in ("chosen", "rejected")
        }
        for row in ROWS
    ]


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def pairs_in(store: TokenStore) -> set[tuple[str, str, str]]:
    codec = store.codec()
    found = set()
    for split in ("train", "validation"):
        for row in store.pair_rows(split).tolist():
            prompts = [codec.decode(store.prompt(r)).strip() for r in (row, row + 1)]
            assert prompts[0] == prompts[1]
            answers = [codec.decode(store.target(r)) for r in (row, row + 1)]
            found.add((prompts[0], *answers))
    return found


EXPECTED = {(row["prompt"], row["chosen"], row["rejected"]) for row in ROWS}


@pytest.fixture(scope="module")
def base(
    tokenizers_at: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("chat") / "base"
    return chat_base(folder, tokenizers_at["decoder"], end="<|endoftext|>")


@pytest.fixture
def config(base: Path, tmp_path: Path) -> toque.RunConfig:
    return toque.configure(
        TINY | {"model": {"family": "auto", "start_from": str(base)}},
        run_dir=str(tmp_path / "run"),
        objective={"kind": "dpo"},
        data={"sources": [], "store": str(tmp_path / "store")},
    )


@pytest.mark.parametrize("form", ["list", "dataset", "frame"])
def test_rows_of_a_program_are_pairs(form, config):
    made = {
        "list": lambda: ROWS,
        "dataset": lambda: datasets.Dataset.from_list(ROWS),
        "frame": lambda: pd.DataFrame(ROWS),
    }
    result = toque.prepare(config, data=made[form](), validation=ROWS[:4])
    assert pairs_in(result.store) == EXPECTED
    assert result.report.sources[0].unused == {"score": len(ROWS)}
    assert len(result.store.pair_rows("validation")) == 4
    assert open_store(config).has_pairs


def test_columns_of_a_program_name_the_answers(config):
    rows = [{"q": r["prompt"], "j": r["chosen"], "k": r["rejected"]} for r in ROWS]
    columns = {"prompt": "q", "chosen": "j", "rejected": "k"}
    assert pairs_in(toque.prepare(config, data=rows, columns=columns).store) == EXPECTED
    with pytest.raises(ConfigError, match="Preference pairs need chosen and rejected"):
        toque.prepare(config, data=rows, columns={"prompt": "q", "chosen": "j"})


@pytest.mark.parametrize("kind", ["saved", "hf"])
def test_a_dataset_is_read_like_a_file(kind, config, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "toque"))
    folder = tmp_path / "saved"
    if kind == "saved":
        datasets.Dataset.from_list(talks()).save_to_disk(str(folder))
    else:
        folder.mkdir()
        write(folder / "train.jsonl", talks())
    path = str(folder) if kind == "saved" else f"hf:{folder}:train"
    t5 = {"family": "t5", "shape": {"d_model": 16, "num_layers": 1, "num_heads": 2}}
    changed = toque.configure(
        TINY | {"model": {"tokenizer": "trained:512", **t5}},
        run_dir=config.run_dir,
        data={
            "sources": [{"path": path}],
            "store": config.data.store,
        },
    )
    result = prepare_store(changed)
    assert pairs_in(result.store) == EXPECTED
    assert open_store(changed).has_pairs  # the same reader


def test_an_encoder_does_not_read_several_turns(config, tmp_path):
    path = write(tmp_path / "long.jsonl", talks(n_before=1))
    changed = toque.configure(
        TINY | {"model": {"family": "t5", "tokenizer": "trained:512"}},
        data={"sources": [{"path": path}], "store": config.data.store},
    )
    with pytest.raises(ConfigError, match=r"long\.jsonl .*need a decoder-only model"):
        toque.prepare(changed)


@pytest.mark.parametrize("n_before", [0, 2])
def test_messages_use_the_chat_template_and_only_the_last_answer_is_a_target(
    n_before, config, tmp_path
):
    path = write(tmp_path / "talks.jsonl", talks(n_before=n_before))
    limits = {"max_prompt_tokens": 200, "max_target_tokens": 200}
    config = toque.configure(config, data={"sources": [{"path": path}], **limits})
    store = toque.prepare(config).store
    codec = store.codec()
    for row in store.pair_rows("train").tolist():
        assert np.array_equal(store.prompt(row), store.prompt(row + 1))
        assert store.spans(row) == []
        n = int(codec.decode(store.target(row + 1)).split()[1])
        prompt = codec.decode(store.prompt(row))
        assert prompt.count("user\n") == 1 + n_before
        assert f"What of rice, {n}?" in prompt
        assert codec.decode(store.target(row)).startswith(f"Stew it for {n} minutes.")
        assert store.target(row)[-1] == codec.eos_id
    assert (store.learnt_lengths == store.target_lengths).all()
    short = toque.configure(
        config, data={"store": str(tmp_path / "short"), "max_prompt_tokens": 8,
                      "max_target_tokens": int(store.prompt_lengths.max())}
    )  # fmt: skip
    notes = toque.prepare(short).report.notes
    assert notes[CUT_PAIRS] == len(ROWS)
    assert notes[CUT_ANSWERS] >= len(ROWS)


def test_bad_files_end_with_one_paragraph_and_a_code(tmp_path, capsys):
    write(tmp_path / "equal.jsonl", [r | {"rejected": r["chosen"]} for r in ROWS])
    write(tmp_path / "pairs.jsonl", ROWS)
    write(tmp_path / "qa.jsonl", [{"question": "Why?", "answer": "So."}])
    cases = [
        (["equal.jsonl"], 3, "24 chosen and rejected are equal"),
        (["pairs.jsonl", "qa.jsonl"], 2, "a store has only one of the two"),
    ]
    for files, code, message in cases:
        sources = [{"path": str(tmp_path / file)} for file in files]
        config = tiny_config(data={"sources": sources, "store": str(tmp_path / "s")})
        (tmp_path / "my.yaml").write_text(json.dumps(config.model_dump(mode="json")))
        assert main(["prepare", str(tmp_path / "my.yaml")]) == code
        error = capsys.readouterr().err
        assert message in " ".join(error.split())
        assert not (tmp_path / "s" / "manifest.json").exists()
    columns = {"chosen": "chosen", "rejected": "worse"}
    source = {"path": str(tmp_path / "pairs.jsonl"), "columns": columns}
    with pytest.raises(DataError, match="no column for rejected: worse"):
        toque.prepare(tiny_config(data={"sources": [source]}))


def test_the_report_of_prepare_shows_dropped_pairs(tmp_path, capsys):
    rows = [*ROWS, ROWS[0] | {"rejected": ROWS[0]["chosen"] + " "}]
    path = write(tmp_path / "pairs.jsonl", rows)
    config = tiny_config(
        run_dir=str(tmp_path / "run"),
        data={"sources": [{"path": path}], "store": str(tmp_path / "store")},
    )
    (tmp_path / "my.yaml").write_text(json.dumps(config.model_dump(mode="json")))
    main(["prepare", str(tmp_path / "my.yaml")])
    shown = capsys.readouterr().out
    assert "chosen and rejected differ only in white space" in shown
    assert "json-lines chosen and rejected texts" in shown


def test_a_first_configuration_of_pairs_has_the_objective(base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "pairs.jsonl", ROWS)
    made = toque.init("pairs.jsonl", to="pairs.yaml", start_from=base)
    text = made.file.read_text()
    assert "objective: {kind: dpo}" in text
    assert "tasks" not in text
    assert made.config.objective.kind == "dpo"
    assert made.config.optim.peak_lr == pytest.approx(5e-5)
    assert "24 preference pairs" in str(made)
    assert pairs_in(toque.prepare(made.config).store) == EXPECTED
    shown = str(show_batch(made.config, max_examples=48))
    assert ", chosen\n" in shown
    assert ", rejected\n" in shown
    (tmp_path / "qa.jsonl").write_text('{"question": "Why?", "answer": "So."}\n')
    with pytest.raises(ConfigError, match="a store has only one of the two"):
        toque.init(["pairs.jsonl", "qa.jsonl"], to="both.yaml", start_from=base)


def test_a_first_configuration_of_pairs_needs_a_model(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = [{"q": r["prompt"], "j": r["chosen"], "k": r["rejected"]} for r in ROWS]
    write(tmp_path / "pairs.jsonl", rows)
    columns = [
        "--columns",
        "prompt=q",
        "--columns",
        "chosen=j",
        "--columns",
        "rejected=k",
    ]
    assert main(["init", "pairs.jsonl", *columns]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "pairs.jsonl has preference pairs" in error
    assert "so --start-from must name one" in error
    assert "use --columns prompt=q --columns target=j." in error
