"""Generate without training: evaluation and chat."""

from __future__ import annotations

import logging
import mimetypes
from collections import Counter
from contextlib import closing
from pathlib import Path

from lightrft.config.data import DataConfig
from lightrft.config.verbs import ChatConfig, EvaluateConfig
from lightrft.datasets.chat_encoder import ChatEncoder
from lightrft.engines.constrained.grammars import check_column, refuse_column
from lightrft.models.decoding.kinds import length_bound
from lightrft.models.families import FAMILIES, context_length
from lightrft.models.processors import load_processor
from lightrft.observability.run_directory import RunDirectory
from lightrft.observability.run_health import Health
from lightrft.rewards.startup_check import check_rewards
from lightrft.rewards.success import Success
from lightrft.rollout.collate import attached
from lightrft.rollout.collect import check_scored
from lightrft.rollout.eval_results.prompt_scores import eval_conditions
from lightrft.rollout.eval_results.summary import EvalSummary, summarize
from lightrft.rollout.evaluation import Evaluation, evaluate, load_eval_prompts
from lightrft.rollout.logprob_check import CheckedEngine
from lightrft.rollout.shown_samples import equal_outcomes, examples
from lightrft.trainer.checks.context_limits import check_lengths, longest
from lightrft.trainer.checks.preflight import check_whole_rewards
from lightrft.trainer.saved_policy import media_of, resolved
from lightrft.types import Request, Rollout
from lightrft.utils.errors import ConfigError, DataError
from lightrft.utils.seeding import derive_seed
from lightrft.workers.engine_kinds import check_media, kinds_to_check
from lightrft.workers.local import (
    local_policy,
    local_scorer,
    local_tokenizer,
    with_reward_models,
)
from lightrft.workers.local_served import check_server_media

log = logging.getLogger(__name__)


def run_eval(config: EvaluateConfig) -> EvalSummary:
    """Evaluate a model on the eval set. Responses and metrics go to the run folder.

    Raises:
        ConfigError: If there are no prompts or no rewards, or the run folder belongs to another
            evaluation.
        RewardError: If no response could be scored.
    """
    _check_named(config)
    path = config.run.folder
    model, saved = resolved(config.model)
    # Record the checkpoint itself in the run folder, so that another one is rejected there.
    if saved is not None:
        config = config.model_copy(
            update={"model": config.model.model_copy(update={"path": str(saved.checkpoint)})}
        )
    folder = RunDirectory.open(
        path,
        config,
        resume="auto",
        overwrite=config.run.overwrite,
        ignore=("eval", "run", "reward", "engine"),
        is_evaluation=True,
    )
    with folder:
        tokenizer = local_tokenizer(model)
        processor = load_processor(model, tokenizer, media_of(saved))
        prompts = load_eval_prompts(
            config.eval.data,
            tokenizer,
            config.run.seed,
            config.eval.limit,
            processor,
            reward=config.reward,
        )
        check_column(prompts, config.eval.sampling, "eval.sampling", "eval.data")
        check_rewards(config.reward, prompts, tokenizer)
        with closing(local_scorer(config.reward)) as functions:
            weights = None if saved is None else saved.weights
            strategy, actor, engine = local_policy(
                model,
                config.strategy,
                config.engine,
                tokenizer,
                weights=weights,
                trains=False,
                media=kinds_to_check(config.engine, prompts),
            )
            check_lengths(
                actor,
                engine,
                config.engine,
                longest(prompts),
                config.eval.sampling,
                "eval.sampling",
                "eval.data",
            )
            scorer = with_reward_models(functions, config.reward, model, tokenizer, strategy.device)
            with closing(CheckedEngine(engine, actor, config.engine)) as checked:
                found = evaluate(
                    checked,
                    scorer,
                    prompts,
                    config.eval,
                    config.run.seed,
                    reward=config.reward,
                )
        return _record(folder, config, found, len(prompts))


def _check_named(config: EvaluateConfig) -> None:
    """Raise ``ConfigError`` unless prompts and rewards are named.

    Warn if all responses to a prompt will be the same.
    """
    if not config.eval.data.sources:
        raise ConfigError(
            "eval.data.sources is empty; name the prompts, e.g. eval.data.sources=[{path: "
            "test.jsonl}]"
        )
    if not config.reward.scores:
        raise ConfigError(
            "reward.terms is empty; name what scores a response, e.g. reward.terms=[math]"
        )
    check_whole_rewards(config.reward, "eval")
    if problem := next(Success(config.reward, config.eval.threshold).problems(), ""):
        raise ConfigError(problem)
    if config.eval.samples > 1 and config.eval.sampling.temperature == 0:
        log.warning(
            "eval.samples = %d with eval.sampling.temperature = 0: all responses to a prompt are "
            "the same; set a temperature",
            config.eval.samples,
        )


