"""Options of other frameworks about the optimizer steps and the run, by setting."""

from __future__ import annotations

from lightrft.config.other_names import conversions as to
from lightrft.config.other_names.rows import (
    Converted,
    NameRow,
    ValueTable,
    as_list,
    by_hand,
    counted,
    ignore,
    inverse,
    positive,
    when,
)
from lightrft.config.other_names.translated import (
    ACTOR,
    MICRO,
    MODEL,
    ON_DEVICES,
    ROLLOUT,
    TOKENS,
)

STEPS = (
    NameRow("group_size", "online.group_size samples rollout.group_size"),
    NameRow("n", "online.group_size samples rollout.group_size eval.samples"),
    NameRow(
        "lora_modules_to_save modules_to_save additional_target",
        "model.lora.modules_to_save",
        "ends of names of modules that are trained whole, in a list",
        to.lora_modules,
    ),
    NameRow(
        "num_train_epochs num_epochs total_epochs trainer.total_epochs epochs",
        "train.epochs",
        "",
        positive,
    ),
    NameRow(
        "num_episodes train.num_episodes",
        "train.epochs",
        "passes over the prompts",
    ),
    NameRow(
        "max_epochs train.max_epochs",
        "train.ppo_epochs",
        "passes over each rollout batch, not over the data",
    ),
    NameRow("max_epochs train.max_epochs", "train.epochs"),
    NameRow(
        "max_steps train_iters total_steps",
        "train.steps",
        "rollout steps in rl, where one may hold several optimizer steps; else optimizer steps",
        positive,
    ),
    NameRow(
        "total_training_steps trainer.total_training_steps",
        "train.steps",
        "rollout steps in rl; else optimizer steps",
        positive,
    ),
    NameRow(
        "total_episodes",
        "train.steps",
        "responses there; here rollout steps of prompts_per_step x group_size responses",
        by_hand,
    ),
    NameRow(
        f"num_iterations num_ppo_epochs ppo_epochs {ACTOR}.ppo_epochs",
        "train.ppo_epochs",
        "passes over each rollout batch",
    ),
    NameRow(
        "num_mini_batches",
        "train.num_mini_batches",
        "optimizer steps of a pass over a rollout batch",
    ),
    NameRow(
        f"ppo_mini_batch_size {ACTOR}.ppo_mini_batch_size",
        "train.num_mini_batches",
        "a size in prompts there, and a count of optimizer steps here: "
        "data.train_batch_size / ppo_mini_batch_size",
        to.mini_batches_of("data.train_batch_size"),
    ),
    NameRow(
        "mini_batch_size local_mini_batch_size",
        "train.num_mini_batches",
        "a size there, and a count of optimizer steps here: rows of a step / mini_batch_size",
        by_hand,
    ),
    NameRow(
        "steps_per_generation",
        "train.num_mini_batches",
        "micro-batches of a generation there, and a count of optimizer steps here: "
        "steps_per_generation / gradient_accumulation_steps",
        counted,
    ),
    NameRow(
        "generation_batch_size",
        "rollout.prompts_per_step",
        "responses over all processes there, and prompts here: generation_batch_size / "
        "num_generations",
        counted,
    ),
    NameRow(
        "train_batch_size train.batch_size",
        "batch_size",
        "rows of an optimizer step over all processes",
        to.responses_of_mini_batch,
    ),
    NameRow(
        "train_batch_size train.batch_size",
        "train.num_mini_batches",
        "responses of an optimizer step there, and a count of optimizer steps here: "
        "rollout_batch_size x n_samples_per_prompt / train_batch_size",
        to.responses_of_mini_batch,
    ),
    NameRow("global_batch_size", "batch_size", "rows of an optimizer step over all processes"),
    NameRow(
        "global_batch_size",
        "rollout.prompts_per_step",
        "responses there, and prompts here: global_batch_size / num_generations",
        by_hand,
    ),
    NameRow(
        "per_device_train_batch_size",
        "batch_size",
        "rows of one device and forward pass there, and of an optimizer step here: "
        "per_device_train_batch_size x processes x gradient_accumulation_steps",
        to.device_batch,
    ),
    NameRow(
        "per_device_train_batch_size",
        "rollout.prompts_per_step",
        "responses of one device and forward pass there, and prompts of a step here: "
        "per_device_train_batch_size x processes x steps_per_generation / num_generations",
        to.device_batch,
    ),
    NameRow(
        "gradient_accumulation_steps",
        "batch_size",
        "a factor there, and the product here: per_device_train_batch_size x processes x "
        "gradient_accumulation_steps; train.max_tokens_per_micro_batch bounds memory, in tokens",
        counted,
    ),
    NameRow(
        "gradient_accumulation_steps",
        "rollout.prompts_per_step",
        "a factor there, and the product here: per_device_train_batch_size x processes x "
        "gradient_accumulation_steps / num_generations; train.max_tokens_per_micro_batch bounds "
        "memory, in tokens",
        counted,
    ),
    NameRow(
        "micro_train_batch_size micro_batch_size train.micro_batch_size ppo_micro_batch_size "
        "micro_rollout_batch_size rollout.micro_batch_size local_rollout_forward_batch_size "
        f"ppo_micro_batch_size_per_gpu {ACTOR}.ppo_micro_batch_size "
        f"{ACTOR}.ppo_micro_batch_size_per_gpu critic.ppo_micro_batch_size "
        "critic.ppo_micro_batch_size_per_gpu critic.forward_micro_batch_size "
        "critic.forward_micro_batch_size_per_gpu data.micro_batch_size "
        "data.micro_batch_size_per_gpu local_batch_size "
        f"{ROLLOUT}.log_prob_micro_batch_size {ROLLOUT}.log_prob_micro_batch_size_per_gpu "
        "actor_rollout_ref.ref.log_prob_micro_batch_size "
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu "
        "rollout.log_prob_micro_batch_size rollout.log_prob_micro_batch_size_per_gpu "
        "precompute_ref_batch_size ref_batch_size",
        "train.max_tokens_per_micro_batch max_tokens_per_micro_batch",
        MICRO,
        by_hand,
    ),
    NameRow(
        "ppo_max_token_len_per_gpu train_max_tokens_per_gpu rollout_max_tokens_per_gpu "
        f"train.max_tokens_per_gpu rollout.max_tokens_per_gpu {ACTOR}.ppo_max_token_len_per_gpu "
        "critic.ppo_max_token_len_per_gpu critic.forward_max_token_len_per_gpu "
        f"{ROLLOUT}.log_prob_max_token_len_per_gpu "
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu data.max_token_len_per_gpu "
        "token_budget",
        "train.max_tokens_per_micro_batch",
        TOKENS,
    ),
    NameRow(
        "use_dynamic_bsz use_dynamic_batch train.dynamic_batch_enable data.use_dynamic_bsz "
        f"{ACTOR}.use_dynamic_bsz critic.use_dynamic_bsz {ROLLOUT}.log_prob_use_dynamic_bsz "
        "actor_rollout_ref.ref.log_prob_use_dynamic_bsz reward_model.use_dynamic_bsz "
        "data.balance_dp_token auto_find_batch_size trainer.balance_batch data_sharding "
        "sequence_packing_scheduler",
        "train.max_tokens_per_micro_batch",
        "micro-batches always hold so many tokens, evenly over processes",
        ignore,
    ),
    NameRow(
        "learning_rate actor_learning_rate lr optim.lr adam.lr actor.adam.lr actor.optim.lr "
        f"{ACTOR}.optim.lr train_learning_rate",
        "optimizer.lr",
    ),
    NameRow(
        "critic_learning_rate critic.optim.lr critic.adam.lr critic_lr value_lr",
        "critic.optimizer.lr",
    ),
    NameRow("vit_lr aligner_lr", "optimizer.lr_of", "optimizer.lr_of.tower or .projector", by_hand),
    NameRow(
        "adam_betas adam_beta1 adam_beta2 adam.betas actor.adam.betas optim.betas "
        f"{ACTOR}.optim.betas",
        "optimizer.betas",
        "both numbers",
        to.betas,
    ),
    NameRow("critic.optim.betas critic.adam.betas", "critic.optimizer.betas", "", to.betas),
    NameRow(f"adam_epsilon adam_eps adam.eps actor.adam.eps {ACTOR}.optim.eps", "optimizer.eps"),
    NameRow("critic.optim.eps critic.adam.eps", "critic.optimizer.eps"),
    NameRow(
        "weight_decay l2 adam.weight_decay actor.adam.weight_decay optim.weight_decay "
        f"{ACTOR}.optim.weight_decay",
        "optimizer.weight_decay",
    ),
    NameRow("critic.optim.weight_decay critic.adam.weight_decay", "critic.optimizer.weight_decay"),
    NameRow(
        f"max_grad_norm max_norm grad_clip clip_grad {ACTOR}.grad_clip {ACTOR}.optim.clip_grad "
        "optim.clip_grad actor.max_norm model.max_norm",
        "optimizer.max_grad_norm",
        "",
        lambda value, _: value or None,
    ),
    NameRow(
        "critic.grad_clip critic.optim.clip_grad critic.max_norm", "critic.optimizer.max_grad_norm"
    ),
    NameRow(
        "lr_scheduler_type lr_scheduler lr_decay_style optim.lr_scheduler warmup_style scheduler "
        f"{ACTOR}.optim.lr_scheduler_type {ACTOR}.optim.lr_decay_style "
        f"{ACTOR}.optim.warmup_style actor.lr_scheduler model.lr_scheduler",
        "optimizer.schedule",
        "constant, linear or cosine, after the warm-up",
        to.SCHEDULES,
    ),
    NameRow(
        "critic.optim.lr_scheduler_type critic.optim.lr_decay_style critic.optim.warmup_style "
        "critic.lr_scheduler",
        "critic.optimizer.schedule",
        "",
        to.SCHEDULES,
    ),
    NameRow(
        "warmup_ratio lr_warmup_ratio lr_warmup_fraction lr_warmup_steps_ratio "
        f"optim.lr_warmup_steps_ratio {ACTOR}.optim.lr_warmup_steps_ratio actor.lr_warmup_ratio "
        "model.lr_warmup_ratio",
        "optimizer.warmup_ratio",
        "a share of all optimizer steps",
        positive,
    ),
    NameRow(
        "critic.optim.lr_warmup_steps_ratio critic.lr_warmup_ratio",
        "critic.optimizer.warmup_ratio",
        "a share of all optimizer steps",
        positive,
    ),
    NameRow(
        f"warmup_steps lr_warmup_steps lr_warmup_iters {ACTOR}.optim.lr_warmup_steps warmup",
        "optimizer.warmup_steps",
        "optimizer steps; a number below 1 is optimizer.warmup_ratio",
        to.share_of_steps,
    ),
    NameRow("critic.optim.lr_warmup_steps", "critic.optimizer.warmup_steps", "", positive),
    NameRow(
        f"min_lr_ratio lr_scheduler_kwargs.min_lr_rate {ACTOR}.optim.min_lr_ratio actor."
        f"min_lr_ratio model.min_lr_ratio",
        "optimizer.min_lr_ratio",
        "a share of the peak learning rate",
        lambda value, _: value or 0.0,
    ),
    NameRow(
        "critic.optim.min_lr_ratio critic.min_lr_ratio",
        "critic.optimizer.min_lr_ratio",
        "",
        lambda value, _: value or 0.0,
    ),
    NameRow(
        f"min_lr lr_min {ACTOR}.optim.min_lr {ACTOR}.optim.lr_min lr_scheduler_kwargs.min_lr",
        "optimizer.min_lr_ratio",
        "a learning rate there, and a share of the peak here",
        lambda value, options: (
            value / options["lr"] if value and options.get("lr") else by_hand(value, options)
        ),
    ),
    NameRow("neftune_noise_alpha", "neftune_alpha", "", lambda value, _: value or 0.0),
)

