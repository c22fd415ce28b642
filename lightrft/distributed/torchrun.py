"""Start several processes on this machine with torchelastic, and report a failure in one line."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from lightrft.distributed.error_report import SPEAKER
from lightrft.distributed.local_store import LOOPBACK, loopback_store
from lightrft.utils.errors import RESUMES
from lightrft.utils.stop_signal import TERMINATING

if TYPE_CHECKING:
    from torch.distributed import TCPStore
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
    from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousParameters

BACKEND = "one-machine"


FROM_PYTHON = "LIGHTRFT_FROM_PYTHON"
"""Environment variable of processes that a function of Python starts."""


def run_processes(name: str, program: Sequence[str], processes: int, minutes: float) -> int:
    """Run ``processes`` copies of ``python program...`` on this machine and wait for them.

    Args:
        name: prefix of the error message.
        program: arguments of the Python interpreter.
        processes: number of ranks.
        minutes: time the ranks get to stop after a signal, in minutes.

    Returns:
        The exit status: 0, 2 for errors the user can fix, 1 for others. A signal to this process is
        forwarded to the ranks, and the status is 128 plus its number.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # Torch's report of a failure is long and adds nothing to the line that is printed below.
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    rendezvous_handler_registry.register(BACKEND, one_machine)
    forced = Forced()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does for several processes
    # Ranks save a checkpoint after a signal, which takes longer than torch's default of 30 s.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(max(30, round(60 * minutes))))
    os.environ[SPEAKER] = "1"
    # nohup starts programs that ignore SIGHUP, which torchelastic would handle all the same.
    forwarded = [
        number.name
        for number in (*TERMINATING, signal.SIGINT, signal.SIGQUIT)
        if signal.getsignal(number) is not signal.SIG_IGN or number == signal.SIGINT
    ]
    settings = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        max_restarts=0,
        rdzv_backend=BACKEND,
        run_id=uuid4().hex,
        signals_to_handle=",".join(forwarded),
    )
    try:
        elastic_launch(settings, sys.executable)(*program)
    except ChildFailedError as error:
        text, status = cause(error.failures, forced.pids)
        sys.stderr.write(f"\n{name}: {text}\n")
        return status
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


class OneMachine:
    """A ``RendezvousHandler`` of one launcher, with a store on the loopback interface only."""

    # Torchelastic shares this store with the ranks then, and the first rank opens none.
    use_agent_store = True

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.store: TCPStore | None = None

    def get_backend(self) -> str:
        return BACKEND

    def get_run_id(self) -> str:
        return self.run_id

    def next_rendezvous(self) -> RendezvousInfo:
        from torch.distributed import PrefixStore
        from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo

        if self.store is None:
            self.store = loopback_store(0, timedelta(minutes=10))
        return RendezvousInfo(
            PrefixStore(self.run_id, self.store),
            0,
            1,
            # MASTER_ADDR of the ranks. Torch's handlers give the host's name, where this store does
            # not listen.
            RendezvousStoreInfo(LOOPBACK, self.store.port),
        )

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        return

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True


def one_machine(parameters: RendezvousParameters) -> Any:
    """Make the handler that torchelastic looks up under the name ``BACKEND``."""
    return OneMachine(parameters.run_id)


class Forced(logging.Handler):
    """A log handler that collects ``pids`` of processes which torchelastic killed itself.

    These processes did not end when they were asked to, so their exit says nothing of the cause.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.pids: set[int] = set()
        logger = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
        logger.setLevel(logging.WARNING)
        logger.propagate = False
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Collect the process ids of a message about forced termination."""
        if "forcefully" in str(record.msg) and isinstance(record.args, tuple):
            self.pids.update(pid for pid in record.args if isinstance(pid, int))


def cause(failures: Mapping[int, ProcessFailure], forced: Collection[int] = ()) -> tuple[str, int]:
    """Return a message about the first of ``failures``, and the exit status.

    A report about another rank counts only if that rank has reported nothing itself.

    Args:
        failures: torchelastic's failures, by rank.
        forced: ids of processes that the launcher killed afterwards.
    """
    told: dict[int, tuple[str, str]] = {}
    for rank, failure in failures.items():
        told[rank] = ("", "was killed") if failure.pid in forced else _told(failure)
    # A killed process comes first: the errors of the others are its consequences.
    order = {"killed": 0, "bug": 1, "user": 1, "rank": 2, "": 3}
    rank = min(told, key=lambda r: (order[told[r][0]], failures[r].timestamp, r))
    kind, text = told[rank]
    if kind == "rank":
        return text, 2
    if kind == "user":
        everyone = all(said == text for _, said in told.values())
        return (text if everyone else f"rank {rank}: {text}"), 2
    return f"rank {rank} {text}. {RESUMES}", 1


def _told(failure: ProcessFailure) -> tuple[str, str]:
    """Return the kind of a failure and its message."""
    data = failure.error_file_data
    message = data.get("message", {}) if isinstance(data, dict) else {}
    if isinstance(message, dict) and "kind" in message.get("extraInfo", {}):
        kind = message["extraInfo"]["kind"]
        text = message["message"]
        return kind, f"failed with {text}" if kind == "bug" else text
    if -failure.exitcode in (*TERMINATING, signal.SIGINT):
        return "", f"was ended by {failure.signal_name()}"
    if failure.exitcode < 0:
        # The kernel ends a process with SIGKILL when memory runs out.
        memory = ", as happens when memory runs out" if failure.exitcode == -signal.SIGKILL else ""
        return "killed", f"was killed by {failure.signal_name()}{memory}"
    return "", f"ended with status {failure.exitcode}; see what it said above"
