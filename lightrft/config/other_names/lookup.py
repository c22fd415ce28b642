"""Answers to settings that do not exist: the names of other frameworks and of earlier versions."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any, NoReturn

from lightrft.config.other_names.rows import FRAMEWORKS, Converted, NameRow, NoValue, Unclear

Exists = Callable[[str], bool]
"""Return True for a setting of the verb, by its dotted name."""
NO_COUNTERPART = "has no counterpart here"


class _Unread(Mapping[str, Any]):
    """Options that no conversion may read: its result then depends on its value alone."""

    def __getitem__(self, name: str) -> NoReturn:
        raise Unclear(f"it depends on {name}")

    def get(self, key: object, default: Any = None, /) -> NoReturn:
        raise Unclear(f"it depends on {key}")

    def __contains__(self, name: object) -> bool:
        return False

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


def _rows_of(name: str) -> list[tuple[str, NameRow]]:
    # The thousands of names take longer to import than a config without an unknown one to read.
    from lightrft.config.other_names import table

    return table.rows_of(name)


def options_in(name: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield the options below ``name`` with their values.

    A mapping is one option if its name is known and no name below it is.
    """
    if not isinstance(value, Mapping) or not value:
        yield name, value
        return
    below = [pair for key, one in value.items() for pair in options_in(f"{name}.{key}", one)]
    if _rows_of(name) and not any(_rows_of(leaf) for leaf, _ in below):
        yield name, value
    else:
        yield from below


def is_of_others(names: Collection[str], exists: Exists) -> bool:
    """Return True if most ``names`` of a file, and some, are options of other frameworks alone."""
    foreign = [name for name in names if not exists(name) and _rows_of(name)]
    return len(foreign) > max(2, len(names) / 2)


def setting_of(row: NameRow, exists: Exists) -> str:
    """Return the setting of the verb that does what ``row`` does, or ""."""
    return next((here for here in row.here.split() if exists(here)), "")


def answer(name: str, value: object, exists: Exists, verbs_with: Callable[[str], str]) -> str:
    """Return what an option of another framework or an earlier version is here, or "".

    Args:
        name: The whole dotted name.
        value: Its value; a mapping has options below it.
        exists: Returns True for a setting of the verb.
        verbs_with: Returns the verbs that have a setting, as text.
    """
    # The items of a list have the settings of one section.
    name = re.sub(r"\.\d+(?=\.|$)", "", name)
    if advice := why_removed(name, exists):
        return advice
    found = [
        one
        for leaf, given in options_in(name, value)
        if (one := _answer(leaf, given, exists, verbs_with))
    ]
    return "\n  ".join(found) if any(": " in one for one in found) else ", ".join(found)


def _answer(name: str, value: object, exists: Exists, verbs_with: Callable[[str], str]) -> str:
    """Return the answer for one option, or ""."""
    if now := new_name(name, exists):
        return f"{name} is {now} here"
    rows = _rows_of(name)
    # The first of several rows for all frameworks: a row for another verb may fit too.
    fitting: list[tuple[str, NameRow]] = []
    for of, row in rows:
        if setting_of(row, exists) and of not in [one for one, _ in fitting]:
            fitting.append((of, row))
    if not rows:
        return _in_its_section(name, exists)
    texts = []
    for framework, row in fitting or rows:
        text = _text(row, value, exists, verbs_with)
        texts.append(f"{text} ({FRAMEWORKS[framework]})" if framework and len(rows) > 1 else text)
    if not fitting and rows[0][1].here:
        texts.append("this verb has no such setting")
    return f"{name} {'; '.join(texts)}"


def _text(row: NameRow, value: object, exists: Exists, verbs_with: Callable[[str], str]) -> str:
    """Return what ``row`` says about a value, as the rest of a sentence."""
    if not row.here:
        return f"{NO_COUNTERPART}: {row.note}"
    note = f": {row.note}" if row.note else ""
    here = setting_of(row, exists)
    if not here:
        others = ", ".join(f"{one} in {verbs_with(one)}" for one in row.here.split())
        return f"is {others}{note}"
    try:
        new = _converted(row, here, value, exists)
    except NoValue as reason:
        return f"is {here} here, without this value: {reason}{note}"
    shown = ", ".join(f"{one}={as_yaml(part)}" for one, part in new.items())
    return f"is {next(iter(new), here)} here{f' ({shown})' if shown else ''}{note}"


def _converted(row: NameRow, here: str, value: object, exists: Exists) -> dict[str, Any]:
    """Return the settings of a value that do not depend on other options, if it changes."""
    if row.convert is None or isinstance(value, Mapping):
        return {}
    try:
        new = row.convert(value, _Unread())
    except NoValue:
        raise
    except (Unclear, TypeError, ValueError, AttributeError, LookupError, ArithmeticError):
        return {}
    if isinstance(new, Converted):
        return {one: part for one, part in new.items() if exists(one)}
    return {} if new == value else {here: new}


