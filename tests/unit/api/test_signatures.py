"""Functions have the signatures and docstrings that notebooks and editors show."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import lightrft
from lightrft.config.texts.python_form import SHORT
from lightrft.config.verbs import GenerateConfig, RLConfig
from lightrft.observability.events import EVENTS


def test_the_signature_of_rl_lists_sections_short_names_and_callbacks():
    found = inspect.signature(lightrft.rl).parameters
    short = {"rewards", "steps", "epochs", "lr", "name", "dir"}
    assert set(found) == {"configs", *RLConfig.model_fields, *short, *EVENTS, "settings"}
    assert short < set(SHORT)
    assert found["optimizer"].annotation == "OptimizerConfig | Mapping[str, Any]"


@pytest.mark.parametrize("name", lightrft.VERBS)
def test_the_docstring_of_a_function_describes_every_keyword_of_its_signature(name):
    function = getattr(lightrft, name)
    named = inspect.signature(function).parameters.values()
    asked = [one.name for one in named if one.kind is one.KEYWORD_ONLY]
    lines = inspect.getdoc(function).splitlines()
    assert asked and lines[0].endswith(".")
    for keyword in asked:
        assert any(line.startswith(f"    {keyword}: ") for line in lines), keyword


def test_callbacks_are_keywords_of_the_functions_that_call_them():
    generate = inspect.signature(lightrft.generate).parameters
    assert set(GenerateConfig.model_fields) < set(generate)
    assert set(EVENTS) & set(generate) == {"on_rollouts"}
    assert "on_rollouts" not in inspect.signature(lightrft.sft).parameters


def test_the_first_parameter_of_grm_is_its_method():
    first = next(iter(inspect.signature(lightrft.grm).parameters.values()))
    assert (first.name, first.kind) == ("method", first.POSITIONAL_ONLY)


def test_importing_the_package_and_its_errors_loads_no_heavy_package():
    heavy = ("torch", "transformers", "pydantic", "pandas", "numpy", "yaml", "IPython")
    code = f"import sys, lightrft; lightrft.ConfigError; sys.exit(any(m in sys.modules for m in {heavy}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_reading_a_signature_loads_no_torch():
    code = "import sys, inspect, lightrft; inspect.signature(lightrft.rl); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
