"""Published algorithms as rows of settings, by the name in ``algorithm: <name>``."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from lightrft.verbs import VERBS, trains

SAFE_RLHF_MULTIPLIER: dict[str, object] = {
    "costs": [{"name": "cost", "threshold": 0.0}],
    "init": 1.0,
    "lr": 0.1,
    "max": 5.0,
    "delay_steps": 0,
    "window": 128,
}
"""Section ``lagrangian`` of the rows with a cost."""

PRESETS: dict[str, dict[str, object]] = {
    "grpo": {
        "advantage": {"name": "grpo"},
        "loss": {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2},
        "aggregation": "sequence",
        "kl": {"where": "loss", "estimator": "k3", "coef": 0.04},
    },
    "reinforce++": {
        "advantage": {"name": "reinforce", "gamma": 1.0, "normalize": "batch"},
        "loss": {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2},
        "aggregation": "token",
        "kl": {"where": "reward", "estimator": "k1", "coef": 0.01},
    },
    "reinforce++_baseline": {
        "advantage": {"name": "group_mean", "normalize": "batch"},
        "loss": {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2},
        "aggregation": "token",
        "kl": {"where": "loss", "estimator": "k2", "coef": 1e-5},
    },
    "rloo": {
        "advantage": {"name": "rloo"},
        "loss": {"name": "reinforce"},
        "aggregation": "sequence_sum",
        "kl": {"where": "reward", "estimator": "k1", "coef": 0.03},
    },
    "remax": {
        "advantage": {"name": "remax", "gamma": 0.99},
        "loss": {"name": "reinforce"},
        "aggregation": "sequence_sum",
        "kl": {"where": "reward", "estimator": "k1", "coef": 0.05},
    },
    "remax_released": {
        "advantage": {"name": "remax", "gamma": 0.99},
        "loss": {"name": "reinforce"},
        "aggregation": "token",
        "kl": {"where": "loss", "estimator": "k2", "coef": 0.05},
    },
    "opo": {
        "advantage": {"name": "opo"},
        "loss": {"name": "reinforce"},
        "aggregation": "sequence_sum",
    },
    "pass_at_k": {
        "advantage": {"name": "pass_at_k"},
        "loss": {"name": "reinforce"},
        "aggregation": "sequence_sum",
    },
    "maxrl": {
        "advantage": {"name": "maxrl"},
        "loss": {"name": "reinforce"},
        "aggregation": "sequence_sum",
    },
    "gpg": {
        "advantage": {"name": "gpg"},
        "loss": {"name": "reinforce"},
        "aggregation": "token",
    },
    "raft": {
        "advantage": {"name": "raft"},
        "loss": {"name": "reinforce"},
        "aggregation": "token",
    },
    "rft": {
        "advantage": {"name": "rft", "options": {"threshold": 1.0}},
        "loss": {"name": "reinforce"},
        "aggregation": "token",
    },
    "dr_grpo": {
        "advantage": {"name": "group_mean"},
        "loss": {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2},
        "aggregation": "constant",
    },
    "lite_ppo": {
        "advantage": {"name": "lite_ppo"},
        "loss": {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2},
        "aggregation": "token",
    },
    "gdpo": {
        "normalize": {"terms": "group"},
        "advantage": {"name": "batch_standard"},
        "loss": {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2},
        "aggregation": "sequence",
    },
    "vapo": {
        # The trace of the policy depends on the length of each response. That of the critic is 1.
        "advantage": {"name": "vapo", "gamma": 1.0, "options": {"alpha": 0.05, "lam_critic": 1.0}},
        "loss": {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.28},
        "aggregation": "token",
        "positive_nll": {"coef": 0.1},
    },
    "ppo": {
        "advantage": {"name": "gae", "gamma": 1.0, "gae_lambda": 0.95, "normalize": "batch"},
        "loss": {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2},
        "aggregation": "token",
        "kl": {"where": "reward", "estimator": "k1", "coef": 0.02},
        "value": {"clip": 0.2},
    },
    "ppo_lag": {
        "advantage": {"name": "gae", "gamma": 1.0, "gae_lambda": 0.95},
        "loss": {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2},
        "aggregation": "sequence",
        "kl": {"where": "reward", "estimator": "k1", "coef": 0.01},
        "value": {"clip": 5.0},
        "lagrangian": SAFE_RLHF_MULTIPLIER,
    },
    "grpo_lag": {
        "advantage": {"name": "grpo"},
        "loss": {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2},
        "aggregation": "sequence",
        "kl": {"where": "loss", "estimator": "k3", "coef": 0.04},
        "lagrangian": SAFE_RLHF_MULTIPLIER,
    },
    "reinforce": {
        "advantage": {"name": "reinforce", "gamma": 1.0},
        "loss": {"name": "reinforce"},
        "aggregation": "sequence_sum",
    },
    "dapo": {
        "advantage": {"name": "grpo"},
        "loss": {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.28},
        "aggregation": "token",
        "shaping": [{"name": "overlong", "options": {"buffer": 0.2}}],
        "filters": [{"name": "zero_variance", "options": {}}],
    },
    # The ratio of a sequence is the geometric mean over its tokens. It stays much nearer to 1 than
    # the ratio of a token, so the bounds are narrow, here and in the next two rows.
    "gspo": {
        "advantage": {"name": "grpo"},
        "loss": {"name": "ppo_clip", "ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4},
        "aggregation": "sequence",
    },
    "gspo_token": {
        "advantage": {"name": "grpo"},
        "loss": {
            "name": "ppo_clip",
            "ratio": "sequence_token",
            "clip_low": 3e-4,
            "clip_high": 4e-4,
        },
        "aggregation": "sequence",
    },
    "luspo": {
        "advantage": {"name": "grpo"},
        "loss": {"name": "ppo_clip", "ratio": "sequence", "clip_low": 2e-3, "clip_high": 2.5e-3},
        "aggregation": "sequence_sum",
    },
    "gmpo": {
        "advantage": {"name": "grpo"},
        "loss": {"name": "gmpo", "clip_low": 0.4, "clip_high": 0.4},
        "aggregation": "sequence",
    },
    "cispo": {
        "advantage": {"name": "grpo"},
        # 1 - 1 = 0 is below every ratio: there is no lower bound.
        "loss": {"name": "cispo", "clip_low": 1.0, "clip_high": 0.28},
        "aggregation": "token",
    },
    "cispo_cap": {
        "advantage": {"name": "lite_ppo"},
        "loss": {"name": "cispo_cap", "options": {"cap": 5.0}},
        "aggregation": "prompt",
    },
    "cpgd": {
        "advantage": {"name": "grpo"},
        "loss": {"name": "cpgd", "clip_low": 0.2, "clip_high": 0.2},
        "aggregation": "token",
        "policy_drift": {"coef": 0.01, "estimator": "k3", "cap": 2.0},
    },
    "sapo": {
        "advantage": {"name": "grpo"},
        "loss": {"name": "sapo", "options": {"tau_pos": 1.0, "tau_neg": 1.05}},
        "aggregation": "sequence",
    },
    "vespo": {
        "advantage": {"name": "grpo"},
        "loss": {
            "name": "vespo",
            "options": {"k_pos": 2.0, "lam_pos": 3.0, "k_neg": 3.0, "lam_neg": 2.0},
        },
        "old_logprobs": "rollout",
        "aggregation": "token",
    },
    "dppo": {
        "advantage": {"name": "group_mean"},
        "loss": {"name": "dppo", "options": {"low": 0.15, "high": 0.15}},
        "old_logprobs": "rollout",
        "aggregation": "constant",
    },
    "dppo_kl": {
        "advantage": {"name": "group_mean"},
        "loss": {"name": "dppo_kl", "options": {"low": 0.05, "high": 0.05}},
        "old_logprobs": "rollout",
        "aggregation": "constant",
    },
    "topr": {
        "advantage": {"name": "reinforce", "gamma": 1.0},
        "loss": {
            "name": "topr",
            "options": {"pos_low": 1.0, "pos_high": 1.0, "neg_low": 0.0, "neg_high": 1.0},
        },
        "old_logprobs": "rollout",
        "aggregation": "sequence_sum",
    },
    "kimi_k15": {
        "advantage": {"name": "group_mean"},
        "loss": {"name": "reinforce"},
        "aggregation": "sequence_sum",
        "policy_drift": {"coef": 0.1, "estimator": "k2", "level": "response"},
    },
    "otb": {
        "advantage": {"name": "otb", "eps": 1e-8, "options": {"zero_tail": True}},
        "loss": {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2},
        "aggregation": "token",
    },
    "m2po": {
        "advantage": {"name": "grpo"},
        "loss": {"name": "importance"},
        "old_logprobs": "rollout",
        "token_masks": [{"name": "m2po", "options": {"tau": 0.04}}],
        "aggregation": "token",
    },
    "m2po_released": {
        "advantage": {"name": "grpo"},
        "loss": {"name": "importance"},
        "old_logprobs": "rollout",
        "token_masks": [
            {"name": "m2po_released", "options": {"tau": 0.04, "floor_low": 0.3, "floor_high": 0.5}}
        ],
        "aggregation": "token",
    },
    "clip_cov": {
        "advantage": {"name": "grpo"},
        # Wide: the mask, not the clip, limits the step.
        "loss": {"name": "ppo_clip", "clip_low": 1.0, "clip_high": 1.0},
        "token_masks": [{"name": "clip_cov", "options": {"share": 2e-4, "low": 1.0, "high": 5.0}}],
        "aggregation": "token",
        "filters": [{"name": "zero_variance", "options": {}}],
    },
    "kl_cov": {
        "advantage": {"name": "grpo"},
        # Without a clip: a KL term on the masked tokens limits the step.
        "loss": {"name": "importance"},
        "token_masks": [{"name": "kl_cov", "options": {"share": 2e-3, "coef": 1.0}}],
        "aggregation": "token",
        "filters": [{"name": "zero_variance", "options": {}}],
    },
    "kl_cov_32b": {
        "advantage": {"name": "grpo"},
        "loss": {"name": "importance"},
        "token_masks": [{"name": "kl_cov", "options": {"share": 2e-4, "coef": 1.0}}],
        "aggregation": "token",
        "filters": [{"name": "zero_variance", "options": {}}],
    },
    "high_entropy": {
        "advantage": {"name": "grpo"},
        "loss": {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.28},
        "token_masks": [{"name": "high_entropy", "options": {"rho": 0.2}}],
        "aggregation": "token",
        "shaping": [{"name": "overlong", "options": {"buffer": 0.2}}],
        "filters": [{"name": "zero_variance", "options": {}}],
    },
    "prime": {
        "advantage": {"name": "prime", "gamma": 1.0},
        "loss": {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2},
        "aggregation": "token",
        "filters": [{"name": "reward_bounds", "options": {"low": 0.2, "high": 0.8}}],
    },
    "prime_released": {
        "advantage": {
            "name": "prime_released",
            "normalize": "batch",
            "options": {"outcome_coef": 5.0, "process_coef": 5.0, "batch_norm": True},
        },
        "loss": {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2},
        "aggregation": "token",
        "filters": [{"name": "reward_bounds", "options": {"low": 0.2, "high": 0.8}}],
    },
    "opd": {
        "advantage": {"name": "teacher"},
        "loss": {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2},
        "aggregation": "token",
        "distill": {"kind": "sampled"},
    },
}

PAPERS: dict[str, str] = {
    "grpo": "DeepSeekMath, arXiv 2402.03300, eq. 3 and 21, section 4.2",
    "reinforce++": "REINFORCE++, arXiv 2501.03262, section 3",
    "reinforce++_baseline": (
        "REINFORCE++ with a baseline, arXiv 2501.03262, section 3; k2 and its coefficient as in "
        "the authors' script of 2026"
    ),
    "rloo": "Back to basics, arXiv 2402.14740, section 3: the policy gradient of whole responses; "
    "coefficient as there for TL;DR",
    "remax": "ReMax, arXiv 2310.10505, algorithm 2; discount and coefficient of the KL as in the "
    "authors' scripts",
    "remax_released": (
        "ReMax as in the authors' released code: each token has its own KL only, and the mean is "
        "over tokens"
    ),
    "opo": "OPO, arXiv 2505.23585: exact on-policy training, without KL or entropy",
    "pass_at_k": "Inference-time objectives, arXiv 2503.19595, section 3",
    "maxrl": "Maximum likelihood reinforcement learning, arXiv 2602.02710",
    "gpg": "GPG, arXiv 2504.02546, section 3",
    "raft": "RAFT, arXiv 2304.06767, algorithm 1: the log-likelihood of the best responses",
    "rft": "Rejection sampling fine-tuning, arXiv 2308.01825, inside the loop: the log-likelihood "
    "of correct responses",
    "dr_grpo": "Understanding R1-Zero-like training, arXiv 2503.20783, section 3.2: no division by "
    "length or deviation, no KL",
    "lite_ppo": (
        "Tricks or traps, arXiv 2508.08221, section 5: deviation of the batch, token-level loss, "
        "no KL"
    ),
    "gdpo": "GDPO, arXiv 2601.05242, section 3: every reward inside its group, then their weighted "
    "sum over the batch",
    "vapo": "VAPO, arXiv 2504.05118, section 5.1; there the critic learns alone for the first 50 "
    "steps: critic.warmup_steps",
    "ppo": "PPO, arXiv 1707.06347; per-token KL in the reward as in arXiv 2203.02155",
    "ppo_lag": "Safe RLHF, arXiv 2310.12773, section 3.3: PPO with a cost model, a second critic and "
    "a multiplier; numbers of the authors' script",
    "grpo_lag": "GRPO with the multiplier of Safe RLHF, arXiv 2310.12773: costs are standardised in "
    "their group as rewards are",
    "reinforce": "Williams 1992: the policy gradient of whole responses, no baseline",
    "dapo": "DAPO, arXiv 2503.14476, section 4.1; the buffer is 4096 of 20480 tokens there",
    "gspo": "GSPO, arXiv 2507.18071, section 5.1",
    "gspo_token": "GSPO-token, arXiv 2507.18071, section 4.3",
    "luspo": "LUSPO, arXiv 2602.05261, section 5.1: GSPO times the length of each response",
    "gmpo": "GMPO, arXiv 2507.20673, section 4: bounds (e^-0.4, e^0.4)",
    "cispo": "MiniMax-M1, arXiv 2506.13585, section 3.1: no lower bound; the upper one is not "
    "printed, so it is DAPO's",
    "cispo_cap": (
        "CISPO as in ScaleRL, arXiv 2510.13786, sections 3.2 and 4: one bound, on the ratio "
        "itself; deviation of the batch, mean over prompts. Its filter of groups with equal "
        "rewards and its curriculum are separate settings"
    ),
    "cpgd": "CPGD, arXiv 2505.12504, section 4; the deviation of the group and the numbers of the "
    "drift follow the authors' code, whose ratio less 1 pulls by at most 2",
    "sapo": "SAPO, arXiv 2511.20347, section 5",
    "vespo": "VESPO, arXiv 2602.10693: weights against the sampler",
    "dppo": (
        "DPPO, binary total variation, arXiv 2602.04879: the trust region is around the sampler; "
        "advantage and denominator of the authors' script"
    ),
    "dppo_kl": "DPPO, binary KL, arXiv 2602.04879: the trust region is around the sampler",
    "topr": "TOPR, arXiv 2503.14286, section 3: rewards of 1 and -1, no baseline",
    "kimi_k15": (
        "Kimi k1.5, arXiv 2501.12599, section 2.3.2: mirror descent around the policy before the "
        "update"
    ),
    "otb": "the optimal token baseline, arXiv 2602.07078",
    "m2po": "M2PO, arXiv 2510.01161, section 5",
    "m2po_released": (
        "M2PO as in the authors' released code: the second moment of the tokens where clipping "
        "could act, and a clip that is never narrower than its floors"
    ),
    "clip_cov": "The entropy mechanism, arXiv 2505.22617, section 4.2; clip and filter as in the "
    "authors' scripts",
    "kl_cov": (
        "The entropy mechanism, arXiv 2505.22617, section 4.3; share for 7B models, and filter, "
        "as in the authors' scripts"
    ),
    "kl_cov_32b": (
        "The entropy mechanism, arXiv 2505.22617, section 4.3; share for 32B models, and filter, "
        "as in the authors' scripts"
    ),
    "high_entropy": (
        "Beyond the 80/20 rule, arXiv 2506.01939, section 5: DAPO on the most uncertain fifth of "
        "the tokens"
    ),
    "prime": "PRIME, arXiv 2502.01456: no KL, only prompts of which between 0.2 and 0.8 of the "
    "answers are right; see also ``prm``",
    "prime_released": (
        "PRIME as in the authors' released code: process scores over their largest return, "
        "whitened advantages"
    ),
    "opd": "On-policy distillation, arXiv 2306.13649, by the sampled token; distill: reverse_kl, "
    "forward_kl or jsd for whole vocabularies",
}
"""Source of each row, and of its parts if they come from several papers."""

PPO_CLIP = "PPO's, arXiv 1707.06347, section 6.1"
UNDISCOUNTED = "1: the reward of a response is not discounted"
INSTRUCT = "InstructGPT, arXiv 2203.02155, appendix C.4"
DAPO = "DAPO, arXiv 2503.14476, section 4.1"
VERL_CLIP = "verl's default, actor.clip_ratio"
ENTROPY = "PRIME-RL/Entropy-Mechanism-of-RL, recipe/dapo"
DPPO_SCRIPT = "verl, examples/dppo_trainer/run_qwen3_30b_a3b_megatron.sh"
M2PO_SCRIPT = "Infini-AI-Lab/M2PO, train-scripts/m2po-qwen-math-7b-s256.sh"
PRIME_SCRIPT = "PRIME-RL/PRIME, training/examples/run_prime_main.sh"
CPGD_SCRIPT = (
    "ModalMinds/MM-EUREKA, branch qwen, examples/scripts/train_cpgd_qwen_7b_single_node.sh"
)
REMAX_SCRIPT = "liziniu/ReMax, step3_rlhf_finetuning/training_scripts/llama2/run_llama2_7b.sh"
OPENRLHF = "OpenRLHF's default"
SAFE_RLHF_SCRIPT = "PKU-Alignment/safe-rlhf, scripts/ppo-lag.sh"

SOURCES: dict[str, dict[str, str]] = {
    "grpo": {"loss": PPO_CLIP, "kl.coef": "DeepSeekMath, arXiv 2402.03300, section 4.2"},
    "reinforce++": {"advantage.gamma": UNDISCOUNTED, "loss": OPENRLHF, "kl.coef": OPENRLHF},
    "reinforce++_baseline": {
        "loss": OPENRLHF,
        "kl.coef": "OpenRLHF, examples/scripts/train_reinforce_baseline_hybrid_engine.sh, 2026",
    },
    "rloo": {"kl.coef": "arXiv 2402.14740, for TL;DR"},
    "remax": {"advantage.gamma": REMAX_SCRIPT, "kl.coef": REMAX_SCRIPT},
    "remax_released": {"advantage.gamma": REMAX_SCRIPT, "kl.coef": REMAX_SCRIPT},
    "rft": {
        "advantage.options.threshold": (
            "1: the reward of a correct response; arXiv 2308.01825 keeps correct responses"
        )
    },
    "dr_grpo": {"loss": PPO_CLIP},
    "lite_ppo": {"loss": PPO_CLIP},
    "gdpo": {"loss": PPO_CLIP},
    "vapo": {
        "advantage": "VAPO, arXiv 2504.05118, section 5.1",
        "loss": "VAPO, arXiv 2504.05118, section 5.1",
        "positive_nll": "VAPO, arXiv 2504.05118, section 5.1",
    },
    "ppo": {"advantage": INSTRUCT, "loss": INSTRUCT, "kl.coef": INSTRUCT, "value.clip": INSTRUCT},
    "ppo_lag": {
        "advantage": f"{SAFE_RLHF_SCRIPT}: the defaults of gamma and gae_lambda",
        "loss": SAFE_RLHF_SCRIPT,
        "kl.coef": SAFE_RLHF_SCRIPT,
        "value.clip": SAFE_RLHF_SCRIPT,
        "lagrangian": SAFE_RLHF_SCRIPT,
    },
    "grpo_lag": {
        "loss": PPO_CLIP,
        "kl.coef": "DeepSeekMath, arXiv 2402.03300, section 4.2",
        "lagrangian": SAFE_RLHF_SCRIPT,
    },
    "reinforce": {"advantage.gamma": UNDISCOUNTED},
    "dapo": {"loss": DAPO, "shaping": f"{DAPO}: 4096 of 20480 tokens"},
    "gspo": {"loss": "GSPO, arXiv 2507.18071, section 5.1"},
    "gspo_token": {"loss": "GSPO, arXiv 2507.18071, section 5.1"},
    "luspo": {"loss": "LUSPO, arXiv 2602.05261, section 5.1"},
    "gmpo": {"loss": "GMPO, arXiv 2507.20673, section 4: (e^-0.4, e^0.4)"},
    "cispo": {
        "loss.clip_low": "MiniMax-M1, arXiv 2506.13585, section 3.1: no lower bound",
        "loss.clip_high": f"{DAPO}; MiniMax-M1 prints none",
    },
    "cispo_cap": {
        "loss": (
            "ScaleRL, arXiv 2510.13786; the cap of 5 as TRL's documentation gives it for the paper"
        )
    },
    "cpgd": {
        "loss": f"{CPGD_SCRIPT}: the default of eps_clip",
        "policy_drift.coef": CPGD_SCRIPT,
        "policy_drift.cap": f"{CPGD_SCRIPT}: the default of policy_drift_clip_eps",
    },
    "sapo": {"loss": "SAPO, arXiv 2511.20347, section 5"},
    "vespo": {"loss": "VESPO, arXiv 2602.10693"},
    "dppo": {"loss": DPPO_SCRIPT},
    "dppo_kl": {"loss": DPPO_SCRIPT},
    "topr": {"advantage.gamma": UNDISCOUNTED, "loss": "TOPR, arXiv 2503.14286, section 3"},
    "kimi_k15": {"policy_drift.coef": "chosen here: Kimi k1.5 prints none"},
    "otb": {
        "advantage.eps": (
            "verl, trainer/ppo/core_algos.py, compute_optimal_token_baseline_advantage"
        ),
        "loss": VERL_CLIP,
    },
    "m2po": {"token_masks": f"M2PO, arXiv 2510.01161, section 5; {M2PO_SCRIPT}"},
    "m2po_released": {
        "token_masks.0.options.tau": M2PO_SCRIPT,
        "token_masks.0.options": (
            "Infini-AI-Lab/M2PO, verl/trainer/ppo/core_algos.py, compute_m2po_policy_loss"
        ),
    },
    "clip_cov": {"loss": f"{ENTROPY}/7b_clip_cov.sh", "token_masks": f"{ENTROPY}/7b_clip_cov.sh"},
    "kl_cov": {"token_masks": f"{ENTROPY}/7b_kl_cov.sh: 0.2 %"},
    "kl_cov_32b": {"token_masks": f"{ENTROPY}/32b_kl_cov.sh: 0.02 %"},
    "high_entropy": {
        "loss": DAPO,
        "token_masks": "arXiv 2506.01939, section 5",
        "shaping": f"{DAPO}: 4096 of 20480 tokens",
    },
    "prime": {"advantage.gamma": PRIME_SCRIPT, "loss": VERL_CLIP, "filters": PRIME_SCRIPT},
    "prime_released": {
        "advantage.options": (
            "PRIME-RL/Entropy-Mechanism-of-RL, recipe/prime/config/prime_trainer.yaml"
        ),
        "loss": VERL_CLIP,
        "filters": PRIME_SCRIPT,
    },
    "opd": {"loss": PPO_CLIP},
}
"""Source of the numbers of each row, by setting.

