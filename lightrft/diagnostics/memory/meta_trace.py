"""Measure the peak memory of forward and backward passes on the meta device (shapes only).

Every tensor that an operation creates is counted until it would be freed. Temporary memory inside
a kernel is not visible. Attention is replaced by a stand-in. It saves the same tensors for the
backward pass as the real one, and its temporary memory is a formula.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightrft.config.strategy import OptimizerConfig, StrategyConfig
from lightrft.models.actor import Actor, Backbone
from lightrft.models.attention.layouts import Packed, pack
from lightrft.models.critic import Critic
from lightrft.models.reward.process import ProcessRewardModel
from lightrft.models.reward.reward_model import RewardModel
from lightrft.strategy.activation_offload import stays
from lightrft.strategy.base import TrainState
from lightrft.strategy.single import Masters, SingleStrategy
from lightrft.types import Batch, Segments

FORWARD_COPIES, BACKWARD_COPIES = 4, 8
"""Number of query-sized arrays that chunked attention needs temporarily, forward and backward.

These are queries, repeated keys and values, and a chunk's output. The backward pass also needs
the gradient of each.
"""


Saved = Literal["device", "host", "same"]
"""Location of tensors saved for the backward pass.

``device`` leaves them there, ``host`` offloads them. ``same`` offloads them on a CPU, where host
and device share the memory.
"""


class AllocationTracker(TorchDispatchMode):
    """Counts ``live`` bytes of tensors created inside the context, and their ``peak``.

    ``away_peak`` is the peak of offloaded bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self.away = 0
        self.away_peak = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        if func is torch.ops.aten._local_scalar_dense.default:
            # Models test whether positions form one sequence, to build a mask that is unused here.
            # The meta device has no values, so any number serves.
            return 1
        result = func(*args, **(kwargs or {}))
        # A result in the storage of an input is a view, or was written in place: no new memory.
        inputs = {x.untyped_storage()._cdata for x in _tensors((args, kwargs))}
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in inputs:
                self._add(storage)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return

        # The key is an address, which is reused once the storage is freed.
        def gone(_: object) -> None:
            del self._known[key]
            self.live -= size

        # A weak reference, since the tracker must not keep alive what it counts.
        self._known[key] = weakref.ref(storage, gone)
        self.live += size
        self.peak = max(self.peak, self.live)

    def sent(self, kept: object, size: int) -> None:
        """Count ``size`` offloaded bytes until ``kept`` is freed."""
        self.away += size
        self.away_peak = max(self.away_peak, self.away)
        weakref.finalize(kept, self._back, size)

    def _back(self, size: int) -> None:
        self.away -= size

    def brief(self, size: int) -> None:
        """Count ``size`` bytes that are allocated and freed at once."""
        self.peak = max(self.peak, self.live + size)


