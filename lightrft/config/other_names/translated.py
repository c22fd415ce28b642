"""Options of other frameworks that a setting of this one replaces."""

from __future__ import annotations

from lightrft.config.other_names import conversions as to
from lightrft.config.other_names.rows import (
    Choice,
    Row,
    Settings,
    as_list,
    by_hand,
    counted,
    ignore,
    inverse,
    positive,
    when,
)

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
MICRO = (
    "a bound in tokens of a forward pass on one device, not a number of rows; it does not change "
    "the result, so leave it unless memory runs out"
)
TOKENS = (
    "tokens of one forward pass on one device, prompts included; a longer row goes alone, and the "
    "result does not change"
)
NO_PADDING = "nothing is padded by default, so packing needs no setting"
ON_DEVICES = "the number of processes over all nodes that this command starts"
ADAPTERS = "0 means no adapters there; here model.lora=null does"

MODELS = (
    Row(
        "model_name_or_path pretrain model model_name name_or_path "
        "model_path sft_model_path actor.model_name_or_path model.model_name_or_path "
        f"model.partial_pretrain model.path {MODEL}.path hf_model_path base_model_path",
        "model.path",
    ),
    Row(
        f"tokenizer tokenizer_name tokenizer_path tokenizer_name_or_path {MODEL}.tokenizer_path "
        "data.tokenizer",
        "model.tokenizer",
    ),
    Row(
        "chat_template chat_template_path tokenizer_chat_template data.tokenizer_chat_template "
        f"data.chat_template {MODEL}.custom_chat_template",
        "model.chat_template",
        "a Jinja template or a file of one; the tokenizer's own is used without it",
    ),
    Row(
        "template template_type",
        "model.chat_template",
        "the tokenizer's own chat template is used; a name such as qwen is none, and a Jinja file "
        "replaces it",
        by_hand,
    ),
    Row("model_revision", "model.revision"),
    Row(
        "bf16 pure_bf16",
        "model.dtype",
        "the type of the weights that are computed with; the optimizer keeps float32 copies",
        when("model.dtype", to.BF16),
    ),
    Row("fp16", "model.dtype", "the type of the weights", when("model.dtype", to.FP16)),
    Row(
        "torch_dtype dtype param_dtype ds.param_dtype infer_dtype model_init_kwargs.{torch_dtype,"
        f"dtype}} {ACTOR}.fsdp_config.model_dtype model.fsdp_config.model_dtype "
        "model_kwargs.torch_dtype",
        "model.dtype dtype",
        "the type of the weights that are computed with; the optimizer keeps float32 copies",
        to.DTYPES,
    ),
    Row(
        "attn_implementation attn_impl ds.attn_implementation flash_attn attention_backend "
        f"model_init_kwargs.attn_implementation {MODEL}.override_config.attn_implementation",
        "model.attention",
        "it acts on the layout `padded` alone; other layouts Choice their kernel themselves",
        ignore,
    ),
    Row(
        "packing padding_free neat_packing packing_samples ds.packing_samples use_remove_padding "
        "eval_packing packing_strategy packing_length block_diag_attn use_packed_sequences "
        f"{MODEL}.use_remove_padding critic.model.use_remove_padding {ACTOR}.use_remove_padding "
        f"reward_model.model.use_remove_padding {ACTOR}.use_prefix_grouper",
        "model.layout",
        NO_PADDING,
        ignore,
    ),
    Row(
        f"lora_r lora_rank ds.lora.rank {MODEL}.lora_rank {MODEL}.lora.rank model.lora_rank "
        "model.lora.r",
        "model.lora.rank",
        ADAPTERS,
        to.of_lora,
    ),
    Row(
        f"lora_alpha ds.lora.alpha {MODEL}.lora_alpha {MODEL}.lora.alpha model.lora_alpha",
        "model.lora.alpha",
        "",
        to.of_lora,
    ),
    Row(
        f"lora_dropout ds.lora.dropout {MODEL}.lora.dropout",
        "model.lora.dropout",
        "",
        to.of_lora,
    ),
    Row(
        "target_modules lora_target lora_target_modules ds.lora.target_modules target_regex "
        f"{MODEL}.target_modules {MODEL}.lora.target_modules model.target_modules",
        "model.lora.targets",
        "",
        to.lora_targets,
    ),
    Row("use_dora", "model.lora.dora", "", to.of_lora),
    Row(
        "use_peft",
        "model.lora",
        "adapters are trained where a setting of model.lora is given, e.g. model.lora.rank=16",
        ignore,
    ),
    Row(
        "finetuning_type tuner_type train_type",
        "model.lora",
        "lora: set model.lora.rank; full: leave model.lora out; freeze: model.freeze",
        Choice({"lora": Settings(), "full": Settings()}),
    ),
    Row("load_in_4bit ds.load_in_4bit", "model.load_in_4bit"),
    Row(
        "quantization_bit quant_bits",
        "model.load_in_4bit",
        "4 bits alone, by bitsandbytes",
        Choice({4: Settings({"model.load_in_4bit": True}), None: Settings()}),
    ),
    Row(
        "gradient_checkpointing activation_checkpointing enable_gradient_checkpointing "
        "actor.gradient_checkpointing_enable model.gradient_checkpointing_enable "
        f"{MODEL}.enable_gradient_checkpointing model.enable_gradient_checkpointing",
        "model.gradient_checkpointing",
    ),
    Row(
        "disable_gradient_checkpointing",
        "model.gradient_checkpointing",
        "the opposite",
        inverse,
    ),
    Row(
        "use_liger_kernel use_liger enable_liger_kernel use_liger_loss ds.use_liger_kernel "
        f"fused_linear_logprob chunk_size {MODEL}.use_liger model.use_liger "
        f"{MODEL}.use_fused_kernels critic.model.use_fused_kernels {ACTOR}.use_fused_kernels "
        f"{MODEL}.fused_kernel_options.impl_backend use_logits_to_keep use_num_logits_to_keep "
        "reward_model.model.use_fused_kernels critic.model.fused_kernel_options.impl_backend "
        f"{ACTOR}.entropy_from_logits_with_chunking critic.model.use_liger cross_entropy_loss_fusion "
        f"{ACTOR}.entropy_from_logits_chunk_size actor.entropy_from_logits_with_chunking "
        "cross_entropy_fusion_impl disable_logprobs_flashattn",
        "model.logits_mb",
        "logits are never made as a whole; logits_mb bounds their memory in MiB",
        ignore,
    ),
    Row(
        f"trust_remote_code {MODEL}.trust_remote_code model.trust_remote_code "
        "data.trust_remote_code",
        "model.trust_remote_code",
    ),
    Row(
        "freeze_prefix freeze_vit freeze_vision_tower actor.freeze_visual_encoder "
        f"{ACTOR}.freeze_vision_tower {MODEL}.lora.freeze_vision_model",
        "model.freeze",
        "true is model.freeze=[tower]",
        to.frozen("tower", "freeze_multi_modal_projector=projector", "freeze_aligner=projector"),
    ),
    Row(
        f"freeze_multi_modal_projector freeze_aligner {MODEL}.lora.freeze_vision_projection",
        "model.freeze",
        "true is model.freeze=[projector]",
        to.frozen("projector", "freeze_vision_tower=tower", "freeze_vit=tower"),
    ),
    Row(
        f"freeze_language_model freeze_llm {MODEL}.lora.freeze_language_model",
        "model.freeze",
        "true is model.freeze=[language]",
        to.frozen("language"),
    ),
    Row(
        "freeze_parameters freeze_trainable_modules",
        "model.freeze",
        "parts or prefixes of parameters' names that are not trained",
        by_hand,
    ),
    Row(
        "use_rollout_routing_replay router_replay_mode "
        f"{ACTOR}.router_replay.mode {ACTOR}.megatron.router_replay.mode "
        f"{ROLLOUT}.enable_rollout_routing_replay",
        "model.replay_routes",
        "true, or R3: the routes of generation; R2 replays the trainer's own, which needs nothing",
        Choice(
            {
                True: True,
                "r3": True,
                **dict.fromkeys((False, "disabled", "r2", None), Settings()),
            }
        ),
    ),
    Row(
        "ref_model ref_pretrain ref.model_name_or_path ref_model_name_or_path",
        "reference",
        "null takes the model that training starts from",
    ),
    Row(
        "reward_model reward_model_path reward_pretrain reward_model_name_or_path "
        "reward.model_name_or_path reward_model.model.path reward.reward_model.model_path "
        "cost_model_name_or_path",
        "reward.models",
        "a folder, or a list of folders and tables; see docs/verbs/rm.md",
        as_list,
    ),
    Row(
        "critic_pretrain critic.model.path critic.model_name_or_path critic_model_name_or_path "
        "reward_critic_model_name_or_path value_model",
        "critic.path",
        "empty takes model.path",
    ),
    Row("cost_critic_model_name_or_path", "cost_critic.path"),
    Row(
        "teacher_model teacher_model_name_or_path teacher_tokenizer_name_or_path "
        "distillation.teacher_models.teacher_model.model_path",
        "teacher.path",
        "its tokenizer is in the same folder",
    ),
    Row("teacher_model_revision", "teacher.revision"),
    Row("teacher_model_init_kwargs.{torch_dtype,dtype}", "teacher.dtype", "", to.DTYPES),
    Row(
        "teacher_model_server_url teacher_server_urls teacher_model_server",
        "teacher.url",
        "one address, of a server that returns prompt_logprobs, such as vLLM's",
    ),
)

