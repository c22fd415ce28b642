"""Prompts with media for tiny real models of every family, made from random pictures, clips and sounds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lightrft.config.model import ModelConfig
from lightrft.models.actor import Actor
from lightrft.models.loading.from_pretrained import load_tokenizer
from lightrft.models.processors import Processor, load_processor
from lightrft.models.processors.own import OwnPart
from lightrft.models.tiny import save_tiny_media
from lightrft.types import Batch, Extent, Prompt, Ragged, Segments

Piece = str | tuple[str, tuple[int, ...]]
"""Text, or the kind and the shape of something random."""


@contextmanager
def as_in_a_run() -> Iterator[None]:
    """Let processors compute as in a run, inside ``Float64`` too: torchaudio uses the default type."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch._C.DisableTorchFunction():
            yield
    finally:
        torch.set_default_dtype(before)


@dataclass
class Rig:
    """A tiny model in a folder, with its tokenizer and processor."""

    actor: Actor
    tokenizer: Any
    processor: Processor
    path: Path

    @property
    def kinds(self) -> set[str]:
        return set(self.processor.parts)

    @as_in_a_run()
    def prompt(self, name: str, *pieces: Piece, seed: int = 0) -> Prompt:
        """A user message of ``pieces`` through the chat template, each kind's text expanded in place."""
        rng = np.random.default_rng(seed)
        values = [
            (kind, *random_media(kind, shape, rng))
            for kind, shape in (p for p in pieces if not isinstance(p, str))
        ]
        parts = [
            {"type": "text", "text": p} if isinstance(p, str) else {"type": p[0]} for p in pieces
        ]
        text = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True
        )
        made: dict[str, list[torch.Tensor]] = {}
        pieces, items = [], []
        for kind, value, extent in values:
            part = self.processor.parts[kind]
            before, _, text = text.partition(part.written)
            pieces.append(before)
            items.append((part, extent))
            for key, tensor in part.inputs(value, extent).items():
                made.setdefault(key, []).append(tensor)
        text = self.processor.expanded([*pieces, text], items)
        media = {
            key: Ragged(torch.cat(each), torch.tensor([sum(map(len, each))]))
            for key, each in made.items()
        }
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return Prompt(id=name, token_ids=ids, text=text, media=media)


def random_media(
    kind: str, shape: tuple[int, ...], rng: np.random.Generator
) -> tuple[np.ndarray, Extent]:
    if kind == "audio":
        return rng.normal(0, 0.1, size=shape).astype(np.float32), Extent(shape)
    times = tuple(t / 2 for t in range(shape[0])) if len(shape) == 4 else ()
    return rng.integers(0, 256, size=shape).astype(np.uint8), Extent(shape, times)


def rig(family: str, folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Rig:
    save_tiny_media(family, folder / family, **options)
    return rig_in(folder / family, dtype)


def rig_in(path: Path, dtype: torch.dtype = torch.float32) -> Rig:
    config = ModelConfig(path=str(path))
    tokenizer = load_tokenizer(config)
    with as_in_a_run():
        processor = load_processor(config, tokenizer)
    assert processor is not None
    actor = Actor.load(config, dtype=dtype)
    experts = ("num_experts", "moe_num_experts", "n_routed_experts")
    if dtype == torch.float64 and any(hasattr(actor.text_config, name) for name in experts):
        actor.base.set_experts_implementation("eager")  # the grouped kernel knows no float64
        actor.double()  # transformers loads some routers in float32
    return Rig(actor, tokenizer, processor, path)


def layouts_of(actor: Actor) -> tuple[str, ...]:
    """Return the layouts that the family's row allows: a layer that carries a state takes rows of their own."""
    layouts = ("prefix_shared", "packed", "padded")
    return layouts[layouts.index(actor.family.layout) :]


def mixed_prompts(rig: Rig) -> list[Prompt]:
    """Sizes that differ, several in a prompt, every kind that the family takes, and a prompt without any."""
    pictures, clips, sounds = (kind in rig.kinds for kind in ("image", "video", "audio"))
    rows: list[Sequence[Piece]] = [("plain text, nothing else",)]
    if pictures:
        rows += [
            (("image", (20, 30, 3)), "what is it?"),
            ("one ", ("image", (9, 40, 3)), " two ", ("image", (33, 17, 3)), "?"),
        ]
    if clips:
        rows += [
            (("video", (5, 16, 24, 3)), "and then?"),
            *([(("image", (16, 16, 3)), ("video", (2, 12, 12, 3)))] if pictures else []),
        ]
    if sounds:
        rows += [(("audio", (7000,)), "who?")]
        # A prompt with several sounds is refused where the processor joins them in another way.
        part = rig.processor.parts["audio"]
        first: Sequence[Piece] = ("audio", (16000,)), " or "
        is_one = isinstance(part, OwnPart) and not part.several
        rows += [(*(() if is_one else first), ("audio", (2500,)), "?")]
    if sounds and pictures:
        rows += [("see", ("image", (16, 24, 3)), "hear", ("audio", (4000,)))]
    return [rig.prompt(str(i), *row, seed=i) for i, row in enumerate(rows)]


def mixed_batch(prompts: Sequence[Prompt], seed: int = 0) -> Batch:
    """Groups of 3, 2, 1, 3 ... answers of length 0 to 7 to ``prompts``."""
    generator = torch.Generator().manual_seed(seed)
    of = [p for p in range(len(prompts)) for _ in range((3, 2, 1)[p % 3])]
    lengths = [5, 0, 3, 7, 1, 4, 6, 2]
    answers = [
        torch.randint(4, 90, (lengths[i % len(lengths)],), generator=generator).tolist()
        for i in range(len(of))
    ]
    return Batch(Segments.of_prompts(prompts), Segments.of(answers), torch.tensor(of))
