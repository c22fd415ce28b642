"""The numbers of presets are those of the papers, or of the authors' scripts where a preset says so."""

from __future__ import annotations

from typing import Any

import pytest

from lightrft.config.base import build
from lightrft.config.verbs import RLConfig

ZERO_VARIANCE = ["zero_variance"]
RELEASED: dict[str, dict[str, Any]] = {
    "clip_cov": {"loss.clip_low": 1.0, "loss.clip_high": 1.0, "filters": ZERO_VARIANCE},
    "kl_cov": {"token_masks.share": 2e-3, "filters": ZERO_VARIANCE},
    "kl_cov_32b": {"token_masks.share": 2e-4, "filters": ZERO_VARIANCE},
    "remax": {"kl.where": "reward", "kl.coef": 0.05, "advantage.gamma": 0.99},
    "remax_released": {
        "kl.where": "loss",
        "kl.coef": 0.05,
        "advantage.gamma": 0.99,
        "aggregation": "token",
    },
    "dppo": {"advantage.name": "group_mean", "aggregation": "constant"},
    "dppo_kl": {"advantage.name": "group_mean", "aggregation": "constant"},
    "cpgd": {
        "advantage.name": "grpo",
        "policy_drift.coef": 0.01,
        "policy_drift.cap": 2.0,
        "loss.clip_low": 0.2,
        "loss.clip_high": 0.2,
    },
    "m2po": {"token_masks": ["m2po"], "token_masks.tau": 0.04},
    "m2po_released": {"token_masks": ["m2po_released"], "token_masks.tau": 0.04},
    "prime": {"advantage.name": "prime", "advantage.normalize": "none"},
    "prime_released": {
        "advantage.name": "prime_released",
        "advantage.normalize": "batch",
        "advantage.batch_norm": True,
    },
    "reinforce++_baseline": {"kl.coef": 1e-5},
    "cispo_cap": {"advantage.name": "lite_ppo", "aggregation": "prompt"},
}


def number(algorithm: Any, key: str) -> Any:
    """Return the setting or option ``key`` of ``algorithm``; of a list of parts, their names, or the option of the first."""
    part, _, name = key.partition(".")
    found = getattr(algorithm, part)
    if isinstance(found, tuple):
        return found[0].options[name] if name else [one.name for one in found]
    if not name:
        return getattr(found, "name", found)
    return getattr(found, name) if name in type(found).model_fields else found.options[name]


@pytest.mark.parametrize("preset", list(RELEASED))
def test_a_preset_has_the_numbers_of_its_paper_or_of_the_script_that_it_names(preset: str) -> None:
    algorithm = build(RLConfig, {"algorithm": preset}).algorithm
    assert {key: number(algorithm, key) for key in RELEASED[preset]} == RELEASED[preset]
