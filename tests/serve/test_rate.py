"""The rate of prefill, from which the limit of waiting tokens and `Retry-After` follow."""

import asyncio
import math
import types

from swiftkv_jax.serve.options import ServerOptions
from swiftkv_jax.serve.service.histogram import RecentRate
from swiftkv_jax.serve.service.service import Service
from tests.infer.mock_model_runner import mock_engine


def test_only_seconds_with_prompts_that_wait_count():
    async def run() -> None:
        engine, _ = mock_engine(max_model_len=64)
        service = Service(ServerOptions(), "tiny")
        service.open(engine, 1000.0)
        service.engine.stop()
        admission, stats = service.admission, service.engine.snapshot.stats
        assert admission.max_tokens == 30_000, "what the start has measured"
        # (tokens that wait, tokens that ran in the second before)
        for second, (waiting, tokens) in enumerate([(0, 0), (0, 50), (90, 5), (90, 400), (0, 20)]):
            admission.tokens, stats.prefilled_tokens = waiting, stats.prefilled_tokens + tokens
            service.tick(float(second))
        assert service.prefill_rate == 400
        # Where all slots or all pages are taken prompts wait for these, not for prefill.
        snapshot = service.engine.snapshot
        full = {"num_running": service.max_num_seqs}, {"pages_in_use": snapshot.load.num_pages}
        for number, taken in enumerate(full):
            service.engine.snapshot = snapshot._replace(load=snapshot.load._replace(**taken))
            for second in range(3):
                admission.tokens, stats.prefilled_tokens = 90, stats.prefilled_tokens + 1
                service.tick(5.0 + 3 * number + second)
            assert service.prefill_rate == 400
        admission.tokens = 2000
        assert admission.retry_after() == math.ceil(2000 / 400)
        admission.tokens = 10**6
        assert admission.retry_after() == 60
        service.prefill_rate = 0.0
        assert admission.retry_after() == 1 and admission.max_tokens == 4 * 64

    asyncio.run(run())


def test_requests_of_several_samples_wait_for_as_many_slots():
    async def run() -> None:
        engine, _ = mock_engine(slots=4, max_model_len=64)
        service = Service(ServerOptions(), "tiny")
        service.open(engine, 1000.0)
        service.engine.stop()
        snapshot = service.engine.snapshot
        load = snapshot.load._replace(num_running=2)
        service.engine.snapshot = snapshot._replace(load=load)
        service.admission.tokens = 90
        for samples, rate in ((3, 1000.0), (2, 10.0)):
            parts = [types.SimpleNamespace(choices=[None] * samples)]
            service._prefilled = RecentRate(30)
            for second in range(3):
                snapshot.stats.prefilled_tokens += 10
                one = types.SimpleNamespace(parts=parts)
                service._admitted = [one]  # type: ignore[assignment]
                service._measure_rate(float(second))
            assert service.prefill_rate == rate
        service._admitted = set()

    asyncio.run(run())
