"""Reward models in the layout of LightRFT's ``ScalarRewardModelVL`` and ``ScalarRewardModelAL``.

The state dict holds the language model under ``model.`` and these tensors of each head:

* ``{head}_head.0``, ``.1`` and ``.3``: Linear, RMSNorm, and Linear without bias
* ``{head}_attnpool.query``, ``.k`` and ``.v``: attention pooling; without them, the last token
* ``{head}_logit_scale``: the log of the scale in training

The files name neither the order of the heads nor the layer that is pooled. ``preference`` is the
first one, if it is there, and the layer is LightRFT's default, the state before the last layer.
Settings may name others. LightRFT counts the tokens of media as those of text, so
``reward_model.positions`` is ``text``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from lightrft.config.model import ModelConfig
from lightrft.config.reward_model.sections import RewardHeadConfig, RewardModelConfig
from lightrft.models.loading.from_pretrained import model_settings, where_of
from lightrft.models.loading.sharded_read import StoredTensor
from lightrft.models.merging.stored_model import stored_tensors
from lightrft.models.reward.probed_layer import layer_index
from lightrft.models.reward.saved_form import SavedForm
from lightrft.utils.errors import ModelError

NAME = re.compile(r"(\w+)_(?:(head)\.([013]\.\w+)|(attnpool)\.(query|[kv]\.weight)|(logit_scale))")
"""Names of the tensors of a head."""


def named_heads(config: ModelConfig) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of each head in the files of ``config.path``, by head and own name.

    The result is empty for a model in another layout.
    """
    found: dict[str, dict[str, Tensor]] = {}
    for name, source, _ in stored_tensors(where_of(config), config.path):
        match = NAME.fullmatch(name)
        if match:
            whole = source.whole() if isinstance(source, StoredTensor) else source
            found.setdefault(match[1], {})[_own_name(match)] = whole
    return {name: own for name, own in found.items() if "layers.3.weight" in own}


def form_of_named_heads(
    heads: Mapping[str, Mapping[str, Tensor]],
    config: ModelConfig,
    settings: RewardModelConfig | None,
) -> SavedForm:
    """Return the reward model that ``heads`` are of.

    Args:
        heads: The result of ``named_heads``, not empty.
        config: Path and settings of the model.
        settings: Settings of the run, which name layer and order. ``None`` takes the defaults.

    Raises:
        ModelError: The heads have different pooling, or only some have a scale.
    """
    pooled = {"pool.query.weight" in own for own in heads.values()}
    if len(pooled) > 1:
        raise ModelError(
            f"model.path = {config.path!r}: some heads have {{head}}_attnpool and others do not; "
            "copy the model again"
        )
    kinds = []
    for name in _ordered(heads, settings):
        is_scaled = "logit_scale.weight" in heads[name]
        kinds.append(RewardHeadConfig(name=name, kind="mlp", logit_scale=is_scaled))
    text = model_settings(config).get_text_config()
    count = int(text.num_hidden_layers)
    layer = count - 1
    if settings is not None:
        layer = layer_index(settings.layer, count)
    form = RewardModelConfig(
        heads=tuple(kinds),
        pooling="attention" if pooled.pop() else "last",
        layer=-1 if layer == count else layer,
        # ``ScalarRewardModelVL.forward`` passes the index of each token
        positions="text",
    )
    tensors: dict[str, Tensor] = {
        "score_mean": torch.zeros(len(kinds), dtype=torch.float64),
        "score_std": torch.ones(len(kinds), dtype=torch.float64),
    }
    for name, own in heads.items():
        for key, tensor in own.items():
            part, _, rest = key.partition(".")
            tensors[f"pools.{name}.{rest}" if part == "pool" else f"heads.{name}.{key}"] = tensor
    return SavedForm(form, False, tensors)


def _ordered(heads: Iterable[str], settings: RewardModelConfig | None) -> list[str]:
    """Return the names of heads in the order of ``settings``, or ``preference`` first."""
    wanted = [] if settings is None else [head.name for head in settings.heads]
    if sorted(wanted) == sorted(heads):
        return wanted
    return sorted(heads, key=lambda name: (name != "preference", name))


def _own_name(match: re.Match[str]) -> str:
    """Return the name of a tensor of a head in ``RewardModel``, without the name of the head."""
    if match[2]:
        return f"layers.{match[3]}"
    if match[4]:
        return "pool.query.weight" if match[5] == "query" else f"pool.{match[5]}"
    return "logit_scale.weight"
