"""Chat templates of multimodal models.

Their processor may have a template that their tokenizer lacks.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import transformers
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from lightrft.models.families import family_of
from lightrft.utils.chat_template import rendered

_log = logging.getLogger(__name__)
_CLASSES = {"qwen2_audio": "Qwen2AudioProcessor"}
"""Processors with a class-level template. Published folders of these types have only the
tokenizer's template, for text alone."""


def fit_template(
    tokenizer: PreTrainedTokenizerBase,
    settings: PreTrainedConfig,
    where: str,
    revision: str | None,
) -> None:
    """Give ``tokenizer`` the processor's chat template if that accepts more kinds.

    The kinds are the media that the model reads. A tokenizer without any template gets one from a
    file or from the family's row, never from a class. The template writes the token of the
    beginning where the processor adds it.

    Args:
        tokenizer: Changed in place.
        settings: Config of the model.
        where: Folder or hub name.
        revision: Revision on the hub. ``None`` for the newest.

    Raises:
        OSError: A file cannot be read.
        ValueError: The content of a file cannot be read.
        KeyError: A file lacks an entry.
    """
    _fit_kinds(tokenizer, settings, where, revision)
    own = family_of(settings).own
    template = tokenizer.chat_template
    if own is None or not own.adds_start or not isinstance(template, str):
        return
    text = str(tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False))
    start = tokenizer.bos_token or tokenizer.eos_token
    if not text.startswith(str(start)):
        tokenizer.chat_template = "{{- bos_token or eos_token -}}" + template


def _fit_kinds(
    tokenizer: PreTrainedTokenizerBase,
    settings: PreTrainedConfig,
    where: str,
    revision: str | None,
) -> None:
    """Give ``tokenizer`` the template that accepts most kinds, see ``fit_template``."""
    family = family_of(settings)
    reader = family.reader
    kinds = {tower.kind for tower in reader.towers} if reader is not None else set()
    own = _taken(tokenizer, None, kinds)
    if own == kinds:
        return
    has_template = bool(tokenizer.chat_template)
    templates: Iterable[str] = _of_processor(
        settings.model_type, where, revision, chat=has_template
    )
    if family.own is not None and family.own.chat_template and not has_template:
        templates = chain(templates, [family.own.chat_template])
    for template in templates:
        taken = _taken(tokenizer, template, kinds)
        # a proper superset: a template that takes more kinds but loses one is no gain
        if taken > own:
            more = ", ".join(sorted(taken - own))
            _log.info("the tokenizer's chat template takes no %s: the processor's is used", more)
            tokenizer.chat_template = template
            return


def _taken(tokenizer: PreTrainedTokenizerBase, template: str | None, kinds: set[str]) -> set[str]:
    """Return the subset of ``kinds`` for which ``template`` writes anything. ``None`` stands for
    the tokenizer's template."""

    def apply(messages: list[dict[str, Any]]) -> str:
        return str(tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False))

    # a template takes a kind if a part of that kind changes the text next to this word
    word = {"type": "text", "text": "(word)"}
    alone = rendered(apply, [word])
    taken = set()
    for kind in kinds:
        text = rendered(apply, [{"type": kind}, word])
        # some templates drop a part that they do not know, others the whole message
        if text is not None and text != alone and "(word)" in text:
            taken.add(kind)
    return taken


def _of_processor(
    model_type: str,
    where: str,
    revision: str | None,
    *,
    chat: bool,
) -> Iterator[str]:
    """Yield templates in transformers' order of preference: of files, then, with ``chat``, of the
    processor's class."""
    # imported here, since text models need none of the modules that it loads
    from transformers import ProcessorMixin

    fields, _ = ProcessorMixin.get_processor_dict(where, revision=revision)
    found = fields.get("chat_template")
    if isinstance(found, dict):
        found = found.get("default")
    if found:
        yield found
    processor = getattr(transformers, _CLASSES.get(model_type, ""), None)
    own = getattr(processor, "default_chat_template", None)
    # read without an instance, which would need the processors of all media
    if chat and isinstance(own, property) and own.fget is not None:
        yield own.fget(None)
