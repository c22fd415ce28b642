"""A step of GRPO here against the same step of TRL's ``GRPOTrainer``, on the same GPU in the same run.

Rounds, calibration and report are those of ``benchmarks/vs_trl.py``: a process for each round of a side, rounds in turns, and each side as
it was fastest in a calibration round. Both compute in bfloat16. Weights here are bfloat16 with float32 masters; TRL's are tried as
float32 under autocast and as bfloat16, its generation by ``generate``, by continuous batching and, where vllm is installed, by vllm.
This side decodes by CUDA graphs, its default on a GPU. What fails of these is said and left out.

    python benchmarks/gpu/vs_trl.py [--cases 0.5b 0.5b-32 1.5b] [--rounds 2] [--fixed] [--smoke]

``--fixed`` tries no variants: TRL has bfloat16 weights and ``generate``, which was its fastest on an H100.

Needs ``pip install trl``. Without it ``--smoke`` runs this side alone; anything else ends with status 3.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import common  # first: it says where the rest lies

from benchmarks import vs_trl
from benchmarks.vs_trl import Variant, Work, main


@dataclass(frozen=True)
class Case:
    """``size`` names the model. Answers may end by themselves, which hardly one of a vocabulary so large does."""

    size: str
    prompt_tokens: int
    steps: int
    seconds: bool = True
    full: bool = False
    new_tokens: int = 256

    @property
    def vocabulary(self) -> int:
        return common.SIZES[self.size]["vocab_size"]


class OnGPU(Work):
    """As ``WorkBatch``, on the GPU where there is one."""

    script = Path(__file__)
    stem = "vs_trl_gpu"
    cases: Mapping[str, Any] = {
        "0.5b": Case("0.5b", 512, 2),
        "0.5b-32": Case("0.5b", 32, 4, new_tokens=64),
        "1.5b": Case("1.5b", 512, 2),
        "smoke": Case("smoke", 16, 1, new_tokens=8),
    }
    usual = ("0.5b",)
    checked = ("0.5b", "smoke")
    model = "qwen2"
    groups, answers = 8, 8

    def __init__(self, smoke: bool, case: str = "0.5b", fixed: bool = False) -> None:
        self.fixed = fixed
        self.new_tokens = self.cases[case].new_tokens
        self.device = str(common.device())
        self.dtype = "bfloat16" if self.device == "cuda" else "float32"
        self.size = f"weights drawn at random, {self.dtype} here (with float32 masters)"
        if smoke:
            self.groups, self.answers = 2, 2

    def made_of(self, case: Case) -> str:
        return case.size

    def make(self, folder: Path, of: str) -> None:
        common.make(of, folder)

    def variants(self, case: Case, side: str) -> list[Variant]:
        if self.device == "cpu":
            return [Variant(side, 1, n) for n in (self.whole, self.whole // 4)]
        if side == "lightrft":
            return [Variant(side, 1, self.whole)]
        kinds = ("bfloat16",) if self.fixed else ("float32", "bfloat16")
        return [Variant(side, 1, self.whole, weights=kind) for kind in kinds]

    def further(self, case: Case, best: Variant) -> list[Variant]:
        if self.device == "cpu":
            return []  # continuous batching takes a minute and gigabytes there
        if self.fixed:
            return []
        ways = [replace(best, generation="continuous")]
        return ways + ([replace(best, generation="vllm")] if find_spec("vllm") else [])

    def trl_options(self, variant: Variant) -> dict[str, Any]:
        if self.device == "cpu":
            return super().trl_options(variant)
        vllm = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.3}
        return {"bf16": True, **(vllm if variant.generation == "vllm" else {})}

    def machine(self) -> str:
        return common.device_name()

    def wait(self) -> None:
        common.wait()

    def peak_mb(self) -> float:
        return common.peak_memory() / 2**20 if self.device == "cuda" else super().peak_mb()

    def workers_mb(self) -> float:
        return 0.0 if self.device == "cuda" else super().workers_mb()

    def about(self, case: Case) -> str:
        self.new_tokens = case.new_tokens
        return f"Qwen2.5-{case.size}, {super().about(case)}"


def one_side(work: OnGPU) -> None:
    """A round of this side, where the other is not installed."""
    with tempfile.TemporaryDirectory() as folder:
        vs_trl.call(work, "make", 1, folder=folder, of="smoke")
        got = vs_trl.one_round(
            work, "smoke", work.variants(work.cases["smoke"], "lightrft")[0], Path(folder), 1
        )
    print(
        f"trl is not installed (pip install trl): this side alone ran, {got['step']:.2f} s a step"
    )


def arguments(given: list[str]) -> list[str]:
    """``--smoke`` as the case of that name, without ``--fixed``."""
    given = [g for g in given if g != "--fixed"]
    if "--smoke" in given:
        given = [*(g for g in given if g != "--smoke"), "--cases", "smoke", "--rounds", "1"]
    if os.environ.get("OUT") and "--out" not in given:
        given = [*given, "--out", os.environ["OUT"]]
    return given


if __name__ == "__main__":
    order = json.loads(sys.argv[2]) if sys.argv[1:2] == ["--worker"] else {}
    fixed = "--fixed" in sys.argv
    smoke = "--smoke" in sys.argv or order.get("case") == "smoke"
    sys.argv[1:] = sys.argv[1:] if order else arguments(sys.argv[1:])
    if find_spec("trl") or order:
        case = order.get("case") or next((a for a in sys.argv if a in OnGPU.cases), "0.5b")
        main(OnGPU(smoke, case, fixed), __doc__)
    elif smoke:
        one_side(OnGPU(smoke, "smoke"))
    else:
        print("not run: needs trl (pip install trl)")
        sys.exit(3)
