"""Entrances: the valid input of each area, its damage, and the command that reads it.

A case writes a folder with one damaged file and runs a command on it, or for sources a reader of
`prepare`. The command must finish, or refuse the file in one paragraph with a documented exit code.
Any other outcome raises `Unwell` or the exception of the command.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

from fuzzing import mutations, originals
from fuzzing.mutations import Damage

LONGEST_MESSAGE: Final = 8_000
"""Maximum length of an error message in characters."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_CODES: Final = {"data": {0, 3}, "model": {0, 2, 3, 4}, "any": {0, 2, 3, 4, 5}}


class Unwell(Exception):  # noqa: N818 - a finding, told like any other exception
    """A command that failed without an error message of Toque."""


@dataclass(frozen=True)
class Area:
    """One kind of input."""

    case: Callable[[Random, Path], int]
    """Makes a damaged input in an empty folder, opens it, and gives the number of records met."""
    original: Path | None = None
    """The whole folder that is damaged."""


def command(*words: str, allowed: set[int] = _CODES["any"]) -> tuple[int, str]:
    """Run a command in this process. Return its exit code and standard error.

    Raises:
        Unwell: The exit code is undocumented, or the error is not one paragraph.
    """
    from toque.cli import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(words))
    said = err.getvalue()
    if code not in allowed:
        raise Unwell(f"toque {words[0]} ended with {code}: {said[-500:]!r}")
    if code:
        check_paragraph(said.rpartition("toque: ")[2].removesuffix("\n"))
    elif words[0] != "generate" and (found := _CONTROL.search(out.getvalue())):
        raise Unwell(
            f"toque {words[0]} prints the control character {found[0]!r} of a file"
        )
    return code, said


def check_paragraph(text: str) -> None:
    """Raise Unwell unless the text is one paragraph without control characters."""
    if "\n" in text:
        raise Unwell(f"a message of several lines: {text[:500]!r}")
    if found := _CONTROL.search(text):
        raise Unwell(
            f"a message with the control character {found[0]!r}: {text[:500]!r}"
        )
    if not 40 <= len(text) <= LONGEST_MESSAGE:
        raise Unwell(f"a message of {len(text)} characters: {text[:500]!r}")


def sealed_again(folder: Path) -> None:
    """Update every size and hash of a manifest, so that damage has valid hashes."""
    from toque.storage.json_files import add_seal

    path = folder / "manifest.json"
    held = json.loads(path.read_bytes())
    for entry in [*held.get("shards", []), *held["files"]]:
        file = folder / entry["file"]
        if file.is_file():
            entry["bytes"] = file.stat().st_size
            entry["sha256"] = hashlib.sha256(file.read_bytes()).hexdigest()
    held["self_sha256"] = ""
    path.write_bytes(add_seal(json.dumps(held, indent=1).encode()))


def manifest_damage(data: bytes, chance: Random) -> bytes:
    """Damage a manifest. Half of the time, update its own hash."""
    from toque.storage.json_files import add_seal

    if chance.random() < 0.3:
        return mutations.of_bytes(data, chance)
    held = json.loads(data)
    tree = mutations.of_tree(
        {k: v for k, v in held.items() if k != "self_sha256"}, chance
    )
    if not isinstance(tree, dict):
        return mutations.dumped(tree).encode("utf-8", "surrogatepass")
    tree["self_sha256"] = ""
    return add_seal(mutations.dumped(tree).encode("utf-8", "surrogatepass"))


def damage_of(name: str) -> Damage:
    """Return the damage for a file suffix."""
    endings: Mapping[str, Damage] = {
        "manifest.json": manifest_damage,
        ".json": mutations.of_json,
        ".jsonl": mutations.of_json_lines,
        ".yaml": mutations.of_yaml,
        ".npy": mutations.of_npy,
        ".safetensors": mutations.of_safetensors,
    }
    return next(
        (d for ending, d in endings.items() if name.endswith(ending)),
        mutations.of_bytes,
    )


def damaged_copy(
    original: Path, copy: Path, chance: Random, *, seal: bool = False, only: str = "*"
) -> Path:
    """Copy a folder and damage one file. With `seal`, most copies have valid hashes."""
    shutil.copytree(original, copy)
    files = sorted(p for p in copy.rglob(only) if p.is_file() and p.stat().st_size)
    path = chance.choice(files)
    path.write_bytes(damage_of(path.name)(path.read_bytes(), chance))
    if seal and path.name != "manifest.json" and chance.random() < 0.9:
        sealed_again(copy)
    return path