DATA = (
    Row(
        "dataset dataset_name dataset_path prompt_data train_data train_dataset train_file "
        "train_files data.dataset data.prompt_dataset data.train_files data_files data.path "
        "datasets",
        "data.sources",
        "files, folders or names on the hub; a name of another framework's registry is none",
        as_list,
    ),
    Row("trl:path", "data.sources.path", "it belongs to a source", by_hand),
    Row("trl:name", "data.sources.subset", "it belongs to a source", by_hand),
    Row("trl:split", "data.sources.split", "it belongs to a source", by_hand),
    Row("dataset_config subset", "data.sources.subset", "it belongs to a source", by_hand),
    Row(
        "dataset_split dataset_train_split prompt_split train_split data.dataset_split "
        "data.prompt_split",
        "data.sources.split",
        "it belongs to a source; the split `train` is taken without it",
        Choice({"train": Settings()}),
    ),
    Row(
        "dataset_probs prompt_data_probs interleave_probs interleave_prob data.dataset_probs "
        "data.prompt_probs",
        "data.sources.weight",
        "a weight for each source, with data.blend=sample",
        by_hand,
    ),
    Row(
        "max_samples data.max_samples data.train_max_samples",
        "data.sources.limit",
        "most rows of each source, not of all together",
        by_hand,
    ),
    Row("pretrain_data", "ptx.data.sources", "supervised rows next to the rollouts", as_list),
    Row("pretrain_split", "ptx.data.sources.split", "it belongs to a source", by_hand),
    Row("pretrain_data_probs", "ptx.data.sources.weight", "a weight for each source", by_hand),
    Row("ptx_coef", "ptx.coef", "it needs ptx.data.sources"),
    Row(
        "eval_data eval_dataset val_dataset val_files eval.dataset data.val_files eval_file "
        "validation_file",
        "validation.sources eval.data.sources",
        "",
        as_list,
    ),
    Row(
        "eval_split dataset_test_split eval.split",
        "validation.sources.split eval.data.sources.split",
        "it belongs to a source",
        by_hand,
    ),
    Row(
        "val_size split_dataset_ratio test_split_size",
        "validation.sources eval.data.sources",
        "a share of the training rows there; here name a file of rows that are not trained",
        by_hand,
    ),
    Row(
        "max_eval_samples eval_limit data.val_max_samples val_dataset_sample",
        "eval.limit",
        "prompts from the first on",
        positive,
    ),
    Row(
        "input_key prompt_key data.input_key data.prompt_key dataset_text_field "
        "data.multiturn.messages_key data.messages_key prompt_column columns.prompt",
        "data.columns.prompt",
    ),
    Row(
        "output_key data.output_key data.response_key columns.response",
        "data.columns.response",
    ),
    Row("label_key data.label_key", "data.columns.label"),
    Row("reference_key", "data.columns.reference"),
    Row(
        "data.reward_fn_key data.data_source_key",
        "data.columns.data_source",
        "the column that chooses the terms of a row in reward.per_source",
    ),
    Row("image_key images_key data.image_key", "data.columns.images"),
    Row("data.video_key video_key", "data.columns.videos"),
    Row("data.audio_key audio_key", "data.columns.audios"),
    Row("data.tools_key data.multiturn.tools_key", "data.columns.tools"),
    Row("chosen_key data.chosen_key columns.chosen", "data.columns.chosen"),
    Row("rejected_key data.rejected_key columns.rejected", "data.columns.rejected"),
    Row(
        "system system_prompt default_system task_instruction",
        "data.system system",
        "the message of rows that have none",
    ),
    Row("system_prompt_path", "data.system", "the text itself, not a file", by_hand),
    Row(
        "input_template data.input_template",
        "data.template",
        "{prompt} stands for the prompt, in place of {}",
        to.template,
    ),
    Row(
        "apply_chat_template data.apply_chat_template use_chat_template",
        "data.apply_chat_template",
    ),
    Row(
        "chat_template_kwargs data.apply_chat_template_kwargs",
        "data.chat_template_options",
    ),
    Row(
        "enable_thinking data.enable_thinking_default",
        "data.chat_template_options",
        "an argument of the chat template: data.chat_template_options.enable_thinking",
        lambda value, _: {"enable_thinking": value} if value is not None else Settings(),
    ),
    Row(
        "max_prompt_length prompt_max_len data.max_prompt_length",
        "data.max_prompt_tokens max_tokens",
        "tokens of the prompt, with its template and media",
        positive,
    ),
    Row(
        "max_length max_seq_length max_len cutoff_len model_max_length data.max_length "
        "data.max_len max_model_len",
        "max_tokens",
        "tokens of a prompt with its response",
        positive,
    ),
    Row(
        "max_length max_seq_length max_len cutoff_len model_max_length data.max_length "
        "data.max_len max_model_len",
        "data.max_prompt_tokens",
        "tokens of the prompt alone; sampling.max_new_tokens bounds the response",
        positive,
    ),
    Row(
        "filter_overlong_prompts data.filter_overlong_prompts",
        "data.overlong_prompts",
        "true is `drop`",
        Choice({True: "drop", False: Settings()}),
    ),
    Row(
        "truncation_strategy data.truncation truncation_mode",
        "data.overlong_prompts",
        "`drop`, `error` or `truncate`, which cuts the start of a prompt's last message",
        Choice(
            {
                "error": "error",
                "raise": "error",
                "delete": "drop",
                **dict.fromkeys(("left", "right", "middle", "keep_start", "keep_end"), "truncate"),
            }
        ),
    ),
    Row(
        "assistant_only_loss completion_only_loss",
        "data.loss_on",
        "true is `assistant`, false is `all`",
        Choice({True: "assistant", False: "all", None: Settings()}),
    ),
    Row(
        "train_on_prompt train_on_inputs pretrain_mode model.pretrain_mode_enable",
        "data.loss_on",
        "true is `all`",
        Choice({True: "all", False: Settings()}),
    ),
    Row(
        "loss_scale",
        "data.loss_on",
        "`default` is assistant, `all` is all; `last_round` is data.turns=last",
        Choice(
            {
                "default": Settings(),
                "all": "all",
                "last_round": Settings({"data.turns": "last"}),
            }
        ),
    ),
    Row("mask_history", "data.turns", "true is `last`", when("data.turns", "last")),
    Row(
        "multiturn data.multiturn",
        "data.turns",
        "conversations of several turns need no flag",
        ignore,
    ),
    Row(
        "shuffle_dataset data.shuffle dataset_shuffle train_dataloader_shuffle",
        "data.shuffle",
    ),
    Row("disable_shuffling", "data.shuffle", "the opposite", inverse),
    Row(
        "mix_strategy stopping_strategy",
        "data.blend",
        "",
        Choice(
            {
                "concat": "concat",
                **dict.fromkeys(("interleave_under", "first_exhausted"), "sample"),
                **dict.fromkeys(("interleave_over", "all_exhausted"), "sample_all"),
            }
        ),
    ),
    Row("max_pixels image_max_pixels video_max_pixels", "data.media.max_pixels"),
    Row("image_min_pixels video_min_pixels", "data.media.min_pixels"),
    Row("fps video_fps", "data.media.fps", "frames taken per second of video"),
    Row("video_maxlen fps_max_frames", "data.media.max_frames", "frames of one video"),
    Row("media_dir", "data.media.root"),
    Row(
        "tokenized_path cached_dataset cached_val_dataset",
        "data.token_cache",
        "a folder of this program's own; tokens of other programs are not read",
        by_hand,
    ),
    Row(
        "strict",
        "data.bad_rows",
        "true is `error`, false is `skip`",
        Choice({True: "error", False: "skip"}),
    ),
    Row("step_separator", "data.separator"),
    Row("placeholder_token", "data.placeholder"),
    Row(
        "train_on_last_step_only",
        "process_model.last_step_only",
    ),
)