def _in_its_section(name: str, exists: Exists) -> str:
    """Return the answer for an unknown name in a section that exists: ``optimizer.learning_rate``.

    The setting must be in that very section: ``critic.lr`` is ``critic.optimizer.lr``, and never
    ``optimizer.lr``.
    """
    parts = name.split(".")
    for k in range(len(parts) - 1, 0, -1):
        section, rest = ".".join(parts[:k]), ".".join(parts[k:])
        if not exists(section):
            continue
        # The setting begins with the section, or with the end of it: ``critic.optimizer`` has what
        # ``optimizer`` has.
        outer = ["", *(".".join(parts[:i]) + "." for i in range(1, k + 1))]
        for _, row in _rows_of(rest):
            for here, above in itertools.product(row.here.split(), outer):
                if f"{above}{here}".startswith(f"{section}.") and exists(f"{above}{here}"):
                    note = f": {row.note}" if row.note else ""
                    return f"{name} is {above}{here} here{note}"
        return ""
    return ""


def meant(setting: str, error: Mapping[str, Any]) -> str:
    """Return ``; did you mean ...?`` for a value of another framework, or "".

    Args:
        setting: The dotted name.
        error: The error of pydantic about it.
    """
    from lightrft.config.other_names import table

    if error["type"] not in ("literal_error", "string_type", "bool_parsing"):
        return ""
    for row in table.ROWS:
        if setting not in row.here.split():
            continue
        new: dict[str, Any] = {}
        with suppress(NoValue):
            new = _converted(row, setting, error["input"], lambda _: True)
        if setting in new:
            return f"; did you mean {', '.join(f'{k}={as_yaml(v)}' for k, v in new.items())}?"
    return ""


def as_yaml(value: Any) -> str:
    """Return a value as it is written on the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "null"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(as_yaml, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {as_yaml(one)}' for key, one in value.items())}}}"
    return str(value)


OLD_NAMES: dict[str, str] = {
    "rollout.prompts": "rollout.prompts_per_step",
    "rollout.samples": "rollout.group_size",
    "rollout.step_tokens": "rollout.max_tokens_per_step",
    "train.updates": "train.ppo_epochs",
    "train.mini_batches": "train.num_mini_batches",
    "train.micro_batch_tokens": "train.max_tokens_per_micro_batch",
    "algorithm.proximal": "algorithm.old_logprobs",
    "algorithm.drift": "algorithm.policy_drift",
    "algorithm.gates": "algorithm.token_masks",
    "algorithm.corrections": "algorithm.importance_sampling",
    "algorithm.advantage.lam": "algorithm.advantage.gae_lambda",
    "algorithm.advantage.whiten": "algorithm.advantage.normalize",
    "reward.deadline": "reward.timeout",
    "data.chat": "data.apply_chat_template",
    "data.chat_options": "data.chat_template_options",
    "data.overlong": "data.overlong_prompts",
    "data.malformed": "data.bad_rows",
    "strategy.sleep": "strategy.offload_during_generation",
    "strategy.offload": "strategy.cpu_offload",
    "strategy.tensor": "strategy.tensor_parallel",
    "strategy.sequence": "strategy.sequence_parallel",
    "strategy.shard": "strategy.hsdp_shard_size",
    "strategy.reshard": "strategy.reshard_after_forward",
    "strategy.stage": "strategy.zero_stage",
    "strategy.timeout": "strategy.timeout_minutes",
    "engine.max_rows": "engine.max_num_seqs",
    "engine.token_budget": "engine.max_cache_tokens",
    "launch.ray.silence": "launch.ray.call_timeout_minutes",
    "launch.ray.wait": "launch.ray.placement_timeout_minutes",
    "optimizer.min_lr": "optimizer.min_lr_ratio",
    "process": "prm",
}
"""Settings of earlier versions, as they end, to their names now."""

_TRAINED_BY_RANKS = (
    "the ranks train it, and strategy.kind fsdp2 or deepspeed shards it over them; leave it out"
)

REMOVED: dict[str, str] = {
    "launch.ray.critic": (
        f"it was removed: a critic in one worker cannot be sharded; {_TRAINED_BY_RANKS}"
    ),
    "launch.ray.process": (
        "it was removed: a process reward model in one worker cannot be sharded; "
        f"{_TRAINED_BY_RANKS}"
    ),
    "optimizer.warmup": (
        "set {above}optimizer.warmup_steps, or {above}optimizer.warmup_ratio for a share of all "
        "steps"
    ),
}
"""Settings of earlier versions, as they end, with what to do instead. ``{above}`` is the rest."""


def why_removed(name: str, exists: Callable[[str], bool]) -> str:
    """Return what to do in place of the setting ``name`` of an earlier version, or "".

    Args:
        name: The dotted name.
        exists: Returns True for a setting of the verb.
    """
    for old, advice in REMOVED.items():
        # With the dots, so that ``my_optimizer.warmup`` does not end in ``optimizer.warmup``.
        above, found, below = f".{name}".rpartition(f".{old}")
        section = f"{above}.{old.rpartition('.')[0]}".strip(".")
        if found and not below and exists(section):
            return advice.replace("{above}", f"{above}.".lstrip("."))
    return ""


def new_name(name: str, exists: Callable[[str], bool]) -> str:
    """Return the setting that replaced ``name`` of an earlier version, or "".

    Args:
        name: The dotted name.
        exists: Returns True for a setting of the verb.
    """
    for old, new in OLD_NAMES.items():
        # In the middle too: a branch that was renamed has settings below it.
        before, found, after = f".{name}.".partition(f".{old}.")
        now = f"{before}.{new}.{after}".strip(".")
        if found and exists(now):
            return now
    return ""