def config_case(work: Path) -> Area:
    """Run `show` on a damaged configuration or override."""
    import toque.config

    presets = Path(toque.config.__file__).parent.parent / "presets"
    texts = [p.read_bytes() for p in sorted(presets.glob("*.yaml"))]
    texts.append((work / "run" / "config.yaml").read_bytes())

    def case(chance: Random, folder: Path) -> int:
        file = folder / "config.yaml"
        text = chance.choice(texts)
        grown = chance.random() < 0.03
        file.write_bytes(
            (mutations.enlarged if grown else mutations.of_yaml)(text, chance)
        )
        words = [str(file)]
        if chance.random() < 0.3:
            name = chance.choice(
                (
                    "optim.peak_lr",
                    "train.batch",
                    "data.sources.0.path",
                    "a.b",
                    "seed",
                    "model",
                )
            )
            value = mutations.of_bytes(b'"3 steps"', chance).decode(errors="replace")
            words.append(f"{name}={value}")
        if any(word.startswith("-") for word in words):
            return 0
        command("show", *words, allowed={0, 2})
        return 1

    return Area(case)


def store_case(work: Path) -> Area:
    """Run `verify` and `report` on a damaged store, and read every row."""
    from toque.data.store.token_store import TokenStore
    from toque.errors import DataError

    def case(chance: Random, folder: Path) -> int:
        store = folder / "store"
        damaged_copy(work / "store", store, chance, seal=True)
        code, _ = command("verify", str(store), allowed={0, 2, 3, 4})
        command("report", str(store), allowed={0, 2, 3})
        with contextlib.suppress(DataError):
            found = TokenStore.open(store)
            for split in ("train", "validation"):
                found.sides(found.rows(split))  # type: ignore[arg-type]
            for name in found.manifest.columns:
                found.column(name)
            found.codec().encode("lentils")
        return int(code == 0)

    return Area(case, work / "store")


def checkpoint_case(work: Path) -> Area:
    """Run `verify` on a damaged checkpoint, and load it as a resumed run does."""
    from toque.errors import CheckpointError
    from toque.training.checkpoint.saved import verify_checkpoint
    from toque.training.checkpoint.store import CheckpointStore

    original = next((work / "half" / "checkpoints").glob("step-*"))

    def case(chance: Random, folder: Path) -> int:
        copy = folder / "checkpoints" / original.name
        damaged_copy(original, copy, chance, seal=True)
        code, _ = command("verify", str(copy), allowed={0, 2, 3, 4})
        with contextlib.suppress(CheckpointError):
            CheckpointStore(folder / "checkpoints").newest_valid()
        with contextlib.suppress(CheckpointError):
            found = verify_checkpoint(copy)
            found.state()
            found.tensors("model")
            found.tensors("optimizer")
        return int(code == 0)

    return Area(case)


def resume_case(work: Path) -> Area:
    """Run `train` with a damaged checkpoint, `resources.json` or metrics."""

    def case(chance: Random, folder: Path) -> int:
        run = folder / "half"
        shutil.copytree(work / "half", run)
        places = ["state.json"] * 4 + [
            "model.safetensors",
            "optimizer.safetensors",
            "manifest.json",
        ]
        places += ["resources.json", "metrics.jsonl"]
        name = chance.choice(places)
        path = next(iter([*run.glob(name), *run.glob(f"checkpoints/*/{name}")]))
        path.write_bytes(damage_of(name)(path.read_bytes(), chance))
        if path.parent != run and name != "manifest.json":
            sealed_again(path.parent)
        command(
            "train", str(work / "run.yaml"), f"run_dir={run}", "train.stop_after=5 steps",
            "optim.schedule=constant", "evaluation.generate=0",
        )  # fmt: skip
        return 1

    return Area(case)


def run_case(work: Path) -> Area:
    """Run `report`, `verify` and `show` on a damaged run folder, and read its metrics."""
    from toque.errors import ToqueError
    from toque.workflows.results import TrainedRun

    def case(chance: Random, folder: Path) -> int:
        run = folder / "run"
        damaged_copy(
            work / "run",
            run,
            chance,
            only=chance.choice(("*.json", "*.jsonl", "config.yaml")),
        )
        command("report", str(run))
        command("verify", str(run))
        command("show", str(run), allowed={0, 2})
        with contextlib.suppress(ToqueError):
            trained = TrainedRun(run, 6, "finished")
            _ = (trained.metrics, trained.losses)
        return 1

    return Area(case)


def model_case(work: Path) -> Area:
    """Run `generate` on a damaged model folder, and load its tokenizer."""
    from toque.data.tokenizer.codec import load_codec
    from toque.data.tokenizer.tokenizer_folder import resolve_tokenizer
    from toque.errors import ToqueError

    def case(chance: Random, folder: Path) -> int:
        model = folder / "model"
        weighted = (
            ["config.json"] * 3
            + ["tokenizer.json"] * 2
            + ["*.json", "model.safetensors"]
        )
        damaged_copy(
            work / "run" / "model", model, chance, only=chance.choice(weighted)
        )
        command(
            "generate",
            str(model),
            "--prompt",
            "Lentils",
            "--max-new-tokens",
            "3",
            allowed=_CODES["model"],
        )
        with contextlib.suppress(ToqueError):
            codec = load_codec(resolve_tokenizer(str(model)))
            codec.decode(codec.encode("2 cups of lentils\nand salt"))
        return 1

    return Area(case, work / "run" / "model")


