"""Preference learning on responses that each step samples: online DPO (OAIF, arXiv 2402.04792)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from lightrft.algorithms.preference.requirements import PreferenceRequirements
from lightrft.config.base import ComponentConfig
from lightrft.config.preference.sections import OnlineConfig, PreferenceKind
from lightrft.config.rollout import RolloutConfig
from lightrft.config.verbs import DPOConfig
from lightrft.datasets.preference.preference_dataset import PreferenceExample, PreferenceResponse
from lightrft.datasets.preference.preference_rows import dense_ranks, margins_of
from lightrft.learner.preference_batch import preference_to_batch
from lightrft.learner.preference_step import preference_step
from lightrft.learner.reference_update import update_reference
from lightrft.learner.sft_step import with_sources
from lightrft.models.processors import load_processor
from lightrft.observability.metrics import Metrics, Sum
from lightrft.observability.run_health import Health
from lightrft.rollout.accounting import (
    CollectedRollouts,
    FilterResult,
    filter_and_select,
    rollout_metrics,
)
from lightrft.rollout.collate import collate
from lightrft.rollout.collect import CollectSettings, collect_rollouts
from lightrft.rollout.logprob_check import check_batch
from lightrft.rollout.prompt_stream import PromptStream
from lightrft.rollout.row_check import check_labels
from lightrft.trainer.checks.context_limits import check_lengths
from lightrft.trainer.checks.preflight import check_enough
from lightrft.trainer.preference.base import (
    PreferenceRun,
    load_roles,
    load_validation,
    preference_settings,
)
from lightrft.trainer.preference.checks import online_source
from lightrft.trainer.run_session import RunSession
from lightrft.trainer.supervised import loaded_eval_prompts, try_rewards
from lightrft.trainer.training_loop import TrainingRun
from lightrft.types import Rollout
from lightrft.utils.errors import RewardError, before_update
from lightrft.utils.state_io import State
from lightrft.workers.local import local_tokenizer

MOST_IDLE_STEPS = 10
"""Number of steps in a row without an example after which a run stops."""


@dataclass(slots=True, kw_only=True)
class OnlinePreferenceRun(PreferenceRun):
    """A run whose steps sample responses to the prompts of ``stream`` and compare their rewards.

    Attributes:
        stream: Source of the prompts.
        collect: Decides which groups a step collects.
        idle_steps: Number of newest steps in a row without an example.
    """

    stream: PromptStream
    collect: CollectSettings
    idle_steps: int = 0

    def begin(self) -> None:
        """See ``TrainingRun.begin``."""
        config, dataset = self.config, self.stream.dataset
        # A row of a source without reward could otherwise be sampled after hours of training.
        if not config.reward.terms:
            self.roles.scorer.check_sources(dataset.data_sources)
        check_lengths(
            self.roles.actor,
            self.roles.engine,
            config.engine,
            dataset.longest,
            config.sampling,
            "sampling",
            "data",
        )
        TrainingRun.begin(self)

    @property
    def samples(self) -> bool:
        """See ``PolicyRun.samples``."""
        return True

    def train_step(self) -> Metrics:
        """Sample and score groups, and take one step on the examples that they give."""
        with self.stream.restore_on_error():
            collected = self.sample()
            idle = 0 if collected.groups else self.idle_steps + 1
            if idle >= MOST_IDLE_STEPS:
                raise RewardError(why_idle(idle, collected, self.config))
        self.idle_steps = idle
        examples = self.examples(collected)
        metrics = rollout_metrics(collected)
        metrics.merge(self.learn(collected, examples))
        self.write(collected, examples)
        return metrics

    def sample(self) -> CollectedRollouts:
        """Sample groups until ``batch_size`` of them give an example.

        Raises ``GenerationInterrupted`` if the run is asked to stop meanwhile.
        """
        stopped = lambda: bool(self.session.stop)  # noqa: E731
        with before_update(), self.roles.generation_mode():
            collected = collect_rollouts(
                self.roles, self.collect, self.step, self.stream, self.session.timers, stopped
            )
        # A mismatched pair needs two prompts.
        if self.settings.requirements.kl and len(collected.groups) == 1:
            collected.drop_groups("one_prompt")
        return collected

    def examples(self, collected: CollectedRollouts) -> list[PreferenceExample]:
        """Return the examples of the groups to train on."""
        kind, threshold = self.settings.requirements.kind, self.config.online.threshold
        return [example_of(group, kind, threshold) for group in collected.groups]

    def learn(self, collected: CollectedRollouts, examples: Sequence[PreferenceExample]) -> Metrics:
        """Take one step on ``examples``, or none if there are none."""
        config, timers = self.config, self.session.timers
        # In steps without an example too: the schedule counts steps.
        update_reference(self.roles, config.preference.reference, self.step)
        if not examples:
            return Metrics({"preference/tokens": Sum(0), "preference/responses": Sum(0)})
        with timers("layout"):
            batch = collate(collected.groups)
            check_batch(self.roles, batch, config.sampling, config.engine, self.step)
        with timers("update"):
            sources = self.stream.dataset.data_sources
            batch = with_sources(preference_to_batch(examples), examples, sources)
            return preference_step(self.roles, batch, self.settings, self.stats, self.step)

    def write(self, collected: CollectedRollouts, examples: Sequence[PreferenceExample]) -> None:
        """Show the responses of a step, with their ranks or labels."""
        ranks: dict[int, int | None] = {}
        labels: dict[int, bool | None] = {}
        for group, example in zip(collected.groups, examples):
            for rollout, response in zip(group, example.responses):
                ranks[id(rollout)] = response.rank
                labels[id(rollout)] = response.desirable
        drawn = collected.rollouts
        self.show(
            drawn,
            collected.failures,
            rank=[ranks.get(id(rollout)) for rollout in drawn],
            desirable=[labels.get(id(rollout)) for rollout in drawn],
        )

    def state(self) -> State:
        """Return the state of the prompts, of the running numbers and of a moving reference."""
        return {**self.stream.state_dict(), **self.carried(), "idle_steps": self.idle_steps}

    def load_state(self, state: State) -> None:
        """Restore the result of ``state``."""
        self.stream.load_state_dict(state)
        self.load_carried(state)
        self.idle_steps = state["idle_steps"]

    def close(self) -> None:
        """Cancel reads of media that have not started, and close the roles."""
        self.stream.close()
        PreferenceRun.close(self)


def why_idle(steps: int, collected: CollectedRollouts, config: DPOConfig) -> str:
    """Return why no step learns anything, and what to change.

    Args:
        steps: Number of steps in a row without an example.
        collected: The groups of the last of them.
        config: Settings of the run.
    """
    reasons = ", ".join(f"{count} {reason}" for reason, count in collected.dropped.most_common())
    rewards = [r.reward for r in collected.rollouts if r.reward is not None]
    found = f"{min(rewards):g} to {max(rewards):g}" if rewards else "none"
    terms = dict.fromkeys(term.function for term in config.reward.terms)
    for own in config.reward.per_source.values():
        terms |= dict.fromkeys(term.function for term in own)
    return (
        f"{steps} steps in a row had no responses to compare (groups of the last: "
        f"{reasons}; rewards: {found}). Look at rollouts/ in the run folder: can the policy reach "
        f"different rewards by reward.terms = {', '.join(terms)}? Raise online.group_size or "
        "sampling.temperature, or take other prompts or another reward"
    )


def prepare_online(
    config: DPOConfig, requirements: PreferenceRequirements, session: RunSession
) -> OnlinePreferenceRun:
    """Load prompts and roles of a run, at step 0.

    Args:
        config: Settings of the run.
        requirements: What the losses read.
        session: Folder, metrics and timers of the run.
    """
    tokenizer = local_tokenizer(config.model)
    processor = load_processor(config.model, tokenizer, config.data.media)
    stream = PromptStream.of(config.data, tokenizer, config.run.seed, processor=processor)
    validation = load_validation(config, requirements, tokenizer, processor)
    check_enough("batch_size", config.batch_size, len(stream.dataset), "prompts")
    steps = config.train.count_steps(len(stream.dataset), config.batch_size)
    check_labels(stream.dataset, config.reward, "data.sources")
    prompts = loaded_eval_prompts(config, tokenizer, processor, session, stream.dataset)
    try_rewards(config.reward, stream.without_media, tokenizer, session.ranks)
    source = online_source(config, requirements)
    always_learns = requirements.kind == "labelled" and config.online.threshold is not None
    return OnlinePreferenceRun(
        session=session,
        eval_prompts=prompts,
        roles=load_roles(
            config, source, session, tokenizer, processor, steps, [prompts, stream.dataset]
        ),
        steps=steps,
        health=Health(frozenset() if always_learns else frozenset({"groups"})),
        config=config,
        settings=preference_settings(config, requirements, stream.dataset.data_sources),
        validation=validation,
        source=source,
        stream=stream,
        collect=collect_settings(config, requirements),
    )


def collect_settings(config: DPOConfig, requirements: PreferenceRequirements) -> CollectSettings:
    """Return the settings that decide which groups a step collects."""
    online = config.online
    rollout = RolloutConfig(
        prompts_per_step=config.batch_size,
        group_size=online.group_size,
        max_rounds=online.max_rounds,
    )
    judge = PreferenceJudge(requirements.kind, online)
    return CollectSettings(rollout, config.sampling, judge, config.run.seed, config.engine)


MISSING_EOS = "missing_eos"
"""Reward term of a response that the length limit cut."""
DIFFERENT_REWARDS = ComponentConfig(name="zero_variance")
"""The filter of groups that have nothing to compare."""


@dataclass(frozen=True, slots=True)
class PreferenceJudge:
    """Decides which responses of a group are compared.

    Attributes:
        kind: What the losses read.
        online: The settings ``online``.
    """

    kind: PreferenceKind
    online: OnlineConfig

    def __call__(self, group: Sequence[Rollout]) -> FilterResult:
        """Return the responses to compare, or the reason why the group gives no example.

        The penalty of a cut response becomes part of its reward.
        """
        penalise_cut(group, self.online.missing_eos_penalty)
        if self.kind == "labelled" and self.online.threshold is not None:
            return filter_and_select(group, (), None, 1)
        verdict = filter_and_select(group, (DIFFERENT_REWARDS,), None, 2)
        if verdict.reason or self.kind == "labelled":
            return verdict
        kept = verdict.kept
        if self.kind == "pair" and self.online.pairs == "best_worst":
            kept = best_and_worst(kept)
        # As of a noisy judge. Nothing can be learned from a response that beats itself.
        if contradict(kept):
            return FilterResult(reason="equal_responses")
        return FilterResult(kept)


def penalise_cut(group: Sequence[Rollout], penalty: float) -> None:
    """Subtract ``penalty`` from the reward of each response that the length limit cut."""
    if not penalty:
        return
    for rollout in group:
        if rollout.reward is None:
            continue
        is_cut = rollout.finish_reason == "length"
        rollout.reward -= penalty * is_cut
        rollout.terms[MISSING_EOS] = float(is_cut)
        rollout.weights[MISSING_EOS] = -penalty


def reward_of(rollout: Rollout) -> float:
    """Return the reward of a scored response."""
    assert rollout.reward is not None
    return rollout.reward


def best_and_worst(group: Sequence[Rollout]) -> list[Rollout]:
    """Return the response of the highest and that of the lowest reward.

    Of equal rewards it is the first response, which is as random as any.
    """
    return [max(group, key=reward_of), min(group, key=reward_of)]


def contradict(group: Sequence[Rollout]) -> bool:
    """Return True if two responses of equal tokens have different rewards."""
    responses = {tuple(rollout.token_ids) for rollout in group}
    scored = {(tuple(rollout.token_ids), rollout.reward) for rollout in group}
    return len(scored) > len(responses)


def example_of(
    group: Sequence[Rollout], kind: PreferenceKind, threshold: float | None
) -> PreferenceExample:
    """Build the example of a group that ``PreferenceJudge`` has kept.

    The reward of a response is its rating. Its margin is the distance to the next lower reward.

    Args:
        group: Scored responses to one prompt.
        kind: What the losses read.
        threshold: The setting ``online.threshold``.
    """
    prompt = group[0].prompt
    rewards = [reward_of(rollout) for rollout in group]
    ranks: Sequence[int | None] = [None] * len(group)
    labels: Sequence[bool | None] = [None] * len(group)
    margins: Sequence[float | None] = [None] * len(group)
    if kind == "labelled":
        labels = desirable(rewards, threshold)
    else:
        ordered = dense_ranks([-reward for reward in rewards])
        ranks, margins = ordered, margins_of(rewards, ordered)
    responses: list[PreferenceResponse] = []
    for k, rollout in enumerate(group):
        responses.append(
            PreferenceResponse(
                rollout.token_ids,
                rollout.sampled,
                rank=ranks[k],
                desirable=labels[k],
                rating=rewards[k],
                margin=margins[k],
            )
        )
    return PreferenceExample(
        prompt.token_ids,
        responses,
        prompt.id,
        data_source=prompt.data_source,
        prompt_media=prompt.media,
    )


def desirable(rewards: Sequence[float], threshold: float | None) -> list[bool]:
    """Return the label of each response of a group.

    Args:
        rewards: Rewards of the group.
        threshold: Smallest reward of a desirable response. None takes those above the mean.
    """
    if threshold is not None:
        return [reward >= threshold for reward in rewards]
    mean = fmean(rewards)
    return [reward > mean for reward in rewards]
