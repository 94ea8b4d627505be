"""Files of examples/cluster: each is what its scheduler reads, and its command is one of ours."""

import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import get_args_parser

from conftest import REPOSITORY
from toque.cli.app import app
from toque.cli.commands_run import train
from toque.config import load_config

CLUSTER = REPOSITORY / "examples" / "cluster"
SCRIPTS = sorted(CLUSTER.glob("*.sh"))


def parsed(words: Sequence[str]) -> dict[str, object]:
    """The arguments of a `toque train` command; its configuration is read, too."""
    assert words[:2] == ["toque", "train"]
    command, bound, _ = app.parse_args(
        words[1:], print_error=False, exit_on_error=False
    )
    assert command is train
    load_config(bound.arguments["config"], list(bound.arguments["overrides"]))
    return dict(bound.arguments)


def command_of(script: Path) -> list[str]:
    """What srun starts, with variables as they would be."""
    text = re.sub(r"\\\n\s*", " ", script.read_text())
    line = next(line for line in text.splitlines() if line.startswith("srun "))
    return shlex.split(line.removeprefix("srun "))


def option(script: Path, name: str) -> int:
    found = re.search(rf"^#SBATCH --{name}=(\d+)", script.read_text(), re.MULTILINE)
    assert found, name
    return int(found[1])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_scripts_are_bash(script: Path) -> None:
    if (bash := shutil.which("bash")) is None:
        pytest.skip("there is no bash")
    subprocess.run([bash, "-n", str(script)], check=True)


def test_slurm_starts_torchrun_once_on_each_machine() -> None:
    script = CLUSTER / "slurm.sh"
    given = get_args_parser().parse_args(command_of(script)[1:])
    assert given.module
    parsed([given.training_script, *given.training_script_args])
    assert option(script, "ntasks-per-node") == 1
    assert int(given.nproc_per_node) == option(script, "gpus-per-node")
    assert int(given.nnodes) == option(script, "nodes")


def test_kubernetes_starts_torchrun_in_each_pod_and_they_find_each_other() -> None:
    service, job = yaml.safe_load_all((CLUSTER / "kubernetes.yaml").read_text())
    spec = job["spec"]
    pod = spec["template"]["spec"]
    container = pod["containers"][0]
    command = container["command"]
    given = get_args_parser().parse_args(command[1:])
    assert command[0] == "torchrun"
    assert given.module
    parsed([given.training_script, *given.training_script_args])
    assert int(given.nnodes) == spec["completions"] == spec["parallelism"]
    assert (
        int(given.nproc_per_node) == container["resources"]["limits"]["nvidia.com/gpu"]
    )
    # The first pod's name by the service, whose selector finds the pods.
    host = f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert given.rdzv_endpoint == f"{host}:29400"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert (
        service["spec"]["selector"].items()
        <= spec["template"]["metadata"]["labels"].items()
    )
    assert service["spec"]["clusterIP"] == "None"
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