def source_case(work: Path, name: str, valid: bytes, damage: Damage) -> Area:
    """Read a damaged source of one format. Sometimes run the whole `prepare`."""
    from toque.errors import ConfigError, DataError
    from toque.sources.source_files import blocks_of, find_files
    from toque.workflows.configure import configure
    from toque.workflows.prepared_store import open_sources

    columns = {
        "pairs": {"prompt": "question", "target": "answer"},
        "documents": {"text": "text"},
    }
    sealed = name.startswith("np")
    tokenizer = str(work / "store" / "tokenizer") if sealed else "trained:512"

    def case(chance: Random, folder: Path) -> int:
        file = folder / "source"
        grown = chance.random() < 0.02
        file.write_bytes((mutations.enlarged if grown else damage)(valid, chance))
        named = chance.random() < 0.3
        source = {"path": str(file), "columns": columns.get(name, {}) if named else {}}
        if name == "text" and named:
            source["format"] = "text"
        read = 0
        try:
            config = configure(
                data={"sources": [source], "store": str(folder / "store")},
                model={"family": "gpt2", "tokenizer": tokenizer},
            )
            for found in find_files(open_sources(config)):
                for block in blocks_of(found):
                    given = found.reader.examples(block)
                    read += given.read
                    if given.read != given.kept + sum(map(len, given.dropped.values())):
                        raise Unwell(
                            f"read is {given.read}, kept {given.kept}, dropped {given.dropped}"
                        )
                    for example in given.examples:
                        (example.prompt + example.target).encode()
        except (ConfigError, DataError) as error:
            check_paragraph(str(error))
        if chance.random() < 0.03:
            (folder / "p.yaml").write_text(json.dumps({
                "data": {"sources": [source], "store": str(folder / "store")},
                "model": {"family": "gpt2", "tokenizer": tokenizer},
            }))  # fmt: skip
            command("prepare", str(folder / "p.yaml"), allowed={0, 2, 3})
        return read

    return Area(case)


def saved_dataset_case(work: Path) -> Area:
    """Read a folder saved by `datasets` with damaged lists of files and splits."""
    import datasets

    from toque.errors import DataError
    from toque.sources.source_files import blocks_of, find_files
    from toque.workflows.configure import configure
    from toque.workflows.prepared_store import open_sources

    original = work / "dataset"
    if not original.exists():
        rows = datasets.Dataset.from_list(
            [originals.record(n) for n in range(originals.N_RECORDS)]
        )
        datasets.DatasetDict({"train": rows}).save_to_disk(original)

    def case(chance: Random, folder: Path) -> int:
        copy, read = folder / "dataset", 0
        damaged_copy(original, copy, chance)
        try:
            for found in find_files(
                open_sources(configure(data={"sources": [{"path": str(copy)}]}))
            ):
                read += sum(
                    found.reader.examples(block).read for block in blocks_of(found)
                )
        except DataError as error:
            check_paragraph(str(error))
        return read

    return Area(case)


def areas(work: Path) -> dict[str, Area]:
    """Return every area by name. `work` has the files of `originals.make`."""
    sources = originals.sources()
    kinds: dict[str, Damage] = {
        "json": mutations.of_json, "json-nested": mutations.of_json, "json-ld": mutations.of_json,
        "jsonl": mutations.of_json_lines, "pairs": mutations.of_json_lines,
        "documents": mutations.of_json_lines, "npy": mutations.of_npy, "npz": mutations.of_npz,
        "npz-rows": mutations.of_npz, "html": mutations.of_page, "parquet": mutations.of_parquet,
        "xlsx": mutations.of_workbook,
    }  # fmt: skip
    found = {
        "config": config_case(work), "store": store_case(work), "checkpoint": checkpoint_case(work),
        "resume": resume_case(work), "run": run_case(work), "model": model_case(work),
        "dataset": saved_dataset_case(work),
    }  # fmt: skip
    for name, valid in sources.items():
        found[name] = source_case(
            work, name, valid, kinds.get(name, mutations.of_bytes)
        )
    lines = sources["jsonl"]
    gz = mutations.compressed(
        mutations.of_json_lines, mutations.gzipped, gzip.decompress
    )
    found["gz"] = source_case(work, "gz", mutations.gzipped(lines), gz)
    import pyarrow as pa

    def pack(data: bytes) -> bytes:
        packed: Any = pa.compress(data, codec="zstd", asbytes=True)
        return bytes(packed)

    def unpack(data: bytes) -> bytes:
        return bytes(pa.CompressedInputStream(pa.BufferReader(data), "zstd").read())

    zst = mutations.compressed(mutations.of_json_lines, pack, unpack)
    found["zst"] = source_case(work, "zst", pack(lines), zst)
    return found
