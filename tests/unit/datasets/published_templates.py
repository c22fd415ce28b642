"""Chat templates that write the published formats of model families, in short forms of our own.

Each takes the roles and fields that its published counterpart takes.
"""

from dataclasses import dataclass

from lightrft.models.tiny.text import tiny_tokenizer


@dataclass(frozen=True)
class Published:
    """A format.

    Attributes:
        template: The chat template.
        special: Its special tokens.
        eos: The EOS token of the published tokenizer.
        ends: The tokens that end a turn of the assistant. Empty for a template that ends none.
    """

    template: str
    special: tuple[str, ...] = ()
    eos: str = "<|endoftext|>"
    ends: tuple[str, ...] = ()

    def tokenizer(self):
        """Return a tokenizer of characters with this template."""
        made = tiny_tokenizer(special=(*self.special, self.eos), chat_template=self.template)
        made.eos_token = self.eos
        return made


def _plain(user, assistant, system="{{ m['content'] }}", generate="", start=""):
    """Return a template of the forms of three roles, which refuses others."""

    def form(text):
        return text.replace("@", "{{ m['content'] }}")

    return (
        f"{start}{{% for m in messages %}}{{% if m['role'] == 'user' %}}{form(user)}"
        f"{{% elif m['role'] == 'assistant' %}}{form(assistant)}"
        f"{{% elif m['role'] == 'system' %}}{form(system)}"
        "{% else %}{{ raise_exception('unknown role ' ~ m['role']) }}{% endif %}{% endfor %}"
        f"{{% if add_generation_prompt %}}{generate}{{% endif %}}"
    )


def _every(before, after, generate, start=""):
    """Return a template that writes each role between ``before`` and ``after``."""
    role = "{{ m['role'] }}"
    return (
        f"{start}{{% for m in messages %}}{before.replace('#', role)}{{{{ m['content'] }}}}{after}"
        f"{{% endfor %}}{{% if add_generation_prompt %}}{generate}{{% endif %}}"
    )


def _turns(before, after, names, generate, start=""):
    """Return a template of role names, which refuses other roles."""
    table = "{" + ", ".join(f"'{k}': '{v}'" for k, v in names.items()) + "}"
    role = "{{ names[m['role']] }}"
    return (
        f"{{% set names = {table} %}}{start}{{% for m in messages %}}"
        "{% if m['role'] not in names %}{{ raise_exception('unknown role') }}{% endif %}"
        f"{before.replace('#', role)}{{{{ m['content'] | trim }}}}{after}"
        f"{{% endfor %}}{{% if add_generation_prompt %}}{generate}{{% endif %}}"
    )


