from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toque.config import (
    RunConfig,
    config_sha256,
    load_config,
    presets,
    resolve_values,
    resolved_yaml,
)
from toque.config.dump import SAFE_TO_CHANGE, differences, to_yaml
from toque.config.error_messages import setting_paths
from toque.config.yaml_reader import read_yaml

REPOSITORY = Path(__file__).resolve().parent.parent.parent
Golden = Callable[[Path, str], None]

texts = st.text(
    st.characters(
        exclude_categories=["Cs"], include_characters="#:%'\"{}[]\n \t\u00bd\ufeff\x7f"
    ),
    min_size=1,
)


@pytest.mark.golden
@pytest.mark.parametrize("name", sorted(presets()))
def test_preset_in_full(name: str, golden_text: Golden) -> None:
    """A moved default shows up here as a changed line."""
    path = REPOSITORY / "tests" / "golden" / "presets" / f"{name}.yaml"
    golden_text(path, to_yaml(load_config(name).config))


@pytest.mark.parametrize("name", sorted(presets()))
def test_resolved_text_is_itself_runnable(name, tmp_path):
    resolved = load_config(
        name, ["train.early_stopping={patience: 2}", "model.family=t5"][:1]
    )
    path = tmp_path / "config.yaml"
    path.write_text(resolved_yaml(resolved), encoding="utf-8")
    again = load_config(path)
    assert again.config == resolved.config
    assert "command line" in path.read_text(encoding="utf-8")
    assert f"presets/{name}.yaml:" in path.read_text(encoding="utf-8")


@given(st.lists(texts, max_size=3), texts, st.dictionaries(texts, texts, max_size=3))
def test_any_text_is_written_so_that_it_reads_back(prompts, run_dir, shape):
    config = resolve_values(
        {
            "run_dir": run_dir,
            "evaluation": {"prompts": prompts},
            "model": {"shape": shape},
        }
    ).config
    again = resolve_values(read_yaml(to_yaml(config), "written").value).config
    assert again == config
    assert config_sha256(again) == config_sha256(config)


@given(st.floats(min_value=1e-300, max_value=1e300), st.integers(0, 2**63 - 1))
def test_any_number_reads_back(peak_lr, seed):
    config = resolve_values({"optim": {"peak_lr": peak_lr}, "seed": seed}).config
    assert resolve_values(read_yaml(to_yaml(config), "written").value).config == config


def test_hash_and_differences_see_every_change():
    old = load_config("recipe-t5-small").config
    new = load_config(
        "recipe-t5-small",
        [
            "seed=18",
            "train.micro_batch_rows=4",
            "train.early_stopping=null",
            "model.shape.d_model=64",
            "observe.log_every=1 steps",
        ],
    ).config
    found = {d.path: (d.old, d.new, d.is_safe) for d in differences(old, new)}
    assert found == {
        "seed": (17, 18, False),
        "model.shape.d_model": (old.model.shape["d_model"], 64, False),
        "train.micro_batch_rows": ("auto", 4, True),
        "train.early_stopping.patience": (3, None, True),
        "train.early_stopping.min_delta": (0.0, None, True),
        "train.early_stopping.metric": ("loss", None, True),
        "observe.log_every": ("10 steps", "1 steps", True),
    }
    assert config_sha256(old) != config_sha256(new)
    assert differences(old, load_config("recipe-t5-small").config) == []


def test_safe_settings_exist():
    assert set(setting_paths()) >= SAFE_TO_CHANGE
    for path in (
        "train.stop_after",
        "train.batch",
        "seed",
        "train.precision",
        "optim",
        "data",
    ):
        assert path not in SAFE_TO_CHANGE


def test_defaults_are_frozen():
    with pytest.raises(ValueError, match="frozen"):
        RunConfig().seed = 3


def test_what_is_not_printable_is_escaped_and_reads_back():
    text = "dump/\u202eslnosj.\x1b[2J\x85a"
    config = resolve_values({"data": {"sources": [{"path": text}]}}).config
    written = to_yaml(config)
    assert all(line.isprintable() for line in written.split("\n"))
    assert read_yaml(written, "a").value["data"]["sources"][0]["path"] == text
