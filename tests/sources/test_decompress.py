import bz2
import gzip
import lzma
import random
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest

from fixtures.processes import python
from toque.errors import DataError
from toque.sources import decompress as opening
from toque.sources.decompress import chunks, head, packed_as, plain_size
from toque.sources.documents import TextReader

TEXT = b"".join(b'{"title": "Dish %d"}\n' % n for n in range(5000))


def joined(path, **settings):
    return b"".join(chunks(path, **settings))


@pytest.fixture
def packed(tmp_path):
    path = tmp_path / "file.txt"
    path.write_bytes(TEXT)
    return path


def zstd(path, data):
    program = shutil.which("zstd")
    if program is None:
        pytest.skip("the zstd program is not installed")
    run = subprocess.run(
        [program, "-q", "-c"], input=data, capture_output=True, check=True
    )
    path.write_bytes(run.stdout)
    return path


def test_compressions_are_known_by_their_first_bytes(packed):
    forms = [TEXT, b"\xef\xbb\xbf" + TEXT]
    for compress in (gzip.compress, lzma.compress, bz2.compress):
        forms += [compress(TEXT), compress(TEXT[:1000]) + compress(TEXT[1000:])]
    for data in forms:
        packed.write_bytes(data)
        assert joined(packed, size=1000) == TEXT
    pytest.importorskip("pyarrow")
    assert joined(zstd(packed, TEXT), size=1000) == TEXT


@pytest.mark.parametrize("program", ["none", "gzip", "zstd"])
@pytest.mark.parametrize("seen", [opening.SIZED_BYTES, 1 << 20])
def test_a_size_is_counted_or_estimated_whatever_the_file_says_of_it(
    packed, program, seen, monkeypatch
):
    monkeypatch.setattr(opening, "SIZED_BYTES", seen)
    draw = random.Random(17)
    text = b"".join(b'{"a": %d}\n' % draw.randrange(10**9) for _ in range(240_000))
    packed.write_bytes(text)
    if program == "gzip":  # the last of two members says its own size alone
        members = (text[: 3 << 20], text[3 << 20 :])
        packed.write_bytes(b"".join(gzip.compress(member, 1) for member in members))
    elif program == "zstd":  # from a pipe, whose size nobody knew
        pytest.importorskip("pyarrow")
        zstd(packed, text)
    exact = program == "none" or seen > len(text)
    assert plain_size(packed) == pytest.approx(len(text), rel=0 if exact else 0.1)


@pytest.mark.parametrize("program", ["gzip", "zstd", "xz", "bzip2"])
def test_a_cut_file_is_refused(packed, program):
    if program == "zstd":
        pytest.importorskip("pyarrow")
        whole = zstd(packed, TEXT).read_bytes()
    else:
        modules = {"gzip": gzip, "xz": lzma, "bzip2": bz2}
        whole = modules[program].compress(TEXT)
    packed.write_bytes(whole[:-200])
    assert plain_size(packed) == len(whole) - 200
    with pytest.raises(DataError, match=f"damaged or truncated {program} file"):
        joined(packed)


def test_zstd_without_a_library_says_what_to_install(packed, monkeypatch):
    packed.write_bytes(b"\x28\xb5\x2f\xfd rest")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"pip install 'toque\[data\]'"):
        joined(packed)


def test_a_bomb_is_stopped_and_never_held(tmp_path, monkeypatch):
    monkeypatch.setattr(opening, "MIN_BOMB_BYTES", 1 << 20)
    path = tmp_path / "bomb.gz"
    with gzip.open(path, "wb") as file:
        for _ in range(64):
            file.write(bytes(1 << 20))
    seen: list[int] = []
    with pytest.raises(DataError, match="over 200 times as many"):
        seen.extend(len(chunk) for chunk in chunks(path))
    assert max(seen) <= opening.CHUNK_BYTES
    assert sum(seen) < path.stat().st_size * opening.MAX_EXPANSION + (2 << 20)


def bombs(folder):
    """300 MiB of blanks after some recipes: 0.3 MB of gzip, some 30 kB of zstd."""
    with gzip.open(folder / "bomb.jsonl.gz", "wb") as file:
        file.write(TEXT)
        for _ in range(300):
            file.write(b" " * (1 << 20))
    yield folder / "bomb.jsonl.gz"
    program = shutil.which("zstd")
    if program is not None:
        with (folder / "bomb.jsonl.zst").open("wb") as packed:
            run = subprocess.Popen(
                [program, "-q", "-c"], stdin=subprocess.PIPE, stdout=packed
            )
            run.stdin.write(TEXT)
            for _ in range(300):
                run.stdin.write(b" " * (1 << 20))
            run.stdin.close()
            assert run.wait() == 0
        yield folder / "bomb.jsonl.zst"


READ = """
import resource, sys
from pathlib import Path
from toque.sources.json_records import json_blocks
from toque.errors import DataError

base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    for block in json_blocks(Path(sys.argv[1]), "lines"):
        pass
except DataError as error:
    print("refused:", error)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base)
"""


@pytest.mark.slow
def test_a_real_bomb_is_refused_in_bounded_memory(tmp_path):
    """In a process of its own, at the product's own limits; its one line is never held."""
    for path in bombs(tmp_path):
        assert path.stat().st_size * opening.MAX_EXPANSION < 300 << 20
        said, kibibytes = python("-c", READ, path).stdout.strip().rsplit("\n", 1)
        assert said.startswith("refused:"), path
        assert "a decompression bomb" in said
        assert int(kibibytes) < 64 << 10, path


