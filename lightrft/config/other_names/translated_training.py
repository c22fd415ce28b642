"""Options of other frameworks about the loss, the optimizer steps and the run, by setting."""

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
from lightrft.config.other_names.translated import (
    ACTOR,
    MICRO,
    MODEL,
    ON_DEVICES,
    ROLLOUT,
    TOKENS,
)

ALGORITHM = (
    Row(
        "advantage_estimator adv_estimator algorithm.adv_estimator algo.advantage.estimator",
        "algorithm.preset",
        "a preset sets loss, aggregation and KL too; algorithm.advantage.name alone replaces the "
        "advantage",
        to.ESTIMATES,
    ),
    Row(
        "loss_type pref_loss model.loss_type kto_loss_type rlhf_loss_type",
        "preference.losses",
        "",
        to.loss_type,
    ),
    Row("loss_type model.loss_type", "reward_model.losses", "", to.reward_loss),
    Row(
        "loss_type rlhf_loss_type",
        "algorithm.loss.name",
        "in TRL, an aggregation: grpo is algorithm.aggregation=sequence, bnpo and dapo are token, "
        "dr_grpo is constant; cispo, sapo and vespo are losses here too",
        to.loss_type,
    ),
    Row(
        f"policy_loss policy_loss_type actor.policy_loss_type {ACTOR}.policy_loss.loss_mode",
        "algorithm.loss.name",
        "gspo is algorithm.loss.ratio=sequence; clip_cov and kl_cov are algorithm.token_masks",
        to.VERL_LOSSES,
    ),
    Row(
        "use_gspo",
        "algorithm.preset",
        "true is algorithm=gspo",
        when("algorithm.preset", "gspo"),
    ),
    Row(
        "use_cpg_loss",
        "algorithm.preset",
        "true is algorithm=cpgd",
        when("algorithm.preset", "cpgd"),
    ),
    Row(
        f"loss_agg_mode actor.loss_agg_mode {ACTOR}.loss_agg_mode",
        "algorithm.aggregation",
        "over the global batch, not over a micro-batch",
        to.AGGREGATIONS,
    ),
    Row(
        f"{ACTOR}.loss_scale_factor",
        "algorithm.constant_length",
        "the divisor of the aggregation `constant`, in tokens",
    ),
    Row(
        "importance_sampling_level",
        "algorithm.loss.ratio",
        "",
        Choice({name: name for name in ("token", "sequence", "sequence_token")}),
    ),
    Row(
        f"epsilon clip_ratio {ACTOR}.clip_ratio algorithm.clip_ratio",
        "algorithm.loss.clip_low",
        "it sets the upper end too: algorithm.loss.clip_high",
        to.clip_range,
    ),
    Row(
        "eps_clip actor.eps_clip cliprange",
        "algorithm.loss.clip_low",
        "it sets the upper end too: algorithm.loss.clip_high",
        to.clip_range,
    ),
    Row(f"clip_ratio_low {ACTOR}.clip_ratio_low", "algorithm.loss.clip_low"),
    Row(
        f"epsilon_high clip_ratio_high {ACTOR}.clip_ratio_high algorithm.clip_ratio_high",
        "algorithm.loss.clip_high",
        "",
        lambda value, _: Settings() if value is None else value,
    ),
    Row(
        "eps_clip_low_high actor.eps_clip_low_high",
        "algorithm.loss.clip_low algorithm.loss.clip_high",
        "two numbers: algorithm.loss.clip_low and algorithm.loss.clip_high",
        lambda value, options: to.clip_range(value, options) if value else Settings(),
    ),
    Row(
        f"dual_clip actor.dual_clip clip_ratio_c {ACTOR}.clip_ratio_c",
        "algorithm.loss.dual_clip",
    ),
    Row("delta", "algorithm.loss.ratio_cap", "the largest ratio before the clip"),
    Row(
        "sapo_temperature_pos sapo_temperature_neg tau_pos tau_neg "
        f"{ACTOR}.tau_pos {ACTOR}.tau_neg vespo_k_pos vespo_k_neg vespo_lambda_pos "
        f"vespo_lambda_neg {ACTOR}.policy_loss.dro_beta real_tau",
        "algorithm.loss.options",
        "an option of the loss, e.g. algorithm.loss.options.tau_pos; docs/parts.md lists them",
        by_hand,
    ),
    Row(
        "beta",
        "preference.beta distill.beta",
        "",
        to.kl_of_trl,
    ),
    Row(
        "beta",
        "algorithm.kl.coef",
        "with algorithm.kl.where=loss, or reward for RLOO; 0 takes no reference",
        to.kl_of_trl,
    ),
    Row("model.beta pref_beta", "preference.beta"),
    Row(
        "init_kl_coef algo.kl.init_coef",
        "algorithm.kl.coef",
        "in the reward, or in the loss with use_kl_loss: algorithm.kl.where",
        to.kl_of_openrlhf,
    ),
    Row(
        f"kl_loss_coef {ACTOR}.kl_loss_coef",
        "algorithm.kl.coef",
        "with algorithm.kl.where=loss",
        to.kl_in("loss", f"{ACTOR}.use_kl_loss", "use_kl_loss"),
    ),
    Row(
        "kl_coef algorithm.kl_ctrl.kl_coef",
        "algorithm.kl.coef",
        "with algorithm.kl.where=reward",
        to.kl_in("reward", "algorithm.use_kl_in_reward", "use_kl_in_reward", "kl_coef"),
    ),
    Row(
        f"use_kl_loss algo.kl.use_loss {ACTOR}.use_kl_loss",
        "algorithm.kl.where",
        "true is `loss`; the coefficient is algorithm.kl.coef",
        to.no_kl("loss", "use_kl_in_reward", "algorithm.use_kl_in_reward", *to.OPENRLHF_KL),
    ),
    Row(
        "use_kl_in_reward kl_in_reward algorithm.use_kl_in_reward",
        "algorithm.kl.where",
        "true is `reward`; the coefficient is algorithm.kl.coef",
        to.no_kl("reward", "use_kl_loss", f"{ACTOR}.use_kl_loss"),
    ),
    Row(
        "kl_estimator kl_loss_type kl_penalty algo.kl.estimator algorithm.kl_penalty "
        f"{ACTOR}.kl_loss_type",
        "algorithm.kl.estimator",
        "k1 (kl), k2 (mse), k3 (low_var_kl)",
        to.ESTIMATORS,
    ),
    Row(
        "use_kl_estimator_k3",
        "algorithm.kl.estimator",
        "true is k3",
        when("algorithm.kl.estimator", "k3"),
    ),
    Row(
        "use_bias_correction_kl algo.kl.unbiased_gradient",
        "algorithm.kl.weighted",
    ),
    Row(
        "kl_target algo.kl.target algorithm.kl_ctrl.target_kl",
        "algorithm.kl.target",
        "nats per response, the sum over its tokens; with algorithm.kl.controller=adaptive",
        lambda value, options: (
            Settings()
            if value is None or options.get("algorithm.kl_ctrl.type", "adaptive") != "adaptive"
            else Settings({"algorithm.kl.target": value, "algorithm.kl.controller": "adaptive"})
        ),
    ),
    Row(
        "kl_horizon algo.kl.horizon algorithm.kl_ctrl.horizon",
        "algorithm.kl.horizon",
        "responses",
        lambda value, options: (
            value if options.get("algorithm.kl_ctrl.type", "fixed") == "adaptive" else Settings()
        ),
    ),
    Row("algorithm.kl_ctrl.type", "algorithm.kl.controller"),
    Row(
        "sync_ref_model",
        "preference.reference.refresh_every algorithm.kl.refresh_every",
        "a flag there; here a number of steps above 0 turns it on",
        counted,
    ),
    Row(
        "ref_model_sync_steps",
        "preference.reference.refresh_every algorithm.kl.refresh_every",
        "steps; TRL reads it with sync_ref_model alone",
        lambda value, options: value if options.get("sync_ref_model") else Settings(),
    ),
    Row(
        "ref_model_mixup_alpha",
        "preference.reference.refresh_decay algorithm.kl.refresh_decay",
        "the weight of the old reference: 1 - alpha",
        lambda value, options: (
            round(1 - value, 12) if options.get("sync_ref_model") else Settings()
        ),
    ),
    Row(
        f"entropy_coeff entropy_coef entropy_loss_coef actor.entropy_coef {ACTOR}.entropy_coeff",
        "algorithm.entropy.coef",
        "",
        lambda value, _: value or 0.0,
    ),
    Row(
        "use_adaptive_entropy entropy_target",
        "algorithm.entropy.target",
        "the entropy that the coefficient steers to",
        by_hand,
    ),
    Row(
        "entropy_coef_delta",
        "algorithm.entropy.rate",
        "the change of the coefficient in a step",
        by_hand,
    ),
    Row(
        "top_entropy_quantile high_entropy_token_ratio",
        "algorithm.token_masks",
        "`high_entropy`, whose option rho is the share of tokens that stay",
        to.masked,
    ),
    Row(
        f"{ACTOR}.policy_loss.clip_cov_ratio {ACTOR}.policy_loss.clip_cov_lb "
        f"{ACTOR}.policy_loss.clip_cov_ub {ACTOR}.policy_loss.kl_cov_ratio "
        f"{ACTOR}.policy_loss.ppo_kl_coef",
        "algorithm.token_masks",
        "an option of clip_cov or kl_cov",
        by_hand,
    ),
    Row("gamma algo.advantage.gamma algorithm.gamma", "algorithm.advantage.gamma", "per token"),
    Row(
        "lam lambd gae_lambda algo.advantage.lambd algorithm.lam",
        "algorithm.advantage.gae_lambda",
    ),
    Row(
        "scale_rewards",
        "algorithm.advantage.name",
        "`group` is grpo, `none` is group_mean, `batch` is lite_ppo",
        Choice(
            {
                **dict.fromkeys((True, "group"), "grpo"),
                **dict.fromkeys((False, "none"), "group_mean"),
                "batch": "lite_ppo",
            }
        ),
    ),
    Row(
        "norm_adv_by_std_in_grpo algorithm.norm_adv_by_std_in_grpo",
        "algorithm.advantage.name",
        "true is grpo, false is group_mean",
        Choice({True: Settings(), False: "group_mean"}),
    ),
    Row(
        "no_advantage_std_norm algo.advantage.no_std_norm",
        "algorithm.advantage.name",
        "true is group_mean",
        Choice({True: "group_mean", False: Settings()}),
    ),
    Row(
        "advantages_norm normalize_advantage normalize_advantages",
        "algorithm.advantage.normalize",
        "true is `batch`: over the trained tokens of the global batch",
        Choice({True: "batch", False: "none"}),
    ),
    Row(
        "whiten_rewards ppo_whiten_rewards ppo_score_norm reward.normalize_enable "
        "reward_running_norm normalize_reward",
        "algorithm.normalize.rewards",
        "`standard` takes off the running mean and divides by the deviation, `scale` divides alone",
        by_hand,
    ),
    Row(
        "normalize_reward reward.normalize_enable",
        "reward_model.normalize",
        "`center` or `scale`, by the training rows",
        by_hand,
    ),
    Row(
        "reward_running_norm_minus_mean",
        "algorithm.normalize.rewards",
        "`standard` takes the mean off, `scale` does not",
        by_hand,
    ),
    Row(
        "normalize_reward_for_critic",
        "algorithm.normalize.values",
        "the critic learns standardised returns",
    ),
    Row(
        "value_clip cliprange_value critic.value_clip critic.cliprange_value",
        "algorithm.value.clip",
    ),
    Row(
        "vllm_importance_sampling_correction enable_vllm_is_correction "
        "algo.advantage.is_correction_enable",
        "algorithm.importance_sampling",
        "`tis`",
        Choice({True: ["tis"], False: []}),
    ),
    Row(
        "vllm_importance_sampling_cap vllm_importance_sampling_clip_{max,min} "
        "vllm_importance_sampling_mode vllm_is_truncated_threshold vllm_is_correction_type "
        "algo.advantage.is_correction_{threshold,type,level,mode,gating} tis_imp_ratio_cap "
        "rollout_importance_sampling_mode rollout_importance_sampling_threshold "
        "algorithm.rollout_correction.rollout_{is,is_threshold,is_batch_normalize,rs,rs_threshold} "
        "off_policy_mask_threshold off_policy_sequence_mask_delta",
        "algorithm.importance_sampling",
        "tis, mis, icepop, opsm or sequence_mask, with their bounds as options",
        lambda value, _: Settings() if value is None else by_hand(value, _),
    ),
    Row(
        "algorithm.rollout_correction.bypass_mode",
        "algorithm.old_logprobs",
        "true is `rollout`: the sampler's log-probs are the old ones",
        Choice({True: "rollout", False: Settings(), None: Settings()}),
    ),
    Row(
        "freezing_actor_steps critic_warmup critic.freezing_steps trainer.critic_warmup",
        "critic.warmup_steps",
        "rollout steps that train the critic alone",
        lambda value, _: max(0, int(value or 0)),
    ),
    Row("threshold", "algorithm.lagrangian.costs", "it belongs to a cost", by_hand),
    Row("lambda_init", "algorithm.lagrangian.init"),
    Row("lambda_lr", "algorithm.lagrangian.lr"),
    Row("lambda_max", "algorithm.lagrangian.max"),
    Row("lambda_update_delay_steps", "algorithm.lagrangian.delay_steps"),
    Row("episode_cost_window_size", "algorithm.lagrangian.window"),
)

