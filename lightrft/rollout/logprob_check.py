"""Compare the log-probs that an engine reports with the trainer's log-probs of the same tokens.

The sampled policy must be the trained policy. The trainer computes the logits of a few tokens once.
If the log-probs differ, every suspected cause is tried on these logits: another temperature, other
filters. The remaining causes are the engine's weights, which its fingerprint reveals, and its
decoding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lightrft.config.engine import EngineConfig
from lightrft.config.strategy import SamplingConfig
from lightrft.engines import sampling as draws
from lightrft.engines.base import Engine, Fingerprint, never_stop
from lightrft.engines.fingerprint import checksum, dtype_of
from lightrft.engines.vllm_parts.row_formats import ROW_FORMATS
from lightrft.models.actor import Actor
from lightrft.models.attention.layout_check import check_layout
from lightrft.models.multimodal.merge_inputs import media_token_ids
from lightrft.models.sampled_distribution import Distribution, steps_of
from lightrft.observability.metrics import Mean, Metrics
from lightrft.roles import Roles
from lightrft.types import Batch, Prompt, Request, Rollout, Segments
from lightrft.utils.errors import ModelError

ROWS = 4
"""Number of responses of a batch that are compared."""

ROUNDING = {
    torch.float8_e4m3fn: 2**-4,
    torch.int8: 2**-5,
    torch.bfloat16: 2**-8,
    torch.float16: 2**-11,
    torch.float32: 2**-11,
    torch.float64: 2**-11,
}
"""Unit roundoff of a layer's output, by dtype.

Float32 matmuls may use TF32, and the engine reports float32 in any case.

The step of an INT8 row is its largest value divided by 127. The rms of its rounding errors is the
step divided by the square root of 12. It is below 2^-5 of the rms of the row if the largest value
is below 13.7 times that rms.
"""

EIGHT_BITS = tuple(row_format.dtype for row_format in ROW_FORMATS.values())
"""Types of the weights that ``engine.quantization`` samples from."""
COARSE = (*EIGHT_BITS, torch.bfloat16, torch.float16)
"""Types in which the mean difference counts."""
REMOVED = 0.05
"""Fraction of tokens, rounded up, that the trainer's filter may remove by rounding alone."""


def coarsest(dtype: torch.dtype, engine: EngineConfig | None) -> torch.dtype:
    """Return the coarser of ``dtype`` and the type of the weights that ``engine`` samples from."""
    quantization = None if engine is None else engine.quantization
    return dtype if quantization is None else ROW_FORMATS[quantization].dtype


def gap_bound(
    dtype: torch.dtype, layers: int, spread: float = 1.0, temperature: float = 1.0
) -> float:
    """Return the difference in nats that rounding explains in a model of ``layers`` layers.

    The residual stream is a sum of ``2 * layers`` outputs and the embedding. Each is rounded by
    ``ROUNDING[dtype]``. The rounding errors are independent, so the errors add up to the square
    root of their number. The engine and the trainer both round, which doubles the bound. That is
    the error of a state relative to its size. A logit is a product with the state, so its error
    relative to the deviation of the logits is the same. The temperature divides logit and error.

    Args:
        dtype: Coarsest type of states and weights.
        layers: Number of layers.
        spread: Standard deviation of the logits over the vocabulary. A deviation below 1 counts as
            1, since the sums of a softmax round too.
        temperature: Divisor of the logits.
    """
    return 2 * ROUNDING[dtype] * math.sqrt(2 * layers + 1) * max(1.0, spread) / temperature


