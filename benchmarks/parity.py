"""The same run on one process and on several, number by number; and checkpoints of each way to run taken up by each other.

    python benchmarks/parity.py [--ways fsdp2x2 zero3x2] [--cases grpo pictures] [--out benchmarks/results] [--folder kept]
    python benchmarks/parity.py --checkpoints [--ways single fsdp2x2] [--out benchmarks/results] [--folder kept]

Every case is run as ``single`` and in every way, tiny models in float32 on the CPU, gloo between real processes; a way whose package is
not installed is left out, and said to be. All runs of a way go on one after another in the same processes (on Ray, in the same cluster),
and the first of them is repeated at the end, to be the same bit for bit. Runs are kept in ``--folder``, if there is one, and those that
have ended there are not run again.

What is compared is each metric of each step, but for times, and each trained weight at the end. The difference of two numbers is relative
to the expected one or to 0.02, whichever is larger: a loss whose terms cancel has no digits of its own (``policy/kl_per_answer``, a
difference of sums of about 20, to 0.12). The difference of two tensors is the largest of their elements' over the largest element expected,
or 0.02. The exit status is 1 when one is above 1e-5.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

LIMIT = 1e-5
FLOOR = 0.02
"""The size at which smaller numbers are compared."""
FLOORS = {"policy/kl_per_answer": 0.12}
"""The same for differences of near-equal numbers: here of the log-probs of six tokens, about 20 in all. Float32 keeps such a sum to 2e-6:
a difference of 0 has no digits of its own. Over 0.12, 1e-5 are 1.2e-6."""
NOT_COMPARED = ("time", "seconds", "tokens_per_second", "policy/rollout_logprob_diff")
"""How the names begin of what depends on the clock, or measures rounding itself."""
WORKERS = ("/restarts", "/weights_resent", "/retries", "/update_bytes", "/update_seconds")
"""How they end where there are workers or a server only."""
Tree = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Way:
    """How a run is spread: ``processes`` that are started for it, the settings that ask for it, more of them by case, the package that it
    needs, and the cases that it cannot run."""

    processes: int = 1
    settings: Tree = field(default_factory=dict)
    needs: str = "torch"
    by_case: dict[str, Tree] = field(default_factory=dict)
    without: tuple[str, ...] = ()

    @property
    def there(self) -> bool:
        return importlib.util.find_spec(self.needs) is not None


def zero(stage: int) -> Tree:
    """The settings that ask for a stage of ZeRO."""
    return {"strategy": {"kind": "deepspeed", "zero_stage": stage}}


def on_ray(**ray: Any) -> Tree:
    """The settings that ask for two ranks on a cluster of this machine, and for workers."""
    return {"launch": {"kind": "ray", "processes": 2, "ray": {"cpus": 0.2, **ray}}}


def groups_of_2(setting: str) -> Tree:
    """The settings by which two ranks share each row or each layer."""
    return {"strategy": {"kind": "fsdp2", setting: 2}}


APART = {"worker_cpus": 0.2, "engines": 1, "scorers": 1}
OF_ROLLOUTS = ("grpo", "ppo", "lora", "pictures", "one row", "experts")
OF_RESPONSES = (
    "sft",
    "sft pictures",
    "sft experts",
    "dpo",
    "dpo lora",
    "dpo experts",
    "dpo pictures",
    "dpo frozen pictures",
    "dpo online",
    "mpo",
    "tdpo",
    "kto",
    "distill",
    "uld",
    "rm",
    "rm ranked",
    "rm pictures",
    "prm",
)
"""The cases that sample, and those of verbs that train on given responses."""

WAYS: dict[str, Way] = {
    "single": Way(),
    **{f"fsdp2x{n}": Way(n, {"strategy": {"kind": "fsdp2"}}) for n in (2, 3)},
    # Runs with rollouts have tests of their own for these (tests/e2e/test_teams.py). Sequences of two
    # tokenizers cannot be split alike.
    "sequence2": Way(2, groups_of_2("sequence_parallel"), without=(*OF_ROLLOUTS, "uld")),
    "tensor2": Way(2, groups_of_2("tensor_parallel"), without=OF_ROLLOUTS),
    **{f"zero{stage}x{n}": Way(n, zero(stage), "deepspeed") for n in (2, 3) for stage in (1, 2, 3)},
    "ray": Way(1, on_ray(), "ray"),
    "ray-apart": Way(
        settings=on_ray(**APART),
        needs="ray",
        by_case={
            "grpo": on_ray(**APART, references=1),
            "ppo": on_ray(**APART, references=1),
            "pictures": on_ray(**APART, references=1),
        },
        without=OF_RESPONSES,
    ),
}
"""On Ray, ranks have all roles with them, or engine, scorer and reference are in workers of their own; training on given responses
has none of these."""

REWARD = """def varied(rollout):
    return sum(rollout.token_ids) % 7 / 7