PREFERENCE = (
    Row(
        "simpo_gamma cpo_alpha rpo_alpha pref_ftx nll_loss_coef model.nll_loss_coef sft_alpha "
        "ftx_gamma tpo_alpha tpo_l_gamma loss_weights desirable_weight undesirable_weight "
        "desirable_loss_weight undesirable_loss_weight kto_chosen_weight kto_rejected_weight "
        "discopop_tau pref_bco_weight alpha",
        "preference.losses",
        "a weight or an option of a loss, e.g. preference.losses=[sigmoid, {name: sft, weight: "
        "0.1}]; docs/parts.md lists the options",
        lambda value, _: Settings() if value in (None, 0, 1.0) else by_hand(value, _),
    ),
    Row(
        "ipo model.ipo_enable",
        "preference.losses",
        "true is preference=ipo",
        Choice({True: ["ipo"], False: Settings()}),
    ),
    Row(
        "label_smoothing dpo_label_smoothing model.label_smoothing",
        "preference.label_smoothing",
    ),
    Row(
        "f_divergence_type",
        "preference.f_divergence.kind",
        "",
        Choice(
            {
                **{name: name for name in ("reverse_kl", "forward_kl", "js")},
                "js_divergence": "js",
                **dict.fromkeys(("alpha", "alpha_divergence"), "alpha"),
            }
        ),
    ),
    Row("f_alpha_divergence_coef", "preference.f_divergence.alpha", "", by_hand),
    Row("ld_alpha", "preference.ld_alpha"),
    Row("use_weighting", "preference.wpo"),
    Row(
        "precompute_ref_log_probs",
        "preference.reference.source",
        "true is `cached`",
        Choice({True: "cached", False: Settings()}),
    ),
    Row(
        "reference_free",
        "preference.reference.source",
        "true is `none`, for losses that need no reference",
        Choice({True: "none", False: Settings()}),
    ),
    Row("missing_eos_penalty", "online.missing_eos_penalty"),
    Row(
        "loss margin_loss center_rewards_coefficient model.margin_loss_enable margin",
        "reward_model.losses",
        "a loss or an option of one: bradley_terry, log_exp, centre; docs/parts.md lists them",
        lambda value, options: (
            Settings() if value in (None, False) else to.reward_loss(value, options)
        ),
    ),
    Row(
        "heads_types head_types scale_for_train",
        "reward_model.heads",
        "tables with a name and a kind; docs/verbs/rm.md has an example",
        by_hand,
    ),
    Row(
        "pooling_method",
        "reward_model.pooling",
        "",
        Choice({"attn": "attention", "attention": "attention", "last": "last", "mean": "mean"}),
    ),
    Row("probing_layer", "reward_model.layer"),
    Row("lmbda", "distill.on_policy", "the share of steps on sampled responses"),
    Row(
        "kd_coef",
        "distill.nll_coef",
        "it weights both terms there: a share c of the divergence is nll_coef = (1 - c) / c",
        lambda value, _: round((1 - value) / value, 9) if value else by_hand(value, _),
    ),
    Row("use_uld_loss use_extended_uld uld_use_hybrid_loss", "distill.kind", "`uld`", by_hand),
    Row("uld_crossentropy_weight", "distill.nll_coef"),
    Row(
        "uld_student_temperature uld_teacher_temperature teacher_temperature kd_temperature",
        "distill.temperature",
        "one temperature for both models",
    ),
    Row(
        "gkd_logits_topk loss_top_k teacher_top_k distillation_topk "
        "distillation.distillation_loss.topk",
        "distill.top_k",
        "tokens of the teacher that are compared; null compares all",
        positive,
    ),
    Row(
        "loss_add_tail distillation_add_tail add_tail_bucket",
        "distill.tail",
        "true is `bucket`, false is `renormalised`",
        Choice({True: Settings(), False: "renormalised"}),
    ),
    Row(
        "distillation_alpha distillation_mode distillation.distillation_loss.loss_mode",
        "distill.kind",
        "forward_kl, reverse_kl or jsd, whose mixture is distill.beta",
        by_hand,
    ),
    Row(
        "distillation_weight distillation.distillation_loss.distillation_loss_coef teacher_kl_coef",
        "algorithm.distill.coef",
        "with algorithm.distill.kind, next to rewards",
        by_hand,
    ),
    Row(
        "teacher_sync_steps",
        "distill.refresh_every",
        "optimizer steps; for a teacher that starts as the student",
    ),
    Row("teacher_update_rate", "distill.refresh_decay", "1 - rate", by_hand),
    Row(
        "teacher_prompt_template reprompt_template solution_template feedback_template",
        "distill.teacher_template",
        "with {prompt} and {any_column}",
        by_hand,
    ),
)

