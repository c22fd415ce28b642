"""The load-balancing loss of a mixture of experts, over all tokens of an optimizer step.

It is ``E * sum_e f_e P_e`` for ``E`` experts (arXiv 2101.03961, eq. 4 to 6). ``f_e`` is the number
of times that routers choose expert e, and ``P_e`` the sum of their probabilities of it. Both are
divided by the number of tokens. The tokens of all layers with experts count, as in transformers'
``load_balancing_loss_func``. ``f`` has no gradient. Given ``f`` the loss is a sum over tokens, so
any split of the tokens gives the same loss and gradient. ``f`` is therefore counted first.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from lightrft.distributed.process_group import ModelParallelGroup, ProcessGroup, SingleProcess
from lightrft.models.attention.ulysses import Row, SequencePart
from lightrft.models.logprobs import wide
from lightrft.types import Batch
from lightrft.utils.device_transfer import to_device
from lightrft.utils.errors import ModelError

SETTING = "model.router_aux_loss_coef"
COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef", "moe_loss_weight")
"""Names of the coefficient of the load-balancing loss in the configs of transformers."""
log = logging.getLogger(__name__)


class RouterLoss:
    """The load-balancing loss of one model, computed from the logits of its routers.

    Args:
        model: The transformers model, with or without adapters.
        decoder: Its module that yields last hidden states.
        coef: Factor of the loss.
        tries: Compare the loss with the model's own on four tokens, by its own attention. It needs
            weights.

    Raises:
        ModelError: The model's own forward computes no such loss, or another one.
    """

    def __init__(
        self, model: PreTrainedModel, decoder: nn.Module, coef: float, *, tries: bool
    ) -> None:
        self.coef = coef
        self._kind: str = model.config.model_type
        config: Any = model.config.get_text_config(decoder=True)
        owners: list[Any] = [one for one in (model, config) if hasattr(one, "num_experts_per_tok")]
        # transformers adds the loss in the file of the family, or nowhere
        if not owners or not hasattr(
            sys.modules[type(model).__module__], "load_balancing_loss_func"
        ):
            raise self._refusal("its own forward computes no load-balancing loss of experts")
        self._top_k: int = owners[0].num_experts_per_tok
        self._phase: Literal["off", "count", "add"] = "off"
        self._counts: Tensor | None = None
        self._rows: Tensor | None = None
        self._weights: Tensor | None = None
        self._sum: Tensor | None = None
        if tries:
            self._try(model, decoder)

    @property
    def reads_calls(self) -> bool:
        """Return ``True`` if the loss reads the routers of the calls that follow.

        Passes without gradient inside a training step, such as the values of evaluation mode, are
        not read.
        """
        return self._phase == "count" or (self._phase == "add" and torch.is_grad_enabled())

    def read(
        self, logits: Sequence[Tensor] | None, counts: Tensor, group: ModelParallelGroup
    ) -> None:
        """Read the routers of one model call.

        Args:
            logits: ``[T, E]`` logits of each router, for this rank's tokens.
            counts: Number of rows that each token of the whole call stands for, see
                ``counts_of_tokens``.
            group: The sequence-parallel group, which shards the tokens of the call.
        """
        if not logits:
            raise self._refusal("its routers do not return their logits")
        part = SequencePart.rows(group, group.size, counts.device)
        if group.size > 1:
            counts = Row(group, len(counts)).own(counts)
        found = self._read(logits, counts)
        found = [part.whole(own[None]).sum(0) for own in found]
        if self._phase == "add":
            (self._sum,) = found
        else:
            self._counts = found[0] if self._counts is None else self._counts + found[0]
            self._rows = found[1] if self._rows is None else self._rows + found[1]

    def _read(self, logits: Sequence[Tensor], counts: Tensor) -> list[Tensor]:
        """Return what ``read`` adds up over the tokens of this rank."""
        found: list[Tensor] = []
        for router in logits:
            flat = router.flatten(0, -2)
            probs = flat.to(wide(flat.dtype)).softmax(-1)
            if self._phase == "add":
                sums = [counts.to(probs.dtype) @ probs]
            else:
                chosen = probs.topk(self._top_k, dim=-1).indices.flatten()
                nothing = counts.new_zeros(probs.shape[-1])
                times = counts.repeat_interleave(self._top_k)
                sums = [nothing.index_add(0, chosen, times), counts.sum()]
            found = sums if not found else [old + new for old, new in zip(found, sums)]
        return found

    @contextmanager
    def counting(self, ranks: ProcessGroup) -> Generator[None]:
        """Return a context for all calls of a step without gradient, which count ``f``.

        Args:
            ranks: The data-parallel group. The numbers are summed over its ranks.
        """
        self._phase, self._counts, self._rows = "count", None, None
        try:
            yield
        finally:
            self._phase = "off"
        assert self._counts is not None and self._rows is not None
        counts, rows = ranks.sum(self._counts), ranks.sum(self._rows).clamp(min=1)
        self._weights = (len(counts) * counts).double() / rows.double() ** 2

    @contextmanager
    def adding(self) -> Generator[None]:
        """Return a context for the calls of a step with gradient."""
        self._phase = "add"
        try:
            yield
        finally:
            self._phase, self._sum = "off", None

    def term(self) -> Tensor:
        """Return the last call's part of the loss of the step (0-d), without ``coef``."""
        assert self._sum is not None and self._weights is not None
        term = (self._sum * self._weights.to(self._sum)).sum()
        self._sum = None
        return term

    @torch.no_grad()
    def _try(self, model: PreTrainedModel, decoder: nn.Module) -> None:
        # no setting selects float64, and the experts' fused kernels do not support it
        if model.dtype == torch.float64 or model.device.type == "meta":
            return
        config: Any = model.config.get_text_config(decoder=True)
        ids = torch.arange(4, 8, device=model.device)[None] % config.vocab_size
        call: Any = {"input_ids": ids, "use_cache": False, "output_router_logits": True}
        logits = decoder(**call).router_logits
        expected = model(**call).aux_loss if logits else None
        if not isinstance(expected, Tensor):
            raise self._refusal("its own forward computes no load-balancing loss of experts")
        counts = torch.ones(ids.numel(), dtype=torch.long, device=ids.device)
        group, own = ModelParallelGroup(0, 1), SingleProcess()
        with self.counting(own):
            self.read(logits, counts, group)
        with self.adding():
            self.read(logits, counts, group)
            found = self.term()
        # a router's logits in half precision may be equal, and the experts are then any of these
        bound = 1e-4 if logits[0].dtype in (torch.float32, torch.float64) else 0.1
        if not float((found - expected).abs()) <= bound * float(expected.abs()):
            raise self._refusal(f"its own loss is {float(expected):g}, and this one {found:g}")

    def _refusal(self, why: str) -> ModelError:
        return ModelError(
            f"{SETTING} = {self.coef:g} does not work with model type {self._kind!r}: {why}; "
            f"leave {SETTING} out"
        )


