"""Damage to valid files: bytes, JSON trees, and the headers of binary formats.

Every function takes the bytes of a valid file and a `random.Random`, and returns bytes. The same
generator state gives the same damage, so a seed repeats a failure.
"""

from __future__ import annotations

import copy
import datetime as dt
import gzip
import io
import json
import struct
import zipfile
from collections.abc import Callable
from random import Random
from typing import Any

Damage = Callable[[bytes, Random], bytes]

PARTS = (
    b"", b'"', b"'", b"[", b"]", b"{", b"}", b",", b":", b"\\", b"\n", b"\r", b"\r\n", b"\t",
    b"\0", b"\x1b[2J", b"\x7f", b"\x80", b"\xff", b"\xed\xa0\x80", b"\xf4\x90\x80\x80",
    b"\xef\xbb\xbf", b"&#0;", b"&#x110000;", b"&" * 9, b"<", b"</script>", b"<!--", b"null",
    b"NaN", b"-Infinity", b"1e999", b"-1", b"9" * 25, b"9" * 5000, b"1/0", b"1,000,000",
    b"\\ud800", b"\\u0000", b"MMMMM", b"c(", b"[" * 300, b"{" * 300, b"(" * 300, b" " * 200,
    b"-" * 200, b"- " * 100, b"*a", b"&a", b"<<: *a", b"!!python/object:os.system", b"---\n",
    b"%YAML 9.9\n", b"../", b"\xc2\xa0", b"\xc2\x85", "\u2028\u200f\u202e".encode(), "½⅓".encode(),
    "e\u0301".encode() * 20, b"PK\x03\x04", b"\x93NUMPY",
)  # fmt: skip
"""Pieces that break parsers."""

VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, -5, 1, 2, 255, 256, 2**31, 2**32, 2**53 + 1, 2**63, -(2**63) - 1,
    2**64, 10**30, 0.5, -0.0, 1e30, 1e308, 5e-324, float("nan"), float("inf"), float("-inf"), "",
    " ", "0", "-5", "1e999", "NaN", "\0", "\x1b[31mred", "\u202e", "\ud800", "../../etc/passwd",
    "/etc/passwd", "a/b", ".", "..", "C:\\x", "line\nbreak", "x" * 300, "ß" * 4097, "é́", [], {},
    [[]], [None], {"": None}, [0] * 1000, "os:system", "hf:nothing", "s3://", "${HOME}", "%s%n",
    "trained:512", "trained:-1", "3 epochs",
)  # fmt: skip
"""Replacement values."""


class Raw(str):
    """JSON text that is written without quotes."""

    __slots__ = ()


class Pairs(list[tuple[str, Any]]):
    """An object that may contain a name twice."""

    __slots__ = ()


RAW = (
    Raw("9" * 4400), Raw("-" + "9" * 400), Raw("1e" + "9" * 30), Raw("0." + "3" * 5000),
    Raw("tru"), Raw("'a'"), Raw("01"), Raw("0x10"), Raw("[" * 2000), Raw("[" * 2000 + "]" * 2000),
    Raw('{"a":' * 900 + "1" + "}" * 900), Raw('"\\x"'), Raw('"\\ud83d"'), Raw('"' + "\x01" + '"'),
)  # fmt: skip


def of_bytes(data: bytes, chance: Random) -> bytes:
    """Flip, insert, remove, repeat, move or truncate bytes, up to 30 times."""
    found = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 3, 8, 30))):
        at = chance.randrange(len(found) + 1)
        to = min(len(found), at + chance.choice((1, 1, 2, 4, 40, 400)))
        match chance.randrange(9):
            case 0 if at < len(found):
                found[at] ^= 1 << chance.randrange(8)
            case 1 if at < len(found):
                found[at] ^= 128
            case 2 if at < len(found):
                found[at] = chance.randrange(256)
            case 3 | 4:
                found[at:at] = chance.choice(PARTS)
            case 5:
                del found[at:to]
            case 6:
                found[at:at] = found[at:to] * chance.choice((1, 1, 2, 50))
            case 7:
                piece, found[at:to] = found[at:to], b""
                there = chance.randrange(len(found) + 1)
                found[there:there] = piece
            case 8 if chance.random() < 0.2:
                del found[at:]
    return bytes(found)


