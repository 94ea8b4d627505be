"""Files made to harm, opened as a user would open them, by a process with little memory to give.

`python crafted.py FOLDER` makes them, opens each, and prints what was said of it. It is a process
of its own so that a file that does get its gigabytes, or runs its code, harms no test beside it.
"""

import hashlib
import json
import os
import pickle
import resource
import shutil
import struct
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from crafted_models import model_cases

from toque.cooking.cookbook.recipes import write_cookbook
from toque.data.store.token_store import TokenStore
from toque.errors import ToqueError
from toque.models.loading.pretrained import load_model
from toque.storage.json_files import add_seal
from toque.training.checkpoint.saved import verify_checkpoint
from toque.training.checkpoint.store import CheckpointStore

Craft = Callable[[Path], object]
MORE_BYTES = 400 << 20
"""Address space the process may still take while it opens what was crafted."""
MORE_SECONDS = 240
"""Processor time for all of them; ten thousand layers alone would take as long."""
ONE = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
TWICE = json.dumps({"w": ONE})[:-1] + ', "w": ' + json.dumps(ONE) + "}"
HEADERS: dict[str, tuple[str, bytes, int | None]] = {
    "a header of 10 GB": ("{}", b"", 10 << 30),
    "a header as long as a number can be": ("{}", b"", (1 << 64) - 1),
    "a header of 10 GB in a file that is no larger": ("{}", bytes(1 << 16), 10 << 30),
    "negative offsets": (
        json.dumps({"w": {**ONE, "data_offsets": [-4, 0]}}),
        bytes(4),
        None,
    ),
    "a negative size": (json.dumps({"w": {**ONE, "shape": [-1]}}), bytes(4), None),
    "a size of terabytes": (
        json.dumps({"w": {**ONE, "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}),
        bytes(4),
        None,
    ),
    "a name twice": (TWICE, bytes(4), None),
    "tensors that overlap": (json.dumps({"w": ONE, "v": ONE}), bytes(4), None),
    "a hundred thousand brackets": ("[" * 100_000, b"", None),
}
"""Header text, what follows it, and the length it claims where that is not its own."""


class Planted:
    """Unpickled, it leaves a file."""

    def __init__(self, where: Path) -> None:
        self.where = str(where)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        return open, (self.where, "w")


def rewritten(folder: Path, change: Callable[[dict[str, Any]], object] = len) -> None:
    """Change a manifest as one who can compute its hash, and those of its files, would."""
    path = folder / "manifest.json"
    held = json.loads(path.read_text())
    for entry in [*held.get("shards", []), *held["files"]]:
        file = folder / entry["file"]
        entry["bytes"] = file.stat().st_size
        entry["sha256"] = hashlib.sha256(file.read_bytes()).hexdigest()
    change(held)
    held["self_sha256"] = ""
    path.write_bytes(add_seal(json.dumps(held, indent=1).encode()))


def headed(header: str, body: bytes, claimed: int | None) -> Craft:
    """Weights with this header, in a checkpoint or a model's folder."""

    def craft(folder: Path) -> None:
        text = header.encode()
        length = struct.pack("<Q", len(text) if claimed is None else claimed)
        (folder / "model.safetensors").write_bytes(length + text + body)
        if (folder / "manifest.json").exists():
            rewritten(folder)

    return craft


def linked(name: str) -> Craft:
    """A link in place of a file or folder, to where that lies now."""

    def craft(folder: Path) -> None:
        outside = folder.parent / f"{folder.name}-outside"
        (folder / name).rename(outside)
        (folder / name).symlink_to(outside)
        rewritten(folder)

    return craft


def entry_of(part: str, **change: Any) -> Craft:
    """A manifest whose first entry of a part says something else."""
    return lambda folder: rewritten(folder, lambda held: held[part][0].update(change))


def crafted(good: Path, folder: Path, craft: Craft) -> Path:
    """A copy of a good folder, harmed."""
    shutil.copytree(good, folder)
    craft(folder)
    return folder


def checkpoints(work: Path) -> Mapping[str, Callable[[], object]]:
    """Crafted checkpoints: what is done to a good one, and how it is opened."""
    store = CheckpointStore(work / "checkpoints")
    good = store.save(
        4, {"model": {"w": torch.ones(3)}}, {"progress": {"step": 4}}
    ).path

    def opened(name: str, craft: Craft) -> Callable[[], object]:
        folder = crafted(good, work / "c" / name.replace(" ", "-") / good.name, craft)
        return lambda: verify_checkpoint(folder).tensors("model")

    def pickled(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / "model.bin").write_bytes(pickle.dumps(Planted(work / "executed")))
        held = json.loads((folder / "manifest.json").read_text())
        held["files"] = [{"file": "model.bin", "bytes": 0, "sha256": ""}]
        (folder / "manifest.json").write_text(json.dumps(held))
        rewritten(folder)

    crafts: dict[str, Craft] = {
        **{name: headed(*found) for name, found in HEADERS.items()},
        "a file outside": entry_of("files", file="../../secret"),
        "a file in a folder": entry_of("files", file="a/b"),
        "an absolute name": entry_of("files", file="/etc/hostname"),
        "a negative count of bytes": entry_of("files", bytes=-5),
        "a link out of the folder": linked("model.safetensors"),
        "a pickle in place of the weights": pickled,
        "a manifest of 20 MB": lambda f: (f / "manifest.json").write_bytes(
            b" " * (20 << 20)
        ),
    }
    return {
        f"checkpoint: {name}": opened(name, craft) for name, craft in crafts.items()
    }


def stores(work: Path) -> Mapping[str, Callable[[], object]]:
    """The same of token stores."""
    from toque.cli import main

    write_cookbook(work / "a.jsonl", n=12, seed=3)
    good = work / "store"
    words = [f"data.sources=[{{path: {work}/a.jsonl}}]", f"data.store={good}"]
    (work / "run.yaml").write_text("model: {family: gpt2, tokenizer: 'trained:512'}")
    assert main(["prepare", str(work / "run.yaml"), *words]) == 0
    tokens = "shards/00000/target_tokens.npy"

    def opened(name: str, craft: Craft) -> Callable[[], object]:
        folder = crafted(good, work / "s" / name.replace(" ", "-"), craft)

        def read() -> object:
            store = TokenStore.open(folder, verify=True)
            return store.target(0), store.target_lengths

        return read

    def header(text: str) -> Craft:
        def craft(folder: Path) -> None:
            padded = text.ljust(117) + "\n"
            start = (
                b"\x93NUMPY\x01\x00" + struct.pack("<H", len(padded)) + padded.encode()
            )
            (folder / tokens).write_bytes(start + bytes(64))
            rewritten(folder)

        return craft

    def of_objects(folder: Path) -> None:
        planted = np.array([Planted(work / "executed")], object)
        np.save(folder / tokens, planted, allow_pickle=True)  # only a test writes one
        rewritten(folder)

    def shape(shape: str, kind: str = "<u2") -> str:
        return f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}"

    crafts: dict[str, Craft] = {
        "a file outside": entry_of("shards", file="shards/../../secret"),
        "an absolute name": entry_of("shards", file="/etc/hostname"),
        "a name twice": lambda f: rewritten(
            f, lambda h: h["shards"].append(h["shards"][0])
        ),
        "a negative count of bytes": entry_of("shards", bytes=-5),
        "a negative count of rows": entry_of("shards", examples=-5),
        "a link out of the folder": linked(tokens),
        "a folder that is a link": linked("shards"),
        "an array of terabytes": header(shape("(1099511627776,)")),
        "an array of negative size": header(shape("(-32,)")),
        "an array whose header is code": header(
            "__import__('os').system('touch executed')"
        ),
        "an array of objects": of_objects,
    }
    return {f"store: {name}": opened(name, craft) for name, craft in crafts.items()}


def models(work: Path) -> Mapping[str, Callable[[], object]]:
    """The same of Hugging Face model folders."""
    shape = {"n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": 8, "vocab_size": 8}

    def opened(name: str, craft: Craft, **config: Any) -> Callable[[], object]:
        folder = work / "m" / name.replace(" ", "-")
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(
            json.dumps({"model_type": "gpt2", **shape, **config})
        )
        craft(folder)
        return lambda: load_model(str(folder))

    def indexed(folder: Path) -> None:
        index = {"weight_map": {"w": "../../secret.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    def planted(name: str) -> Craft:
        return lambda folder: (folder / name).write_bytes(
            pickle.dumps(Planted(work / "executed"))
        )

    def code(folder: Path) -> None:
        (folder / "evil.py").write_text(f"open({str(work / 'executed')!r}, 'w')\n")

    found = {name: opened(name, headed(*row)) for name, row in HEADERS.items()}
    found |= {
        f"only a {n}": opened(f"only a {n}", planted(n))
        for n in ("w.bin", "w.pt", "w.pkl")
    }
    found["an index that points outside"] = opened("an index", indexed)
    auto = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    found["code of its own"] = opened("code", code, model_type="evil", auto_map=auto)
    return {f"model: {name}": load for name, load in found.items()}


def limited() -> None:
    """Leave the process `MORE_BYTES` of address space beyond what it has, and minutes of time."""
    resource.setrlimit(resource.RLIMIT_CPU, (MORE_SECONDS, MORE_SECONDS))
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + MORE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def main() -> None:
    """Make, open, tell."""
    work = Path(sys.argv[1])
    cases = {**checkpoints(work), **stores(work), **models(work), **model_cases(work)}
    limited()
    said = {}
    for name, opened in cases.items():
        try:
            opened()
            said[name] = ("nothing", 0, "")
        except ToqueError as error:
            said[name] = (type(error).__name__, error.exit_code, str(error))
        except BaseException as error:  # noqa: BLE001  # told, and the test fails on it
            said[name] = (type(error).__name__, -1, str(error))
    print(json.dumps({"said": said, "executed": (work / "executed").exists()}))


if __name__ == "__main__":
    main()
