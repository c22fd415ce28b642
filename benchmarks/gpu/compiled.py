"""Does compiled decoding sample the same tokens on this machine, for each family that it can serve?

    python benchmarks/gpu/compiled.py [--families qwen2 gemma2] [--smoke]

Each family is a tiny model with random weights, in float64 where it can run so, else in float32. The same requests, with a seed each, are
sampled with and without ``engine.compile`` (CUDA graphs on a GPU). Then the weights change in place, as in training, and both sample
again with the graphs of new sessions. A family whose steps cannot be captured decodes without graphs, and is listed with the reason. The
exit status is 1 where tokens differ, or log-probs by more than 1e-4.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass

import common  # first: it says where the rest lies
import torch
from transformers import PreTrainedModel

from lightrft.config.strategy import EngineConfig, SamplingConfig
from lightrft.engines.native import NativeEngine
from lightrft.models.decoding.kv_decoder import KVDecoder
from lightrft.models.tiny.text import tiny_tokenizer
from lightrft.models.tiny.text_families import TEXT_FAMILIES, family_model
from lightrft.types import Prompt, Request, Rollout

PROMPTS = (5, 40, 1, 70, 5)
LIMITS = (1, 12, 40, 25)
CLOSE = 1e-4


@dataclass
class Row:
    """A family. ``gap``: largest difference of log-probs. ``failure``: why its steps were not captured."""

    family: str
    dtype: str
    graphs: int
    steps: int
    equal: bool
    gap: float
    failure: str
    seconds: float

    @property
    def good(self) -> bool:
        return self.equal and self.gap <= CLOSE


def wide_model(family: str) -> PreTrainedModel:
    """Return a tiny model on the device, in float64 where its operations exist in it."""
    for dtype in (torch.float64, torch.float32):
        model = family_model(family, dtype=dtype, eos_token_id=None)
        if dtype == torch.float64:
            model.set_experts_implementation("eager")  # the grouped kernel knows no float64
        model = model.to(common.device()).eval()
        try:
            with torch.no_grad():
                model(input_ids=torch.tensor([[5, 6]], device=model.device), use_cache=False)
        except (RuntimeError, NotImplementedError):
            continue
        return model
    raise RuntimeError(f"{family} runs neither in float64 nor in float32")


def requests() -> list[Request]:
    """Three responses to each prompt, of lengths that differ."""
    draw = torch.Generator().manual_seed(0)
    prompts = [
        Prompt(str(i), torch.randint(4, 99, (n,), generator=draw).tolist())
        for i, n in enumerate(PROMPTS)
    ]
    return [
        Request(prompt, 10 * i + s, s, LIMITS[(3 * i + s) % len(LIMITS)])
        for i, prompt in enumerate(prompts)
        for s in range(3)
    ]


def sampled(engine: NativeEngine) -> dict[int, Rollout]:
    return {r.seed: r for r in engine.generate(requests(), SamplingConfig(temperature=1.3))}


def compared(family: str, model: PreTrainedModel) -> Row:
    """Sample twice with and without compilation, with other weights the second time."""
    began = time.perf_counter()
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    plain = NativeEngine(KVDecoder(model), tokenizer, EngineConfig())
    compiled = NativeEngine(KVDecoder(model), tokenizer, EngineConfig(compile=True))
    equal, gap = True, 0.0
    for _ in range(2):
        before, after = sampled(plain), sampled(compiled)
        for seed, rollout in before.items():
            equal = equal and rollout.token_ids == after[seed].token_ids
            pairs = zip(rollout.logprobs, after[seed].logprobs)
            gap = max([gap, *(abs(a - b) for a, b in pairs)])
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
    counts = compiled.compiled
    assert counts is not None
    return Row(
        family,
        str(next(model.parameters()).dtype)[6:],
        counts.graphs,
        counts.steps,
        equal,
        gap,
        counts.failure,
        time.perf_counter() - began,
    )


def main() -> int:
    parser = common.parser(__doc__)
    parser.add_argument("--families", nargs="+", choices=TEXT_FAMILIES, default=list(TEXT_FAMILIES))
    args = parser.parse_args()
    if args.smoke:
        args.families = ["qwen2"]
    rows = []
    for family in args.families:
        model = wide_model(family)
        if KVDecoder(model).by_plan:
            rows.append(compared(family, model))
            print(rows[-1], flush=True)
    bad = [row.family for row in rows if not row.good]
    refused = [row.family for row in rows if row.failure]
    lines = [
        f"{len(rows)} families, {len(bad)} differ, {len(refused)} decode without graphs.",
        "",
        *common.table(
            ["family", "dtype", "graphs", "steps", "equal tokens", "log-probs off", "not captured"],
            [
                [
                    r.family,
                    r.dtype,
                    str(r.graphs),
                    str(r.steps),
                    "yes" if r.equal else "**no**",
                    f"{r.gap:.1e}",
                    r.failure,
                ]
                for r in rows
            ],
        ),
    ]
    tree = {"rows": [asdict(row) for row in rows]}
    common.write(args.out, "compiled", args.machine, "Compiled decoding", tree, lines)
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
