"""Waits that are short while other programs compute: idle teams come and go with the readings."""

import threading
from collections.abc import Iterator

from fixtures.processes import python
from toque.hardware.processor import ProcessorUse, usable_cores
from toque.hardware.short_waits import ShortWaits, teams_needed


def idle_teams() -> int:
    return sum(thread.name == "idle team" for thread in threading.enumerate())


def test_idle_teams_are_there_while_others_compute() -> None:
    cores = len(usable_cores())

    def readings() -> Iterator[ProcessorUse]:
        busy = 0.0
        for second, others in enumerate((0.0, 0.0, cores, cores, 0.0)):
            busy += others
            yield ProcessorUse(float(second), busy, 0.0)

    several = max(2, cores)
    taken = readings()
    waits = ShortWaits(several, lambda: next(taken))
    states = list[tuple[bool, bool]]()
    for _ in range(4):
        waits.update()
        states.append((waits.are_short, idle_teams() == teams_needed(several, cores)))
    assert states[:3] == [(False, False), (True, True), (True, True)]
    assert not waits.are_short


def test_a_user_who_chose_how_threads_wait_is_not_overruled() -> None:
    lines = (
        "import threading, toque",
        "from toque.hardware.short_waits import shorten_waits_when_busy",
        "shorten_waits_when_busy(); shorten_waits_when_busy()",
        "print(sum(one.name == 'short waits' for one in threading.enumerate()))",
    )
    code = "\n".join(lines)
    unset = "import os; os.environ.pop('OMP_WAIT_POLICY', None)\n"
    watched = {
        name: python(
            "-c", unset * (name != "passive") + code, **environment
        ).stdout.strip()
        for name, environment in {
            "ours": {"OMP_NUM_THREADS": "2"},
            "passive": {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"},
            "one thread": {"OMP_NUM_THREADS": "1"},
        }.items()
    }
    assert watched == {"ours": "1", "passive": "0", "one thread": "0"}
