"""Every `toque ...` command that pages, output, presets and examples print is run, or parsed.

`fixtures.pages` collects them. Names such as RUN or CONFIG, and the values of f-strings, are filled
with what lies in a small kitchen; the command then has to end with 0 in a fresh copy of it. One
that would train for long, download, measure the machine or serve until it is stopped is parsed by
the real command line, and its configuration resolved and its model built in outline. A name alone
(`toque train` in a sentence) is parsed with the configuration or run that it leaves out.
"""

import json
import re
import shlex
import shutil
from collections import Counter, defaultdict
from pathlib import Path
from typing import Final

import pytest

from fixtures.outline import build_in_outline
from fixtures.pages import REPOSITORY, Printed, blocks, printed_commands
from toque.cli import main
from toque.cli.app import app
from toque.cli.console import flag
from toque.config import load_config, presets

VERBS: Final = {verb for verb in app if not verb.startswith("-")}
NO_COMMANDS: Final = {
    "toque cookbook (synthetic)": "the source that a synthetic recipe names",
    "toque update": "the name of an update in a profile",
}
NAMES: Final = {
    "CONFIG": "my.yaml", "$CONFIG": "my.yaml", "PATH": "my.yaml",
    "RUN": "runs/my", "NAME": "demo",
    "BASE": "runs/my/model", "MODEL": "runs/my/model",
    "path/to/checkpoint": "runs/my/model", "checkpoint": "runs/my/model",
    "ADAPTER": "runs/a/model", "DIR": "folder",
    "model.start_from=DIR": "model.start_from=runs/my/model",
    "RECIPES": "my-recipes.jsonl.gz", "YOUR-RECIPES": "my-recipes.jsonl.gz",
    "recipes.jsonl": "recipes.jsonl", "dump.csv": "recipes.jsonl", "$data": "my-recipes.jsonl.gz",
    "CARD": "rtx-4090", "N": "2", "seed=S": "seed=3", "$first:29400": "node-1:29400",
    "step-00000200": "step-00000003", "200": "3",
    "runs/my/best/step-00000200": "runs/my/best/step-00000003",
    "RUN/best/step-00000200": "runs/my/best/step-00000003",
}  # fmt: skip
"""What a reader puts in."""
VALUES: Final = {
    "verb": "train", "argument('gpus=2')": "--gpus 2", "folder": "runs/my own",
    "folder.parent": "runs/my own", "run": "runs/my own", "run.folder": "runs/my own",
    "self.folder": "runs/my own", "store": "stores/my own", "config.data.store": "stores/my own",
    "result.store.path": "stores/my own", "file": "my own.yaml", "again": "'my own.yaml'",
    "self.file": "my own.yaml", "record.address": "runs/my own",
    "start": "runs/complete", "step": "", "place.address": "runs/my own",
    "config": "my own.yaml",
}  # fmt: skip
"""What the program puts in, by the expression of the f-string; paths with a blank in them."""
NOT_RUN: Final = {
    "ablate": "trains many times", "demo": "trains for minutes", "drill": "trains many times",
    "average": "ends with 1 if the newest checkpoint is better",
    "chat": "reads what is typed",
    "plan": "measures or lays out a whole model", "serve": "ends when it is stopped",
    "watch": "ends when it is stopped",
}  # fmt: skip
IN_CONFIG: Final = {"train", "prepare", "plan", "check", "ablate", "show", "show-batch"}
"""Verbs whose first argument is a configuration (of `show`, sometimes a run)."""
FLAGS_WITH_NEW_FOLDER: Final = {"--to", "--out"}


OF_PAGES: Final = {
    (block.page, named[1]): block.text
    for block in blocks("yaml")
    if (named := re.match(r"# (\S+\.yaml)\n", block.text))
    and "tutorial" not in block.page.parts
}
"""Configurations that a page asks for; the tutorial's are followed in test_docs.py."""


def words_of(printed: Printed) -> list[str]:
    """The command's words after `toque`, filled; a shell's redirections are left out."""
    text = printed.text if printed.is_code else printed.text.rstrip(").'\"")
    if printed.file.suffix == ".py" and printed.file.is_relative_to(REPOSITORY / "src"):
        text = text.replace("RUN RUN", "RUN runs/other")
        text = re.sub(
            r"\{([^{}]+)\}", lambda found: _value(found[1], printed.file), text
        )
    words = shlex.split(text, comments=True)[1:]
    ends = [at for at, word in enumerate(words) if word in {"|", ">", "&"}]
    words = words[: min(ends, default=len(words))]
    return [
        word if before in FLAGS_WITH_NEW_FOLDER else _filled(word, printed.file)
        for before, word in zip(["", *words], words, strict=False)
    ]


