"""Real models, which `make real` has fetched, and one server for all tests of it (`make
test-real`)."""

from collections.abc import Iterator

import anthropic
import openai
import pytest

from examples.real_models import path_of
from tests.serve.process import Server, serving

OPTIONS = (
    "--port 0 --temperature 0 --max-model-len 4096 --max-num-seqs 4 --max-num-batched-tokens 256 "
    "--page-size 16"
).split()


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """Qwen2.5-Coder-0.5B-Instruct, with greedy answers unless a request says otherwise."""
    with serving(path_of("qwen2.5-coder"), *OPTIONS) as running:
        yield running


@pytest.fixture(scope="session")
def client(server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", timeout=600, max_retries=0
    ) as made:
        yield made


@pytest.fixture(scope="session")
def anthropic_client(server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url=server.url, api_key="none", timeout=600, max_retries=0
    ) as made:
        yield made
