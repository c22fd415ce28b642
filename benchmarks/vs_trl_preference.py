"""Compare steps of SFT and DPO with TRL's ``SFTTrainer`` and ``DPOTrainer``: time, CPU time and memory.

    python benchmarks/vs_trl_preference.py [--rounds 3] [--cases sft dpo dpo_image memory] [--out DIR]

Both sides train the same model folder on the same rows with the same AdamW, in float32 on the CPU.
Lengths of responses are uniform between a quarter and the whole of the given length, and so are
those of prompts in ``sft``. Both sides compute the log-probs of DPO's reference in each step, by a
second model. Every round of a side is a process of its own, and rounds of both sides alternate. Each
side runs with the micro-batch that a first round found best: for TRL the whole batch, a quarter of
it, or a row; for lightrft ``BUDGET`` tokens, a quarter or an eighth of them.

``tokens`` are the tokens that the policy computes in a step, with padding, over the nodes of the
prefix trees: each prompt once, and each response after it but for its last token, which predicts
nothing. ``dpo_image_frozen`` trains the language model alone, as is usual for pictures.

Needs ``pip install trl``. Compare ratios only: absolute times belong to the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vs_trl import (
    TEXT_SIZES,
    characters,
    cpu_family,
    cpu_model,
    load_tokenizer,
    peak_mb,
    write_lines,
)
from vs_trl_vlm import MERGE, PATCH, Pictures

HERE = Path(__file__).resolve().parent
WARM = 1
"""Steps at the start that are not measured."""
MEASURES = ("seconds", "cpu", "peak_mb", "tokens")
PARTS = (1, 4, None)
"""Numbers of micro-batches that TRL tries; ``None`` is one for each row."""
BUDGET = 8192
"""Largest micro-batch of lightrft, in tokens."""
SHARES = (1, 4, 8)
"""Fractions of ``BUDGET`` that lightrft tries."""


@dataclass(frozen=True, slots=True)
class Case:
    """One comparison.

    Attributes:
        verb: ``sft`` or ``dpo``.
        prompt: Tokens of a prompt, or of its text.
        response: Most tokens of a response.
        rows: Rows of a batch.
        steps: Measured steps of a round.
        vocabulary: Size of the vocabulary.
        side: Features along each side of the picture of a prompt; 0 for text.
        frozen: Do not train the tower.
        target: Ratio of TRL to lightrft that is aimed for, by measure.
    """

    verb: str
    prompt: int
    response: int
    rows: int
    steps: int
    target: dict[str, float]
    vocabulary: int = 4096
    side: int = 0
    frozen: bool = False


CASES = {
    "sft": Case("sft", 256, 256, 16, 4, {"seconds": 1.5}),
    "dpo": Case("dpo", 256, 256, 8, 4, {"seconds": 2.0}),
    "dpo_image": Case("dpo", 64, 64, 4, 3, {"seconds": 3.0}, side=16),
    "dpo_image_frozen": Case("dpo", 64, 64, 4, 3, {"seconds": 3.0}, side=16, frozen=True),
    "memory": Case("dpo", 512, 512, 4, 1, {"peak_mb": 2.0}, vocabulary=151_936),
}


def make(case: Case, folder: Path) -> None:
    """Write the model of ``case``."""
    from lightrft.models.tiny.text import tiny_model, tiny_tokenizer

    if case.side:
        Pictures().make(folder, case.vocabulary)
        return
    tokenizer = tiny_tokenizer(chars=characters(case.vocabulary - 4))
    # Rows are plain text on both sides.
    tokenizer.chat_template = None
    tiny_model("qwen2", seed=0, vocab_size=case.vocabulary, **TEXT_SIZES).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def rows_of(case: Case, folder: Path, scratch: Path) -> list[dict[str, Any]]:
    """Write the rows of all steps to ``rows.jsonl``, and return them in TRL's form."""
    draw = random.Random(0)
    letters = [c for c in load_tokenizer(folder).get_vocab() if len(c) == 1 and not c.isspace()]

    def text(most: int, least: int | None = None) -> str:
        return "".join(
            draw.choices(letters, k=draw.randint(most // 4 if least is None else least, most))
        )

    ours, theirs = [], []
    for i in range(case.rows * (case.steps + WARM + 1)):
        prompt = text(case.prompt) if case.verb == "sft" else text(case.prompt, case.prompt)
        names = ("completion",) if case.verb == "sft" else ("chosen", "rejected")
        said = {name: text(case.response) for name in names}
        if not case.side:
            theirs.append({"prompt": prompt, **said})
            own = {"response": said["completion"]} if case.verb == "sft" else said
            ours.append({"prompt": prompt, **own})
            continue
        file = picture(scratch / f"{i}.png", case.side * PATCH * MERGE, i)
        turns = {name: [{"role": "assistant", "content": words}] for name, words in said.items()}
        asked = [{"role": "user", "content": prompt}]
        theirs.append({"prompt": asked, **turns, "images": [str(file)]})
        parts = [{"type": "image", "image": file.name}, {"type": "text", "text": prompt}]
        ours.append({"prompt": [{"role": "user", "content": parts}], **turns})
    write_lines(scratch / "rows.jsonl", ours)
    return theirs


def picture(file: Path, side: int, seed: int) -> Path:
    """Write a picture of noise and return its file."""
    import numpy as np
    from PIL import Image

    noise = np.random.default_rng(seed)
    Image.fromarray(noise.integers(0, 256, (side, side, 3), dtype=np.uint8)).save(file)
    return file


class Clock:
    """Wall and CPU time of steps, tokens of the policy, and the peak memory until the last one."""

    def __init__(self) -> None:
        self.tokens = 0
        self.marks: list[tuple[float, float, float, int]] = []
        torch.nn.modules.module.register_module_forward_pre_hook(self._count)

    def _count(self, module: Any, words: Any) -> None:
        # The layers of a decoder get the hidden states of all tokens; the reference's are frozen.
        if type(module).__name__.endswith("DecoderLayer") and module.self_attn.layer_idx == 0:
            trained = next(module.parameters()).requires_grad
            self.tokens += trained * words[0].shape[:-1].numel()

    def mark(self) -> None:
        """Record the end of a step."""
        self.marks.append((time.perf_counter(), time.process_time(), peak_mb(), self.tokens))

    def result(self, steps: int, nodes: int) -> dict[str, float]:
        """Return the means of ``steps`` steps after those that warm up.

        Args:
            steps: Number of measured steps.
            nodes: Nodes of the prefix trees of these steps.
        """
        (wall, cpu, _, tokens), (wall_end, cpu_end, peak, tokens_end) = (
            self.marks[WARM - 1],
            self.marks[WARM - 1 + steps],
        )
        return {
            "seconds": (wall_end - wall) / steps,
            "cpu": (cpu_end - cpu) / steps,
            "peak_mb": peak,
            "tokens": (tokens_end - tokens) / nodes,
        }


def nodes_of(case: Case, config: Any) -> int:
    """Return the nodes of the prefix trees of the measured steps, one tree for each row."""
    from lightrft.datasets.preference.preference_dataset import PreferenceDataset
    from lightrft.datasets.sft_dataset import SFTDataset
    from lightrft.models.loading.from_pretrained import load_tokenizer as own_tokenizer
    from lightrft.models.processors import load_processor

    tokenizer = own_tokenizer(config.model)
    processor = load_processor(config.model, tokenizer)
    options = {"max_tokens": config.max_tokens, "seed": 0, "processor": processor}
    if case.verb == "sft":
        dataset: Any = SFTDataset(config.data, tokenizer, **options)
    else:
        dataset = PreferenceDataset(config.data, tokenizer, kind="pair", **options)
    nodes = 0
    for i in range(case.rows * WARM, case.rows * (WARM + case.steps)):
        example = dataset[i]
        answers = (
            [example.response_ids]
            if case.verb == "sft"
            else [response.token_ids for response in example.responses]
        )
        rows = [[*example.prompt_ids, *answer[:-1]] for answer in answers]
        nodes += len({tuple(row[:end]) for row in rows for end in range(1, len(row) + 1)})
    return nodes


def run_lightrft(case: Case, folder: Path, scratch: Path, share: int) -> dict[str, float]:
    """Take the steps with the verb's own run."""
    rows_of(case, folder, scratch)
    from lightrft.observability.observer import NullObserver
    from lightrft.trainer.preference.run import run_preference
    from lightrft.trainer.sft import run_sft

    clock = Clock()

    class Marks(NullObserver):
        def update(self, row: Any) -> None:
            clock.mark()

    config = config_of(case, folder, scratch, share)
    (run_sft if case.verb == "sft" else run_preference)(config, Marks())
    return clock.result(case.steps, nodes_of(case, config))


def config_of(case: Case, folder: Path, scratch: Path, share: int = 1) -> Any:
    """Return the settings of the verb."""
    from lightrft.config.base import build
    from lightrft.verbs import VERBS

    tree: dict[str, Any] = {
        "run": {"dir": str(scratch), "name": "run", "progress": False},
        "model": {
            "path": str(folder),
            "dtype": "float32",
            "check_layout": False,
            # TRL's side freezes all of ``visual``, which holds the projector.
            "freeze": ["tower", "projector"] if case.frozen else [],
        },
        "data": {"sources": [{"path": str(scratch / "rows.jsonl")}], "shuffle": False},
        "batch_size": case.rows,
        "max_tokens": 4096,
        # The last step writes a checkpoint, so that one more is taken than is measured.
        "train": {
            "steps": case.steps + WARM + 1,
            "max_tokens_per_micro_batch": BUDGET // share,
        },
        "optimizer": {"lr": 1e-5},
        "strategy": {"device": "cpu"},
        "log": {"tensorboard": False},
    }
    if case.verb == "dpo":
        tree["preference"] = {"beta": 0.1, "reference": {"source": "step"}}
    return build(VERBS[case.verb].settings_class(), tree)


def trl_settings(case: Case, scratch: Path, rows: int, part: int) -> dict[str, Any]:
    """Return the settings that all of TRL's trainers share.

    Args:
        case: The case.
        scratch: Folder for what the trainer writes.
        rows: Rows of a batch on TRL's side.
        part: Number of micro-batches.
    """
    return {
        "output_dir": str(scratch / "trl"),
        "per_device_train_batch_size": rows // part,
        "gradient_accumulation_steps": part,
        "max_steps": case.steps + WARM,
        "learning_rate": 1e-5,
        "train_sampling_strategy": "sequential",
        "max_length": None if case.side else 4096,
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
    }


def marks(clock: Clock) -> Any:
    """Return a callback of TRL's trainers that records the end of each step."""
    from transformers import TrainerCallback

    class Marks(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.mark()

    return Marks()


def run_trl(case: Case, folder: Path, scratch: Path, part: int) -> dict[str, float]:
    """Take the steps with TRL's trainer, in ``part`` micro-batches."""
    rows = rows_of(case, folder, scratch)
    import trl
    from datasets import Dataset, Image, List
    from transformers import AutoModelForCausalLM

    clock = Clock()
    name = case.verb.upper()
    options: dict[str, Any] = {"beta": 0.1} if case.verb == "dpo" else {}
    config = getattr(trl, f"{name}Config")(
        **trl_settings(case, scratch, case.rows, part), **options
    )
    data, pictures = Dataset.from_list(rows), Pictures()
    if case.side:
        data = data.cast_column("images", List(Image()))
        load, processing = (
            lambda: pictures.trl_model(folder, None),
            pictures.processing_class(folder),
        )
    else:
        load = lambda: AutoModelForCausalLM.from_pretrained(folder, dtype="float32")  # noqa: E731
        processing = load_tokenizer(folder)
    policy = load()
    if case.frozen:
        policy.model.visual.requires_grad_(False)
    models = {"model": policy, **({"ref_model": load()} if case.verb == "dpo" else {})}
    trainer = getattr(trl, f"{name}Trainer")(
        **models,
        args=config,
        train_dataset=data,
        processing_class=processing,
        callbacks=[marks(clock)],
    )
    trainer.train()
    return clock.result(case.steps, nodes_of(case, config_of(case, folder, scratch)))


Side = Callable[[Case, Path, Path, int], dict[str, float]]
"""Takes the steps of a case with a model folder, in a scratch folder, in parts."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A benchmark of two sides.

    Attributes:
        script: The script that runs it.
        title: Title of the page of results.
        cases: The cases by name.
        make: Writes the model of a case.
        sides: What runs, by side.
    """

    script: Path
    title: str
    cases: Mapping[str, Case]
    make: Callable[[Case, Path], None]
    sides: Mapping[str, Side]


def one_round(
    about: Comparison, case: str, side: str, folder: Path, part: int = 1
) -> dict[str, float]:
    """Run one side in a process of its own."""
    given = json.dumps([case, side, str(folder), part])
    words = [sys.executable, str(about.script), "--worker", given]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    found = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not found:
        raise RuntimeError(f"{case}, {side}: status {done.returncode}\n{done.stderr[-3000:]}")
    return json.loads(found[-1].removeprefix("RESULT "))


def worker(about: Comparison, name: str, side: str, folder: Path, part: int) -> None:
    """Run one side of a case and print its result."""
    torch.manual_seed(0)
    torch.set_num_threads(os.cpu_count() or 1)
    case = about.cases[name]
    if side == "make":
        about.make(case, folder)
        print("RESULT {}")
        return
    with tempfile.TemporaryDirectory() as scratch:
        result = about.sides[side](case, folder, Path(scratch), part)
    print("RESULT " + json.dumps(result))


def fastest(about: Comparison, name: str, side: str, folder: Path, parts: Sequence[int]) -> int:
    """Return the one of ``parts`` that is best by the measure of the case's target."""
    wanted = next(iter(about.cases[name].target))
    tried = {part: one_round(about, name, side, folder, part) for part in dict.fromkeys(parts)}
    return min(tried, key=lambda part: tried[part][wanted])


def compare(about: Comparison, name: str, rounds: int) -> list[str]:
    """Run both sides in turn and return the rows of the table."""
    case = about.cases[name]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        one_round(about, name, "make", folder)
        sides = {"lightrft": SHARES, "trl": [part or case.rows for part in PARTS]}
        best = {side: fastest(about, name, side, folder, parts) for side, parts in sides.items()}
        found: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
        for _ in range(rounds):
            for side, part in best.items():
                found[side].append(one_round(about, name, side, folder, part))
    lines = []
    for measure in MEASURES:
        pairs = list(zip(found["trl"], found["lightrft"], strict=True))
        ratios = [theirs[measure] / ours[measure] for theirs, ours in pairs]
        ours = statistics.median(row[measure] for row in found["lightrft"])
        theirs = statistics.median(row[measure] for row in found["trl"])
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        goal = f"{case.target[measure]:g}" if measure in case.target else ""
        middle = statistics.median(ratios)
        lines.append(
            f"| {name} | {measure} | {ours:.3g} | {theirs:.3g} | {middle:.2f} | {spread} | {goal} |"
        )
        print(lines[-1], flush=True)
    return lines


def kept_rows(file: Path, cases: Mapping[str, Case]) -> dict[str, list[str]]:
    """Return the rows of ``file`` by case. Cases that are not measured again keep theirs."""
    rows: dict[str, list[str]] = {}
    if not file.is_file():
        return rows
    for line in file.read_text(encoding="utf-8").splitlines():
        name = line.strip("| ").partition(" ")[0]
        if name in cases:
            rows.setdefault(name, []).append(line)
    return rows


def main(about: Comparison, doc: str | None) -> int:
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", nargs="+", choices=about.cases, default=list(about.cases))
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        name, side, folder, part = json.loads(args.worker)
        worker(about, name, side, Path(folder), part)
        return 0
    import transformers
    import trl

    versions = (
        f"torch {torch.__version__}, transformers {transformers.__version__}, TRL {trl.__version__}"
    )
    head = [
        f"# {about.title}\n",
        f"`python benchmarks/{about.script.name} --rounds {args.rounds}` on {cpu_model()} (family "
        f"{cpu_family()}), {os.cpu_count()} cores, {versions}. A ratio is TRL's number over lightrft's, of rounds that "
        "alternate; above 1 is better here. The top of the script says what is compared.\n",
        "| case | measure | lightrft | TRL | ratio | spread | target |",
        "|---|---|---|---|---|---|---|",
    ]
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / f"{about.script.stem}-{platform.machine()}-{os.cpu_count()}cores.md"
    rows = kept_rows(file, about.cases)
    # After each case: a case takes minutes, and a later one may fail.
    for name in args.cases:
        rows[name] = compare(about, name, args.rounds)
        lines = [line for case in about.cases for line in rows.get(case, [])]
        file.write_text("\n".join([*head, *lines]) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    both: dict[str, Side] = {"lightrft": run_lightrft, "trl": run_trl}
    title = "Steps of SFT and DPO against TRL"
    raise SystemExit(
        main(Comparison(HERE / Path(__file__).name, title, CASES, make, both), __doc__)
    )
