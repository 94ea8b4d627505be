"""Runs on a card that is not there: the feed, saves, resume, evaluation, texts, lack of memory."""

import pytest

from fake_cuda import cases_of_runs as cases
from fake_cuda.card import BLOCK
from tiny import EVERY_KIND

EIGHT_BIT = "adamw8bit"
SLOW = [
    pytest.param(kind, marks=pytest.mark.slow) for kind in EVERY_KIND if kind != "gpt2"
]
WAYS = [
    {},
    {"temperature": 0.8},
    pytest.param(
        {"temperature": 0.8, "top_k": 5, "top_p": 0.9}, marks=pytest.mark.slow
    ),
    pytest.param({"precision": "bf16"}, marks=pytest.mark.slow),
]


def test_a_batch_is_sent_on_a_stream_of_its_own_and_nobody_waits(on_card):
    assert on_card(cases.fed_batch) == [
        "page-locked",
        "copy from page-locked memory on stream 1",
        "event 0 on stream 1",
        "stream 0 waits for event 0",
        "record_stream 0",
    ]


def test_a_save_in_the_background_waits_once_for_all_copies(on_card):
    found = on_card(cases.snapshot)
    ((where, waits),) = found.waits.items()
    assert where.startswith("synchronize at toque/training/checkpoint/saver.py:")
    assert waits == 1
    assert found.log == ["copy from the card on stream 0"]
    assert found.pinned
    assert found.second_is_the_first
    assert found.is_whole
    assert found.on == {"cpu"}


@pytest.mark.parametrize(
    ("kind", "setup"),
    [
        ("gpt2", {"background": True}),
        pytest.param(
            "t5", {"adapter": True, "recompute": True}, marks=pytest.mark.slow
        ),
        pytest.param("neox", {"precision": "fp16"}, marks=pytest.mark.slow),
        pytest.param(
            "llama", {"adapter": True, "form": "int8"}, marks=pytest.mark.slow
        ),
    ],
)
def test_a_run_stops_and_continues_on_the_card(on_card, kind, setup):
    run = on_card(cases.six_updates, kind, **setup)
    assert (run.steps, run.reason, run.evaluated) == (6, "finished", True)
    assert run.saved == ["step-00000003", "step-00000006"]
    assert set(run.state_on.values()) == {"cuda"}
    assert run.warnings == []


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon", "adafactor", EIGHT_BIT])
def test_what_a_checkpoint_held_is_on_the_card_again(on_card, optimizer):
    if optimizer == EIGHT_BIT:
        pytest.importorskip("bitsandbytes")
    found = on_card(cases.loaded, optimizer)
    # Adafactor counts its updates in the machine's memory, as torch has it.
    expected = {"cpu"} if optimizer == "adafactor" else {"cuda"}
    assert {found.pop("step")} == expected
    assert set(found.values()) == {"cuda"}


@pytest.mark.slow
def test_a_run_goes_back_to_its_checkpoint_on_the_card(on_card):
    warnings, state_on = on_card(cases.rolled_back)
    assert [w for w in warnings if "continues with the weights of step 2" in w]
    assert set(state_on.values()) == {"cuda"}


def test_what_is_not_finite_is_traced_on_the_card(on_card):
    message = on_card(cases.not_finite)
    assert message.startswith("Step 0 has loss 1 and gradient norm 1")
    assert (
        "Every value was finite when the update was computed again." in message
    )  # all of it was looked at


@pytest.mark.parametrize("kind", ["gpt2", pytest.param("t5", marks=pytest.mark.slow)])
def test_out_of_memory_on_the_card_is_computed_again_with_fewer_rows(on_card, kind):
    found = on_card(cases.short_of_memory, kind)
    assert found.smaller_from == {0: 2}
    assert "ran out of memory with 5 rows per micro-batch" in found.warnings[0]
    assert (
        found.left == 3 * BLOCK
    )  # the guard's loss, limits and verdict, until it looks
    assert found.peak <= found.limit


@pytest.mark.parametrize("kind", ["gpt2", *SLOW])
def test_a_held_out_loss_waits_once_a_batch(on_card, kind):
    metrics, waits = on_card(cases.held_out, kind)
    ((where, number),) = waits.items()
    assert where.startswith("a number is read at toque/evaluation/heldout_loss.py:")
    assert number == 4  # batches of two rows
    assert metrics["target_tokens"] > 0


@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.parametrize("kind", ["gpt2", *SLOW])
def test_a_token_of_every_text_waits_for_ids_up_and_down(on_card, kind, options):
    few, waits = on_card(cases.texts, kind, 2, **options)
    many, more_waits = on_card(cases.texts, kind, 5, **options)
    assert (few, many) == ([2] * 3, [5] * 3)
    # The last tokens go up, but for T5's with their positions; down comes what is chosen, or the
    # probabilities to draw from, and the tokens whose they are.
    a_token = (2 if kind.startswith("t5") else 3) + ("top_k" in options)
    assert sum(more_waits.values()) - sum(waits.values()) == 3 * a_token, more_waits


@pytest.mark.parametrize(("visible", "device"), [("", "cpu"), ("0", "cuda")])
def test_a_card_that_the_environment_hides_is_not_used(on_card, visible, device):
    assert on_card(cases.hidden, visible) == device