THREE = {"system": "system", "user": "user", "assistant": "assistant"}
GEMMA = {"system": "user", "user": "user", "assistant": "model"}
IM = ("<|im_start|>", "<|im_end|>")
CHATML = _every("<|im_start|>#\n", "<|im_end|>\n", "<|im_start|>assistant\n")
TOOLS = (
    "{% if tools %}<|im_start|>system\n# Tools\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
    "<|im_end|>\n{% endif %}"
)
CALLS = (
    "{% for call in m.tool_calls or [] %}{% set f = call.function or call %}\n<tool_call>\n"
    '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}"
)
RESPONSE = "<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
QWEN25 = (
    TOOLS + "{% for m in messages %}{% if m.role == 'tool' %}" + RESPONSE + "{% else %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}" + CALLS + "<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN3 = (
    TOOLS + "{% for m in messages %}{% if m.role == 'tool' %}" + RESPONSE + "{% else %}"
    "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and m.reasoning_content %}<think>\n"
    "{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}" + CALLS + "<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GLM45 = (
    "[gMASK]<sop>{% for m in messages %}{% if m.role == 'user' %}<|user|>\n{{ m.content }}"
    "{% elif m.role == 'assistant' %}<|assistant|>\n<think>{{ m.reasoning_content or '' }}</think>"
    "{% if m.content %}\n{{ m.content }}{% endif %}{% for call in m.tool_calls or [] %}"
    "{% set f = call.function or call %}\n<tool_call>{{ f.name }}{% for k, v in f.arguments.items() %}\n"
    "<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v if v is string else v | tojson }}</arg_value>"
    "{% endfor %}\n</tool_call>{% endfor %}{% elif m.role == 'tool' %}<|observation|>\n"
    "<tool_response>\n{{ m.content }}\n</tool_response>{% elif m.role == 'system' %}<|system|>\n"
    "{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MISTRAL_V3 = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
    "{% elif m.tool_calls %}[TOOL_CALLS] [{% for call in m.tool_calls %}"
    "{{ {'name': call.function.name, 'arguments': call.function.arguments, 'id': call.id} | tojson }}"
    "{% if not loop.last %}, {% endif %}{% endfor %}]</s>{% elif m.role == 'assistant' %}"
    " {{ m.content }}</s>{% elif m.role == 'tool' %}[TOOL_RESULTS] "
    "{{ {'content': m.content, 'call_id': m.tool_call_id} | tojson }}[/TOOL_RESULTS]"
    "{% elif m.role == 'system' %}[INST] {{ m.content }}\n\n[/INST]{% endif %}{% endfor %}"
)
LLAMA31 = (
    "<|begin_of_text|>{% for m in messages %}{% if m.tool_calls %}"
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('one call only') }}{% endif %}"
    '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "{{ m.tool_calls[0].function.name }}", '
    '"parameters": {{ m.tool_calls[0].function.arguments | tojson }}}<|eot_id|>'
    "{% elif m.role in ['tool', 'ipython'] %}<|start_header_id|>ipython<|end_header_id|>\n\n"
    "{{ m.content }}<|eot_id|>{% else %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endif %}{% endfor %}{% if add_generation_prompt %}"
    "<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
HARMONY = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% if m.thinking %}<|start|>assistant"
    "<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}{% if m.tool_calls %}<|start|>"
    "assistant to=functions.{{ m.tool_calls[0].function.name }}<|channel|>commentary json<|message|>"
    "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>{% elif loop.last %}<|start|>assistant"
    "<|channel|>final<|message|>{{ m.content }}<|return|>{% else %}<|start|>assistant<|channel|>final"
    "<|message|>{{ m.content }}<|end|>{% endif %}{% elif m.role == 'tool' %}<|start|>functions to="
    "assistant<|channel|>commentary<|message|>{{ m.content }}<|end|>{% else %}<|start|>{{ m.role }}"
    "<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>"
    "assistant{% endif %}"
)
DEEPSEEK_V3 = (
    "<|begin|>{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% elif m.role == "
    "'user' %}<|User|>{{ m.content }}{% elif m.role == 'tool' %}<|tool_output_begin|>{{ m.content }}"
    "<|tool_output_end|>{% elif m.tool_calls %}<|Assistant|>{{ m.content or '' }}<|tool_calls_begin|>"
    "{% for call in m.tool_calls %}<|tool_call_begin|>{{ call.function.name }}<|tool_sep|>"
    "{{ call.function.arguments | tojson }}<|tool_call_end|>{% endfor %}<|tool_calls_end|><|end|>"
    "{% else %}<|Assistant|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|>{% endif %}"
)
HEADERS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_EOT = ("<end_of_turn>",)
_S = ("</s>",)
_ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
_GLM = (*_ROLES, "<|observation|>", "[gMASK]", "<sop>")
_EXAONE = ("[|system|]", "[|user|]", "[|assistant|]", "[|endofturn|]")
_COHERE = ("<|START|>", "<|SYSTEM|>", "<|USER|>", "<|CHATBOT|>", "<|END_OF_TURN_TOKEN|>")
_KIMI = ("<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|im_end|>")
_TOOL_MARKS = (
    "calls_begin",
    "call_begin",
    "sep",
    "call_end",
    "calls_end",
    "output_begin",
    "output_end",
)
_DEEPSEEK = ("<|begin|>", "<|User|>", "<|Assistant|>", *(f"<|tool_{m}|>" for m in _TOOL_MARKS))
_HARMONY = ("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|call|>")

