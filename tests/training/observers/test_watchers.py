"""Who watches a run from outside: nothing they do, or fail to do, touches it."""

import json
import threading
from dataclasses import replace
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from fixtures.updates import update
from toque.config import load_config
from toque.errors import ConfigError
from toque.training.callbacks import Best, Callbacks, Goal, Requests, RunEnd, RunStart
from toque.training.observers.watchers import (
    EqualRewards,
    Overfitting,
    UserCallback,
    Watchers,
)
from toque.training.observers.webhook import (
    Webhook,
    describe_error,
    encode_message,
    post_json,
)
from toque.units import Duration, Progress

START = RunStart(Progress(), Duration(6, "steps"))
END = RunEnd("finished", Progress(step=6, epoch=3.0), 60.0, Best(4, 1.5))


class Notes:
    def __init__(self):
        self.seen = []

    def __getattr__(self, name):
        if not name.startswith("on_"):
            raise AttributeError(name)
        return lambda state: self.seen.append((name.removeprefix("on_"), state.step))


def run_through(callback, steps=4):
    callback.on_fit_start(START)
    asked = []
    for step in range(1, steps + 1):
        info = update(step, per_epoch=2)
        callback.on_before_step(info.before)
        asked.append(callback.on_step(info))
    callback.on_before_evaluate(Progress(step=steps))
    asked.append(callback.on_evaluate(Progress(step=steps), {"loss": 1.5}))
    callback.on_fit_end(END)
    return asked


def test_all_methods_are_called_in_order(warn, warnings):
    notes = Notes()
    run_through(UserCallback(notes, name="notes", warn=warn), steps=3)
    assert notes.seen == [
        ("train_begin", 0), ("epoch_begin", 0), ("step_begin", 0), ("step_end", 1),
        ("step_begin", 1), ("step_end", 2), ("epoch_end", 2), ("epoch_begin", 2),
        ("step_begin", 2), ("step_end", 3), ("evaluate_begin", 3), ("evaluate_end", 3),
        ("train_end", 6),
    ]  # fmt: skip
    assert warnings == []


def test_what_a_method_returns_is_asked_of_the_loop(warn):
    class Asking:
        def on_step_end(self, state):
            assert state.loss == 2.0
            return {1: None, 2: "save", 3: ["save", "stop"], 4: "evaluate"}[state.step]

    asked = run_through(UserCallback(Asking(), name="asking", warn=warn))
    assert asked == [
        Requests(),
        Requests(save=True),
        Requests(stop=True, save=True, reason="callback"),
        Requests(evaluate=True),
        None,
    ]


def test_one_that_raises_is_survived_with_one_warning_and_counted(warn, warnings):
    class Raising:
        def on_step_end(self, state):
            raise ZeroDivisionError("of my own")

        def on_evaluate_end(self, state):
            return 7

    asked = run_through(UserCallback(Raising(), name="m:Raising", warn=warn))
    assert asked[:4] == [Requests()] * 4
    assert [step for step, _ in warnings] == [1, 6]
    assert (
        "m:Raising raised in on_step_end: ZeroDivisionError: of my own"
        in warnings[0][1]
    )
    assert "test_watchers.py, line" in warnings[0][1]
    assert "raised 5 times" in warnings[1][1]


def test_state_travels_with_checkpoints_when_it_is_json(warn, warnings):
    class Counting:
        def __init__(self, kept):
            self.kept = kept

        def state_dict(self):
            return self.kept

        def load_state_dict(self, state):
            self.kept = state

    one, other = Counting({"n": 3}), Counting(None)
    state = UserCallback(one, name="c", warn=warn).state_dict()
    UserCallback(other, name="c", warn=warn).load_state_dict(
        json.loads(json.dumps(state))
    )
    assert other.kept == {"n": 3}
    UserCallback(other, name="another", warn=warn).load_state_dict(
        {"name": "c", "own": 1}
    )
    assert other.kept == {"n": 3}
    for no_json in ({1, 2}, {"lowest": float("inf")}, [float("nan")]):
        assert UserCallback(Counting(no_json), name="c", warn=warn).state_dict() == {}
    assert all("raised in state_dict" in said for _, said in warnings)
    assert "NaN or infinity" in warnings[1][1]
    assert "Return None instead of NaN" in warnings[2][1]