def test_a_size_that_a_header_claims_is_not_believed(tmp_path):
    """gzip ends with the plain size, zstd begins with it: neither is made room for."""
    path = tmp_path / "claims.gz"
    path.write_bytes(gzip.compress(TEXT, mtime=0)[:-4] + b"\xff\xff\xff\xff")
    with pytest.raises(DataError, match="damaged or truncated gzip file"):
        joined(path)
    pytest.importorskip("pyarrow")
    # A frame that says 1 TiB (RFC 8878, 3.1.1.1): magic, descriptor, size, one last raw block.
    frame = b"\x28\xb5\x2f\xfd\xe0" + (1 << 40).to_bytes(8, "little")
    path.write_bytes(frame + (len(b"{}\n") << 3 | 1).to_bytes(3, "little") + b"{}\n")
    said, kibibytes = python("-c", READ, path).stdout.strip().rsplit("\n", 1)
    assert "damaged or truncated zstd file" in said
    assert int(kibibytes) < 64 << 10


@pytest.mark.parametrize(
    ("start", "said"),
    [
        (b"\xff\xfeh\x00", "UTF-16"),
        (b"PK\x03\x04rest", "ZIP archive"),
        (b"SQLite format 3\x00", "SQLite"),
        (b"7z\xbc\xaf\x27\x1c", "a 7-Zip archive.*7z x"),
        (b"Rar!\x1a\x07\x00", "a RAR archive"),
        (b"%PDF-1.7", "a PDF document"),
        (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "an old Office file"),
        (
            b"\xd0\xcf\x11\xe0" + "EncryptedPackage".encode("utf-16-le"),
            "an Office file with a password",
        ),
        (b"{\\rtf1 Soup", "an RTF document"),
        (b"\x04\x22\x4d\x18", "LZ4"),
    ],
)
def test_other_kinds_are_refused_with_the_way_out(packed, start, said):
    packed.write_bytes(start)
    with pytest.raises(DataError, match=said):
        joined(packed)
    assert said == "UTF-16" or re.search(said, packed_as(packed))


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["[Content_Types].xml", "xl/workbook.bin"], "a binary Excel workbook (.xlsb)"),
        (["[Content_Types].xml", "word/document.xml"], "a Word document"),
        (["[Content_Types].xml", "ppt/presentation.xml"], "a PowerPoint presentation"),
        (
            ["mimetype=application/vnd.oasis.opendocument.spreadsheet"],
            "an OpenDocument spreadshe",
        ),
        (["mimetype=application/vnd.oasis.opendocument.text"], "an OpenDocument file"),
        (["mimetype=application/epub+zip", "META-INF/container.xml"], "an EPUB book"),
        (
            ["classes.dex", "AndroidManifest.xml", "META-INF/MANIFEST.MF"],
            "an Android app",
        ),
        (["recipes.jsonl", "word/list.txt"], "a ZIP archive. Unpack it first: unzip"),
    ],
)
def test_what_is_a_zip_archive_is_called_what_it_is(packed, names, said):
    with zipfile.ZipFile(packed, "w") as archive:
        for name in names:
            archive.writestr(name.partition("=")[0], name.partition("=")[2])
    with pytest.raises(DataError, match=f"is {re.escape(said)}"):
        joined(packed)


@pytest.mark.parametrize(
    "form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]
)
@pytest.mark.parametrize("compression", ["", "gz", "xz", "bz2"])
def test_a_tar_archive_is_called_one_however_it_is_compressed(
    packed, form, compression
):
    inner = packed.with_name("recipes.jsonl")
    inner.write_bytes(TEXT)
    with tarfile.open(packed, f"w:{compression}", format=form) as archive:
        archive.add(inner, "recipes.jsonl")
    with pytest.raises(DataError, match=r"is a tar archive\. Unpack it first: tar xf"):
        joined(packed)
    assert packed_as(packed).startswith("a tar archive")


def test_missing_empty_and_folders(tmp_path, packed):
    with pytest.raises(DataError, match="does not exist"):
        joined(tmp_path / "nothing")
    with pytest.raises(DataError, match="not a folder"):
        joined(tmp_path)
    packed.write_bytes(b" \n")
    with pytest.raises(DataError, match="is empty"):
        head(packed)


def test_the_head_says_whether_it_is_all(packed):
    assert head(packed) == (TEXT, True)
    assert head(packed, 100) == (TEXT[:100], False)


@pytest.mark.parametrize("size", [1, 3, 1 << 20])
def test_bytes_that_utf_16_does_not_know_are_counted_as_not_utf_8(tmp_path, size):
    path = tmp_path / "file.txt"
    lone, text = b"A\xd8", "crème\n".encode("utf-16-le")
    path.write_bytes(
        b"\xff\xfe" + text + lone + text + b"\n"
    )  # the last character is cut
    found = b"".join(chunks(path, size, encoding="utf-16"))
    assert found == "crème\n".encode() + b"\xff\xd8" + "crème\n".encode() + b"\xff"
    (block,) = TextReader(encoding="utf-16").blocks(path)
    assert TextReader().examples(block).notes == {"bytes that are not UTF-8": 3}
