"""Published preference losses as rows of settings, by the name in ``preference: <name>``."""

from __future__ import annotations

from typing import Any

PREFERENCE_PRESETS: dict[str, dict[str, Any]] = {
    "dpo": {"losses": [{"name": "sigmoid"}], "beta": 0.1},
    "f_dpo_js": {"losses": [{"name": "sigmoid"}], "beta": 0.1, "f_divergence": {"kind": "js"}},
    "cdpo": {"losses": [{"name": "sigmoid"}], "beta": 0.1, "label_smoothing": 0.1},
    "robust_dpo": {"losses": [{"name": "robust"}], "beta": 0.1, "label_smoothing": 0.1},
    "rso": {"losses": [{"name": "hinge"}], "beta": 0.05},
    "ipo": {"losses": [{"name": "ipo"}], "beta": 0.1},
    "exo": {"losses": [{"name": "exo"}], "beta": 0.1, "label_smoothing": 1e-3},
    "nca": {"losses": [{"name": "nca"}], "beta": 0.01},
    "bco": {"losses": [{"name": "bco"}], "beta": 0.01},
    "sppo": {"losses": [{"name": "sppo_hard"}], "beta": 0.001},
    "aot": {"losses": [{"name": "aot"}], "beta": 0.01},
    "aot_unpaired": {"losses": [{"name": "aot_unpaired"}], "beta": 0.01},
    "apo_zero": {"losses": [{"name": "apo_zero"}], "beta": 0.1},
    "apo_down": {"losses": [{"name": "apo_down"}], "beta": 0.1},
    "discopop": {"losses": [{"name": "discopop", "options": {"tau": 0.05}}], "beta": 0.05},
    "dpo_norm": {"losses": [{"name": "sigmoid_norm"}], "beta": 5.0},
    "simpo": {"losses": [{"name": "simpo", "options": {"gamma": 1.375}}], "beta": 2.5},
    "alphapo": {
        "losses": [{"name": "alphapo", "options": {"alpha": 0.25, "gamma": 0.1}}],
        "beta": 2.5,
    },
    "cpo": {
        "losses": [{"name": "cpo", "options": {"alpha": 0.0}}, {"name": "sft", "weight": 1.0}],
        "beta": 0.1,
    },
    "orpo": {"losses": [{"name": "orpo"}], "beta": 0.1},
    "tpo": {
        "losses": [{"name": "tpo", "options": {"alpha": 0.0}}, {"name": "sft_gold", "weight": 1.0}],
        "beta": 0.01,
    },
    "tpo_l": {
        "losses": [
            {
                "name": "tpo",
                "options": {"form": "length_normalized", "gamma": 0.5, "alpha": 0.0},
            },
            {"name": "sft_gold", "weight": 1.0},
        ],
        "beta": 0.01,
    },
    "kto": {
        "losses": [
            {"name": "kto", "options": {"desirable_weight": 1.0, "undesirable_weight": 1.0}}
        ],
        "beta": 0.1,
    },
    "mpo": {
        "losses": [
            {"name": "sigmoid", "weight": 0.8},
            {"name": "bco_pair", "weight": 0.2},
            {"name": "sft", "weight": 1.0},
        ],
        "beta": 0.1,
    },
    "rpo": {
        "losses": [
            {"name": "sigmoid"},
            {"name": "sft", "weight": 1.0, "options": {"per": "response"}},
        ],
        "beta": 0.1,
    },
    "tr_dpo": {
        "losses": [{"name": "sigmoid"}],
        "beta": 0.05,
        "reference": {"source": "step", "refresh_every": 512, "refresh_decay": 0.4},
    },
    "wpo": {"losses": [{"name": "sigmoid"}], "beta": 0.01, "wpo": True, "wpo_cap": 1.0},
    "ld_dpo": {"losses": [{"name": "sigmoid"}], "beta": 0.1, "ld_alpha": 0.5},
    "sampo": {"losses": [{"name": "sigmoid"}], "beta": 0.1, "sampo": True},
    "dpop": {"losses": [{"name": "dpop", "options": {"lam": 50.0}}], "beta": 0.3},
    "beta_dpo": {
        "losses": [{"name": "beta_dpo", "options": {"alpha": 0.6, "margin": "log_ratio"}}],
        "beta": 0.1,
    },
    "tdpo": {"losses": [{"name": "tdpo"}], "beta": 0.1},
    "tdpo2": {"losses": [{"name": "tdpo2", "options": {"alpha": 0.5}}], "beta": 0.1},
    "cal_dpo": {"losses": [{"name": "cal_dpo", "options": {"weight": 0.5}}], "beta": 0.001},
    "odpo": {"losses": [{"name": "odpo", "options": {"alpha": 1.0}}], "beta": 0.5},
    "mdpo": {"losses": [{"name": "mdpo"}], "beta": 0.1},
    "plackett_luce": {"losses": [{"name": "plackett_luce"}], "beta": 0.1},
    "lipo": {"losses": [{"name": "lipo"}], "beta": 0.05},
}

