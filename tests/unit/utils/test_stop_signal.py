import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from lightrft.utils.stop_signal import (
    TERMINATING,
    StopFlag,
    Terminated,
    in_notebook,
    raise_at_termination,
)


@pytest.fixture(autouse=True)
def heeded():
    """Heed SIGHUP, which ``nohup`` ignores in all that it starts, and SIGINT, which ``&`` does."""
    hangup = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGHUP, hangup)
    signal.signal(signal.SIGINT, interrupt)


@pytest.mark.parametrize("number", [*TERMINATING, signal.SIGINT])
def test_a_signal_sets_the_flag_and_the_loop_goes_on(number):
    before = signal.getsignal(number)
    with StopFlag() as stop:
        assert not stop
        os.kill(os.getpid(), number)
        assert stop
        assert stop.reason == number.name
    assert signal.getsignal(number) is before


def test_a_second_interrupt_stops_at_once():
    with StopFlag() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)  # the first Ctrl-C, even after a SIGTERM
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert stop.reason == "SIGTERM"


class Signalled:
    """An object that gets a signal while it is deleted, where Python ignores what is raised."""

    def __init__(self, number):
        self.number = number

    def __del__(self):
        os.kill(os.getpid(), self.number)
        # The handler runs before the next line.
        self.number = 0


@pytest.mark.parametrize("number", [*TERMINATING, signal.SIGINT])
def test_a_signal_that_comes_while_an_object_is_deleted_is_not_lost(number):
    before = sys.unraisablehook
    with pytest.raises(KeyboardInterrupt) as raised, raise_at_termination():
        Signalled(number)
        time.sleep(60)
    assert getattr(raised.value, "number", signal.SIGINT) == number
    assert sys.unraisablehook is before


def test_a_signal_that_is_ignored_once_reaches_the_flag_of_a_later_loop():
    with raise_at_termination():
        Signalled(signal.SIGUSR1)
        with StopFlag() as stop:
            for _ in range(600):
                if stop:
                    break
                time.sleep(0.1)
    assert stop.reason == "SIGUSR1"


def test_other_errors_of_deleted_objects_are_shown_as_before():
    class Broken:
        def __del__(self):
            raise ValueError("broken")

    shown = []
    hook, sys.unraisablehook = sys.unraisablehook, lambda ignored: shown.append(ignored.exc_value)
    try:
        with raise_at_termination():
            Broken()
    finally:
        sys.unraisablehook = hook
    assert [str(error) for error in shown] == ["broken"]


def test_handlers_come_back_when_the_body_raises():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ZeroDivisionError), StopFlag():
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGINT) is before


def test_sigterm_is_raised_where_nothing_else_handles_it_and_never_by_other_threads():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Terminated), raise_at_termination():
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before
    with raise_at_termination(), StopFlag() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
    assert stop.reason == "SIGTERM"
    handlers = []
    with StopFlag():
        own = signal.getsignal(signal.SIGTERM)
        with raise_at_termination():
            handlers.append(signal.getsignal(signal.SIGTERM) == own)

    def body():
        with raise_at_termination():
            handlers.append(signal.getsignal(signal.SIGTERM) is before)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert handlers == [True, True]


@pytest.mark.parametrize("number", TERMINATING)
def test_every_signal_that_ends_a_program_is_raised_with_its_number(number):
    with pytest.raises(Terminated) as raised, raise_at_termination():
        os.kill(os.getpid(), number)
    assert raised.value.number == number


def test_a_program_that_nohup_has_started_goes_on_when_its_terminal_closes():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with raise_at_termination(), StopFlag() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop
            os.kill(os.getpid(), signal.SIGUSR1)
            assert stop.reason == "SIGUSR1"
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_other_threads_can_only_ask():
    seen = []

    def body():
        with StopFlag() as stop:
            stop.request("enough")
            seen.append(stop.reason)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == ["enough"]


def signalled(code, number, timeout):
    """Send a signal to ``python -c code`` once it has said that it is ready. Return its status and what it wrote after that."""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout.readline() == "ready\n"
        child.send_signal(number)
        out, err = child.communicate(timeout=timeout)
    return child.returncode, out, err


def test_a_loop_in_a_real_process_finishes_its_step_and_leaves():
    code = (
        "import time\nfrom lightrft.utils.stop_signal import StopFlag\n"
        "with StopFlag() as stop:\n"
        "    print('ready', flush=True)\n"
        "    for step in range(60_000):\n"
        "        time.sleep(0.02)\n"
        "        if stop: break\n"
        "print('left after', stop.reason, flush=True)\n"
    )
    status, out, err = signalled(code, signal.SIGTERM, timeout=600)
    assert (status, out) == (0, "left after SIGTERM\n")
    assert "safe point" in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_wait_in_which_nothing_can_be_lost_ends_at_the_first_signal(number):
    code = (
        "import time\nfrom lightrft.utils.stop_signal import StopFlag, Terminated\n"
        "with StopFlag() as stop:\n"
        "    try:\n"
        "        with stop.at_once():\n"
        "            print('ready', flush=True)\n"
        "            time.sleep(600)\n"
        "    except KeyboardInterrupt as error:\n"
        "        print(type(error).__name__, stop.reason, flush=True)\n"
        "    try:\n"
        "        with stop.at_once(): print('not reached')\n"
        "    except Terminated: print('no later wait begins')\n"
    )
    status, out, err = signalled(code, number, timeout=300)
    raised = "Terminated SIGTERM" if number == signal.SIGTERM else "KeyboardInterrupt SIGINT"
    assert (status, out) == (0, f"{raised}\nno later wait begins\n")
    assert "stopping before the first step" in err


@pytest.mark.parametrize("number", [*TERMINATING, signal.SIGINT])
@pytest.mark.parametrize("at_once", [False, True])
def test_a_signal_ends_the_program_as_itself_where_a_library_raises_an_error_in_its_place(
    number, at_once, capfd
):
    stop = StopFlag()
    with pytest.raises(KeyboardInterrupt) as caught, raise_at_termination(), stop:
        if not at_once:
            stop.__exit__(None, None, None)
        with stop.at_once() if at_once else nullcontext():
            try:
                os.kill(os.getpid(), number)
                time.sleep(60)
            except BaseException:
                raise ModuleNotFoundError("Could not import module 'X'")  # noqa: B904
    assert getattr(caught.value, "number", signal.SIGINT) == number
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)
    with pytest.raises(ModuleNotFoundError), raise_at_termination():
        raise ModuleNotFoundError("an error without a signal stays what it is")


@pytest.mark.parametrize(
    ("shell", "told"),
    [
        (None, "Ctrl-C again stops at once"),
        (SimpleNamespace(), "Ctrl-C again stops at once"),  # IPython in a terminal
        (SimpleNamespace(kernel="ipykernel"), "the interrupt button again stops at once"),
    ],
)
def test_an_interrupt_names_the_button_in_a_notebook_and_the_keys_in_a_terminal(
    monkeypatch, capfd, shell, told
):
    ipython = SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    with StopFlag():
        os.kill(os.getpid(), signal.SIGINT)
    assert f"SIGINT: stopping at the next safe point; {told}" in capfd.readouterr().err


def test_a_program_outside_a_kernel_is_no_notebook():
    assert not in_notebook()
