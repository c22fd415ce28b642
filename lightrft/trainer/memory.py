"""What a run needs in memory, as formulas: bytes of each model, of the cache, and of a device over the phases of a step.

Bytes that only a call of a model can tell (activations, gradients) are measured on the meta device, in ``tracing``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

MASTER, MOMENT = 4, 4
"""Bytes of a float32 master weight, and of each of the two moments of AdamW."""
QUANTISED = 0.516
"""Bytes of a weight in 4 bit with double quantisation: 4 bits, and 8 bits of scale for each 64 weights (arXiv 2305.14314, section 3)."""
LAZY = 2
"""Blocks of a sharded model that are whole at one time: the one that runs, and the one that is fetched meanwhile."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameters of a kind: how many, bytes of each, and whether they are trained."""

    count: int
    itemsize: float
    trained: bool


@dataclass(frozen=True, slots=True)
class Shares:
    """Over how many ranks each part of a model is spread: weights, masters with moments, gradients of an optimizer step.

    ``cut``: over how many of them each layer is cut, so that none ever holds it whole. ``copied``: float32 weights have masters apart
    from them. ``summed_whole``: gradients of several micro-batches are summed whole before
    they are spread. ``bucket``: bytes in which gradients are collected on their way. ``state_away``: masters and moments are elsewhere.
    """

    weights: int = 1
    state: int = 1
    gradients: int = 1
    cut: int = 1
    copied: bool = False
    summed_whole: bool = False
    bucket: float = 0.0
    state_away: bool = False


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
    """Bytes that are held beside the models while something is done, part by part; they are gone after it."""

    name: str
    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def held(parameters: Iterable[Parameters], shares: Shares = WHOLE) -> Held:
    """A model on one of the ranks over which ``shares`` spread it.

    weights = sum(count x itemsize); of what is trained: masters = 4 x count unless the parameter is float32 itself (itemsize 4 or
    more) and not copied, moments = 2 x 4 x count (2 x 8 for float64); each divided by its shares.
    """
    weights = masters = moments = 0.0
    for p in parameters:
        weights += p.count * p.itemsize
        if p.trained:
            masters += p.count * MASTER if p.itemsize < MASTER or shares.copied else 0
            moments += 2 * p.count * max(MOMENT, p.itemsize)
    here = 0 if shares.state_away else 1
    return Held(weights / shares.weights, here * masters / shares.state, here * moments / shares.state)


def gradients(trained: int, parts: int, shares: Shares) -> float:
    """Gradients of ``trained`` parameters over ``parts`` micro-batches, in float32: 4 x trained over the shares, over the cut alone where
    those of several micro-batches are summed whole, and the bucket."""
    whole = shares.summed_whole and parts > 1
    return MASTER * trained / (shares.cut if whole else shares.gradients) + shares.bucket


def key_value_cache(tokens: int, widths: Sequence[int], itemsize: int) -> int:
    """Keys and values of ``tokens`` in every layer: tokens x sum over layers of 2 x (key heads x head width) x itemsize.

    ``widths``: key heads x head width of each layer."""
    return tokens * 2 * sum(widths) * itemsize


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
    return tokens * layers * (norms + (3 * queries + 2 * keys + 4 * inner) * itemsize)


def drawing(rows: int, heads: int, columns: int, vocabulary: int) -> int:
    """One token for ``rows`` answers: scores and their softmax, 3 x rows x heads x columns, and logits with what is made of them to draw
    from, 4 x rows x vocabulary; 4 bytes each."""
    return 4 * (3 * rows * heads * columns + 4 * rows * vocabulary)


def layout_check(tokens: int, vocabulary: int, itemsize: int, bound: int) -> int:
    """The logits of as many of ``tokens`` as fit into ``bound`` bytes in float32, two at least: count x vocabulary x (itemsize, and 4 as
    log-probs; in half precision 4 more, for those in float32)."""
    count = min(tokens, max(2, bound // (vocabulary * max(4, itemsize))))
    return count * vocabulary * (itemsize + 4 + (4 if itemsize < 4 else 0))


def made_whole(outside: float, blocks: Sequence[float], itemsize: float, *, trained: bool) -> float:
    """Weights of a sharded model that a rank holds whole while it is called: those ``outside`` of blocks, and the ``LAZY`` largest
    blocks; when it is trained, the gradients of one block in float32 and of what lies outside, besides. In bytes, of sizes in bytes."""
    largest = sorted(blocks, reverse=True)[:LAZY]
    weights = outside + sum(largest)
    gradients = (outside + max(blocks, default=0.0)) * MASTER / itemsize
    return weights + gradients if trained else weights


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