PREFERENCE_PAPERS: dict[str, str] = {
    "dpo": "DPO, arXiv 2305.18290, eq. 7",
    "f_dpo_js": "f-DPO, arXiv 2309.16240, with the Jensen-Shannon divergence",
    "cdpo": "conservative DPO, Mitchell 2023, eq. 3: a share of the labels is wrong",
    "robust_dpo": "rDPO, arXiv 2403.00409: the unbiased loss for wrong labels",
    "rso": "RSO, arXiv 2309.06657: SLiC's hinge on the log-ratio",
    "ipo": "IPO, arXiv 2310.12036, eq. 17, with means over tokens as in the authors' experiments",
    "exo": "EXO, arXiv 2402.00856, eq. 16",
    "nca": "NCA, arXiv 2402.05369",
    "bco": "BCO, arXiv 2404.04656, with the running shift",
    "sppo": "SPPO, arXiv 2405.00675, eq. 4.7 with winning probabilities of 1 and 0",
    "aot": "AOT, arXiv 2406.05882, paired",
    "aot_unpaired": "AOT, arXiv 2406.05882, unpaired",
    "apo_zero": "APO-zero, arXiv 2408.06266, eq. 7",
    "apo_down": "APO-down, arXiv 2408.06266, eq. 8",
    "discopop": "DiscoPOP, arXiv 2406.08414, eq. 5",
    "dpo_norm": "length-normalised DPO, Tulu 3, arXiv 2411.15124",
    "simpo": "SimPO, arXiv 2405.14734, eq. 6",
    "alphapo": "AlphaPO, arXiv 2501.03884",
    "cpo": "CPO, arXiv 2401.08417, with the token mean of the likelihood as in the authors' code",
    "orpo": "ORPO, arXiv 2403.07691, eq. 6",
    "tpo": "TPO, arXiv 2405.16681, with the token mean of the likelihood",
    "tpo_l": "TPO-L, arXiv 2405.16681: means over tokens and a margin",
    "kto": "KTO, arXiv 2402.01306, eq. 7",
    "mpo": "MPO, arXiv 2411.10442, section 3.2",
    "rpo": "Iterative RPO, arXiv 2404.19733: the likelihood is a mean over each response",
    "tr_dpo": "TR-DPO, arXiv 2404.09656, soft update",
    "wpo": "WPO, arXiv 2406.11827, eq. 2, with the weight capped as in the authors' code",
    "ld_dpo": "LD-DPO, arXiv 2409.06411",
    "sampo": "SamPO, arXiv 2406.10957",
    "dpop": "DPO-Positive, arXiv 2402.13228",
    "beta_dpo": "beta-DPO, arXiv 2407.08639; margins and numbers as in the authors' code",
    "tdpo": "TDPO1, arXiv 2404.11999",
    "tdpo2": "TDPO2, arXiv 2404.11999",
    "cal_dpo": "Cal-DPO, arXiv 2412.14516; half the squares and beta as in the authors' code",
    "odpo": "ODPO, arXiv 2402.10571, with the logarithm of the margin",
    "mdpo": "mDPO, arXiv 2406.11839",
    "plackett_luce": "DPO for rankings, arXiv 2305.18290, appendix A.3",
    "lipo": "LiPO-lambda, arXiv 2402.01878",
}
"""Paper of each row. It is empty for no row."""

CHOSEN = "chosen here: the paper's number is not confirmed"
TR_DPO = "TR-DPO, arXiv 2404.09656, table 1"
AOT = "AOT, arXiv 2406.05882, caption of figure 2"
MPO = "MPO, arXiv 2411.10442, section 7"
TPO = "TPO, arXiv 2405.16681, section 3 and table 6"
ALPHAPO = "AlphaPO, arXiv 2501.03884, as in TRL's index of papers"
SIMPO_SCRIPT = "princeton-nlp/SimPO, training_configs/llama-3-8b-instruct-simpo.yaml"
TDPO_SCRIPT = "Vance0124/Token-level-Direct-Preference-Optimization, config/loss/tdpo.yaml"
CAL_DPO_SCRIPT = "tengxiao1/Cal-DPO, run/beta001_sametokenize.sh and scripts/dpo_trainer.py"
BETA_DPO_SCRIPT = "junkangwu/beta-DPO, README.md and trainers.py"
ODPO_SCRIPT = "rycolab/odpo, config/loss/odpo.yaml and README.md"

