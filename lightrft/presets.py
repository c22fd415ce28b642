"""Published algorithms as rows of settings: what ``algorithm: <name>`` stands for."""

from __future__ import annotations

from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    # DeepSeekMath, arXiv 2402.03300, eq. 3 and 21, section 4.2
    "grpo": {
        "advantage": {"name": "grpo"},
        "loss": {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2},
        "aggregation": "sequence",
        "kl": {"where": "loss", "estimator": "k3", "coef": 0.04},
    },
    # REINFORCE++, arXiv 2501.03262, section 3
    "reinforce++": {
        "advantage": {"name": "reinforce", "gamma": 1.0, "whiten": "batch"},
        "loss": {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2},
        "aggregation": "token",
        "kl": {"where": "reward", "estimator": "k1", "coef": 0.01},
    },
    # REINFORCE++ with a baseline, arXiv 2501.03262, section 3; k2 and its coefficient as in the authors' scripts (OpenRLHF)
    "reinforce++_baseline": {
        "advantage": {"name": "group_mean", "whiten": "batch"},
        "loss": {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2},
        "aggregation": "token",
        "kl": {"where": "loss", "estimator": "k2", "coef": 0.001},
    },
    # Back to basics, arXiv 2402.14740, section 3: the policy gradient of whole answers; coefficient as there for TL;DR
    "rloo": {
        "advantage": {"name": "rloo"},
        "loss": {"name": "reinforce"},
        "aggregation": "sequence_sum",
        "kl": {"where": "reward", "estimator": "k1", "coef": 0.03},
    },
    # ReMax, arXiv 2310.10505, algorithm 2; coefficient of the KL in the reward as in the authors' scripts
    "remax": {
        "advantage": {"name": "remax"},
        "loss": {"name": "reinforce"},
        "aggregation": "sequence_sum",
        "kl": {"where": "reward", "estimator": "k1", "coef": 0.1},
    },
    # OPO, arXiv 2505.23585: exact on-policy training, without KL or entropy
    "opo": {
        "advantage": {"name": "opo"},
        "loss": {"name": "reinforce"},
        "aggregation": "sequence_sum",
    },
    # Inference-time objectives, arXiv 2503.19595, section 3
    "pass_at_k": {
        "advantage": {"name": "pass_at_k"},
        "loss": {"name": "reinforce"},
        "aggregation": "sequence_sum",
    },
    # Maximum likelihood reinforcement learning, arXiv 2602.02710
    "maxrl": {
        "advantage": {"name": "maxrl"},
        "loss": {"name": "reinforce"},
        "aggregation": "sequence_sum",
    },
    # GPG, arXiv 2504.02546, section 3
    "gpg": {
        "advantage": {"name": "gpg"},
        "loss": {"name": "reinforce"},
        "aggregation": "token",
    },
    # RAFT, arXiv 2304.06767, algorithm 1: the log-likelihood of the best answers
    "raft": {
        "advantage": {"name": "raft"},
        "loss": {"name": "reinforce"},
        "aggregation": "token",
    },
    # Rejection sampling fine-tuning, arXiv 2308.01825, inside the loop: the log-likelihood of right answers
    "rft": {
        "advantage": {"name": "rft", "options": {"threshold": 1.0}},
        "loss": {"name": "reinforce"},
        "aggregation": "token",
    },
    # Understanding R1-Zero-like training, arXiv 2503.20783, section 3.2: no division by length or deviation, no KL
    "dr_grpo": {
        "advantage": {"name": "group_mean"},
        "loss": {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2},
        "aggregation": "constant",
    },
    # Tricks or traps, arXiv 2508.08221, section 5: deviation of the batch, token-level loss, no KL
    "lite_ppo": {
        "advantage": {"name": "lite_ppo"},
        "loss": {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2},
        "aggregation": "token",
    },
    # GDPO, arXiv 2601.05242, section 3: every reward inside its group, then their weighted sum over the batch
    "gdpo": {
        "normalize": {"terms": "group"},
        "advantage": {"name": "batch_standard"},
        "loss": {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2},
        "aggregation": "sequence",
    },
    # VAPO, arXiv 2504.05118, section 5.1; there the critic learns alone for the first 50 steps: critic.warmup_steps
    "vapo": {
        "advantage": {"name": "vapo", "gamma": 1.0, "options": {"alpha": 0.05, "lam_critic": 1.0}},
        "loss": {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.28},
        "aggregation": "token",
        "positive_nll": {"coef": 0.1},
    },
    # PPO, arXiv 1707.06347; per-token KL in the reward as in arXiv 2203.02155
    "ppo": {
        "advantage": {"name": "gae", "gamma": 1.0, "lam": 0.95, "whiten": "batch"},
        "loss": {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2},
        "aggregation": "token",
        "kl": {"where": "reward", "estimator": "k1", "coef": 0.02},
        "value": {"clip": 0.2},
    },
    # Williams 1992: the policy gradient of whole answers, no baseline
    "reinforce": {
        "advantage": {"name": "reinforce", "gamma": 1.0},
        "loss": {"name": "reinforce"},
        "aggregation": "sequence_sum",
    },
    # DAPO, arXiv 2503.14476, section 4.1; the buffer is 4096 of 20480 tokens there
    "dapo": {
        "advantage": {"name": "grpo"},
        "loss": {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.28},
        "aggregation": "token",
        "shaping": [{"name": "overlong", "options": {"buffer": 0.2}}],
        "filters": [{"name": "zero_variance", "options": {}}],
    },
    # GSPO, arXiv 2507.18071, section 5.1
    "gspo": {
        "advantage": {"name": "grpo"},
        "loss": {"name": "ppo_clip", "ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4},
        "aggregation": "sequence",
    },
    # GSPO-token, arXiv 2507.18071, section 4.3
    "gspo_token": {
        "advantage": {"name": "grpo"},
        "loss": {"name": "ppo_clip", "ratio": "sequence_token", "clip_low": 3e-4, "clip_high": 4e-4},
        "aggregation": "sequence",
    },
    # LUSPO, arXiv 2602.05261, section 5.1: GSPO times the length of each answer
    "luspo": {
        "advantage": {"name": "grpo"},
        "loss": {"name": "ppo_clip", "ratio": "sequence", "clip_low": 2e-3, "clip_high": 2.5e-3},
        "aggregation": "sequence_sum",
    },
    # GMPO, arXiv 2507.20673, section 4: bounds (e^-0.4, e^0.4)
    "gmpo": {
        "advantage": {"name": "grpo"},
        "loss": {"name": "gmpo", "clip_low": 0.4, "clip_high": 0.4},
        "aggregation": "sequence",
    },
    # MiniMax-M1, arXiv 2506.13585, section 3.1: no lower bound; the upper one is not printed, so that of DAPO
    "cispo": {
        "advantage": {"name": "grpo"},
        "loss": {"name": "cispo", "clip_low": 1.0, "clip_high": 0.28},
        "aggregation": "token",
    },
    # CISPO as in ScaleRL, arXiv 2510.13786, section 3.2: one bound, on the ratio itself
    "cispo_cap": {
        "advantage": {"name": "grpo"},
        "loss": {"name": "cispo_cap", "options": {"cap": 5.0}},
        "aggregation": "token",
    },
    # CPGD, arXiv 2505.12504, section 4; the numbers of the drift are those of the authors' code
    "cpgd": {
        "advantage": {"name": "group_mean"},
        "loss": {"name": "cpgd", "clip_low": 0.2, "clip_high": 0.2},
        "aggregation": "token",
        "drift": {"coef": 0.01, "estimator": "k3", "cap": 0.2},
    },
    # SAPO, arXiv 2511.20347, section 5
    "sapo": {
        "advantage": {"name": "grpo"},
        "loss": {"name": "sapo", "options": {"tau_pos": 1.0, "tau_neg": 1.05}},
        "aggregation": "sequence",
    },
    # VESPO, arXiv 2602.10693: weights against the sampler
    "vespo": {
        "advantage": {"name": "grpo"},
        "loss": {"name": "vespo", "options": {"k_pos": 2.0, "lam_pos": 3.0, "k_neg": 3.0, "lam_neg": 2.0}},
        "proximal": "behavior",
        "aggregation": "token",
    },
    # DPPO, binary total variation, arXiv 2602.04879: the trust region is around the sampler
    "dppo": {
        "advantage": {"name": "grpo"},
        "loss": {"name": "dppo", "options": {"low": 0.15, "high": 0.15}},
        "proximal": "behavior",
        "aggregation": "token",
    },
    # M2PO, arXiv 2510.01161, section 5
    "m2po": {
        "advantage": {"name": "grpo"},
        "loss": {"name": "importance"},
        "proximal": "behavior",
        "gates": [{"name": "m2po", "options": {"tau": 0.04}}],
        "aggregation": "token",
    },
    # The entropy mechanism, arXiv 2505.22617, section 4.2
    "clip_cov": {
        "advantage": {"name": "grpo"},
        "loss": {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2},
        "gates": [{"name": "clip_cov", "options": {"share": 2e-4, "low": 1.0, "high": 5.0}}],
        "aggregation": "token",
    },
    # The entropy mechanism, arXiv 2505.22617, section 4.3
    "kl_cov": {
        "advantage": {"name": "grpo"},
        "loss": {"name": "importance"},
        "gates": [{"name": "kl_cov", "options": {"share": 2e-4, "coef": 1.0}}],
        "aggregation": "token",
    },
    # Beyond the 80/20 rule, arXiv 2506.01939, section 5: DAPO on the most uncertain fifth of the tokens
    "high_entropy": {
        "advantage": {"name": "grpo"},
        "loss": {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.28},
        "gates": [{"name": "high_entropy", "options": {"rho": 0.2}}],
        "aggregation": "token",
        "shaping": [{"name": "overlong", "options": {"buffer": 0.2}}],
        "filters": [{"name": "zero_variance", "options": {}}],
    },
    # PRIME, arXiv 2502.01456: no KL, only prompts of which between 0.2 and 0.8 of the answers are right; see also ``process``
    "prime": {
        "advantage": {"name": "prime", "gamma": 1.0},
        "loss": {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2},
        "aggregation": "token",
        "filters": [{"name": "reward_bounds", "options": {"low": 0.2, "high": 0.8}}],
    },
    # On-policy distillation by the sampled token: arXiv 2306.13649; Thinking Machines, On-Policy Distillation, 2025.
    # algorithm.distill=reverse_kl, forward_kl or jsd beside it compares whole vocabularies.
    "opd": {
        "advantage": {"name": "teacher"},
        "loss": {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2},
        "aggregation": "token",
        "distill": {"kind": "sampled"},
    },
}
