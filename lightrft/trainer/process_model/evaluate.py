"""Evaluate a saved process reward model on responses whose steps have labels."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from math import fsum
from pathlib import Path

from lightrft.algorithms.process_reward.quality import ScoredSteps, step_quality
from lightrft.config.base import changed_fields
from lightrft.config.reward_model.process import ProcessModelConfig
from lightrft.config.train import micro_batch_tokens
from lightrft.config.verbs import EvalRMConfig
from lightrft.datasets.process.process_dataset import ProcessDataset
from lightrft.datasets.row_warnings import check_rows, check_steps
from lightrft.datasets.sampler import report
from lightrft.distributed.process_group import SINGLE_PROCESS
from lightrft.learner.process_model.evaluation import by_source, metrics_of_steps, scored_steps
from lightrft.learner.process_model.step import ProcessModelSettings
from lightrft.models.processors import load_processor
from lightrft.models.reward.process import ProcessRewardModel
from lightrft.models.reward.process_form import PROCESS_FILE
from lightrft.observability.progress_bar import Progress
from lightrft.observability.run_directory import RunDirectory
from lightrft.rollout.eval_results.summary import EvalSummary
from lightrft.strategy.base import Strategy
from lightrft.trainer.checks.context_limits import check_examples
from lightrft.trainer.process_model.results import (
    scored_response,
    step_texts,
    write_step_report,
)
from lightrft.trainer.reward_model.results_file import RESULTS, ResultsFile, fingerprint
from lightrft.utils.errors import ConfigError, DataError
from lightrft.workers.local import local_tokenizer, strategy_of

MAY_DIFFER = ("run", "worst", "batch_size", "max_tokens_per_micro_batch", "strategy.device")
"""Settings that change no score, so that an evaluation may resume with others."""
OF_RESPONSES = ("head", "judgement", "sampling", "best_of")
"""Settings of ``eval-rm`` that no process reward model reads."""
F1 = "process_bench_f1"
"""Metric of a data source, the harmonic mean of the accuracies on wrong and on right responses."""


@dataclass(slots=True)
class EvaluatedProcessModel:
    """A process reward model that is not trained. See ``LayoutChecked``."""

    model: ProcessRewardModel
    layout_verified: bool = False


@dataclass(frozen=True, slots=True)
class _Prepared:
    """Model, device and rows of an evaluation.

    Attributes:
        model: The process reward model.
        strategy: Its device.
        dataset: The responses.
        settings: Settings of the forward pass and of the metrics.
        fingerprint: What changes when the files of the model change.
    """

    model: ProcessRewardModel
    strategy: Strategy
    dataset: ProcessDataset
    settings: ProcessModelSettings
    fingerprint: str


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
        responses = _score(config, found, path / RESULTS)
        form = found.settings.process_model
        result = measure(responses, form)
        write_step_report(path, found.dataset, responses, form.threshold, worst=config.worst)
        about = {
            "verb": "eval-rm",
            "model": config.model.path,
            "threshold": form.threshold,
            "responses": len(responses),
            "rows": dict(found.dataset.counts),
            "seconds": time.perf_counter() - began,
            "heldout_after": result.metrics["eval/step_accuracy"],
            "intervals": result.intervals_as_json(),
        }
        folder.write_summary({**about, **result.metrics})
    return result


def _prepare(config: EvalRMConfig) -> _Prepared:
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
    placed = ProcessModelSettings(
        form, micro_batch_tokens(config.max_tokens_per_micro_batch), dataset.data_sources
    )
    return _Prepared(model, strategy, dataset, placed, fingerprint(config.model, own))


def _score(config: EvalRMConfig, found: _Prepared, path: Path) -> list[ScoredSteps]:
    """Score the responses that are not in the file ``path`` yet. Return all of them.

    Args:
        config: Settings of the evaluation.
        found: Model and rows.
        path: The file of scores.
    """
    dataset, size = found.dataset, config.batch_size
    identity = {"data": dataset.digest(), "model": found.fingerprint}
    file = ResultsFile(path, scored_response, identity, size, len(dataset))
    with closing(file) as results:
        done = results.done
        model = EvaluatedProcessModel(found.model)
        parts = scored_steps(found.strategy, model, dataset, found.settings, size, begin=done)
        enabled = config.run.progress and done < len(dataset)
        with Progress(len(dataset), "eval-rm", done=done, enabled=enabled) as progress:
            for responses in parts:
                for response in responses:
                    results.add(response, step_texts(dataset, response.index))
                results.flush()
                progress.update({"step": responses[-1].index + 1})
        return results.rows


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
