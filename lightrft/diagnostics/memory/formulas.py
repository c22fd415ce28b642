"""Formulas for the memory of a run: models, key-value cache, and phases of a step, in bytes.

A strategy shards models over processes, and offloads parts of them. Activations and gradients
depend on the model's code. They are measured on the meta device, in ``meta_trace``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lightrft.config.strategy import StrategyConfig
from lightrft.strategy.sharding import BUCKET, bucket_of

MASTER, MOMENT = 4, 4
"""Bytes of a float32 master weight, and of each of the two AdamW moments."""
QUANTISED = 0.516
"""Bytes of a weight in 4 bit with double quantization.

That is 4 bits, plus 8 bits of scale for each 64 weights (arXiv 2305.14314, section 3).
"""
LAZY = 2
"""Number of blocks of a sharded model that are gathered simultaneously: current and prefetched."""
Part = Literal["weights", "state", "gradients"]


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameters of one kind: their number, bytes each, and whether they are trained.

    ``cut`` is True for a layer that tensor-parallel ranks shard.
    """

    count: int
    itemsize: float
    trained: bool
    cut: bool = False


@dataclass(frozen=True, slots=True)
class ShardingFactors:
    """Number of ranks that shard each part of a model.

    ``weights``, ``state`` (masters and moments) and ``gradients`` (of an optimizer step) are these
    numbers. ``cut`` is the number of tensor-parallel ranks, of which none gathers a full layer.
    ``copied``: float32 weights also have separate masters. ``precise``: trained weights are stored
    in float32 only and serve as masters. ``by_blocks``: weights are gathered block by block when
    called. ``kept_between_passes``: fraction of a block's gathered weights that stays on the device
    between forward and backward. ``bucket``: elements of the bucket in which gradients are reduced.
    ``on_host``: parts that are offloaded to CPU memory.
    """

    weights: int = 1
    state: int = 1
    gradients: int = 1
    cut: int = 1
    copied: bool = False
    precise: bool = False
    by_blocks: bool = False
    kept_between_passes: float = 0.0
    bucket: float = 0.0
    on_host: tuple[Part, ...] = ()

    def count(self, p: Parameters) -> float:
        """Return the number of elements of ``p`` on a tensor-parallel rank."""
        return p.count / (self.cut if p.cut else 1)


WHOLE = ShardingFactors()


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """Bytes that one model occupies on a device throughout."""

    weights: float
    masters: float = 0.0
    moments: float = 0.0

    @property
    def total(self) -> float:
        """The sum of weights, masters and moments, in bytes."""
        return self.weights + self.masters + self.moments


@dataclass(frozen=True, slots=True)
class MemoryPhase:
    """Bytes of a phase, part by part, in addition to the models. They are freed afterwards.

    ``resting``: bytes of the models that are offloaded to CPU memory meanwhile.
    """

    name: str
    parts: Mapping[str, float]
    resting: float = 0.0

    @property
    def total(self) -> float:
        """The bytes that the phase adds, minus the offloaded ones."""
        return sum(self.parts.values()) - self.resting


def held(parameters: Iterable[Parameters], shares: ShardingFactors = WHOLE) -> ModelMemory:
    """Return the bytes of a model on one of the ranks that shard it, on the device or offloaded.

    weights = sum(count * itemsize). Trained parameters have masters = 4 * count and moments = 2 * 4
    * count. Moments of float64 take 2 * 8 * count. A parameter in float32 (itemsize 4 or more) has
    no masters unless ``copied``. Each is divided by its shares, and by ``cut`` where the layer is
    cut. With ``precise``, trained weights take at least 4 * count and have no masters.
    """
    weights = masters = moments = 0.0
    for p in parameters:
        here = shares.count(p)
        alone = p.trained and shares.precise
        weights += here * (max(MASTER, p.itemsize) if alone else p.itemsize)
        if not p.trained:
            continue
        is_own_master = alone or p.itemsize >= MASTER
        if shares.copied or not is_own_master:
            masters += here * MASTER
        moments += 2 * here * max(MOMENT, p.itemsize)
    return ModelMemory(weights / shares.weights, masters / shares.state, moments / shares.state)


