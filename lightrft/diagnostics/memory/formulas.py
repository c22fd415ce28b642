"""What a run needs in memory, as formulas: bytes of each model, of the cache, and of a device over the phases of a step.

Bytes that only a call of a model can tell (activations, gradients) are measured on the meta device, in ``tracing``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

MASTER, MOMENT = 4, 4
"""Bytes of a float32 master weight, and of each of the two moments of AdamW."""
QUANTISED = 0.516
"""Bytes of a weight in 4 bit with double quantisation: 4 bits, and 8 bits of scale for each 64 weights (arXiv 2305.14314, section 3)."""
LAZY = 2
"""Blocks of a sharded model that are whole at one time: the one that runs, and the one that is fetched meanwhile."""
Part = Literal["weights", "state", "gradients"]


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameters of a kind: how many, bytes of each, whether they are trained, and whether they are of a layer that ranks can share out
    (``cut``)."""

    count: int
    itemsize: float
    trained: bool
    cut: bool = False


@dataclass(frozen=True, slots=True)
class Shares:
    """Over how many ranks each part of a model is spread: weights, masters with moments, gradients of an optimizer step; and over how
    many each layer is ``cut`` besides, so that none of them ever holds it whole.

    ``copied``: float32 weights have masters apart from them. ``precise``: what is trained lies in float32 alone, and is its own master.
    ``by_blocks``: weights are made whole when they are called, block by block; ``left`` is the share of a block that stays there from its
    forward to its backward pass. ``bucket``: elements of the bucket in which gradients are collected on their way. ``away``: what lies in
    the host's memory.
    """

    weights: int = 1
    state: int = 1
    gradients: int = 1
    cut: int = 1
    copied: bool = False
    precise: bool = False
    by_blocks: bool = False
    left: float = 0.0
    bucket: float = 0.0
    away: tuple[Part, ...] = ()


WHOLE = Shares()


@dataclass(frozen=True, slots=True)
class Held:
    """What one model holds on a device from start to end, in bytes."""

    weights: float
    masters: float = 0.0
    moments: float = 0.0

    @property
    def total(self) -> float:
        return self.weights + self.masters + self.moments


@dataclass(frozen=True, slots=True)
class Phase:
    """Bytes that are held beside the models while something is done, part by part; they are gone after it. ``resting``: of the models
    themselves, what is in the host's memory meanwhile."""

    name: str
    parts: Mapping[str, float]
    resting: float = 0.0

    @property
    def total(self) -> float:
        return sum(self.parts.values()) - self.resting


def held(parameters: Iterable[Parameters], shares: Shares = WHOLE) -> Held:
    """A model on one of the ranks over which ``shares`` spread it, wherever that keeps it.

    weights = sum(count x itemsize); of what is trained: masters = 4 x count unless the parameter is float32 itself (itemsize 4 or
    more) and not copied, moments = 2 x 4 x count (2 x 8 for float64); each divided by its shares, and by the cut where it is cut. With
    ``precise`` weights are 4 x count where they are less, and there are no masters.
    """
    weights = masters = moments = 0.0
    for p in parameters:
        here = p.count / (shares.cut if p.cut else 1)
        alone = p.trained and shares.precise
        weights += here * (max(MASTER, p.itemsize) if alone else p.itemsize)
        if p.trained:
            masters += here * MASTER if (p.itemsize < MASTER and not alone) or shares.copied else 0
            moments += 2 * here * max(MOMENT, p.itemsize)
    return Held(weights / shares.weights, masters / shares.state, moments / shares.state)


def on_device(model: Held, shares: Shares) -> Held:
    """Of ``model``, what is not in the host's memory."""
    state = 0 if "state" in shares.away else 1
    return Held(model.weights * ("weights" not in shares.away), model.masters * state, model.moments * state)


def gradients(parameters: Iterable[Parameters], shares: Shares = WHOLE) -> float:
    """Gradients of what is trained in float32, over its shares and its cut: sum of 4 x count."""
    trained = sum(p.count / (shares.cut if p.cut else 1) for p in parameters if p.trained)
    return MASTER * trained / shares.gradients


def key_value_cache(tokens: int, widths: Sequence[int], itemsize: int) -> int:
    """Keys and values of ``tokens`` in every layer: tokens x sum over layers of 2 x (key heads x head width) x itemsize.

    ``widths``: key heads x head width of each layer."""
    return tokens * 2 * sum(widths) * itemsize


def recurrent_states(rows: int, fields: Mapping[str, Any]) -> int:
    """Return the bytes of the recurrent states of ``rows``, where every layer of a config with ``fields`` has one.

    mamba: rows x layers x inner width x state size x 4 bytes; rwkv: rows x layers x 5 x hidden size x 4 bytes. Hybrid models
    are counted as if every layer had both keys and a state. Convolution states are left out: they are a few tokens long.
    """
    layers, hidden = fields.get("num_hidden_layers") or 0, fields.get("hidden_size") or 0
    if fields.get("model_type") == "rwkv":
        return rows * layers * 5 * hidden * 4
    size = fields.get("state_size") or fields.get("mamba_d_state") or fields.get("ssm_state_size") or 0
    inner = hidden * (fields.get("expand") or fields.get("mamba_expand") or 2)
    return rows * layers * inner * size * 4


