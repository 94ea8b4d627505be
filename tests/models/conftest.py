from collections.abc import Callable

import pytest
from transformers import PreTrainedModel

from tiny import EVERY_KIND, KINDS, Example, examples, make, pack
from toque.batch import Batch


@pytest.fixture(params=EVERY_KIND)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=list(KINDS))
def family_kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def tiny() -> Callable[..., PreTrainedModel]:
    return make


@pytest.fixture
def some_examples() -> Callable[..., list[Example]]:
    return examples


@pytest.fixture
def packed() -> Callable[..., Batch]:
    return pack
