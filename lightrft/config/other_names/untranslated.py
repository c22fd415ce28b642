"""Options of other frameworks that have no counterpart here, and why."""

from __future__ import annotations

from lightrft.config.other_names.rows import NameRow

ACTOR = "actor_rollout_ref.actor"
REF = "actor_rollout_ref.ref"
ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"


def none(why: str, *names: str) -> NameRow:
    """Return a row of names without a counterpart."""
    return NameRow(" ".join(names), "", why)


HARDWARE = (
    none(
        "it is an option of Megatron-LM, which is not used here; strategy.tensor_parallel and "
        "strategy.sequence_parallel split a model",
        "{actor_rollout_ref.actor,actor_rollout_ref.ref,critic,reward_model}.megatron.**",
        "account_for_{embedding,loss}_in_pipeline_split accumulate_allreduce_grads_in_fp32",
        "align_grad_reduce align_param_gather apply_dsa_kernel_fusion apply_rope_fusion",
        "apply_query_key_layer_scaling apply_wd_to_qk_layernorm async_save batch_p2p_comm",
        "attention_softmax_in_fp32 bias_activation_fusion bias_dropout_fusion bridge_backend",
        "calculate_per_token_loss cp_comm_type cp_partition_mode csa_dense_mode",
        "data_parallel_random_init data_parallel_sharding_strategy decoder_first_pipeline_num_layers",
        "decoder_last_pipeline_num_layers dist_ckpt_{optim_fully_reshardable,save_pre_mcore_014}",
        "distrib_optim_fully_reshardable_mem_efficient dsa_indexer_{loss_coeff,use_sparse_loss}",
        "engram_tokenizer_map exp_avg_dtype exp_avg_sq_dtype expert_model_parallel_size",
        "expert_tensor_parallel_size finetune fp4_{format,param_gather,recipe}",
        "fp8_{amax_compute_algo,amax_history_len,format,param_gather,recipe}",
        "gradient_accumulation_fusion linear_decoupled_in_proj main_{grads,params}_dtype",
        "manual_gc manual_gc_eval manual_gc_steps masked_softmax_fusion mcore_adapter mcore_model",
        "mcore_ref_adapter mcore_ref_model megatron_bridge_args megatron_extra_kwargs",
        "megatron_pretrained_checkpoint mhc_recompute_layer_num microbatch_group_size_per_vp_stage",
        "mlp_padding_free moe_enable_deepep moe_expert_capacity_factor moe_grouped_gemm",
        "moe_layer_recompute moe_pad_expert_input_to_capacity moe_permute_fusion moe_router_dtype",
        "moe_shared_expert_overlap moe_token_dispatcher_type moe_token_drop_policy",
        "nccl_comm_warmup no_load_{optim,rng} no_save_{optim,rng} offload_bridge",
        "optimizer_cuda_graph optimizer_offload_fraction overlap_grad_reduce overlap_p2p_comm",
        "overlap_param_gather overlap_param_gather_with_optimizer_step perform_initialization",
        "pipeline_model_parallel_layout pipeline_model_parallel_size pp ep recompute_granularity",
        "recompute_method recompute_modules recompute_num_layers save_safetensors",
        "sequence_parallel skip_megatron_init strict_fsdp_dtensor_load te_rng_tracker",
        "tp_comm_overlap test_convert_dtype test_convert_precision to_hf to_mcore use_mca",
        "use_cpu_initialization use_distributed_optimizer use_fused_mhc use_megatron_bridge",
        "use_megatron_fsdp use_persistent_ckpt_worker use_precision_aware_optimizer",
        "virtual_pipeline_model_parallel_size language_model_only save_missing_weights",
        "export_hf_on_finish use_hyper_parallel hyper_parallel_args accelerator_config thread_count",
    ),
    none(
        "that trainer is not used here; strategy.kind is single, fsdp2 or deepspeed",
        "{actor_rollout_ref.actor,actor_rollout_ref.ref,critic}.{torchtitan,veomni}.**",
        "accelerator_kwargs mixed_precision parallelism_config",
    ),
    none(
        "fsdp2 shards each block of the model by itself and needs no further option",
        f"{{{ACTOR},{REF}}}.fsdp_config.{{dtype,forward_only,forward_prefetch,use_orig_params}}",
        f"{{{ACTOR},{REF}}}.fsdp_config.{{use_torch_compile,use_no_sync_for_gradient_accumulation}}",
        f"{{{ACTOR},{REF}}}.fsdp_config.{{wrap_policy.min_num_params,turbo_config.**}}",
        f"{{{ACTOR},{REF}}}.fsdp_config.entropy_{{checkpointing,from_logits_chunk_size}}",
        f"{{{ACTOR},{REF}}}.fsdp_config.entropy_from_logits_with_chunking",
        f"{{{ACTOR},{REF}}}.fsdp_config.{{pad_to_length,pad_to_length_bucket,qat.**,seed}}",
        f"{{{ACTOR},{REF}}}.fsdp_config.{{full_determinism,wrap_policy}} fsdp_config",
        "actor.fsdp_config.forward_prefetch model.fsdp_config.wrap_policy.min_num_params",
        "critic.model.fsdp_config.** critic.fsdp.** no_shard_vit initial_model_shard_size",
        "reward_model.model.fsdp_config.** meta_init actor_init_on_gpu fsdp_config.**",
        f"{REF}.fsdp_config.{{model_dtype,offload_policy,optimizer_offload,param_offload}}",
        f"{REF}.fsdp_config.{{fsdp_size,reshard_after_forward,strategy}}",
        f"{REF}.fsdp_config.ulysses_sequence_parallel_size",
    ),
    none(
        "it is an option of DeepSpeed: strategy.deepspeed takes the keys of its file",
        "overlap_comm ds.overlap_comm grad_accum_dtype ds.grad_accum_dtype deepcompile",
        "ds.deepcompile use_ds_universal_ckpt ds.use_universal_ckpt ds3_gather_for_generation",
        "disable_ds_ckpt ckpt.disable_ds teacher_deepspeed deepspeed.**",
    ),
    none(
        "torchrun, Ray or the launcher of the cluster starts the processes",
        "local_rank master_addr master_port ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb",
        "ddp_find_unused_parameters ddp_static_graph node_rank num_machines machine_rank",
        "device_groups ray_exp_name ray_init_kwargs ray_num_workers ray_kwargs.** world_size",
        "data_shared_file_system trainer.ray_wait_register_center_timeout ray_init_kwargs.**",
    ),
    none(
        "it is an option of a launcher or of the environment, and not of a run",
        "config_path config_name config_file standalone nodes ntasks rdzv_** address overlap",
        "runtime_env_json runtime_env working_dir cuda_visible_devices pytorch_cuda_alloc_conf",
        "wandb_api_key hf_endpoint hf_home omp_num_threads nccl_** swift_** no_wait",
        "module",
        "fsdp_transformer_layer_cls_to_wrap dist_config.** kernel_config.** job_name",
    ),
    none(
        "the devices of roles follow from launch.ray: by default all roles share the devices of the "
        "ranks",
        "colocate_actor_ref colocate_all_models colocate_critic_reward train.colocate_actor_ref",
        "train.colocate_all train.colocate_critic_reward actor_rollout_ref.hybrid_engine",
        "critic_num_nodes critic_num_gpus_per_node critic.num_nodes critic.num_gpus_per_node",
        f"{ROLLOUT}.nnodes {ROLLOUT}.n_gpus_per_node ref_offload ref.offload teacher_offload",
        "offload_teacher_model trainer.esi_redundant_time",
    ),
    none(
        "devices and memory are found when the run starts; see strategy.device",
        "device_map max_memory quantization_device_map low_cpu_mem_usage offload_folder vllm_device",
        "torch_empty_cache_steps optimize_device_cache use_ipex no_cuda kt_**",
        "use_kt buffer_size gpu_ids device",
    ),
    none(
        "CUDA's own defaults are kept; batches and losses do not depend on it",
        "tf32 allow_tf32 full_determinism train.full_determinism_enable enable_npu_model_patch",
        "compute_fp32_loss model.compute_fp32_loss_enable cast_lm_head_to_fp32 compute_dtype",
        "bf16_full_eval fp16_full_eval upcast_layernorm upcast_lmhead_output fp8",
        "fp8_backend fp8_enable_fsdp_float8_all_gather mixture_of_depths use_v1_kernels",
    ),
    none(
        "the policy is not compiled in training; engine.compile compiles decoding",
        f"torch_compile torch_compile_backend torch_compile_mode {ACTOR}.use_torch_compile",
        f"{REF}.use_torch_compile use_unsloth use_unsloth_gc",
    ),
    none(
        "activations are always recomputed without reentrance, per block",
        "gradient_checkpointing_kwargs activation_checkpointing_kwargs use_reentrant_gc",
        "gradient_checkpointing_use_reentrant actor.gradient_checkpointing_reentrant",
        "model.gradient_checkpointing_reentrant vit_gradient_checkpointing",
        "vit_gradient_checkpointing_kwargs gradient_checkpointing_kwargs.**",
    ),
    none(
        "each process may have rows of any number; nothing is padded and no batch must divide",
        "dataloader_drop_last pad_to_multiple_of padding_side padding_value label_pad_token_id",
        f"{ACTOR}.pad_to_length {REF}.pad_to_length data.pad_mode ignore_pad_token_for_loss",
        "group_by_length length_column_name train_sampling_strategy average_tokens_across_devices",
        "use_legacy_prediction_loop",
    ),
)

