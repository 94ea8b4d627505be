"""Requests that are asked again, and those that are not."""

from __future__ import annotations

import pytest

from toque.storage import retry
from toque.storage.retry import MismatchError, Retry, is_transient


class Service:
    """Fails with each of its errors in turn, then answers."""

    def __init__(self, *errors):
        self.errors, self.asked = list(errors), 0

    def __call__(self):
        self.asked += 1
        if self.errors:
            raise self.errors.pop(0)
        return "answer"


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(retry, "FIRST_WAIT", 0.001)


def test_waits_double_and_are_counted():
    service, again = Service(*[ConnectionResetError("x")] * 4), Retry()
    assert again(service, (OSError,)) == "answer"
    assert service.asked == 5
    assert len(again.waits) == 4
    for attempt, seconds in enumerate(again.waits):
        assert 0.0005 * 2**attempt <= seconds <= 0.001 * 2**attempt


@pytest.mark.parametrize(
    ("error", "transient"),
    [
        (ConnectionResetError("reset"), True),
        (TimeoutError(), True),
        (OSError("Slow Down: 503"), True),
        (MismatchError("a has 403 bytes in the bucket; 401 were sent"), True),
        (OSError("MD5 9f403ab2 differs"), True),
        (FileNotFoundError("gone"), False),
        (PermissionError("Access Denied"), False),
        (OSError("Forbidden: https://host/o"), False),
        (OSError("An error occurred (403) when calling PutObject"), False),
        (ValueError("InvalidAccessKeyId"), False),
    ],
)
def test_only_what_may_pass_is_asked_again(error, transient):
    assert is_transient(error) == transient
    service, again = Service(error), Retry()
    if transient:
        assert again(service, (OSError, ValueError)) == "answer"
        return
    with pytest.raises(type(error)):
        again(service, (OSError, ValueError))
    assert service.asked == 1


def test_a_deadline_or_a_stop_ends_it():
    with pytest.raises(ConnectionResetError):
        Retry(deadline=0.0)(Service(ConnectionResetError()), (OSError,))
    stopped, service = Retry(), Service(ConnectionResetError())
    stopped.stop.set()
    with pytest.raises(ConnectionResetError):
        stopped(service, (OSError,))
    assert service.asked == 1