def costly(rollout):
    return sum(rollout.token_ids) % 5 / 5
"""
"""As different for answers as for right and wrong ones, of a model that has learnt nothing."""

BASE: Tree = {
    "run": {"seed": 5, "threads": 1, "progress": False},
    "strategy": {"device": "cpu", "timeout_minutes": 2.0},
    "model": {"dtype": "float32"},
    "train": {"steps": 3, "max_tokens_per_micro_batch": 60},
    # Adam makes a gradient that is nothing but rounding, as that of a bias of keys, as large as any other unless eps is above it.
    "optimizer": {"lr": 1e-3, "eps": 1e-4},
    "log": {"tensorboard": False},
}
ROLLOUTS: Tree = {
    "rollout": {"prompts_per_step": 5, "group_size": 3},
    "sampling": {"max_new_tokens": 6},
}
"""Five groups of three, which neither two nor three ranks divide, in micro-batches of a few rows."""

CASES: dict[str, Tree] = {
    "grpo": {"algorithm": {"preset": "grpo"}},
    "ppo": {
        "algorithm": {"preset": "ppo", "kl": {"coef": 0.01}},
        "train": {"ppo_epochs": 2, "num_mini_batches": 2},
    },
    # Two critics, and a multiplier that moves by the costs of all ranks.
    "ppo_lag": {
        "algorithm": {"preset": "ppo_lag", "lagrangian": {"window": 20}},
        "train": {"num_mini_batches": 2},
    },
    "lora": {"algorithm": {"preset": "grpo", "kl": {"coef": 0.01}}, "model": {"lora": {"rank": 4}}},
    # Rows with pictures are few: of the ranks that draw, and of those that train, some have none.
    "pictures": {"algorithm": {"preset": "grpo"}, "train": {"steps": 2}},
    # One answer: every other rank has no row at all.
    "one row": {
        "algorithm": {"preset": "reinforce"},
        "rollout": {"prompts_per_step": 1, "group_size": 1},
    },
    # A mixture of experts, trained with the experts that generation picked, and to balance them.
    "experts": {
        "algorithm": {"preset": "grpo"},
        "model": {"replay_routes": True, "router_aux_loss_coef": 0.1},
    },
    # The rows have weights, and each place in the batch its own noise.
    "sft": {"batch_size": 5, "neftune_alpha": 5.0},
    "sft pictures": {"batch_size": 5, "train": {"steps": 2}},
    "sft experts": {"batch_size": 5, "model": {"router_aux_loss_coef": 0.1}},
    "dpo": {"preference": {"preset": "dpo"}},
    "dpo lora": {"preference": {"preset": "dpo"}, "model": {"lora": {"rank": 4}}},
    "dpo experts": {"preference": {"preset": "dpo"}, "model": {"router_aux_loss_coef": 0.1}},
    "dpo pictures": {"preference": {"preset": "dpo"}, "train": {"steps": 2}},
    # Policy and reference share features, and all ranks must agree on when the tower runs.
    "dpo frozen pictures": {
        "model": {"freeze": ["tower", "projector"]},
        "preference": {"preset": "dpo", "reference": {"source": "step"}},
        "train": {"steps": 2},
    },
    # Ranks share the prompts. Groups of equal rewards are replaced, and the reference moves.
    "dpo online": {
        "preference": {
            "losses": ["odpo"],
            # Float32 keeps the log-prob of a response to 1e-6, of which the implicit reward is beta
            # times a difference: with the preset's 0.5 its rounding would be above the limit.
            "beta": 0.1,
            "reference": {"refresh_every": 1, "refresh_decay": 0.5},
        },
        "online": {"group_size": 2, "missing_eos_penalty": 0.25},
        "sampling": {"max_new_tokens": 4},
        "validation": {"sources": []},
    },
    # It couples the whole batch by a running mean.
    "mpo": {"preference": {"preset": "mpo"}},
    # It compares whole distributions with those of the reference.
    "tdpo": {"preference": {"preset": "tdpo", "reference": {"source": "step"}}},
    "kto": {"preference": {"preset": "kto"}},
    # The seed samples the responses of one step of three.
    "distill": {
        "distill": {"kind": "jsd", "top_k": 12, "on_policy": 0.5, "nll_coef": 0.1},
        "sampling": {"max_new_tokens": 6},
    },
    # The teacher has another tokenizer.
    "uld": {
        "distill": {"kind": "uld", "on_policy": 0.5, "nll_coef": 0.1},
        "sampling": {"max_new_tokens": 6},
    },
    "rm": {"reward_model": {"normalize": "scale"}},
    # A micro-batch has fewer tokens than a group, so the gradient is computed in two passes.
    "rm ranked": {
        "reward_model": {
            "heads": [{"name": "preference", "kind": "mlp", "logit_scale": True}],
            "losses": ["plackett_luce", {"name": "bradley_terry", "weight": 0.5}],
            "pooling": "attention",
        },
        "train": {"max_tokens_per_micro_batch": 10},
    },
    "rm pictures": {"reward_model": {"pooling": "mean"}, "train": {"steps": 2}},
    # A micro-batch has fewer tokens than the batch, and PQM compares the steps of a response.
    "prm": {
        "process_model": {"head": "mlp", "losses": ["cross_entropy", "pqm"]},
        "train": {"max_tokens_per_micro_batch": 20},
    },
}
"""What is run, as changes of ``BASE``."""
SUPERVISED = {
    "sft": "sft",
    "sft pictures": "sft",
    "sft experts": "sft",
    "dpo": "dpo",
    "dpo lora": "dpo",
    "dpo experts": "dpo",
    "dpo pictures": "dpo",
    "dpo frozen pictures": "dpo",
    "dpo online": "dpo",
    "mpo": "dpo",
    "tdpo": "dpo",
    "kto": "kto",
    "distill": "distill",
    "uld": "distill",
    "rm": "rm",
    "rm ranked": "rm",
    "rm pictures": "rm",
    "prm": "prm",
}
"""The verb of cases that train on given responses. All others are run by ``rl``."""
ROWS_OF = {
    "sft": "rows",
    "dpo": "pairs",
    "kto": "labelled",
    "distill": "rows",
    "rm": "pairs",
    "prm": "steps",
    "rl": "rows",
}
"""The file of a verb's rows; ``pictures`` and ``pairs of pictures`` have some with pictures."""


