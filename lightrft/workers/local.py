"""Build the roles of a run as objects of this process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from transformers import PreTrainedTokenizerBase

from lightrft.algorithms.preference.reference_source import Source
from lightrft.algorithms.requirements import Requirements
from lightrft.config.engine import EngineConfig, server_compiles
from lightrft.config.model import ModelConfig, TrainedModelConfig
from lightrft.config.reward import RewardConfig
from lightrft.config.strategy import SHARDING, StrategyConfig
from lightrft.config.train import TeacherConfig, ValueModelConfig
from lightrft.config.verbs import DistillVerbConfig, DPOConfig, RLConfig
from lightrft.distributed.process_group import SINGLE_PROCESS, ProcessGroup, check_parallel_sizes
from lightrft.engines.base import Engine
from lightrft.learner.reference_update import MovingReference
from lightrft.learner.sft_step import PretrainingLoss
from lightrft.models.actor import Actor
from lightrft.models.critic import Critic
from lightrft.models.decoding.kv_decoder import KVDecoder
from lightrft.models.expert_replay import ExpertReplay
from lightrft.models.loading.adapter_base import adds_adapters, saved_adapters
from lightrft.models.loading.from_pretrained import has_tokenizer, load_tokenizer
from lightrft.models.lora import merged_model, untied_modules
from lightrft.models.processors import Processor
from lightrft.models.router_loss import RouterLoss
from lightrft.rewards.base import NullScorer, RewardScorer
from lightrft.rewards.scorer import Scorer
from lightrft.rewards.success import unknown_success
from lightrft.roles import AdapterFreeReference, FrozenModel, Reference, Roles, TrainableModel
from lightrft.strategy.base import Strategy
from lightrft.strategy.single import SingleStrategy, load_weights
from lightrft.utils.errors import ConfigError, ModelError, path_of
from lightrft.workers.engine_kinds import EngineParts, check_media, check_native, kind_of
from lightrft.workers.frozen_models import local_frozen
from lightrft.workers.local_vllm import check_shared_copy
from lightrft.workers.scoring.collecting import CombiningScorer
from lightrft.workers.scoring.judge import open_judges
from lightrft.workers.scoring.judge_scorer import JudgeScorer
from lightrft.workers.scoring.model_scorer import ModelScorer, scoring_models


def local_tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer of ``model``. Raises ``ConfigError`` when no model is named."""
    if not model.path:
        raise ConfigError(
            "model.path is empty; give a Hugging Face folder or name, e.g. model.path=path/to/model"
        )
    return load_tokenizer(model)


def strategy_of(config: StrategyConfig, ranks: ProcessGroup) -> Strategy:
    """Build the strategy that ``config`` selects.

    Raises ``ConfigError`` if the strategy does not fit the number of ranks or its package is
    missing.
    """
    check_parallel_sizes(ranks, config.sequence_parallel * config.tensor_parallel)
    if config.kind in ("fsdp2", "deepspeed") and ranks.size == 1:
        raise ConfigError(
            f"strategy.kind = {config.kind!r} shards over several processes; set "
            "launch.processes, or strategy.kind=auto"
        )
    if config.kind == "deepspeed":
        from lightrft.strategy.deepspeed import DeepSpeedStrategy

        return DeepSpeedStrategy(config, ranks)
    if config.kind == "fsdp2" or (config.kind == "auto" and ranks.size > 1):
        from lightrft.strategy.fsdp2 import Fsdp2Strategy

        return Fsdp2Strategy(config, ranks)
    if ranks.size > 1:
        raise ConfigError(
            f"strategy.kind = 'single' is for one process, and this run has {ranks.size}; set "
            "strategy.kind=auto"
        )
    for name in SHARDING:
        if (value := getattr(config, name)) != StrategyConfig.model_fields[name].default:
            raise ConfigError(
                f"strategy.{name} = {value} changes nothing in one process; set "
                "launch.processes, or leave it out"
            )
    found = SingleStrategy(config)
    if config.cpu_offload and found.device.type == "cpu":
        raise ConfigError(
            "strategy.cpu_offload = True changes nothing in one process on the CPU, whose memory "
            "is the host's; leave it out"
        )
    return found


