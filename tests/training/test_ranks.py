"""Two processes over gloo are one run: the same losses, decisions and files."""

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from fixtures.processes import toque
from fixtures.ranks import as_rank, loaded, surroundings
from toque.cli import main
from toque.data.loader.batch_stream import Step
from toque.errors import ConfigError, DataError, RankLost
from toque.training.callbacks import Requests
from toque.training.distributed.collectives import RankFailures, Ranks, weights_sum
from toque.training.distributed.process_group import join_ranks
from toque.training.runtime import set_deterministic
from toque.units import Cursor

SCRIPT = Path(__file__).parent / "shared_run.py"
shared_run = loaded(SCRIPT)
STEPS, FAMILIES = shared_run.STEPS, shared_run.FAMILIES


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def seen(folder) -> list[dict[str, Any]]:
    """What each of two ranks saw."""
    alone, _ = shared_run.run_of("gpt2", Ranks(), folder / "changing", steps=3)
    alone.fit()
    shared = surroundings()
    second = as_rank(1, shared, str(SCRIPT), str(folder))
    # This process is the first rank: starting a second one with torch costs more than all else.
    before, threads = (
        torch.are_deterministic_algorithms_enabled(),
        torch.get_num_threads(),
    )
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (shared | {"RANK": "0", "LOCAL_RANK": "0"}).items():
            patch.setenv(name, value)
        try:
            shared_run.work(folder)
        finally:
            said = second.communicate(timeout=60)[0]
    torch.set_num_threads(threads)
    set_deterministic(before)
    # gloo may abort a process that is done; what it wrote tells whether it was.
    found = [folder / f"rank{rank}.json" for rank in range(2)]
    assert found[1].exists(), said[-6000:]
    return [json.loads(path.read_text()) for path in found]


@pytest.fixture(scope="module")
def alone(folder) -> dict[str, Any]:
    """The same runs in one process."""
    before = torch.are_deterministic_algorithms_enabled()
    found = shared_run.families(Ranks(), folder / "alone")
    set_deterministic(before)
    return found


def test_a_group_outlives_the_run(seen):
    """Its destructor may wait for a thread of its own that waits for the interpreter's lock."""
    assert [rank["group_is_kept"] for rank in seen] == [True, True]


def test_what_ranks_say_to_each_other(seen):
    for rank in seen:
        said = rank["exchanges"]
        assert said["total"] == [2.0, 1.0]
        assert said["gather"] == [{"rank": 0, "name": ""}, {"rank": 1, "name": "é"}]
        assert said["first"] == ["of", 0]
        assert said["agreed"] == {
            "stop": True, "evaluate": False, "save": True, "reason": "tired",
        }  # fmt: skip
        assert not any(said["nothing"].values())
        assert said["loss"] == 3.0
        assert said["most"] == 4
        assert said["gradients"] == [[2.0, 6.0, 10.0], None, [3.0, 3.0, 3.0, 3.0]]