def rows_of_pictures(folder: Path) -> list[Tree]:
    """Two rows, whose pictures are of different sizes and lie in ``folder``."""
    import numpy as np
    from PIL import Image

    for i in range(2):
        pixels = np.random.default_rng(i).integers(0, 256, (12 + 8 * i, 20, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{i}.png")
    return [{"prompt": "which?", "images": [f"{i}.png"], "label": "1"} for i in range(2)]


def make(folder: Path) -> None:
    """Models, rows and reward of all cases."""
    from lightrft.models.loading.save_model import save_model
    from lightrft.models.tiny import save_tiny_media
    from lightrft.models.tiny.text import tiny_model, tiny_tokenizer
    from lightrft.models.tiny.text_families import family_model

    tokenizer = tiny_tokenizer()
    # Two ranks can share the heads.
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": len(tokenizer), **heads}
    save_model(tiny_model("qwen2", seed=1, **sizes), tokenizer, folder / "model")
    save_model(tiny_model("qwen2", seed=2, **sizes), tokenizer, folder / "teacher")
    more = tiny_tokenizer(special=("<more>",))
    wider = {**sizes, "vocab_size": len(more)}
    save_model(tiny_model("llama", seed=3, **wider), more, folder / "stranger")
    save_model(family_model("qwen3_moe"), tokenizer, folder / "experts")
    save_tiny_media("qwen2_5_vl", folder / "reader", hidden_size=32)
    rows: list[Tree] = [
        {
            "prompt": "1" * i + f"{i}+{i}=",
            "response": str(2 * i),
            "label": str(2 * i),
            "example_weight": 1 + i % 3,
        }
        for i in range(8)
    ]
    seen = [*rows, *rows_of_pictures(folder)]
    for name, some in {"rows": rows, "pictures": seen}.items():
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in some), encoding="utf-8"
        )
    pairs = [
        {
            "prompt": row["prompt"],
            "chosen": row["label"],
            "rejected": row["label"] + "1" * (i % 3) + "0",
        }
        for i, row in enumerate(rows)
    ]
    labelled = [
        {"prompt": row["prompt"], "completion": row["label"] + "0" * (i % 2), "label": i % 2 == 0}
        for i, row in enumerate(rows)
    ]
    seen_pairs = [
        {"prompt": row["prompt"], "images": row["images"], "chosen": "1", "rejected": "20"}
        for row in seen[len(rows) :]
    ]
    rankings = [
        {
            "prompt": pair["prompt"],
            "completions": [
                {"rank": 0, "completion": pair["chosen"]},
                {"rank": 1, "completion": pair["rejected"]},
                {"rank": 2, "completion": "x" * (1 + i % 4)},
            ],
        }
        for i, pair in enumerate(pairs)
    ]
    steps = [
        {
            "prompt": pair["prompt"],
            "completions": [pair["chosen"], "x" * (1 + i % 4), pair["rejected"]][: 2 + i % 2],
            "labels": [True, 0.25, False][: 2 + i % 2],
        }
        for i, pair in enumerate(pairs)
    ]
    lessons = [{**row, "response": row["label"]} for row in seen]
    files = {
        "steps": steps,
        "pairs": pairs,
        "rankings": rankings,
        "labelled": labelled,
        "pairs of pictures": [*pairs, *seen_pairs],
        "pictures": lessons,
    }
    for name, some in files.items():
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in some), encoding="utf-8"
        )
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")


