"""Arguments of the chat template in a request, as in vLLM and SGLang."""

from __future__ import annotations

import inspect
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from lightrft.serving.problems import bad
from lightrft.utils.chat_template import names_read
from lightrft.utils.errors import did_you_mean

FIELD = "chat_template_kwargs"
_OF_RENDERING = frozenset({"messages", "conversations", "raise_exception", "strftime_now"})
"""Names that transformers gives to every template, or needs itself."""


def read_template_kwargs(
    body: Mapping[str, Any], tokenizer: Any, tools: Sequence[Mapping[str, Any]]
) -> Mapping[str, Any]:
    """Return the arguments of the chat template that a request gives.

    Args:
        body: The request.
        tokenizer: The tokenizer with its chat template.
        tools: Tools of the request. Some tokenizers have another template for them.

    Raises:
        HTTPProblem: The server sets an argument itself, or the template does not read it.
    """
    given = body.get(FIELD) or {}
    if not given:
        return {}
    arguments = inspect.signature(tokenizer.apply_chat_template).parameters
    # a template gets the special tokens by their names
    reserved = {*arguments, *tokenizer.SPECIAL_TOKENS_ATTRIBUTES, *_OF_RENDERING}
    read = names_read(tokenizer.get_chat_template(tools=list(tools) or None)) - reserved
    for name in given:
        if name in reserved:
            raise bad(f"{FIELD}.{name} is set by the server; leave it out")
        if name not in read:
            others = f"; it reads {', '.join(sorted(read))}" if read else "; leave it out"
            near = did_you_mean(name, read) or others
            raise bad(f"{FIELD}: the chat template does not read {reprlib.repr(name)}{near}")
    return given
