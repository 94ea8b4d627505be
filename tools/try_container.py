"""Trial of the Dockerfile in a fresh Debian root, for a machine without a container engine.

    sudo python tools/try_container.py FOLDER --wheels WHEELS      CPU, a demo of 30 seconds
    sudo python tools/try_container.py FOLDER --whole-demo --build-arg DEVICE=cuda

Needs root and debootstrap. The RUN, COPY, ENV, ARG and WORKDIR steps of the last stage are read
from the Dockerfile itself and done in a chroot under FOLDER; then the entry point does the demo as
the image's user, as process 1 of its own. Mirror and pip's settings are this machine's, read now.
What this cannot try: layers, volumes, GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
INSIDE = "TOQUE_TRIAL_INSIDE"
"""Set in the mount namespace that this script starts itself in: its mounts end with it."""


def instructions(dockerfile: str) -> list[tuple[str, str]]:
    r"""Name and arguments of each step of the last stage.

    >>> instructions("FROM scratch AS a\nFROM debian:x\n# why\nRUN one \\\n  two\n")
    [('FROM', 'debian:x'), ('RUN', 'one two')]
    """
    text = re.sub(r"(?m)^\s*#.*\n", "", dockerfile)
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    steps = [
        (name, rest)
        for name, _, rest in (line.partition(" ") for line in lines)
        if name
    ]
    last = max(at for at, (name, _) in enumerate(steps) if name == "FROM")
    return steps[last:]


def mirror_of_this_machine() -> str | None:
    """The first Debian archive in apt's sources; None: debootstrap's own."""
    for file in sorted(Path("/etc/apt").glob("sources.list*")) + sorted(
        Path("/etc/apt/sources.list.d").glob("*")
    ):
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
        found = re.search(
            r"(?m)^(?:URIs:|deb)\s.*?(https?://\S+/debian)/?(?:\s|$)", text
        )
        if found:
            return found[1]
    return None


def pip_settings() -> tuple[str, list[Path]]:
    """Settings of pip on this machine, as a pip.conf, and the local paths that they name."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    values: dict[str, str] = {}
    for line in listed.splitlines():  # the environment's come first and win
        name, _, quoted = line.partition("=")
        values.setdefault(name.split(".", 1)[1].lstrip("."), quoted[1:-1])
    words = " ".join(values.values()).split()
    paths = [Path(word.removeprefix("file://")) for word in words]
    lines = [f"{name} = {value}" for name, value in values.items()]
    return "\n".join(["[global]", *lines, ""]), [
        _folder(path) for path in paths if path.is_absolute() and path.exists()
    ]


def _folder(path: Path) -> Path:
    """What is to be seen for a path to work: an index of files leads beside itself."""
    return path.parent if path.name == "simple" else path


@dataclass
class Root:
    """A folder that steps are done in as if it were the machine."""

    folder: Path
    context: Path
    wheels: Path | None
    values: dict[str, str]
    """ARG and ENV so far."""
    build_args: dict[str, str]
    work: str = "/"
    user: str = "root"
    said: dict[str, list[str]] = field(default_factory=dict)
    """ENTRYPOINT and HEALTHCHECK, as lists of words."""

    def do(self, name: str, rest: str) -> None:
        """Do one step."""
        match name:
            case "RUN":
                self._run(rest)
            case "COPY":
                self._copy(shlex.split(rest))
            case "ENV":
                self.values |= dict(pair.split("=", 1) for pair in shlex.split(rest))
            case "ARG":
                key, _, default = rest.partition("=")
                self.values[key] = self.build_args.get(key, default)
            case "WORKDIR":
                self.work = rest
                self._inside(rest).mkdir(parents=True, exist_ok=True)
            case "USER":
                self.user = rest
            case "ENTRYPOINT" | "HEALTHCHECK":
                self.said[name] = json.loads(rest[rest.index("[") :])
            case "FROM" | "VOLUME" | "EXPOSE" | "CMD":
                pass
            case _:
                sys.exit(
                    f"The Dockerfile has a step {name}, which this trial does not know."
                )

    def execute(self, words: Iterable[str]) -> int:
        """Run a command as the image's user in the folder of the step; its exit code."""
        return subprocess.run(self.command(words), check=False).returncode

    def command(self, words: Iterable[str]) -> list[str]:
        """A command inside, as this machine starts it: nothing of its environment goes along."""
        home = "/root" if self.user == "root" else f"/home/{self.user}"
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        proxies = {
            key: value for key, value in os.environ.items() if key.endswith("_proxy")
        }
        environment = {"PATH": path, "HOME": home, **proxies, **self.values}
        settings = [f"{key}={value}" for key, value in environment.items()]
        chroot = ["chroot", f"--userspec={self.user}", str(self.folder)]
        return [*chroot, "env", "-i", f"--chdir={self.work}", *settings, *words]

    def first_process(self, words: Iterable[str]) -> list[str]:
        """A command as `docker run` starts it: as process 1."""
        space = ["unshare", "--pid", "--fork", f"--mount-proc={self._inside('/proc')}"]
        return [*space, *self.command(words)]

    def _run(self, rest: str) -> None:
        mounts = re.findall(r"--mount=(\S+)", rest)
        command = re.sub(r"--mount=\S+\s*", "", rest)
        mounted = [target for mount in mounts for target in self._mount(mount)]
        code = self.execute(["sh", "-c", command])
        for target in reversed(mounted):
            subprocess.run(["umount", target], check=True)
        if code:
            sys.exit(f"The step ended with {code}: RUN {rest}")

    def _mount(self, mount: str) -> list[Path]:
        options = dict(pair.split("=", 1) for pair in mount.split(","))
        if options["type"] == "secret":
            text, paths = pip_settings()
            handed = self.folder.parent / "pip.conf"
            handed.write_text(text, encoding="utf-8")
            return [self._bind(handed, options["target"])] + [
                self._bind(path, str(path)) for path in dict.fromkeys(paths)
            ]
        empty = self.folder.parent / "empty"
        empty.mkdir(exist_ok=True)
        return [self._bind(self.wheels or empty, options["target"])]

    def _bind(self, path: Path, target: str) -> Path:
        inside = self._inside(target)
        inside.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            inside.mkdir(exist_ok=True)
        else:
            inside.touch()
        subprocess.run(["mount", "--bind", "-o", "ro", path, inside], check=True)
        return inside

    def _copy(self, words: list[str]) -> None:
        *sources, target = words
        into = self._inside(os.path.join(self.work, target))  # noqa: PTH118
        into.mkdir(parents=True, exist_ok=True)
        for source in sources:
            path = self.context / source
            if path.is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(path, into, ignore=ignored, dirs_exist_ok=True)
            else:
                shutil.copy(path, into)

    def _inside(self, path: str) -> Path:
        return self.folder / os.path.normpath(path).lstrip("/")


