"""The same reward curves as TRL's ``GRPOTrainer`` and ``RLOOTrainer``: GRPO, RLOO and DAPO on the demo's task, three seeds.

    python benchmarks/same_as_trl.py [--algorithms grpo rloo dapo] [--seeds 0 1 2] [--steps 24] [--report]

Both sides go on from the same model folder (the demo's after its warm-up), see the same problems in the same steps, score answers with the
same function, and take the same optimizer steps of the same AdamW; only the random numbers that draw the answers differ. ``SETTINGS``
holds every setting that matters, for both sides. Besides, the first batch of a TRL run goes through the objective here: loss and
gradient are those of TRL.

Needs ``pip install trl``. A run that has its line in ``same_as_trl-<machine>.jsonl`` is not run again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PROMPTS, ANSWERS, NEW_TOKENS, STEPS = 16, 8, 48, 24
LEARNING_RATE = 1e-4
BUFFER = 16
"""Tokens over which DAPO's soft punishment of long answers grows."""
TENTHS = 10


@dataclass(frozen=True, slots=True)
class Same:
    """One algorithm on both sides. ``updates``: optimizer steps on each batch."""

    trainer: str
    updates: int
    ours: dict[str, Any]
    theirs: dict[str, Any]
    overlong: bool = False
    note: str = ""


EPS = 1e-4  # what TRL adds to a standard deviation

SETTINGS = {
    "grpo": Same(
        "GRPO",
        2,
        {
            "preset": "grpo",
            "advantage": {"name": "grpo", "eps": EPS},
            "loss": {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2},
            "aggregation": "sequence",
            "kl": {"where": "loss", "estimator": "k3", "coef": 0.04},
        },
        {
            "loss_type": "grpo",
            "epsilon": 0.2,
            "beta": 0.04,
            "scale_rewards": "group",
            "num_iterations": 2,
            "use_bias_correction_kl": False,
        },
        note="`use_bias_correction_kl` is off for the published KL term; TRL's default multiplies "
        "it by the ratio.",
    ),
    "rloo": Same(
        "RLOO",
        1,
        {
            "preset": None,
            "advantage": {"name": "rloo"},
            "loss": {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2},
            "aggregation": "sequence_sum",
            "kl": {"where": "reward", "estimator": "k1", "coef": 0.01},
        },
        {"epsilon": 0.2, "beta": 0.01, "normalize_advantages": False, "num_iterations": 1},
        note="One update a batch, as published: there TRL's ratio of whole answers and ours of "
        "tokens, both 1, have the same gradient.",
    ),
    "dapo": Same(
        "GRPO",
        2,
        {
            "preset": None,
            "advantage": {"name": "grpo", "eps": EPS},
            "loss": {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.28},
            "aggregation": "token",
            "kl": {"where": "none", "coef": 0.0},
            "shaping": [{"name": "overlong", "options": {"buffer": BUFFER}}],
        },
        {
            "loss_type": "dapo",
            "epsilon": 0.2,
            "epsilon_high": 0.28,
            "beta": 0.0,
            "scale_rewards": "group",
            "num_iterations": 2,
        },
        overlong_prompts=True,
        note="Neither side replaces groups of equal rewards: TRL does not have that part.",
    ),
}


# ---------------------------------------------------------------- one run of one side, in a process of its own


def problems(seed: int, steps: int) -> list[dict[str, Any]]:
    """The problems of all steps, in order."""
    from learning import demo

    from lightrft.datasets.synthetic.arithmetic import rows

    options = demo().rl.data.sources[0].options
    return list(rows(**{**options, "seed": seed, "count": PROMPTS * steps, "split": "train"}))


