"""One side of a part of ``run_all.py``: steps of training by lightrft or by TRL, or decoding.

    python benchmarks/gpu/measure.py grpo --size 0.5b [--micro 16384] [--set model.gradient_checkpointing=true]

Models are made on the spot, and no response ends by itself, so that each run does the same work. A GRPO step
goes through the functions of ``lightrft rl``. Utilization is the FLOPs that a step asks for over what the
device could do meanwhile; ``common.work_of`` has the formula. Numbers go to ``measured.json`` under ``--out``.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import common  # first: it says where the rest lies
import torch
from operations import Profiler

from benchmarks.generate import native, transformers_generate
from benchmarks.vs_trl import open_run
from lightrft.config.base import load_settings
from lightrft.config.verbs import DPOConfig, RLConfig, SFTConfig
from lightrft.diagnostics.memory.estimate import MemoryEstimate, estimate_memory
from lightrft.diagnostics.memory.phases import Device, Lengths
from lightrft.engines.fingerprint import checksums
from lightrft.types import Prompt
from lightrft.utils.yaml_text import tree_to_yaml

GIB = 2**30
RESULT = "measured.json"
PHASES = ("generate", "logprobs", "update")
"""Phases of a step of lightrft that are reported. The optimizer's step is a part of the update."""
TRL = ("trl-grpo", "trl-sft", "trl-dpo")
ENDS = 8
"""Room for tokens that end a row."""
PICTURE = 448
"""Pixels along each side of a picture: 256 tokens."""
TOWER: dict[str, Any] = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "patch_size": 14,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
    "initializer_range": 0.02,
}
"""The tower of Qwen2.5-VL-3B."""
SMOKE_TOWER = {**TOWER, "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2}


class Stopwatch:
    """Seconds within wrapped functions since the last ``take``, with the work that they queued."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def wrap(
        self, owner: Any, method: str, name: str, wanted: Callable[[], bool] = lambda: True
    ) -> None:
        inner = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            if not wanted():
                return inner(*args, **kwargs)
            common.wait()
            began = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                common.wait()
                spent = time.perf_counter() - began
                self.seconds[name] = self.seconds.get(name, 0.0) + spent

        setattr(owner, method, timed)

    def take(self) -> dict[str, float]:
        seconds, self.seconds = self.seconds, {}
        return seconds


class Result:
    """Numbers of one side, written whenever some are added: a limit may end the process."""

    def __init__(self, out: Path, work: str) -> None:
        self._file = out / RESULT
        self.tree: dict[str, Any] = {"work": work, "numbers": {}}

    def add(self, numbers: dict[str, Any], **more: Any) -> None:
        self.tree["numbers"] |= numbers
        self.tree |= more
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text(json.dumps(self.tree, indent=1) + "\n", encoding="utf-8")
        for name, value in numbers.items():
            print(f"{name}: {value:.5g}" if isinstance(value, float) else f"{name}: {value}")


def half() -> str:
    """Return the type of weights: bfloat16 on a GPU."""
    return "bfloat16" if torch.cuda.is_available() else "float32"


def model_of(args: Any, own: Path) -> Path:
    """Return a folder with the model of ``args``."""
    if args.pictures:
        return common.model_folder(f"{args.size}-pictures", lambda f: picture_model(args, f), own)
    return common.model_folder(args.size, lambda f: common.make(args.size, f), own)


def picture_model(args: Any, folder: Path) -> None:
    """Write a Qwen2.5-VL whose language model has the size of ``args``."""
    from lightrft.models.tiny import save_tiny_media, tiny_media_tokenizer

    sizes = dict(common.SIZES[args.size])
    # Without characters it has one for the space.
    special = len(tiny_media_tokenizer("qwen2_5_vl", chars="")) - 1
    # The chat template has line breaks.
    chars = "\n" + common.characters(sizes.pop("vocab_size") - special - 1)
    patch = TOWER["patch_size"]
    bounds = {"shortest_edge": patch**2, "longest_edge": (64 * patch) ** 2}
    processor = {"patch_size": patch, "merge_size": 2, "size": bounds}
    tower = SMOKE_TOWER | {"fullatt_block_indexes": [1]} if args.size == "smoke" else TOWER
    with common.device():
        save_tiny_media(
            "qwen2_5_vl", folder, chars=chars, processor=processor, tower=tower, **sizes
        )
    (folder / "rewards.py").write_text(common.REWARD, encoding="utf-8")


def prompts_of(args: Any, scratch: Path) -> dict[str, Any]:
    """Write the prompts of all steps. Return the branch ``data`` of a config."""
    count = args.prompts * (args.steps + 2)
    # A tokenizer with tokens for media has fewer characters.
    vocabulary = common.SIZES[args.size]["vocab_size"] - 64 * bool(args.pictures)
    file = common.write_prompts(scratch, vocabulary, count, args.prompt)
    if not args.pictures:
        return {"sources": [str(file)], "apply_chat_template": False}
    from benchmarks.vs_trl import write_lines

    rows = []
    for i, line in enumerate(file.read_text(encoding="utf-8").splitlines()):
        for k in range(args.pictures):
            noise_picture(scratch / f"{i}-{k}.png", 56 if args.smoke else PICTURE, i)
        parts = [{"type": "image", "image": f"{i}-{k}.png"} for k in range(args.pictures)]
        text = {"type": "text", "text": json.loads(line)["prompt"]}
        rows.append({"prompt": [{"role": "user", "content": [*parts, text]}]})
    write_lines(file, rows)
    return {"sources": [str(file)]}


def noise_picture(file: Path, side: int, seed: int) -> None:
    import numpy as np
    from PIL import Image

    noise = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
    Image.fromarray(noise).save(file)


def base_tree(args: Any, model: Path, scratch: Path, data: dict[str, Any]) -> dict[str, Any]:
    """Return the branches that all verbs share."""
    return {
        "run": {"dir": str(scratch / "runs"), "name": "run", "progress": False},
        "model": {"path": str(model), "dtype": half(), "lora": {"rank": 16} if args.lora else None},
        "data": data,
        "train": {"steps": args.steps + 2, "max_tokens_per_micro_batch": args.micro},
        "log": {"tensorboard": False},
    }


def grpo_config(args: Any, model: Path, scratch: Path, data: dict[str, Any]) -> RLConfig:
    """Return the config of a run."""
    tree = base_tree(args, model, scratch, data) | {
        "rollout": {"prompts_per_step": args.prompts, "group_size": args.samples},
        "sampling": {"max_new_tokens": args.answer, "min_new_tokens": args.answer},
        "engine": {
            "max_num_seqs": args.prompts * args.samples,
            "max_cache_tokens": 2 * args.prompts * (args.prompt + args.samples * args.answer),
        },
        "reward": {"terms": [f"{model / 'rewards.py'}:varied"]},
        "algorithm": {"preset": "grpo", "kl": {"where": "none", "coef": 0.0}},
    }
    tree["log"] |= {"rollouts_every": 0, "entropy": False}
    return settings_of(RLConfig, tree, args, scratch)


def settings_of(cls: type[Any], tree: dict[str, Any], args: Any, scratch: Path) -> Any:
    """Return ``tree`` with the settings of the command line."""
    file = scratch / "config.yaml"
    file.write_text(tree_to_yaml(tree), encoding="utf-8")
    return load_settings(cls, [file], args.set).settings


def estimate(args: Any, config: RLConfig, device: Device) -> MemoryEstimate:
    """Return the memory that ``lightrft doctor`` expects of the step."""
    pictures = args.pictures * (PICTURE // (2 * TOWER["patch_size"])) ** 2
    lengths = Lengths(args.prompt + pictures, args.answer, args.prompts, args.samples)
    return estimate_memory(config, lengths, device)


def grpo(args: Any, scratch: Path, result: Result) -> None:
    """Steps of GRPO by lightrft, after one that warms up. A profile takes one more."""
    model = model_of(args, scratch)
    config = grpo_config(args, model, scratch, prompts_of(args, scratch))
    watch, rows, batch = Stopwatch(), [], None
    with open_run(config) as (session, run):
        watch.wrap(run.roles.strategy, "step", "optimizer")
        engine = Sleeper(run.roles.engine) if config.engine.kind == "vllm" else None

        def step(number: int) -> tuple[dict[str, float], Any]:
            common.wait()
            began = time.perf_counter()
            run.step = number
            found = run.learn_next()
            common.wait()
            seconds = time.perf_counter() - began
            values = session.record(number + 1, found.metrics)
            phases = {name: values.get(f"time/{name}", 0.0) for name in PHASES}
            return {"step": seconds, **phases, **watch.take()}, found.batch

        for number in range(args.steps + 1):
            row, batch = step(number)
            rows.append(row)
        assert batch is not None
        numbers = step_numbers(args, rows[1:], batch, frozen=args.lora)
        numbers["peak memory, GiB"] = common.peak_memory() / GIB
        numbers |= engine.numbers if engine else {}
        if args.deterministic:
            sums = checksums(run.roles.actor.model.named_parameters())
            text = "".join(f"{name}={sums[name]}" for name in sorted(sums))
            numbers["weights"] = hashlib.sha256(text.encode()).hexdigest()[:12]
        result.add(numbers, steps=rows)
        if args.profile:
            profiler = Profiler()
            around(importlib.import_module("lightrft.trainer.phases"), "update", profiler)
            step(args.steps + 1)
            result.add(profiler.result["numbers"], profile=profiler.result)
    # Last: tracing a large model takes seconds of the host.
    expected = estimate(args, config, Device(common.device().type, 0))
    phase = expected.largest
    parts = {f"{phase.name}, {name}": size / GIB for name, size in phase.parts.items()}
    parts |= {name: memory.total / GIB for name, memory in expected.models.items()}
    result.add({"memory by doctor, GiB": expected.peak / GIB}, memory=parts)


def around(owner: Any, name: str, profiler: Profiler) -> None:
    """Profile the calls of a function."""
    inner = getattr(owner, name)

    def profiled(*args: Any, **kwargs: Any) -> Any:
        profiler.start()
        try:
            return inner(*args, **kwargs)
        finally:
            profiler.stop()

    setattr(owner, name, profiled)


class Sleeper:
    """Memory of the device in use, and seconds, after an engine has slept and woken."""

    def __init__(self, engine: Any) -> None:
        self.numbers: dict[str, float] = {}
        for method, state in (("sleep", "asleep"), ("wake", "awake")):
            self._wrap(engine, method, state)

    def _wrap(self, engine: Any, method: str, state: str) -> None:
        inner = getattr(engine, method)

        def called(*args: Any) -> None:
            began = time.perf_counter()
            inner(*args)
            common.wait()
            self.numbers[f"seconds to {method}"] = time.perf_counter() - began
            if torch.cuda.is_available():
                free, total = torch.cuda.mem_get_info()
                self.numbers[f"device in use, vLLM {state}, GiB"] = (total - free) / GIB

        setattr(engine, method, called)


def step_numbers(
    args: Any, rows: list[dict[str, float]], batch: Any, *, frozen: bool
) -> dict[str, Any]:
    """Return medians of ``rows``, and speeds. ``batch`` has the lengths of a step."""
    names = dict.fromkeys(name for row in rows for name in row)
    middle = {name: statistics.median(row.get(name, 0.0) for row in rows) for name in names}
    prompts, responses = batch.prompts.lengths.tolist(), batch.lengths.tolist()
    model, head = common.dense(args.size)
    work = common.work_of(model, head, prompts, responses, batch.prompt_of.tolist(), frozen=frozen)
    peak = common.speed().peak
    update = max(1e-9, middle["update"])
    return {
        **{f"{name}, s": value for name, value in middle.items()},
        "response tokens/s, whole step": sum(responses) / middle["step"],
        "response tokens/s, generation": sum(responses) / max(1e-9, middle["generate"]),
        "tokens/s, update": (sum(prompts) + sum(responses)) / update,
        "utilization of the update": work.update / update / peak,
    }


def supervised(args: Any, scratch: Path, result: Result) -> None:
    """Steps of ``lightrft sft`` or ``lightrft dpo``."""
    from vs_trl_preference import rows_of

    from lightrft.observability.observer import NullObserver
    from lightrft.trainer.preference.run import run_preference
    from lightrft.trainer.sft import run_sft

    model = model_of(args, scratch)
    rows_of(preference_case(args), model, scratch)
    data = {"sources": [str(scratch / "rows.jsonl")], "shuffle": False}
    tree = base_tree(args, model, scratch, data) | {
        "batch_size": args.prompts,
        "max_tokens": args.prompt + args.answer + ENDS,
    }
    if args.kind == "dpo":
        tree["preference"] = {"beta": 0.1, "reference": {"source": "step"}}
    config = settings_of(SFTConfig if args.kind == "sft" else DPOConfig, tree, args, scratch)
    marks: list[float] = []

    class Enough(Exception):
        """The last measured step is done, and no checkpoint is wanted."""

    class Marks(NullObserver):
        def update(self, row: Any) -> None:
            common.wait()
            marks.append(time.perf_counter())
            if len(marks) == args.steps + 1:
                raise Enough

    with suppress(Enough):
        (run_sft if args.kind == "sft" else run_preference)(config, Marks())
    result.add(supervised_numbers(args, marks))


def preference_case(args: Any) -> Any:
    """Return the work of SFT or DPO as ``vs_trl_preference.py`` describes it."""
    from vs_trl_preference import Case

    verb = args.kind.removeprefix("trl-")
    return Case(verb, args.prompt, args.answer, args.prompts, args.steps, {})


def supervised_numbers(args: Any, marks: list[float]) -> dict[str, Any]:
    """Return the seconds of a step, and its speed, from the ends of steps."""
    seconds = statistics.median(b - a for a, b in pairwise(marks))
    return {
        "step, s": seconds,
        "rows/s": args.prompts / seconds,
        "peak memory, GiB": common.peak_memory() / GIB,
    }


def decoding(args: Any, scratch: Path, result: Result) -> None:
    """Responses of skewed lengths, which all engines are asked for."""
    generator = torch.Generator().manual_seed(0)
    total = args.prompts * args.samples
    skew = torch.randn(total, generator=generator).mul(0.9).exp().mul(args.answer / 3)
    lengths = skew.round().long().clamp(1, args.answer)
    vocabulary = common.SIZES[args.size]["vocab_size"]
    ids = torch.randint(4, vocabulary, (args.prompts, args.prompt), generator=generator).tolist()
    prompts = [Prompt(id=str(i), token_ids=row) for i, row in enumerate(ids)]
    model = model_of(args, scratch)
    if args.engine == "vllm":
        side = vllm_side(args, model, prompts, lengths)
    else:
        from transformers import AutoModelForCausalLM

        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=half())
        loaded = loaded.to(common.device()).eval()
        loaded.generation_config.eos_token_id = loaded.config.eos_token_id = None
        side = (
            native(loaded, prompts, lengths, compiled=torch.cuda.is_available())
            if args.engine == "native"
            else transformers_generate(loaded, prompts, lengths, total)
        )
    tokens = int(lengths.sum())
    seconds = []
    for _ in range(args.steps + 1):
        common.wait()
        began = time.perf_counter()
        assert side() == tokens
        common.wait()
        seconds.append(time.perf_counter() - began)
    middle = statistics.median(seconds[1:])
    lengths_text = f"{tokens:,} tokens, longest {int(lengths.max())}"
    result.tree["work"] += f"; {lengths_text}"
    result.add({"decoding, s": middle, "tokens/s": tokens / middle, "first call, s": seconds[0]})


def vllm_side(args: Any, model: Path, prompts: Any, lengths: torch.Tensor) -> Callable[[], int]:
    """Decode with vLLM as it is by default, with its graphs and its compilation."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if not importlib.util.find_spec("flashinfer"):
        # vLLM takes it for installed, and ends at the start without it.
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    vllm = importlib.import_module("vllm")
    share = {"gpu_memory_utilization": 0.5} if torch.cuda.is_available() else {}
    served = vllm.LLM(
        model=str(model),
        skip_tokenizer_init=True,
        dtype=half(),
        max_model_len=args.prompt + args.answer + 16,
        **share,
    )
    rows = [{"prompt_token_ids": p.token_ids} for p in prompts for _ in range(args.samples)]
    sampling = [
        vllm.SamplingParams(max_tokens=n, ignore_eos=True, detokenize=False, logprobs=0)
        for n in lengths.tolist()
    ]

    def run() -> int:
        served.reset_prefix_cache()
        found = served.generate(rows, sampling, use_tqdm=False)
        return sum(len(one.outputs[0].token_ids) for one in found)

    return run


def parser() -> argparse.ArgumentParser:
    options = common.parser(__doc__)
    options.add_argument("kind", choices=["grpo", "sft", "dpo", "decoding", *TRL])
    options.add_argument("--size", choices=list(common.SIZES), default="0.5b")
    options.add_argument("--engine", choices=["native", "transformers", "vllm"], default="native")
    options.add_argument("--prompts", type=int, default=8)
    options.add_argument("--samples", type=int, default=8, help="responses to each prompt")
    options.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    options.add_argument("--answer", type=int, default=256, help="tokens of a response")
    options.add_argument("--pictures", type=int, default=0, help="of each prompt")
    options.add_argument("--steps", type=int, default=2, help="measured, after one that warms up")
    options.add_argument("--micro", type=int, default=16384, help="tokens of a micro-batch")
    options.add_argument("--lora", action="store_true", help="train adapters on all layers")
    options.add_argument(
        "--profile", action="store_true", help="profile the update of one more step"
    )
    options.add_argument("--deterministic", action="store_true", help="by deterministic operations")
    options.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a setting"
    )
    return options


