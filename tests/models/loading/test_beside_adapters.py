"""An adapter in use beside its base as it was trained: the same bits, and memory counted."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import PreTrainedModel

from models.lora.test_layers import disturb
from tiny import EOS, KINDS, PAD, make
from toque.config.schema_methods import AdapterConfig, OptimisationsConfig
from toque.errors import ConfigError
from toque.hardware.memory import HEADROOM
from toque.models.loading import pretrained
from toque.models.loading.model_export import export_adapter, sample_logits, save_model
from toque.models.loading.pretrained import (
    AdaptedBase,
    check_folder,
    formats_in_use,
    grow_vocabulary,
    load_model,
    load_with_adapter,
    load_with_adapters,
)
from toque.models.lora.adapter_files import (
    is_adapter_folder,
    load_adapter,
    recorded_format,
    use_adapter,
    write_adapter,
)
from toque.models.lora.frozen import PLAIN, FrozenFormat, computing, format_of
from toque.models.lora.layers import attach
from toque.training.optimisations import optimise
from toque.training.runtime import Runtime
from written import generate

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BF16, NF4 = FrozenFormat(torch.bfloat16), FrozenFormat(torch.float16, "nf4")
COARSE = [BF16, FrozenFormat(torch.bfloat16, "int8")]
PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12], [7]]
each_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def base(kind: str, tmp_path: Path) -> Path:
    save_model(make(kind), None, tmp_path / "base", card="")
    return tmp_path / "base"


def run_beside(
    base: Path, *, variant: str = "lora", r: int = 4, targets: str = "auto"
) -> AdaptedBase:
    """A base as a run reads it, with rows of two new tokens."""
    adapter = AdapterConfig(kind=variant, r=r, dropout=0.0, target_modules=targets)

    def add(model: PreTrainedModel) -> None:
        grow_vocabulary(model, 63)
        attach(model, adapter, base=str(base), seed=3, tokens=(61, 62))

    return AdaptedBase(check_folder(str(base)), add, read_whole=variant == "dora")


def trained(
    base: Path, to: Path, held: FrozenFormat, *, record: FrozenFormat | None = None,
    seed: int = 1, **adapter: Any,
) -> PreTrainedModel:  # fmt: skip
    """A run's model at its end; its adapter is in the folder `to`."""
    model, base_hash = run_beside(base, **adapter).placed(held, CPU)
    disturb(model, seed)
    to.mkdir()
    vars(model)["frozen_format"] = record or held
    write_adapter(model, to, base_hash=base_hash)
    return model.eval()


def texts(model: PreTrainedModel) -> list[list[int]]:
    return generate(model, PROMPTS, max_new_tokens=16, eos_id=EOS, pad_id=PAD)


def logits(model: PreTrainedModel) -> torch.Tensor:
    with computing(model):
        return sample_logits(model)


@each_kind
@pytest.mark.parametrize("held", COARSE, ids=str)
def test_it_computes_and_writes_to_the_bit_what_its_run_did(held, base, tmp_path):
    run = trained(base, tmp_path / "one", held)
    assert recorded_format(tmp_path / "one") == held
    used = load_with_adapters({"one": tmp_path / "one"}, [held], CPU)
    assert format_of(used) == held
    assert torch.equal(logits(used), logits(run))
    runtime = Runtime(precision="bf16")
    optimise(run, OptimisationsConfig(), runtime)
    with runtime.autocast():
        expected = texts(
            run
        )  # as a trainer's samples are written, with a trainer's layers
    assert texts(used) == expected


@pytest.mark.parametrize(
    ("kind", "variant"),
    [*((k, "lora") for k in KINDS), ("t5", "dora"), ("gpt2", "rslora")],
)
def test_beside_float32_and_merged_it_writes_the_same(variant, base, tmp_path):
    folder = tmp_path / "one"
    run = trained(base, folder, PLAIN, variant=variant)
    beside = load_with_adapters({"one": folder}, [PLAIN], CPU)
    assert torch.equal(logits(beside), logits(run))
    merged = load_with_adapter(folder)
    torch.testing.assert_close(logits(merged), logits(run), rtol=1e-4, atol=1e-4)
    assert texts(merged) == texts(beside) == texts(run)


