"""Writers: files are opened for writing in storage/ alone, where no link is followed."""

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent.parent / "src" / "toque"
WRITING_CALLS = {
    "write_text",
    "write_bytes",
    "copyfile",
    "copy",
    "copy2",
    "copytree",
    "move",
}
WRITING_FLAGS = {"O_WRONLY", "O_RDWR", "O_CREAT"}
LIBRARIES = {"save_file", "save_pretrained", "savez", "mkstemp", "NamedTemporaryFile"}
ALLOWED = {
    # Into a folder that `atomic_folder` has just made, where nothing can lie in the way.
    "training/checkpoint/tensor_files.py: save_file",
    "models/loading/model_export.py: save_file",
    "models/loading/model_export.py: save_pretrained",
    "models/lora/adapter_files.py: save_pretrained",
    # Into a folder of a name that nobody can know, made for it.
    "workflows/configure.py: save_pretrained",
    # Of the drill's own scratch folder, and of a copy it has made there.
    "workflows/diagnosis/drill_faults.py: copy",
    "workflows/diagnosis/drill_faults.py: copytree",
    "workflows/diagnosis/drill_faults.py: write_bytes",
    # A file of its own, made new under a name nobody can know, to time the disk and the parts.
    "workflows/diagnosis/machine_checks.py: NamedTemporaryFile",
    # What `open_append` has opened, which follows no link.
    "workflows/run_folder/run_log.py: fdopen",
    # Below storage/; it opens the file itself and no link.
    "reporter.py: O_CREAT",
    "reporter.py: O_WRONLY",
    "reporter.py: fdopen",
    # An entry of a zip file in memory.
    "studio/exports.py: open",
    # Standard output, after its reader has gone.
    "cli/console.py: O_WRONLY",
}


def calls(tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = node.func
            yield (
                called.attr
                if isinstance(called, ast.Attribute)
                else getattr(called, "id", ""),
                node,
            )


def mode_of(call: ast.Call) -> str:
    """The mode of an `open`; "" for one of another kind, as of a tracker or a store."""
    words = [*call.args, *(k.value for k in call.keywords if k.arg == "mode")]
    texts = [
        w.value
        for w in words
        if isinstance(w, ast.Constant) and isinstance(w.value, str)
    ]
    return next((text for text in texts if text and set(text) <= set("rwaxbt+")), "")


def writers(file: Path) -> set[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    found = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in WRITING_FLAGS
    }
    for name, call in calls(tree):
        owner = call.func.value if isinstance(call.func, ast.Attribute) else None
        if name in WRITING_CALLS | LIBRARIES:
            copies_data = (
                name in {"copy", "move"} and getattr(owner, "id", "") != "shutil"
            )
            if not copies_data:
                found.add(name)
        elif name in {"open", "fdopen"} and set(mode_of(call)) & set("wax+"):
            found.add(name)
    return found


def test_only_storage_opens_files_for_writing() -> None:
    files = {f.relative_to(PACKAGE).as_posix(): f for f in PACKAGE.rglob("*.py")}
    found = {
        f"{name}: {writer}"
        for name, file in files.items()
        if not name.startswith("storage/")
        for writer in writers(file)
    }
    assert sorted(found - ALLOWED) == []
    assert sorted(ALLOWED - found) == []


def test_such_a_call_would_be_found(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    for text, name in (
        ("path.open('a', encoding='utf-8')", "open"),
        ("open(path, mode='w')", "open"),
        ("path.write_text('x')", "write_text"),
        ("os.open(path, os.O_RDWR)", "O_RDWR"),
        ("shutil.copy(a, b)", "copy"),
        ("save_file(tensors, path)", "save_file"),
    ):
        file.write_text(text)
        assert writers(file) == {name}, text
    file.write_text(
        "path.open('rb'); TokenStore.open(folder); found.copy(); open(path)"
    )
    assert writers(file) == set()