def _record(
    folder: RunDirectory, config: EvaluateConfig, found: Evaluation, prompts: int
) -> EvalSummary:
    """Write the responses and the summary of an evaluation, and return the summary.

    Args:
        folder: The run folder.
        config: The settings.
        found: The responses and their metrics.
        prompts: Number of prompts of the eval set.

    Raises:
        RewardError: If no response could be scored.
    """
    # An earlier evaluation in this folder is replaced.
    folder.rewind(0)
    folder.write_rollouts(0, found.rollouts, name="eval", attached=attached(found.rollouts))
    folder.flush()
    result = summarize(found.metrics.compute(), found.groups, config.eval.threshold, config.reward)
    health = Health()
    health.blame("eval/failed", Counter(r.failed for r in found.rollouts if r.failed))
    health.examples = examples(found.rollouts, config.reward, evaluated=True)
    success = Success(config.reward, config.eval.threshold)
    for message in [*equal_outcomes(found.rollouts, success), *health.warnings(result.metrics)]:
        log.warning("%s", message)
    # After the responses are on disk, so that they show why none was scored.
    check_scored(found.rollouts, "of the evaluation")
    about = {
        "verb": "eval",
        "model": config.model.path,
        "prompts": prompts,
        "conditions": eval_conditions(found.groups, config.eval, config.reward, config.run.seed),
        "intervals": result.intervals_as_json(),
    }
    folder.write_summary({**about, **result.metrics})
    return result


class Chat:
    """A conversation with a model, in which every turn goes through the chat template."""

    def __init__(self, config: ChatConfig) -> None:
        self.config = config
        refuse_column(config.sampling, "a chat has no")
        model, saved = resolved(config.model)
        tokenizer = local_tokenizer(model)
        self.processor = load_processor(model, tokenizer, media_of(saved))
        weights = None if saved is None else saved.weights
        _, actor, engine = local_policy(
            model, config.strategy, config.engine, tokenizer, weights=weights, trains=False
        )
        self._model, self._bare_engine = model, engine
        self.engine = CheckedEngine(engine, actor, config.engine)
        bound, context = length_bound(actor.base.config), context_length(actor.base.config)
        self.context = context if bound is None else min(bound.tokens, context or bound.tokens)
        self.encoder = ChatEncoder(
            DataConfig(apply_chat_template=True, media=config.media), tokenizer, self.processor
        )
        self.messages: list[dict[str, object]] = []
        self.attached: list[dict[str, str]] = []
        self.turn = 0
        self.clear()

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of media that can be attached to a message."""
        return () if self.processor is None else tuple(self.processor.parts)

    def clear(self) -> None:
        """Clear the conversation and the attachments. The system message stays."""
        self.messages = []
        if self.config.system:
            self.messages.append({"role": "system", "content": self.config.system})
        self.attached = []

    def attach(self, path: str, kind: str = "") -> None:
        """Attach a file or URL to the next message. An empty ``kind`` is guessed from the name.

        Raises:
            DataError: the model or the engine does not read this kind, or the file cannot be read.
        """
        kind = kind or (mimetypes.guess_type(path)[0] or "").partition("/")[0]
        if kind not in self.kinds:
            kinds = ", ".join(self.kinds) or "text alone"
            raise DataError(
                f"{path}: it is of kind {kind or 'unknown'}, and this model reads {kinds}"
            )
        try:
            check_media(self._model, self.config.engine, {kind})
            check_server_media(self._bare_engine, {kind})
        except ConfigError as error:
            raise DataError(f"{path}: {error}") from error
        where = path if "://" in path else str(Path(path).expanduser().absolute())
        part = {"type": kind, kind: where}
        # Encoded now, so that a file that cannot be read fails here and not in the next message.
        self.encoder.ask([{"role": "user", "content": [part]}], path)
        self.attached.append(part)

    def say(self, text: str) -> Rollout:
        """Add a user message with its attachments and the model's response, and return the
        response.

        Raises:
            DataError: the context has no room for a response, or the engine gave none. The
                conversation is unchanged.
        """
        content = [*self.attached, {"type": "text", "text": text}] if self.attached else text
        messages: list[dict[str, object]] = [*self.messages, {"role": "user", "content": content}]
        prompt = self.encoder.ask(messages, "the conversation")
        prompt.id = f"turn-{self.turn}"
        room = self.config.sampling.max_new_tokens
        if self.context is not None:
            room = min(room, self.context - len(prompt.token_ids))
        if room < max(1, self.config.sampling.min_new_tokens):
            raise DataError(
                f"{len(prompt.token_ids)} tokens leave no room for a response: the maximum of "
                f"the model is {self.context}"
            )
        request = Request(
            prompt, derive_seed(self.config.run.seed, "chat", self.turn), max_new_tokens=room
        )
        (answer,) = self.engine.generate([request], self.config.sampling)
        if answer.failed:
            raise DataError(answer.failed)
        # Only now: an error above leaves the conversation and its attachments as they were.
        messages.append({"role": "assistant", "content": answer.text})
        self.messages = messages
        self.attached = []
        self.turn += 1
        return answer


def attachable() -> set[str]:
    """Return all kinds of media that some model family reads."""
    kinds: set[str] = set()
    for family in FAMILIES.values():
        if family.reader is not None:
            kinds |= {tower.kind for tower in family.reader.towers}
    return kinds
