"""The project's attention kernels, compiled for cards that are not there.

    python tests/fake_cuda/kernels.py compile sm_90 records.jsonl --sizes 64 --dtypes bfloat16
    python tests/fake_cuda/kernels.py table records.jsonl   # as Markdown

A record, of minutes, has the kernels of one card, head size, precision, and bias or none:
`flex_attention.kernels_on` looks for options as it does on a GPU, and then `attend` makes by them
what a run makes. Inductor and Triton are the real ones, down to machine code; loading a kernel is
replaced by the check that loading makes of its shared memory, and launching by nothing. So nothing
is computed: numbers are for tests/gpu. A process compiles for one card.

Needs triton of torch's version beside a CPU build of torch: `make test-kernels`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SIZES, DTYPES = (64, 128, 32, 80, 96), ("bfloat16", "float16", "float32")


Case = tuple[int, str, bool]  # head size, precision, with a bias


@dataclass(frozen=True)
class Architecture:
    """A card of a compute capability; shared memory in bytes, from CUDA's programming guide."""

    card: str
    processors: int
    shared: int  # a block may take
    shared_of_processor: int


CARDS = {
    "sm_80": Architecture("NVIDIA A100-SXM4-80GB", 108, 163 << 10, 164 << 10),
    "sm_86": Architecture("NVIDIA GeForce RTX 3090", 82, 99 << 10, 100 << 10),
    "sm_89": Architecture("NVIDIA GeForce RTX 4090", 128, 99 << 10, 100 << 10),
    "sm_90": Architecture("NVIDIA H100 80GB HBM3", 132, 227 << 10, 228 << 10),
    "sm_120": Architecture("NVIDIA GeForce RTX 5090", 170, 99 << 10, 100 << 10),
}


class _Driver:
    """What Triton and Inductor ask of the driver."""

    launcher_cls = None

    def __init__(self, capability: int, card: Architecture) -> None:
        self._capability = capability
        at = {
            "max_shared_mem": card.shared,
            "multiprocessor_count": card.processors,
            "max_num_regs": 65536,
            "warpSize": 32,
        }
        self.utils = types.SimpleNamespace(get_device_properties=lambda _: at)

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, *_: Any) -> int:
        return 0

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cuda", 0)


def _pretend(capability: int, card: Architecture) -> None:
    """Let torch and Triton believe in the card, for the rest of the process."""
    import torch
    import torch._dynamo.device_interface as interfaces
    import triton

    major, minor = divmod(capability, 10)
    properties = types.SimpleNamespace(
        name=card.card, total_memory=24 << 30, major=major, minor=minor, gcnArchName="",
        multi_processor_count=card.processors, L2_cache_size=50 << 20, warp_size=32,
        max_threads_per_multi_processor=1536, max_threads_per_block=1024,
        regs_per_multiprocessor=65536, shared_memory_per_block=48 << 10,
        shared_memory_per_block_optin=card.shared,
        shared_memory_per_multiprocessor=card.shared_of_processor,
    )  # fmt: skip
    answers: dict[str, Any] = {
        "is_available": True, "device_count": 1, "current_device": 0, "is_initialized": True,
        "_lazy_init": None, "get_device_name": card.card, "get_device_properties": properties,
        "get_device_capability": (major, minor), "set_device": None, "synchronize": None,
        "is_bf16_supported": True, "_exchange_device": 0, "_maybe_exchange_device": 0,
        "set_rng_state": None, "manual_seed": None, "manual_seed_all": None,
        "get_rng_state": torch.empty(16, dtype=torch.uint8),
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, _answer=answer, **__: _answer)
    cuda = interfaces.CudaInterface
    for name in ("device_count", "current_device", "set_device", "synchronize",
                 "get_device_properties", "is_bf16_supported"):  # fmt: skip
        setattr(cuda, name, staticmethod(getattr(torch.cuda, name)))
    for name in ("exchange_device", "maybe_exchange_device", "get_raw_stream"):
        setattr(cuda, name, staticmethod(lambda *_: 0))
    for name in ("_cuda_getDevice", "_cuda_exchangeDevice", "_cuda_maybeExchangeDevice",
                 "_cuda_setDevice", "_cuda_getCurrentRawStream"):  # fmt: skip
        setattr(torch._C, name, lambda *_: 0)
    triton.runtime.driver.set_active(_Driver(capability, card))


