import pytest

from toque.data.prepare.store_plan import _matches
from toque.sources.source_files import locate_files


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("data[old]/*.jsonl", ["data[old]/a.jsonl"]), ("data[old]", ["data[old]/a.jsonl"]),
        ("my [recipes]/file.jsonl", ["my [recipes]/file.jsonl"]),
        ("*/*[[]x].jsonl", ["my [recipes]/[x].jsonl"]), ("*/[x].jsonl", ["my [recipes]/[x].jsonl"]),
        ("**/v[1]/*.jsonl", ["p/v[1]/b.jsonl"]), ("p/v[1]/*.jsonl", ["p/v[1]/b.jsonl"]),
        ("what?/*.jsonl", ["what?/a.jsonl"]), ("data[o]/*.jsonl", ["datao/c.jsonl"]),
        ("un[closed/*", ["un[closed/a.jsonl"]),
    ],
)  # fmt: skip
def test_folders_with_brackets_and_other_signs_of_patterns(
    tmp_path, monkeypatch, pattern, names
):
    for name in (
        "data[old]/a.jsonl", "datao/c.jsonl", "my [recipes]/file.jsonl", "my [recipes]/[x].jsonl",
        "p/v[1]/b.jsonl", "what?/a.jsonl", "whats/a.jsonl", "un[closed/a.jsonl",
    ):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert [file.name for file in locate_files(pattern)] == names
    absolute = str(tmp_path / pattern)
    assert [file.name for file in locate_files(absolute)] == [
        str(tmp_path / name) for name in names
    ]
    assert all(_matches(pattern, name) for name in names)
