"""Options of other frameworks that a setting of this one replaces."""

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
    NameRow(
        "model_name_or_path pretrain student student_model model model_name name_or_path "
        "model_path sft_model_path actor.model_name_or_path model.model_name_or_path "
        f"model.partial_pretrain model.path {MODEL}.path hf_model_path base_model_path",
        "model.path path models",
    ),
    NameRow(
        f"tokenizer tokenizer_name tokenizer_path tokenizer_name_or_path {MODEL}.tokenizer_path "
        "data.tokenizer processing_class",
        "model.tokenizer",
    ),
    NameRow(
        "chat_template chat_template_path tokenizer_chat_template data.tokenizer_chat_template "
        f"data.chat_template {MODEL}.custom_chat_template",
        "model.chat_template",
        "a Jinja template or a file of one; the tokenizer's own is used without it",
    ),
    NameRow(
        "template template_type",
        "model.chat_template",
        "the tokenizer's own chat template is used; a name such as qwen is none, and a Jinja file "
        "replaces it",
        by_hand,
    ),
    NameRow("model_revision", "model.revision"),
    NameRow(
        "disable_dropout",
        "model.dropout",
        "the opposite: true trains with dropout; the default is false, except in sft",
        inverse,
    ),
    NameRow(
        "bf16 pure_bf16",
        "model.dtype",
        "the type of the weights that are computed with; the optimizer keeps float32 copies",
        when("model.dtype", to.BF16),
    ),
    NameRow("fp16", "model.dtype", "the type of the weights", when("model.dtype", to.FP16)),
    NameRow(
        "torch_dtype dtype precision param_dtype ds.param_dtype infer_dtype model_init_kwargs.{torch_dtype,"
        f"dtype}} {ACTOR}.fsdp_config.model_dtype model.fsdp_config.model_dtype "
        "model_kwargs.torch_dtype",
        "model.dtype dtype",
        "the type of the weights that are computed with; the optimizer keeps float32 copies",
        to.DTYPES,
    ),
    NameRow(
        "attn_implementation attn attn_impl ds.attn_implementation flash_attn attention_backend "
        f"model_init_kwargs.attn_implementation {MODEL}.override_config.attn_implementation",
        "model.attention",
        "it acts on the layout `padded` alone; other layouts choose their kernel themselves",
        ignore,
    ),
    NameRow(
        "packing padding_free neat_packing packing_samples ds.packing_samples use_remove_padding "
        "eval_packing packing_strategy packing_length block_diag_attn use_packed_sequences "
        f"{MODEL}.use_remove_padding critic.model.use_remove_padding {ACTOR}.use_remove_padding "
        f"reward_model.model.use_remove_padding {ACTOR}.use_prefix_grouper",
        "model.layout",
        NO_PADDING,
        ignore,
    ),
    NameRow("peft_config", "model.lora", "a table, such as {rank: 16, alpha: 32.0}", by_hand),
    NameRow(
        f"lora_r r lora_rank ds.lora.rank {MODEL}.lora_rank {MODEL}.lora.rank model.lora_rank "
        "model.lora.r",
        "model.lora.rank",
        ADAPTERS,
        to.of_lora,
    ),
    NameRow(
        f"lora_alpha ds.lora.alpha {MODEL}.lora_alpha {MODEL}.lora.alpha model.lora_alpha",
        "model.lora.alpha",
        "",
        to.of_lora,
    ),
    NameRow(
        f"lora_dropout ds.lora.dropout {MODEL}.lora.dropout",
        "model.lora.dropout",
        "",
        to.of_lora,
    ),
    NameRow(
        "target_modules lora_target lora_target_modules ds.lora.target_modules target_regex "
        f"{MODEL}.target_modules {MODEL}.lora.target_modules model.target_modules",
        "model.lora.targets",
        "",
        to.lora_targets,
    ),
    NameRow("use_dora", "model.lora.dora", "", to.of_lora),
    NameRow("use_rslora", "model.lora.rslora", "", to.of_lora),
    NameRow(
        "use_peft",
        "model.lora",
        "adapters are trained where a setting of model.lora is given, e.g. model.lora.rank=16",
        ignore,
    ),
    NameRow(
        "finetuning_type tuner_type train_type",
        "model.lora",
        "lora: set model.lora.rank; full: leave model.lora out; freeze: model.freeze",
        ValueTable({"lora": Converted(), "full": Converted()}),
    ),
    NameRow("load_in_4bit ds.load_in_4bit qlora", "model.load_in_4bit"),
    NameRow(
        "quantization_bit quant_bits",
        "model.load_in_4bit",
        "4 bits alone, by bitsandbytes",
        ValueTable({4: Converted({"model.load_in_4bit": True}), None: Converted()}),
    ),
    NameRow(
        "gradient_checkpointing activation_checkpointing enable_gradient_checkpointing "
        "actor.gradient_checkpointing_enable model.gradient_checkpointing_enable "
        f"{MODEL}.enable_gradient_checkpointing model.enable_gradient_checkpointing",
        "model.gradient_checkpointing",
    ),
    NameRow(
        "disable_gradient_checkpointing",
        "model.gradient_checkpointing",
        "the opposite",
        inverse,
    ),
    NameRow(
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
    NameRow(
        f"trust_remote_code {MODEL}.trust_remote_code model.trust_remote_code "
        "data.trust_remote_code",
        "model.trust_remote_code",
    ),
    NameRow(
        "freeze_prefix freeze_vit freeze_vision_tower actor.freeze_visual_encoder "
        f"{ACTOR}.freeze_vision_tower {MODEL}.lora.freeze_vision_model",
        "model.freeze",
        "true is model.freeze=[tower]",
        to.frozen("tower", "freeze_multi_modal_projector=projector", "freeze_aligner=projector"),
    ),
    NameRow(
        f"freeze_multi_modal_projector freeze_aligner {MODEL}.lora.freeze_vision_projection",
        "model.freeze",
        "true is model.freeze=[projector]",
        to.frozen("projector", "freeze_vision_tower=tower", "freeze_vit=tower"),
    ),
    NameRow(
        f"freeze_language_model freeze_llm {MODEL}.lora.freeze_language_model",
        "model.freeze",
        "true is model.freeze=[language]",
        to.frozen("language"),
    ),
    NameRow(
        "freeze_parameters freeze_trainable_modules",
        "model.freeze",
        "parts or prefixes of parameters' names that are not trained",
        by_hand,
    ),
    NameRow(
        "use_rollout_routing_replay router_replay_mode "
        f"{ACTOR}.router_replay.mode {ACTOR}.megatron.router_replay.mode "
        f"{ROLLOUT}.enable_rollout_routing_replay",
        "model.replay_routes",
        "true, or R3: the routes of generation; R2 replays the trainer's own, which needs nothing",
        ValueTable(
            {
                True: True,
                "r3": True,
                **dict.fromkeys((False, "disabled", "r2", None), Converted()),
            }
        ),
    ),
    NameRow(
        "ref_model ref_policy ref_pretrain ref.model_name_or_path ref_model_name_or_path",
        "reference",
        "null takes the model that training starts from",
    ),
    NameRow(
        "critic_pretrain critic.model.path critic.model_name_or_path critic_model_name_or_path "
        "reward_critic_model_name_or_path value_model",
        "critic.path",
        "empty takes model.path",
    ),
    NameRow("cost_critic_model_name_or_path", "cost_critic.path"),
    NameRow(
        "teacher_model teacher_model_name_or_path teacher_tokenizer_name_or_path "
        "distillation.teacher_models.teacher_model.model_path",
        "teacher.path",
        "its tokenizer is in the same folder",
    ),
    NameRow("teacher_model_revision", "teacher.revision"),
    NameRow("teacher_model_init_kwargs.{torch_dtype,dtype}", "teacher.dtype", "", to.DTYPES),
    NameRow(
        "teacher_model_server_url teacher_server_urls teacher_model_server",
        "teacher.url",
        "one address, of a server that returns prompt_logprobs, such as vLLM's",
    ),
)

