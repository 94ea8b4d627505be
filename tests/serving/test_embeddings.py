"""Embeddings: the mean of the last hidden states, alone and in a batch."""

import base64
import json
import threading

import numpy as np
import pytest
import torch

from serving.alone import client_of, metric, open_to, sent
from toque.models.generation.embeddings import embed_texts
from toque.serving import embeddings
from toque.serving.batcher import Batcher, ServedModels
from toque.workflows.inference.open_served import open_models

pytest.importorskip("openai")
JSON = {"Content-Type": "application/json"}
PATH = "/v1/embeddings"
TEXTS = [
    "lentil soup with rice and butter",
    "cake",
    "salt",
    "rice with butter and salt and lentil",
]


def reference(served, text):
    """The embedding by plain transformers."""
    ids = torch.tensor([served.prompt_ids(text)])
    with torch.inference_mode():
        if served.is_encoder_decoder:
            states = served.model.get_encoder()(input_ids=ids).last_hidden_state
        else:
            states = served.model.base_model(input_ids=ids).last_hidden_state
    mean = states[0].mean(0)
    return (mean / mean.norm()).numpy()


def post(address, **fields):
    body = json.dumps({"model": "tiny", "input": TEXTS} | fields)
    status, _, answer = sent(address, "POST", PATH, body, JSON)
    return status, json.loads(answer)


@pytest.fixture(scope="module")
def address(served, serving):
    with serving(ServedModels([served])) as where:
        yield where


@pytest.fixture(scope="module")
def gpt2_address(gpt2, serving):
    with serving(ServedModels([gpt2])) as where:
        yield where


def test_embeddings_are_the_mean_of_the_last_hidden_states(address, served):
    with client_of(address) as client:
        found = client.embeddings.create(model="tiny", input=TEXTS)
    assert [one.index for one in found.data] == [0, 1, 2, 3]
    for text, one in zip(TEXTS, found.data, strict=True):
        np.testing.assert_allclose(one.embedding, reference(served, text), atol=1e-5)
    n_tokens = sum(len(served.prompt_ids(text)) for text in TEXTS)
    assert found.usage.prompt_tokens == found.usage.total_tokens == n_tokens


def test_padding_changes_no_vector(served):
    texts = [served.prompt_ids(text) for text in TEXTS]
    pad_id = served.codec.pad_id
    together = embed_texts(served.model, texts, pad_id=pad_id)
    alone = [embed_texts(served.model, [text], pad_id=pad_id)[0] for text in texts]
    torch.testing.assert_close(together, torch.stack(alone), atol=1e-5, rtol=0)
    torch.testing.assert_close(together.norm(dim=1), torch.ones(4))
    similarities = together @ together.T
    assert similarities[0, 1] < 0.999  # the vectors differ


def test_forms_of_input_and_of_vectors_agree(gpt2_address, gpt2):
    ids = [gpt2.prompt_ids(text) for text in TEXTS]

    def vectors(**fields):
        status, body = post(gpt2_address, **fields)
        assert status == 200, body
        return [one["embedding"] for one in body["data"]]

    floats = np.array(vectors())
    packed = [base64.b64decode(one) for one in vectors(encoding_format="base64")]
    decoded = np.array([np.frombuffer(one, "<f4") for one in packed])
    np.testing.assert_array_equal(decoded, floats.astype("f4"))
    np.testing.assert_allclose(vectors(input=ids), floats, atol=1e-6)
    np.testing.assert_allclose(vectors(input=ids[0])[0], floats[0], atol=1e-5)
    np.testing.assert_allclose(vectors(input=TEXTS[0])[0], floats[0], atol=1e-5)


def test_an_adapter_has_vectors_of_its_own(folders, serving):
    models = open_models({name: folders[name] for name in ("base", "one")})
    with serving(models) as where:
        vectors = []
        for name in ("base", "one", "base"):
            status, body = post(where, model=name)
            assert status == 200
            vectors.append(np.array([one["embedding"] for one in body["data"]]))
    base, adapted, again = vectors
    np.testing.assert_array_equal(base, again)
    assert np.abs(base - adapted).max() > 0.01


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"input": []}, "input", "is empty"),
        ({"input": ["rice", ""]}, "input", "an empty text"),
        ({"input": ""}, "input", "an empty text"),
        ({"input": ["a"] * 2049}, "input", "The limit is 2,048"),
        ({"input": [[1], [1, 10**6]]}, "input[1]", "check_embedding_ctx_length=False"),
        ({"input": ["a", "rice " * 300]}, "input[1]", "context length is 96 tokens"),
        ({"dimensions": 8}, "dimensions", "does not support"),
        ({"encoding_format": "int8"}, "encoding_format", "'float' or 'base64'"),
        ({"model": "other"}, "model", "does not exist"),
    ],
)
def test_wrong_requests_are_refused(fields, param, words, gpt2_address):
    status, body = post(gpt2_address, **fields)
    assert status == (404 if param == "model" else 400)
    assert body["error"]["param"] == param
    assert words in body["error"]["message"]


def test_two_thousand_texts_are_one_request(gpt2_address):
    text = "rice with butter and salt, rice with butter and salt, rice with butter and salt, cake"
    escaped = "".join(f"\\u{ord(char):04x}" for char in text)
    body = json.dumps({"model": "tiny", "input": ["TEXT"] * 2048})
    body = body.replace("TEXT", escaped)
    assert len(body) > 1 << 20  # no other request may be so long
    status, _, answer = sent(gpt2_address, "POST", PATH, body, JSON)
    assert (status, len(json.loads(answer)["data"])) == (200, 2048)


def test_a_failure_is_an_internal_error_and_others_go_on(
    gpt2_address, monkeypatch, caplog
):
    def fail(*_):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(Batcher, "embed", fail)
        status, body = post(gpt2_address)
    assert (status, body["error"]["code"]) == (500, "internal_error")
    assert "embedding with tiny failed" in caplog.text
    assert post(gpt2_address)[0] == 200


def test_the_reading_ends_with_its_client(gpt2_address, monkeypatch):
    n_groups, go = [], threading.Event()
    embed = Batcher.embed

    def slow(*args):
        n_groups.append(1)
        assert go.wait(20)
        return embed(*args)

    def one_by_one(texts, _):
        return (slice(i, i + 1) for i in range(len(texts)))

    monkeypatch.setattr(Batcher, "embed", slow)
    monkeypatch.setattr(embeddings, "prefill_groups", one_by_one)
    before = metric(gpt2_address, "toque_clients_gone_total")
    gone = open_to(gpt2_address)
    gone.request("POST", PATH, json.dumps({"model": "tiny", "input": TEXTS}), JSON)
    while not n_groups:
        threading.Event().wait(0.01)
    assert metric(gpt2_address, "toque_waiting_texts") == 1
    gone.sock.close()
    threading.Event().wait(0.1)
    go.set()
    while metric(gpt2_address, "toque_clients_gone_total") == before:
        threading.Event().wait(0.01)
    assert len(n_groups) < len(TEXTS)
    assert metric(gpt2_address, "toque_waiting_texts") == 0
