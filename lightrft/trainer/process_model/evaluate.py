"""Evaluate a saved process reward model on responses whose steps have labels."""

from __future__ import annotations

import time
from dataclasses import dataclass
from math import fsum
from pathlib import Path

from lightrft.config.verbs import EvalRMConfig
from lightrft.datasets.process.process_dataset import ProcessDataset
from lightrft.datasets.row_warnings import check_text
from lightrft.datasets.sampler import report
from lightrft.distributed.process_group import SINGLE_PROCESS
from lightrft.learner.process_model.evaluation import evaluate_process_model
from lightrft.learner.process_model.step import ProcessModelSettings
from lightrft.models.processors import load_processor
from lightrft.models.reward.process import ProcessRewardModel
from lightrft.models.reward.process_form import PROCESS_FILE
from lightrft.observability.run_directory import RunDirectory
from lightrft.rollout.eval_results.summary import EvalSummary
from lightrft.utils.errors import ConfigError
from lightrft.workers.local import local_tokenizer, strategy_of

F1 = "process_bench_f1"
"""Metric of a data source, the harmonic mean of the accuracies on wrong and on right responses."""


@dataclass(slots=True)
class EvaluatedProcessModel:
    """A process reward model that is not trained. See ``LayoutChecked``."""

    model: ProcessRewardModel
    layout_verified: bool = False


def process_folder(path: str) -> str | None:
    """Return the folder of the process reward model of ``path``, or ``None`` if there is none.

    ``path`` may be a run folder of ``lightrft prm``.
    """
    for folder in (Path(path).expanduser() / "model", Path(path).expanduser()):
        if (folder / PROCESS_FILE).is_file():
            return str(folder)
    return None


def run_eval_steps(config: EvalRMConfig) -> EvalSummary:
    """Score steps by a process reward model. The metrics go to the run folder.

    ``eval/process_bench/average`` is the mean of the F1 of all data sources, as ProcessBench
    (arXiv 2412.06559) reports it over its subsets.

    Args:
        config: Settings of the evaluation, with rows in ``steps``.

    Raises:
        ConfigError: There are rows of responses too, or the run folder belongs to another
            evaluation.
        DataError: A row cannot be used.
    """
    if config.data.sources:
        raise ConfigError(
            "data.sources and steps.sources are both set; evaluate responses and steps one by one"
        )
    path = Path(config.run.dir).expanduser() / config.run.name
    began = time.perf_counter()
    ignored = ("run", "batch_size", "max_tokens_per_micro_batch", "strategy.device")
    folder = RunDirectory.open(
        path, config, resume=config.run.resume, overwrite=config.run.overwrite, ignore=ignored
    )
    with folder:
        metrics, rows = _measured(config)
        about = {
            "verb": "eval-rm",
            "model": config.model.path,
            "rows": rows,
            "seconds": time.perf_counter() - began,
            "heldout_after": metrics["eval/step_accuracy"],
        }
        folder.write_summary({**about, **metrics})
    return EvalSummary(metrics, {})


def _measured(config: EvalRMConfig) -> tuple[dict[str, float], dict[str, int]]:
    """Return the metrics of the steps, and the counts of their rows."""
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
    check_text(dataset, "steps.sources")
    placed = ProcessModelSettings(form, config.max_tokens_per_micro_batch, dataset.data_sources)
    found = evaluate_process_model(
        strategy, EvaluatedProcessModel(model), dataset, placed, config.batch_size
    ).compute()
    scores = [value for name, value in found.items() if name.count("/") == 2 and F1 in name]
    if scores:
        found["eval/process_bench/average"] = fsum(scores) / len(scores)
    return found, dict(dataset.counts)
