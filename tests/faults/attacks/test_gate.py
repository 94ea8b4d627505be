"""The gate of `toque serve` and `toque watch`, asked by raw bytes as no client would send them."""

import re
import socket
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

import toque
from fixtures.servers import in_a_thread
from toque.runs.places import RunFinder
from toque.serving.batcher import ServedModels
from toque.serving.completions import ChatRequest, CompletionRequest
from toque.serving.gate import Limits
from toque.serving.model_app import build_model_app
from toque.serving.request_body import parse_request
from toque.serving.request_errors import RequestError
from toque.serving.server import LOOPBACK_NAMES, Server, allowed_hosts
from toque.serving.watch_app import Watcher, build_watch_app

HOSTS = (
    "x/y?", "x/?", "x#", "x/#", "/?", "?", "x\\y?", "x/health?", "x/health#", "a:b@x/y?",
    "[::1]/y?", "localhost/y?", "localhost:80/y?", "127.0.0.1/page/?", "x/y;z?", "x/%3f?", "x/y?z=",
    "x:/?", "x/y?#", "x/../?",
)  # fmt: skip
"""What starlette 1.0.0 takes for the beginning of an address, so that the path is another one."""
GUARDED = {
    "serve": ("/v1/models", "/v1/models/a", "/metrics", "/api/models"),
    "watch": ("/api/page",),
}


@contextmanager
def asked_at(verb, tmp_path, **settings):
    if verb == "serve":
        gate = build_model_app(ServedModels([]), **settings)
    else:
        gate = build_watch_app(Watcher(RunFinder(tmp_path), every=0.05), **settings)
    server = Server(gate, Limits())
    with in_a_thread(server, lambda: server.handle_exit(2, None)) as address:
        yield urlsplit(address)


def answer_to(there, path, host, more=""):
    """The head of the answer to a request that is sent byte by byte as it stands here."""
    with socket.create_connection((there.hostname, there.port), timeout=60) as line:
        line.sendall(f"GET {path} HTTP/1.1\r\nHost: {host}\r\n{more}\r\n".encode())
        return line.recv(65_536).decode()


@pytest.mark.parametrize("verb", ["serve", "watch"])
def test_no_host_header_leads_past_the_token(verb, tmp_path):
    """starlette 1.0.0 makes `request.url` of the header, and the gate once read its path there."""
    with asked_at(verb, tmp_path, token="sesame", hosts=None) as there:  # noqa: S106
        for path in GUARDED[verb]:
            answers = {host: answer_to(there, path, host) for host in HOSTS}
            passed = [
                host
                for host, head in answers.items()
                if " 200 " in head.split("\r\n")[0]
            ]
            assert passed == [], path
        brought = "Authorization: Bearer sesame\r\n"
        assert answer_to(there, GUARDED[verb][0], "x", brought).startswith(
            "HTTP/1.1 200"
        )


def cookie_in(head: str) -> str:
    """The cookie of a response."""
    line = next(line for line in head.split("\r\n") if line.startswith("set-cookie: "))
    return line.removeprefix("set-cookie: ")


@pytest.mark.parametrize("verb", ["serve", "watch"])
def test_token_in_the_first_address_becomes_a_cookie(verb, tmp_path):
    path = GUARDED[verb][0]
    with asked_at(verb, tmp_path, token="sesame", hosts=None) as there:  # noqa: S106
        head = answer_to(there, "/?token=sesame", "x")
        assert head.startswith("HTTP/1.1 303")
        assert "\r\nlocation: ./\r\n" in head
        cookie = cookie_in(head)
        assert cookie.endswith("; Path=/; HttpOnly; SameSite=Strict")
        pair = cookie.partition(";")[0]
        allowed = answer_to(there, path, "x", f"Cookie: other=1; {pair}\r\n")
        assert allowed.startswith("HTTP/1.1 200")
        for wrong in (f"{pair}0", pair[:-1], "toque=sesame", pair.partition("=")[0]):
            refused = answer_to(there, path, "x", f"Cookie: {wrong}\r\n")
            assert refused.startswith("HTTP/1.1 401")
        head = answer_to(there, "/?token=wrong", "x", "Connection: close\r\n")
        assert head.startswith("HTTP/1.1 200")
        assert "set-cookie" not in head


def test_login_returns_the_cookie_for_the_right_token_only(tmp_path):
    with asked_at("watch", tmp_path, token="sesame", hosts=None) as there:  # noqa: S106
        address = f"{there.geturl()}/session"
        answer = httpx.post(address, json={"token": "sesame"})
        assert (answer.status_code, answer.json()) == (200, {})
        assert "SameSite=Strict" in answer.headers["set-cookie"]
        answer = httpx.post(address, json={"token": "Sesame"})
        assert answer.status_code == 401
        assert "set-cookie" not in answer.headers
        assert httpx.post(address, json={"token": 1}).status_code == 400


