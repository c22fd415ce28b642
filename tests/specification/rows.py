"""The rows of the specification's feature lists, and the tests that prove each.

``ROWS[section][row]`` lists tests as ``file::function``, below ``tests``.
"""

from __future__ import annotations

D, M, R = "unit/datasets/", "unit/models/", "unit/models/reward/"
NUMBERS = "numbers/test_public_losses.py::"
ADVANTAGES = "numbers/test_public_advantages.py::"
STRATEGY = "unit/compat/test_strategies.py::"
PROGRAMS = "specification/test_programs.py::"

LIGHTRFT_DATASETS = {
    "PromptDataset": (
        D + "test_prompt_dataset.py::test_a_prompt_carries_its_row",
        D + "test_prompt_dataset.py::test_the_last_answer_of_a_conversation_is_its_reference",
    ),
    "PromptDatasetVL": (
        D + "test_media_prompts.py::"
        "test_a_marker_an_openai_part_and_a_column_alone_give_the_same_prompt",
        D + "test_media_prompts.py::test_several_pictures_stand_where_their_markers_are",
        D + "test_media_prompts.py::"
        "test_chat_templates_that_take_strings_or_parts_alone_write_media_too",
    ),
    "SFTDataset": (
        D + "test_sft_dataset.py::test_without_chat_the_response_is_followed_by_eos_once",
        D + "test_sft_dataset.py::test_exactly_the_assistants_words_of_all_turns_are_learned",
        D + "test_sft_dataset.py::test_overlong_examples_are_dropped_cut_or_an_error",
    ),
    "SFTDatasetVL": (
        D + "test_media_sft.py::test_a_picture_of_the_question_belongs_to_the_prompt",
        D + "test_media_sft.py::test_pictures_of_later_turns_are_in_the_response_and_never_trained",
    ),
    "RankDatasetVL, RankDatasetAL": (
        D + "test_preference_formats.py::"
        "test_a_published_row_with_a_sound_or_a_film_keeps_it_in_the_prompt",
        "e2e/test_published_sets.py::"
        "test_rm_trains_on_a_local_copy_of_each_published_set_of_preferences",
    ),
    "GRMDataset": (
        D + "test_judgement_rows.py::"
        "test_both_orders_show_the_same_responses_and_have_opposite_labels",
        "e2e/test_published_sets.py::test_grm_trains_a_judge_on_a_local_copy_of_sets_of_media",
    ),
    "RFTDatasetVL": (
        D + "test_judgement_rows.py::test_media_of_the_request_stay_in_their_place",
        "unit/rewards/test_verdicts.py::test_a_verdict_is_read_from_its_place_and_never_guessed",
    ),
    "ProcessRewardDataset": (
        D
        + "test_process_dataset.py::test_a_separator_follows_each_step_and_marks_where_it_is_scored",
        D + "test_process_dataset.py::test_every_published_layout_is_read_without_settings",
    ),
    "MathReasoningDataset": (
        D + "test_published_benchmarks.py::test_competition_sets_are_read_as_they_are_published",
        D + "test_published_benchmarks.py::test_choices_of_gpqa_are_shuffled_by_seed_and_question",
    ),
    "handlers": (
        D + "test_preference_formats.py::test_pairs_of_sounds_become_verdicts_through_their_reader",
        D
        + "test_preferences.py::test_pictures_of_one_prompt_are_paired_unless_their_ranks_are_equal",
        D + "test_preferences.py::test_videos_of_one_prompt_are_paired",
        "specification/test_rows.py::test_every_source_of_lightrft_has_a_reader",
    ),
    "utils": (
        ADVANTAGES + "test_rows_are_padded_with_zeros_on_one_side",
        "unit/rewards/test_answers.py::test_choices_and_texts_are_found_by_their_own_rules",
    ),
}

