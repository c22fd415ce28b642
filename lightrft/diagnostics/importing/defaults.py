"""Defaults of other frameworks that differ from ours and change what is learned."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from lightrft.config.other_names.conversions import number, processes_in

Options = Mapping[str, Any]


def _floor(schedule: str, usual: str) -> Callable[[Options], Any]:
    """Return the floor of a schedule that falls to 0, where the option ``schedule`` is one."""
    return lambda given: None if str(given.get(schedule, usual)).startswith("constant") else 0.0


def _alpha(given: Options) -> float:
    return 2.0 * (number(given, "lora_rank", default=8) or 8)


def _swift_rate(given: Options) -> float:
    kind = str(given.get("tuner_type") or given.get("train_type") or "lora")
    return 1e-5 if kind == "full" else 1e-4


def _swift_accumulation(given: Options) -> int:
    rows = number(given, "per_device_train_batch_size") * (processes_in(given) or 1)
    return max(1, math.ceil(16 / max(rows, 1)))


def _evaluated(given: Options) -> list[dict[str, Any]] | None:
    """Return the split that TRL's scripts evaluate on, where they evaluate."""
    name, subset = given.get("dataset_name"), given.get("dataset_config")
    if not name or str(given.get("eval_strategy") or "no") == "no":
        return None
    own = {"path": name, "split": given.get("dataset_test_split", "test")}
    return [own if subset is None else {**own, "subset": subset}]


_TRAINER = {
    "per_device_train_batch_size": 8,
    "num_train_epochs": 3,
    "lr_scheduler_type": "linear",
    "lr_scheduler_kwargs.min_lr_rate": _floor("lr_scheduler_type", "linear"),
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
}
_TRL = {
    **_TRAINER,
    "gradient_checkpointing": True,
    "lora_dropout": 0.05,
    "eval_dataset": _evaluated,
}
_LLAMA = {
    **_TRAINER,
    "learning_rate": 5e-5,
    "cutoff_len": 2048,
    "lora_rank": 8,
    "lora_alpha": _alpha,
    "finetuning_type": "lora",
}
_SWIFT = {
    **_TRAINER,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": _swift_accumulation,
    "gradient_checkpointing": True,
    "learning_rate": _swift_rate,
    "lr_scheduler_type": "cosine",
    "adam_beta2": 0.95,
    "weight_decay": 0.1,
    "lora_rank": 8,
    "lora_alpha": 32,
    "lora_dropout": 0.05,
    "train_type": "lora",
}
_OPENRLHF = {
    "train_batch_size": 128,
    "adam_betas": [0.9, 0.95],
    "max_norm": 1.0,
    "lr_scheduler": "cosine_with_min_lr",
    "lr_warmup_ratio": 0.03,
    "lora_alpha": 16,
}
_OPENRLHF_RL = {
    **_OPENRLHF,
    "actor_learning_rate": 1e-6,
    "advantage_estimator": "gae",
    "n_samples_per_prompt": 1,
    "generate_max_len": 1024,
    "init_kl_coef": 0.01,
    "kl_estimator": "k1",
}
_ACTOR = "actor_rollout_ref.actor"

DEFAULTS: dict[tuple[str, str], dict[str, Any]] = {
    ("trl", "sft"): {**_TRL, "learning_rate": 2e-5, "max_length": 1024},
    ("trl", "dpo"): {**_TRL, "learning_rate": 1e-6, "max_length": 1024, "beta": 0.1},
    ("trl", "kto"): {**_TRL, "learning_rate": 1e-6, "max_length": 1024, "beta": 0.1},
    ("trl", "rm"): {**_TRL, "learning_rate": 1e-4, "max_length": 1024},
    ("trl", "rl"): {
        **_TRL,
        "learning_rate": 1e-6,
        "num_generations": 8,
        "max_completion_length": 512,
        "beta": 0.0,
        "loss_type": "dapo",
    },
    ("openrlhf", "rl"): {**_OPENRLHF_RL, "rollout_batch_size": 1024, "lambd": 1.0},
    ("lightrft", "rl"): {
        **_OPENRLHF_RL,
        "rollout_batch_size": 512,
        "lambd": 0.95,
        "loss_agg_mode": "seq-mean-token-mean",
    },
    ("openrlhf", "sft"): {**_OPENRLHF, "learning_rate": 5e-6, "max_len": 2048, "max_epochs": 2},
    ("openrlhf", "dpo"): {**_OPENRLHF, "learning_rate": 1e-5, "max_len": 512, "beta": 0.1},
    ("openrlhf", "rm"): {**_OPENRLHF, "learning_rate": 9e-6, "max_len": 512},
    ("openrlhf", "kto"): {**_OPENRLHF, "learning_rate": 1e-5, "max_len": 2048, "beta": 0.01},
    ("openrlhf", "distill"): {
        **_OPENRLHF,
        "learning_rate": 5e-6,
        "max_len": 2048,
        "kd_coef": 0.4,
    },
    ("verl", "rl"): {
        "data.train_batch_size": 1024,
        "data.max_prompt_length": 512,
        "data.max_response_length": 512,
        "algorithm.adv_estimator": "gae",
        "algorithm.use_kl_in_reward": False,
        f"{_ACTOR}.use_kl_loss": False,
        f"{_ACTOR}.ppo_mini_batch_size": 256,
        f"{_ACTOR}.loss_agg_mode": "token-mean",
        f"{_ACTOR}.optim.lr": 1e-6,
        f"{_ACTOR}.optim.weight_decay": 0.01,
        f"{_ACTOR}.optim.betas": [0.9, 0.999],
        f"{_ACTOR}.optim.min_lr_ratio": _floor(f"{_ACTOR}.optim.lr_scheduler_type", "constant"),
        "actor_rollout_ref.model.lora_alpha": 16,
        "actor_rollout_ref.rollout.n": 1,
        "trainer.total_epochs": 30,
    },
    ("llamafactory", "sft"): _LLAMA,
    ("llamafactory", "dpo"): {**_LLAMA, "pref_beta": 0.1},
    ("llamafactory", "kto"): {**_LLAMA, "pref_beta": 0.1},
    ("llamafactory", "rm"): _LLAMA,
    ("ms-swift", "sft"): _SWIFT,
    ("ms-swift", "dpo"): {**_SWIFT, "beta": 0.1},
    ("ms-swift", "kto"): {**_SWIFT, "beta": 0.1},
    ("ms-swift", "rm"): _SWIFT,
    ("ms-swift", "rl"): {
        name: _SWIFT[name]
        for name in ("per_device_train_batch_size", "gradient_accumulation_steps")
    },
}
"""Options that a config leaves out, by framework and verb.

A function returns the value for the options that are given, or None where there is none.
"""
