from pathlib import Path

import pytest

from toque.config import RunConfig, load_config, presets, resolve_values
from toque.config.error_messages import ELSEWHERE, nearest, setting_paths
from toque.errors import ConfigError
from toque.units import Duration


def write(folder: Path, text: str) -> str:
    path = folder / "my.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def refusal(name: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(name, list(overrides))
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_default_then_file_then_override(tmp_path):
    path = write(tmp_path, "optim:\n  peak_lr: 3e-4\n  min_lr: 1e-5\n")
    resolved = load_config(path, ["optim.min_lr=2e-5"])
    assert resolved.config.optim.peak_lr == 3e-4
    assert resolved.config.optim.min_lr == 2e-5
    assert resolved.config.optim.weight_decay == RunConfig().optim.weight_decay
    assert resolved.origins["optim.peak_lr"] == f"{path}:2"
    assert resolved.origins["optim.min_lr"] == "command line"
    assert resolved.origins["optim.weight_decay"] == "default"


@pytest.mark.parametrize(
    ("text", "line", "name", "nearest"),
    [
        ("optim:\n  peak_lrr: 1e-3\n", 2, "optim.peak_lrr", "optim.peak_lr"),
        ("peak_lr: 1e-3\n", 1, "peak_lr", "optim.peak_lr"),
        ("seed: 1\ntrian: {batch: 1 examples}\n", 2, "trian", "train"),
        ("learning_rate: 1e-3\n", 1, "learning_rate", "optim.peak_lr"),
        ("data:\n  sources:\n    - pth: x\n", 3, "data.sources.0.pth", "data.sources.path"),
        ("train:\n  early_stopping:\n    pacience: 2\n", 3, "train.early_stopping.pacience",
         "train.early_stopping.patience"),
    ],
)  # fmt: skip
def test_unknown_name_says_where_and_what_was_meant(
    tmp_path, text, line, name, nearest
):
    path = write(tmp_path, text)
    message = refusal(path)
    assert message.startswith(f"{path}:{line}: `{name}` is not a setting.")
    assert f"Nearest: `{nearest}`" in message


