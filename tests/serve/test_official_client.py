"""The official client, asynchronous: many requests at once, what it retries, and its errors."""

import asyncio
from typing import Any

import openai
import pytest

from tests.serve.conftest import Running
from tests.serve.process import SMALL, serving

BODY: Any = {"model": "tiny", "prompt": "hello", "max_tokens": 12}
COMPLETIONS = "/v1/completions"


def client(url: str, *, api_key: str = "none", max_retries: int = 0) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=api_key, max_retries=max_retries)


async def streamed(asked: openai.AsyncOpenAI, **fields) -> str:
    stream = await asked.completions.create(**BODY | fields, stream=True)
    return "".join([event.choices[0].text async for event in stream if event.choices])


def test_streams_and_answers_at_once(running):
    async def run() -> None:
        async with client(running.url) as asked:
            prompts = [f"{number}: hello" for number in range(30)]
            whole = asyncio.gather(
                *(asked.completions.create(**BODY | {"prompt": one}) for one in prompts)
            )
            parts = asyncio.gather(*(streamed(asked, prompt=one) for one in prompts))
            texts = [answer.choices[0].text for answer in await whole]
            assert texts == await parts and len(set(texts)) > 1 and all(texts)

    asyncio.run(run())


def answers(running: Running, status: int) -> int:
    """How often the server has answered so."""
    return running.app.service.metrics.http[COMPLETIONS, status]


def test_refused_requests_are_asked_again(start):
    """As often as the client is told to, while there is no room; then it gets in."""
    running = start(engine={"slots": 1}, step_seconds=0.02, max_num_queued_reqs=1)

    async def run() -> None:
        async with client(running.url) as asked:
            held = await asked.completions.create(
                **BODY | {"max_tokens": 60}, stream=True, extra_body={"ignore_eos": True}
            )
            with pytest.raises(openai.RateLimitError) as caught:
                await asked.completions.create(**BODY)
            assert caught.value.code == "queue_full" and answers(running, 429) == 1
            text = await asked.with_options(max_retries=10).completions.create(**BODY)
            assert text.choices[0].text and answers(running, 429) > 1
            assert [event async for event in held]

    asyncio.run(run())
    running.check_empty()


def test_what_would_fail_again_is_asked_once(start):
    running = start(step_seconds=0.2, request_timeout=0.3)

    async def run() -> None:
        async with client(running.url, max_retries=3) as asked:
            with pytest.raises(openai.InternalServerError) as caught:
                await asked.completions.create(
                    **BODY | {"max_tokens": 100}, extra_body={"ignore_eos": True}
                )
            assert caught.value.status_code == 504
            running.until(lambda: answers(running, 504))  # counted once it has been sent
            assert answers(running, 504) == 1

    asyncio.run(run())
    running.check_empty()


def test_errors_are_the_clients_classes(start):
    running = start(api_keys={"one": "a-key-of-some-length"})

    async def run() -> None:
        async with client(running.url) as asked:
            with pytest.raises(openai.AuthenticationError):
                await asked.completions.create(**BODY)
        async with client(running.url, api_key="a-key-of-some-length") as asked:
            with pytest.raises(openai.BadRequestError) as bad:
                await asked.completions.create(**BODY | {"max_tokens": -1})
            assert bad.value.param == "max_tokens"

    asyncio.run(run())


@pytest.mark.long
def test_seeds_repeat_under_load(checkpoint):
    """Draws depend on the seed, not on what else runs."""
    with serving(checkpoint, *SMALL, "--max-num-queued-reqs", "200") as server:

        async def run() -> list[str]:
            async with client(server.url) as asked:
                model = (await asked.models.list()).data[0].id
                body = BODY | {"model": model, "max_tokens": 8, "temperature": 1.0}

                async def text(seed: int) -> str:
                    answer = await asked.completions.create(**body, seed=seed)
                    return answer.choices[0].text

                return await asyncio.gather(*map(text, [*range(100), *reversed(range(100))]))

        found = asyncio.run(run())
    assert found[:100] == found[:99:-1] and len(set(found)) > 50
