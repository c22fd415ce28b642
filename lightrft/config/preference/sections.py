"""Settings of preference learning: losses, modifiers, the reference, and sampled responses."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from lightrft.config.base import (
    NamedFunction,
    Settings,
    Tree,
    changed_fields,
    deep_merge,
    full_branches,
    is_branch,
    strings_as,
)
from lightrft.config.preference.presets import PREFERENCE_PRESETS
from lightrft.config.presets import other_verb
from lightrft.utils.errors import did_you_mean

PreferenceKind = Literal["pair", "labelled", "ranked"]
"""Form of the data that a loss reads."""


class PreferenceLossConfig(NamedFunction):
    """One loss of the weighted sum."""

    name: str
    """Preference loss. A registered name, ``package.module:function`` or ``file.py:function``."""
    weight: float = Field(1.0, gt=0)
    """Factor of the loss in the sum. Positive; only its ratio to the other weights and to the
    learning rate matters."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further keyword arguments of the loss."""


class FDivergenceConfig(Settings):
    """The divergence that replaces the reverse KL between policy and reference (arXiv
    2309.16240)."""

    shorthand: ClassVar[str | None] = "kind"
    """The setting that a bare string or number stands for."""

    kind: Literal["reverse_kl", "forward_kl", "js", "alpha"] = "reverse_kl"
    """Divergence. ``reverse_kl`` is DPO's; ``forward_kl`` covers more of the reference's responses;
    ``js`` and ``alpha`` are between the two."""
    alpha: float = Field(0.5, ge=0, le=1)
    """Coefficient of ``alpha``, in [0, 1]: 0 is the forward KL and 1 the reverse KL. No other kind
    reads it."""


class PreferenceReferenceConfig(Settings):
    """The source of the reference's log-probs, and when the reference moves."""

    section: ClassVar[str] = "preference.reference"
    """Key of the section, for messages."""
    shorthand: ClassVar[str | None] = "source"
    """The setting that a bare string or number stands for."""

    source: Literal["auto", "cached", "step", "adapters_off", "none"] = "auto"
    """``cached`` computes the log-probs of all rows before the first step and keeps them on disk.
    ``step`` computes them in each step, by a second model. ``adapters_off`` computes them in each
    step by the policy with its adapters off. ``none`` computes none. ``auto`` takes ``none`` if no
    loss reads them, ``adapters_off`` for a policy with adapters, ``cached`` if the run sees every
    row and the losses allow it, else ``step``."""
    cache_dir: str = "~/.cache/lightrft/reference"
    """Folder of the log-probs that ``cached`` keeps. An entry belongs to the content of the rows,
    the template and the weights; deleting it is always safe."""
    refresh_every: int = Field(0, ge=0)
    """Update the reference from the policy after every so many optimizer steps; 0 never does
    (TR-DPO, arXiv 2404.09656)."""
    refresh_decay: float = Field(0.0, ge=0, lt=1)
    """Weight of the old reference in an update, in [0, 1). The policy has the rest, which is
    ``alpha`` in TR-DPO; 0 copies the policy."""

    @model_validator(mode="after")
    def _means_something(self) -> PreferenceReferenceConfig:
        if self.refresh_decay and not self.refresh_every:
            raise ValueError(
                f"preference.reference.refresh_decay = {self.refresh_decay} changes nothing "
                "without preference.reference.refresh_every; set that, e.g. to 512"
            )
        return self