def test_unknown_name_on_the_command_line():
    message = refusal("demo", "optim.peak_lrr=1e-3")
    assert message.startswith("command line: `optim.peak_lrr` is not a setting.")
    assert "Nearest: `optim.peak_lr`" in message
    assert set(setting_paths()) >= {nearest((name,)) for name in ELSEWHERE}


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("optim:\n  peak_lr: fast\n", 2, ['`optim.peak_lr` is "fast"', "a number above 0"]),
        ("optim: {peak_lr: 0}\n", 1, ["`optim.peak_lr` is 0", "above 0"]),
        ("optim: {peak_lr: .nan}\n", 1, ["is nan", "a number"]),
        ("seed: true\n", 1, ["`seed` is true", "a whole number"]),
        ("seed: 1.5\n", 1, ["`seed` is 1.5", "a whole number"]),
        ("run_dir:\n", 1, ["`run_dir` is null", "a folder"]),
        ("run_dir: 2024\n", 1, ["`run_dir` is 2024", "Quote it"]),
        ("run_dir: ''\n", 1, ['`run_dir` is ""', "a folder"]),
        ("model:\n  family: bert\n", 2, ['"bert"', "t5, gpt2, neox, llama or auto"]),
        ("model:\n  tokenizer: trained:12\n", 2, ["trained:N"]),
        ("train:\n  stop_after: 3\n", 2, ["is 3", '"3 epochs"']),
        ("train:\n  stop_after: 10 %\n", 2, ['"10 %"', "epochs"]),
        ("train:\n  stop_after: 0 steps\n", 2, ["above 0"]),
        ("train:\n  batch: 3 epochs\n", 2, ["tokens or examples"]),
        ("train:\n  batch: 0.5 examples\n", 2, ["whole number of tokens or examples"]),
        ("train: {micro_batch_rows: 0}\n", 1, ["a whole number from 1 or auto"]),
        ("train: {micro_batch_rows: many}\n", 1, ['"many"', "or auto"]),
        ("train: {early_stopping: 3}\n", 1, ["min_delta: ..., metric: ...} or null"]),
        ("train: {pack: yes}\n", 1, ['"yes"', "true or false"]),
        ("data:\n  validation_fraction: 1.5\n", 2, ["from 0 below 1"]),
        ("data: {sources: recipes.jsonl}\n", 1, ["a list such as"]),
        ("data: {sources: [recipes.jsonl]}\n", 1, ["`data.sources.0`", "path"]),
        ("data:\n  sources:\n  - path: a\n  - format: text\n", 4, ["sources.1.path`", "missing"]),
        ("data:\n  sources:\n  - path: a\n    columns: {promt: b}\n", 4,
         ["`data.sources.0.columns` has the name `promt`", "Nearest: `prompt`", "messages or"]),
        ("data:\n  sources:\n  - path: a\n    columns:\n      prompt: 3\n", 5,
         ["`data.sources.0.columns.prompt` is 3", "text or a list of texts", "Quote it"]),
        ("data:\n  task_weights:\n    write: 0\n", 3,
         ["`data.task_weights.write` is 0", "a number above 0 to 100"]),
        ("data:\n  tasks:\n    a b: {prompt: q, target: a}\n", 3,
         ["`data.tasks` has the name `a b`", "a word other than write, request"]),
        ("data: {tasks: {(a): {prompt: q, target: a}}}\n", 1, ["`data.tasks` has the name `(a)`"]),
        ("data:\n  tasks:\n    mood: 3\n", 3, ["`data.tasks.mood` is 3", "{prompt: ..., target:"]),
        ("data: [1]\n", 1, ["`data` is a list of 1"]),
        ("optim: null\n", 1, ["`optim` is null"]),
        ("observe: {system: true}\n", 1, ["is true", 'e.g. "10 seconds"']),
        ("observe: {system: 5 steps}\n", 1, ["seconds, minutes or hours"]),
        ("observe: {gradients: 1.5 steps}\n", 1, ["a whole number of steps", "or null"]),
        ("observe: {profile: {repeat: 0}}\n", 1, ["`observe.profile.repeat`", "from 1"]),
        ("evaluation: {prompts: [1]}\n", 1, ["`evaluation.prompts.0` is 1"]),
    ],
)  # fmt: skip
def test_wrong_value_says_where_what_and_what_is_allowed(tmp_path, text, line, words):
    path = write(tmp_path, text)
    message = refusal(path)
    assert message.startswith(f"{path}:{line}: ")
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.family=auto"], ["scratch", "Choose t5, gpt2"]),
        (["model.start_from=folder"], ["`model.shape`", "has its own shape"]),
        (["train.precision=fp16"], ["65504", "bf16"]),
        (
            ["optim.min_lr=1"],
            ["`optim.min_lr` is 1 and `optim.peak_lr` is", "Lower `optim.min"],
        ),
        (["optim.schedule=constant", "optim.min_lr=1e-6"], ["constant"]),
        (["optim.warmup=10 epochs"], ["would end before"]),
        (["optim.warmup=100 %"], ["would end before"]),
        (
            ["train.early_stopping={}", "data.validation_fraction=0"],
            ["no loss to watch"],
        ),
    ],
)
def test_impossible_combinations(overrides, words):
    message = refusal("recipe-t5-small", *overrides)
    assert message.startswith(("command line: ", "presets/recipe-t5-small.yaml:"))
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["is empty", "demo"]),
        ("# nothing\n", ["is empty"]),
        ("- a\n", [":1:", "this is a list"]),
        ("demo\n", [":1:", "a single value"]),
        ("train:\n\tpack: true\n", [":2:", "tab"]),
        ("train: {pack: true\n", ["not YAML"]),
        ("seed: 1\nseed: 2\n", [":2:", "given twice", "line 1"]),
        (
            "train:\n  pack: true\n  pack: false\n",
            [":3:", "`train.pack` is given twice"],
        ),
        ("a: 1\n---\nb: 2\n", ["another document"]),
        ("seed: &a [*a]\n", ["alias"]),
        ("seed: !!python/name:os.system\n", ["is not a valid value"]),
        ("? [a]\n: 1\n", ["setting's name"]),
        ("[" * 1000, ["nested too deeply"]),
        ("seed: \x00\n", ["not YAML text"]),
    ],
)
def test_text_that_is_no_configuration(tmp_path, text, words):
    message = refusal(write(tmp_path, text))
    for word in words:
        assert word in message


def test_what_is_no_file_of_text_is_refused(tmp_path):
    message = refusal("recipes-t5-smal")
    assert "neither a file nor a preset" in message
    assert "Nearest: recipe-t5-small" in message
    assert "cannot be read" in refusal(str(tmp_path))
    (tmp_path / "b.yaml").write_bytes(b"seed: \xff\n")
    assert "not UTF-8" in refusal(str(tmp_path / "b.yaml"))


def test_a_mistyped_file_is_answered_by_the_files_beside_it(tmp_path):
    for name in ("base.yaml", "notes.txt", "other.yml"):
        (tmp_path / name).write_text("seed: 1")
    message = refusal(str(tmp_path / "bse.yaml"))
    assert message.endswith(f"Nearest: {tmp_path / 'base.yaml'}.")
    assert "demo" not in message  # a preset is not meant
    assert f"Nearest: {tmp_path / 'base.yaml'}." in refusal(str(tmp_path / "base"))
    message = refusal(str(tmp_path / "zzz.yaml"))
    assert (
        f"YAML files there: {tmp_path / 'base.yaml'}, {tmp_path / 'other.yml'}."
        in message
    )
    assert "Presets: agi2-small" in message


