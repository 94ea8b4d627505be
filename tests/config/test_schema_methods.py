"""Settings of adapters, cycles and noise: what is refused, and in which words."""

import pytest

from toque.config import load_config
from toque.errors import ConfigError


@pytest.mark.parametrize(
    ("override", "says"),
    [
        (["adapter={kind: lora}"], "`model.start_from` is scratch"),
        (["optim.cycles={growth: 3}"], "only cosine_restarts uses it"),
        (['optim.cooldown="10 %"'], "only wsd uses it"),
        (
            ["optim.averaging={last: 3}"],
            "It was removed. Instead, use optim.ema_decay",
        ),
        (["optim.gradient_noise={eta: -1}"], "optim.gradient_noise.eta"),
    ],
)
def test_what_cannot_be_or_would_not_be_read_is_refused(
    override: list[str], says: str
) -> None:
    with pytest.raises(ConfigError) as error:
        load_config("demo", override)
    assert says in str(error.value)


@pytest.mark.parametrize("targets", ["auto", "all", "[q, v]", "3", "[]", "some"])
def test_target_modules_are_a_word_or_a_list(targets: str) -> None:
    words = ["model.start_from=some/model", "model.shape={}"]
    words.append(f"adapter={{target_modules: {targets}}}")
    if targets in ("3", "[]", "some"):
        with pytest.raises(ConfigError, match="target_modules"):
            load_config("demo", words)
        return
    adapter = load_config("demo", words).config.adapter
    assert adapter is not None
    assert adapter.target_modules == (("q", "v") if targets == "[q, v]" else targets)
