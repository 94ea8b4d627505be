"""Figures of the machine while a run trains: written on the way, and never in its way."""

import json
import sys
import threading
from types import SimpleNamespace

import psutil
import pytest
import torch

from fixtures.updates import update
from toque.hardware.processor import usable_cores
from toque.training.callbacks import RunEnd, RunStart
from toque.training.observers.metrics_log import MetricsLog
from toque.training.observers.system_sampler import Gpus, Host, SystemSampler, find_gpus
from toque.units import Duration, Progress

START = RunStart(Progress(), Duration(6, "steps"))
END = RunEnd("finished", Progress(step=6), 1.0)


class Heard:
    """Takes events as `MetricsLog.record` does."""

    def __init__(self):
        self.events, self.come = [], threading.Event()

    def __call__(self, event, **fields):
        self.events.append({"event": event, **fields})
        self.come.set()


def test_the_machine_is_looked_at_with_the_fields_of_the_contract():
    figures = Host().read()
    assert set(figures) == {
        "cpu_percent", "cpu_percent_by_core", "process_cpu_percent", "memory_used_bytes",
        "memory_total_bytes", "process_resident_bytes", "disk_read_bytes_per_second",
        "disk_write_bytes_per_second", "network_received_bytes_per_second",
        "network_sent_bytes_per_second", "host",
    }  # fmt: skip
    assert 0 < figures["process_resident_bytes"] < figures["memory_total_bytes"]
    assert len(figures["cpu_percent_by_core"]) == len(psutil.Process().cpu_affinity())


def test_looks_come_while_a_run_goes_on_and_once_more_at_its_end():
    heard, warnings = Heard(), []
    sampler = SystemSampler(heard, 0.01, lambda _, text: warnings.append(text))
    sampler.on_fit_start(START)
    sampler.on_step(update(1))
    assert heard.come.wait(60)
    sampler.on_fit_end(END)
    assert {e["event"] for e in heard.events} == {"system"}
    assert all(e["gpus"] == [] and e["step"] in (0, 1) for e in heard.events)
    assert not sampler._thread.is_alive()
    assert warnings == []


def test_a_run_shorter_than_the_interval_is_looked_at_once():
    heard = Heard()
    sampler = SystemSampler(heard, 3600.0, lambda *_: None)
    sampler.on_fit_start(START)
    sampler.on_fit_end(END)
    assert len(heard.events) == 1


def test_a_system_that_cannot_be_looked_at_is_one_warning():
    class Closed:
        def read(self):
            raise psutil.AccessDenied(pid=1)

    heard, warnings = Heard(), []
    sampler = SystemSampler(
        heard,
        0.001,
        lambda at, text: warnings.append((at.step, text)),
        make_host=Closed,
    )
    sampler.on_fit_start(START)
    sampler._thread.join(60)
    sampler.on_step(update(3))
    sampler.on_step(update(4))
    sampler.on_fit_end(END)
    ((at, said),) = warnings
    assert at == 3
    assert "AccessDenied" in said
    assert "The run continues" in said
    assert heard.events == []


CORES = len(usable_cores())


@pytest.mark.parametrize(
    ("spinning", "others", "named"),
    [(max(2, CORES), 99.0, True), (CORES, 0.0, False), (0, 99.0, False)],
)
def test_a_busy_machine_is_named_once_with_its_lever(spinning, others, named):
    class Busy(Host):
        def read(self):
            return super().read() | {"host": {"others_cores": others}}

    heard, warnings = Heard(), []
    sampler = SystemSampler(
        heard,
        0.01,
        lambda _, text: warnings.append(text),
        make_host=Busy,
        spinning=spinning,
    )
    sampler.on_fit_start(START)
    assert heard.come.wait(60)
    sampler.on_fit_end(END)
    assert len(warnings) == named
    for said in warnings:
        assert f"other programs keep 99.0 of {CORES} cores busy" in said
        assert "OMP_WAIT_POLICY=PASSIVE" in said


class NvmlError(Exception):
    pass


def refused(*_):
    raise NvmlError("no permission")


def of_first(answer):
    """What the first card answers; the second, in another mode, refuses."""
    return lambda handle, *_: refused() if handle else answer


def nvml(**changes):
    """nvidia-ml-py of a machine with two cards."""
    answers = {
        "NVMLError": NvmlError,
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": lambda handle: "card B" if handle else "card A",
        "nvmlDeviceGetUtilizationRates": of_first(SimpleNamespace(gpu=97)),
        "nvmlDeviceGetMemoryInfo": lambda _: SimpleNamespace(used=30, total=80),
        "nvmlDeviceGetPowerUsage": lambda _: 250_000,
        "nvmlDeviceGetTemperature": lambda _, sensor: 71 + sensor,
        "nvmlDeviceGetCurrentClocksEventReasons": of_first(32 | 1),
    }
    return SimpleNamespace(**(answers | changes))


def test_what_one_card_refuses_the_others_still_tell():
    closed = []
    gpus = Gpus(nvml(nvmlShutdown=lambda: closed.append(True)))
    first, second = gpus.read()
    assert first == {
        "index": 0, "name": "card A", "utilisation_percent": 97, "memory_used_bytes": 30,
        "memory_total_bytes": 80, "power_watts": 250.0, "temperature_celsius": 71,
        "throttled": ["heat"],
    }  # fmt: skip
    assert (second["name"], second["utilisation_percent"], second["throttled"]) == (
        "card B", None, [],
    )  # fmt: skip
    gpus.close()
    assert closed == [True]


def test_a_driver_that_is_not_there_is_a_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", nvml(nvmlInit=refused))
    found, why = find_gpus()
    assert found is None
    assert "no permission" in why
    monkeypatch.setitem(sys.modules, "pynvml", None)  # as if not installed
    found, why = find_gpus()
    assert found is None
    assert "toque[gpu]" in why


def test_events_of_other_threads_are_whole_lines_within_the_session(tmp_path):
    copied, inside, overlaps = [], [], []

    def copy(record):
        inside.append(1)
        threading.Event().wait(1e-4)  # lets another thread in, if anything does
        overlaps.append(len(inside) > 1)
        inside.pop()
        copied.append(record)

    log = MetricsLog(
        tmp_path / "metrics.jsonl", log_every=Duration(1, "steps"), copies=[copy]
    )
    log.record("system", step=0)
    log.on_fit_start(START)
    threads = [
        threading.Thread(
            target=lambda: [log.record("system", step=0) for _ in range(50)]
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for n in range(1, 6):
        log.on_step(update(n))
    for thread in threads:
        thread.join()
    log.on_fit_end(END)
    log.record("system", step=6)
    lines = [json.loads(line) for line in log.path.read_text().splitlines()]
    assert [line["event"] for line in lines].count("system") == 200
    assert (lines[0]["event"], lines[-1]["event"]) == ("start", "end")
    assert len(copied) == len(lines)
    assert not any(overlaps)


@pytest.mark.gpu
def test_the_gpus_of_this_machine():
    pytest.importorskip("pynvml")
    found, why = find_gpus()
    assert why == ""
    assert len(found.read()) >= torch.cuda.device_count()