def run_ours(name: str, seed: int, steps: int, start: Path, scratch: Path) -> list[float]:
    """Mean reward of each step, before any shaping."""
    from lightrft.config.base import build
    from lightrft.config.verbs import RLConfig
    from lightrft.trainer.rl import run_rl

    lines = "".join(json.dumps(row) + "\n" for row in problems(seed, steps))
    (scratch / "problems.jsonl").write_text(lines, encoding="utf-8")
    tree = {
        "run": {"dir": str(scratch), "name": "run", "seed": seed, "progress": False},
        "model": {"path": str(start), "dtype": "float32"},
        "data": {"sources": [{"path": str(scratch / "problems.jsonl")}], "shuffle": False},
        "rollout": {"prompts_per_step": PROMPTS, "group_size": ANSWERS},
        "sampling": {"max_new_tokens": NEW_TOKENS},
        "reward": {"terms": ["math"]},
        "algorithm": SETTINGS[name].ours,
        "optimizer": {
            "lr": LEARNING_RATE,
            "betas": (0.9, 0.999),
            "weight_decay": 0.0,
            "max_grad_norm": 1.0,
        },
        "train": {"steps": steps, "ppo_epochs": SETTINGS[name].updates},
        "log": {"tensorboard": False, "rollouts_every": 0},
    }
    run_rl(build(RLConfig, tree))
    rows = [
        json.loads(line)
        for line in (scratch / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    return [row["reward/mean"] for row in rows if "reward/mean" in row]


def math_reward(completions: list[str], label: list[str], **_: Any) -> list[float]:
    """What reward ``math`` gives here."""
    from types import SimpleNamespace

    from lightrft.rewards.rules.math import math_reward as ours

    def view(text: str, gold: str) -> Any:
        return SimpleNamespace(text=text, prompt=SimpleNamespace(label=gold, reference=None))

    return [ours(view(text, gold)) for text, gold in zip(completions, label, strict=True)]


def trl_trainer(name: str, seed: int, steps: int, start: Path, scratch: Path) -> Any:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
    from trl.rewards import get_soft_overlong_punishment
    from vs_trl import load_tokenizer

    same, tokenizer = SETTINGS[name], load_tokenizer(start)
    trainer, config = (
        (GRPOTrainer, GRPOConfig) if same.trainer == "GRPO" else (RLOOTrainer, RLOOConfig)
    )
    rows = [
        {
            "prompt": tokenizer.apply_chat_template(
                [{"role": "user", "content": row["prompt"]}],
                tokenize=False,
                add_generation_prompt=True,
            ),
            "label": row["label"],
        }
        for row in problems(seed, steps)
    ]
    rewards = (
        [math_reward, get_soft_overlong_punishment(NEW_TOKENS, BUFFER)]
        if same.overlong
        else math_reward
    )
    options = {
        "output_dir": str(scratch / "trl"),
        "seed": seed,
        "per_device_train_batch_size": PROMPTS * ANSWERS,
        "gradient_accumulation_steps": 1,
        "steps_per_generation": 1,
        "num_generations": ANSWERS,
        "max_completion_length": NEW_TOKENS,
        "max_steps": steps * same.updates,
        "shuffle_dataset": False,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "temperature": 1.0,
        "bf16": False,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "report_to": "none",
        "logging_strategy": "no",
        "save_strategy": "no",
        "disable_tqdm": True,
        **same.theirs,
    }
    model = AutoModelForCausalLM.from_pretrained(start, dtype="float32")
    return trainer(
        model=model,
        reward_funcs=rewards,
        args=config(**options),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )


def run_trl(name: str, seed: int, steps: int, start: Path, scratch: Path) -> list[float]:
    """Mean reward of each generation, before any punishment."""
    trainer = trl_trainer(name, seed, steps, start, scratch)
    means: list[float] = []
    calculate = trainer._calculate_rewards

    def counted(*args: Any, **kwargs: Any) -> Any:
        found = calculate(*args, **kwargs)
        means.append(float(found[:, 0].mean()))
        return found

    trainer._calculate_rewards = counted
    trainer.train()
    return means


def check(name: str, seed: int, steps: int, start: Path, scratch: Path) -> dict[str, float]:
    """TRL's second optimizer step through the objective here: the policy has moved away from the reference, and, where a batch is used
    twice, from what drew the answers. Returns the largest differences; raises where they are not those of rounding."""
    import torch
    import trl.trainer.grpo_trainer as grpo_trainer
    import trl.trainer.rloo_trainer as rloo_trainer
    from transformers import TrainerCallback

    for module in (grpo_trainer, rloo_trainer):
        # So that rewards and rows stay in the same order.
        module.shuffle_sequence_dict = lambda batch: batch
    SETTINGS[name].theirs.update(max_grad_norm=1e9)
    trainer = trl_trainer(name, seed, 2, start, scratch)
    trainer.args.max_steps = 2
    seen: dict[str, Any] = {}
    calculate, loss_of = trainer._calculate_rewards, trainer._compute_loss

    def calculated(*args: Any, **kwargs: Any) -> Any:
        seen["rewards"] = calculate(*args, **kwargs)
        return seen["rewards"]

    def computed(model: Any, inputs: dict[str, Any]) -> Any:
        out = loss_of(model, inputs)
        seen.update(inputs=inputs, loss=float(out.detach()))
        return out

    class Keep(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            parameters = dict(trainer.model.named_parameters())
            seen["parameters"] = {n: p.detach().clone() for n, p in parameters.items()}
            seen["gradients"] = {
                n: p.grad.clone() for n, p in parameters.items() if p.grad is not None
            }

    trainer._calculate_rewards, trainer._compute_loss = calculated, computed
    trainer.add_callback(Keep())
    trainer.train()
    return compared(name, start, seen, torch)


def compared(name: str, start: Path, seen: Mapping[str, Any], torch: Any) -> dict[str, float]:
    """The batch of ``seen`` through the objective here, against what TRL made of it."""
    from lightrft.algorithms.requirements import Requirements
    from lightrft.config.base import build
    from lightrft.config.model import ModelConfig
    from lightrft.config.verbs import RLConfig
    from lightrft.learner.controllers import Controllers
    from lightrft.learner.policy_update import Objective, with_loss_weights
    from lightrft.models.actor import Actor
    from lightrft.trainer.phases import advantages_from, with_shaped_rewards

    tree = {"algorithm": SETTINGS[name].ours, "sampling": {"max_new_tokens": NEW_TOKENS}}
    config, inputs = build(RLConfig, tree), seen["inputs"]
    algorithm = config.algorithm
    batch = batch_of(inputs, seen["rewards"][:, 0], torch)
    actor = Actor.load(ModelConfig(path=str(start), dtype="float32"))
    with torch.no_grad():
        first = actor.score(batch).logprobs
        actor.model.load_state_dict(seen["parameters"], strict=False)
        now = actor.score(batch).logprobs
    old = first if SETTINGS[name].updates > 1 else now
    batch = batch.replace(old_logprobs=old, ref_logprobs=first if algorithm.kl.used else None)
    controls = Controllers.of(algorithm)
    shaped, _ = with_shaped_rewards(batch, config, controls, Requirements.of(config.algorithm))
    batch = with_loss_weights(
        advantages_from(shaped, config, controls),
        config.algorithm,
        config.sampling.max_new_tokens,
    )
    loss, _ = Objective.of(algorithm, Requirements.of(algorithm), controls)(
        batch, actor.score(batch)
    )
    loss.backward()

    ours = {n: p.grad for n, p in actor.model.named_parameters() if p.grad is not None}
    theirs = seen["gradients"]
    assert ours.keys() == theirs.keys()
    rows = batch.lengths.cumsum(0) - 1
    norm = torch.nn.utils.get_total_norm
    found = {
        "advantage_gap": float((batch.advantages[rows] - inputs["advantages"]).abs().max()),
        "loss_gap": abs(float(loss.detach()) - seen["loss"]),
        "gradient_gap": float(
            norm([ours[n] - g for n, g in theirs.items()]) / norm(list(theirs.values()))
        ),
        "moved": float((now - first).abs().max()),
    }
    assert (
        found["moved"] > 1e-2 and found["gradient_gap"] < 1e-3 and found["advantage_gap"] < 1e-3
    ), found
    return found


def batch_of(inputs: Mapping[str, Any], rewards: Any, torch: Any) -> Any:
    """TRL's padded tensors as a batch without padding."""
    from lightrft.types import Batch, Segments

    def runs(tokens: Any, mask: Any) -> list[list[int]]:
        return [row[keep.bool()].tolist() for row, keep in zip(tokens, mask, strict=True)]

    texts = runs(inputs["prompt_ids"], inputs["prompt_mask"])
    places: dict[tuple[int, ...], int] = {}
    prompt_of = torch.tensor([places.setdefault(tuple(text), len(places)) for text in texts])
    answers = Segments.of(runs(inputs["completion_ids"], inputs["completion_mask"]))
    sampled = torch.ones(len(answers.tokens), dtype=torch.bool)
    return Batch(
        Segments.of([list(text) for text in places]),
        answers,
        prompt_of,
        sampled=sampled,
        rewards=rewards,
    )


def worker(order: Mapping[str, Any]) -> None:
    import torch

    torch.set_num_threads(1)
    began = time.perf_counter()
    side = {"lightrft": run_ours, "trl": run_trl, "check": check}[order["side"]]
    with tempfile.TemporaryDirectory() as scratch:
        found = side(
            order["algorithm"], order["seed"], order["steps"], Path(order["start"]), Path(scratch)
        )
    row = {k: order[k] for k in ("algorithm", "side", "seed")}
    print("RESULT " + json.dumps({**row, "seconds": time.perf_counter() - began, "found": found}))


# ---------------------------------------------------------------- the driver


def call(order: Mapping[str, Any]) -> dict[str, Any]:
    """One run, in a process of its own."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join(
            [str(HERE.parent), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
        ),
    }
    command = [sys.executable, __file__, "--worker", json.dumps(order)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{order} failed\n{done.stdout[-3000:]}\n{done.stderr[-5000:]}")
    return json.loads(
        [line for line in done.stdout.splitlines() if line.startswith("RESULT ")][-1].removeprefix(
            "RESULT "
        )
    )


def run_all(args: argparse.Namespace, file: Path) -> None:
    from learning import make_start

    start = make_start(args.start)
    there = set(lines_of(file))
    orders = [(name, "check", 0) for name in args.algorithms]
    orders += [
        (name, side, seed)
        for seed in args.seeds
        for name in args.algorithms
        for side in ("lightrft", "trl")
    ]
    for name, side, seed in orders:
        if (name, side, seed) in there:
            continue
        row = call(
            {
                "algorithm": name,
                "side": side,
                "seed": seed,
                "steps": args.steps,
                "start": str(start.resolve()),
            }
        )
        with file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(row) + "\n")
        found = row["found"]
        said = (
            found
            if side == "check"
            else f"mean reward {statistics.mean(found):.3f}, {row['seconds']:.0f} s"
        )
        print(f"{name}, {side}, seed {seed}: {said}", flush=True)


def lines_of(file: Path) -> dict[tuple[str, str, int], Any]:
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return {(row["algorithm"], row["side"], row["seed"]): row for row in map(json.loads, lines)}


@dataclass(frozen=True, slots=True)
class Tenth:
    """Mean reward of a tenth of the training, of each side: mean and deviation over the seeds."""

    ours: tuple[float, float]
    theirs: tuple[float, float]
    seeds: int

    @property
    def gap(self) -> float:
        return self.ours[0] - self.theirs[0]

    @property
    def noise(self) -> float:
        """The standard error of the gap, from the spread of the seeds."""
        return math.sqrt((self.ours[1] ** 2 + self.theirs[1] ** 2) / self.seeds)


def tenths(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> list[Tenth]:
    """``ours`` and ``theirs``: a curve per seed."""
    steps = len(ours[0])
    cuts = [round(i * steps / TENTHS) for i in range(TENTHS + 1)]
    found = []
    for a, b in itertools.pairwise(cuts):
        sides = [[statistics.mean(curve[a:b]) for curve in curves] for curves in (ours, theirs)]
        first, second = ((statistics.mean(side), statistics.stdev(side)) for side in sides)
        found.append(Tenth(first, second, len(ours)))
    return found


def curves_of(
    rows: Mapping[tuple[str, str, int], Any], name: str
) -> tuple[list[list[float]], list[list[float]]]:
    """The curves of both sides, of the seeds that both have run."""
    seeds = sorted(
        s for n, side, s in rows if n == name and side == "lightrft" and (name, "trl", s) in rows
    )
    ours, theirs = (
        [rows[name, side, seed]["found"] for seed in seeds] for side in ("lightrft", "trl")
    )
    return ours, theirs


def page(rows: Mapping[tuple[str, str, int], Any], args: argparse.Namespace) -> str:
    command = "python benchmarks/same_as_trl.py"
    parts = [
        "# The same reward curves as TRL",
        f"`{command}` on {args.machine}, one thread; {versions()}.",
        ABOUT,
    ]
    for name, same in SETTINGS.items():
        ours, theirs = curves_of(rows, name)
        if len(ours) >= 2:
            parts += [
                f"## {name.upper()}, against `{same.trainer}Trainer`",
                *section(rows, name, ours, theirs, args),
            ]
    return "\n\n".join(parts) + "\n"


ABOUT = f"""\
Both sides train the demo's model after its warm-up on the same problems in the same order: {PROMPTS} problems x {ANSWERS} answers of at
most {NEW_TOKENS} tokens a step, AdamW (0.9, 0.999) at {LEARNING_RATE}, no decay, gradients clipped at 1, float32. The reward is 1 for
the right result, else 0. Answers are drawn with different random numbers, so two runs differ by chance; *noise* is the standard error of
the difference of the two means, from the spread over seeds. The algorithms share seeds, hence their first answers: their differences are
not independent of each other."""


def section(
    rows: Mapping[tuple[str, str, int], Any],
    name: str,
    ours: Sequence[Sequence[float]],
    theirs: Sequence[Sequence[float]],
    args: argparse.Namespace,
) -> Iterator[str]:
    same, parts = SETTINGS[name], tenths(ours, theirs)
    updates = f"{same.updates} optimizer step{'s' * (same.updates > 1)} a batch"
    yield f"Here: `{json.dumps(same.ours)}`. There: `{json.dumps(same.theirs)}`. {updates}."
    if (name, "check", 0) in rows:
        gaps = rows[name, "check", 0]["found"]
        yield (
            "The batch of TRL's second optimizer step through the objective here: advantages "
            f"differ by at most {gaps['advantage_gap']:.1e}, the gradient by "
            f"{gaps['gradient_gap']:.1e} of its norm. {same.note}".strip()
        )
    head = "| tenth of training | lightrft | TRL | difference | noise |\n|---|---|---|---|---|\n"
    yield head + "\n".join(
        f"| {i} | {t.ours[0]:.3f} ± {t.ours[1]:.3f} | {t.theirs[0]:.3f} ± {t.theirs[1]:.3f} | "
        f"{t.gap:+.3f} | {t.noise:.3f} |"
        for i, t in enumerate(parts, 1)
    )
    means = [[statistics.mean(curve) for curve in side] for side in (ours, theirs)]
    whole = Tenth(*((statistics.mean(m), statistics.stdev(m)) for m in means), seeds=len(ours))
    worst = max(parts, key=lambda t: abs(t.gap))
    yield (
        f"Mean reward of the whole training, {len(ours)} seeds: {whole.ours[0]:.3f} ± "
        f"{whole.ours[1]:.3f} here, {whole.theirs[0]:.3f} ± {whole.theirs[1]:.3f} there: a "
        f"difference of {whole.gap:+.3f}, noise {whole.noise:.3f}. The largest difference of a "
        f"tenth is {worst.gap:+.3f}, noise {worst.noise:.3f}. "
        f"{sum(abs(t.gap) <= 2 * t.noise for t in parts)} of {TENTHS} tenths lie within twice "
        "their noise."
    )
    yield f"![Reward of both sides](same_as_trl-{args.machine}-{name}.svg)"


def plot(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]], name: str) -> str:
    """The mean over seeds of both sides, bold, over the curve of each seed."""
    from learning import STYLE

    left, width, top, height = 44, 480, 26, 200
    steps = len(ours[0])

    def line(curve: Sequence[float], css: str) -> str:
        places = (
            f"{left + i / max(1, steps - 1) * width:.1f} {top + (1 - y) * height:.1f}"
            for i, y in enumerate(curve)
        )
        return f'<path class="{css}" d="M{"L".join(places)}"/>'

    parts = [f'<rect width="{left + width + 16}" height="{top + height + 30}"/>']
    for share in (0, 0.25, 0.5, 0.75, 1):
        y = top + (1 - share) * height
        parts.append(f'<line class="g" x1="{left}" x2="{left + width}" y1="{y}" y2="{y}"/>')
        parts.append(
            f'<text class="m" x="{left - 8}" y="{y + 4}" text-anchor="end">{share:.2f}</text>'
        )
    for i in range(0, steps, 4):
        x = left + i / max(1, steps - 1) * width
        parts.append(
            f'<text class="m" x="{x:.1f}" y="{top + height + 18}" '
            f'text-anchor="middle">{i + 1}</text>'
        )
    title = (
        f"{name.upper()}: mean reward by step, lightrft (blue) and TRL (orange), {len(ours)} "
        "seeds and their mean"
    )
    parts.append(f'<text class="m" x="{left}" y="14">{title}</text>')
    for curves, css in ((ours, "u"), (theirs, "t")):
        parts += [line(curve, f"{css} f") for curve in curves]
        parts.append(line([statistics.mean(step) for step in zip(*curves, strict=True)], css))
    style = f"{STYLE}path{{fill:none;stroke-width:2.2}}.u{{stroke:#1f5fd0}}.t{{stroke:#c2570c}}.f{{stroke-width:1;stroke-opacity:.35}}"
    size = (
        f'viewBox="0 0 {left + width + 16} {top + height + 30}" width="{left + width + 16}" '
        f'height="{top + height + 30}"'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" '
        f'aria-label="{title}"><style>{style}</style>{"".join(parts)}</svg>\n'
    )


def versions() -> str:
    from importlib.metadata import version

    return ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "trl"))


def write_report(args: argparse.Namespace, file: Path) -> None:
    rows = lines_of(file)
    text = page(rows, args)
    file.with_suffix(".md").write_text(text, encoding="utf-8")
    for name in SETTINGS:
        ours, theirs = curves_of(rows, name)
        if len(ours) >= 2:
            (args.out / f"{file.stem}-{name}.svg").write_text(
                plot(ours, theirs, name), encoding="utf-8"
            )
    print(text)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--algorithms", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument(
        "--start",
        type=Path,
        default=Path("runs/learning"),
        help="folder of the model that all go on from",
    )
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--machine", default=f"{platform.machine()}-{os.cpu_count()}cores")
    parser.add_argument(
        "--report",
        action="store_true",
        help="only write page and plots from the lines that are there",
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(json.loads(args.worker))
        return
    file = args.out / f"same_as_trl-{args.machine}.jsonl"
    if not args.report:
        run_all(args, file)
    write_report(args, file)


if __name__ == "__main__":
    main()