def counts_of_tokens(batch: Batch, source: Tensor) -> Tensor:
    """Return the number of rows that each token of a call stands for, ``[S * T]``.

    They sum to the tokens of all rows, whatever the layout: a prompt that is computed once stands
    for all of its responses. Padding counts 0.

    Args:
        batch: The micro-batch.
        source: See ``Packed.source``.
    """
    groups = torch.tensor(batch.groups, dtype=torch.long)
    members = torch.bincount(groups, minlength=len(batch.prompts))
    # on the host, since repeat_interleave on a device waits for the lengths
    sizes = torch.tensor(batch.prompts.sizes, dtype=torch.long)
    of_prompts = torch.repeat_interleave(members, sizes)
    of_responses = torch.ones(batch.responses.tokens.numel(), dtype=torch.long)
    # the last entry is that of padding, whose source is -1
    wanted = torch.cat([of_prompts, of_responses, of_responses.new_zeros(1)])
    wanted = to_device(wanted, source.device)
    index = torch.where(source < 0, len(wanted) - 1, source)
    copies = torch.zeros_like(wanted).index_add(0, index, torch.ones_like(index))
    return wanted[index] // copies[index]


def report_unread(config: PreTrainedConfig) -> None:
    """Warn of losses that the config of a model asks for, and that no setting adds."""
    branches = [config.to_dict()]
    for branch in branches:
        branches += [value for value in branch.values() if isinstance(value, dict)]
    given: dict[str, object] = {}
    for branch in reversed(branches):
        given |= {name: value for name, value in branch.items() if value}
    named = (f"{name} = {given[name]:g}" for name in COEFFICIENTS if given.get(name))
    if given.get("output_router_logits") and (asked := next(named, "")):
        log.warning(
            "output_router_logits = true and %s of the model's config change nothing: the "
            "load-balancing loss of experts is a setting here, %s=%s of the verbs that train a "
            "policy",
            asked,
            SETTING,
            asked.partition(" = ")[2],
        )
    if given.get("z_loss_coefficient"):
        log.warning(
            "z_loss_coefficient = %g of the model's config changes nothing: no verb adds a loss of "
            "the size of logits",
            given["z_loss_coefficient"],
        )