def test_byte_order_mark_and_windows_lines_are_fine(tmp_path):
    path = tmp_path / "w.yaml"
    path.write_bytes("\ufeffseed: 5\r\noptim:\r\n  peak_lr: 1e-3\r\n".encode())
    resolved = load_config(str(path))
    assert (resolved.config.seed, resolved.config.optim.peak_lr) == (5, 1e-3)
    assert resolved.origins["optim.peak_lr"] == f"{path}:3"


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("train.stop_after=3 epochs", "3 epochs"),
        ('train.stop_after="3 epochs"', "3 epochs"),
        ("optim.warmup=10%", "10 %"),
        ("data.max_examples=1_000", 1000),
        ("train.early_stopping.patience=5", 5),
        ("data.sources.0.path=b.txt", "b.txt"),
        ("model.shape.d_model=64", 64),
    ],
)
def test_override_forms(override, value):
    resolved = load_config("demo", [override])
    here = resolved.config.model_dump(mode="json")
    for part in override.partition("=")[0].split("."):
        here = here[int(part) if part.isdecimal() else part]
    assert here == value
    assert list(resolved.origins.values()).count("command line") == 1


@pytest.mark.parametrize(
    "text", ["seed", "=3", "train..batch=1 examples", "", ".seed=1"]
)
def test_what_is_no_override_is_refused(text):
    assert "is not an override" in refusal("demo", text)


PLACELESS = ["data.sources.5.path=x", "optim.peak_lr.x=1", "seed=[1", "0=1"]
PLACELESS += [
    f"data.sources.{'9' * n}=1" for n in (19, 5000)
]  # int() reads no 5,000 digits


@pytest.mark.parametrize("text", PLACELESS, ids=lambda text: text[:40])
def test_override_without_a_place_is_refused(text):
    assert refusal("demo", text).startswith("command line")


def test_an_override_of_a_blank_that_yaml_does_not_know_is_that_blank():
    assert load_config("demo", ["run_dir=\u00a0"]).config.run_dir == "\u00a0"


def test_an_override_of_a_section_takes_the_whole_section():
    resolved = load_config("demo", ["model.shape.d_model=64", "model.shape={d_kv: 8}"])
    assert load_config("demo", ["seed=1", "seed=2"]).config.seed == 2
    assert resolved.config.model.shape == {"d_kv": 8}
    assert resolved.origins["model.shape.d_kv"] == "command line"


def test_values_need_no_file():
    config = resolve_values({"train": {"batch": "4 examples"}}).config
    assert config.train.batch == Duration(4, "examples")
    with pytest.raises(ConfigError, match=r"`optim\.lr`"):
        resolve_values({"optim": {"lr": 1.0}})


def test_every_preset_says_what_it_is():
    assert set(presets()) >= {
        "demo",
        "recipe-t5-small",
        "recipe-gpt2-small",
        "finetune-folder",
    }
    assert all(line.endswith(".") for line in presets().values())


def test_tokenizer_auto_is_resolved():
    scratch = resolve_values({}).config.model
    folder = resolve_values(
        {"model": {"start_from": "dir", "family": "auto"}}
    ).config.model
    assert (scratch.tokenizer_source, folder.tokenizer_source) == (
        "trained:8192",
        "dir",
    )


@pytest.mark.parametrize(
    "text",
    [
        '"\\e[2Jseed": 3',
        '"line\\nbreak": 3',
        'data: {store: ["\\u202e"]}',
        f"seed: {'x' * 90_000}",
    ],
)
def test_what_a_file_holds_reaches_no_terminal_as_it_is(tmp_path, text):
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ConfigError) as refused:
        load_config(tmp_path / "a.yaml")
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 5000


@pytest.mark.parametrize(
    "setting",
    ["run_dir", "data.store", "data.sources", "model.start_from", "model.tokenizer"],
)
@pytest.mark.parametrize("path", ["a" * 256, "b/" * 2_000, "é" * 200])
def test_a_path_that_no_file_system_holds_is_refused(setting, path):
    form = "[{path: %s}]" if setting == "data.sources" else "%s"
    assert setting in refusal("demo", f"{setting}={form % path}")
    held = [f"{setting}={form % ('c' * 255)}", "model.shape={}"]
    assert load_config("demo", held).config is not None


def test_a_file_that_is_no_configuration_by_its_length_is_not_read(tmp_path):
    (tmp_path / "long.yaml").write_text("# " + "x" * (1 << 20))
    with pytest.raises(ConfigError, match="longer than 1,048,576 bytes"):
        load_config(str(tmp_path / "long.yaml"))
