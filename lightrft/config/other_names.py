"""Names of settings in TRL, verl, OpenRLHF and earlier versions, with the names they have here."""

from __future__ import annotations

from collections.abc import Callable

OTHER_NAMES: dict[str, str] = {
    # model
    "model_name_or_path": "model.path",
    "pretrain": "model.path",
    "actor_rollout_ref.model.path": "model.path",
    "attn_implementation": "model.attention",
    "torch_dtype": "model.dtype",
    "bf16": "model.dtype",
    "fp16": "model.dtype",
    "lora_r": "model.lora.rank",
    "lora_rank": "model.lora.rank",
    "lora_alpha": "model.lora.alpha",
    "lora_dropout": "model.lora.dropout",
    "lora_target_modules": "model.lora.targets",
    "target_modules": "model.lora.targets",
    "enable_gradient_checkpointing": "model.gradient_checkpointing",
    "gradient_checkpointing": "model.gradient_checkpointing",
    "chat_template_path": "model.chat_template",
    "use_rollout_routing_replay": "model.replay_routes",
    "actor_rollout_ref.actor.router_replay.mode": "model.replay_routes",
    "actor_rollout_ref.rollout.enable_rollout_routing_replay": "model.replay_routes",
    "ref_model": "reference",
    "reward_pretrain": "reward.models",
    "reward_model.model.path": "reward.models",
    "critic_pretrain": "critic.path",
    "teacher_model_name_or_path": "teacher.path",
    "lmbda": "distill.on_policy",
    "kd_coef": "distill.nll_coef",
    "teacher_model": "teacher.path",
    "teacher_tokenizer_name_or_path": "teacher.path",
    "use_uld_loss": "distill.kind",
    "use_extended_uld": "distill.kind",
    "uld_use_hybrid_loss": "distill.kind",
    "uld_crossentropy_weight": "distill.nll_coef",
    "uld_student_temperature": "distill.temperature",
    "uld_teacher_temperature": "distill.temperature",
    # data
    "dataset_name": "data.sources",
    "prompt_data": "data.sources",
    "train_files": "data.sources",
    "train_dataset": "data.sources",
    "val_files": "eval.data.sources",
    "eval_dataset": "eval.data.sources",
    "input_key": "data.columns.prompt",
    "prompt_key": "data.columns.prompt",
    "label_key": "data.columns.label",
    "image_key": "data.columns.images",
    "max_prompt_length": "data.max_prompt_tokens",
    "prompt_max_len": "data.max_prompt_tokens",
    "apply_chat_template": "data.apply_chat_template",
    "filter_overlong_prompts": "data.overlong_prompts",
    "dataset_text_field": "data.columns.prompt",
    "completion_only_loss": "data.loss_on",
    "assistant_only_loss": "data.loss_on",
    "train_on_inputs": "data.loss_on",
    "train_on_prompt": "data.loss_on",
    "mask_history": "data.turns",
    "max_seq_length": "max_tokens",
    "max_length": "max_tokens",
    # merge
    "out_dtype": "dtype",
    "out_shard_size": "max_shard_size",
    "lambda": "scale",
    "parameters.weight": "models.weight",
    "parameters.density": "models.density",
    "parameters.t": "t",
    "parameters.normalize": "normalize",
    # rollout and sampling
    "num_generations": "rollout.group_size",
    "n_samples_per_prompt": "rollout.group_size",
    "rollout.n": "rollout.group_size",
    "rollout_batch_size": "rollout.prompts_per_step",
    "data.train_batch_size": "rollout.prompts_per_step",
    "max_completion_length": "sampling.max_new_tokens",
    "max_new_tokens": "sampling.max_new_tokens",
    "max_response_length": "sampling.max_new_tokens",
    "generate_max_len": "sampling.max_new_tokens",
    "rollout.temperature": "sampling.temperature",
    "temperature": "sampling.temperature",
    "top_p": "sampling.top_p",
    "top_k": "sampling.top_k",
    "min_p": "sampling.min_p",
    "repetition_penalty": "sampling.repetition_penalty",
    "steps_per_generation": "train.num_mini_batches",
    "dynamic_filtering": "algorithm.filters",
    "filter_groups": "algorithm.filters",
    "async_training": "rollout.staleness",
    # reward
    "reward_funcs": "reward.terms",
    "custom_reward_function": "reward.terms",
    "remote_rm_url": "reward.terms",
    "reward_weights": "reward.terms.weight",
    "overlong_buffer": "algorithm.shaping",
    "overlong_buffer_len": "algorithm.shaping",
    # algorithm
    "advantage_estimator": "algorithm.advantage.name",
    "adv_estimator": "algorithm.advantage.name",
    "loss_type": "algorithm.loss.name",
    "policy_loss": "algorithm.loss.name",
    "loss_agg_mode": "algorithm.aggregation",
    "importance_sampling_level": "algorithm.loss.ratio",
    "epsilon": "algorithm.loss.clip_low",
    "epsilon_high": "algorithm.loss.clip_high",
    "eps_clip": "algorithm.loss.clip_low",
    "eps_clip_low_high": "algorithm.loss.clip_high",
    "cliprange": "algorithm.loss.clip_low",
    "clip_ratio": "algorithm.loss.clip_low",
    "clip_ratio_low": "algorithm.loss.clip_low",
    "clip_ratio_high": "algorithm.loss.clip_high",
    "clip_ratio_c": "algorithm.loss.dual_clip",
    "dual_clip": "algorithm.loss.dual_clip",
    "delta": "algorithm.loss.ratio_cap",
    "beta": "algorithm.kl.coef",
    "kl_coef": "algorithm.kl.coef",
    "init_kl_coef": "algorithm.kl.coef",
    "kl_loss_coef": "algorithm.kl.coef",
    "kl_target": "algorithm.kl.target",
    "kl_horizon": "algorithm.kl.horizon",
    "kl_estimator": "algorithm.kl.estimator",
    "kl_loss_type": "algorithm.kl.estimator",
    "kl_penalty": "algorithm.kl.estimator",
    "use_kl_loss": "algorithm.kl.where",
    "use_kl_in_reward": "algorithm.kl.where",
    "sync_ref_model": "algorithm.kl.refresh_every",
    "ref_model_sync_steps": "algorithm.kl.refresh_every",
    "ref_model_mixup_alpha": "algorithm.kl.refresh_decay",
    "entropy_coeff": "algorithm.entropy.coef",
    "entropy_loss_coef": "algorithm.entropy.coef",
    "top_entropy_quantile": "algorithm.token_masks",
    "gamma": "algorithm.advantage.gamma",
    "lam": "algorithm.advantage.gae_lambda",
    "lambd": "algorithm.advantage.gae_lambda",
    "gae_lambda": "algorithm.advantage.gae_lambda",
    "scale_rewards": "algorithm.advantage.name",
    "norm_adv_by_std_in_grpo": "algorithm.advantage.name",
    "whiten_rewards": "algorithm.normalize.rewards",
    "normalize_reward": "algorithm.normalize.rewards",
    "value_clip": "algorithm.value.clip",
    "cliprange_value": "algorithm.value.clip",
    "vllm_importance_sampling_correction": "algorithm.importance_sampling",
    "tis_imp_ratio_cap": "algorithm.importance_sampling",
    "freezing_actor_steps": "critic.warmup_steps",
    "critic_warmup": "critic.warmup_steps",
    # training
    "num_train_epochs": "train.epochs",
    "num_episodes": "train.epochs",
    "total_epochs": "train.epochs",
    "max_steps": "train.steps",
    "total_training_steps": "train.steps",
    "num_iterations": "train.ppo_epochs",
    "num_ppo_epochs": "train.ppo_epochs",
    "ppo_epochs": "train.ppo_epochs",
    "num_mini_batches": "train.num_mini_batches",
    "ppo_mini_batch_size": "train.num_mini_batches",
    "train_batch_size": "train.num_mini_batches",
    "per_device_train_batch_size": "train.max_tokens_per_micro_batch",
    "gradient_accumulation_steps": "train.max_tokens_per_micro_batch",
    "micro_train_batch_size": "train.max_tokens_per_micro_batch",
    "micro_rollout_batch_size": "engine.max_num_seqs",
    "ppo_micro_batch_size_per_gpu": "train.max_tokens_per_micro_batch",
    "ppo_max_token_len_per_gpu": "train.max_tokens_per_micro_batch",
    "train_max_tokens_per_gpu": "train.max_tokens_per_micro_batch",
    "critic_learning_rate": "critic.optimizer.lr",
    "reward_model_name_or_path": "reward.models",
    "cost_model_name_or_path": "reward.models",
    "reward_critic_model_name_or_path": "critic.path",
    "cost_critic_model_name_or_path": "cost_critic.path",
    "threshold": "algorithm.lagrangian.costs",
    "lambda_init": "algorithm.lagrangian.init",
    "lambda_lr": "algorithm.lagrangian.lr",
    "lambda_max": "algorithm.lagrangian.max",
    "lambda_update_delay_steps": "algorithm.lagrangian.delay_steps",
    "episode_cost_window_size": "algorithm.lagrangian.window",
    "actor_learning_rate": "optimizer.lr",
    "learning_rate": "optimizer.lr",
    "optim.lr": "optimizer.lr",
    "lr": "optimizer.lr",
    "adam_betas": "optimizer.betas",
    "adam_beta1": "optimizer.betas",
    "adam_beta2": "optimizer.betas",
    "adam_epsilon": "optimizer.eps",
    "weight_decay": "optimizer.weight_decay",
    "l2": "optimizer.weight_decay",
    "max_grad_norm": "optimizer.max_grad_norm",
    "max_norm": "optimizer.max_grad_norm",
    "grad_clip": "optimizer.max_grad_norm",
    "lr_scheduler_type": "optimizer.schedule",
    "lr_scheduler": "optimizer.schedule",
    "warmup_ratio": "optimizer.warmup_ratio",
    "lr_warmup_ratio": "optimizer.warmup_ratio",
    "lr_warmup_steps": "optimizer.warmup_steps",
    "lr_warmup_steps_ratio": "optimizer.warmup_ratio",
    "warmup_steps": "optimizer.warmup_steps",
    "neftune_noise_alpha": "neftune_alpha",
    "neftune_alpha": "neftune_alpha",
    # where it runs
    "zero_stage": "strategy.zero_stage",
    "adam_offload": "strategy.cpu_offload",
    "param_offload": "strategy.cpu_offload",
    "optimizer_offload": "strategy.cpu_offload",
    "ring_attn_size": "strategy.sequence_parallel",
    "ulysses_sequence_parallel_size": "strategy.sequence_parallel",
    "ds_tensor_parallel_size": "strategy.tensor_parallel",
    "tensor_model_parallel_size": "strategy.tensor_parallel",
    "vllm_enable_sleep": "strategy.offload_during_generation",
    "n_gpus_per_node": "launch.processes",
    "nproc_per_node": "launch.processes",
    "num_processes": "launch.processes",
    "vllm_num_engines": "launch.ray.engines",
    "max_num_seqs": "engine.max_num_seqs",
    # run
    "output_dir": "run.dir",
    "default_local_dir": "run.dir",
    "save_path": "run.dir",
    "ckpt_path": "run.dir",
    "run_name": "run.name",
    "experiment_name": "run.name",
    "seed": "run.seed",
    "resume_from_checkpoint": "run.resume",
    "resume_mode": "run.resume",
    "load_checkpoint": "run.resume",
    "overwrite_output_dir": "run.overwrite",
    "save_steps": "checkpoint.every",
    "save_freq": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "max_ckpt_num": "checkpoint.keep",
    "max_actor_ckpt_to_keep": "checkpoint.keep",
    "eval_steps": "eval.every",
    "test_freq": "eval.every",
    "val_before_train": "eval.at_start",
    "eval_on_start": "eval.at_start",
    "report_to": "log.tensorboard",
    "use_tensorboard": "log.tensorboard",
    "use_wandb": "log.wandb",
    "wandb_project": "log.wandb",
    "project_name": "log.wandb",
    "log_completions": "log.rollouts_every",
    "rollout_data_dir": "log.rollouts_every",
}
"""A name in another program, whole or its last words, to the setting that does the same.

Units may differ; see ``docs/configuration.md``.
"""


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
        "set optimizer.warmup_steps, or optimizer.warmup_ratio for a share of all steps"
    ),
}
"""Settings of earlier versions, as they end, with what to do instead."""


