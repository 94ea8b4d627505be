"""Choice of a model size for some text and time."""

import math
import random

import pytest

from toque.errors import ConfigError
from toque.units import Duration
from toque.workflows.first_config.model_sizes import SIZES
from toque.workflows.first_config.sizing import (
    BYTES_PER_TOKEN,
    FIT,
    OF_PLAIN_TEXT,
    OF_RECIPES,
    VOCABULARY,
    TextTokenizer,
    estimate_difficulty,
    find_best_size,
    predict_bits,
    trained_tokenizer,
)
from toque.workflows.first_config.speed_trial import measure_rate
from toque.workflows.first_config.tuning import MAX_PASSES, plan_tuning, tuned_lr

EACH = BYTES_PER_TOKEN[VOCABULARY]


def by_parameters(size):
    """Tokens a second of a machine whose updates take as long as their products."""
    return 2e10 / size.parameters


def test_the_fit_rewards_text_and_size_and_repeats_ever_less():
    small, large = (FIT.bits_per_byte(n, 1e7) for n in (1e5, 1e6))
    assert large < small
    assert FIT.bits_per_byte(1e6, 2e7) < FIT.bits_per_byte(1e6, 1e7)
    once, twice, often = (FIT.fresh(n * 1e6, 1e6) for n in (1, 2, 100))
    assert once == 1e6 < twice < FIT.fresh(2e6, 1e9) == 2e6
    assert FIT.fresh(1e9, 1e6) == pytest.approx(often, rel=0.05)


@pytest.mark.parametrize(
    ("like", "name"),
    [(like, name) for like in (OF_RECIPES, OF_PLAIN_TEXT) for name in like.bits],
)
def test_a_forecast_is_what_was_measured_where_something_was(like, name):
    measured, each = like.bits[name], like.bytes_per_token
    for tokens, bits in measured.items():
        assert predict_bits(name, tokens * each, math.inf, like) == pytest.approx(bits)
    *_, less, most = measured
    between = predict_bits(name, math.sqrt(less * most) * each, math.inf, like)
    assert measured[most] < between < measured[less]
    assert predict_bits(name, 1e9 * each, math.inf, like) < measured[most]


def test_runs_over_plain_text_predict_plain_text():
    hour, read = (
        Duration.parse("1 hours total"),
        find_best_size(1e12, 3600.0, by_parameters),
    )
    plain = find_best_size(
        1e12, 3600.0, by_parameters, like=OF_PLAIN_TEXT, only=read.name
    )
    assert plain.bits_per_byte > 1.5 * read.bits_per_byte
    assert plain.tokenizer.bytes_per_token < read.tokenizer.bytes_per_token
    assert "on runs over old cookbooks" in plain.forecast(hour)
    assert "on runs over recipes" in read.forecast(hour)
    own = TextTokenizer("folder", EACH)
    mine = find_best_size(
        1e12, 3600.0, by_parameters, tokenizer=own, like=OF_PLAIN_TEXT
    )
    assert mine.tokenizer == own


def test_the_size_for_ten_cookbooks_is_the_best_of_nine_that_were_trained():
    rates = {64: 35_500.0, 128: 19_200.0, 192: 9_000.0}  # of two Zen 5 cores
    chosen = find_best_size(
        7.4e6, 270.0, lambda size: rates[size.width], like=OF_PLAIN_TEXT
    )
    assert chosen.name == "1m"
    assert chosen.bits_per_byte == pytest.approx(1.281, rel=0.03)  # what it had


def test_a_size_that_was_never_trained_learns_to_copy_as_the_largest_that_was():
    few, many = (predict_bits("6m", tokens * EACH, math.inf) for tokens in (1e6, 1e8))
    far, last = SIZES["6m"].parameters, list(OF_RECIPES.bits)[-1]
    least, *_, most = (
        bits / FIT.bits_per_byte(SIZES[last].parameters, tokens * EACH)
        for tokens, bits in OF_RECIPES.bits[last].items()
    )
    assert least > 1.05 * most
    assert few == pytest.approx(least * FIT.bits_per_byte(far, 1e6 * EACH))
    assert many == pytest.approx(most * FIT.bits_per_byte(far, 1e8 * EACH))


def test_more_time_takes_a_larger_model():
    names = [
        find_best_size(1e9, 60.0 * n, by_parameters).name
        for n in (1, 30, 1000, 100_000)
    ]
    order = list(SIZES)
    assert [order.index(name) for name in names] == sorted(
        order.index(name) for name in names
    )
    assert len(set(names)) > 2
    faster = find_best_size(1e9, 60.0, lambda size: 1000 * by_parameters(size))
    assert faster.name == find_best_size(1e9, 60_000.0, by_parameters).name


