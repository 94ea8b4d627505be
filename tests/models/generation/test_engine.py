"""Generation: the ids of transformers' generate, whatever shares the batch."""

import random
from itertools import pairwise

import pytest
import torch
from tokenizers import Tokenizer

from tiny import EOS, PAD, VOCAB, model_of
from toque.errors import ConfigError
from toque.models.flops import parameter_counts
from toque.models.forward.packed import output_head
from toque.models.generation import kv_cache
from toque.models.generation.sampling import WORTHWHILE_STEPS, Int8Argmax, supports_int8
from toque.models.loading.pretrained import load_model
from written import generate

IDS = {"eos_id": EOS, "pad_id": PAD}


def prompts(n=7, seed=0):
    drawn = random.Random(seed)
    return [
        [drawn.randrange(2, VOCAB) for _ in range(drawn.randint(1, 12))]
        for _ in range(n)
    ]


def make_eager_to_end(model):
    """Raise the end token's logit, so that answers end at many different lengths."""
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    with torch.no_grad():
        if head.weight is embedding:
            head.weight = torch.nn.Parameter(embedding.clone())
        size = head.weight[2:].norm(dim=1).mean()
        head.weight[EOS] *= 2.2 * size / head.weight[EOS].norm()


def stock(model, prompt, max_new_tokens, **more):
    """One prompt alone through transformers, every step computed anew.

    Its own cache fails for a T5 whose decoder is deeper than its encoder.
    """
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        use_cache=False,
        pad_token_id=PAD,
        eos_token_id=EOS,
        **more,
    )[0].tolist()
    new = output[1:] if model.config.is_encoder_decoder else output[len(prompt) :]
    return new[: new.index(EOS)] if EOS in new else new


def test_greedy_ids_are_those_of_transformers(kind, tiny):
    model = tiny(kind)
    make_eager_to_end(model)
    expected = [stock(model, prompt, 16) for prompt in prompts()]
    lengths = {len(answer) for answer in expected}
    assert len(lengths) > 2, "the test model should stop at different lengths"
    assert min(lengths) < 16
    for rows in (1, 4, 16):
        got = generate(model, prompts(), max_new_tokens=16, batch_rows=rows, **IDS)
        assert got == expected
    even = [(prompt + [7] * 12)[:12] for prompt in prompts(4)]  # they go without a mask
    answers = [stock(model, prompt, 8) for prompt in even]
    assert generate(model, even, max_new_tokens=8, **IDS) == answers


@pytest.mark.parametrize("kind", ["t5", "neox", "llama"])
def test_buffers_grow_and_shift_under_rows_that_begin_late(kind, tiny):
    """More columns than a buffer begins with, and rows whose starts lie far apart."""
    model = tiny(kind)
    make_eager_to_end(model)
    given = prompts(9, seed=4)
    answers = generate(model, given, max_new_tokens=90, batch_rows=3, **IDS)
    lengths = {len(answer) for answer in answers}
    assert max(lengths) > 50
    assert min(lengths) < 30
    for number in (0, 4, 8):
        room = 90 if kind == "t5" else 64 + 1 - len(given[number])
        assert answers[number] == stock(model, given[number], room)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("kind", ["t5", "gpt2", "llama"])
def test_an_adapter_writes_as_its_merged_model(kind, tiny):
    peft = pytest.importorskip("peft")
    targets = {
        "t5": ["q", "v", "wo"],
        "gpt2": ["c_attn", "c_fc"],
        "llama": ["q_proj", "up_proj"],
    }
    drawn = {"init_lora_weights": False, "fan_in_fan_out": kind == "gpt2"}
    settings = peft.LoraConfig(r=4, target_modules=targets[kind], **drawn)
    plain = generate(tiny(kind), prompts(), max_new_tokens=12, **IDS)
    adapted = peft.get_peft_model(tiny(kind), settings).eval()
    written = generate(adapted, prompts(), max_new_tokens=12, **IDS)
    assert written != plain
    merged = adapted.merge_and_unload()
    assert written == [stock(merged, prompt, 12) for prompt in prompts()]