@pytest.mark.parametrize("kind", ["gpt2", "t5"])
def test_several_lie_beside_one_quantised_base(base, tmp_path):
    held, folders = (
        FrozenFormat(torch.bfloat16, "int8"),
        {n: tmp_path / n for n in ("one", "two")},
    )
    runs = {
        "one": trained(base, folders["one"], held),
        "two": trained(base, folders["two"], held, seed=2, r=2, targets="all"),
    }
    both = load_with_adapters(folders, [held], CPU)
    for name in ("one", "two", "one"):
        use_adapter(both, name)
        assert torch.equal(logits(both), logits(runs[name]))
        assert texts(both) == texts(runs[name])


@pytest.mark.parametrize("kind", ["t5-v1.1", "gpt2", "llama"])
@pytest.mark.parametrize(
    ("held", "variant"), [(COARSE[1], "lora"), (BF16, "dora")], ids=str
)
def test_the_bytes_counted_before_are_those_it_holds(held, variant, base):
    run = run_beside(base, variant=variant)
    needed = run.needed(held, CUDA)
    model, _ = run.placed(held, CPU)
    holds = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    assert needed[0] == holds
    assert run.needed(held, CPU)[0] == 0
    if variant == "dora":  # read whole, and twice of the largest tensor beside
        assert needed[1] > run.needed(PLAIN, CUDA)[0]


@pytest.mark.parametrize("kind", ["llama"])
def test_what_there_is_no_memory_for_is_refused_before_it_is_read(
    base, tmp_path, monkeypatch
):
    folder, small = tmp_path / "one", FrozenFormat(torch.float32, "int8")
    trained(base, folder, FrozenFormat(torch.bfloat16, "int8"))
    run = run_beside(base)
    room = {held: run.needed(held, CPU)[1] / HEADROOM for held in (PLAIN, small)}
    assert room[small] < room[PLAIN]

    def held_with(free: float) -> FrozenFormat:
        monkeypatch.setattr(pretrained, "free_bytes", lambda _: int(free) + 1)
        formats = [PLAIN, small]
        return format_of(load_with_adapters({"one": folder}, formats, CPU))

    assert held_with(room[PLAIN]) == PLAIN
    assert held_with(room[PLAIN] - 2) == small
    monkeypatch.setattr(pretrained, "matrix_of", None)
    with pytest.raises(
        ConfigError, match=r"\(float32\), or .* \(int8 for products in float32\)"
    ):
        held_with(room[small] - 2)


@pytest.mark.parametrize(
    ("recorded", "device", "formats"),
    [
        ([BF16], CUDA, [BF16]),
        ([NF4, NF4], CUDA, [NF4]),
        ([NF4, BF16], CUDA, [PLAIN, BF16]),
        ([None], CUDA, [PLAIN, BF16]),
        ([PLAIN], CUDA, [PLAIN, BF16]),
        ([BF16], CPU, [PLAIN, BF16]),
    ],
)
def test_a_gpu_holds_what_was_trained_beside_and_a_cpu_float32(
    recorded, device, formats, monkeypatch
):
    monkeypatch.setattr(
        pretrained, "recorded_format", lambda adapter: recorded[int(str(adapter))]
    )
    adapters = [Path(str(i)) for i in range(len(recorded))]
    assert formats_in_use(adapters, device) == formats
    expected = [NF4] if recorded == [None] else formats
    assert formats_in_use(adapters, device, NF4) == expected


def of_peft(
    base: Path, to: Path, *, save_embedding_layers: Any = "auto", **settings: Any
) -> PreTrainedModel:
    """A model with an adapter that peft alone made and wrote."""
    model = load_model(str(base))
    config = peft.LoraConfig(
        **{"r": 4, "target_modules": ["q_proj", "v_proj"]} | settings
    )
    adapted = peft.get_peft_model(model, config)
    disturb(model, seed=1)
    adapted.save_pretrained(to, save_embedding_layers=save_embedding_layers)
    file = to / "adapter_config.json"
    named = json.loads(file.read_text()) | {"base_model_name_or_path": str(base)}
    file.write_text(json.dumps(named))
    return model.eval()


