"""A plan made: the outlined model, and what follows from it."""

from __future__ import annotations

from toque.config import RunConfig
from toque.models.families import family_of
from toque.models.flops import parameter_counts
from toque.training.planning.outlined_update import outlining
from toque.workflows.plan.ahead import store_of, what_lies_ahead
from toque.workflows.plan.disk import disk_of
from toque.workflows.plan.duration import time_of
from toque.workflows.plan.levers import Case, levers_of
from toque.workflows.plan.machine import machine_of
from toque.workflows.plan.memory import memory_of
from toque.workflows.plan.outlined_model import outlined_model, vocabulary_of
from toque.workflows.plan.result import Plan


def planned(config: RunConfig, hardware: str | None, utilisation: float | None) -> Plan:
    """What `plan` gives."""
    store = store_of(config)
    vocabulary, _ = vocabulary_of(config, store)
    with outlining():
        # The family decides the precision, and the precision the layers: so twice.
        plain = outlined_model(config, vocabulary, where="cuda", precision="float32")
    machine = machine_of(config, hardware, family_of(plain.config))
    ahead = what_lies_ahead(config, plain, store)
    with outlining():
        model = outlined_model(config, vocabulary, where=machine.where, precision=machine.precision)
        memory = memory_of(config, model, ahead, machine)
    time = time_of(config, model, vocabulary, ahead, machine, memory, utilisation=utilisation)
    case = Case(config, vocabulary, ahead, machine, memory, time)
    with outlining():
        levers = list(levers_of(case))
    disk = disk_of(config, model, ahead, memory, time.run_seconds)
    return Plan(
        parameters=parameter_counts(model),
        machine=machine,
        ahead=ahead,
        memory=memory,
        time=time,
        disk=disk,
        levers=levers,
        notes=[],
    )
