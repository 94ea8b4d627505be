import pytest


@pytest.fixture
def warnings():
    """Steps and sentences that observers warn with."""
    return []


@pytest.fixture
def warn(warnings):
    return lambda at, text: warnings.append((at.step, text))