def test_a_size_that_cannot_be_the_best_is_not_measured():
    asked = []

    def rate(size):
        asked.append(size)
        return by_parameters(size)

    choice = find_best_size(1e9, 60.0, rate)
    assert asked == list(SIZES.values())[: len(asked)]
    assert asked.index(choice.size) == len(asked) - 2  # one was tried that was worse
    asked.clear()
    assert find_best_size(1e9, 60.0, rate, only="6m").name == "6m"
    assert asked == [SIZES["6m"]]


def test_measuring_ends_when_it_has_taken_its_share_of_the_time():
    asked = []

    def rate(size):
        asked.append(size)
        return by_parameters(size)

    choice = find_best_size(1e9, 1e6, rate, is_over=lambda: len(asked) == 2)
    assert asked == list(SIZES.values())[:2]
    assert "Larger models were not tried" in choice.forecast(
        Duration.parse("1 hours total")
    )
    assert "not tried" not in find_best_size(1e9, 60.0, rate).forecast(
        Duration.parse("1 hours total")
    )


def test_few_texts_are_read_a_few_times_however_long_the_time_is():
    short, long = (
        find_best_size(2.8e6, seconds, by_parameters) for seconds in (10.0, 1e6)
    )
    assert not short.passes.ends_early
    assert long.passes.ends_early
    assert long == find_best_size(2.8e6, 1e7, by_parameters)._replace(
        passes=long.passes
    )
    assert long.tokens * EACH == pytest.approx(long.passes.useful * 2.8e6)
    of_small, of_large = (
        find_best_size(2.8e6, 1e6, by_parameters, only=name).passes.useful
        for name in ("300k", "6m")
    )
    assert of_small > of_large >= MAX_PASSES
    assert "needs only about" in long.forecast(Duration.parse("1 hours total"))
    unseen = find_best_size(math.inf, 1e6, by_parameters)
    assert not unseen.passes.ends_early
    assert "passes" not in unseen.forecast(Duration.parse("1 hours total"))


def test_only_texts_that_were_compared_are_told_of_and_unlike_ones_have_a_margin():
    hour = Duration.parse("1 hours total")
    once = find_best_size(1e12, 3600.0, by_parameters)
    assert "your texts" not in once.forecast(hour)
    assert "±17 %" not in once._replace(difficulty=1.05).forecast(hour)
    for difficulty in (0.8, 1.3):
        said = once._replace(difficulty=difficulty).forecast(hour)
        assert "on the compression of your texts" in said
        assert "±17 %" in said
    mine = TextTokenizer("folder", EACH / 2)
    own = find_best_size(1e12, 3600.0, by_parameters, tokenizer=mine, only=once.name)
    assert own.bits_per_byte > once.bits_per_byte  # as many tokens are half the text
    assert "±17 %" in own.forecast(hour)


def test_no_loss_above_a_random_guess_is_predicted():
    minute = Duration.parse("1 minutes total")
    few = find_best_size(9_000.0, 8.0, by_parameters, only="300k")
    assert few.bits_per_byte * few.tokenizer.bytes_per_token * math.log(2) > math.log(
        2048
    )
    assert (
        "Forecast: no held-out loss, because the run reads too little"
        in few.forecast(minute)
    )
    assert "runs over" not in few.forecast(minute)


def test_passes_and_vocabulary_go_by_the_texts():
    fewest, few, more, short, once = (
        find_best_size(text, seconds, by_parameters, only="300k")
        for text, seconds in (
            (5e4, 1e8),
            (5e5, 1e8),
            (1.2e7, 1e8),
            (1.2e7, 3.0),
            (1e15, 1e8),
        )
    )
    assert [one.passes.useful for one in (fewest, few, more)] == [6.0, 10.0, 18.0]
    assert short.passes.possible < 1.0
    assert once.passes.possible < 1.0
    assert [one.tokenizer.setting for one in (fewest, few, once)] == [
        "trained:2048",
        "trained:4096",
        "trained:8192",
    ]


def test_weights_decay_more_where_a_text_comes_again_and_less_an_update_of_a_long_run():
    size = SIZES["1m"]
    once, longer, again, often = (
        size.decay(tokens, passes) * size.peak_lr * tokens / size.batch_tokens
        for tokens, passes in ((2e6, 0.1), (2e7, 1.0), (2e6, 6.0), (2e6, 12.0))
    )
    assert once == pytest.approx(longer, rel=0.05)
    assert often == pytest.approx(2.0 * again, rel=0.05)
    assert again > 1.5 * once
    # Updates are smaller where there would be few of them, so that as many share the whole.
    assert size.decay(6e5, 3.0) == pytest.approx(size.decay(4e5, 3.0), rel=0.05)
    assert size.decay(1e5, 20.0) == size.decay(2e5, 20.0) == 2.0
    half_a_pass = find_best_size(1e9, 60.0, by_parameters, only="1m")
    assert half_a_pass.decay == size.decay(
        half_a_pass.tokens, half_a_pass.passes.possible
    )
    many_passes = find_best_size(2.8e6, 1e6, by_parameters, only="1m")
    assert many_passes.decay == size.decay(
        many_passes.tokens, many_passes.passes.useful
    )


