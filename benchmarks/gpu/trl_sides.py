"""The sides of TRL: steps of ``GRPOTrainer``, ``SFTTrainer`` and ``DPOTrainer`` on the device.

Weights are in bfloat16 on a GPU and responses come from ``generate``, which was the fastest way of TRL on an H100.
"""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import common  # first: it says where the rest lies
import torch
from measure import ENDS, GIB, Result, Stopwatch, half, model_of, preference_case, step_numbers
from measure import supervised_numbers as numbers_of
from operations import Profiler
from transformers import AutoModelForCausalLM, TrainerCallback

from benchmarks.vs_trl import Job, Variant, Work, load_tokenizer, trl_trainer
from lightrft.types import Segments


def run(args: Any, scratch: Path, result: Result) -> None:
    """Take the steps of ``args.kind``."""
    (grpo if args.kind == "trl-grpo" else supervised)(args, scratch, result)


def place() -> dict[str, Any]:
    """Return the options that say where TRL computes, and in which type."""
    gpu = torch.cuda.is_available()
    return {"bf16": gpu, "use_cpu": not gpu}


def rows_of_micro_batch(args: Any, rows: int) -> int:
    """Return the largest divisor of ``rows`` whose rows fit into a micro-batch."""
    most = max(1, args.micro // (args.prompt + args.answer))
    return max(n for n in range(1, rows + 1) if rows % n == 0 and n <= most)


class OnDevice(Work):
    """The work of ``args``, as ``trl_trainer`` reads it."""

    def __init__(self, args: Any) -> None:
        self.groups, self.answers, self.new_tokens = args.prompts, args.samples, args.answer

    def trl_options(self, variant: Variant) -> dict[str, Any]:
        return place()


def grpo(args: Any, scratch: Path, result: Result) -> None:
    """Steps of GRPO by TRL, after one that warms up. A profile takes one more."""
    folder = model_of(args, scratch)
    work = OnDevice(args)
    case: Any = SimpleNamespace(prompt_tokens=args.prompt)
    rows = work.prompts(folder, scratch, case, args.prompts * (args.steps + 2))
    size = rows_of_micro_batch(args, work.whole)
    job = Job(
        work,
        folder,
        scratch,
        rows,
        args.steps,
        Variant("trl", 1, size, weights=half()),
        True,
        args.prompt + args.samples * args.answer,
    )
    steps = args.steps + 1 + args.profile
    # Each token of a micro-batch counts, so the number of rows says more than that of tokens.
    result.tree["work"] += f", {size} rows a micro-batch"
    trainer = trl_trainer(job, steps)
    clock = GRPOClock(trainer, args, Profiler() if args.profile else None)
    trainer.add_callback(clock)
    trainer.train()
    batch = SimpleNamespace(
        prompts=Segments.of([[0] * args.prompt] * args.prompts),
        lengths=torch.full((work.whole,), args.answer),
        prompt_of=torch.arange(args.prompts).repeat_interleave(args.samples),
    )
    measured = clock.rows[: args.steps + 1]
    numbers = step_numbers(args, measured[1:], batch, frozen=False)
    numbers["peak memory, GiB"] = clock.peak / GIB
    result.add(numbers, steps=measured)
    if clock.profiler is not None:
        result.add(clock.profiler.result["numbers"], profile=clock.profiler.result)


class GRPOClock(TrainerCallback):
    """Times the parts of each step, and profiles the update of the last one.

    TRL generates within the first forward pass of a step, so the update is what is left of it.
    """

    def __init__(self, trainer: Any, args: Any, profiler: Profiler | None) -> None:
        self.rows: list[dict[str, float]] = []
        self.profiler, self.peak = profiler, 0
        self._steps, self._watch, self._generated = args.steps, Stopwatch(), 0
        self._marks = {"end": 0.0, "begin": 0.0}
        self._count_tokens(trainer, args.answer)
        self._watch.wrap(trainer, "_generate_single_turn", "generate")
        scores = "_get_per_token_logps_and_entropies"
        self._watch.wrap(trainer, scores, "logprobs", lambda: not torch.is_grad_enabled())
        self._watch.wrap(trainer, "_prepare_inputs", "prepare")
        if profiler is not None:
            self._profile_after(trainer, profiler)

    def _count_tokens(self, trainer: Any, tokens: int) -> None:
        generate = trainer._generate_single_turn

        def counted(*args: Any, **kwargs: Any) -> Any:
            found = generate(*args, **kwargs)
            assert {len(row) for row in found[0]} == {tokens}, "a response ended by itself"
            return found

        trainer._generate_single_turn = counted

    def _profile_after(self, trainer: Any, profiler: Profiler) -> None:
        prepare = trainer._prepare_inputs

        def prepared(*args: Any, **kwargs: Any) -> Any:
            found = prepare(*args, **kwargs)
            if len(self.rows) == self._steps + 1 and not profiler.running:
                profiler.start()
            return found

        trainer._prepare_inputs = prepared

    def on_train_begin(self, *_: Any, **about: Any) -> None:
        self._watch.wrap(about["optimizer"], "step", "optimizer")
        self._marks["end"] = time.perf_counter()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._marks["begin"] = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        common.wait()
        if self.profiler is not None and self.profiler.running:
            self.profiler.stop()
        else:
            self.peak = common.peak_memory()
        now, spent = time.perf_counter(), self._watch.take()
        update = now - self._marks["begin"] - spent.pop("prepare")
        row = {"step": now - self._marks["end"], "generate": 0.0, "logprobs": 0.0, **spent}
        self.rows.append({**row, "update": update})
        self._marks["end"] = now


def supervised(args: Any, scratch: Path, result: Result) -> None:
    """Steps of SFT or DPO by TRL."""
    import trl
    from datasets import Dataset
    from vs_trl_preference import rows_of

    folder, verb = model_of(args, scratch), args.kind.removeprefix("trl-")
    rows = rows_of(preference_case(args), folder, scratch)
    # A pair is two rows.
    size = rows_of_micro_batch(args, args.prompts * (2 if verb == "dpo" else 1))
    size = max(1, size // (2 if verb == "dpo" else 1))
    result.tree["work"] += f", {size} rows a micro-batch"
    options: dict[str, Any] = {
        "output_dir": str(scratch / "trl"),
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": args.prompts // size,
        "max_steps": args.steps + 1,
        "learning_rate": 1e-5,
        "train_sampling_strategy": "sequential",
        "max_length": args.prompt + args.answer + ENDS,
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        **place(),
        **({"beta": 0.1} if verb == "dpo" else {}),
    }
    marks: list[float] = []

    class Marks(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            common.wait()
            marks.append(time.perf_counter())

    def load() -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=half())

    models = {"model": load(), **({"ref_model": load()} if verb == "dpo" else {})}
    trainer = getattr(trl, f"{verb.upper()}Trainer")(
        **models,
        args=getattr(trl, f"{verb.upper()}Config")(**options),
        train_dataset=Dataset.from_list(rows),
        processing_class=load_tokenizer(folder),
        callbacks=[Marks()],
    )
    trainer.train()
    result.add(numbers_of(args, marks))