LIGHTRFT_MODELS = {
    "ActorModality, MODALITY_PARAMETERS": (
        M + "test_actor_language.py::test_modalities_name_their_inputs",
        M + "test_actor_vl.py::test_what_a_loop_keeps_of_its_inputs_builds_a_call",
    ),
    "ActorLanguage, ActorText": (
        M + "test_actor_language.py::test_a_path_and_a_module_give_the_logprobs_of_the_actions",
        M + "test_actor_language.py::test_packed_rows_give_what_separate_rows_give",
        M + "test_actor_language.py::test_entropy_comes_with_the_output_when_asked_for",
        M + "test_actor_language.py::test_gradient_checkpointing_goes_on_and_off",
    ),
    "ActorVL": (
        PROGRAMS + "test_the_program_of_actor_vl_generates_and_scores",
        M + "test_actor_vl.py::test_grids_may_be_one_tensor_per_sample",
    ),
    "ActorAL": (
        PROGRAMS + "test_the_program_of_actor_al_takes_sound_by_both_names",
        M + "test_actor_al.py::test_sound_as_pixel_values_is_sound",
        M + "test_actor_al.py::test_clips_beyond_the_towers_window_are_cut",
    ),
    "process_sequences": (
        M + "test_actor_language.py::test_processed_sequences_follow_the_documented_rules",
        M + "test_actor_vl.py::test_generated_rows_get_the_documented_masks",
    ),
    "CriticLanguage, CriticVL": (
        M + "test_actor_language.py::test_the_critic_gives_values_of_the_states_before_actions",
        M + "test_actor_vl.py::test_the_critic_gives_values_of_the_states_before_actions",
    ),
    "ScalarRewardModelVL, ScalarRewardModelAL": (
        R + "test_media_rewards.py::test_the_vision_class_scores_pictures_and_videos",
        R + "test_media_rewards.py::test_the_audio_class_scores_sounds",
        R + "test_named_heads.py::test_a_published_model_scores_as_its_own_code_does",
        R + "test_positions.py::test_the_public_class_counts_as_lightrft_does",
        PROGRAMS + "test_a_reward_model_is_trained_by_both_candidates_in_one_call",
    ),
    "GenerativeRewardModelVL": (
        R + "test_media_rewards.py::"
        "test_the_generative_class_gives_logits_loss_and_text_as_transformers_does",
        PROGRAMS + "test_a_generative_reward_model_learns_judgements",
    ),
    "find_all_linear_modules": (
        M + "test_actor_vl.py::"
        "test_linear_modules_leave_out_the_tower_if_it_is_frozen_and_its_connector_always",
    ),
    "apply_lora_configuration": (
        M + "test_actor_vl.py::test_adapters_stay_out_of_the_tower_and_its_projector",
    ),
    "log_probs_from_logits": (
        NUMBERS + "test_log_probs_keep_the_dtype_of_half_precision_logits",
        "numbers/test_logprobs.py::test_logits_helpers_equal_enumeration",
    ),
    "reset_position_ids": (
        M + "test_actor_language.py::test_positions_restart_with_each_packed_sample",
    ),
    "entropy_from_logits": ("numbers/test_logprobs.py::test_logits_helpers_equal_enumeration",),
    "create_high_entropy_mask": (
        M + "test_actor_language.py::test_the_high_entropy_mask_keeps_the_top_share_of_each_row",
    ),
    "compute_approx_kl": (
        M + "test_actor_language.py::test_kl_estimates_follow_their_formulas_and_the_mask",
    ),
    "compute_reward": (M + "test_actor_language.py::test_the_reward_lands_on_the_last_action",),
    "masked_mean, unpacking_samples, pad_to_length": (
        M + "test_actor_language.py::test_masked_means_and_unpacking",
    ),
    "concatenated_forward": (
        PROGRAMS + "test_a_reward_model_is_trained_by_both_candidates_in_one_call",
    ),
    "AttentionPooling": (NUMBERS + "test_attention_pooling_is_the_attention_of_one_query",),
    "monkey patches": (
        M + "test_monkey_patch.py::"
        "test_two_ranks_with_half_of_each_row_give_the_logits_and_gradients_of_one_process",
    ),
    "GPTLMLoss": (NUMBERS + "test_the_language_model_loss_predicts_the_next_token",),
    "PolicyLoss": (
        NUMBERS + "test_the_policy_loss_is_the_mean_over_rows_of_the_mean_over_tokens",
        NUMBERS + "test_the_policy_loss_equals_lightrfts_own_numbers",
        NUMBERS + "test_only_tokens_of_the_entropy_mask_are_trained",
    ),
    "ValueLoss": (NUMBERS + "test_the_value_loss_is_half_the_larger_squared_error",),
    "PairWiseLoss, LogSigmoidLoss, LogExpLoss, HPSLoss": (
        NUMBERS + "test_the_losses_of_pairs_of_scores_equal_their_formulas",
    ),
    "DPOLoss": (NUMBERS + "test_the_dpo_loss_equals_dpo_cdpo_and_ipo",),
    "VanillaKTOLoss": (
        NUMBERS + "test_vanilla_kto_takes_the_kl_of_the_other_kind_and_no_gradient_through_it",
    ),
    "KTOLoss": (NUMBERS + "test_kto_weighs_both_kinds_around_the_kl_of_mismatched_pairs",),
    "KDLoss": (
        NUMBERS + "test_distillation_is_the_cross_entropy_of_the_student_under_the_teacher",
    ),
    "PRMLoss": (
        NUMBERS + "test_the_process_reward_loss_reads_logits_at_placeholders",
        NUMBERS + "test_soft_labels_are_probabilities_of_the_first_reward_token",
    ),
}

