"""LightRFT's helpers of scalar reward models, and the model factory of OpenRLHF-M."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightrft.models.actor import Backbone
from lightrft.models.actor_vl import CriticVL
from lightrft.models.public.actor import PublicModel
from lightrft.models.utils import pad_to_length
from lightrft.utils.errors import ModelError

QUERY_STD = 0.02
"""Standard deviation of the initial query."""


class AttentionPooling(nn.Module):
    """Attention of one learned query to all states of a row ``[B, S, C]``.

    The names of its tensors are LightRFT's: ``query``, ``k`` and ``v``. ``RewardModel`` pools
    ragged rows in the same way.

    Args:
        hidden_size: Width C of the states.
        num_heads: Number of heads, which divides the width.
        qkv_bias: Give the layers of keys and values a bias.
        position_bias: Add a bias that grows linearly over the row to the attention logits.
        position_bias_scale: The bias that the end of the row tends to.

    Raises:
        ModelError: The heads do not divide the width, or a scale is given without a bias.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int = 4,
        qkv_bias: bool = False,
        position_bias: bool = False,
        position_bias_scale: float = 3.0,
    ) -> None:
        super().__init__()
        if num_heads < 1 or hidden_size % num_heads:
            raise ModelError(
                f"num_heads = {num_heads} does not divide hidden_size = {hidden_size}; take a "
                "divisor"
            )
        self.num_heads = num_heads
        self.head_dim = hidden_size // num_heads
        self.scale = self.head_dim**-0.5
        self.position_bias = position_bias
        self.position_bias_scale = position_bias_scale
        self.k = nn.Linear(hidden_size, hidden_size, bias=qkv_bias)
        self.v = nn.Linear(hidden_size, hidden_size, bias=qkv_bias)
        self.query = nn.Parameter(torch.randn(hidden_size) * QUERY_STD)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return the pooled states ``[B, C]`` of ``hidden_states [B, S, C]``.

        Every state counts, those of padding too.
        """
        rows, length, _ = hidden_states.shape
        split = (self.num_heads, self.head_dim)
        keys = self.k(hidden_states).unflatten(-1, split).transpose(1, 2)
        values = self.v(hidden_states).unflatten(-1, split).transpose(1, 2)
        query = self.query.view(1, self.num_heads, 1, self.head_dim).expand(rows, -1, -1, -1)
        bias = None
        if self.position_bias:
            places = torch.arange(length, device=keys.device, dtype=torch.float32)
            bias = (places / length * self.position_bias_scale).to(keys.dtype).view(1, 1, 1, -1)
        pooled = nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=bias)
        return pooled.flatten(1)


def concatenated_forward(
    model: Callable[..., Mapping[str, Tensor]],
    input0_ids: Tensor,
    input0_mask: Tensor,
    input1_ids: Tensor,
    input1_mask: Tensor,
    input0_img_pixels: Tensor | None,
    input0_img_grid_thws: Tensor | None,
    input1_img_pixels: Tensor | None,
    input1_img_grid_thws: Tensor | None,
    input0_video_pixels: Tensor | None,
    input0_video_grid_thws: Tensor | None,
    input1_video_pixels: Tensor | None,
    input1_video_grid_thws: Tensor | None,
    pad_token_id: int,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the scores of two candidates per row, by head, in one call of ``model``.

    Rows are padded on the left. Media of one candidate alone are passed on, where LightRFT fails or
    leaves them out.

    Args:
        model: A scalar reward model.
        input0_ids: ``[B, L0]`` token ids of the first candidates.
        input0_mask: ``[B, L0]``, 0 for padding.
        input1_ids: ``[B, L1]`` token ids of the second candidates.
        input1_mask: ``[B, L1]``, 0 for padding.
        input0_img_pixels: Patches of the first candidates' images. ``None`` for none.
        input0_img_grid_thws: ``[images, 3]``.
        input1_img_pixels: Patches of the second candidates' images. ``None`` for none.
        input1_img_grid_thws: ``[images, 3]``.
        input0_video_pixels: Patches of the first candidates' videos. ``None`` for none.
        input0_video_grid_thws: ``[videos, 3]``.
        input1_video_pixels: Patches of the second candidates' videos. ``None`` for none.
        input1_video_grid_thws: ``[videos, 3]``.
        pad_token_id: Token of the padding.
    """
    length = max(input0_ids.shape[1], input1_ids.shape[1])
    ids = [pad_to_length(x, length, pad_token_id) for x in (input0_ids, input1_ids)]
    masks = [pad_to_length(x, length, 0) for x in (input0_mask, input1_mask)]
    scores = model(
        torch.cat(ids),
        attention_mask=torch.cat(masks),
        pixel_values=_joined(input0_img_pixels, input1_img_pixels),
        image_grid_thw=_joined(input0_img_grid_thws, input1_img_grid_thws),
        pixel_values_videos=_joined(input0_video_pixels, input1_video_pixels),
        video_grid_thw=_joined(input0_video_grid_thws, input1_video_grid_thws),
    )
    rows = len(input0_ids)
    first = {head: score[:rows] for head, score in scores.items()}
    return first, {head: score[rows:] for head, score in scores.items()}


