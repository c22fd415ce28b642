"""Small real multimodal models, with tokenizer and processors.

They are built from the configs of their families.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from lightrft.models.families import family_of
from lightrft.models.loading.save_model import save_model
from lightrft.models.tiny import audio, gemma, own, qwen, smolvlm, tiles
from lightrft.models.tiny.spec import Fields, Tiny
from lightrft.models.tiny.text import PRINTABLE, tiny_tokenizer
from lightrft.utils.errors import ModelError


def tiny_media_tokenizer(family: str, **options: Any) -> PreTrainedTokenizerFast:
    """Build ``tiny_tokenizer`` with the tokens of ``family``.

    Its chat template accepts the family's kinds of media.
    """
    tiny = _tiny(family)
    return tiny_tokenizer(
        special=tiny.special,
        chat_template=_chat_template(tiny.written),
        named=tiny.named,
        **options,
    )


def tiny_media_model(
    family: str,
    tokenizer: PreTrainedTokenizerFast | None = None,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    tower: Fields | None = None,
    **overrides: object,
) -> PreTrainedModel:
    """Build a model of ``family`` with random weights, in evaluation mode.

    The global random generator is not changed.

    Args:
        family: One of ``MEDIA_FAMILIES``.
        tokenizer: Gives vocabulary size and token ids. ``None`` builds ``tiny_media_tokenizer``.
        seed: Seed of the weights.
        dtype: Dtype of the weights.
        tower: Fields of the tower's config.
        **overrides: Fields of the text config.
    """
    tiny = _tiny(family)
    tokenizer = tokenizer or tiny_media_tokenizer(family)
    sizes: Fields = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 3,
        "initializer_range": 0.1,
        **overrides,
    }
    sizes.setdefault("intermediate_size", 2 * sizes["hidden_size"])
    ids = {name: int(tokenizer.convert_tokens_to_ids(name)) for name in tiny.special}  # ty: ignore[invalid-argument-type]
    config = tiny.config(sizes, ids, tower or {})
    # the weights depend on ``seed`` alone, and the caller's random numbers stay as they are
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, family_of(config).loader)(config)
        for parameter in model.parameters():
            # A zero projector would hide the picture.
            if parameter.ndim > 1 and not parameter.any():
                torch.nn.init.normal_(parameter, std=0.1)
            # A closed gate would hide what is behind it.
            if parameter.numel() == 1 and not parameter.any():
                torch.nn.init.constant_(parameter, 0.5)
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, 3
    return model.to(dtype).eval()


def save_tiny_media(
    family: str,
    path: str | Path,
    *,
    chars: str = PRINTABLE,
    whole_roles: bool = False,
    processor: Fields | None = None,
    **options: Any,
) -> PreTrainedModel:
    """Write a folder with a model of ``tiny_media_model``, its tokenizer and its processors.

    Return the model.

    Args:
        family: One of ``MEDIA_FAMILIES``.
        path: The folder.
        chars: Characters of the tokenizer.
        whole_roles: The names of roles are single tokens.
        processor: Settings of the saved processor; the tower's must fit them.
        **options: Arguments of ``tiny_media_model``.
    """
    tokenizer = tiny_media_tokenizer(family, chars=chars, whole_roles=whole_roles)
    model = tiny_media_model(family, tokenizer, **options)
    save_model(model, tokenizer, path)
    _tiny(family).processor(**(processor or {})).save_pretrained(str(path))
    return model


def _tiny(family: str) -> Tiny:
    known = {**_FAMILIES, **own.FAMILIES}
    if family not in known:
        raise ModelError(f"unknown family {family!r}; known: {', '.join(known)}")
    return known[family]


def _chat_template(written: dict[str, str]) -> str:
    """Return the template of ``tiny.CHAT_TEMPLATE``, for content that is text or parts."""
    kinds = "".join(f"{{% elif p['type'] == '{kind}' %}}{text}" for kind, text in written.items())
    content = (
        "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for p in m['content'] %}"
        f"{{% if p['type'] == 'text' %}}{{{{ p['text'] }}}}{kinds}{{% endif %}}{{% endfor %}}{{% "
        f"endif %}}"
    )
    return (
        f"{{% for m in messages %}}<|im_start|>{{{{ m['role'] }}}}\n{content}<|im_end|>\n{{% "
        f"endfor %}}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


_FAMILIES: dict[str, Tiny] = {
    **qwen.FAMILIES,
    **tiles.FAMILIES,
    **gemma.FAMILIES,
    **smolvlm.FAMILIES,
    **audio.FAMILIES,
}
MEDIA_FAMILIES: tuple[str, ...] = tuple(_FAMILIES)
"""Families with towers and a processor of this package."""

ALL_MEDIA_FAMILIES: tuple[str, ...] = (*MEDIA_FAMILIES, *own.FAMILIES)
"""Those, and families that read media by their own processor and methods."""

TORCHVISION_FAMILIES: tuple[str, ...] = tuple(own.PACKAGES)
"""Families whose processors or towers need packages of ``make test-torchvision``."""


def missing_package(family: str) -> str | None:
    """Return an optional package that ``family`` needs and that is not installed, or ``None``."""
    for package in own.PACKAGES.get(family, ()):
        if importlib.util.find_spec(package) is None:
            return package
    return None