def enlarged(data: bytes, chance: Random, *, size: int = 200_000) -> bytes:
    """Repeat a short piece to about `size` bytes."""
    at = chance.randrange(len(data) + 1)
    own = data[at : at + chance.choice((1, 2, 5, 30))]
    piece = chance.choice((own, own, *chance.sample(PARTS, 2))) or b"a"
    return data[:at] + piece * (size // len(piece)) + data[at:]


def of_json(data: bytes, chance: Random) -> bytes:
    """Replace, move, repeat or remove JSON values, or damage the bytes."""
    if chance.random() < 0.25:
        return of_bytes(data, chance)
    try:
        return dumped(of_tree(json.loads(data), chance)).encode(
            "utf-8", "surrogatepass"
        )
    except (ValueError, RecursionError):  # it was damaged before
        return of_bytes(data, chance)


def of_json_lines(data: bytes, chance: Random) -> bytes:
    """Damage, repeat or exchange some JSON lines."""
    lines = data.splitlines(keepends=True)
    for _ in range(chance.choice((1, 1, 2, 5))):
        at = chance.randrange(len(lines))
        lines[at] = (
            chance.choice((of_json, of_json, of_bytes))(lines[at], chance) + b"\n"
        )
        if chance.random() < 0.1:
            lines.insert(chance.randrange(len(lines)), lines[at])
    return b"".join(lines)


def of_tree(tree: Any, chance: Random) -> Any:
    """Copy a tree and change one to four random values."""
    tree = copy.deepcopy(tree)
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        places = list(_places(tree))
        if not places:
            return _value(chance, tree)
        holder, key = chance.choice(places)
        if isinstance(holder, Pairs):
            name, value = holder[key]
            holder[key] = (name, _value(chance, value))
        else:
            _change(holder, key, chance, places)
    return tree


def _change(
    holder: Any, key: Any, chance: Random, places: list[tuple[Any, Any]]
) -> None:
    match chance.randrange(10):
        case 0 | 1 | 2 | 3 | 4:
            holder[key] = _value(chance, holder[key])
        case 5:
            del holder[key]
        case 6 if isinstance(holder, dict):
            holder[str(chance.choice(VALUES))] = holder.pop(key)
        case 7 if isinstance(holder, dict):
            inner = holder[key]
            if isinstance(inner, dict) and inner:
                name = chance.choice(list(inner))
                doubled = (name, _value(chance, inner[name]))
                holder[key] = Pairs([*inner.items(), doubled])
        case 8:
            other, name = chance.choice(places)
            if not isinstance(other, Pairs):
                holder[key] = copy.deepcopy(
                    other.get(name) if isinstance(other, dict) else None
                )
        case _ if isinstance(holder, list):
            holder.insert(key, copy.deepcopy(holder[key]))


def _value(chance: Random, now: Any) -> Any:
    """Return a replacement for `now`: a near value, another type, or a parser problem."""
    kind = chance.randrange(8)
    if kind == 0 and isinstance(now, int | float):
        return chance.choice(
            (-now, now + 1, now - 1, now * 1000, now * 10**12, float(now), str(now))
        )
    if kind == 1 and isinstance(now, str):
        as_bytes = of_bytes(now.encode("utf-8", "surrogatepass"), chance)
        return chance.choice(
            (as_bytes.decode(errors="replace"), now * 50, now.upper(), [now])
        )
    if kind == 2:
        return chance.choice(([now], {"value": now}, [now] * 3, [[now, None]]))
    if kind == 3:
        return chance.choice(RAW)
    return copy.deepcopy(chance.choice(VALUES))


def _places(tree: Any) -> Any:
    """Return (container, key) of every value below the root."""
    keys: Any = ()
    if isinstance(tree, Pairs | list):
        keys = range(len(tree))
    elif isinstance(tree, dict):
        keys = list(tree)
    for key in keys:
        yield tree, key
        inner = tree[key][1] if isinstance(tree, Pairs) else tree[key]
        yield from _places(inner)


def dumped(tree: Any) -> str:
    """Write a tree with `Raw`, `Pairs`, NaN and lone surrogates as JSON."""
    if isinstance(tree, Raw):
        return str(tree)
    if isinstance(tree, dict):
        tree = Pairs(tree.items())
    if isinstance(tree, Pairs):
        return "{" + ", ".join(f"{json.dumps(k)}: {dumped(v)}" for k, v in tree) + "}"
    if isinstance(tree, list | tuple):
        return "[" + ", ".join(map(dumped, tree)) + "]"
    if isinstance(tree, dt.date):  # YAML reads dates as such
        tree = str(tree)
    return json.dumps(tree, ensure_ascii=not isinstance(tree, str) or "\ud800" in tree)


def of_page(data: bytes, chance: Random) -> bytes:
    """Damage the JSON-LD of a web page, or the text of the page."""
    start = data.index(b">", data.index(b"ld+json")) + 1
    end = data.index(b"</script>", start)
    if chance.random() < 0.6:
        return data[:start] + of_json(data[start:end], chance) + data[end:]
    return of_bytes(data, chance)


def of_yaml(data: bytes, chance: Random) -> bytes:
    """Damage the bytes or lines of YAML, or write its values as damaged JSON."""
    import yaml

    if chance.random() < 0.5:
        tree = of_tree(yaml.safe_load(data), chance)
        return dumped(tree).encode("utf-8", "surrogatepass")
    lines = data.splitlines(keepends=True)
    if chance.random() < 0.5:
        at = chance.randrange(len(lines))
        part = chance.choice(PARTS).strip(b"\n")
        name, colon, value = lines[at].partition(b": ")
        nested = b"".join(b" " * d + b"a:\n" for d in range(1, 200))
        changed = (
            name + colon + part + b"\n",
            name + colon + b"&a [*a]\n",
            name + b":\n" + nested,
            name + colon + b"!!binary " + value,
            part + colon + value,
            lines[at] * 2,
            b" " + lines[at],
            b"\t" + lines[at],
        )
        lines[at] = chance.choice(changed)
        return b"".join(lines)
    return of_bytes(data, chance)


def of_safetensors(data: bytes, chance: Random) -> bytes:
    """Damage the header length, the header or the body of a safetensors file."""
    length = struct.unpack("<Q", data[:8])[0]
    header, body = data[8 : 8 + length], data[8 + length :]
    kind = chance.randrange(4)
    if kind == 0:
        length = chance.choice(
            (0, 1, length - 1, length + 1, len(data), 2**31, 2**63, 2**64 - 1)
        )
        return struct.pack("<Q", length) + data[8:]
    if kind == 1:
        return of_bytes(data, chance)
    if kind == 2:
        body = of_bytes(body, chance)
    else:
        header = of_json(header, chance)
    return struct.pack("<Q", len(header)) + header + body


def of_npy(data: bytes, chance: Random) -> bytes:
    """Damage the shape, type, version, header or bytes of an `.npy` file."""
    if chance.random() < 0.3:
        return of_bytes(data, chance)
    length = struct.unpack("<H", data[8:10])[0]
    header, body = data[10 : 10 + length].decode("latin-1"), data[10 + length :]
    swaps = (
        (
            "(",
            chance.choice(
                ("(-", "(9999999999999, ", "((", "(1, 1, 1, ", "[", "(True, ", "(1.5, ")
            ),
        ),
        (",)", chance.choice((")", ", 0)", ", -1)", ", 99999999999999999999)", "]"))),
        ("False", chance.choice(("True", "None", "__import__('os')", "1"))),
        (
            "<u2",
            chance.choice(
                ("|O", ">u2", "<f8", "|V0", "|S0", "<i8", "|b1", "<M8[s]", "<U9", "?")
            ),
        ),
        ("<", chance.choice((">", "|", "=", ""))),
        ("}", chance.choice(("", "}}", ", 'descr': '<u4'}", "} + {}"))),
        ("'descr'", chance.choice(("'shape'", "'other'", "descr", "b'descr'"))),
    )
    for old, new in chance.sample(swaps, chance.choice((1, 1, 2))):
        header = header.replace(old, new, 1)
    if chance.random() < 0.2:
        header = of_bytes(header.encode("latin-1"), chance).decode("latin-1")
    text = header.encode("latin-1")
    version = chance.choice(
        (b"\x01\x00",) * 6 + (b"\x02\x00", b"\x03\x00", b"\x09\x09")
    )
    count = (
        min(len(text), 65_535) if chance.random() < 0.9 else chance.randrange(65_536)
    )
    size = struct.pack("<H" if version[0] == 1 else "<I", count)
    body = body if chance.random() < 0.7 else of_bytes(body, chance)
    return b"\x93NUMPY" + version + size + text + body


def of_npz(data: bytes, chance: Random) -> bytes:
    """Damage members, names or bytes of an `.npz` archive."""
    if chance.random() < 0.4:
        return of_bytes(data, chance)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = [(name, archive.read(name)) for name in archive.namelist()]
    at = chance.randrange(len(members))
    name, body = members[at]
    match chance.randrange(5):
        case 0 | 1 | 2:
            members[at] = (name, of_npy(body, chance))
        case 3:
            members[at] = (
                chance.choice(
                    ("../a.npy", "ids.npy", "a.txt", "", "ends.npy", "\0.npy")
                ),
                body,
            )
        case _:
            members.pop(at)
    kept = io.BytesIO()
    packing = chance.choice(
        (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2)
    )
    with zipfile.ZipFile(kept, "w", packing) as archive:
        for name, body in members:
            archive.writestr(zipfile.ZipInfo(name), body, packing)
    return kept.getvalue()


def of_workbook(data: bytes, chance: Random) -> bytes:
    """Damage the bytes of a workbook, or the XML of a member."""
    if chance.random() < 0.3:
        return of_bytes(data, chance)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    damaged = chance.choice([name for name in members if "theme" not in name])
    members[damaged] = of_bytes(members[damaged], chance)
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, body in members.items():
            archive.writestr(name, body)
    return packed.getvalue()


def of_parquet(data: bytes, chance: Random) -> bytes:
    """Write other cells into a Parquet file, or damage its bytes."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if chance.random() < 0.6:
        return of_bytes(data, chance)
    rows = pq.read_table(pa.BufferReader(data)).to_pylist()
    kept = io.BytesIO()
    try:
        at = chance.randrange(len(rows))
        rows[at] = json.loads(dumped(of_tree(rows[at], chance)))
        if chance.random() < 0.5:
            rows = [of_tree(row, Random(at)) for row in rows]
        pq.write_table(pa.Table.from_pylist(rows), kept)
    except (
        ValueError,
        TypeError,
        OverflowError,
        RecursionError,
        AttributeError,
        pa.ArrowException,
    ):
        return of_bytes(data, chance)  # Arrow has no place for that
    return kept.getvalue()


def compressed(
    inner: Damage, pack: Callable[[bytes], bytes], unpack: Callable[[bytes], bytes]
) -> Damage:
    """Damage the bytes before or after compression."""

    def damage(data: bytes, chance: Random) -> bytes:
        if chance.random() < 0.6:
            return of_bytes(data, chance)
        return pack(inner(unpack(data), chance))

    return damage


def gzipped(data: bytes) -> bytes:
    """Compress bytes deterministically."""
    return gzip.compress(data, mtime=0)