def smoke(args: Any) -> None:
    """Make the work of ``args`` as small as it can be."""
    args.size, args.steps = "smoke", 1
    args.prompts, args.samples, args.prompt, args.answer = 2, 2, 12, 8
    args.micro = min(args.micro, 64)


def work_of(args: Any) -> str:
    """Return a description of the work."""
    rows = f"{args.prompts} prompts of {args.prompt} tokens"
    rows += f" and {args.pictures} pictures" if args.pictures else ""
    if args.kind.endswith(("grpo", "decoding")):
        rows += f" x {args.samples} responses of {args.answer} tokens"
    else:
        rows += f" with responses of up to {args.answer} tokens"
    settings = "".join(f", {one}" for one in args.set) + ", LoRA" * args.lora
    return (
        f"Qwen2.5-{args.size} (random weights), {half()}, {rows}, micro-batches of "
        f"{args.micro} tokens{settings}"
    )


def main() -> None:
    args = parser().parse_args()
    if args.smoke:
        smoke(args)
    caught: Any = nullcontext([])
    if args.deterministic:
        # Before the first product: cuBLAS reads it then.
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True, warn_only=True)
        caught = warnings.catch_warnings(record=True)
    torch.manual_seed(0)
    sys.path.append(str(common.ROOT / "benchmarks"))
    result = Result(args.out, work_of(args))
    with tempfile.TemporaryDirectory(dir=common.scratch(args.size)) as name, caught as messages:
        if args.kind in TRL:
            importlib.import_module("trl_sides").run(args, Path(name), result)
        else:
            kinds = {"grpo": grpo, "decoding": decoding}
            kinds.get(args.kind, supervised)(args, Path(name), result)
    if args.deterministic:
        parts = [str(m.message).partition(" does not have a deterministic") for m in messages]
        names = sorted({name for name, found, _ in parts if found})
        result.add({"operations without a deterministic form": ", ".join(names) or "none"})


if __name__ == "__main__":
    main()