def _value(expression: str, file: Path) -> str:
    """What an expression gives, as it stands in the printed line."""
    inside = re.fullmatch(r"in_shell\(([\w.]+)\)", expression)
    value = VALUES[inside[1] if inside else expression]
    assigned = rf"\b{re.escape(expression)} ?= ?in_shell\("
    set_quoted = re.search(assigned, file.read_text(encoding="utf-8"))
    return shlex.quote(value) if inside or set_quoted else value


def _filled(word: str, page: Path) -> str:
    if word in NAMES or (page, word) in OF_PAGES:
        return NAMES.get(word, word)
    if re.fullmatch(r"[\w/-]+\.yaml", word):
        return word if word == "runs/my/config.yaml" else "my.yaml"
    # Each run and store of the pages is the kitchen's but these, which are there.
    place = re.fullmatch(
        r"(run|store|work)s?/(?!my|other|reviews|[ab](?:/|$))\w+(/.+)?", word
    )
    return f"{place[1].replace('work', 'run')}s/my{place[2] or ''}" if place else word


def why_not_run(words: list[str]) -> str:
    """The reason to parse a command only; empty where it is run."""
    verb, text = words[0], " ".join(words)
    if verb in {"presets", "--help", "--version"}:
        return ""
    if len(words) == 1 or words[1].startswith("-"):
        return "a name alone"
    if verb in NOT_RUN:
        return NOT_RUN[verb]
    if verb in {"train", "prepare"} and words[1] in presets():
        return "a preset takes hours"
    if any(part in text for part in ("://", "google/", "--push-to", "--format web")):
        return "needs the network"
    return "trains" if verb == "train" else ""


COMMANDS: Final[dict[tuple[str, ...], list[Printed]]] = defaultdict(list)
for _printed in printed_commands():
    if _printed.text in NO_COMMANDS or _printed.file.name == "cli.md":
        continue  # the reference is made from the commands themselves
    _verb = _printed.text.split()[1]
    if _printed.is_code or _verb in {*VERBS, "--help", "--version"}:
        COMMANDS[tuple(words_of(_printed))].append(_printed)
RUN: Final = [words for words in COMMANDS if not why_not_run(list(words))]
PARSED: Final = [words for words in COMMANDS if why_not_run(list(words))]

TRAINED: Final = [
    words
    for words in PARSED
    if words[:2] == ("train", "my.yaml") and why_not_run(list(words)) == "trains"
    if not {"--gpus", "model.family=auto"} & set(words)
]
"""Of those that train, the ones on the kitchen's own configuration and machine."""


def places(words: tuple[str, ...]) -> str:
    return ", ".join(printed.place for printed in COMMANDS[words])