@dataclass
class Compiled:
    """A kernel as it was compiled, and whether a probe or a run made it."""

    by: str
    kernel: str
    shared: int  # bytes of a block
    stages: int
    registers: int  # of a thread
    stack: int  # bytes of a thread: registers that did not suffice


def _registers(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack of a thread, as the machine code says."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        said = subprocess.run(
            [tool, "--dump-resource-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    fields = dict(part.split(":") for part in said.split() if part.count(":") == 1)
    return int(fields["REG"]), int(fields["STACK"])


@contextmanager
def _compiling(card: Architecture, by: list[str]) -> Iterator[list[Compiled]]:
    """Inside, kernels are compiled and not launched; the list holds those of attention."""
    import torch
    from torch._inductor.fx_passes import joint_graph
    from torch._inductor.runtime import triton_helpers
    from torch._inductor.runtime import triton_heuristics as heuristics
    from torch._subclasses import fake_tensor

    made: list[Compiled] = []

    def loaded(self: Any) -> Any:
        """As the launcher of torch's CUDA build does it (static_launcher/cuda.cpp)."""
        meta, name = self.kernel.metadata, self.inductor_meta.get("kernel_name", "")
        if "tem_fused" in name:
            usage = _registers(self.kernel.asm["cubin"])
            made.append(Compiled(by[-1], name, meta.shared, meta.num_stages, *usage))
        if meta.shared >= card.shared:
            raise torch.cuda.OutOfMemoryError(
                f"out of resource: {name} Required: {meta.shared} Hardware limit:{card.shared} "
                "Reducing block sizes or `num_stages` may help."
            )
        return types.SimpleNamespace(
            config=self.config, n_regs=0, n_spills=0, shared=meta.shared, cache_hash=""
        )

    class Mode(fake_tensor.FakeTensorMode):
        @property
        def avoid_device_init(self) -> bool:
            return True

    joint_graph.lazy_init = lambda *_: (
        None
    )  # patterns of products, made of tensors on the card
    triton_helpers.set_driver_to_gpu = lambda: None
    heuristics.TritonCompileResult.make_launcher = loaded
    heuristics.CachingAutotuner.run = lambda *_, **__: None
    fake_tensor.init_gpu_context = lambda _: None
    torch._C._dynamo.guards._empty_strided_cuda = lambda size, stride, dtype: (
        torch.empty_strided(size, stride, dtype=dtype, device="cuda")
    )
    torch.Tensor.__float__ = lambda _: 0.0  # a distance of numbers that nobody computed
    with Mode(allow_non_fake_inputs=True):
        yield made


def compiled(
    arch: str, cases: Iterable[Case], *, of_a_run: bool
) -> Iterator[dict[str, Any]]:
    """Options that the probe finds for a card, and the kernels that it and a run make."""
    capability, card = int(arch.removeprefix("sm_")), CARDS[arch]
    import torch
    from torch._functorch import config as functorch
    from torch._inductor import config as inductor

    functorch.enable_autograd_cache = False
    inductor.fx_graph_cache = False
    inductor.joint_graph_constant_folding = False  # it computes
    inductor.compile_threads = 1
    inductor.use_static_triton_launcher = (
        False  # of the same checks, in C++ of the CUDA build
    )
    _pretend(capability, card)
    from toque.models.forward import flex_attention as flex

    for size, dtype, biased in cases:
        torch.compiler.reset()
        by = ["probe"]
        with _compiling(card, by) as made:
            cuda, number = torch.device("cuda", 0), getattr(torch, dtype)
            found = flex.kernels_on(cuda, number, size, biased=biased)
            by.append("run")
            if of_a_run and found.options is not None:
                _of_a_run(number, size, found.options, biased=biased)
        yield {
            "arch": arch, "card": card.card, "limit": card.shared, "size": size, "dtype": dtype,
            "biased": biased, "torch": torch.__version__, "triton": version("triton"),
            "options": found.options and dict(found.options), "words": str(found),
            "kernels": [vars(kernel) for kernel in made],
        }  # fmt: skip


def _of_a_run(number: Any, size: int, options: Any, *, biased: bool) -> None:
    """What a run makes: masks of encoder and decoder, or across; longer rows than the probe's."""
    import torch

    from toque.models.forward import flex_attention as flex

    rows, heads, source, target = 3, 4, 512, 392
    cases = [(target, target, True)]
    cases += [(source, source, False)] if biased else [(target, source, False)]
    for queries, keys, causal in cases:
        of_queries, of_keys = (
            torch.zeros(rows, n, dtype=torch.int32, device="cuda")
            for n in (queries, keys)
        )
        mask = flex._block_mask(of_queries, of_keys, causal=causal)
        q, k, v = (
            torch.empty(
                rows, heads, n, size, dtype=number, device="cuda", requires_grad=True
            )
            for n in (queries, keys, keys)
        )
        shape = (1, heads, queries, keys)
        bias = torch.empty(shape, device="cuda", requires_grad=True) if biased else None
        for dropout in (0.0, 0.1):
            out = flex.attend(
                q, k, v, mask, bias=bias, scale=0.125, dropout=dropout, options=options
            )
            out.sum().backward()


def missing(file: Path, arch: str, cases: Iterable[Case]) -> list[Case]:
    """The cases of which the file has no record."""
    known = {
        (r["arch"], r["size"], r["dtype"], r["biased"])
        for r in map(json.loads, file.read_text().splitlines() if file.exists() else ())
    }
    return [case for case in cases if (arch, *case) not in known]


def table(records: list[dict[str, Any]]) -> str:
    """Markdown: what was chosen, and the most that its kernels take of each direction."""
    head = (
        "card", "bytes a block may take", "heads of", "precision", "bias", "blocks",
        "torch's own need", "forward", "backward", "stack of a thread",
    )  # fmt: skip
    rows = [head, ("---",) * len(head)]
    order = {name: n for n, name in enumerate(CARDS)}
    for r in sorted(
        records, key=lambda r: (order[r["arch"]], r["dtype"], r["size"], r["biased"])
    ):
        # What fails to load ends a try; the last try, and what a run made, are by the options.
        fails = [n for n, k in enumerate(r["kernels"]) if k["shared"] >= r["limit"]]
        made = r["kernels"][max(fails, default=-1) + 1 :]
        needed = r["kernels"][fails[0]]["shared"] if fails else None
        of = [
            [k for k in made if ("backward" in k["kernel"]) == back]
            for back in (False, True)
        ]
        rows.append(
            (
                r["arch"], f"{r['limit']:,}", str(r["size"]), r["dtype"],
                "yes" if r["biased"] else "no", r["words"].split(", since")[0],
                "-" if needed is None else f"{needed:,}",
                *(f"{max((k['shared'] for k in kernels), default=0):,}" for kernels in of),
                " / ".join(f"{max((k['stack'] for k in kernels), default=0):,}" for kernels in of),
            )
        )  # fmt: skip
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    asked = parser.add_subparsers(dest="do", required=True)
    one = asked.add_parser("compile", help="append the records that the file lacks")
    one.add_argument("arch", choices=CARDS)
    one.add_argument("file", type=Path)
    one.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    one.add_argument("--dtypes", nargs="+", default=DTYPES)
    one.add_argument("--bias", choices=("with", "without"), help="default: both")
    one.add_argument("--probe-only", action="store_true", help="not what a run makes")
    asked.add_parser("table").add_argument("file", type=Path)
    of = parser.parse_args()
    if of.do == "table":
        print(table([json.loads(line) for line in of.file.read_text().splitlines()]))
        return
    from fake_cuda import hooks

    hooks.install()
    biases = [of.bias == "with"] if of.bias else [True, False]
    cases = missing(of.file, of.arch, product(of.sizes, of.dtypes, biases))
    for record in compiled(of.arch, cases, of_a_run=not of.probe_only):
        with of.file.open("a") as out:
            out.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    sys.path[:0] = [str(HERE.parent)]
    with tempfile.TemporaryDirectory(prefix="toque-kernels-") as folder:
        for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
            os.environ[name] = f"{folder}/{name}"
        main()