PLACES = (
    NameRow(
        "zero_stage ds.zero_stage zero",
        "strategy.zero_stage",
        "with strategy.kind=deepspeed",
        lambda value, _: Converted({"strategy.kind": "deepspeed", "strategy.zero_stage": value}),
    ),
    NameRow(
        "deepspeed",
        "strategy.kind",
        "`deepspeed` with strategy.zero_stage; strategy.deepspeed takes further keys of its file",
        lambda value, options: Converted() if value in (None, "") else by_hand(value, options),
    ),
    NameRow(
        f"fsdp strategy {ACTOR}.strategy actor.strategy critic.strategy model.strategy "
        "actor_rollout_ref.ref.strategy reward_model.strategy "
        f"{ACTOR}.fsdp_config.strategy",
        "strategy.kind",
        "`fsdp2`, which several processes take by themselves",
        ignore,
    ),
    NameRow(
        "adam_offload ds.adam_offload fsdp_cpu_offload param_offload optimizer_offload "
        f"optimizer_cpu_offload {ACTOR}.fsdp_config.param_offload "
        f"{ACTOR}.fsdp_config.optimizer_offload {ACTOR}.fsdp_config.offload_policy "
        "model.fsdp_config.cpu_offload model.fsdp_config.offload_params",
        "strategy.cpu_offload",
        "the optimizer steps on the CPU; in one process the weights stay on the device, with FSDP2 "
        "they are in the host's memory too",
        ValueTable({False: Converted(), None: Converted()}),
    ),
    NameRow(
        f"activation_offloading {MODEL}.enable_activation_offload "
        "critic.model.enable_activation_offload",
        "strategy.offload_activations",
    ),
    NameRow(
        f"{ACTOR}.fsdp_config.reshard_after_forward",
        "strategy.reshard_after_forward",
    ),
    NameRow(
        f"{ACTOR}.fsdp_config.fsdp_size actor.fsdp_config.fsdp_size zpg ds.zpg "
        "zero_hpz_partition_size",
        "strategy.hsdp_shard_size",
        "processes that share one copy of the weights; for FSDP2",
        lambda value, _: value if value and value > 1 else Converted(),
    ),
    NameRow(
        "ring_attn_size ds.ring_attn_size sp_size sequence_parallel_size sp cp "
        "ulysses_sequence_parallel_size context_parallel_size "
        f"{ACTOR}.ulysses_sequence_parallel_size actor.ulysses_sequence_parallel_size "
        f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size "
        "hyper_parallel_cp_size",
        "strategy.sequence_parallel",
        "processes that share the tokens of a micro-batch; it divides the processes",
    ),
    NameRow(
        "ds_tensor_parallel_size ds.tensor_parallel_size deepspeed_autotp_size "
        "tensor_model_parallel_size tp",
        "strategy.tensor_parallel",
        "processes that share each layer in training; it divides the processes",
    ),
    NameRow(
        "ddp_timeout",
        "strategy.timeout_minutes",
        "minutes, not seconds",
        lambda value, _: max(1, round(value / 60)),
    ),
    NameRow(
        "actor_rollout_ref.nccl_timeout critic.nccl_timeout reward_model.nccl_timeout",
        "strategy.timeout_minutes",
        "minutes, not seconds",
        lambda value, _: max(1, round(value / 60)),
    ),
    NameRow(
        "n_gpus_per_node nproc_per_node num_processes trainer.n_gpus_per_node gpus num_gpus n_gpus",
        "launch.processes",
        ON_DEVICES,
        to.processes,
    ),
    NameRow(
        "actor_num_gpus_per_node actor.num_gpus_per_node",
        "launch.processes",
        ON_DEVICES + "; with launch.kind=ray, the ranks of all nodes",
        to.processes,
    ),
    NameRow(
        "nnodes trainer.nnodes actor_num_nodes actor.num_nodes",
        "launch.processes",
        "processes of all nodes: nodes x processes of a node, with launch.kind=ray or torchrun",
        lambda value, options: Converted() if value == 1 else to.processes(value, options),
    ),
    NameRow(
        "use_ray",
        "launch.kind",
        "true is `ray`",
        when("launch.kind", "ray"),
    ),
    NameRow(
        "vllm_num_engines vllm.num_engines",
        "launch.ray.engines",
        "with launch.kind=ray; 0 generates in the ranks",
        by_hand,
    ),
    NameRow(
        "ref_num_nodes ref_num_gpus_per_node ref.num_nodes ref.num_gpus_per_node",
        "launch.ray.references",
        "workers that each hold a copy, with launch.kind=ray; 0 holds it in the ranks",
        by_hand,
    ),
    NameRow(
        "reward_num_nodes reward_num_gpus_per_node reward.num_nodes reward.num_gpus_per_node "
        "reward_model.n_gpus_per_node reward_model.nnodes reward.reward_model.n_gpus_per_node "
        "reward.reward_model.nnodes reward_model.enable_resource_pool "
        "reward.reward_model.enable_resource_pool",
        "launch.ray.reward_models",
        "workers that each hold a copy, with launch.kind=ray; 0 holds them in the ranks",
        by_hand,
    ),
    NameRow(
        "distillation.n_gpus_per_node distillation.nnodes "
        "distillation.teacher_models.teacher_model.num_replicas",
        "launch.ray.teachers",
        "workers that each hold a copy, with launch.kind=ray; 0 holds it in the ranks",
        by_hand,
    ),
    NameRow("ray_init_kwargs.address", "launch.ray.address"),
    NameRow(
        "vllm_sync_backend vllm.sync_backend vllm_sync_with_ray vllm.sync_with_ray "
        f"{ROLLOUT}.checkpoint_engine.backend",
        "launch.ray.weights",
        "`broadcast`, `shared` or `message`",
        ignore,
    ),
    NameRow(
        f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes",
        "launch.ray.bucket_mb",
        "MiB; with launch.ray.engines",
        by_hand,
    ),
    NameRow("use_cpu cpu", "strategy.device", "true is `cpu`", when("strategy.device", "cpu")),
    NameRow("trainer.device", "strategy.device", "", ValueTable({"cuda": "cuda", "cpu": "cpu"})),
)