@pytest.mark.parametrize("kind", ["llama"])
@pytest.mark.parametrize("start", [True, "gaussian", "eva", "orthogonal", "mica"])
def test_adapters_of_peft_are_read_whatever_they_started_from(start, base, tmp_path):
    model = of_peft(base, tmp_path / "a", init_lora_weights=start)
    read = load_with_adapters({"a": tmp_path / "a"}, [PLAIN], CPU)
    assert torch.equal(logits(read), logits(model))


@pytest.mark.parametrize("kind", ["llama"])
@pytest.mark.parametrize(
    "settings",
    [
        {"init_lora_weights": "pissa"},
        {"init_lora_weights": "olora"},
        {"alora_invocation_tokens": [5, 6], "task_type": "CAUSAL_LM"},
        {"lora_bias": True},
        {"kasa_config": peft.tuners.lora.config.KasaConfig()},
        {"layer_replication": [(0, 2), (1, 2)]},
    ],
    ids=lambda settings: (
        next(iter(settings)) + str(settings.get("init_lora_weights", ""))
    ),
)
@pytest.mark.filterwarnings("ignore:`lora_bias=True`")
def test_an_adapter_that_is_no_plain_sum_is_refused_by_name(settings, base, tmp_path):
    of_peft(base, tmp_path / "a", **settings)
    named = next(iter(settings))
    for read in (
        lambda: load_with_adapters({"a": tmp_path / "a"}, [PLAIN], CPU, merge=True),
        lambda: load_with_adapter(tmp_path / "a"),
        lambda: load_adapter(load_model(str(base)), tmp_path / "a"),
    ):
        with pytest.raises(
            ConfigError, match=rf"adapter_config.json sets {named} .* with peft"
        ):
            read()


@pytest.mark.parametrize(
    ("kind", "settings", "held"),
    [
        ("gpt2", {"target_modules": ["wte"]}, "wte.lora_embedding_A.* an embedding or"),
        (
            "gpt2",
            {"target_modules": ["c_attn"], "bias": "all"},
            '.bias.* for bias "all"',
        ),
        (
            "llama",
            {"target_modules": ["lm_head"]},
            "lm_head.base_layer.weight.* the output head",
        ),
    ],
    ids=["embedding", "bias", "head"],
)
def test_an_adapter_with_other_weights_is_refused_by_name(
    settings, held, base, tmp_path
):
    of_peft(base, tmp_path / "a", **settings)
    for read in (
        lambda: load_with_adapter(tmp_path / "a"),
        lambda: load_adapter(load_model(str(base)), tmp_path / "a"),
    ):
        with pytest.raises(
            ConfigError, match=rf"model.safetensors contains .*{held}.* with peft"
        ):
            read()


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_head_that_shares_its_matrix_is_merged_alone(base, tmp_path):
    settings = {"target_modules": ["lm_head"], "save_embedding_layers": False}
    model = of_peft(base, tmp_path / "a", **settings)
    torch.testing.assert_close(logits(load_with_adapter(tmp_path / "a")), logits(model))


@pytest.mark.parametrize("kind", ["llama"])
def test_a_folder_of_a_model_and_an_adapter_is_neither(base, tmp_path):
    """transformers alone would read the adapter into the model and freeze it, unsaid."""
    of_peft(base, tmp_path / "a")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(tmp_path / "a" / name, base / name)
    with pytest.raises(
        ConfigError, match=r"both the weights of a model and an adapter"
    ):
        load_model(str(base))


@pytest.mark.parametrize("kind", ["llama"])
def test_an_adapter_may_lie_beside_the_config_of_its_base(base, tmp_path):
    """As axolotl writes it."""
    of_peft(base, tmp_path / "a")
    shutil.copy(base / "config.json", tmp_path / "a" / "config.json")
    assert is_adapter_folder(tmp_path / "a")
    assert not is_adapter_folder(base)
    with pytest.raises(ConfigError, match="contains an adapter, not a model"):
        load_model(str(tmp_path / "a"))
    load_with_adapter(tmp_path / "a")


@pytest.mark.parametrize("kind", ["llama"])
def test_an_adapter_whose_base_is_away_leaves_no_copy(base, tmp_path):
    of_peft(base, tmp_path / "a")
    base.rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="there is no such folder"):
        export_adapter(tmp_path / "a", tmp_path / "copy", card="")
    assert not (tmp_path / "copy").exists()
    (tmp_path / "elsewhere").rename(base)
    export_adapter(tmp_path / "a", tmp_path / "copy", card="")
