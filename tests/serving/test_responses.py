"""The Responses API, which must answer as a chat does, and the requests of other clients."""

import copy
import json
from concurrent.futures import Future
from dataclasses import replace

import anyio
import pytest

from serving.alone import alone, client_of, sent
from toque.errors import DataError
from toque.serving.batcher import ServedModels
from toque.serving.responses import ResponseRequest

openai = pytest.importorskip("openai")
JSON = {"Content-Type": "application/json"}
PATH = "/v1/responses"


@pytest.fixture(scope="module")
def address(gpt2, serving):
    with serving(ServedModels([gpt2])) as where:
        yield where


@pytest.fixture
def client(address):
    with client_of(address) as made:
        yield made


def post(address, path, fields):
    status, _, body = sent(address, "POST", path, json.dumps(fields), JSON)
    return status, json.loads(body)


def chat_text(gpt2, dish="rice", most=24):
    prompt = gpt2.prompt_ids(f"Recipe for {dish}")
    return gpt2.codec.decode(alone(gpt2, prompt, most=most))


def test_a_response_has_the_text_of_a_chat(client, gpt2):
    found = client.responses.create(
        model="tiny", input="rice", temperature=0, instructions="You are a cook.",
        store=False, metadata={"a": "b"}, reasoning={"effort": "low"},
    )  # fmt: skip
    ids = alone(gpt2, gpt2.prompt_ids("Recipe for rice"))
    is_cut = len(ids) == 24
    assert found.output_text == chat_text(gpt2)
    assert found.status == ("incomplete" if is_cut else "completed")
    assert found.usage.output_tokens == len(ids)
    assert found.usage.input_tokens == len(gpt2.prompt_ids("Recipe for rice"))
    assert (found.store, found.instructions) == (False, "You are a cook.")
    assert found.output[0].role == "assistant"


def test_a_cut_response_is_incomplete(client, gpt2):
    found = client.responses.create(
        model="tiny", input="rice", temperature=0, max_output_tokens=3
    )
    assert found.output_text == chat_text(gpt2, most=3)
    assert (found.status, found.output[0].status) == ("incomplete", "incomplete")
    assert found.incomplete_details.reason == "max_output_tokens"


def test_the_events_of_a_stream_are_the_response_in_pieces(client):
    settings = {"model": "tiny", "input": "rice", "temperature": 0, "top_logprobs": 2}
    complete = client.responses.create(**settings)
    events = list(client.responses.create(**settings, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:-1] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
    ]
    assert kinds[-1] == f"response.{complete.status}"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 1
    assert "".join(event.delta for event in deltas) == complete.output_text
    last = events[-1].response
    assert last.output_text == complete.output_text
    assert last.usage == complete.usage
    logprobs = complete.output[0].content[0].logprobs
    assert last.output[0].content[0].logprobs == logprobs
    assert "".join(one.token for one in logprobs) == complete.output_text
    assert all(len(one.top_logprobs) >= 2 for one in logprobs)


def test_a_stream_that_breaks_off_raises_the_error(gpt2, serving):
    codec = copy.copy(gpt2.codec)
    n_left = iter(range(12))

    def decode(ids):
        if next(n_left, None) is None:
            raise DataError("The tokenizer cannot be used.")
        return gpt2.codec.decode(ids)

    codec.decode = decode
    models = ServedModels([replace(gpt2, codec=codec)])
    with serving(models) as where, client_of(where) as client:
        stream = client.responses.create(
            model="tiny", input="rice", temperature=0, stream=True
        )
        with pytest.raises(openai.APIError, match="server's log"):
            list(stream)


def test_a_chat_model_reads_instructions_and_all_messages(gpt2):
    """Earlier answers are sent back as the client received them."""

    class Template:
        def ids(self, turns):
            self.turns = turns
            made = Future()
            made.set_result([1, 2])
            return made

    template = Template()
    earlier = {
        "id": "msg_1", "type": "message", "role": "assistant", "status": "completed",
        "content": [{"type": "output_text", "text": "Soup.", "annotations": [], "logprobs": []}],
    }  # fmt: skip
    asked = [
        {"role": "developer", "content": "Be short."},
        {"role": "user", "content": [{"type": "input_text", "text": "What?"}]},
        earlier,
        {"role": "user", "content": "And then?"},
    ]
    fields = {"model": "tiny", "instructions": "You are a cook.", "input": asked}
    request = ResponseRequest.model_validate_json(json.dumps(fields))
    ids = anyio.run(request.prompt_ids, replace(gpt2, chat=template))
    assert ids == [[1, 2]]
    assert template.turns == [
        {"role": "system", "content": "You are a cook."},
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "What?"},
        {"role": "assistant", "content": "Soup."},
        {"role": "user", "content": "And then?"},
    ]


