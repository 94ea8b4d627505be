from __future__ import annotations

import json
from contextlib import suppress

import pytest
import torch

from fixtures.runs import RowStream
from toque.errors import ConfigError
from toque.hardware.onednn import onednn_is_faster
from toque.runs import peak as peak_module
from toque.runs.peak import measure_peak, peak_of
from toque.training.optim.factory import build_optimizer
from toque.training.runtime import Runtime, restoring_torch, set_deterministic
from toque.training.update_guard import UpdateGuard
from toque.units import Cursor


@pytest.fixture(autouse=True)
def _determinism_as_before():
    before = torch.are_deterministic_algorithms_enabled()
    yield
    set_deterministic(before)


def detect(**options):
    return Runtime.detect(device="cpu", **options)


def test_precision_on_a_cpu_follows_its_instructions():
    fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    assert detect().precision == ("bf16" if fast else "float32")
    assert detect(precision="bf16").precision == "bf16"
    assert detect(precision="float32").precision == "float32"


@pytest.mark.parametrize("fast", [True, False])
def test_bf16_that_is_emulated_is_said(monkeypatch, fast):
    monkeypatch.setattr("toque.training.runtime.has_fast_bf16", lambda _: fast)
    said = detect(precision="bf16").warnings
    assert any("no bf16 in hardware" in each for each in said) is not fast
    assert not any("bf16" in each for each in detect().warnings)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "fp16"}, "fp16 needs CUDA"),
        ({"precision": "fp16", "fp16_is_safe": False}, "activations of T5 overflow"),
        ({"device": "cuda:77"}, "Device cuda:77 (does not exist|is not available)"),
    ],
)
def test_what_cannot_work_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        Runtime.detect(**{"device": "cpu", **options})


def test_several_ranks_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="WORLD_SIZE is 2"):
        detect()


@pytest.mark.parametrize("failing", [True, False])
def test_a_program_finds_torch_as_it_was(failing):
    torch.manual_seed(4)
    expected = torch.rand(3)
    torch.manual_seed(4)
    before = torch.get_deterministic_debug_mode()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.set_deterministic_debug_mode(1)  # warn only
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.backends.cudnn.benchmark = True
    try:
        with suppress(ConfigError), restoring_torch():
            detect().seed(5, 6)
            torch.rand(2)
            if failing:
                raise ConfigError("one")
        assert torch.get_deterministic_debug_mode() == 1
        assert torch.utils.deterministic.fill_uninitialized_memory
        assert torch.backends.cudnn.benchmark
    finally:
        torch.set_deterministic_debug_mode(before)
        torch.utils.deterministic.fill_uninitialized_memory = fill
        torch.backends.cudnn.benchmark = False
    assert torch.equal(torch.rand(3), expected)
    assert torch.initial_seed() == 4


def test_the_settings_of_torch_follow():
    for wanted in (True, False):
        detect(deterministic=wanted)
        assert torch.are_deterministic_algorithms_enabled() == wanted
    a = torch.ones(4, 4)
    for precision, dtype in (("bf16", torch.bfloat16), ("float32", torch.float32)):
        with detect(precision=precision).autocast():
            assert (a @ a).dtype == dtype


def test_random_numbers_are_a_function_of_seed_and_step():
    runtime = detect()
    draws = {}
    for key in [(1, 0), (1, 1), (2, 0), (0, 1), (1, 0)]:
        runtime.seed(*key)
        drawn = torch.rand(8).tolist()
        assert draws.setdefault(key, drawn) == drawn
    assert len({tuple(d) for d in draws.values()}) == 4


YES = torch.tensor(True)


def update(runtime, optimizer, *, loss=1.0, lr=0.1):
    """Clip, judge and apply, as `Trainer.step` does."""
    norm = runtime.clip_gradients(optimizer, 1.0)
    batch = RowStream().at(Cursor()).batch
    loss = torch.tensor(loss, device=norm.device)
    apply = UpdateGuard(runtime).should_apply(0, lr, loss, norm, batch)
    runtime.optimizer_step(optimizer, lr=lr, only_if=apply, step=0)


def with_gradients(model, value=1.0):
    optimizer = build_optimizer(model)
    for p in model.parameters():
        p.grad = torch.full_like(p, value)
    return optimizer


