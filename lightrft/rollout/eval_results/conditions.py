"""The conditions of an evaluation, so that two results can be compared."""

from __future__ import annotations

from typing import Any

from lightrft.config.reward import RewardConfig
from lightrft.config.rollout import EvalConfig
from lightrft.rewards.success import Success
from lightrft.rollout.eval_results.prompt_scores import Groups
from lightrft.utils.prompt_digest import prompt_digest


def eval_conditions(
    groups: Groups, config: EvalConfig, reward: RewardConfig, seed: int
) -> dict[str, Any]:
    """Return what determines the numbers of an evaluation besides the model, as plain data.

    It is the generation, the text around each prompt, the rewards, and a digest of the prompts.

    Args:
        groups: The responses to each prompt.
        config: The settings ``eval``.
        reward: The settings ``reward``.
        seed: The setting ``run.seed``.
    """
    data = config.data
    terms = {"": reward.terms, **reward.per_source}
    if reward.models:
        terms["models"] = reward.models
    if reward.judges:
        terms["judges"] = reward.judges
    success = Success(reward)
    return {
        "samples": config.samples,
        "threshold": config.threshold,
        "success": {source: success.term(source) for source in success.sources()},
        "seed": seed,
        "sampling": config.sampling.model_dump(mode="json"),
        "template": data.template,
        "system": data.system,
        "apply_chat_template": data.apply_chat_template,
        "chat_template_options": dict(data.chat_template_options),
        "rewards": {
            source: [term.model_dump(mode="json", exclude_defaults=True) for term in some]
            for source, some in terms.items()
            if some
        },
        "prompts": len(groups),
        "prompts_digest": prompt_digest(group[0].prompt.as_json() for group in groups),
    }