def tree_of(case: str, way: str, folder: Path) -> Tree:
    """The config of ``case`` in ``way`` over what ``make`` has left in ``folder``."""
    from lightrft.config.base import deep_merge

    media = case.endswith("pictures")
    model = "reader" if media else "experts" if case.endswith("experts") else "model"
    verb = SUPERVISED.get(case, "rl")
    name = ROWS_OF[verb]
    if media:
        name = "pairs of pictures" if verb in ("dpo", "rm") else "pictures"
    elif case == "rm ranked":
        name = "rankings"
    elif "online" in CASES[case]:
        name = "rows"
    sources = {"sources": [{"path": str(folder / f"{name}.jsonl")}]}
    prompts = {"sources": [{"path": str(folder / ("pictures.jsonl" if media else "rows.jsonl"))}]}
    own: Tree = {
        "run": {"dir": str(folder / way), "name": case},
        "model": {"path": str(folder / model)},
        "data": sources,
        "eval": {"data": prompts, "every": 2, "sampling": {"max_new_tokens": 4}},
        "reward": {"terms": [f"{folder / 'reward.py'}:varied"]},
    }
    if case == "ppo_lag":
        cost = {"function": f"{folder / 'reward.py'}:costly", "name": "cost", "weight": 0}
        own["reward"]["terms"].append(cost)
        own["reward"]["success"] = "varied"
    if verb == "distill":
        own["teacher"] = {"path": str(folder / ("stranger" if case == "uld" else "teacher"))}
    if verb == "rl":
        kind = ROLLOUTS
    else:
        kind = {"verb": verb, "batch_size": 5}
    if verb in ("dpo", "kto"):
        kind["validation"] = sources
        kind["preference"] = {"reference": {"cache_dir": str(folder / way / "cache")}}
    if verb in ("rm", "prm"):
        # It has neither prompts nor rewards.
        kind["validation"] = sources
        own["eval"] = {"every": 2}
        del own["reward"]
    tree = deep_merge(BASE, own)
    for more in (
        kind,
        CASES[case],
        WAYS[way].settings,
        WAYS[way].by_case.get(case, {}),
    ):
        tree = deep_merge(tree, more)
    return tree


