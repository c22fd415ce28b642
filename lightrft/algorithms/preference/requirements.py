"""Determine the model outputs and columns that preference losses read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from lightrft.algorithms.preference.losses import PREFERENCE_LOSSES
from lightrft.config.preference.sections import PreferenceConfig, PreferenceKind


@dataclass(frozen=True, slots=True)
class PreferenceRequirements:
    """Model outputs and columns that the losses of a run read.

    A run builds it once, with ``preference_requirements``, and passes it on.

    Attributes:
        kind: Form of the data: ``pair``, ``labelled`` or ``ranked``.
        reference: Log-probs of the reference.
        sequence_kl: KL(reference, policy) over the vocabulary at each token.
        margin: The column ``margin``.
        corrupted: Log-probs of the chosen response after corrupted media.
        gold: A third response to each prompt.
        kl: Mean log-ratio of mismatched pairs of prompt and response.
        shift: Running mean of the implicit rewards.
        margin_stats: Running mean and deviation of the margins.
        rating: The column ``rating``.
        whole_batch: All pairs of the global batch in one call.
        partner: The other response of each pair weights the tokens of a response.
        collision: ``log sum_v p(v)^2`` of the policy at each token, for the weights of WPO.
    """

    kind: PreferenceKind
    reference: bool
    sequence_kl: bool
    margin: bool
    corrupted: bool
    gold: bool
    kl: bool
    shift: bool
    margin_stats: bool
    rating: bool
    whole_batch: bool
    partner: bool
    collision: bool


def preference_requirements(settings: PreferenceConfig) -> PreferenceRequirements:
    """Determine what the losses and modifiers of ``settings`` read.

    A user's loss declares what it reads in its attribute ``needs``, and its form of the data in
    ``kind``.
    """
    described = [PREFERENCE_LOSSES.about(part.name) for part in settings.losses]
    needs: set[str] = set().union(*(about.needs for about in described))
    return PreferenceRequirements(
        # ``check_preference`` has refused any other word.
        kind=cast(PreferenceKind, described[0].kind),
        reference="reference" in needs,
        sequence_kl="sequence_kl" in needs,
        margin="margin" in needs,
        corrupted="corrupted" in needs,
        gold="gold" in needs,
        kl="kl" in needs,
        shift="shift" in needs,
        margin_stats="margin_stats" in needs,
        rating="rating" in needs,
        whole_batch="whole_batch" in needs,
        partner=settings.sampo or settings.ld_alpha != 1,
        collision=settings.wpo,
    )