DATA = (
    NameRow(
        " ".join(to.SOURCES),
        "data.sources",
        "files, folders or names on the hub; a name of another framework's registry is none; "
        "#1000 of ms-swift takes rows at random, and limit the first",
        to.sources,
    ),
    *(
        NameRow(f"trl:{name}", f"data.sources.{here}", "it belongs to a source", by_hand)
        for name, here in (("path", "path"), ("split", "split"), ("name", "subset"))
    ),
    NameRow("dataset_config subset", "data.sources.subset", "the only one gets it", to.of_a_source),
    NameRow(
        " ".join(to.OF_A_SOURCE["split"]),
        "data.sources.split",
        "the only one gets it; the split `train` is taken without it",
        to.of_a_source,
    ),
    NameRow(
        "dataset_probs prompt_data_probs interleave_probs interleave_prob data.dataset_probs "
        "data.prompt_probs",
        "data.sources.weight",
        "a weight for each source, with data.blend=sample",
        by_hand,
    ),
    NameRow(
        " ".join(to.OF_A_SOURCE["limit"]),
        "data.sources.limit",
        "most rows of each source, not of all together; the only one gets it",
        to.of_a_source,
    ),
    NameRow("pretrain_data", "ptx.data.sources", "supervised rows next to the rollouts", as_list),
    NameRow("pretrain_split", "ptx.data.sources.split", "it belongs to a source", by_hand),
    NameRow("pretrain_data_probs", "ptx.data.sources.weight", "a weight for each source", by_hand),
    NameRow("ptx_coef", "ptx.coef", "it needs ptx.data.sources"),
    NameRow(
        "eval_data eval_dataset val_dataset val_files eval.dataset data.val_files eval_file "
        "validation_file",
        "validation.sources eval.data.sources",
        "",
        as_list,
    ),
    NameRow(
        "eval_split dataset_test_split eval.split",
        "validation.sources.split eval.data.sources.split",
        "it belongs to a source",
        to.held_out_split,
    ),
    NameRow(
        "val_size split_dataset_ratio test_split_size",
        "validation.sources eval.data.sources",
        "a share of the training rows there; here name a file of rows that are not trained",
        by_hand,
    ),
    NameRow(
        "max_eval_samples eval_limit data.val_max_samples val_dataset_sample",
        "eval.limit",
        "prompts from the first on",
        positive,
    ),
    NameRow(
        "input_key prompt_key data.input_key data.prompt_key dataset_text_field "
        "data.multiturn.messages_key data.messages_key prompt_column columns.prompt",
        "data.columns.prompt",
    ),
    NameRow(
        "output_key data.output_key data.response_key columns.response",
        "data.columns.response",
    ),
    NameRow("label_key data.label_key", "data.columns.label"),
    NameRow("reference_key", "data.columns.reference"),
    NameRow(
        "data.reward_fn_key data.data_source_key",
        "data.columns.data_source",
        "the column that chooses the terms of a row in reward.per_source",
    ),
    NameRow("image_key images_key data.image_key", "data.columns.images"),
    NameRow("data.video_key video_key", "data.columns.videos"),
    NameRow("data.audio_key audio_key", "data.columns.audios"),
    NameRow("data.tools_key data.multiturn.tools_key", "data.columns.tools"),
    NameRow("chosen_key data.chosen_key columns.chosen", "data.columns.chosen"),
    NameRow("rejected_key data.rejected_key columns.rejected", "data.columns.rejected"),
    NameRow(
        "system system_prompt default_system task_instruction",
        "data.system system",
        "the message of rows that have none",
    ),
    NameRow("system_prompt_path", "data.system", "the text itself, not a file", by_hand),
    NameRow(
        "input_template data.input_template",
        "data.template",
        "{prompt} stands for the prompt, in place of {}",
        to.template,
    ),
    NameRow(
        "apply_chat_template data.apply_chat_template use_chat_template",
        "data.apply_chat_template",
    ),
    NameRow(
        "chat_template_kwargs data.apply_chat_template_kwargs",
        "data.chat_template_options",
    ),
    NameRow(
        "enable_thinking data.enable_thinking_default",
        "data.chat_template_options",
        "an argument of the chat template: data.chat_template_options.enable_thinking",
        lambda value, _: {"enable_thinking": value} if value is not None else Converted(),
    ),
    NameRow(
        "max_prompt_length prompt_max_len data.max_prompt_length",
        "data.max_prompt_tokens max_tokens",
        "tokens of the prompt, with its template and media",
        positive,
    ),
    NameRow(
        "max_length max_seq_length max_seq_len seq_len context_length max_len cutoff_len model_max_length data.max_length "
        "data.max_len max_model_len",
        "max_tokens",
        "tokens of a prompt with its response",
        positive,
    ),
    NameRow(
        "max_length max_seq_length max_seq_len seq_len context_length max_len cutoff_len model_max_length data.max_length "
        "data.max_len max_model_len",
        "data.max_prompt_tokens",
        "tokens of the prompt alone; sampling.max_new_tokens bounds the response",
        positive,
    ),
    NameRow(
        "filter_overlong_prompts data.filter_overlong_prompts",
        "data.overlong_prompts",
        "true is `drop`",
        ValueTable({True: "drop", False: Converted()}),
    ),
    NameRow(
        "truncation_strategy data.truncation truncation_mode",
        "data.overlong_prompts",
        "`drop`, `error` or `truncate`, which cuts the start of a prompt's last message",
        ValueTable(
            {
                "error": "error",
                "raise": "error",
                "delete": "drop",
                **dict.fromkeys(("left", "right", "middle", "keep_start", "keep_end"), "truncate"),
            }
        ),
    ),
    NameRow(
        "assistant_only_loss completion_only_loss",
        "data.loss_on",
        "true is `assistant`, false is `all`",
        ValueTable({True: "assistant", False: "all", None: Converted()}),
    ),
    NameRow(
        "train_on_prompt train_on_inputs pretrain_mode model.pretrain_mode_enable",
        "data.loss_on",
        "true is `all`",
        ValueTable({True: "all", False: Converted()}),
    ),
    NameRow(
        "loss_scale",
        "data.loss_on",
        "`default` is assistant, `all` is all; `last_round` is data.turns=last",
        ValueTable(
            {
                "default": Converted(),
                "all": "all",
                "last_round": Converted({"data.turns": "last"}),
            }
        ),
    ),
    NameRow("mask_history", "data.turns", "true is `last`", when("data.turns", "last")),
    NameRow(
        "multiturn data.multiturn",
        "data.turns",
        "conversations of several turns need no flag",
        ignore,
    ),
    NameRow(
        "shuffle_dataset data.shuffle dataset_shuffle train_dataloader_shuffle",
        "data.shuffle",
    ),
    NameRow("disable_shuffling", "data.shuffle", "the opposite", inverse),
    NameRow(
        "mix_strategy stopping_strategy",
        "data.blend",
        "",
        ValueTable(
            {
                "concat": "concat",
                **dict.fromkeys(("interleave_under", "first_exhausted"), "sample"),
                **dict.fromkeys(("interleave_over", "all_exhausted"), "sample_all"),
            }
        ),
    ),
    NameRow("max_pixels image_max_pixels video_max_pixels", "data.media.max_pixels"),
    NameRow("image_min_pixels video_min_pixels", "data.media.min_pixels"),
    NameRow("fps video_fps", "data.media.fps", "frames taken per second of video"),
    NameRow("video_maxlen fps_max_frames", "data.media.max_frames", "frames of one video"),
    NameRow("media_dir", "data.media.root"),
    NameRow(
        "tokenized_path cached_dataset cached_val_dataset",
        "data.token_cache",
        "a folder of this program's own; tokens of other programs are not read",
        by_hand,
    ),
    NameRow(
        "strict",
        "data.bad_rows",
        "true is `error`, false is `skip`",
        ValueTable({True: "error", False: "skip"}),
    ),
    NameRow("step_separator", "data.separator"),
    NameRow("placeholder_token", "data.placeholder"),
    NameRow(
        "train_on_last_step_only",
        "process_model.last_step_only",
    ),
)