def why_removed(name: str) -> str | None:
    """Return what to do in place of the setting ``name`` of an earlier version, or None."""
    for old, advice in REMOVED.items():
        # With the dots, so that ``my_optimizer.warmup`` does not end in ``optimizer.warmup``.
        if f".{name}".endswith(f".{old}"):
            return advice
    return None


PREFERENCE_NAMES: dict[str, str] = {
    "beta": "preference.beta",
    "pref_beta": "preference.beta",
    "simpo_gamma": "preference.losses",
    "loss_type": "preference.losses",
    "loss_weights": "preference.losses",
    "pref_loss": "preference.losses",
    "pref_ftx": "preference.losses",
    "rpo_alpha": "preference.losses",
    "nll_loss_coef": "preference.losses",
    "cpo_alpha": "preference.losses",
    "desirable_weight": "preference.losses",
    "undesirable_weight": "preference.losses",
    "label_smoothing": "preference.label_smoothing",
    "dpo_label_smoothing": "preference.label_smoothing",
    "f_divergence_type": "preference.f_divergence.kind",
    "f_alpha_divergence_coef": "preference.f_divergence.alpha",
    "ld_alpha": "preference.ld_alpha",
    "use_weighting": "preference.wpo",
    "precompute_ref_log_probs": "preference.reference.source",
    "reference_free": "preference.reference.source",
    "sync_ref_model": "preference.reference.refresh_every",
    "ref_model_sync_steps": "preference.reference.refresh_every",
    "ref_model_mixup_alpha": "preference.reference.refresh_decay",
    "num_generations": "online.group_size",
    "n_samples_per_prompt": "online.group_size",
    "missing_eos_penalty": "online.missing_eos_penalty",
    "reward_model_path": "reward.models",
    "judge": "reward.terms",
    "chosen_key": "data.columns.chosen",
    "rejected_key": "data.columns.rejected",
}
"""The same for settings of preference learning. They decide where a verb has these settings."""


