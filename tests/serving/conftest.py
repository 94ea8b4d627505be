"""A tiny model that writes different lengths, its adapters, and servers over them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from fixtures.servers import in_a_thread
from tiny import shape_of
from toque.config.schema_methods import AdapterConfig
from toque.data.tokenizer.codec import Codec, load_codec
from toque.models.loading.from_scratch import build_model
from toque.models.loading.model_export import save_model
from toque.models.loading.provenance import Provenance
from toque.models.lora.adapter_files import write_adapter
from toque.models.lora.frozen import base_sha256
from toque.models.lora.layers import attach
from toque.serving.batcher import ServedModel, ServedModels
from toque.serving.gate import Limits
from toque.serving.model_app import build_model_app
from toque.serving.server import Server

FAMILIES = ("gpt2", "t5")


@pytest.fixture(scope="session")
def codecs(tokenizers_at: dict[str, Path]) -> dict[str, Codec]:
    return {
        "gpt2": load_codec(tokenizers_at["decoder"]),
        "t5": load_codec(tokenizers_at["encoder-decoder"]),
    }


def build(codec: Codec, family: str = "gpt2"):
    """Weights drawn wide, so that answers differ."""
    wide = {} if family == "t5" else {"initializer_range": 0.3}
    return build_model(
        family=family, shape=shape_of(family, positions=96, **wide), vocab_size=codec.vocab_size,
        pad_id=codec.pad_id, eos_id=codec.eos_id, bos_id=codec.bos_id, seed=3,
    ).eval()  # fmt: skip


def eager_to_end(model, eos_id: int):
    """The model with a head of its own, which likes the end token: answers differ, in length too.

    A T5 whose head is its embedding answers everything with one token over and over.
    """
    head, drawn = model.get_output_embeddings(), torch.Generator().manual_seed(5)
    with torch.no_grad():
        weight = torch.randn(head.weight.shape, generator=drawn) * head.weight.std()
        weight[eos_id] *= 1.5
        head.weight = torch.nn.Parameter(weight)
    return model


def asked(typed: str) -> str:
    return f"Recipe for {typed}"


def served_as(name: str, codec: Codec, family: str) -> ServedModel:
    return ServedModel(
        name=name,
        model=eager_to_end(build(codec, family), codec.eos_id),
        codec=codec,
        record=Provenance(form="pairs", max_new_tokens=24),
        to_prompt=asked,
    )


@pytest.fixture(scope="session", params=FAMILIES)
def served(request: pytest.FixtureRequest, codecs: dict[str, Codec]) -> ServedModel:
    return served_as("tiny", codecs[request.param], request.param)


@pytest.fixture(scope="session")
def gpt2(codecs: dict[str, Codec]) -> ServedModel:
    return served_as("tiny", codecs["gpt2"], "gpt2")


@pytest.fixture(scope="session", params=["decoder", "encoder-decoder"])
def served_json(
    request: pytest.FixtureRequest, writers_of_json: dict[str, Codec]
) -> ServedModel:
    """A model whose tokenizer can write JSON."""
    pytest.importorskip("llguidance")
    family = "gpt2" if request.param == "decoder" else "t5"
    return served_as("tiny", writers_of_json[request.param], family)


@contextmanager
def running(models: ServedModels, **settings: object) -> Iterator[str]:
    """A real server on a free port, in a thread of its own; gives its address."""
    limits = Limits(**settings.pop("limits", {}))
    server = Server(build_model_app(models, limits=limits, **settings), limits)
    with in_a_thread(server, lambda: setattr(server, "should_exit", True)) as address:
        yield address


@pytest.fixture(scope="session")
def serving() -> Callable[..., object]:
    return running


@pytest.fixture(scope="session")
def folders(
    tmp_path_factory: pytest.TempPathFactory, codecs: dict[str, Codec]
) -> dict[str, Path]:
    """A model and two adapters of it, on disk; and an adapter of other weights."""
    root, codec = tmp_path_factory.mktemp("served"), codecs["gpt2"]
    files = codec.files()
    model = build(codec)
    save_model(model, None, root / "base", card="", files=files)
    base = base_sha256(model)
    for number, name in enumerate(("one", "two", "stranger")):
        adapted = build(codec)
        attach(
            adapted,
            AdapterConfig(r=2, dropout=0.0),
            base=str(root / "base"),
            seed=number,
        )
        with torch.no_grad():  # B begins at zero, and the adapter would change nothing
            for key, tensor in adapted.named_parameters():
                if ".lora_B" in key:
                    tensor.normal_(
                        0, 0.5, generator=torch.Generator().manual_seed(number)
                    )
        (root / name).mkdir()
        hash_of = "0" * 64 if name == "stranger" else base
        write_adapter(adapted, root / name, base_hash=hash_of)
        for file, text in files.items():
            (root / name / file).write_text(text)
    return {path.name: path for path in root.iterdir()}
