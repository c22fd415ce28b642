"""Checks of IFEval that need a library: the language, and the number of sentences."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from lightrft.rewards.rules.ifeval.word_checks import Check, Options, holds
from lightrft.utils.errors import install_extra

SENTENCES = "english"
"""Language of the sentence model. IFEval counts English sentences."""


class MissingTool(Exception):
    """A check needs a library or its data, which are missing. The message names the fix."""


def is_in_language(text: str, options: Options) -> bool:
    """Return whether the language of a text is as asked.

    Any language is accepted for a text without one, such as digits alone, as IFEval does.
    """
    detector = _detector()
    try:
        return detector.detect(text) == options["language"]
    except detector.LangDetectException:
        return True


def has_number_of_sentences(text: str, options: Options) -> bool:
    """Return whether the number of sentences is as asked."""
    count = len(_sentence_model().tokenize(text))
    return holds(count, options["relation"], int(options["num_sentences"]))


@cache
def _detector() -> Any:
    """Return langdetect. Raises ``MissingTool`` if it is not installed."""
    try:
        import langdetect
    except ImportError as error:
        raise MissingTool(f"langdetect: {install_extra('ifeval')}") from error
    # Its features are sampled: the same text must have the same language in every process.
    langdetect.DetectorFactory.seed = 0
    return langdetect


@cache
def _sentence_model() -> Any:
    """Return the sentence model of nltk. Raises ``MissingTool`` if it is not there."""
    try:
        from nltk.tokenize import PunktTokenizer
    except ImportError as error:
        raise MissingTool(f"nltk: {install_extra('ifeval')}") from error
    try:
        return PunktTokenizer(SENTENCES)
    except LookupError as error:
        raise MissingTool(
            "the data punkt_tab of nltk: python -m nltk.downloader punkt_tab"
        ) from error


LANGUAGE_CHECKS: Mapping[str, Check] = {
    "language:response_language": is_in_language,
    "length_constraints:number_sentences": has_number_of_sentences,
}
