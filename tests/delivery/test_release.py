"""Files that describe a release: they agree on the version and on the commands."""

import re
from pathlib import Path

import yaml

import toque

REPOSITORY = Path(__file__).resolve().parents[2]
WORKFLOWS = REPOSITORY / ".github" / "workflows"


def text_of(name: str) -> str:
    return (REPOSITORY / name).read_text(encoding="utf-8")


def test_the_citation_and_the_changelog_have_the_version_of_the_package():
    assert yaml.safe_load(text_of("CITATION.cff"))["version"] == toque.__version__
    newest = re.search(r"(?m)^## (\S+) \(", text_of("CHANGELOG.md"))
    assert newest is not None
    assert newest[1] == toque.__version__


def test_the_workflows_run_the_test_command_of_the_readme():
    workflow = yaml.safe_load((WORKFLOWS / "test.yml").read_text(encoding="utf-8"))
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    commands = [step["run"] for step in steps if "run" in step]
    assert "make test" in commands
    assert "$ make test " in text_of("README.md")


def test_the_workflows_call_targets_of_the_makefile():
    targets = set(re.findall(r"(?m)^([a-z-]+):", text_of("Makefile")))
    for file in sorted(WORKFLOWS.glob("*.yml")):
        called = re.findall(
            r"(?m)run: make ([a-z-]+)", file.read_text(encoding="utf-8")
        )
        assert called, file.name
        assert set(called) <= targets, file.name
