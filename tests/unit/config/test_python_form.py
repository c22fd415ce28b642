"""Objects of settings have our errors, and messages to programs are in the form of Python."""

from __future__ import annotations

import ast
import logging
import re
from contextlib import suppress

import pytest

import lightrft
from docs.generate import SETTINGS as CLASSES
from lightrft import config
from lightrft.config.base import branch_of
from lightrft.config.demo import DemoConfig
from lightrft.config.texts.python_form import PythonFormatter, in_python, python_messages
from lightrft.config.verbs import RLConfig
from lightrft.utils.errors import ConfigError, DataError
from tests.architecture.tree import modules


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: config.OptimizerConfig(lrr=1), "OptimizerConfig: unknown setting lrr; did you"),
        (lambda: config.OptimizerConfig(lr="x"), "OptimizerConfig: lr = 'x': Input should be a"),
        (lambda: config.OptimizerConfig(1e-6), r"OptimizerConfig\(1e-06\): settings have names;"),
        (lambda: config.OptimizerConfig(lr=30.0), "^OptimizerConfig: lr = 30: AdamW moves"),
        (lambda: RLConfig(optimizer={"lrr": 1}), "RLConfig: unknown setting optimizer.lrr"),
        (lambda: config.RewardConfig(terms=[len]), "terms.0 = .*give the function to the call"),
    ],
    ids=range(6),
)
def test_an_object_of_settings_has_an_error_that_names_class_setting_and_value(build, said):
    with pytest.raises(lightrft.ConfigError, match=said) as caught:
        build()
    assert "pydantic" not in str(caught.value) and caught.value.__cause__ is None


def test_every_problem_of_an_object_is_in_one_message():
    with pytest.raises(ConfigError) as caught:
        RLConfig(optimizer={"lrr": 1}, train={"steps": "many"})
    assert len(str(caught.value).splitlines()) == 2


def test_an_object_takes_dotted_names_and_short_forms_as_a_table_does():
    given = {"optimizer.lr": 3e-4, "algorithm": "dapo"}
    built = RLConfig(**given)
    assert (built.optimizer.lr, built.algorithm.preset) == (3e-4, "dapo")


def test_a_setting_of_an_object_cannot_be_assigned():
    optimizer = config.OptimizerConfig(lr=1e-6)
    with pytest.raises(ConfigError, match=r"lr cannot be set.*OptimizerConfig\(lr=0.1\)"):
        optimizer.lr = 0.1
    assert optimizer.lr == 1e-6


def test_the_package_of_settings_has_the_class_of_every_section_of_a_function():
    sections = {
        branch_of(cls, name)
        for verb, cls in CLASSES.items()
        if verb.replace("-", "_") in lightrft.VERBS
        for name in cls.model_fields
    }
    assert set(config.__all__) == {
        cls.__name__ for cls in sections if cls not in CLASSES.values() or cls.__name__ in STAGES
    }
    assert all(getattr(config, name).__name__ == name for name in config.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'Optimizer'"):
        config.Optimizer  # noqa: B018


STAGES = ("DPOConfig", "KTOConfig", "SFTConfig")
"""Sections of ``iterate``."""


@pytest.mark.parametrize(
    ("shell", "python"),
    [
        ("set optimizer.lr=1e-6, or", 'set optimizer={"lr": 1e-6}, or'),
        ("set algorithm.kl.coef=0.", 'set algorithm={"kl": {"coef": 0}}.'),
        ("e.g. reward.terms=[math]", 'e.g. rewards=["math"]'),
        ("(model.lora=null)", '(model={"lora": None})'),
        ("data.sources=[{path: a.jsonl}]", 'data=[{"path": "a.jsonl"}]'),
        ("engine.url=http://127.0.0.1:8000", 'engine={"url": "http://127.0.0.1:8000"}'),
        (
            "put quotes inside the quotes: model.path='\"...\"'",
            'put it in quotes: model="..."',
        ),
        ("set overwrite=true; x = true", "set overwrite=True; x = True"),
        ("the same command resumes", "the same call resumes"),
        ("as in {a: 1}", 'as in {"a": 1}'),
        ("a = null, and null takes the start", "a = None, and None takes the start"),
        ("beta is algorithm.kl.coef here", 'beta is algorithm={"kl": {"coef": ...}} here'),
        ("such as {rank: 16, alpha: 32.0}", 'such as {"rank": 16, "alpha": 32.0}'),
        ("set data.bad_rows: skip", 'set data={"bad_rows": "skip"}'),
        ("are for lightrft dpo", "are for lightrft.dpo"),
        ("of lightrft rl and dpo, and", "of lightrft.rl and lightrft.dpo, and"),
        ("reward 'runs/inputs/acc-21ffe725a212.py:acc' has", "reward 'acc' has"),
        ("runs/inputs/rows-39d60d774445.jsonl, line 1: x", "row 0: x"),
        ("reward.terms.0: Judge is a class", "rewards[0]: Judge is a class"),
        # These are of a shell, or of Python already.
        ("lightrft rl runs/a/config.yaml", "lightrft rl runs/a/config.yaml"),
        ("lightrft merge A B output=FOLDER", "lightrft merge A B output=FOLDER"),
        ("set model=(model, tokenizer)", "set model=(model, tokenizer)"),
        ("model=..., data=...", "model=..., data=..."),
        ("ray start --num-gpus=2", "ray start --num-gpus=2"),
    ],
)
def test_a_message_has_its_settings_as_keywords_of_python(shell, python):
    assert in_python(shell) == python
    assert in_python(python) == python


def test_no_message_of_the_package_keeps_a_setting_in_the_form_of_the_shell():
    """Texts of the source that give a section's setting a value, each rewritten."""
    names = "|".join({name for cls in (RLConfig, DemoConfig) for name in cls.model_fields})
    shell = re.compile(rf"(?<![\w.])(?:{names})(?:\.[a-z_0-9]+)+=[\w\[{{]")
    seen = []
    for module in modules():
        if module.part in ("cli", "compat"):
            continue
        for node in ast.walk(ast.parse(module.text)):
            text = node.value if isinstance(node, ast.Constant) else None
            if isinstance(text, str) and "\n" not in text and "lightrft " not in text:
                seen += shell.findall(text)
                assert not shell.search(in_python(text)), text
    assert len(seen) > 100


def test_errors_and_warnings_that_a_program_gets_are_rewritten():
    @python_messages
    def fail() -> None:
        with suppress(KeyError):
            raise DataError("set data.turns=last")

    with pytest.raises(DataError, match=r'set data=\{"turns": "last"\}') as found:
        fail()
    assert [frame.name for frame in found.traceback] == [
        "test_errors_and_warnings_that_a_program_gets_are_rewritten",
        "called",
    ]
    record = logging.LogRecord("a", logging.WARNING, "", 0, "set log.samples=%d", (1,), None)
    formatter = PythonFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    assert formatter.format(record) == 'WARNING: set log={"samples": 1}'
