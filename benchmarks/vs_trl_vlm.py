"""A step of GRPO with pictures here against the same step of TRL's ``GRPOTrainer``: whole step, generation, update, peak memory.

As ``vs_trl.py``, whose rounds, calibration and report these are, with a Qwen2.5-VL: every prompt is a picture of its own, or
four, and some text, 8 answers of 64 new tokens to each of 4 prompts, every weight trained, the tower's too.

    python benchmarks/vs_trl_vlm.py [--rounds 3] [--cases one64 four64 one256] [--machine NAME]

Needs ``pip install trl``. TRL's side gets transformers' own processor for the family, without its part for videos, which needs
torchvision; no case here has a video. Compare ratios only: absolute times belong to the machine.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vs_trl import (
    HIDDEN,
    LAYERS,
    NEW_TOKENS,
    TEXT_SIZES,
    Variant,
    Work,
    characters,
    load_tokenizer,
    main,
    unpadded,
    write_lines,
)

VOCABULARY = 4096
PATCH, MERGE = 14, 2
MARKS, TEMPLATE = 2, 40
"""Tokens around each picture, and at most so many of a prompt that are the chat template's."""
TOWER: dict[str, Any] = {
    "depth": LAYERS,
    "hidden_size": HIDDEN * 5 // 8,
    "intermediate_size": HIDDEN * 5 * 11 // (8 * 4),
    "num_heads": 5,
    "patch_size": PATCH,
    "window_size": 8 * PATCH,
    "fullatt_block_indexes": [LAYERS - 1],
    "initializer_range": 0.02,
}


@dataclass(frozen=True)
class Case:
    """``pictures`` in each prompt, of ``side`` features along each side. ``seconds`` and ``full`` as in ``vs_trl.py``."""

    pictures: int
    side: int
    steps: int
    text_tokens: int = 128
    vocabulary: int = VOCABULARY
    seconds: bool = True
    full: bool = True


CASES = {"one64": Case(1, 8, 4), "four64": Case(4, 8, 3), "one256": Case(1, 16, 3)}


class Pictures(Work):
    script = Path(__file__)
    stem = "vs_trl_vlm"
    title = "A GRPO step with pictures against TRL's GRPOTrainer"
    model = f"qwen2_5_vl, tower of {LAYERS} layers of {TOWER['hidden_size']}; language model of"
    cases: Mapping[str, Any] = CASES
    usual = checked = ("one64", "four64", "one256")

    def make(self, folder: Path, vocabulary: int) -> None:
        from lightrft.models.tiny import save_tiny_media, tiny_media_tokenizer

        # Without characters it has one for the space.
        special = len(tiny_media_tokenizer("qwen2_5_vl", chars="")) - 1
        bounds = {"shortest_edge": PATCH**2, "longest_edge": (64 * PATCH) ** 2}
        processor = {"patch_size": PATCH, "merge_size": MERGE, "size": bounds}
        sizes = {**TEXT_SIZES, "max_position_embeddings": 4096}
        save_tiny_media(
            "qwen2_5_vl",
            folder,
            chars=characters(vocabulary - special),
            processor=processor,
            tower=TOWER,
            **sizes,
        )

    def prompts(self, folder: Path, scratch: Path, case: Case, count: int) -> list[dict[str, Any]]:
        """Pictures of noise; TRL's data set names the files too, and decodes them when the row is drawn."""
        import numpy as np
        from PIL import Image

        letters = [c for c in load_tokenizer(folder).get_vocab() if len(c) == 1 and not c.isspace()]
        draw, noise = random.Random(0), np.random.default_rng(0)
        theirs, ours = [], []
        for i in range(count):
            names = [f"{i}-{k}.png" for k in range(case.pictures)]
            for name in names:
                side = case.side * PATCH * MERGE
                Image.fromarray(noise.integers(0, 256, (side, side, 3), dtype=np.uint8)).save(
                    scratch / name
                )
            text = "".join(draw.choices(letters, k=case.text_tokens))
            parts = [
                *({"type": "image", "image": name} for name in names),
                {"type": "text", "text": text},
            ]
            ours.append({"prompt": [{"role": "user", "content": parts}]})
            theirs.append(
                {
                    "prompt": [{"role": "user", "content": text}],
                    "images": [str(scratch / name) for name in names],
                }
            )
        write_lines(scratch / "prompts.jsonl", ours)
        return theirs

    def prompt_tokens(self, case: Case) -> int:
        return case.pictures * (case.side**2 + MARKS) + case.text_tokens + TEMPLATE

    def data(self, scratch: Path) -> dict[str, Any]:
        return {"sources": [{"path": str(scratch / "prompts.jsonl")}], "apply_chat_template": True}

    def dataset(self, rows: list[dict[str, Any]]) -> Any:
        from datasets import Image, List

        return super().dataset(rows).cast_column("images", List(Image()))

    def trl_model(self, folder: Path, variant: Variant) -> Any:
        from transformers import Qwen2_5_VLForConditionalGeneration

        return Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype="float32")

    def processing_class(self, folder: Path) -> Any:
        from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
            Qwen2VLImageProcessorPil,
        )

        class WithoutVideos(Qwen2_5_VLProcessor):
            def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
                return type(argument)

        tokenizer = load_tokenizer(folder)
        return WithoutVideos(
            Qwen2VLImageProcessorPil.from_pretrained(folder),
            tokenizer,
            None,
            chat_template=tokenizer.chat_template,
        )

    def segments(self, inputs: dict[str, Any], rows: list[int]) -> Any:
        import torch

        from lightrft.types import Ragged, Segments

        each = inputs["num_images"]
        grids = inputs["image_grid_thw"].split(each)
        patches = inputs["pixel_values"].split([int(grid.prod(-1).sum()) for grid in grids])
        media = {
            name: Ragged(
                torch.cat([some[row] for row in rows]),
                torch.tensor([len(some[row]) for row in rows]),
            )
            for name, some in (("pixel_values", patches), ("image_grid_thw", grids))
        }
        return Segments.of([unpadded(inputs, row) for row in rows], media)

    def about(self, case: Case) -> str:
        return (
            f"{case.pictures} picture{'s' * (case.pictures > 1)} of {case.side**2} features "
            f"({(case.side * MERGE) ** 2:,} patches) and {case.text_tokens} characters, answers "
            f"of {NEW_TOKENS} tokens, vocabulary {case.vocabulary:,}"
        )


if __name__ == "__main__":
    main(Pictures(), __doc__)