A branch stands for all numbers below it that have no entry.
"""


def source_of(
    preset: str, key: str, sources: Mapping[str, Mapping[str, str]] = SOURCES
) -> str | None:
    """Return the source of the number ``key`` of ``preset``, e.g. ``loss.clip_low``.

    Args:
        preset: Name of the row.
        key: Setting of the row.
        sources: Table of sources by row and setting.

    Returns:
        The source of the number or of a branch above it; ``None`` if there is no entry.
    """
    known = sources.get(preset, {})
    # The longest entry first: that of a number is more exact than that of its branch.
    while key and key not in known:
        key = key.rpartition(".")[0]
    return known.get(key)


def meant_verb(word: str) -> tuple[str, str, str]:
    """Return the verb that a word of another tool means, and a setting with its value, or "".

    Another word is returned as it is.
    """
    from lightrft.config.preference.presets import PREFERENCE_PRESETS

    method, name = word.lower(), word.lower().replace("_", "-")
    if method in PRESETS:
        return "rl", "algorithm", method
    if name in VERBS:
        return name, "", ""
    if method in PREFERENCE_PRESETS:
        return "kto" if method == "bco" else "dpo", "preference", method
    return next((v for v, row in VERBS.items() if name in row.others.split()), word), "", ""


def preset_hint(name: str) -> str:
    """Return ``; `` and the setting that takes the preset ``name``, or "".

    It is for a part, such as a loss, that is called by the name of a method.
    """
    method = name.lower()
    return f"; it is a preset: algorithm={method}." if method in PRESETS else ""


def other_verb(name: str, presets: Collection[str]) -> str:
    """Return ``; `` and the verb that trains by the method ``name``, or "".

    Args:
        name: Name of a method.
        presets: Presets here, which no other verb is needed for.
    """
    verb, setting, value = meant_verb(name)
    if value in presets:
        return ""
    if value:
        return f"; it is a preset of another verb: lightrft {verb} {setting}={value}."
    return f"; another verb trains by it: lightrft {verb}." if trains(verb) else ""