@pytest.mark.parametrize("kind", ["t5", "gpt2", "llama"])
@pytest.mark.parametrize(
    "settings", [{"temperature": 1.0}, {"top_k": 9, "top_p": 0.8, "temperature": 0.7}]
)
def test_a_draw_depends_on_seed_prompt_and_position_alone(kind, settings, tiny):
    model = tiny(kind)
    make_eager_to_end(model)
    given = prompts()

    def draw(seed=0, rows=16):
        how = {"seed": seed, "batch_rows": rows, **settings}
        return generate(model, given, max_new_tokens=12, **how, **IDS)

    state = torch.get_rng_state()
    first = draw()
    assert draw() == draw(rows=1) == draw(rows=4) == first
    assert draw(seed=1) != first
    assert torch.equal(torch.get_rng_state(), state)
    # The neighbours change, the first prompt's text does not.
    given = [given[0], [9, 9, 9]]
    assert draw()[0] == first[0]


def twice(answer, n):
    """The runs of n tokens that an answer holds more than once."""
    runs = [tuple(answer[i : i + n]) for i in range(len(answer) - n + 1)]
    return {run for run in runs if runs.count(run) > 1}


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("family", ["t5", "gpt2"])
def test_no_answer_repeats_a_run_whatever_shares_the_batch(family, n):
    """With a vocabulary whose largest logits are looked for by int8 bounds, where no run is due."""
    model = model_of(family, vocab=5000, seed=3)
    given = prompts(9, seed=4)
    how = {"max_new_tokens": WORTHWHILE_STEPS, **IDS}
    plain = generate(model, given, **how)
    assert sum(bool(twice(answer, n)) for answer in plain) > 3, (
        "these should write runs twice"
    )
    expected = [
        generate(model, [one], no_repeat_ngram_size=n, **how)[0] for one in given
    ]
    for rows in (3, 9):
        found = generate(model, given, no_repeat_ngram_size=n, batch_rows=rows, **how)
        assert found == expected
    assert not any(twice(answer, n) for answer in expected)
    for before, after in zip(plain, expected, strict=True):
        until = next(
            (i for i in range(len(before)) if twice(before[: i + 1], n)), len(before)
        )
        assert after[:until] == before[:until]
    assert generate(model, given, no_repeat_ngram_size=0, **how) == plain
    if family == "t5":  # of a decoder's answers transformers counts the prompt a part
        assert expected == [
            stock(model, one, WORTHWHILE_STEPS, no_repeat_ngram_size=n) for one in given
        ]


def test_a_run_of_the_prompt_may_be_written_once(tiny):
    model = tiny("gpt2")
    first = generate(model, [[5, 6]], max_new_tokens=8, **IDS)[0]
    asked = [[5, 6, *first, 5, 6]]
    answer = generate(model, asked, max_new_tokens=30, no_repeat_ngram_size=2, **IDS)[0]
    assert {*pairwise(asked[0])} & {*pairwise(answer)}
    assert not twice(answer, 2)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("kind", ["t5", "gpt2"])
def test_drawn_answers_repeat_no_run_either(kind, n, tiny):
    how = {"max_new_tokens": 20, "temperature": 0.3, "top_p": 0.9, "seed": 2, **IDS}
    plain = generate(tiny(kind), prompts(), **how)
    assert any(twice(answer, n) for answer in plain)
    assert not any(
        twice(answer, n)
        for answer in generate(tiny(kind), prompts(), no_repeat_ngram_size=n, **how)
    )


@pytest.mark.parametrize("kind", ["t5", "gpt2"])
def test_the_log_probability_of_each_token_is_told_and_changes_none(kind, tiny):
    model = tiny(kind)
    make_eager_to_end(model)
    told = {}
    how = {"max_new_tokens": 12, "temperature": 1.5, "top_p": 0.9, **IDS}
    answers = generate(
        model,
        prompts(),
        on_logprob=lambda n, log: told.setdefault(n, []).append(log),
        **how,
    )
    assert answers == generate(model, prompts(), **how)
    assert len({len(answer) for answer in answers}) > 2
    for number, (prompt, answer) in enumerate(zip(prompts(), answers, strict=True)):
        ended = answer if len(answer) == 12 else [*answer, EOS]
        with torch.inference_mode():
            if kind == "t5":
                read = {
                    "input_ids": [prompt],
                    "decoder_input_ids": [[PAD, *ended[:-1]]],
                }
            else:
                read = {"input_ids": [[*prompt, *ended[:-1]]]}
            logits = model(
                **{name: torch.tensor(ids) for name, ids in read.items()}
            ).logits
            logs = logits[0, -len(ended) :].log_softmax(-1)
        known = logs[range(len(ended)), ended].tolist()
        assert told[number] == pytest.approx(known, abs=1e-4)


