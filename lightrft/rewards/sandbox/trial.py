"""Try reward functions in a separate process, to show within seconds where they raise or hang.

``try_rewards`` starts and ends the process. ``main`` runs in it. Every call has the deadline of the
rewards. The first call beyond it ends the trial, so a hanging reward costs one deadline.
"""

from __future__ import annotations

import faulthandler
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightrft.distributed.guarded.guardian import become_guardian
from lightrft.rewards.registry import Reward, load_reward
from lightrft.rewards.sandbox.results import VALUE, InvalidReward, rows_of, terms_of
from lightrft.rewards.sandbox.rollout_view import view_of
from lightrft.rewards.sandbox.worker import describe, warm_up
from lightrft.types import Rollout

_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from lightrft.rewards.sandbox.trial import main; main({fd}, {parent})"
)
START_SECONDS = 300.0
"""Seconds for importing a user's file."""
END_SECONDS = 5.0
"""Seconds past the deadline after which a trial is ended from outside."""
START_OF_BUILT_IN = 30.0
"""Additional seconds for a reward of this package.

Its first call loads its dependencies.
"""
PACKAGE = str(Path(__file__).parents[2])


@dataclass(frozen=True, slots=True)
class Call:
    """A call of one reward function on one pickled rollout view, or on several if it is batched."""

    reward: int
    views: list[bytes]


@dataclass(frozen=True, slots=True)
class TrialOutcome:
    """The result of a call: its ``values``, or a ``problem``.

    Attributes:
        call: Index of the call.
        values: One reward per rollout.
        names: Names of the further numbers, of all rollouts together.
        problem: Empty if the call succeeded.
        trace: The user's own frames of the traceback.
    """

    call: int
    values: tuple[float, ...] = ()
    names: frozenset[str] = frozenset()
    problem: str = ""
    trace: str = ""


def calls_on(reward: Reward, rollouts: Sequence[Rollout]) -> list[Call]:
    """Return one call per rollout, or one for all if ``reward`` is batched."""
    views = []
    for rollout in rollouts:
        views.append(pickle.dumps(view_of(rollout), protocol=pickle.HIGHEST_PROTOCOL))
    if reward.batched:
        return [Call(0, views)]
    return [Call(0, [view]) for view in views]


def try_rewards(
    rewards: Sequence[tuple[str, dict[str, object]]],
    calls: Sequence[Call],
    deadline: float,
) -> list[TrialOutcome]:
    """Run ``calls`` in order in a separate process.

    Args:
        rewards: Name and options of each function.
        calls: The calls; ``Call.reward`` is an index into ``rewards``.
        deadline: Seconds for each call. No call begins after this many seconds in total.

    Returns:
        The outcomes of the calls made, in order. The last may be a problem that ended the process.
    """
    work = (list(rewards), list(calls), deadline)
    # No call begins after ``deadline``, and the last one may take as long again.
    patience = START_SECONDS + 2 * deadline + END_SECONDS
    # A file, not a pipe: it cannot fill up and block, and survives a killed process.
    with tempfile.TemporaryFile("w+b") as told:
        # An empty entry of sys.path is the working directory.
        path = json.dumps([str(Path(entry).absolute()) for entry in sys.path])
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM.format(fd=told.fileno(), parent=os.getpid()), path],
            stdin=subprocess.PIPE,
            pass_fds=[told.fileno()],
            start_new_session=True,
            env={"OMP_NUM_THREADS": "1", **os.environ},
        )
        try:
            with suppress(subprocess.TimeoutExpired):
                frame = pickle.dumps(work, protocol=pickle.HIGHEST_PROTOCOL)
                process.communicate(frame, timeout=patience)
        finally:
            process.terminate()  # its guardian then ends everything that the rewards have started
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS)
            process.kill()
            process.wait()
        told.seek(0)
        return _outcomes(told.read().decode(errors="replace"), process.returncode, deadline)