def on_device(model: ModelMemory, shares: ShardingFactors) -> ModelMemory:
    """Return the bytes of ``model`` that are not offloaded."""
    weights = "weights" not in shares.on_host
    state = "state" not in shares.on_host
    return ModelMemory(model.weights * weights, model.masters * state, model.moments * state)


def gradients(parameters: Iterable[Parameters], shares: ShardingFactors = WHOLE) -> float:
    """Return the bytes of float32 gradients: sum of 4 * count, divided by shares and cut."""
    trained = sum(shares.count(p) for p in parameters if p.trained)
    return MASTER * trained / shares.gradients


def key_value_cache(tokens: int, widths: Sequence[float], itemsize: int) -> float:
    """Return the bytes of keys and values: tokens * sum over layers of 2 * width * itemsize.

    Args:
        tokens: number of cached tokens.
        widths: key heads * head width, of each layer.
        itemsize: bytes of an element.
    """
    return tokens * 2 * sum(widths) * itemsize


def recurrent_states(rows: int, fields: Mapping[str, Any]) -> int:
    """Return the bytes of the recurrent states of ``rows``, if every layer has one.

    - mamba: rows * layers * inner width * state size * 4 bytes.
    - rwkv: rows * layers * 5 * hidden size * 4 bytes.

    Hybrid models are counted as if every layer had both keys and a state. Convolution states are
    ignored: they are a few tokens long.
    """

    def first(*names: str) -> int:
        return next((fields[name] for name in names if fields.get(name)), 0)

    layers = first("num_hidden_layers")
    hidden = first("hidden_size")
    if fields.get("model_type") == "rwkv":
        return rows * layers * 5 * hidden * 4
    size = first("state_size", "mamba_d_state", "ssm_state_size")
    inner = hidden * (first("expand", "mamba_expand") or 2)
    return rows * layers * inner * size * 4


