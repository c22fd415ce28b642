"""Compile constraints into matchers of tokens. This file wraps the package ``llguidance``."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import ValidationError

from lightrft.config.generation.decoding import ConstraintConfig
from lightrft.config.strategy import SamplingConfig
from lightrft.types import Prompt, Request
from lightrft.utils.errors import ConfigError, DataError, did_you_mean, first_line, install_extra

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

COMPILED = 256
"""Most constraints that stay compiled."""
WHITESPACE = r"[ \n\t]{0,32}"
"""White space between the parts of JSON. It is bounded, since a model may repeat it for ever."""


def constraint_of(prompt: Prompt, sampling: SamplingConfig) -> ConstraintConfig | None:
    """Return the constraint of the responses to ``prompt``, or ``None``.

    Raises:
        DataError: The column of the prompt's row holds no constraint.
    """
    constraint = sampling.constraint
    if constraint is None or constraint.column is None:
        return constraint
    given = prompt.columns.get(constraint.column)
    if given is None:
        return None
    try:
        # columns of a table give every row the fields of all rows
        filled = {k: v for k, v in given.items() if v is not None}
        return ConstraintConfig.model_validate(filled) if filled else None
    except (AttributeError, ValidationError) as error:
        raise DataError(
            f"column {constraint.column!r} of prompt {prompt.id!r} is no constraint "
            f"({first_line(error)}); give one of json_schema, regex or choices, or null"
        ) from error


def request_constraint(request: Request, sampling: SamplingConfig) -> ConstraintConfig | None:
    """Return the constraint of ``request``: its own, or that of the sampling settings."""
    if request.constraint is not None:
        return request.constraint
    return constraint_of(request.prompt, sampling)


def check_constraint(constraint: ConstraintConfig | None) -> None:
    """Raise ``ConfigError`` if the package is missing or ``constraint`` is malformed."""
    if constraint is not None and constraint.column is None:
        _refuse(constraint, _package().LLMatcher.validate_grammar(_grammar(constraint)))


def refuse_column(sampling: SamplingConfig, why: str) -> None:
    """Raise ``ConfigError`` if the constraint is in a column, which ``why`` ("no request has")."""
    constraint = sampling.constraint
    if constraint is not None and constraint.column is not None:
        raise ConfigError(
            f"sampling.constraint.column = {constraint.column!r}: {why} columns; give "
            "json_schema, regex or choices"
        )


def check_column(
    prompts: Iterable[Prompt], sampling: SamplingConfig, branch: str, data: str
) -> None:
    """Raise ``ConfigError`` if the constraint is in a column that no row has.

    Args:
        prompts: The prompts that responses are generated to.
        sampling: Sampling settings of the responses.
        branch: Key of ``sampling``, for messages.
        data: Key of the settings of the prompts, for messages.
    """
    constraint = sampling.constraint
    if constraint is None or constraint.column is None:
        return
    known: set[str] = set()
    for prompt in prompts:
        known.update(prompt.columns)
        if constraint.column in known:
            return
    raise ConfigError(
        f"{branch}.constraint.column = {constraint.column!r}: no row of {data} has this column"
        f"{did_you_mean(constraint.column, known)}; name one that holds constraints"
    )


class Matcher:
    """The state of one response under a constraint.

    ``inner`` is a matcher of llguidance.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def copy(self) -> Matcher:
        """Return a matcher in the same state."""
        return Matcher(self.inner.deep_copy())

    @property
    def error(self) -> str:
        """Return the reason why no token can follow; empty if one can."""
        return " ".join(self.inner.get_error().split()) if self.inner.is_error() else ""

    def accepts(self, token_ids: Sequence[int]) -> int:
        """Return the number of first tokens of ``token_ids`` that the constraint allows."""
        return int(self.inner.validate_tokens(list(token_ids)))

    def consume(self, token_ids: Sequence[int]) -> bool:
        """Append ``token_ids``. Return False, in an unusable state, if one is not allowed."""
        return bool(self.inner.consume_tokens(list(token_ids)))


@dataclass(frozen=True, slots=True)
class MatchedRow:
    """A row of logits whose tokens a constraint limits.

    Attributes:
        matcher: State of the response before ``drafts``.
        index: Row of the logits.
        drafts: Tokens that follow. The next rows are those after each of them.
    """

    matcher: Matcher
    index: int
    drafts: Sequence[int] = ()