# ---------------------------------------------------------------------------------------------------------------------- many runs


def ended(tree: Tree) -> bool:
    """Whether there is a run of ``tree`` that has come to its end."""
    summary = Path(tree["run"]["dir"]) / tree["run"]["name"] / "summary.json"
    if not summary.exists():
        return False
    found = json.loads(summary.read_text(encoding="utf-8"))
    return bool(found["finished"]) and found["steps"] == tree["train"]["steps"]


class Start(Protocol):
    """Run ``python words...`` and return its exit status and output.

    Args:
        words: the arguments of the interpreter.
        env: the environment of the process.
        seats: the number of ranks that torch's launcher starts there; 0 without the launcher.
        timeout: seconds after which the process is killed and ``TimeoutExpired`` is raised.
    """

    def __call__(
        self, words: Sequence[str], *, env: Mapping[str, str], seats: int, timeout: float
    ) -> subprocess.CompletedProcess[str]: ...


def new_interpreters(
    words: Sequence[str], *, env: Mapping[str, str], seats: int, timeout: float
) -> subprocess.CompletedProcess[str]:
    """Implement ``Start`` with a new interpreter for the program and for each of its ranks."""
    # A file and not a pipe: a cluster that outlives the program would keep the pipe open.
    with tempfile.TemporaryFile("w+") as said:
        command = [sys.executable, *words]
        status = subprocess.run(
            command, stdout=said, stderr=subprocess.STDOUT, env=env, timeout=timeout, check=False
        ).returncode
        said.seek(0)
        return subprocess.CompletedProcess(command, status, said.read(), "")


def run_all(
    trees: Sequence[Tree],
    folder: Path,
    processes: int,
    seconds: float = 200,
    start: Start = new_interpreters,
) -> None:
    """Run configs one after another in the same process group.

    ``verb`` of a config names the verb that runs it. Without it, that is ``lightrft rl``.

    Args:
        trees: the configs.
        folder: where the list of configs is written.
        processes: the number of ranks.
        seconds: the limit for each config. The limit of all is their sum.
        start: starts the processes.

    Raises:
        RuntimeError: a run failed. The message has its output. Later configs are not run.
    """
    if not trees:
        return
    folder.mkdir(parents=True, exist_ok=True)
    plan = folder / "plan.json"
    plan.write_text(json.dumps(list(trees)), encoding="utf-8")
    path = os.pathsep.join(
        [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]
    )
    env = {
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **os.environ,
        "PYTHONPATH": path,
    }
    torchrun = (
        ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        if processes > 1
        else []
    )
    words = [*torchrun, __file__, "--plan", str(plan)]
    seats = processes if processes > 1 else 0
    done = start(words, env=env, seats=seats, timeout=seconds * len(trees))
    if done.returncode:
        said = (done.stdout + done.stderr)[-8000:]
        raise RuntimeError(f"{processes} processes ended with status {done.returncode}:\n{said}")


def run_here(plan: Path) -> None:
    """In each of the processes: the runs of ``plan``."""
    import torch

    from lightrft.api.start import program
    from lightrft.config.base import build
    from lightrft.distributed.process_group import init_process_group
    from lightrft.observability.observer import NullObserver
    from lightrft.verbs import VERBS

    torch.set_num_threads(1)
    trees = json.loads(plan.read_text(encoding="utf-8"))
    with ExitStack() as stack:
        stack.enter_context(init_process_group(BASE["strategy"]["timeout_minutes"]))
        for tree in trees:
            row = VERBS[tree.pop("verb", "rl")]
            config = build(row.settings_class(), tree)
            if config.launch.kind == "ray":
                from lightrft.distributed.ray_cluster import cluster

                stack.enter_context(cluster(config.launch.ray))  # where there is one already, that
            program(row.function, config)(config, NullObserver())


# --------------------------------------------------------------------------------------------------------------------- comparison


def relative(found: float, expected: float, floor: float = FLOOR) -> float:
    """How far ``found`` is from ``expected``, over its size or ``floor``."""
    if found == expected or (math.isnan(found) and math.isnan(expected)):
        return 0.0
    gap = abs(found - expected) / max(abs(expected), floor)
    return gap if math.isfinite(gap) else math.inf