def local_policy(
    model: ModelConfig,
    strategy: StrategyConfig,
    engine: EngineConfig,
    tokenizer: PreTrainedTokenizerBase,
    ranks: ProcessGroup = SINGLE_PROCESS,
    weights: Path | None = None,
    *,
    trains: bool = True,
    merges: bool = False,
    replay_routes: bool = False,
    media: Collection[str] = (),
    compares: bool = True,
) -> tuple[Strategy, Actor, Engine]:
    """Build the strategy, the policy on its device and an engine over the same weights.

    Args:
        model: the model to load.
        strategy: settings of the strategy.
        engine: settings of the engine.
        tokenizer: tokenizer of the model.
        ranks: all ranks of the run.
        weights: folder of the trained weights in a checkpoint, loaded by a single process. None
            keeps the weights of ``model``.
        trains: the weights will change, and the engine must follow them.
        merges: adapters are added to the weights.
        replay_routes: the engine records the experts of each token, and the policy replays them.
        media: kinds of media of the prompts, see ``kinds_to_check``.

    Raises:
        ConfigError: the engine cannot generate for such media, or its server does not read a
            setting, or has other weights.
        ModelError: the model has no load-balancing loss, and ``model`` sets its coefficient.
    """
    check_media(model, engine, media)
    placed = strategy_of(strategy, ranks)
    check_shared_copy(engine, ranks.size)
    kind = kind_of(engine)
    if kind.asks_server and engine.compile is not None:
        raise ConfigError(server_compiles(engine))
    # A server that nothing is compared with needs no weights here.
    is_hollow = kind.asks_server and not trains and not engine.check_logprobs
    with placed.loading() as device:
        actor = Actor.load(model, device="meta" if is_hollow else device)
    if trains and not kind.shares_weights and (names := untied_modules(actor.model)):
        raise ModelError(
            f"modules_to_save = {names}: the model has one tensor for embeddings and output head "
            f"(tie_word_embeddings), and so has the engine, {engine.kind}, which could not tell "
            "the two; set engine.kind=native, or leave them out"
        )
    if weights is not None and not is_hollow:
        load_weights(actor, weights)
    if merges and actor.has_adapters:
        actor.model = merged_model(actor.model).eval()
    if trains and isinstance(model, TrainedModelConfig) and model.router_aux_loss_coef:
        coef, tries = model.router_aux_loss_coef, actor.unread is None
        actor.router_loss = RouterLoss(actor.base, actor.decoder, coef, tries=tries)
    if replay_routes:
        actor.experts = ExpertReplay(actor.model)
    parts = EngineParts(
        model=model,
        config=engine,
        tokenizer=tokenizer,
        actor=actor,
        decoder=KVDecoder(actor.model, actor.experts),
        strategy=placed,
        tensor_parallel_size=strategy.tensor_parallel,
        trains=trains,
        media=media,
        compares=compares and not is_hollow,
    )
    return placed, actor, kind.build(parts)


def local_scorer(config: RewardConfig, unscored: float | None = None) -> RewardScorer:
    """Build a scorer with worker processes for the terms of ``config``.

    Without terms, return a scorer that gives every response the reward ``unscored``.
    """
    return Scorer(config) if config.calls_functions else NullScorer(unscored)


def with_reward_models(
    scorer: RewardScorer,
    config: RewardConfig,
    policy: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
) -> RewardScorer:
    """Return ``scorer``, or one that adds the scores of ``reward.models`` and ``reward.judges``.

    It combines all terms as ``reward.gates`` and ``reward.combine`` ask for.

    Args:
        scorer: scores responses by functions.
        config: settings of the rewards.
        policy: settings of the policy.
        tokenizer: tokenizer of the policy.
        device: device of the reward models.
    """
    names: list[str] = []
    for made in model_scorers(config, policy, tokenizer, device):
        made.inner = scorer
        scorer = made
        if isinstance(made, ModelScorer):
            names = [model.name for model in made.models]
    return CombiningScorer(scorer, config, names) if config.combines else scorer


def model_scorers(
    config: RewardConfig,
    policy: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
) -> list[ModelScorer | JudgeScorer]:
    """Load the models of ``reward.models`` and ``reward.judges``, each with its scorer.

    The scorers have no other scorer inside yet.

    Args:
        config: settings of the rewards.
        policy: settings of the policy.
        tokenizer: tokenizer of the policy.
        device: device of the models.

    Raises:
        ConfigError: a model cannot be loaded, or has the name of another term.
    """
    found: list[ModelScorer | JudgeScorer] = []
    models = scoring_models(config.models, policy, tokenizer, device)
    names = [model.name for model in models]
    if problem := config.shared_name(names) or unknown_success(config, config.term_names(names)):
        raise ConfigError(problem)
    if models:
        found.append(ModelScorer(NullScorer(None), models, device))
    if config.judges:
        found.append(JudgeScorer(NullScorer(None), open_judges(config, policy, device)))
    return found


