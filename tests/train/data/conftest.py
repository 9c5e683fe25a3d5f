"""A tokenizer whose tokens can be counted by eye."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<end>{% endfor %}{% if "
    "add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer():
    """One token a byte, with an end token and a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate([*alphabet, "</s>"])}, merges=[]))
    bpe.pre_tokenizer, bpe.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    result = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="</s>")
    result.chat_template = TEMPLATE
    return result
