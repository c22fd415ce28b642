"""The settings of each round of ``lightrft iterate``: its generation and its training."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightrft.algorithms.preference.requirements import PreferenceRequirements
from lightrft.config.base import changed_fields
from lightrft.config.data import DataConfig
from lightrft.config.model import ModelConfig
from lightrft.config.reward import RewardConfig
from lightrft.config.verbs import DPOConfig, GenerateConfig, IterateConfig, SFTConfig
from lightrft.datasets.sampler import PromptSampler
from lightrft.models.loading.adapter_base import has_adapters
from lightrft.trainer.checks.preflight import check_enough
from lightrft.trainer.pipelines.generate import check_generate
from lightrft.trainer.preference.checks import check
from lightrft.trainer.saved_policy import is_saved
from lightrft.trainer.supervised import check_supervised
from lightrft.utils.errors import ConfigError
from lightrft.utils.seeding import derive_seed

TRAINED_BY = {
    "best": ("sft",),
    "correct": ("sft",),
    "conditioned": ("sft",),
    "pairs": ("dpo", "kto"),
    "self_play": ("dpo", "kto"),
    "ranked": ("dpo",),
    "labelled": ("kto",),
    "all": (),
}
"""Verbs that train on the rows of each value of ``select.keep``."""

SET_BY_ROUND = ("run", "model", "reward", "engine", "strategy", "launch", "eval", "hub", "log")
"""Sections of a training that the rounds set."""


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """One round of a run.

    Args:
        config: settings of all rounds.
        number: number of the round, from 1.
    """

    config: IterateConfig
    number: int

    @property
    def folder(self) -> Path:
        """The folder of the round."""
        return self._folder_of(self.number)

    @property
    def rows(self) -> Path:
        """The file of the training rows."""
        return self.folder / "rows.jsonl"

    @property
    def run(self) -> Path:
        """The run folder of the training."""
        return self.folder / "train"

    @property
    def seed(self) -> int:
        """The seed of the round. Round 1 is what the verbs do by themselves."""
        seed = self.config.run.seed
        return seed if self.number == 1 else derive_seed(seed, "round", self.number)

    def indices(self, length: int) -> Sequence[int]:
        """Return the indices of the prompts of the round, of ``length`` prompts.

        Raises ``ConfigError`` if there are fewer than ``prompts_per_round``.
        """
        count = self.config.prompts_per_round
        if count is None:
            return range(length)
        check_enough("prompts_per_round", count, length, "prompts")
        sampler = PromptSampler(length, self.config.run.seed, self.config.data.shuffle)
        # Rounds follow each other in one endless order, whichever of them ran in this process.
        return sampler.next(count * self.number)[-count:]

    def generation(self) -> GenerateConfig:
        """Return the settings of the generation."""
        config = self.config
        model = config.generator
        if not model.path:
            # Adapters are merged into the weights that a round writes.
            model = self._trained_before().model_copy(update={"lora": None})
        return GenerateConfig(
            run=config.run.model_copy(update={"seed": self.seed, "overwrite": False}),
            model=model,
            data=config.data,
            sampling=config.sampling,
            samples=config.samples,
            output=str(self.rows),
            engine=config.engine,
            reward=config.reward.model_copy(update={"success": ()}),
            select=config.select,
            strategy=config.strategy,
        )

    def reader(self) -> DataConfig:
        """Return the data settings of the training."""
        return self.training().data

    def training(self) -> SFTConfig | DPOConfig:
        """Return the settings of the training."""
        config = self.config
        first = 1 if config.rows == "all" else self.number
        files = [self._folder_of(k) / "rows.jsonl" for k in range(first, self.number + 1)]
        sources = DataConfig(sources=tuple({"path": str(file)} for file in files)).sources
        evaluates = bool(config.eval.data.sources)
        run = {"dir": str(self.folder), "name": self.run.name, "seed": self.seed}
        update: dict[str, object] = {
            "run": config.run.model_copy(update={**run, "resume": "auto", "overwrite": False}),
            "model": config.model if config.train_from == "start" else self._trained_before(),
            "data": config.training.data.model_copy(update={"sources": sources}),
            # The end of a round is the start of the next one.
            "eval": config.eval.model_copy(
                update={"at_start": config.eval.at_start and self.number == 1}
            ),
            "reward": config.reward if evaluates else RewardConfig(),
            "engine": config.engine,
            "strategy": config.strategy,
            "hub": config.hub,
            # The responses of a round are sampled, and shown, before its training.
            "log": config.log.model_copy(update={"samples": 0}),
        }
        moved = self.number > 1 and config.train_from == "previous"
        if config.reference == "start" and moved:
            update["reference"] = config.model.path
        return config.training.model_copy(update=update)

    def _folder_of(self, number: int) -> Path:
        run = self.config.run
        return run.folder / f"round_{number:02}"

    def _trained_before(self) -> ModelConfig:
        """Return the model that the round before has trained, or the start model."""
        model = self.config.model
        if self.number == 1:
            return model
        path = self._folder_of(self.number - 1) / self.run.name / "model"
        # That folder has its own tokenizer.
        own = {"path": str(path), "base": None, "tokenizer": None, "revision": None}
        return model.model_copy(update=own)


def check_iterate(config: IterateConfig) -> None:
    """Raise ``ConfigError`` for settings with which some round could not work."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "lightrft iterate runs in one process; call it without torchrun, or run lightrft "
            "generate and the training of each round by themselves"
        )
    if config.run.resume not in ("auto", "never"):
        raise ConfigError(
            f"run.resume = {config.run.resume!r}: a run of rounds resumes at its last round; set "
            "run.resume=auto"
        )
    training = config.training
    verb, keep = training.verb, config.select.keep
    if verb not in TRAINED_BY[keep]:
        fitting = [name for name, verbs in TRAINED_BY.items() if verb in verbs]
        raise ConfigError(
            f"select.keep = {keep!r} makes no rows that lightrft {verb} trains on; set "
            f"select.keep to {' or '.join(fitting)}, or give the settings of another training "
            "(sft, dpo or kto)"
        )
    check_sections(training)
    check_models(config)
    if verb == "sft" and config.reference != "previous":
        raise ConfigError(
            "reference changes nothing: sft has no reference; leave it out, or train by dpo"
        )
    # The second round differs from the first, and all later ones are like it.
    for number in range(1, min(config.rounds, 2) + 1):
        part = RoundPlan(config, number)
        check_generate(part.generation())
        settings = part.training()
        if isinstance(settings, DPOConfig):
            check_reference(config, check(settings))
        else:
            check_supervised(settings)