def policy_scorer(
    config: RewardConfig,
    policy: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
) -> RewardScorer:
    """Build a scorer by functions and reward models.

    Args:
        config: settings of the rewards.
        policy: settings of the policy.
        tokenizer: tokenizer of the policy.
        device: device of the reward models.
    """
    return with_reward_models(local_scorer(config), config, policy, tokenizer, device)


def local_roles(
    config: RLConfig,
    requirements: Requirements,
    tokenizer: PreTrainedTokenizerBase,
    steps: int,
    processor: Processor | None = None,
    ranks: ProcessGroup = SINGLE_PROCESS,
    remote_builders: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
) -> Roles:
    """Build the roles that an RL run needs. Roles that the algorithm does not use are not loaded.

    Args:
        config: settings of the run.
        requirements: what the algorithm reads.
        tokenizer: tokenizer of the policy.
        steps: number of steps of the run.
        processor: processor of the policy, or None for a text-only model.
        ranks: all ranks of the run.
        remote_builders: functions that build some roles in another way, by role name.
    """
    if config.model.replay_routes:
        check_native(config.engine, "model.replay_routes", "true")
    # Must come first: its processes start while models are loaded.
    scorer = remote_builders.get("scorer", lambda: local_scorer(config.reward, unscored=0.0))()
    engine: Engine | None = None
    try:
        strategy, actor, engine = local_policy(
            config.model,
            config.strategy,
            _own_engine(config, remote_builders),
            tokenizer,
            ranks,
            replay_routes=config.model.replay_routes,
        )
        per_step = config.train.ppo_epochs * config.train.num_mini_batches
        frozen = config.critic.warmup_steps if requirements.critic else 0
        # The policy takes no optimizer step while the critic trains alone.
        policy = TrainableModel(
            actor, strategy.prepare(actor, config.optimizer, max(1, (steps - frozen) * per_step))
        )
        with_models = remote_builders.get("reward_model", with_reward_models)
        scorer = with_models(scorer, config.reward, config.model, tokenizer, strategy.device)
        return Roles(
            strategy=strategy,
            reference=remote_builders["reference"]()
            if "reference" in remote_builders
            else local_reference(config, requirements, policy, strategy),
            policy=policy,
            engine=remote_builders["engine"](actor, strategy)
            if "engine" in remote_builders
            else engine,
            scorer=scorer,
            tokenizer=tokenizer,
            processor=processor,
            async_engine=remote_builders["async_engine"](actor, strategy)
            if "async_engine" in remote_builders
            else local_async_engine(config, policy, tokenizer, strategy),
            async_process_group=ranks.duplicate() if config.rollout.staleness else None,
            teacher=remote_builders.get("teacher", partial(local_teacher, config))(
                tokenizer, strategy
            ),
            critic=local_critic(config, "critic", strategy, max(1, steps * per_step))
            if requirements.critic
            else None,
            cost_critic=local_critic(config, "cost_critic", strategy, max(1, steps * per_step))
            if requirements.cost_critic
            else None,
            prm=local_process(config, strategy, steps) if requirements.prm else None,
            ptx=PretrainingLoss.of(config.ptx, tokenizer, config.run.seed, processor),
        )
    except BaseException:
        scorer.close()
        if engine is not None:
            engine.close()
        raise


def _own_engine(config: RLConfig, remote_builders: Mapping[str, object]) -> EngineConfig:
    """Return the settings of the engine that generates in this process between training steps."""
    # The native one costs nothing, where another engine generates the batches.
    if "engine" in remote_builders or config.rollout.staleness:
        # ``compile: true`` is of the other engine. This one compiles where it can.
        compiles = None if config.engine.compile else config.engine.compile
        return config.engine.model_copy(update={"kind": "native", "compile": compiles})
    return config.engine


