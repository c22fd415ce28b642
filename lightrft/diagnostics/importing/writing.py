"""``lightrft import-config``: a config of another framework as a config of ours, with comments.

Defaults of other frameworks that differ from ours and change what is learned are written out.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from lightrft.config.base import Tree, build, has_setting
from lightrft.config.config_tools import ImportConfig
from lightrft.config.other_names.conversions import Project, number, processes_in
from lightrft.config.other_names.lookup import setting_of
from lightrft.config.other_names.rows import FRAMEWORKS, Converted, NameRow, Unclear, counted
from lightrft.config.other_names.table import rows_of
from lightrft.diagnostics.importing.reading import Foreign, read_foreign
from lightrft.observability.redaction import MARK, is_secret
from lightrft.utils.atomic_files import write_atomic
from lightrft.utils.errors import ConfigError
from lightrft.utils.yaml_text import inline_yaml
from lightrft.verbs import VERBS

WIDTH = 96
"""Width of a comment."""


@dataclass(slots=True)
class Imported:
    """A translated config.

    Args:
        verb: Verb that trains in the same way.
        framework: Key of the other framework.
        tree: Values by dotted name.
        comments: Lines above a setting, by its name.
        left: Options that set nothing, with the reason.
        problems: Lines about values that do not fit together.
    """

    verb: str
    framework: str
    tree: dict[str, Any] = field(default_factory=dict)
    comments: dict[str, list[str]] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def text(self) -> str:
        """Return the config as YAML, with a comment for each difference."""
        lines = [
            f"# Made from a config of {FRAMEWORKS[self.framework]}, for: lightrft {self.verb}",
            *_nested_lines(self.tree, self.comments),
        ]
        for title, rows in (
            ("This config is refused as it is:", self.problems),
            ("Options that set nothing here:", self.left),
        ):
            if rows:
                lines += ["", f"# {title}", *(one for row in rows for one in _comment(row))]
        return "\n".join(lines) + "\n"

    def lines(self, output: str | None) -> str:
        """Return the config, or a line about the file ``output`` that it is in."""
        if output is None:
            return self.text().rstrip("\n")
        counts = f"{len(self.tree)} settings, {len(self.left)} options that set nothing"
        refused = f"; refused as it is: {self.problems[0]}" if self.problems else ""
        return f"{output}: {counts}{refused}\n  lightrft {self.verb} {output}"


def run_import(config: ImportConfig) -> Imported:
    """Translate a file, and write the result if ``config.output`` names a file.

    Raises:
        ConfigError: The file cannot be read, its framework is not known or not the named one, or
            the output exists.
    """
    if not config.path:
        raise ConfigError("path is empty; name a file: lightrft import-config FILE")
    foreign = read_foreign(Path(config.path))
    framework = config.framework if config.framework != "auto" else foreign.framework()
    if not framework:
        raise ConfigError(
            f"path = {config.path!r}: no option tells its framework; set framework to one of "
            f"{', '.join(FRAMEWORKS)} (--from {next(iter(FRAMEWORKS))})"
        )
    if config.framework != "auto":
        foreign.check_framework(framework)
    verb = foreign.verb() if config.verb == "auto" else config.verb
    imported = translate(foreign, framework, verb, config.processes)
    if config.output is not None:
        output = Path(config.output)
        if output.exists() and not config.overwrite:
            raise ConfigError(f"output = {config.output!r} exists; set overwrite=true, or another")
        write_atomic(output, imported.text())
    return imported


def translate(
    foreign: Foreign, framework: str, verb: str, processes: int | None = None
) -> Imported:
    """Return the settings of ``lightrft verb`` that do what ``foreign`` does, and check them.

    Args:
        foreign: The config of another framework.
        framework: Key of the framework.
        verb: Verb of the result.
        processes: Number of processes, where the config does not say it.
    """
    result = collect(foreign, framework, verb, processes)
    try:
        build(VERBS[verb].settings_class(), _nested(result.tree))
    except ConfigError as error:
        result.problems = str(error).splitlines()
    return result


def collect(foreign: Foreign, framework: str, verb: str, processes: int | None = None) -> Imported:
    """Return what each option of ``foreign`` sets, without a check that the values fit together.

    Args:
        foreign: The config of another framework.
        framework: Key of the framework.
        verb: Verb of the result.
        processes: Number of processes, where the config does not say it.
    """
    result = Imported(verb, framework)
    exists = partial(has_setting, VERBS[verb].settings_class())
    given = dict(_whole_tables(foreign.options))
    if processes is not None:
        given["num_processes"] = processes
    rows = {name: _row(name, framework, exists) for name in given}
    # A factor, such as the steps of accumulation, leaves the default of another factor in place.
    whole = [row for row in rows.values() if row is not None and row.convert is not counted]
    targets = {setting_of(row, exists) for row in whole}
    added = {}
    for name, value in DEFAULTS.get((framework, verb), {}).items():
        row = _row(name, framework, exists)
        here = setting_of(row, exists) if row is not None else ""
        is_epochs = here == "train.epochs" and "train.steps" in targets
        default = value(given) if callable(value) else value
        is_factor = row is not None and row.convert is counted
        is_left_out = name not in given and (is_factor or here not in targets)
        if is_left_out and not is_epochs and default is not None:
            added[name] = default
            rows[name] = row
    options = {**added, **given}
    if "per_device_train_batch_size" in options and processes_in(options) is None:
        result.left.append(
            "the number of processes is not given, and 1 is taken for rows of a device: give "
            "processes=N"
        )
    for name, value in options.items():
        _translate(result, name, value, rows[name], options, exists, name in added)
    order = list(VERBS[verb].settings_class().model_fields)
    result.tree = dict(
        sorted(result.tree.items(), key=lambda one: order.index(one[0].split(".")[0]))
    )
    return result


def _whole_tables(options: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the options, with keys of one table that have no row of their own as the table."""
    tables: dict[str, dict[str, Any]] = {}
    for name, value in options.items():
        above, _, last = name.rpartition(".")
        if above and not rows_of(name) and rows_of(above):
            tables.setdefault(above, {})[last] = value
        else:
            yield name, value
    yield from tables.items()


