"""The protocol as its clients speak it: the `openai` package, and requests by hand."""

import copy
import json
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from statistics import fmean

import pytest
import torch

from serving.alone import alone, client_of, metric, sent
from serving.conftest import build, served_as
from toque.data.tokenizer.codec import TextStream
from toque.errors import DataError
from toque.evaluation import best_of
from toque.models.generation import engine
from toque.models.generation.options import GenerationOptions
from toque.models.loading.provenance import RECIPE_RUN_TOKENS, Provenance
from toque.serving.batcher import ServedModels

openai = pytest.importorskip("openai")
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def address(gpt2, serving):
    with serving(ServedModels([gpt2]), limits={"body_bytes": 5000}) as where:
        yield where


@pytest.fixture
def client(address):
    with client_of(address) as made:
        yield made


def refusal(address, path, fields):
    status, _, body = sent(address, "POST", path, json.dumps(fields), JSON)
    return status, json.loads(body)["error"]


def expected(gpt2, prompt, most=24):
    return gpt2.codec.decode(alone(gpt2, gpt2.prompt_ids(prompt), most=most))


def test_models_are_listed_and_looked_up(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").max_model_len == 96
    with pytest.raises(openai.NotFoundError, match="This server has: tiny") as error:
        client.models.retrieve("other")
    assert error.value.code == "model_not_found"


def test_a_completion_is_what_generate_writes(client, gpt2):
    found = client.completions.create(model="tiny", prompt="lentil soup", temperature=0)
    (choice,), ids = found.choices, alone(gpt2, gpt2.prompt_ids("lentil soup"))
    assert choice.text == expected(gpt2, "lentil soup")
    assert choice.finish_reason == ("length" if len(ids) == 24 else "stop")
    assert found.usage.completion_tokens == len(ids)
    assert found.usage.prompt_tokens == len(gpt2.prompt_ids("lentil soup"))


def test_several_prompts_of_text_and_of_ids(client, gpt2):
    texts = ["rice", "butter cake"]
    for prompt in (texts, [gpt2.prompt_ids(text) for text in texts]):
        found = client.completions.create(
            model="tiny", prompt=prompt, temperature=0, n=2
        )
        written = [choice.text for choice in found.choices]
        assert written == [expected(gpt2, text) for text in texts for _ in range(2)]
        assert [choice.index for choice in found.choices] == [0, 1, 2, 3]


def test_a_chat_is_asked_in_the_models_form(client, gpt2):
    said = [
        {"role": "system", "content": "You are a cook."},
        {"role": "user", "content": "butter cake"},
        {"role": "assistant", "content": "Stir it."},
        {"role": "user", "content": [{"type": "text", "text": "rice"}]},
    ]
    found = client.chat.completions.create(model="tiny", messages=said, temperature=0)
    assert found.choices[0].message.content == expected(gpt2, "Recipe for rice")
    assert found.choices[0].message.role == "assistant"


@pytest.mark.parametrize("kind", ["chat", "text"])
def test_a_stream_is_the_whole_in_pieces(kind, client, gpt2):
    options = {"model": "tiny", "temperature": 0, "stream": True, "n": 2}
    options["stream_options"] = {"include_usage": True}
    texts, ends, usage = ["", ""], [None, None], None
    if kind == "chat":
        said = [{"role": "user", "content": "rice"}]
        events = client.chat.completions.create(messages=said, **options)
    else:
        events = client.completions.create(prompt="Recipe for rice", **options)
    n_events = 0
    for event in events:
        n_events += 1
        usage = event.usage
        for choice in event.choices:
            more = choice.delta.content if kind == "chat" else choice.text
            texts[choice.index] += more or ""
            ends[choice.index] = choice.finish_reason or ends[choice.index]
    ids = alone(gpt2, gpt2.prompt_ids("Recipe for rice"))
    assert texts == [gpt2.codec.decode(ids)] * 2
    assert ends == ["length" if len(ids) == 24 else "stop"] * 2
    assert usage.completion_tokens == 2 * len(ids)
    assert n_events > 2


def test_a_stream_that_breaks_off_says_so(gpt2, serving):
    codec = copy.copy(gpt2.codec)
    n_left = iter(range(12))  # beyond the first token, which comes alone

    def decode(ids):
        if next(n_left, None) is None:
            raise DataError("The tokenizer cannot be used.")
        return gpt2.codec.decode(ids)

    codec.decode = decode
    said = [{"role": "user", "content": "rice"}]
    fields = {"model": "tiny", "messages": said, "temperature": 0, "stream": True}
    with serving(ServedModels([replace(gpt2, codec=codec)])) as address:
        status, _, body = sent(
            address, "POST", "/v1/chat/completions", json.dumps(fields), JSON
        )
    *events, done = body.decode().split("\n\n")[:-1]
    assert (status, done) == (200, "data: [DONE]")
    *pieces, last = [json.loads(event.removeprefix("data: ")) for event in events]
    assert all(piece["choices"] for piece in pieces)
    assert pieces
    assert last["error"]["code"] == "internal_error"


def test_a_failure_that_nobody_foresaw_is_in_the_servers_own_log(gpt2, serving, caplog):
    def broken(_):
        raise RuntimeError("the cupboard is bare")

    with serving(ServedModels([replace(gpt2, to_prompt=broken)])) as address:
        status, error = refusal(address, CHAT, {"model": "tiny", "messages": USER})
    assert (status, error["code"]) == (500, "internal_error")
    assert "the server's log" in error["message"]
    (said,) = [one for one in caplog.records if one.name == "toque.serving"]
    assert said.getMessage() == f"answering {CHAT!r} failed"
    assert "the cupboard is bare" in str(said.exc_info[1])


def test_seeds_repeat_draws_and_texts_of_one_request_differ(client):
    def draw(seed):
        found = client.completions.create(model="tiny", prompt="rice", n=3, seed=seed)
        return [choice.text for choice in found.choices]

    assert len(set(draw(1))) > 1
    assert draw(1) == draw(1) != draw(2)
    assert draw(None) != draw(None)


@pytest.mark.parametrize(
    ("setting", "value"),
    [("temperature", 0.01), ("top_p", 0.01), ("extra_body", {"top_k": 1})],
)
def test_settings_of_draws_have_their_effect(setting, value, client, gpt2):
    greedy = expected(gpt2, "rice")
    free = (
        client.completions.create(model="tiny", prompt="rice", seed=3).choices[0].text
    )
    found = client.completions.create(
        model="tiny", prompt="rice", seed=3, **{setting: value}
    )
    assert found.choices[0].text == greedy != free


@pytest.mark.parametrize("form", ["recipes", "pairs"])
def test_texts_of_recipes_repeat_no_run_unless_asked(form, codecs, serving):
    """A model whose likeliest text is one token over and over."""
    record = Provenance(form=form, max_new_tokens=60)
    model = served_as("tiny", codecs["t5"], "t5")
    circling = replace(model, record=record, model=build(codecs["t5"], "t5"))
    with serving(ServedModels([circling])) as where, client_of(where) as client:

        def write(**more):
            how = {
                "model": "tiny",
                "prompt": "rice",
                "temperature": 0,
                "extra_body": more,
            }
            return client.completions.create(**how).choices[0].text

        free, ruled = (
            write(no_repeat_ngram_size=0),
            write(no_repeat_ngram_size=RECIPE_RUN_TOKENS),
        )
        assert free != ruled
        assert write() == (ruled if form == "recipes" else free)
        with pytest.raises(openai.BadRequestError, match="no_repeat_ngram_size"):
            write(no_repeat_ngram_size=-1)


@pytest.mark.parametrize("by", [None, "likelihood", "form"])
@pytest.mark.parametrize("kind", ["text", "chat"])
def test_the_best_of_several_is_answered(kind, by, gpt2, serving, monkeypatch):
    """The texts are those of `n` with the same seed; a scripted score stands for a recipe's."""

    def length(_prompt, text, **_):
        return {"form": len(text)}

    monkeypatch.setattr(best_of, "text_metrics", length)
    asked = "Generate recipe for: rice"
    how = {"model": "tiny", "seed": 5, "temperature": 1.5, "stop": ["soup"]}
    with (
        serving(ServedModels([replace(gpt2, to_prompt=str)])) as where,
        client_of(where) as client,
    ):
        if kind == "text":
            how |= {"prompt": [asked, "Generate recipe for: cake"], "logprobs": 0}
            create, said = client.completions.create, lambda choice: choice.text
        else:
            how |= {"messages": [{"role": "user", "content": asked}], "logprobs": True}
            create, said = (
                client.chat.completions.create,
                lambda choice: choice.message.content,
            )
        every = create(**how, n=6)
        how.pop("logprobs")
        found = create(**how, n=2, extra_body={"best_of": 6, "best_by": by})
    assert found.usage == every.usage
    assert [choice.index for choice in found.choices] == [
        *range(len(every.choices) // 3)
    ]
    for i in range(len(every.choices) // 6):
        own, best = every.choices[6 * i :][:6], found.choices[2 * i :][:2]
        scores = sorted((len(said(choice)) for choice in own), reverse=True)
        if by != "form":
            assert {choice.best_of["by"] for choice in best} == {"likelihood"}
            continue
        assert scores[0] > scores[-1]
        assert [len(said(choice)) for choice in best] == scores[:2]
        assert best[0].best_of["mean"] == pytest.approx(fmean(scores))
        assert best[0].logprobs is None


def test_the_likeliest_is_that_of_generate(client, gpt2):
    """By the mean over tokens, the end token among them."""
    ids, told = gpt2.prompt_ids("lentil soup"), {}
    options = GenerationOptions(temperature=1.5, seed=4, max_new_tokens=24)
    texts = engine.generate(
        gpt2.model, [ids] * 6, options, eos_id=gpt2.codec.eos_id, pad_id=gpt2.codec.pad_id,
        on_logprob=lambda number, log: told.setdefault(number, []).append(log),
    )  # fmt: skip
    means = [fmean(told[number]) for number in range(6)]
    found = client.completions.create(
        model="tiny", prompt="lentil soup", temperature=1.5, seed=4, best_of=6
    )
    (choice,) = found.choices
    assert choice.text == gpt2.codec.decode(texts[means.index(max(means))])
    assert choice.best_of["score"] == pytest.approx(max(means), abs=1e-5)
    assert choice.best_of["mean"] == pytest.approx(fmean(means), abs=1e-5)
    assert found.usage.completion_tokens == sum(map(len, texts))


def test_max_tokens_and_stop_end_a_text(client, gpt2, address):
    whole = expected(gpt2, "rice")
    short = client.completions.create(
        model="tiny", prompt="rice", temperature=0, max_tokens=3
    )
    assert short.choices[0].text == expected(gpt2, "rice", most=3)
    assert short.choices[0].finish_reason == "length"
    asked = {"model": "tiny", "prompt": "rice", "temperature": 0}
    for stop in (whole[4:7], ["never there", whole[4:7]]):
        for stream in (False, True):
            found = client.completions.create(**asked, stop=stop, stream=stream)
            choices = [e.choices[0] for e in found] if stream else found.choices
            assert (
                "".join(choice.text for choice in choices)
                == whole[: whole.index(whole[4:7])]
            )
            assert choices[-1].finish_reason == "stop"
    assert metric(address, "toque_live_texts") == 0  # their places are free


@pytest.mark.parametrize("most", [1, 5])
@pytest.mark.parametrize("temperature", [0, 1.5])
def test_the_chosen_token_is_among_the_likeliest_as_it_stands_in_the_text(
    served, serving, most, temperature
):
    """SentencePiece writes a word alone without the space before it; drawn ones are often rare."""
    asked = {"model": "tiny", "temperature": temperature, "seed": 4, "logprobs": most}
    with serving(ServedModels([served])) as where, client_of(where) as client:
        choice = client.completions.create(prompt="lentil soup", **asked).choices[0]
        logs = choice.logprobs
        asked["logprobs"] = None
        plain = client.completions.create(prompt="lentil soup", **asked).choices[0]
        assert "".join(logs.tokens) == choice.text == plain.text
        assert logs.text_offset[1] == len(logs.tokens[0])
        assert " " in choice.text
        for token, log, best in zip(
            logs.tokens, logs.token_logprobs, logs.top_logprobs, strict=True
        ):
            assert best[token] == log
            assert len(best) <= most + 1
        asked |= {"logprobs": True, "top_logprobs": most}
        said = [{"role": "user", "content": "rice"}]
        found = client.chat.completions.create(messages=said, **asked).choices[0]
        tokens = found.logprobs.content
        content = found.message.content
        assert "".join(one.token for one in tokens) == content
        if "\ufffd" not in content:
            assert b"".join(bytes(one.bytes) for one in tokens) == content.encode()
        for one in tokens:
            pairs = [(other.token, other.logprob) for other in one.top_logprobs]
            assert (one.token, one.logprob) in pairs
            assert most <= len(pairs) <= most + 1


def test_the_texts_of_tokens_that_were_not_chosen_are_those_of_their_place(served):
    codec, rng = served.codec, random.Random(3)
    stream, ids = TextStream(codec), []
    for _ in range(300):
        token, other = rng.randrange(codec.vocab_size), rng.randrange(codec.vocab_size)
        if token in codec.silent or other in codec.silent:
            continue
        before = codec.decode(ids).rstrip("\ufffd")
        assert before + stream.decode_next(other) == codec.decode([*ids, other])
        ids.append(token)
        stream.feed(token)
    assert stream.decode_next(codec.eos_id) == codec.piece(codec.eos_id)


def schema_of(schema):
    """`response_format` as OpenAI's clients send it."""
    inner = {"name": "order", "strict": True} | (
        {} if schema is None else {"schema": schema}
    )
    return {"type": "json_schema", "json_schema": inner}


@pytest.mark.parametrize("most", [0, 1, 24])
def test_an_echo_tells_the_prompts_own_tokens(client, gpt2, most):
    """As lm-eval asks: several prompts of ids, of which each token's probability is told."""
    prompts = [gpt2.prompt_ids("lentil soup with rice"), gpt2.prompt_ids("a")]
    settings = {"model": "tiny", "temperature": 0, "max_tokens": most, "echo": True}
    found = client.completions.create(
        prompt=prompts, logprobs=2, stop=["soup"], **settings
    )
    bare = client.completions.create(prompt=prompts, stop=["soup"], **settings)
    assert found.usage.prompt_tokens == sum(map(len, prompts))
    answers = [alone(gpt2, prompt, most=most) if most else [] for prompt in prompts]
    # Tokens are those of the texts: the end token, which is told, is none of them, as without echo.
    assert found.usage.completion_tokens == sum(map(len, answers))
    assert bare.usage.completion_tokens == sum(map(len, answers))
    every = zip(found.choices, bare.choices, prompts, answers, strict=True)
    for choice, other, prompt, written in every:
        read = gpt2.codec.decode(prompt)
        assert choice.text == other.text
        assert choice.text.startswith(read)
        assert choice.finish_reason == ("stop" if 0 < len(written) < most else "length")
        logs, n = choice.logprobs, len(prompt)
        ended = choice.finish_reason == "stop"
        assert len(logs.tokens) == n + len(written) + ended
        assert "".join(logs.tokens[:n]) == read
        with torch.inference_mode():
            ids = torch.tensor([[*prompt, *written]])
            known = gpt2.model(ids).logits[0].log_softmax(-1)
        assert logs.token_logprobs[0] is logs.top_logprobs[0] is None
        for at in range(1, n + len(written)):
            assert logs.token_logprobs[at] == pytest.approx(
                known[at - 1, ids[0, at]].item(), abs=1e-4
            )
            assert max(logs.top_logprobs[at].values()) == pytest.approx(
                known[at - 1].max().item(), abs=1e-4
            )
    events = client.completions.create(
        prompt=prompts, stream=True, stop=["soup"], **settings
    )
    streamed = {0: "", 1: ""}
    for event in events:
        for choice in event.choices:
            streamed[choice.index] += choice.text
    assert list(streamed.values()) == [choice.text for choice in bare.choices]


def test_an_encoder_decoder_echoes_nothing(codecs, serving):
    asked = {"model": "tiny", "prompt": "rice", "echo": True}
    with serving(ServedModels([served_as("tiny", codecs["t5"], "t5")])) as where:
        status, error = refusal(where, TEXT, asked)
    assert (status, error["param"]) == (400, "echo")


CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "rice"}]
WRONG = {
    "no model": (TEXT, {"prompt": "rice"}, 400, "model"),
    "unknown model": (TEXT, {"model": "gpt-9", "prompt": "rice"}, 404, "model"),
    "no prompt": (TEXT, {"model": "tiny"}, 400, "prompt"),
    "a number as prompt": (TEXT, {"model": "tiny", "prompt": 7}, 400, "prompt"),
    "an empty list": (TEXT, {"model": "tiny", "prompt": []}, 400, "prompt"),
    "ids of no token": (TEXT, {"model": "tiny", "prompt": [1, 10**9]}, 400, "prompt"),
    "negative ids": (TEXT, {"model": "tiny", "prompt": [-1]}, 400, "prompt"),
    "too long": (TEXT, {"model": "tiny", "prompt": "rice " * 300}, 400, "prompt"),
    "temperature": (TEXT, {"model": "tiny", "prompt": "a", "temperature": -1}, 400, "temperature"),
    "a word": (TEXT, {"model": "tiny", "prompt": "a", "temperature": "hot"}, 400, "temperature"),
    "top_p": (TEXT, {"model": "tiny", "prompt": "a", "top_p": 0}, 400, "top_p"),
    "n": (TEXT, {"model": "tiny", "prompt": "a", "n": 0}, 400, "n"),
    "too many": (TEXT, {"model": "tiny", "prompt": "a", "n": 1000}, 400, "n"),
    "true is no number": (TEXT, {"model": "tiny", "prompt": "a", "n": True}, 400, "n"),
    "max_tokens": (TEXT, {"model": "tiny", "prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
    "seed": (TEXT, {"model": "tiny", "prompt": "a", "seed": 10**30}, 400, "seed"),
    "empty stop": (TEXT, {"model": "tiny", "prompt": "a", "stop": ""}, 400, "stop"),
    "five stops": (TEXT, {"model": "tiny", "prompt": "a", "stop": list("abcde")}, 400, "stop"),
    "unknown field": (TEXT, {"model": "tiny", "prompt": "a", "colour": 1}, 400, "colour"),
    "cannot": (TEXT, {"model": "tiny", "prompt": "a", "suffix": "b"}, 400, "suffix"),
    "a greedy choice": (
        TEXT, {"model": "tiny", "prompt": "a", "best_of": 3, "temperature": 0}, 400, "best_of",
    ),
    "a streamed choice": (
        TEXT, {"model": "tiny", "prompt": "a", "best_of": 3, "stream": True}, 400, "best_of",
    ),
    "a choice of echoes": (
        TEXT, {"model": "tiny", "prompt": "a", "best_of": 3, "echo": True}, 400, "best_of",
    ),
    "fewer than n": (TEXT, {"model": "tiny", "prompt": "a", "best_of": 3, "n": 4}, 400, "best_of"),
    "too many to choose": (
        TEXT, {"model": "tiny", "prompt": ["a", "b"], "best_of": 33}, 400, "best_of",
    ),
    "no score": (
        TEXT, {"model": "tiny", "prompt": "a", "best_of": 3, "best_by": "taste"}, 400, "best_by",
    ),
    "a score of one": (TEXT, {"model": "tiny", "prompt": "a", "best_by": "form"}, 400, "best_by"),
    "a recipe's score": (
        CHAT, {"model": "tiny", "messages": USER, "best_of": 3, "best_by": "form"}, 400, "best_by",
    ),
    "a tier": (
        CHAT, {"model": "tiny", "messages": USER, "service_tier": "flex"}, 400, "service_tier",
    ),
    "store": (CHAT, {"model": "tiny", "messages": USER, "store": True}, 400, "store"),
    "a form": (
        CHAT, {"model": "tiny", "messages": USER, "response_format": {"type": "yaml"}}, 400,
        "response_format",
    ),
    "a schema's name": (
        TEXT, {"model": "tiny", "prompt": "a", "response_format": schema_of(None)}, 400,
        "response_format",
    ),
    "a schema": (
        CHAT, {"model": "tiny", "messages": USER, "response_format": schema_of({"not": {}})}, 400,
        "response_format",
    ),
    "no message": (CHAT, {"model": "tiny", "messages": []}, 400, "messages"),
    "no user": (
        CHAT, {"model": "tiny", "messages": [{"role": "system", "content": "a"}]}, 400, "messages",
    ),
    "a role": (
        CHAT, {"model": "tiny", "messages": [{"role": "cook", "content": "a"}]}, 400, "messages",
    ),
    "tools": (CHAT, {"model": "tiny", "messages": USER, "tools": [{"type": "x"}]}, 400, "tools"),
    "penalty": (
        CHAT, {"model": "tiny", "messages": USER, "presence_penalty": 3}, 400, "presence_penalty",
    ),
    "bias of an unknown token": (
        CHAT, {"model": "tiny", "messages": USER, "logit_bias": {"99999": 1}}, 400, "logit_bias",
    ),
    "bias of no token": (
        CHAT, {"model": "tiny", "messages": USER, "logit_bias": {"a": 1}}, 400, "logit_bias",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_requests_get_the_protocols_own_error(case, address):
    path, fields, status, param = WRONG[case]
    found, error = refusal(address, path, fields)
    assert (found, error["param"]) == (status, param)
    assert error["message"].endswith(".")
    assert error["type"] == "invalid_request_error"
    if case == "too long":
        assert error["code"] == "context_length_exceeded"
        assert "maximum context length is 96 tokens" in error["message"]


def test_penalties_change_the_text_as_in_the_engine(client, gpt2):
    penalties = {"presence_penalty": 1.5, "frequency_penalty": 0.5}
    more = {"repetition_penalty": 1.2, "min_p": 0.1}
    found = client.completions.create(
        model="tiny", prompt="rice", temperature=0, max_tokens=20, logit_bias={"9": -50},
        extra_body=more, **penalties,
    )  # fmt: skip
    options = GenerationOptions(**penalties, **more, logit_bias={9: -50.0})
    ids = alone(gpt2, gpt2.prompt_ids("rice"), options, most=20)
    text = gpt2.codec.decode(ids)
    assert found.choices[0].text == text != expected(gpt2, "rice", most=20)


def test_fields_that_ask_for_nothing_are_accepted(client, gpt2):
    found = client.completions.create(
        model="tiny", prompt="rice", temperature=0, presence_penalty=0, frequency_penalty=0.0,
        logit_bias={}, user="me", best_of=None, echo=False,
    )  # fmt: skip
    assert found.choices[0].text == expected(gpt2, "rice")
    said = client.chat.completions.create(
        model="tiny", messages=USER, temperature=0, n=1, user="me", metadata={"a": "b"},
        frequency_penalty=0, presence_penalty=0, store=False, service_tier="default",
        parallel_tool_calls=True, reasoning_effort="low", response_format={"type": "text"},
    )  # fmt: skip
    assert said.choices[0].message.content == expected(gpt2, "Recipe for rice")


ORDER = {
    "type": "object",
    "properties": {
        "dish": {"enum": ["soup", "cake"]},
        "persons": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["dish", "persons"],
    "additionalProperties": False,
}
ASKED = {
    "model": "tiny",
    "messages": USER,
    "seed": 3,
    "max_tokens": 60,
    "temperature": 30,
}


@pytest.fixture
def writer_of_json(served_json, serving):
    with serving(ServedModels([served_json])) as where:
        yield where


def test_answers_are_json_of_their_schema_whole_and_in_pieces(writer_of_json):
    with client_of(writer_of_json) as client:
        found = client.chat.completions.create(
            **ASKED, n=4, response_format=schema_of(ORDER)
        )
        texts = [choice.message.content for choice in found.choices]
        assert {choice.finish_reason for choice in found.choices} == {"stop"}
        assert len(set(texts)) > 1
        for order in map(json.loads, texts):
            assert order["dish"] in ("soup", "cake")
            assert 1 <= order["persons"] <= 9
        stream = client.chat.completions.create(
            **ASKED, n=4, stream=True, response_format=schema_of(ORDER)
        )
        pieces = [""] * 4
        for event in stream:
            pieces[event.choices[0].index] += event.choices[0].delta.content or ""
        assert pieces == texts
        logs = client.chat.completions.create(
            **ASKED, logprobs=True, top_logprobs=5, response_format=schema_of(ORDER)
        ).choices[0]
        assert logs.message.content == texts[0]
        for (
            one
        ) in logs.logprobs.content:  # what may not come is not among the likeliest
            assert (one.token, one.logprob) in [
                (o.token, o.logprob) for o in one.top_logprobs
            ]
            assert all(other.logprob is not None for other in one.top_logprobs)
        for form in (schema_of(ORDER), {"type": "json_object"}):
            cut = client.completions.create(
                model="tiny",
                prompt="rice",
                max_tokens=3,
                extra_body={"response_format": form},
            ).choices[0]
            assert cut.text.lstrip()[0] == "{"
            assert cut.finish_reason == "length" or json.loads(cut.text) == {}
        recipe = client.chat.completions.create(
            **ASKED,
            response_format={"type": "json_schema", "json_schema": {"name": "recipe"}},
        ).choices[0]
        assert recipe.message.content.startswith('{"@context": "https://schema.org"')


@pytest.mark.parametrize("served_json", ["encoder-decoder"], indirect=True)
def test_one_text_that_cannot_go_on_ends_no_other(served_json, serving):
    """What no token can write is met in the middle, where names and fixed values do not tell."""
    schema = {"type": "string", "pattern": "^soup 爆$"}
    free = {"model": "tiny", "prompt": "rice", "temperature": 0}
    held = free | {"response_format": schema_of(schema)}
    with serving(ServedModels([served_json])) as where, ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(sent, where, "POST", TEXT, json.dumps(fields), JSON)
                 for fields in (free, held, held | {"stream": True})]  # fmt: skip
        whole, stuck, streamed = [one.result() for one in asked]
    assert json.loads(whole.body)["choices"][0]["text"] == expected(served_json, "rice")
    assert stuck.status == 400
    told, done = streamed.body.split(b"\n\n")[-3:-1]  # the stream had begun before
    assert done == b"data: [DONE]"
    for body in (stuck.body, told.removeprefix(b"data: ")):
        error = json.loads(body)["error"]
        assert error["message"].startswith("The text cannot match its form")
        assert error["param"] == "response_format"


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status"),
    [
        ("POST", TEXT, b"{", JSON, 400),
        ("POST", TEXT, b"[" * 4000, JSON, 400),
        ("POST", TEXT, b'{"model": "tiny", "prompt": "\xff"}', JSON, 400),
        ("POST", TEXT, b'{"model": "tiny", "prompt": "a", "top_p": NaN}', JSON, 400),
        ("POST", TEXT, b"", JSON, 400),
        ("POST", TEXT, b"{}", {"Content-Type": "text/plain"}, 415),
        ("POST", TEXT, b" " * 6000, JSON, 413),
        ("POST", TEXT, b" " * 400_000, JSON, 413),
        ("GET", TEXT, b"", {}, 405),
        ("GET", "/nowhere", b"", {}, 404),
        ("GET", "/v1/models/../../etc/passwd", b"", {}, 404),
        ("GET", "/health", b"", {}, 200),
    ],
)
def test_what_is_no_request_gets_the_right_code(
    method, path, body, headers, status, address
):
    found, _, answer = sent(address, method, path, body, headers)
    assert found == status
    assert status == 200 or json.loads(answer)["error"]["message"]


def test_metrics_count_what_was_asked_and_written(address, client):
    def seen():
        asked = 'toque_requests_total{path="/v1/completions",status="200"}'
        names = (asked, "toque_tokens_total", "toque_first_token_seconds_count")
        names += ("toque_time_per_output_token_seconds_count",)
        return [metric(address, name) for name in names]

    before = seen()
    found = client.completions.create(
        model="tiny", prompt="rice", temperature=0, max_tokens=2
    )
    after = seen()
    n_new = [1, found.usage.completion_tokens, 1, 1]
    assert after == [old + new for old, new in zip(before, n_new, strict=True)]
    assert (
        metric(address, "toque_live_texts")
        == metric(address, "toque_waiting_texts")
        == 0
    )
