"""Evaluate a saved reward model on scored rows, whatever its unit: a response or a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightrft.config.verbs import EvalRMConfig
from lightrft.learner.reward_model.scoring import EvaluatedModel, ScoringSettings, scored
from lightrft.models.actor import Backbone
from lightrft.observability.progress_bar import Progress
from lightrft.observability.run_directory import RunDirectory
from lightrft.rollout.eval_results.summary import EvalSummary
from lightrft.strategy.base import Strategy
from lightrft.trainer.reward_model.results import RESULTS, ResultsFile, Shown, fingerprint

MAY_DIFFER = (
    *("run", "best_of", "worst", "batch_size", "max_tokens_per_micro_batch", "strategy.device"),
)
"""Settings that change no score, so that an evaluation may resume with others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredEvaluation:
    """Model and rows of an evaluation, and how its scores are kept and measured.

    Attributes:
        model: The reward model.
        folder: Its folder.
        strategy: Its device.
        dataset: The rows, a ``PreferenceDataset`` or a ``ProcessDataset``.
        settings: Settings of the forward pass.
        rows: Returns the scored rows of examples, their batch and the outputs of the model.
        read: Reads the fields of a line as a scored row.
        texts: Returns the texts of a row, from ``dataset`` and its index.
        measure: Returns all metrics of scored rows.
        report: Writes the content of the report to the run folder, from scored rows.
        about: Further fields of the summary.
        noun: Name of the number of rows in the summary.
        main: Metric that stands for the evaluation.
    """

    model: Backbone
    folder: str
    strategy: Strategy
    dataset: Any
    settings: ScoringSettings[Any, Any, Any]
    rows: Callable[..., Sequence[Any]]
    read: Callable[[Shown], Any]
    texts: Callable[[Any, int], Shown]
    measure: Callable[[Sequence[Any]], EvalSummary]
    report: Callable[[Path, Sequence[Any]], None]
    about: Mapping[str, object]
    noun: str
    main: str


def run_evaluation(
    config: EvalRMConfig, prepare: Callable[[EvalRMConfig], ScoredEvaluation]
) -> EvalSummary:
    """Score the rows of an evaluation. Scores, metrics and report data go to the run folder.

    Raises ``ConfigError`` if the run folder belongs to another evaluation.
    """
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
        found = prepare(config)
        rows = _score(config, found, path / RESULTS)
        result = found.measure(rows)
        found.report(path, rows)
        about = {
            "verb": "eval-rm",
            "model": config.model.path,
            **found.about,
            found.noun: len(rows),
            "rows": dict(found.dataset.counts),
            "seconds": time.perf_counter() - began,
            "heldout_after": result.metrics[found.main],
            "intervals": result.intervals_as_json(),
        }
        folder.write_summary({**about, **result.metrics})
    return result


def _score(config: EvalRMConfig, found: ScoredEvaluation, path: Path) -> list[Any]:
    """Score the rows that are not in the file ``path`` yet. Return all of them.

    Args:
        config: Settings of the evaluation.
        found: Model and rows.
        path: The file of scores.
    """
    dataset, size = found.dataset, config.batch_size
    identity = {"data": dataset.digest(), "model": fingerprint(config.model, found.folder)}
    with closing(ResultsFile(path, found.read, identity, size, len(dataset))) as results:
        done, model = results.done, EvaluatedModel(found.model)
        parts = scored(found.strategy, model, dataset, found.settings, size, begin=done)
        enabled = config.run.progress and done < len(dataset)
        with Progress(len(dataset), "eval-rm", done=done, enabled=enabled) as progress:
            for examples, batch, outputs in parts:
                for row in found.rows(examples, batch, outputs):
                    results.add(row, found.texts(dataset, row.index))
                results.flush()
                progress.update({"step": examples[-1].index + 1})
        return results.rows
