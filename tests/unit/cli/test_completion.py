"""``lightrft completion``: the printed scripts, in real shells where they are installed."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightrft.cli.completion import SHELLS, table
from lightrft.cli.main import main
from lightrft.config.base import has_setting, load_settings
from lightrft.config.verbs import RLConfig
from lightrft.utils.errors import ConfigError
from lightrft.verbs import VERBS, of_kind

SETUP = {
    "bash": ["bash", "--norc", "--noprofile", "-i"],
    "zsh": ["zsh", "-f", "-i"],
    "fish": ["fish", "--no-config", "-i"],
}
BEFORE = {"zsh": "autoload -U compinit; compinit -u; setopt no_auto_remove_slash\n"}


class Terminal:
    """An interactive shell that has read the script."""

    def __init__(self, shell: str, script: Path, folder: Path) -> None:
        child, self.file = pty.fork()
        if child == 0:
            os.chdir(folder)
            os.environ.update(TERM="dumb", PS1="$ ", HOME=str(folder))
            os.execvp(shell, SETUP[shell])
        self.child = child
        self.type(f"{BEFORE.get(shell, '')}source {script}; echo rea''dy\n", "^ready")

    def type(self, keys: str, until: str) -> str:
        """The first group of ``until``, a pattern, once it is on the screen."""
        os.write(self.file, keys.encode())
        screen, end = "", time.monotonic() + 60
        while not (found := re.search(until, screen.replace("\r", ""), re.M)):
            assert time.monotonic() < end, screen
            if select.select([self.file], [], [], 1)[0]:
                screen += os.read(self.file, 4096).decode(errors="replace")
        return found[found.re.groups]

    def complete(self, words: str) -> str:
        """The line after the key Tab."""
        # Ctrl-A goes to the start of the line, which is then printed between two marks.
        os.write(self.file, f"{words}\t".encode())
        time.sleep(0.5)
        return self.type("\x01echo '<'\x05'>'\n", "^< ?(.*)>")


@pytest.fixture(params=SHELLS)
def terminal(request, tmp_path, capsys) -> Iterator[Terminal]:
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    (tmp_path / "my_run.yaml").write_text("")
    (tmp_path / "folder").mkdir()
    assert main(["completion", request.param]) == 0
    script = tmp_path / "script"
    script.write_text(capsys.readouterr().out)
    shell = Terminal(request.param, script, tmp_path)
    yield shell
    os.write(shell.file, b"\x15exit\n")
    os.waitpid(shell.child, 0)
    os.close(shell.file)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("lightrft lab", "lightrft label-steps "),
        ("lightrft grm d", "lightrft grm dpo "),
        ("lightrft rl sampl", "lightrft rl sampling."),
        ("lightrft rl sampling.temper", "lightrft rl sampling.temperature="),
        ("lightrft rl strategy.kind=deep", "lightrft rl strategy.kind=deepspeed "),
        ("lightrft rl algorithm=vap", "lightrft rl algorithm=vapo "),
        ("lightrft rl my", "lightrft rl my_run.yaml "),
        ("lightrft rl my_run.yaml model.path=fol", "lightrft rl my_run.yaml model.path=folder/"),
        ("lightrft dpo engine.", "lightrft dpo engine."),
        ("lightrft completion fi", "lightrft completion fish "),
    ],
)
def test_the_key_tab_completes_a_word(terminal: Terminal, words: str, line: str) -> None:
    assert terminal.complete(words).rstrip() == line.rstrip()


def test_every_word_of_rl_is_a_setting_and_every_listed_value_is_read() -> None:
    rows = [row.split("\t") for row in table().splitlines()]
    words = [word for verbs, word in rows if ",rl," in verbs and word != "--help"]
    assert len(words) > 400
    names = {word.partition("=")[0].replace(".0.", ".") for word in words}
    assert {name for name in names if not has_setting(RLConfig, name)} == set()
    wrong = []
    for word in words:
        # An item of an empty list cannot be changed.
        if word.endswith("=") or ".0." in word:
            continue
        try:
            load_settings(RLConfig, [], [word])
        except ConfigError as error:
            if "unknown setting" in str(error) or "Input should be" in str(error):
                wrong.append((word, str(error)))
    assert wrong == []


def test_each_verb_has_words_and_each_script_has_the_table(capsys) -> None:
    verbs = {verb for row in table().splitlines() for verb in row.split("\t")[0].split(",")}
    assert set(VERBS) - verbs <= {"report"} and {f"grm {one}" for one in ("rl", "dpo")} <= verbs
    assert {*of_kind("training", "rounds")} <= verbs
    for shell in SHELLS:
        assert main(["completion", shell]) == 0
        assert table() in capsys.readouterr().out


def test_the_words_of_a_script_are_found_in_a_tenth_of_a_second(tmp_path, capsys) -> None:
    assert main(["completion", "bash"]) == 0
    (tmp_path / "script").write_text(capsys.readouterr().out)
    ask = 'source ./script; for k in {1..10}; do _lightrft_words "rl" "engine.k"; done'
    start = time.monotonic()
    done = subprocess.run(["bash", "-c", ask], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "engine.kind=\n" * 10 and time.monotonic() - start < 5


def test_another_shell_is_refused(capsys) -> None:
    assert main(["completion", "fihs"]) == 2
    assert "bash, zsh, fish; did you mean 'fish'" in capsys.readouterr().err