SAMPLING = (
    Row(
        f"num_generations n_samples_per_prompt rollout.n_samples_per_prompt {ROLLOUT}.n rollout.n "
        "rloo_k num_return_sequences best_of_n num_samples num_sample_generations data.n_samples",
        "online.group_size samples rollout.group_size",
        "",
    ),
    Row("group_size", "online.group_size samples rollout.group_size"),
    Row(
        "eval_n_samples_per_prompt eval.n_samples_per_prompt num_generations_eval "
        f"{ROLLOUT}.val_kwargs.n",
        "eval.samples",
        "responses to one prompt of the eval set",
    ),
    Row(
        "rollout_batch_size rollout.batch_size",
        "rollout.prompts_per_step",
        "prompts of a step over all processes, each with its group of responses",
    ),
    Row(
        "data.train_batch_size data.gen_batch_size",
        "rollout.prompts_per_step batch_size",
        "prompts of a step over all processes (rows, in sft)",
    ),
    Row(
        "data.batch_size",
        "batch_size",
        "rows of an optimizer step over all processes",
    ),
    Row(
        "max_completion_length max_response_length max_new_tokens generate_max_len response_length "
        f"data.max_response_length rollout.max_new_tokens {ROLLOUT}.response_length "
        "rollout.response_length max_tokens",
        "sampling.max_new_tokens eval.sampling.max_new_tokens",
        "tokens of the response alone",
    ),
    Row(
        f"temperature rollout.temperature {ROLLOUT}.temperature sampling_temperature",
        "sampling.temperature eval.sampling.temperature",
    ),
    Row(f"top_p rollout.top_p {ROLLOUT}.top_p", "sampling.top_p eval.sampling.top_p"),
    Row(
        f"top_k {ROLLOUT}.top_k rollout.top_k",
        "sampling.top_k eval.sampling.top_k",
        "0 keeps all, as -1 and null do there",
        lambda value, _: value if isinstance(value, int) and value > 0 else 0,
    ),
    Row(
        "min_p",
        "sampling.min_p eval.sampling.min_p",
        "",
        lambda value, _: value or 0.0,
    ),
    Row("repetition_penalty", "sampling.repetition_penalty eval.sampling.repetition_penalty"),
    Row(
        f"do_sample {ROLLOUT}.do_sample rollout.do_sample",
        "sampling.temperature eval.sampling.temperature",
        "false is temperature 0, which rl refuses",
        Choice({True: Settings(), False: 0.0}),
    ),
    Row(
        "greedy_sampling",
        "sampling.temperature",
        "true is temperature 0",
        Choice({True: 0.0, False: Settings()}),
    ),
    Row(
        f"eval_temperature eval.temperature {ROLLOUT}.val_kwargs.temperature",
        "eval.sampling.temperature",
        "0 is greedy",
    ),
    Row(f"{ROLLOUT}.val_kwargs.top_p eval.top_p", "eval.sampling.top_p"),
    Row(
        f"{ROLLOUT}.val_kwargs.top_k eval.top_k",
        "eval.sampling.top_k",
        "0 keeps all, as -1 does there",
        lambda value, _: value if isinstance(value, int) and value > 0 else 0,
    ),
    Row(
        f"{ROLLOUT}.val_kwargs.do_sample",
        "eval.sampling.temperature",
        "false is temperature 0",
        Choice({True: Settings(), False: 0.0}),
    ),
    Row(
        "use_fire",
        "sampling.first_token_temperature",
        "a flag there; here the temperature itself turns it on",
        counted,
    ),
    Row(
        "first_token_temperature",
        "sampling.first_token_temperature",
        "LightRFT reads it with use_fire alone",
        lambda value, options: value if options.get("use_fire", True) else Settings(),
    ),
    Row("stop_words stop_token stop", "sampling.stop", "", as_list),
    Row("stop_token_id eos_token_ids", "sampling.stop_token_ids", "", as_list),
    Row(
        "vllm_guided_decoding_regex vllm_structured_outputs_regex structured_outputs_regex",
        "sampling.constraint.regex",
    ),
    Row(
        "dynamic_filtering dynamic_sampling dynamic_sample algo.dynamic_filtering_enable "
        "algorithm.filter_groups.enable filter_groups.enable",
        "algorithm.filters",
        "`zero_variance` drops groups of equal rewards",
        to.entropy_filter,
    ),
    Row(
        "dynamic_filtering_reward_range algo.dynamic_filtering_range",
        "algorithm.filters",
        "the mean reward of a group: {name: reward_bounds, options: {low: 0.01, high: 0.99}}",
        by_hand,
    ),
    Row(
        "algorithm.filter_groups algorithm.filter_groups.metric filter_groups",
        "algorithm.filters",
        "`zero_variance` compares the rewards of a group",
        ignore,
    ),
    Row(
        "max_resample_times algorithm.filter_groups.max_num_gen_batches",
        "rollout.max_rounds",
        "rounds of generation in a step, in which dropped groups are replaced",
        positive,
    ),
    Row(
        "num_remains_in_group",
        "rollout.select",
        "a function that keeps some responses of each group; docs/parts.md lists them",
        by_hand,
    ),
    Row(
        f"{ROLLOUT}.over_sample_rate vllm_generate_batch_size rollout.vllm_generate_batch_size",
        "rollout.oversample",
        "a factor: groups that are generated over groups that are needed",
        by_hand,
    ),
    Row(
        "partial_rollout train.partial_rollout_enable",
        "rollout.partial",
        "it needs rollout.max_tokens_per_step, or rollout.oversample above 1",
        by_hand,
    ),
    Row(
        "async_training async_train async_generate train.async_enable",
        "rollout.staleness",
        "true is 1: each step trains on responses of exactly one step before",
        Choice({True: 1, False: Settings()}),
    ),
    Row(
        "async_queue_size train.async_queue_size max_staleness trainer.v1.sampler."
        "max_off_policy_threshold",
        "rollout.staleness",
        "steps that generation runs ahead, exactly and not at most",
        by_hand,
    ),
    Row(
        f"micro_rollout_batch_size rollout.micro_batch_size max_num_seqs {ROLLOUT}.max_num_seqs "
        "vllm_max_num_seqs rollout.max_num_seqs max_batch_size local_rollout_forward_batch_size",
        "engine.max_num_seqs",
        "responses that grow at once; it does not change the result",
    ),
    Row(
        f"gpu_memory_utilization vllm_gpu_memory_utilization vllm_gpu_util engine_mem_util "
        f"vllm.gpu_memory_utilization {ROLLOUT}.gpu_memory_utilization sglang_mem_fraction "
        f"sglang_mem_fraction_static rollout.gpu_memory_utilization {ROLLOUT}."
        "max_num_batched_tokens rollout.max_num_batched_tokens",
        "engine.max_cache_tokens",
        "tokens of prompts and responses whose keys and values are in memory, not a share of it",
        by_hand,
    ),
    Row(
        f"engine_type infer_backend {ROLLOUT}.name rollout.name sampler_engine",
        "engine.kind",
        "`native` samples from the policy itself; vllm and sglang need their packages",
        Choice(
            {
                "vllm": "vllm",
                "sglang": "sglang",
                **dict.fromkeys(("hf", "huggingface", "pt", "transformers"), "native"),
            }
        ),
    ),
    Row("use_vllm", "engine.kind", "true is `vllm`", when("engine.kind", "vllm")),
    Row(
        "vllm_mode",
        "engine.kind",
        "`colocate` is vllm, in the process of the run; `server` is http, with engine.url",
        Choice(
            {
                "colocate": Settings({"engine.kind": "vllm"}),
                "server": Settings({"engine.kind": "http"}),
            }
        ),
    ),
    Row(
        "vllm_server_base_url",
        "engine.url",
        "with engine.kind=http; started with --logprobs-mode processed_logprobs",
    ),
    Row("vllm_server_host vllm_server_port", "engine.url", "http://host:port", by_hand),
    Row("vllm_server_timeout request_timeout", "engine.deadline", "seconds"),
    Row(
        f"enforce_eager vllm.enforce_eager vllm_enforce_eager {ROLLOUT}.enforce_eager "
        "rollout.enforce_eager sglang_disable_cuda_graph",
        "engine.compile",
        "the opposite: false decodes without CUDA graphs",
        inverse,
    ),
    Row(
        f"quantization vllm_quantization {ROLLOUT}.quantization",
        "engine.quantization",
        "",
        Choice({"fp8": "fp8_per_channel", None: Settings()}),
    ),
    Row(
        "vllm_speculative_config",
        "engine.speculative",
        "for the native engine",
        by_hand,
    ),
    Row(
        f"enable_sleep vllm_enable_sleep vllm.enable_sleep vllm_enable_sleep_mode "
        "deepspeed_enable_sleep ds.enable_sleep enable_engine_sleep move_model_batches "
        f"offload_model offload_optimizer sleep_level {ROLLOUT}.free_cache_engine",
        "strategy.offload_during_generation",
        "it moves the trainer's weights and optimizer to host memory while responses grow",
        by_hand,
    ),
    Row(
        "disable_engine_sleep",
        "strategy.offload_during_generation",
        "the opposite",
        by_hand,
    ),
)

