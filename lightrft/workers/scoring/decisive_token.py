"""Find the token of a judgement that decides its verdict."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import takewhile
from typing import Any

from lightrft.config.reward_model.judgement import QuestionConfig
from lightrft.datasets.chat_encoder import ChatEncoder
from lightrft.datasets.judgement.question import lead
from lightrft.rewards.rules.verdicts import Verdict, VerdictForm, read_verdict
from lightrft.utils.errors import ConfigError


def possible(form: VerdictForm) -> list[Verdict]:
    """Return the verdicts of one token: the letters, or the whole numbers of the scale."""
    if form.choices:
        return list(form.choices)
    return [float(v) for v in range(math.ceil(form.low), math.floor(form.high) + 1)]


def verdict_names(form: VerdictForm) -> list[str]:
    """Return the verdicts of ``possible`` as a judgement writes them."""
    return [f"{v:g}" if isinstance(v, float) else str(v) for v in possible(form)]


def decisive_token(
    count: int, said: Callable[[int], str], text: Callable[[int], str], form: VerdictForm
) -> int | None:
    """Return the index of the token that decides the verdict of a judgement.

    Each other verdict in place of this token is read as this other verdict. So the place of the
    verdict needs no description. ``None`` if there is no verdict, or it has several tokens.

    Args:
        count: Number of tokens of the judgement.
        said: Returns the text of the token of an index.
        text: Returns the text of so many first tokens.
        form: Form of the verdict.
    """
    names, verdicts = verdict_names(form), possible(form)
    whole = text(count)
    for k in reversed(range(count)):
        word = said(k).strip()
        if word not in names:
            continue
        until = text(k + 1)
        at = until.rfind(word)
        if not whole.startswith(until):
            continue
        head, tail = whole[:at], whole[at + len(word) :]
        read = (read_verdict(head + name + tail, form) for name in names)
        if all(found == verdict for found, verdict in zip(read, verdicts, strict=True)):
            return k
    return None


class JudgementTokens:
    """The tokens of a judgement as texts.

    Args:
        tokenizer: Tokenizer of the judge.
        ids: The tokens, without an end token.
    """

    def __init__(self, tokenizer: Any, ids: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.ids = list(ids)

    @cached_property
    def texts(self) -> list[str]:
        """The text of each token."""
        return self.tokenizer.batch_decode([[id] for id in self.ids])

    def text(self, count: int) -> str:
        """Return the text of the first ``count`` tokens."""
        return self.tokenizer.decode(self.ids[:count])

    def decisive(self, form: VerdictForm) -> int | None:
        """Return the index of ``decisive_token``."""
        return decisive_token(len(self.ids), self.texts.__getitem__, self.text, form)

    def others(self, index: int, names: Sequence[str]) -> list[int]:
        """Return the tokens that say ``names`` as the token ``index`` says its verdict.

        Args:
            index: Index of the token.
            names: The verdicts.

        Raises:
            ConfigError: A verdict has no such token.
        """
        piece = str(self.tokenizer.convert_ids_to_tokens(self.ids[index]))
        known = self.tokenizer.get_vocab()
        word = self.texts[index].strip()
        pieces = [name.join(piece.rsplit(word, 1)) for name in names]
        missing = [name for name, other in zip(names, pieces) if other not in known]
        if missing:
            raise ConfigError(
                f"reward.judges: read = 'after_reasons' needs verdicts of one token, and "
                f"{missing[0]!r} is none; set read: text, or a scale of one digit"
            )
        return [known[other] for other in pieces]


def common_length(rows: Sequence[Sequence[int]]) -> int:
    """Return the number of tokens that all ``rows`` begin with."""
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, zip(*rows)))


def verdict_tokens(
    encoder: ChatEncoder, config: QuestionConfig, verdicts: Sequence[str]
) -> tuple[list[int], list[int]]:
    """Return the tokens before a verdict, and the token of each verdict.

    Args:
        encoder: Encodes texts by the judge's tokenizer.
        config: Place of the verdict.
        verdicts: The verdicts.

    Raises:
        ConfigError: A verdict is not one token of its own.
    """
    before = lead(config)
    start, *rows = encoder.encode([before, *(before + verdict for verdict in verdicts)])
    ids = []
    for verdict, row in zip(verdicts, rows):
        if row[:-1] != start or len(row) != len(start) + 1:
            raise ConfigError(
                f"reward.judges: read = 'probability' needs verdicts of one token, and {verdict!r} "
                f"after {before!r} has {len(row) - len(start)}; set read: text, another verdict "
                "place, or a scale of one digit"
            )
        ids.append(row[-1])
    if len(set(ids)) < len(ids):
        raise ConfigError(
            f"reward.judges: two of the verdicts {', '.join(verdicts)} are the same token; set "
            "read: text"
        )
    return start, ids
