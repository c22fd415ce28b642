"""Load model folders by plain transformers, of any version, and print how far their logits are from ``expected.pt``.

With ``item.json`` in the folder, a prompt with a picture or a sound, print its token ids by the folder's own processor instead.
Many processors need torchvision.

usage: read_folders.py   (a line [KIND, [FOLDER, ...]] gives a line with a JSON object: folder to result. KIND is read or rewrite.)
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
from transformers import AutoProcessor, AutoTokenizer

MARK = "results: "
IDS = torch.arange(4, 12)[None]


def processed(folder: Path, item: dict[str, Any]) -> dict[str, Any]:
    """Return the token ids that the folder's own processor makes of ``item``, and those of its text with placeholders."""
    processor = AutoProcessor.from_pretrained(folder)
    if item["kind"] == "image":
        value = np.array(item["value"], dtype=np.uint8)
        made = processor(
            text=[item["text"]], images=[[Image.fromarray(value)]], return_tensors="pt"
        )
    else:
        value = np.array(item["value"], dtype=np.float32)
        made = processor(
            text=[item["text"]], audio=[value], sampling_rate=16000, return_tensors="pt"
        )
    # Both add the special tokens that the tokenizer adds by itself.
    expected = processor.tokenizer(item["expanded"])["input_ids"]
    return {"ids": np.asarray(made["input_ids"])[0].tolist(), "expected": expected}


def class_of(folder: Path) -> Any:
    """Return the class of the folder's model, or its name if this version has none."""
    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    return getattr(transformers, name, name)


def read(folder: Path) -> dict[str, Any]:
    if (folder / "item.json").exists():
        return processed(folder, json.loads((folder / "item.json").read_text()))
    loader = class_of(folder)
    if isinstance(loader, str):
        return {"unknown": loader}
    # as the folder's own class, by its own attention, which every version has
    config = loader.config_class.from_pretrained(folder)
    if hasattr(config, "use_mamba_kernels"):  # they need a GPU
        config.use_mamba_kernels = False
    model, info = loader.from_pretrained(
        folder, config=config, output_loading_info=True, attn_implementation="eager"
    )
    wrong = {kind: sorted(map(str, names))[:3] for kind, names in info.items() if names}
    expected = torch.load(folder / "expected.pt")
    with torch.no_grad():
        # Layers of Gemma 3n read the keys of another layer from the cache alone.
        use_cache = config.model_type.startswith("gemma3n")
        made = model.eval()(input_ids=IDS, attention_mask=torch.ones_like(IDS), use_cache=use_cache)
        found = made.logits.float()
    gap = float((found - expected).abs().max() / expected.abs().max())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return {"gap": gap, "wrong": wrong, "ids": tokenizer("1+1=")["input_ids"]}


def rewrite(folder: Path) -> dict[str, Any]:
    """Replace the weights of a folder by random ones, with the names and the config of this version."""
    loader = class_of(folder)
    if isinstance(loader, str):
        return {"unknown": loader}
    torch.manual_seed(1)
    model = loader(loader.config_class.from_pretrained(folder)).float()
    with torch.no_grad():
        for parameter in model.parameters():
            # A zero projector would hide the picture.
            if parameter.ndim > 1 and not parameter.any():
                torch.nn.init.normal_(parameter, std=0.1)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder)
    return {}


def answer(kind: str, folders: list[str]) -> dict[str, Any]:
    results: dict[str, Any] = {"version": transformers.__version__}
    for folder in folders:
        try:
            results[folder] = {"read": read, "rewrite": rewrite}[kind](Path(folder))
        except Exception as error:
            results[folder] = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
    return results


def main() -> None:
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    for line in sys.stdin:
        # Libraries may print too, without an end of line.
        sys.stdout.write("\n" + MARK + json.dumps(answer(*json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