def _tensors(value: object) -> list[Tensor]:
    """Return the tensors in nested lists, tuples and dictionaries."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


@dataclass(slots=True)
class _Attention:
    """Stand-in for the attention plan of a layout.

    ``written``: bytes of materialized scores per query head.
    """

    watch: AllocationTracker
    written: int = 0
    last_layer: int | None = None
    spans: tuple[object, ...] = ()

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        softcap: float | None,
        **_: object,
    ) -> Tensor:
        return _Attend.apply(query, key, value, self)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: _Attention) -> Tensor:
        out = query.new_empty(*query.shape[:3], value.shape[-1])
        # Attention kernels keep the log-sum-exp of each query instead of its probabilities.
        lse = query.new_empty(query.shape[:3], dtype=torch.float32)
        copies = FORWARD_COPIES * out.untyped_storage().nbytes()
        plan.watch.brief(copies + plan.written * query.shape[1])
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.plan = plan
        return out.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, _ = ctx.saved_tensors
        found = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        copies = BACKWARD_COPIES * out.untyped_storage().nbytes()
        # Twice the scores: the gradient of each is materialized too.
        ctx.plan.watch.brief(copies + 2 * ctx.plan.written * query.shape[1])
        return *found, None


@dataclass(frozen=True, slots=True)
class Traced:
    """Memory of a pass in bytes: peak, gradients that remain after it, and offloaded bytes
    ``away``.
    """

    peak: int
    gradients: int = 0
    away: int = 0

    @property
    def activations(self) -> int:
        """The peak without gradients."""
        return max(0, self.peak - self.gradients)


def largest_batch(
    groups: int,
    samples: int,
    prompt_tokens: int,
    answer_tokens: int,
    budget: int,
    layout: str,
    steps: int = 1,
) -> Batch:
    """Build the largest micro-batch of a step, with prompts and responses of full length.

    It has at least one response.

    Args:
        groups: prompts of the step.
        samples: responses per prompt.
        prompt_tokens: length of a prompt.
        answer_tokens: length of a response.
        budget: maximum number of tokens of the micro-batch.
        layout: layout of the model. In ``prefix_shared``, a prompt counts once per group.
        steps: scored steps of a response, which a process reward model reads.
    """
    prompt_of: list[int] = []
    used = 0
    for group in range(groups):
        for sample in range(samples):
            shares = layout == "prefix_shared" and sample
            cost = answer_tokens if shares else prompt_tokens + answer_tokens
            if prompt_of and used + cost > budget:
                return _batch(prompt_of, prompt_tokens, answer_tokens, steps)
            prompt_of.append(group)
            used += cost
    return _batch(prompt_of, prompt_tokens, answer_tokens, steps)


def _batch(prompt_of: list[int], prompt_tokens: int, answer_tokens: int, steps: int) -> Batch:
    # Any token serves, since the meta device has no values.
    prompts = Segments.of([[0] * prompt_tokens for _ in range(max(prompt_of) + 1)])
    answers = Segments.of([[0] * answer_tokens for _ in prompt_of])
    # The places of the steps do not change the memory.
    ends = torch.arange(answer_tokens) < steps
    return Batch(
        prompts,
        answers,
        torch.tensor(prompt_of),
        sampled=torch.ones(answers.tokens.numel(), dtype=torch.bool),
        step_ends=ends.repeat(len(prompt_of)),
    )


def forward(
    model: Backbone, batch: Batch, *, written: bool = False, entropy: bool = False
) -> Traced:
    """Trace a pass of ``model`` over ``batch`` without gradient.

    Args:
        model: the model, on the meta device.
        batch: one micro-batch.
        written: True if attention scores are materialized.
        entropy: True if the entropy is computed.
    """
    with _called(model, batch, written, entropy) as (watch, call), torch.no_grad():
        call()
    return Traced(watch.peak)


def update(
    model: Backbone,
    batch: Batch,
    parts: int,
    *,
    written: bool = False,
    entropy: bool = False,
    saved: Saved = "device",
) -> Traced:
    """Trace forward and backward passes of micro-batches, up to the optimizer step.

    Gradients are accumulated as a strategy does.

    Args:
        model: the model, on the meta device.
        batch: one micro-batch.
        parts: number of micro-batches like ``batch``.
        written: True if attention scores are materialized.
        entropy: True if the entropy is computed.
        saved: location of the tensors saved for the backward pass.
    """
    strategy = SingleStrategy(StrategyConfig(device="meta"))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    masters: dict[str, Tensor] = {}
    for name, p in trained.items():
        # A parameter of full precision is its own master.
        is_precise = p.dtype in (torch.float32, torch.float64)
        masters[name] = p if is_precise else p.detach().float()
    both = Masters(trained, masters)
    state = TrainState(model, None, OptimizerConfig(), both)  # ty: ignore[invalid-argument-type]
    with _training(model), _called(model, batch, written, entropy, saved) as (watch, call):
        # Two are enough: from the second on, gradients are accumulated into existing ones.
        for part in range(min(parts, 2)):
            strategy.backward(state, call(), last=part == parts - 1)
        gradients = watch.live
    # The same model is traced again for other phases, which must start without gradients.
    for each in (*trained.values(), *masters.values()):
        each.grad = None
    return Traced(watch.peak, gradients, watch.away_peak)


def spread_update(
    model: Backbone,
    batch: Batch,
    *,
    written: bool = False,
    entropy: bool = False,
    saved: Saved = "device",
) -> Traced:
    """Trace forward and backward over ``batch``, where each gradient is reduced and freed at once.

    Args:
        model: the model, on the meta device.
        batch: one micro-batch.
        written: True if attention scores are materialized.
        entropy: True if the entropy is computed.
        saved: location of the tensors saved for the backward pass.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    hooks = [p.register_post_accumulate_grad_hook(_let_go) for p in trained]
    try:
        with _training(model), _called(model, batch, written, entropy, saved) as (watch, call):
            call().backward()
    finally:
        for hook in hooks:
            hook.remove()
    return Traced(watch.peak, 0, watch.away_peak)