def check_models(config: IterateConfig) -> None:
    """Raise ``ConfigError`` for a start model that rounds cannot train, or an unread generator."""
    path = config.model.path
    # A generation reads it, and the training would refuse it only after that.
    if path and is_saved(Path(path).expanduser()):
        raise ConfigError(
            f"model.path = {path!r} is a run folder or a checkpoint, and training starts from a "
            f"model folder; give {Path(path) / 'model'} of a run, or what lightrft export writes"
        )
    is_whole = config.rounds > 1 and config.train_from == "previous" and config.model.lora is None
    if path and is_whole and has_adapters(config.model):
        raise ConfigError(
            f"model.path = {path!r} holds adapters, which the first round would merge, so that the "
            "next one trained all weights; write a model by lightrft merge and set model.lora, or "
            "set train_from=start"
        )
    changed = changed_fields(config.generator)
    if changed and not config.generator.path:
        raise ConfigError(
            f"generator.{changed[0]} changes nothing: generator.path is empty, so the trained "
            "model generates; name a model in generator.path, or leave generator out"
        )


def check_reference(config: IterateConfig, requirements: PreferenceRequirements) -> None:
    """Raise ``ConfigError`` for a reference that no loss reads, or that rounds cannot load."""
    reads = requirements.reference or requirements.sequence_kl
    if config.reference == "start" and not reads:
        raise ConfigError(
            "reference = 'start' changes nothing: no loss reads a reference; leave it out"
        )
    moves = config.rounds > 1 and config.train_from == "previous"
    if not (reads and moves):
        return
    # The policy without its adapters would be the start model.
    if config.reference == "previous" and config.model.load_in_4bit:
        raise ConfigError(
            "reference = 'previous' with model.load_in_4bit = true: a round on 4-bit weights "
            "leaves its adapters alone, which cannot be the reference of the next; set "
            "reference=start, or model.load_in_4bit=false"
        )
    if config.reference == "start" and config.model.revision is not None:
        raise ConfigError(
            f"reference = 'start' with model.revision = {config.model.revision!r}: a reference "
            "is loaded without revision; download that revision and give its folder as model.path"
        )


def check_sections(training: SFTConfig | DPOConfig) -> None:
    """Raise ``ConfigError`` for settings of the training that the rounds set."""
    changed = changed_fields(training)
    for name in SET_BY_ROUND:
        if name in changed:
            raise ConfigError(
                f"{training.verb}.{name} changes nothing: all rounds have the same one, in one "
                f"process; leave it out, or set {name} at the top if it is there"
            )
    if training.data.sources:
        raise ConfigError(
            f"{training.verb}.data.sources changes nothing: a round trains on the rows that it "
            "generates; name the prompts in data.sources"
        )
    if isinstance(training, DPOConfig) and training.reference is not None:
        raise ConfigError(
            f"{training.verb}.reference changes nothing: each round sets it; set reference to "
            "previous or start"
        )
