"""Monte-Carlo labels of the steps of solutions, as rows that train a process reward model."""

from __future__ import annotations

import itertools
import logging
import os
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import overload

from lightrft.config.data import ProcessDataConfig
from lightrft.config.rollout import SelectConfig
from lightrft.config.verbs import GenerateConfig, LabelStepsConfig
from lightrft.datasets.prompt_dataset import PromptDataset
from lightrft.datasets.row_parser import ParsedRow
from lightrft.datasets.row_tables import MalformedRow, look_up
from lightrft.datasets.row_writer.prompt_rows import PromptRows
from lightrft.datasets.sampler import EvalPrompts
from lightrft.engines.base import Engine
from lightrft.observability.observer import NullObserver, Observer
from lightrft.rewards.base import NullScorer, RewardScorer
from lightrft.rewards.startup_check import check_rewards
from lightrft.rollout.generation import requests_for
from lightrft.trainer.checks.preflight import check_whole_rewards, greedy_setting
from lightrft.trainer.pipelines.generate import (
    MAY_DIFFER,
    Collector,
    Inputs,
    free_output,
    indexed,
    loaded_engine,
    open_inputs,
    respond,
)
from lightrft.trainer.pipelines.journal import Journal
from lightrft.trainer.pipelines.selection import usable
from lightrft.trainer.pipelines.step_labels import Solution, Tally, labels_of, wanted
from lightrft.trainer.pipelines.training_rows import summary_of
from lightrft.types import Prompt, Request, Rollout
from lightrft.utils.atomic_files import json_line, sync_folder, write_json
from lightrft.utils.errors import ConfigError, DataError
from lightrft.utils.seeding import derive_seed

log = logging.getLogger(__name__)

PART = 64
"""Number of prompts whose solutions are continued together."""
Encoding = Callable[[Sequence[str]], list[list[int]]]
"""Returns the tokens of texts."""
STEP_COLUMNS = ("completions", "steps")
"""Usual columns of the steps of a solution."""


@dataclass(slots=True)
class StepCounts:
    """Numbers of a labelling.

    Attributes:
        prompts: prompts of the data.
        solutions: solutions that were labelled.
        rows: rows written.
        continuations: responses that continue a solution.
        scored: scored responses, with the solutions themselves.
        reached: scored responses that are right.
        labelled: steps with a label in the column ``labels``.
        right: steps whose label is above 0: some response is right.
        left_out: solutions without a row, and other losses, by reason.
    """

    prompts: int = 0
    solutions: int = 0
    rows: int = 0
    continuations: int = 0
    scored: int = 0
    reached: int = 0
    labelled: int = 0
    right: int = 0
    left_out: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        parts = [
            f"{self.prompts} prompts, {self.solutions} solutions, {self.continuations} "
            f"continuations; {self.right} of {self.labelled} labelled steps are right"
        ]
        parts += [f"{count} {why}" for why, count in self.left_out.items() if count]
        return "; ".join(parts)

    def warnings(self, threshold: float) -> list[str]:
        """Return a warning if ``steps.threshold`` divides no responses, else an empty list."""
        if 0 < self.reached < self.scored:
            return []
        share, label = ("all", 1) if self.reached else ("none", 0)
        return [
            f"steps.threshold = {threshold:g}: {share} of the {self.scored} scored responses "
            f"reached it, so that every label is {label}; set it to the smallest reward of a right "
            "response"
        ]


def run_label_steps(config: LabelStepsConfig, observer: Observer | None = None) -> StepCounts:
    """Label the steps of solutions, and write them to ``config.output``.

    A labelling that was interrupted resumes, and generates no continuation twice.

    Args:
        config: settings of the labelling.
        observer: receives the number of labelled steps. None for none.

    Raises:
        ConfigError: the settings cannot work, the output exists, or it was begun with others.
        DataError: no solution has a label, or the data has changed since it was begun.
    """
    check_label_steps(config)
    output = free_output(config)
    if config.run.overwrite:
        Journal.discard(solutions_of(output))
    inputs = open_inputs(config)
    config = inputs.config
    prompts = EvalPrompts(inputs.dataset, range(len(inputs.dataset)))
    check_rewards(config.reward, prompts, inputs.tokenizer)
    labelling = Labelling(inputs, prompts, output, observer or NullObserver())
    return labelling.run()


