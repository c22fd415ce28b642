"""Reward models in the layouts of other frameworks.

A head is read under these names:

* ``score.weight``: transformers' ``AutoModelForSequenceClassification``, and OpenRLHF
* ``v_head.summary.weight``: TRL's ``AutoModelForCausalLMWithValueHead``
* ``value_head.weight``, or the name that OpenRLHF's ``value_head_prefix`` gives
* ``value_head.safetensors`` next to the weights: LLaMA-Factory, and critics of lightrft
* ``{head}_head``, ``{head}_attnpool`` and ``{head}_logit_scale``: LightRFT, see below

``mean`` and ``std`` of an OpenRLHF config become the normalisation of the scores.

LightRFT's ``ScalarRewardModelVL`` and ``ScalarRewardModelAL`` hold the language model under
``model.`` and these tensors of each head:

* ``{head}_head.0``, ``.1`` and ``.3``: Linear, RMSNorm, and Linear without bias
* ``{head}_attnpool.query``, ``.k`` and ``.v``: attention pooling; without them, the last token
* ``{head}_logit_scale``: the log of the scale in training

The files name neither the order of the heads nor the layer that is pooled. ``preference`` is the
first one, if it is there, and the layer is LightRFT's default, the state before the last layer.
Settings may name others. LightRFT counts the tokens of media as those of text, so
``reward_model.positions`` is ``text``.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    PreTrainedTokenizerBase,
)

from lightrft.config.model import ModelConfig
from lightrft.config.reward_model.sections import RewardHeadConfig, RewardModelConfig
from lightrft.models.loading.adapter_base import saved_adapters
from lightrft.models.loading.from_pretrained import model_settings, where_of
from lightrft.models.loading.sharded_read import StoredTensor
from lightrft.models.lora import is_adapted, merged_state
from lightrft.models.merging.stored_model import stored_tensors
from lightrft.models.reward.saved_form import SavedForm
from lightrft.utils.chat_template import turn_ends
from lightrft.utils.errors import ModelError, first_line

if TYPE_CHECKING:
    from lightrft.models.reward.reward_model import RewardModel
import re
from collections.abc import Iterable, Mapping

from lightrft.models.reward.probed_layer import layer_index

PREFIXES = ("score", "v_head.summary", "v_head", "value_head.summary", "value_head")
EXTRA_FILE = "value_head.safetensors"
PADDING = "<|pad|>"
"""Padding token of a written classifier whose tokenizer has none of its own."""


@dataclass(frozen=True, slots=True)
class OtherHead:
    """A linear head of another framework.

    Attributes:
        weight: ``[k, H]``.
        bias: ``[k]``. ``None`` for no bias.
        fields: Fields of the model's config.
    """

    weight: Tensor
    bias: Tensor | None
    fields: dict[str, Any]

    @property
    def normalization(self) -> tuple[Tensor, Tensor]:
        """The mean and the deviation ``[k]`` with which the scores are those of the framework."""
        count = len(self.weight)
        wide = torch.float64
        mean = torch.full((count,), float(self.fields.get("mean") or 0.0), dtype=wide)
        std = torch.full((count,), float(self.fields.get("std") or 1.0), dtype=wide)
        # a bias that is added is a mean that is not subtracted
        return (mean if self.bias is None else mean - self.bias.to(wide)), std


def read_other_form(config: ModelConfig, settings: RewardModelConfig | None) -> SavedForm | None:
    """Return the head of ``config.path`` in the layout of another framework.

    Return ``None`` for a model without one.

    Args:
        config: Path and settings of the model.
        settings: Heads to fill. ``None`` makes a linear head for each output, or one of kind
            ``classes`` for a classifier.

    Raises:
        ModelError: The head does not fit ``settings``, or its numbers cannot be used.
    """
    head = find_other_head(config)
    if head is None:
        heads = _named_heads(config)
        return form_of_named_heads(heads, config, settings) if heads else None
    settings = _settings_of(head) if settings is None else settings
    _check_fit(head, settings, config.path)
    mean, std = head.normalization
    if not bool(mean.isfinite().all() and std.isfinite().all() and (std > 0).all()):
        raise ModelError(
            f"model.path = {config.path!r}: mean = {head.fields.get('mean')} and std = "
            f"{head.fields.get('std')} in its config.json do not normalise scores; correct them"
        )
    names = [each.name for each in settings.heads]
    tensors: dict[str, Tensor] = {}
    if len(names) == 1:
        tensors[f"heads.{names[0]}.layers.weight"] = head.weight
        if len(head.weight) > 1:  # one score of several outputs
            mean, std = mean[:1], std[:1]
    else:
        for name, row in zip(names, head.weight):
            tensors[f"heads.{name}.layers.weight"] = row[None]
    plain = settings.model_copy(update={"layer": -1})
    return SavedForm(plain, False, {**tensors, "score_mean": mean, "score_std": std})


def holds_other_head(config: ModelConfig) -> bool:
    """Return True if ``config.path`` is a reward model of another framework.

    Raises ``ModelError`` for damaged files.
    """
    return find_other_head(config) is not None or bool(_named_heads(config))


def _named_heads(config: ModelConfig) -> dict[str, dict[str, Tensor]]:
    if saved_adapters(config) is not None or config.revision is not None:
        return {}
    return named_heads(config)


def find_other_head(config: ModelConfig) -> OtherHead | None:
    """Return the head in the files of ``config.path``; ``None`` if there is none.

    Adapters and revisions of the hub are not searched. Raises ``ModelError`` for damaged files.
    """
    if saved_adapters(config) is not None or config.revision is not None:
        return None
    where = where_of(config)
    fields = model_settings(config).to_dict()
    tensors = _extra_tensors(Path(where) / EXTRA_FILE)
    if not tensors:
        own = fields.get("value_head_prefix")
        prefixes = PREFIXES if own is None else (str(own), *PREFIXES)
        wanted = {f"{prefix}.{kind}" for prefix in prefixes for kind in ("weight", "bias")}
        for name, source, _ in stored_tensors(where, config.path):
            if name in wanted:
                whole = source.whole() if isinstance(source, StoredTensor) else source
                tensors[name.rpartition(".")[2]] = whole
    if "weight" not in tensors:
        return None
    weight = tensors["weight"]
    return OtherHead(weight.reshape(-1, weight.shape[-1]), tensors.get("bias"), fields)


def _extra_tensors(file: Path) -> dict[str, Tensor]:
    """Return weight and bias of ``file``; empty if there is no such file."""
    if not file.is_file():
        return {}
    try:
        found = load_file(file)
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"{file}: it cannot be read ({first_line(error)}); copy it again"
        ) from error
    return {name.rpartition(".")[2]: tensor for name, tensor in found.items()}


def _settings_of(head: OtherHead) -> RewardModelConfig:
    count = len(head.weight)
    if count == 1:
        return RewardModelConfig()
    if head.fields.get("problem_type") == "single_label_classification":
        return RewardModelConfig(heads=(RewardHeadConfig(kind="classes", size=count),))
    labels = [str(label) for label in dict(head.fields.get("id2label") or {}).values()]
    if len(set(labels)) != count or labels[0] == "LABEL_0":
        labels = [f"score_{i}" for i in range(count)]
    return RewardModelConfig(heads=tuple(RewardHeadConfig(name=label) for label in labels))


def _check_fit(head: OtherHead, settings: RewardModelConfig, path: str) -> None:
    """Raise ``ModelError`` if ``head`` does not fit the heads of ``settings``."""
    count = len(head.weight)
    kinds = {each.kind for each in settings.heads}
    is_row_each = kinds == {"linear"} and len(settings.heads) == count
    one = settings.heads[0]
    is_one = len(settings.heads) == 1 and one.kind in ("classes", "ensemble") and one.size == count
    scaled = any(each.logit_scale for each in settings.heads)
    plain = settings.pooling == "last" and not settings.gate and not scaled
    if plain and (is_row_each or is_one):
        return
    raise ModelError(
        f"model.path = {path!r} holds a linear head with {count} outputs, which reads the last "
        f"token; give reward_model.heads {count} of kind linear, pooling=last and no gate, or "
        "start from a model without a head"
    )


def save_as_classifier(
    reward: RewardModel, tokenizer: PreTrainedTokenizerBase, path: str | Path
) -> None:
    """Write a folder that transformers' ``AutoModelForSequenceClassification`` loads.

    Its logits are the scores before normalisation, one for each head. The config holds ``mean``
    and ``std`` of one head, as OpenRLHF reads them.

    Args:
        reward: The reward model.
        tokenizer: Its tokenizer. transformers scores the last token that is no padding, so a
            padding token that may end a text is replaced by a token of its own.
        path: The folder.

    Raises:
        ModelError: Heads are not linear, another token than the last is pooled, or transformers
            has no such class for the model.
    """
    config = reward.base.config
    settings = reward.settings
    kinds = {head.kind for head in settings.heads}
    is_plain = kinds == {"linear"} and settings.pooling == "last" and not settings.gate
    cls: Any = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)
    if not is_plain or reward.is_cut or cls is None:
        raise ModelError(
            f"a model of type {config.model_type!r} with heads of kind {', '.join(sorted(kinds))}, "
            f"pooling = {settings.pooling!r} and layer = {settings.layer} is no classifier of "
            "transformers; save it as a reward model"
        )
    fields: Any = type(config).from_dict(config.to_dict())
    fields.num_labels = len(settings.heads)
    fields.id2label = {i: head.name for i, head in enumerate(settings.heads)}
    fields.label2id = {head.name: i for i, head in enumerate(settings.heads)}
    tokenizer = with_own_padding(tokenizer)
    fields.pad_token_id = tokenizer.pad_token_id
    fields.vocab_size = max(config.vocab_size, fields.pad_token_id + 1)
    if len(settings.heads) == 1:
        fields.mean, fields.std = float(reward.score_mean[0]), float(reward.score_std[0])
    with torch.device("meta"):
        model: Any = cls(fields)
    state = dict(merged_weights(reward))
    own = reward.own_tensors()
    rows = [own[f"heads.{head.name}.layers.weight"] for head in settings.heads]
    state["score.weight"] = torch.cat(rows).to(reward.base.dtype)
    wanted = model.state_dict()
    for name, weight in model.named_parameters():
        if weight is model.get_input_embeddings().weight and name in state:
            # The row of a new padding token: attention never reads it.
            more = len(weight) - len(state[name])
            state[name] = torch.nn.functional.pad(state[name], (0, 0, 0, more))
    lacking = sorted(wanted.keys() - state.keys())
    if lacking:
        raise ModelError(f"{cls.__name__} has weights that {config.model_type} lacks: {lacking[0]}")
    model.load_state_dict({name: state[name] for name in wanted}, assign=True)
    model.save_pretrained(str(path))
    tokenizer.save_pretrained(str(path))


def with_own_padding(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Return ``tokenizer`` with a padding token that ends no text.

    Without one, or with an end token as padding, it is a copy with a new special token.
    """
    ends = {None, tokenizer.eos_token_id, *turn_ends(tokenizer).ids}
    if tokenizer.pad_token_id not in ends:
        return tokenizer
    own = copy.deepcopy(tokenizer)
    own.add_special_tokens({"pad_token": PADDING})
    return own


def merged_weights(reward: RewardModel) -> dict[str, Tensor]:
    """Return the weights of the language model with adapters added in, by name."""
    return merged_state(reward.model) if is_adapted(reward.model) else reward.base.state_dict()


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
