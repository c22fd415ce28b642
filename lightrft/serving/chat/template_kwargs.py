"""Arguments of the chat template in a request, as in vLLM and SGLang."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightrft.serving.problems import bad
from lightrft.utils.chat_template import argument_problem, names_of_rendering

FIELD = "chat_template_kwargs"


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
    # a template gets the special tokens by their names
    reserved = names_of_rendering(tokenizer) | set(tokenizer.SPECIAL_TOKENS_ATTRIBUTES)
    template = tokenizer.get_chat_template(tools=list(tools) or None)
    if problem := argument_problem(FIELD, given, [template], reserved):
        raise bad(problem)
    return given