def check_label_steps(config: LabelStepsConfig) -> None:
    """Raise ``ConfigError`` for settings that cannot work."""
    if not config.data.sources:
        raise ConfigError(
            "data.sources is empty; name prompts with solutions, e.g. "
            "data.sources=[{path: solutions.jsonl}]"
        )
    if not config.reward.scores:
        raise ConfigError(
            "reward.terms is empty; name what scores a solution, e.g. reward.terms=[math]"
        )
    check_whole_rewards(config.reward, "label-steps")
    greedy = greedy_setting(config.sampling)
    for name, count in (
        ("steps.continuations", config.steps.continuations),
        ("samples", config.samples),
    ):
        if greedy and count > 1:
            raise ConfigError(
                f"{greedy}: all {count} responses are the same, so {name} = {count} measures "
                f"nothing; sample, e.g. with sampling.temperature=1, or set {name}=1"
            )
    if config.samples and config.steps.column:
        raise ConfigError(
            f"steps.column = {config.steps.column!r} is not read with samples = {config.samples}, "
            "which generates the solutions; leave one of them out"
        )
    if config.steps.search == "first_wrong" and config.steps.labels == "soft":
        raise ConfigError(
            "steps.search = 'first_wrong' with steps.labels = 'soft': the search skips steps, and a "
            "step that no response continues has no soft label; set steps.labels=hard, or "
            "steps.search=every"
        )


def solutions_of(output: Path) -> Path:
    """Return the file that the journal of generated solutions is named after."""
    return output.with_name(f"{output.stem}.solutions{output.suffix}")