def test_ranks_that_are_not_alike_are_told_which_has_which(seen):
    host = socket.gethostname()
    for rank in seen:
        assert (
            f"The 2 ranks differ: torch is 2.0 on {host} (rank 0), 2.1 on {host} (rank 1). "
            in rank["unlike"]["said"]
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_two_processes_train_as_one(seen, alone, family):
    for rank in seen:
        shared, single = rank["families"][family], alone[family]
        assert len(shared["losses"]) == STEPS
        assert shared["losses"] == pytest.approx(single["losses"], rel=1e-5)
        assert shared["norms"] == pytest.approx(single["norms"], rel=1e-4)
        assert shared["best"] == pytest.approx(single["best"], rel=1e-5)
        assert shared["computed"] == single["computed"]
        for name in ("step", "epoch", "examples", "tokens", "target_tokens"):
            assert shared["progress"][name] == single["progress"][name]
    assert seen[0]["families"] == seen[1]["families"]  # to the bit, seconds included


def updates(family: str, n: int, ranks: Ranks) -> list[Step]:
    stream, steps = shared_run.stream(family, ranks), []
    for _ in range(n):
        steps.append(stream.at(steps[-1].cursor if steps else Cursor()))
    return steps


def test_some_update_leaves_a_rank_without_rows():
    share = Ranks(rank=1, world_size=2)
    assert 0 in [update.batch.n_rows for update in updates("gpt2", STEPS, share)]


def test_a_request_of_any_rank_stops_all_and_rank_0_saves(seen, folder):
    assert [rank["stopped"] for rank in seen] == [{"reason": "tired", "step": 2}] * 2
    assert [p.name for p in (folder / "tired" / "checkpoints").glob("step-*")] == [
        "step-00000002"
    ]


def test_out_of_memory_on_one_rank_changes_no_update(seen):
    for rank in seen:
        assert rank["memory"]["losses"] == pytest.approx(
            rank["families"]["gpt2"]["losses"], rel=1e-5
        )
    assert [bool(rank["memory"]["smaller_from"]) for rank in seen] == [False, True]


def test_a_loss_that_is_no_number_is_told_once_and_of_all_ranks(seen, folder):
    first, second = (rank["nan"] for rank in seen)
    assert first["step"] == second["step"] == 3
    dump = json.loads((folder / "nan" / "non_finite.json").read_text())
    third = updates("gpt2", 3, Ranks())[2]
    held = sorted(i for row in dump["example_ids"] for i in row)
    assert held == sorted(i for row in third.batch.example_ids for i in row)


def test_ranks_that_drift_apart_save_nothing(seen, folder):
    """Fault 24: one flipped bit in one weight of one rank."""
    for rank in seen:
        assert "do not agree before a save" in rank["apart"]["said"]
        assert "the sum of the weights" in rank["apart"]["said"]
    assert not list((folder / "apart").glob("checkpoints/step-*"))


def test_a_run_in_minutes_ends_at_one_step(seen):
    assert seen[0]["minutes"] == seen[1]["minutes"]
    assert seen[0]["minutes"]["updates"] >= 1


def test_one_then_two_then_one_process_are_one_run(seen, folder):
    whole, losses = shared_run.run_of("gpt2", Ranks(), folder / "whole", steps=9)
    whole.fit()
    last, after = shared_run.run_of("gpt2", Ranks(), folder / "changing", steps=9)
    last.fit()
    for rank in seen:
        assert rank["changing"]["losses"] == pytest.approx(losses.losses[3:6], rel=1e-5)
        assert any("ranks: 1 -> 2" in note for note in rank["changing"]["notes"])
    assert after.losses == pytest.approx(losses.losses[6:], rel=1e-5)
    assert any("ranks: 2 -> 1" in note for note in last.notes)


def test_alone_nothing_is_exchanged():
    ranks, wants = Ranks(), Requests(save=True)
    assert ranks.is_main
    assert not ranks.is_distributed
    assert ranks.all_reduce_sum([1.5]) == [1.5]
    assert ranks.all_gather("own") == ["own"]
    assert ranks.combine_requests(wants) is wants


def test_the_sum_of_the_weights_sees_one_bit(tiny_model):
    before = weights_sum(tiny_model)
    tiny_model.head.weight.detach().view(-1).view(torch.int32)[5] ^= 1
    assert weights_sum(tiny_model) != before


@pytest.mark.parametrize(
    ("strategy", "variables", "words"),
    [
        ("single", {"WORLD_SIZE": "2"}, "train.strategy is single"),
        ("ddp", {}, "there is only one process"),
        ("auto", {"WORLD_SIZE": "two"}, "WORLD_SIZE must be a whole number, not 'two'"),
        (
            "auto",
            {"WORLD_SIZE": "2", "TOQUE_RANK_TIMEOUT": "1e3"},
            "TOQUE_RANK_TIMEOUT must be a whole number, not '1e3'",
        ),
    ],
)
def test_what_does_not_fit_is_refused(monkeypatch, strategy, variables, words):
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=words), join_ranks(strategy=strategy):
        pass


