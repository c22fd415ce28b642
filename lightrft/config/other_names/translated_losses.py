"""Options of other frameworks about the loss, by setting."""

from __future__ import annotations

from lightrft.config.other_names import conversions as to
from lightrft.config.other_names.rows import (
    Converted,
    NameRow,
    ValueTable,
    by_hand,
    counted,
    positive,
    when,
)
from lightrft.config.other_names.translated import (
    ACTOR,
)

ALGORITHM = (
    NameRow(
        "router_aux_loss_coef moe_aux_loss_coef aux_loss_coef actor.aux_loss_coef "
        "model.aux_loss_coef",
        "model.router_aux_loss_coef",
        "the coefficient of the load-balancing loss, here over all tokens of an optimizer step and "
        "not of each micro-batch",
        positive,
    ),
    NameRow(
        "advantage_estimator adv_estimator algorithm.adv_estimator algo.advantage.estimator",
        "algorithm.preset",
        "a preset sets loss, aggregation and KL too; algorithm.advantage.name alone replaces the "
        "advantage",
        to.ESTIMATES,
    ),
    NameRow(
        "loss loss_type pref_loss model.loss_type kto_loss_type rlhf_loss_type",
        "preference.losses",
        "",
        to.loss_type,
    ),
    NameRow("loss_type model.loss_type", "reward_model.losses", "", to.reward_loss),
    NameRow(
        "loss_type rlhf_loss_type",
        "algorithm.loss.name",
        "in TRL, an aggregation: grpo is algorithm.aggregation=sequence, bnpo and dapo are token, "
        "dr_grpo is constant; cispo, sapo and vespo are losses here too",
        to.loss_type,
    ),
    NameRow(
        f"policy_loss policy_loss_type actor.policy_loss_type {ACTOR}.policy_loss.loss_mode",
        "algorithm.loss.name",
        "gspo is algorithm.loss.ratio=sequence; clip_cov and kl_cov are algorithm.token_masks",
        to.VERL_LOSSES,
    ),
    NameRow("algorithm.name", "algorithm.preset"),
    NameRow(
        "use_gspo",
        "algorithm.preset",
        "true is algorithm=gspo",
        when("algorithm.preset", "gspo"),
    ),
    NameRow(
        "use_cpg_loss",
        "algorithm.preset",
        "true is algorithm=cpgd",
        when("algorithm.preset", "cpgd"),
    ),
    NameRow(
        f"loss_agg_mode actor.loss_agg_mode {ACTOR}.loss_agg_mode",
        "algorithm.aggregation",
        "over the global batch, not over a micro-batch",
        to.AGGREGATIONS,
    ),
    NameRow(
        f"{ACTOR}.loss_scale_factor",
        "algorithm.constant_length",
        "the divisor of the aggregation `constant`, in tokens",
    ),
    NameRow(
        "importance_sampling_level",
        "algorithm.loss.ratio",
        "",
        ValueTable({name: name for name in ("token", "sequence", "sequence_token")}),
    ),
    NameRow(
        f"epsilon clip_ratio {ACTOR}.clip_ratio algorithm.clip_ratio",
        "algorithm.loss.clip_low",
        "it sets the upper end too: algorithm.loss.clip_high",
        to.clip_range,
    ),
    NameRow(
        "eps_clip actor.eps_clip cliprange clip_eps",
        "algorithm.loss.clip_low",
        "it sets the upper end too: algorithm.loss.clip_high",
        to.clip_range,
    ),
    NameRow(f"clip_ratio_low {ACTOR}.clip_ratio_low", "algorithm.loss.clip_low"),
    NameRow(
        f"epsilon_high clip_ratio_high {ACTOR}.clip_ratio_high algorithm.clip_ratio_high",
        "algorithm.loss.clip_high",
        "",
        lambda value, _: Converted() if value is None else value,
    ),
    NameRow(
        "eps_clip_low_high actor.eps_clip_low_high",
        "algorithm.loss.clip_low algorithm.loss.clip_high",
        "two numbers: algorithm.loss.clip_low and algorithm.loss.clip_high",
        lambda value, options: to.clip_range(value, options) if value else Converted(),
    ),
    NameRow(
        f"dual_clip actor.dual_clip clip_ratio_c {ACTOR}.clip_ratio_c",
        "algorithm.loss.dual_clip",
    ),
    NameRow("delta", "algorithm.loss.ratio_cap", "the largest ratio before the clip"),
    NameRow(
        "sapo_temperature_pos sapo_temperature_neg tau_pos tau_neg "
        f"{ACTOR}.tau_pos {ACTOR}.tau_neg vespo_k_pos vespo_k_neg vespo_lambda_pos "
        f"vespo_lambda_neg {ACTOR}.policy_loss.dro_beta real_tau",
        "algorithm.loss.options",
        "an option of the loss, e.g. algorithm.loss.options.tau_pos; docs/parts.md lists them",
        by_hand,
    ),
    NameRow(
        "beta",
        "preference.beta distill.beta",
        "",
        to.kl_of_trl,
    ),
    NameRow(
        "beta",
        "algorithm.kl.coef",
        "with algorithm.kl.where=loss, or reward for RLOO; 0 takes no reference",
        to.kl_of_trl,
    ),
    NameRow("model.beta pref_beta", "preference.beta"),
    NameRow(
        "init_kl_coef algo.kl.init_coef",
        "algorithm.kl.coef",
        "in the reward, or in the loss with use_kl_loss: algorithm.kl.where",
        to.kl_of_openrlhf,
    ),
    NameRow(
        f"kl_loss_coef {ACTOR}.kl_loss_coef",
        "algorithm.kl.coef",
        "with algorithm.kl.where=loss",
        to.kl_in("loss", f"{ACTOR}.use_kl_loss", "use_kl_loss"),
    ),
    NameRow(
        "kl_coef algorithm.kl_ctrl.kl_coef",
        "algorithm.kl.coef",
        "with algorithm.kl.where=reward",
        to.kl_in("reward", "algorithm.use_kl_in_reward", "use_kl_in_reward", "kl_coef"),
    ),
    NameRow(
        f"use_kl_loss algo.kl.use_loss {ACTOR}.use_kl_loss",
        "algorithm.kl.where",
        "true is `loss`; the coefficient is algorithm.kl.coef",
        to.no_kl("loss", "use_kl_in_reward", "algorithm.use_kl_in_reward", *to.OPENRLHF_KL),
    ),
    NameRow(
        "use_kl_in_reward kl_in_reward algorithm.use_kl_in_reward",
        "algorithm.kl.where",
        "true is `reward`; the coefficient is algorithm.kl.coef",
        to.no_kl("reward", "use_kl_loss", f"{ACTOR}.use_kl_loss"),
    ),
    NameRow(
        "kl_estimator kl_loss_type kl_penalty algo.kl.estimator algorithm.kl_penalty "
        f"{ACTOR}.kl_loss_type",
        "algorithm.kl.estimator",
        "k1 (kl), k2 (mse), k3 (low_var_kl)",
        to.ESTIMATORS,
    ),
    NameRow(
        "use_kl_estimator_k3",
        "algorithm.kl.estimator",
        "true is k3",
        when("algorithm.kl.estimator", "k3"),
    ),
    NameRow(
        "use_bias_correction_kl algo.kl.unbiased_gradient",
        "algorithm.kl.weighted",
    ),
    NameRow(
        "kl_target target_kl algo.kl.target algorithm.kl_ctrl.target_kl",
        "algorithm.kl.target",
        "nats per response, the sum over its tokens; with algorithm.kl.controller=adaptive",
        lambda value, options: (
            Converted()
            if value is None or options.get("algorithm.kl_ctrl.type", "adaptive") != "adaptive"
            else Converted({"algorithm.kl.target": value, "algorithm.kl.controller": "adaptive"})
        ),
    ),
    NameRow(
        "kl_horizon algo.kl.horizon algorithm.kl_ctrl.horizon",
        "algorithm.kl.horizon",
        "responses",
        lambda value, options: (
            value if options.get("algorithm.kl_ctrl.type", "fixed") == "adaptive" else Converted()
        ),
    ),
    NameRow("algorithm.kl_ctrl.type", "algorithm.kl.controller"),
    NameRow(
        "sync_ref_model",
        "preference.reference.refresh_every algorithm.kl.refresh_every",
        "a flag there; here a number of steps above 0 turns it on",
        counted,
    ),
    NameRow(
        "ref_model_sync_steps",
        "preference.reference.refresh_every algorithm.kl.refresh_every",
        "steps; TRL reads it with sync_ref_model alone",
        lambda value, options: value if options.get("sync_ref_model") else Converted(),
    ),
    NameRow(
        "ref_model_mixup_alpha",
        "preference.reference.refresh_decay algorithm.kl.refresh_decay",
        "the weight of the old reference: 1 - alpha",
        lambda value, options: (
            round(1 - value, 12) if options.get("sync_ref_model") else Converted()
        ),
    ),
    NameRow(
        f"entropy_coeff entropy_coef ent_coef entropy_loss_coef actor.entropy_coef {ACTOR}.entropy_coeff",
        "algorithm.entropy.coef",
        "",
        lambda value, _: value or 0.0,
    ),
    NameRow(
        "use_adaptive_entropy entropy_target",
        "algorithm.entropy.target",
        "the entropy that the coefficient steers to",
        by_hand,
    ),
    NameRow(
        "entropy_coef_delta",
        "algorithm.entropy.rate",
        "the change of the coefficient in a step",
        by_hand,
    ),
    NameRow(
        "top_entropy_quantile high_entropy_token_ratio",
        "algorithm.token_masks",
        "`high_entropy`, whose option rho is the share of tokens that stay",
        to.masked,
    ),
    NameRow(
        f"{ACTOR}.policy_loss.clip_cov_ratio {ACTOR}.policy_loss.clip_cov_lb "
        f"{ACTOR}.policy_loss.clip_cov_ub {ACTOR}.policy_loss.kl_cov_ratio "
        f"{ACTOR}.policy_loss.ppo_kl_coef",
        "algorithm.token_masks",
        "an option of clip_cov or kl_cov",
        by_hand,
    ),
    NameRow("gamma algo.advantage.gamma algorithm.gamma", "algorithm.advantage.gamma", "per token"),
    NameRow(
        "lam lambd gae_lambda algo.advantage.lambd algorithm.lam",
        "algorithm.advantage.gae_lambda",
    ),
    NameRow(
        "scale_rewards",
        "algorithm.advantage.name",
        "`group` is grpo, `none` is group_mean, `batch` is lite_ppo",
        ValueTable(
            {
                **dict.fromkeys((True, "group"), "grpo"),
                **dict.fromkeys((False, "none"), "group_mean"),
                "batch": "lite_ppo",
            }
        ),
    ),
    NameRow(
        "norm_adv_by_std_in_grpo algorithm.norm_adv_by_std_in_grpo",
        "algorithm.advantage.name",
        "true is grpo, false is group_mean",
        ValueTable({True: Converted(), False: "group_mean"}),
    ),
    NameRow(
        "no_advantage_std_norm algo.advantage.no_std_norm",
        "algorithm.advantage.name",
        "true is group_mean",
        ValueTable({True: "group_mean", False: Converted()}),
    ),
    NameRow(
        "advantages_norm normalize_advantage normalize_advantages",
        "algorithm.advantage.normalize",
        "true is `batch`: over the trained tokens of the global batch",
        ValueTable({True: "batch", False: "none"}),
    ),
    NameRow(
        "advantage_clip",
        "algorithm.advantage.clip",
        "0 clips nothing",
        positive,
    ),
    NameRow(
        "whiten_rewards ppo_whiten_rewards ppo_score_norm reward.normalize_enable "
        "reward_running_norm normalize_reward",
        "algorithm.normalize.rewards",
        "`standard` takes off the running mean and divides by the deviation, `scale` divides alone",
        by_hand,
    ),
    NameRow(
        "normalize_reward reward.normalize_enable",
        "reward_model.normalize",
        "`center` or `scale`, by the training rows",
        by_hand,
    ),
    NameRow(
        "reward_running_norm_minus_mean",
        "algorithm.normalize.rewards",
        "`standard` takes the mean off, `scale` does not",
        by_hand,
    ),
    NameRow(
        "normalize_reward_for_critic",
        "algorithm.normalize.values",
        "the critic learns standardised returns",
    ),
    NameRow(
        "value_clip cliprange_value critic.value_clip critic.cliprange_value",
        "algorithm.value.clip",
    ),
    NameRow(
        "vllm_importance_sampling_correction enable_vllm_is_correction "
        "algo.advantage.is_correction_enable",
        "algorithm.importance_sampling",
        "`tis`",
        ValueTable({True: ["tis"], False: []}),
    ),
    NameRow(
        "vllm_importance_sampling_cap vllm_importance_sampling_clip_{max,min} "
        "vllm_importance_sampling_mode vllm_is_truncated_threshold vllm_is_correction_type "
        "algo.advantage.is_correction_{threshold,type,level,mode,gating} tis_imp_ratio_cap "
        "rollout_importance_sampling_mode rollout_importance_sampling_threshold "
        "algorithm.rollout_correction.rollout_{is,is_threshold,is_batch_normalize,rs,rs_threshold} "
        "off_policy_mask_threshold off_policy_sequence_mask_delta",
        "algorithm.importance_sampling",
        "tis, mis, icepop, opsm or sequence_mask, with their bounds as options",
        lambda value, _: Converted() if value is None else by_hand(value, _),
    ),
    NameRow(
        "algorithm.rollout_correction.bypass_mode",
        "algorithm.old_logprobs",
        "true is `rollout`: the sampler's log-probs are the old ones",
        ValueTable({True: "rollout", False: Converted(), None: Converted()}),
    ),
    NameRow(
        "freezing_actor_steps critic_warmup critic.freezing_steps trainer.critic_warmup",
        "critic.warmup_steps",
        "rollout steps that train the critic alone",
        lambda value, _: max(0, int(value or 0)),
    ),
    NameRow("threshold", "algorithm.lagrangian.costs", "it belongs to a cost", by_hand),
    NameRow("lambda_init", "algorithm.lagrangian.init"),
    NameRow("lambda_lr", "algorithm.lagrangian.lr"),
    NameRow("lambda_max", "algorithm.lagrangian.max"),
    NameRow("lambda_update_delay_steps", "algorithm.lagrangian.delay_steps"),
    NameRow("episode_cost_window_size", "algorithm.lagrangian.window"),
)