@dataclass(slots=True)
class LogprobComparison:
    """Sampled tokens with the log-probs of trainer and engine.

    Attributes:
        logits: ``[n, V]``. The trainer's logits.
        tokens: ``[n]``. The sampled tokens.
        reported: ``[n]``. The engine's log-probs of the tokens.
        greedy: ``[n]`` bool. The token was the most likely one.
        seen: ``[n, V]`` bool. Tokens before each token, for the repetition penalty. ``None``
            without a penalty.
        dtype: The coarsest type of states and weights during a call.
        first: ``[n]`` bool. The token is the first of its response. ``None`` if none is.
        banned: ``[n, V]`` bool. Tokens that a constraint did not allow. ``None`` without one.
        before: ``[n]``. Log-probs of the tokens under older weights, NaN where there are none.
            ``None`` if there are none at all.
    """

    logits: Tensor
    tokens: Tensor
    reported: Tensor
    greedy: Tensor
    seen: Tensor | None
    dtype: torch.dtype
    first: Tensor | None = None
    banned: Tensor | None = None
    before: Tensor | None = None

    def gap(self, sampling: SamplingConfig) -> float:
        """Return the difference in nats if the engine sampled by ``sampling``.

        It is the largest difference, or the mean in half precision, FP8 and INT8. The difference
        of a greedy token is the distance of its logit from the largest logit.
        """
        likeliest = sampling.model_copy(update={"temperature": 0.0})
        gaps = torch.empty_like(self.reported)
        first = torch.zeros_like(self.greedy)
        if self.first is not None and sampling.first_token_temperature is not None:
            first = self.first & ~self.greedy
        kinds = (
            (self.greedy, likeliest),
            (first, draws.of_first_token(sampling)),
            (~(self.greedy | first), sampling),
        )
        for where, settings in kinds:
            seen = None
            if self.seen is not None and settings.repetition_penalty != 1:
                seen = self.seen[where]
            banned = None if self.banned is None else self.banned[where]
            logits = draws.process(self.logits[where], settings, seen, banned)
            chosen = logits.gather(1, self.tokens[where, None])[:, 0]
            if settings.temperature == 0:
                gaps[where] = logits.amax(-1) - chosen
            else:
                gaps[where] = (chosen - logits.logsumexp(-1) - self.reported[where]).abs()
        # A token at the border of ``top_p`` may be inside for the engine and outside here.
        removed = gaps.isinf()
        if int(removed.sum()) <= math.ceil(REMOVED * len(gaps)):
            gaps = gaps[~removed]
        return self._summed_up(gaps)

    def bound(self, layers: int, sampling: SamplingConfig) -> float:
        """Return the difference in nats that rounding explains if the engine sampled by
        ``sampling``.

        Args:
            layers: Number of layers of the model.
            sampling: The sampling settings.
        """
        divisors = [sampling.temperature or 1.0]
        if bool(self.greedy.all()):
            divisors = [1.0]
        elif self.first is not None and sampling.first_token_temperature is not None:
            divisors.append(sampling.first_token_temperature)
        sampled = self.logits[:, ~self.logits.isneginf().any(0)]
        spread = float(sampled.std(-1).mean()) if len(sampled) else 1.0
        return gap_bound(self.dtype, layers, spread, min(divisors))

    def after_first(self) -> LogprobComparison | None:
        """Return the tokens after the first of their responses, or ``None`` if all are first."""
        if self.first is None or bool(self.first.all()):
            return None
        later = ~self.first
        picked: dict[str, Tensor | None] = {}
        for name in ("logits", "tokens", "reported", "greedy", "seen", "banned", "before"):
            values = getattr(self, name)
            picked[name] = None if values is None else values[later]
        return replace(self, first=None, **picked)

    def is_of_older_weights(self, bound: float) -> bool:
        """Return whether the reported log-probs match older weights within ``bound``."""
        if self.before is None:
            return False
        unknown = self.before.isnan()
        if bool(unknown.all()):
            return False
        return self._summed_up((self.before - self.reported)[~unknown].abs()) <= bound

    def _summed_up(self, gaps: Tensor) -> float:
        if not len(gaps):
            return 0.0
        return float(gaps.mean() if self.dtype in COARSE else gaps.max())


AllowedTokens = Callable[[list[int], list[int], int], Tensor]
"""Returns ``[n, V]`` bool, the tokens that constraints allowed. Its arguments are the response and
the step of each place, and V."""


