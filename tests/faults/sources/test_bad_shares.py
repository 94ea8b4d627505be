"""Sources of which much cannot be used: refused in words that help, and what they advise works."""

import json
from functools import partial
from pathlib import Path

import pytest

from fixtures.recipe_files import Prepare
from toque.data.prepare.data_report import Report
from toque.data.store.store_manifest import read_manifest

STEPS = [
    "Rincez les lentilles à l'eau froide.",
    "Mijotez doucement, servez avec de la crème fraîche.",
]


def lines(n: int) -> list[str]:
    records = [
        {"title": f"Soupe à l'oignon {i}", "ingredients": [f"{i} oignons", "crème"]}
        for i in range(1, n + 1)
    ]
    return [
        json.dumps(record | {"directions": STEPS}, ensure_ascii=False)
        for record in records
    ]


@pytest.fixture
def run(prepare_files: Prepare, tmp_path: Path) -> Prepare:
    return partial(prepare_files, tmp_path / "a", f"run_dir={tmp_path}/run")


def test_more_than_half_bad_is_refused_until_the_share_is_raised(
    tmp_path: Path, run: Prepare
) -> None:
    (tmp_path / "a").write_text("\n".join([*lines(20), *['{"title": }'] * 30]))
    code, _, err = run()
    assert code == 3
    assert (
        "30 of the 50 records in a cannot be used, more than data.max_bad_share=0.5"
        in err
    )
    assert "30 not JSON (first at a:21" in err
    assert "set data.max_bad_share=0.6." in err
    code, out, _ = run("data.max_bad_share=0.6")
    assert code == 0
    assert "Read 50 records: kept 20, dropped 30" in out
    made = read_manifest(tmp_path / "store").fingerprint
    code, out, _ = run("data.max_bad_share=1.0")
    assert code == 0, "the limit changes no row"
    assert "Reused" in out
    code, _, err = run()
    assert code == 3, "a store made when more was allowed is no way round the limit"
    assert "30 of the 50 records in a cannot be used" in err
    assert read_manifest(tmp_path / "store").fingerprint == made


@pytest.mark.parametrize(
    ("encoding", "form"),
    [
        ("latin-1", "lines"),
        ("cp1252", "array"),
        ("cp850", "table"),
        ("latin-1", "text"),
        ("utf-16", "lines"),
        ("utf-16", "text"),
    ],
)
def test_an_old_encoding_is_read_when_it_is_named(
    encoding: str,
    form: str,
    tmp_path: Path,
    run: Prepare,
    tokenizers_at: dict[str, Path],
) -> None:
    own = f"model.tokenizer={tokenizers_at['decoder']}"  # one learnt samples by bytes of the file
    records = lines(20)
    text = {
        "lines": "\n".join(records),
        "array": "[" + ",".join(records) + "]",
        "table": "title;ingredients;directions\n"
        + "\n".join(
            f"Soupe à l'oignon {i};{i} oignons|crème;{' '.join(STEPS)}"
            for i in range(20)
        ),
        "text": "".join(
            f"Mijotez {i} minutes, servez avec de la crème fraîche.\n"
            for i in range(4000)
        ),
    }[form]
    (tmp_path / "a").write_bytes(text.encode("utf-8"))
    assert run(own, f"data.store={tmp_path}/right")[0] == 0
    (tmp_path / "a").write_bytes(text.encode(encoding))
    code, out, err = run()
    if encoding == "utf-16":
        assert code == 3
        assert "data.encoding=utf-16" in err
    elif form == "text":
        assert code == 0, err
        assert "Set data.encoding=cp1252" in out
    else:
        assert code == 3
        assert "not UTF-8" in err
        assert "Set data.encoding=cp1252" in err
    code, _, err = run(own, f"data.encoding={encoding}", f"data.store={tmp_path}/named")
    assert code == 0, err
    right, named = (Report.read_from(tmp_path / name) for name in ("right", "named"))
    assert right is not None
    assert named is not None
    assert named.kept == right.kept
    assert [e.text for e in named.kept_examples] == [
        e.text for e in right.kept_examples
    ]
    one, other = (read_manifest(tmp_path / name) for name in ("right", "named"))
    assert {s.file: s.sha256 for s in one.shards} == {
        s.file: s.sha256 for s in other.shards
    }
    assert one.fingerprint != other.fingerprint


def test_bytes_that_the_encoding_lacks_are_counted(
    tmp_path: Path, run: Prepare
) -> None:
    raw = [line.encode("cp1252") for line in lines(20)]
    raw[4] = raw[4].replace(b"oignons", b"oign\x81ns")  # no character of cp1252
    (tmp_path / "a").write_bytes(b"\n".join(raw))
    code, _, err = run("data.encoding=cp1252")
    assert code == 0, err
    report = Report.read_from(tmp_path / "store")
    assert report is not None
    assert report.dropped == {"not UTF-8": 1}
    assert report.lines == {"not UTF-8": ["a:5"]}


def test_training_wants_the_encoding_of_its_store(tmp_path: Path, run: Prepare) -> None:
    (tmp_path / "a").write_bytes("\n".join(lines(20)).encode("latin-1"))
    assert run("data.encoding=latin-1")[0] == 0
    code, _, err = run("model.shape={n_embd: 32, n_layer: 1, n_head: 2}", verb="train")
    assert code == 3, err
    assert "data.encoding was latin-1 and is utf-8" in err


@pytest.mark.parametrize("name", ["klingon", "rot13", "base64", ""])
def test_an_unknown_encoding_is_refused(name: str, run: Prepare) -> None:
    code, _, err = run(f"data.encoding={name}")
    assert code == 2
    assert "data.encoding" in err