def kind_of(metric: str) -> str:
    """The column of the table that ``metric`` belongs to."""
    name = metric.rpartition("/")[2]
    return {"loss": "loss", "grad_norm": "gradient norm"}.get(name, "other metrics")


def metric_gaps(found: Sequence[Tree], expected: Sequence[Tree]) -> Iterator[tuple[str, float]]:
    """Step and name of each metric in rows of ``metrics.jsonl``, and its difference; infinite where it is on one side only."""
    if [r["step"] for r in found] != [r["step"] for r in expected]:
        yield "steps", math.inf
    for row, want in zip(found, expected):
        keys = {
            k
            for k in row.keys() | want.keys()
            if not k.startswith(NOT_COMPARED) and not k.endswith(WORKERS)
        }
        for key in sorted(keys):
            a, b = row.get(key), want.get(key)
            numbers = isinstance(a, int | float) and isinstance(b, int | float)
            gap = (
                relative(float(a), float(b), FLOORS.get(key, FLOOR))
                if numbers
                else 0.0
                if a == b
                else math.inf
            )
            yield f"{want['step']} {key}", gap


def weights_of(run: Path) -> dict[str, Any]:
    """Every tensor that ``run`` has trained, from its last checkpoint, and of the model that it has written."""
    from safetensors.torch import load_file

    last = max((run / "checkpoints").glob("step_*"))
    files = [*last.glob("*/state.safetensors"), *(run / "model").rglob("*.safetensors")]
    return {
        f"{file.parent.name}/{name}": tensor
        for file in files
        for name, tensor in load_file(file).items()
        if file.name != "state.safetensors" or name.startswith("weights/")
    }


def weight_gaps(found: Path, expected: Path) -> Iterator[tuple[str, float]]:
    """Each tensor of two runs and its difference."""
    theirs, ours = weights_of(found), weights_of(expected)
    for name in sorted(theirs.keys() | ours.keys()):
        a, b = theirs.get(name), ours.get(name)
        if a is None or b is None or a.shape != b.shape:
            yield name, math.inf
        elif b.numel():
            a, b = a.double(), b.double()
            yield name, float((a - b).abs().max() / b.abs().max().clamp(min=FLOOR))


@dataclass(slots=True)
class Gaps:
    """The largest difference between two runs by column of the table, and where it is."""

    largest: dict[str, tuple[float, str]] = field(default_factory=dict)

    def add(self, column: str, where: str, gap: float) -> None:
        if gap >= self.largest.get(column, (0.0, ""))[0]:
            self.largest[column] = (gap, where)

    @property
    def worst(self) -> tuple[float, str]:
        return max(self.largest.values())

    def of(self, column: str) -> str:
        return f"{self.largest[column][0]:.1e}" if column in self.largest else ""


def compared(found: Path, expected: Path, since: int = 0) -> Gaps:
    """Two run folders: metrics of the steps after ``since``, and weights."""
    from lightrft.observability.trackers import read_rows

    gaps = Gaps()
    rows = [
        [r for r in read_rows(run / "metrics.jsonl") if r["step"] >= since]
        for run in (found, expected)
    ]
    for name, gap in metric_gaps(*rows):
        gaps.add(kind_of(name.split()[-1]), f"step {name}", gap)
    for name, gap in weight_gaps(found, expected):
        gaps.add("weights", name, gap)
    return gaps


# ---------------------------------------------------------------------------------------------------------------- the two tables

COLUMNS = ("loss", "gradient norm", "other metrics", "weights")


def run_way(way: str, cases: Sequence[str], folder: Path, start: Start = new_interpreters) -> None:
    """Run ``cases`` in ``way``, and the first of them again.

    Args:
        way: a key of ``WAYS``.
        cases: keys of ``CASES``. Cases that ``way`` cannot run are left out.
        folder: the folder of models, data and runs. A finished run in it is not run again.
        start: starts the processes.

    Raises:
        RuntimeError: a run failed, or the first case gave other numbers the second time.
    """
    cases = [case for case in cases if case not in WAYS[way].without]
    again = tree_of(cases[0], way, folder)
    again["run"]["name"] = "again"
    trees = [*(tree_of(case, way, folder) for case in cases), again]
    left = [tree for tree in trees if not ended(tree)]
    run_all(left, folder / way, WAYS[way].processes, start=start)
    gap, where = compared(folder / way / "again", folder / way / cases[0]).worst
    if gap:
        raise RuntimeError(
            f"{way}: {cases[0]} is not the same when it is run again in the same processes "
            f"({where}: {gap})"
        )


