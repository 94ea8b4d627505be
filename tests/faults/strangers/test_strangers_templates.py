"""Chat templates and tokenizers of strangers: the time and memory that they take is bounded."""

import json
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from fixtures.servers import in_a_thread
from tiny import model_of, shape_of
from toque.cli import main
from toque.data.tokenizer.chat import ChatTemplate
from toque.data.tokenizer.codec import load_codec
from toque.errors import CheckpointError, DataError
from toque.serving.gate import Limits
from toque.serving.model_app import build_model_app
from toque.serving.server import Server
from toque.workflows.inference.open_served import open_models

LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
BAD = {
    "loop": (LOOP, "more than 2 s"),
    "large": ("{% set n = 6000000000 %}{{ 'x' * n }}", "more memory"),
    "long": ("{% set n = 60000000 %}{{ 'x' * n }}", "60,000,0"),
}
GOOD = "{{ messages[-1].content }}{{ eos_token }}"
MOODS = "".join(
    f"{{% if messages[-1].content == '{word}' %}}{bad}{{% endif %}}"
    for word, (bad, _) in BAD.items()
)
END = "<|endoftext|>"


@pytest.fixture(autouse=True)
def _bounded() -> Iterator[None]:
    """Little more memory than this process has: what grows without an end harms no other."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    more = pages * resource.getpagesize() + (6 << 30)
    resource.setrlimit(resource.RLIMIT_AS, (more, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.fixture
def strange(tmp_path: Path, tokenizers_at: dict[str, Path]) -> Callable[..., Path]:
    """A stranger's model folder: with a chat template, or parts of its tokenizer replaced."""

    def write(template: str | None = None, **parts: Any) -> Path:
        folder = tmp_path / "theirs"
        text = (tokenizers_at["decoder"] / "tokenizer.json").read_text()
        shape = shape_of("gpt2", positions=128, width=16, layers=1, heads=2)
        codec = load_codec(tokenizers_at["decoder"])
        model_of("gpt2", vocab=codec.vocab_size, shape=shape).save_pretrained(folder)
        (folder / "tokenizer.json").write_text(json.dumps(json.loads(text) | parts))
        config = dict.fromkeys(("bos_token", "eos_token", "pad_token"), END)
        config |= {"chat_template": template} if template else {}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        return folder

    return write


def ask(client: httpx.Client, text: str) -> httpx.Response:
    said = {
        "model": "theirs",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 2,
    }
    return client.post("/v1/chat/completions", json=said)


def test_a_template_that_takes_everything_is_a_bad_request_and_the_server_goes_on(
    strange: Callable[..., Path],
) -> None:
    limits, models = Limits(), open_models({"theirs": strange(MOODS + GOOD)})
    server = Server(build_model_app(models, limits=limits), limits)
    with (
        in_a_thread(server, lambda: setattr(server, "should_exit", True)) as address,
        httpx.Client(base_url=address, timeout=60) as client,
        httpx.Client(base_url=address, timeout=60) as beside,
        ThreadPoolExecutor(1) as thread,
    ):
        for word, (_, said) in BAD.items():
            asking = thread.submit(ask, client, word)
            while not asking.done():  # the loop that answers others is free meanwhile
                assert beside.get("/health").status_code == 200
                time.sleep(0.05)
            assert asking.result().status_code == 400
            error = asking.result().json()["error"]
            assert (said in error["message"], error["param"]) == (True, "messages")
            assert ask(client, "lentil soup").status_code == 200


def test_one_child_answers_every_request_until_it_has_to_be_ended(
    tokenizers_at: dict[str, Path],
) -> None:
    codec = load_codec(tokenizers_at["decoder"])
    chat = ChatTemplate(MOODS + GOOD, codec)

    def asked(text: str) -> list[int]:
        return chat.ids([{"role": "user", "content": text}]).result()

    def child() -> int:
        assert chat._child is not None
        return chat._child.pid

    assert chat._child is None, "none before a template is used"
    assert asked("rice") == [*codec.encode("rice"), codec.eos_id]
    first = child()
    assert asked("x" * 50_000)[-1] == codec.eos_id
    with pytest.raises(
        DataError, match="60,000,017 characters, but the limit is 65,568"
    ):
        asked("long")
    assert child() == first
    with pytest.raises(DataError, match="more than 2 s"):
        asked("loop")
    assert asked("rice") == [*codec.encode("rice"), codec.eos_id]
    assert child() != first


def test_a_constant_of_6_gb_is_not_made_while_the_template_is_read(
    tokenizers_at: dict[str, Path],
) -> None:
    chat = ChatTemplate("{{ 'x' * 6000000000 }}", load_codec(tokenizers_at["decoder"]))
    with pytest.raises(DataError, match="more memory"):
        chat.ids([{"role": "user", "content": "rice"}]).result()