def tokens_held(
    prompts: int,
    samples: int,
    prompt_tokens: int,
    answer_tokens: int,
    budget: int,
    max_rows: int,
) -> tuple[int, int, int]:
    """Return the maximum ``(tokens, rows, prompts)`` that the engine holds.

    rows = min(prompts * samples, max_rows). tokens = ceil(rows / samples) * prompt_tokens + rows *
    answer_tokens. Each prompt is stored once. Rows are reduced until tokens fit into ``budget``, to
    one at least.

    Args:
        prompts: prompts of a step.
        samples: responses per prompt.
        prompt_tokens: length of a prompt.
        answer_tokens: length of a response.
        budget: maximum number of tokens.
        max_rows: maximum number of concurrent responses.
    """

    def slots_of(rows: int) -> int:
        return -(-rows // samples)

    def tokens_of(rows: int) -> int:
        return slots_of(rows) * prompt_tokens + rows * answer_tokens

    rows = min(prompts * samples, max_rows)
    while rows > 1 and tokens_of(rows) > budget:
        rows -= 1
    return tokens_of(rows), rows, slots_of(rows)


def kept_by_blocks(
    tokens: int,
    layers: int,
    itemsize: int,
    *,
    hidden: int,
    queries: int,
    keys: int,
    inner: int,
) -> int:
    """Return the bytes that ``layers`` plain blocks save for the backward pass.

    A plain block has two RMS norms, attention with rotary positions and a gated MLP. It saves these
    elements per token:

    - each norm: 3 * hidden (input, scaled, result). In half precision the input is in float32.
    - attention: 3 * queries (queries, output, and its transposed copy).
    - keys and values: 2 * keys.
    - MLP: 4 * inner (gate, its activation, up, and their product).

    The log-sum-exp of attention is ignored.

    Args:
        tokens: number of tokens.
        layers: number of blocks.
        itemsize: bytes of an element.
        hidden: hidden size.
        queries: query heads * head width.
        keys: key heads * head width.
        inner: width of the MLP.
    """
    norms = tokens * layers * 2 * hidden * (4 + 2 * itemsize)
    widths = {"queries": queries, "keys": keys, "inner": inner}
    return norms + inside_blocks(tokens, layers, itemsize, **widths)


def inside_blocks(
    tokens: int,
    layers: int,
    itemsize: int,
    *,
    queries: int,
    keys: int,
    inner: int,
) -> int:
    """Return the part of ``kept_by_blocks`` that tensor-parallel ranks shard: heads and MLP width.

    Args:
        tokens: number of tokens.
        layers: number of blocks.
        itemsize: bytes of an element.
        queries: query heads * head width.
        keys: key heads * head width.
        inner: width of the MLP.
    """
    return tokens * layers * (3 * queries + 2 * keys + 4 * inner) * itemsize


def generation_phase(rows: int, heads: int, columns: int, vocabulary: int) -> int:
    """Return the bytes to generate one token for ``rows`` responses, at 4 bytes per element.

    Scores and softmax take 3 * rows * heads * columns. Logits and sampling take 4 * rows *
    vocabulary.

    Args:
        rows: number of responses.
        heads: number of attention heads.
        columns: length of the longest row.
        vocabulary: size of the vocabulary.
    """
    return 4 * (3 * rows * heads * columns + 4 * rows * vocabulary)


def layout_check(tokens: int, vocabulary: int, itemsize: int, bound: int) -> int:
    """Return the bytes of logits for the layout check, for as many tokens as fit into ``bound``.

    That is count * vocabulary * (itemsize + 4), where 4 is for log-probs. Half precision adds
    4 * count * vocabulary for a float32 copy. The count is at least 2.

    Args:
        tokens: number of tokens to check.
        vocabulary: size of the vocabulary.
        itemsize: bytes of a logit.
        bound: maximum number of bytes of the logits in float32.
    """
    fitting = bound // (vocabulary * max(4, itemsize))
    count = min(tokens, max(2, fitting))
    copy = 4 if itemsize < 4 else 0
    return count * vocabulary * (itemsize + 4 + copy)


def unsharded_bytes(outside: float, blocks: Sequence[float], left: float = 0.0) -> float:
    """Return the bytes of gathered weights of a sharded model during a call, in the compute dtype.

    These are the weights ``outside`` of blocks and the ``LAZY`` largest blocks. The fraction
    ``left`` of each other block is added.

    Args:
        outside: bytes of weights outside of blocks.
        blocks: bytes of each block.
        left: fraction of a block that stays gathered until its backward pass.
    """
    largest = sorted(blocks, reverse=True)
    return outside + sum(largest[:LAZY]) + left * sum(largest[LAZY:])


def on_their_way(outside: float, blocks: Sequence[float], itemsize: float) -> float:
    """Return the bytes of unsharded gradients during the backward pass of a sharded model.

    These are gradients of weights ``outside`` of blocks, which finish last, and of the largest
    block. The float32 copy of the latter for the reduction is added.

    Args:
        outside: bytes of weights outside of blocks.
        blocks: bytes of each block.
        itemsize: bytes of a weight.
    """
    largest = max(blocks, default=0.0)
    return outside + largest + largest * MASTER / itemsize


def last_sum(outside: float, blocks: Sequence[float], itemsize: float) -> float:
    """Return the unsharded bytes at the end of a backward pass, when activations are freed.

    Gradients of weights ``outside`` of blocks are being reduced. These are weights, gradients and
    their float32 copy, plus the float32 copy of the previous block.

    Args:
        outside: bytes of weights outside of blocks.
        blocks: bytes of each block.
        itemsize: bytes of a weight.
    """
    return 2 * outside + (outside + max(blocks, default=0.0)) * MASTER / itemsize


def collected(trained: float, bucket: float, *, touched: bool) -> float:
    """Return the bytes of a gradient bucket and of the copy that ranks reduce.

    Args:
        trained: number of trained parameters.
        bucket: elements of the bucket.
        touched: True if only the filled part of the bucket uses memory, as on a CPU.
    """
    filled = min(trained, bucket)
    return MASTER * ((filled if touched else bucket) + filled)


def peak(
    models: Mapping[str, ModelMemory], phases: Sequence[MemoryPhase]
) -> tuple[float, MemoryPhase]:
    """Return the maximum memory in bytes, and its phase: all models plus the largest phase."""
    largest = max(phases, key=lambda phase: phase.total)
    return sum(m.total for m in models.values()) + largest.total, largest


UNITS = {
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}


def size_of(text: str) -> int:
    """Parse a size such as ``80GiB`` into bytes. Raises ``ValueError``."""
    size = text.strip()
    for unit, factor in UNITS.items():
        if size.endswith(unit):
            return round(float(size.removesuffix(unit)) * factor)
    raise ValueError(f"{text!r} is not a size; write e.g. 80GiB (units: {', '.join(UNITS)})")


def shown(size: float) -> str:
    """Format ``size``, in bytes, with a unit."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20)):
        if size >= factor:
            return f"{size / factor:.2f} {unit}"
    return f"{size / 2**10:.0f} KiB"


def shares_of(
    strategy: StrategyConfig,
    processes: int,
    kind: str,
    *,
    trained: bool,
    block: int = BUCKET,
) -> ShardingFactors:
    """Return the sharding of a model under ``strategy``.

    Args:
        strategy: settings of the strategy.
        processes: number of processes.
        kind: kind of device. On ``cpu``, device and host share the memory, so nothing is offloaded.
        trained: True for a model that is trained.
        block: number of trained weights of its largest block.
    """
    if processes == 1:
        is_away = strategy.cpu_offload and trained and kind != "cpu"
        # Every trained weight has a master on the host, and a gradient leaves once it is complete.
        return ShardingFactors(copied=True, on_host=("state", "gradients")) if is_away else WHOLE
    if strategy.kind == "deepspeed":
        return _zero(strategy, processes, kind, trained, block)
    return _fsdp(strategy, processes, kind, trained)


def rows_of(strategy: StrategyConfig, processes: int) -> int:
    """Return the number of processes that shard one copy of the weights (HSDP: of one replica).

    Tensor-parallel ranks count once.
    """
    rows = max(1, processes // strategy.tensor_parallel)
    return min(strategy.hsdp_shard_size or rows, rows)


def _fsdp(strategy: StrategyConfig, processes: int, kind: str, trained: bool) -> ShardingFactors:
    """Return the sharding of FSDP2: equal shards, gathered block by block.

    Trained weights are in float32, unless layers are tensor-parallel.
    """
    rows = rows_of(strategy, processes)
    left = 0.0
    # False keeps whole blocks. A number reshards to that many ranks.
    if trained and strategy.reshard_after_forward is not True:
        left = 1 / (strategy.reshard_after_forward or 1)
    away: tuple[Part, ...] = ()
    # On a CPU, host and device share the memory.
    if strategy.cpu_offload and kind != "cpu":
        away = ("weights", "state", "gradients")
    return ShardingFactors(
        rows,
        rows,
        rows,
        cut=strategy.tensor_parallel,
        precise=strategy.tensor_parallel == 1,
        by_blocks=True,
        kept_between_passes=left,
        on_host=away,
    )


def _zero(
    strategy: StrategyConfig,
    processes: int,
    kind: str,
    trained: bool,
    block: int,
) -> ShardingFactors:
    """Return the sharding of ZeRO. Models that are not trained are sharded only in stage 3."""
    stage = strategy.zero_stage
    given = strategy.deepspeed.get("zero_optimization", {})

    def offloaded(what: str) -> bool:
        # On a CPU, host and device share the memory.
        section = given.get(f"offload_{what}") or {}
        return kind != "cpu" and section.get("device", "none") != "none"

    # Stage 1 shards masters and moments, stage 2 gradients too, and stage 3 also weights.
    weights = processes if stage == 3 else 1
    away: list[Part] = []
    if stage == 3 and offloaded("param"):
        away.append("weights")
    if not trained:
        return ShardingFactors(weights, by_blocks=stage == 3, on_host=tuple(away))
    if offloaded("optimizer"):
        away.append("state")
        if stage > 1:
            away.append("gradients")
    return ShardingFactors(
        weights,
        processes,
        processes if stage > 1 else 1,
        copied=stage < 3,
        by_blocks=stage == 3,
        bucket=float(given.get("reduce_bucket_size", bucket_of(block))),
        on_host=tuple(away),
    )
