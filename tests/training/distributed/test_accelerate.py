"""Accelerate: a lone process of several is refused, and settings that are not read are named."""

import pytest

from toque.errors import ConfigError
from toque.training.distributed.accelerate import ignored_settings, refuse_lone_process

LAUNCHED = {
    "ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_USE_CPU": "True",
    "ACCELERATE_DYNAMO_BACKEND": "NO",
}  # fmt: skip
SEVERAL = LAUNCHED | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
"""What `accelerate launch --cpu --num_processes 2` gives to the one process that it starts."""


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch):
    for name in (*SEVERAL, "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        monkeypatch.delenv(name, raising=False)


def given(monkeypatch, environment):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    "environment", [SEVERAL, {"OMPI_COMM_WORLD_SIZE": "2"}, {"PMI_SIZE": "4"}]
)
def test_one_process_of_several_does_not_train_alone(monkeypatch, environment):
    refuse_lone_process("auto")
    given(monkeypatch, environment)
    with pytest.raises(ConfigError, match=r"train alone.*--gpus|gpus=2.*torchrun"):
        refuse_lone_process("auto")
    refuse_lone_process("single")  # asked for
    monkeypatch.setenv("WORLD_SIZE", "2")
    refuse_lone_process("auto")  # a rank of torchrun, as on GPUs


@pytest.mark.parametrize("environment", [LAUNCHED, {"OMPI_COMM_WORLD_SIZE": "1"}, {
    "MASTER_ADDR": "node1", "MASTER_PORT": "1234"}])  # fmt: skip
def test_a_process_that_was_to_be_alone_trains(monkeypatch, environment):
    given(monkeypatch, environment)
    refuse_lone_process("auto")
    assert ignored_settings("auto") == []


def test_settings_that_are_not_read_are_named_with_those_that_are(monkeypatch):
    given(monkeypatch, {
        "ACCELERATE_MIXED_PRECISION": "fp16", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
        "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR", "ACCELERATE_USE_FSDP": "true",
    })  # fmt: skip
    precision, *others = ignored_settings("auto")
    assert (
        precision
        == "ACCELERATE_MIXED_PRECISION=fp16 is ignored: use train.precision=fp16"
    )
    assert others[0].startswith(
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS=4 is ignored: train.batch"
    )
    assert others[1:] == [
        "ACCELERATE_DYNAMO_BACKEND=inductor is ignored: use train.compile=true",
        "ACCELERATE_USE_FSDP=true is ignored: use train.strategy=fsdp",
    ]
    assert ignored_settings("fp16") == others
