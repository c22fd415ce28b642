"""Reward functions that behave well and badly, for the tests of the scorer."""

import asyncio
import ctypes
import math
import os
import signal
import sys
import time
from pathlib import Path

from lightrft.rewards.registry import ungraded_beyond

WARM = []
LEAK = []


def warm_up():
    WARM.append(os.getpid())


def end_soon():
    """Let the alarm of this call ring now, as if its deadline, which is far, were over."""
    assert signal.getitimer(signal.ITIMER_REAL)[0] > 30
    signal.setitimer(signal.ITIMER_REAL, 0.05)


def stuck():
    """Tell the fixture ``overdue`` that this call will not return."""
    Path(os.environ["LIGHTRFT_TEST_STUCK"]).touch()


def endure():
    """Never return, whatever is raised."""
    while True:
        try:
            time.sleep(0.01)
        except BaseException:
            continue


def act(text):
    """Do what ``text`` says; by default its number is the reward."""
    if text == "raise":
        raise ValueError("no such luck")
    if text == "loop":
        end_soon()
        while True:
            pass
    if text == "stubborn":
        stuck()
        endure()
    if text == "c-loop":
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
        stuck()
        ctypes.PyDLL(None).sleep(1000)
    if text == "memory":
        LEAK.append(bytearray(10**12))
    if text == "leak":
        while True:
            LEAK.append(bytearray(10**7))
    if text == "exit":
        os._exit(3)
    if text == "sys.exit":
        sys.exit(4)
    if text == "segv":
        os.kill(os.getpid(), signal.SIGSEGV)
    if text == "sigkill":
        os.kill(os.getpid(), signal.SIGKILL)
    if text == "print":
        print("hello " * 10000, flush=True)
        os.write(1, b"world\n")
        return 1.0
    if text == "fork":
        os.fork()
        return 1.0
    if text == "hang up":
        os.closerange(3, 100)
        endure()
    if text == "stdin":
        return float(len(sys.stdin.read()))
    odd = {
        "nan": math.nan,
        "inf": math.inf,
        "str": "good",
        "none": None,
        "list": [1.0],
        "huge": 10**400,
        "dict": {},
        "true": True,
    }
    if text in odd:
        return odd[text]
    return float(text)


def plain(rollout):
    return act(rollout.text)


async def asynchronous(rollout):
    await asyncio.sleep(0.01)
    if rollout.text == "sleep":
        loop = asyncio.get_running_loop()
        while len(asyncio.all_tasks()) > 2:  # this call, and the one that waits for all
            await asyncio.sleep(0.01)
        now = loop.time
        loop.time = lambda: now() + 1000  # as if the deadline, which is far, were over
        try:
            await asyncio.sleep(1000)
        finally:
            loop.time = now
    return act(rollout.text)


OPEN = set()


async def open_at_once(rollout):
    """The calls that are open at the end of this one."""
    OPEN.add(rollout.seed)
    await asyncio.sleep(0.01)
    found = len(OPEN)
    OPEN.discard(rollout.seed)
    return float(found)


def batched(rollouts):
    return [act(r.text) for r in rollouts]


async def batched_async(rollouts):
    await asyncio.sleep(0.01)
    return {"reward": [act(r.text) for r in rollouts], "size": [len(rollouts)] * len(rollouts)}


def batched_short(rollouts):
    return [1.0] * (len(rollouts) + 1)


def batch_size(rollouts):
    return [float(len(rollouts))] * len(rollouts)


def terms(rollout, scale=1.0):
    return {"reward": 3.0 * scale, "a": 1.0 * scale, "b": 2.0 * scale}


def counted(rollout):
    return {"reward": 0.5, "steps": 7}


def columns(rollout):
    p = rollout.prompt
    assert (p.id, p.label, p.reference, p.data_source, p.text) == (
        "p0",
        "gold",
        "why",
        "here",
        "Q?",
    )
    assert rollout.finish_reason == "stop" and rollout.token_ids == [5, 6] and len(rollout) == 2
    assert (
        rollout.sampled == [True, False]
        and rollout.logprobs == [-0.5, 0.0]
        and rollout.versions == [1, 1]
    )
    return float(p.columns["bonus"])


def sleeps(rollout):
    time.sleep(float(rollout.text))
    return 1.0


def waits_for_a_file(rollout):
    while not Path(rollout.text).exists():
        time.sleep(0.01)
    return 1.0


def loaded(rollout):
    assert (
        "torch" not in sys.modules
        and "transformers" not in sys.modules
        and "pydantic" not in sys.modules
    )
    assert len(WARM) == 1 and WARM[0] == os.getpid()
    return float(os.getpid())


def socket_number():
    """The descriptor of the worker's socket."""
    import stat

    most = os.sysconf("SC_OPEN_MAX")  # a run that has many files open passes on a high number
    return next(n for n in range(3, most) if _is_open(n) and stat.S_ISSOCK(os.fstat(n).st_mode))


def _is_open(number):
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def writes_to_its_socket(rollout):
    """Send ``rollout.text`` to the run, unless it is a number."""
    if not rollout.text.isdigit():
        data = b"[" * 100_000 + b"\n" if rollout.text == "deep" else rollout.text.encode()
        if rollout.text == "long":
            data = b"x" * (40 << 20)
        os.write(socket_number(), data) if len(data) < 200_000 else send_all(data)
        if rollout.text == "begun for ever":
            while True:
                os.write(socket_number(), b'{"begun": true}\n')
                time.sleep(0.1)
        return 7.0
    return float(rollout.text)


def send_all(data):
    import socket

    with socket.socket(fileno=os.dup(socket_number())) as connection:
        connection.sendall(data)


def daemon(rollout):
    """Start a process of another session whose own parent has ended; its number."""
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.write(writing, str(os.getpid()).encode())
            os.closerange(3, 200)
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
            time.sleep(1000)
        os._exit(0)
    os.wait()
    return float(os.read(reading, 20))


def bomb(rollout):
    """Fork without end, but for a test on a shared machine not too fast."""
    while True:
        time.sleep(0.2)
        os.fork()


@ungraded_beyond(0.3)
def budgeted(rollout):
    while rollout.text == "python":
        pass
    return float(rollout.text == "1" or 7 ** (10**9) > 0)


def child(rollout):
    import subprocess

    return float(subprocess.Popen(["sleep", "1000"]).pid)


def takes_nothing():
    return 1.0


def only_keyword(*, rollout):
    return 1.0


NOT_A_FUNCTION = 3