def _let_go(parameter: Tensor) -> None:
    parameter.grad = None


@contextmanager
def _training(model: Backbone) -> Generator[None]:
    # Gradient checkpointing of transformers applies in training mode only.
    model.train()
    try:
        yield
    finally:
        model.eval()


@contextmanager
def _called(
    model: Backbone,
    batch: Batch,
    written: bool,
    entropy: bool,
    saved: Saved = "device",
) -> Generator[tuple[AllocationTracker, Callable[[], Tensor]]]:
    """Yield a counter, and a call of ``model`` on ``batch`` that returns a loss."""
    is_scored = isinstance(model, RewardModel)
    if is_scored:
        batch = model.ended(batch)
    is_process = isinstance(model, ProcessRewardModel)
    packed = pack(batch, model.layout, final=is_scored or is_process)
    targets = batch.responses.tokens.to("meta")
    longest = int(batch.prompts.lengths.max() + batch.lengths.max())
    # One place in the rows for each step, whichever.
    count = 0 if batch.step_ends is None else int(batch.step_ends.sum())
    steps = torch.zeros(count, dtype=torch.long, device="meta")
    watch = AllocationTracker()
    plan = _Attention(watch)
    if written:
        # Three float32 arrays of scores at once, with four bytes each.
        plan.written = 3 * 4 * packed.input_ids.numel() * longest
    packed = _on_meta(packed, plan)

    def passed() -> Tensor:
        every = model.states(packed).flatten(0, 1)
        if isinstance(model, RewardModel):
            heads = model.outputs_of(every, packed, batch).values()
            return torch.stack([head.scores.sum() + head.outputs.sum() for head in heads]).sum()
        if isinstance(model, ProcessRewardModel):
            return model.logits_of(every.index_select(0, steps)).sum()
        states = every.index_select(0, packed.gather)
        if isinstance(model, Critic):
            return model.value(states).sum()
        if not isinstance(model, Actor):
            raise TypeError(
                f"{type(model).__name__} is no actor, critic, reward model or process model"
            )
        scores = model.score_states(states, targets, entropy=entropy)
        loss = scores.logprobs.sum()
        return loss if scores.entropy is None else loss + scores.entropy.sum()

    def call() -> Tensor:
        if saved == "device":
            return passed()
        with saved_tensors_hooks(partial(_to_host, watch, saved), _from_host):
            return passed()

    # After packing, whose tensors on the host must not count.
    with watch:
        yield watch, call


@dataclass(frozen=True, slots=True, weakref_slot=True)
class _OnHost:
    """Stand-in for an offloaded tensor: its shape and dtype."""

    like: tuple[torch.Size, torch.dtype]


def _to_host(watch: AllocationTracker, saved: Saved, tensor: Tensor) -> Tensor | _OnHost:
    """Offload a saved tensor like ``activation_offload``. On a CPU the copy stays in its memory.

    Args:
        watch: Counts the offloaded bytes.
        saved: Location of the tensors saved for the backward pass.
        tensor: A tensor saved for the backward pass.
    """
    if stays(tensor):
        return tensor
    if saved == "same":
        return torch.empty_like(tensor)
    kept = _OnHost((tensor.shape, tensor.dtype))
    watch.sent(kept, tensor.numel() * tensor.itemsize)
    return kept


def _from_host(kept: Tensor | _OnHost) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    shape, dtype = kept.like
    return torch.empty(shape, dtype=dtype, device="meta")


def _on_meta(packed: Packed, plan: _Attention) -> Packed:
    names = ("input_ids", "position_ids", "gather", "source")
    tensors = {name: getattr(packed, name).to("meta") for name in names}
    if packed.final is not None:
        tensors["final"] = packed.final.to("meta")
    # Without the mask, which the stand-in does not read and which would count as memory.
    return replace(packed, **tensors, plan=plan, mask=None)
