"""The value function: a language model's hidden states through one linear layer."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, overload

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from lightrft.config.model import ModelConfig
from lightrft.models.actor import Backbone, Read
from lightrft.models.loading.from_pretrained import save_model
from lightrft.models.loading.sharded_read import made
from lightrft.types import Batch

VALUE_HEAD = "value_head.safetensors"


class _Head(nn.Linear):
    """Values have more than eight bits whatever the weights are kept in."""

    def forward(self, input: Tensor) -> Tensor:
        kind = torch.promote_types(self.weight.dtype, torch.float32)
        return nn.functional.linear(input.to(kind), self.weight.to(kind))


class Critic(Backbone):
    """V(state), in the unit of what it is trained on. The head has no bias; its weights start normal, with standard deviation 1 / (H + 1),
    drawn from ``seed``."""

    def __init__(self, model: nn.Module, config: ModelConfig | None = None, *, seed: int = 0) -> None:
        super().__init__(model, config)
        width = self.base.config.get_text_config().hidden_size
        self.value_head = _Head(width, 1, bias=False, device=self.device, dtype=torch.float32)
        self._draw_head(seed)
        if self.base.dtype == torch.float64:
            self.value_head.double()
        head = self.base.get_output_embeddings()
        if head is not None and head.weight is not self.base.get_input_embeddings().weight:
            head.requires_grad_(False)  # logits are not used: no optimizer state for them

    @torch.no_grad()
    def _draw_head(self, seed: int) -> None:
        weight = self.value_head.weight
        drawn = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))
        weight.copy_(drawn / (weight.shape[1] + 1))

    @classmethod
    def load(
        cls, config: ModelConfig, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None, seed: int = 0
    ) -> Critic:
        """The model of ``config.path``, with its value head where the folder holds one. Raises as ``load_model``."""
        model, unread = made(config, device, dtype)
        critic = cls(model, config, seed=seed)
        critic.unread = unread
        if unread is not None:  # the head is drawn, not read
            critic.value_head.to_empty(device="cpu")
            critic._draw_head(seed)
        critic.load_value_head(config.path)
        if config.gradient_checkpointing:
            critic.gradient_checkpointing_enable()
        return critic

    def load_value_head(self, path: str | Path) -> None:
        """Take over the value head of folder ``path``, if it holds one."""
        saved = Path(path).expanduser() / VALUE_HEAD
        if saved.is_file():
            self.value_head.load_state_dict(load_file(saved))

    def save(self, tokenizer: PreTrainedTokenizerBase | None, path: str | Path) -> None:
        """Write a folder that ``load`` reads back, value head included."""
        save_model(self, tokenizer, path)
        save_file({"weight": self.value_head.weight.detach().contiguous()}, Path(path) / VALUE_HEAD)

    @overload
    def values(self, batch: Batch, final: Literal[True]) -> tuple[Tensor, Tensor]: ...

    @overload
    def values(self, batch: Batch, final: Literal[False] = False) -> tuple[Tensor, None]: ...

    def values(self, batch: Batch, final: bool = False) -> tuple[Tensor, Tensor | None]:
        """V of the state before each response token ``[N]``, and with ``final`` of the state after each last token ``[B]``."""
        return self(batch, final=final)

    def forward(self, batch: Batch, *, final: bool = False) -> tuple[Tensor, Tensor | None]:
        """``values``; here so that wrappers which act on a module's call see it."""
        states, after = self.read(batch, final)
        return self._whole(states), None if after is None else self._whole(after)

    def _whole(self, read: Read) -> Tensor:
        return read.part.whole(self.value(read.states)).clone()  # a view would not do for whoever acts on results

    def value(self, states: Tensor) -> Tensor:
        """V ``[...]`` of hidden ``states [..., H]``."""
        return self.value_head(states).squeeze(-1)
