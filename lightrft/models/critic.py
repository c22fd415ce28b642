"""The value function: one linear layer on a language model's hidden states."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, overload

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from lightrft.config.model import ModelConfig
from lightrft.models.actor import Backbone, HiddenStates
from lightrft.models.loading.save_model import save_model
from lightrft.models.loading.sharded_read import build_model
from lightrft.models.reward.heads import WideLinear, draw_value_weights, state_width
from lightrft.models.reward.other_layouts import read_other_form
from lightrft.models.reward.saved_form import PROCESS_FILE, read_form
from lightrft.types import Batch
from lightrft.utils.errors import ModelError

VALUE_HEAD = "value_head.safetensors"


class Critic(Backbone):
    """A value function V(state), in the unit of its training targets.

    The head has no bias. Its initial weights are normal with standard deviation 1 / (H + 1),
    sampled from ``seed``.

    Args:
        model: The transformers or peft model.
        config: Layout, attention and memory settings. ``None`` uses the settings of an empty
            ``ModelConfig``.
        seed: Seed of the head's initial weights.
    """

    def __init__(
        self,
        model: nn.Module,
        config: ModelConfig | None = None,
        *,
        seed: int = 0,
    ) -> None:
        super().__init__(model, config)
        self.value_head = WideLinear(
            state_width(self.base), 1, bias=False, device=self.device, dtype=torch.float32
        )
        draw_value_weights(self.value_head.weight, seed)
        # last, so that the head starts from the same numbers as in float32
        if self.base.dtype == torch.float64:
            self.value_head.double()
        self.freeze_output_head()

    @classmethod
    def load(
        cls,
        config: ModelConfig,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        seed: int = 0,
    ) -> Critic:
        """Load the model of ``config.path``, with its value head if the folder holds one.

        Raises as ``load_model``.

        Args:
            config: Path and settings of the model.
            device: Device of the weights. On the meta device they have no memory until
                ``read_weights``.
            dtype: Dtype of the weights. ``None`` uses ``config.dtype``.
            seed: Seed of the head's initial weights.
        """
        # files of reward models often lack the output head, which is not used
        model, unread = build_model(config, device, dtype, output_head=False)
        critic = cls(model, config, seed=seed)
        critic.unread = unread
        if unread is not None:  # the head is initialised here, not read with the other weights
            critic.value_head.to_empty(device="cpu")
            draw_value_weights(critic.value_head.weight, seed)
        critic.load_value_head(config.path)
        critic.fit_layout()
        if config.gradient_checkpointing:
            critic.gradient_checkpointing_enable()
        return critic

    def load_value_head(self, path: str | Path) -> None:
        """Load the value head of folder ``path``, if it holds one.

        The reward head of a saved reward model also becomes the value head. The first value is then
        the score plus ``score_mean / score_std``, since a value head has no bias. Raises
        ``ModelError`` if that head is no linear function of the last state.
        """
        saved = Path(path).expanduser() / VALUE_HEAD
        if saved.is_file():
            self.value_head.load_state_dict(load_file(saved))
            return
        trusted = self.config.trust_remote_code
        allowed = self.config.unproved_family
        weight = reward_weight(
            ModelConfig(path=str(path), trust_remote_code=trusted, unproved_family=allowed)
        )
        if weight is not None:
            self.value_head.load_state_dict({"weight": weight})

    def save(self, tokenizer: PreTrainedTokenizerBase | None, path: str | Path) -> None:
        """Write a folder that ``load`` reads back, value head included."""
        save_model(self, tokenizer, path)
        save_file({"weight": self.value_head.weight.detach().contiguous()}, Path(path) / VALUE_HEAD)

    @overload
    def values(self, batch: Batch, final: Literal[True]) -> tuple[Tensor, Tensor]: ...

    @overload
    def values(self, batch: Batch, final: Literal[False] = False) -> tuple[Tensor, None]: ...

    def values(self, batch: Batch, final: bool = False) -> tuple[Tensor, Tensor | None]:
        """Return V of the state before each response token, ``[N]``.

        With ``final``, also return V of the state after each last token, ``[B]``.
        """
        # through the module's call, whose hooks gather shards and cast inputs
        return self(batch, final=final)

    def forward(self, batch: Batch, *, final: bool = False) -> tuple[Tensor, Tensor | None]:
        """Return ``values``.

        It is ``forward``, so that wrappers that act on a module's call see it.
        """
        states, after = self.read(batch, final)
        return self._whole(states), None if after is None else self._whole(after)

    def _whole(self, read: HiddenStates) -> Tensor:
        # clone: hooks that wrap the output (FSDP) must not get a view
        return read.part.whole(self.value(read.states)).clone()

    def value(self, states: Tensor) -> Tensor:
        """Return V ``[...]`` of hidden ``states [..., H]``."""
        return self.value_head(states).squeeze(-1)


def reward_weight(config: ModelConfig) -> Tensor | None:
    """Return the weight ``[1, H]`` of the reward head in the folder of ``config``, or ``None``.

    The deviation of the scores is divided out. Raises ``ModelError`` if the score is no linear
    function of the state of the last token.
    """
    path = config.path
    if (Path(path).expanduser() / PROCESS_FILE).is_file():
        raise ModelError(
            f"critic.path = {path!r} holds a process reward model, whose head scores steps "
            "alone; name a reward model with a linear head on the last token, or a language model"
        )
    form = read_form(path) or read_other_form(config, None)
    if form is None:
        return None
    settings, head = form.settings, form.settings.heads[0]
    why = ""
    if settings.gate:
        why = "its score is a mixture of heads by a gate"
    elif head.kind != "linear":
        why = f"its head {head.name!r} is of kind {head.kind}, not linear"
    elif settings.pooling != "last":
        why = f"its pooling is {settings.pooling}, not last"
    elif form.is_cut:
        why = f"it scores the inner layer {settings.layer}"
    if why:
        raise ModelError(
            f"critic.path = {path!r} holds a reward model that cannot start a critic: {why}; "
            "name a reward model with a linear head on the last token, or a language model"
        )
    weight = form.tensors[f"heads.{head.name}.layers.weight"]
    return weight / form.tensors["score_std"][0].to(weight.dtype)
