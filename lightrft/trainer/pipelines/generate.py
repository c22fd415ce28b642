"""Batch generation: responses to every prompt, or the training rows that a selection makes."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from transformers import PreTrainedTokenizerBase

from lightrft.config.data import DataConfig
from lightrft.config.model import ModelConfig
from lightrft.config.rollout import SelectConfig
from lightrft.config.verbs import GenerateConfig, LabelStepsConfig
from lightrft.datasets.prompt_dataset import PromptDataset
from lightrft.datasets.sampler import EvalPrompts
from lightrft.engines.base import Engine
from lightrft.engines.constrained.grammars import check_column
from lightrft.models.processors import load_processor
from lightrft.observability.events import Requests, RolloutsEvent
from lightrft.observability.observer import NullObserver, Observer
from lightrft.rewards.base import RewardScorer
from lightrft.rewards.startup_check import check_rewards
from lightrft.rollout.evaluation import load_prompts
from lightrft.rollout.generation import requests_for
from lightrft.rollout.logprob_check import CheckedEngine
from lightrft.trainer.checks.context_limits import check_lengths, longest
from lightrft.trainer.checks.preflight import check_whole_rewards, greedy_setting
from lightrft.trainer.pipelines.journal import Journal
from lightrft.trainer.pipelines.selection import Counts
from lightrft.trainer.pipelines.training_rows import write_output
from lightrft.trainer.saved_policy import SavedPolicy, media_of, resolved
from lightrft.types import Prompt, Request, Rollout
from lightrft.utils.errors import ConfigError
from lightrft.workers.engine_kinds import kinds_to_check
from lightrft.workers.local import (
    local_policy,
    local_scorer,
    local_tokenizer,
    with_reward_models,
)

log = logging.getLogger(__name__)

MAY_DIFFER = (
    "run.name",
    "run.dir",
    "run.resume",
    "run.overwrite",
    "run.threads",
    "run.progress",
    "engine",
    "strategy",
    "reward.workers",
    "select",
)
"""Settings that may differ between a resumed generation and the one that began it."""

C = TypeVar("C", GenerateConfig, LabelStepsConfig)

Choose = Callable[[int], Sequence[int]]
"""Return the indices of the prompts to respond to, given the number of all prompts."""


@dataclass(frozen=True, slots=True)
class Generated:
    """The result of a generation.

    Attributes:
        counts: numbers of prompts, responses and rows.
        selected: True if a selection made the rows.
    """

    counts: Counts
    selected: bool

    def lines(self, output: str) -> str:
        """Return lines about the result for the terminal."""
        counts = self.counts
        if not self.selected:
            return f"{counts.responses} responses in {output}"
        return f"{counts.rows} rows in {output}\n{counts}"


def run_generate(
    config: GenerateConfig,
    choose: Choose | None = None,
    reader: DataConfig | None = None,
    observer: Observer | None = None,
) -> Generated:
    """Generate ``config.samples`` responses per prompt, and write them to ``config.output``.

    They are JSON lines in the order of the prompts. A generation that was interrupted resumes.

    Args:
        config: settings of the generation.
        choose: chooses the prompts. None takes all of them, in the order of the data.
        reader: data settings of the run that will train on the rows. None stands for the defaults.
        observer: receives the number of complete prompts. None for none.

    Raises:
        ConfigError: the settings cannot work, the output exists, or it was begun with others.
        DataError: the selection leaves no row, or the data has changed since it was begun.
    """
    check_generate(config)
    output = free_output(config)
    inputs = open_inputs(config)
    config, dataset = inputs.config, inputs.dataset
    check_condition(config.select, dataset)
    chosen = choose(len(dataset)) if choose else range(len(dataset))
    prompts = EvalPrompts(dataset, chosen)
    if config.reward.scores:
        check_rewards(config.reward, prompts, inputs.tokenizer)
    with Journal.open(output, config, MAY_DIFFER) as journal:
        journal.check_prompts(prompts)
        journal.observer = observer or NullObserver()
        journal.observer.begin("generate", len(prompts), len(journal))
        if len(journal):
            done = f"{len(journal)} of {len(prompts)} prompts are complete"
            log.warning("%s: the generation resumes; %s", output, done)
        if len(journal) < len(prompts):
            with loaded_engine(inputs, prompts) as (engine, scorer):
                respond(config, prompts, journal, engine, scorer)
        counts = write_output(config.select, output, journal, dataset, reader or DataConfig())
        journal.finish()
    if counts.first_failure:
        log.warning(
            "%d of %d responses were not scored, the first: %s",
            counts.failed,
            counts.responses,
            counts.first_failure,
        )
    return Generated(counts, config.select.keep != "all")


def check_generate(config: GenerateConfig) -> None:
    """Raise ``ConfigError`` for settings that cannot work."""
    if not config.data.sources:
        raise ConfigError(
            "data.sources is empty; name the prompts, e.g. data.sources=[{path: prompts.jsonl}]"
        )
    check_whole_rewards(config.reward, "generate")
    check_selection(config)


def check_selection(config: GenerateConfig) -> None:
    """Raise ``ConfigError`` if the settings leave ``select`` nothing to choose from."""
    keep, has_reward = config.select.keep, config.reward.scores
    if keep in ("all", "self_play"):
        return
    if not has_reward:
        raise ConfigError(
            f"select.keep = {keep!r} goes by rewards, and reward.terms is empty; name what scores "
            "a response, e.g. reward.terms=[math]"
        )
    compares = keep in ("best", "pairs", "ranked")
    if compares and config.samples == 1:
        raise ConfigError(
            f"select.keep = {keep!r} compares the responses to a prompt, and samples = 1; set "
            "samples to 2 or more, e.g. samples=8"
        )
    greedy = greedy_setting(config.sampling)
    if greedy and config.samples > 1:
        raise ConfigError(
            f"{greedy}: all {config.samples} responses to a prompt are the same, so select.keep = "
            f"{keep!r} has no choice; sample, e.g. with sampling.temperature=1"
        )


def check_condition(select: SelectConfig, dataset: PromptDataset) -> None:
    """Raise ``ConfigError`` for a system message without a chat template."""
    uses_system = select.keep == "conditioned" and select.condition.where == "system"
    if uses_system and not dataset.encoder.chat:
        raise ConfigError(
            "select.condition.where = 'system' needs a chat template, and none is in use; set "
            "select.condition.where=prompt"
        )


def free_output(config: GenerateConfig | LabelStepsConfig) -> Path:
    """Return the file to write. Raises ``ConfigError`` if it exists and must not be replaced."""
    output = Path(config.output).expanduser()
    if config.run.overwrite:
        Journal.discard(output)
    elif output.exists():
        raise ConfigError(f"output {output} exists; choose another name, or set run.overwrite=true")
    return output


@dataclass(frozen=True, slots=True)
class Inputs(Generic[C]):
    """The model of a generation, before it is loaded, and its prompts.

    Attributes:
        config: settings, in which a run folder is replaced by its checkpoint.
        model: the model to load.
        saved: the policy whose weights to load into the model, or None.
        tokenizer: tokenizer of the model.
        dataset: the prompts.
    """

    config: C
    model: ModelConfig
    saved: SavedPolicy | None
    tokenizer: PreTrainedTokenizerBase
    dataset: PromptDataset


def open_inputs(config: C) -> Inputs[C]:
    """Find the model that ``config`` names, and read the prompts."""
    model, saved = resolved(config.model)
    # Record the checkpoint itself, so that another one is refused on a resume.
    if saved is not None:
        path = {"path": str(saved.checkpoint)}
        config = config.model_copy(update={"model": config.model.model_copy(update=path)})
    tokenizer = local_tokenizer(model)
    processor = load_processor(model, tokenizer, media_of(saved))
    reward = config.reward if config.reward.scores else None
    dataset = load_prompts(
        config.data, tokenizer, config.run.seed, processor, reward, "data.sources"
    )
    return Inputs(config, model, saved, tokenizer, dataset)


@contextmanager
def loaded_engine(
    inputs: Inputs[Any], prompts: Sequence[Prompt], more: int = 0
) -> Generator[tuple[Engine, RewardScorer]]:
    """Load the model, and yield its engine and the scorer of its responses.

    Args:
        inputs: the model and its settings.
        prompts: the prompts.
        more: largest number of tokens between a prompt and a response.
    """
    config, model, saved = inputs.config, inputs.model, inputs.saved
    check_column(prompts, config.sampling, "sampling", "data")
    # Its processes start while the model is loaded.
    with closing(local_scorer(config.reward)) as functions:
        # A row of a source without reward could otherwise be met after hours of generation.
        if not config.reward.terms:
            functions.check_sources({prompt.data_source for prompt in prompts})
        weights = None if saved is None else saved.weights
        strategy, actor, engine = local_policy(
            model,
            config.strategy,
            config.engine,
            inputs.tokenizer,
            weights=weights,
            trains=False,
            media=kinds_to_check(config.engine, prompts),
        )
        tokens = longest(prompts) + more
        check_lengths(actor, engine, config.engine, tokens, config.sampling, "sampling", "data")
        scorer = with_reward_models(
            functions, config.reward, model, inputs.tokenizer, strategy.device
        )
        with closing(CheckedEngine(engine, actor, config.engine)) as checked:
            yield checked, scorer


def respond(
    config: GenerateConfig,
    prompts: EvalPrompts,
    journal: Journal,
    engine: Engine,
    scorer: RewardScorer,
) -> None:
    """Generate and score the responses that ``journal`` lacks.

    Args:
        config: settings of the generation.
        prompts: the prompts.
        journal: gets the responses to each prompt when all of them are scored.
        engine: generates the responses.
        scorer: scores the responses.
    """
    collector = Collector(journal, scorer, line_of)
    missing = (index for index in range(len(prompts)) if index not in journal)
    for first, part in prompts.parts(begin=next(missing, len(prompts))):
        requests: list[Request] = []
        for index, prompt in indexed(prompts, part, first):
            if index in journal:
                continue
            seeds = (config.run.seed, "generate")
            (group,) = requests_for([prompt], config.samples, *seeds, first=index)
            requests += group
            collector.expect(index, prompt, group)
        if not requests:
            continue
        for rollout in engine.generate(requests, config.sampling):
            collector.submit(rollout)
            collector.collect(wait=False)
        collector.collect(wait=True)


def indexed(
    prompts: Sequence[Prompt], part: Sequence[Prompt], first: int
) -> Iterator[tuple[int, Prompt]]:
    """Yield the prompts of ``part`` with their indices in ``prompts``.

    Args:
        prompts: all prompts.
        part: consecutive prompts of them, without those whose media cannot be read.
        first: index of the first prompt of the part, readable or not.
    """
    index = first
    for prompt in part:
        # The prompts after an unreadable one keep their indices, which give seeds and order.
        while prompts[index].id != prompt.id:
            index += 1
        yield index, prompt
        index += 1


@dataclass(slots=True)
class Expected:
    """A prompt whose responses are generated, and the number of them."""

    index: int
    prompt: Prompt
    count: int


@dataclass(slots=True)
class Collector:
    """Collects scored responses, and writes each group to the journal when it is complete.

    Args:
        journal: gets the groups.
        scorer: returns the scored responses.
        line: returns the line of a response.
    """

    journal: Journal
    scorer: RewardScorer
    line: Callable[[Rollout], dict[str, object]]
    _expected: dict[int, Expected] = field(default_factory=dict)
    _found: dict[int, list[Rollout]] = field(default_factory=lambda: defaultdict(list))

    def expect(self, index: int, prompt: Prompt, requests: Sequence[Request]) -> None:
        """Expect a response to each of ``requests``.

        Args:
            index: index of the prompt in the journal.
            prompt: the prompt.
            requests: all requests of the prompt. They have distinct seeds.
        """
        expected = Expected(index, prompt, len(requests))
        self._expected |= dict.fromkeys((request.seed for request in requests), expected)

    def submit(self, rollout: Rollout) -> None:
        """Submit a response for scoring. One whose generation failed gets no score."""
        if rollout.failed:
            self._add(rollout)
        else:
            self.scorer.submit(rollout)

    def collect(self, wait: bool) -> None:
        """Take the scored responses; with ``wait``, all of them."""
        for rollout in self.scorer.results(wait=wait):
            self._add(rollout)

    def _add(self, rollout: Rollout) -> None:
        expected = self._expected.pop(rollout.seed)
        group = self._found[expected.index]
        group.append(rollout)
        if len(group) == expected.count:
            # Responses come as they are finished, and scores in any order.
            ordered = sorted(self._found.pop(expected.index), key=lambda r: r.sample)
            lines = [self.line(one) for one in ordered]
            self.journal.add(expected.index, expected.prompt, lines)
            done = {"number": len(self.journal), "rollouts": ordered}
            event = RolloutsEvent(phase="generate", requests=Requests(check=_refuse), **done)
            self.journal.observer.event(event)


def _refuse(action: str, *_: Any) -> None:
    raise ConfigError(f"a generation can be watched, and has no {action}(); leave it out")


def line_of(rollout: Rollout) -> dict[str, object]:
    """Return a response as a line of the output."""
    line: dict[str, object] = {
        "id": rollout.prompt.id,
        "sample": rollout.sample,
        "prompt": rollout.prompt.text,
    }
    if rollout.prompt.attachments:
        line["attachments"] = [attachment.name for attachment in rollout.prompt.attachments]
    line |= {
        "response": rollout.text,
        "finish_reason": rollout.finish_reason,
        "label": rollout.prompt.label,
    }
    if rollout.reward is not None or rollout.failed:
        line |= {"reward": rollout.reward, "terms": rollout.terms, "failed": rollout.failed}
    return line
