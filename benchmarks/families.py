# ruff: noqa: E402 (the environment is set before torch is imported)
"""Prove each model family on a tiny real model: load, three layouts, sampling and one optimizer step.

Each check compares with the model's own forward on one row at a time, in float64. A family is ``right``, ``refused`` at start with
a message, or ``wrong``. ``--write`` stores the verdicts, from which ``docs/generate.py`` makes ``docs/families.md``.

    python benchmarks/families.py [--families llama gemma3 ...] [--no-sampling] [--write]
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from lightrft.utils.cpu import set_thread_policy

set_thread_policy()

import torch
import transformers

from lightrft.config.engine import EngineConfig
from lightrft.config.model import Layout, ModelConfig
from lightrft.config.strategy import SamplingConfig
from lightrft.engines.native import NativeEngine
from lightrft.models.actor import Actor
from lightrft.models.decoding.kv_decoder import KVDecoder, PlanDecodeSession
from lightrft.models.families import FAMILIES
from lightrft.models.tiny import ALL_MEDIA_FAMILIES, missing_package
from lightrft.models.tiny.text import tiny_tokenizer
from lightrft.models.tiny.text_families import TEXT_FAMILIES, family_model
from lightrft.types import Batch, Prompt, Request
from lightrft.utils.errors import ModelError
from tests.media_helpers import mixed_batch, mixed_prompts, rig
from tests.model_helpers import Float64, gap, gradients, plain_rows, ragged_batch, weights

RESULT = ROOT / "benchmarks" / "results" / "families.json"
LAYOUTS: tuple[Layout, ...] = ("prefix_shared", "packed", "padded")
FLOAT32 = {"xglm"}
"""Families whose code holds a bound of float32, so that they run in float32 only."""

TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4}
"""Largest difference of log-probs and of gradients, as a share of the largest. Summation order alone differs."""

SAMPLED_TOLERANCE = 1e-4
"""Largest difference of a sampled token's log-prob, in nats: the engine takes softmax in float32."""


@dataclass(frozen=True, slots=True)
class Proof:
    """The verdict on one family, and what it rests on."""

    family: str
    verdict: str
    layout: str
    decoding: str
    reason: str = ""


class Wrong(Exception):
    """A check that failed. Its text says which."""


def prove(family: str, folder: Path, *, sampling: bool = True) -> Proof:
    """Take ``family`` through every check, with its tiny model saved below ``folder``. Without ``sampling``, leave that check out."""
    row = FAMILIES.get(family)
    layout = "" if row is None else row.layout
    try:
        actor, batch, expected = (
            _media(family, folder) if family in ALL_MEDIA_FAMILIES else _text(family, folder)
        )
        layout = actor.family.layout
        with precise(actor):
            check_layouts(actor, batch, *expected)
            # Sampling from media needs banned tokens: tests/unit/models/multimodal/test_media_decoding.py.
            if sampling and family in TEXT_FAMILIES:
                check_sampling(actor)
            check_step(actor, batch)
    except ModelError as error:
        return Proof(family, "refused", "", "", str(error).split(": ", 1)[-1])
    except Wrong as error:
        return Proof(family, "wrong", layout, "", str(error))
    return Proof(family, "right", layout, decoding_of(actor) if sampling else "")


def precise(actor: Actor) -> AbstractContextManager[object]:
    """Return the context in which arithmetic of ``actor`` stays in the type of its weights."""
    return Float64() if actor.base.dtype == torch.float64 else nullcontext()


Expected = tuple[torch.Tensor, dict[str, torch.Tensor]]


def _text(family: str, folder: Path) -> tuple[Actor, Batch, Expected]:
    """Save, load and run the model of ``family`` row by row."""
    saved = family_model(family)
    saved.save_pretrained(folder / family)
    actor = Actor.load(ModelConfig(path=str(folder / family)), dtype=torch.float32)
    _compare_weights(saved, actor)
    if family not in FLOAT32:
        actor.double()
        with suppress(ValueError):  # families without experts
            actor.base.set_experts_implementation("eager")  # the grouped kernel knows no float64
    batch = ragged_batch([21, 5, 1], [0, 17, 1, 6, 9], [0, 0, 0, 1, 2])
    with precise(actor):
        return actor, batch, _with_gradients(actor, plain_rows(actor, batch))


def _media(family: str, folder: Path) -> tuple[Actor, Batch, Expected]:
    made = rig(family, folder, torch.float64)
    batch = mixed_batch(mixed_prompts(made))
    with precise(made.actor):
        return made.actor, batch, _with_gradients(made.actor, made.actor.own_logprobs(batch))


def _compare_weights(saved: torch.nn.Module, actor: Actor) -> None:
    loaded = actor.base.state_dict()
    for name, tensor in saved.state_dict().items():
        if name not in loaded or not torch.equal(loaded[name].float(), tensor.float()):
            raise Wrong(f"weight {name} is not the one that was saved")


def _with_gradients(actor: Actor, logprobs: torch.Tensor) -> Expected:
    actor.zero_grad()
    (logprobs * weights(len(logprobs), logprobs.dtype)).sum().backward()
    return logprobs.detach(), {
        name: p.grad.clone() for name, p in actor.named_parameters() if p.grad is not None
    }


