"""Evaluate a saved reward model on responses whose order is known, such as those of benchmarks.

The data source of a row names its benchmark and its subset, as readers of
``lightrft.datasets.benchmarks.reward_bench`` write it: ``reward_bench_2/Factuality``. A model that
judges by text is evaluated by ``lightrft eval``, with the settings of ``as_evaluation``.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import fsum
from pathlib import Path
from statistics import fmean

from lightrft.algorithms.reward_model.benchmarks import (
    RewardBench2Row,
    reward_bench,
    reward_bench_2,
)
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
from lightrft.config.base import changed_fields
from lightrft.config.data import Columns, DataConfig
from lightrft.config.reward_model.judgement import JudgementConfig
from lightrft.config.reward_model.sections import RewardModelConfig
from lightrft.config.rollout import EvalConfig
from lightrft.config.train import micro_batch_tokens
from lightrft.config.verbs import AGREEMENT, EvalRMConfig, EvaluateConfig, JudgeTrainingConfig
from lightrft.datasets.preference.preference_dataset import PreferenceDataset
from lightrft.datasets.row_warnings import check_rows
from lightrft.datasets.sampler import report
from lightrft.distributed.process_group import SINGLE_PROCESS
from lightrft.learner.reward_model.evaluation import head_metrics, scored_prompts
from lightrft.learner.reward_model.step import RewardModelSettings
from lightrft.models.processors import load_processor
from lightrft.models.reward.other_layouts import holds_other_head
from lightrft.models.reward.reward_model import RewardModel
from lightrft.models.reward.saved_form import SETTINGS_FILE, read_form
from lightrft.rollout.eval_results.summary import EvalSummary
from lightrft.trainer.checks.context_limits import check_examples
from lightrft.trainer.inference import run_eval
from lightrft.trainer.process_model.evaluate import process_folder, run_eval_steps
from lightrft.trainer.reward_model.evaluation import ScoredEvaluation, run_evaluation
from lightrft.trainer.reward_model.results import scored_prompt, texts_of, write_report_data
from lightrft.utils.errors import ConfigError, DataError, did_you_mean
from lightrft.utils.lazy_imports import torch
from lightrft.utils.peft_folder import merge_hint
from lightrft.workers.local import local_tokenizer, strategy_of

log = logging.getLogger(__name__)


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
    return run_evaluation(config, _prepare)


def _prepare(config: EvalRMConfig) -> ScoredEvaluation:
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
    budget = micro_batch_tokens(config.max_tokens_per_micro_batch)

    def measured(prompts: Sequence[ScoredPrompt]) -> EvalSummary:
        result = measure(prompts, heads, model.score_names, config.best_of)
        result.metrics.update(sign_accuracy(prompts, heads, model.settings))
        return result

    def report_of(path: Path, prompts: Sequence[ScoredPrompt]) -> None:
        worst, best_of = config.worst, config.best_of
        write_report_data(path, dataset, prompts, heads[0], worst=worst, best_of=best_of)

    return ScoredEvaluation(
        model=model,
        folder=settings.path,
        strategy=strategy,
        dataset=dataset,
        settings=RewardModelSettings(model.settings, budget, heads, dataset.data_sources),
        rows=partial(scored_prompts, heads=heads),
        read=scored_prompt,
        texts=texts_of,
        measure=measured,
        report=report_of,
        about={"head": heads[0]},
        noun="prompts",
        main="eval/pair_accuracy",
    )


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


log = logging.getLogger(__name__)

Scores = dict[str, float]
"""Scores of a benchmark, by name."""


def suite_metrics(prompts: Sequence[ScoredPrompt], head: str) -> Scores:
    """Return the scores of each benchmark that ``prompts`` belong to, as ``eval/<name>/...``.

    A benchmark whose rows are incomplete has no scores, and the reason is logged.

    Args:
        prompts: The scored prompts.
        head: Head whose scores count.
    """
    rows: dict[str, list[ScoredPrompt]] = {}
    for prompt in prompts:
        name, slash, _ = prompt.source.partition("/")
        if slash and name in SUITES:
            rows.setdefault(name, []).append(prompt)
    found: Scores = {}
    for name, own in rows.items():
        try:
            scores = SUITES[name](own, head)
        except DataError as error:
            log.warning("%s has no score: %s", name, error)
            continue
        found |= {f"eval/{name}/{part}": value for part, value in scores.items()}
    return found


def _reward_bench(prompts: Sequence[ScoredPrompt], head: str) -> Scores:
    subsets, chosen, rejected = [], [], []
    for prompt in prompts:
        right, wrong = _sides(prompt, head)
        subsets.append(_subset(prompt))
        chosen.append(right[0])
        rejected.append(wrong[0])
    found = reward_bench(subsets, chosen, rejected)
    return {"score": found.score, **found.sections}


def _reward_bench_2(prompts: Sequence[ScoredPrompt], head: str) -> Scores:
    rows = []
    for prompt in prompts:
        right, wrong = _sides(prompt, head)
        rows.append(RewardBench2Row(_subset(prompt), [*right, *wrong], prompt.id, len(right)))
    found = reward_bench_2(rows)
    return {"score": found.score, **found.subsets}


def _mean_of_subsets(prompts: Sequence[ScoredPrompt], head: str) -> Scores:
    """Return the accuracy over all pairs, and its mean over subsets."""
    of_subset: dict[str, list[ScoredPrompt]] = {}
    for prompt in prompts:
        of_subset.setdefault(_subset(prompt), []).append(prompt)
    accuracies = []
    for own in (prompts, *of_subset.values()):
        pairs = judged_pairs(own, head)
        if not pairs:
            raise DataError(f"subset {_subset(own[0])} has no pair with finite scores")
        accuracies.append(pair_accuracy(pairs).mean)
    return {"score": accuracies[0], "mean_of_subsets": fmean(accuracies[1:])}


SUITES: Mapping[str, Callable[[Sequence[ScoredPrompt], str], Scores]] = {
    "reward_bench": _reward_bench,
    "reward_bench_2": _reward_bench_2,
    "vl_rewardbench": _mean_of_subsets,
    "multimodal_rewardbench": _mean_of_subsets,
}
"""Scorers of benchmarks, by the name of their reader."""


def _subset(prompt: ScoredPrompt) -> str:
    return prompt.source.partition("/")[2]


def _sides(prompt: ScoredPrompt, head: str) -> tuple[list[float], list[float]]:
    """Return the scores of the responses with the highest label, and those of the others."""
    labels = prompt.labels[head]
    highest = max(labels)
    right, wrong = [], []
    for score, label in zip(prompt.scores[head], labels):
        (right if label == highest else wrong).append(score)
    if not right or not wrong:
        raise DataError(f"row {prompt.id!r} lacks a right or a wrong response")
    return right, wrong


OF_HEADS = ("head", "max_tokens", "batch_size", "max_tokens_per_micro_batch", "best_of", "worst")
"""Settings of ``eval-rm`` that only a model with heads reads."""


def asked(judgement: JudgementConfig) -> JudgementConfig:
    """Return the questions of an evaluation: in both orders, and ratings where none is the best."""
    found = JudgeTrainingConfig(judgement=judgement).held_out
    if found.form not in ("best", "rating"):
        return found
    return found.model_copy(update={"rate_best": True})


def as_evaluation(config: EvalRMConfig) -> EvaluateConfig:
    """Return the settings of ``lightrft eval`` that evaluate a generative reward model.

    Comparisons are asked in both orders.

    Args:
        config: Settings of ``lightrft eval-rm``, with ``judgement``.

    Raises:
        ConfigError: A setting is given that only a model with heads reads.
    """
    assert config.judgement is not None
    columns = config.data.columns
    unread = [name for name in changed_fields(config) if name in OF_HEADS]
    unread += [
        f"data.columns.{n}" for n in changed_fields(columns) if n not in Columns.model_fields
    ]
    if unread:
        raise ConfigError(
            f"{', '.join(sorted(unread))}: read for a model with heads, and judgement is set; "
            "leave them out"
        )
    names = DataConfig.model_fields.keys() - {"columns", "judgement"}
    given = {name: getattr(config.data, name) for name in names}
    given["columns"] = Columns(**{name: getattr(columns, name) for name in Columns.model_fields})
    given["judgement"] = asked(config.judgement)
    evaluation = EvalConfig(data=DataConfig(**given), sampling=config.sampling)
    return EvaluateConfig(
        run=config.run,
        model=config.model,
        eval=evaluation,
        reward=AGREEMENT,
        strategy=config.strategy,
    )