LIGHTRFT_STRATEGY = {
    "get_strategy, is_engine": (
        STRATEGY + "test_steps_are_those_of_adamw_over_mean_losses",
        STRATEGY + "test_an_engine_is_refused_with_the_ways_to_generate",
    ),
    "StrategyConfig": (STRATEGY + "test_options_keep_what_has_no_field",),
    "prepare_models_and_optimizers": (
        STRATEGY + "test_all_models_of_a_run_are_prepared_with_cosine_schedules",
    ),
    "setup_dataloader": (STRATEGY + "test_a_loader_shuffles_by_epoch_and_resumes_inside_one",),
    "save_ckpt, load_ckpt": (
        STRATEGY + "test_a_checkpoint_continues_bit_for_bit",
        STRATEGY + "test_old_checkpoints_are_removed_and_other_folders_stay",
    ),
    "collectives": (STRATEGY + "test_sums_over_one_process_are_the_numbers_themselves",),
    "FSDPV2Strategy": (
        "unit/strategy/test_fsdp2.py::"
        "test_every_cell_gives_the_losses_gradients_and_weights_of_one_process",
        "unit/strategy/test_fsdp2.py::test_a_checkpoint_of_any_cell_gives_back_its_weights",
    ),
    "DeepspeedStrategy": (
        "e2e/test_zero.py::"
        "test_every_stage_gives_the_numbers_of_one_process_and_goes_on_from_any_other",
    ),
    "FakeStrategy": (STRATEGY + "test_sums_over_one_process_are_the_numbers_themselves",),
    "vLLM": (
        "e2e/vllm/test_vllm_runs.py::test_a_run_trains_on_the_log_probs_that_vllm_sampled_from",
    ),
    "SGLang": (
        "e2e/test_sglang_engine.py::"
        "test_a_run_trains_on_the_weights_that_it_sent_and_leaves_no_copy",
        "e2e/test_sglang_engine.py::test_sleep_releases_memory_and_wake_resumes_it",
    ),
    "weight broadcast": (
        "unit/engines/test_weight_transport.py::"
        "test_buckets_of_any_size_bring_every_bit_and_none_is_larger",
    ),
    "Adam offloading": (
        "unit/strategy/test_single.py::"
        "test_optimizer_state_on_the_host_gives_the_same_numbers_bit_for_bit",
    ),
}

