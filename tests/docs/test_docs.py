"""Code blocks of README, CONTRIBUTING, docs/ and lab/: each runs, or says above it why it does not.

Python is executed page by page. YAML, and the configurations of `$ toque ...` lines, are resolved
and their models built in outline; slow: the commands are run, and a page of the tutorial is
followed from its text alone. `<!-- not run: reason -->` on the line before a block leaves it out.
Blocks of plain `text` are output. All in a folder with a small run.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch._subclasses.fake_tensor import FakeTensorMode

from toque.cli import main
from toque.cli.app import app
from toque.config import RunConfig, load_config, presets
from toque.cooking.cookbook.generate import write_cookbook
from toque.errors import ConfigError
from toque.models.families import max_positions
from toque.models.loading.from_scratch import build_model
from toque.workflows.assembly.optim_and_adapter import learning_rate

REPOSITORY = Path(__file__).resolve().parent.parent.parent
PAGES = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md"]
PAGES += sorted((REPOSITORY / "docs").rglob("*.md")) + sorted((REPOSITORY / "lab").glob("*.md"))
TUTORIALS = sorted((REPOSITORY / "docs" / "tutorial").glob("*.md"))
MY_YAML = """
run_dir: runs/mine
model: {family: gpt2, tokenizer: "trained:512",
  shape: {n_embd: 16, n_layer: 1, n_head: 2, n_positions: 512}}
data: {sources: [{path: my-recipes.jsonl.gz}], store: stores/mine, max_prompt_tokens: 64,
  max_target_tokens: 256}
