"""The table of names in other frameworks, looked up by whole names."""

from __future__ import annotations

import functools
import re

from lightrft.config.other_names import (
    translated,
    translated_losses,
    translated_rewards,
    translated_training,
    untranslated,
)
from lightrft.config.other_names.rows import NameRow, pattern_of

GUESSED: tuple[NameRow, ...] = (
    NameRow("data.columns.{answer,answers,solution,target,ground_truth}", "data.columns.label"),
    NameRow("data.columns.{question,query,instruction,messages,problem}", "data.columns.prompt"),
    NameRow("data.columns.{completion,output}", "data.columns.response"),
    NameRow("validation.{sources,data,data.sources}", "validation.sources eval.data.sources"),
    NameRow("validation.every", "eval.every"),
    NameRow("rewards reward_fn reward_functions", "reward.terms", "as in reward.terms=[math]"),
    NameRow("prompts", "data"),
    NameRow("from src", "path"),
    NameRow("to out destination", "output"),
    NameRow("optimizer.kind", "", "optimizer is AdamW with float32 copies"),
)
"""Names that users guess, of no framework alone."""

ROWS: tuple[NameRow, ...] = (
    *translated.MODELS,
    *translated.DATA,
    *translated.SAMPLING,
    *translated_rewards.REWARD,
    *translated_losses.ALGORITHM,
    *translated_losses.PREFERENCE,
    *translated_training.STEPS,
    *translated_training.PLACES,
    *translated_training.RUN,
    *translated_training.MERGING,
    *GUESSED,
    *untranslated.ROWS,
)
"""Names with a counterpart first, so that they come before patterns without one."""


@functools.cache
def _by_name() -> tuple[
    dict[str, list[tuple[str, NameRow]]], list[tuple[re.Pattern[str], NameRow]]
]:
    """Return the rows by exact name, each with its framework, and the rows with patterns."""
    exact: dict[str, list[tuple[str, NameRow]]] = {}
    patterns = []
    for row in ROWS:
        for framework, name in row.each_name():
            if "*" in name:
                patterns.append((pattern_of(name), row))
            else:
                exact.setdefault(name, []).append((framework, row))
    return exact, patterns


@functools.cache
def rows_of(name: str) -> list[tuple[str, NameRow]]:
    """Return the rows of a whole name, each with the framework that it holds for, or "" for all."""
    exact, patterns = _by_name()
    # As they are typed: ``--learning-rate``, in capitals, or ``+trainer.x`` of Hydra.
    name = name.lower().replace("-", "_").lstrip("+~_")
    if found := exact.get(name):
        return found
    return [("", row) for pattern, row in patterns if pattern.fullmatch(name)][:1]
