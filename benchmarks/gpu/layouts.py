"""Do all layouts give the same numbers on this machine: log-probs and gradients of ragged groups, family by family?

    python benchmarks/gpu/layouts.py [--families qwen2 gemma2] [--smoke]

The truth is the same weights in float64, or in float32 for bfloat16. A layout may be off it, relative to its norm, by at most 1.5 times
what ``padded``, with attention by transformers, is off it, and in float32 always by 1e-5; so may adapters and, where bitsandbytes is
installed, 4-bit weights. On a GPU the variable-length kernel must have been what computed attention
in bfloat16, but for families that it cannot serve. The exit status is 1 where anything is off.
"""

from __future__ import annotations

import copy
import random
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any

import common  # first: it says where the rest lies
import torch
from torch import Tensor, nn

from lightrft.config.engine import EngineConfig
from lightrft.config.model import LoRAConfig, ModelConfig
from lightrft.config.strategy import SamplingConfig
from lightrft.engines.native import NativeEngine
from lightrft.models.actor import Actor
from lightrft.models.attention import varlen_cuda
from lightrft.models.decoding.kv_decoder import KVDecoder
from lightrft.models.loading.from_pretrained import load_model
from lightrft.models.lora import add_adapters, base_model
from lightrft.models.tiny.text import FAMILIES, tiny_model, tiny_tokenizer
from lightrft.types import Batch, Prompt, Request, Segments

EXACT, ROUNDED = 1e-5, 1.5
FLAT = ("prefix_shared", "packed")
CAPPED = ("gemma2",)
"""Families whose attention the kernel cannot compute: scores are soft-capped."""


@dataclass
class Row:
    """A comparison: ``off`` and ``allowed`` in the same unit. ``kernel``: calls of the variable-length kernel."""

    what: str
    layout: str
    quantity: str
    off: float
    allowed: float
    kernel: int

    @property
    def good(self) -> bool:
        return self.off <= self.allowed


class Counted:
    """How often the variable-length kernel was called inside."""

    def __enter__(self) -> Counted:
        self.calls, self._was = 0, varlen_cuda.attend

        def attend(*args: Any) -> Tensor:
            self.calls += 1
            return self._was(*args)

        varlen_cuda.attend = attend
        return self

    def __exit__(self, *_: object) -> None:
        varlen_cuda.attend = self._was


def ragged(vocabulary: int, groups: int, longest: int) -> Batch:
    """Groups of one to six answers, some of them empty or one token long."""
    draw = random.Random(0)
    tokens = lambda n: [draw.randrange(4, vocabulary) for _ in range(n)]  # noqa: E731
    prompts = [tokens(draw.randrange(3, longest)) for _ in range(groups)]
    of = [p for p in range(groups) for _ in range(draw.randrange(1, 7))]
    answers = [tokens(draw.choice((0, 1, draw.randrange(2, longest)))) for _ in of]
    answers[0] = tokens(longest)
    sampled = torch.ones(sum(map(len, answers)), dtype=torch.bool)
    return Batch(Segments.of(prompts), Segments.of(answers), torch.tensor(of), sampled=sampled).to(
        common.device()
    )


def scored(actor: Actor, batch: Batch, layout: Any) -> tuple[Tensor, Tensor, int]:
    """Log-probs, the gradient of a weighted sum of them in all that is trained, and how often the kernel was called."""
    actor.layout = layout
    actor.zero_grad(set_to_none=True)
    with Counted() as counted:
        logprobs = actor.score(batch).logprobs.float()
        weights = torch.linspace(-1, 1, logprobs.numel(), device=logprobs.device)
        (logprobs * weights).sum().backward()
    grads = [p.grad.float().flatten() for p in actor.parameters() if p.grad is not None]
    return logprobs.detach(), torch.cat(grads), counted.calls


def off(found: Tensor, truth: Tensor) -> float:
    """Relative to the norm of ``truth``."""
    return float((found - truth).norm() / truth.norm())


def compared(
    what: str, actor: Actor, truth: Actor, batch: Batch, floor: float = 0.0
) -> Iterator[Row]:
    """Rows of ``actor``, whose weights ``truth`` has in a wider type."""
    true, plain = scored(truth, batch, "padded"), scored(actor, batch, "padded")
    for layout in FLAT:
        found = scored(actor, batch, layout)
        for i, quantity in enumerate(("log-probs", "gradient")):
            allowed = max(floor, ROUNDED * off(plain[i], true[i]))
            yield Row(what, layout, quantity, off(found[i], true[i]), allowed, found[2])


def exact(what: str, actor: Actor, batch: Batch) -> Iterator[Row]:
    """Rows of ``actor`` in float32."""
    yield from compared(what, actor, copy.deepcopy(actor).double(), batch, EXACT)


def with_adapters(model: nn.Module) -> nn.Module:
    """Adapters on all layers that do something already."""
    adapted = add_adapters(base_model(model), LoRAConfig(rank=4))
    torch.manual_seed(1)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.05)
    return adapted


def adapters(family: str, model: Any, batch: Batch) -> Iterator[Row]:
    """Layouts with adapters, and that without them the model is what it was, bit for bit."""
    plain = Actor(copy.deepcopy(model))
    adapted = Actor(with_adapters(copy.deepcopy(model)))
    yield from exact(f"{family}, LoRA, float32", adapted, batch)
    half, wide = copy.deepcopy(adapted).bfloat16(), copy.deepcopy(adapted).bfloat16().float()
    yield from compared(f"{family}, LoRA, bfloat16", half, wide, batch)
    adapted.layout = plain.layout
    with torch.no_grad(), adapted.reference() as reference:
        gap = float((reference.score(batch).logprobs - plain.score(batch).logprobs).abs().max())
    yield Row(f"{family}, LoRA off", "prefix_shared", "log-probs", gap, 0.0, 0)


