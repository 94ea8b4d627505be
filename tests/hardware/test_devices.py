"""Devices in words: what torch says of drivers and cards, and what a user is told of it."""

from __future__ import annotations

import os
import re
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import toque
from toque.cli import main
from toque.errors import ConfigError
from toque.hardware import devices
from toque.hardware.memory import (
    describe_free_memory,
    describe_other_use,
    is_out_of_memory,
)
from toque.workflows.diagnosis import machine_checks

SETTLED = ("CUBLAS_WORKSPACE_CONFIG", *devices._ALLOCATORS)
TOO_OLD = (
    "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU "
    "driver by downloading and installing a new version from the URL: ..."
)
BUILD = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")


@pytest.fixture(autouse=True)
def _own_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*SETTLED, "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "")  # so that what the test sets is taken back
        monkeypatch.delenv(name)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes torch tell of a driver and a card, in a build with CUDA."""

    def made(
        *,
        trouble: str = "",
        count: int = 1,
        name: str = "NVIDIA GeForce RTX 4090",
        capability: tuple[int, int] = (8, 9),
        free: int = 23 << 30,
        refused: str = "",
        built: bool = True,
        codes: tuple[str, ...] = BUILD,
    ) -> None:
        def init() -> None:
            if trouble:
                raise RuntimeError(trouble)

        def mem_get_info(_device: object = None) -> tuple[int, int]:
            if refused:
                raise RuntimeError(refused)
            return free, 24 << 30

        for attribute, value in {
            "is_available": lambda: not trouble and count > 0,
            "device_count": lambda: 0 if trouble else count,
            "init": init,
            "get_device_name": lambda *_: name,
            "get_device_capability": lambda *_: capability,
            "get_device_properties": lambda *_: types.SimpleNamespace(
                major=capability[0]
            ),
            "current_device": lambda: 0,
            "get_arch_list": lambda: list(codes),
            "mem_get_info": mem_get_info,
            "memory_reserved": lambda *_: 0,
            "memory_allocated": lambda *_: 0,
        }.items():
            monkeypatch.setattr(torch.cuda, attribute, value)
        monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: built)
        monkeypatch.setattr(machine_checks.shutil, "which", lambda _: None)
        monkeypatch.setattr(machine_checks, "attention_on", lambda device: device)

    return made


NO_GPU = {"trouble": "No CUDA GPUs are available"}
P100 = {"name": "Tesla P100-PCIE-16GB", "capability": (6, 0)}
HELD = {
    "refused": "CUDA error: all CUDA-capable devices are busy or unavailable\nCUDA kernel"
}


@pytest.mark.parametrize(
    ("asked", "there", "said"),
    [
        ("tpu", {}, "'tpu' is not a device. Use auto, cpu, cuda or cuda:N"),
        (
            "mps",
            {},
            "Device mps is an Apple GPU. Toque is not tested .* Use cpu, or an NVIDIA GPU",
        ),
        ("xpu:1", {}, "Device xpu:1 is an Intel GPU"),
        ("meta", {}, "Device meta is a device without data"),
        ("vulkan", {}, "Device vulkan is a device type that torch supports"),
        (
            "cuda:1",
            {},
            "cuda:1 does not exist: torch finds 1 CUDA devices. Use a lower index",
        ),
        (
            "cuda",
            {"trouble": "none", "built": False},
            "torch .* is a build without CUDA. Use",
        ),
        (
            "cuda",
            NO_GPU,
            "Device cuda is not available: No CUDA GPUs are available. Use cpu or auto",
        ),
        (
            "cuda",
            {"trouble": TOO_OLD},
            r"not available: .* too old \(found version 11040\). Use cpu",
        ),
        (
            "auto",
            {"trouble": TOO_OLD},
            "cannot use this machine's GPU: .* too old .* Update the driver, or",
        ),
        (
            "auto",
            P100,
            "Tesla P100-PCIE-16GB needs kernels for sm_60, but torch .* sm_75, sm_80",
        ),
        ("cuda:0", {"capability": (13, 0), "name": "A"}, "A needs kernels for sm_130"),
        (
            "auto",
            HELD,
            "RTX 4090 cannot be opened: CUDA error: all .* unavailable. `nvidia-smi`",
        ),
    ],
)
def test_a_device_of_no_use_is_refused_with_what_to_do(
    machine: Any, asked: str, there: dict[str, Any], said: str
) -> None:
    machine(**there)
    with pytest.raises(ConfigError, match=said) as raised:
        devices.device_named(asked)
    assert raised.value.exit_code == 2
    assert "\n" not in str(raised.value)
    if asked == "auto":
        assert "CUDA_VISIBLE_DEVICES= before the command" in str(raised.value)


@pytest.mark.parametrize(
    ("asked", "there", "device"),
    [
        ("auto", {}, "cuda"),
        ("cuda:1", {"count": 2}, "cuda:1"),
        ("auto", NO_GPU, "cpu"),
        (
            "auto",
            {"trouble": "Found no NVIDIA driver on your system. Please check"},
            "cpu",
        ),
        (
            "auto",
            {"trouble": "Cannot re-initialize CUDA in forked subprocess. To use"},
            "cpu",
        ),
        ("auto", {"trouble": "none", "built": False}, "cpu"),
        ("auto", {"capability": (12, 1)}, "cuda"),
        ("auto", {"capability": (13, 0), "codes": ("sm_90", "compute_120")}, "cuda"),
        ("auto", {"codes": ("gfx942",)}, "cuda"),  # a build for AMD's, which are others
        ("cpu", {"trouble": TOO_OLD}, "cpu"),
    ],
)
def test_a_device_that_works_is_taken(
    machine: Any, asked: str, there: dict[str, Any], device: str
) -> None:
    machine(**there)
    assert devices.device_named(asked) == torch.device(device)


@pytest.mark.parametrize("value", ["", "-1"])
def test_hidden_gpus_are_nobodys_fault(
    machine: Any, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    """Also with a driver that is too old, which would be refused otherwise."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    machine(trouble=TOO_OLD)
    assert devices.device_named("auto").type == "cpu"
    with pytest.raises(
        ConfigError, match=f"CUDA_VISIBLE_DEVICES is '{value}', which hides every"
    ):
        devices.device_named("cuda")
    (found,) = machine_checks._check_gpus()
    assert (found.state, found.todo) == ("ok", "")
    assert f"none that is used: CUDA_VISIBLE_DEVICES is '{value}'" in found.found


