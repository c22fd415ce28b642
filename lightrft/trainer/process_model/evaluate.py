"""Evaluate a saved process reward model on responses whose steps have labels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import fsum
from pathlib import Path

from lightrft.algorithms.process_reward.quality import (
    ScoredSteps,
    step_quality,
)
from lightrft.config.base import changed_fields
from lightrft.config.reward_model.sections import ProcessModelConfig
from lightrft.config.train import micro_batch_tokens
from lightrft.config.verbs import EvalRMConfig
from lightrft.datasets.process.process_dataset import ProcessDataset, ProcessExample
from lightrft.datasets.row_warnings import check_rows, check_steps
from lightrft.datasets.sampler import report
from lightrft.distributed.process_group import SINGLE_PROCESS
from lightrft.learner.reward_model.process import (
    ProcessModelSettings,
    StepNumbers,
    by_response,
    by_source,
    metrics_of_steps,
)
from lightrft.models.processors import load_processor
from lightrft.models.reward.process import ProcessRewardModel
from lightrft.models.reward.process_form import PROCESS_FILE
from lightrft.rollout.eval_results.summary import EvalSummary
from lightrft.trainer.checks.context_limits import check_examples
from lightrft.trainer.process_model.results import (
    scored_response,
    step_texts,
    write_step_report,
)
from lightrft.trainer.reward_model.evaluation import ScoredEvaluation, run_evaluation
from lightrft.types import Batch
from lightrft.utils.errors import ConfigError, DataError
from lightrft.workers.local import local_tokenizer, strategy_of

OF_RESPONSES = ("head", "judgement", "sampling", "best_of")
"""Settings of ``eval-rm`` that no process reward model reads."""
F1 = "process_bench_f1"
"""Metric of a data source, the harmonic mean of the accuracies on wrong and on right responses."""


def process_folder(path: str) -> str | None:
    """Return the folder of the process reward model of ``path``, or ``None`` if there is none.

    ``path`` may be a run folder of ``lightrft prm``.
    """
    for folder in (Path(path).expanduser() / "model", Path(path).expanduser()):
        if (folder / PROCESS_FILE).is_file():
            return str(folder)
    return None


def run_eval_steps(config: EvalRMConfig) -> EvalSummary:
    """Score steps by a process reward model. Scores, metrics and report data go to the run folder.

    ``eval/process_bench/average`` is the mean of the F1 of all data sources, as ProcessBench
    (arXiv 2412.06559) reports it over its subsets.

    Args:
        config: Settings of the evaluation, with rows in ``steps``.

    Raises:
        ConfigError: There are rows of responses too, or settings that only they read, or the run
            folder belongs to another evaluation.
        DataError: A row cannot be used.
    """
    if config.data.sources:
        raise ConfigError(
            "data.sources and steps.sources are both set; evaluate responses and steps one by one"
        )
    unread = [name for name in changed_fields(config) if name in OF_RESPONSES]
    if unread:
        raise ConfigError(
            f"{', '.join(sorted(unread))}: read for scores of whole responses, and steps.sources "
            "is set; leave them out"
        )
    return run_evaluation(config, _prepare)


def _prepare(config: EvalRMConfig) -> ScoredEvaluation:
    """Load model and rows."""
    steps = config.steps
    own = process_folder(config.model.path) or config.model.path
    settings = config.model.model_copy(update={"path": own})
    tokenizer = local_tokenizer(settings)
    processor = load_processor(settings, tokenizer)
    strategy = strategy_of(config.strategy, SINGLE_PROCESS)
    model = ProcessRewardModel.load(settings, device=strategy.device).requires_grad_(False)
    form = model.settings
    if config.threshold is not None:
        form = form.model_copy(update={"threshold": config.threshold})
    if model.separator is not None:
        # The model scores the separator that it was trained with.
        steps = steps.model_copy(update={"separator": model.separator.text})
    dataset = ProcessDataset(
        steps,
        tokenizer,
        max_tokens=config.max_tokens,
        seed=config.run.seed,
        processor=processor,
    )
    report("steps", dataset.counts, dataset.first_problem)
    check_rows(dataset, "steps.sources")
    check_steps(dataset, "steps")
    check_examples(model, dataset.longest, config.max_tokens)
    budget = micro_batch_tokens(config.max_tokens_per_micro_batch)

    def rows(
        examples: Sequence[ProcessExample], batch: Batch, numbers: StepNumbers
    ) -> list[ScoredSteps]:
        return list(by_response(examples, *numbers))

    def report_of(path: Path, responses: Sequence[ScoredSteps]) -> None:
        write_step_report(path, dataset, responses, form.threshold, worst=config.worst)

    return ScoredEvaluation(
        model=model,
        folder=own,
        strategy=strategy,
        dataset=dataset,
        settings=ProcessModelSettings(form, budget, dataset.data_sources),
        rows=rows,
        read=scored_response,
        texts=step_texts,
        measure=partial(measure, settings=form),
        report=report_of,
        about={"threshold": form.threshold},
        noun="responses",
        main="eval/step_accuracy",
    )


def measure(responses: Sequence[ScoredSteps], settings: ProcessModelConfig) -> EvalSummary:
    """Return all metrics of scored responses.

    Args:
        responses: The scored responses.
        settings: The settings of the model, with the threshold.

    Raises:
        DataError: No step has a label and a finite score.
    """
    metrics = metrics_of_steps(responses, settings).compute()
    if "eval/step_accuracy" not in metrics:
        raise DataError(
            "steps.sources: no step has a label and a finite score; look at results.jsonl"
        )
    groups = {"": list(responses), **by_source(responses)}
    scores = [metrics[name] for name in (f"eval/{key}/{F1}" for key in groups) if name in metrics]
    if scores:
        metrics["eval/process_bench/average"] = fsum(scores) / len(scores)
    intervals = {}
    for name, own in groups.items():
        accuracy = step_quality(own, settings.threshold).responses
        if accuracy is not None:
            intervals["/".join(filter(None, (name, "response_accuracy")))] = accuracy
    return EvalSummary(metrics, intervals)
