"""Tokenizers with the habits that go wrong: a BOS of their own, merges across borders, templates that rewrite the past."""

from tokenizers import processors

from lightrft.models.tiny.text import tiny_tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WITH_BOS = "{{ bos_token }}" + CHATML
WITH_TOOLS = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
    "<|im_end|>\n{% endif %}" + CHATML
)
NO_END = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}{% if "
    "add_generation_prompt %}assistant: {% endif %}"
)
FORGETS = (  # earlier answers lose what stands before </think>, as several reasoning models' templates have it
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' and "
    "loop.last %}<think></think>{% endif %}{{ m['content'] }}<|im_end|>\n{% endfor %}{% if "
    "add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OPENS_OTHERWISE = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>{% endif %}")
GENERATION = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% if loop.last %}!{% endif %}"
    "{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m['content'] }}<|im_end|>{% endif %}|{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def chat_tokenizer(template=CHATML):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def bos_tokenizer(template=None):
    """Puts ``<s>`` before and ``</s>`` behind every text."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    bos, eos = tokenizer.convert_tokens_to_ids(["<s>", "</s>"])
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", bos), ("</s>", eos)]
    )
    tokenizer.chat_template = template
    assert tokenizer("a")["input_ids"][0] == bos and tokenizer("a")["input_ids"][-1] == eos
    return tokenizer
