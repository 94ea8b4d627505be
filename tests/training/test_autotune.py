"""From configuration to a fitted model: explicit settings obeyed, choices remembered, refusals."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from fixtures.kitchens import kitchen_in
from toque.batch import Batch
from toque.config import load_config
from toque.config.schema import RunConfig
from toque.data.loader import batch_stream
from toque.data.store.token_store import TokenStore
from toque.errors import ConfigError
from toque.models.forward.blocks import blocks
from toque.training.autotune import Fitted, fit_to_machine
from toque.training.micro_batch import Probe
from toque.training.resources import Resources
from toque.training.runtime import Runtime
from toque.workflows.build import build_language_model, build_stream


@pytest.fixture(scope="module")
def kitchen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 512}
    model = {"family": "gpt2", "tokenizer": "trained:512", "shape": shape}
    train = {"batch": "2048 tokens", "micro_batch_rows": "auto", "compile": "auto"}
    return kitchen_in(
        tmp_path_factory.mktemp("kitchen"), model=model, train=train
    ).parent


class Fit:
    def __init__(
        self, kitchen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.kitchen, self.run, self.monkeypatch = (
            kitchen,
            tmp_path / "run",
            monkeypatch,
        )
        self.model: PreTrainedModel
        self.config: RunConfig
        self.row_tokens: int

    def __call__(
        self, *settings: str, free: int | None = None, run: str = "run"
    ) -> Fitted:
        words = [f"run_dir={self.run.with_name(run)}", *settings]
        self.config = load_config(str(self.kitchen / "run.yaml"), words).config
        store = TokenStore.open(self.config.data.store)
        self.model = build_language_model(self.config, store)
        stream = build_stream(self.config, store, self.model)
        self.row_tokens = stream.layout.shape.tokens
        with self.monkeypatch.context() as patch:
            if free is not None:
                patch.setattr(
                    "toque.training.autotune.free_bytes", lambda _device: free
                )
            return fit_to_machine(
                self.model,
                stream,
                Runtime(),
                run=Path(self.config.run_dir),
                train=self.config.train,
                optim=self.config.optim,
            )

    @property
    def recomputes(self) -> bool:
        return all("forward" in vars(block) for block in blocks(self.model))


@pytest.fixture
def fit(kitchen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fit:
    monkeypatch.setenv("TOQUE_CACHE", str(tmp_path / "cache"))
    return Fit(kitchen, tmp_path, monkeypatch)


def test_what_is_set_is_obeyed(fit: Fit) -> None:
    fitted = fit("train.micro_batch_rows=3", "train.gradient_checkpointing=true")
    assert fitted.resources.micro_batch_rows == 3
    assert fitted.resources.gradient_checkpointing
    assert fit.recomputes
    assert "3 rows per micro-batch, activations recomputed (as set)" in fitted.line
    assert not fit(
        "train.gradient_checkpointing=false", run="b"
    ).resources.gradient_checkpointing
    assert not fit.recomputes


def test_auto_says_what_it_chose_and_keeps_to_it(fit: Fit) -> None:
    first = fit()
    assert "(4,096 tokens)" in first.line
    assert "not compiled" in first.line
    chosen = replace(first.resources, smaller_from={4: 1}, micro_batch_rows=2)
    chosen.save(fit.run)
    assert fit().resources == chosen  # a continued run
    other = fit(run="other")  # an equal run on this machine
    assert other.resources == first.resources
    assert "as before" in other.line
    # A run of other settings is none of these.
    assert fit("train.micro_batch_rows=5").resources.smaller_from == {}


def test_rows_of_a_cpu_are_a_rule_and_no_trial(
    fit: Fit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal runs computed half as many rows at once where the clock said so: other bits, and
    a fifth less memory than was planned."""
    fit("train.micro_batch_rows=1", run="shape")
    monkeypatch.setattr(batch_stream, "CPU_MICRO_BATCH_TOKENS", 2 * fit.row_tokens)
    tried: list[int] = []
    seconds = Probe.seconds
    monkeypatch.setattr(
        Probe, "seconds", lambda self, n: tried.append(n) or seconds(self, n)
    )
    fitted = fit("train.batch=2048 tokens")
    assert int(fitted.resources.machine["update_rows"]) >= 4
    assert fitted.resources.micro_batch_rows == 2
    assert tried == []