def _row(name: str, framework: str, exists: Any) -> NameRow | None:
    """Return the row of a name for a framework: one whose setting the verb has, if possible."""
    rows = [row for of, row in rows_of(name) if of in ("", framework)]
    own = [row for of, row in rows_of(name) if of == framework]
    return next((row for row in (*own, *rows) if setting_of(row, exists)), next(iter(rows), None))


def _translate(
    result: Imported,
    name: str,
    value: Any,
    row: NameRow | None,
    options: Mapping[str, Any],
    exists: Any,
    is_default: bool,
) -> None:
    """Add what one option sets to ``result``, or the reason why it sets nothing."""
    # ``use_wandb`` of OpenRLHF takes the key of the account.
    key = row is not None and isinstance(row.convert, Project) and isinstance(value, str)
    shown = f"{name} = {MARK if key or is_secret(name) else inline_yaml(value)}"
    note = f": {row.note}" if row is not None and row.note else ""
    here = setting_of(row, exists) if row is not None else ""
    if row is None:
        result.left.append(f"{shown}: unknown; check its spelling")
        return
    if not here:
        other = f": {row.here.split()[0]} is for another verb" if row.here else ""
        result.left.append(f"{shown}{other}{note}")
        return
    if isinstance(value, str) and re.search(r"\$[\w{(@]", value):
        result.left.append(f"{shown}: {here} here; the file does not say the value")
        return
    try:
        new = value if row.convert is None else row.convert(value, options)
    except (Unclear, TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as why:
        if not is_default:
            reason = str(why) if isinstance(why, Unclear) else "its value does not fit"
            result.left.append(f"{shown}: {here} here ({reason}){note}")
        return
    if new is None and value is None:
        return  # null leaves the default in both
    settings = new if isinstance(new, Converted) else {here: new}
    settings = {one: part for one, part in settings.items() if exists(one)}
    if not settings and not is_default and row.convert is not counted:
        result.left.append(f"{shown}: nothing to set for {here}{note}")
    origin = f"default of {FRAMEWORKS[result.framework]}: {shown}" if is_default else shown
    if is_default and row.convert is counted:
        result.comments.setdefault(here, []).append(origin)
    for one, part in settings.items():
        changed = part != value or row.note
        _set(result, one, part, [f"{origin}{note}" if changed or is_default else name])


def _set(result: Imported, name: str, value: Any, comments: list[str]) -> None:
    """Set ``name``. Lists of parts are joined; another value that is there already stays."""
    old = result.tree.get(name)
    if isinstance(old, list) and isinstance(value, list) and name.startswith("algorithm."):
        value = [*old, *(one for one in value if one not in old)]
    elif old is not None and old != value and not isinstance(old, list):
        result.left.append(f"{comments[0] if comments else name}: {name} is {old} already")
        return
    result.tree[name] = value
    result.comments.setdefault(name, []).extend(comments)


def _nested(flat: Mapping[str, Any]) -> Tree:
    """Return values by dotted name as a tree."""
    tree: Tree = {}
    for name, value in flat.items():
        branch = tree
        *above, last = name.split(".")
        for part in above:
            branch = branch.setdefault(part, {})
        branch[last] = value
    return tree


def _nested_lines(flat: Mapping[str, Any], comments: Mapping[str, list[str]]) -> Iterator[str]:
    """Yield the lines of a tree as YAML, with the comments of each setting above it."""

    def lines(tree: Mapping[str, Any], above: str) -> Iterator[str]:
        indent = "  " * above.count(".")
        for key, value in tree.items():
            name = f"{above}{key}"
            if name in flat:
                for comment in comments.get(name, ()):
                    yield from _comment(comment, indent)
                yield f"{indent}{key}: {inline_yaml(value)}"
            else:
                yield f"{indent}{key}:"
                yield from lines(value, f"{name}.")

    yield from lines(_nested(flat), "")


def _comment(text: str, indent: str = "") -> list[str]:
    """Return ``text`` as lines of a comment."""
    lead = f"{indent}# "
    return textwrap.wrap(
        text, WIDTH, initial_indent=lead, subsequent_indent=f"{indent}#   ", break_long_words=False
    )


Options = Mapping[str, Any]


def _floor(schedule: str, usual: str) -> Callable[[Options], Any]:
    """Return the floor of a schedule that falls to 0, where the option ``schedule`` is one."""
    return lambda given: None if str(given.get(schedule, usual)).startswith("constant") else 0.0


def _alpha(given: Options) -> float:
    return 2.0 * (number(given, "lora_rank", default=8) or 8)


def _swift_rate(given: Options) -> float:
    kind = str(given.get("tuner_type") or given.get("train_type") or "lora")
    return 1e-5 if kind == "full" else 1e-4


def _swift_accumulation(given: Options) -> int:
    rows = number(given, "per_device_train_batch_size") * (processes_in(given) or 1)
    return max(1, math.ceil(16 / max(rows, 1)))


def _evaluated(given: Options) -> list[dict[str, Any]] | None:
    """Return the split that TRL's scripts evaluate on, where they evaluate."""
    name, subset = given.get("dataset_name"), given.get("dataset_config")
    if not name or str(given.get("eval_strategy") or "no") == "no":
        return None
    own = {"path": name, "split": given.get("dataset_test_split", "test")}
    return [own if subset is None else {**own, "subset": subset}]


_TRAINER = {
    "per_device_train_batch_size": 8,
    "num_train_epochs": 3,
    "lr_scheduler_type": "linear",
    "lr_scheduler_kwargs.min_lr_rate": _floor("lr_scheduler_type", "linear"),
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
}
_TRL = {
    **_TRAINER,
    "gradient_checkpointing": True,
    "lora_dropout": 0.05,
    "eval_dataset": _evaluated,
}
_LLAMA = {
    **_TRAINER,
    "learning_rate": 5e-5,
    "cutoff_len": 2048,
    "lora_rank": 8,
    "lora_alpha": _alpha,
    "finetuning_type": "lora",
}
_SWIFT = {
    **_TRAINER,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": _swift_accumulation,
    "gradient_checkpointing": True,
    "learning_rate": _swift_rate,
    "lr_scheduler_type": "cosine",
    "adam_beta2": 0.95,
    "weight_decay": 0.1,
    "lora_rank": 8,
    "lora_alpha": 32,
    "lora_dropout": 0.05,
    "train_type": "lora",
}
_OPENRLHF = {
    "train_batch_size": 128,
    "adam_betas": [0.9, 0.95],
    "max_norm": 1.0,
    "lr_scheduler": "cosine_with_min_lr",
    "lr_warmup_ratio": 0.03,
    "lora_alpha": 16,
}
_OPENRLHF_RL = {
    **_OPENRLHF,
    "actor_learning_rate": 1e-6,
    "advantage_estimator": "gae",
    "n_samples_per_prompt": 1,
    "generate_max_len": 1024,
    "init_kl_coef": 0.01,
    "kl_estimator": "k1",
}
_ACTOR = "actor_rollout_ref.actor"

DEFAULTS: dict[tuple[str, str], dict[str, Any]] = {
    ("trl", "sft"): {**_TRL, "learning_rate": 2e-5, "max_length": 1024},
    ("trl", "dpo"): {**_TRL, "learning_rate": 1e-6, "max_length": 1024, "beta": 0.1},
    ("trl", "kto"): {**_TRL, "learning_rate": 1e-6, "max_length": 1024, "beta": 0.1},
    ("trl", "rm"): {**_TRL, "learning_rate": 1e-4, "max_length": 1024},
    ("trl", "rl"): {
        **_TRL,
        "learning_rate": 1e-6,
        "num_generations": 8,
        "max_completion_length": 512,
        "beta": 0.0,
        "loss_type": "dapo",
    },
    ("openrlhf", "rl"): {**_OPENRLHF_RL, "rollout_batch_size": 1024, "lambd": 1.0},
    ("lightrft", "rl"): {
        **_OPENRLHF_RL,
        "rollout_batch_size": 512,
        "lambd": 0.95,
        "loss_agg_mode": "seq-mean-token-mean",
    },
    ("openrlhf", "sft"): {**_OPENRLHF, "learning_rate": 5e-6, "max_len": 2048, "max_epochs": 2},
    ("openrlhf", "dpo"): {**_OPENRLHF, "learning_rate": 1e-5, "max_len": 512, "beta": 0.1},
    ("openrlhf", "rm"): {**_OPENRLHF, "learning_rate": 9e-6, "max_len": 512},
    ("openrlhf", "kto"): {**_OPENRLHF, "learning_rate": 1e-5, "max_len": 2048, "beta": 0.01},
    ("openrlhf", "distill"): {
        **_OPENRLHF,
        "learning_rate": 5e-6,
        "max_len": 2048,
        "kd_coef": 0.4,
    },
    ("verl", "rl"): {
        "data.train_batch_size": 1024,
        "data.max_prompt_length": 512,
        "data.max_response_length": 512,
        "algorithm.adv_estimator": "gae",
        "algorithm.use_kl_in_reward": False,
        f"{_ACTOR}.use_kl_loss": False,
        f"{_ACTOR}.ppo_mini_batch_size": 256,
        f"{_ACTOR}.loss_agg_mode": "token-mean",
        f"{_ACTOR}.optim.lr": 1e-6,
        f"{_ACTOR}.optim.weight_decay": 0.01,
        f"{_ACTOR}.optim.betas": [0.9, 0.999],
        f"{_ACTOR}.optim.min_lr_ratio": _floor(f"{_ACTOR}.optim.lr_scheduler_type", "constant"),
        "actor_rollout_ref.model.lora_alpha": 16,
        "actor_rollout_ref.rollout.n": 1,
        "trainer.total_epochs": 30,
    },
    ("llamafactory", "sft"): _LLAMA,
    ("llamafactory", "dpo"): {**_LLAMA, "pref_beta": 0.1},
    ("llamafactory", "kto"): {**_LLAMA, "pref_beta": 0.1},
    ("llamafactory", "rm"): _LLAMA,
    ("ms-swift", "sft"): _SWIFT,
    ("ms-swift", "dpo"): {**_SWIFT, "beta": 0.1},
    ("ms-swift", "kto"): {**_SWIFT, "beta": 0.1},
    ("ms-swift", "rm"): _SWIFT,
    ("ms-swift", "rl"): {
        name: _SWIFT[name]
        for name in ("per_device_train_batch_size", "gradient_accumulation_steps")
    },
}
"""Options that a config leaves out, by framework and verb.

A function returns the value for the options that are given, or None where there is none.
"""