def matrix(
    ways: Sequence[str], cases: Sequence[str], folder: Path
) -> Iterator[tuple[str, str, Gaps]]:
    """Each way and case with its differences from ``single``."""
    for way in dict.fromkeys(["single", *ways]):
        run_way(way, cases, folder)
        for case in cases:
            if way == "single" or case in WAYS[way].without:
                continue
            yield way, case, compared(folder / way / case, folder / "single" / case)


STEPS_BEFORE = 2
"""Steps of the run whose checkpoint is taken up; one more is taken then."""


def checkpoints(
    ways: Sequence[str], folder: Path, case: str = "ppo", start: Start = new_interpreters
) -> Iterator[tuple[str, str, Gaps]]:
    """Save a run in each way, resume it in each way, and compare with ``single`` never stopped.

    Args:
        ways: keys of ``WAYS``.
        folder: the folder of models, data and runs. A finished run in it is not run again.
        case: a key of ``CASES``.
        start: starts the processes.

    Yields:
        The way that saved, the way that resumed, and the differences of the steps after that. If both are the same way, also the
        difference between log-probs of the exported model and of the run.
    """

    def tree(way: str, name: str, steps: int) -> Tree:
        found = tree_of(case, way, folder)
        found["run"]["name"] = name
        found["train"]["steps"] = steps
        found["eval"] = {**found["eval"], "every": 1}
        return {**found, "log": {**found["log"], "batches_every": 1}}

    for way in dict.fromkeys(["single", *ways]):
        whole = [tree(way, "whole", STEPS_BEFORE + 1)] if way == "single" else []
        trees = [*whole, tree(way, "saved", STEPS_BEFORE)]
        unfinished = [tree for tree in trees if not ended(tree)]
        run_all(unfinished, folder / way, WAYS[way].processes, start=start)
    for way in ways:
        going_on = {other: tree(way, f"from {other}", STEPS_BEFORE + 1) for other in ways}
        left = {other: its for other, its in going_on.items() if not ended(its)}
        for other in left:
            shutil.rmtree(folder / way / f"from {other}", ignore_errors=True)
            shutil.copytree(folder / other / "saved", folder / way / f"from {other}")
        run_all(list(left.values()), folder / way, WAYS[way].processes, start=start)
        for other in ways:
            found = folder / way / f"from {other}"
            gaps = compared(found, folder / "single" / "whole", since=STEPS_BEFORE + 1)
            if other == way:
                batch = found / "batches" / f"step_{STEPS_BEFORE + 1:06d}"
                gaps.add("export", "log-probs", export_gap(folder / way / "saved" / "model", batch))
            yield other, way, gaps


def export_gap(model: Path, batch: Path) -> float:
    """The largest difference between the log-probs that transformers gives a written model, row by row and without padding, and those
    that the run had, of answers to the next prompts."""
    import torch
    from transformers import AutoModelForCausalLM

    from lightrft.rollout.serialization import load_batch

    drawn = load_batch(batch)
    reader = AutoModelForCausalLM.from_pretrained(model).eval()
    prompts, answers = (
        drawn.prompts.tokens.split(drawn.prompts.lengths.tolist()),
        drawn.responses.tokens,
    )
    rows = []
    for prompt, answer in zip(drawn.prompt_of.tolist(), answers.split(drawn.lengths.tolist())):
        ids = torch.cat([prompts[prompt], answer])
        with torch.no_grad():
            logits = reader(ids[None]).logits[0, len(prompts[prompt]) - 1 : -1].float()
        rows.append(logits.log_softmax(-1).gather(-1, answer[:, None])[:, 0])
    expected = torch.cat(rows).double()
    own = [c for c in (drawn.behavior_logprobs, drawn.old_logprobs) if c is not None]
    if not own:
        raise RuntimeError(f"{batch} has no log-probs of the run")
    return max(
        float(((column.double() - expected).abs() / expected.abs().clamp(min=FLOOR)).max())
        for column in own
    )