class PreferenceConfig(Settings):
    """A weighted sum of preference losses, and the modifiers that they share. A ``preset`` fills
    in a published row; what stands next to it wins."""

    shorthand: ClassVar[str | None] = "preset"
    """The setting that a bare string or number stands for."""

    preset: str | None = None
    """Published row of settings to start from. ``null`` starts from the defaults, which are those
    of DPO."""
    losses: Annotated[tuple[PreferenceLossConfig, ...], strings_as("name")] = Field(
        (PreferenceLossConfig(name="sigmoid"),), min_length=1
    )
    """Losses whose weighted sum is minimised. All of one kind: of pairs, of labelled responses or
    of ranked responses."""
    beta: float = Field(0.1, gt=0)
    """Scale of the implicit reward, or the strength of the pull to the reference. Positive. Raise
    it to stay nearer to the reference. Losses without a reference take larger values."""
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """Share of pairs whose label is taken to be wrong, below 0.5. Raise it for noisy
    annotations."""
    f_divergence: FDivergenceConfig = FDivergenceConfig()
    """Divergence to the reference."""
    ld_alpha: float = Field(1.0, ge=0, le=1)
    """Weight of the tokens past the length of the shorter response of a pair, in [0, 1] (LD-DPO,
    arXiv 2409.06411). 1 counts all tokens alike. Lower it if responses grow too long."""
    sampo: bool = False
    """Sum over as many random tokens of the longer response of a pair as the shorter one has
    (SamPO, arXiv 2406.10957). Set it if responses grow too long."""
    wpo: bool = False
    """Weight each pair by how likely the policy is to generate it (WPO, arXiv 2406.11827, eq. 2).
    Set it if other models generated the responses."""
    wpo_cap: float | None = Field(1.0, gt=0)
    """Largest weight of ``wpo``: 1 as in the authors' code. ``null`` sets no bound, as in the
    paper's formula."""
    reference: PreferenceReferenceConfig = PreferenceReferenceConfig()
    """Reference of the implicit reward."""

    @model_validator(mode="before")
    @classmethod
    def _preset_first(cls, tree: object) -> object:
        """Put the settings that are given over the row of the preset."""
        tree = {"preset": tree} if isinstance(tree, str) else tree
        if not is_branch(tree):
            return tree
        # Losses without a preset are not those of the default preset, and have other numbers.
        usual = None if "losses" in tree else cls.model_fields["preset"].default
        tree = {"preset": usual, **tree}
        if tree["preset"] is None:
            return tree
        name = str(tree["preset"])
        row = PREFERENCE_PRESETS.get(name)
        if row is None:
            hint = other_verb(name, PREFERENCE_PRESETS)
            hint = hint or did_you_mean(name, PREFERENCE_PRESETS) or "."
            known = ", ".join(sorted(PREFERENCE_PRESETS))
            raise ValueError(f"unknown preset {name!r}{hint} Known: {known}")
        merged = deep_merge(row, tree)
        if "losses" in tree:
            merged["losses"] = _merged_losses(name, row["losses"], tree["losses"])
        return merged


class KTOPreferenceConfig(PreferenceConfig):
    """A weighted sum of losses of labelled responses. A ``preset`` fills in a published row; what
    stands next to it wins."""

    preset: str | None = "kto"
    """Published row of settings to start from, e.g. ``kto`` or ``bco``. ``losses`` without a preset
    start from the defaults."""


def _merged_losses(preset: str, losses: list[Tree], given: object) -> object:
    """Return ``given`` on top of the losses of a preset.

    The numbers of a preset are meant for its own losses, so other losses are an error.

    Args:
        preset: Name of the preset, for messages.
        losses: Its losses.
        given: The losses next to the preset; anything but a list is left to the validation.
    """
    parts = full_branches("name", given)
    if not isinstance(parts, list):
        return parts
    trees = [
        part.model_dump() if isinstance(part, PreferenceLossConfig) else part for part in parts
    ]
    names = [part["name"] for part in losses]
    given_names = [str(part.get("name")) if is_branch(part) else str(part) for part in trees]
    if given_names != names:
        raise ValueError(
            f"preference.losses names {', '.join(given_names) or 'nothing'}, and preset "
            f"{preset!r} has the numbers of {', '.join(names)}; leave out preference.preset, or "
            "name the same losses"
        )
    return [deep_merge(own, part) for own, part in zip(losses, trees, strict=True)]


class OnlineConfig(Settings):
    """Preferences from sampled responses. Each step samples responses to its prompts by the current
    policy, and ``reward`` decides which are better (online DPO; OAIF, arXiv 2402.04792)."""

    shorthand: ClassVar[str | None] = "group_size"
    """The setting that a bare string or number stands for."""

    group_size: int = Field(0, ge=0)
    """Number of responses to each prompt, usually 2 to 8. 0 samples none and trains on given
    responses."""
    pairs: Literal["best_worst", "all"] = "best_worst"
    """Pairs of a group. ``best_worst`` compares the response of the highest reward with that of the
    lowest. ``all`` compares any two responses with different rewards. Losses of rankings and of
    labels read all responses."""
    threshold: float | None = None
    """Reward that a response must reach to be desirable, in ``lightrft kto``. ``null`` takes the
    responses above the mean of their group."""
    missing_eos_penalty: float = Field(0.0, ge=0)
    """Subtracted from the reward of a response that ``sampling.max_new_tokens`` cut. Raise it if
    responses grow until they are cut."""
    max_rounds: int = Field(8, ge=1)
    """Most rounds of generation in a step. Each round replaces groups that give no pair."""

    @model_validator(mode="after")
    def _means_something(self) -> OnlineConfig:
        if self.group_size:
            return self
        for name in changed_fields(self):
            raise ValueError(
                f"online.{name} = {getattr(self, name)} changes nothing: online.group_size is 0, "
                "so no response is sampled; set it, e.g. online.group_size=2"
            )
        return self