SAMPLING = (
    NameRow(
        f"num_generations n_samples_per_prompt rollout.n_samples_per_prompt {ROLLOUT}.n rollout.n "
        "rloo_k num_return_sequences best_of_n num_samples num_sample_generations data.n_samples",
        "online.group_size samples rollout.group_size",
        "",
    ),
    NameRow(
        "eval_n_samples_per_prompt eval.n_samples_per_prompt num_generations_eval "
        f"{ROLLOUT}.val_kwargs.n eval.n",
        "eval.samples",
        "responses to one prompt of the eval set",
    ),
    NameRow(
        "rollout_batch_size rollout.batch_size",
        "rollout.prompts_per_step",
        "prompts of a step over all processes, each with its group of responses",
    ),
    NameRow(
        "data.train_batch_size data.gen_batch_size",
        "rollout.prompts_per_step batch_size",
        "prompts of a step over all processes (rows, in sft)",
    ),
    NameRow(
        "data.batch_size",
        "batch_size",
        "rows of an optimizer step over all processes",
    ),
    NameRow(
        "max_completion_length max_response_length max_new_tokens generate_max_len response_length "
        f"data.max_response_length rollout.max_new_tokens {ROLLOUT}.response_length "
        "rollout.response_length max_tokens",
        "sampling.max_new_tokens eval.sampling.max_new_tokens",
        "tokens of the response alone",
    ),
    NameRow(
        f"temperature rollout.temperature {ROLLOUT}.temperature sampling_temperature",
        "sampling.temperature eval.sampling.temperature",
    ),
    NameRow(f"top_p rollout.top_p {ROLLOUT}.top_p", "sampling.top_p eval.sampling.top_p"),
    NameRow(
        f"top_k {ROLLOUT}.top_k rollout.top_k",
        "sampling.top_k eval.sampling.top_k",
        "0 keeps all, as -1 and null do there",
        lambda value, _: value if isinstance(value, int) and value > 0 else 0,
    ),
    NameRow(
        "min_p",
        "sampling.min_p eval.sampling.min_p",
        "",
        lambda value, _: value or 0.0,
    ),
    NameRow("repetition_penalty", "sampling.repetition_penalty eval.sampling.repetition_penalty"),
    NameRow(
        f"do_sample {ROLLOUT}.do_sample rollout.do_sample",
        "sampling.temperature eval.sampling.temperature",
        "false is temperature 0, which rl refuses",
        ValueTable({True: Converted(), False: 0.0}),
    ),
    NameRow(
        "greedy_sampling",
        "sampling.temperature",
        "true is temperature 0",
        ValueTable({True: 0.0, False: Converted()}),
    ),
    NameRow(
        f"eval_temperature eval.temperature {ROLLOUT}.val_kwargs.temperature",
        "eval.sampling.temperature",
        "0 is greedy",
    ),
    NameRow(f"{ROLLOUT}.val_kwargs.top_p eval.top_p", "eval.sampling.top_p"),
    NameRow(
        f"{ROLLOUT}.val_kwargs.top_k eval.top_k",
        "eval.sampling.top_k",
        "0 keeps all, as -1 does there",
        lambda value, _: value if isinstance(value, int) and value > 0 else 0,
    ),
    NameRow(
        f"{ROLLOUT}.val_kwargs.do_sample",
        "eval.sampling.temperature",
        "false is temperature 0",
        ValueTable({True: Converted(), False: 0.0}),
    ),
    NameRow(
        "use_fire",
        "sampling.first_token_temperature",
        "a flag there; here the temperature itself turns it on",
        counted,
    ),
    NameRow(
        "first_token_temperature",
        "sampling.first_token_temperature",
        "LightRFT reads it with use_fire alone",
        lambda value, options: value if options.get("use_fire", True) else Converted(),
    ),
    NameRow("stop_words stop_token stop", "sampling.stop", "", as_list),
    NameRow("stop_token_id eos_token_ids", "sampling.stop_token_ids", "", as_list),
    NameRow(
        "vllm_guided_decoding_regex vllm_structured_outputs_regex structured_outputs_regex",
        "sampling.constraint.regex",
    ),
    NameRow(
        "dynamic_filtering dynamic_sampling dynamic_sample algo.dynamic_filtering_enable "
        "algorithm.filter_groups.enable filter_groups.enable",
        "algorithm.filters",
        "`zero_variance` drops groups of equal rewards",
        to.entropy_filter,
    ),
    NameRow(
        "dynamic_filtering_reward_range algo.dynamic_filtering_range",
        "algorithm.filters",
        "the mean reward of a group: {name: reward_bounds, options: {low: 0.01, high: 0.99}}",
        by_hand,
    ),
    NameRow(
        "algorithm.filter_groups algorithm.filter_groups.metric filter_groups",
        "algorithm.filters",
        "`zero_variance` compares the rewards of a group",
        ignore,
    ),
    NameRow(
        "max_resample_times algorithm.filter_groups.max_num_gen_batches",
        "rollout.max_rounds",
        "rounds of generation in a step, in which dropped groups are replaced",
        positive,
    ),
    NameRow(
        "num_remains_in_group",
        "rollout.select",
        "a function that keeps some responses of each group; docs/parts.md lists them",
        by_hand,
    ),
    NameRow(
        f"{ROLLOUT}.over_sample_rate vllm_generate_batch_size rollout.vllm_generate_batch_size",
        "rollout.oversample",
        "a factor: groups that are generated over groups that are needed",
        by_hand,
    ),
    NameRow(
        "partial_rollout train.partial_rollout_enable",
        "rollout.partial",
        "it needs rollout.max_tokens_per_step, or rollout.oversample above 1",
        by_hand,
    ),
    NameRow(
        "async_training async_train async_generate train.async_enable",
        "rollout.staleness",
        "true is 1: each step trains on responses of exactly one step before",
        ValueTable({True: 1, False: Converted()}),
    ),
    NameRow(
        "async_queue_size train.async_queue_size max_staleness trainer.v1.sampler."
        "max_off_policy_threshold",
        "rollout.staleness",
        "steps that generation runs ahead, exactly and not at most",
        by_hand,
    ),
    NameRow(
        f"max_num_seqs {ROLLOUT}.max_num_seqs vllm_max_num_seqs rollout.max_num_seqs max_batch_size",
        "engine.max_num_seqs",
        "responses that grow at once; it does not change the result",
    ),
    NameRow(
        f"gpu_memory_utilization vllm_gpu_memory_utilization vllm_gpu_util engine_mem_util "
        f"vllm.gpu_memory_utilization {ROLLOUT}.gpu_memory_utilization "
        "rollout.gpu_memory_utilization",
        "engine.gpu_memory_utilization",
        "for engine.kind=vllm; engine.max_cache_tokens bounds the cache of other engines, in tokens and "
        "not a share of it",
        to.of_vllm,
    ),
    NameRow(
        "vllm_tensor_parallel_size vllm.tensor_parallel_size tensor_parallel_size tp_size "
        f"engine_tp_size {ROLLOUT}.tensor_model_parallel_size rollout.tensor_model_parallel_size",
        "engine.tensor_parallel",
        "processes of the run that share a copy of the model in vLLM; it divides launch.processes",
        to.of_vllm,
    ),
    NameRow(
        "sglang_mem_fraction sglang_mem_fraction_static "
        f"{ROLLOUT}.max_num_batched_tokens rollout.max_num_batched_tokens",
        "engine.max_cache_tokens",
        "tokens of prompts and responses whose keys and values are in memory, not a share of it",
        by_hand,
    ),
    NameRow(
        f"engine_type infer_backend {ROLLOUT}.name rollout.name sampler_engine",
        "engine.kind",
        "`native` samples from the policy itself; vllm and sglang need their packages",
        ValueTable(
            {
                "vllm": "vllm",
                "sglang": "sglang",
                **dict.fromkeys(("hf", "huggingface", "pt", "transformers"), "native"),
            }
        ),
    ),
    NameRow("use_vllm vllm", "engine.kind", "true is `vllm`", when("engine.kind", "vllm")),
    NameRow(
        "vllm_mode",
        "engine.kind",
        "`colocate` is vllm, in the process of the run; `server` is http, with engine.url",
        ValueTable(
            {
                "colocate": Converted({"engine.kind": "vllm"}),
                "server": Converted({"engine.kind": "http"}),
            }
        ),
    ),
    NameRow(
        "vllm_server_base_url",
        "engine.url",
        "with engine.kind=http; started with --logprobs-mode processed_logprobs",
    ),
    NameRow("vllm_server_host vllm_server_port", "engine.url", "http://host:port", by_hand),
    NameRow("vllm_server_timeout request_timeout", "engine.deadline", "seconds"),
    NameRow(
        f"enforce_eager vllm.enforce_eager vllm_enforce_eager {ROLLOUT}.enforce_eager "
        "rollout.enforce_eager sglang_disable_cuda_graph",
        "engine.compile",
        "the opposite: false decodes without CUDA graphs",
        inverse,
    ),
    NameRow(
        f"quantization vllm_quantization {ROLLOUT}.quantization",
        "engine.quantization",
        "",
        ValueTable({"fp8": "fp8_per_channel", None: Converted()}),
    ),
    NameRow(
        "vllm_speculative_config",
        "engine.speculative",
        "for the native engine",
        by_hand,
    ),
    NameRow(
        f"enable_sleep vllm_enable_sleep vllm.enable_sleep vllm_enable_sleep_mode "
        "deepspeed_enable_sleep ds.enable_sleep enable_engine_sleep move_model_batches "
        f"offload_model offload_optimizer sleep_level {ROLLOUT}.free_cache_engine",
        "strategy.offload_during_generation",
        "it moves the trainer's weights and optimizer to host memory while responses grow",
        by_hand,
    ),
    NameRow(
        "disable_engine_sleep",
        "strategy.offload_during_generation",
        "the opposite",
        by_hand,
    ),
)
