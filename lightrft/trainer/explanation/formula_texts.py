"""Formulas of parts that have no registry entry, as shown by ``lightrft explain``."""

from __future__ import annotations

from lightrft.utils.registry import About

SAMPLED = About(
    "A_t <- A_t - coef (logp_old - logp_teacher)",
    r"\hat A_t\leftarrow\hat A_t-\lambda\,(\log\pi_{old}-\log\pi_T)",
    "Thinking Machines, On-Policy Distillation, 2025; GKD, arXiv 2306.13649",
)
"""The form ``sampled`` of distillation.

The log-ratio is the reward of its own token only. No discount propagates it to earlier tokens.
"""
IMPLICIT = About(
    "p_t = beta (logp_process - logp_ref)",
    r"p_t=\beta\,(\log\pi_\phi-\log\pi_{ref})",
    "PRIME, arXiv 2502.01456; Free Process Rewards, arXiv 2412.01981",
)
OUTCOME_LOSS = About(
    "-o log sigma(sum_t p_t) - (1 - o) log sigma(-sum_t p_t), mean over responses,  o = 1[R >= "
    "threshold]",
    r"-o\log\sigma\big(\textstyle\sum_tp_t\big)-(1-o)\log\sigma\big(-\sum_tp_t\big),\quad o=\mathbb 1[R\ge\tau]",
    "PRIME, arXiv 2502.01456",
)
ROUTER = About(
    "L_router = E sum_e f_e P_e,  f_e = choices of expert e / tokens,  P_e = mean probability of "
    "expert e, over the tokens of all routers in the optimizer step; f_e has no gradient",
    r"L_{\mathrm{router}}=E\sum_ef_eP_e,\quad f_e=\operatorname{mean}_t\mathbb 1[e\in\mathcal T_t],"
    r"\quad P_e=\operatorname{mean}_tp_t(e)",
    "Switch Transformers, arXiv 2101.03961, eq. 4 to 6",
)
PTX = About(
    "coef * mean over the tokens of a separate batch of -logp",
    r"\gamma\,\operatorname{mean}_{(x,t)\sim\mathcal D}\big[-\log\pi_\theta(x_t)\big]",
    "PPO-ptx: InstructGPT, arXiv 2203.02155, eq. 2, there summed over the tokens of a text",
)