class Labelling:
    """Labels of the steps of the solutions of prompts.

    Args:
        inputs: the model, its settings and the prompts.
        prompts: the prompts.
        output: the file to write.
        observer: receives the number of labelled steps.
    """

    def __init__(
        self,
        inputs: Inputs[LabelStepsConfig],
        prompts: EvalPrompts,
        output: Path,
        observer: Observer,
    ) -> None:
        self.inputs = inputs
        self.config = inputs.config
        self.prompts = prompts
        self.output = output
        self.observer = observer
        self.counts = StepCounts(prompts=len(prompts))
        self._may_differ = (*MAY_DIFFER, "steps.threshold", "steps.labels")

    def run(self) -> StepCounts:
        """Generate what is missing, and write the rows."""
        if not self.config.samples:
            found = given_solutions(self.inputs.dataset, self.config, self.counts.left_out)
            self._label(found, None)
            return self.counts
        with Journal.open(solutions_of(self.output), self.config, self._may_differ) as journal:
            journal.check_prompts(self.prompts)
            if len(journal) == len(self.prompts):
                self._label(self._generated(journal), None)
            else:
                more = self.config.sampling.max_new_tokens
                with loaded_engine(self.inputs, self.prompts, more) as loaded:
                    respond(_solving(self.config), self.prompts, journal, loaded[0], NullScorer())
                    self._label(self._generated(journal), loaded)
            journal.finish()
        return self.counts

    def _generated(self, journal: Journal) -> list[Solution]:
        """Return the solutions in ``journal`` that can be labelled."""
        found: list[Solution] = []
        for index in range(len(self.prompts)):
            # The media of a prompt that is missing cannot be read.
            if index not in journal:
                continue
            for answer in usable(journal[index], SelectConfig(), self.counts.left_out):
                separator = self.config.steps.separator
                found.append(Solution.split(index, answer.sample, answer.text, separator))
        return found

    def _label(
        self, solutions: Sequence[Solution], loaded: tuple[Engine, RewardScorer] | None
    ) -> None:
        """Label ``solutions``, and write the rows.

        Args:
            solutions: the solutions, in the order of their prompts.
            loaded: the engine and the scorer. None loads them if they are needed.
        """
        if not solutions:
            raise DataError(f"there is no solution to label ({self.counts})")
        self.counts.solutions = len(solutions)
        encoder = self.inputs.dataset.encoder
        encode = encoder.encode_sampled if self.config.samples else encoder.encode_answers
        prefixes = Prefixes(self.prompts, solutions, encode)
        with Journal.open(self.output, self.config, self._may_differ) as journal:
            journal.check_prompts(prefixes)
            journal.observer = self.observer
            self.observer.begin("label-steps", len(prefixes), len(journal))
            if len(journal):
                log.warning(
                    "%s: the labelling resumes; %d steps are complete", self.output, len(journal)
                )
            measured = Measured(prefixes, journal, self.config)
            if measured.missing:
                with (
                    loaded_engine(self.inputs, self.prompts, prefixes.longest)
                    if loaded is None
                    else nullcontext(loaded)
                ) as (engine, scorer):
                    measured.measure(engine, scorer)
            self._write(measured)
            journal.finish()

    def _write(self, measured: Measured) -> None:
        """Write the rows and the summary. Raises ``DataError`` if no step has a label."""
        media = self.output.with_name(f"{self.output.stem}_media")
        rows = PromptRows(self.inputs.dataset, ProcessDataConfig(), media)
        temporary = self.output.with_name(f".{self.output.name}.tmp")
        with temporary.open("w", encoding="utf-8") as file:
            for row in self._rows(measured, rows):
                file.write(json_line(row) + "\n")
            file.flush()
            os.fsync(file.fileno())
        if not self.counts.rows:
            temporary.unlink()
            raise DataError(
                f"no step has a label ({self.counts}); mend the reward, and give the same command "
                "again, which generates only what was not scored"
            )
        if rows.unlike:
            log.warning(
                "%d prompts are encoded to other tokens by prm without settings, the first: %s",
                rows.unlike,
                rows.first_unlike,
            )
        warnings = self.counts.warnings(self.config.steps.threshold)
        for warning in warnings:
            log.warning(warning)
        more = {"steps": self.config.steps.model_dump(mode="json"), "warnings": warnings}
        write_json(summary_of(self.output), {**_as_json(self.counts), **more})
        temporary.replace(self.output)
        sync_folder(self.output.parent)

    def _rows(self, measured: Measured, rows: PromptRows) -> Iterator[dict[str, object]]:
        for number, solution in enumerate(measured.prefixes.solutions):
            tallies = measured.tallies(number)
            count = len(solution.steps)
            self.counts.continuations += sum(
                t.scored + t.failed for k, t in tallies.items() if k < count
            )
            self.counts.scored += sum(t.scored for t in tallies.values())
            self.counts.reached += sum(t.right for t in tallies.values())
            self.counts.left_out["responses not scored"] += sum(t.failed for t in tallies.values())
            self.counts.left_out["continuations cut off"] += sum(
                t.truncated for t in tallies.values()
            )
            labels = labels_of(count, tallies, self.config.steps)
            chosen = labels.soft if self.config.steps.labels == "soft" else labels.hard
            if all(label is None for label in chosen):
                self.counts.left_out["solutions without a label"] += 1
                continue
            self.counts.rows += 1
            given = [label for label in chosen if label is not None]
            self.counts.labelled += len(given)
            self.counts.right += sum(label > 0 for label in given)
            prompt = self.prompts[solution.prompt]
            whole = tallies.get(count)
            yield {
                "id": f"{prompt.id}/{solution.sample}",
                "data_source": prompt.data_source,
                **rows.row(solution.prompt),
                "completions": list(solution.steps),
                "labels": chosen,
                "soft_labels": labels.soft,
                "hard_labels": labels.hard,
                "continuations": [
                    tallies[k].scored if k in tallies else 0 for k in range(1, count + 1)
                ],
                "correct": bool(whole.right) if whole is not None and whole.scored else None,
            }


class Prefixes(Sequence[Prompt]):
    """The first steps of solutions as prompts: one for each step of each solution, in order.

    Args:
        prompts: the prompts.
        solutions: their solutions.
        encode: returns the tokens of the starts of solutions.
    """

    def __init__(
        self, prompts: Sequence[Prompt], solutions: Sequence[Solution], encode: Encoding
    ) -> None:
        self.prompts = prompts
        self.solutions = solutions
        self.encode = encode
        sizes = [len(solution.steps) for solution in solutions]
        self.starts = [0, *itertools.accumulate(sizes)]

    def __len__(self) -> int:
        return self.starts[-1]

    @overload
    def __getitem__(self, i: int) -> Prompt: ...

    @overload
    def __getitem__(self, i: slice) -> Sequence[Prompt]: ...

    def __getitem__(self, i: int | slice) -> Prompt | Sequence[Prompt]:
        if isinstance(i, slice):
            return [self[k] for k in range(*i.indices(len(self)))]
        number, count = self.place(i)
        return self.prefix(number, count, self.prompts[self.solutions[number].prompt])

    def place(self, i: int) -> tuple[int, int]:
        """Return the number of a solution, and the number of its first steps."""
        number = bisect_right(self.starts, i) - 1
        return number, i - self.starts[number] + 1

    def place_of(self, number: int, count: int) -> int:
        """Return the place of the first ``count`` steps of solution ``number``."""
        return self.starts[number] + count - 1

    def prefix(self, number: int, count: int, prompt: Prompt) -> Prompt:
        """Return a prompt that ends with the first steps of a solution.

        Args:
            number: number of the solution.
            count: number of first steps.
            prompt: the prompt of the solution, with its media.
        """
        solution = self.solutions[number]
        text = solution.prefix(count)
        return replace(
            prompt,
            id=f"{prompt.id}/{solution.sample}/{count}",
            token_ids=[*prompt.token_ids, *self.encode([text])[0]],
            text=prompt.text + text,
        )

    @property
    def longest(self) -> int:
        """The number of tokens of the longest solution."""
        return max(map(len, self.encode([s.text for s in self.solutions])), default=0)


