"""llama.cpp itself: it reads the file, cuts texts as the codec does and writes the same tokens."""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tiny import shape_of
from toque.data.tokenizer.chat import prompt_ids
from toque.data.tokenizer.codec import Codec, load_codec
from toque.models.gguf.gguf_export import write_gguf
from toque.models.gguf.gguf_vocabulary import PromptTokens
from toque.models.gguf.layout import remove_output_scale
from toque.models.loading.from_scratch import build_model
from written import generate

try:
    import llama_cpp
except ImportError:
    llama_cpp = None

pytestmark = pytest.mark.skipif(
    llama_cpp is None, reason="llama-cpp-python is not installed"
)

DISHES = ("Lentil Soup", "Apple Pie", "Toast", "Rye Bread", "Plain Omelette")
FOODS = ("eggs, flour", "2 cups milk, salt", "butter", "  two  spaces")
PROMPTS = [
    f"Generate recipe for: {d} using ingredients: {f}" for d in DISHES for f in FOODS
]
FAMILIES = {
    "gpt2": ("decoder", "tokenizers/gpt2"),
    "neox": ("decoder", "tokenizers/gpt_neox"),
    "llama": ("decoder", "models/stories15m"),
    "t5": ("encoder-decoder", "tokenizers/t5"),
}
N_TOKENS = 24
MOST_PARTED = {"gpt2": 1, "neox": 1, "llama": 0, "t5": 0}
"""Of the 20 prompts. llama.cpp looks GELU up in a table of 16 bits, and computes its tanh form."""
TIE = 2e-3
"""Where a text parts, the two tokens' logits differ by less than this share of the largest."""


class Engine:
    """A file in llama.cpp, asked by ids."""

    def __init__(self, file: Path) -> None:
        llama_cpp.llama_backend_init()
        model = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(str(file).encode(), model)
        assert self.model, "llama.cpp does not read the file"
        self.vocab = llama_cpp.llama_model_get_vocab(self.model)

    def close(self) -> None:
        llama_cpp.llama_model_free(self.model)

    def tokenize(self, text: str) -> list[int]:
        data, room = text.encode(), (llama_cpp.llama_token * 512)()
        n = llama_cpp.llama_tokenize(
            self.vocab, data, len(data), room, 512, True, False
        )
        return list(room[:n])

    def greedy(
        self, prompt: Sequence[int], *, most: int, eos: int, start: int
    ) -> list[int]:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = 256, 256, 256
        params.type_k = params.type_v = llama_cpp.GGML_TYPE_F32
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.n_threads = params.n_threads_batch = 1
        context = llama_cpp.llama_init_from_model(self.model, params)
        try:
            fed = list(prompt)
            if llama_cpp.llama_model_has_encoder(self.model):
                self._run(llama_cpp.llama_encode, context, fed)
                fed = [start]
            written: list[int] = []
            while len(written) < most:
                self._run(llama_cpp.llama_decode, context, fed)
                logits = llama_cpp.llama_get_logits_ith(context, -1)
                size = llama_cpp.llama_vocab_n_tokens(self.vocab)
                best = max(range(size), key=logits.__getitem__)
                if best == eos:
                    break
                written.append(best)
                fed = [best]
            return written
        finally:
            llama_cpp.llama_free(context)

    def _run(self, step: Callable[..., int], context: Any, ids: Sequence[int]) -> None:
        held = (ctypes.c_int32 * len(ids))(*ids)  # the batch points into it
        assert step(context, llama_cpp.llama_batch_get_one(held, len(ids))) == 0


def tie(
    model: PreTrainedModel,
    prompt: Sequence[int],
    ours: Sequence[int],
    theirs: Sequence[int],
) -> float:
    """How near the two tokens are where two texts part, in shares of the largest logit."""
    place = next(
        i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b
    )
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt, *ours[:place]]])).logits[0, -1]
    return float(
        (logits[ours[place]] - logits[theirs[place]]).abs() / logits.abs().max()
    )


@pytest.fixture(params=["learnt", "real"])
def codec_of(
    request: pytest.FixtureRequest, tokenizers_at: dict[str, Path]
) -> Callable[[str], Codec]:
    def of(family: str) -> Codec:
        kind, real = FAMILIES[family]
        if request.param == "learnt":
            return load_codec(tokenizers_at[kind])
        return load_codec(request.getfixturevalue("shared") / real)

    return of


@pytest.fixture
def opened() -> Iterator[Callable[[Path], Engine]]:
    made: list[Engine] = []

    def opening(file: Path) -> Engine:
        made.append(Engine(file))
        return made[-1]

    yield opening
    for engine in made:
        engine.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_llama_cpp_cuts_and_writes_what_toque_does(
    family: str,
    codec_of: Callable[[str], Codec],
    opened: Callable[[Path], Engine],
    tmp_path: Path,
) -> None:
    codec, encoder = codec_of(family), family == "t5"
    wide = {} if encoder else {"initializer_range": 0.4}
    model = build_model(
        family=family, shape=shape_of(family, width=64, inner=96, positions=256, **wide),
        vocab_size=codec.vocab_size, pad_id=codec.pad_id, eos_id=codec.eos_id,
        bos_id=codec.bos_id, seed=4
    ).eval()  # fmt: skip
    if encoder:
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(3)
    asked = [
        prompt_ids(codec, text, FAMILIES[family][0], "recipes") for text in PROMPTS
    ]
    expected = generate(
        model, asked, max_new_tokens=N_TOKENS, eos_id=codec.eos_id, pad_id=codec.pad_id
    )
    assert len(set(map(tuple, expected))) > 10, (
        "the texts must differ by prompt to tell anything"
    )
    remove_output_scale(model)
    asking = PromptTokens(
        begin=None if encoder else codec.bos_id, bos=codec.bos_id, ends=(codec.eos_id,),
        pad=codec.pad_id, unk=codec.unk_id, newline=codec.newline_id, ends_with_eos=encoder,
        template=None,
    )  # fmt: skip
    file = tmp_path / "model.gguf"
    write_gguf(
        model,
        file,
        name=family,
        kind="f32",
        tokenizer_json=codec.tokenizer_json,
        tokens=asking,
    )
    engine = opened(file)
    ends = "" if encoder else "\n"
    assert [engine.tokenize(codec.normalise(text) + ends) for text in PROMPTS] == asked
    found = [
        engine.greedy(ids, most=N_TOKENS, eos=codec.eos_id, start=codec.pad_id)
        for ids in asked
    ]
    parted = [i for i, ids in enumerate(found) if ids != expected[i]]
    assert len(parted) <= MOST_PARTED[family]
    for i in parted:
        assert tie(model, asked[i], expected[i], found[i]) < TIE
