"""Reject combinations of preference losses and modifiers that make no sense.

Each message gives the reason and a way out. Only built-in losses are judged, since the reads of a
user's loss are unknown.
"""

from __future__ import annotations

from collections.abc import Iterator

from lightrft.algorithms.preference.losses import PREFERENCE_LOSSES
from lightrft.algorithms.validate.component_kinds import COMPONENT_KINDS, signature_problems
from lightrft.config.base import ComponentConfig, Settings
from lightrft.config.preference.sections import PreferenceConfig, PreferenceLossConfig
from lightrft.utils.errors import ConfigError

LIKELIHOODS = ("sft", "sft_gold")
"""Losses without a reference and without shared settings, which any sum may contain."""
KINDS = ("pair", "labelled", "ranked")


def check_preference(settings: PreferenceConfig) -> None:
    """Raise ``ConfigError`` with every unknown name, misfit option and nonsense combination."""
    row = COMPONENT_KINDS["preference"]
    problems = []
    for i, part in enumerate(settings.losses):
        named = ComponentConfig(name=part.name, options=part.options)
        key = f"{row.key}.{i}"
        problems += signature_problems(key, row.registry, named, len(row.arguments), *row.given)
    if not problems:
        problems = list(incompatible_preference_settings(settings))
    if problems:
        raise ConfigError("\n".join(problems))


def incompatible_preference_settings(settings: PreferenceConfig) -> Iterator[str]:
    """Yield one line for each combination that cannot be intended.

    Every loss must exist; ``check_preference`` verifies that first.
    """
    # every problem is reported at once, so none of these raises
    yield from _kinds(settings)
    yield from _repeated(settings)
    yield from _unread(settings)
    yield from _unread_options(settings)
    yield from _label_smoothing(settings)
    yield from _f_divergence(settings)
    yield from _token_weights(settings)
    yield from _wpo(settings)
    yield from _reference(settings)


def _built_in(settings: PreferenceConfig) -> list[PreferenceLossConfig]:
    return [part for part in settings.losses if part.name in PREFERENCE_LOSSES]


def _has_users_loss(settings: PreferenceConfig) -> bool:
    return len(_built_in(settings)) < len(settings.losses)


def _reading(settings: PreferenceConfig, name: str) -> list[str]:
    """Return the built-in losses that read the shared setting ``name``."""
    parts = _built_in(settings)
    return [part.name for part in parts if name in PREFERENCE_LOSSES.about(part.name).reads]


def _needing(settings: PreferenceConfig, need: str) -> list[str]:
    """Return the losses that ``need`` something of the batch."""
    parts = settings.losses
    return [part.name for part in parts if need in PREFERENCE_LOSSES.about(part.name).needs]


def _names(settings: PreferenceConfig) -> str:
    return ", ".join(part.name for part in settings.losses)


def _kinds(settings: PreferenceConfig) -> Iterator[str]:
    kinds: dict[str, str] = {}
    for part in settings.losses:
        kind = PREFERENCE_LOSSES.about(part.name).kind
        if kind not in KINDS:
            yield (
                f"preference.losses: the kind of {part.name!r} is {kind!r}; set the attribute kind "
                f"of the function to one of {', '.join(KINDS)}"
            )
        kinds.setdefault(kind, part.name)
    if len(kinds) > 1:
        found = " and ".join(f"{name!r} of kind {kind}" for kind, name in kinds.items())
        yield (
            f"preference.losses mixes {found}: a batch has one kind of data; keep the losses of "
            "one kind"
        )


def _repeated(settings: PreferenceConfig) -> Iterator[str]:
    seen: list[tuple[str, object]] = []
    for part in settings.losses:
        if (part.name, part.options) in seen:
            yield (
                f"preference.losses names {part.name!r} twice with the same options; name it once "
                "with the sum of the weights"
            )
        seen.append((part.name, part.options))


def _unread(settings: PreferenceConfig) -> Iterator[str]:
    """Yield changed numbers that no loss reads."""
    if _has_users_loss(settings):
        return
    for name in ("beta", "label_smoothing"):
        value = getattr(settings, name)
        if value != _default(settings, name) and not _reading(settings, name):
            yield (
                f"preference.{name} = {value} changes nothing: {_names(settings)} does not read "
                "it; leave it out"
            )


def _unread_options(settings: PreferenceConfig) -> Iterator[str]:
    """Yield options that other options of the same loss make meaningless."""
    for part in _built_in(settings):
        options = part.options
        key = f"preference.losses: {part.name!r}"
        form = options.get("form", "sigmoid")
        if part.name == "tpo" and "gamma" in options and form != "length_normalized":
            yield (
                f"{key}: options.gamma = {options['gamma']} changes nothing with form {form}; take "
                "form: length_normalized, or leave it out"
            )
        if "nll" in options and options.get("alpha") == 0:
            yield (
                f"{key}: options.nll = {options['nll']} changes nothing: options.alpha is 0; leave "
                "it out"
            )