def tokens_held(
    prompts: int, samples: int, prompt_tokens: int, answer_tokens: int, budget: int, max_rows: int
) -> tuple[int, int, int]:
    """``(tokens, rows, prompts)`` that the engine holds at most: rows = min(prompts x samples, max_rows), each with
    ``answer_tokens``, and each prompt once: tokens = ceil(rows / samples) x prompt_tokens + rows x answer_tokens; as many rows less as
    ``budget`` asks for, but one at least."""
    rows = min(prompts * samples, max_rows)
    while rows > 1 and -(-rows // samples) * prompt_tokens + rows * answer_tokens > budget:
        rows -= 1
    slots = -(-rows // samples)
    return slots * prompt_tokens + rows * answer_tokens, rows, slots


def kept_by_blocks(tokens: int, layers: int, itemsize: int, *, hidden: int, queries: int, keys: int, inner: int) -> int:
    """What ``layers`` plain blocks (two RMS norms, attention with rotary positions, a gated MLP) keep of ``tokens`` for the backward
    pass, the logs of denominators left out. In elements of a token: of each norm its input, what is scaled and the result, 3 x hidden;
    queries, what attention gives and the same in order, 3 x queries; keys and values, 2 x keys; gate, its activation, up and their
    product, 4 x inner. A norm in half precision keeps its input in float32.
    """
    norms = 2 * hidden * (4 + 2 * itemsize)
    return tokens * layers * norms + inside_blocks(tokens, layers, itemsize, queries=queries, keys=keys, inner=inner)


def inside_blocks(tokens: int, layers: int, itemsize: int, *, queries: int, keys: int, inner: int) -> int:
    """Of ``kept_by_blocks``, what ranks that share out layers have a part of each: heads and the inner width."""
    return tokens * layers * (3 * queries + 2 * keys + 4 * inner) * itemsize


def drawing(rows: int, heads: int, columns: int, vocabulary: int) -> int:
    """One token for ``rows`` answers: scores and their softmax, 3 x rows x heads x columns, and logits with what is made of them to draw
    from, 4 x rows x vocabulary; 4 bytes each."""
    return 4 * (3 * rows * heads * columns + 4 * rows * vocabulary)


def layout_check(tokens: int, vocabulary: int, itemsize: int, bound: int) -> int:
    """The logits of as many of ``tokens`` as fit into ``bound`` bytes in float32, two at least: count x vocabulary x (itemsize, and 4 as
    log-probs; in half precision 4 more, for those in float32)."""
    count = min(tokens, max(2, bound // (vocabulary * max(4, itemsize))))
    return count * vocabulary * (itemsize + 4 + (4 if itemsize < 4 else 0))


def made_whole(outside: float, blocks: Sequence[float], left: float = 0.0) -> float:
    """Weights of a sharded model that a rank holds whole while it is called, in the type of the call: those ``outside`` of blocks, the
    ``LAZY`` largest blocks, and of the others what is ``left`` of each until its backward pass."""
    largest = sorted(blocks, reverse=True)
    return outside + sum(largest[:LAZY]) + left * sum(largest[LAZY:])


def on_their_way(outside: float, blocks: Sequence[float], itemsize: float) -> float:
    """Gradients of a sharded model that a rank holds whole in the midst of its backward pass: those of weights ``outside`` of blocks, that
    end last, those of the largest block, and the float32 copy by which ranks sum these. In bytes, of weights in bytes."""
    largest = max(blocks, default=0.0)
    return outside + largest + largest * MASTER / itemsize


def last_sum(outside: float, blocks: Sequence[float], itemsize: float) -> float:
    """What a rank holds whole when a backward pass has come to its end, activations are gone, and gradients of weights ``outside`` of
    blocks are summed: weights, gradients and a float32 copy of these; beside it the copy of the block before."""
    return 2 * outside + (outside + max(blocks, default=0.0)) * MASTER / itemsize


def collected(trained: float, bucket: float, *, touched: bool) -> float:
    """Bytes of a ``bucket`` of elements in which gradients of ``trained`` parameters are collected, and of the copy that ranks sum: of the
    bucket as far as it is filled where memory is there once it is ``touched``, as on a CPU."""
    filled = min(trained, bucket)
    return MASTER * ((filled if touched else bucket) + filled)


def peak(models: Mapping[str, Held], phases: Sequence[Phase]) -> tuple[float, Phase]:
    """The most that is held at one time, and the phase in which it is: all models, and the largest phase."""
    largest = max(phases, key=lambda phase: phase.total)
    return sum(m.total for m in models.values()) + largest.total, largest


UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def size_of(text: str) -> int:
    """Bytes of a size such as ``80GiB``. Raises ``ValueError``."""
    for unit, factor in UNITS.items():
        if text.strip().endswith(unit):
            return round(float(text.strip().removesuffix(unit)) * factor)
    raise ValueError(f"{text!r} is not a size; write e.g. 80GiB (units: {', '.join(UNITS)})")


def shown(size: float) -> str:
    """``size`` in bytes, for people."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20)):
        if size >= factor:
            return f"{size / factor:.2f} {unit}"
    return f"{size / 2**10:.0f} KiB"