class GrammarCompiler:
    """Compiles constraints for a tokenizer. Threads may share it.

    Args:
        tokenizer: The tokenizer of the model.
        end: Token id that ends a response. ``None`` for a model without one.

    Raises:
        ConfigError: The package is missing, the tokenizer is not supported, or ``end`` is ``None``.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, end: int | None) -> None:
        if end is None:
            raise ConfigError(
                "sampling.constraint needs a model with an end token, which ends a response that "
                "is complete; set eos_token in its tokenizer, or leave out sampling.constraint"
            )
        self.end = end
        self._package = _package()
        self._tokenizer = _wrapped(self._package, tokenizer, end)
        self._executor = self._package.LLExecutor()
        self._compiled: OrderedDict[str, Matcher] = OrderedDict()
        self._lock = threading.Lock()

    def matcher(self, constraint: ConstraintConfig) -> Matcher:
        """Return a matcher at the start of a response.

        Raises:
            ConfigError: The constraint is malformed.
        """
        grammar = _grammar(constraint)
        with self._lock:
            found = self._compiled.pop(grammar, None)
            if found is None:
                found = Matcher(self._package.LLMatcher(self._tokenizer, grammar, log_level=0))
                _refuse(constraint, found.inner.get_error())
            self._compiled[grammar] = found
            if len(self._compiled) > COMPILED:
                self._compiled.popitem(last=False)
            return found.copy()

    def bits(self, rows: Sequence[MatchedRow], count: int) -> np.ndarray:
        """Return ``[count, W]`` int32: bit ``v`` of a row is 1 if token ``v`` is allowed.

        All tokens of other rows than those of ``rows`` are allowed. The bit of ``end`` is 1 where
        the response may end.
        """
        from llguidance import numpy as kernels

        found = kernels.allocate_token_bitmask(count, self._tokenizer.vocab_size)
        plain = [(row.matcher.inner, row.index) for row in rows if not row.drafts]
        if plain:
            kernels.fill_next_token_bitmask_par(self._executor, plain, found)
        drafted = [(row.matcher.inner, row.index, list(row.drafts)) for row in rows if row.drafts]
        if drafted:
            kernels.fill_next_token_bitmask_par_with_draft_tokens(self._executor, drafted, found)
        return found


def _package() -> Any:
    """Return the package. Raises ``ConfigError`` if it is not installed."""
    try:
        import llguidance
    except ImportError as error:
        raise ConfigError(
            "sampling.constraint needs the package llguidance: "
            f"{install_extra('constrained')}, or leave out sampling.constraint"
        ) from error
    return llguidance


def _refuse(constraint: ConstraintConfig, error: str) -> None:
    if error:
        name = "json_schema" if constraint.json_schema is not None else "regex"
        reason = " ".join(error.split())
        raise ConfigError(
            f"sampling.constraint.{name} is not supported: {reason}; correct or simplify it"
        )


def _grammar(constraint: ConstraintConfig) -> str:
    """Return the grammar of llguidance that ``constraint`` stands for."""
    package = _package()
    if constraint.json_schema is not None:
        schema: Mapping[str, Any] = constraint.json_schema
        options = {"whitespace_pattern": WHITESPACE}
        return package.LLMatcher.grammar_from_json_schema(json.dumps(schema), options)
    if constraint.regex is not None:
        return package.LLMatcher.grammar_from_regex(constraint.regex)
    return package.grammar_from("choice", json.dumps(constraint.choices))


def _wrapped(package: Any, tokenizer: Any, end: int) -> Any:
    """Return ``tokenizer`` as llguidance reads it."""
    import llguidance.hf

    size = len(tokenizer)
    try:
        return llguidance.hf.from_tokenizer(tokenizer, n_vocab=size, eos_token=end)
    except ValueError as error:
        decoder = type(tokenizer.backend_tokenizer.decoder).__name__
        # the text of a response is then the texts of its tokens, one after another
        if decoder not in ("Fuse", "NoneType"):
            raise ConfigError(
                f"sampling.constraint does not support the tokenizer of this model ({error}); "
                "leave out sampling.constraint"
            ) from error
    spelled = _SpelledTokens(tokenizer, end, size)
    return package.LLTokenizer(package.TokenizerWrapper(spelled), n_vocab=size)


class _SpelledTokens:
    """A tokenizer whose tokens are spelled in its vocabulary, as llguidance reads one."""

    def __init__(self, tokenizer: Any, end: int, size: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = end
        self.bos_token_id = None
        self.special_token_ids = tokenizer.all_special_ids
        names = tokenizer.convert_ids_to_tokens(list(range(size)))
        self.tokens = [("" if name is None else name).encode() for name in names]

    def __call__(self, text: str | bytes) -> list[int]:
        text = text.decode() if isinstance(text, bytes) else text
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
