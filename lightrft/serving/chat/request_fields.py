"""The fields of the requests of each API: read, unread, or refused."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from lightrft.serving.chat.response_format import GUIDED
from lightrft.serving.problems import bad, reason
from lightrft.utils.errors import did_you_mean

SETTINGS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "stop": "stop",
    "stop_sequences": "stop",
    "stop_token_ids": "stop_token_ids",
}
"""Field of a request to the setting ``sampling`` of this name."""


@dataclass(frozen=True, slots=True)
class RequestFields:
    """The fields that the requests of an API may have.

    Attributes:
        read: Fields that this server reads.
        unread: Fields that change no answer, whatever their value is.
        neutral: Fields that this server does not follow, to the value that asks for nothing. So
            does ``null``, and every empty value where this one is empty.
    """

    read: Collection[str]
    unread: Collection[str]
    neutral: Mapping[str, object]

    def check(self, body: Mapping[str, Any]) -> None:
        """Check the names of the fields of ``body``, and the values that would be ignored.

        Raises:
            HTTPProblem: A field is unknown, or asks for something that this server does not do.
        """
        for name, value in body.items():
            if name in self.read or name in self.unread:
                continue
            if name not in self.neutral:
                near = did_you_mean(name, [*self.read, *self.unread, *self.neutral])
                raise bad(f"unknown field {reprlib.repr(name)}{near or '; leave it out'}")
            if not _is_neutral(value, self.neutral[name]):
                given = f"{name} = {reprlib.repr(value)}"
                raise bad(f"{given} is not supported, and would change the answer; leave it out")


def _is_neutral(value: object, neutral: object) -> bool:
    return value is None or value == neutral or (not neutral and not value)


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


_SAMPLED = (*(n for n in SETTINGS if n != "stop_sequences"), "seed", "stream", "return_token_ids")
_OPENAI = (
    *_SAMPLED,
    *GUIDED,
    *("n", "seeds", "stream_options", "response_format", "structured_outputs"),
)
# ``parallel_tool_calls``: calls are found in the text, which the model writes without this field.
_UNREAD = (
    *("model", "user", "metadata", "store", "service_tier", "safety_identifier", "prediction"),
    *("parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
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
    "chat_template_kwargs": {},
    "documents": [],
    "mm_processor_kwargs": {},
    "media_io_kwargs": {},
}
_CONVERSATION = (
    *("messages", "tools", "tool_choice"),
    *("continue_final_message", "add_generation_prompt"),
)
CHAT = RequestFields(
    read=(*_OPENAI, *_CONVERSATION, "logprobs", "top_logprobs"),
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
        "reasoning_effort": None,
        "verbosity": "medium",
        "web_search_options": None,
    },
)
"""Chat completions of OpenAI, with the fields of vLLM."""
COMPLETIONS = RequestFields(
    read=(*_OPENAI, "prompt", "echo", "logprobs", "media", "response_tokens"),
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
    read=("prompt", *_CONVERSATION, "add_special_tokens"),
    unread=("model",),
    neutral={**_TEMPLATE, "return_token_strs": False},
)
"""``/tokenize`` of vLLM."""
DETOKENIZE = RequestFields(read=("tokens",), unread=("model",), neutral={})
"""``/detokenize`` of vLLM."""
PASSED_ON = ("max_tokens", "temperature", "top_p", "top_k", "seed", "stream", "stop_sequences")
"""Fields of messages that a chat completion reads too."""
MESSAGES = RequestFields(
    read=(
        *PASSED_ON,
        *("messages", "system", "tools", "tool_choice", "output_config", "output_format"),
        "return_token_ids",
    ),
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