MODELS = (
    none(
        "adapters of this kind are not trained here; model.lora has rank, alpha, targets, dora, rslora "
        "and modules_to_save",
        "lora_bias lora_dtype lora_target_parameters lora_task_type use_swift_lora",
        "target_parameters init_weights loraplus_lr_ratio loraplus_lr_embedding lorap_lr_ratio",
        "pissa_init pissa_iter pissa_convert lora_ga_** adalora_** vera_** boft_** fourier_**",
        "oft_** reft_** adapter_act adapter_length module_dropout create_new_adapter",
        "llamapro_** use_llama_pro",
        f"{MODEL}.lora.{{a2a_experimental,dropout_position,dtype,exclude_modules}}",
        f"{MODEL}.lora.{{lora_A_init_method,lora_B_init_method,merge,type}} {MODEL}.exclude_modules",
        "critic.model.lora.** critic.model.lora_adapter_path",
        "critic.model.{lora_rank,lora_alpha,target_modules,exclude_modules} tuner_backend",
        "model_adapter_name ref_adapter_name merge_lora adapter_folder",
        "freeze_trainable_layers freeze_extra_modules freeze_parameters_ratio",
        "freeze_parameters_regex trainable_parameters trainable_parameters_regex",
    ),
    none(
        "a reference, teacher or reward model has one path, and no setting for its adapters: "
        "reference and teacher.path may be a folder of adapters, and adapters of a reward model "
        "are merged first (lightrft merge)",
        "ref_model_adapters ref_adapters reward_adapters teacher_adapters reward_model_adapters",
        "ref_model_quantization_bit reward_model_quantization_bit reward_model_type",
        "ref_model_type ref_model_revision reward_model_revision teacher_model_type",
        "ref_model_init_kwargs teacher_model_init_kwargs teacher_model_kind force_use_ref_model",
        "teacher_model_init_kwargs.** ref_model_init_kwargs.**",
    ),
    none(
        "weights are quantised by model.load_in_4bit alone, as NF4 of bitsandbytes",
        "load_in_8bit model.load_in_8bit model.quantization bnb_4bit_** use_bnb_nested_quant",
        "quantization_method quantization_type double_quantization quant_method hqq_axis quant_n_samples quant_batch_size",
        "export_quantization_** is_rm",
        f"{ACTOR}.qat.** {ROLLOUT}.qat",
    ),
    none(
        "the model, its tokenizer and its config are taken as they are saved",
        "model_type task_type num_labels problem_type init_strategy local_repo_path model_kwargs",
        "resize_vocab add_tokens add_special_tokens new_special_tokens_config new_special_tokens",
        "init_special_tokens rope_scaling shift_attn model_init_kwargs config_name",
        f"{MODEL}.{{external_lib,hf_config_path,use_shm}} {MODEL}.override_config.**",
        "critic.model.{external_lib,hf_config_path,use_shm,tokenizer_path,custom_chat_template}",
        "critic.model.override_config critic.model.override_config.** critic.model.trust_remote_code",
        f"critic.model.enable_gradient_checkpointing {MODEL}.override_config",
        "model.external_lib model.use_shm reward_model.model.{external_lib,input_tokenizer,use_shm}",
        "reward_model.model.{override_config,trust_remote_code} disable_fast_tokenizer",
        "use_fast_tokenizer data.disable_fast_tokenizer split_special_tokens data.use_shm",
        "is_encoder_decoder use_cache use_kv_cache eos_token eos_tokens pad_token model_init_kwargs.**",
        "base_model_attribute_name train_from_scratch check_model cached_file mrl_dims is_multimodal",
        "experts_implementation ds.experts_implementation experts_impl model.override_config",
        "vit_attn_impl custom_register_path use_mp_opt ignore_bias_buffers bos_token padding_token",
        f"load_args load_data_args ignore_args_error add_version {MODEL}.tiled_mlp.**",
        "critic.model.tiled_mlp.** model_kwargs.** processor_kwargs",
    ),
    none(
        "the head of a reward model or critic is found in its folder",
        "value_head_prefix ds.value_head_prefix",
    ),
    none(
        "Megatron's losses of routers, one for each layer, are not added here; "
        "model.router_aux_loss_coef adds the one that transformers pools over layers",
        "moe_aux_loss_coeff moe_z_loss_coeff moe_router_load_balancing_type",
    ),
    none(
        "heads for several tokens ahead are not trained here",
        f"{MODEL}.mtp.** critic.model.mtp.** mtp_** {ROLLOUT}.mtp",
    ),
    none(
        "a copy with averaged weights is not kept; average saved models by lightrft merge",
        "enable_ema ema_beta train.enable_ema train.ema_beta",
    ),
    none(
        "it is an option of a kind of model that is not trained here",
        "train_cfg train_timestep_fraction train_num_inner_epochs train_adv_clip_max",
        "train_clip_range train_adam_** train_gradient_accumulation_steps train_max_grad_norm",
        "train_use_8bit_adam sample_** per_prompt_stat_tracking per_prompt_stat_tracking_*",
        "truncated_backprop_rand truncated_backprop_timestep truncated_rand_backprop_minmax",
        "negative_prompts log_image_freq num_checkpoint_limit save_folder mixture_coef logdir",
        "prompt_sample_size max_target_length num_of_sequences tracker_kwargs",
        "tracker_project_name project_kwargs num_value_samples reranker_use_activation",
        "examples user norm_bbox image_do_pan_and_scan crop_to_patches audio_sampling_rate",
        "use_audio_in_video is_binary_loss_scale max_completion_length_scope",
    ),
    none(
        "this optimizer is not part of the framework; optimizer is AdamW with float32 copies",
        "optim optim_args optim_target_modules optimizer muon.** muon_** use_muon use_galore",
        "galore_** use_apollo apollo_** use_badam badam_** lisa_** use_adam_mini sgd_momentum",
        "optimizer.type optimizer.name actor.muon.** critic.muon.** actor.optim critic.optim",
        f"model.optim {{{ACTOR},critic}}.optim.{{optimizer,optimizer_impl,name,zero_indexed_step}}",
        f"{{{ACTOR},critic}}.optim.{{override_optimizer_config,num_cycles,muon_*,decay_type}}",
        f"{{{ACTOR},critic}}.optim.{{exp_avg_dtype,exp_avg_sq_dtype,main_grads_dtype}}",
        f"{{{ACTOR},critic}}.optim.{{main_params_dtype,use_precision_aware_optimizer}}",
        f"{{{ACTOR},critic}}.optim.{{use_layer_wise_distributed_optimizer,lr_decay_ratio}}",
        f"{{{ACTOR},critic}}.optim.{{use_checkpoint_opt_param_scheduler,weight_decay_incr_style}}",
        f"{REF}.optim.**",
    ),
    none(
        "the schedule spans all optimizer steps: constant, linear or cosine, with "
        "optimizer.min_lr_ratio",
        f"{{{ACTOR},critic}}.optim.{{lr_decay_steps,lr_start,lr_warmup_init,lr_wsd_decay_steps}}",
        f"{{{ACTOR},critic}}.optim.{{lr_wsd_decay_style,min_lr_factor,total_training_steps}}",
        "critic.optim.{min_lr,lr_min} lr_decay_iters lr_warmup_init lr_wsd_decay_iters",
        "lr_wsd_decay_style lr_scheduler_kwargs start_weight_decay end_weight_decay",
        "weight_decay_incr_style lr_scheduler_kwargs.**",
    ),
)

