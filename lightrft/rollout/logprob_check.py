"""Compare the log-probs that an engine reports with the trainer's own for the same tokens: what is sampled must be what is trained.

The trainer computes the logits of a few tokens once. All suspicions are then tried on those logits: another temperature, other
filters. What is left is the engine's weights, which its fingerprint tells, or its decoding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from lightrft.config.strategy import EngineConfig, SamplingConfig
from lightrft.engines import sampling as draws
from lightrft.engines.base import Engine, Fingerprint, never
from lightrft.engines.native import checksum
from lightrft.models.actor import Actor
from lightrft.roles import Roles
from lightrft.types import Batch, Request, Rollout, Segments
from lightrft.utils.errors import ModelError

ROWS = 4
"""Responses of a batch that are compared."""

ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-11, torch.float64: 2**-11}
"""Unit roundoff of a layer's output. Products of float32 may be taken in TF32, and the engine reports float32 in any case."""

HALF = (torch.bfloat16, torch.float16)
REMOVED = 0.05
"""Share of tokens, rounded up, that a filter of the trainer may remove by rounding, although the engine sampled them."""


def gap_bound(dtype: torch.dtype, layers: int) -> float:
    """Return the difference in nats that rounding explains, for a model of ``layers`` layers computed in ``dtype``.

    The residual stream is a sum of ``2 * layers`` outputs and the embedding. Each is rounded by ``ROUNDING``, independently, so
    the errors add up to its root. The engine and the trainer both round: twice that.
    """
    return 2 * ROUNDING[dtype] * math.sqrt(2 * layers + 1)


@dataclass(slots=True)
class Compared:
    """``n`` sampled tokens: the trainer's ``logits [n, V]``, the ``tokens [n]``, and the log-probs ``reported [n]`` for them.

    ``seen [n, V]`` marks the tokens before each, for the repetition penalty. ``greedy [n]`` tokens were the likeliest ones.
    ``dtype`` is the coarsest type of the states and weights, as a call sees them.
    ``before [n]`` are the log-probs that older weights gave the tokens, NaN where they gave none.
    """

    logits: Tensor
    tokens: Tensor
    reported: Tensor
    greedy: Tensor
    seen: Tensor | None
    dtype: torch.dtype
    before: Tensor | None = None

    def gap(self, sampling: SamplingConfig) -> float:
        """Return the difference in nats if the engine sampled by ``sampling``: the largest, or in half precision the mean.

        Of a greedy token it is the distance of its logit from the largest.
        """
        likeliest = sampling.model_copy(update={"temperature": 0.0})
        gaps = torch.empty_like(self.reported)
        for where, settings in ((self.greedy, likeliest), (~self.greedy, sampling)):
            seen = None if self.seen is None or settings.repetition_penalty == 1 else self.seen[where]
            logits = draws.process(self.logits[where], settings, seen)
            chosen = logits.gather(1, self.tokens[where, None])[:, 0]
            if settings is likeliest:
                gaps[where] = logits.amax(-1) - chosen
            else:
                gaps[where] = (chosen - logits.logsumexp(-1) - self.reported[where]).abs()
        removed = gaps.isinf()
        if int(removed.sum()) <= math.ceil(REMOVED * len(gaps)):
            gaps = gaps[~removed]
        return self._summed_up(gaps)

    def is_of_older_weights(self, bound: float) -> bool:
        """Return True where the log-probs are, within ``bound``, those that older weights gave."""
        if self.before is None or bool((unknown := self.before.isnan()).all()):
            return False
        return self._summed_up((self.before - self.reported)[~unknown].abs()) <= bound

    def _summed_up(self, gaps: Tensor) -> float:
        return float(gaps.mean() if self.dtype in HALF else gaps.max()) if len(gaps) else 0.0


