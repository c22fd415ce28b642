"""Read an evaluation from the run folder that it was written to."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from lightrft.config.algorithm import LagrangianConfig
from lightrft.config.base import build, dotted
from lightrft.config.reward import RewardConfig
from lightrft.rewards.success import Success
from lightrft.trainer.process_model.results import scored_response
from lightrft.trainer.reward_model.results import RESULTS, read_line, scored_prompt
from lightrft.utils.errors import ConfigError, DataError
from lightrft.utils.prompt_digest import IDENTIFYING
from lightrft.utils.yaml_text import parse_yaml

CONDITIONS = (
    *("eval.samples", "eval.sampling", "eval.threshold", "run.seed"),
    *("eval.data.template", "eval.data.system", "eval.data.apply_chat_template"),
    *("eval.data.chat_template_options", "eval.data.special_tokens"),
    *("eval.data.max_prompt_tokens", "eval.data.overlong_prompts"),
    *("eval.data.media.min_pixels", "eval.data.media.max_pixels"),
    *("eval.data.media.fps", "eval.data.media.max_frames"),
    *("reward.terms", "reward.per_source", "reward.models", "reward.success"),
    *(
        "head",
        "threshold",
        "max_tokens",
        "data.template",
        "data.system",
        "data.apply_chat_template",
    ),
)
"""Settings, and branches of settings, that change the numbers of an evaluation."""

IN_SUMMARY = ("samples", "threshold", "seed", "sampling")
"""Conditions in ``summary.json`` that are also settings. ``seed`` is one of ``run``."""

OF_RESPONSE = ("text", "reward", "failed", "finish_reason")
"""Fields of a response that are kept. Those of tokens can be thousands of times as large."""

ABOVE_ZERO = math.ulp(0.0)
"""Smallest margin of the scores of a pair in right order."""

Key = tuple[str, str]
"""Data source and id of a prompt."""


@dataclass(slots=True)
class SavedPrompt:
    """A prompt with its responses.

    Attributes:
        prompt: The identifying fields of the prompt.
        responses: The fields ``OF_RESPONSE`` of each response, its ``length`` in tokens, and its
            ``outcome``: the value that must reach the threshold, or None.
    """

    prompt: dict[str, Any]
    responses: list[dict[str, Any]] = field(default_factory=list)


@dataclass(slots=True)
class SavedEvaluation:
    """A saved evaluation.

    Attributes:
        file: The file of responses.
        step: Step of the evaluation.
        threshold: ``eval.threshold`` of the run.
        settings: Settings that change the numbers, by dotted key.
        prompts: The prompts with their responses.
        unjudged: Number of further prompts, whose data source has no outcome term.
        outcome_values: See ``Success.outcome_values``.
    """

    file: Path
    step: int
    threshold: float
    settings: dict[str, Any]
    prompts: dict[Key, SavedPrompt]
    unjudged: int = 0
    outcome_values: int = 0


def read_evaluation(path: Path, step: int | None, success: Sequence[str] = ()) -> SavedEvaluation:
    """Read the evaluation at ``step`` of a run folder, or the file of an evaluation.

    Args:
        path: A run folder, or a file ``eval_*.jsonl`` of its ``rollouts``.
        step: Step of the evaluation. ``None`` takes the last one.
        success: Names for ``reward.success``. Empty takes the setting of the run.

    Raises:
        ConfigError: If there is no such evaluation, or no response can be right.
        DataError: If a file of the run is malformed.
    """
    scores = path if path.name == RESULTS else path / RESULTS
    if scores.is_file():
        return _read_scores(scores)
    file = path if path.is_file() else _file_at(path, step)
    number = re.fullmatch(r"eval_(\d+)", file.stem)
    if number is None or file.suffix != ".jsonl":
        raise ConfigError(f"{file} is not a file of an evaluation, such as eval_000000.jsonl")
    tree = _tree(file.parent.parent / "config.yaml")
    settings: dict[str, Any] = dict(dotted(tree))
    _check_finished(file.parent.parent, settings)
    threshold = float(settings.get("eval.threshold", 1.0))
    rule = _rule(file.parent.parent, tree, success, threshold)
    prompts: dict[Key, SavedPrompt] = {}
    unjudged: set[Key] = set()
    outcomes: list[tuple[str, float]] = []
    for row in _rows(file):
        prompt = {name: row["prompt"].get(name) for name in IDENTIFYING}
        key = str(prompt["data_source"]), str(prompt["id"])
        if not rule.judges(key[0]):
            unjudged.add(key)
            continue
        response = {name: row[name] for name in OF_RESPONSE}
        response["length"] = len(row["token_ids"])
        outcome = rule.outcome(key[0], row["reward"], row.get("terms", {}))
        response["outcome"] = outcome
        if outcome is not None and not response["failed"]:
            outcomes.append((key[0], outcome))
        elif not response["failed"]:
            raise DataError(f"{file}: a response of {key[1]!r} lacks {rule.term(key[0])!r}")
        prompts.setdefault(key, SavedPrompt(prompt)).responses.append(response)
    if not prompts:
        raise DataError(f"{file} holds no response")
    relevant = {name: value for name, value in settings.items() if _is_condition(name)}
    values = rule.outcome_values(outcomes)
    step = int(number[1])
    return SavedEvaluation(file, step, threshold, relevant, prompts, len(unjudged), values)


def _read_scores(file: Path) -> SavedEvaluation:
    """Read an evaluation of a reward model: the scores of responses, or of their steps."""
    folder = file.parent
    settings = dict(dotted(_tree(folder / "config.yaml")))
    summary: Mapping[str, Any] = {}
    if (folder / "summary.json").is_file():
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    with file.open("rb") as lines:
        next(lines, b"")  # the first line identifies data and model
        rows = list(lines)
    if settings.get("steps.sources"):
        unit, threshold = "responses", 1.0
        prompts = _judged_responses(rows, file, float(summary.get("threshold", math.nan)))
    else:
        unit, threshold = "prompts", ABOVE_ZERO
        prompts = _ordered_pairs(rows, file, str(summary.get("head")))
    if len(rows) != summary.get(unit) or not prompts:
        raise DataError(f"{folder}: the last lightrft eval-rm did not finish; run it again")
    relevant = {name: value for name, value in settings.items() if _is_condition(name)}
    return SavedEvaluation(file, 0, threshold, relevant, prompts)


def _ordered_pairs(rows: Iterable[bytes], file: Path, head: str) -> dict[Key, SavedPrompt]:
    """Return the prompts of scored responses. Their responses are pairs, and rewards are margins.

    A pair counts twice: once of two if the scores are equal, else both times or never.
    """
    prompts: dict[Key, SavedPrompt] = {}
    for raw in rows:
        prompt, line = read_line(raw, file, scored_prompt)
        saved = SavedPrompt(
            {"id": prompt.id, "data_source": prompt.source, "text": line["prompt"], "label": ""}
        )
        for better, worse in prompt.pairs(head) if head in prompt.labels else ():
            margin = prompt.scores[head][better] - prompt.scores[head][worse]
            text = f"{line['responses'][better]}\n(preferred to)\n{line['responses'][worse]}"
            for reward in (margin or ABOVE_ZERO, margin):
                response = {"text": text, "reward": reward, "failed": "", "finish_reason": ""}
                length = prompt.lengths[better]
                saved.responses.append({**response, "length": length, "outcome": reward})
        if saved.responses:
            prompts[prompt.source, prompt.id] = saved
    return prompts


def _judged_responses(
    rows: Iterable[bytes], file: Path, threshold: float
) -> dict[Key, SavedPrompt]:
    """Return scored responses in steps. The reward is 1 if the first wrong step is found.

    Responses whose first wrong step is unknown are left out. The length is the number of steps.
    """
    prompts: dict[Key, SavedPrompt] = {}
    for raw in rows:
        one, line = read_line(raw, file, scored_response)
        labelled = one.first_wrong()
        if labelled is None:
            continue
        about = {"id": one.id, "data_source": one.source, "text": line["prompt"]}
        saved = SavedPrompt({**about, "label": str(labelled)})
        reward = float(one.first_predicted(threshold) == labelled)
        response = {"text": "\n".join(line["steps"]), "reward": reward, "failed": ""}
        response["outcome"] = reward
        saved.responses.append({**response, "finish_reason": "", "length": len(line["steps"])})
        prompts[one.source, one.id] = saved
    return prompts


def _file_at(folder: Path, step: int | None) -> Path:
    files = sorted((folder / "rollouts").glob("eval_*.jsonl"))
    if not files:
        raise ConfigError(
            f"{folder} holds no evaluation (rollouts/eval_*.jsonl); name a run of lightrft eval, "
            "or a training run with eval.data.sources"
        )
    if step is None:
        return files[-1]
    for file in files:
        if file.stem == f"eval_{step:06d}":
            return file
    steps = ", ".join(str(int(file.stem.rpartition("_")[2])) for file in files)
    raise ConfigError(f"{folder} holds no evaluation of step {step}; it has the steps {steps}")


def _rule(
    folder: Path, tree: Mapping[str, Any], success: Sequence[str], threshold: float
) -> Success:
    """Return the rule for right responses of a run.

    Args:
        folder: The run folder.
        tree: The settings of the run.
        success: Names for ``reward.success``. Empty takes the setting of the run.
        threshold: ``eval.threshold`` of the run.
    """
    reward = build(RewardConfig, tree.get("reward") or {})
    if success:
        reward = reward.model_copy(update={"success": tuple(success)})
    algorithm = tree.get("algorithm") or {}
    costs = build(LagrangianConfig, algorithm.get("lagrangian") or {}).names
    rule = Success(reward, threshold, costs)
    if problem := next(rule.problems(), ""):
        raise ConfigError(f"{folder}: {problem}")
    if not any(rule.judges(source) for source in rule.sources()):
        raise ConfigError(
            f"{folder}: no term of the reward says if a response is right, so there is no accuracy "
            f"to compare; set success to one of {', '.join(sorted(reward.term_names() or ['a term']))}"
        )
    return rule


def _tree(file: Path) -> Mapping[str, Any]:
    """Return the settings of a run."""
    try:
        tree = parse_yaml(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{file} is missing; an evaluation is compared in its run folder") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise DataError(f"{file} is not YAML: {error}") from None
    if not isinstance(tree, Mapping):
        raise DataError(f"{file} must hold settings")
    return tree


def _check_finished(folder: Path, settings: Mapping[str, Any]) -> None:
    """Raise ``DataError`` if the settings of a folder are not those of its responses.

    ``lightrft eval`` writes the settings at its start, and the responses and the summary at its
    end. If a second evaluation is stopped, the responses are those of the first.
    """
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        verb, conditions = summary["verb"], summary["conditions"]
    except (OSError, ValueError, KeyError, TypeError):
        return  # a training run, or an evaluation without a summary
    if verb != "eval" or not isinstance(conditions, Mapping):
        return
    of_responses = dict(dotted({name: conditions.get(name) for name in IN_SUMMARY}))
    for name, value in of_responses.items():
        setting = "run.seed" if name == "seed" else f"eval.{name}"
        if setting in settings and settings[setting] != value:
            raise DataError(
                f"{folder}: the last lightrft eval did not finish: {setting} is "
                f"{settings[setting]!r} in config.yaml and {value!r} in summary.json, which is of "
                "the responses; run it again"
            )


def _is_condition(name: str) -> bool:
    return any(name == key or name.startswith(f"{key}.") for key in CONDITIONS)


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
                _ = row["prompt"]["id"], row["token_ids"], [row[name] for name in OF_RESPONSE]
            except (ValueError, KeyError, TypeError):
                raise DataError(f"{file}, line {number} is not a response: {line[:80]!r}") from None
            yield row
