import os
import signal
import threading

import pytest

from fixtures.processes import python
from toque.training.callbacks import Callback, RunEnd, RunStart
from toque.training.stopping import INTERRUPTED, Interrupt
from toque.units import Duration, Progress

START = RunStart(Progress(), Duration(10, "steps"))
END = RunEnd("finished", Progress(), 0.0)


class KillAt(Callback):
    def __init__(self, step, number):
        self.step, self.number = step, number

    def on_step(self, info):
        if info.progress.step == self.step:
            os.kill(os.getpid(), self.number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_finishes_the_step_saves_and_stops(make_run, number):
    before = signal.getsignal(number)
    whole = make_run(folder=make_run.folder / "whole")
    whole.trainer.fit()
    run = make_run(save_every=None, callbacks=(KillAt(7, number), Interrupt()))
    end = run.trainer.fit()
    assert end.reason == INTERRUPTED
    assert run.recorder.events[-3:] == ["step 7", "save 7", "end interrupted"]
    assert signal.getsignal(number) is before
    again = make_run()
    again.trainer.fit()
    assert run.losses + again.losses == whole.losses


def test_handlers_are_given_back_even_after_an_error(make_run):
    before = signal.getsignal(signal.SIGTERM)
    run = make_run(callbacks=(Interrupt(),))
    run.trainer.loss_fn = None
    with pytest.raises(TypeError):
        run.trainer.fit()
    assert signal.getsignal(signal.SIGTERM) is before


def test_outside_the_main_thread_signals_are_left_alone():
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def work():
        interrupt = Interrupt()
        interrupt.on_fit_start(START)
        seen.append(signal.getsignal(signal.SIGTERM))
        interrupt.on_fit_end(END)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]


TWICE = """
import os, signal
from toque.training.stopping import Interrupt
from toque.training.callbacks import RunStart
from toque.units import Duration, Progress
Interrupt().on_fit_start(RunStart(Progress(), Duration(1, "steps")))
os.kill(os.getpid(), signal.SIGTERM)
print("still here", flush=True)
os.kill(os.getpid(), signal.SIGTERM)
print("never printed", flush=True)
"""


def test_the_second_signal_exits_at_once():
    done = python("-c", TWICE)
    assert done.returncode == 128 + signal.SIGTERM
    assert done.stdout == "still here\n"
    assert "SIGTERM: finishing this step" in done.stderr
    assert "SIGTERM again: exiting now" in done.stderr