PREFERENCE_SOURCES: dict[str, dict[str, str]] = {
    "dpo": {"beta": "DPO, arXiv 2305.18290, appendix B"},
    "f_dpo_js": {"beta": CHOSEN},
    "cdpo": {"beta": CHOSEN, "label_smoothing": CHOSEN},
    "robust_dpo": {
        "beta": "rDPO, arXiv 2403.00409, appendix B",
        "label_smoothing": "rDPO, arXiv 2403.00409, section 6",
    },
    "rso": {"beta": "gamma in RSO, arXiv 2309.06657"},
    "ipo": {"beta": "tau; " + CHOSEN},
    "exo": {
        "beta": "EXO, arXiv 2402.00856, appendix B",
        "label_smoothing": "the value that TRL's trainer names for the paper",
    },
    "nca": {"beta": "NCA, arXiv 2402.05369, as in TRL's index of papers"},
    "bco": {"beta": "BCO, arXiv 2404.04656, as in TRL's index of papers"},
    "sppo": {"beta": "1 / eta in SPPO, arXiv 2405.00675"},
    "aot": {"beta": AOT},
    "aot_unpaired": {"beta": AOT},
    "apo_zero": {"beta": "APO, arXiv 2408.06266, section 5.2 of the published version"},
    "apo_down": {"beta": "APO, arXiv 2408.06266, section 5.2 of the published version"},
    "discopop": {
        "beta": "DiscoPOP, arXiv 2406.08414, appendix B.1",
        "losses": "DiscoPOP, arXiv 2406.08414, appendix E",
    },
    "dpo_norm": {"beta": CHOSEN},
    "simpo": {"beta": SIMPO_SCRIPT, "losses": f"{SIMPO_SCRIPT}: gamma / beta = 0.55"},
    "alphapo": {"beta": ALPHAPO, "losses": ALPHAPO},
    "cpo": {
        "beta": "CPO, arXiv 2401.08417, section 4.2",
        "losses": "CPO, arXiv 2401.08417, section 3",
    },
    "orpo": {"beta": "lambda in ORPO, arXiv 2403.07691, table 7: Mistral-ORPO-beta"},
    "tpo": {"beta": TPO, "losses": TPO},
    "tpo_l": {"beta": TPO, "losses": f"{TPO}: Llama-3-Base"},
    "kto": {"beta": "TRL's default", "losses": "1: as many good as bad responses"},
    "mpo": {"beta": CHOSEN, "losses": MPO},
    "rpo": {"beta": CHOSEN, "losses": "alpha in Iterative RPO, arXiv 2404.19733"},
    "tr_dpo": {"beta": TR_DPO, "reference": TR_DPO},
    "wpo": {
        "beta": "WPO, arXiv 2406.11827, section 4",
        "wpo_cap": "wzhouad/WPO, scripts/run_wpo.py",
    },
    "ld_dpo": {"beta": CHOSEN, "ld_alpha": "LD-DPO, arXiv 2409.06411, as in TRL's index of papers"},
    "sampo": {"beta": "LuJunru/SamPO, the script of DPO"},
    "dpop": {"beta": CHOSEN, "losses": CHOSEN},
    "beta_dpo": {"beta": BETA_DPO_SCRIPT, "losses": BETA_DPO_SCRIPT},
    "tdpo": {"beta": TDPO_SCRIPT},
    "tdpo2": {"beta": TDPO_SCRIPT, "losses": TDPO_SCRIPT},
    "cal_dpo": {"beta": CAL_DPO_SCRIPT, "losses": CAL_DPO_SCRIPT},
    "odpo": {"beta": ODPO_SCRIPT, "losses": ODPO_SCRIPT},
    "mdpo": {"beta": "luka-group/mDPO, bunny/config.yaml"},
    "plackett_luce": {"beta": CHOSEN},
    "lipo": {"beta": CHOSEN},
}
"""Source of the numbers of each row, by setting; see ``lightrft.config.presets.source_of``."""