@pytest.mark.parametrize("verb", ["serve", "watch"])
def test_pages_of_another_site_are_refused(verb, tmp_path):
    with asked_at(verb, tmp_path, token=None, hosts=None) as there:
        for origin in ("http://evil.example", "http://x:81", "null", "http://[", "x"):
            head = answer_to(there, GUARDED[verb][0], "x:80", f"Origin: {origin}\r\n")
            assert head.startswith("HTTP/1.1 403"), origin
        for origin in ("http://x:80", "https://X:80"):
            head = answer_to(there, GUARDED[verb][0], "x:80", f"Origin: {origin}\r\n")
            assert head.startswith("HTTP/1.1 200"), origin


def test_nothing_of_ours_reads_an_address_that_the_client_has_made():
    """`request.url`, `base_url` and `url_for` begin with the Host header, whatever it says."""
    package = Path(toque.__file__).parent
    words = ("request.url", ".base_url", ".url_for(")
    found = [
        f"{path.relative_to(package)} has {word}"
        for path in package.glob("serving/*.py")
        for word in words
        if word in re.sub(r"`.*?`", "", path.read_text())
    ]
    assert found == []


@pytest.mark.parametrize("verb", ["serve", "watch"])
def test_who_has_no_token_learns_that_the_server_lives_and_no_name(verb, tmp_path):
    with asked_at(verb, tmp_path, token="sesame", hosts=None) as there:  # noqa: S106
        head = answer_to(there, "/health", "x", "Connection: close\r\n")
        assert head.startswith("HTTP/1.1 200")
        assert head.endswith('\r\n\r\n{"status":"ok"}')


@pytest.mark.parametrize(
    "host", ["LOCALHOST", "LocalHost:8000", "127.0.0.1", "[::1]:80"]
)
def test_names_of_hosts_are_compared_without_case(host, tmp_path):
    with asked_at("serve", tmp_path, token=None, hosts=LOOPBACK_NAMES) as there:
        assert answer_to(there, "/health", host).startswith("HTTP/1.1 200")
        assert answer_to(there, "/health", f"{host}.example").startswith("HTTP/1.1 421")


def test_an_address_to_listen_on_is_read_without_case_too():
    assert allowed_hosts("LOCALHOST", port=0, token=None, risk="ask") == LOOPBACK_NAMES
    other = allowed_hosts(
        "127.0.0.2", port=0, token=None, risk="ask"
    )  # the address that is printed
    assert other == (*LOOPBACK_NAMES, "127.0.0.2")


def repeated(begin: bytes, item: bytes, end: bytes, *, numbered: bool = False) -> bytes:
    """A body of nearly the longest that is read."""
    n = ((1 << 20) - 200) // (len(item) + 1 + 6 * numbered)
    parts = (item % number if numbered else item for number in range(n))
    return begin + b",".join(parts) + end


PROMPT, CHAT = b'{"model": "a", "prompt": [', b'{"model": "a", "messages": ['
CROWDED = {
    "keys": (CompletionRequest, repeated(b"{", b'"%06d":0', b"}", numbered=True)),
    "notes": (
        CompletionRequest,
        repeated(
            b'{"model": "a", "prompt": "", "metadata": {',
            b'"%06d":0',
            b"}}",
            numbered=True,
        ),
    ),
    "prompts": (CompletionRequest, repeated(PROMPT, b"{}", b"]}")),
    "ids": (CompletionRequest, repeated(PROMPT, b"1", b',""]}')),
    "lists": (CompletionRequest, repeated(PROMPT, b'[""]', b"]}")),
    "messages": (ChatRequest, repeated(CHAT, b"{}", b"]}")),
    "parts": (
        ChatRequest,
        repeated(CHAT + b'{"role": "user", "content": [', b"{}", b"]}]}"),
    ),
    "keys of a part": (
        ChatRequest,
        repeated(
            CHAT + b'{"role":"user","content":[{', b'"%06d":0', b"}]}]}", numbered=True
        ),
    ),
}


@pytest.mark.parametrize("case", CROWDED)
def test_a_megabyte_of_mistakes_is_not_told_one_by_one(case):
    """pydantic made a sentence for each, and the event loop stood still: 14 s for 350,000 `{}`."""
    kind, body = CROWDED[case]
    with pytest.raises(RequestError) as refused:
        parse_request(kind, body)
    told = refused.value.__cause__
    if told is None:
        assert "of the body's fields are unknown, missing or of the wrong type" in str(
            refused.value
        )
    else:
        assert told.error_count() < 10
    assert len(str(refused.value)) < 300
