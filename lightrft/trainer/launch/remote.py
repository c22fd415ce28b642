"""Roles that live in workers: each rank holds objects with the methods of those roles, which ask the workers."""

from __future__ import annotations

from lightrft.utils.workers import Maker, Worker, WorkerLost

__all__ = ["Maker", "Worker", "WorkerLost"]
