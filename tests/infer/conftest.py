"""A byte-level BPE tokenizer made on the spot, and a list of what XLA compiles."""

from collections.abc import Iterator

import jax
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

TEXT = """def main(argv):
    for word in argv: print(word, "naïve café, 東京 and 🙂🙃")
"""
CHAT_TEMPLATE = "<s>{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}\n{% endfor %}[assistant]"


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """320 tokens: <s> is put before every text, </s> ends one."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    bpe.train_from_iterator([TEXT] * 3, trainer)
    bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>")


@pytest.fixture
def compilations() -> Iterator[list[str]]:
    """Grows by one entry with every program that XLA compiles during the test."""
    events: list[str] = []

    def listener(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listener)
    yield events
    jax.monitoring.unregister_event_duration_listener(listener)