optim: {warmup: "1 steps"}
train: {stop_after: "3 steps", batch: "1024 tokens", precision: float32}
evaluation: {max_examples: 4, generate: 1}
"""
UNRUN = {
    "make",
    "cd",
    "pip",
    "git",
    "python",
    "export",
    "docker",
    "torchrun",
    "tensorboard",
    "trackio",
}
"""Programs that a reader has or that take minutes; `make` targets are looked up."""
NOT_AT_ALL = {"serve", "watch", "demo", "drill", "ablate"}
"""Verbs that do not end or take minutes."""


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    text: str

    @property
    def id(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(language: str) -> list[Block]:
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in re.finditer(r"(?ms)^(<!-- not run: .+? -->\n)?```(\w*)\n(.*?)^```", text):
            excused, named, inner = match.groups()
            if named == language and not excused:
                line = text.count("\n", 0, match.start(2)) + 1
                found.append(Block(page, line, named, inner))
    return found


def commands() -> list[tuple[Block, list[str]]]:
    return [
        (block, shlex.split(line.removeprefix("$ "), comments=True))
        for block in blocks("console")
        for line in re.sub(r"\\\n\s*", " ", block.text).splitlines()
        if line.startswith("$ ")
    ]


@pytest.fixture(scope="module")
def kitchen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as the pages have it: recipes, my.yaml, stores/mine and runs/mine."""
    folder = tmp_path_factory.mktemp("docs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_cookbook(folder / "my-recipes.jsonl.gz", n=60, seed=3)
        (folder / "my.yaml").write_text(MY_YAML)
        for name, page in (
            ("mymodule", "evaluate-and-compare.md"),
            ("mywatch", "callbacks-and-trackers.md"),
        ):
            own = [block.text for block in blocks("python") if block.page.name == page]
            (folder / f"{name}.py").write_text("\n".join(own))
        assert main(["prepare", "my.yaml"]) == 0
        assert main(["train", "my.yaml"]) == 0
    return folder


@pytest.mark.parametrize(
    "page", sorted({block.page for block in blocks("python")}), ids=lambda page: page.name
)
def test_python_runs(page: Path, kitchen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(kitchen)
    names: dict[str, object] = {"__name__": page.stem}
    for block in blocks("python"):
        if block.page == page:
            padding = "\n" * block.line  # errors name the page's own lines
            exec(compile(padding + block.text, str(page), "exec"), names)  # noqa: S102


def build_in_outline(config: RunConfig) -> None:
    """What `toque train` makes of a configuration before it opens its data; without memory.

    Raises:
        ConfigError: the model, its length or its learning rate cannot be made.
    """
    model, data, stop = config.model, config.data, config.train.stop_after
    learning_rate(config, dict.fromkeys(("steps", "epochs", "examples", "tokens"), stop.amount))
    if model.start_from != "scratch":
        return  # a checkpoint brings its own shape
    learnt = re.fullmatch(
        r"trained:(\d+)", "trained:8192" if model.tokenizer == "auto" else model.tokenizer
    )
    with FakeTensorMode():
        built = build_model(
            family=model.family,
            shape=model.shape,
            vocab_size=int(learnt[1]) if learnt else 50_257,
            pad_id=0,
            eos_id=1,
            bos_id=None,
            seed=config.seed,
        )
    limit = max_positions(built.config)
    limits = data.max_prompt_tokens, data.max_target_tokens
    longest = sum(side for side in limits if side != "auto") - 1  # the rest is chosen to fit
    if limit is not None and not built.config.is_encoder_decoder and longest > limit:
        raise ConfigError(f"an example of {longest} tokens does not fit {limit} positions")


@pytest.mark.parametrize("block", blocks("yaml"), ids=lambda block: block.id)
def test_yaml_is_a_configuration_that_can_be_built(block: Block, tmp_path: Path) -> None:
    (tmp_path / "block.yaml").write_text(block.text)
    build_in_outline(load_config(tmp_path / "block.yaml").config)


@pytest.mark.parametrize("name", presets())
def test_presets_can_be_built(name: str) -> None:
    build_in_outline(load_config(name).config)


def test_every_language_is_known() -> None:
    known = {"text", "python", "pycon", "yaml", "console", "json", "html", "bibtex"}
    for page in PAGES:
        opened = re.findall(r"(?m)^```(.*)$", page.read_text(encoding="utf-8"))[::2]
        assert set(opened) <= known, page.name


@pytest.mark.parametrize(
    ("block", "words"), commands(), ids=lambda part: part.id if isinstance(part, Block) else ""
)
def test_commands_parse(
    block: Block, words: list[str], kitchen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(kitchen)
    assert words, block.id
    if words[0] == "make":
        targets = re.findall(r"(?m)^([a-z-]+):", (REPOSITORY / "Makefile").read_text())
        assert words[1] in targets
        return
    if words[0] in UNRUN or "=" in words[0]:
        return
    assert words[0] == "toque", block.id
    app.parse_args(words[1:], print_error=False, exit_on_error=False)
    config = words[2] if len(words) > 2 else ""
    if config.endswith(".yaml") or config in presets():
        overrides = [w for w in words[3:] if re.match(r"[a-z_.]+=", w)]
        resolved = load_config("my.yaml" if config.endswith(".yaml") else config, overrides)
        build_in_outline(resolved.config)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("block", "words"), commands(), ids=lambda part: part.id if isinstance(part, Block) else ""
)
def test_commands_run(
    block: Block, words: list[str], kitchen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those about the run and the store of the folder; a preset would train for an hour."""
    ours = len(words) > 2 and words[2] in ("my.yaml", "runs/mine", "stores/mine")
    if words[0] != "toque" or not ours or words[1] in NOT_AT_ALL:
        pytest.skip(f"{block.id} is not about this folder")
    if any("://" in word for word in words):
        pytest.skip(f"{block.id} needs a bucket")
    monkeypatch.chdir(kitchen)
    monkeypatch.setenv("MY_WEBHOOK", "http://127.0.0.1:9/nobody-listens")
    overridden = words[1] == "train" and len(words) > 3
    another = [f"run_dir=runs/{block.page.stem}-{block.line}"] if overridden else []
    assert main([*words[1:], *another]) in (0, 1)


def test_tutorials_can_be_followed_from_their_text_alone() -> None:
    """Every configuration that a command names is a block that says which file it is."""
    assert len(TUTORIALS) == 3
    for page in TUTORIALS:
        files = {name for name, _ in files_of(page)}
        named = {
            words[2]
            for block, words in commands()
            if block.page == page and words[0] == "toque"
            if len(words) > 2 and words[2].endswith(".yaml")
        }
        assert named <= files, page.name


def files_of(page: Path) -> list[tuple[str, str]]:
    """Files that a page asks for: YAML by its first comment, others by `<!-- file: NAME -->`."""
    text = page.read_text(encoding="utf-8")
    found = [
        (match[1], match[0])
        for match in re.finditer(r"(?m)^# (\S+\.yaml).*\n(?s:.*?)(?=^```)", text)
    ]
    found += re.findall(r"(?ms)^<!-- file: (\S+) -->\n```\w*\n(.*?)^```", text)
    return found


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_tutorial_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All pages, one after the other in one folder, with runs of a few steps."""
    monkeypatch.chdir(tmp_path)
    for page in TUTORIALS:
        for name, text in files_of(page):
            shorter = re.sub(r'stop_after: "\d+ steps"', 'stop_after: "6 steps"', text)
            shorter = re.sub(r'(evaluate|save)_every: "\d+ steps"', r'\1_every: "3 steps"', shorter)
            Path(name).write_text(shorter, encoding="utf-8")
        for block, words in commands():
            if block.page == page and words[0] == "toque" and words[1] not in NOT_AT_ALL:
                assert main(words[1:]) == 0, f"{block.id}: {shlex.join(words)}"
