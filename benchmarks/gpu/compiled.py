"""Does compiled decoding sample the same tokens on this machine, for each family that it can serve?

    python benchmarks/gpu/compiled.py [--families qwen2 gemma2] [--smoke]

Each family is a tiny model with random weights, in float64 where it can run so, else in float32. The same requests, with a seed each, are
sampled with and without ``engine.compile`` (CUDA graphs on a GPU). Then the weights change in place, as in training, and both sample
again with the graphs of new sessions. Where that cannot be captured (experts in float32 wait for the host), and for 4-bit weights, the
model is in bfloat16, whose products round differently for more rows: then log-probs are compared with those of transformers. A family
whose steps cannot be captured decodes without graphs, and is listed with the reason. The exit status is 1 where tokens differ, or log-probs
by more than 1e-4, or 0.05 nats on average in bfloat16.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec

import common  # first: it says where the rest lies
import torch
from engine_checks import HALF
from engine_checks import gap as mean_gap
from transformers import PreTrainedModel

from lightrft.config.engine import EngineConfig
from lightrft.config.model import ModelConfig
from lightrft.config.strategy import SamplingConfig
from lightrft.engines.native import NativeEngine
from lightrft.engines.native_parts.compiled_steps import CudaGraphs
from lightrft.models.decoding.kv_decoder import KVDecoder
from lightrft.models.loading.from_pretrained import load_model
from lightrft.models.tiny.text import tiny_model, tiny_tokenizer
from lightrft.models.tiny.text_families import TEXT_FAMILIES, family_model
from lightrft.types import Prompt, Request, Rollout

PROMPTS = (5, 40, 1, 70, 5)
LIMITS = (1, 12, 40, 25)
SMOKE_LIMITS = (12,)
CLOSE = 1e-4


@dataclass
class Row:
    """A family. ``equal``: ``None`` where tokens are not compared. ``gap``: largest difference of log-probs, in bfloat16 the mean from
    those of transformers. ``failure``: why its steps were not captured."""

    family: str
    dtype: str
    graphs: int
    steps: int
    equal: bool | None
    gap: float
    failure: str
    seconds: float

    @property
    def good(self) -> bool:
        return self.gap <= HALF if self.equal is None else self.equal and self.gap <= CLOSE


def wide_model(family: str) -> PreTrainedModel:
    """Return a tiny model on the device, in float64 where its operations exist in it."""
    for dtype in (torch.float64, torch.float32):
        # mixtures of experts sample in float32: their grouped kernel knows no float64
        model = family_model(family, dtype=dtype, eos_token_id=None).to(common.device()).eval()
        try:
            with torch.no_grad():
                model(input_ids=torch.tensor([[5, 6]], device=model.device), use_cache=False)
        except (RuntimeError, NotImplementedError):
            continue
        return model
    raise RuntimeError(f"{family} runs neither in float64 nor in float32")


def requests(limits: Sequence[int]) -> list[Request]:
    """Three responses to each prompt, with one limit of tokens after another."""
    draw = torch.Generator().manual_seed(0)
    prompts = [
        Prompt(str(i), torch.randint(4, 99, (n,), generator=draw).tolist())
        for i, n in enumerate(PROMPTS)
    ]
    return [
        Request(prompt, 10 * i + s, s, limits[(3 * i + s) % len(limits)])
        for i, prompt in enumerate(prompts)
        for s in range(3)
    ]


def engine_of(model: PreTrainedModel, *, compiled: bool) -> NativeEngine:
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    return NativeEngine(KVDecoder(model), tokenizer, EngineConfig(compile=compiled))


def sampled(
    engine: NativeEngine, limits: Sequence[int], temperature: float = 1.3
) -> dict[int, Rollout]:
    settings = SamplingConfig(temperature=temperature)
    return {r.seed: r for r in engine.generate(requests(limits), settings)}


def rounded(family: str, model: PreTrainedModel, limits: Sequence[int]) -> Row:
    """Sample with compilation, and compare with transformers."""
    began = time.perf_counter()
    engine = engine_of(model, compiled=True)
    off = mean_gap(model, list(sampled(engine, limits, 1.0).values()))
    return row_of(family, model, engine, None, off, began)


def in_4bit() -> PreTrainedModel:
    """Return a tiny model of 4-bit weights."""
    with tempfile.TemporaryDirectory() as folder:
        tiny_model("qwen2", eos_token_id=None, hidden_size=128).save_pretrained(folder)
        config = ModelConfig(path=folder, dtype="bfloat16", load_in_4bit=True)
        return load_model(config, device=common.device()).eval()


def compared(family: str, model: PreTrainedModel, limits: Sequence[int]) -> Row:
    """Sample twice with and without compilation, with other weights the second time."""
    began = time.perf_counter()
    plain, compiled = (engine_of(model, compiled=choice) for choice in (False, True))
    equal, gap = True, 0.0
    for _ in range(2):
        before, after = sampled(plain, limits), sampled(compiled, limits)
        for seed, rollout in before.items():
            equal = equal and rollout.token_ids == after[seed].token_ids
            pairs = zip(rollout.logprobs, after[seed].logprobs)
            gap = max([gap, *(abs(a - b) for a, b in pairs)])
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
    return row_of(family, model, compiled, equal, gap, began)


def row_of(
    family: str,
    model: PreTrainedModel,
    engine: NativeEngine,
    equal: bool | None,
    gap: float,
    began: float,
) -> Row:
    counts = engine.compiled
    assert counts is not None
    dtype = str(next(model.parameters()).dtype)[6:]
    took = time.perf_counter() - began
    return Row(family, dtype, counts.graphs, counts.steps, equal, gap, counts.failure, took)


def captures() -> dict[str, bool]:
    """Return whether captures do as they should where memory is short, and where a step waits for the host."""
    ones = torch.ones(150_000_000, device="cuda")
    capture = CudaGraphs(torch.device("cuda"))
    torch.cuda.empty_cache()
    # all but 64 MiB of what may be used is cached in a block that no pool of graphs can take
    block = torch.empty(2**31, dtype=torch.uint8, device="cuda")
    del block
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**26) / total)
    try:
        replay = capture(lambda: (ones + 1).sum())
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    found = {"a capture in a full memory": float(replay()) == 2 * len(ones)}
    held = torch.cuda.memory_reserved()
    for _ in range(3):
        replay = capture(lambda: (ones + 1).sum())
    found["further captures take no memory"] = torch.cuda.memory_reserved() == held
    try:
        capture(lambda: torch.tensor(ones[0].item()))
    except RuntimeError:
        try:
            found["random numbers after a failed capture"] = len(torch.rand(4, device="cuda")) == 4
        except RuntimeError:
            found["random numbers after a failed capture"] = False
    return found


def main() -> int:
    parser = common.parser(__doc__)
    parser.add_argument("--families", nargs="+", choices=TEXT_FAMILIES, default=list(TEXT_FAMILIES))
    args = parser.parse_args()
    limits = LIMITS
    if args.smoke:
        # each other number of rows is compiled once more, which takes ten seconds on a CPU
        args.families, limits = ["qwen2"], SMOKE_LIMITS
    rows = []
    for family in args.families:
        model = wide_model(family)
        if KVDecoder(model).by_plan:
            rows.append(compared(family, model, limits))
            if rows[-1].failure:
                rows.append(rounded(family, model.to(torch.bfloat16), limits))
            print(*rows[-2:], sep="\n", flush=True)
    if find_spec("bitsandbytes"):
        rows.append(rounded("qwen2, 4 bit", in_4bit(), limits))
    checks = captures() if torch.cuda.is_available() else {}
    bad = [row.family for row in rows if not row.good]
    bad += [what for what, good in checks.items() if not good]
    captured = {row.family for row in rows if not row.failure}
    refused = {row.family for row in rows} - captured
    lines = [
        f"{len(captured | refused)} models, {len(bad)} differ, {len(refused)} decode without graphs.",
        *(f"* {what}: {'yes' if good else '**no**'}" for what, good in checks.items()),
        "",
        *common.table(
            ["family", "dtype", "graphs", "steps", "equal tokens", "log-probs off", "not captured"],
            [
                [
                    r.family,
                    r.dtype,
                    str(r.graphs),
                    str(r.steps),
                    {True: "yes", False: "**no**", None: ""}[r.equal],
                    f"{r.gap:.1e}",
                    r.failure,
                ]
                for r in rows
            ],
        ),
    ]
    tree = {"rows": [asdict(row) for row in rows], "captures": checks}
    common.write(args.out, "compiled", args.machine, "Compiled decoding", tree, lines)
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