def fresh_root(folder: Path, suite: str) -> Path:
    """A root of nothing but Debian's smallest set; debootstrap's is kept beside it and copied."""
    base, root = folder / f"debian-{suite}", folder / "root"
    if not (base / "etc" / "debian_version").is_file():
        mirror = mirror_of_this_machine()
        command = [
            "debootstrap",
            "--variant=minbase",
            suite,
            base,
            *([mirror] if mirror else []),
        ]
        subprocess.run(command, check=True)
    if root.exists():
        shutil.rmtree(root)
    subprocess.run(["cp", "--archive", base, root], check=True)
    for name in ("proc", "dev"):
        kind = ["-t", "proc", "proc"] if name == "proc" else ["--rbind", "/dev"]
        subprocess.run(["mount", *kind, str(root / name)], check=True)
    return root


def try_serving(root: Root) -> None:
    """Serve the demo's model as process 1, until it is healthy; then end it."""
    words = [*root.said["ENTRYPOINT"], "serve", "runs/demo"]
    with subprocess.Popen(root.first_process(words)) as space:
        children = Path(f"/proc/{space.pid}/task/{space.pid}/children")
        deadline = time.monotonic() + 120
        while True:
            time.sleep(2)
            inside = (
                children.read_text(encoding="utf-8").strip()
                if space.poll() is None
                else ""
            )
            if not inside or time.monotonic() > deadline:
                space.kill()
                sys.exit(f"{' '.join(words)} did not become healthy in two minutes.")
            enter = ["nsenter", f"--target={inside}", "--pid", "--mount"]
            check = root.command(root.said["HEALTHCHECK"])
            if (
                subprocess.run(
                    [*enter, *check], stderr=subprocess.DEVNULL, check=False
                ).returncode
                == 0
            ):
                break
        os.kill(int(inside), signal.SIGTERM)
    if space.returncode:
        sys.exit(f"{' '.join(words)} ended with {space.returncode} on SIGTERM.")


def main() -> None:
    """Do the steps, the demo and the health check; a step that fails ends the trial."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folder", type=Path, help="where the root is made, some gigabytes"
    )
    parser.add_argument(
        "--wheels", type=Path, help="as docker's --build-context wheels=FOLDER"
    )
    parser.add_argument(
        "--build-arg", action="append", default=[], metavar="NAME=VALUE"
    )
    parser.add_argument(
        "--whole-demo", action="store_true", help="instead of 30 seconds of it"
    )
    asked = parser.parse_args()
    if os.geteuid() != 0 or shutil.which("debootstrap") is None:
        sys.exit(
            "The trial needs root (chroot, mounts) and debootstrap (apt install debootstrap)."
        )
    if INSIDE not in os.environ:
        command = ["unshare", "--mount", sys.executable, *sys.argv]
        os.execvpe("unshare", command, {**os.environ, INSIDE: "1"})  # noqa: S606
    asked.folder.mkdir(parents=True, exist_ok=True)
    steps = instructions((REPOSITORY / "Dockerfile").read_text(encoding="utf-8"))
    suite = steps[0][1].removeprefix("debian:").removesuffix("-slim")
    root = Root(
        folder=fresh_root(asked.folder.resolve(), suite),
        context=REPOSITORY,
        wheels=asked.wheels.resolve() if asked.wheels else None,
        values={},
        build_args=dict(pair.split("=", 1) for pair in asked.build_arg),
    )
    for number, (name, rest) in enumerate(steps, start=1):
        began = time.monotonic()
        print(f"[{number}/{len(steps)}] {name} {rest[:100]}", flush=True)
        root.do(name, rest)
        print(f"    {time.monotonic() - began:.0f} s", flush=True)
    demo = ["demo"] if asked.whole_demo else ["demo", "train.stop_after=30 seconds"]
    words = [*root.said["ENTRYPOINT"], *demo]
    print(f"as {root.user}: {' '.join(words)}", flush=True)
    if code := subprocess.run(root.first_process(words), check=False).returncode:
        sys.exit(f"{' '.join(words)} ended with {code}.")
    try_serving(root)
    print(
        "Done: the Dockerfile's steps, the demo, a server that was healthy and ended on SIGTERM."
    )


if __name__ == "__main__":
    main()
