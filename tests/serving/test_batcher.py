"""The shared batch: what a request is answered does not depend on who else asks."""

import asyncio
import copy
from dataclasses import replace

import pytest

from serving.alone import GREEDY, alone, prompts
from toque.models.generation import engine
from toque.models.generation.live_rows import Order
from toque.models.generation.options import GenerationOptions
from toque.serving.batcher import Batcher, ServedModels
from toque.serving.request_errors import RequestError
from written import generate


async def written(batcher, served, orders):
    """The ids of every order, and its end."""
    ids, ends = [[] for _ in orders], [None] * len(orders)
    with batcher.ticket(served, orders) as ticket:
        async for new in news_of(ticket):
            place = orders.index(new.order)
            ends[place] = new.end
            if new.end != "stop":
                ids[place].append(new.token)
    return ids, ends


async def news_of(ticket):
    """The tokens of a request, until all of its texts have ended."""
    left = len(ticket.orders)
    while left:
        news = await ticket.updates.get()
        if isinstance(news, RequestError):
            raise news
        for new in news:
            left -= new.end is not None
            yield new


def within(models, work, *, rows=4, queue=100, **settings):
    """Run `work(batcher)` in an event loop."""

    async def main():
        batcher = Batcher(models, rows=rows, queue=queue, **settings)
        batcher.start()
        try:
            return await work(batcher)
        finally:
            batcher.close()

    return asyncio.run(main())


def test_requests_that_join_a_running_batch_get_what_they_get_alone(served):
    given = prompts(served, 13)
    expected = [alone(served, prompt) for prompt in given]
    assert len({len(ids) for ids in expected}) > 2, (
        "the test model should stop at many lengths"
    )
    assert len(set(map(tuple, expected))) > 9, (
        "the test model should tell prompts apart"
    )

    async def work(batcher):
        live = []

        async def one(prompt):
            answer = await written(batcher, served, [Order(prompt, 24, GREEDY)])
            live.append(batcher.n_live)
            return answer

        answers = await asyncio.gather(*map(one, given))
        # Rows stayed when others ended, and what waited took the places of those.
        assert max(live) > 1
        return answers

    found = within(ServedModels([served]), work)
    assert [ids[0] for ids, _ in found] == expected
    ends = ["length" if len(ids) == 24 else "stop" for ids in expected]
    assert [ends[0] for _, ends in found] == ends


def test_draws_are_those_of_generate_beside_greedy_neighbours(served):
    (prompt,) = prompts(served, 1)
    options = GenerationOptions(temperature=0.8, top_p=0.9, seed=5)
    three = generate(
        served.model, [prompt] * 3, eos_id=served.codec.eos_id, pad_id=served.codec.pad_id,
        **(vars(options) | {"max_new_tokens": 24}),
    )  # fmt: skip
    assert three[0] != three[1]

    async def work(batcher):
        orders = [Order(prompt, 24, options, number) for number in range(3)]
        greedy = [Order(one, 24, GREEDY) for one in prompts(served, 4)]
        both = (written(batcher, served, part) for part in (orders, greedy))
        return await asyncio.gather(*both)

    (drawn, _), (plain, _) = within(ServedModels([served]), work, rows=8)
    assert drawn == three
    assert plain == [alone(served, one) for one in prompts(served, 4)]


def test_products_have_the_precision_that_was_asked_for(served):
    (prompt,) = prompts(served, 1)
    options = replace(GREEDY, max_new_tokens=6)

    def of_generate(precision):
        told = []
        model, codec = served.model, served.codec
        how = replace(options, precision=precision)
        engine.generate(
            model, [prompt], how, eos_id=codec.eos_id, pad_id=codec.pad_id,
            on_logprob=lambda _, logprob: told.append(logprob),
        )  # fmt: skip
        return told

    async def work(batcher):
        order = Order(prompt, 6, options, n_top_logprobs=0)
        with batcher.ticket(served, [order]) as ticket:
            return [new.logprob async for new in news_of(ticket)]

    found = {
        p: within(ServedModels([served]), work, precision=p)
        for p in ("float32", "bf16")
    }
    for precision, logprobs in found.items():
        assert logprobs == pytest.approx(of_generate(precision), abs=1e-5)
    assert found["bf16"] != pytest.approx(found["float32"], abs=1e-4)


def test_a_model_with_orders_is_not_removed(gpt2):
    (prompt,) = prompts(gpt2, 1)

    async def work(batcher):
        only_prompt = Order(prompt, 0, GREEDY)
        with batcher.ticket(gpt2, [only_prompt]):
            assert not await batcher.remove("tiny")
        assert await written(batcher, gpt2, [Order(prompt, 2, GREEDY)])
        assert await batcher.remove("tiny")
        with (
            pytest.raises(RequestError, match="was closed meanwhile"),
            batcher.ticket(gpt2, [Order(prompt, 2, GREEDY)]),
        ):
            pass
        await asyncio.to_thread(batcher.add, gpt2)
        return await written(batcher, gpt2, [Order(prompt, 24, GREEDY)])

    (ids,), _ = within(ServedModels([gpt2]), work)
    assert ids == alone(gpt2, prompt)


def test_a_model_that_cannot_begin_again_fails_alone_and_recovers(gpt2):
    """As where memory is short after a failure: the thread goes on, and others are answered."""
    broken = replace(gpt2, name="broken", model=copy.deepcopy(gpt2.model))
    (prompt,) = prompts(gpt2, 1)
    kind = broken.model.config.model_type

    async def status_of(batcher, ids):
        with pytest.raises(RequestError) as failed:
            await written(batcher, broken, [Order(ids, 24, GREEDY)])
        return failed.value.status

    async def work(batcher):
        broken.model.config.model_type = (
            "t5"  # what is begun goes on, nothing begins anew
        )
        beside = asyncio.ensure_future(
            written(batcher, gpt2, [Order(prompt, 24, GREEDY)])
        )
        statuses = [await status_of(batcher, ids) for ids in ([10**6, 10**6], prompt)]
        broken.model.config.model_type = kind
        return (
            statuses,
            await beside,
            await written(batcher, broken, [Order(prompt, 24, GREEDY)]),
        )

    statuses, beside, after = within(ServedModels([broken, gpt2]), work)
    assert statuses == [500, 500]
    assert beside[0] == [alone(gpt2, prompt)]
    assert after[0] == [alone(broken, prompt)]


def test_work_between_two_steps_gives_its_value_or_its_error(gpt2):
    async def work(batcher):
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(batcher.run_between_steps, gpt2, lambda: 1 / 0)
        return await asyncio.to_thread(batcher.run_between_steps, gpt2, lambda: 7)

    assert within(ServedModels([gpt2]), work) == 7
