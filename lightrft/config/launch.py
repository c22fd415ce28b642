"""Settings that start the processes of a run: torchrun, Ray and its workers."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from lightrft.config.base import Settings

WORKERS = {
    "engines": "engine",
    "scorers": "scorer",
    "references": "reference",
    "teachers": "teacher",
    "critic": "critic",
    "process": "process",
}
"""Settings of ``RayConfig`` that give a role workers, and what one of those is called."""


class RayConfig(Settings):
    """How ``launch.kind: ray`` uses a cluster.

    ``address``: ``null`` starts one of this machine alone, for the time of the run; ``auto`` or ``host:port`` joins one that is there.
    Each rank asks for ``cpus`` processors and for ``devices`` of an accelerator (``null``: a whole one, where ranks compute on them; ranks
    never share one). ``placement`` is Ray's strategy for the bundles of these. What is asked for has ``wait`` minutes to be free.
    A rank that is lost, or its node, has all ranks start again from the last checkpoint, at most ``restarts`` times.
    ``environment`` is set in every process of the run.

    Roles may have workers of their own, apart from the ranks: ``engines`` that draw, ``scorers`` that call reward functions,
    ``references``, ``teachers``, the ``critic`` and the ``process`` reward model. Each asks for ``worker_cpus``, and engines for
    ``engine_devices``, models for ``model_devices`` of an accelerator (``null``: a whole one); what ranks leave of theirs is taken first.
    ``weights`` is how engines, and references that move, get them, in buckets of ``bucket_mb``: ``broadcast`` in a process group,
    ``shared`` in memory that both sides see, ``message`` through Ray. A worker that is lost, or silent for ``silence`` minutes
    (``null``: half of ``strategy.timeout``, which must be more: ranks wait for it), is started anew, ``restarts`` times in a row.
    """

    address: str | None = None
    cpus: float = Field(1.0, ge=0)
    devices: float | None = Field(None, gt=0, le=1)
    placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    wait: float = Field(5.0, gt=0)
    restarts: int = Field(3, ge=0)
    environment: dict[str, str] = Field(default_factory=dict)
    engines: int = Field(0, ge=0)
    scorers: int = Field(0, ge=0)
    references: int = Field(0, ge=0)
    teachers: int = Field(0, ge=0)
    critic: bool = False
    process: bool = False
    worker_cpus: float = Field(1.0, ge=0)
    engine_devices: float | None = Field(None, gt=0, le=1)
    model_devices: float | None = Field(None, gt=0, le=1)
    weights: Literal["broadcast", "shared", "message"] = "broadcast"
    bucket_mb: int = Field(256, ge=1)
    silence: float | None = Field(None, gt=0)

    @property
    def staff(self) -> dict[str, int]:
        """How many workers each setting asks for."""
        trained = {"critic": int(self.critic), "process": int(self.process)}
        models = {"references": self.references, "teachers": self.teachers, **trained}
        return {"engines": self.engines, "scorers": self.scorers, **models}

    @property
    def workers(self) -> dict[str, tuple[int, float | None]]:
        """How many workers of each kind, and the share of a device that one asks for, if they compute on such."""
        shares = {"engines": self.engine_devices, "scorers": 0.0}
        return {WORKERS[name]: (count, shares.get(name, self.model_devices)) for name, count in self.staff.items()}

    @model_validator(mode="after")
    def _of_workers(self) -> RayConfig:
        models, moving = ("references", "teachers", "critic", "process"), ("engines", "references")
        needed = {"engine_devices": ("engines",), "weights": moving, "bucket_mb": moving, "model_devices": models}
        for name, kinds in {**needed, "worker_cpus": tuple(self.staff), "silence": tuple(self.staff)}.items():
            value = getattr(self, name)
            if value != type(self).model_fields[name].default and not any(self.staff[kind] for kind in kinds):
                raise ValueError(f"launch.ray.{name} = {value!r} changes nothing without launch.ray.{' or '.join(kinds)}")
        return self


class LaunchConfig(Settings):
    """Where the processes of a run are started. ``kind`` ``local``: ``processes`` above 1 starts so many of them on this machine, by
    torchrun; one that torchrun has started itself counts as it is. ``ray``: on a Ray cluster, as ``ray`` says."""

    kind: Literal["local", "ray"] = "local"
    processes: int = Field(1, ge=1)
    ray: RayConfig = RayConfig()

    @model_validator(mode="after")
    def _of_kind(self) -> LaunchConfig:
        if self.kind != "ray" and (given := [k for k, f in RayConfig.model_fields.items() if self._differs(k, f)]):
            raise ValueError(
                f"launch.ray.{given[0]} = {getattr(self.ray, given[0])!r} changes nothing with kind {self.kind}; set launch.kind=ray"
            )
        return self

    def _differs(self, name: str, field: Any) -> bool:
        return getattr(self.ray, name) != field.get_default(call_default_factory=True)