def test_rows_of_a_cpu_are_fewer_where_memory_is_short(fit: Fit) -> None:
    usual = fit("train.batch=2048 tokens").resources.micro_batch_rows
    short = fit("train.batch=2048 tokens", free=20 * 10**6, run="other")
    assert "(the most that fit)" in short.line
    assert 1 <= short.resources.micro_batch_rows < usual


def test_more_rows_than_an_update_has_are_never_tried(fit: Fit) -> None:
    """Half a million tokens at once were tried when such a run began anew: 23 GB, and killed."""
    first = fit("train.micro_batch_rows=999", free=4 * 10**8)
    assert "as set" in first.line
    again = fit("train.micro_batch_rows=999", free=4 * 10**8, run="other")
    assert "as before" in again.line


def test_recomputing_is_chosen_when_a_row_does_not_fit_without(fit: Fit) -> None:
    fitted = fit(free=10**9)
    assert not fitted.resources.gradient_checkpointing
    fixed = smallest(fit)
    both = fit(
        free=fixed, run="tight"
    )  # though the machine's cache knows of something faster
    assert both.resources.gradient_checkpointing
    assert fit.recomputes
    assert "do not fit into memory" in both.warnings[0]
    assert Resources.load(fit.run.with_name("tight")) == both.resources
    with pytest.raises(ConfigError, match="does not fit") as error:
        fit("train.gradient_checkpointing=false", free=fixed, run="refused")
    assert "train.gradient_checkpointing=true" in str(error.value)


def smallest(fit: Fit) -> int:
    """Free bytes with which only recomputing fits, found by halving."""
    low, high = 10**6, 5 * 10**7
    while high - low > 2 * 10**4:
        middle = (low + high) // 2
        try:
            fit("train.gradient_checkpointing=true", free=middle, run=f"m{middle}")
        except ConfigError:
            low = middle
        else:
            high = middle
    return high


def test_what_cannot_fit_is_refused_with_its_parts(fit: Fit) -> None:
    with pytest.raises(ConfigError) as error:
        fit(free=10**6)
    text = str(error.value)
    for part in (
        "weights",
        "gradients",
        "optimizer",
        "logits",
        "activations",
        "adamw8bit",
    ):
        assert part in text
    assert not (fit.run / "resources.json").exists()


def test_what_a_first_and_disturbed_try_takes_decides_nothing(
    fit: Fit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside other programs the time told first was 20 to 60 times too long."""
    times = [30.0]  # the first try is the one that loads

    def seconds_of(_probe: Probe, _batch: Batch) -> float:
        times.append(0.01)
        return times.pop(0)

    monkeypatch.setattr(Probe, "seconds_of", seconds_of)
    fitted = fit("train.micro_batch_rows=1")
    rows = int(fitted.resources.machine["update_rows"])
    assert fitted.update_seconds == pytest.approx(rows * 0.01)


@pytest.mark.slow  # loading the compiler takes five seconds
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_compiler_that_fails_costs_one_line(
    fit: Fit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(torch._inductor.config.cpp, "cxx", ("no-such-compiler",))
    monkeypatch.setattr(torch._inductor.config, "force_disable_caches", True)
    fitted = fit("train.compile=true", "train.micro_batch_rows=1")
    assert not fitted.resources.compile
    assert len(fitted.warnings) == 1
    assert "torch.compile failed, so the run is not compiled" in fitted.warnings[0]
    assert all(block._compiled_call_impl is None for block in blocks(fit.model))
    assert list((fit.run.parent / "cache").rglob("*.json")) == []
