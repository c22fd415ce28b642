"""The fields of the requests of each API that generates: read, unread, or refused."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping

from pydantic import ValidationError

from lightrft.serving.chat.response_format import FORMAT, GUIDED, OUTPUTS
from lightrft.serving.field_table import (
    BOOLEAN,
    INTEGER,
    LIST,
    NULL,
    NUMBER,
    OBJECT,
    TEXT,
    RequestFields,
    Types,
    list_of,
    object_of,
)
from lightrft.serving.problems import reason

SAMPLING: Mapping[str, Types] = {
    "temperature": (NUMBER, NULL),
    "top_p": (NUMBER, NULL),
    "top_k": (INTEGER, NULL),
    "min_p": (NUMBER, NULL),
    "repetition_penalty": (NUMBER, NULL),
    "max_tokens": (INTEGER, NULL),
    "max_completion_tokens": (INTEGER, NULL),
    "min_tokens": (INTEGER,),
    "stop": (TEXT, list_of(TEXT), NULL),
    "stop_token_ids": (list_of(INTEGER), NULL),
}
"""Fields of the API of OpenAI and of vLLM that are settings ``sampling``."""
_RENAMED = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "stop_sequences": "stop",
}
SETTINGS = {name: _RENAMED.get(name, name) for name in (*SAMPLING, "stop_sequences")}
"""Field of a request to the setting ``sampling`` of this name."""


def sampling_problem(error: ValidationError, fields: Mapping[str, str]) -> str:
    """Return the first problem of ``error`` in a line that names the field of the request.

    Args:
        error: The error of ``SamplingConfig``.
        fields: Setting to the field that the request has for it.
    """
    first = error.errors()[0]
    # a later field of the same setting has the more special name
    names = {setting: name for name, setting in reversed(SETTINGS.items())} | dict(fields)
    if first["type"] == "value_error":
        # a message of our own, which has the name and the value of each setting
        return re.sub(r"\w+", lambda word: names.get(word[0], word[0]), reason(first))
    setting, *inside = map(str, first["loc"])
    where = ".".join([names.get(setting, setting), *inside])
    return f"{where} = {reprlib.repr(first['input'])}: {reason(first)}"


_STREAM_OPTIONS = RequestFields(
    read={"include_usage": (BOOLEAN, NULL)},
    # it pads events
    unread=("include_obfuscation",),
    neutral={"continuous_usage_stats": False},
)
_OPENAI: Mapping[str, Types] = {
    **SAMPLING,
    "n": (INTEGER, NULL),
    "seed": (INTEGER, NULL),
    "seeds": (list_of(INTEGER), NULL),
    "stream": (BOOLEAN, NULL),
    "stream_options": (object_of(_STREAM_OPTIONS), NULL),
    "return_token_ids": (BOOLEAN, NULL),
    "response_format": (object_of(FORMAT), NULL),
    "structured_outputs": (object_of(OUTPUTS), NULL),
    **GUIDED,
}
_UNREAD = (
    *("model", "user", "metadata", "store", "service_tier", "safety_identifier", "prediction"),
    *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
    *("request_id", "priority", "cache_salt", "data_parallel_rank", "kv_transfer_params"),
    *("guided_decoding_backend",),
)
_NEUTRAL: dict[str, object] = {
    # of OpenAI
    "logit_bias": {},
    "presence_penalty": 0,
    "frequency_penalty": 0,
    # of vLLM
    "ignore_eos": False,
    "use_beam_search": False,
    "length_penalty": 1,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "include_stop_str_in_output": False,
    "allowed_token_ids": [],
    "bad_words": [],
    "logits_processors": [],
    "prompt_logprobs": None,
    "logprob_token_ids": [],
    "truncate_prompt_tokens": None,
    "truncation_side": None,
    "return_tokens_as_token_ids": False,
    "repetition_detection": None,
    "thinking_token_budget": None,
    "vllm_xargs": {},
    "guided_grammar": None,
    "guided_whitespace_pattern": None,
    # of this server's settings
    "first_token_temperature": None,
    "constraint": None,
}
_TEMPLATE: dict[str, object] = {
    "chat_template": None,
    "documents": [],
    "mm_processor_kwargs": {},
    "media_io_kwargs": {},
}
CONVERSATION: Mapping[str, Types] = {
    "messages": (list_of(OBJECT),),
    "tools": (list_of(OBJECT), NULL),
    "tool_choice": (TEXT, OBJECT, NULL),
    "continue_final_message": (BOOLEAN,),
    "add_generation_prompt": (BOOLEAN,),
    "chat_template_kwargs": (OBJECT, NULL),
}
"""Fields that make the prompt of a chat."""
CHAT = RequestFields(
    read={
        **_OPENAI,
        **CONVERSATION,
        "logprobs": (BOOLEAN, NULL),
        "top_logprobs": (INTEGER, NULL),
    },
    unread=_UNREAD,
    neutral={
        **_NEUTRAL,
        **_TEMPLATE,
        "best_of": 1,
        "echo": False,
        "add_special_tokens": False,
        "audio": None,
        "modalities": ["text"],
        "moderation": None,
        "functions": [],
        "function_call": None,
        "include_reasoning": True,
        # calls are found in the text, and nothing stops the model after the first
        "parallel_tool_calls": True,
        "reasoning_effort": None,
        "verbosity": "medium",
        "web_search_options": None,
    },
)
"""Chat completions of OpenAI, with the fields of vLLM."""
COMPLETIONS = RequestFields(
    read={
        **_OPENAI,
        "prompt": (TEXT, LIST),
        "echo": (BOOLEAN, NULL),
        "logprobs": (INTEGER, NULL),
        "media": (TEXT, NULL),
        "response_tokens": (INTEGER, NULL),
    },
    unread=_UNREAD,
    neutral={
        **_NEUTRAL,
        "best_of": 1,
        "suffix": "",
        "add_special_tokens": True,
        "prompt_embeds": None,
    },
)
"""Completions of OpenAI, with the fields of vLLM and of ``engine.kind: http``."""
TOKENIZE = RequestFields(
    read={"prompt": (TEXT,), **CONVERSATION, "add_special_tokens": (BOOLEAN,)},
    unread=("model",),
    neutral={**_TEMPLATE, "return_token_strs": False},
)
"""``/tokenize`` of vLLM."""
DETOKENIZE = RequestFields(read={"tokens": (LIST,)}, unread=("model",))
"""``/detokenize`` of vLLM."""
PASSED_ON: Mapping[str, Types] = {
    "max_tokens": (INTEGER,),
    "temperature": (NUMBER,),
    "top_p": (NUMBER,),
    "top_k": (INTEGER,),
    "seed": (INTEGER,),
    "stream": (BOOLEAN,),
    "stop_sequences": (list_of(TEXT),),
    "chat_template_kwargs": (OBJECT, NULL),
}
"""Fields of messages that a chat completion reads too."""
_TOOL_CHOICE = RequestFields(
    read={"type": (TEXT,)},
    # a forced call, which alone has a name, is refused by its type
    unread=("name",),
    # as ``parallel_tool_calls``
    neutral={"disable_parallel_tool_use": False},
)
TOOL = RequestFields(
    read={
        "type": (TEXT, NULL),
        "name": (TEXT,),
        "description": (TEXT,),
        "input_schema": (OBJECT,),
    },
    unread=("cache_control", "eager_input_streaming", "defer_loading", "allowed_callers"),
    neutral={"strict": False, "input_examples": []},
)
"""Tools of ``MESSAGES`` that the client runs."""
_OUTPUT_CONFIG = RequestFields(read={"format": (OBJECT, NULL)}, neutral={"effort": None})
MESSAGES = RequestFields(
    read={
        **PASSED_ON,
        "messages": (list_of(OBJECT),),
        "system": (TEXT, list_of(OBJECT)),
        "tools": (list_of(OBJECT),),
        "tool_choice": (object_of(_TOOL_CHOICE),),
        "output_config": (object_of(_OUTPUT_CONFIG),),
        "output_format": (OBJECT, NULL),
        "return_token_ids": (BOOLEAN, NULL),
    },
    unread=(
        *("model", "metadata", "service_tier", "cache_control", "inference_geo", "speed"),
        *("diagnostics", "user_profile_id", "workspace_id"),
    ),
    neutral={
        "thinking": {"type": "disabled"},
        "container": None,
        "context_management": None,
        "mcp_servers": [],
        **_TEMPLATE,
    },
)
"""Messages of Anthropic."""