LIGHTRFT_TRAINER = {
    "group estimators": (ADVANTAGES + "test_a_baseline_of_the_group_equals_its_formula",),
    "gae": (ADVANTAGES + "test_gae_equals_its_recursion_with_and_without_padding",),
    "reinforce": (
        ADVANTAGES + "test_discounted_returns_are_sums_from_each_action_on",
        ADVANTAGES + "test_advantages_are_whitened_over_all_experiences",
    ),
    "reinforce_baseline": (
        ADVANTAGES + "test_the_baseline_of_reinforce_takes_no_discount_and_says_so",
    ),
    "cpgd": (ADVANTAGES + "test_cpgd_standardizes_the_outcome_rewards_of_the_experience",),
    "dynamic sampling": (
        ADVANTAGES + "test_dynamic_sampling_masks_groups_that_are_all_right_or_all_wrong",
        "e2e/test_rl.py::test_filtered_groups_are_replaced_up_to_the_exact_batch",
    ),
    "advantages_norm, advantage_clip": (
        ADVANTAGES + "test_advantages_are_standardized_over_actions_and_then_clipped",
    ),
    "reward_running_norm": (
        "unit/algorithms/test_running_stats.py::"
        "test_rewards_are_normalised_over_the_run_with_the_batch_included",
    ),
    "overlong_buffer": ("numbers/test_shaping.py::test_the_overlong_penalty_at_any_length",),
    "FixedKLController, AdaptiveKLController": (
        ADVANTAGES + "test_the_adaptive_controller_moves_by_at_most_a_fifth",
    ),
    "FIRE sampling": (
        "unit/engines/test_first_token.py::"
        "test_first_tokens_have_the_frequencies_of_the_hot_distribution",
    ),
    "NaiveReplayBuffer": (
        ADVANTAGES + "test_a_buffer_keeps_samples_without_padding_and_pads_batches_on_the_left",
        ADVANTAGES + "test_a_buffer_with_a_limit_drops_the_oldest_samples",
        ADVANTAGES + "test_advantages_of_a_buffer_are_normalized_over_actions",
    ),
    "NaiveReplayBufferVL, ExperienceVL": (
        ADVANTAGES + "test_media_follow_their_samples_through_a_buffer",
    ),
    "Experience, make_experience_batch": (
        ADVANTAGES + "test_packed_samples_stay_lists_of_rows",
        ADVANTAGES + "test_a_batch_moves_as_a_whole_and_can_be_pickled",
    ),
    "PPOTrainer, SPMDPPOTrainer": (
        PROGRAMS + "test_a_loop_of_ppo_over_these_names_raises_its_reward",
        "e2e/test_rl.py::test_every_preset_runs_and_leaves_a_whole_run_folder",
        "e2e/test_rl.py::test_reward_rises_and_a_wrong_sign_makes_it_fall",
    ),
    "PPOTrainerVL, SPMDPPOTrainerVL": (
        "e2e/test_media.py::"
        "test_a_run_on_rows_with_and_without_media_trains_and_keeps_what_people_see_of_them",
    ),
    "SRMTrainerVL, SRMTrainerAL": (
        "e2e/test_reward_model.py::"
        "test_a_run_learns_the_order_of_held_out_pairs_and_leaves_a_model_that_scores",
    ),
    "GRMTrainerVL": ("e2e/test_grm_runs.py::test_adapters_learn_judgements_of_media",),
    "pretraining data": (
        "e2e/test_roles.py::"
        "test_supervised_data_beside_the_rollouts_is_learned_and_its_place_is_saved",
    ),
}

LIGHTRFT_REST = {
    "blending_datasets": (
        D + "test_prompt_dataset.py::test_sampling_ends_with_the_first_source_and_keeps_the_shares",
        D + "test_open_source.py::test_every_container_gives_the_same_rows",
    ),
    "DistributedSampler": (
        D + "test_prompt_dataset.py::test_a_resumed_sampler_goes_on_as_if_never_stopped",
        STRATEGY + "test_a_loader_shuffles_by_epoch_and_resumes_inside_one",
    ),
    "processors rs, csft, iter_dpo": (
        "e2e/test_select.py::"
        "test_the_rewards_of_rows_are_those_of_the_responses_and_the_best_is_the_highest",
        "e2e/test_select.py::test_conditioned_rows_state_their_reward_in_the_prompt",
    ),
    "ds2hf, fsdp2hf": (
        "e2e/test_training_checkpoints.py::"
        "test_a_checkpoint_of_zero_loads_in_transformers_with_its_weights",
        "e2e/test_training_checkpoints.py::"
        "test_a_checkpoint_of_fsdp_loads_in_transformers_with_its_weights",
    ),
    "evaluation": ("e2e/test_eval.py::test_the_metrics_are_what_the_answers_say",),
    "options of the command line": (
        "unit/diagnostics/test_import_config.py::"
        "test_every_option_of_a_framework_is_translated_or_has_a_reason",
    ),
    "remote reward models": (
        "unit/serving/test_reward_service.py::"
        "test_lightrft_asks_with_queries_references_and_no_images",
    ),
    "example gsm8k_geo3k": (
        "e2e/test_gsm8k.py::test_fine_tuning_then_reinforcement_then_every_test_question_is_graded",
        D + "test_media_benchmarks.py::test_geometry3k_is_read_as_the_hub_has_it",
    ),
    "example r1_aqa": (
        D + "test_media_benchmarks.py::"
        "test_avqa_is_read_as_lightrft_prepares_it_whose_label_names_a_rule",
        "e2e/test_media_recipes.py::test_a_recipe_takes_a_step_on_rows_of_its_layout",
    ),
    "example grm_training, grm_vl_rl": (
        "e2e/test_grm_runs.py::test_two_processes_and_a_resumed_run_end_as_one_run_does",
    ),
    "example chat": (
        "e2e/test_chat.py::test_every_line_gets_an_answer_that_knows_what_was_said_before",
    ),
}

