"""The fields of the requests of each API that scores: read, unread, or refused."""

from __future__ import annotations

from collections.abc import Mapping

from lightrft.serving.field_table import (
    BOOLEAN,
    LIST,
    NULL,
    OBJECT,
    TEXT,
    RequestFields,
    Types,
    list_of,
    object_of,
)

_HEAD: Mapping[str, Types] = {"head": (TEXT, NULL)}
_SEVERAL: Types = (TEXT, OBJECT, LIST)
"""One text or content, or a list of them."""
_UNREAD = ("model", "user", "request_id", "priority", "cache_salt")
_NEUTRAL: dict[str, object] = {
    "truncate_prompt_tokens": None,
    "truncation_side": None,
    "padding": "do_not_pad",
    "mm_processor_kwargs": {},
}
_OF_INPUTS: dict[str, object] = {
    **_NEUTRAL,
    "add_special_tokens": True,
    # messages end with an answer, which is scored as it is
    "add_generation_prompt": False,
    "continue_final_message": False,
    "chat_template": None,
    "chat_template_kwargs": {},
    "media_io_kwargs": {},
}
_ACTIVATION = ("use_activation", "activation", "softmax")
"""Names of one field in different versions of vLLM."""
_INPUTS: Mapping[str, Types] = {
    "input": (TEXT, LIST),
    "messages": (list_of(OBJECT),),
    **_HEAD,
}
PROMPTS, RESPONSES = ("text_1", "queries", "data_1"), ("text_2", "documents", "items", "data_2")
"""Names of the two sides of ``/score`` of vLLM."""

TEXTS = ("query", "queries")
"""Names of the texts of ``/get_reward``: of OpenRLHF, and of LightRFT."""
GET_REWARD = RequestFields(
    read={**dict.fromkeys(TEXTS, (TEXT, LIST)), "prompts": (LIST, NULL), "images": (LIST, NULL)}
    | _HEAD,
    # no reward model reads the reference answers
    unread=("labels", "references"),
)
"""``/get_reward`` of OpenRLHF and of LightRFT."""
SCORE = RequestFields(
    read={**dict.fromkeys((*PROMPTS, *RESPONSES), _SEVERAL), **_HEAD},
    unread=_UNREAD,
    # a score is the output of its head
    neutral={**_NEUTRAL, **dict.fromkeys(_ACTIVATION, False)},
)
"""``/score`` of vLLM."""
CLASSIFY = RequestFields(
    read={**_INPUTS, **dict.fromkeys(_ACTIVATION, (BOOLEAN, NULL))},
    unread=_UNREAD,
    neutral=_OF_INPUTS,
)
"""``/classify`` of vLLM."""
POOLING = RequestFields(
    read={**_INPUTS, "encoding_format": (TEXT,)},
    unread=_UNREAD,
    neutral={
        **_OF_INPUTS,
        **dict.fromkeys(_ACTIVATION, False),
        "task": "classify",
        "dimensions": None,
        "embed_dtype": "float32",
        "endianness": "native",
    },
)
"""``/pooling`` of vLLM."""
_TOKENS = RequestFields(read={"input_ids": (LIST,), "media": (TEXT, NULL)})
REWARDS = RequestFields(
    read={
        "prompts": (object_of(_TOKENS),),
        "responses": (object_of(_TOKENS),),
        "conversations": (LIST,),
        "answers": (LIST,),
        "prompt_of": (LIST,),
    }
)
"""The forms of ``reward_wire``."""
