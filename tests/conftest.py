"""What every test shares: one thread, no network, real data where it lies, golden files."""

import difflib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

# Before anything imports a Hugging Face library: a hub look-up would retry for most of a minute.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")
# What tests measure and fetch stays out of the user's cache, and is shared by the processes.
os.environ.setdefault("TOQUE_CACHE", tempfile.mkdtemp(prefix="toque-cache-"))

import pytest
from hypothesis import settings

pytest_plugins = [
    "fixtures.stores",
    "fixtures.runs",
    "fixtures.recipe_files",
    "fixtures.browser",
    "fixtures.buckets",
    "fixtures.kitchens",
    "fixtures.pairs",
]

REPOSITORY = Path(__file__).resolve().parent.parent
GOLDEN = REPOSITORY / "tests" / "golden"

# The same examples on every machine and in every run; no time limit, machines are shared.
settings.register_profile(
    "toque", derandomize=True, deadline=None, max_examples=30, database=None
)
settings.load_profile("toque")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--regenerate",
        action="store_true",
        help="rewrite golden files instead of comparing",
    )


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Sums depend on the number of threads; so do other people's test runs on the machine."""
    try:
        import torch
    except ImportError:
        return
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real recipes, tokenizers and models: $TOQUE_SHARED, or ../shared."""
    named = os.environ.get("TOQUE_SHARED")
    folder = Path(named) if named else REPOSITORY.parent / "shared"
    if not (folder / "data").is_dir():
        pytest.skip(
            f"no real data at {folder}; set TOQUE_SHARED to the folder that holds data/"
        )
    return folder


@pytest.fixture
def regenerate(request: pytest.FixtureRequest) -> bool:
    """Whether golden files are rewritten in this run."""
    return bool(request.config.getoption("--regenerate"))


@pytest.fixture
def golden_text(*, regenerate: bool) -> Callable[[Path, str], None]:
    """`golden_text(path, text)`: the file at `path` holds exactly `text`, or is made to."""

    def compare(path: Path, text: str) -> None:
        if regenerate:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            return
        pinned = path.read_text(encoding="utf-8") if path.exists() else ""
        difference = difflib.unified_diff(
            pinned.splitlines(), text.splitlines(), "pinned", "now", lineterm=""
        )
        name = path.relative_to(REPOSITORY)
        hint = f"{name} differs; if the change is meant: pytest --regenerate"
        assert pinned == text, "\n".join([hint, *difference])

    return compare
