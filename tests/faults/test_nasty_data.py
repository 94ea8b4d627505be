"""A file with everything wrong at once, through the command a user types."""

import json

from fixtures.recipe_files import pot as record
from toque.data.prepare.data_report import Report
from toque.data.store.store_manifest import read_manifest

LINES = [json.dumps(record(n)).encode() for n in range(40)]
NASTY = {
    6: LINES[5].replace(b"lentils", b"lent\xff\xfels"),
    10: b'{"title": "x',
    14: b"[1, 2]",
    18: b'{"title": "' + b"a" * (9 << 20) + b'"}',
    22: json.dumps(record(21, directions=[])).encode(),
    23: json.dumps(record(22, directions=["", " "])).encode(),
    26: b"[" * 100_000,
    38: b"\x00\x00\x00",
}
"""By the number of their line."""
STRANGE = {
    30: b'{"title": "Pot 0", ' + LINES[29][1:],  # one key twice
    34: json.dumps(record(33, title="Pot\x00 33")).encode(),
}
"""What can still be read."""


def test_faults_29_and_30_are_counted_with_their_lines(tmp_path, prepare_files):
    lines = [(NASTY | STRANGE).get(n, line) for n, line in enumerate(LINES, start=1)]
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(lines) + b"\r\n")
    code, said, err = prepare_files(tmp_path / "a.jsonl")
    assert code == 0, err
    manifest = read_manifest(tmp_path / "store")
    assert {
        reason: manifest.dropped[reason] for reason in sorted(manifest.dropped)
    } == {
        "no steps": 2,
        "not JSON": 3,
        "not UTF-8": 1,
        "not an object": 1,
        "too long": 1,
    }
    assert "Read 40 records: kept 32, dropped 8" in said
    places = Report.read_from(tmp_path / "store").lines
    told = sorted(int(p.rpartition(":")[2]) for found in places.values() for p in found)
    assert told == sorted(NASTY)
