"""A policy that a program trains by a loop of its own, with the functions of a step of ``rl``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from lightrft.api.calls import Given, is_elsewhere, read, show_warnings, take_callbacks
from lightrft.api.progress import watching
from lightrft.api.run import Run
from lightrft.api.signatures import check_call
from lightrft.api.start import check_trained, set_threads
from lightrft.config.base import changed_fields
from lightrft.config.texts.python_form import python_messages
from lightrft.config.verbs import RLConfig
from lightrft.distributed.process_group import broadcast_failure, init_process_group
from lightrft.learner.policy_update import Objective, TokenLosses, policy_loss, with_loss_columns
from lightrft.observability.events import Callbacks
from lightrft.observability.metrics import Last
from lightrft.observability.trackers import ReadRow
from lightrft.rewards.base import NullScorer
from lightrft.rollout.accounting import CollectedRollouts
from lightrft.rollout.collect import check_scored, generate_on_ranks, score_on_ranks
from lightrft.rollout.generation import requests_for
from lightrft.trainer.checks.check_config import check
from lightrft.trainer.phases import PHASES, StepContext, run_phases, update_models
from lightrft.trainer.rl import RLRun, prepare
from lightrft.trainer.rl_step import checked_batch, collect_settings, step_result
from lightrft.trainer.run_session import open_session
from lightrft.trainer.training_loop import (
    begin_steps,
    end_steps,
    finish_step,
    resume_from_checkpoint,
    save_after_error,
    seed_step,
)
from lightrft.types import Batch, Prompt, Rollout
from lightrft.utils.errors import (
    ConfigError,
    GenerationInterrupted,
    HintedAttributes,
    RewardError,
    UserError,
    before_update,
)
from lightrft.utils.seeding import derive_seed, torch_generator


class Policy(HintedAttributes):
    """The policy of a run of ``rl``, for a program that writes the loop itself.

    The methods are the parts of a step of ``lightrft.rl``, in the order of the example. The run
    folder, evaluations, checkpoints and resume are those of ``lightrft.rl``.

    Args:
        configs: As for ``lightrft.rl``.
        settings: As for ``lightrft.rl``, with its callbacks.

    Raises:
        ConfigError: Lists every problem of the settings, and names settings that a loop of the
            program replaces.

    Example::

        with lightrft.Policy("recipe.yaml") as policy:
            for step in policy:
                groups = policy.score(policy.sample(policy.prompts()))
                policy.update(policy.batch(groups))
                policy.sync()
    """

    _meant: ClassVar[Mapping[str, str]] = {
        "generate": "did you mean 'sample'?",
        **dict.fromkeys(("train", "fit"), "write the loop, or call lightrft.rl"),
        "backward": "update(batch) takes the optimizer steps",
        "save_pretrained": "close() writes the model",
    }

    @python_messages
    def __init__(self, *configs: Given, **settings: Any) -> None:
        callbacks, settings = take_callbacks("rl", settings)
        config: RLConfig = read(RLConfig, configs, settings)
        requirements = check(config)
        check_own_loop(config)
        set_threads(config.run.threads)
        self._stack = ExitStack()
        try:
            self._run, self._values = self._open(config, requirements, callbacks)
        except BaseException as error:
            self._stack.__exit__(type(error), error, error.__traceback__)
            raise
        self._first = self._run.step + 1
        self._is_closed = False
        self._begin()

    def _open(
        self, config: RLConfig, requirements: Any, callbacks: Callbacks
    ) -> tuple[RLRun, ReadRow]:
        enter = self._stack.enter_context
        enter(show_warnings())
        observer = enter(watching(config.run, callbacks))
        strategy = config.strategy
        ranks = enter(init_process_group(strategy.timeout_minutes, strategy.device))
        session = enter(open_session(config, observer, ranks))
        with session.starting():
            run = prepare(config, requirements, session)
        self._stack.callback(run.close)
        self._stack.push(_tell_ranks)
        run.begin()
        resume_from_checkpoint(run)
        return run, begin_steps(run)

    @property
    def _open_run(self) -> RLRun:
        if self._is_closed:
            raise ConfigError("the policy is closed; open it again by lightrft.Policy(...)")
        return self._run

    @property
    def config(self) -> RLConfig:
        """The settings of the run, as callbacks of an earlier process changed them."""
        return self._run.config

    @property
    def step(self) -> int:
        """Number of completed steps."""
        return self._run.step

    @property
    def model(self) -> nn.Module:
        """The model that is trained: of transformers, or of peft with adapters."""
        return self._run.roles.actor.model

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the model."""
        return self._run.roles.tokenizer

    def __iter__(self) -> Iterator[int]:
        """Yield the number of each step, until ``train.steps`` or until the run is to stop."""
        run = self._run
        while run.step < run.steps and not run.session.stopping():
            if run.reached(self._values):
                return
            begun = self._step
            yield run.step + 1
            if self._step is begun:
                raise ConfigError(
                    f"step {run.step + 1} did not end; call sync() at the end of each step"
                )

    @python_messages
    def prompts(self, count: int | None = None) -> list[Prompt]:
        """Return the next prompts of the data.

        Args:
            count: Their number. ``None`` takes ``rollout.prompts_per_step``.
        """
        default = self.config.rollout.prompts_per_step
        return self._open_run.stream.draw(_number("count", count, default))

    @python_messages
    def sample(self, prompts: Sequence[Prompt], size: int | None = None) -> list[list[Rollout]]:
        """Return responses to each prompt, as the settings ``sampling`` say.

        Args:
            prompts: Prompts of the data, or some of them.
            size: Number of responses to each prompt. ``None`` takes ``rollout.group_size``.

        Raises:
            GenerationInterrupted: The run is to stop. The context of the policy ends with it.
        """
        run, config = self._open_run, self.config
        size = _number("size", size, config.rollout.group_size)
        _check_all(prompts, Prompt, "sample() takes prompts, as prompts() returns them")
        seeds = (config.run.seed, run.step, self._rounds)
        self._rounds += 1
        requests = requests_for(prompts, size, *seeds, greedy=run.requirements.greedy)
        with before_update(), run.roles.generation_mode():
            return generate_on_ranks(
                run.roles.strategy.ranks,
                run.roles.engine,
                NullScorer(),
                requests,
                config.sampling,
                run.session.timers,
                self._context.stopped,
            )

    @python_messages
    def score(self, groups: Sequence[Sequence[Rollout]]) -> list[list[Rollout]]:
        """Return the responses with their rewards, as the settings ``reward`` say.

        A program may also set the attribute ``reward`` of each response itself.

        Args:
            groups: The responses to each prompt.
        """
        run = self._open_run
        _check_groups(groups)
        with before_update():
            return score_on_ranks(
                run.roles.strategy.ranks,
                run.roles.scorer,
                groups,
                run.session.timers,
                self._context.stopped,
            )

    @python_messages
    def batch(self, groups: Sequence[Sequence[Rollout]]) -> Batch | None:
        """Return the tensors to train on, without padding, or ``None`` if every group is dropped.

        ``algorithm.filters`` and ``rollout.select`` decide which responses they hold. The columns
        are those that the algorithm reads: log-probs of policy, reference and teacher, values, and
        the advantages. ``batch.replace(advantages=...)`` changes one.

        Args:
            groups: The scored responses to each prompt.

        Raises:
            RewardError: A response has no reward, or all of them failed to be scored.
        """
        run = self._open_run
        _check_groups(groups)
        if self._collected is not None:
            raise ConfigError(
                f"batch() was called twice in step {run.step + 1}; call sync() before the next one"
            )
        unscored = [r for group in groups for r in group if r.reward is None and not r.failed]
        if unscored:
            raise RewardError(
                f"{len(unscored)} responses have no reward; call score(), or set the reward of each"
            )
        for rollout in (r for group in groups for r in group):
            if rollout.reward is not None:
                rollout.reward = _as_number("the reward of a response", rollout.reward)
        collected = CollectedRollouts(rounds=self._rounds)
        judge = collect_settings(self.config, run.requirements).judge
        for group in groups:
            collected.add_group(group, judge(group))
        check_scored(collected.rollouts, f"of step {run.step + 1}")
        run.stream.record_results(collected)
        self._collected = collected
        self._context = context = replace(self._context, collected=collected)
        batch = checked_batch(context, collected)
        if batch is not None:
            # Until ``sync``: all passes of the step read the same media.
            batch = self._step.enter_context(run.roles.keeping_features(batch))
            batch = run_phases(batch, context, PHASES[:-1])
        return batch if collected.groups else None

    @python_messages
    def loss(
        self, batch: Batch, token_losses: TokenLosses | None = None
    ) -> tuple[Tensor, dict[str, float]]:
        """Return the loss of all rows ``[]``, with gradient, and its metrics.

        It is what ``update`` minimizes, before it is split into micro-batches.

        Args:
            batch: The batch, with advantages.
            token_losses: As in ``update``.
        """
        run, step = self._open_run, self._run.step
        _check_all([batch], Batch, "loss() takes the batch that batch() returns")
        settings = replace(self._context.update_settings, token_losses=token_losses)
        objective = Objective.of(
            settings.algorithm, run.requirements, run.controllers, batch, step, token_losses
        )
        seed = derive_seed(settings.seed, "mini-batches", step, 0)
        mini = with_loss_columns(batch, run.roles, settings, step, torch_generator(seed))
        loss, metrics = policy_loss(run.roles, objective, settings)(mini.to(run.roles.device))
        return loss, metrics.compute()

    @python_messages
    def update(self, batch: Batch | None, token_losses: TokenLosses | None = None) -> None:
        """Take the optimizer steps of ``train.ppo_epochs`` passes over the batch.

        Args:
            batch: The batch, with advantages. ``None`` trains nothing.
            token_losses: A function of the policy's log-probs ``[N]`` and the batch, which returns
                the loss of each token ``[N]``. It replaces ``algorithm.loss``, whose aggregation
                weighs the tokens. ``batch.old_logprobs`` are the log-probs before the step. KL,
                entropy and corrections of ``algorithm`` are added as before.
        """
        if batch is None:
            return
        _check_all([batch], Batch, "update() takes the batch that batch() returns")
        if token_losses is not None:
            check_call("token_losses", token_losses, "logprobs", "batch")
        self._trained = update_models(batch, self._context, token_losses)

    @python_messages
    def sync(self, metrics: Mapping[str, float] | None = None) -> ReadRow:
        """End the step: send the weights to the engine, and evaluate, save and log if it is due.

        Args:
            metrics: Metrics of the program, which are logged with those of the step.

        Returns:
            The metrics of the step.
        """
        run, collected = self._open_run, self._collected
        if run.step >= run.steps:
            raise ConfigError(
                f"train.steps = {run.steps}: these steps are done; loop by `for step in policy`, or "
                "raise train.steps"
            )
        own = {name: _as_number(f"metric {name!r}", each) for name, each in (metrics or {}).items()}
        found = self._context.metrics
        if collected is not None:
            result = step_result(self._context, collected, self._trained)
            run.report(result)
        for name, value in own.items():
            found.add(name, Last(value))
        self._step.close()
        run.step += 1
        self._values = finish_step(run, found, is_first=run.step == self._first)
        self._begin()
        return self._values

    def _begin(self) -> None:
        """Start the next step."""
        run = self._run
        seed_step(run)
        self._context: StepContext = run.context()
        self._collected: CollectedRollouts | None = None
        self._trained: Batch | None = None
        self._rounds = 0
        self._step = ExitStack()
        self._step.enter_context(run.stream.restore_on_error())

    @python_messages
    def save(self) -> Path:
        """Write a checkpoint of the last whole step, and return its folder."""
        session = self._run.session
        if session.saved_step != self.step:
            session.save(self._run, self._values)
        return session.store.path(self.step)

    @python_messages
    def load(self, checkpoint: str | Path) -> None:
        """Go back to a checkpoint of this run: weights, optimizers, data and metrics.

        Later checkpoints and metrics are removed, as in a resume.

        Args:
            checkpoint: Its folder, as ``save`` returns it.

        Raises:
            CheckpointError: It is damaged, or of another model.
        """
        self._step.close()
        try:
            resume_from_checkpoint(self._run, Path(checkpoint))
            self._values = self._run.values
        finally:
            self._begin()

    @python_messages
    def close(self) -> Run:
        """Save the run, write ``model/`` after the last step, and return the run.

        Raises:
            NothingTrained: All steps are done, and none trained anything.
        """
        run = self._run
        if not self._is_closed:
            self._is_closed = True
            self._step.close()
            with self._stack:
                summary = end_steps(run, self._values, is_saved=run.step < self._first)
            check_trained(summary)
        return Run(self.config.run.folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        """Close the policy. After an error of rewards or engine, the last whole step is saved."""
        if error is None:
            self.close()
            return False
        # Before a checkpoint is saved: prompts of the step come again.
        self._step.__exit__(kind, error, trace)
        if isinstance(error, GenerationInterrupted):
            self.close()
            return True
        if isinstance(error, UserError):
            save_after_error(self._run, self._values, error)
        return bool(self._stack.__exit__(kind, error, trace))


def _number(name: str, value: int | None, default: int) -> int:
    """Return a count that a program gave, or its default."""
    if value is None:
        return default
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} = {value!r}: give a whole number of at least 1")
    return value