@pytest.mark.parametrize("served_json", ["decoder"], indirect=True)
def test_a_response_follows_its_schema(served_json, serving):
    schema = {"type": "object", "properties": {"dish": {"enum": ["soup", "cake"]}}}
    schema |= {"required": ["dish"], "additionalProperties": False}
    form = {"type": "json_schema", "name": "order", "schema": schema, "strict": True}
    with serving(ServedModels([served_json])) as where, client_of(where) as client:
        found = client.responses.create(
            model="tiny", input="rice", text={"format": form}, max_output_tokens=60
        )
    assert json.loads(found.output_text)["dish"] in ("soup", "cake")
    assert found.text.format.name == "order"


IMAGE = {"type": "input_image", "image_url": "data:,"}
WRONG = {
    "tools": ({"tools": [{"type": "function", "name": "x"}]}, "tools", "leave it out"),
    "stored": ({"previous_response_id": "resp_1"}, "previous_response_id", "stores no"),
    "store": ({"store": True}, "store", "earlier messages in input"),
    "conversation": ({"conversation": "c"}, "conversation", "stores no"),
    "background": ({"background": True}, "background", "does not support"),
    "no input": ({"input": []}, "input", "Send a message"),
    "a tool's output": (
        {"input": [{"type": "function_call_output", "call_id": "1", "output": "2"}]},
        "input", "messages only, not 'function_call_output'",
    ),
    "a picture": (
        {"input": [{"role": "user", "content": [IMAGE]}]},
        "input", "text only, not 'input_image'",
    ),
    "no user": ({"input": [{"role": "system", "content": "a"}]}, "input", "user message"),
    "several": ({"n": 2}, "n", "Unrecognized request argument"),
    "a schema": (
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}},
        "text", "not",
    ),
    "too long": ({"input": "rice " * 300}, "input", "maximum context length is 96"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_requests_that_need_more_are_refused_by_name(case, address):
    fields, param, words = WRONG[case]
    asked = {"model": "tiny", "input": "rice"} | fields
    status, body = post(address, PATH, asked)
    assert (status, body["error"]["param"]) == (400, param)
    assert words in body["error"]["message"]


CHAT = [{"content": "rice", "role": "user"}]
NULLS = dict.fromkeys(
    ("include", "instructions", "max_output_tokens", "metadata", "previous_response_id", "user")
)  # fmt: skip
RECORDED = [
    # langchain-openai 1.7.4: ChatOpenAI with invoke and stream, and with the Responses API;
    # OpenAIEmbeddings with check_embedding_ctx_length=False.
    ("/v1/chat/completions", {"messages": CHAT, "stream": False}),
    ("/v1/chat/completions", {"messages": CHAT, "stream": True}),
    (PATH, {"input": [CHAT[0] | {"type": "message"}], "max_output_tokens": 9, "stream": True}),
    (
        PATH,
        {
            "input": [
                CHAT[0] | {"type": "message"},
                {
                    "type": "message", "role": "assistant", "id": "msg_1",
                    "content": [{"type": "output_text", "text": "Soup.", "annotations": []}],
                },
                CHAT[0] | {"type": "message"},
            ],
            "max_output_tokens": 9,
            "stream": False,
        },
    ),
    ("/v1/embeddings", {"input": ["rice", "soup"], "encoding_format": "base64"}),
    # llama-index-llms-openai 0.8.3 and llama-index-llms-openai-like 0.8.1: OpenAILike with
    # complete, chat and stream_chat; OpenAIResponses.
    ("/v1/completions", {"prompt": "rice", "stream": False, "temperature": 0.1}),
    ("/v1/chat/completions", {"messages": CHAT, "stream": True, "temperature": 0.1}),
    (
        PATH,
        NULLS | {
            "input": "rice", "store": False, "stream": True, "temperature": 0.1, "tools": [],
            "top_p": 1.0, "truncation": "disabled",
        },
    ),
]  # fmt: skip


@pytest.mark.parametrize(("path", "fields"), RECORDED)
def test_requests_of_langchain_and_llamaindex_are_answered(path, fields, address):
    body = json.dumps({"model": "tiny"} | fields)
    answer = sent(address, "POST", path, body, JSON)
    assert answer.status == 200, answer.body
    is_stream = fields.get("stream", False)
    assert ("event-stream" in answer.headers["content-type"]) == is_stream