DATA = (
    none(
        "rows are read and tokenised when the run starts, by all processors; data.token_cache keeps "
        "tokens",
        "dataset_num_proc preprocessing_num_workers preprocessing_batch_size dataset_batch_size",
        "dataloader_** data.dataloader_num_workers data.num_workers packing_num_proc",
        "data.filter_overlong_prompts_workers lazy_tokenize overwrite_cache load_from_cache_file",
        "streaming dataset_streaming shuffle_buffer_size cache_dir dataset_kwargs columns",
        "remove_unused_columns disable_auto_column_mapping download_mode custom_dataset_info",
        "dataset_dir data_dir cache_files chars_per_token ignore_data_skip data.val_batch_size",
        "pin_memory num_workers eval_do_concat_batches data.validation_shuffle val_dataset_shuffle",
        "decision_** mixed_mm_data data.return_* data.ignore_input_ids_mismatch",
        "data.image_patch_size data.mm_processor_kwargs data.custom_cls.** data.sampler.**",
        "data.datagen.** data.prompt_dict_keys data.response_dict_keys data.reward_model_key",
        "data.seed data.multiturn.enable data.multiturn.enable_thinking_key",
        "data.enable_thinking_key data.prompt_key_type dataset_kwargs.** text_only",
        f"{ACTOR}.data_loader_seed critic.data_loader_seed {ACTOR}.shuffle critic.shuffle",
        f"{ACTOR}.rollout_n critic.rollout_n {REF}.rollout_n to_cached_dataset local_dataset",
        "data_range easy_query_threshold include_for_metrics fraction examples_file",
        "limit_mm_image_per_prompt limit_mm_video_per_prompt data.max_images_per_prompt",
        "model_author tool_format agent_template template_backend template_mode response_prefix",
        "add_non_thinking_prefix disable_ignore_empty_think preserve_thinking",
        "remove_thinking_from_demonstration n_shot lang label_names",
    ),
    none(
        "hubs and accounts are those of the environment, such as HF_HOME and HF_TOKEN",
        "hub_token hub_revision hub_always_push use_hf use_ms ms_hub_token om_hub_token hf_hub_token commit_message",
        "log_completions_hub_repo trackio_** swanlab_**",
        "wandb_org wandb_group wandb_log_unique_prompts logger.wandb.{group,org} use_evalscope",
        "project trainer.default_hdfs_dir wandb_entity",
    ),
)

