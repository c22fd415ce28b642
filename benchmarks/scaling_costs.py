"""What a phase of a step costs at least, from sizes and speeds alone: the formulas of ``docs/scaling.md``.

A roofline: the larger of arithmetic over speed and bytes over bandwidth. Seconds, bytes, FLOPs and tokens throughout; nothing here is
measured. ``Machine.compute`` and ``Machine.reach`` say which share of the data sheet's figures is taken to be reached.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Model:
    """A dense decoder. ``queries`` and ``keys``: heads times head size. ``width`` in bytes of a weight, and of a cached key or value."""

    name: str
    parameters: float
    layers: int
    hidden: int
    queries: int
    keys: int
    width: int = 2

    @property
    def weight_bytes(self) -> float:
        return self.parameters * self.width

    @property
    def cache_bytes(self) -> float:
        """Keys and values of one token."""
        return 2.0 * self.layers * self.keys * self.width

    def forward_flops(self, tokens: float, seen: float) -> float:
        """``seen``: pairs of a token and one that it attends to, over all ``tokens``."""
        return 2.0 * self.parameters * tokens + 4.0 * self.layers * self.queries * seen


@dataclass(frozen=True)
class Machine:
    """One GPU and its links, each in one direction. ``lane``: its share of its node's network, ``node`` GPUs to a node.
    ``front``: the network that plain data takes. ``hop``: seconds of one link of a ring."""

    name: str
    flops: float
    bandwidth: float
    memory: float
    inside: float
    lane: float
    front: float = 12.5e9
    node: int = 8
    compute: float = 0.4
    reach: float = 0.7
    hop: float = 3e-6

    @property
    def speed(self) -> float:
        return self.flops * self.compute

    @property
    def stream(self) -> float:
        return self.bandwidth * self.reach

    def bus(self, ranks: int) -> float:
        """Bytes a second that a ring over ``ranks`` moves at each of its members: it leaves a node through all of its network cards."""
        return self.inside if ranks <= self.node else min(self.inside, self.node * self.lane)


H100 = Machine("H100", 989e12, 3.35e12, 80e9, 450e9, 50e9)
H20 = Machine("H20", 148e12, 4.0e12, 96e9, 450e9, 50e9)
MACHINES = {"h100": H100, "h20": H20}

MODELS = {
    "1.5b": Model("Qwen2.5-1.5B", 1.54e9, 28, 1536, 1536, 256),
    "7b": Model("Qwen2.5-7B", 7.62e9, 28, 3584, 3584, 512),
    "8b": Model("Llama-3.1-8B", 8.03e9, 32, 4096, 4096, 1024),
    "32b": Model("Qwen3-32B", 32.8e9, 64, 5120, 8192, 1024),
    "70b": Model("Llama-3.1-70B", 70.6e9, 80, 8192, 8192, 1024),
    "405b": Model("Llama-3.1-405B", 405e9, 126, 16384, 16384, 1024),
}


def prefill(model: Model, machine: Machine, tokens: float, cut: int = 1) -> float:
    """Seconds to read a prompt of ``tokens`` on ``cut`` GPUs that share each product (tensor parallel)."""
    return (
        max(
            model.forward_flops(tokens, tokens * tokens / 2) / machine.speed,
            model.weight_bytes / machine.stream,
        )
        / cut
    )


@dataclass(frozen=True)
class Decode:
    """Seconds of one decoding step of ``rows`` answers whose contexts have ``context`` tokens in all: the larger of the two lines
    ``(a + b * rows) + c * context``. ``overhead``: what each step takes besides, such as launches and exchanges."""

    flops_row: float
    flops_token: float
    weights: float
    cache_token: float
    overhead: float = 0.0

    @classmethod
    def of(cls, model: Model, machine: Machine, cut: int = 1) -> Decode:
        # Sums in two places of a layer.
        exchange = 0.0 if cut == 1 else 2 * model.layers * 2 * (cut - 1) * machine.hop
        return cls(
            2.0 * model.parameters / (machine.speed * cut),
            4.0 * model.layers * model.queries / (machine.speed * cut),
            model.weight_bytes / (machine.stream * cut),
            model.cache_bytes / (machine.stream * cut),
            exchange,
        )

    def seconds(self, rows: float, context: float) -> float:
        compute = self.flops_row * rows + self.flops_token * context
        return max(compute, self.weights + self.cache_token * context) + self.overhead

    def span(self, rows: int, context: float, steps: int) -> float:
        """Seconds of ``steps`` in a row, while no answer ends or begins: each makes every context one token longer. Exact."""
        if steps <= 0 or rows == 0:
            return 0.0
        compute = (self.flops_row * rows + self.flops_token * context, self.flops_token * rows)
        memory = (self.weights + self.cache_token * context, self.cache_token * rows)
        over = lambda line, n: line[0] * n + line[1] * n * (n - 1) / 2  # noqa: E731
        gap, slope = compute[0] - memory[0], compute[1] - memory[1]
        if gap * (gap + slope * (steps - 1)) >= 0:  # the same line is the higher one all along
            return max(over(compute, steps), over(memory, steps)) + self.overhead * steps
        turn = min(steps, math.floor(-gap / slope) + 1)  # steps before the other line is
        first, second = (compute, memory) if gap > 0 else (memory, compute)
        return over(first, turn) + over(second, steps) - over(second, turn) + self.overhead * steps


def enough_rows(model: Model, machine: Machine, context: float) -> float:
    """Answers at a time from which on a decoding step with contexts of ``context`` tokens is bound by arithmetic; infinite where no
    number is enough, since each answer brings more bytes of cache than it brings arithmetic."""
    gain = (2 * model.parameters + 4 * model.layers * model.queries * context) / machine.speed
    gain -= model.cache_bytes * context / machine.stream
    return model.weight_bytes / machine.stream / gain if gain > 0 else math.inf


def longest_bound_by_arithmetic(model: Model, machine: Machine) -> float:
    """Tokens of context beyond which decoding is bound by bandwidth however many answers are drawn at a time."""
    more = model.cache_bytes / machine.stream - 4 * model.layers * model.queries / machine.speed
    return 2 * model.parameters / machine.speed / more if more > 0 else math.inf


def rows_that_fit(
    model: Model, machine: Machine, context: float, cut: int = 1, used: float = 0.9
) -> int:
    """Answers whose caches fit beside whole weights on ``cut`` GPUs, 0 where the weights do not."""
    return max(
        0, int((used * machine.memory * cut - model.weight_bytes) / (model.cache_bytes * context))
    )


def gathered(model: Model, machine: Machine, ranks: int, width: float | None = None) -> float:
    """Seconds to gather all weights on each of ``ranks`` (or to sum and scatter as many numbers of ``width`` bytes), block by block."""
    if ranks == 1:
        return 0.0
    size = model.parameters * (model.width if width is None else width)
    nodes = math.ceil(ranks / machine.node)
    return size * (ranks - 1) / ranks / machine.bus(ranks) + model.layers * machine.hop * (
        min(ranks, machine.node) - 1 + nodes - 1
    )


def hiding_tokens(model: Model, machine: Machine, ranks: int) -> float:
    """Tokens of a micro-batch on a rank whose forward takes as long as the gathering of the weights meanwhile."""
    return gathered(model, machine, ranks) * machine.speed / (2 * model.parameters)


@dataclass(frozen=True)
class Passes:
    """Forwards of a batch beside the update's own, and whether the update computes activations twice to keep fewer."""

    scored: int = 1
    checkpointing: bool = True
    steps: int = 1
    """Optimizer steps of a batch."""


