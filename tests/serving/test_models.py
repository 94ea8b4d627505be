"""What is served under which name, and what is refused before anything listens."""

import json
import math
import os
import signal
import socket
import subprocess
import sys

import pytest

import toque
from fixtures.kitchens import Notices
from serving.alone import sent
from toque.errors import CheckpointError, ConfigError
from toque.workflows.inference import open_model as opening
from toque.workflows.inference.open_served import open_models

DISH = "lentil soup"


def asked(address, name):
    body = {"model": name, "prompt": DISH, "temperature": 0, "max_tokens": 24}
    header = {"Content-Type": "application/json"}
    answer = sent(address, "POST", "/v1/completions", json.dumps(body), header)
    return json.loads(answer.body)["choices"][0]["text"]


def alone(folder, adapters=()):
    (one,) = toque.generate(
        folder, DISH, adapters=adapters, temperature=0, max_new_tokens=24, raw=True
    )
    return one.text


def test_adapters_beside_their_base_write_their_own_texts_with_one_base_in_memory(
    folders, serving
):
    named = {name: folders[name] for name in ("one", "base", "two")}
    models = open_models(named)
    assert list(models) == ["one", "base", "two"]
    assert len({id(served.model) for served in models.values()}) == 1
    assert [models[name].base for name in models] == ["base", None, "base"]
    with serving(models) as address:
        texts = {name: asked(address, name) for name in (*models, *models)}
    expected = {
        name: alone(folders["base"], [folders[name]]) for name in ("one", "two")
    }
    assert texts == expected | {"base": alone(folders["base"])}
    assert len(set(texts.values())) == 3


def test_what_is_not_in_float32_is_told_once_with_its_name(folders, monkeypatch):
    kinds = {name: folders[name] for name in ("one", "base", "two")} | {
        "again": folders["base"]
    }
    monkeypatch.setattr(
        opening, "placement_note", lambda _: "it is held over two cards in bf16"
    )
    told = Notices()
    open_models(kinds, reporter=told)
    assert told.notices == [
        "note: base: it is held over two cards in bf16",
        "note: again: it is held over two cards in bf16",
    ]


def test_an_adapter_alone_is_merged(folders):
    (served,) = open_models({"mine": folders["one"]}).values()
    assert (served.name, served.adapter) == ("mine", None)
    assert not hasattr(served.model, "peft_config")


def test_an_adapter_of_another_base_is_refused(folders):
    with pytest.raises(
        CheckpointError, match="trained on other weights than this base"
    ):
        open_models({"base": folders["base"], "stranger": folders["stranger"]})


@pytest.mark.parametrize(
    ("models", "settings", "said"),
    [
        ([], {}, "nothing to serve"),
        (["base", "mine=base", "base"], {}, "both be served as 'base'"),
        (["base"], {"host": "0.0.0.0"}, "without a token anyone could"),  # noqa: S104
        (["base"], {"host": "example.org"}, "without a token anyone could"),
        (["base"], {"token": ""}, "token is empty. Choose a token"),
        (["base"], {"rows": 0}, "rows is 0"),
        (["base"], {"seconds": math.nan}, "seconds is nan"),
        (["base"], {"seconds": 0.5}, "seconds is 0.5"),
        (["base"], {"port": 70_000}, "port must be between 0 .* 65535, not 70000"),
        (["base"], {"host": "127.9.9.999.9", "token": "t"}, "Cannot listen"),
        (["base/gone"], {}, "does not exist"),
    ],
)
def test_bad_input_is_refused_in_a_paragraph(
    models, settings, said, folders, monkeypatch
):
    monkeypatch.chdir(folders["base"].parent)
    with pytest.raises(ConfigError, match=said):
        toque.serve(models, **settings)


def test_a_port_that_is_taken_is_said_before_the_model_is_read(folders):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port={port}: Address already in use"):
            toque.serve(folders["base"], port=port)


def test_the_command_serves_and_ends_gracefully_on_sigterm(folders):
    command = [
        sys.executable,
        "-m",
        "toque",
        "serve",
        f"mine={folders['base']}",
        "--port",
        "0",
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ}
    ) as run:
        said = run.stdout.readline()
        address, _, names = said.partition(" serves ")
        assert names == "mine.\n"
        assert asked(address, "mine") == alone(folders["base"])
        run.send_signal(signal.SIGTERM)
        assert run.wait(60) == 0