@pytest.mark.parametrize(
    ("there", "state", "found", "todo"),
    [
        (NO_GPU, "ok", "none that is used: No CUDA GPUs", ""),
        (
            {"trouble": TOO_OLD},
            "failed",
            "cannot use it: The NVIDIA driver .* 11040",
            "Install",
        ),
        (P100, "failed", "P100.* sm_60", "Install a torch build with these kernels"),
        (HELD, "failed", "cannot be opened: CUDA error: all", "`nvidia-smi` lists"),
        ({}, "ok", "4090, 23.0 of 24.0 GiB free, bf16", ""),
        ({"capability": (7, 5)}, "ok", "no bf16", ""),
        (
            {"free": 12 << 30},
            "warning",
            "12.0 of 24.0 GiB free",
            "use 12.0 GiB of its 24.0 GiB",
        ),
    ],
)
def test_doctor_tells_of_each_card(
    machine: Any, there: dict[str, Any], state: str, found: str, todo: str
) -> None:
    machine(**there)
    row, *more = machine_checks._check_gpus()
    assert bool(more) == (
        "4090" in row.found and state != "failed"
    )  # attention is tried there
    assert row.state == state
    assert re.search(found, row.found)
    assert re.search(todo, row.todo)
    assert bool(row.todo) == (state != "ok")


def test_what_cuda_reads_is_set_where_the_user_has_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    devices.set_cuda_variables()
    assert [os.environ.get(name) for name in SETTLED] == [
        ":4096:8", None, None, "expandable_segments:True",
    ]  # fmt: skip
    for own in devices._ALLOCATORS:
        monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
        monkeypatch.setenv(own, "max_split_size_mb:512")
        devices.set_cuda_variables()
        assert os.environ.get("PYTORCH_ALLOC_CONF") != "expandable_segments:True"
        monkeypatch.delenv(own)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    monkeypatch.setattr(
        devices.platform, "release", lambda: "6.6.87-microsoft-standard-WSL2"
    )
    devices.set_cuda_variables()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    assert "PYTORCH_ALLOC_CONF" not in os.environ


