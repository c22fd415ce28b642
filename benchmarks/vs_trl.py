# ruff: noqa: E402 (the package is found first)
"""A step of GRPO here against the same step of TRL's ``GRPOTrainer``: whole step, generation, update, peak memory.

Both sides train the same model folder on the same prompts: 4 prompts x 8 answers of 64 new tokens, one optimizer step per
generation, no reference, the same AdamW. Cases ``step`` and ``memory`` suppress the end token, so that every answer has its full
length; in ``ragged`` a vocabulary of 40 ends answers by itself, at most at 64 tokens.

Every round of a side is a process of its own; rounds are interleaved; each side runs with the thread count and the micro-batch
(and TRL with the way of generating) that a calibration round found fastest, or leanest where several are about as fast. CPU time
says what the work costs where other programs share the cores.

    python benchmarks/vs_trl.py [--rounds 3] [--cases step32 step512 ragged32 ragged512 memory32] [--machine NAME]

Needs ``pip install trl``. Compare ratios only: absolute times belong to the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from lightrft.utils.cpu import set_thread_policy

PROMPTS, ANSWERS, NEW_TOKENS = 4, 8, 64
LAYERS, HIDDEN = 4, 256
LEARNING_RATE = 1e-5

REWARD = '''"""Kept apart from the benchmark, since the reward runs in a worker process."""


def mean_code(rollout):
    """The mean code point of the answer's characters: cheap, and different for the answers of a group."""
    return sum(map(ord, rollout.text)) / max(1, len(rollout.text)) / 1000