def local_reference(
    config: RLConfig, requirements: Requirements, policy: TrainableModel, strategy: Strategy
) -> Reference | None:
    """Build the reference model, or return None when no part of the algorithm reads it.

    With adapters it is the policy with adapters disabled. Otherwise it is a separate frozen model.

    Args:
        config: settings of the run.
        requirements: what the algorithm reads.
        policy: the policy with its optimizer.
        strategy: strategy that places the reference.
    """
    if not requirements.reference:
        return None
    if adds_adapters(config.model) and config.reference is None:
        return AdapterFreeReference(policy.model)
    frozen, kl = frozen_reference(config, strategy), config.algorithm.kl
    return (
        MovingReference.of(frozen, policy.state.shapes, strategy, kl)
        if kl.refresh_every
        else FrozenModel(frozen)
    )


def preference_reference(
    config: DPOConfig, source: Source, policy: TrainableModel[Actor], strategy: Strategy
) -> FrozenModel | AdapterFreeReference | None:
    """Build the reference of preference learning, or return None if no loss reads it.

    Log-probs that are computed before the first step need no second model: the policy still has the
    weights that training starts from.

    Args:
        config: settings of the run.
        source: where the log-probs come from.
        policy: the policy, with the weights that training starts from.
        strategy: strategy that places the reference.
    """
    if source == "none":
        return None
    if adds_adapters(config.model) and config.reference is None and source != "step":
        return AdapterFreeReference(policy.model)
    if source == "cached" and config.reference is None:
        return FrozenModel(policy.model)
    frozen = frozen_reference(config, strategy)
    settings = config.preference.reference
    if settings.refresh_every:
        return MovingReference.of(frozen, policy.state.shapes, strategy, settings)
    return FrozenModel(frozen)


def reference_model(config: RLConfig | DPOConfig) -> ModelConfig:
    """Return the model settings of a separate reference."""
    return config.model.at(config.reference)


def frozen_reference(config: RLConfig | DPOConfig, strategy: Strategy) -> Actor:
    """Load a separate reference in eval mode, without gradients."""
    with path_of("reference" if config.reference else ""):
        return local_frozen(reference_model(config), strategy)


def local_async_engine(
    config: RLConfig,
    policy: TrainableModel[Actor],
    tokenizer: PreTrainedTokenizerBase,
    strategy: Strategy,
) -> Engine | None:
    """Build an engine with a full copy of the weights on each rank, for asynchronous generation.

    Return None without ``rollout.staleness``.

    Args:
        config: settings of the run.
        policy: the policy.
        tokenizer: tokenizer of the policy.
        strategy: strategy of the policy.
    """
    if not config.rollout.staleness:
        return None
    build_async = kind_of(config.engine).build_async
    assert build_async is not None  # checked at start
    return build_async(config, policy, tokenizer, strategy)


def local_teacher(
    config: RLConfig, tokenizer: PreTrainedTokenizerBase, strategy: Strategy
) -> FrozenModel | None:
    """Build the teacher model, or return None without ``algorithm.distill``.

    Args:
        config: settings of the run.
        tokenizer: tokenizer of the policy.
        strategy: strategy that places the teacher.

    Raises:
        ConfigError: the vocabularies of teacher and policy differ.
    """
    if config.algorithm.distill.kind == "none":
        return None
    model = teacher_model(config.model, config.teacher, tokenizer)
    with path_of("teacher.path"):
        return FrozenModel(local_frozen(model, strategy))


def self_teacher(
    config: DistillVerbConfig, policy: TrainableModel[Actor], strategy: Strategy
) -> Reference:
    """Build the teacher of self-distillation: the model that training starts from.

    With adapters it is the policy with adapters disabled. Otherwise it is a separate model.

    Args:
        config: settings of the run.
        policy: the policy with its optimizer.
        strategy: strategy that places the teacher.
    """
    if adds_adapters(config.model):
        return AdapterFreeReference(policy.model)
    frozen = local_frozen(config.model, strategy)
    if config.distill.refresh_every:
        return MovingReference.of(frozen, policy.state.shapes, strategy, config.distill)
    return FrozenModel(frozen)


def teacher_settings(policy: ModelConfig, teacher: TeacherConfig) -> ModelConfig:
    """Return the model settings of a teacher of ``policy``."""
    own = {
        "base": None,
        "tokenizer": None,
        "chat_template": None,
        "lora": None,
        "freeze": (),
        "gradient_checkpointing": False,
    }
    named = {name: getattr(teacher, name) for name in TeacherConfig.model_fields}
    return policy.model_copy(update={**own, **named})


