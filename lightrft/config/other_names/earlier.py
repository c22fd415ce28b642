"""Settings of earlier versions of this framework."""

from __future__ import annotations

from collections.abc import Callable

OLD_NAMES: dict[str, str] = {
    "rollout.prompts": "rollout.prompts_per_step",
    "rollout.samples": "rollout.group_size",
    "rollout.step_tokens": "rollout.max_tokens_per_step",
    "train.updates": "train.ppo_epochs",
    "train.mini_batches": "train.num_mini_batches",
    "train.micro_batch_tokens": "train.max_tokens_per_micro_batch",
    "algorithm.proximal": "algorithm.old_logprobs",
    "algorithm.drift": "algorithm.policy_drift",
    "algorithm.gates": "algorithm.token_masks",
    "algorithm.corrections": "algorithm.importance_sampling",
    "algorithm.advantage.lam": "algorithm.advantage.gae_lambda",
    "algorithm.advantage.whiten": "algorithm.advantage.normalize",
    "reward.deadline": "reward.timeout",
    "data.chat": "data.apply_chat_template",
    "data.chat_options": "data.chat_template_options",
    "data.overlong": "data.overlong_prompts",
    "data.malformed": "data.bad_rows",
    "strategy.sleep": "strategy.offload_during_generation",
    "strategy.offload": "strategy.cpu_offload",
    "strategy.tensor": "strategy.tensor_parallel",
    "strategy.sequence": "strategy.sequence_parallel",
    "strategy.shard": "strategy.hsdp_shard_size",
    "strategy.reshard": "strategy.reshard_after_forward",
    "strategy.stage": "strategy.zero_stage",
    "strategy.timeout": "strategy.timeout_minutes",
    "engine.max_rows": "engine.max_num_seqs",
    "engine.token_budget": "engine.max_cache_tokens",
    "launch.ray.silence": "launch.ray.call_timeout_minutes",
    "launch.ray.wait": "launch.ray.placement_timeout_minutes",
    "optimizer.min_lr": "optimizer.min_lr_ratio",
    "process": "prm",
}
"""Settings of earlier versions, as they end, to their names now."""

_TRAINED_BY_RANKS = (
    "the ranks train it, and strategy.kind fsdp2 or deepspeed shards it over them; leave it out"
)

REMOVED: dict[str, str] = {
    "launch.ray.critic": (
        f"it was removed: a critic in one worker cannot be sharded; {_TRAINED_BY_RANKS}"
    ),
    "launch.ray.process": (
        "it was removed: a process reward model in one worker cannot be sharded; "
        f"{_TRAINED_BY_RANKS}"
    ),
    "optimizer.warmup": (
        "set {above}optimizer.warmup_steps, or {above}optimizer.warmup_ratio for a share of all "
        "steps"
    ),
}
"""Settings of earlier versions, as they end, with what to do instead. ``{above}`` is the rest."""


def why_removed(name: str, exists: Callable[[str], bool]) -> str:
    """Return what to do in place of the setting ``name`` of an earlier version, or "".

    Args:
        name: The dotted name.
        exists: Returns True for a setting of the verb.
    """
    for old, advice in REMOVED.items():
        # With the dots, so that ``my_optimizer.warmup`` does not end in ``optimizer.warmup``.
        above, found, below = f".{name}".rpartition(f".{old}")
        section = f"{above}.{old.rpartition('.')[0]}".strip(".")
        if found and not below and exists(section):
            return advice.replace("{above}", f"{above}.".lstrip("."))
    return ""


def new_name(name: str, exists: Callable[[str], bool]) -> str:
    """Return the setting that replaced ``name`` of an earlier version, or "".

    Args:
        name: The dotted name.
        exists: Returns True for a setting of the verb.
    """
    for old, new in OLD_NAMES.items():
        # In the middle too: a branch that was renamed has settings below it.
        before, found, after = f".{name}.".partition(f".{old}.")
        now = f"{before}.{new}.{after}".strip(".")
        if found and exists(now):
            return now
    return ""
