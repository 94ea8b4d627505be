"""Verdicts on the page: shown, asked for seldom, and done without where there are none."""

from dataclasses import dataclass

from toque.watching.places import FolderPlace
from toque.watching.verdicts import Verdicts
from toque.watching.view import Chosen, Viewer
from toque.watching.watched_run import WatchedRun
from watching.written_run import WrittenRun


@dataclass
class Share:
    name: str
    seconds: float
    share: float


@dataclass
class Verdict:
    shares: tuple[Share, ...]
    sentence: str
    lever: str | None
    expected_gain: float | None


WAITING = Verdict(
    (Share("waiting for data", 45.0, 0.75), Share("computing", 15.0, 0.25)),
    "Waiting for data limits this run.",
    "data.prefetch=4",
    0.25,
)


def verdict_part(folder, verdict) -> str:
    run = WatchedRun(FolderPlace(folder))
    run.refresh()
    viewer = Viewer(str(folder), Verdicts(ask=lambda _: verdict))
    return viewer.view({"run": run}, Chosen()).parts["verdict"]


def test_the_sentence_the_lever_and_the_shares_are_shown(tmp_path):
    WrittenRun(tmp_path / "run").step(1)
    html = verdict_part(tmp_path / "run", WAITING)
    for part in (WAITING.sentence, "data.prefetch=4", "about 25% faster", "75.0%", "0:45"):
        assert part in html
    assert verdict_part(tmp_path / "run", None).strip() == ""


def test_a_run_is_judged_seldom_and_when_it_changed(tmp_path):
    now, asked = [100.0], []
    verdicts = Verdicts(ask=lambda folder: asked.append(folder) or WAITING, clock=lambda: now[0])
    assert verdicts.of(tmp_path, 1) is WAITING
    now[0] += 1000
    verdicts.of(tmp_path, 1)
    assert len(asked) == 1
    verdicts.of(tmp_path, 2)
    assert len(asked) == 2
    now[0] += 10
    verdicts.of(tmp_path, 3)
    assert len(asked) == 2