OPENRLHF_M = {
    "train_sft": ("e2e/test_sft.py::test_a_run_leaves_a_whole_folder_and_a_model_that_loads",),
    "train_rm": (
        "e2e/test_reward_model.py::"
        "test_scores_of_the_saved_model_are_normalised_over_the_held_out_rows",
        "e2e/test_reward_model.py::"
        "test_margins_are_read_and_a_row_without_one_is_refused_at_the_start",
    ),
    "train_dpo": (
        "e2e/test_preference.py::test_a_run_leaves_a_whole_folder_and_a_model_that_loads",
    ),
    "train_kto": ("e2e/test_preference.py::test_labelled_responses_are_trained_by_kto_and_bco",),
    "train_prm": (
        "e2e/test_process_reward_model.py::"
        "test_a_run_learns_to_find_wrong_steps_and_leaves_a_model_that_scores",
    ),
    "train_kd": ("e2e/test_distill.py::test_a_student_comes_near_to_its_teacher",),
    "train_ppo_ray": (
        "e2e/test_ray.py::"
        "test_a_killed_node_has_all_start_again_elsewhere_and_the_numbers_are_those_of_one_process",
    ),
    "batch_inference": (
        "e2e/test_generate.py::"
        "test_answers_come_in_the_order_of_the_prompts_whatever_the_order_they_end_in",
        "e2e/test_select.py::test_labelled_rows_are_read_by_kto_with_the_label_of_their_reward",
    ),
    "serve_rm": (
        "unit/serving/test_reward_service.py::"
        "test_get_reward_scores_rendered_texts_as_openrlhf_asks",
    ),
    "lora_combiner": (
        "e2e/test_merge.py::test_adapters_are_added_to_their_base_as_peft_does_in_float32",
    ),
    "interactive_chat": (
        "e2e/test_chat.py::test_clear_starts_anew",
        "e2e/test_chat.py::test_exit_leaves_and_what_follows_is_not_read",
    ),
    "rejection sampling, iterative DPO, conditional SFT": (
        "e2e/test_pipelines.py::test_a_recipe_runs_on_a_tiny_model",
    ),
    "get_llm_for_sequence_regression": (
        PROGRAMS + "test_a_vision_model_becomes_a_critic_or_a_reward_model",
        R + "test_other_layouts.py",
    ),
    "multimodal kits": (
        M + "multimodal/test_own_media.py::"
        "test_ids_and_log_probs_are_those_of_the_familys_processor_and_forward",
    ),
    "load_in_4bit": (
        "e2e/test_preference_modalities.py::"
        "test_weights_in_four_bits_train_adapters_that_resume_and_merge",
    ),
    "advantages": ("numbers/test_advantages.py",),
    "asynchronous training": (
        "e2e/test_asynchronous.py::test_generation_runs_while_the_policy_is_trained",
    ),
    "checkpoints and resume": (
        "e2e/test_resume.py::test_a_killed_run_ends_bit_for_bit_like_one_that_was_not",
    ),
    "math verifier": ("unit/rewards/test_rules.py::test_math_accepts",),
    "recipes of lmm-r1": (
        "e2e/test_media_recipes.py::test_a_recipe_takes_a_step_on_rows_of_its_layout",
    ),
}

ROWS = {
    "LightRFT datasets": LIGHTRFT_DATASETS,
    "LightRFT models": LIGHTRFT_MODELS,
    "LightRFT strategy": LIGHTRFT_STRATEGY,
    "LightRFT trainer": LIGHTRFT_TRAINER,
    "LightRFT utilities and examples": LIGHTRFT_REST,
    "OpenRLHF-M": OPENRLHF_M,
}