RUN = (
    NameRow(
        "output_dir default_local_dir trainer.default_local_dir save_path ckpt_path ckpt_dir "
        "ckpt.output_dir ckpt.path save export_dir",
        "run.dir output",
        "the run is the folder run.dir/run.name, with its model in model/",
        to.folder,
    ),
    NameRow(
        "run_name experiment_name trainer.experiment_name exp_name wandb_run_name experiment "
        "logger.wandb.run_name wandb_exp_name",
        "run.name",
        "the name of the run's folder below run.dir",
        lambda value, options: (
            Converted()
            if not value or to.first(options, "output_dir", "save_path", "ckpt.output_dir")
            else str(value).replace("/", "-")
        ),
    ),
    NameRow(
        "use_gradient_checkpointing",
        "model.gradient_checkpointing",
        "`unsloth` is true",
        lambda value, _: bool(value),
    ),
    NameRow(
        "full_finetuning",
        "model.lora",
        "true: leave model.lora out; false: set model.lora.rank",
        counted,
    ),
    NameRow("fast_inference", "engine.kind", "true is `vllm`", when("engine.kind", "vllm")),
    NameRow("seed data_seed random_state train.seed trainer.seed", "run.seed"),
    NameRow(
        "resume_from_checkpoint resume_mode trainer.resume_mode load_checkpoint ckpt.load_enable",
        "run.resume",
        "auto, never, or a path",
        to.resume,
    ),
    NameRow(
        "trainer.resume_from_path resume_from",
        "run.resume",
        "",
        lambda value, _: value or Converted(),
    ),
    NameRow("overwrite_output_dir", "run.overwrite"),
    NameRow("disable_tqdm", "run.progress", "the opposite", inverse),
    NameRow(
        "save_steps save_freq trainer.save_freq ckpt.save_steps save_every save_interval",
        "checkpoint.every",
        "",
        to.every,
    ),
    NameRow(
        "save_strategy",
        "checkpoint.every",
        "`steps`, with its number; for `epoch`, give the steps of an epoch",
        ValueTable({"steps": Converted(), "no": Converted()}),
    ),
    NameRow(
        "save_total_limit max_ckpt_num ckpt.max_num max_actor_ckpt_to_keep "
        "trainer.max_actor_ckpt_to_keep trainer.max_ckpt_to_keep",
        "checkpoint.keep",
        "newest checkpoints",
        positive,
    ),
    NameRow(
        "metric_for_best_model best_metric_key ckpt.best_metric_key load_best_model_at_end "
        "greater_is_better",
        "checkpoint.best",
        "a metric such as eval/accuracy; a minus in front takes the smallest",
        lambda value, options: (
            Converted() if value in (None, False, "", True) else by_hand(value, options)
        ),
    ),
    NameRow("hub_model_id export_hub_model_id", "hub.repo"),
    NameRow(
        "push_to_hub",
        "hub.repo",
        "true is a repository, such as me/model",
        lambda value, options: (
            by_hand(value, options) if value and "hub_model_id" not in options else Converted()
        ),
    ),
    NameRow(
        "hub_strategy",
        "hub.push_every",
        "`end` pushes at the end, and `every_save` becomes a number of steps",
        ValueTable({"end": Converted()}),
    ),
    NameRow("hub_private_repo", "hub.private"),
    NameRow(
        "eval_steps eval.steps test_freq trainer.test_freq eval_iters eval_every eval_interval",
        "eval.every",
        "",
        to.every,
    ),
    NameRow(
        "eval_strategy evaluation_strategy do_eval",
        "eval.every",
        "`steps`, with its number; it evaluates where the eval set has sources",
        ValueTable(
            {"steps": Converted(), "no": Converted(), True: Converted(), False: Converted()}
        ),
    ),
    NameRow("eval_on_start val_before_train trainer.val_before_train", "eval.at_start"),
    NameRow(
        "report_to log_with trainer.logger logger trackers log.trackers log.report_to",
        "log.wandb log.tensorboard log.mlflow log.trackio log.swanlab",
        "tensorboard is log.tensorboard; wandb, mlflow, trackio and swanlab take a project's name",
        to.trackers,
    ),
    NameRow(
        "use_tensorboard tensorboard_dir logger.tensorboard_dir",
        "log.tensorboard",
        "a flag; the files are in tensorboard/ of the run",
        lambda value, _: bool(value),
    ),
    NameRow(
        "use_wandb logger.wandb.key",
        "log.wandb",
        "the name of a project; the key is in WANDB_API_KEY",
        to.Project("wandb"),
    ),
    NameRow(
        "use_swanlab",
        "log.swanlab",
        "the name of a project; the key is in SWANLAB_API_KEY",
        to.Project("swanlab"),
    ),
    NameRow(
        "swanlab_project",
        "log.swanlab",
        "the name of a project, which turns it on",
        counted,
    ),
    NameRow(
        "wandb_project project_name trainer.project_name logger.wandb.project",
        "log.wandb",
        "the name of a project, which turns it on",
        counted,
    ),
    NameRow(
        "log_completions log_completions_steps rollout_data_dir trainer.rollout_data_dir "
        "trainer.log_val_generations save_trajectories trainer.validation_data_dir "
        "num_trajectories_to_save",
        "log.rollouts_every",
        "steps; 1 writes the rollouts of each step, in rollouts/ of the run",
        ignore,
    ),
    NameRow("log_entropy actor_rollout_ref.actor.calculate_entropy", "log.entropy"),
)

