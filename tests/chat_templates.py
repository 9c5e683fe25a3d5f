"""Chat templates that do what the published ones of their families do, in few lines, and a
tokenizer of bytes that runs them."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Trims contents; tools in a turn of their own where they are given; one call to an answer, its
# arguments as `parameters`; the tool's turn is ipython's.
LLAMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set system = messages[0].content | trim"
    " %}{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}"
    "<|head|>system<|/head|>\n\n{% if tools is not none %}Environment: ipython\n{% endif %}"
    "{{ system }}<|eot|>"
    "{% for t in tools or [] %}<|head|>tool<|/head|>{{ t | tojson(indent=4) }}<|eot|>{% endfor %}"
    "{% for m in messages %}{% if 'tool_calls' in m %}"
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    "{% set call = m.tool_calls[0].function %}<|head|>assistant<|/head|>\n\n"
    '{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}<|eot|>'
    "{% elif m.role == 'tool' %}<|head|>ipython<|/head|>\n\n{{ m.content | tojson }}<|eot|>"
    "{% else %}<|head|>{{ m.role }}<|/head|>\n\n{{ m.content | trim }}<|eot|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|head|>assistant<|/head|>\n\n{% endif %}"
)
_CALLS = (
    "{% for c in m.tool_calls or [] %}{% set c = c.function or c %}\n<tool_call>\n"
    '{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}}\n</tool_call>{% endfor %}'
)
# The results of neighbouring tools are one turn of the user's.
_RESULTS = (
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
)
_SYSTEM = (
    "{% if tools %}<|im_start|>system\n{% if messages[0].role == 'system' %}"
    "{{ messages[0].content }}\n\n{% endif %}<tools>{% for t in tools %}\n{{ t | tojson }}"
    "{% endfor %}\n</tools><|im_end|>\n{% elif messages[0].role == 'system' %}"
    "<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif %}"
)
QWEN2 = (
    _SYSTEM
    + "{% for m in messages %}{% if m.role == 'user' or m.role == 'system' and not loop.first"
    " or m.role == 'assistant' and not m.tool_calls %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% elif m.role == 'assistant' %}"
    "<|im_start|>assistant{% if m.content %}\n{{ m.content }}{% endif %}"
    + _CALLS
    + "<|im_end|>\n{% elif m.role == 'tool' %}"
    + _RESULTS
    + "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Reasoning is kept after the last question alone, and is empty where there is none; the switch
# writes the empty one into the prompt.
QWEN3 = (
    _SYSTEM + "{% set ns = namespace(last=messages | length) %}{% for m in messages %}"
    "{% if m.role == 'user' and m.content is string %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' or m.role == 'system' and not loop.first %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% elif m.role == 'assistant' %}{% set content = m.content %}"
    "{% set reasoning = m.reasoning_content or '' %}"
    "{% if not reasoning and '</think>' in content %}"
    "{% set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "<|im_start|>assistant\n{% if loop.index0 > ns.last and (loop.last or reasoning) %}"
    "<think>\n{{ reasoning.strip('\n') }}\n</think>\n\n{{ content.lstrip('\n') }}"
    "{% else %}{{ content }}{% endif %}" + _CALLS + "<|im_end|>\n"
    "{% elif m.role == 'tool' %}" + _RESULTS + "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}"
)
HERMES = (
    "{{ bos_token }}" + _SYSTEM + "{% for m in messages %}{% if m.role in ('user', 'assistant') or"
    " m.role == 'system' and not loop.first %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    + _CALLS
    + "<|im_end|>\n{% elif m.role == 'tool' %}<|im_start|>tool\n<tool_response>\n{{ m.content }}\n"
    "</tool_response><|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Turns alternate; the system prompt and the tools stand in the last question; a call has an id of
# nine characters.
MISTRAL = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
    "{% set messages = messages[1:] %}{% endif %}{% set ns = namespace(user=true) %}"
    "{% for m in messages %}{% if m.role in ('user', 'assistant') and not m.tool_calls %}"
    "{% if (m.role == 'user') != ns.user %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set ns.user = not ns.user %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools and loop.last %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]"
    "{% endif %}"
    "[INST] {% if system is defined and loop.last %}{{ system }}\n\n{% endif %}{{ m.content }}"
    "[/INST]{% elif m.tool_calls %}[TOOL_CALLS] ["
    "{% for c in m.tool_calls %}{% if not c.id or c.id | length != 9 %}"
    "{{ raise_exception('an id must have nine characters') }}{% endif %}"
    '{{ (c.function | tojson)[:-1] }}, "id": "{{ c.id }}"}{{ ", " if not loop.last }}{% endfor %}]'
    "{{ eos_token }}{% elif m.role == 'assistant' %} {{ m.content | trim }}{{ eos_token }}"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS] {\"content\": {{ m.content | tojson }}, "
    '"call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]'
    "{% else %}{{ raise_exception('no such role') }}{% endif %}{% endfor %}"
)
# All that a template gets.
AS_JSON = (
    "{{ messages | tojson }}{{ tools | tojson }}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "llama": LLAMA,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "hermes": HERMES,
    "mistral": MISTRAL,
    "json": AS_JSON,
}


def byte_tokenizer(template: str | None = None, specials: tuple[str, ...] = ()):
    """One token a byte, `<s>` and `</s>`, and one for each of `specials`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens([AddedToken(one, special=True) for one in ("<s>", "</s>", *specials)])
    result = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>")
    result.chat_template = template
    return result