def test_a_gpt2_answer_ends_where_its_positions_do(tiny):
    model = tiny("gpt2")  # 64 positions
    near, full = [5] * 60, [6] * 64
    answers = generate(model, [near, full, [7]], max_new_tokens=10, **IDS)
    assert [len(answer) for answer in answers] == [5, 1, 10]
    with pytest.raises(
        ConfigError,
        match=r"Prompt 2 has 65 tokens, but this model's context length is 64",
    ):
        generate(model, [near, [5] * 65], max_new_tokens=2, **IDS)
    with pytest.raises(ConfigError, match=r"Prompt 3 has no tokens"):
        generate(model, [near, near, []], max_new_tokens=2, **IDS)


def test_modes_are_restored_and_dropout_is_off(tiny):
    model = tiny("t5").train()
    model.encoder.eval()
    first = generate(model, prompts(), max_new_tokens=8, **IDS)
    assert model.training
    assert model.decoder.block[0].training
    assert not model.encoder.training
    assert generate(model, prompts(), max_new_tokens=8, **IDS) == first
    with pytest.raises(ConfigError, match="no tokens"):
        generate(model, [[]], max_new_tokens=8, **IDS)
    rows = model.config.vocab_size
    with pytest.raises(
        ConfigError,
        match=f"token id {rows}, but the model's last token id is {rows - 1}",
    ):
        generate(model, [[5], [5, rows]], max_new_tokens=8, **IDS)


def test_progress_counts_texts_and_tokens_to_all(tiny):
    model = tiny("t5")
    make_eager_to_end(model)
    seen = []
    told = {"on_progress": lambda *progress: seen.append(progress)}
    generate(model, prompts(), max_new_tokens=20, batch_rows=4, **told, **IDS)
    assert seen[0] == (0, 7, 0.0)
    assert seen[-1] == (7, 7, 1.0)
    assert {whole for _, whole, _ in seen} == {7}
    shares = [share for _, _, share in seen]
    assert shares == sorted(set(shares))  # told of every token, not of every text alone
    assert len(seen) > 1 + len({done for done, _, _ in seen})
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)


def test_wrong_settings_are_refused_and_no_prompts_are_none(tiny):
    model = tiny("gpt2")
    assert generate(model, [], max_new_tokens=4, **IDS) == []
    for wrong, said in (
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"max_new_tokens": 1, "batch_rows": 0}, "batch_rows is 0"),
        ({}, "max_new_tokens is missing"),
        ({"max_new_tokens": 1, "temperature": -1.0}, "temperature is -1"),
        ({"max_new_tokens": 1, "top_p": 0.0}, "top_p must be above 0"),
        ({"max_new_tokens": 1, "top_k": -1}, "top_k is -1; it must be at least 0"),
        (
            {"max_new_tokens": 1, "no_repeat_ngram_size": -2},
            "no_repeat_ngram_size is -2; it must be at least 0",
        ),
    ):
        with pytest.raises(ConfigError, match=said):
            generate(model, [[5]], **wrong, **IDS)


