"""Bytes that a forward and backward pass hold at most, by running them on the meta device: shapes without numbers.

Every tensor that an operation makes is counted until its memory would be freed. What the kernels of a device take inside one
operation is not seen, and the attention of a layout stands in for itself: what it keeps for the backward pass is what the real one
keeps, and what it takes meanwhile is a formula.
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

from lightrft.config.strategy import OptimizerConfig, StrategyConfig
from lightrft.models.actor import Actor, Backbone
from lightrft.models.attention.layouts import Packed, pack
from lightrft.models.critic import Critic
from lightrft.strategy.activation_offload import stays
from lightrft.strategy.base import TrainState
from lightrft.strategy.single import Masters, SingleStrategy
from lightrft.types import Batch, Segments

FORWARD_COPIES, BACKWARD_COPIES = 4, 8
"""Arrays of the queries' size that attention by parts takes while it runs: queries, repeated keys and values, and a part's output;
in the backward pass also the gradients of each."""


Saved = Literal["device", "host", "same"]
"""Where what a forward pass leaves for the backward pass lies: on the device, on the host, or on a host whose memory is the device's."""


class Watch(TorchDispatchMode):
    """``live`` bytes of tensors that were made inside, and their ``peak``; ``away_peak``: of what was sent elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self.away = 0
        self.away_peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1  # a model asks whether positions are one sequence, to make a mask that is not made: there is no number
        result = func(*args, **(kwargs or {}))
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

        def gone(_: Any) -> None:
            del self._known[key]
            self.live -= size

        self._known[key] = weakref.ref(storage, gone)
        self.live += size
        self.peak = max(self.peak, self.live)

    def sent(self, kept: Any, size: int) -> None:
        """``size`` bytes lie elsewhere as long as ``kept`` lives."""
        self.away += size
        self.away_peak = max(self.away_peak, self.away)
        weakref.finalize(kept, self._back, size)

    def _back(self, size: int) -> None:
        self.away -= size

    def brief(self, size: int) -> None:
        """``size`` bytes that are taken and given back at once."""
        self.peak = max(self.peak, self.live + size)


def _tensors(value: Any) -> Generator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)


@dataclass(slots=True)
class _Attention:
    """Stands in for the plan of a layout. ``scores``: bytes of the scores that are written out, for a query's number of heads."""

    watch: Watch
    written: int = 0
    last_layer: int | None = None
    spans: Any = ()

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, softcap: float | None, **_: Any) -> Tensor:
        return _Attend.apply(query, key, value, self)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: _Attention) -> Tensor:
        out = query.new_empty(*query.shape[:3], value.shape[-1])
        lse = query.new_empty(query.shape[:3], dtype=torch.float32)
        plan.watch.brief(FORWARD_COPIES * out.untyped_storage().nbytes() + plan.written * query.shape[1])
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.plan = plan
        return out.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, _ = ctx.saved_tensors
        found = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        ctx.plan.watch.brief(BACKWARD_COPIES * out.untyped_storage().nbytes() + 2 * ctx.plan.written * query.shape[1])
        return *found, None


@dataclass(frozen=True, slots=True)
class Traced:
    """Bytes of a pass: at most, and what is left of it after the last backward, which is the gradients; ``away`` are those on the host."""

    peak: int
    gradients: int = 0
    away: int = 0

    @property
    def activations(self) -> int:
        """What the peak holds beside gradients."""
        return max(0, self.peak - self.gradients)


def largest_batch(groups: int, samples: int, prompt_tokens: int, answer_tokens: int, budget: int, layout: str) -> Batch:
    """The largest micro-batch of a step of ``groups`` prompts with ``samples`` answers each, all of full length, within ``budget``
    tokens of ``layout``; one answer at least."""
    prompt_of: list[int] = []
    used = 0
    for group in range(groups):
        for sample in range(samples):
            shares = layout == "prefix_shared" and sample
            cost = answer_tokens if shares else prompt_tokens + answer_tokens
            if prompt_of and used + cost > budget:
                return _batch(prompt_of, prompt_tokens, answer_tokens)
            prompt_of.append(group)
            used += cost
    return _batch(prompt_of, prompt_tokens, answer_tokens)


