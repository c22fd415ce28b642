"""The public scalar reward model of text, and the base of those that read media."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from lightrft.config.reward_model.sections import RewardHeadConfig, RewardModelConfig
from lightrft.models.actor import Backbone
from lightrft.models.actor_modality import ActorModality
from lightrft.models.attention.padded import Given, rows_with_media
from lightrft.models.public.actor import ModelLoader, PublicModel, adapt, is_known
from lightrft.models.reward.other_layouts import read_other_form
from lightrft.models.reward.reward_model import RewardModel
from lightrft.models.reward.saved_form import read_form
from lightrft.types import Batch, Segments
from lightrft.utils.errors import ModelError

Pooling = Literal["attn", "last"]
_POOLINGS: dict[str, Literal["attention", "last"]] = {"attn": "attention", "last": "last"}


def check_adapters(lora_rank: int, lora_alpha: float) -> None:
    """Raise ``ModelError`` for adapters that change nothing."""
    if lora_rank > 0 and lora_alpha == 0:
        raise ModelError(
            f"lora_alpha = 0 with lora_rank = {lora_rank}: the scale of the adapters is 0, so they "
            f"change nothing; set lora_alpha, e.g. {2 * lora_rank}"
        )


class PublicRewardModel(PublicModel):
    """A scalar reward model with the public interface, around ``RewardModel``.

    ``{head}_head`` are the layers of a head, ``{head}_attnpool`` is its pooling, and
    ``{head}_logit_scale`` is its log scale. As in LightRFT, tokens of media have the positions of
    text, unless a folder of ``reward.save`` says otherwise.

    Args:
        pretrain_or_model: A folder, a hub name, or a transformers or peft model. Heads of a folder
            that ``reward.save`` wrote are read.
        use_flash_attention_2: Use flash-attn, see ``PublicActor``.
        bf16: Load the weights in bfloat16. Otherwise keep the dtype of the files. Heads are in
            float32.
        lora_rank: Rank of new adapters. 0 adds none.
        lora_alpha: Numerator of the adapters' scale.
        lora_dropout: Dropout probability of the adapters' input.
        target_modules: Layers that get adapters. ``None`` selects every linear layer but the output
            head.
        ds_config: DeepSpeed's settings. With ZeRO stage 3, the model is loaded in shards.
        device_map: Placement of the weights, passed to transformers.
        packing_samples: ``sequences`` is one row of several samples, and ``attention_mask`` holds
            1..n for them.
        pooling_method: ``attn``: a learned attention over all tokens. ``last``: the last token.
        scale_for_train: In training mode, multiply scores by a learned scale.
        probing_layer: Layer whose hidden states are pooled, as in ``RewardModelConfig``. Later
            layers are removed.
        head_types: Names of the heads.

    Raises:
        ModelError: The model cannot be loaded or adapted, or has no such layer.
    """

    modality: ClassVar[ActorModality]

    def __init__(
        self,
        pretrain_or_model: str | nn.Module,
        use_flash_attention_2: bool = True,
        bf16: bool = True,
        lora_rank: int = 0,
        lora_alpha: float = 0,
        lora_dropout: float = 0,
        target_modules: str | list[str] | None = None,
        ds_config: dict[str, Any] | None = None,
        device_map: str | dict[str, object] | None = None,
        packing_samples: bool = False,
        pooling_method: Pooling = "attn",
        scale_for_train: bool = True,
        probing_layer: int = -1,
        head_types: Sequence[str] = ("preference",),
    ) -> None:
        super().__init__()
        if pooling_method not in _POOLINGS:
            known = ", ".join(_POOLINGS)
            raise ModelError(f"pooling_method = {pooling_method!r}: must be one of {known}")
        check_adapters(lora_rank, lora_alpha)
        # files of reward models often lack the output head, which is not used
        loader = ModelLoader(
            use_flash_attention_2, bf16, ds_config, device_map, False, output_head=False
        )
        model, config = loader.model(pretrain_or_model)
        if not is_known(model):
            given = f"pretrain_or_model is a {type(model).__name__}"
            raise ModelError(f"{given}: a reward model needs a path, a transformers or peft model")
        if lora_rank > 0:
            model = adapt(model, lora_rank, lora_alpha, lora_dropout, target_modules)
        self._loader = loader  # DeepSpeed's settings apply only while their object exists
        heads = []
        for name in head_types:
            heads.append(RewardHeadConfig(name=name, kind="mlp", logit_scale=scale_for_train))
        settings = RewardModelConfig(
            heads=tuple(heads), pooling=_POOLINGS[pooling_method], layer=probing_layer
        )
        form = read_form(config.path) or read_other_form(config, settings) if config.path else None
        if form is None:
            settings = settings.model_copy(update={"positions": "text"})
        self.reward = RewardModel.around(model, config, settings, form)
        self.packing_samples = packing_samples

    @property
    def backbone(self) -> Backbone:
        return self.reward

    def __getattr__(self, name: str) -> Any:
        # from __dict__, since an attribute that is missing yet would lead back here
        reward = self.__dict__.get("_modules", {}).get("reward")
        if isinstance(reward, RewardModel):
            for head in reward.head_names:
                scale: Any = reward.heads[head].logit_scale
                if name == f"{head}_head":
                    return reward.heads[head].layers
                if name == f"{head}_attnpool" and head in reward.pools:
                    return reward.pools[head]
                if name == f"{head}_logit_scale" and scale is not None:
                    return scale.weight
        return super().__getattr__(name)

    def score_rows(
        self, sequences: Tensor, attention_mask: Tensor | None, media: Given
    ) -> dict[str, Tensor]:
        """Return the scores ``[B]`` of each head.

        Every ``forward`` of a scalar reward model calls it. Padding may be on either side.

        Args:
            sequences: ``[B, L]`` token ids, or ``[1, sum L]`` of packed samples.
            attention_mask: ``[B, L]``, 0 for padding. A packed row holds 1..n for its samples.
                ``None`` means no padding.
            media: Media by input name.

        Raises:
            ValueError: A packed row has no mask.
            ModelError: The model cannot read the media, or they do not fit the placeholders.
        """
        if attention_mask is None:
            if self.packing_samples:
                raise ValueError("packing_samples is on, so attention_mask must be given")
            attention_mask = torch.ones_like(sequences)
        present = {name: values for name, values in media.items() if values is not None}
        real = attention_mask != 0
        rows = rows_with_media(
            self.reward,
            sequences[real],
            sample_lengths(attention_mask, self.packing_samples),
            present,
        )
        # each sample is a prompt with a response of no tokens, whose last state is the prompt's
        nothing = Segments.of([[]] * len(rows)).to(sequences.device)
        batch = Batch(rows, nothing, torch.arange(len(rows), device=sequences.device))
        return {name: found.scores for name, found in self.reward(batch).items()}


def sample_lengths(mask: Tensor, packed: bool) -> Tensor:
    """Return the number of tokens ``[B]`` of each sample.

    Args:
        mask: ``[B, L]``, 0 for padding. A packed row ``[1, L]`` holds 1..n for its samples.
        packed: The row holds several samples.
    """
    return torch.bincount(mask[0].long())[1:] if packed else (mask != 0).sum(1)


class ScalarRewardModel(PublicRewardModel):
    """A scalar reward model that reads text."""

    modality: ClassVar[ActorModality] = ActorModality.LANGUAGE_ONLY

    def forward(self, sequences: Tensor, attention_mask: Tensor | None = None) -> dict[str, Tensor]:
        """Return the scores ``[B]`` of each head, see ``PublicRewardModel.score_rows``.

        Args:
            sequences: ``[B, L]`` token ids, or ``[1, sum L]`` of packed samples.
            attention_mask: ``[B, L]``, 0 for padding. ``None`` means no padding.
        """
        return self.score_rows(sequences, attention_mask, {})
