"""An actor over any ``nn.Module`` with the forward of a causal language model."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers.generation import (
    LogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from lightrft.config.model import ModelConfig
from lightrft.models.actor import Actor, TokenScores
from lightrft.models.attention.layouts import Packed
from lightrft.models.families import Family
from lightrft.models.logprobs import entropy_from_logits
from lightrft.models.multimodal.merge_inputs import MergedInputs
from lightrft.models.sampled_distribution import TokenFilters
from lightrft.utils.errors import ModelError


class ModuleActor(Actor):
    """A policy over any module with the forward of a causal language model.

    The call is ``model(input_ids, attention_mask, position_ids)``. It returns logits ``[B, L, V]``
    or an object with them. ``attention_mask`` and ``position_ids`` are passed if the forward
    accepts them. The layout is ``padded``, and the logits of a full rectangle exist at once,
    because only the module's forward is known. Raises ``ModelError`` for a forward without
    ``input_ids``.
    """

    def __init__(self, model: nn.Module) -> None:
        # not the constructor of Actor, which needs the config of a transformers model
        nn.Module.__init__(self)
        taken = inspect.signature(model.forward).parameters
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in taken.values())
        self._taken = set(taken)
        if not (self._takes_all or "input_ids" in taken):
            raise ModelError(
                f"pretrain_or_model is a {type(model).__name__} whose forward has no input_ids: "
                "give a path or a module with the "
                "forward of a causal language model"
            )
        self.config = ModelConfig(layout="padded")
        self.model = model
        self.family = Family(layout="padded")
        self.unread = None
        self._layout = "padded"

    def use_attention(self, kind: str) -> None:
        """Do nothing: the module selects its attention."""

    def states(self, packed: Packed, seen: MergedInputs | None = None) -> Tensor:
        """Return the logits ``[B, L, V]``, which take the place of hidden states here."""
        mask = (packed.source != -1).view(packed.input_ids.shape).long()
        inputs = {
            "input_ids": packed.input_ids,
            "attention_mask": mask,
            "position_ids": packed.position_ids,
        }
        kept = inputs
        if not self._takes_all:
            kept = {name: value for name, value in inputs.items() if name in self._taken}
        name = type(self.model).__name__
        if "attention_mask" not in kept and not bool(mask.all()):
            problem = "rows of unequal length need an attention_mask"
            raise ModelError(f"{problem}, and the forward of {name} does not take one")
        output = self.model(**kept)
        if isinstance(output, Tensor):
            return output
        is_dict = isinstance(output, dict)
        logits = output.get("logits") if is_dict else getattr(output, "logits", None)
        if logits is None:
            raise ModelError(
                f"the forward of {name} returned {type(output).__name__} without logits"
            )
        return logits

    def score_states(
        self,
        states: Tensor,
        targets: Tensor,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
        filters: TokenFilters | None = None,
    ) -> TokenScores:
        """Return log-probs of ``targets [N]`` from their logits ``[N, V]``.

        Args:
            states: ``[N, V]`` logits, which take the place of hidden states here.
            targets: ``[N]`` token ids.
            temperature: Divisor of the logits.
            entropy: Also return the entropy of the softmax.
            filters: Temperature and filters of sampling at the targets. ``None`` filters nothing.
        """
        wide = states.to(torch.promote_types(states.dtype, torch.float32))
        if filters is None:
            wide = wide / temperature
        else:
            wide = filters.apply(wide, slice(0, len(wide)), targets)
        logprobs = wide.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
        return TokenScores(logprobs, entropy_from_logits(wide) if entropy else None)

    def logits(self, states: Tensor) -> Tensor:
        """Return ``states``, which are logits here."""
        return states

    def gradient_checkpointing_enable(
        self,
        gradient_checkpointing_kwargs: dict[str, object] | None = None,
    ) -> None:
        """Call the module's method of the same name. Raises ``ModelError`` if it has none."""
        self._call(
            "gradient_checkpointing_enable",
            gradient_checkpointing_kwargs or {"use_reentrant": False},
        )

    def gradient_checkpointing_disable(self) -> None:
        """Call the module's method of the same name. Raises ``ModelError`` if it has none."""
        self._call("gradient_checkpointing_disable")

    def _call(self, name: str, *arguments: object) -> None:
        if not hasattr(self.model, name):
            raise ModelError(f"{type(self.model).__name__} has no method {name}")
        getattr(self.model, name)(*arguments)

    @torch.no_grad()
    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        options: dict[str, Any],
    ) -> Tensor:
        """Sample responses token by token, without a cache.

        Return rows ``[B, L]``, padded with ``pad_token_id``.

        Args:
            input_ids: ``[B, L_in]`` prompts, padded on the left.
            attention_mask: ``[B, L_in]``, 0 for padding.
            options: The options of ``PublicActor.sample_rows``.

        Raises:
            ModelError: ``num_beams`` is not 1.
        """
        if options["num_beams"] != 1:
            problem = f"num_beams = {options['num_beams']}"
            raise ModelError(f"{problem}: a plain module generates one beam; set it to 1")
        rows, mask, width = input_ids, attention_mask.long(), input_ids.shape[1]
        ends = torch.as_tensor(options["eos_token_id"], device=rows.device).reshape(-1)
        open_rows = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
        while rows.shape[1] - width < _limit(options, width) and bool(open_rows.any()):
            positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
            source = torch.where(mask.flatten() != 0, mask.flatten().cumsum(0) - 1, -1)
            packed = Packed(rows, positions, None, source[:0], None, source)
            logits = self.states(packed)[:, -1].float()

            if rows.shape[1] - width < options["min_new_tokens"]:
                logits[:, ends] = -torch.inf
            # rows that have ended are padded until all have ended
            token = torch.where(open_rows, _pick(rows, logits, options), options["pad_token_id"])
            rows = torch.cat([rows, token[:, None]], 1)
            mask = torch.cat([mask, open_rows[:, None].long()], 1)
            open_rows &= ~torch.isin(token, ends)
        return rows


def _limit(options: dict[str, Any], width: int) -> int:
    """Return the largest number of new tokens. Raises ``ModelError`` if no option bounds it."""
    if "max_new_tokens" in options:
        return options["max_new_tokens"]
    if "max_length" not in options:
        raise ModelError(
            "generate() needs max_new_tokens or max_length: a plain module has no generation config"
        )
    return options["max_length"] - width


def _pick(rows: Tensor, logits: Tensor, options: dict[str, Any]) -> Tensor:
    """Sample one token ``[B]`` per row of ``logits [B, V]``, with the filters of transformers'
    ``generate``."""
    if not options["do_sample"]:
        return logits.argmax(-1)
    filters: list[LogitsProcessor] = [TemperatureLogitsWarper(float(options["temperature"]))]
    if options.get("top_k"):
        filters.append(TopKLogitsWarper(options["top_k"]))
    if options.get("top_p", 1.0) < 1.0:
        filters.append(TopPLogitsWarper(options["top_p"]))
    for each in filters:
        logits = each(rows, logits)
    return torch.multinomial(logits.softmax(-1), 1)[:, 0]
