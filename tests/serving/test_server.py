"""A server among clients that go away, wait, or send nothing; its token, and its end."""

import copy
import json
import socket
import threading
from contextlib import ExitStack, closing
from dataclasses import replace
from urllib.parse import urlsplit

import pytest

from serving.alone import alone, metric, open_to, sent
from toque.models.generation.live_rows import LiveRows
from toque.serving.batcher import ServedModels

ASK = {"model": "tiny", "prompt": "rice", "temperature": 0}


def ask(address, headers=None, **fields):
    kind = {"Content-Type": "application/json", **(headers or {})}
    return sent(address, "POST", "/v1/completions", json.dumps(ASK | fields), kind)


def until(found):
    while not found():
        threading.Event().wait(0.01)


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"


def plain(address):
    """A connection of bytes."""
    there = urlsplit(address)
    return socket.create_connection((there.hostname, there.port), timeout=60)


def text_of(gpt2):
    return gpt2.codec.decode(alone(gpt2, gpt2.prompt_ids("rice")))


def test_a_client_that_goes_away_frees_its_place(gpt2, serving):
    """One row, and the answer after it is written though the one before was never ended."""
    with serving(ServedModels([gpt2]), limits={"rows": 1}) as address:
        for stream in (True, False):
            before = metric(address, "toque_clients_gone_total")
            gone = open_to(address)
            body = json.dumps(ASK | {"stream": stream, "prompt": ["rice"] * 60})
            gone.request(
                "POST", "/v1/completions", body, {"Content-Type": "application/json"}
            )
            until(lambda: metric(address, "toque_live_texts") == 1)
            gone.sock.close()
            until(lambda n=before: metric(address, "toque_clients_gone_total") == n + 1)
            answer = json.loads(ask(address).body)
            assert answer["choices"][0]["text"] == text_of(gpt2)


def test_a_client_that_leaves_during_its_body_is_counted_and_logs_nothing(
    gpt2, serving, caplog
):
    with serving(ServedModels([gpt2])) as address:
        for path in (b"/v1/completions", b"/v1/chat/completions"):
            before = metric(address, "toque_clients_gone_total")
            with closing(plain(address)) as gone:
                head = HEAD.replace(b"/v1/completions", path)
                head += b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n"
                gone.sendall(head + b'{"model": ')
            until(
                lambda n=before: (
                    caplog.records
                    or metric(address, "toque_clients_gone_total") == n + 1
                )
            )
        assert ask(address).status == 200
    assert not caplog.records


def test_a_full_queue_answers_429_with_when_to_try_again(gpt2, serving):
    with serving(ServedModels([gpt2]), limits={"rows": 1, "queue": 59}) as address:
        with closing(open_to(address)) as full:
            body = json.dumps(ASK | {"prompt": ["rice"] * 60})
            full.request(
                "POST", "/v1/completions", body, {"Content-Type": "application/json"}
            )
            until(lambda: metric(address, "toque_live_texts") == 1)
            refused = ask(address, prompt=["rice"] * 60)
        assert refused.status == 429
        assert refused.headers["retry-after"] == "1"
        assert json.loads(refused.body)["error"]["type"] == "rate_limit_error"
        until(lambda: not metric(address, "toque_live_texts"))
        assert ask(address).status == 200
        never = ask(address, prompt=["rice"] * 61)
        assert never.status == 400
        assert (
            "generates and queues at most 60 at a time"
            in json.loads(never.body)["error"]["message"]
        )


def test_prompts_that_are_read_count_in_the_queue_hold_up_nobody_and_end_with_their_client(
    gpt2, serving
):
    codec, begun, go = copy.copy(gpt2.codec), set[int](), threading.Event()

    def decode(ids, **options):
        begun.add(next(iter(ids), 0))
        assert go.wait(20)
        threading.Event().wait(0.005)
        return gpt2.codec.decode(ids, **options)

    codec.decode = decode
    models = ServedModels([gpt2, replace(gpt2, name="slow", codec=codec)])
    asked = {
        "model": "slow",
        "prompt": [[number] * 8 for number in range(60)],
        "echo": True,
    }
    kind = {"Content-Type": "application/json"}
    with serving(models, limits={"rows": 1, "queue": 60}) as address:
        reader = open_to(address)
        body = json.dumps(ASK | asked | {"max_tokens": 0, "logprobs": 0})
        reader.request("POST", "/v1/completions", body, kind)
        until(lambda: begun)
        assert metric(address, "toque_waiting_texts") == 60
        assert ask(address, n=2).status == 429
        assert ask(address).status == 200
        assert metric(address, "toque_clients_gone_total") == 0
        reader.sock.close()
        go.set()
        until(lambda: metric(address, "toque_clients_gone_total") == 1)
        assert len(begun) < 60
        assert metric(address, "toque_waiting_texts") == 0


