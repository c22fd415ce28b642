"""What limits a step of reinforcement learning on 1 to thousands of GPUs, computed and simulated; ``docs/scaling.md`` explains it.

Seconds here are a model's, not a clock's, except in the section that says so. Runs in under a minute on one core, and gives the same
numbers each time (but for that section).

    python benchmarks/scaling.py [--machine NAME] [--write] [--lengths]
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import pickle
import platform
import sys
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from benchmarks import scaling_costs as costs
from benchmarks import scaling_lengths as lengths_of
from benchmarks.scaling_costs import H20, H100, MODELS, Decode, Machine, Model, Passes
from benchmarks.scaling_sim import (
    Answer,
    Outcome,
    Plan,
    ahead,
    each_ahead,
    partial,
    streaming,
    synchronous,
)
from lightrft.rollout.serialization import pack_rollout, unpack_rollout
from lightrft.types import Prompt, Rollout

RESULTS = Path(__file__).resolve().parent / "results"
REASONING = {"median": 4000.0, "sigma": 0.9, "cap": 32768}
BARS = 40
ONCE = Passes()


@dataclass(frozen=True)
class Case:
    """A run on ``gpus``. ``cut``: GPUs to an engine. ``rows``: the most answers that an engine draws at a time."""

    model: Model
    machine: Machine
    gpus: int
    lengths: np.ndarray
    groups: int
    prompt: int = 256
    cut: int = 1
    rows: int = 256
    steps: int = 10
    passes: Passes = ONCE

    def plan(
        self, drawing: int, training: int, *, shared: bool = True, passes: Passes | None = None
    ) -> Plan:
        """``drawing`` and ``training``: GPUs of each; both may be all."""
        engines = max(1, drawing // self.cut)
        mean = self.prompt + float(self.lengths.mean())
        slots = min(self.rows, costs.rows_that_fit(self.model, self.machine, mean, self.cut))
        if slots < 1:
            raise ValueError(
                f"{self.model.name} does not fit on {self.cut} {self.machine.name} with one "
                f"answer of {mean:.0f} tokens"
            )
        decode = Decode.of(self.model, self.machine, self.cut)
        read = costs.prefill(self.model, self.machine, 4096, self.cut) / 4096
        sync = costs.gathered(self.model, self.machine, max(drawing, 2))

        def train(answers: Sequence[Answer]) -> float:
            whole = [a.prompt + a.length for a in answers]
            tokens: float = sum(a.length for a in answers) + self.prompt * len(
                {a.group for a in answers}
            )
            seen = sum(n * n for n in whole) / 2
            # An answer is one rank's: more ranks than this has nothing to share out.
            fullest = max(1.0, max(whole) * training / tokens)
            tokens, seen = tokens * fullest, seen * fullest
            found = costs.train(
                self.model, self.machine, training, tokens, seen, passes=passes or self.passes
            )
            return found["scored"] + found["update"]

        return Plan(
            decode, read, slots, engines, train, self.groups, self.steps, self.prompt, sync, shared
        )

    def split(self, share: float) -> tuple[int, int]:
        """GPUs that draw and that train, about ``share`` of them drawing, in whole engines."""
        drawing = min(
            self.gpus - self.cut, max(self.cut, round(self.gpus * share / self.cut) * self.cut)
        )
        return drawing, self.gpus - drawing


@dataclass(frozen=True)
class Row:
    """One mode of one case. Shares of the time of the GPUs that each is made of."""

    mode: str
    step: float
    token: float
    drawing: float
    training: float
    idle: float
    tail: float
    lags: str
    read_again: float
    split: str

    @classmethod
    def of(cls, mode: str, out: Outcome, plan: Plan, split: str) -> Row:
        elapsed, late = out.ends[-1], out.lags[len(out.lags) // 2 :]
        mean = lambda values: float(np.mean(values)) if values else math.nan  # noqa: E731
        return cls(
            mode,
            out.step_seconds(plan.steps // 2),
            out.token_seconds(plan.steps // 2),
            out.generating / plan.engines / elapsed,
            out.training / elapsed,
            mean(out.idle),
            mean(out.tails),
            ", ".join(
                f"{lag}: {percent(late.count(lag) / len(late))}" for lag in sorted(set(late))
            ),
            out.read_again / max(1, out.trained),
            split,
        )


def modes(case: Case, lags: Sequence[int] = (1, 4)) -> Iterator[Row]:
    """Each mode on the same GPUs and lengths. Where drawing and training have GPUs of their own, they are shared out as their work is."""
    both = case.plan(case.gpus, case.gpus)
    dealt = dataclasses.replace(both, shared=False)
    out = synchronous(both, case.lengths)
    busy, trained = out.generating / both.engines, out.training
    yield Row.of(
        "synchronous, groups dealt out", synchronous(dealt, case.lengths), dealt, "all both"
    )
    yield Row.of("synchronous, one queue", out, both, "all both")
    yield Row.of("partial, 1.5 times begun", partial(both, case.lengths, 1.5), both, "all both")
    drawing, training = case.split(busy / (busy + trained))
    apart, split = case.plan(drawing, training), f"{drawing}:{training}"
    yield Row.of("one step off", ahead(apart, case.lengths, 1), apart, split)
    yield Row.of("staleness 2, batch after batch", ahead(apart, case.lengths, 2), apart, split)
    yield Row.of(
        "staleness 2, each engine on its own", each_ahead(apart, case.lengths, 2), apart, split
    )
    for lag in lags:
        yield Row.of(
            f"staleness {lag}, streaming", streaming(apart, case.lengths, lag), apart, split
        )


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def percent(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.0%}"


def mode_table(case: Case) -> str:
    rows = list(modes(case))
    first = rows[0].token
    heads = [
        "mode",
        "draw:train",
        "s/step",
        "s/Mtoken",
        "gain",
        "drawing",
        "training",
        "idle in generation",
        "last tenth",
        "answers by lag",
        "read again",
    ]
    shown = [
        [
            r.mode,
            r.split,
            f"{r.step:.0f}",
            f"{1e6 * r.token:.1f}",
            f"{first / r.token:.2f}",
            percent(r.drawing),
            percent(r.training),
            percent(r.idle),
            percent(r.tail),
            r.lags,
            percent(r.read_again),
        ]
        for r in rows
    ]
    most = max(r.token for r in rows)
    plot = "\n".join(
        f"{r.mode:36} {'#' * round(BARS * r.token / most):{BARS}} {1e6 * r.token:7.1f} s/Mtoken"
        for r in rows
    )
    return f"{table(heads, shown)}\n\n```text\n{plot}\n```"


def reasoning(prompts: int, samples: int, *, seed: int = 0, **law: float) -> np.ndarray:
    given = {**REASONING, **law}
    return lengths_of.drawn_lognormal(
        np.random.default_rng(seed),
        prompts,
        samples,
        given["median"],
        given["sigma"],
        int(given["cap"]),
    )


def section_modes() -> Iterator[str]:
    yield (
        "## Modes (simulated)\n\n128 prompts x 16 answers a step, Qwen2.5-7B, H100, prompts of "
        "256 tokens, ten steps, of which the last five count. Gain: by seconds a trained token, "
        "since a step of some modes trains what came first."
    )
    gsm8k = lengths_of.drawn_measured(np.random.default_rng(0), 10 * 128, 16)
    for name, found, sizes in (
        ("GSM8K solutions (measured)", gsm8k, (8, 64)),
        ("long reasoning (log-normal)", reasoning(10 * 128, 16), (16, 64, 256)),
    ):
        for gpus in sizes:
            mean, longest = found.mean(), found.max()
            shown = mode_table(Case(MODELS["7b"], H100, gpus, found, 128))
            yield (
                f"### {name}, {gpus} GPUs\n\nLengths: mean {mean:.0f}, longest "
                f"{longest}.\n\n{shown}"
            )


def section_tail() -> str:
    rows = []
    for sigma in (0.0, 0.3, 0.6, 0.9, 1.2):
        # The same mean at each sigma, as far as the cap allows.
        median = 4000.0 * math.exp((0.9**2 - sigma**2) / 2)
        found = reasoning(8 * 128, 16, median=median, sigma=sigma)
        listed = list(modes(Case(MODELS["7b"], H100, 64, found, 128, steps=8), lags=(4,)))
        token = {row.mode: row.token for row in listed}
        base = token["synchronous, groups dealt out"]
        rows.append(
            [
                f"{sigma}",
                f"{found.mean():.0f}",
                f"{found.max() / found.mean():.1f}",
                f"{listed[0].step:.0f}",
                percent(listed[0].idle),
            ]
            + [
                f"{base / token[m]:.2f}"
                for m in (
                    "synchronous, one queue",
                    "partial, 1.5 times begun",
                    "one step off",
                    "staleness 4, streaming",
                )
            ]
        )
    heads = [
        "sigma",
        "mean",
        "longest / mean",
        "s/step, dealt out",
        "idle",
        "one queue",
        "partial",
        "one step off",
        "staleness 4",
    ]
    return (
        "## What the tail costs (simulated)\n\n64 H100, Qwen2.5-7B, 128 x 16 answers; gains over "
        "groups dealt out.\n\n" + table(heads, rows)
    )


def section_weak(bytes_per_token: float, seconds_per_token: float, held_per_token: float) -> str:
    rows = []
    model = MODELS["7b"]
    for gpus in (1, 8, 64, 512, 4096):
        found = reasoning(gpus, 16)
        case = Case(model, H100, gpus, found, gpus, steps=1)
        plan = case.plan(gpus, gpus, shared=False)
        out = synchronous(plan, found)
        trained = out.training
        drawn = out.ends[-1] - trained - plan.sync
        tokens = float(found.sum())
        told = costs.exchange(
            H100, gpus, tokens, bytes_per_token, float(found.sum(1).max() / found.sum(1).mean())
        )
        read = tokens * seconds_per_token if gpus > 1 else 0.0
        rows.append(
            [
                f"{gpus:,}",
                f"{16 * gpus:,}",
                f"{tokens / 1e6:.1f}",
                f"{drawn:.0f}",
                percent(out.idle[0]),
                f"{trained:.0f}",
                f"{plan.sync:.2f}",
                f"{told:.1f}",
                f"{read:.0f}",
                f"{tokens * held_per_token * min(gpus, 8) / 1e9:.0f}",
                f"{costs.hiding_tokens(model, H100, gpus):.0f}",
            ]
        )
    heads = [
        "GPUs",
        "answers",
        "Mtokens",
        "generation, s",
        "idle in it",
        "training, s",
        "weights, s",
        "rollouts on the wire, s",
        "rollouts read, s",
        "held, GB a node",
    ]
    heads += ["tokens that hide a gather"]
    return (
        "## One prompt of 16 long answers for each GPU (computed; generation "
        "simulated)\n\nQwen2.5-7B, groups dealt out.\n\n" + table(heads, rows)
    )


def section_phases() -> str:
    """A step of one prompt with 16 equal answers for each GPU: equal, so that no tail is in it."""
    rows = []
    for key, gpus, length in (
        *((key, 64, 8192) for key in ("1.5b", "7b", "32b", "70b")),
        *(("7b", gpus, 8192) for gpus in (8, 512, 4096)),
        *(("7b", 64, length) for length in (512, 2048, 32768)),
    ):
        model = MODELS[key]
        cut = next(
            c for c in (1, 2, 4, 8, 16) if costs.rows_that_fit(model, H100, 256 + length, c) >= 16
        )
        answers, engines = 16 * gpus, gpus // cut
        at_once = min(answers // engines, costs.rows_that_fit(model, H100, 256 + length, cut))
        waves = answers / engines / at_once
        drawn = waves * Decode.of(model, H100, cut).span(at_once, at_once * 256, length)
        tokens, seen = answers * (256 + length), answers * (256 + length) ** 2 / 2
        found = costs.train(model, H100, gpus, tokens, seen)
        sync = costs.gathered(model, H100, gpus)
        whole = drawn + found["scored"] + found["update"] + sync
        shares = (drawn, found["scored"], found["update"], sync)
        cells = [f"{s:.3g} ({s / whole:.0%})" for s in shares]
        rows.append(
            [
                key,
                f"{gpus:,}",
                f"{length:,}",
                f"{at_once} on {cut}",
                *cells,
                f"{costs.hiding_tokens(model, H100, gpus):.0f}",
            ]
        )
    heads = [
        "model",
        "GPUs",
        "tokens of an answer",
        "answers at a time on GPUs",
        "drawing, s",
        "log-probs, s",
        "update, s",
    ]
    heads += ["weights to engines, s", "tokens of a micro-batch that hide a gather"]
    return (
        "## Cost of each phase (computed)\n\nH100; a step of one prompt of 256 tokens with 16 "
        "answers for each GPU, all answers equally long, so that no tail is in it; log-probs of "
        "one model, activations recomputed.\n\n" + table(heads, rows)
    )


def section_limits() -> str:
    rows = []
    for key, model in MODELS.items():
        cut = next(
            c for c in (1, 2, 4, 8, 16, 32) if costs.rows_that_fit(model, H100, 8192, c) >= 16
        )
        decode = Decode.of(model, H100, cut)
        longest = costs.longest_bound_by_arithmetic(model, H100)
        fits = costs.rows_that_fit(model, H100, 8192, cut)
        state = costs.train_memory(model, 64)
        rows.append(
            [
                key,
                f"{cut}",
                f"{model.cache_bytes / 1e3:.0f}",
                f"{1e3 * decode.seconds(1, 1000):.1f}",
                f"{costs.enough_rows(model, H100, 0):.0f}",
                f"{longest:.0f}",
                f"{fits}",
                f"{fits / decode.seconds(fits, fits * 8192) / cut:.0f}",
                f"{32768 * decode.seconds(1, 16384):.0f}",
                f"{costs.gathered(model, H100, 64):.2f}",
                f"{state['state'] / 1e9:.1f}",
            ]
        )
    heads = [
        "model",
        "GPUs to an engine",
        "cache, kB/token",
        "one answer, ms/token",
        "rows to arithmetic at no context",
        "context beyond which never",
    ]
    heads += [
        "rows of 8k that fit",
        "tokens/s and GPU there",
        "s for one answer of 32k",
        "gather on 64, s",
        "state on 64, GB",
    ]
    return (
        "## Limits by size (computed)\n\nH100, 0.4 of its arithmetic and 0.7 of its bandwidth "
        "taken to be reached.\n\n" + table(heads, rows)
    )


def measured_exchange() -> tuple[float, float, float]:
    """On this machine: bytes and seconds a token to pack, send and unpack rollouts as ranks do, and bytes of memory a token."""
    rng = np.random.default_rng(0)
    prompt = Prompt(id="0", token_ids=[1] * 256)

    def rollout(seed: int, tokens: int = 4096) -> Rollout:
        ids, logs = (
            rng.integers(0, 150_000, tokens).tolist(),
            (-rng.exponential(size=tokens)).tolist(),
        )
        return Rollout(
            prompt, ids, [True] * tokens, logs, [seed] * tokens, "stop", seed, text="word " * tokens
        )

    tracemalloc.start()
    rollouts = [rollout(i) for i in range(16)]
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    count = sum(map(len, rollouts))
    sent = pickle.dumps([pack_rollout(r) for r in rollouts])
    best = math.inf
    for _ in range(3):
        began = time.perf_counter()
        _ = [unpack_rollout(fields, prompt) for fields in pickle.loads(sent)]
        best = min(best, time.perf_counter() - began)
    return len(sent) / count, best / count, held / count


@dataclass(frozen=True)
class Published:
    """A row that others have measured, and the case that stands for it here."""

    name: str
    seconds: float
    found: float


def nemo() -> Iterator[Published]:
    """NeMo RL v0.4, H100: 2,048 answers a step, mean lengths and step times as published; the law of lengths is not, nor the split."""
    passes = Passes(scored=2, checkpointing=False, steps=4)
    for key, cut, gpus, mean, off, seconds in (
        ("8b", 1, 16, 1060, False, 97.7),
        ("8b", 1, 16, 1129, True, 74.6),
        ("32b", 4, 32, 3206, False, 393.0),
        ("32b", 4, 64, 3207, True, 215.0),
    ):
        found = with_mean(mean, 4096, 3 * 32, 64)
        case = Case(MODELS[key], H100, gpus, found, 32, prompt=128, cut=cut, steps=3, passes=passes)
        both = case.plan(gpus, gpus)
        out = synchronous(both, found)
        if off:
            busy = out.generating / both.engines
            out = ahead(case.plan(*case.split(busy / (busy + out.training))), found, 1)
        yield Published(
            f"NeMo RL {MODELS[key].name}, {gpus} GPUs, {'one step off' if off else 'on policy'}",
            seconds,
            out.step_seconds(1),
        )


def with_mean(mean: float, cap: int, prompts: int, samples: int, sigma: float = 0.6) -> np.ndarray:
    """Log-normal lengths below ``cap`` whose mean is ``mean``."""
    low, high = 1.0, 20.0 * cap
    while high / low > 1.0001:
        median = math.sqrt(low * high)
        found = lengths_of.drawn_lognormal(
            np.random.default_rng(0), prompts, samples, median, sigma, cap
        )
        low, high = (median, high) if found.mean() < mean else (low, median)
    return found


VERL = {
    32: (790.10, 357.41, 421.52, 294.77),
    64: (365.28, 150.72, 203.67, 189.26),
    128: (356.30, 177.85, 167.73, 150.63),
}
"""verl, H20, Qwen2.5-Math-7B, 512 x 16 answers of at most 28k tokens: by GPUs the colocated step, its generation, its old log-probs with
its update, and the fully asynchronous step, half of the GPUs to each side."""


def verl() -> Iterator[tuple[int, list[float]]]:
    """For each size: the same four figures, computed. One number is fitted: the mean length, so that training takes on 32 GPUs what
    it took."""
    model, cap = MODELS["7b"], 28672
    passes = Passes(scored=1, steps=16)
    low, high = 100.0, 8000.0
    while high / low > 1.01:
        mean = math.sqrt(low * high)
        found = with_mean(mean, cap, 512, 16, sigma=1.0)
        answers = [Answer(i, int(n), 256) for i, row in enumerate(found) for n in row]
        low, high = (
            (mean, high)
            if Case(model, H20, 32, found, 512, passes=passes).plan(32, 32).train(answers)
            < VERL[32][2]
            else (low, mean)
        )
    for gpus in VERL:
        case = Case(model, H20, gpus, found, 512, steps=2, passes=passes)
        both = case.plan(gpus, gpus)
        out = synchronous(both, found)
        apart = case.plan(gpus // 2, gpus // 2, passes=Passes(scored=0, steps=16))
        overlapped = streaming(dataclasses.replace(apart, steps=4), found, 0.5).token_seconds(
            1
        ) * float(found.sum())
        step, trained = out.step_seconds(0), out.training / case.steps
        yield gpus, [step, step - trained, trained, overlapped, float(found.mean())]


def section_published() -> str:
    rows = [
        [p.name, f"{p.seconds:.0f}", f"{p.found:.0f}", f"{p.found / p.seconds:.2f}"] for p in nemo()
    ]
    for gpus, (step, drawn, trained, overlapped, _) in verl():
        was = VERL[gpus]
        pairs = (
            ("step", was[0], step),
            ("generation", was[1], drawn),
            ("log-probs and update", was[2], trained),
            ("asynchronous step", was[3], overlapped),
        )
        rows += [
            [f"verl Qwen2.5-Math-7B, {gpus} H20, {what}", f"{a:.0f}", f"{b:.0f}", f"{b / a:.2f}"]
            for what, a, b in pairs
        ]
        rows.append(
            [
                f"verl, {gpus} H20, gain of asynchrony",
                f"{was[0] / was[3]:.2f}x",
                f"{step / overlapped:.2f}x",
                f"{step / overlapped / (was[0] / was[3]):.2f}",
            ]
        )
    floor = 28672 * Decode.of(MODELS["7b"], H20).seconds(1, 14336)
    rows.append(
        ["verl, least generation of one answer of 28k tokens", "151 to 357", f"{floor:.0f}", ""]
    )
    return (
        "## Against published figures\n\nSeconds a step unless it says otherwise; sources in "
        "docs/scaling.md.\n\n" + table(["", "published", "here", "here / published"], rows)
    )


def report(machine: str) -> str:
    sent, seconds, held = measured_exchange()
    lengths = lengths_of.measured()
    median, sigma = lengths_of.fitted(lengths)
    head = (
        f"# Scaling, computed and simulated\n\n`python benchmarks/scaling.py --machine {machine} "
        "--write`\n\nModel figures, unless a section says that it was measured; what they mean "
        "is in [docs/scaling.md](../../docs/scaling.md)."
    )
    measured = (
        f"## Measured here\n\n* machine: {machine}, {platform.system()}, Python "
        f"{platform.python_version()}\n* a rollout of 4,096 tokens between ranks: {sent:.1f} "
        f"bytes a token sent, {seconds * 1e6:.2f} us a token to read on a rank, {held:.0f} bytes "
        f"a token held as plain lists\n* lengths of {len(lengths):,} worked solutions of GSM8K, "
        f"characters over 4: mean {lengths.mean():.0f}, longest {lengths.max()}; log-normal fit: "
        f"median {median:.0f}, sigma {sigma:.2f}"
    )
    parts = [
        head,
        measured,
        section_limits(),
        section_phases(),
        section_weak(sent, seconds, held),
        *section_modes(),
        section_tail(),
        section_published(),
    ]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--machine",
        default=f"{platform.machine()}-{os.cpu_count()}cores",
        help="name of the file of results",
    )
    parser.add_argument(
        "--write", action="store_true", help="write benchmarks/results/scaling-MACHINE.md"
    )
    parser.add_argument(
        "--lengths",
        action="store_true",
        help="make the file of measured lengths again, and nothing else",
    )
    args = parser.parse_args()
    if args.lengths:
        lengths_of.write()
        return
    text = report(args.machine)
    print(text)
    if args.write:
        (RESULTS / f"scaling-{args.machine}.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
