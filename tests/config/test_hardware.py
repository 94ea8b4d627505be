"""Overlays by card: what a file says of a card comes on top, and overrides come last."""

from pathlib import Path

import pytest

from toque.config import load_config
from toque.config.resolve import names_card
from toque.errors import ConfigError

FILE = """model: {family: gpt2}
train: {micro_batch_rows: 2, precision: auto}
hardware:
  rtx-4090:
    train: {micro_batch_rows: 8}
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "my.yaml").write_text(FILE)
    return tmp_path / "my.yaml"


def test_a_card_changes_what_it_names_and_no_more(path: Path) -> None:
    plain, card = load_config(path), load_config(path, hardware="RTX 4090")
    assert plain.config.train.micro_batch_rows == 2
    assert card.config.train.micro_batch_rows == 8
    assert card.origins["train.micro_batch_rows"] == f"{path}:5"
    assert card.origins["train.precision"] == f"{path}:2"


def test_an_override_comes_after_the_card(path: Path) -> None:
    given = load_config(path, ["train.micro_batch_rows=4"], hardware="rtx-4090")
    assert given.config.train.micro_batch_rows == 4
    assert given.origins["train.micro_batch_rows"] == "command line"


def test_a_card_that_the_file_does_not_name_is_refused(path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"has settings for rtx-4090. Nearest: rtx-4090"
    ):
        load_config(path, hardware="rtx-4080")
    assert (names_card(path, "rtx-4090"), names_card(path, "h100")) == (True, False)
    with pytest.raises(ConfigError, match=r"demo\.yaml has no `hardware` section"):
        load_config("demo", hardware="h100")


def test_a_setting_in_an_overlay_is_checked_where_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(FILE.replace("micro_batch_rows: 8", "micro_rows: 8"))
    with pytest.raises(
        ConfigError, match=r"my.yaml:5: `train.micro_rows` is not a setting"
    ):
        load_config(path, hardware="rtx-4090")
    with pytest.raises(
        ConfigError, match=r"my.yaml:5: `train.micro_rows` is not a setting"
    ):
        load_config(path)  # also on a machine that has another card


@pytest.mark.parametrize("written", ["RTX-4090", "RTX 4090", '"rtx  4090"'])
def test_a_card_may_be_written_as_its_maker_writes_it(
    tmp_path: Path, written: str
) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(FILE.replace("rtx-4090", written))
    for asked in ("rtx-4090", "RTX-4090", "RTX 4090"):
        card = load_config(path, hardware=asked)
        assert card.config.train.micro_batch_rows == 8
        assert card.origins["train.micro_batch_rows"] == f"{path}:5"
        assert names_card(path, asked)
    path.write_text(FILE.replace("rtx-4090", written) + "  rtx-4090: {seed: 1}\n")
    with pytest.raises(
        ConfigError, match=r"my.yaml:\d: `hardware` names a GPU twice: "
    ):
        load_config(path)