def test_state_is_found_by_name_whatever_other_callbacks_there_are(warn):
    class Counting:
        def __init__(self, n):
            self.n = n

        def state_dict(self):
            return {"n": self.n}

        def load_state_dict(self, state):
            self.n = state["n"]

    def those(*named):
        own = [Counting(n) for _, n in named]
        names = [name for name, _ in named]
        pairs = zip(own, names, strict=True)
        return own, Callbacks(
            [UserCallback(o, name=name, warn=warn) for o, name in pairs]
        )

    _, before = those(("b", 7), ("c", 8), ("c", 9))
    own, after = those(("a", 0), ("c", 0), ("b", 0), ("c", 0))
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert [o.n for o in own] == [0, 8, 7, 9]


def test_overfitting_is_said_once_until_the_gap_closes(warn, warnings):
    watch = Overfitting(warn=warn)
    gaps = [(2.0, 2.5), (2.0, 2.7), (1.0, 1.5), (2.0, 2.5), (1.0, 1.5)]
    for step, (trained, held_out) in enumerate(gaps, start=1):
        watch.on_step(update(step, loss=trained))
        watch.on_evaluate(Progress(step=step), {"loss": held_out})
    assert [step for step, _ in warnings] == [2, 5]
    assert "35%" in warnings[0][1]


def test_losses_of_pairs_near_zero_are_no_overfitting(warn, warnings):
    watch = Overfitting(warn=warn)
    watch.on_step(update(1, loss=0.001))
    watch.on_evaluate(Progress(step=1), {"loss": 0.04})
    assert warnings == []
    watch.on_step(update(2, loss=0.001))
    watch.on_evaluate(Progress(step=2), {"loss": 0.2})
    assert [step for step, _ in warnings] == [2]


def test_overfitting_compares_the_same_updates_after_a_restart(warn, warnings):
    first, second = Overfitting(warn=warn), Overfitting(warn=warn)
    first.on_step(update(1, loss=3.0))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    second.on_step(update(2, loss=1.0))
    second.on_evaluate(Progress(step=2), {"loss": 2.61})
    assert "(2.0000)" in warnings[0][1]  # of both updates


def test_overfitting_leaves_out_losses_that_are_no_numbers(warn, warnings):
    watch = Overfitting(warn=warn)
    for step, loss in enumerate([2.0, float("nan"), float("inf"), 2.0], start=1):
        watch.on_step(update(step, loss=loss))
    assert watch.state_dict() == {"nats": 240.0, "targets": 120, "warned": False}
    watch.on_evaluate(Progress(step=4), {"loss": 2.7})
    assert "(2.0000)" in warnings[0][1]


class Receiver(ThreadingHTTPServer):
    def __init__(self, *, hang=None, status=204):
        self.bodies, self.hang, self.status = [], hang, status
        super().__init__(("127.0.0.1", 0), Answer)
        self.address = f"http://127.0.0.1:{self.server_port}/secret-token"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Answer(BaseHTTPRequestHandler):
    def do_POST(self):
        self.server.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
        if self.server.hang is not None:
            self.server.hang.wait(60)
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, *args):
        pass


@pytest.fixture
def receive():
    servers = []

    def make(**options):
        servers.append(Receiver(**options))
        return servers[-1]

    yield make
    for server in servers:
        if server.hang is not None:
            server.hang.set()
        server.shutdown()
        server.server_close()


