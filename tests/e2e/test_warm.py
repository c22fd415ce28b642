"""Programs in processes that begin with the imports done behave as under ``python``."""

from __future__ import annotations

import os
import signal
import subprocess

from tests import warm


def test_a_warm_process_has_the_words_the_input_the_environment_and_the_folder_that_it_is_given(
    tmp_path,
):
    code = (
        "import os, sys; assert 'torch' in sys.modules; print(sys.argv, input(), "
        "os.environ['HERE'], os.getcwd()); sys.exit(3)"
    )
    done = warm.run(
        ["-c", code, "word"], env={**os.environ, "HERE": "there"}, cwd=tmp_path, input="typed\n"
    )
    assert (done.returncode, done.stderr) == (3, "")
    assert done.stdout == f"['-c', 'word'] typed there {tmp_path}\n"


def test_a_warm_process_ends_with_its_error_or_its_signal_and_what_it_has_written():
    failed = warm.run(["-c", "print('first'); 1 / 0"], env=os.environ)
    assert (failed.returncode, failed.stdout) == (1, "first\n")
    assert failed.stderr.endswith("ZeroDivisionError: division by zero\n")
    assert (
        warm.run(["-c", "import os; os.kill(os.getpid(), 9)"], env=os.environ).returncode
        == -signal.SIGKILL
    )


def test_the_ranks_of_a_warm_launcher_are_its_children_in_sessions_of_their_own(tmp_path):
    rank = tmp_path / "rank.py"
    rank.write_text(
        "import os, sys; from pathlib import Path\n"
        "found = os.getppid(), os.getsid(0) == os.getpid(), 'torch' in sys.modules\n"
        "Path('rank' + os.environ['RANK']).write_text(str(found))\n"
    )
    launch = (
        "import os, sys; from lightrft.distributed.torchrun import run_processes; "
        "run_processes('x', sys.argv[1:], 2, 1.0); print(os.getpid())"
    )
    done = warm.run(["-c", launch, rank], env=os.environ, cwd=tmp_path, seats=2)
    found = [(tmp_path / f"rank{i}").read_text() for i in range(2)]
    assert found == [f"({done.stdout.strip()}, True, True)"] * 2, done.stderr


def test_a_warm_interpreter_runs_its_words_in_a_fork_and_ends_as_the_fork_does(tmp_path):
    python, script = str(warm.interpreter(tmp_path)), tmp_path / "script.py"
    env = {**os.environ, "WARM_PYTHON": python}
    script.write_text(
        "import os, sys\n"
        "print('torch' in sys.modules, sys.executable, *sys.argv[1:], input(), flush=True)\n"
        "sys.exit(3) if len(sys.argv) > 2 else os.kill(os.getpid(), 9)\n"
    )
    for words, status in ((["two words", "'"], 3), (["one"], -signal.SIGKILL)):
        command = [python, str(script), *words]
        done = subprocess.run(command, env=env, input="typed\n", capture_output=True, text=True)
        said = f"True {python} {' '.join(words)} typed\n"
        assert (done.returncode, done.stdout) == (status, said), done.stderr


def test_code_for_a_warm_interpreter_runs_in_a_new_one_with_its_pipes(tmp_path):
    code = "import os, sys; os.write(int(sys.argv[1]), str('torch' in sys.modules).encode())"
    inlet, outlet = os.pipe()
    with os.fdopen(inlet) as pipe:
        words = [str(warm.interpreter(tmp_path)), "-c", code, str(outlet)]
        subprocess.run(words, pass_fds=[outlet], check=True)
        os.close(outlet)
        assert pipe.read() == "False"