REWARD_MODEL_NAMES: dict[str, str] = {
    "loss": "reward_model.losses",
    "loss_type": "reward_model.losses",
    "margin_loss": "reward_model.losses",
    "center_rewards_coefficient": "reward_model.losses",
    "heads_types": "reward_model.heads",
    "head_types": "reward_model.heads",
    "scale_for_train": "reward_model.heads",
    "pooling_method": "reward_model.pooling",
    "probing_layer": "reward_model.layer",
    "normalize_reward": "reward_model.normalize",
    "chosen_key": "data.columns.chosen",
    "rejected_key": "data.columns.rejected",
    "train_data": "data.sources",
    "eval_data": "validation.sources",
    "task_instruction": "data.system",
    "max_len": "max_tokens",
}
"""The same for settings of reward models. They decide where a verb has these settings."""


SUPERVISED_NAMES: dict[str, str] = {
    "eval_dataset": "validation.sources",
    "val_files": "validation.sources",
    "per_device_train_batch_size": "batch_size",
    "train_batch_size": "batch_size",
}
"""The same for verbs that train on given responses. They decide where a verb has ``validation``."""


SELECT_NAMES: dict[str, str] = {
    "best_of_n": "samples",
    "n_samples_per_prompt": "samples",
    "num_generations": "samples",
    "num_return_sequences": "samples",
    "num_samples": "samples",
    "post_processor": "select.keep",
    "enable_csft": "select.keep",
    "csft_prompt": "select.condition.template",
    "reward_template": "select.condition.template",
    "iter": "rounds",
    "num_rounds": "rounds",
    "output_path": "output",
}
"""The same for settings of generated rows. They decide where a verb has these settings."""


def own_name(name: str, exists: Callable[[str], bool]) -> str:
    """Return the setting that does what ``name`` does in an earlier version or another program.

    The longest known ending of the dotted name decides. Empty if no ending is known.

    Args:
        name: the dotted name.
        exists: returns True for a setting of the verb.
    """
    for old, new in OLD_NAMES.items():
        # In the middle too: a branch that was renamed has settings below it.
        before, found, after = f".{name}.".partition(f".{old}.")
        if found:
            return f"{before}.{new}.{after}".strip(".")
    # Arguments of other programs come as they are typed: ``--learning-rate``, or in capitals.
    ending = name.lower().replace("-", "_").strip("_")
    tables = {
        "preference": PREFERENCE_NAMES,
        "reward_model": REWARD_MODEL_NAMES,
        "validation": SUPERVISED_NAMES,
        "select": SELECT_NAMES,
        "": OTHER_NAMES,
    }
    # The longest ending first: ``actor.optim.lr`` says more than ``lr``.
    while ending:
        for branch, table in tables.items():
            if exists(table.get(ending, "")) and (not branch or exists(branch)):
                return table[ending]
        ending = ending.partition(".")[2]
    return ""