@pytest.fixture
def four_ranks(monkeypatch) -> list[RankFailures]:
    """Four ranks of this process, of which the first waits in vain for the others."""
    monkeypatch.setattr("toque.training.distributed.collectives._ANSWER_SECONDS", 0.1)
    store = HashStore()
    ranks = [RankFailures(store, rank, 4, 60.0) for rank in range(4)]
    for each in ranks:
        each.register()
    return ranks


def test_of_silent_ranks_the_dead_one_is_named(four_ranks):
    """Ranks that exchange nothing with it notice last, and are not to blame."""
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    host = socket.gethostname()
    four_ranks[2].store.set("process/2", json.dumps([dead.pid, host]))
    said = str(four_ranks[0].diagnose(RuntimeError("Connection closed by peer")))
    assert said.startswith(f"Rank 2 (process {dead.pid} on {host}) is gone")
    assert "Rank 1" not in said
    assert "TOQUE_RANK_TIMEOUT" not in said


def test_who_does_not_answer_in_time_is_named(four_ranks):
    four_ranks[1].store.set("waiting/1", "")
    said = str(
        four_ranks[0].diagnose(RuntimeError("Timed out waiting 60000ms for recv"))
    )
    assert "Rank 1" not in said
    assert said.count("does not answer") == 2
    assert "waited 60 s for it (TOQUE_RANK_TIMEOUT)" in said


@pytest.mark.parametrize(
    "said",
    [
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:552] Connection closed by peer",
        (
            "Got the following error when running the callback: RuntimeError: Application timeout "
            "caused pair closure\n\nAt:\n  data_parallel.py(170): <lambda>\n"
        ),
    ],
)
def test_an_exchange_that_fails_in_backward_names_the_lost_rank(four_ranks, said):
    """What gloo says, and what it says where several buckets of gradients were on their way."""
    ranks = Ranks(0, 4, 0, four_ranks[0])
    with (
        pytest.raises(RankLost, match="does not answer") as found,
        ranks.diagnosing_failures(),
    ):
        raise RuntimeError(said)
    assert ("TOQUE_RANK_TIMEOUT" in str(found.value)) == ("timeout" in said)


def test_an_error_of_the_model_in_backward_passes(four_ranks):
    with (
        pytest.raises(RuntimeError, match="inplace"),
        Ranks(0, 4, 0, four_ranks[0]).diagnosing_failures(),
    ):
        raise RuntimeError("a variable has been modified by an inplace operation")


def test_a_collective_that_fails_with_all_present_says_why(four_ranks):
    for each in four_ranks[1:]:
        each.store.set(f"waiting/{each.rank}", "")
    said = str(four_ranks[0].diagnose(RuntimeError("NCCL error\nand more")))
    assert "A collective of all ranks failed: NCCL error." in said


def test_one_error_of_several_ranks_is_printed_once(four_ranks):
    errors = [DataError("no store") for _ in four_ranks]
    for each, error in zip(four_ranks, errors, strict=True):
        each.report(error)
    assert [error.said_by_another for error in errors] == [False, True, True, True]
    lost = four_ranks[0].diagnose(RuntimeError("closed"))
    assert "Another rank ended first" in str(lost)
    assert lost.exit_code == DataError.exit_code


def test_a_bug_is_written_where_torchrun_looks_for_it(
    four_ranks, tmp_path, monkeypatch
):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    four_ranks[3].report(ZeroDivisionError("division by zero"))
    found = json.loads((tmp_path / "error.json").read_text())
    assert found["message"]["message"] == "ZeroDivisionError: division by zero"


def test_other_commands_are_not_repeated_in_every_process():
    first, second = (
        toque("demo", WORLD_SIZE="2", RANK="1", LOCAL_RANK=n) for n in "01"
    )
    assert (first.returncode, second.returncode) == (2, 2)
    assert "only `toque train` supports multiple processes" in first.stderr
    assert second.stderr == ""  # said once
    assert main(["presets"]) == 0