'''


@dataclass(frozen=True)
class Case:
    """``full``: the end token is suppressed, so that every answer has its full length; else it is as likely as any other token.

    ``seconds``: whether the case is about time (then calibration pays), or about memory.
    """

    prompt_tokens: int
    vocabulary: int
    steps: int
    seconds: bool = True
    full: bool = True


COMPARED = ("step", "cpu", "update", "generate", "peak_mb", "growth_mb")
TEXT_CASES = {
    "step32": Case(32, 4096, 8),
    "step512": Case(512, 4096, 4),
    "ragged32": Case(32, 40, 12, full=False),
    "ragged512": Case(512, 40, 6, full=False),
    "memory32": Case(32, 151_936, 1, seconds=False),
    "memory512": Case(512, 151_936, 1, seconds=False),
}


@dataclass(frozen=True)
class Variant:
    """How one side runs: ``threads``, rows of a micro-batch, and for TRL the way of generating and the type of its weights."""

    side: str
    threads: int
    rows: int = PROMPTS * ANSWERS
    generation: str = "generate"
    weights: str = "float32"

    def __str__(self) -> str:
        more = f", {self.generation}" if self.side == "trl" else ""
        more += f", {self.weights} weights" if self.weights != "float32" else ""
        return (
            f"{self.threads} thread{'s' * (self.threads > 1)}, micro-batches of {self.rows}{more}"
        )


def arguments(work: Work, description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", nargs="+", choices=list(work.cases), default=list(work.usual))
    parser.add_argument(
        "--machine",
        default="",
        help="name in the result files; the CPU model and the cores without it",
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument(
        "--check", action="store_true", help="only compare log-probs and gradients of one batch"
    )
    parser.add_argument(
        "--steps",
        type=int,
        help="steps of a round after the one that warms up; each case has its own number",
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


# ---------------------------------------------------------------- the same model and prompts for both sides


def characters(count: int) -> str:
    """``count`` different ones, each a token of its own."""
    from lightrft.models.tiny.text import PRINTABLE

    printable = [c for c in PRINTABLE if not c.isspace()][:count]
    letters = (
        chr(c)
        for c in range(0x4E00, 0x30000)
        if not 0xD800 <= c <= 0xF8FF and (c & 0xFFFE) != 0xFFFE
    )
    return "".join(printable) + "".join(
        c for c, _ in zip(letters, range(count - len(printable)), strict=False)
    )


TEXT_SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HIDDEN // 32,
    "num_key_value_heads": HIDDEN // 64,
    "intermediate_size": HIDDEN * 11 // 4,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,  # nearly uniform: every token is about equally likely
}


def load_tokenizer(folder: Path) -> Any:
    """Not by ``AutoTokenizer``, which replaces the pre-tokenizer of this model type."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(folder)


class Work:
    """What both sides do: their model, their prompts, and how each is told of them. Here, text."""

    script = Path(__file__)
    stem = "vs_trl"
    title = "A GRPO step against TRL's GRPOTrainer"
    model = "qwen2"
    size = f"{LAYERS} layers of {HIDDEN}, tied embeddings, float32"
    groups, answers, new_tokens = PROMPTS, ANSWERS, NEW_TOKENS
    dtype, device = "float32", "cpu"
    cases: Mapping[str, Any] = TEXT_CASES
    usual: tuple[str, ...] = ("step32", "step512", "ragged32", "ragged512", "memory32")
    checked: tuple[str, ...] = ("step32", "step512")

    @property
    def whole(self) -> int:
        """Answers of a step."""
        return self.groups * self.answers

    def made_of(self, case: Any) -> Any:
        """What ``make`` is told; cases with the same share a model."""
        return case.vocabulary

    def make(self, folder: Path, vocabulary: int) -> None:
        """A folder with a Qwen2 whose vocabulary is ``vocabulary`` - 4 characters and the four special tokens."""
        from lightrft.models.tiny.text import tiny_model, tiny_tokenizer

        tokenizer = tiny_tokenizer(chars=characters(vocabulary - 4))
        assert len(tokenizer) == vocabulary
        tiny_model("qwen2", seed=0, vocab_size=vocabulary, **TEXT_SIZES).save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    def prompts(self, folder: Path, scratch: Path, case: Any, count: int) -> list[dict[str, Any]]:
        """Rows of TRL's data set, of random characters; written for the other side into ``prompts.jsonl``."""
        tokenizer, draw = load_tokenizer(folder), random.Random(0)
        letters = [c for c in tokenizer.get_vocab() if len(c) == 1]
        texts = ["".join(draw.choices(letters, k=case.prompt_tokens)) for _ in range(count)]
        assert all(
            len(ids) == case.prompt_tokens
            for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]
        )
        rows = [{"prompt": text} for text in texts]
        write_lines(scratch / "prompts.jsonl", rows)
        return rows

    def prompt_tokens(self, case: Any) -> int:
        return case.prompt_tokens

    def data(self, scratch: Path) -> dict[str, Any]:
        """The ``data`` part of a config."""
        return {"sources": [{"path": str(scratch / "prompts.jsonl")}], "apply_chat_template": False}

    def dataset(self, rows: list[dict[str, Any]]) -> Any:
        """TRL's, of what ``prompts`` gave."""
        from datasets import Dataset

        return Dataset.from_list(rows)

    def trl_model(self, folder: Path, variant: Variant) -> Any:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(folder, dtype=variant.weights)

    def trl_options(self, variant: Variant) -> dict[str, Any]:
        """Of ``GRPOConfig``: where and in which precision TRL computes."""
        return {"bf16": False, "use_cpu": True}

    def processing_class(self, folder: Path) -> Any:
        return load_tokenizer(folder)

    def segments(self, inputs: dict[str, Any], rows: list[int]) -> Any:
        """The prompts in ``rows`` of TRL's batch."""
        from lightrft.types import Segments

        return Segments.of([unpadded(inputs, row) for row in rows])

    def variants(self, case: Any, side: str) -> list[Variant]:
        """What calibration tries."""
        threads = sorted({1, os.cpu_count() or 1})
        return [Variant(side, n, rows) for n in threads for rows in (self.whole, self.whole // 4)]

    def further(self, case: Any, best: Variant) -> list[Variant]:
        """What TRL may be faster with, beside ``best`` of the rest: its other way of generating, which cannot suppress the end token."""
        return [] if case.full else [replace(best, generation="continuous")]

    def machine(self) -> str:
        return cpu_model()

    def wait(self) -> None:
        """Until all that was asked of the device is done."""

    def peak_mb(self) -> float:
        return peak_mb()

    def workers_mb(self) -> float:
        """Peak memory of processes that reward answers."""
        return sum(peak_of(p) for p in children())

    def about(self, case: Any) -> str:
        most = self.new_tokens
        ends = (
            f"answers of {most} tokens"
            if case.full
            else f"answers of up to {most} tokens, ending by themselves"
        )
        return f"{case.prompt_tokens}-token prompts, {ends}, vocabulary {case.vocabulary:,}"


def unpadded(inputs: dict[str, Any], row: int) -> list[int]:
    return inputs["prompt_ids"][row][inputs["prompt_mask"][row].bool()].tolist()


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


# ---------------------------------------------------------------- workers: one side, one case, one process


def peak_mb() -> float:
    """The largest resident memory of this process so far, MiB."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


@dataclass(frozen=True)
class Job:
    """One side of one case: ``steps`` are those after the one that warms up."""

    work: Work
    folder: Path
    scratch: Path
    rows: list[dict[str, Any]]
    steps: int
    variant: Variant
    full: bool
    group_tokens: int


def worker(work: Work, order: dict[str, Any]) -> None:
    import torch

    torch.manual_seed(0)
    folder, kind = Path(order["folder"]), order["kind"]
    if kind == "make":
        work.make(folder, order["of"])
        (folder / "rewards.py").write_text(REWARD, encoding="utf-8")
        return
    case, variant = work.cases[order["case"]], Variant(**order["variant"])
    torch.set_num_threads(variant.threads)

    with tempfile.TemporaryDirectory() as scratch:
        rows = work.prompts(folder, Path(scratch), case, work.groups * (order["steps"] + 1))
        group_tokens = work.prompt_tokens(case) + work.answers * work.new_tokens
        side = {"lightrft": run_lightrft, "trl": run_trl, "check": check}[kind]
        result = side(
            Job(
                work,
                folder,
                Path(scratch),
                rows,
                order["steps"],
                variant,
                case.full or kind == "check",
                group_tokens,
            )
        )
    print("RESULT " + json.dumps(result))


def rl_config(job: Job, steps: int) -> Any:
    from lightrft.config.base import build
    from lightrft.config.verbs import RLConfig

    tree = {
        "run": {"dir": str(job.scratch), "name": "run", "progress": False},
        "model": {"path": str(job.folder), "dtype": job.work.dtype},
        "data": job.work.data(job.scratch),
        "rollout": {"prompts_per_step": job.work.groups, "group_size": job.work.answers},
        "sampling": {
            "max_new_tokens": job.work.new_tokens,
            "min_new_tokens": job.work.new_tokens * job.full,
        },
        "reward": {"terms": [f"{job.folder / 'rewards.py'}:mean_code"]},
        "algorithm": {"preset": "grpo", "kl": {"where": "none", "coef": 0.0}},
        "optimizer": {"lr": LEARNING_RATE, "betas": (0.9, 0.999)},
        "train": {
            "steps": steps,
            "max_tokens_per_micro_batch": job.group_tokens * job.variant.rows // job.work.answers,
        },
        "eval": {"at_start": False},
        "log": {"tensorboard": False, "rollouts_every": 0},
    }
    return build(RLConfig, tree)


def open_run(config: Any) -> Any:
    """A session and the run that ``lightrft rl`` would make of ``config``."""
    from contextlib import contextmanager

    from lightrft.trainer.checks.check_config import check as check_config
    from lightrft.trainer.rl import prepare
    from lightrft.trainer.run_session import open_session

    @contextmanager
    def opened() -> Any:
        requirements = check_config(config)
        with open_session(config) as session:
            run = prepare(config, requirements, session)
            try:
                yield session, run
            finally:
                run.roles.close()

    return opened()


def run_lightrft(job: Job) -> dict[str, Any]:
    rows = []
    work = job.work
    with open_run(rl_config(job, job.steps + 1)) as (session, run):
        before = work.peak_mb()
        for step in range(job.steps + 1):  # the first one warms up
            start, cpu = time.perf_counter(), time.process_time()
            run.step = step
            result = run.learn_next()
            values = session.record(step + 1, result.metrics)
            work.wait()
            spent = {"step": time.perf_counter() - start, "cpu": time.process_time() - cpu}
            tokens = result.collected.tokens["trained"]
            assert not job.full or tokens == work.whole * work.new_tokens
            assert values["policy/frac_rows_with_loss"] == 1
            rows.append(
                {
                    **spent,
                    "update": values["time/update"],
                    "generate": values["time/generate"],
                    "tokens": tokens,
                }
            )
        worker_mb, peak = work.workers_mb(), work.peak_mb()
    return {"rows": rows[1:], "peak_mb": peak, "before_mb": before, "reward_worker_mb": worker_mb}


def children() -> list[Path]:
    """The folders of this process's descendants under /proc."""
    found, mine = [], {os.getpid()}
    for path in sorted(
        (p for p in Path("/proc").iterdir() if p.name.isdigit()), key=lambda p: int(p.name)
    ):
        try:
            parent = int(path.joinpath("stat").read_text().rsplit(")", 1)[1].split()[1])
        except OSError:  # it has ended
            continue
        if parent in mine:
            mine.add(int(path.name))
            found.append(path)
    return found


def peak_of(process: Path) -> float:
    found = re.search(r"VmHWM:\s+(\d+) kB", process.joinpath("status").read_text())
    return int(found[1]) / 1024 if found else 0.0


def mean_code(completions: list[Any], **_: Any) -> list[float]:
    """As that of ``REWARD``. TRL hands over text, or where prompts are messages, messages."""
    texts = [done if isinstance(done, str) else done[0]["content"] for done in completions]
    return [sum(map(ord, text)) / max(1, len(text)) / 1000 for text in texts]


def trl_trainer(job: Job, steps: int, **over: Any) -> Any:
    from trl import GRPOConfig, GRPOTrainer

    options: dict[str, Any] = {
        "output_dir": str(job.scratch / "trl"),
        "per_device_train_batch_size": job.variant.rows,
        "gradient_accumulation_steps": job.work.whole // job.variant.rows,
        "num_generations": job.work.answers,
        "max_completion_length": job.work.new_tokens,
        "generation_kwargs": {"min_new_tokens": job.work.new_tokens} if job.full else None,
        "max_steps": steps,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "adam_beta2": 0.999,
        "beta": 0.0,
        "loss_type": "grpo",
        "temperature": 1.0,
        "gradient_checkpointing": False,
        "report_to": "none",
        "logging_strategy": "no",
        "save_strategy": "no",
        "disable_tqdm": True,
        "dataloader_num_workers": 0,
        "use_transformers_continuous_batching": job.variant.generation == "continuous",
        **job.work.trl_options(job.variant),
        **over,
    }
    trainer = GRPOTrainer(
        model=job.work.trl_model(job.folder, job.variant),
        reward_funcs=mean_code,
        args=GRPOConfig(**options),
        train_dataset=job.work.dataset(job.rows),
        processing_class=job.work.processing_class(job.folder),
    )
    assert trainer.ref_model is None
    return trainer


class Stopwatch:
    """Seconds spent in wrapped methods since the last ``take``."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def wrap(self, owner: Any, method: str, name: str) -> None:
        inner: Callable[..., Any] = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

        setattr(owner, method, timed)

    def take(self) -> dict[str, float]:
        found, self.seconds = self.seconds, {}
        return found


def run_trl(job: Job) -> dict[str, Any]:
    from transformers import TrainerCallback

    trainer = trl_trainer(job, job.steps + 1)
    watch = Stopwatch()
    watch.wrap(trainer, "_prepare_inputs", "prepare")
    watch.wrap(trainer, "_generate_single_turn", "generate")
    rows: list[dict[str, float]] = []
    marks = {"end": 0.0, "begin": 0.0, "cpu": 0.0}
    lengths: list[list[int]] = []
    generate = trainer._generate_single_turn

    def counted(*args: Any, **kwargs: Any) -> Any:
        out = generate(*args, **kwargs)
        lengths.append([len(row) for row in out[0]])
        return out

    trainer._generate_single_turn = counted

    class Clock(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            marks["end"], marks["cpu"] = time.perf_counter(), time.process_time()

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            marks["begin"] = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            job.work.wait()
            now, cpu, spent = time.perf_counter(), time.process_time(), watch.take()
            rows.append(
                {
                    "step": now - marks["end"],
                    "cpu": cpu - marks["cpu"],
                    "update": now - marks["begin"] - spent["prepare"],
                    "generate": spent["generate"],
                    "tokens": sum(lengths[-1]),
                }
            )
            marks["end"], marks["cpu"] = now, cpu

    trainer.add_callback(Clock())
    before = job.work.peak_mb()
    trainer.train()
    assert not job.full or lengths == [[job.work.new_tokens] * job.work.whole] * (job.steps + 1), (
        lengths
    )
    return {
        "rows": rows[1:],
        "peak_mb": job.work.peak_mb(),
        "before_mb": before,
        "reward_worker_mb": 0.0,
    }


# ---------------------------------------------------------------- do both sides compute the same?


def check(job: Job) -> dict[str, Any]:
    """TRL's batch of one step through both: log-probs, loss and gradients."""
    import torch
    from transformers import TrainerCallback

    from lightrft.algorithms.requirements import Requirements
    from lightrft.config.model import ModelConfig
    from lightrft.learner.policy_update import Objective, with_loss_weights
    from lightrft.models.actor import Actor
    from lightrft.types import Batch, Segments

    trainer = trl_trainer(job, 1, max_grad_norm=1e9, bf16=False)
    seen: dict[str, Any] = {}
    score, loss_of = trainer._get_per_token_logps_and_entropies, trainer._compute_loss

    def scored(*args: Any, **kwargs: Any) -> Any:
        out = score(*args, **kwargs)
        seen["logprobs"] = out[0].detach()
        return out

    def computed(model: Any, inputs: dict[str, Any]) -> Any:
        out = loss_of(model, inputs)
        seen["inputs"], seen["loss"] = inputs, float(out)
        return out

    class Keep(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            seen["grads"] = {
                n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None
            }

    trainer._get_per_token_logps_and_entropies, trainer._compute_loss = scored, computed
    trainer.add_callback(Keep())
    trainer.train()

    inputs = seen["inputs"]
    work = job.work
    prompts = [tuple(unpadded(inputs, row)) for row in range(work.whole)]
    first = {prompt: row for row, prompt in reversed(list(enumerate(prompts)))}
    prompt_of = torch.tensor([list(first).index(prompt) for prompt in prompts])
    answers = inputs["completion_ids"]
    batch = Batch(
        job.work.segments(inputs, list(first.values())),
        Segments.of(answers.tolist()),
        prompt_of,
        sampled=torch.ones(answers.numel(), dtype=torch.bool),
        advantages=inputs["advantages"].repeat_interleave(work.new_tokens),
    )
    config = rl_config(job, 1)
    actor = Actor.load(ModelConfig(path=str(job.folder), dtype="float32"), device=work.device)
    batch = with_loss_weights(
        batch.to(actor.device), config.algorithm, config.sampling.max_new_tokens
    )
    scores = actor.score(batch, entropy=True)
    loss, _ = Objective(config.algorithm, Requirements.of(config.algorithm), 0.0, 0.0)(
        batch, scores
    )
    loss.backward()
    grads = {n: p.grad for n, p in actor.model.named_parameters() if p.grad is not None}
    assert grads.keys() == seen["grads"].keys() and len(first) == work.groups
    norm = torch.nn.utils.get_total_norm(list(seen["grads"].values()))
    gap = torch.nn.utils.get_total_norm([grads[n] - g for n, g in seen["grads"].items()])
    result = {
        "logprob_gap": float((scores.logprobs.detach() - seen["logprobs"].reshape(-1)).abs().max()),
        "loss": [float(loss), seen["loss"]],
        "gradient_norm": [float(torch.nn.utils.get_total_norm(list(grads.values()))), float(norm)],
        "gradient_gap": float(gap / norm),
    }
    assert result["logprob_gap"] < 1e-4 and result["gradient_gap"] < 1e-3, result
    return result


# ---------------------------------------------------------------- the driver: never imports torch, so that it stays small


def call(work: Work, kind: str, threads: int, **order: Any) -> dict[str, Any]:
    """Run one worker; what it says beside its result goes to the terminal if it fails."""
    set_thread_policy()
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    command = [sys.executable, str(work.script), "--worker", json.dumps({"kind": kind, **order})]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{kind} failed\n{done.stdout[-3000:]}\n{done.stderr[-5000:]}")
    found = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return json.loads(found[-1].removeprefix("RESULT ")) if found else {}


def one_round(work: Work, case: str, variant: Variant, folder: Path, steps: int) -> dict[str, Any]:
    """Medians over the steps of one process."""
    got = call(
        work,
        variant.side,
        variant.threads,
        case=case,
        variant=vars(variant),
        folder=str(folder),
        steps=steps,
    )
    middle = {
        name: statistics.median(row[name] for row in got["rows"])
        for name in ("step", "cpu", "update", "generate", "tokens")
    }
    total = got["peak_mb"] + got["reward_worker_mb"]
    return {
        **middle,
        "peak_mb": total,
        "growth_mb": got["peak_mb"] - got["before_mb"],
        "reward_worker_mb": got["reward_worker_mb"],
    }


def calibrate(work: Work, case: str, folder: Path) -> list[Variant]:
    """The fastest variant of each side by the whole step, each tried once; of those within 5 % of it, the leanest."""
    if not work.cases[case].seconds:
        return [Variant(side, os.cpu_count() or 1, work.whole) for side in ("lightrft", "trl")]
    chosen = []
    for side in ("lightrft", "trl"):
        variants = work.variants(work.cases[case], side)
        if len(variants) == 1 and (
            side == "lightrft" or not work.further(work.cases[case], *variants)
        ):
            chosen += variants
            continue
        tried = {v: one_round(work, case, v, folder, 1) for v in variants}
        if side == "trl":
            best = min(tried, key=lambda v: tried[v]["step"])
            for variant in work.further(work.cases[case], best):
                try:
                    tried[variant] = one_round(work, case, variant, folder, 1)
                except SystemExit as error:
                    print(
                        f"  {case}: trl, {variant}: left out, it fails: "
                        f"{str(error).strip().splitlines()[-1]}",
                        flush=True,
                    )
        for variant, took in tried.items():
            print(
                f"  {case}: {side}, {variant}: {took['step']:.2f} s a step, "
                f"{took['peak_mb']:,.0f} MiB",
                flush=True,
            )
        fastest = min(took["step"] for took in tried.values())
        chosen.append(
            min(
                (v for v in tried if tried[v]["step"] <= 1.05 * fastest),
                key=lambda v: tried[v]["peak_mb"],
            )
        )
    return chosen


def measure(work: Work, case: str, folder: Path, rounds: int, steps: int) -> dict[str, Any]:
    ours, theirs = calibrate(work, case, folder)
    found = []
    for i in range(rounds):
        a, b = (one_round(work, case, v, folder, steps) for v in (ours, theirs))
        ratio = {name: b[name] / a[name] for name in COMPARED}
        found.append({"lightrft": a, "trl": b, "ratio": ratio, "load": os.getloadavg()[0]})
        shown = ", ".join(f"{k} {v:.2f}" for k, v in ratio.items())
        print(
            f"  {case} round {i + 1}: TRL over lightrft: {shown}; load {os.getloadavg()[0]:.1f}",
            flush=True,
        )
    spread = {}
    for name in COMPARED:
        values = [r["ratio"][name] for r in found]
        spread[name] = {
            "lowest": min(values),
            "median": statistics.median(values),
            "highest": max(values),
        }
    return {
        "sides": {"lightrft": str(ours), "trl": str(theirs)},
        "steps": steps,
        "rounds": found,
        "ratio": spread,
    }


def cpu_model() -> str:
    found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    return found[1].strip() if found else platform.machine()


def cpu_family() -> str:
    """The family number, which tells apart processors of one name; "unknown" where there is none."""
    found = re.search(r"cpu family\s*:\s*(\d+)", Path("/proc/cpuinfo").read_text())
    return found[1] if found else "unknown"


def main(work: Work, description: str | None) -> None:
    args = arguments(work, description)
    if args.worker:
        worker(work, json.loads(args.worker))
        return
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folders = {}
        for of in dict.fromkeys(work.made_of(work.cases[c]) for c in args.cases):
            folders[of] = Path(scratch) / str(of)
            call(work, "make", 1, folder=str(folders[of]), of=of)
        same = {}
        for case in work.checked:
            if case in args.cases:
                folder = str(folders[work.made_of(work.cases[case])])
                same[case] = call(
                    work,
                    "check",
                    2,
                    case=case,
                    variant=vars(Variant("trl", 2, work.whole)),
                    folder=folder,
                    steps=1,
                )
                print(f"  {case}: one batch through both: {same[case]}", flush=True)
        if args.check:
            return
        for case in args.cases:
            about = work.cases[case]
            results[case] = measure(
                work, case, folders[work.made_of(about)], args.rounds, args.steps or about.steps
            )
    report(work, args, results, same)


def versions() -> dict[str, str]:
    from importlib.metadata import version

    return {
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers", "trl", "accelerate")},
    }


def report(
    work: Work, args: argparse.Namespace, results: dict[str, Any], same: dict[str, Any]
) -> None:
    machine = (
        f"{work.machine()}, {os.cpu_count()} cores, CPU family {cpu_family()}, {platform.system()}"
    )
    name = args.machine or re.sub(
        r"[^a-z0-9]+", "-", f"{work.machine()}-{os.cpu_count()}cores".lower()
    ).strip("-")
    done = (
        f"{work.model}, {work.size}; {work.groups} prompts x {work.answers} answers of at most "
        f"{work.new_tokens} new tokens, one optimizer step per generation, grpo without a reference"
    )
    command = " ".join(["python", str(work.script.resolve().relative_to(ROOT)), *sys.argv[1:]])
    tree = {
        "command": command,
        "machine": machine,
        "versions": versions(),
        "work": done,
        "same": same,
        "cases": results,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    stem = args.out / f"{work.stem}-{name}"
    stem.with_suffix(".json").write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")
    stem.with_suffix(".md").write_text("\n".join(markdown(work, tree)) + "\n", encoding="utf-8")
    print("\n".join(markdown(work, tree)))


UNITS = {
    "step": "whole step, s",
    "cpu": "CPU time of a step, s",
    "update": "update, s",
    "generate": "generation, s",
    "peak_mb": "peak memory, MiB",
    "growth_mb": "memory grown by steps, MiB",
}


def markdown(work: Work, tree: dict[str, Any]) -> list[str]:
    lines = [f"# {work.title}", "", f"`{tree['command']}`", ""]
    lines += [
        f"* machine: {tree['machine']}",
        f"* versions: {', '.join(f'{k} {v}' for k, v in tree['versions'].items())}",
    ]
    lines += [f"* work: {tree['work']}", ""]
    for case, same in tree["same"].items():
        lines.append(
            f"One batch through both ({work.about(work.cases[case])}): log-probs differ by at "
            f"most {same['logprob_gap']:.1e}, gradients by {same['gradient_gap']:.1e} of their "
            "norm."
        )
    for case, found in tree["cases"].items():
        lines += ["", f"## {work.about(work.cases[case])}", ""]
        for side, title in (("lightrft", "lightrft"), ("trl", "TRL")):
            tokens = statistics.mean(r[side]["tokens"] for r in found["rounds"])
            lines.append(f"* {title}: {found['sides'][side]}; {tokens:,.0f} answer tokens a step")
        load = ", ".join(f"{r['load']:.1f}" for r in found["rounds"])
        lines += [
            f"* {len(found['rounds'])} rounds, medians of {found['steps']} steps each; load "
            f"average after each: {load}",
            "",
        ]
        lines += [
            "| | lightrft | TRL | TRL / lightrft: median | lowest | highest |",
            "|---|---|---|---|---|---|",
        ]
        for name, title in UNITS.items():
            a, b = (
                statistics.median(r[side][name] for r in found["rounds"])
                for side in ("lightrft", "trl")
            )
            digits, s = (0 if name.endswith("_mb") else 3), found["ratio"][name]
            lines.append(
                f"| {title} | {a:,.{digits}f} | {b:,.{digits}f} | **{s['median']:.2f}** | "
                f"{s['lowest']:.2f} | {s['highest']:.2f} |"
            )
    return lines


if __name__ == "__main__":
    main(Work(), __doc__)
