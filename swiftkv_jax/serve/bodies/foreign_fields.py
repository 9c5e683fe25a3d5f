"""Fields that other servers have in completions and chats, and what to write here."""

from __future__ import annotations

from collections.abc import Mapping

_OTHER_SAMPLERS = "`top_p`, `top_k` and `min_p` are what this server samples by"
_MAX_TOKENS = "the field is `max_tokens`"
_NO_EFFECT = "leave it out: every prefix is cached, and the model stays loaded"

INSTEAD: Mapping[str, str] = {
    "cache_prompt": _NO_EFFECT,
    "dry_multiplier": _OTHER_SAMPLERS,
    "ebnf": "the field is `structured_outputs.grammar`, in Lark",
    "enable_thinking": "the field is `chat_template_kwargs.enable_thinking`",
    "extra_body": "what clients take as `extra_body` are fields of the body itself",
    "format": "the field is `response_format`",
    "grammar": "the field is `structured_outputs.grammar`, in Lark",
    "guided_decoding_backend": "leave it out: there is one",
    "json_schema": "the field is `response_format`, of type 'json_schema'",
    "keep_alive": _NO_EFFECT,
    "max_length": _MAX_TOKENS,
    "max_new_tokens": _MAX_TOKENS,
    "mirostat": _OTHER_SAMPLERS,
    "n_predict": _MAX_TOKENS,
    "n_probs": "the fields are `logprobs` and `top_logprobs`",
    "num_ctx": "the server's --max-model-len says how long a context is",
    "num_predict": _MAX_TOKENS,
    "options": "its fields are fields of the body itself",
    "random_seed": "the field is `seed`",
    "reasoning": "the field is `reasoning_effort`",
    "regex": "the field is `structured_outputs.regex`",
    "repeat_penalty": "the field is `repetition_penalty`",
    "stop_sequences": "the field is `stop`",
    "system": "write a message of role 'system'",
    "tfs_z": _OTHER_SAMPLERS,
    "thinking_budget": "`max_tokens` limits reasoning and answer together",
    "top_a": _OTHER_SAMPLERS,
    "typical_p": _OTHER_SAMPLERS,
    "xtc_probability": _OTHER_SAMPLERS,
    "response_format.schema": "the field is `response_format.json_schema.schema`, with the type "
    "'json_schema'",
}
"""Path of a field that completions and chats do not have -> what to do instead."""