STEPS = (
    Row(
        "num_train_epochs num_epochs total_epochs trainer.total_epochs epochs",
        "train.epochs",
        "",
        positive,
    ),
    Row(
        "num_episodes train.num_episodes",
        "train.epochs",
        "passes over the prompts",
    ),
    Row(
        "max_epochs train.max_epochs",
        "train.ppo_epochs",
        "passes over each rollout batch, not over the data",
    ),
    Row("max_epochs train.max_epochs", "train.epochs"),
    Row(
        "max_steps train_iters",
        "train.steps",
        "rollout steps in rl, where one may hold several optimizer steps; else optimizer steps",
        positive,
    ),
    Row(
        "total_training_steps trainer.total_training_steps",
        "train.steps",
        "rollout steps in rl; else optimizer steps",
        positive,
    ),
    Row(
        "total_episodes",
        "train.steps",
        "responses there; here rollout steps of prompts_per_step x group_size responses",
        by_hand,
    ),
    Row(
        f"num_iterations num_ppo_epochs ppo_epochs {ACTOR}.ppo_epochs",
        "train.ppo_epochs",
        "passes over each rollout batch",
    ),
    Row(
        "num_mini_batches",
        "train.num_mini_batches",
        "optimizer steps of a pass over a rollout batch",
    ),
    Row(
        f"ppo_mini_batch_size {ACTOR}.ppo_mini_batch_size",
        "train.num_mini_batches",
        "a size in prompts there, and a count of optimizer steps here: "
        "data.train_batch_size / ppo_mini_batch_size",
        to.mini_batches_of("data.train_batch_size"),
    ),
    Row(
        "mini_batch_size local_mini_batch_size",
        "train.num_mini_batches",
        "a size there, and a count of optimizer steps here: rows of a step / mini_batch_size",
        by_hand,
    ),
    Row(
        "steps_per_generation",
        "train.num_mini_batches",
        "micro-batches of a generation there, and a count of optimizer steps here: "
        "steps_per_generation / gradient_accumulation_steps",
        counted,
    ),
    Row(
        "generation_batch_size",
        "rollout.prompts_per_step",
        "responses over all processes there, and prompts here: generation_batch_size / "
        "num_generations",
        counted,
    ),
    Row(
        "train_batch_size train.batch_size",
        "batch_size",
        "rows of an optimizer step over all processes",
        to.responses_of_mini_batch,
    ),
    Row(
        "train_batch_size train.batch_size",
        "train.num_mini_batches",
        "responses of an optimizer step there, and a count of optimizer steps here: "
        "rollout_batch_size x n_samples_per_prompt / train_batch_size",
        to.responses_of_mini_batch,
    ),
    Row("global_batch_size", "batch_size", "rows of an optimizer step over all processes"),
    Row(
        "global_batch_size",
        "rollout.prompts_per_step",
        "responses there, and prompts here: global_batch_size / num_generations",
        by_hand,
    ),
    Row(
        "per_device_train_batch_size",
        "batch_size",
        "rows of one device and forward pass there, and of an optimizer step here: "
        "per_device_train_batch_size x processes x gradient_accumulation_steps",
        to.device_batch,
    ),
    Row(
        "per_device_train_batch_size",
        "rollout.prompts_per_step",
        "responses of one device and forward pass there, and prompts of a step here: "
        "per_device_train_batch_size x processes x steps_per_generation / num_generations",
        to.device_batch,
    ),
    Row(
        "gradient_accumulation_steps",
        "batch_size",
        "a factor there, and the product here: per_device_train_batch_size x processes x "
        "gradient_accumulation_steps; train.max_tokens_per_micro_batch bounds memory, in tokens",
        counted,
    ),
    Row(
        "gradient_accumulation_steps",
        "rollout.prompts_per_step",
        "a factor there, and the product here: per_device_train_batch_size x processes x "
        "gradient_accumulation_steps / num_generations; train.max_tokens_per_micro_batch bounds "
        "memory, in tokens",
        counted,
    ),
    Row(
        "micro_train_batch_size micro_batch_size train.micro_batch_size ppo_micro_batch_size "
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
    Row(
        "ppo_max_token_len_per_gpu train_max_tokens_per_gpu rollout_max_tokens_per_gpu "
        f"train.max_tokens_per_gpu rollout.max_tokens_per_gpu {ACTOR}.ppo_max_token_len_per_gpu "
        "critic.ppo_max_token_len_per_gpu critic.forward_max_token_len_per_gpu "
        f"{ROLLOUT}.log_prob_max_token_len_per_gpu "
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu data.max_token_len_per_gpu "
        "token_budget",
        "train.max_tokens_per_micro_batch",
        TOKENS,
    ),
    Row(
        "use_dynamic_bsz use_dynamic_batch train.dynamic_batch_enable data.use_dynamic_bsz "
        f"{ACTOR}.use_dynamic_bsz critic.use_dynamic_bsz {ROLLOUT}.log_prob_use_dynamic_bsz "
        "actor_rollout_ref.ref.log_prob_use_dynamic_bsz reward_model.use_dynamic_bsz "
        "data.balance_dp_token auto_find_batch_size trainer.balance_batch data_sharding "
        "sequence_packing_scheduler",
        "train.max_tokens_per_micro_batch",
        "micro-batches always hold so many tokens, evenly over processes",
        ignore,
    ),
    Row(
        "learning_rate actor_learning_rate lr optim.lr adam.lr actor.adam.lr "
        f"{ACTOR}.optim.lr train_learning_rate",
        "optimizer.lr",
    ),
    Row("critic_learning_rate critic.optim.lr critic.adam.lr critic_lr", "critic.optimizer.lr"),
    Row("vit_lr aligner_lr", "optimizer.lr_of", "optimizer.lr_of.tower or .projector", by_hand),
    Row(
        "adam_betas adam_beta1 adam_beta2 adam.betas actor.adam.betas optim.betas "
        f"{ACTOR}.optim.betas",
        "optimizer.betas",
        "both numbers",
        to.betas,
    ),
    Row("critic.optim.betas critic.adam.betas", "critic.optimizer.betas", "", to.betas),
    Row(f"adam_epsilon adam_eps adam.eps actor.adam.eps {ACTOR}.optim.eps", "optimizer.eps"),
    Row("critic.optim.eps critic.adam.eps", "critic.optimizer.eps"),
    Row(
        "weight_decay l2 adam.weight_decay actor.adam.weight_decay optim.weight_decay "
        f"{ACTOR}.optim.weight_decay",
        "optimizer.weight_decay",
    ),
    Row("critic.optim.weight_decay critic.adam.weight_decay", "critic.optimizer.weight_decay"),
    Row(
        f"max_grad_norm max_norm grad_clip clip_grad {ACTOR}.grad_clip {ACTOR}.optim.clip_grad "
        "optim.clip_grad actor.max_norm model.max_norm",
        "optimizer.max_grad_norm",
        "",
        lambda value, _: value or None,
    ),
    Row(
        "critic.grad_clip critic.optim.clip_grad critic.max_norm", "critic.optimizer.max_grad_norm"
    ),
    Row(
        "lr_scheduler_type lr_scheduler lr_decay_style optim.lr_scheduler warmup_style "
        f"{ACTOR}.optim.lr_scheduler_type {ACTOR}.optim.lr_decay_style "
        f"{ACTOR}.optim.warmup_style actor.lr_scheduler model.lr_scheduler",
        "optimizer.schedule",
        "constant, linear or cosine, after the warm-up",
        to.SCHEDULES,
    ),
    Row(
        "critic.optim.lr_scheduler_type critic.optim.lr_decay_style critic.optim.warmup_style "
        "critic.lr_scheduler",
        "critic.optimizer.schedule",
        "",
        to.SCHEDULES,
    ),
    Row(
        "warmup_ratio lr_warmup_ratio lr_warmup_fraction lr_warmup_steps_ratio "
        f"optim.lr_warmup_steps_ratio {ACTOR}.optim.lr_warmup_steps_ratio actor.lr_warmup_ratio "
        "model.lr_warmup_ratio",
        "optimizer.warmup_ratio",
        "a share of all optimizer steps",
        positive,
    ),
    Row(
        "critic.optim.lr_warmup_steps_ratio critic.lr_warmup_ratio",
        "critic.optimizer.warmup_ratio",
        "a share of all optimizer steps",
        positive,
    ),
    Row(
        f"warmup_steps lr_warmup_steps lr_warmup_iters {ACTOR}.optim.lr_warmup_steps",
        "optimizer.warmup_steps",
        "optimizer steps; a number below 1 is optimizer.warmup_ratio",
        to.share_of_steps,
    ),
    Row("critic.optim.lr_warmup_steps", "critic.optimizer.warmup_steps", "", positive),
    Row(
        f"min_lr_ratio lr_scheduler_kwargs.min_lr_rate {ACTOR}.optim.min_lr_ratio actor."
        f"min_lr_ratio model.min_lr_ratio",
        "optimizer.min_lr_ratio",
        "a share of the peak learning rate",
        lambda value, _: value or 0.0,
    ),
    Row(
        "critic.optim.min_lr_ratio critic.min_lr_ratio",
        "critic.optimizer.min_lr_ratio",
        "",
        lambda value, _: value or 0.0,
    ),
    Row(
        f"min_lr lr_min {ACTOR}.optim.min_lr {ACTOR}.optim.lr_min lr_scheduler_kwargs.min_lr",
        "optimizer.min_lr_ratio",
        "a learning rate there, and a share of the peak here",
        lambda value, options: (
            value / options["lr"] if value and options.get("lr") else by_hand(value, options)
        ),
    ),
    Row("neftune_noise_alpha", "neftune_alpha", "", lambda value, _: value or 0.0),
)

PLACES = (
    Row(
        "zero_stage ds.zero_stage",
        "strategy.zero_stage",
        "with strategy.kind=deepspeed",
        lambda value, _: Settings({"strategy.kind": "deepspeed", "strategy.zero_stage": value}),
    ),
    Row(
        "deepspeed",
        "strategy.kind",
        "`deepspeed` with strategy.zero_stage; strategy.deepspeed takes further keys of its file",
        lambda value, options: Settings() if value in (None, "") else by_hand(value, options),
    ),
    Row(
        f"fsdp strategy {ACTOR}.strategy actor.strategy critic.strategy model.strategy "
        "actor_rollout_ref.ref.strategy reward_model.strategy "
        f"{ACTOR}.fsdp_config.strategy",
        "strategy.kind",
        "`fsdp2`, which several processes take by themselves",
        ignore,
    ),
    Row(
        "adam_offload ds.adam_offload fsdp_cpu_offload param_offload optimizer_offload "
        f"optimizer_cpu_offload {ACTOR}.fsdp_config.param_offload "
        f"{ACTOR}.fsdp_config.optimizer_offload {ACTOR}.fsdp_config.offload_policy "
        "model.fsdp_config.cpu_offload model.fsdp_config.offload_params",
        "strategy.cpu_offload",
        "weights and optimizer together, and the optimizer steps on the CPU; for FSDP2",
        Choice({False: Settings(), None: Settings()}),
    ),
    Row(
        f"activation_offloading {MODEL}.enable_activation_offload "
        "critic.model.enable_activation_offload",
        "strategy.offload_activations",
    ),
    Row(
        f"{ACTOR}.fsdp_config.reshard_after_forward",
        "strategy.reshard_after_forward",
    ),
    Row(
        f"{ACTOR}.fsdp_config.fsdp_size actor.fsdp_config.fsdp_size zpg ds.zpg "
        "zero_hpz_partition_size",
        "strategy.hsdp_shard_size",
        "processes that share one copy of the weights; for FSDP2",
        lambda value, _: value if value and value > 1 else Settings(),
    ),
    Row(
        "ring_attn_size ds.ring_attn_size sp_size sequence_parallel_size "
        "ulysses_sequence_parallel_size context_parallel_size "
        f"{ACTOR}.ulysses_sequence_parallel_size actor.ulysses_sequence_parallel_size "
        f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size "
        "hyper_parallel_cp_size",
        "strategy.sequence_parallel",
        "processes that share the tokens of a micro-batch; it divides the processes",
    ),
    Row(
        "ds_tensor_parallel_size ds.tensor_parallel_size deepspeed_autotp_size "
        "tensor_model_parallel_size",
        "strategy.tensor_parallel",
        "processes that share each layer in training; it divides the processes",
    ),
    Row(
        "ddp_timeout",
        "strategy.timeout_minutes",
        "minutes, not seconds",
        lambda value, _: max(1, round(value / 60)),
    ),
    Row(
        "actor_rollout_ref.nccl_timeout critic.nccl_timeout reward_model.nccl_timeout",
        "strategy.timeout_minutes",
        "minutes, not seconds",
        lambda value, _: max(1, round(value / 60)),
    ),
    Row(
        "n_gpus_per_node nproc_per_node num_processes trainer.n_gpus_per_node",
        "launch.processes",
        ON_DEVICES,
        to.processes,
    ),
    Row(
        "actor_num_gpus_per_node actor.num_gpus_per_node",
        "launch.processes",
        ON_DEVICES + "; with launch.kind=ray, the ranks of all nodes",
        to.processes,
    ),
    Row(
        "nnodes trainer.nnodes actor_num_nodes actor.num_nodes",
        "launch.processes",
        "processes of all nodes: nodes x processes of a node, with launch.kind=ray or torchrun",
        lambda value, options: Settings() if value == 1 else to.processes(value, options),
    ),
    Row(
        "use_ray",
        "launch.kind",
        "true is `ray`",
        when("launch.kind", "ray"),
    ),
    Row(
        "vllm_num_engines vllm.num_engines",
        "launch.ray.engines",
        "with launch.kind=ray; 0 generates in the ranks",
        by_hand,
    ),
    Row(
        "ref_num_nodes ref_num_gpus_per_node ref.num_nodes ref.num_gpus_per_node",
        "launch.ray.references",
        "workers that each hold a copy, with launch.kind=ray; 0 holds it in the ranks",
        by_hand,
    ),
    Row(
        "reward_num_nodes reward_num_gpus_per_node reward.num_nodes reward.num_gpus_per_node "
        "reward_model.n_gpus_per_node reward_model.nnodes reward.reward_model.n_gpus_per_node "
        "reward.reward_model.nnodes reward_model.enable_resource_pool "
        "reward.reward_model.enable_resource_pool",
        "launch.ray.reward_models",
        "workers that each hold a copy, with launch.kind=ray; 0 holds them in the ranks",
        by_hand,
    ),
    Row(
        "distillation.n_gpus_per_node distillation.nnodes "
        "distillation.teacher_models.teacher_model.num_replicas",
        "launch.ray.teachers",
        "workers that each hold a copy, with launch.kind=ray; 0 holds it in the ranks",
        by_hand,
    ),
    Row("ray_init_kwargs.address", "launch.ray.address"),
    Row(
        "vllm_sync_backend vllm.sync_backend vllm_sync_with_ray vllm.sync_with_ray "
        f"{ROLLOUT}.checkpoint_engine.backend",
        "launch.ray.weights",
        "`broadcast`, `shared` or `message`",
        ignore,
    ),
    Row(
        f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes",
        "launch.ray.bucket_mb",
        "MiB; with launch.ray.engines",
        by_hand,
    ),
    Row("use_cpu", "strategy.device", "true is `cpu`", when("strategy.device", "cpu")),
    Row("trainer.device", "strategy.device", "", Choice({"cuda": "cuda", "cpu": "cpu"})),
)

RUN = (
    Row(
        "output_dir default_local_dir trainer.default_local_dir save_path ckpt_path "
        "ckpt.output_dir ckpt.path save export_dir",
        "run.dir output",
        "the run is the folder run.dir/run.name, with its model in model/",
        to.folder,
    ),
    Row(
        "run_name experiment_name trainer.experiment_name exp_name wandb_run_name "
        "logger.wandb.run_name wandb_exp_name",
        "run.name",
        "the name of the run's folder below run.dir",
        lambda value, options: (
            Settings()
            if not value or to.first(options, "output_dir", "save_path", "ckpt.output_dir")
            else str(value).replace("/", "-")
        ),
    ),
    Row("seed data_seed train.seed trainer.seed", "run.seed"),
    Row(
        "resume_from_checkpoint resume_mode trainer.resume_mode load_checkpoint ckpt.load_enable",
        "run.resume",
        "auto, never, or a path",
        to.resume,
    ),
    Row(
        "trainer.resume_from_path resume_from",
        "run.resume",
        "",
        lambda value, _: value or Settings(),
    ),
    Row("overwrite_output_dir", "run.overwrite"),
    Row("disable_tqdm", "run.progress", "the opposite", inverse),
    Row(
        "save_steps save_freq trainer.save_freq ckpt.save_steps",
        "checkpoint.every",
        "",
        to.every,
    ),
    Row(
        "save_strategy",
        "checkpoint.every",
        "`steps`, with its number",
        Choice({"steps": Settings(), "no": Settings()}),
    ),
    Row(
        "save_total_limit max_ckpt_num ckpt.max_num max_actor_ckpt_to_keep "
        "trainer.max_actor_ckpt_to_keep trainer.max_ckpt_to_keep",
        "checkpoint.keep",
        "newest checkpoints",
        positive,
    ),
    Row(
        "metric_for_best_model best_metric_key ckpt.best_metric_key load_best_model_at_end "
        "greater_is_better",
        "checkpoint.best",
        "a metric such as eval/accuracy; a minus in front takes the smallest",
        lambda value, options: (
            Settings() if value in (None, False, "", True) else by_hand(value, options)
        ),
    ),
    Row(
        "eval_steps eval.steps test_freq trainer.test_freq eval_iters",
        "eval.every",
        "",
        to.every,
    ),
    Row(
        "eval_strategy evaluation_strategy do_eval",
        "eval.every",
        "`steps`, with its number; it evaluates where the eval set has sources",
        Choice({"steps": Settings(), "no": Settings(), True: Settings(), False: Settings()}),
    ),
    Row("eval_on_start val_before_train trainer.val_before_train", "eval.at_start"),
    Row(
        "report_to log_with trainer.logger",
        "log.wandb log.tensorboard",
        "tensorboard is log.tensorboard, and wandb is log.wandb with the name of a project",
        to.trackers,
    ),
    Row(
        "use_tensorboard tensorboard_dir logger.tensorboard_dir",
        "log.tensorboard",
        "a flag; the files are in tensorboard/ of the run",
        lambda value, _: bool(value),
    ),
    Row(
        "use_wandb logger.wandb.key",
        "log.wandb",
        "the name of a project; the key is in WANDB_API_KEY",
        to.wandb,
    ),
    Row(
        "wandb_project project_name trainer.project_name logger.wandb.project",
        "log.wandb",
        "the name of a project, which turns it on",
        counted,
    ),
    Row(
        "log_completions log_completions_steps rollout_data_dir trainer.rollout_data_dir "
        "trainer.log_val_generations save_trajectories trainer.validation_data_dir "
        "num_trajectories_to_save",
        "log.rollouts_every",
        "steps; 1 writes the rollouts of each step, in rollouts/ of the run",
        ignore,
    ),
    Row("log_entropy actor_rollout_ref.actor.calculate_entropy", "log.entropy"),
)

MERGING = (
    Row("out_dtype", "dtype", "", to.DTYPES),
    Row("out_shard_size export_size max_shard_size", "max_shard_size"),
    Row("lambda", "scale"),
    Row("parameters.weight", "models.weight"),
    Row("parameters.density", "models.density"),
    Row("parameters.t", "t"),
    Row("parameters.normalize", "normalize"),
    Row("lora_path adapter_name_or_path adapters", "models", "folders of adapters", as_list),
    Row("post_processor", "select.keep", "best, correct, pairs, conditioned", by_hand),
    Row("enable_csft", "select.keep", "true is `conditioned`", by_hand),
    Row("csft_prompt reward_template", "select.condition.template"),
    Row("iter num_rounds", "rounds", "rounds in all, not the number of this one"),
    Row("output_path output_file result_path data.output_path", "output"),
    Row("port server_port", "http.port"),
    Row("host server_name", "http.host"),
    Row(
        "api_key",
        "http.token_file",
        "a file with the token, so that no command line holds it",
        by_hand,
    ),
    Row("served_model_name", "name"),
    Row("batch_size", "batch_size batching.max_tokens rollout.prompts_per_step"),
)
