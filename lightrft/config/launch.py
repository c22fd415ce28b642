"""Settings that start the processes of a run: torchrun, Ray and its workers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from lightrft.config.base import Settings, changed_fields

WORKERS = {
    "engines": "engine",
    "scorers": "scorer",
    "references": "reference",
    "teachers": "teacher",
    "reward_models": "reward_model",
}
"""Settings of ``RayConfig`` that give a role workers, mapped to the name of one such worker."""


class RayConfig(Settings):
    """Ray: the cluster, the ranks on it, and roles that run in separate workers."""

    address: str | None = None
    """Cluster to join: ``auto`` or ``host:port``. ``null`` starts a cluster of this machine alone,
    for the time of the run."""
    cpus: float = Field(1.0, ge=0)
    """Processors that each rank asks for. Fractions are fine."""
    devices: float | None = Field(None, gt=0, le=1)
    """Share of an accelerator that each rank takes, up to 1. ``null``: a whole one, where ranks
    compute on accelerators. Lower it to leave room for workers; ranks never share one."""
    placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    """Ray's strategy for the bundles of ranks and workers. ``PACK``: few nodes; ``SPREAD``: many.
    ``STRICT_PACK``: exactly one; ``STRICT_SPREAD``: a node for each bundle."""
    placement_timeout_minutes: float = Field(5.0, gt=0)
    """Minutes that the requested resources have to become free. Raise it on a cluster that grows on
    demand."""
    restarts: int = Field(3, ge=0)
    """Most restarts. When a rank or its node is lost, all ranks restart from the last checkpoint,
    at most so often. A lost worker is restarted at most so often in a row."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Environment variables of every process of the run."""
    engines: int = Field(0, ge=0)
    """Number of engines in separate workers, which generate for all ranks; 0 generates in the
    ranks."""
    scorers: int = Field(0, ge=0)
    """Number of workers that call reward functions, each with ``reward.workers`` processes; 0 calls
    them in the ranks."""
    references: int = Field(0, ge=0)
    """Number of workers that each hold a copy of the reference; 0 holds it in the ranks."""
    teachers: int = Field(0, ge=0)
    """Number of workers that each hold a copy of the teacher; 0 holds it in the ranks."""
    reward_models: int = Field(0, ge=0)
    """Number of workers that each hold a copy of all reward models and judges; 0 holds them in the
    ranks."""
    worker_cpus: float = Field(1.0, ge=0)
    """Processors that each worker asks for."""
    engine_devices: float | None = Field(None, gt=0, le=1)
    """Share of an accelerator that each engine worker takes, up to 1; ``null``: a whole one. What
    ranks leave of theirs is used first."""
    model_devices: float | None = Field(None, gt=0, le=1)
    """Share of an accelerator that each worker with a model takes, up to 1; ``null``: a whole one.
    What ranks leave of theirs is used first."""
    weights: Literal["broadcast", "shared", "message"] = "broadcast"
    """Transport of new weights to engines. ``broadcast``: a process group, to any node; it is
    replaced, with a warning, where processes share a GPU. ``shared``: memory that both sides see.
    ``message``: through Ray."""
    bucket_mb: int = Field(256, ge=1)
    """Size in MiB of the buckets in which weights travel."""
    call_timeout_minutes: float | None = Field(None, gt=0)
    """Minutes after which a worker that does not reply is restarted; its start counts too.
    ``null``: half of ``strategy.timeout_minutes``. Must be below ``strategy.timeout_minutes``, or
    the ranks that
    wait time out first."""

    @property
    def worker_counts(self) -> dict[str, int]:
        """Number of workers that each setting asks for."""
        models = {
            "references": self.references,
            "teachers": self.teachers,
            "reward_models": self.reward_models,
        }
        return {"engines": self.engines, "scorers": self.scorers, **models}

    @property
    def workers(self) -> dict[str, tuple[int, float | None]]:
        """Map each kind of worker to its number and the share of a device that one asks for.

        The share is 0 for workers that compute on no device, and None for a whole device.
        """
        shares = {"engines": self.engine_devices, "scorers": 0.0}
        return {
            WORKERS[name]: (count, shares.get(name, self.model_devices))
            for name, count in self.worker_counts.items()
        }

    @model_validator(mode="after")
    def _of_workers(self) -> RayConfig:
        needed = {
            "engine_devices": ("engines",),
            "weights": ("engines",),
            "bucket_mb": ("engines",),
            "model_devices": ("references", "teachers", "reward_models"),
            "worker_cpus": tuple(self.worker_counts),
            "call_timeout_minutes": tuple(self.worker_counts),
        }
        for name in changed_fields(self):
            kinds = needed.get(name, ())
            if kinds and not any(self.worker_counts[kind] for kind in kinds):
                value = getattr(self, name)
                raise ValueError(
                    f"launch.ray.{name} = {value!r} changes nothing without "
                    f"launch.ray.{' or '.join(kinds)}"
                )
        return self


class LaunchConfig(Settings):
    """The processes of a run and where they start."""

    kind: Literal["local", "ray"] = "local"
    """``local`` starts ``processes`` on this machine by torchrun; a process that torchrun has
    started itself runs as it is. ``ray`` starts them on a Ray cluster."""
    processes: int = Field(1, ge=1)
    """Number of ranks. Set it to the number of devices."""
    ray: RayConfig = RayConfig()
    """Cluster and workers of ``kind: ray``."""

    @model_validator(mode="after")
    def _of_kind(self) -> LaunchConfig:
        # Refused, not ignored: a config that asks for workers would otherwise run without them.
        given = changed_fields(self.ray)
        if given and self.kind != "ray":
            raise ValueError(
                f"launch.ray.{given[0]} = {getattr(self.ray, given[0])!r} changes nothing with "
                f"kind {self.kind}; set launch.kind=ray"
            )
        return self
