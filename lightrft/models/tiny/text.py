"""Small real transformers models and a tokenizer, built from configs.

They serve tests, and a first run without downloads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from lightrft.models.tiny.spec import Fields
from lightrft.utils.errors import ModelError

PAD, UNK, START, END = "<pad>", "<unk>", "<|im_start|>", "<|im_end|>"
ROLES = ("system", "user", "assistant")
PRINTABLE = "\n" + "".join(chr(c) for c in range(32, 127))
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_tokenizer(
    extra_chars: str = "",
    *,
    chars: str = PRINTABLE,
    whole_roles: bool = False,
    special: Sequence[str] = (),
    chat_template: str = CHAT_TEMPLATE,
    named: Mapping[str, str] | None = None,
) -> PreTrainedTokenizerFast:
    """Build a tokenizer with one token per character.

    Characters outside of ``chars`` and ``extra_chars`` are ``<unk>``. Token 0 pads, ``<|im_end|>``
    ends a response, and the chat template takes system, user and assistant messages.

    Args:
        extra_chars: More characters.
        chars: Characters.
        whole_roles: The name of a role after ``<|im_start|>`` is one token. It occurs in every
            prompt, so prompts get shorter.
        special: More special tokens, last in the vocabulary.
        chat_template: The chat template.
        named: Special tokens by the attribute of the tokenizer that names each.
    """
    roles = ROLES if whole_roles else ()
    # a dict keeps the order and drops what is listed twice
    tokens = dict.fromkeys([PAD, UNK, START, END, *chars, *extra_chars, *roles, *special])
    vocabulary = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    role = rf"^(?:{'|'.join(ROLES)})(?=\n)|" if whole_roles else ""
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(role + r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    # Named tokens replace the list of special tokens, so that the others need names as well.
    others = {f"special_{i}": token for i, token in enumerate([START, *special])}
    extra = {**others, **named} if named else [START, *special]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        unk_token=UNK,
        eos_token=END,
        extra_special_tokens=extra,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def sliding_then_full(layers: int) -> list[str]:
    """Return alternating kinds of attention, from a sliding window on."""
    return ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)]


def _gemma2(sizes: Fields) -> Fields:
    return {**_gemma3(sizes), "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}


def _gemma3(sizes: Fields) -> Fields:
    return {
        "head_dim": sizes["head_dim"],
        "query_pre_attn_scalar": sizes["head_dim"],
        "sliding_window": 16,
        "layer_types": sliding_then_full(sizes["num_hidden_layers"]),
    }


def _moe(sizes: Fields) -> Fields:
    return {
        "head_dim": sizes["head_dim"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": max(32, sizes["intermediate_size"] // 4),
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
    }


_FAMILIES: dict[str, tuple[str, Callable[[Fields], Fields]]] = {
    "qwen2": ("qwen2", lambda sizes: {}),
    "qwen3": ("qwen3", lambda sizes: {"head_dim": sizes["head_dim"]}),
    "qwen3_moe": ("qwen3_moe", _moe),
    "llama": ("llama", lambda sizes: {"head_dim": sizes["head_dim"]}),
    "mistral": ("mistral", lambda sizes: {"head_dim": sizes["head_dim"], "sliding_window": 16}),
    "gemma2": ("gemma2", _gemma2),
    "gemma3": ("gemma3_text", _gemma3),
    "phi3": (
        "phi3",
        lambda sizes: {"original_max_position_embeddings": sizes["max_position_embeddings"]},
    ),
    "olmo2": ("olmo2", lambda sizes: {}),
}

FAMILIES: tuple[str, ...] = tuple(_FAMILIES)


def tiny_config(family: str, *, vocab_size: int, **overrides: object) -> PreTrainedConfig:
    """Build a config of ``family``. ``overrides`` are fields of the family's config class.

    Token ids fit ``tiny_tokenizer``. Raises ``ModelError`` for a family that is not in
    ``FAMILIES``.
    """
    if family not in _FAMILIES:
        raise ModelError(f"unknown family {family!r}; known: {', '.join(FAMILIES)}")
    model_type, special = _FAMILIES[family]
    sizes: Fields = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 2048,
        **overrides,
    }
    sizes.setdefault("intermediate_size", 2 * sizes["hidden_size"])
    sizes.setdefault("num_key_value_heads", max(1, sizes["num_attention_heads"] // 2))
    head_dim = max(1, sizes["hidden_size"] // sizes["num_attention_heads"])
    derived = {"head_dim": head_dim, **sizes}
    # Initial weights are wider than transformers' 0.02: at this size the model would otherwise
    # start almost uniform.
    tokens = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 3, "initializer_range": 0.1}
    fields: Fields = {"vocab_size": vocab_size, **tokens, **special(derived), **sizes}
    return CONFIG_MAPPING[model_type](**fields)


def tiny_model(
    family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any
) -> PreTrainedModel:
    """Build a model of ``family`` with random weights, in evaluation mode.

    The global random generator is not changed.

    Args:
        family: One of ``FAMILIES``.
        seed: Seed of the weights.
        dtype: Dtype of the weights.
        **overrides: Fields of the config. ``vocab_size`` fits ``tiny_tokenizer`` unless given.
    """
    overrides.setdefault("vocab_size", len(PRINTABLE) + 4)
    return drawn_model(tiny_config(family, **overrides), seed=seed).to(dtype).eval()


def drawn_model(config: PreTrainedConfig, *, seed: int) -> PreTrainedModel:
    """Build a language model of ``config`` in float32 with weights from ``seed``.

    The global random generator is not changed.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # float32, which callers cast: the numbers of a seed are the same in every dtype
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if model.generation_config is not None:
        said = config.to_dict()
        model.generation_config.pad_token_id = said.get("pad_token_id")
        model.generation_config.eos_token_id = said.get("eos_token_id")
    return model
