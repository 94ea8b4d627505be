"""Folders that hold more than recipes: each file is judged by itself (fault 53)."""

import csv
import gzip
import json
import random
from pathlib import Path

import numpy as np
import pytest

from fixtures.recipe_files import STEPS, Prepare, as_lines, pot
from toque.cli import main
from toque.config.schema import FilesConfig
from toque.cooking.schemas.reader import RecipeReader, reader_for
from toque.data.prepare.data_report import Report
from toque.data.store.store_manifest import read_manifest
from toque.sources.documents import DocumentReader, PairReader, TextReader
from toque.sources.file_kinds import FileJudge
from toque.sources.source_files import locate_files

README = "# Recipes\n\nTen recipes, with thanks to everyone.\n"
LICENCE = "Copyright nobody. Do as you like, at your own risk.\n"
NOTES = "Remember to buy lentils, and to call the baker about the bread of last week.\n"


def recipes(folder: Path) -> None:
    folder.mkdir()
    (folder / "m.jsonl").write_bytes(as_lines([pot(n) for n in range(1, 11)]))


def table(path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["title", "ingredients", "directions"])
        for n in range(10):
            one = pot(100 + n)
            writer.writerow(
                [one["title"], json.dumps(one["ingredients"]), json.dumps(STEPS)]
            )


def test_fault_53_documentation_and_pictures_stay_beside_the_recipes(
    tmp_path: Path, prepare_files: Prepare
) -> None:
    folder = tmp_path / "dump"
    recipes(folder)
    table(folder / "z.csv")
    for name, text in (
        ("README.md", README),
        ("A-README", README),
        ("LICENSE", LICENCE),
        ("CHANGELOG.txt", README),
        ("about.md", README),
        ("notes.txt", NOTES),
        ("LICENSE-html.html", "<html>law</html>"),
    ):
        (folder / name).write_text(text)
    noise = random.Random(3)
    (folder / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n" + noise.randbytes(500))
    (folder / "b.jpg").write_bytes(noise.randbytes(3000))
    (folder / "c").write_bytes(noise.randbytes(120))
    code, out, err = prepare_files(folder)
    assert code == 0, err
    manifest = read_manifest(tmp_path / "store")
    assert {Path(s.path).name: (s.reader, s.kept) for s in manifest.sources} == {
        "m.jsonl": (RecipeReader().recorded_name, 10),
        "z.csv": (RecipeReader().recorded_name, 10),
    }
    report = Report.read_from(tmp_path / "store")
    assert report is not None
    left_out: dict[str, set[str]] = {}
    for name, why in report.left_out.items():
        left_out.setdefault(why, set()).add(Path(name).name)
    assert left_out == {
        "documentation": {
            "README.md", "LICENSE", "CHANGELOG.txt", "about.md", "LICENSE-html.html"
        },
        "no text, such as a picture": {"a.png", "b.jpg", "c"},
        "plain text beside files of records": {"A-README", "notes.txt"},
    }  # fmt: skip
    for why, names in left_out.items():
        assert report.notes[f"files left out: {why}"] == len(names)
    assert "a.png, b.jpg, c (no text, such as a picture)" in err
    assert "To train on a skipped text, add it as a separate source." in err
    assert "files left out: documentation" in out


@pytest.mark.parametrize("form", ["recipes", "auto"])
def test_fault_53_the_order_of_names_does_not_matter(
    form: str, tmp_path: Path, prepare_files: Prepare
) -> None:
    for name in ("README.md", "ZZZ.md"):
        folder = tmp_path / name
        recipes(folder)
        (folder / name).write_text(README)
        code, _, err = prepare_files(
            folder, f"data.store={tmp_path}/of-{name}", format=form
        )
        assert code == 0, err
    one, other = (
        read_manifest(tmp_path / f"of-{name}") for name in ("README.md", "ZZZ.md")
    )
    assert one.fingerprint == other.fingerprint
    assert one.records.kept == other.records.kept == 10


def test_fault_53_files_of_several_kinds_are_each_read_by_their_own_reader(
    tmp_path: Path, prepare_files: Prepare
) -> None:
    folder = tmp_path / "dump"
    recipes(folder)
    asked = [f"Is dish {n} hot, or has it long gone cold?" for n in range(4)]
    (folder / "qa.jsonl").write_bytes(
        as_lines([{"question": q, "answer": "Yes."} for q in asked])
    )
    (folder / "b.json.gz").write_bytes(gzip.compress(json.dumps([pot(50)]).encode()))
    code, _, err = prepare_files(folder)
    assert code == 0, err
    manifest = read_manifest(tmp_path / "store")
    assert {Path(s.path).name: (s.reader, s.kept) for s in manifest.sources} == {
        "b.json.gz": (RecipeReader().recorded_name, 1),
        "m.jsonl": (RecipeReader().recorded_name, 10),
        "qa.jsonl": (PairReader("question", "answer").recorded_name, 4),
    }
    code, out, err = prepare_files(folder)
    assert code == 0, err
    assert "Reused" in out


def test_the_reader_of_most_files_is_found_in_one_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(30):
        (tmp_path / f"{n:02}.jsonl").write_bytes(as_lines([{"text": NOTES}]))
    (tmp_path / "00.jsonl").write_bytes(
        as_lines([{"question": "Hot?", "answer": "No."}])
    )
    n_compared, equal = 0, DocumentReader.__eq__

    def counted(one: object, other: object) -> object:
        nonlocal n_compared
        n_compared += 1
        return equal(one, other)

    monkeypatch.setattr(DocumentReader, "__eq__", counted)
    judge = FileJudge(FilesConfig(path=str(tmp_path)), "utf-8", reader_for)
    source = judge.judge(locate_files(str(tmp_path)), print)
    assert source.reader.recorded_name == DocumentReader("text").recorded_name
    assert [Path(name).name for name in source.readers] == ["00.jsonl"]
    assert n_compared <= 2 * 30


def test_a_linked_folder_is_read_once_and_one_around_the_source_never(
    tmp_path: Path,
) -> None:
    source, other = tmp_path / "source", tmp_path / "other"
    for place in (source / "own", source / ".hidden", other / "deep", other / ".git"):
        place.mkdir(parents=True)
        (place / "a.txt").write_text(NOTES)
    (other / "deep" / "back").symlink_to(source, target_is_directory=True)
    (other / "round").symlink_to(other, target_is_directory=True)
    for name, target in (
        ("another", other), ("again", other), ("first", source / "own"), ("up", tmp_path),
        (".also", other),
    ):  # fmt: skip
        (source / name).symlink_to(target, target_is_directory=True)
    (source / "b.txt").symlink_to(other / "deep" / "a.txt")
    (source / "nowhere.txt").symlink_to(tmp_path / "nowhere")
    found = [
        file.path.relative_to(source).as_posix() for file in locate_files(str(source))
    ]
    assert found == ["again/deep/a.txt", "b.txt", "own/a.txt"]


def test_a_folder_of_text_stays_plain_text_with_its_readme(
    tmp_path: Path, prepare_files: Prepare
) -> None:
    folder = tmp_path / "books"
    folder.mkdir()
    for name in ("one.txt", "two.txt", "README"):
        (folder / name).write_text((name + " " + NOTES) * 20)
    (folder / "cover.jpg").write_bytes(bytes(range(256)) * 4)
    code, _, err = prepare_files(folder)
    assert code == 0, err
    manifest = read_manifest(tmp_path / "store")
    assert {Path(s.path).name for s in manifest.sources} == {
        "README",
        "one.txt",
        "two.txt",
    }
    assert {s.reader for s in manifest.sources} == {TextReader().recorded_name}
    assert "cover.jpg (no text, such as a picture)" in err


def test_a_picture_alone_is_refused(tmp_path: Path, prepare_files: Prepare) -> None:
    picture = tmp_path / "a.txt"
    picture.write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + bytes(100))
    code, _, err = prepare_files(picture)
    assert code == 3
    assert "a.txt is not a text file" in err
    folder = tmp_path / "pictures"
    folder.mkdir()
    for name in "ab":
        (folder / f"{name}.png").write_bytes(picture.read_bytes())
    code, _, err = prepare_files(folder)
    assert code == 3
    assert "None of the 2 files of the source" in err