def test_texts_that_compress_less_than_what_was_measured_are_harder():
    draw = random.Random(17)
    words = ["".join(draw.choices("etaoinshrdlu", k=6)) for _ in range(2000)]

    def text(n, known):
        return " ".join(draw.choices(words[:known], k=n)).encode()

    repeated, few, many = (text(40_000, known) for known in (2, 40, 2000))
    assert (
        estimate_difficulty(repeated)
        < 0.2
        < estimate_difficulty(few)
        < 1.0
        < estimate_difficulty(many)
        < 3.0
    )
    # A sample of a tenth compresses less, as those that were measured do.
    assert estimate_difficulty(many[:30_000]) == pytest.approx(
        estimate_difficulty(many), rel=0.35
    )
    assert estimate_difficulty(b"too short to tell") == estimate_difficulty(b"") == 1.0


def test_little_text_has_a_small_model_however_long_it_takes():
    names = [
        find_best_size(text, 1e9, by_parameters).name for text in (5e4, 8e5, 2.8e6)
    ]
    assert names == ["300k", "1m", "3m"]


def test_the_rate_is_that_of_real_updates():
    assert measure_rate(SIZES["300k"], 400.0, "trained:2048") > 10.0


def test_without_a_folder_for_temporary_files_it_says_how_to_name_one(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    with pytest.raises(ConfigError, match=r"Set TMPDIR to a folder"):
        measure_rate(SIZES["300k"], 500.0, "trained:2048")  # not remembered


def test_a_pretrained_model_stops_where_texts_would_be_learnt_by_heart():
    hour = Duration.parse("1 hours total")
    many = plan_tuning(1e7, 40_000, 3000.0, 200.0, longest=400)
    assert (many.tokens, many.batch) == (600_000.0, "1024 tokens")
    assert "600,000 tokens in 1 hour, 0.06 passes" in many.forecast(hour)
    assert not many.passes.ends_early
    few = plan_tuning(100_000, 400, 3000.0, 1000.0, longest=400)
    assert few.tokens == MAX_PASSES * 100_000
    assert few.passes.ends_early
    # 3,000 seconds of training are 0.95 of the hour but for preparing; 400 of them are used.
    assert (
        "400,000 tokens in 4 passes over the texts and needs only about 14:23 of the 1 hour: the "
        "time is enough for 30 passes, but the model would memorise the texts."
    ) in few.forecast(hour)


def test_a_run_that_would_end_a_little_early_takes_the_whole_time():
    """The speed is an estimate, and a fifth pass harms no model."""
    five = Duration.parse("5 minutes total")
    nearly = plan_tuning(100_000, 400, 250.0, 1900.0, longest=400)
    assert not nearly.passes.ends_early
    assert nearly.tokens == 475_000.0
    assert "480,000 tokens in 5 minutes, 4.8 passes over the texts." in nearly.forecast(
        five
    )
    clearly = plan_tuning(100_000, 400, 250.0, 2100.0, longest=400)
    assert clearly.passes.ends_early
    assert clearly.tokens == 400_000.0


def test_an_update_of_a_pretrained_model_grows_with_what_is_read():
    fast = plan_tuning(1e10, 10_000_000, 3000.0, 5000.0, longest=400)
    assert fast.batch == "16384 tokens"
    assert (
        plan_tuning(1e10, 10_000_000, 3000.0, 1000.0, longest=400).batch
        == "8192 tokens"
    )
    assert plan_tuning(0, 0, 3000.0, 100.0, longest=4000).batch == "4000 tokens"
    assert plan_tuning(2_000, 20, 3000.0, 100.0, longest=400).batch == "4 examples"


def test_a_larger_pretrained_model_has_a_smaller_rate():
    assert [tuned_lr(n, adapted=False) for n in (15_191_712, 134_515_008)] == [
        3e-4,
        1e-4,
    ]
    assert 2e-5 <= tuned_lr(1_200_000_000, adapted=False) <= 5e-5
    assert tuned_lr(100_000, adapted=False) <= 5e-4
    assert tuned_lr(0, adapted=False) == 1e-4  # nobody has looked at it
    assert tuned_lr(1_200_000_000, adapted=True) > 2e-4


def test_the_parameters_are_those_of_the_vocabulary_too() -> None:
    chosen = find_best_size(2.8e6, 600.0, by_parameters, only="300k")
    for entries, said in ((2048, "0.3 M"), (4096, "0.4 M"), (8192, "0.7 M")):
        model = chosen._replace(tokenizer=trained_tokenizer(entries)).model
        assert model == f"{said} parameters (size 300k)"
    unknown = chosen._replace(tokenizer=TextTokenizer("some/tokenizer", EACH))
    assert unknown.model == "size 300k"