ROLLOUT_ROWS = (
    none(
        "episodes of several turns, tools and environments are not part of this version",
        "env agent max_turns rollout.max_turns multi_turn multi_turn_scheduler gym_env use_gym_env",
        "tools environment environment_factory max_tool_calling_iterations agent_func_path",
        "train.agent_func_path rollout.multi_turn rollout.multi_turn.** multi_turn.** context_manager",
        f"{ROLLOUT}.multi_turn.** {ROLLOUT}.agent.** data.function_tool_path",
        "data.tool_config_path rollout_func train.num_turns max_inflight_tasks",
        "environment_feedback_only_without_solution include_environment_feedback",
        "completion_length_limit_scope fork_threshold_tokens vllm_server_pass_dataset",
    ),
    none(
        "an engine of a run takes the model and its devices from the run; engine.server_options has "
        "options of an SGLang that the run starts",
        "sglang_tp_size vllm_data_parallel_size vllm_pipeline_parallel_size",
        f"{ROLLOUT}.data_parallel_size",
        f"{ROLLOUT}.expert_parallel_size {ROLLOUT}.pipeline_model_parallel_size",
        "rollout.data_parallel_size data_parallel_size dp",
        f"{ROLLOUT}.{{cudagraph_capture_sizes,disable_log_stats,dtype,enable_chunked_prefill}}",
        f"{ROLLOUT}.{{enable_prefix_caching,full_determinism,ignore_eos,layered_summon}}",
        f"{ROLLOUT}.{{load_format,logprobs_mode,max_model_len,mode,multi_stage_wake_up}}",
        f"{ROLLOUT}.{{moe_load_balance_metrics_interval,prompt_length,quantization_config_file}}",
        f"{ROLLOUT}.{{router_config_path,scheduling_policy,seed,skip_dump_dir,skip_rollout}}",
        f"{ROLLOUT}.{{skip_tokenizer_init,calculate_log_probs}} {ROLLOUT}.layer_name_map.**",
        f"{ROLLOUT}.{{checkpoint_engine,disaggregation,engine_kwargs,prometheus,trace}}.**",
        f"{ROLLOUT}.engine_kwargs",
        "rollout.{calculate_log_probs,disable_log_stats,dtype,enable_chunked_prefill}",
        "rollout.{free_cache_engine,ignore_eos,load_format,max_model_len,mode,prompt_length}",
        "vllm.enable_prefix_caching enable_prefix_caching vllm_enable_prefix_caching",
        "vllm_max_model_len vllm_max_model_length vllm_maxlen vllm_model_impl vllm_dtype",
        "vllm_group_port vllm_server_group_port vllm_max_lora_rank vllm_enable_lora vllm_config",
        "max_lora_rank float8_kv_cache",
        "vllm_limit_mm_per_prompt vllm_disable_** vllm_enable_expert_parallel vllm_engine_kwargs",
        "vllm_mm_processor_cache_gb vllm_reasoning_parser vllm_use_async_engine",
        "vllm_sync_frequency weight_sync_steps weight_sync_timeout enable_flattened_weight_sync",
        "sglang_config sglang_lora_backend sglang_maxlen sglang_context_length sglang_dp_size",
        "sglang_disable_custom_all_reduce sglang_enable_** sglang_ep_size sglang_kv_cache_dtype",
        "sglang_pp_size sglang_quantization sglang_speculative_** lmdeploy_** engine_kwargs",
        "generation_kwargs cache_implementation use_transformers_paged transformers_**",
        "use_transformers_continuous_batching rm_use_engine rm_engine_cudagraph",
        "heartbeat_stale_after_s queue_maxsize max_workers async_reward_computation",
        "generation_kwargs.** sampler_type verbose log_interval max_logprobs owned_by",
        "num_sampling_batches num_sampling_batch_size n_best_to_keep cached_sampling",
        "vllm_engine_kwargs.** vllm_config.** kv_cache_dtype swap_space",
        "reward.reward_model.rollout.** reward_model.rollout.**",
        "distillation.teacher_models.teacher_model.inference.**",
        "distillation.teacher_models.teacher_model.key distillation.teacher_key",
    ),
    none(
        "decoding by beams or with a length penalty is not done here",
        "num_beams length_penalty eval_num_beams skip_special_tokens logprobs top_logprobs",
    ),
    none(
        "the whole group shares one prompt and one update; there is no buffer of old groups",
        "replay_buffer_size ppo_buffer_size print_replay_buffer_stats max_inflight_gen_batches",
        "algorithm.filter_groups.max_inflight_gen_batches trainer.v1.** skip.** transfer_queue.**",
        "algorithm.use_pf_ppo algorithm.pf_ppo.** trainer.use_v1 trainer.use_legacy_worker_impl",
    ),
)