@torch.no_grad()
def compared(actor: Actor, batch: Batch, sampling: SamplingConfig, version: int | None) -> Compared | None:
    """Score a few tokens of ``batch`` that policy ``version`` sampled; ``None`` is any version, and without such tokens.

    The logits of all tokens that are compared fit into ``model.logits_mb``.
    """
    few = _few(batch, _comparable(batch, sampling, version))
    if few is None:
        return None
    few = few.to(actor.device)
    places = _comparable(few, sampling, version).nonzero()[:, 0]
    places = places[torch.linspace(0, len(places) - 1, min(len(places), room(actor))).round().long().to(places.device)]
    logits, dtype = logits_at(actor, few, places)
    assert few.behavior_logprobs is not None
    greedy = torch.full_like(places, sampling.temperature == 0, dtype=torch.bool)
    sums = torch.zeros(len(few), device=places.device).index_add_(0, few.row_of, few.behavior_logprobs.abs().float())
    greedy |= sums[few.row_of[places]] == 0
    seen = seen_before(few, places, logits.shape[1]) if sampling.repetition_penalty != 1 else None
    tokens, reported = few.responses.tokens[places], few.behavior_logprobs[places].float()
    return Compared(logits, tokens, reported, greedy, seen, dtype)


def room(actor: Actor) -> int:
    """Return the number of tokens whose logits fit into ``model.logits_mb``."""
    return max(2, actor.config.logits_mb * 2**20 // (4 * actor.text_config.vocab_size))


@torch.no_grad()
def logits_at(actor: Actor, batch: Batch, places: Tensor) -> tuple[Tensor, torch.dtype]:
    """Return the logits ``[n, V]`` of the response tokens at ``places [n]``, in float32.

    Also returns the coarsest type that they are computed in.
    """
    training = actor.training
    actor.eval()
    try:
        states = actor(batch, states_alone=True)
        logits = actor.logits(states[places]).float()
    finally:
        actor.train(training)
    # Sharded weights are float32 outside of a call, whatever the call computes in.
    kinds = {states.dtype, torch.float32, *(p.dtype for p in actor.model.parameters() if p.dtype in ROUNDING)}
    return logits, max(kinds, key=ROUNDING.__getitem__)


def _comparable(batch: Batch, sampling: SamplingConfig, version: int | None) -> Tensor:
    """``[N]`` bool: tokens that the policy of ``version`` sampled from logits with no end token suppressed."""
    starts = batch.lengths.cumsum(0) - batch.lengths
    step = torch.arange(batch.tokens, device=starts.device) - starts[batch.row_of]
    chosen = batch.mask & (step >= sampling.min_new_tokens)
    if version is not None and batch.versions is not None:
        chosen = chosen & (batch.versions == version)
    return chosen


def _few(batch: Batch, comparable: Tensor) -> Batch | None:
    """The longest row with comparable tokens, and others spread over the batch."""
    counts = torch.zeros_like(batch.lengths).index_add_(0, batch.row_of, comparable.long())
    rows = counts.nonzero()[:, 0]
    if not len(rows):
        return None
    longest = rows[(batch.lengths + batch.prompts.lengths[batch.prompt_of])[rows].argmax()]
    others = rows[torch.linspace(0, len(rows) - 1, min(ROWS - 1, len(rows))).round().long()]
    return batch.select(torch.unique(torch.cat([longest[None], others])))


def seen_before(batch: Batch, places: Tensor, vocabulary: int) -> Tensor:
    """``[n, V]`` bool: tokens of the prompt and of the response before each of ``places``."""
    seen = torch.zeros(len(places), vocabulary, dtype=torch.bool, device=places.device)
    prompts = batch.prompts.tokens.split(batch.prompts.lengths.tolist())
    starts = batch.lengths.cumsum(0) - batch.lengths
    for row, place, of in zip(seen, places.tolist(), batch.row_of[places].tolist()):
        row[prompts[int(batch.prompt_of[of])]] = True
        row[batch.responses.tokens[int(starts[of]) : place]] = True
    return seen


@dataclass(frozen=True, slots=True)
class Agreement:
    """The ``gap`` in nats on ``tokens`` sampled tokens, and the ``bound`` of ``dtype`` for it.

    ``cause`` is that of a gap beyond the bound, else empty.
    """

    gap: float
    bound: float
    tokens: int
    dtype: str
    cause: str = ""

    def __str__(self) -> str:
        gap = f"the engine's log-probs differ from the trainer's by {self.gap:.3g} nats"
        bound = f"rounding in {self.dtype} explains {self.bound:.2g}"
        return f"{gap} on {self.tokens} tokens it sampled; {bound}{self.cause and '. ' + self.cause}"


def agreement(actor: Actor, found: Compared, sampling: SamplingConfig, unequal: Callable[[], str] | None) -> Agreement:
    """Return how far the engine's log-probs are from the trainer's, with the cause if it is too far.

    ``unequal`` returns the name of a parameter in which the engine's own weights differ from the
    trainer's, or nothing. ``None`` is for an engine without weights of its own.
    """
    bound, gap = gap_bound(found.dtype, actor.text_config.num_hidden_layers), found.gap(sampling)
    cause = "" if gap <= bound else _cause(actor, found, sampling, bound, unequal)
    return Agreement(gap, bound, len(found.tokens), str(found.dtype).removeprefix("torch."), cause)


def refuse_gap(
    actor: Actor, found: Compared | None, sampling: SamplingConfig, unequal: Callable[[], str] | None, when: str = ""
) -> None:
    """Raise ``ModelError`` with the cause where the log-probs differ by more than ``gap_bound``.

    ``when`` begins the message. See ``agreement``.
    """
    if found is not None and (said := agreement(actor, found, sampling, unequal)).cause:
        raise ModelError(f"{when}{said} (engine.check_logprobs=false turns this comparison off)")


def _cause(
    actor: Actor,
    found: Compared,
    sampling: SamplingConfig,
    bound: float,
    unequal: Callable[[], str] | None,
) -> str:
    if unequal is not None and (name := unequal()):
        return f"Cause: weights were not transferred, the engine holds another {name!r}."
    if found.is_of_older_weights(bound):
        hides = "whatever its fingerprint says"
        return f"Cause: weights were not transferred, the engine gives the log-probs of older ones, {hides}."
    for words, variant in _variants(sampling):
        if found.gap(variant) <= bound:
            return f"Cause: the engine sampled {words}, and the settings say {_said(sampling)}."
    kind = actor.base.config.model_type
    same = "temperature and filters are the same. Cause: the engine"
    decodes = f"decodes model type {kind!r} in another way than it is trained."
    if unequal is None:
        return f"Weights, {same} {decodes}"
    other = "computes with other weights than those of its fingerprint"
    return f"The fingerprint of the weights, {same} {other}, or {decodes}"


def _variants(sampling: SamplingConfig) -> Iterator[tuple[str, SamplingConfig]]:
    """Ways to sample that an engine could have taken instead."""
    open_ = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    temperature = {"temperature": 1.0}
    for words, other in (
        ("at temperature 1", temperature),
        ("without the filters", open_),
        ("at temperature 1 without the filters", open_ | temperature),
        ("at half the temperature", {"temperature": sampling.temperature / 2}),
        ("at twice the temperature", {"temperature": sampling.temperature * 2}),
    ):
        variant = sampling.model_copy(update=other)
        if variant != sampling:
            yield words, variant


def _said(sampling: SamplingConfig) -> str:
    return ", ".join(
        f"{name} {getattr(sampling, name)}" for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    )


def unequal_weight(found: Fingerprint, given: Iterable[tuple[str, Tensor]]) -> str:
    """Return the name of the first parameter ``given`` that differs from an engine's fingerprint ``found``; empty if none does.

    An engine may hold another type than it was given: the comparison is in the engine's type.
    """
    different = ""
    for name, tensor in given:  # to the end: to gather each takes all ranks
        if different or name not in found:
            continue
        held = getattr(torch, found[name].partition("[")[0].removeprefix("torch."))
        if checksum(tensor.to(held)) != found[name]:
            different = name
    return different


def refuse_weights(found: Fingerprint, given: Mapping[str, Tensor], version: int) -> None:
    """Raise ``ModelError`` where an engine does not hold the weights of ``version`` that it was ``given``."""
    if name := unequal_weight(found, given.items()):
        raise ModelError(f"weights of version {version} were not transferred: the engine holds another {name!r} than the trainer")


def check_batch(roles: Roles, batch: Batch, sampling: SamplingConfig, engine: EngineConfig, version: int) -> None:
    """Compare on a run's first batch, and on every batch of an engine that has its own weights.

    All ranks hold the same ``batch`` and find the same. Raises ``ModelError`` with the cause of a difference.
    """
    if not engine.check_logprobs or not len(batch) or (roles.logprobs_checked and roles.engine.shared):
        return
    with roles.strategy.whole(roles.actor):
        found = compared(roles.actor, batch, sampling, version)
    if found is not None:
        unequal = None if roles.engine.shared else partial(_unequal, roles)
        refuse_gap(roles.actor, found, sampling, unequal)
        roles.logprobs_checked = True


def _unequal(roles: Roles) -> str:
    return unequal_weight(roles.held, roles.weights())


@dataclass(slots=True)
class CheckedEngine:
    """An engine over ``actor``'s weights, whose first responses are compared with the model's own forward."""

    engine: Engine
    actor: Actor
    config: EngineConfig
    of_all: bool = field(init=False)
    together: int = field(init=False)
    shared: bool = field(init=False)
    checked: bool = False

    def __post_init__(self) -> None:
        self.of_all, self.together, self.shared = self.engine.of_all, self.engine.together, self.engine.shared

    def generate(
        self, requests: Iterable[Request], sampling: SamplingConfig, stopped: Callable[[], bool] = never
    ) -> Iterator[Rollout]:
        """See ``Engine.generate``. Raises ``ModelError`` before the first response where the log-probs differ."""
        first: list[Rollout] = []
        for rollout in self.engine.generate(requests, sampling, stopped):
            if self.checked or not self.config.check_logprobs:
                yield rollout
                continue
            first.append(rollout)
            if len(first) == ROWS:
                self._check(first, sampling)
                yield from first
        if not self.checked and first:
            self._check(first, sampling)
            yield from first

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Fingerprint:
        """See ``Engine.load_weights``."""
        return self.engine.load_weights(weights, version)

    def sleep(self, level: int) -> None:
        self.engine.sleep(level)

    def wake(self) -> None:
        self.engine.wake()

    def close(self) -> None:
        self.engine.close()

    def _check(self, rollouts: Sequence[Rollout], sampling: SamplingConfig) -> None:
        self.checked = True
        batch = batch_of(rollouts)
        if not batch.tokens:
            self.checked = False
            return
        if self.actor.config.check_layout:
            self.actor.check_layout(batch.to(self.actor.device))
        refuse_gap(self.actor, compared(self.actor, batch, sampling, None), sampling, None)


def batch_of(rollouts: Sequence[Rollout]) -> Batch:
    """Collate responses that need no reward. Those whose prompt is one object share it."""
    prompts = {id(r.prompt): r.prompt for r in rollouts}
    place = {key: i for i, key in enumerate(prompts)}
    return Batch(
        Segments.of_prompts(list(prompts.values())),
        Segments.of([r.token_ids for r in rollouts]),
        torch.tensor([place[id(r.prompt)] for r in rollouts]),
        sampled=torch.tensor([x for r in rollouts for x in r.sampled], dtype=torch.bool),
        behavior_logprobs=torch.tensor([x for r in rollouts for x in r.logprobs]),
        versions=torch.tensor([x for r in rollouts for x in r.versions], dtype=torch.long),
    )