def replace(old: str, new: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


def normalizers(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"normalizer": {"type": "Sequence", "normalizers": list(steps)}}


BYTES = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": False,
}
REGEX = {"type": "Replace", "pattern": {"Regex": "[a-z]"}, "content": "ee"}
HARM = {
    "34 doublings": (
        normalizers(*[replace("e", "ee")] * 34),
        "one byte into 17,179,869,184 bytes",
    ),
    "by an expression": (normalizers(*[REGEX] * 34), "may turn one byte into"),
    "by two letters in turn": (
        normalizers(*[replace("e", "aa"), replace("a", "ee")] * 17),
        "may turn one byte into",
    ),
    "between other steps": (
        normalizers(*[replace("e", "ee"), {"type": "Lowercase"}] * 34),
        "may turn one byte into",
    ),
    "as bytes": (normalizers(*[{"type": "ByteLevel"}] * 34), "may turn one byte into"),
    "12 doublings": (
        normalizers(*[replace("e", "ee")] * 12),
        "turns 'e' into 4,096 characters",
    ),
    "a prepend of 40 MB": (
        normalizers({"type": "Prepend", "prepend": "x" * 40_000_000}),
        "a text of 40,000,000 characters",
    ),
    "words of bytes": (
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTES] * 34}},
        "may turn one byte into",
    ),
    "texts that double": (
        {"decoder": {"type": "Sequence", "decoders": [replace("e", "ee")] * 34}},
        "may turn one byte into",
    ),
    "an entry of 1 MB": (
        {"model": {"type": "BPE", "merges": [], "vocab": {END: 0, "x" * 1_000_000: 1}}},
        "has an entry of 1,000,000 characters",
    ),
    "an added token of 1 MB": (
        {"added_tokens": [{"id": 400, "content": "x" * 1_000_000, "special": False}]},
        "has an entry of 1,000,000 characters",
    ),
    "behind a name": (
        normalizers(*[replace("e", "ee") | {"normalizers": []}] * 34),
        "may turn one byte into",
    ),
    "between all letters": (normalizers(*[replace("", "e")] * 34), "unknown form"),
    "no known form": (normalizers({"type": "Replace", "pattern": "e"}), "unknown form"),
}


@pytest.mark.parametrize("name", HARM)
def test_a_tokenizer_that_takes_all_memory_is_refused(
    name: str, strange: Callable[..., Path]
) -> None:
    parts, said = HARM[name]
    with pytest.raises(DataError, match=said):
        load_codec(strange(**parts))


def test_commands_refuse_it_with_their_exit_codes(
    strange: Callable[..., Path],
    tmp_path: Path,
    kitchen: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    folder = strange(**HARM["34 doublings"][0])
    assert (
        main(["generate", str(folder), "--prompt", "eggs", "--max-new-tokens", "2"])
        == 4
    )
    assert main(["serve", str(folder), "--port", "0"]) == 4
    assert (
        main(["export", str(folder), "--to", str(tmp_path / "x"), "--format", "gguf"])
        == 4
    )
    shutil.copy(kitchen / "run.yaml", tmp_path)
    words = [f"model.tokenizer={folder}", f"data.store={tmp_path / 'store'}"]
    assert main(["prepare", str(tmp_path / "run.yaml"), *words]) == 3
    said = " ".join(capfd.readouterr().err.split())
    assert said.count("17,179,869,184 bytes, but 65,536 is the limit") == 4
    assert said.count(f"{folder / 'tokenizer.json'} may turn") == 4
    with pytest.raises(CheckpointError, match="malicious"):
        open_models({"theirs": folder})


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param(
            [{"type": kind} for kind in ("NFD", "Lowercase", "StripAccents")], id="BERT"
        ),
        pytest.param(
            [{"type": "Prepend", "prepend": "▁"}, replace(" ", "▁")], id="Llama"
        ),
        pytest.param(
            [
                replace("``", '"'),
                replace("''", '"'),
                {"type": "NFKD"},
                {"type": "Lowercase"},
            ],
            id="ALBERT",
        ),
        pytest.param(
            [
                {
                    "type": "Replace",
                    "pattern": {"Regex": f"[{chr(c)}]"},
                    "content": "of it",
                }
                for c in range(0x400, 0x480)
            ],
            id="stand-ins",
        ),
    ],
)
def test_what_tokenizers_usually_do_is_no_harm(
    steps: list[dict[str, Any]], strange: Callable[..., Path]
) -> None:
    codec = load_codec(strange(**normalizers(*steps)))
    assert codec.encode("Two eggs")