def check_layouts(
    actor: Actor, batch: Batch, expected: torch.Tensor, expected_grads: dict[str, torch.Tensor]
) -> None:
    """Ask for each layout in turn: log-probs and gradients must be those of the model's own forward."""
    bound = TOLERANCE[actor.base.dtype]
    for layout in LAYOUTS:
        asked = Actor(actor.model, ModelConfig(layout=layout))
        found, grads = gradients(asked, batch)
        far = float((found - expected).abs().max() / expected.abs().max())
        if not far < bound:
            raise Wrong(f"model.layout = {layout}: log-probs differ by {far:.2g}")
        far = gap(
            {
                name: grads.get(name, torch.zeros_like(grad))
                for name, grad in expected_grads.items()
            },
            expected_grads,
        )
        if not far < bound:
            raise Wrong(f"model.layout = {layout}: gradients differ by {far:.2g}")


def check_sampling(actor: Actor) -> None:
    """Sample two responses to prompts of several lengths: their log-probs must be those of the model's own forward."""
    lengths = (13, 1, 5)
    prompts = [
        Prompt(id=str(n), token_ids=[4 + (7 * i + n) % 90 for i in range(n)]) for n in lengths
    ]
    requests = [
        Request(p, seed=10 * p.token_ids[0] + s, sample=s, max_new_tokens=3 + 5 * s)
        for p in prompts
        for s in (0, 1)
    ]
    engine = NativeEngine(KVDecoder(actor.base), tiny_tokenizer(), EngineConfig())
    try:
        rollouts = list(engine.generate(requests, SamplingConfig()))
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
        raise Wrong(f"sampling raises {type(error).__name__}: {str(error)[:120]}") from error
    for rollout in rollouts:
        rows = ragged_batch([len(rollout.prompt.token_ids)], [len(rollout.token_ids)], [0])
        rows.prompts.tokens[:] = torch.tensor(rollout.prompt.token_ids)
        rows.responses.tokens[:] = torch.tensor(rollout.token_ids)
        with torch.no_grad():
            far = float(
                (torch.tensor(rollout.logprobs, dtype=torch.float64) - plain_rows(actor, rows))
                .abs()
                .max()
            )
        if not far < SAMPLED_TOLERANCE:
            raise Wrong(f"log-probs of sampled tokens differ by {far:.2g} nats")


def check_step(actor: Actor, batch: Batch) -> None:
    """Make one optimizer step towards the responses: every gradient is finite, and they become more likely."""
    optimizer = torch.optim.SGD([p for p in actor.parameters() if p.requires_grad], lr=1.0)
    actor.zero_grad()
    before = actor.score(batch).logprobs.mean()
    (-before).backward()
    grads = [p.grad for p in actor.parameters() if p.grad is not None]
    if not grads or not all(bool(grad.isfinite().all()) for grad in grads):
        raise Wrong("a gradient is missing or not finite")
    norm = torch.stack([grad.norm() for grad in grads]).norm()
    for grad in grads:
        grad *= (1e-6 if actor.base.dtype == torch.float64 else 1e-3) / norm
    optimizer.step()
    with torch.no_grad():
        after = actor.score(batch).logprobs.mean()
    if not after > before:
        raise Wrong("a step towards the responses does not make them more likely")


def decoding_of(actor: Actor) -> str:
    """Return how the native engine decodes: by ``plan``, or with the model's own ``cache``."""
    return "plan" if isinstance(KVDecoder(actor.base).session(), PlanDecodeSession) else "cache"


def proofs(families: Sequence[str], sampling: bool = True) -> Iterator[Proof]:
    """Prove each of ``families`` in a folder of its own."""
    for family in families:
        with tempfile.TemporaryDirectory() as folder:
            yield prove(family, Path(folder), sampling=sampling)


def stored() -> list[Proof]:
    """Read the committed verdicts."""
    return [Proof(**row) for row in json.loads(RESULT.read_text(encoding="utf-8"))["families"]]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--families",
        nargs="+",
        choices=(*TEXT_FAMILIES, *ALL_MEDIA_FAMILIES),
        default=[*TEXT_FAMILIES, *ALL_MEDIA_FAMILIES],
    )
    parser.add_argument(
        "--no-sampling", action="store_true", help="leave out the check of the engine"
    )
    parser.add_argument(
        "--write", action="store_true", help=f"store the verdicts in {RESULT.relative_to(ROOT)}"
    )
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    logging.getLogger("lightrft").setLevel(logging.ERROR)
    families = list(options.families)
    for family in list(families):
        if missing := missing_package(family):
            families.remove(family)
            print(f"left out, since {missing} is not installed: {family}")
    found = []
    for proof in proofs(families, not options.no_sampling):
        found.append(proof)
        print(
            f"{proof.family:24} {proof.verdict:8} {proof.layout:14} {proof.decoding:6} "
            f"{proof.reason}",
            flush=True,
        )
    for kind, names in (("text", set(TEXT_FAMILIES)), ("media", set(ALL_MEDIA_FAMILIES))):
        counts = Counter(proof.verdict for proof in found if proof.family in names)
        print(
            f"{kind}: {counts['right']} right, {counts['refused']} refused, {counts['wrong']} wrong"
        )
    if options.write:
        # Families that were left out keep their verdicts.
        newest = {proof.family: proof for proof in (*stored(), *found)}
        rows = [
            asdict(newest[family])
            for family in (*TEXT_FAMILIES, *ALL_MEDIA_FAMILIES)
            if family in newest
        ]
        result = {"transformers": transformers.__version__, "families": rows}
        RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return int(any(proof.verdict == "wrong" for proof in found))


if __name__ == "__main__":
    sys.exit(main())
