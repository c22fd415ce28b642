"""Memory of a rank that sends weights to a server: copies for a restart of it, and buckets."""

from __future__ import annotations

from lightrft.config.verbs import PolicyConfig, RLConfig, TrainingConfig
from lightrft.diagnostics.memory.phases import Device, Model
from lightrft.engines.base import ServerKind
from lightrft.engines.sending.sender_memory import SentWeights, sender_memory
from lightrft.trainer.checks.preflight import generates
from lightrft.utils.module_tensors import factor_of, plain_name


def asks_server(config: TrainingConfig) -> bool:
    """Return True if the run asks ``engine.url`` for responses."""
    if not isinstance(config, PolicyConfig) or config.engine.url is None:
        return False
    return generates(config) or bool(config.eval.data.sources)


def sent_weights(
    config: TrainingConfig, policy: Model, device: Device, server: ServerKind | None
) -> SentWeights:
    """Return the memory of the rank that sends weights to a server.

    Args:
        config: Settings of the run.
        policy: The policy.
        device: Device of each process.
        server: Kind of the server of ``engine.url``. None if it is unknown; the kind that takes
            the most memory counts then.
    """
    if not isinstance(config, PolicyConfig):
        return SentWeights()
    engine = config.engine
    starts = engine.starts_server and (generates(config) or bool(config.eval.data.sources))
    if not starts and not asks_server(config):
        return SentWeights()
    sizes = {name: p.numel() * p.itemsize for name, p in policy.model.named_parameters()}
    # adapters are added to the weights that are sent
    whole = float(sum(size for name, size in sizes.items() if plain_name(name) is not None))
    bases = float(sum(size for name, size in sizes.items() if is_base(name)))
    ahead = isinstance(config, RLConfig) and bool(config.rollout.staleness)
    # the frozen weights under adapters, which rank 0 gathers once for all updates
    frozen = bases if ahead and device.processes > 1 and not starts else 0.0
    changes = bases or sum(p.count * p.itemsize for p in policy.parameters if p.trained)
    return sender_memory(engine, server, whole, changes, frozen)


def is_base(name: str) -> bool:
    """Return True for a weight that an adapter is added to."""
    factor = factor_of(name.removeprefix("model."))
    return factor is not None and factor[1] == "base"