def train(
    model: Model,
    machine: Machine,
    ranks: int,
    tokens: float,
    seen: float,
    budget: float = 16384,
    passes: Passes = Passes(),
) -> dict[str, float]:
    """Seconds of ``tokens`` (``seen``: attended pairs) spread evenly over ``ranks`` with fully sharded weights: ``scored`` (log-probs of
    old policy and reference), ``update``, and the share of each that waits for weights on the network (``exposed``)."""
    parts = max(1, math.ceil(tokens / ranks / budget))  # micro-batches of a rank
    forward = model.forward_flops(tokens, seen) / machine.speed / ranks
    gather = gathered(model, machine, ranks) * max(parts, passes.steps)
    # Float32 sums, with each micro-batch.
    scatter = gathered(model, machine, ranks, 4) * max(parts, passes.steps)
    back = forward * (3 if passes.checkpointing else 2)
    scored = passes.scored * max(forward, gather)
    update = max(forward, gather) + max(back, gather + scatter)
    return {
        "scored": scored,
        "update": update,
        "exposed": scored + update - (passes.scored + 1) * forward - back,
    }


def train_memory(model: Model, ranks: int) -> dict[str, float]:
    """Bytes on a rank: its shard of weights, float32 masters, two moments and the sum of gradients, and what is whole meanwhile."""
    return {
        "state": model.parameters * (model.width + 4 + 8 + 4) / ranks,
        "two blocks": 2 * model.weight_bytes / model.layers,
    }


def exchange(
    machine: Machine, ranks: int, tokens: float, per_token: float, uneven: float = 1.0
) -> float:
    """Seconds to tell all ranks all rollouts over the network of plain data: around a ring every link carries everything once, each
    rank's part padded to that of the fullest (``uneven`` times the mean)."""
    return 0.0 if ranks == 1 else tokens * per_token * uneven * (ranks - 1) / ranks / machine.front