def test_the_texts_of_one_prompt_read_it_once(gpt2, serving, monkeypatch):
    n_read = []
    read = LiveRows.read
    monkeypatch.setattr(LiveRows, "read", lambda *args: n_read.append(1) or read(*args))
    with serving(ServedModels([gpt2])) as address:
        answer = ask(
            address, prompt=["rice", "soup"], n=3, echo=True, logprobs=0, max_tokens=2
        )
    texts = [choice["text"] for choice in json.loads(answer.body)["choices"]]
    assert (len(n_read), len(texts), len(set(texts))) == (2, 6, 2)


def test_a_request_out_of_time_says_so_and_leaves(gpt2, serving):
    limits = {"rows": 1, "seconds": 0.001}
    with serving(ServedModels([gpt2]), limits=limits) as address:
        answer = ask(address, prompt=["rice"] * 60)
        assert (answer.status, answer.headers["x-should-retry"]) == (504, "false")
        until(lambda: not metric(address, "toque_live_texts"))
        until(lambda: not metric(address, "toque_waiting_texts"))
        assert not metric(address, "toque_live_texts")


def test_slow_heads_are_closed_and_slow_bodies_are_told(gpt2, serving):
    with serving(ServedModels([gpt2]), limits={"body_seconds": 0.3}) as address:
        with plain(address) as silent:
            silent.sendall(HEAD)
            assert silent.recv(100) == b""
        with plain(address) as slow:
            slow.sendall(
                HEAD + b"Content-Length: 100\r\nContent-Type: application/json\r\n\r\n{"
            )
            assert slow.recv(100).startswith(b"HTTP/1.1 408")
        assert ask(address).status == 200


@pytest.mark.parametrize("connections", [2048, 100])
def test_three_hundred_silent_connections_shut_nobody_out(connections, gpt2, serving):
    """Where fewer may be open, those that were silent longest are closed."""
    limits = {"connections": connections}
    with serving(ServedModels([gpt2]), limits=limits) as address, ExitStack() as stack:
        silent = [stack.enter_context(plain(address)) for _ in range(300)]
        for _ in range(3):
            assert json.loads(ask(address).body)["choices"][0]["text"] == text_of(gpt2)
        if connections < 300:
            assert all(one.recv(1) == b"" for one in silent[: 300 - connections])
        silent[-1].sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert silent[-1].recv(100).startswith(b"HTTP/1.1 200")


def test_more_open_requests_than_connections_are_refused_in_the_protocols_form(
    gpt2, serving
):
    with serving(ServedModels([gpt2]), limits={"connections": 1}) as address:
        with plain(address) as first:
            expecting = b"Content-Length: 2\r\nExpect: 100-continue\r\n"
            first.sendall(HEAD + expecting + b"Content-Type: application/json\r\n\r\n")
            assert first.recv(100).startswith(b"HTTP/1.1 100")  # its body is waited for
            refused = ask(address)
            assert (refused.status, refused.headers["retry-after"]) == (503, "1")
            assert json.loads(refused.body)["error"]["type"] == "server_error"
            assert sent(address, "GET", "/health").status == 200
            first.sendall(b"{}")
            assert first.recv(100).startswith(b"HTTP/1.1 400")
        assert ask(address).status == 200


OTHER = {"Authorization": "Basic secret"}


def test_a_token_guards_all_but_health(gpt2, serving):
    with serving(ServedModels([gpt2]), token="secret") as address:  # noqa: S106
        for header in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "secret"},
            OTHER,
        ):
            refused = ask(address, headers=header)
            assert refused.status == 401
            assert json.loads(refused.body)["error"]["code"] == "invalid_api_key"
        for scheme in ("Bearer", "bearer", "BEARER"):  # RFC 9110, 11.1: in any case
            given = {"Authorization": f"{scheme} secret"}
            assert ask(address, headers=given).status == 200
        for path, status in (("/health", 200), ("/metrics", 401), ("/v1/models", 401)):
            assert sent(address, "GET", path).status == status


def test_others_are_answered_while_a_prompt_is_made(gpt2, serving):
    asked_meanwhile = threading.Event()

    def slowly(typed):
        assert asked_meanwhile.wait(20)
        return typed

    served = ServedModels([replace(gpt2, to_prompt=slowly)])
    with serving(served) as address, closing(open_to(address)) as connection:
        body = json.dumps(
            {"model": "tiny", "messages": [{"role": "user", "content": "rice"}]}
        )
        kind = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", body, kind)
        assert sent(address, "GET", "/health").status == 200
        asked_meanwhile.set()
        assert connection.getresponse().status == 200


def test_what_was_accepted_is_answered_when_the_server_ends(gpt2, serving):
    with serving(ServedModels([gpt2]), limits={"rows": 1}) as address:
        connection = open_to(address)
        body = json.dumps(ASK | {"prompt": ["rice"] * 8})
        connection.request(
            "POST", "/v1/completions", body, {"Content-Type": "application/json"}
        )
        until(lambda: metric(address, "toque_live_texts") == 1)
    found = json.loads(connection.getresponse().read())
    connection.close()
    assert [choice["text"] for choice in found["choices"]] == [text_of(gpt2)] * 8
    with pytest.raises(OSError):
        plain(address)