OUT_OF_MEMORY = (
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
    "CUDA driver error: out of memory",
    "HIP error: out of memory",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "Triton Error [CUDA]: out of memory",
    "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory",
)
OTHER = (
    "CUDA error: an illegal memory access was encountered",
    "CUDA error: no kernel image is available for execution on the device",
    "out of resource: shared memory, Required: 246784, Hardware limit: 232448",
    "NCCL Error 1: unhandled cuda error. Last error: Cuda failure 2 'out of memory'",
)


@pytest.mark.parametrize("message", [*OUT_OF_MEMORY, *OTHER])
def test_memory_that_ran_out_is_known_by_every_librarys_words(message: str) -> None:
    assert is_out_of_memory(RuntimeError(message)) == (message in OUT_OF_MEMORY)
    assert not is_out_of_memory(ValueError(message))


@pytest.mark.parametrize(
    ("free", "said"),
    [(23 << 30, ""), (12 << 30, "other programs use 12.0 GiB of its 24.0 GiB")],
)
def test_memory_of_other_programs_is_told(machine: Any, free: int, said: str) -> None:
    machine(free=free)
    words = describe_other_use(torch.device("cuda", 0))
    assert words.startswith(said)
    assert bool(words) == bool(said)
    assert describe_other_use(torch.device("cpu")) == ""


def outline_in(folder: Path) -> None:
    """Make the folder `run` with the outline of a model."""
    (folder / "run").mkdir()
    (folder / "run" / "config.json").write_text("{}")


@pytest.mark.parametrize(
    "there", [{"trouble": TOO_OLD}, P100, HELD], ids=["driver", "card", "held"]
)
@pytest.mark.parametrize("verb", ["train", "generate", "evaluate"])
def test_fault_86_a_gpu_of_no_use_is_told_and_nothing_begun(
    machine: Any,
    own_kitchen: Path,
    capfd: pytest.CaptureFixture[str],
    verb: str,
    there: dict[str, Any],
) -> None:
    machine(**there)
    outline_in(own_kitchen)
    words = {
        "train": ["my.yaml", "run_dir=runs/new"],
        "generate": ["run", "--prompt", "soup"],
        "evaluate": ["run", "my.yaml"],
    }
    assert main([verb, *words[verb]]) == 2
    said = capfd.readouterr().err
    assert "Traceback" not in said
    assert "CUDA_VISIBLE_DEVICES= before the command" in said
    assert not (own_kitchen / "runs").exists()


def test_an_apple_gpu_is_refused_by_name(
    own_kitchen: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    outline_in(own_kitchen)
    assert main(["generate", "run", "--prompt", "soup", "--device", "mps"]) == 2
    assert "Device mps is an Apple GPU" in capfd.readouterr().err
    with pytest.raises(ConfigError, match="Device mps is an Apple GPU"):
        toque.generate(own_kitchen / "run", ["soup"], device="mps")


def test_fault_87_weights_that_do_not_fit_are_refused_with_the_numbers(
    own_kitchen: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    assert own_kitchen.exists()
    monkeypatch.setattr("toque.models.loading.trainable.ModelToTrain.placed", full)
    assert main(["train", "my.yaml", "run_dir=runs/new"]) == 2
    said = " ".join(capfd.readouterr().err.split())
    assert re.search(
        r"weights do not fit into the [0-9.]+ [GM]iB that cpu has free. Train", said
    )
    assert "adapter.quantize_base=int8 or nf4" in said


def test_fault_87_what_others_hold_is_named_where_nothing_fits(machine: Any) -> None:
    machine(free=9 << 30)
    device = torch.device("cuda", 0)
    assert describe_free_memory(device) == (
        "9.0 GiB that cuda:0 has free (other programs use 15.0 GiB of its 24.0 GiB; nvidia-smi "
        "lists them)"
    )