REWARD = (
    Row(
        "reward_funcs custom_reward_function.path reward.custom_reward_function.path "
        "remote_rm_url reward.remote_url reward_model_plugin external_plugins "
        "custom_reward_function",
        "reward.terms",
        "a function gets one rollout and returns a number (docs/tutorials/own-reward.md); a "
        "server of scores is reward.models.url",
        to.reward_function,
    ),
    Row(
        "custom_reward_function.name reward.custom_reward_function.name",
        "reward.terms.function",
        "file.py:name",
        counted,
    ),
    Row("reward_weights", "reward.terms.weight", "it belongs to a term", by_hand),
    Row("judge", "reward.terms", "judges that are models are reward.judges", by_hand),
    Row(
        "reward_model.reward_manager reward.reward_manager.name reward_manager.name",
        "reward.terms",
        "the rules of data sources are reward.per_source; dapo's length penalty is "
        "algorithm.shaping",
        by_hand,
    ),
    Row(
        "reward.num_workers reward_model.num_workers",
        "reward.workers",
        "processes that call reward functions, for each rank",
    ),
    Row(
        "reward.sandbox_fusion.memory_limit_mb reward_model.sandbox_fusion.memory_limit_mb "
        "sandbox_fusion.memory_limit_mb",
        "reward.memory_mb",
        "of each worker that calls reward functions",
    ),
    Row(
        "reward_model.micro_batch_size reward_model.micro_batch_size_per_gpu "
        "reward_model.forward_max_token_len_per_gpu",
        "reward.models.max_tokens_per_micro_batch",
        MICRO,
        by_hand,
    ),
    Row(
        "ref_reward_offload reward.offload reward_offload reward_model.model.fsdp_config."
        "param_offload",
        "reward.models.offload",
        "it belongs to a model",
        by_hand,
    ),
    Row(
        "overlong_buffer",
        "algorithm.shaping",
        "`overlong`, with its length and penalty as options",
        counted,
    ),
    Row(
        "overlong_buffer_len reward.overlong_buffer_len soft_cache_length",
        "algorithm.shaping",
        "the option `buffer` of `overlong`, in tokens",
        to.overlong("overlong_penalty_factor", "overlong_buffer_penalty_factor"),
    ),
    Row(
        "{reward_model,reward}.reward_kwargs.overlong_buffer_cfg.len",
        "algorithm.shaping",
        "the option `buffer` of `overlong`, in tokens",
        to.overlong(
            "reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor",
            "reward.reward_kwargs.overlong_buffer_cfg.penalty_factor",
        ),
    ),
    Row(
        "{reward_model,reward}.reward_kwargs.overlong_buffer_cfg.{enable,penalty_factor,log} "
        "{reward_model,reward}.reward_kwargs.max_resp_len",
        "algorithm.shaping",
        "`overlong`, with its length and penalty as options; the longest response is "
        "sampling.max_new_tokens",
        counted,
    ),
    Row(
        "{custom_reward_function,reward.custom_reward_function}.reward_kwargs",
        "reward.terms.options",
        "it belongs to a term",
        by_hand,
    ),
    Row(
        "overlong_penalty_factor overlong_buffer_penalty_factor reward.overlong_penalty_factor",
        "algorithm.shaping",
        "the option `penalty` of `overlong`",
        counted,
    ),
    Row(
        "reward_clip_range reward.clip_range",
        "algorithm.shaping",
        "{name: reward_clip, options: {low: -10, high: 10}}",
        lambda value, _: (
            [{"name": "reward_clip", "options": {"low": value[0], "high": value[1]}}]
            if value
            else Settings()
        ),
    ),
    Row(
        "reward_clip",
        "algorithm.shaping",
        "{name: reward_clip, options: {low: -x, high: x}}; 0 clips nothing",
        lambda value, _: (
            [{"name": "reward_clip", "options": {"low": -value, "high": value}}]
            if value
            else Settings()
        ),
    ),
    Row(
        "cosine_{min,max}_len_value_{wrong,correct} cosine_max_len",
        "algorithm.shaping",
        "options of `cosine`",
        by_hand,
    ),
)