def _batch(prompt_of: list[int], prompt_tokens: int, answer_tokens: int) -> Batch:
    prompts = Segments.of([[0] * prompt_tokens for _ in range(max(prompt_of) + 1)])
    answers = Segments.of([[0] * answer_tokens for _ in prompt_of])
    return Batch(prompts, answers, torch.tensor(prompt_of), sampled=torch.ones(answers.tokens.numel(), dtype=torch.bool))


def forward(model: Backbone, batch: Batch, *, written: bool = False, entropy: bool = False) -> Traced:
    """The pass of ``model``, on the meta device, over ``batch`` without gradient."""
    with _called(model, batch, written, entropy) as (watch, call), torch.no_grad():
        call()
    return Traced(watch.peak)


def update(
    model: Backbone, batch: Batch, parts: int, *, written: bool = False, entropy: bool = False, saved: Saved = "device"
) -> Traced:
    """Forward and backward of ``parts`` micro-batches like ``batch``, as a strategy adds them up, up to the optimizer's step. ``saved``
    says where what the forward pass leaves lies until the backward pass: where it is, on the host, or on a host that is the device."""
    strategy = SingleStrategy(StrategyConfig(device="meta"))
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    masters = {n: p if p.dtype in (torch.float32, torch.float64) else p.detach().float() for n, p in trained.items()}
    state = TrainState(model, None, None, OptimizerConfig(), Masters(trained, masters))  # ty: ignore[invalid-argument-type]
    with _training(model), _called(model, batch, written, entropy, saved) as (watch, call):
        for part in range(min(parts, 2)):  # a third is as the second: it meets gradients that are there
            strategy.backward(state, call(), last=part == parts - 1)
        gradients = watch.live
    for each in (*trained.values(), *masters.values()):
        each.grad = None
    return Traced(watch.peak, gradients, watch.away_peak)


def spread_update(
    model: Backbone, batch: Batch, *, written: bool = False, entropy: bool = False, saved: Saved = "device"
) -> Traced:
    """Forward and backward over ``batch`` where each gradient goes on to ranks that sum it, as soon as it is there."""
    hooks = [p.register_post_accumulate_grad_hook(_let_go) for p in model.parameters() if p.requires_grad]
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
    model.train()
    try:
        yield
    finally:
        model.eval()


@contextmanager
def _called(
    model: Backbone, batch: Batch, written: bool, entropy: bool, saved: Saved = "device"
) -> Generator[tuple[Watch, Callable[[], Tensor]]]:
    """A call of ``model`` on ``batch`` that gives a loss, watched."""
    packed = pack(batch, model.layout)
    targets = batch.responses.tokens.to("meta")
    longest = int(batch.prompts.lengths.max() + batch.lengths.max())
    watch = Watch()
    plan = _Attention(watch, 3 * 4 * packed.input_ids.numel() * longest if written else 0)
    packed = _on_meta(packed, plan)

    def passed() -> Tensor:
        states = model.states(packed).flatten(0, 1).index_select(0, packed.gather)
        if isinstance(model, Critic):
            return model.value(states).sum()
        if not isinstance(model, Actor):
            raise TypeError(f"{type(model).__name__} is neither an actor nor a critic")
        scores = model.score_states(states, targets, entropy=entropy)
        return scores.logprobs.sum() + (0.0 if scores.entropy is None else scores.entropy.sum())

    def call() -> Tensor:
        if saved == "device":
            return passed()
        with saved_tensors_hooks(partial(_to_host, watch, saved), _from_host):
            return passed()

    with watch:
        yield watch, call


@dataclass(frozen=True, slots=True, weakref_slot=True)
class _OnHost:
    """What lies in the host's memory of a tensor: its shape and type."""

    like: tuple[torch.Size, torch.dtype]


def _to_host(watch: Watch, saved: Saved, tensor: Tensor) -> Any:
    """As ``activations.to_host``: a copy, which on a CPU takes the device's own memory."""
    if stays(tensor):
        return tensor
    if saved == "same":
        return torch.empty_like(tensor)
    kept = _OnHost((tensor.shape, tensor.dtype))
    watch.sent(kept, tensor.numel() * tensor.itemsize)
    return kept


def _from_host(kept: Any) -> Tensor:
    return kept if isinstance(kept, Tensor) else torch.empty(kept.like[0], dtype=kept.like[1], device="meta")


def _on_meta(packed: Packed, plan: Any) -> Packed:
    tensors = {name: getattr(packed, name).to("meta") for name in ("input_ids", "position_ids", "gather", "source")}
    return replace(packed, **tensors, plan=plan, mask=None)