@pytest.mark.parametrize(
    ("limit", "length"), [(1.0, 1.0), (None, 50.0), (0.0, 50.0), (1e9, 50.0)]
)
def test_clipping(limit, length):
    weight = torch.nn.Parameter(torch.zeros(100))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    weight.grad = torch.full((100,), 5.0)
    runtime = detect()
    assert float(runtime.clip_gradients(optimizer, limit)) == pytest.approx(50.0)
    runtime.optimizer_step(optimizer, lr=1.0, only_if=YES, step=0)
    assert float(weight.detach().norm()) == pytest.approx(length)
    assert weight.grad is None


@pytest.mark.parametrize(
    ("precision", "kind"), [("bf16", "bfloat16"), ("float32", "float32")]
)
def test_the_peak_is_of_the_models_products_in_the_runs_precision(
    monkeypatch, precision, kind
):
    """Every matrix made for the measurement has the run's dtype and a side of the model's."""
    made = []
    randn = torch.randn

    def seen(*size, **how):
        made.append((*size, how["dtype"]))
        return randn(*size, **how)

    monkeypatch.setattr(torch, "randn", seen)
    monkeypatch.setattr(peak_module, "_MEASURE_SECONDS", 0.0)
    runtime = Runtime(precision=precision)
    peak = peak_of(runtime.device, runtime.dtype, {(8, 16): 1.0, (8, 61): 3.0})
    assert {dtype for *_, dtype in made} == {getattr(torch, kind)}
    weights = {(rows, columns) for rows, columns, _ in made if rows < 100}
    assert weights == {(16, 8), (61, 8)}
    assert peak.flops_per_second > 1e6
    assert peak.origin == f"measured in {kind}, matmuls of 2 shapes, 1 threads"


def test_a_shape_weighs_by_its_time(monkeypatch):
    """3 FLOP at 1 a second and 1 at 10 a second: 4 in 3.1 seconds."""
    rates = {(8, 61): 1.0, (8, 16): 10.0}
    monkeypatch.setattr(
        peak_module, "_measure_rate", lambda shape, *_, **__: rates[shape]
    )
    found = measure_peak(
        torch.device("cpu"), torch.float32, {(8, 61): 3.0, (8, 16): 1.0}
    )
    assert found.flops_per_second == pytest.approx(4 / 3.1)


@pytest.mark.gpu
def test_cuda_takes_16_bits_and_a_stated_peak():
    runtime = Runtime.detect()
    assert runtime.device.type == "cuda"
    assert runtime.precision in {"bf16", "fp16"}
    assert (
        peak_of(runtime.device, runtime.dtype, {(64, 64): 1.0}).flops_per_second > 1e12
    )


@pytest.mark.gpu
@pytest.mark.parametrize("finite", [True, False])
def test_cuda_skips_what_is_not_finite_without_being_asked(tiny_model, finite):
    model = tiny_model.cuda()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = with_gradients(model, 1.0 if finite else float("nan"))
    update(Runtime.detect(), optimizer)
    changed = [n for n, p in model.named_parameters() if not torch.equal(p, before[n])]
    assert bool(changed) == finite


def test_the_loss_scale_is_saved_and_continues(tiny_model):
    """float16's scaler, tried with the CPU's, which is the same code."""

    def runtime():
        return Runtime(
            precision="fp16", scaler=torch.amp.GradScaler("cpu", init_scale=2.0**40)
        )

    def updates(own, model, optimizer, n):
        for _ in range(n):
            own.backward(sum(p.square().sum() for p in model.parameters()))
            update(own, optimizer, lr=1e-2)

    first, optimizer = runtime(), build_optimizer(tiny_model)
    for p in tiny_model.parameters():
        p.register_hook(
            lambda g: torch.where(g.abs() > 2.0**36, torch.inf, g)
        )  # as float16 would
    updates(first, tiny_model, optimizer, 9)
    state = first.state_dict()
    assert state["scaler"]["scale"] < 2.0**40
    second = runtime()
    second.load_state_dict(json.loads(json.dumps(state)))
    assert second.state_dict() == state
    assert not second.scale_is_hopeless
    none = detect()
    none.load_state_dict({"scaler": None})
    assert none.state_dict() == {"scaler": None}


def test_how_bf16_is_computed_is_recorded_and_float32_needs_no_version():
    by_onednn = {"float32 on a CPU": "oneDNN"} if onednn_is_faster() else {}
    assert detect(precision="float32").numerics == by_onednn
    assert detect(precision="bf16").numerics == {"bf16 on a CPU": "6"}