class Measured:
    """The responses that continue solutions, by the journal.

    Args:
        prefixes: the first steps of all solutions.
        journal: gets the responses.
        config: settings of the labelling.
    """

    def __init__(self, prefixes: Prefixes, journal: Journal, config: LabelStepsConfig) -> None:
        self.prefixes = prefixes
        self.journal = journal
        self.config = config
        self._tallies: dict[int, Tally] = {}
        self._of_prompt: dict[int, list[int]] = {}
        for number, solution in enumerate(prefixes.solutions):
            self._of_prompt.setdefault(solution.prompt, []).append(number)

    def tallies(self, number: int) -> dict[int, Tally]:
        """Return the responses of a solution by the number of first steps that they continue."""
        found: dict[int, Tally] = {}
        for count in range(1, len(self.prefixes.solutions[number].steps) + 1):
            index = self.prefixes.place_of(number, count)
            if index in self.journal and index not in self._tallies:
                tally = Tally.of(self.journal[index], self.config.steps.threshold)
                self._tallies[index] = tally
            if index in self._tallies:
                found[count] = self._tallies[index]
        return found

    def wanted(self, number: int) -> list[int]:
        """Return the numbers of first steps of a solution to continue next."""
        count = len(self.prefixes.solutions[number].steps)
        return wanted(count, self.tallies(number), self.config.steps)

    @property
    def missing(self) -> bool:
        """Some solution is not labelled yet."""
        return any(self.wanted(number) for number in range(len(self.prefixes.solutions)))

    def measure(self, engine: Engine, scorer: RewardScorer) -> None:
        """Continue all solutions that are not labelled yet.

        Args:
            engine: generates the responses.
            scorer: scores the responses.
        """
        prompts = self.prefixes.prompts
        assert isinstance(prompts, EvalPrompts)
        unfinished = (p for p, own in self._of_prompt.items() if any(map(self.wanted, own)))
        begin = next(unfinished, len(prompts))
        collector = Collector(self.journal, scorer, short_line)
        for first, part in prompts.parts(begin=begin):
            readable = indexed(prompts, part, first)
            while few := dict(itertools.islice(readable, PART)):
                # One round measures every prefix, or one step of each bisection.
                while self._round(few, engine, collector):
                    pass

    def _round(self, prompts: dict[int, Prompt], engine: Engine, collector: Collector) -> bool:
        """Continue what is wanted of the solutions of ``prompts``. Return False if nothing is.

        Args:
            prompts: prompts with their media, by index.
            engine: generates the responses.
            collector: writes the responses to the journal.
        """
        starts: dict[int, Started] = {}
        requests: list[Request] = []
        whole: list[Rollout] = []
        for index, prompt in prompts.items():
            for number in self._of_prompt.get(index, []):
                for count in self.wanted(number):
                    if count == len(self.prefixes.solutions[number].steps):
                        whole.append(self._whole(number, prompt, collector))
                        continue
                    own = self._requests(number, count, prompt)
                    collector.expect(self.prefixes.place_of(number, count), own[0].prompt, own)
                    started = Started(prompt, self.prefixes.solutions[number].prefix(count))
                    starts |= dict.fromkeys((request.seed for request in own), started)
                    requests += own
        for rollout in whole:
            collector.submit(rollout)
        for rollout in engine.generate(requests, self.config.sampling) if requests else ():
            collector.submit(starts[rollout.seed].continued(rollout))
            collector.collect(wait=False)
        collector.collect(wait=True)
        return bool(requests or whole)

    def _requests(self, number: int, count: int, prompt: Prompt) -> list[Request]:
        """Return the requests that continue the first ``count`` steps of a solution."""
        prefix = self.prefixes.prefix(number, count, prompt)
        (requests,) = requests_for(
            [prefix], self.config.steps.continuations, *self._seeds(number), first=count
        )
        return requests

    def _seeds(self, number: int) -> tuple[int | str, ...]:
        solution = self.prefixes.solutions[number]
        return self.config.run.seed, "label-steps", solution.prompt, solution.sample

    def _whole(self, number: int, prompt: Prompt, collector: Collector) -> Rollout:
        """Return a solution as a response to score."""
        solution = self.prefixes.solutions[number]
        count = len(solution.steps)
        request = Request(prompt, derive_seed(*self._seeds(number), "whole"))
        prefix = self.prefixes.prefix(number, count, prompt)
        collector.expect(self.prefixes.place_of(number, count), prefix, [request])
        ids = prefix.token_ids[len(prompt.token_ids) :]
        return Rollout(
            prompt, ids, *_given(len(ids)), "stop", seed=request.seed, text=solution.text
        )


