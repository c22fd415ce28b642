"""Configs of other frameworks as options: YAML, JSON, or a shell script with a command."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lightrft.config.other_names.lookup import options_in
from lightrft.config.other_names.rows import FRAMEWORKS
from lightrft.utils.atomic_files import nearest_name
from lightrft.utils.errors import ConfigError
from lightrft.utils.yaml_text import parse_yaml

HYDRA = ("defaults", "hydra", "_target_")
"""Keys that compose a file of Hydra, and set nothing of a run."""

COMMANDS = (
    *(("verl", word) for word in ("verl.trainer", "main_ppo", "fsdp_sft_trainer", "sft_trainer")),
    ("openrlhf", "openrlhf."),
    ("llamafactory", "llamafactory-cli"),
    *(("ms-swift", word) for word in ("swift sft", "swift rlhf", "swift pt", "megatron sft")),
    *(("trl", word) for word in ("trl sft", "trl dpo", "trl grpo", "trl kto", "trl reward")),
    *(("lightrft", word) for word in ("train_colocate", "train_srm", "train_grm")),
)
"""Words of commands, by framework."""

MARKS = (
    ("verl", r"actor_rollout_ref\..*|trainer\.(total_epochs|total_training_steps|default_.*)"),
    (
        "llamafactory",
        "stage|finetuning_type|dataset_dir|cutoff_len|pref_beta|pref_loss|lora_target",
    ),
    ("ms-swift", "rlhf_type|tuner_type|train_type|split_dataset_ratio|target_modules_|quant_bits"),
    ("lightrft", "engine_type|engine_tp_size|rm_use_engine|use_cpg_loss|text_only|images_key"),
    ("openrlhf", "pretrain|prompt_data|micro_train_batch_size|(actor|model|critic)\\.model_name.*"),
    ("openrlhf", r"(ckpt|algo|vllm|ds)\..*"),
    ("trl", "model_name_or_path|dataset_name|num_generations|per_device_train_batch_size"),
)
"""Options that one framework alone has, in the order in which they decide."""

VERB_WORDS = {
    **dict.fromkeys(("main_ppo", "train_ppo", "grpo", "rloo", "ppo", "train_colocate"), "rl"),
    **dict.fromkeys(("sft", "pt", "train_sft", "fsdp_sft_trainer", "sft_trainer"), "sft"),
    **dict.fromkeys(("dpo", "simpo", "cpo", "orpo", "train_dpo", "ipo"), "dpo"),
    **dict.fromkeys(("kto", "bco", "train_kto"), "kto"),
    **dict.fromkeys(("rm", "reward", "train_rm", "train_srm"), "rm"),
    **dict.fromkeys(("gkd", "train_kd", "distillation"), "distill"),
}
"""Word of a command, a stage or a type to the verb here."""

VERB_MARKS = (
    ("rl", r"num_generations|reward_funcs|n_samples_per_prompt|advantage_estimator|prompt_data"),
    ("rl", r"actor_rollout_ref\..*|rollout_batch_size|rollout\.batch_size|max_completion_length"),
    ("kto", r"(un)?desirable_.*|kto_.*"),
    ("dpo", r"precompute_ref_log_probs|chosen_key|data\.chosen_key|rpo_alpha|simpo_gamma"),
    ("dpo", r"pref_.*|f_divergence_type|reference_free|beta|model\.beta|cpo_alpha"),
    ("distill", r"teacher_model.*|lmbda|kd_coef|seq_kd"),
    ("rm", r"center_rewards_coefficient|margin_loss|num_labels|heads_types"),
)
"""Options that a config of one kind of training alone has, in the order in which they decide."""


@dataclass(frozen=True, slots=True)
class Foreign:
    """A config of another framework.

    Args:
        options: Values by whole name.
        command: Words of the command that it comes from; empty for a file of options.
    """

    options: dict[str, Any]
    command: str = ""

    def framework(self) -> str:
        """Return the key of the framework, or "" if no option tells it."""
        if self._commands():
            return self._commands()[0]
        for name, marks in MARKS:
            if self._has(marks):
                return name
        return ""

    def check_framework(self, framework: str) -> None:
        """Raise ``ConfigError`` if another framework than the named one fits clearly better."""
        own = {name: self._signs(name) for name in FRAMEWORKS}
        best = max(own, key=lambda name: len(own[name]))
        if len(own[best]) > max(1, 2 * len(own[framework])):
            given = f", and {', '.join(own[framework])} of it" if own[framework] else ""
            raise ConfigError(
                f"framework = {framework!r}: {', '.join(own[best][:4])} are of {FRAMEWORKS[best]}"
                f"{given}; give --from {best}, or leave --from out"
            )

    def _signs(self, framework: str) -> list[str]:
        """Return the options that a framework alone has; its command counts as two."""
        marks = "|".join(f"({marks})" for name, marks in MARKS if name == framework)
        found = ["its command"] * 2 if framework in self._commands() else []
        return [*(name for name in self.options if re.fullmatch(marks, name)), *found]

    def _commands(self) -> list[str]:
        """Return the frameworks whose commands the command has."""
        return [
            name
            for name, word in COMMANDS
            if re.search(rf"(?<![\w-]){re.escape(word)}", self.command)
        ]

    def verb(self) -> str:
        """Return the verb here that trains in the same way."""
        for option in ("rlhf_type", "stage"):
            if found := VERB_WORDS.get(str(self.options.get(option, "")).lower()):
                return found
        # The longest words first: ``train_sft`` has ``sft`` in it.
        for word in sorted(VERB_WORDS, key=len, reverse=True):
            if re.search(rf"(?<![a-z]){word}(?![a-z])", self.command):
                return VERB_WORDS[word]
        return next((verb for verb, marks in VERB_MARKS if self._has(marks)), "sft")

    def _has(self, marks: str) -> bool:
        return any(re.fullmatch(marks, name) for name in self.options)


def read_foreign(path: Path) -> Foreign:
    """Read a YAML or JSON file of options, or a script with a command.

    Raises:
        ConfigError: The file is missing, is no YAML, or has no options.
    """
    if path.is_dir():
        raise ConfigError(f"path = {str(path)!r} is a folder; name the file of the config in it")
    if not path.is_file():
        raise ConfigError(f"path = {str(path)!r}: there is no such file{nearest_name(path)}")
    if path.suffix.lower() == ".py":
        raise ConfigError(
            f"path = {str(path)!r} is a Python program, which is not run here; save the arguments "
            "of its trainer, as by args.to_json_string(), and give that JSON file"
        )
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix.lower() in (".yaml", ".yml", ".json"):
        found = Foreign(_tree_options(text, path))
    else:
        found = _command(text)
    if not found.options:
        raise ConfigError(
            f"path = {str(path)!r} has no options: give a YAML or JSON file of them, or a script "
            "with the command"
        )
    return found


def _tree_options(text: str, path: Path) -> dict[str, Any]:
    """Return the options of a file of keys and values, by whole name."""
    try:
        tree = parse_yaml(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from None
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{path} must hold keys and values, not {type(tree).__name__}")
    options: dict[str, Any] = {}
    for key, value in tree.items():
        if key not in HYDRA:
            options.update(options_in(str(key), value))
    return options


def _command(text: str) -> Foreign:
    """Return the command of a shell script that has most options, with its variables filled in."""
    variables: dict[str, str] = {}
    best = Foreign({})
    for line in re.sub(r"\\\s*\n", " ", text).splitlines():
        words = _words(_summed(line, variables))
        words = [_filled(word, variables) for word in words if word not in ("export", "local")]
        if words and all(_ASSIGNMENT.match(word) for word in words):
            variables |= dict(word.split("=", 1) for word in words)
            continue
        end = next((k for k, word in enumerate(words) if _END.fullmatch(word)), len(words))
        words = words[:end]
        options = dict(_word_options(words))
        if len(options) > len(best.options):
            plain = [word for word in words if not word.startswith("-") and "=" not in word]
            best = Foreign(options, " ".join(plain))
    return best


def _words(line: str) -> list[str]:
    """Return the words of a line of a shell; none if a quote of it ends on another line."""
    try:
        return shlex.split(line, comments=True)
    except ValueError:
        return []


_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
"""Start of a word that sets a variable of a shell."""
_END = re.compile(r"\|\|?|&&?|;|\d?>.*|<")
"""Words that end a command: its output goes elsewhere, or another command follows."""


_VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)(?::-([^}]*))?\}|\$([A-Za-z_]\w*)")
"""A variable of a shell: ``$a``, ``${a}``, or ``${a:-default}``."""


def _filled(word: str, variables: Mapping[str, str]) -> str:
    """Return ``word`` with the variables of the script filled in; unknown ones stay."""

    def value(found: re.Match[str]) -> str:
        return variables.get(found[1] or found[3], found[2] or found[0])

    return _VARIABLE.sub(value, word)


def _summed(line: str, variables: Mapping[str, str]) -> str:
    """Return ``line`` with its ``$((a * b))`` calculated, where both numbers are known."""

    def number(word: str) -> int | None:
        text = _filled(word if word.startswith("$") else variables.get(word, word), variables)
        return int(text) if text.isdecimal() else None

    def result(found: re.Match[str]) -> str:
        left, right = number(found[1]), number(found[3])
        if left is None or right is None or (found[2], right) == ("/", 0):
            return found[0]
        if found[2] == "/":
            return str(left // right)
        return str({"+": left + right, "-": left - right, "*": left * right}[found[2]])

    return re.sub(r"\$\(\(\s*(\$?\{?\w+\}?)\s*([-+*/])\s*(\$?\{?\w+\}?)\s*\)\)", result, line)


def _word_options(words: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield the options of a command: ``--name value ...``, ``--name=value``, ``a.b=value``."""
    k = 0
    while k < len(words):
        word = words[k]
        k += 1
        name, equals, value = word.partition("=")
        if not word.startswith("--"):
            if equals and re.fullmatch(r"[+~]*[A-Za-z_][\w.]*", name):
                # Variables of the environment are options in capitals.
                yield (name.lower() if name.isupper() else name.lstrip("+~")), _value(value)
            continue
        name = name.lstrip("-").replace("-", "_")
        if equals:
            yield name, _value(value)
            continue
        start = k
        # The first one is the program that gets the options; a later one is a value.
        has_program = _has_program(words[:k])
        while k < len(words) and not _NEXT.match(words[k]):
            if words[k].endswith(".py") and not has_program:
                break
            k += 1
        given = [_value(one) for one in words[start:k]]
        if name:
            yield name, True if not given else given[0] if len(given) == 1 else given


_NEXT = re.compile(r"--|-[A-Za-z]$|[+]*[A-Za-z_][\w.]*\.\w+=")
"""Words that are no value of the option before them, but another option."""


def _has_program(words: list[str]) -> bool:
    """Return whether the words of a command name the program that its further options are for."""
    text = " ".join(words)
    return any(word.endswith(".py") for word in words) or any(
        re.search(rf"(?<![\w-]){re.escape(command)}", text) for _, command in COMMANDS
    )


def _value(word: str) -> Any:
    """Return a word of a command as a value, read as YAML."""
    if word in ("None", "none", "null", ""):
        return None
    try:
        value = parse_yaml(word)
    except yaml.YAMLError:
        return word
    # ``Answer: yes`` is a text, and not a table.
    return word if isinstance(value, Mapping) and not word.startswith("{") else value