def _joined(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    given = [x for x in (first, second) if x is not None]
    return torch.cat(given) if given else None


class LastValueRewardModel(PublicModel):
    """A reward model with a linear head: the value of the last token of each row.

    Args:
        critic: The value function.
    """

    def __init__(self, critic: CriticVL) -> None:
        super().__init__()
        self.critic = critic

    @property
    def backbone(self) -> Backbone:
        return self.critic.backbone

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **media: Any
    ) -> Tensor:
        """Return the scores ``[B]``.

        Args:
            input_ids: ``[B, L]`` token ids.
            attention_mask: ``[B, L]``, 0 for padding. ``None`` means no padding.
            **media: Media, as in ``CriticVL.forward``.
        """
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        values = self.critic(input_ids, attention_mask=mask, return_output=True, **media)
        last = mask.shape[1] - 1 - mask.long().flip(1).argmax(1)
        return values[torch.arange(len(values), device=values.device), last]


def get_vlm_for_sequence_regression(
    model_name_or_path: str | nn.Module,
    model_type: str,
    *,
    bf16: bool = True,
    lora_rank: int = 0,
    lora_alpha: float = 16,
    target_modules: str | list[str] | None = None,
    lora_dropout: float = 0.0,
    normalize_reward: bool = False,
    use_flash_attention_2: bool = False,
    ds_config: dict[str, Any] | None = None,
    init_value_head: bool = False,
    value_head_prefix: str = "score",
    device_map: str | dict[str, object] | None = None,
    packing_samples: bool = False,
) -> CriticVL | LastValueRewardModel:
    """Return a critic, or a reward model with a linear head, over a vision-language model.

    Args:
        model_name_or_path: A folder, a hub name or a model.
        model_type: ``critic``, whose call is that of ``CriticVL``. Or ``reward``, whose call
            returns the value ``[B]`` of the last token of each row.
        bf16: As in ``CriticVL``.
        lora_rank: As in ``CriticVL``.
        lora_alpha: As in ``CriticVL``.
        target_modules: As in ``CriticVL``.
        lora_dropout: As in ``CriticVL``.
        normalize_reward: As in ``CriticVL``.
        use_flash_attention_2: As in ``CriticVL``.
        ds_config: As in ``CriticVL``.
        init_value_head: As in ``CriticVL``.
        value_head_prefix: As in ``CriticVL``.
        device_map: As in ``CriticVL``.
        packing_samples: As in ``CriticVL``. Not for ``reward``.

    Raises:
        ModelError: ``model_type`` is another word, or packed rows are to have a reward.
    """
    if model_type not in ("critic", "reward"):
        raise ModelError(f"model_type = {model_type!r}: must be critic or reward")
    if model_type == "reward" and packing_samples:
        raise ModelError(
            "packing_samples = True with model_type = 'reward': a row has one reward; leave it out"
        )
    critic = CriticVL(
        model_name_or_path,
        use_flash_attention_2=use_flash_attention_2,
        bf16=bf16,
        lora_rank=lora_rank,
        lora_alpha=lora_alpha,
        lora_dropout=lora_dropout,
        target_modules=target_modules,
        ds_config=ds_config,
        device_map=device_map,
        packing_samples=packing_samples,
        normalize_reward=normalize_reward,
        init_value_head=init_value_head,
        value_head_prefix=value_head_prefix,
    )
    return critic if model_type == "critic" else LastValueRewardModel(critic)
