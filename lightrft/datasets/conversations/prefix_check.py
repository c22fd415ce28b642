"""Check that the tokens of a conversation begin those of a longer one."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING

from lightrft.config.data import DataConfig
from lightrft.datasets.chat_encoder import ChatEncoder, tokenizer_name
from lightrft.datasets.row_parser import Message
from lightrft.utils.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def check_template(
    tokenizer: PreTrainedTokenizerBase, options: Mapping[str, object] | None = None
) -> None:
    """Check the prefix property of the chat template.

    The tokens of a conversation up to a turn must be a prefix of the tokens of the longer
    conversation. Several turns can only then share one sequence.

    Raises ``ModelError`` with the first violation and the possible settings.
    """
    encoder = ChatEncoder(
        DataConfig(apply_chat_template=True, chat_template_options=dict(options or {})), tokenizer
    )
    where = f"the tokenizer {tokenizer_name(tokenizer)}"
    turns: list[Message] = [
        {"role": "user", "content": "1+1=?"},
        {"role": "assistant", "content": "It is 2."},
        {"role": "user", "content": "2+1=?"},
        {"role": "assistant", "content": "It is 3."},
    ]
    shorter: list[int] = []
    shown = ""
    for upto, last in enumerate(turns, start=1):
        # after a user's turn, the prompt includes the start of the answer
        text = encoder.render(turns[:upto], where, generate=last["role"] == "user")
        ids = encoder.encode([text])[0]
        # Tokens, not text: a merge across the border would change the earlier ones.
        if ids[: len(shorter)] != shorter:
            raise prefix_error(tokenizer, shown, text)
        shorter = ids
        shown = text


def prefix_error(tokenizer: PreTrainedTokenizerBase, shorter: str, longer: str) -> ModelError:
    """Return the error for a chat template that changes earlier text.

    Args:
        tokenizer: the tokenizer, for its name.
        shorter: the text of the shorter conversation.
        longer: the text of the longer conversation, which should begin with ``shorter``.
    """
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(shorter, longer))
    at = sum(1 for _ in same)
    near = slice(max(0, at - 20), at + 40)
    change = f"{shorter[near]!r} becomes {longer[near]!r} once the conversation continues"
    return ModelError(
        f"the chat template of {tokenizer_name(tokenizer)} does not keep what came before: {change}, "
        "so its turns cannot share one row of tokens. Set data.turns: each (or last) "
        "if it is earlier turns that change, model.chat_template to a template without this, "
        "or data.chat_template_options to switch it off"
    )