_SAMPLED = {"temperature": 1.0, "seed": 3}
_SLOW_PAIRS = [(kind, {}) for kind in ("gpt2", "llama")]
_SLOW_PAIRS += [(kind, _SAMPLED) for kind in ("t5", "llama")]
_SLOW_PAIRS += [(kind, {"no_repeat_ngram_size": 2}) for kind in ("t5", "gpt2")]


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("t5", {}), ("gpt2", _SAMPLED), ("llama", {"no_repeat_ngram_size": 2}),
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in _SLOW_PAIRS),
    ],
)  # fmt: skip
def test_where_memory_runs_out_fewer_rows_write_the_same(kind, settings, tiny):
    """Its embedding takes 3 rows at most, from the 3rd look on: in the middle of answers."""
    model = tiny(kind)
    make_eager_to_end(model)
    given = prompts(9, seed=4)
    expected = generate(
        model, given, max_new_tokens=40, batch_rows=8, **settings, **IDS
    )
    looks, most = [], 3

    def refuse(_module, inputs):
        looks.append(len(inputs[0]))
        if len(looks) > 2 and len(inputs[0]) > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    embedding = (
        model.decoder.embed_tokens if kind == "t5" else model.get_input_embeddings()
    )
    handle = embedding.register_forward_pre_hook(refuse)
    told, said = [[] for _ in given], []
    how = {
        "on_token": lambda i, token: told[i].append(token),
        "on_notice": said.append,
        **settings,
    }
    assert (
        generate(model, given, max_new_tokens=40, batch_rows=8, **how, **IDS)
        == expected
    )
    assert told == [[*answer, None] for answer in expected]
    assert len(said) == 2  # 8 -> 4 -> 2
    assert "Memory ran out with 8 texts at a time" in said[0]
    assert "2 GiB" in said[1]
    most = 0
    with pytest.raises(
        ConfigError, match=r"One text at a time does not fit into memory.*2 GiB"
    ):
        generate(model, given, max_new_tokens=8, **IDS)
    handle.remove()


@pytest.mark.slow
def test_a_real_model_tells_the_story_transformers_tells(shared):
    model = load_model(str(shared / "models" / "stories15m"), family="llama")
    assert 15_100_000 < parameter_counts(model).total < 15_300_000
    tokenizer = Tokenizer.from_file(
        str(shared / "models" / "stories15m" / "tokenizer.json")
    )
    bos, eos = model.config.bos_token_id, model.config.eos_token_id
    texts = ["Once upon a time", "Tom and his dog went to", "The cake"]
    given = [
        [bos, *tokenizer.encode(text, add_special_tokens=False).ids] for text in texts
    ]
    answers = generate(model, given, max_new_tokens=120, eos_id=eos, pad_id=eos)
    for prompt, answer in zip(given, answers, strict=True):
        output = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=120,
            do_sample=False,
            pad_token_id=eos,
        )[0, len(prompt) :].tolist()
        assert answer == (output[: output.index(eos)] if eos in output else output)
    assert "there was a" in tokenizer.decode(given[0] + answers[0])


def test_rows_of_unlike_length_attend_in_parts(kind, tiny, monkeypatch):
    monkeypatch.setattr(kv_cache, "MAX_WASTED_COLUMNS", 2)
    model = tiny(kind)
    make_eager_to_end(model)
    assert len(list(kv_cache.group_by_length([12, 12, 3, 1], max_wasted=2))) > 1
    expected = [stock(model, prompt, 16) for prompt in prompts()]
    for rows in (3, 7):
        assert (
            generate(model, prompts(), max_new_tokens=16, batch_rows=rows, **IDS)
            == expected
        )


@pytest.mark.parametrize("family", ["t5", "gpt2"])
@pytest.mark.parametrize(
    ("new", "pays"), [(WORTHWHILE_STEPS, True), (WORTHWHILE_STEPS - 1, False)]
)
def test_a_large_vocabulary_gives_the_same_ids(family, monkeypatch, new, pays):
    model = model_of(family, vocab=5000, seed=3)
    screened = []
    argmax = Int8Argmax.__call__

    def counted(self, hidden):
        screened.append(len(hidden))
        return argmax(self, hidden)

    monkeypatch.setattr(Int8Argmax, "__call__", counted)
    expected = [stock(model, prompt, new) for prompt in prompts(5)]
    assert generate(model, prompts(5), max_new_tokens=new, **IDS) == expected
    weight, bias = output_head(model)
    assert bool(screened) == (pays and supports_int8(weight, bias))


@pytest.mark.parametrize("kind", ["t5", "llama"])
def test_answers_end_at_each_of_several_tokens(kind, tiny):
    model = tiny(kind)
    free = generate(model, prompts(), max_new_tokens=16, eos_id=(), pad_id=PAD)
    ends = {free[0][3], free[1][5], free[2][9]}
    expected = [
        answer[: [*(t in ends for t in answer), True].index(True)] for answer in free
    ]
    assert len({len(answer) for answer in expected}) > 1
    for rows in (1, 16):
        how = {"max_new_tokens": 16, "batch_rows": rows, "pad_id": PAD}
        assert generate(model, prompts(), eos_id=ends, **how) == expected