def _label_smoothing(settings: PreferenceConfig) -> Iterator[str]:
    e = settings.label_smoothing
    readers = _reading(settings, "label_smoothing")
    if readers and e >= 0.5:
        yield (
            f"preference.label_smoothing = {e}: {readers[0]!r} would take at least half of the "
            "labels for wrong, and learn nothing or the reverse; take less than 0.5"
        )
    if "exo" in readers and e == 0:
        yield (
            "preference.label_smoothing = 0: loss 'exo' takes its logarithm; take a small share, "
            "e.g. 0.001"
        )
    for part in _built_in(settings):
        form = part.options.get("form", "sigmoid")
        if e and form in ("hinge", "ipo") and readers == [part.name]:
            yield (
                f"preference.label_smoothing = {e} changes nothing: {part.name!r} with form {form} "
                "has no smoothed labels; take form: sigmoid, or leave it out"
            )


def _f_divergence(settings: PreferenceConfig) -> Iterator[str]:
    divergence = settings.f_divergence
    if divergence.kind != "alpha" and divergence.alpha != _default(divergence, "alpha"):
        yield (
            f"preference.f_divergence.alpha = {divergence.alpha} changes nothing: only kind alpha "
            f"reads it, and kind is {divergence.kind}"
        )
    if divergence.kind == "reverse_kl":
        return
    readers = _reading(settings, "f_divergence")
    for part in _built_in(settings):
        if part.name not in (*readers, *LIKELIHOODS):
            yield (
                f"preference.f_divergence = {divergence.kind}: {part.name!r} is derived for the "
                "reverse KL and ignores it, so the loss would pull to the reference in two ways; "
                "leave it out, or take a loss that reads it, e.g. sigmoid"
            )
    if not readers and not _has_users_loss(settings):
        yield (
            f"preference.f_divergence = {divergence.kind} changes nothing: {_names(settings)} has "
            "no reference"
        )


def _token_weights(settings: PreferenceConfig) -> Iterator[str]:
    """Yield misuses of LD-DPO and SamPO, which weight the tokens before they are summed."""
    set_here = []
    if settings.ld_alpha != 1:
        set_here.append(f"preference.ld_alpha = {settings.ld_alpha}")
    if settings.sampo:
        set_here.append("preference.sampo = True")
    if len(set_here) == 2:
        yield f"{' and '.join(set_here)} both remove the effect of length; leave one of them out"
    for change in set_here:
        for name in _needing(settings, "tokens"):
            yield (
                f"{change} leaves tokens out of the sums of responses, and {name!r} reads the "
                "likelihood or the number of all tokens; leave one of them out"
            )
        for part in settings.losses:
            kind = PREFERENCE_LOSSES.about(part.name).kind
            if kind in KINDS and kind != "pair":
                yield (
                    f"{change} compares the lengths of a pair, and {part.name!r} is of kind "
                    f"{kind}; leave it out"
                )


def _wpo(settings: PreferenceConfig) -> Iterator[str]:
    if not settings.wpo:
        if settings.wpo_cap != _default(settings, "wpo_cap"):
            yield f"preference.wpo_cap = {settings.wpo_cap} changes nothing: preference.wpo is off"
        return
    for name in _needing(settings, "whole_batch"):
        yield (
            f"preference.wpo = True weighs each pair, and {name!r} compares the batch as a whole, "
            "so that its losses are not those of pairs; leave one of them out"
        )
    for part in settings.losses:
        if PREFERENCE_LOSSES.about(part.name).kind == "ranked":
            yield (
                f"preference.wpo = True weighs pairs or labelled responses, and {part.name!r} "
                "compares whole groups; leave one of them out"
            )


def _reference(settings: PreferenceConfig) -> Iterator[str]:
    reference = settings.reference
    readers = _needing(settings, "reference")
    if not readers and not _has_users_loss(settings):
        if reference.source not in ("auto", "none"):
            yield (
                f"preference.reference.source = {reference.source} changes nothing: "
                f"{_names(settings)} has no reference; leave it out"
            )
        if reference.refresh_every:
            yield (
                f"preference.reference.refresh_every = {reference.refresh_every} changes nothing: "
                f"{_names(settings)} has no reference; leave it out"
            )
        return
    if readers and reference.source == "none":
        yield (
            f"preference.reference.source = none: {readers[0]!r} compares the policy with a "
            "reference; take auto, or a loss without one, e.g. simpo"
        )
    fixed = {
        "cached": "log-probs that are computed once cannot follow it",
        "adapters_off": "the model without adapters never moves",
    }
    if reference.refresh_every and reference.source in fixed:
        yield (
            f"preference.reference.refresh_every = {reference.refresh_every} moves the reference, "
            f"and with source: {reference.source} {fixed[reference.source]}; take source: step"
        )


def _default(settings: Settings, name: str) -> object:
    return type(settings).model_fields[name].default
