"""Patch transformers' ``generate`` to run to the length limit, past end tokens."""

from __future__ import annotations

from lightrft.models.monkey_patch.replaced import original, replace


def apply_monkey_patch_to_generation_mixin() -> None:
    """Remove the end-token criterion that ``generate`` builds from its generation config.

    All ranks then run the same number of decoding steps. No rank blocks in a collective call that
    another rank never makes. Criteria that the caller passes as ``stopping_criteria`` stay. Logs a
    warning.
    """
    from transformers import GenerationConfig, GenerationMixin
    from transformers.generation.stopping_criteria import EosTokenCriteria, StoppingCriteriaList

    built = original(GenerationMixin, "_get_stopping_criteria")

    def without_end_token(
        self: GenerationMixin,
        generation_config: GenerationConfig,
        stopping_criteria: StoppingCriteriaList | None,
        *args: object,
        **kwargs: object,
    ) -> StoppingCriteriaList:
        # by identity with the caller's: these stay, even one for end tokens
        own = list(stopping_criteria or ())
        criteria = built(self, generation_config, stopping_criteria, *args, **kwargs)
        return StoppingCriteriaList(
            c for c in criteria if c in own or not isinstance(c, EosTokenCriteria)
        )

    replace(
        GenerationMixin,
        "_get_stopping_criteria",
        without_end_token,
        "generate does not stop at end tokens",
    )