def _outcomes(text: str, status: int, deadline: float) -> list[TrialOutcome]:
    """Parse the output of the process: a JSON line when a call begins and when it ends.

    The frames of a hanging call may follow.

    Args:
        text: The output.
        status: Exit status of the process.
        deadline: Seconds for each call.
    """
    outcomes: list[TrialOutcome] = []
    frames: list[str] = []
    begun = -1
    for line in text.splitlines():
        message = _message(line)
        if message is None:
            frames.append(line)
        elif "begun" in message:
            begun = message["begun"]
        else:
            values, names = message.get("values", ()), message.get("names", ())
            problem, trace = message.get("problem", ""), message.get("trace", "")
            outcomes.append(
                TrialOutcome(message["call"], tuple(values), frozenset(names), problem, trace)
            )
    if not outcomes and begun < 0:
        return [TrialOutcome(0, problem=f"could not start (status {status})")]
    if begun >= len(outcomes):
        # The last call has no outcome. faulthandler writes frames only past the deadline.
        how = f"ended its process (status {status})"
        if frames:
            how = f"took longer than reward.timeout = {deadline:g} s"
        outcomes.append(TrialOutcome(begun, problem=how, trace=_user_frames(frames)))
    return outcomes


def _message(line: str) -> dict[str, Any] | None:
    with suppress(ValueError):
        found = json.loads(line)
        if isinstance(found, dict):
            return found
    return None


def _user_frames(lines: Sequence[str]) -> str:
    """Return the user's own frames of a ``faulthandler`` dump, innermost last."""
    found = []
    for line in lines:
        is_ours = PACKAGE in line or "<string>" in line
        if line.startswith("  File ") and not is_ours:
            found.append(line)
    return "\n".join(reversed(found))


def main(fd: int, parent: int) -> None:
    """Run the calls of ``try_rewards`` of process ``parent`` and write the results to ``fd``."""
    os.dup2(2, 1)
    become_guardian(parent, fd)
    told = os.fdopen(fd, "w", buffering=1, encoding="utf-8")

    def tell(**message: object) -> None:
        told.write(json.dumps(message) + "\n")

    specs, calls, deadline = pickle.loads(sys.stdin.buffer.read())
    try:
        rewards = [load_reward(name, options) for name, options in specs]
        warm_up([reward for reward in rewards if not _built_in(reward)])
    except BaseException as error:
        problem = f"could not start: {describe(error)}"
        tell(call=0, problem=problem, trace=_frames(error))
        return
    ends = time.monotonic() + deadline
    for index, call in enumerate(calls):
        if time.monotonic() > ends:
            return
        reward = rewards[call.reward]
        tell(begun=index)
        patience = deadline + (START_OF_BUILT_IN if _built_in(reward) else 0)
        # It has a thread in C, which also interrupts a call that does not return to Python.
        faulthandler.dump_traceback_later(patience, exit=True, file=told)
        found = _outcome(reward, call)
        faulthandler.cancel_dump_traceback_later()
        tell(call=index, **found)


def _outcome(reward: Reward, call: Call) -> dict[str, object]:
    try:
        results = _called(reward, [pickle.loads(view) for view in call.views])
        terms = [terms_of(result) for result in results]
        names = {name for each in terms for name in each} - {VALUE}
        return {"values": [each[VALUE] for each in terms], "names": sorted(names)}
    except InvalidReward as error:
        return {"problem": str(error), "trace": _defined(reward)}
    except BaseException as error:
        trace = _frames(error) or _defined(reward)
        return {"problem": f"raised {describe(error)}", "trace": trace}


def _frames(error: BaseException) -> str:
    """Return the user's own frames of a traceback."""
    frames = []
    for frame in traceback.extract_tb(error.__traceback__):
        if not frame.filename.startswith((PACKAGE, "<")):
            frames.append(frame)
    return "".join(traceback.format_list(frames)).rstrip()


def _built_in(reward: Reward) -> bool:
    # A function of code without a module, as `exec` runs it, has None.
    return str(reward.function.__module__).startswith("lightrft.")


def _called(reward: Reward, rollouts: list[Any]) -> list[Any]:
    result = reward.function(rollouts if reward.batched else rollouts[0], **reward.options)
    if reward.asynchronous:
        import asyncio  # a quarter of the start of a process, which most rewards do not need

        result = asyncio.run(result)
    return rows_of(result, len(rollouts)) if reward.batched else [result]


def _defined(reward: Reward) -> str:
    """Return the location of a function's definition, as a line of a traceback."""
    code = getattr(reward.function, "__code__", None)
    if code is None:
        return ""
    return f'  File "{code.co_filename}", line {code.co_firstlineno}, in {code.co_name}'
