"""Functions of a running program, as files that other processes load."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from lightrft.utils.errors import ConfigError
from lightrft.utils.memory_function import name_of_function
from lightrft.utils.registry import resolve

PROGRAM = """
import json, sys
from pathlib import Path
from lightrft.utils.memory_function import name_of_function

{body}

print(name_of_function(reward, Path(sys.argv[1])))
"""


def named(tmp_path: Path, body: str) -> str:
    """The name that a program of its own gives its function ``reward``."""
    code = PROGRAM.format(body=textwrap.dedent(body))
    words = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_function_that_can_be_imported_keeps_its_name_and_no_file_is_written(tmp_path):
    assert name_of_function(textwrap.dedent, tmp_path) == "textwrap:dedent"
    assert list(tmp_path.iterdir()) == []


def test_a_closure_is_loaded_with_its_values_and_the_functions_that_it_calls(tmp_path):
    scale = [2.0, 0.5]

    def shifted(value):
        return value + scale[1]

    def scaled(value):
        return shifted(value) * scale[0]

    name = name_of_function(scaled, tmp_path)
    assert re.fullmatch(rf"{tmp_path}/scaled-[0-9a-f]{{12}}\.py:scaled", name)
    scale[0] = 100.0  # what was written stays as it was
    assert resolve(name)(1.0) == 3.0
    assert "return shifted(value) * scale[0]" in Path(name.rpartition(":")[0]).read_text()


def test_a_lambda_an_object_and_a_bound_method_are_functions(tmp_path):
    class Above:
        def __init__(self, limit):
            self.limit = limit

        def __call__(self, value):
            return float(value > self.limit)

        def below(self, value):
            return float(value < self.limit)

    assert resolve(name_of_function(lambda value: value * 3, tmp_path))(2) == 6
    assert resolve(name_of_function(Above(4), tmp_path))(5) == 1.0
    assert resolve(name_of_function(Above(4).below, tmp_path))(5) == 0.0
    assert name_of_function(Above(4), tmp_path) != name_of_function(Above(5), tmp_path)


RECURSIVE = """
class Table:
    words = ("a", "b")
    def find(self, text):
        return {"x", "y", "z"} & set(text)

table = Table()

def count(text, depth=2):
    return 0 if depth == 0 else len(table.find(text)) + count(text, depth - 1)

def reward(rollout):
    return count(rollout) + len(json.dumps(FACTOR))
"""


def test_another_process_that_defines_the_same_function_elsewhere_gives_it_the_same_name(tmp_path):
    first = named(tmp_path, f"FACTOR = [1]\n{RECURSIVE}")
    again = named(tmp_path, f"# a line above\nx = 1\nFACTOR = [1]\n\n{RECURSIVE}")
    assert again == first
    assert resolve(first)("xq") == 2 + 3


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("FACTOR = [1]", "FACTOR = [2]"),
        ("depth=2", "depth=3"),
        ("depth - 1", "depth - 2"),
        ('"z"', '"w"'),
        ('("a", "b")', '("a", "c")'),
        ("json.dumps", "json.loads"),
    ],
)
def test_a_function_that_computes_otherwise_has_another_name(tmp_path, old, new):
    text = f"FACTOR = [1]\n{RECURSIVE}"
    assert named(tmp_path, text) != named(tmp_path, text.replace(old, new, 1))


def test_a_value_that_cannot_be_sent_is_named(tmp_path):
    lock, limit = threading.Lock(), 3

    def guarded(value):
        with lock:
            return value > limit

    with pytest.raises(
        ConfigError, match=r"'guarded' cannot be sent.*uses 'lock', which is of type"
    ):
        name_of_function(guarded, tmp_path)
    assert list(tmp_path.iterdir()) == []
