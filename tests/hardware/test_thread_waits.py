"""Waiting threads: a bounded spin before torch is loaded, unless the user chose another."""

import os

import pytest

from fixtures.processes import python
from toque.hardware.thread_waits import (
    BOUNDED,
    WAIT_VARIABLES,
    bound_spinning,
    chosen_by_user,
    waits_in,
)
from toque.training.distributed.launcher import environment_of


@pytest.mark.parametrize("name", WAIT_VARIABLES)
def test_a_variable_of_the_user_stays_alone(name: str) -> None:
    environment = {name: "7", "HOME": "/"}
    bound_spinning(environment)
    assert environment == {name: "7", "HOME": "/"}
    assert chosen_by_user(waits_in(environment))


def test_the_bound_is_set_where_no_variable_is() -> None:
    environment = {"HOME": "/"}
    bound_spinning(environment)
    assert waits_in(environment) == BOUNDED
    assert not chosen_by_user(BOUNDED)
    assert not chosen_by_user({})


@pytest.mark.parametrize("by_user", [{}, {"GOMP_SPINCOUNT": "77"}])
def test_torch_spins_as_the_user_or_else_toque_says(by_user: dict[str, str]) -> None:
    """OpenMP reports what it read when torch was loaded."""
    environment = (
        f"import os; [os.environ.pop(name, None) for name in {WAIT_VARIABLES!r}]"
    )
    environment += f"; os.environ.update({by_user!r})"
    done = python(
        "-c", f"{environment}; import toque, torch", OMP_DISPLAY_ENV="VERBOSE"
    )
    assert done.returncode == 0, done.stderr
    if "GOMP_SPINCOUNT" not in done.stderr:
        pytest.skip("this torch does not use GNU's OpenMP")
    spins = (BOUNDED | by_user)["GOMP_SPINCOUNT"]
    assert f"GOMP_SPINCOUNT = '{spins}'" in done.stderr


def test_ranks_of_one_machine_inherit_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in WAIT_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    bound_spinning()
    try:
        assert waits_in(environment_of(2)) == BOUNDED
    finally:
        for name in BOUNDED:
            os.environ.pop(name)
