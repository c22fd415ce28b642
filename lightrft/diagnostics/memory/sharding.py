"""Derive how a strategy shards models over processes, and which parts it offloads."""

from __future__ import annotations

from lightrft.config.strategy import StrategyConfig
from lightrft.diagnostics.memory.formulas import WHOLE, Part, ShardingFactors
from lightrft.strategy.wrap_policy import BUCKET, bucket_of


def shares_of(
    strategy: StrategyConfig,
    processes: int,
    kind: str,
    *,
    trained: bool,
    block: int = BUCKET,
) -> ShardingFactors:
    """Return the sharding of a model under ``strategy``.

    Args:
        strategy: settings of the strategy.
        processes: number of processes.
        kind: kind of device. On ``cpu``, device and host share the memory, so nothing is offloaded.
        trained: True for a model that is trained.
        block: number of trained weights of its largest block.
    """
    if processes == 1:
        is_away = strategy.cpu_offload and trained and kind != "cpu"
        # Every trained weight has a master on the host, and a gradient leaves once it is complete.
        return ShardingFactors(copied=True, on_host=("state", "gradients")) if is_away else WHOLE
    if strategy.kind == "deepspeed":
        return _zero(strategy, processes, kind, trained, block)
    return _fsdp(strategy, processes, kind, trained)


def rows_of(strategy: StrategyConfig, processes: int) -> int:
    """Return the number of processes that shard one copy of the weights (HSDP: of one replica).

    Tensor-parallel ranks count once.
    """
    rows = max(1, processes // strategy.tensor_parallel)
    return min(strategy.hsdp_shard_size or rows, rows)


def _fsdp(strategy: StrategyConfig, processes: int, kind: str, trained: bool) -> ShardingFactors:
    """Return the sharding of FSDP2: equal shards, gathered block by block.

    Trained weights are in float32, unless layers are tensor-parallel.
    """
    rows = rows_of(strategy, processes)
    left = 0.0
    # False keeps whole blocks. A number reshards to that many ranks.
    if trained and strategy.reshard_after_forward is not True:
        left = 1 / (strategy.reshard_after_forward or 1)
    away: tuple[Part, ...] = ()
    # On a CPU, host and device share the memory.
    if strategy.cpu_offload and kind != "cpu":
        away = ("weights", "state", "gradients")
    return ShardingFactors(
        rows,
        rows,
        rows,
        cut=strategy.tensor_parallel,
        precise=strategy.tensor_parallel == 1,
        by_blocks=True,
        kept_between_passes=left,
        on_host=away,
    )


def _zero(
    strategy: StrategyConfig,
    processes: int,
    kind: str,
    trained: bool,
    block: int,
) -> ShardingFactors:
    """Return the sharding of ZeRO. Models that are not trained are sharded only in stage 3."""
    stage = strategy.zero_stage
    given = strategy.deepspeed.get("zero_optimization", {})

    def offloaded(what: str) -> bool:
        # On a CPU, host and device share the memory.
        section = given.get(f"offload_{what}") or {}
        return kind != "cpu" and section.get("device", "none") != "none"

    # Stage 1 shards masters and moments, stage 2 gradients too, and stage 3 also weights.
    weights = processes if stage == 3 else 1
    away: list[Part] = []
    if stage == 3 and offloaded("param"):
        away.append("weights")
    if not trained:
        return ShardingFactors(weights, by_blocks=stage == 3, on_host=tuple(away))
    if offloaded("optimizer"):
        away.append("state")
        if stage > 1:
            away.append("gradients")
    return ShardingFactors(
        weights,
        processes,
        processes if stage > 1 else 1,
        copied=stage < 3,
        by_blocks=stage == 3,
        bucket=float(given.get("reduce_bucket_size", bucket_of(block))),
        on_host=tuple(away),
    )