LEARNING = (
    none(
        "responses that were cut stay in the loss; filters and shapings decide about them",
        "mask_truncated_completions overlong_filter",
    ),
    none(
        "this term of the loss is not part of the framework; algorithm.loss takes a function of "
        "your own (docs/extending.md)",
        "advantage_reweight chord_** fipo_** rlsd_** sdar_** cosine_** asft_alpha",
        "eaft_alpha use_asft_loss use_eaft_loss use_dft_loss enable_dft_loss enable_channel_loss",
        "repetition_max_penalty repetition_n_grams soft_max_length multi_objective_aggregation",
        "token_level_kl vf_coef entropy_coef_max entropy_coef_min max_density_ratio",
        "min_density_ratio iw_opd_** rkl_advantage single_step_decomposition length_normalization",
        "seq_kd reverse_kl_top_1_mode uld_** distillation_is_clip",
        "distillation_objective success_reward_threshold num_loss_tokens_to_skip beta1 beta2",
        "max_reprompt_len dont_reprompt_on_self_success use_successful_as_teacher filter_empty",
        "filter_all_incorrect generate_from_teacher use_teacher_server teacher_tag_key",
        "use_sequence_rewards",
        f"{ACTOR}.calculate_sum_pi_squared {ACTOR}.sum_pi_squared_checkpointing",
        f"{ACTOR}.entropy_checkpointing {REF}.entropy_checkpointing actor.entropy_checkpointing",
        f"{REF}.entropy_from_logits_chunk_size {REF}.entropy_from_logits_with_chunking",
        "algorithm.rollout_correction.loss_type critic.loss_agg_mode critic.loss_scale_factor",
        "distillation.distillation_loss.{clip_ratio,clip_ratio_high,clip_ratio_low}",
        "distillation.distillation_loss.{log_prob_min_clamp,loss_max_clamp,policy_loss_mode}",
        "distillation.distillation_loss.{use_policy_gradient,use_task_rewards}",
        "distillation.enabled prm_threshold prm_model orm_model ppo_target",
    ),
    none(
        "a role exists where the algorithm needs it",
        f"critic.enable reward_model.enable reward.reward_model.enable {ACTOR}.load_weight",
        f"{REF}.load_weight critic.load_weight reward_model.load_weight",
        "critic.ulysses_sequence_parallel_size reward_model.ulysses_sequence_parallel_size",
        f"{REF}.ulysses_sequence_parallel_size reward_model.max_length",
        f"critic.ppo_epochs critic.ppo_mini_batch_size {ACTOR}.router_replay.*",
        f"{REF}.router_replay.** critic.router_replay.**",
    ),
    none(
        "reward functions run in worker processes of the run; reward.workers counts them",
        "reward_model.{launch_reward_fn_async,use_reward_loop,reward_loop_*} reward_model.reward_loop_*",
        "{reward,reward_model}.sandbox_fusion.{url,max_concurrent} sandbox_fusion.{url,max_concurrent}",
        "reward.reward_manager.** reward_manager.**",
    ),
)