def test_a_webhook_tells_start_best_and_end(receive, warn, warnings):
    server = receive()
    hook = Webhook(server.address, run="soup", goal=Goal(), warn=warn)
    hook.on_fit_start(START)
    for step, loss in ((1, float("nan")), (2, 2.0), (4, 1.5), (6, 1.7)):
        hook.on_evaluate(Progress(step=step), {"loss": loss})
    hook.on_fit_end(replace(END, best=Best(4, 1.5)))
    said = [json.loads(body) for body in server.bodies]
    assert [(m["event"], m["step"], m["loss"]) for m in said] == [
        ("start", 0, None),
        ("best", 2, 2.0),
        ("best", 4, 1.5),
        ("end", 6, 1.5),
    ]
    assert said[-1]["text"].startswith(
        "soup: finished after 1.0 minutes, lowest held-out loss 1.5"
    )
    assert warnings == []


def test_a_webhook_announces_the_best_value_of_the_runs_metric(receive, warn):
    server = receive()
    goal = Goal("cookable", rises=True)
    hook = Webhook(server.address, run="soup", goal=goal, warn=warn)
    for step, value in ((2, 0.3), (4, 0.2), (6, 0.5)):
        hook.on_evaluate(Progress(step=step), {"loss": 1 / step, "cookable": value})
    hook.on_fit_end(replace(END, best=Best(6, 0.2, "cookable", 0.5)))
    texts = [json.loads(body)["text"] for body in server.bodies]
    assert texts == [
        "soup: highest cookable so far, 0.3000 (step 2)",
        "soup: highest cookable so far, 0.5000 (step 6)",
        "soup: finished after 1.0 minutes, highest cookable 0.5000 (step 6)",
    ]


def test_a_failure_is_told_and_a_refusal_is_warned_of_without_the_address(
    receive, warn, warnings
):
    server = receive(status=404)
    hook = Webhook(server.address, run="soup", goal=Goal(), warn=warn)
    hook.on_fit_end(
        RunEnd("non_finite", Progress(step=3), 1.0, error="the loss is NaN")
    )
    (body,) = server.bodies
    assert json.loads(body)["event"] == "failure"
    assert "the loss is NaN" in json.loads(body)["text"]
    ((_, said),) = warnings
    assert said.startswith("1 webhook messages could not be delivered")
    assert "HTTP 404" in said
    assert "secret" not in said


def test_a_webhook_that_hangs_delays_no_step_and_the_end_by_seconds(
    receive, warn, warnings, monkeypatch
):
    monkeypatch.setattr("toque.training.observers.webhook.END_PATIENCE_SECONDS", 0.2)
    server = receive(hang=threading.Event())
    hook = Webhook(server.address, run="soup", goal=Goal(), warn=warn)
    hook.on_fit_start(START)
    for step in range(1, 101):
        hook.on_step(update(step))
        hook.on_evaluate(Progress(step=step), {"loss": 1.0 / step})
    hook.on_fit_end(END)
    assert not server.hang.is_set()  # nobody waited for its answer
    assert len(server.bodies) <= 1
    assert "could not be delivered" in warnings[0][1]
    lost = hook._thread.dropped
    assert lost == 102


def test_discord_gets_its_form_and_others_plain_json():
    made = {"run": "r", "step": 1, "text": "x" * 5000, "loss": None}
    discord = json.loads(
        encode_message("https://discord.com/api/webhooks/1/a", "end", **made)
    )
    assert set(discord) == {"content", "allowed_mentions"}
    assert len(discord["content"]) < 2000
    plain = json.loads(
        encode_message("https://notdiscord.com.example.org/x", "end", **made)
    )
    assert plain["event"] == "end"


def test_no_error_text_names_the_address():
    for address in (
        "http://127.0.0.1:9/token",
        "http://no host/token",
        "http://[/token",
    ):
        with pytest.raises((OSError, ValueError, HTTPException)) as failed:
            post_json(address, b"{}")
        assert "token" not in describe_error(failed.value)


