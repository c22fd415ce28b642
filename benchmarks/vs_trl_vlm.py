"""A step of GRPO with pictures here against the same step of TRL's ``GRPOTrainer``: whole step, generation, update, peak memory.

As ``vs_trl.py``, whose rounds, calibration and report these are, with a Qwen2.5-VL, a LLaVA-1.5 and a PaliGemma: every prompt is
a picture of its own, or four, and some text, 8 answers of 64 new tokens to each of 4 prompts, every weight trained, the tower's too.

    python benchmarks/vs_trl_vlm.py [--rounds 3] [--cases one64 four64 one256 llava64 paligemma64] [--machine NAME]

Needs ``pip install trl``. TRL's side gets transformers' own processor for the family, without its part for videos, which needs
torchvision; no case here has a video. Compare ratios only: absolute times belong to the machine.

``paligemma64`` is timed and not compared: TRL marks the tokens of an answer as those of a prompt, which PaliGemma reads in both
directions, so that its log-probs see the tokens that follow.
"""

from __future__ import annotations

import json
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


FIXED = 32
"""Pixels along each side of a picture of the families with pictures of one size, of 8 patches of 4 pixels."""
_FIXED_TOWER: dict[str, Any] = {
    "image_size": FIXED,
    "patch_size": 4,
    "num_hidden_layers": LAYERS,
    "hidden_size": HIDDEN * 5 // 8,
    "intermediate_size": HIDDEN * 5 // 2,
    "num_attention_heads": 5,
    "initializer_range": 0.02,
}
_SIZE = {"height": FIXED, "width": FIXED}


@dataclass(frozen=True)
class Family:
    """``pixels`` along each side of a feature, settings of the tower and of the processor, and TRL's class of the model."""

    pixels: int
    tower: Mapping[str, Any]
    processor: Mapping[str, Any]
    model: str


FAMILIES = {
    "qwen2_5_vl": Family(
        PATCH * MERGE,
        TOWER,
        {
            "patch_size": PATCH,
            "merge_size": MERGE,
            "size": {"shortest_edge": PATCH**2, "longest_edge": (64 * PATCH) ** 2},
        },
        "Qwen2_5_VLForConditionalGeneration",
    ),
    "llava": Family(
        4,
        _FIXED_TOWER,
        {"size": {"shortest_edge": FIXED}, "crop_size": _SIZE},
        "LlavaForConditionalGeneration",
    ),
    "paligemma": Family(
        4,
        {**_FIXED_TOWER, "projection_dim": HIDDEN},
        {"size": _SIZE, "image_seq_length": (FIXED // 4) ** 2},
        "PaliGemmaForConditionalGeneration",
    ),
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
    family: str = "qwen2_5_vl"


CASES = {
    "one64": Case(1, 8, 4),
    "four64": Case(4, 8, 3),
    "one256": Case(1, 16, 3),
    "llava64": Case(1, 8, 4, family="llava"),
    "paligemma64": Case(1, 8, 4, family="paligemma"),
}


def family_in(folder: Path) -> str:
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"]


class Pictures(Work):
    script = Path(__file__)
    stem = "vs_trl_vlm"
    title = "A GRPO step with pictures against TRL's GRPOTrainer"
    model = f"tower of {LAYERS} layers of {TOWER['hidden_size']}; language model of"
    cases: Mapping[str, Any] = CASES
    usual = tuple(CASES)
    checked = ("one64", "four64", "one256", "llava64")

    def made_of(self, case: Case) -> tuple[str, int]:
        return (case.family, case.vocabulary)

    def make(self, folder: Path, of: tuple[str, int]) -> None:
        from lightrft.models.tiny import save_tiny_media, tiny_media_tokenizer

        family, vocabulary = of
        # Without characters it has one for the space.
        special = len(tiny_media_tokenizer(family, chars="")) - 1
        save_tiny_media(
            family,
            folder,
            chars=characters(vocabulary - special - 1) + "\n",
            processor=dict(FAMILIES[family].processor),
            tower=dict(FAMILIES[family].tower),
            **{**TEXT_SIZES, "max_position_embeddings": 4096},
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
                side = case.side * FAMILIES[case.family].pixels
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
        import transformers

        model_class = getattr(transformers, FAMILIES[family_in(folder)].model)
        return model_class.from_pretrained(folder, dtype="float32")

    def processing_class(self, folder: Path) -> Any:
        from transformers import AutoProcessor
        from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
            Qwen2VLImageProcessorPil,
        )

        tokenizer = load_tokenizer(folder)
        if family_in(folder) != "qwen2_5_vl":
            # The processor of PaliGemma writes it after the pictures.
            tokenizer.bos_token = tokenizer.bos_token or tokenizer.eos_token
            processor = AutoProcessor.from_pretrained(folder, use_fast=False)
            processor.tokenizer, processor.chat_template = tokenizer, tokenizer.chat_template
            return processor

        class WithoutVideos(Qwen2_5_VLProcessor):
            def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
                return type(argument)

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
        if "image_grid_thw" in inputs:
            grids = inputs["image_grid_thw"].split(each)
            patches = inputs["pixel_values"].split([int(grid.prod(-1).sum()) for grid in grids])
            media = {"pixel_values": patches, "image_grid_thw": grids}
        else:
            pixels = inputs["pixel_values"].split(each)
            places = [torch.full((count,), (FIXED // 4) ** 2) for count in each]
            media = {"pixel_values": pixels, "image_placeholders": places}
        return Segments.of(
            [unpadded(inputs, row) for row in rows],
            {
                name: Ragged(
                    torch.cat([some[row] for row in rows]),
                    torch.tensor([len(some[row]) for row in rows]),
                )
                for name, some in media.items()
            },
        )

    def about(self, case: Case) -> str:
        patches = (case.side * (MERGE if case.family == "qwen2_5_vl" else 1)) ** 2
        return (
            f"{case.family}, {case.pictures} picture{'s' * (case.pictures > 1)} of {case.side**2} "
            f"features ({patches:,} patches) and {case.text_tokens} characters, answers "
            f"of {NEW_TOKENS} tokens, vocabulary {case.vocabulary:,}"
        )


if __name__ == "__main__":
    main(Pictures(), __doc__)