PUBLISHED = {
    "chatml": Published(CHATML, IM, ends=("<|im_end|>",)),
    "qwen2.5": Published(QWEN25, IM, ends=("<|im_end|>",)),
    "qwen3": Published(QWEN3, IM, ends=("<|im_end|>",)),
    "glm4.5": Published(GLM45, _GLM, ends=("<|user|>", "<|observation|>")),
    "chatglm3": Published(
        _plain("<|user|>\n @", "<|assistant|>\n @", "<|system|>\n @", "<|assistant|>"),
        _GLM,
        "</s>",
        ("<|user|>",),
    ),
    "llama2": Published(
        _plain("<s>[INST] @ [/INST]", " @ </s>", "<<SYS>>\n@\n<</SYS>>\n\n"),
        ("<s>",),
        "</s>",
        ("</s>",),
    ),
    "llama3": Published(
        _turns(
            "<|start_header_id|>#<|end_header_id|>\n\n",
            "<|eot_id|>",
            THREE,
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
            "<|begin_of_text|>",
        ),
        HEADERS,
        "<|end_of_text|>",
        ("<|eot_id|>",),
    ),
    "llama3.1": Published(LLAMA31, HEADERS, "<|end_of_text|>", ("<|eot_id|>",)),
    "mistral": Published(
        _plain("[INST] @ [/INST]", "@</s>", start="<s>"), ("<s>",), "</s>", ("</s>",)
    ),
    "mistral_v3": Published(
        MISTRAL_V3,
        ("<s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        "</s>",
        ("</s>",),
    ),
    "mistral_v7": Published(
        _plain("[INST]@[/INST]", "@</s>", "[SYSTEM_PROMPT]@[/SYSTEM_PROMPT]", start="<s>"),
        ("<s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
        "</s>",
        ("</s>",),
    ),
    "gemma": Published(
        _turns("<start_of_turn>#\n", "<end_of_turn>\n", GEMMA, "<start_of_turn>model\n", "<bos>"),
        ("<bos>", "<start_of_turn>", "<end_of_turn>"),
        "<eos>",
        _EOT,
    ),
    "phi3": Published(
        _every("<|#|>\n", "<|end|>\n", "<|assistant|>\n"), (*_ROLES, "<|end|>"), ends=("<|end|>",)
    ),
    "phi4": Published(
        _every("<|im_start|>#<|im_sep|>", "<|im_end|>", "<|im_start|>assistant<|im_sep|>"),
        (*IM, "<|im_sep|>"),
        ends=("<|im_end|>",),
    ),
    "zephyr": Published(_every("<|#|>\n", "</s>\n", "<|assistant|>\n"), (), "</s>", _S),
    "tulu": Published(
        _plain(
            "<|user|>\n@\n", "<|assistant|>\n@<|endoftext|>\n", "<|system|>\n@\n", "<|assistant|>\n"
        ),
        ends=("<|endoftext|>",),
    ),
    "vicuna": Published(_plain("USER: @ ", "ASSISTANT: @</s>", "@ ", "ASSISTANT:"), (), "</s>", _S),
    "alpaca": Published(
        _plain("### Instruction:\n@\n\n", "### Response:\n@\n\n", "@\n\n", "### Response:\n"),
        (),
        "</s>",
    ),
    "falcon": Published(_plain("User: @\n\n", "Assistant: @\n\n", "@\n\n", "Assistant:")),
    "openchat": Published(
        _turns(
            "GPT4 Correct #: ",
            "<|end_of_turn|>",
            {"user": "User", "assistant": "Assistant", "system": "System"},
            "GPT4 Correct Assistant:",
            "<s>",
        ),
        ("<s>", "<|end_of_turn|>"),
        "</s>",
        ("<|end_of_turn|>",),
    ),
    "deepseek_v2": Published(
        _plain("User: @\n\n", "Assistant: @<|end|>", "@\n\n", "Assistant:", "<|begin|>"),
        ("<|begin|>",),
        "<|end|>",
        ("<|end|>",),
    ),
    "deepseek_v3": Published(DEEPSEEK_V3, _DEEPSEEK, "<|end|>", ("<|end|>",)),
    "deepseek_coder": Published(
        _plain("### Instruction:\n@\n", "### Response:\n@\n<|EOT|>\n", "@", "### Response:\n"),
        (),
        "<|EOT|>",
        ("<|EOT|>",),
    ),
    "command_r": Published(
        _turns(
            "<|START|><|#|>",
            "<|END_OF_TURN_TOKEN|>",
            {"user": "USER", "assistant": "CHATBOT", "system": "SYSTEM"},
            "<|START|><|CHATBOT|>",
        ),
        _COHERE,
        "<|END_OF_TURN_TOKEN|>",
        ("<|END_OF_TURN_TOKEN|>",),
    ),
    "internlm2": Published(
        _every("<|im_start|>#\n", "<|im_end|>\n", "<|im_start|>assistant\n", "<s>"),
        ("<s>", *IM),
        "</s>",
        ("<|im_end|>",),
    ),
    "granite": Published(
        _every(
            "<|start_of_role|>#<|end_of_role|>",
            "<|end_of_text|>\n",
            "<|start_of_role|>assistant<|end_of_role|>",
        ),
        ("<|start_of_role|>", "<|end_of_role|>"),
        "<|end_of_text|>",
        ("<|end_of_text|>",),
    ),
    "harmony": Published(HARMONY, _HARMONY, "<|return|>", ("<|return|>", "<|call|>")),
    "olmo": Published(
        _plain(
            "<|user|>\n@\n",
            "<|assistant|>\n@<|endoftext|>\n",
            "<|system|>\n@\n",
            "<|assistant|>\n",
            "<|endoftext|>",
        ),
        ends=("<|endoftext|>",),
    ),
    "exaone": Published(
        _plain(
            "[|user|]@\n",
            "[|assistant|]@[|endofturn|]\n",
            "[|system|]@[|endofturn|]\n",
            "[|assistant|]",
        ),
        _EXAONE,
        "[|endofturn|]",
        ("[|endofturn|]",),
    ),
    "kimi": Published(
        _plain(
            "<|im_user|>user<|im_middle|>@<|im_end|>",
            "<|im_assistant|>assistant<|im_middle|>@<|im_end|>",
            "<|im_system|>system<|im_middle|>@<|im_end|>",
            "<|im_assistant|>assistant<|im_middle|>",
        ),
        _KIMI,
        "[EOS]",
        ("<|im_end|>",),
    ),
    "llama4": Published(
        _turns(
            "<|header_start|>#<|header_end|>\n\n",
            "<|eot|>",
            THREE,
            "<|header_start|>assistant<|header_end|>\n\n",
            "<|begin_of_text|>",
        ),
        ("<|begin_of_text|>", "<|header_start|>", "<|header_end|>", "<|eot|>"),
        "<|end_of_text|>",
        ("<|eot|>",),
    ),
    "starchat": Published(
        _every("<|#|>\n", "<|end|>\n", "<|assistant|>\n"), (*_ROLES, "<|end|>"), ends=("<|end|>",)
    ),
    "baichuan": Published(
        _plain("<reserved_106>@", "<reserved_107>@</s>", "@", "<reserved_107>"),
        ("<reserved_106>", "<reserved_107>"),
        "</s>",
        _S,
    ),
    "minicpm": Published(_plain("<user>@", "<AI>@</s>", "@", "<AI>"), (), "</s>", _S),
    "nemotron": Published(
        _plain(
            "<extra_id_1>User\n@\n",
            "<extra_id_1>Assistant\n@\n",
            "<extra_id_0>System\n@\n\n",
            "<extra_id_1>Assistant\n",
        ),
        ("<extra_id_0>", "<extra_id_1>"),
        "</s>",
        ("<extra_id_1>",),
    ),
    "solar": Published(
        _plain(
            "### User:\n@\n\n",
            "### Assistant:\n@</s>\n\n",
            "### System:\n@\n\n",
            "### Assistant:\n",
        ),
        (),
        "</s>",
        _S,
    ),
    "stablelm": Published(
        _every("<|#|>\n", "<|endoftext|>\n", "<|assistant|>\n"), _ROLES, ends=("<|endoftext|>",)
    ),
    "seed": Published(
        _every("<seed:bos>#\n", "<seed:eos>", "<seed:bos>assistant\n"),
        ("<seed:bos>",),
        "<seed:eos>",
        ("<seed:eos>",),
    ),
}
