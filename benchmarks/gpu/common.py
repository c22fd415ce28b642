# ruff: noqa: E402 (the environment is set before torch is imported)
"""What the scripts of this folder share: models made on the spot, the machine and its speed, what a step costs, and results in files."""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

from benchmarks.scaling_costs import Model
from benchmarks.vs_trl import characters, cpu_model, write_lines

QWEN = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "max_position_embeddings": 32768,
    "initializer_range": 0.02,
}
SIZES: dict[str, dict[str, Any]] = {
    "smoke": {
        "vocab_size": 300,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    | {"intermediate_size": 128, "tie_word_embeddings": True, "initializer_range": 0.02},
    "0.5b": {
        "vocab_size": 151936,
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
    }
    | {"num_key_value_heads": 2, "intermediate_size": 4864, "tie_word_embeddings": True, **QWEN},
    "1.5b": {
        "vocab_size": 151936,
        "hidden_size": 1536,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
    }
    | {"num_key_value_heads": 2, "intermediate_size": 8960, "tie_word_embeddings": True, **QWEN},
    "3b": {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
    }
    | {"num_key_value_heads": 2, "intermediate_size": 11008, "tie_word_embeddings": True, **QWEN},
    "7b": {
        "vocab_size": 152064,
        "hidden_size": 3584,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
    }
    | {"num_key_value_heads": 4, "intermediate_size": 18944, "tie_word_embeddings": False, **QWEN},
}
"""Those of Qwen2.5's configs, with weights drawn at random: a step costs the same whatever they are."""
SHEET = {"H200": 989.4e12, "H100": 989.4e12, "H20": 148e12, "A100": 312e12}
"""Dense bfloat16 FLOP/s of a GPU by its name, as data sheets have it (SXM); of another one the measured matrix product stands alone."""
REWARD = '''"""Kept apart, since the reward runs in a worker process."""


def varied(rollout):
    """Cheap, and different for the answers of a group."""
    return sum(rollout.token_ids) % 7 / 7
'''


def parser(description: str | None) -> argparse.ArgumentParser:
    """With what every script of this folder takes."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "--smoke",
        action="store_true",
        help="a tiny model and few tokens, on whatever is there: does the script run?",
    )
    made.add_argument(
        "--machine", default="", help="name in the result files; that of the device without it"
    )
    made.add_argument(
        "--out", type=Path, default=Path(os.environ.get("OUT") or ROOT / "benchmarks" / "results")
    )
    return made


def device() -> torch.device:
    """The GPU, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def device_name() -> str:
    """As the driver has it."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_model()


def machine_name(given: str = "") -> str:
    """For file names: the device, how many there are, and the cores beside it."""
    many = f"{torch.cuda.device_count()}gpu-" if torch.cuda.is_available() else ""
    return given or re.sub(
        r"[^a-z0-9]+", "-", f"{device_name()}-{many}{os.cpu_count()}cores".lower()
    ).strip("-")


def machine() -> dict[str, Any]:
    """What results must be read with."""
    from importlib.metadata import PackageNotFoundError, version

    found: dict[str, Any] = {
        "device": device_name(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
    }
    if torch.cuda.is_available():
        found |= {
            "gpus": torch.cuda.device_count(),
            "GiB": round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1),
        }
        found["cuda"] = torch.version.cuda
    found["python"] = platform.python_version()
    for name in ("torch", "transformers", "peft", "trl", "vllm", "bitsandbytes"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def wait() -> None:
    """Until all that was asked of the device is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak_memory() -> int:
    """Bytes of tensors that the GPU has held at most; 0 without one."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


def scratch(size: str) -> Path | None:
    """A folder in memory with room for a model of ``size``, else the system's own for what is temporary."""
    memory = Path("/dev/shm")
    enough = memory.is_dir() and shutil.disk_usage(memory).free > 3 * 2 * parameters(size)
    return memory if enough else None


def model_folder(name: str, build: Callable[[Path], object], own: Path) -> Path:
    """Return the folder of the model ``name``, which ``build`` writes once for all parts of ``run_all.py``.

    Without ``run_all.py``, which names a folder in the environment, it is under ``own``.
    """
    folder = Path(os.environ.get("GPU_MODELS") or own) / name
    if not folder.is_dir():
        # A process that is ended meanwhile must not leave half a model.
        partial = folder.with_name(f"{name}-{os.getpid()}")
        build(partial)
        partial.rename(folder)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    return folder


def parameters(size: str) -> int:
    """Weights of a model by its name."""
    s = SIZES[size]
    h, head = s["hidden_size"], s["hidden_size"] // s["num_attention_heads"]
    keys = s["num_key_value_heads"] * head
    block = 2 * h * h + 2 * h * keys + 3 * h * s["intermediate_size"] + 2 * h + h + 2 * keys
    return (
        s["num_hidden_layers"] * block
        + h
        + s["vocab_size"] * h * (1 if s["tie_word_embeddings"] else 2)
    )


def config_of(size: str) -> Any:
    """Return the transformers config of a model by its name."""
    from lightrft.models.tiny.text import tiny_config

    fields = dict(SIZES[size])
    return tiny_config("qwen2", vocab_size=fields.pop("vocab_size"), **fields)


def random_model(size: str, dtype: torch.dtype) -> Any:
    """A model of ``size`` on the device, with random weights."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with device():
        model = AutoModelForCausalLM.from_config(config_of(size), dtype=dtype)
    found = sum(p.numel() for p in model.parameters())
    assert found == parameters(size), (found, parameters(size))
    return model


def make(size: str, folder: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """A model folder of ``size`` with a tokenizer of one token for each row of its vocabulary, and a file with a reward."""
    from lightrft.models.loading.hf_logging import suppress_hf_warnings
    from lightrft.models.tiny.text import tiny_tokenizer

    model = random_model(size, dtype)
    config = model.config
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = (
        config.pad_token_id,
        config.eos_token_id,
    )
    with suppress_hf_warnings(local=True):
        model.save_pretrained(folder)
    tokenizer = tiny_tokenizer(chars=characters(config.vocab_size - 4))
    # Prompts are text without a template on all sides.
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    (folder / "rewards.py").write_text(REWARD, encoding="utf-8")
    return folder


def write_prompts(folder: Path, vocabulary: int, count: int, tokens: int) -> Path:
    """A file of ``count`` prompts of ``tokens`` random characters each."""
    letters, draw = characters(vocabulary - 4), random.Random(0)
    write_lines(
        folder / "prompts.jsonl",
        [{"prompt": "".join(draw.choices(letters, k=tokens))} for _ in range(count)],
    )
    return folder / "prompts.jsonl"


@dataclass(frozen=True)
class Speed:
    """FLOP/s of the device: what its data sheet says, if that is known here, and what a large matrix product reaches."""

    sheet: float | None
    product: float
    dtype: str

    @property
    def peak(self) -> float:
        """What utilisation is a share of."""
        return self.sheet or self.product

    @property
    def source(self) -> str:
        said = f"a {self.dtype} matrix product here reaches {self.product / 1e12:.3g} TFLOP/s"
        return (
            f"{self.sheet / 1e12:.4g} TFLOP/s by the data sheet; {said}"
            if self.sheet
            else f"{said}, which counts as the peak"
        )


def speed() -> Speed:
    """Measured by the best of ten products of square matrices of random numbers."""
    gpu = torch.cuda.is_available()
    side, dtype = (8192, torch.bfloat16) if gpu else (512, torch.float32)
    a, b = (torch.randn(side, side, device=device(), dtype=dtype) for _ in range(2))
    best = float("inf")
    for _ in range(12):
        wait()
        began = time.perf_counter()
        a @ b
        wait()
        best = min(best, time.perf_counter() - began)
    name = device_name()
    sheet = (
        next((flops for key, flops in SHEET.items() if re.search(rf"\b{key}\b", name)), None)
        if gpu
        else None
    )
    return Speed(sheet, 2 * side**3 / best, str(dtype).removeprefix("torch."))


@dataclass(frozen=True)
class Work:
    """FLOPs that a step asks for, by phase. Nothing is counted that is computed twice, or for padding."""

    drawing: float
    forward: float
    update: float


def work_of(
    model: Model,
    head: float,
    prompts: Sequence[int],
    answers: Sequence[int],
    prompt_of: Sequence[int],
    *,
    frozen: bool,
) -> Work:
    """The arithmetic of drawing, of one forward and of the update of these answers.

    A product with a matrix of n weights is 2 n for a token, and attention 4 L q for a pair of tokens (q: width of the queries). A
    prompt counts once for all of its answers, and an answer's last token is read by nobody: T = prompts + answers - rows. The head
    (``head`` weights) counts for answer tokens alone. Forward: F = 2 N T + 2 head A + 4 L q S. Update: 3 F; with ``frozen`` weights,
    whose own gradient is not asked for, 2 F. Drawing is one F.
    """
    run = [max(0, n - 1) for n in answers]
    tokens = sum(prompts) + sum(run)
    seen = sum(p * (p + 1) / 2 for p in prompts) + sum(
        n * prompts[at] + n * (n + 1) / 2 for n, at in zip(run, prompt_of)
    )
    forward = model.forward_flops(tokens, seen) + 2 * head * sum(answers)
    return Work(forward, forward, forward * (2 if frozen else 3))


def dense(size: str) -> tuple[Model, float]:
    """A model by its name, without embeddings, and the weights of its head."""
    s = SIZES[size]
    head = s["vocab_size"] * s["hidden_size"]
    body = parameters(size) - head * (1 if s["tie_word_embeddings"] else 2)
    keys = s["num_key_value_heads"] * s["hidden_size"] // s["num_attention_heads"]
    return Model(size, body, s["num_hidden_layers"], s["hidden_size"], s["hidden_size"], keys), head


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """In Markdown."""
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows)]


def write(
    out: Path, name: str, given: str, title: str, tree: dict[str, Any], lines: Sequence[str]
) -> None:
    """``NAME-MACHINE.json`` and ``.md`` under ``out``; the latter is printed too."""
    about = machine()
    command = " ".join(
        ["python", str(Path(sys.argv[0]).resolve().relative_to(ROOT)), *sys.argv[1:]]
    )
    said = ", ".join(f"{key} {value}" for key, value in about.items())
    text = "\n".join([f"# {title}", "", f"`{command}`", "", f"Machine: {said}", "", *lines, ""])
    out.mkdir(parents=True, exist_ok=True)
    stem = f"{name}-{machine_name(given)}"
    (out / f"{stem}.json").write_text(
        json.dumps({"command": command, "machine": about, **tree}, indent=1) + "\n",
        encoding="utf-8",
    )
    (out / f"{stem}.md").write_text(text, encoding="utf-8")
    print(text)