def watchers(*overrides, own=()):
    config = load_config("demo", overrides).config
    settings = config.model_dump(mode="json")
    return Watchers.from_settings(
        config.observe,
        {},
        own,
        run=Path("run"),
        settings=settings,
        scores=frozenset(),
        goal=Goal(),
    )


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "class Good:\n    def on_step_end(self, state): ...\n"
        "class Misnamed:\n    def on_batch_end(self, state): ...\n"
        "class Silent: ...\n"
        "class Needy(Good):\n    def __init__(self, path): ...\n"
        "number = 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("module")
def test_classes_are_made_from_their_names():
    ((name, made),) = watchers("observe.callbacks=[mine:Good]").user_objects
    assert (name, type(made).__name__) == ("mine:Good", "Good")


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("mine:Gone", "cannot be imported"),
        ("nowhere_at_all:Good", "cannot be imported"),
        ("mine:Misnamed", "Nearest: on_step_end"),
        ("mine:Silent", "none of a callback"),
        ("mine:Needy", "without arguments"),
        ("mine:number", "not a class"),
        ("no colon", "module:Class"),
    ],
)
def test_what_cannot_watch_is_refused_before_the_run(path, said):
    with pytest.raises(ConfigError, match=said):
        watchers(f"observe.callbacks=['{path}']")


def test_the_address_comes_from_the_environment_or_the_setting(monkeypatch):
    monkeypatch.setenv("MY_HOOK", "https://example.org/token")
    assert (
        watchers("observe.webhook=env:MY_HOOK").webhook == "https://example.org/token"
    )
    assert (
        watchers("observe.webhook=https://example.org/t").webhook
        == "https://example.org/t"
    )
    monkeypatch.setenv("MY_HOOK", "token")
    with pytest.raises(ConfigError, match="MY_HOOK is not an http") as refused:
        watchers("observe.webhook=env:MY_HOOK")
    assert "token" not in str(refused.value)
    monkeypatch.delenv("MY_HOOK")
    with pytest.raises(ConfigError, match="MY_HOOK is not set"):
        watchers("observe.webhook=env:MY_HOOK")


def rewarded(step, *, equal):
    measured = {"equal_groups": torch.tensor(equal), "reward": torch.tensor(0.25)}
    return replace(update(step), measured=measured)


def test_ten_updates_with_equal_rewards_cause_one_warning(warn, warnings):
    watch = EqualRewards(warn=warn)
    for step in range(1, 31):
        watch.on_step(rewarded(step, equal=0.75 if step == 9 else 1.0))
    ((step, message),) = warnings
    assert step == 19  # the count began again after step 9
    assert "in the last 10 updates, so the rewards change nothing" in message
    for setting in ("objective.samples", "objective.temperature", "objective.rewards"):
        assert setting in message


def test_equal_rewards_are_counted_across_a_restart(warn, warnings):
    first, second = EqualRewards(warn=warn), EqualRewards(warn=warn)
    for step in range(1, 8):
        first.on_step(rewarded(step, equal=0.5 if step == 1 else 1.0))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for step in range(8, 12):
        second.on_step(rewarded(step, equal=1.0))
    assert [step for step, _ in warnings] == [11]


def test_equal_rewards_from_the_start_end_the_run(warn, warnings):
    watch = EqualRewards(warn=warn)
    for step in range(1, 10):
        watch.on_step(rewarded(step, equal=1.0))
    with pytest.raises(ConfigError, match=r"first 10 updates .*mean is 0\.25"):
        watch.on_step(rewarded(10, equal=1.0))
    assert not warnings


@pytest.mark.parametrize(
    ("learns_from_rewards", "expected"), [(False, Overfitting), (True, EqualRewards)]
)
def test_warnings_fit_the_objective(learns_from_rewards, expected, warn):
    built = replace(watchers(), learns_from_rewards=learns_from_rewards)
    kinds = {type(callback) for callback in built.callbacks(warn)}
    assert kinds & {Overfitting, EqualRewards} == {expected}
