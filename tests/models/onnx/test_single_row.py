"""The program of a single row: the texts of torch, whatever rows come and go, and its errors."""

from functools import partial

import numpy as np
import pytest
import torch

from tiny import EOS, EVERY_KIND, PAD, VOCAB, make, model_of, shape_of
from toque.errors import ConfigError
from toque.models.generation import engine
from toque.models.generation.engine import generate
from toque.models.generation.live_rows import LiveRows, Order
from toque.models.generation.options import GenerationOptions
from toque.models.onnx import single_row
from toque.models.onnx.decoders import decoder_graph
from toque.models.onnx.row_graph import RowGraph, round_blocks
from toque.models.onnx.single_row import SingleRow, has_exact_int8

IDS = {"eos_id": [EOS], "pad_id": PAD}
PROMPT = [5, 9, 7, 3, 8, 6, 4]
needs_int8 = pytest.mark.skipif(
    not has_exact_int8(), reason="int8 sums may overflow on this processor"
)


@pytest.fixture
def in_float32(monkeypatch):
    """Opens programs that round nothing, so that their texts are torch's."""
    opened = []
    monkeypatch.setattr(single_row, "INT8_BLOCKS", "f32")
    monkeypatch.setattr(single_row, "has_exact_int8", lambda: True)
    monkeypatch.setattr(engine, "has_fast_bf16", lambda _: False)
    begin = SingleRow.begin

    def note(self, *states):
        opened.append(len(states[0][0][0][0]))
        begin(self, *states)

    monkeypatch.setattr(SingleRow, "begin", note)
    return opened


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", EVERY_KIND)
def test_a_text_is_that_of_torch(kind, temperature, in_float32):
    model = make(kind)
    texts = {}
    for precision in ("float32", "int8"):
        options = GenerationOptions(
            max_new_tokens=40, temperature=temperature, precision=precision, seed=3
        )
        logprobs = []
        tokens = generate(
            model, [PROMPT], options, **IDS,
            on_logprob=lambda _, value, to=logprobs: to.append(value),
        )  # fmt: skip
        texts[precision] = tokens, [round(value, 2) for value in logprobs]
    assert texts["int8"] == texts["float32"]
    assert len(in_float32) == 1


@pytest.mark.parametrize("family", ["llama", "neox"])
def test_the_cache_grows_and_the_operator_rotates(family, in_float32, monkeypatch):
    """Heads of 16 columns are rotated by the operator, heads of 8 columns before it."""
    monkeypatch.setattr(single_row, "_MIN_COLUMNS", 4)
    rotary = {"rotary_pct": 1.0} if family == "neox" else {"num_key_value_heads": 1}
    shape = shape_of(family, heads=2, initializer_range=0.2, **rotary)
    model = model_of(family, shape=shape)
    graph = RowGraph("f32")
    decoder_graph(model, graph)
    assert graph.frequencies is not None
    texts = [
        generate(
            model,
            [PROMPT],
            GenerationOptions(max_new_tokens=40, precision=precision),
            eos_id=[VOCAB],
            pad_id=PAD,
        )
        for precision in ("float32", "int8")
    ]
    assert texts[0] == texts[1]
    assert len(texts[0][0]) == 40
    assert in_float32 == [len(PROMPT) - 1]


@pytest.mark.parametrize("columns", [64, 40])
def test_blocks_are_rounded_to_the_nearest_integer(columns):
    matrix = np.random.default_rng(0).standard_normal((300, columns), np.float32)
    matrix[7] = 0.0
    integers, scales = round_blocks(matrix)
    assert integers.shape == (300, 2, 32)
    values = (integers.astype(np.float32) - 128) * scales[:, :, None]
    values = values.reshape(300, 64)
    assert np.all(values[:, columns:] == 0)
    error = np.abs(values[:, :columns] - matrix)
    assert np.all(error <= 0.501 * np.repeat(scales, 32, 1)[:, :columns])


@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen3", "t5"])
def test_rows_come_and_go(kind, in_float32):
    """A row that was alone gets company and is alone again; another one continues a prefix."""
    model = make(kind)
    orders = [
        Order(PROMPT, 40, GenerationOptions(), 0),
        Order([12, 5], 4, GenerationOptions(), 1),
        Order([*PROMPT, 11, 12], 36, GenerationOptions(), 2),
    ]
    texts = {}
    for name in ("torch", "program"):
        program = partial(SingleRow, model) if name == "program" else None
        rows = LiveRows(
            model, rows=2, columns=64, prefix_bytes=1 << 20, open_program=program, **IDS
        )
        answers = {0: [], 1: [], 2: []}
        for first, *others in ((orders[0], (5, orders[1])), (orders[2],)):
            rows.admit([first])
            n_steps = 0
            while rows.orders:
                for after, other in others:
                    if n_steps == after:
                        rows.admit([other])
                for new in rows.step():
                    answers[new.order.number].append(new.token)
                n_steps += 1
        texts[name] = answers
    assert texts["program"] == texts["torch"]
    assert len(texts["torch"][1]) <= 4
    # The row begins in the program, again after the other one ended, and then the last row.
    assert len(in_float32) == 3


@needs_int8
@pytest.mark.parametrize("kind", ["gpt2", "neox", "llama", "t5-v1.1"])
def test_int8_gives_nearly_the_same_logits(kind):
    model = make(kind)
    program = SingleRow(model)
    config = model.config
    ids = torch.tensor([PROMPT])
    with torch.inference_mode():
        if config.is_encoder_decoder:
            out = model(input_ids=ids, decoder_input_ids=ids, use_cache=True)
            caches = out.past_key_values
            source = [
                (la.keys[0], la.values[0]) for la in caches.cross_attention_cache.layers
            ]
            states = [
                (la.keys[0], la.values[0]) for la in caches.self_attention_cache.layers
            ]
        else:
            out = model(input_ids=ids, use_cache=True)
            states = [(la.keys[0], la.values[0]) for la in out.past_key_values.layers]
            source = ()
    program.begin([(k[:, :-1], v[:, :-1]) for k, v in states], source)
    logits = program.step(PROMPT[-1])
    expected = out.logits[:, -1]
    error = float((logits - expected).norm() / expected.norm())
    assert 0 < error < 0.05
    for new, expected in zip(program.states(), states, strict=True):
        for mine, theirs in zip(new, expected, strict=True):
            last = theirs[:, -1]
            assert float((mine[:, -1] - last).norm() / last.norm()) < 0.05


def test_what_the_program_does_not_support_is_refused(monkeypatch):
    options = GenerationOptions(max_new_tokens=40, precision="int8")
    monkeypatch.setattr(single_row, "has_exact_int8", lambda: True)
    model = make("llama")
    model.config.hidden_act = "mish"
    with pytest.raises(ConfigError, match=r"hidden_act=mish\. Use precision=auto"):
        generate(model, [PROMPT], options, **IDS)
    model = model_of("gpt2", shape=shape_of("gpt2", width=40, heads=2))
    with pytest.raises(ConfigError, match=r"20 columns, which is not a multiple of 8"):
        generate(model, [PROMPT], options, **IDS)
    monkeypatch.setattr(single_row, "has_exact_int8", lambda: False)
    with pytest.raises(ConfigError, match="no AVX512-VNNI"):
        generate(make("llama"), [PROMPT], options, **IDS)
