"""On a Ray cluster: the same bytes; without Ray: what to install."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from store_checks import content, prepared
from toque.data.prepare.store_plan import PrepareSettings
from toque.errors import ConfigError, DataError

Make = Callable[..., PrepareSettings]
READERS = str(Path(__file__).parents[2])


def test_without_ray_it_says_what_to_install(
    lines_file: Path, tmp_path: Path, settings_for: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'toque\[ray\]'"):
        prepared(lines_file, tmp_path / "s", settings_for(), engine="ray")


@pytest.mark.slow
@pytest.mark.usefixtures("small_groups")
@pytest.mark.filterwarnings("ignore")  # Ray's own, about its future defaults and open sockets
def test_two_workers_of_a_cluster_write_the_same_bytes(
    lines_file: Path,
    tmp_path: Path,
    settings_for: Make,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ray = pytest.importorskip("ray")
    monkeypatch.setenv("PYTHONPATH", READERS)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    prepared(lines_file, tmp_path / "calm", settings_for(dedup="near"))
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": READERS}},
    )
    try:
        store = tmp_path / "s"
        prepared(lines_file, store, settings_for(dedup="near"), engine="ray", workers=2)
        assert content(store) == content(tmp_path / "calm")
        # A worker's refusal arrives as it was written.
        with pytest.raises(DataError, match="has more than 10 tokens"):
            prepared(
                lines_file,
                tmp_path / "t",
                settings_for(max_target_tokens=10, on_overlong="error"),
                engine="ray",
                workers=2,
            )
    finally:
        ray.shutdown()
