"""Models, and the functions that score with them.

Names are imported on first use, so importing this package loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from lightrft.utils.public_names import names_in, resolver

_HOMES = {
    "actor": ("Actor", "TokenScores"),
    "actor_language": ("ActorLanguage", "ActorText", "CriticLanguage"),
    "actor_vl": ("ActorVL", "CriticVL"),
    "actor_al": ("ActorAL",),
    "actor_modality": (
        "MODALITY_PARAMETERS",
        "ActorModality",
        "get_supported_parameters",
        "supports_parameter",
    ),
    "critic": ("Critic",),
    "grm_vl": ("GenerativeRewardModelVL",),
    "loading.from_pretrained": ("load_model", "load_tokenizer"),
    "loading.save_model": ("save_model",),
    "logprobs": ("entropy_from_logits", "log_probs_from_logits", "token_logprobs"),
    "lora": ("apply_lora_configuration",),
    "monkey_patch": (
        "apply_monkey_patch_to_generation_mixin",
        "apply_monkey_patch_to_llama",
        "apply_monkey_patch_to_qwen2",
        "remove_monkey_patches",
    ),
    "reward.reward_model": ("RewardModel",),
    "reward.scalar": ("ScalarRewardModel",),
    "srm_al": ("ScalarRewardModelAL",),
    "srm_vl": ("ScalarRewardModelVL",),
    "utils": (
        "compute_approx_kl",
        "compute_reward",
        "create_high_entropy_mask",
        "find_all_linear_modules",
        "masked_mean",
        "reset_position_ids",
        "unpacking_samples",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

_compatible = resolver(__name__)

__all__ = sorted([*_HOME_OF, *names_in(__name__)])


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        return _compatible(name)
    return getattr(import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