PREFERENCE = (
    NameRow(
        "simpo_gamma cpo_alpha rpo_alpha pref_ftx nll_loss_coef model.nll_loss_coef sft_alpha "
        "ftx_gamma tpo_alpha tpo_l_gamma loss_weights desirable_weight undesirable_weight "
        "desirable_loss_weight undesirable_loss_weight kto_chosen_weight kto_rejected_weight "
        "discopop_tau pref_bco_weight alpha",
        "preference.losses",
        "a weight or an option of a loss, e.g. preference.losses=[sigmoid, {name: sft, weight: "
        "0.1}]; docs/parts.md lists the options",
        lambda value, _: Converted() if value in (None, 0, 1.0) else by_hand(value, _),
    ),
    NameRow(
        "ipo model.ipo_enable",
        "preference.losses",
        "true is preference=ipo",
        ValueTable({True: ["ipo"], False: Converted()}),
    ),
    NameRow(
        "label_smoothing dpo_label_smoothing model.label_smoothing",
        "preference.label_smoothing",
    ),
    NameRow(
        "f_divergence_type",
        "preference.f_divergence.kind",
        "",
        ValueTable(
            {
                **{name: name for name in ("reverse_kl", "forward_kl", "js")},
                "js_divergence": "js",
                **dict.fromkeys(("alpha", "alpha_divergence"), "alpha"),
            }
        ),
    ),
    NameRow("f_alpha_divergence_coef", "preference.f_divergence.alpha", "", by_hand),
    NameRow("ld_alpha", "preference.ld_alpha"),
    NameRow("use_weighting", "preference.wpo"),
    NameRow(
        "precompute_ref_log_probs",
        "preference.reference.source",
        "true is `cached`",
        ValueTable({True: "cached", False: Converted()}),
    ),
    NameRow(
        "reference_free",
        "preference.reference.source",
        "true is `none`, for losses that need no reference",
        ValueTable({True: "none", False: Converted()}),
    ),
    NameRow("missing_eos_penalty", "online.missing_eos_penalty"),
    NameRow(
        "center_rewards_coefficient",
        "reward_model.losses",
        "the weight of a further loss, as in [bradley_terry, {name: centre, weight: 0.01}]",
        to.centre_loss,
    ),
    NameRow(
        "loss margin_loss model.margin_loss_enable margin",
        "reward_model.losses",
        "a loss or an option of one: bradley_terry, log_exp, centre; docs/parts.md lists them",
        lambda value, options: (
            Converted() if value in (None, False) else to.reward_loss(value, options)
        ),
    ),
    NameRow(
        "heads_types head_types scale_for_train",
        "reward_model.heads",
        "tables with a name and a kind; docs/verbs/rm.md has an example",
        by_hand,
    ),
    NameRow(
        "pooling_method",
        "reward_model.pooling",
        "",
        ValueTable({"attn": "attention", "attention": "attention", "last": "last", "mean": "mean"}),
    ),
    NameRow("probing_layer", "reward_model.layer"),
    NameRow("lmbda", "distill.on_policy", "the share of steps on sampled responses"),
    NameRow(
        "kd_coef",
        "distill.nll_coef",
        "it weights both terms there: a share c of the divergence is nll_coef = (1 - c) / c",
        lambda value, _: round((1 - value) / value, 9) if value else by_hand(value, _),
    ),
    NameRow("use_uld_loss use_extended_uld uld_use_hybrid_loss", "distill.kind", "`uld`", by_hand),
    NameRow("uld_crossentropy_weight", "distill.nll_coef"),
    NameRow(
        "uld_student_temperature uld_teacher_temperature teacher_temperature kd_temperature",
        "distill.temperature",
        "one temperature for both models",
    ),
    NameRow(
        "gkd_logits_topk loss_top_k teacher_top_k distillation_topk "
        "distillation.distillation_loss.topk",
        "distill.top_k",
        "tokens of the teacher that are compared; null compares all",
        positive,
    ),
    NameRow(
        "loss_add_tail distillation_add_tail add_tail_bucket",
        "distill.tail",
        "true is `bucket`, false is `renormalised`",
        ValueTable({True: Converted(), False: "renormalised"}),
    ),
    NameRow(
        "distillation_alpha distillation_mode distillation.distillation_loss.loss_mode",
        "distill.kind",
        "forward_kl, reverse_kl or jsd, whose mixture is distill.beta",
        by_hand,
    ),
    NameRow(
        "distillation_weight distillation.distillation_loss.distillation_loss_coef teacher_kl_coef",
        "algorithm.distill.coef",
        "with algorithm.distill.kind, next to rewards",
        by_hand,
    ),
    NameRow(
        "teacher_sync_steps",
        "distill.refresh_every",
        "optimizer steps; for a teacher that starts as the student",
    ),
    NameRow("teacher_update_rate", "distill.refresh_decay", "1 - rate", by_hand),
    NameRow(
        "teacher_prompt_template reprompt_template solution_template feedback_template",
        "distill.teacher_template",
        "with {prompt} and {any_column}",
        by_hand,
    ),
)