def table(
    cells: Mapping[tuple[str, str], float], rows: Sequence[str], columns: Sequence[str], corner: str
) -> list[str]:
    """The largest difference of each cell, in Markdown."""
    shown = lambda row, column: f"{cells[row, column]:.1e}" if (row, column) in cells else ""  # noqa: E731
    lines = [f"| {corner} | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    return [
        *lines,
        *(f"| {row} | {' | '.join(shown(row, column) for column in columns)} |" for row in rows),
    ]


def show(
    found: Iterator[tuple[str, str, Gaps]], columns: Sequence[str]
) -> dict[tuple[str, str], Gaps]:
    """Print a line for each cell as it comes."""
    cells: dict[tuple[str, str], Gaps] = {}
    print(f"{'':>24}  " + "  ".join(f"{c:>14}" for c in columns), flush=True)
    for one, other, gaps in found:
        cells[one, other] = gaps
        worst, where = gaps.worst
        line = f"{one:>11} {other:>12}  " + "  ".join(f"{gaps.of(c):>14}" for c in columns)
        print(line + (f"  ABOVE {LIMIT:g}: {where}" if worst > LIMIT else ""), flush=True)
    return cells


def text_of(
    cells: Mapping[tuple[str, str], Gaps], corner: str, columns: Sequence[str]
) -> list[str]:
    """The table of all cells, and one of the parts of each, or of each with both names the same where there are such."""
    rows, across = (list(dict.fromkeys(cell[i] for cell in cells)) for i in (0, 1))
    worst = {cell: gaps.worst[0] for cell, gaps in cells.items()}
    detailed = [cell for cell in cells if cell[0] == cell[1]] or list(cells)
    parts = [
        f"| {' | '.join(cell)} | {' | '.join(cells[cell].of(c) for c in columns)} |"
        for cell in detailed
    ]
    first, second = corner.split(" / ")
    head = [f"| {first} | {second} | {' | '.join(columns)} |", "|---" * (len(columns) + 2) + "|"]
    return [*table(worst, rows, across, corner), "", *head, *parts]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--checkpoints", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--plan", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.plan:
        run_here(args.plan)
        return 0
    ways = [way for way in args.ways if WAYS[way].there]
    missing = [
        f"{way} was not run: {WAYS[way].needs} is not installed."
        for way in args.ways
        if way not in ways
    ]
    if not args.checkpoints:
        missing += [
            f"{way} has no {case}: there are no roles to have workers."
            for way in ways
            for case in WAYS[way].without
        ]
    began = time.monotonic()
    corner, columns = (
        ("saved by / taken up by", (*COLUMNS, "export"))
        if args.checkpoints
        else ("way / case", COLUMNS)
    )
    with nullcontext(args.folder) if args.folder else tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        if not (folder / "reward.py").exists():
            folder.mkdir(parents=True, exist_ok=True)
            make(folder)
        found = checkpoints(ways, folder) if args.checkpoints else matrix(ways, args.cases, folder)
        cells = show(found, columns)
    lines = [*text_of(cells, corner, columns), "", *missing]
    print("\n".join(lines))
    if args.out:
        seconds = "" if args.folder else f"; {time.monotonic() - began:.0f} s"
        write(args.out, "checkpoints" if args.checkpoints else "parity", lines, seconds)
    return int(any(gaps.worst[0] > LIMIT for gaps in cells.values()))


def write(out: Path, what: str, lines: Sequence[str], seconds: str) -> None:
    """The table as a file."""
    import torch
    import transformers

    about = (
        f"{platform.machine()}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}, one thread a process"
    )
    flag = " --checkpoints" if what == "checkpoints" else ""
    heading = (
        "Checkpoints of each way to run, taken up by each other"
        if flag
        else "The same run in every way"
    )
    text = (
        f"# {heading}\n\n`python benchmarks/parity.py{flag}` on {about}{seconds}.\n\nThe largest "
        "relative difference from one process, of all steps and tensors; what is compared, and "
        "over what, is at the top of the script. 0 is bit for bit.\n\n"
    )
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{what}-{platform.machine()}-{os.cpu_count()}cores.md"
    path.write_text(text + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