@torch.no_grad()
def compare_logprobs(
    actor: Actor,
    batch: Batch,
    sampling: SamplingConfig,
    version: int | None,
    allowed: AllowedTokens | None = None,
    engine: EngineConfig | None = None,
) -> LogprobComparison | None:
    """Score a few tokens of ``batch`` that policy ``version`` sampled.

    The logits of all compared tokens fit into ``model.logits_mb``.

    Args:
        actor: The trainer's model.
        batch: Has ``behavior_logprobs [N]``.
        sampling: The sampling settings.
        version: Version of the policy. ``None`` accepts any version.
        allowed: Finds the tokens that constraints allowed. ``None`` without constraints.
        engine: The settings ``engine``. ``None`` for an engine that quantizes nothing.

    Returns:
        The tokens with both log-probs, or ``None`` if there is no such token.
    """
    rows = _few_rows(batch, _comparable(batch, sampling, version))
    if rows is None:
        return None
    few = batch.select(rows).to(actor.device)
    places = _comparable(few, sampling, version).nonzero()[:, 0]
    chosen = torch.linspace(0, len(places) - 1, min(len(places), room(actor))).round().long()
    places = places[chosen.to(places.device)]
    logits, dtype = logits_at(actor, few, places)
    assert few.behavior_logprobs is not None
    steps = steps_of(few)[places]
    first = steps == 0
    greedy = torch.full_like(places, sampling.temperature == 0, dtype=torch.bool)
    if sampling.first_token_temperature is not None:
        greedy &= ~first
    sums = torch.zeros(len(few), device=places.device).index_add_(
        0, few.row_of, few.behavior_logprobs.abs().float()
    )
    # Log-probs of exactly 0 throughout a response come from a point mass, as of greedy sampling.
    greedy |= sums[few.row_of[places]] == 0
    seen = seen_before(few, places, logits.shape[1]) if sampling.repetition_penalty != 1 else None
    tokens, reported = few.responses.tokens[places], few.behavior_logprobs[places].float()
    banned = None
    if allowed is not None:
        of = rows[few.row_of[places].cpu()].tolist()
        banned = ~allowed(of, steps.tolist(), logits.shape[1]).to(places.device)
    dtype = coarsest(dtype, engine)
    return LogprobComparison(logits, tokens, reported, greedy, seen, dtype, first, banned)