@dataclass(frozen=True, slots=True)
class Started:
    """The start of a response: a prompt and the text of first steps."""

    prompt: Prompt
    text: str

    def continued(self, rollout: Rollout) -> Rollout:
        """Return the response to the prompt itself, of which ``rollout`` is the end."""
        ids = rollout.prompt.token_ids[len(self.prompt.token_ids) :]
        sampled, logprobs, versions = _given(len(ids))
        return replace(
            rollout,
            prompt=self.prompt,
            token_ids=[*ids, *rollout.token_ids],
            sampled=[*sampled, *rollout.sampled],
            logprobs=[*logprobs, *rollout.logprobs],
            versions=[*versions, *rollout.versions],
            text=self.text + rollout.text,
            plain=None if rollout.plain is None else self.text + rollout.plain,
        )


def _given(count: int) -> tuple[list[bool], list[float], list[int]]:
    """Return the columns ``sampled``, ``logprobs`` and ``versions`` of tokens of the data."""
    return [False] * count, [0.0] * count, [0] * count


def short_line(rollout: Rollout) -> dict[str, object]:
    """Return what labels read of a response."""
    names = ("sample", "finish_reason", "reward", "failed")
    return {name: getattr(rollout, name) for name in names}


def given_solutions(
    dataset: PromptDataset, config: LabelStepsConfig, left_out: Counter[str]
) -> list[Solution]:
    """Return the solutions in the rows of ``dataset``.

    Args:
        dataset: the prompts.
        config: settings of the labelling.
        left_out: counts rows without a solution.

    Raises:
        MalformedRow: a row has no solution, and ``data.bad_rows`` is ``error``.
    """
    found: list[Solution] = []
    for index in range(len(dataset)):
        record, _ = dataset.record(index)
        try:
            found.append(given_solution(record, index, config))
        except MalformedRow:
            if config.data.bad_rows == "error":
                raise
            left_out["rows without a solution"] += 1
    return found


def given_solution(record: ParsedRow, index: int, config: LabelStepsConfig) -> Solution:
    """Return the solution of a row. Raises ``MalformedRow`` if it has none.

    Args:
        record: the row.
        index: index of its prompt.
        config: settings of the labelling.
    """
    column, separator = config.steps.column, config.steps.separator
    value: object = None
    if column:
        value = look_up(record.row, column)
    else:
        value = next((v for v in map(record.row.get, STEP_COLUMNS) if v), record.answer)
    if isinstance(value, str) and value.strip():
        return Solution.split(index, 0, value, separator)
    is_steps = isinstance(value, list | tuple) and len(value) > 0
    if is_steps and all(isinstance(step, str) and step.strip() for step in value):
        return Solution.joined(index, 0, list(value), separator)
    where = f"column {column!r}" if column else "completions, steps or the response"
    raise MalformedRow(
        f"{record.where}: no solution in {where}: it must be a text or a list of steps, none of "
        f"them empty; the row has: {', '.join(record.row)}. Set steps.column, or samples to "
        "generate solutions"
    )


def _solving(config: LabelStepsConfig) -> GenerateConfig:
    """Return the settings that generate the solutions."""
    shared = {name: getattr(config, name) for name in ("run", "sampling", "samples")}
    return GenerateConfig().model_copy(update=shared)


def _as_json(counts: StepCounts) -> dict[str, object]:
    numbers = {name: getattr(counts, name) for name in StepCounts.__slots__}
    return {**numbers, "left_out": dict(counts.left_out)}