MERGING = (
    NameRow("out_dtype", "dtype", "", to.DTYPES),
    NameRow("out_shard_size export_size max_shard_size", "max_shard_size"),
    NameRow("lambda", "scale"),
    NameRow("parameters.weight", "models.weight"),
    NameRow("parameters.density", "models.density"),
    NameRow("parameters.t", "t"),
    NameRow("parameters.normalize", "normalize"),
    NameRow("lora_path adapter_name_or_path adapters", "models", "folders of adapters", as_list),
    NameRow(
        f"adapter_name_or_path adapters {MODEL}.lora_adapter_path {MODEL}.lora.adapter_path",
        "model.path",
        "a folder of adapters is the model, and names its base, or model.base does",
        by_hand,
    ),
    NameRow("post_processor", "select.keep", "best, correct, pairs, conditioned", by_hand),
    NameRow("enable_csft", "select.keep", "true is `conditioned`", by_hand),
    NameRow("csft_prompt reward_template", "select.condition.template"),
    NameRow("iter num_rounds", "rounds", "rounds in all, not the number of this one"),
    NameRow("output_path output_file result_path data.output_path", "output"),
    NameRow("port server_port", "http.port"),
    NameRow("host server_name", "http.host"),
    NameRow(
        "api_key",
        "http.token_file",
        "a file with the token, so that no command line holds it",
        by_hand,
    ),
    NameRow("served_model_name", "name"),
    NameRow("batch_size", "batch_size batching.max_tokens rollout.prompts_per_step"),
)