def compared_tokenizer(model: ModelConfig, key: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model that the policy is compared with.

    Raises ``ConfigError``, which names the setting ``key``, if there is none.
    """
    try:
        with path_of(key):
            return load_tokenizer(model)
    except ModelError as error:
        raise ConfigError(f"{error}; its tokens must be known, to be compared") from error


def teacher_model(
    policy: ModelConfig,
    teacher: TeacherConfig,
    tokenizer: PreTrainedTokenizerBase,
    key: str = "teacher",
    way_out: str = "",
) -> ModelConfig:
    """Return the model settings of a teacher with the tokenizer of the policy.

    Args:
        policy: settings of the policy.
        teacher: settings of the teacher, at ``key``.
        tokenizer: tokenizer of the policy.
        key: key of ``teacher``, for messages.
        way_out: end of the message that another tokenizer is refused with.

    Raises:
        ConfigError: the vocabularies of teacher and policy differ.
    """
    model = teacher_settings(policy, teacher)
    check_tokenizer(model, tokenizer, f"{key}.path", f"a teacher of the same tokenizer{way_out}")
    return model


def check_tokenizer(
    model: ModelConfig, tokenizer: PreTrainedTokenizerBase, key: str, way_out: str
) -> None:
    """Refuse a model whose tokens are not those of the policy.

    A folder of adapters must have the tokens in its base, and in a tokenizer of its own if there is
    one.

    Args:
        model: settings of the model that is compared with the policy.
        tokenizer: tokenizer of the policy.
        key: name of the setting, for messages.
        way_out: a model to take instead, for messages.

    Raises:
        ConfigError: the vocabularies differ, or the model has no tokenizer.
    """
    adapters = saved_adapters(model)
    models = [model]
    if adapters is not None:
        models.append(adapters.base)
        if not has_tokenizer(adapters.folder):
            models.remove(model)
    ours = tokenizer.get_vocab()
    for each in models:
        theirs = compared_tokenizer(each, key).get_vocab()
        if ours == theirs:
            continue
        whose = "its tokenizer" if each is model else f"the tokenizer of its base {each.path!r}"
        raise ConfigError(
            f"{key} = {model.path!r}: {whose} has {len(theirs)} tokens, "
            f"the policy's has {len(ours)}, and {len(ours.items() ^ theirs.items())} differ; "
            f"tokens are compared one by one, so take {way_out}"
        )


def check_tokenizers(config: RLConfig | DPOConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ``ConfigError`` if a model that reads the policy's tokens has another tokenizer.

    These are the reference, the critics and the process reward model. Of the latter, a folder
    without a tokenizer is accepted.
    """
    own = {"tokenizer": None, "chat_template": None}
    if config.reference is not None:
        model = reference_model(config).model_copy(update=own)
        check_tokenizer(model, tokenizer, "reference", "a reference of the same tokenizer")
    if not isinstance(config, RLConfig):
        return
    for key in ("critic", "cost_critic", "prm"):
        path = getattr(config, key).path
        model = config.model.at(path).model_copy(update=own)
        folder = Path(path).expanduser()
        has_none = folder.is_dir() and not has_tokenizer(folder) and saved_adapters(model) is None
        if path and not has_none:
            check_tokenizer(model, tokenizer, f"{key}.path", "a model of the same tokenizer")


def local_critic(
    config: RLConfig,
    key: Literal["critic", "cost_critic"],
    strategy: Strategy,
    optimizer_steps: int,
) -> TrainableModel:
    """Build a critic with its optimizer.

    Args:
        config: settings of the run.
        key: section of the critic.
        strategy: strategy that places and trains it.
        optimizer_steps: number of optimizer steps of the run, for the learning-rate schedule.
    """
    settings: ValueModelConfig = getattr(config, key)
    model = config.model.at(settings.path)
    with path_of(f"{key}.path" if settings.path else ""), strategy.loading() as device:
        critic = Critic.load(model, device=device)
    return TrainableModel(critic, strategy.prepare(critic, settings.optimizer, optimizer_steps))


def local_process(config: RLConfig, strategy: Strategy, steps: int) -> TrainableModel:
    """Build the process reward model with its optimizer.

    Args:
        config: settings of the run.
        strategy: strategy that places and trains it.
        steps: number of steps of the run. Each takes one optimizer step.
    """
    model = config.model.at(config.prm.path)
    with path_of("prm.path" if config.prm.path else ""), strategy.loading() as device:
        actor = Actor.load(model, device=device)
    return TrainableModel(actor, strategy.prepare(actor, config.prm.optimizer, steps))