def _as_number(name: str, value: Any) -> float:
    """Return a number of a program, of numpy or of torch as a number."""
    with suppress(TypeError, ValueError, RuntimeError):
        if not isinstance(value, str):
            return float(value)
    raise ConfigError(f"{name} is of type {type(value).__name__}; give one number")


def _check_all(values: Any, kind: type[Any] | tuple[type[Any], ...], what: str) -> None:
    """Raise ``ConfigError`` unless ``values`` are a list of objects of one class.

    Args:
        values: The values.
        kind: The class, or several.
        what: Words about what is taken.
    """
    for one in values if isinstance(values, list | tuple) else [values]:
        if not isinstance(one, kind):
            raise ConfigError(f"{what}, and not a value of type {type(one).__name__}")


def _check_groups(groups: Any) -> None:
    """Raise ``ConfigError`` unless ``groups`` is a list of lists of responses."""
    what = "groups are lists of responses, one for each prompt, as sample() returns them"
    _check_all(groups, (list, tuple), what)
    for group in groups:
        _check_all(group, Rollout, what)


def _tell_ranks(kind: Any, error: BaseException | None, trace: Any) -> None:
    """Tell the other ranks of an error, before the roles are closed, which may take long."""
    if error is not None:
        broadcast_failure(error)


def check_own_loop(config: RLConfig) -> None:
    """Raise ``ConfigError`` for a setting of the loop of ``rl``, which a program's own replaces."""
    if is_elsewhere(config):
        raise ConfigError(
            "a loop of the program is in its own process, and launch starts others; leave launch "
            "out, or start this program itself with torchrun"
        )
    of_rl = (
        "staleness",
        "partial",
        "carry_over",
        "oversample",
        "max_tokens_per_step",
        "max_rounds",
    )
    for name in changed_fields(config.rollout):
        value = getattr(config.rollout, name)
        # A loop of the program has one round.
        if name in of_rl and (name, value) != ("max_rounds", 1):
            raise ConfigError(
                f"rollout.{name} = {value!r} is read by the loop of lightrft.rl and not by one of "
                "the program; leave it out"
            )
