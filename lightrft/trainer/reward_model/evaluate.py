"""Evaluate a saved reward model on responses whose order is known."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from math import fsum
from pathlib import Path

from lightrft.algorithms.reward_model.inputs import rated_responses
from lightrft.algorithms.reward_model.quality import (
    ScoredPrompt,
    head_agreement,
    judged_pairs,
    pair_accuracy,
    reported_curve,
)
from lightrft.algorithms.reward_model.rating_losses import right_signs, sign_problem
from lightrft.algorithms.reward_model.requirements import signed_score
from lightrft.config.reward_model.sections import RewardModelConfig
from lightrft.config.train import micro_batch_tokens
from lightrft.config.verbs import EvalRMConfig
from lightrft.datasets.preference.preference_dataset import PreferenceDataset
from lightrft.datasets.row_warnings import check_rows
from lightrft.datasets.sampler import report
from lightrft.distributed.process_group import SINGLE_PROCESS
from lightrft.learner.reward_model.evaluation import (
    EvaluatedModel,
    head_metrics,
    scored,
    scored_prompts,
)
from lightrft.learner.reward_model.step import RewardModelSettings
from lightrft.models.processors import load_processor
from lightrft.models.reward.other_layouts import holds_other_head
from lightrft.models.reward.reward_model import RewardModel
from lightrft.models.reward.saved_form import SETTINGS_FILE, read_form
from lightrft.observability.progress_bar import Progress
from lightrft.observability.run_directory import RunDirectory
from lightrft.rollout.eval_results.summary import EvalSummary
from lightrft.strategy.base import Strategy
from lightrft.trainer.checks.context_limits import check_examples
from lightrft.trainer.inference import run_eval
from lightrft.trainer.process_model.evaluate import process_folder, run_eval_steps
from lightrft.trainer.reward_model.judge_evaluation import as_evaluation
from lightrft.trainer.reward_model.results import scored_prompt, texts_of, write_report_data
from lightrft.trainer.reward_model.results_file import RESULTS, ResultsFile, fingerprint
from lightrft.trainer.reward_model.suites import suite_metrics
from lightrft.utils.errors import ConfigError, DataError, did_you_mean
from lightrft.utils.lazy_imports import torch
from lightrft.utils.peft_folder import merge_hint
from lightrft.workers.local import local_tokenizer, strategy_of

log = logging.getLogger(__name__)

MAY_DIFFER = (
    *("run", "best_of", "worst", "batch_size", "max_tokens_per_micro_batch", "strategy.device"),
)
"""Settings that change no score, so that an evaluation may resume with others."""


@dataclass(frozen=True, slots=True)
class _Prepared:
    """Model, device and rows of an evaluation.

    Attributes:
        model: The reward model.
        strategy: Its device.
        dataset: The responses.
        heads: Names of the heads with labels, the compared head first.
    """

    model: RewardModel
    strategy: Strategy
    dataset: PreferenceDataset
    heads: Sequence[str]


def run_eval_rm(config: EvalRMConfig) -> EvalSummary:
    """Score responses by a reward model. Scores, metrics and report data go to the run folder.

    Raises:
        ConfigError: If there are no rows, or the run folder belongs to another evaluation, or the
            model has no such head.
        DataError: If no two responses to a prompt can be compared.
    """
    if config.steps.sources:
        return run_eval_steps(config)
    unread = "threshold" if config.threshold is not None else ""
    if config.steps != EvalRMConfig().steps:
        unread = "steps"
    if unread:
        raise ConfigError(
            f"{unread} changes nothing: it is for labelled steps, and steps.sources is empty; name "
            "rows with labelled steps, or leave it out"
        )
    if not config.data.sources:
        raise ConfigError(
            "data.sources is empty; name rows with chosen and rejected, ranked or rated "
            "responses, e.g. data.sources=test.jsonl"
        )
    if config.judgement is not None:
        return run_eval(as_evaluation(config))
    path = config.run.folder
    began = time.perf_counter()
    folder = RunDirectory.open(
        path,
        config,
        resume=config.run.resume,
        overwrite=config.run.overwrite,
        ignore=MAY_DIFFER,
        is_evaluation=True,
    )
    with folder:
        found = _prepare(config)
        prompts = _score(config, found, path / RESULTS)
        result = measure(prompts, found.heads, found.model.score_names, config.best_of)
        result.metrics.update(sign_accuracy(prompts, found.heads, found.model.settings))
        write_report_data(
            path,
            found.dataset,
            prompts,
            found.heads[0],
            worst=config.worst,
            best_of=config.best_of,
        )
        about = {
            "verb": "eval-rm",
            "model": config.model.path,
            "head": found.heads[0],
            "prompts": len(prompts),
            "rows": dict(found.dataset.counts),
            "seconds": time.perf_counter() - began,
            "heldout_after": result.metrics["eval/pair_accuracy"],
            "intervals": result.intervals_as_json(),
        }
        folder.write_summary({**about, **result.metrics})
        return result


def _prepare(config: EvalRMConfig) -> _Prepared:
    """Load model and rows."""
    settings = config.model.model_copy(update={"path": model_folder(config.model.path)})
    tokenizer = local_tokenizer(settings)
    if process_folder(config.model.path):
        raise ConfigError(
            f"model.path = {config.model.path!r} is a process reward model, which scores steps; "
            "set steps.sources, e.g. to processbench.jsonl"
        )
    if not (read_form(settings.path) or holds_other_head(settings)):
        raise ConfigError(
            f"model.path = {settings.path!r} has no head of a reward model; "
            + (
                merge_hint(settings.path)
                or "to evaluate it as a judge that writes, set judgement, e.g. judgement.form=pair"
            )
        )
    processor = load_processor(settings, tokenizer)
    strategy = strategy_of(config.strategy, SINGLE_PROCESS)
    model = RewardModel.load(settings, device=strategy.device).requires_grad_(False)
    heads = compared_heads(config, model)
    dataset = PreferenceDataset(
        config.data,
        tokenizer,
        kind="rated",
        max_tokens=config.max_tokens,
        seed=config.run.seed,
        processor=processor,
        heads=heads,
    )
    report("data", dataset.counts, dataset.first_problem)
    check_rows(dataset, "data.sources")
    check_examples(model, dataset.longest, config.max_tokens)
    return _Prepared(model, strategy, dataset, heads)


def model_folder(path: str) -> str:
    """Return the folder of the reward model of ``path``, which may be a run of ``lightrft rm``."""
    inner = Path(path).expanduser() / "model"
    return str(inner) if (inner / SETTINGS_FILE).is_file() else path


def compared_heads(config: EvalRMConfig, model: RewardModel) -> list[str]:
    """Return the heads with labels, the one that rows label first.

    Raises ``ConfigError`` for a head that the model does not have.
    """
    head = config.head or model.reward_name
    heads = list(dict.fromkeys((head, *config.data.columns.labels)))
    for name in heads:
        if name not in model.score_names:
            key = "head" if name == head else "data.columns.labels"
            known = ", ".join(model.score_names)
            hint = did_you_mean(name, model.score_names)
            raise ConfigError(f"{key} = {name!r}: the model has no such head{hint}. Known: {known}")
    return heads


def _score(config: EvalRMConfig, found: _Prepared, path: Path) -> list[ScoredPrompt]:
    """Score the prompts that are not in the file ``path`` yet. Return all of them.

    Args:
        config: Settings of the evaluation.
        found: Model and rows.
        path: The file of scores.
    """
    dataset, heads = found.dataset, found.heads
    settings = RewardModelSettings(
        found.model.settings,
        micro_batch_tokens(config.max_tokens_per_micro_batch),
        heads,
        dataset.data_sources,
    )
    model = config.model
    identity = {"data": dataset.digest(), "model": fingerprint(model, model_folder(model.path))}
    file = ResultsFile(path, scored_prompt, identity, config.batch_size, len(dataset))
    with closing(file) as results:
        done = results.done
        parts = scored(
            found.strategy,
            EvaluatedModel(found.model),
            dataset,
            settings,
            config.batch_size,
            begin=done,
        )
        enabled = config.run.progress and done < len(dataset)
        with Progress(len(dataset), "eval-rm", done=done, enabled=enabled) as progress:
            for examples, batch, outputs in parts:
                for prompt in scored_prompts(examples, batch, outputs, heads):
                    results.add(prompt, texts_of(dataset, prompt.index))
                results.flush()
                progress.update({"step": examples[-1].index + 1})
        return results.rows


def measure(
    prompts: Sequence[ScoredPrompt],
    heads: Sequence[str],
    names: Sequence[str],
    best_of: int | None = None,
) -> EvalSummary:
    """Return all metrics of scored prompts.

    Args:
        prompts: The scored prompts.
        heads: Names of the heads with labels, the compared head first.
        names: Names of all scores.
        best_of: See ``reported_curve``.

    Raises:
        DataError: If no two responses to a prompt can be compared.
    """
    head = heads[0]
    pairs = judged_pairs(prompts, head)
    if not pairs:
        raise DataError(
            f"data.sources: no prompt has two responses with different labels and finite scores of "
            f"head {head!r}; look at data.columns and at results.jsonl"
        )
    metrics = head_metrics(prompts, heads).compute()
    intervals = {"pair_accuracy": pair_accuracy(pairs)}
    for source in dict.fromkeys(pair.source for pair in pairs):
        own = [pair for pair in pairs if pair.source == source]
        if source and len(own) < len(pairs):
            intervals[source] = pair_accuracy(own)
    for first, second in itertools.combinations(names, 2):
        agreement = head_agreement(prompts, first, second)
        if agreement is not None:
            metrics[f"eval/agreement/{first}/{second}"] = agreement.mean
            intervals[f"agreement of {first} and {second}"] = agreement
    metrics |= suite_metrics(prompts, head)
    metrics |= _score_metrics(prompts, head)
    curve = reported_curve(prompts, head, best_of)
    if best_of is not None and not curve:
        most = max(len(prompt.rated(head)) for prompt in prompts)
        log.warning(
            "best_of = %d: no prompt has so many rated responses, so there is no best-of-n curve. "
            "The most are %d",
            best_of,
            most,
        )
    for point in curve:
        metrics[f"eval/best_of/{point.n}"] = point.chosen.mean
        metrics[f"eval/best_of/{point.n}/low"] = point.chosen.low
        metrics[f"eval/best_of/{point.n}/high"] = point.chosen.high
        metrics[f"eval/best_of/{point.n}/oracle"] = point.best.mean
    return EvalSummary(metrics, intervals)


def sign_accuracy(
    prompts: Sequence[ScoredPrompt], heads: Sequence[str], settings: RewardModelConfig
) -> dict[str, float]:
    """Return ``eval/sign_accuracy`` of a model that was trained with ``cost_sign``, else nothing.

    A warning says why ratings give none.

    Args:
        prompts: The scored prompts.
        heads: Names of the heads with labels.
        settings: The heads and the losses of the model.
    """
    signed = signed_score(settings)
    if signed is None or signed[0] not in heads:
        return {}
    head, unsafe_from = signed
    rated = [(prompt, k) for prompt in prompts for k in prompt.rated(head)]
    scores = torch.tensor([one.scores[head][k] for one, k in rated], dtype=torch.float64)
    labels = torch.tensor([one.labels[head][k] for one, k in rated], dtype=torch.float64)
    data = rated_responses(scores, labels)
    try:
        problem = sign_problem(data, unsafe_from)
    except DataError as error:
        problem = str(error)
    if problem:
        log.warning("eval/sign_accuracy is left out for head %r: %s", head, problem)
        return {}
    return {"eval/sign_accuracy": float(right_signs(data, unsafe_from).double().mean())}


def _score_metrics(prompts: Sequence[ScoredPrompt], head: str) -> dict[str, float]:
    """Return the numbers of prompts, pairs and scores, and the distribution of the scores."""
    every: list[float] = []
    scores = 0
    for prompt in prompts:
        own = [prompt.scores[head][k] for k in prompt.rated(head)]
        every += own
        scores += len(prompt.lengths)
    mean = fsum(every) / len(every)
    spread = (fsum((score - mean) ** 2 for score in every) / len(every)) ** 0.5
    every.sort()
    found = {"prompts": len(prompts), "responses": scores, "unscored": scores - len(every)}
    without = sum(not any(prompt.pairs(head)) for prompt in prompts)
    quantiles = {}
    for share in (5, 25, 50, 75, 95):
        quantiles[f"score/p{share}"] = every[round(share / 100 * (len(every) - 1))]
    values = {
        **found,
        "prompts_without_pairs": without,
        "score/mean": mean,
        "score/std": spread,
        **quantiles,
    }
    return {f"eval/{name}": float(value) for name, value in values.items()}
