"""Load model folders by plain transformers, of any version, and print how far their logits are from ``expected.pt``.

With ``item.json`` in the folder, a prompt with a picture or a sound, print its token ids by the folder's own processor instead.

usage: read_folders.py FOLDER ...   (prints one JSON object: folder to result)
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from transformers import AutoImageProcessor, AutoProcessor, AutoTokenizer

IDS = torch.arange(4, 12)[None]


def processed(folder: Path, item: dict[str, Any]) -> dict[str, Any]:
    """Return the token ids that the folder's own processor makes of ``item``, or the patches that its picture processor makes."""
    if item["kind"] == "patches":
        pictures = AutoImageProcessor.from_pretrained(folder, use_fast=False)
        value = np.array(item["value"], dtype=np.uint8)
        return {
            "grid": np.asarray(pictures(images=[Image.fromarray(value)])["image_grid_thw"]).tolist()
        }
    processor = AutoProcessor.from_pretrained(folder)
    if item["kind"] == "image":
        value = np.array(item["value"], dtype=np.uint8)
        made = processor(text=[item["text"]], images=[[Image.fromarray(value)]])
    else:
        value = np.array(item["value"], dtype=np.float32)
        made = processor(text=[item["text"]], audio=[value], sampling_rate=16000)
    return {"ids": np.asarray(made["input_ids"])[0].tolist()}


def read(folder: Path) -> dict[str, Any]:
    if (folder / "item.json").exists():
        return processed(folder, json.loads((folder / "item.json").read_text()))
    fields = json.loads((folder / "config.json").read_text())
    loader = getattr(transformers, fields["architectures"][0], None)
    if loader is None:
        return {"unknown": fields["architectures"][0]}
    # as the folder's own class, by its own attention, which every version has
    model, info = loader.from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager"
    )
    wrong = {kind: sorted(map(str, names))[:3] for kind, names in info.items() if names}
    expected = torch.load(folder / "expected.pt")
    with torch.no_grad():
        found = model.eval()(input_ids=IDS, use_cache=False).logits.float()
    gap = float((found - expected).abs().max() / expected.abs().max())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return {"gap": gap, "wrong": wrong, "ids": tokenizer("1+1=")["input_ids"]}


def main(folders: list[str]) -> None:
    transformers.utils.logging.set_verbosity_error()
    results = {"version": transformers.__version__}
    for folder in folders:
        try:
            results[folder] = read(Path(folder))
        except Exception as error:
            results[folder] = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
    sys.stdout.write("\n" + json.dumps(results) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