def in_4bit(model: Any, batch: Batch) -> Iterator[Row]:
    """Adapters over 4-bit weights, in float32."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        config = ModelConfig(path=folder, dtype="float32", load_in_4bit=True)
        loaded, plain = (load_model(config, device=common.device()) for _ in range(2))
    adapted = with_adapters(loaded)
    # layers in 4 bits compute in float32, also in a model of float64
    truth = with_adapters(plain.dequantize()).double()
    names = {name for name, _ in truth.named_parameters() if "lora_" in name}
    weights = {name: p for name, p in adapted.state_dict().items() if name in names}
    assert len(weights) == len(names) and not truth.load_state_dict(weights, strict=False)[1]
    yield from compared("qwen2, 4 bit, float32", Actor(adapted), Actor(truth), batch, EXACT)


def drawn(family: str, model: Any) -> Row:
    """Log-probs that the engine gives with its tokens, against scoring them."""
    engine = NativeEngine(KVDecoder(model), tiny_tokenizer(), EngineConfig())
    draw = random.Random(1)
    prompts = [
        Prompt(id=str(i), token_ids=[draw.randrange(4, 90) for _ in range(5 + 20 * i)])
        for i in range(3)
    ]
    requests = [Request(prompt, seed=i, sample=i) for prompt in prompts for i in range(4)]
    rollouts = sorted(
        engine.generate(requests, SamplingConfig(max_new_tokens=40)),
        key=lambda r: (r.prompt.id, r.sample),
    )
    sampled = torch.ones(sum(map(len, rollouts)), dtype=torch.bool)
    answers, of = (
        Segments.of([r.token_ids for r in rollouts]),
        torch.tensor([int(r.prompt.id) for r in rollouts]),
    )
    batch = Batch(Segments.of([p.token_ids for p in prompts]), answers, of, sampled=sampled).to(
        common.device()
    )
    actor = Actor(model)
    actor.layout = "padded"
    with torch.no_grad():
        truth = actor.score(batch).logprobs
    found = torch.tensor([x for r in rollouts for x in r.logprobs], device=truth.device)
    return Row(f"{family}, engine, float32", "decoding", "log-probs", off(found, truth), EXACT, 0)


def compare(family: str, sizes: dict[str, Any], batch: Batch) -> Iterator[Row]:
    model: Any = tiny_model(family, **sizes).to(common.device())
    yield from exact(f"{family}, float32", Actor(copy.deepcopy(model)), batch)
    half = copy.deepcopy(model).bfloat16()
    yield from compared(
        f"{family}, bfloat16", Actor(half), Actor(copy.deepcopy(half).float()), batch
    )
    yield drawn(family, copy.deepcopy(model))
    if family == "qwen2":
        yield from adapters(family, model, batch)
        if find_spec("bitsandbytes"):
            yield from in_4bit(model, batch)


def without_kernel(rows: list[Row]) -> list[str]:
    """What the kernel should have computed on a GPU, and did not."""
    if not torch.cuda.is_available():
        return []
    served = (r for r in rows if "bfloat16" in r.what and r.what.partition(",")[0] not in CAPPED)
    return sorted({r.what for r in served if not r.kernel})


def main() -> int:
    parser = common.parser(__doc__)
    parser.add_argument(
        "--families", nargs="+", choices=FAMILIES, default=[f for f in FAMILIES if f != "qwen3_moe"]
    )
    args = parser.parse_args()
    gpu, vocabulary = torch.cuda.is_available(), len(tiny_tokenizer())
    sizes = (
        {
            "hidden_size": 512,
            "num_attention_heads": 8,
            "num_hidden_layers": 4,
            # wider weights make each token so likely that its log-prob rounds to 0
            "initializer_range": 0.02,
        }
        if gpu
        else {"hidden_size": 64, "num_attention_heads": 2}
    )
    if args.smoke:
        args.families = ["qwen2", "gemma2"]
    batch = ragged(vocabulary, *((6, 200) if gpu and not args.smoke else (3, 24)))
    rows = [row for family in args.families for row in compare(family, sizes, batch)]
    skipped = without_kernel(rows)
    bad = [row for row in rows if not row.good]
    shown = [
        [
            r.what,
            r.layout,
            r.quantity,
            f"{r.off:.1e}",
            f"{r.allowed:.1e}",
            str(r.kernel),
            "yes" if r.good else "**no**",
        ]
        for r in rows
    ]
    lines = [f"{len(rows)} comparisons of {len(batch)} ragged answers, {len(bad)} off."]
    lines += (
        []
        if find_spec("bitsandbytes")
        else ["4-bit weights: not compared, since bitsandbytes is not installed."]
    )
    lines += (
        [f"**The variable-length kernel was not used for {', '.join(skipped)}.**"]
        if skipped
        else []
    )
    lines += [
        "",
        *common.table(["model", "layout", "of", "off", "allowed", "kernel calls", "good"], shown),
    ]
    common.write(
        args.out,
        "layouts",
        args.machine,
        "Layouts against one another",
        {"rows": [asdict(r) for r in rows]},
        lines,
    )
    return 1 if bad or skipped else 0


if __name__ == "__main__":
    raise SystemExit(main())