def test_ids_and_recipes_of_one_folder(tmp_path: Path, prepare_files: Prepare) -> None:
    folder = tmp_path / "dump"
    recipes(folder)
    np.save(folder / "ids.npy", np.arange(5, 300))
    code, _, err = prepare_files(folder)
    assert code == 2
    assert "a tokenizer cannot be trained on ids" in err


def test_a_foreign_file_of_records_is_left_out_by_name(
    tmp_path: Path, prepare_files: Prepare, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "dump"
    recipes(folder)
    (folder / "ingredient_lines.csv").write_text("recipe_id,line\n1,2 eggs\n2,salt\n")
    (folder / "meta.json").write_text('{"name": "dump", "version": 1}')
    (folder / "empty.json").write_text("[]\n")
    exam = {"question": "Who?", "choices": ["a", "b"], "answer": "a"}
    (folder / "exam.jsonl").write_text(json.dumps(exam))
    code, _, err = prepare_files(folder)
    assert code == 0, err
    assert [Path(s.path).name for s in read_manifest(tmp_path / "store").sources] == [
        "m.jsonl"
    ]
    report = Report.read_from(tmp_path / "store")
    assert report is not None
    assert {Path(name).name: why for name, why in report.left_out.items()} == {
        "ingredient_lines.csv": "no recipes: without a column of title and ingredients and steps",
        "meta.json": "no recipes: without a column of ingredients and steps",
        "empty.json": "no record in it",
        "exam.jsonl": (
            "prompts next to a column 'choices': columns must say whether it is part of a "
            "prompt"
        ),
    }
    assert "ingredient_lines.csv (no recipes: without a column of title" in err
    assert main(["init", str(folder), "--to", str(tmp_path / "my.yaml")]) == 0
    assert "ingredient_lines.csv (no recipes: without" in " ".join(
        capsys.readouterr().err.split()
    )


def test_a_folder_without_a_file_of_recipes_is_refused_with_the_first_ones_reason(
    tmp_path: Path, prepare_files: Prepare
) -> None:
    folder = tmp_path / "dump"
    folder.mkdir()
    (folder / "cut.csv").write_text("title,ingredients\nPot,2 eggs\nPan,salt\n")
    (folder / "README.md").write_text(README)
    code, _, err = prepare_files(folder)
    assert code == 3
    assert "cut.csv is a CSV table without a column of steps" in err