RUNS = (
    none(
        "the verb and the sources say it: lightrft rl (with algorithm=grpo or ppo), sft, dpo, kto, "
        "rm, distill",
        "do_train do_predict stage task rlhf_type trainer.val_only config model_id_or_path",
        "perf eval_task local_files_only base_url stream studio_title share infer_dtype_",
        "trainer.checkpoint_callback_class task_dir eval_only",
    ),
    none(
        "a checkpoint holds all that the run needs, and model/ of the run is in Hugging Face's form; "
        "lightrft export writes that of any checkpoint",
        "save_hf_ckpt ckpt.save_hf save_value_network critic.save_value_network save_only_model",
        "save_on_each_node enable_jit_checkpoint restore_callback_states_from_checkpoint",
        "resume_only_model create_checkpoint_symlink use_flash_ckpt max_ckpt_mem ckpt.max_mem",
        "ckpt_path_local max_critic_ckpt_to_keep trainer.max_critic_ckpt_to_keep save_dir",
        "trainer.del_local_ckpt_after_load trainer.checkpoint.** checkpoint.load_contents",
        f"checkpoint.save_contents {ACTOR}.checkpoint.** critic.checkpoint.** export_device",
        "export_legacy_format safe_serialization to_ollama to_peft_format exist_ok",
        "override_exist_file resume",
    ),
    none(
        "metrics of every step are in metrics.jsonl and on the terminal, and log.txt has all "
        "messages",
        "logging_steps logger.logging_steps logging_strategy logging_first_step log_level log_dir",
        "logging_nan_inf_filter log_level_replica log_on_each_node logging_dir",
        "include_num_input_tokens_seen include_effective_tokens_per_second log_unique_prompts",
        "num_completions_to_print log_multimodal log_rollout_offpolicy_metrics plot_loss plot_every",
        "trajectory_analysis mark_high_entropy_tokens print_param_status tensorboard_queue_size",
        "diagnostics_** compute_accuracy calculate_KL",
    ),
    none(
        "the run's own timers are in its metrics; there is no profiler of other tools",
        "global_profiler.** profiler_** profile_modules enable_torch_profiler debug",
        f"{{{ACTOR},{REF},{ROLLOUT},critic,reward_model}}.profiler.** trainer.profile_interval",
        "skip_memory_metrics",
    ),
    none(
        "the eval set and the rows held out are measured in full; eval has its settings",
        "per_device_eval_batch_size eval_accumulation_steps eval_delay eval_use_gather_object",
        "batch_eval_metrics prediction_loss_only eval_on_each_dataset generate_during_eval",
        "eval_metric metric acc_strategy eval_use_evalscope eval_backend eval_url",
        "eval_generation_config eval_num_proc eval_output_dir eval_dataset_args extra_eval_args",
        "label_smoothing_factor early_stopping_steps early_stop_interval callbacks",
    ),
    none(
        "the function serves a program of another kind",
        "ssl_certfile ssl_keyfile greedy ta_prompt reward_tokens prompt sample_size",
        "external_lib extra_config write_batch_size num_total_batches ms-swift:group_size ring_attn_head_stride ring_head_stride",
        "ds.ring_attn_head_stride liger_kernel_config fused_kernel_options",
    ),
)

ROWS = (*HARDWARE, *MODELS, *DATA, *ROLLOUT_ROWS, *LEARNING, *RUNS)
"""Rows without a setting here."""