def room(actor: Actor) -> int:
    """Return the number of tokens whose logits fit into ``model.logits_mb``."""
    limit = actor.config.logits_limit(actor.base.device.type)
    return max(2, limit * 2**20 // (4 * actor.text_config.vocab_size))


@torch.no_grad()
def logits_at(actor: Actor, batch: Batch, places: Tensor) -> tuple[Tensor, torch.dtype]:
    """Compute the logits of some response tokens.

    Args:
        actor: The trainer's model.
        batch: The batch.
        places: ``[n]`` long. Indices of the response tokens.

    Returns:
        The logits ``[n, V]`` in float32, minus infinity for tokens that are never sampled, and the
        coarsest type used to compute them.
    """
    training = actor.training
    actor.eval()
    try:
        states = actor(batch, states_alone=True)
        logits = actor.logits(states[places]).float()
        banned = torch.tensor(media_token_ids(actor.base.config, actor.family), dtype=torch.long)
        logits = logits.index_fill(1, banned.to(logits.device), -torch.inf)
    finally:
        actor.train(training)
    # Sharded weights are float32 outside of a call, whatever the call computes in.
    kinds = {p.dtype for p in actor.model.parameters() if p.dtype in ROUNDING}
    kinds |= {states.dtype, torch.float32}
    # Float16 and float32 have the same roundoff, and only one of them is coarse.
    return logits, max(kinds, key=lambda kind: (ROUNDING[kind], kind in COARSE))


def _comparable(batch: Batch, sampling: SamplingConfig, version: int | None) -> Tensor:
    """Return a mask ``[N]`` of tokens sampled by ``version`` with no end token suppressed."""
    chosen = batch.mask & (steps_of(batch) >= sampling.min_new_tokens)
    if version is not None and batch.versions is not None:
        chosen = chosen & (batch.versions == version)
    return chosen


def _few(batch: Batch, comparable: Tensor) -> Batch | None:
    """Return the responses of ``_few_rows``."""
    rows = _few_rows(batch, comparable)
    return None if rows is None else batch.select(rows)


def _few_rows(batch: Batch, comparable: Tensor) -> Tensor | None:
    """Return the longest row with comparable tokens, and others spread over the batch, sorted."""
    counts = torch.zeros_like(batch.lengths).index_add_(0, batch.row_of, comparable.long())
    rows = counts.nonzero()[:, 0]
    if not len(rows):
        return None
    longest = rows[(batch.lengths + batch.prompts.lengths[batch.prompt_of])[rows].argmax()]
    others = rows[torch.linspace(0, len(rows) - 1, min(ROWS - 1, len(rows))).round().long()]
    return torch.unique(torch.cat([longest[None], others]))


def seen_before(batch: Batch, places: Tensor, vocabulary: int) -> Tensor:
    """Return a mask ``[n, V]`` of the prompt and response tokens before each of ``places``.

    Args:
        batch: The batch.
        places: ``[n]`` long. Indices of response tokens.
        vocabulary: Size of the vocabulary, V.
    """
    seen = torch.zeros(len(places), vocabulary, dtype=torch.bool, device=places.device)
    prompts = batch.prompts.tokens.split(batch.prompts.lengths.tolist())
    starts = batch.lengths.cumsum(0) - batch.lengths
    for row, place, of in zip(seen, places.tolist(), batch.row_of[places].tolist()):
        row[prompts[int(batch.prompt_of[of])]] = True
        earlier = batch.responses.tokens[int(starts[of]) : place]
        row[earlier] = True
    return seen


@dataclass(frozen=True, slots=True)
class Agreement:
    """Result of a comparison.

    Attributes:
        gap: Difference of the log-probs in nats.
        bound: Difference that rounding in ``dtype`` explains.
        tokens: Number of compared tokens.
        dtype: Type of the computation.
        cause: Cause of a gap beyond the bound; empty otherwise.
    """

    gap: float
    bound: float
    tokens: int
    dtype: str
    cause: str = ""

    def __str__(self) -> str:
        gap = f"the engine's log-probs differ from the trainer's by {self.gap:.3g} nats"
        bound = f"rounding in {self.dtype} explains {self.bound:.2g}"
        text = f"{gap} on {self.tokens} tokens it sampled; {bound}"
        return f"{text}. {self.cause}" if self.cause else text


def agreement(
    actor: Actor,
    found: LogprobComparison,
    sampling: SamplingConfig,
    unequal: Callable[[], str] | None,
    served: str = "",
) -> Agreement:
    """Return the difference between the log-probs of engine and trainer, and its cause.

    Args:
        actor: The trainer's model.
        found: The compared tokens.
        sampling: The sampling settings.
        unequal: Returns the name of a parameter that differs between engine and trainer, or an
            empty string. ``None`` for an engine that shares the trainer's weights.
        served: Address of a server that was sent no weights. Empty for other engines.

    Returns:
        The result; its cause is empty if rounding explains the difference.
    """
    bound = found.bound(actor.text_config.num_hidden_layers, sampling)
    gap = found.gap(sampling)
    # Not ``gap > bound``: a NaN gap must count as a difference.
    cause = "" if gap <= bound else _cause(actor, found, sampling, bound, unequal, served)
    dtype = str(found.dtype).removeprefix("torch.")
    return Agreement(gap, bound, len(found.tokens), dtype, cause)


def refuse_gap(
    actor: Actor,
    found: LogprobComparison | None,
    sampling: SamplingConfig,
    unequal: Callable[[], str] | None,
    when: str = "",
    served: str = "",
) -> None:
    """Raise ``ModelError`` with the cause if the log-probs differ by more than ``gap_bound``.

    Args:
        actor: The trainer's model.
        found: The compared tokens. ``None`` checks nothing.
        sampling: The sampling settings.
        unequal: See ``agreement``.
        when: Start of the error message.
        served: See ``agreement``.
    """
    if found is None:
        return
    result = agreement(actor, found, sampling, unequal, served)
    if result.cause:
        raise ModelError(f"{when}{result} (engine.check_logprobs=false turns this comparison off)")


def _cause(
    actor: Actor,
    found: LogprobComparison,
    sampling: SamplingConfig,
    bound: float,
    unequal: Callable[[], str] | None,
    served: str,
) -> str:
    name = unequal() if unequal is not None else ""
    if name:
        return f"Cause: weights were not transferred, the engine holds another {name!r}."
    if found.is_of_older_weights(bound):
        hides = "whatever its fingerprint says"
        return (
            "Cause: weights were not transferred, the engine gives the log-probs of older ones, "
            f"{hides}."
        )
    layers = actor.text_config.num_hidden_layers
    for words, variant in _variants(sampling):
        if found.gap(variant) <= found.bound(layers, variant):
            return f"Cause: the engine sampled {words}, and the settings say {_said(sampling)}."
    later = found.after_first()
    if later is not None and later.gap(sampling) <= bound:
        return (
            "Cause: only the first token of a response differs, so the engine samples it in "
            "another way, as a server does that has a sampling.first_token_temperature of its own; "
            "leave it out there."
        )
    kind = actor.base.config.model_type
    same = "temperature and filters are the same. Cause: the engine"
    decodes = f"decodes model type {kind!r} in another way than it is trained."
    if served:
        return (
            f"Cause: {served} serves other weights than model.path = {actor.config.path!r}, or "
            f"{decodes} Serve the model of model.path; lightrft merge writes adapters as one."
        )
    if unequal is None:
        return f"Weights, {same} {decodes}"
    if found.dtype in EIGHT_BITS:
        coarse = "or the inputs of its layers lose more in 8 bits than in most models"
        return (
            f"The 8-bit weights, {same} {decodes.removesuffix('.')}, {coarse}: leave out "
            "engine.quantization, or set another one."
        )
    other = "computes with weights that differ from its fingerprint"
    return f"The fingerprint of the weights, {same} {other}, or {decodes}"


def _variants(sampling: SamplingConfig) -> Iterator[tuple[str, SamplingConfig]]:
    """Yield sampling settings that an engine could have used instead, with a description."""
    open_ = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    temperature = {"temperature": 1.0}
    same_first = {"first_token_temperature": None}
    for words, other in (
        ("at temperature 1", temperature),
        ("the first token at the temperature of the others", same_first),
        ("without the filters", open_),
        ("at temperature 1 without the filters", open_ | temperature),
        ("at half the temperature", {"temperature": sampling.temperature / 2}),
        ("at twice the temperature", {"temperature": sampling.temperature * 2}),
    ):
        variant = sampling.model_copy(update=other)
        if variant != sampling:
            yield words, variant


def _said(sampling: SamplingConfig) -> str:
    names = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty"]
    if sampling.first_token_temperature is not None:
        names.insert(1, "first_token_temperature")
    return ", ".join(f"{name} {getattr(sampling, name)}" for name in names)


def unequal_weight(found: Fingerprint, given: Iterable[tuple[str, Tensor]]) -> str:
    """Return the first parameter of ``given`` that differs from the fingerprint ``found``, or "".

    The comparison uses the engine's dtype, which may differ from the given one.
    """
    different = ""
    for name, tensor in given:  # never stop early: gathering each tensor is a collective call
        if different or name not in found:
            continue
        if checksum(tensor.to(dtype_of(found[name]))) != found[name]:
            different = name
    return different


def refuse_weights(found: Fingerprint, given: Mapping[str, Tensor], version: int) -> None:
    """Raise ``ModelError`` if an engine has other weights than it received.

    Args:
        found: Fingerprint of the engine.
        given: The weights it received.
        version: Their version.
    """
    if name := unequal_weight(found, given.items()):
        raise ModelError(
            f"weights of version {version} were not transferred: the engine holds another "
            f"{name!r} than the trainer"
        )


def check_batch(
    roles: Roles, batch: Batch, sampling: SamplingConfig, engine: EngineConfig, version: int
) -> None:
    """Compare log-probs on the first batch of a run.

    For an engine with separate weights, compare them on every batch. Every rank must call it with
    the same ``batch``, and gets the same result.

    Args:
        roles: The models and the engine.
        batch: The batch of the step.
        sampling: The sampling settings.
        engine: The settings ``engine``.
        version: Version of the policy.

    Raises:
        ModelError: With the cause, if the log-probs differ.
    """
    if not engine.check_logprobs or not len(batch):
        return
    # Shared weights cannot go out of step later.
    if roles.logprobs_checked and roles.engine.shares_weights:
        return
    with roles.strategy.gathered(roles.actor):
        found = compare_logprobs(roles.actor, batch, sampling, version, engine=engine)
    if found is None:
        return

    def unequal() -> str:
        return unequal_weight(roles.engine_fingerprint, roles.weights())

    refuse_gap(roles.actor, found, sampling, None if roles.engine.shares_weights else unequal)
    roles.logprobs_checked = True


@torch.no_grad()
def replay_metrics(roles: Roles, batch: Batch, temperature: Distribution) -> Metrics:
    """Measure on a few rows what a replay of experts changes. Every rank must call it.

    Args:
        roles: The policy.
        batch: Has ``behavior_logprobs [N]``.
        temperature: Divisor of the logits, or the distribution with filters.

    Returns:
        The mean difference of the log-probs of engine and trainer, with the replay and without it.
        Without a replay, there are no metrics.
    """
    metrics = Metrics()
    few = _few(batch, batch.mask) if batch.responses.experts is not None else None
    if few is None or few.behavior_logprobs is None:
        return metrics
    actor = roles.actor
    free = replace(
        few,
        prompts=replace(few.prompts, experts=None),
        responses=replace(few.responses, experts=None),
    )
    training = actor.training
    actor.eval()
    for name, rows in (("", few), ("_no_replay", free)):
        found = actor.score(rows, temperature=temperature).logprobs
        reported = few.behavior_logprobs.to(found.device)
        gaps = (found - reported).abs()
        metrics.add(f"replay/logprob_diff{name}", Mean.of(gaps, few.mask.to(gaps.device)))
    actor.train(training)
    return metrics


@dataclass(slots=True)
class CheckedEngine(Engine):
    """An engine over the weights of ``actor`` that checks its first responses.

    Their log-probs are compared with a forward pass of the model.

    Attributes:
        was_sent: A server at ``engine.url`` was sent the weights of ``actor``.
    """

    engine: Engine
    actor: Actor
    config: EngineConfig
    shared_by_all_ranks: bool = field(init=False)
    tensor_parallel_size: int = field(init=False)
    shares_weights: bool = field(init=False)
    checked: bool = False
    was_sent: bool = False

    def __post_init__(self) -> None:
        self.shared_by_all_ranks = self.engine.shared_by_all_ranks
        self.tensor_parallel_size = self.engine.tensor_parallel_size
        self.shares_weights = self.engine.shares_weights

    def generate(
        self,
        requests: Iterable[Request],
        sampling: SamplingConfig,
        stopped: Callable[[], bool] = never_stop,
    ) -> Iterator[Rollout]:
        """Generate responses. See ``Engine.generate``.

        Args:
            requests: The requests.
            sampling: The sampling settings.
            stopped: Returns true when generation must stop.

        Raises:
            ModelError: Before the first response, if the log-probs differ.
        """
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
        batch = batch_of(rollouts)
        # Empty responses prove nothing, so check the next ones.
        self.checked = bool(batch.tokens)
        if not batch.tokens:
            return
        if self.actor.config.check_layout:
            check_layout(self.actor, batch.to(self.actor.device))
        allowed = None
        if sampling.constraint is not None:
            allowed = self.engine.constrained_tokens(rollouts, sampling)
        at = None if allowed is None else allowed.at
        found = compare_logprobs(self.actor, batch, sampling, None, at, self.config)
        served = "" if self.was_sent else self.config.url or ""
        refuse_gap(self.actor, found, sampling, None, served=served)


def batch_of(rollouts: Sequence[Rollout]) -> Batch:
    """Collate responses without rewards. Responses with the same prompt object share the prompt."""
    place: dict[int, int] = {}
    prompts: list[Prompt] = []
    prompt_of: list[int] = []
    sampled: list[bool] = []
    logprobs: list[float] = []
    versions: list[int] = []
    for rollout in rollouts:
        prompt = rollout.prompt
        if id(prompt) not in place:
            place[id(prompt)] = len(prompts)
            prompts.append(prompt)
        prompt_of.append(place[id(prompt)])
        sampled += rollout.sampled
        logprobs += rollout.logprobs
        versions += rollout.versions
    return Batch(
        Segments.of_prompts(prompts),
        Segments.of([rollout.token_ids for rollout in rollouts]),
        torch.tensor(prompt_of),
        sampled=torch.tensor(sampled, dtype=torch.bool),
        behavior_logprobs=torch.tensor(logprobs),
        versions=torch.tensor(versions, dtype=torch.long),
    )