@pytest.fixture(scope="module")
def pantry(kitchen: Path) -> Path:
    """The kitchen with what else the pages name: other runs, two adapters, a file of prompts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(kitchen)
        adapter = [
            "model.family=auto",
            "model.shape={}",
            "model.start_from=runs/my/model",
        ]
        adapter += [
            "model.tokenizer=auto",
            "adapter={kind: lora}",
            "train.stop_after=2 steps",
        ]
        assert main(["train", "my.yaml", "run_dir=runs/a", *adapter]) == 0
        assert main(["cookbook", "recipes.jsonl", "--n", "4"]) == 0
        for (_, name), text in OF_PAGES.items():
            if name != "my.yaml":
                Path(name).write_text(text)
        Path("prompts.txt").write_text("leek soup\npancakes\n")
        turns = [{"role": r, "content": r} for r in ("user", "assistant")]
        Path("chats.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
        pairs = [
            {"prompt": f"Rice {i}", "chosen": f"Stew it {i} min.", "rejected": "No."}
            for i in range(20)
        ]
        lines = "".join(json.dumps(pair) + "\n" for pair in pairs)
        Path("pairs.jsonl").write_text(lines)
        reviews = [
            f"It was {i},{'good' if i % 2 else 'bad'},day {i}\n" for i in range(20)
        ]
        Path("reviews.csv").write_text("".join(["text,label,summary\n", *reviews]))
        few = [
            "train.stop_after=2 steps",
            "evaluation.generate=2",
            "evaluation.texts=2",
        ]
        assert main(["train", "reviews.yaml", *few]) == 0
        shutil.copytree("runs/a", "runs/b")
        for copied in ("runs/my", "stores/my"):
            shutil.copytree(copied, f"{Path(copied).parent}/my own")
        shutil.copytree("runs/my", "runs/other")
        shutil.copy("my.yaml", "my own.yaml")
    return kitchen


@pytest.mark.parametrize("words", RUN, ids=" ".join)
def test_printed_commands_run(
    words: tuple[str, ...],
    pantry: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(shutil.copytree(pantry, tmp_path / "pantry"))
    if words[0] == "init" and "--to" not in words:
        Path("my.yaml").unlink()  # what it writes is not there before
    if words[0] == "cookbook":
        Path("recipes.jsonl").unlink()
    few = ["--n", "4"] if words[0] == "cookbook" and "--n" not in words else []
    code = main([*words, *few])
    assert code == 0, f"{places(words)}: {capfd.readouterr().err}"


@pytest.mark.slow
@pytest.mark.parametrize("words", TRAINED, ids=" ".join)
def test_printed_trainings_run(
    words: tuple[str, ...],
    pantry: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(shutil.copytree(pantry, tmp_path / "pantry"))
    monkeypatch.setenv("MY_WEBHOOK", "http://127.0.0.1:9/nobody-listens")
    own = [
        word.removeprefix("run_dir=") for word in words if word.startswith("run_dir=")
    ]
    for folder in own:
        shutil.rmtree(folder, ignore_errors=True)  # the run of another command
    another = (
        []
        if own or len(words) == 2 or "--resume" in words
        else ["run_dir=runs/another"]
    )
    assert main([*words, *another]) == 0, places(words)


@pytest.mark.parametrize("words", PARSED, ids=" ".join)
def test_printed_commands_parse(
    words: tuple[str, ...], pantry: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(pantry)
    assert words[0] in VERBS, f"{places(words)}: `toque {words[0]}` is no command"
    if why_not_run(list(words)) == "a name alone":
        flags = app[words[0]].assemble_argument_collection()
        known = {name for one in flags for name in one.names} | {"--help"}
        assert {word for word in words if word.startswith("--")} <= known, places(words)
        return
    app.parse_args(list(words), print_error=False, exit_on_error=False)
    config = words[1]
    if words[0] in IN_CONFIG:
        overrides = [word for word in words[2:] if re.match(r"[a-z_.]+=", word)]
        build_in_outline(load_config(config, overrides).config)
    for word in words[1:]:  # a place that has to be there is there
        if (
            re.match(r"(runs|stores)/", word)
            and words[words.index(word) - 1] != "--out"
        ):
            assert Path(word).exists(), places(words)


def test_flags_that_messages_name_are_there() -> None:
    """`argument("n")` in a message is printed as a flag, which some command has."""
    known = {
        name
        for verb in VERBS
        for one in app[verb].assemble_argument_collection()
        for name in one.names
    }
    named = {
        found[2]
        for path in (REPOSITORY / "src").rglob("*.py")
        for found in re.finditer(
            r"""\bargument\(f?(["'])([^"']+)\1\)""", path.read_text("utf-8")
        )
    }
    assert len(named) > 20
    printed = {flag(name).split()[0] for name in named} - {"--traceback", "SOURCES"}
    assert printed <= known


def test_names_alone_are_no_instructions() -> None:
    """A message that says "run `toque prepare`" says what to give it."""
    told = [
        f"{printed.place}: {printed.before}`{printed.text}`"
        for words in PARSED
        for printed in COMMANDS[words]
        if re.search(r"(?i)\brun $", printed.before)
        and words[0] not in {"demo", "doctor"}
        if why_not_run(list(words)) == "a name alone"
    ]
    assert told == []


def test_most_commands_are_run() -> None:
    reasons = Counter(why_not_run(list(words)) for words in PARSED)
    n_printed = sum(len(places) for places in COMMANDS.values())
    print(
        f"{n_printed} printed commands, {len(COMMANDS)} different: {len(RUN)} are run,"
    )
    print(f"{len(PARSED)} are parsed: {dict(reasons)}")
    assert n_printed > 300
    assert len(RUN) > 50
