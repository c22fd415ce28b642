"""The verbs as functions of Python: ``lightrft.rl(model=..., data=rows, rewards=[function])``."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from lightrft.api.inputs import FOLDER, Written, is_rows, natural, plain, rows_of_columns
from lightrft.api.progress import watching
from lightrft.api.run import Run, json_lines
from lightrft.api.shown_data import ShownData, shown_data
from lightrft.api.signatures import check_call, sign
from lightrft.api.start import (
    check_trained,
    function_of,
    import_function,
    memory_errors,
    program,
    started,
)
from lightrft.api.verbs import fitting, plain_settings
from lightrft.config.base import (
    Loaded,
    Settings,
    branch_of,
    has_setting,
    is_branch,
    load_settings,
    to_yaml,
)
from lightrft.config.config_tools import ShowConfig
from lightrft.config.run import RunConfig
from lightrft.config.texts.python_form import SHORT, PythonFormatter, python_messages
from lightrft.config.verbs import (
    GenerateConfig,
    IterateConfig,
    LabelStepsConfig,
    RLConfig,
    TrainingConfig,
)
from lightrft.distributed.torchrun import FROM_PYTHON
from lightrft.observability.events import EVENTS, OF_ROLLOUTS, Callbacks, RolloutsEvent
from lightrft.observability.logging_setup import log_to_terminal, stop_logging
from lightrft.trainer.checks.check_rollout import check_algorithm
from lightrft.utils.atomic_files import write_atomic
from lightrft.utils.cpu import set_thread_policy
from lightrft.utils.errors import ConfigError, did_you_mean
from lightrft.utils.memory_function import DIGITS
from lightrft.utils.stop_signal import raise_at_termination
from lightrft.verbs import VERBS, of_kind, trains

Given: TypeAlias = str | os.PathLike[str] | Mapping[str, Any] | Settings
"""Settings: the path of a YAML file, a tree of values, or a config object."""


@python_messages
def call(verb: str, /, *configs: Given, **settings: Any) -> Any:
    """Run a verb, and return its result.

    Args:
        verb: The name of the verb.
        configs: Settings: first YAML files, then the others, each merged left to right.
        settings: Settings by name, merged over ``configs``. A name may be dotted. A function, rows
            or a model may stand where its name or path does. Names of ``EVENTS`` are callbacks,
            which are called in this process.

    Returns:
        A ``Run`` for verbs that train, the server for verbs that serve, a frame of the written rows
        for ``generate`` and ``label-steps``, and the result of the verb's own function for others.

    Raises:
        ConfigError: Lists every problem of the settings.
    """
    callbacks, settings = take_callbacks(verb, settings)
    row = trains(verb) or of_kind("call", "server").get(verb)
    if row is None:
        judges = [f"grm-{method}" for method in VERBS["grm"].methods]
        hint = did_you_mean(verb, [*of_kind("training", "rounds", "call", "server"), *judges])
        raise ConfigError(f"there is no function of the verb {verb!r}{hint}")
    config = read(row.settings_class(), configs, settings)
    if trains(verb):
        return _trained(verb, row.function, plain_settings(config), callbacks)
    with show_warnings():
        run = function_of(row, config)
        if callbacks:  # of a generation
            with watching(config.run, callbacks) as observer:
                result = run(config, observer=observer)
        else:
            result = run(config)
    if not isinstance(config, GenerateConfig | LabelStepsConfig):
        return result
    import pandas

    return pandas.DataFrame(json_lines(Path(config.output).expanduser()))


def read(cls: type[Any], configs: Sequence[Given], settings: Mapping[str, Any]) -> Any:
    """Return the settings of a verb; see ``load``."""
    return load(cls, configs, settings, {}).settings


def load(
    cls: type[Any], configs: Sequence[Given], settings: Mapping[str, Any], written: Written
) -> Loaded[Any]:
    """Return the settings of a verb. Functions, rows and models of the program become files.

    Args:
        cls: Class of the settings.
        configs: As in ``call``.
        settings: As in ``call``.
        written: As in ``plain``.
    """
    files = [os.fspath(one) for one in configs if isinstance(one, str | os.PathLike)]
    for file in files:
        if not file.endswith((".yaml", ".yml")):
            own = next(name for name in ("path", "models", "model") if has_setting(cls, name))
            raise ConfigError(f"{file!r} is no YAML file; name the setting, as in {own}={file!r}")
    trees = [
        _tree(cls, one) for one in [*configs, settings] if not isinstance(one, str | os.PathLike)
    ]
    where = RunConfig().dir
    for tree in trees:
        run = tree.get("run")
        where = str(tree.get("run.dir") or (run.get("dir") if is_branch(run) else None) or where)
    folder = Path(where).expanduser() / FOLDER
    plain_trees = [plain(tree, folder, written=written) for tree in trees]
    return load_settings(cls, files, (), plain_trees)


_ROWS = ("data", "validation", "eval")
"""Sections that hold rows."""


def _tree(cls: type[Settings], given: Any) -> dict[str, Any]:
    """Return ``given`` as a tree whose keys are settings of ``cls``."""
    given = natural(given)
    if not is_branch(given):
        raise ConfigError(
            f"an argument of type {type(given).__name__} is neither a YAML file nor settings; name "
            "the setting, as in model=... or data=..."
        )
    given = {name: natural(value) for name, value in given.items()}
    # The config of another framework, under its own keyword.
    others = [given.pop(name) for name in ("args", "config") if is_branch(given.get(name))]
    given = functools.reduce(lambda all, one: {**one, **all}, others, given)
    found: dict[str, Any] = {}
    in_memory = False
    for key, value in given.items():
        section = key.partition(".")[0]
        if section in _ROWS and (rows := rows_of_columns(cls, key, value)):
            value = rows
        is_section = isinstance(value, Settings) or (is_branch(value) and not is_rows(value))
        long = next((name for name in SHORT.get(key, ()) if has_setting(cls, name)), key)
        if (
            key in ("reward", "rewards")
            and is_section
            and not any(has_setting(cls, f"reward.{one}") for one in value)
        ):  # functions by name
            value, is_section = [{"name": one, "function": f} for one, f in value.items()], False
        name = key if is_section else long
        first = name.partition(".")[0]
        plain_section = branch_of(cls, name) is not cls and not branch_of(cls, name).shorthand
        is_plain = isinstance(value, str | int | float | list | tuple | None)
        if first not in cls.model_fields and (not is_plain or is_rows(value)):
            value = "..."  # it will be refused, with the name that is known here
        elif plain_section and not is_section and not is_plain:
            value = str(getattr(value, "__name__", type(value).__name__))  # the same
        found[name] = value
        below = value.get("sources", value.get("data")) if is_branch(value) else value
        in_memory = in_memory or (section in _ROWS and is_rows(below))
    # Media of rows are relative to the working directory, not to the file of the rows.
    if in_memory and has_setting(cls, "data.media.root"):
        found = {"data.media.root": str(Path.cwd()), **found}
    return found


TRAINER_KEYWORDS = {
    "callbacks": "give functions of one event, as on_step=... or on_eval=...",
    "compute_metrics": "give a function that scores responses to the eval set, as rewards=[...]",
    "data_collator": "a run packs its rows itself: leave it out",
    "formatting_func": "call it before, and give the rows that it returns as data=...",
    "model_init": "give the model itself, as model=(model, tokenizer)",
    "on_epoch_end": "give a function of one event as on_step=...",
    "on_evaluate": "give a function of one event as on_eval=...",
    "on_init_end": "give a function of one event as on_start=...",
    "on_log": "give a function of one event as on_step=...",
    "on_save": "give a function of one event as on_checkpoint=...",
    "on_step_begin": "give a function of one event as on_step=...",
    "on_step_end": "give a function of one event as on_step=...",
    "on_train_begin": "give a function of one event as on_start=...",
    "on_train_end": "give a function of one event as on_end=...",
    "optimizers": "the optimizer is AdamW; set optimizer.lr=...",
}
"""Keywords of other trainers whose values are objects of a program, with what to write here."""


def take_callbacks(verb: str, settings: Mapping[str, Any]) -> tuple[Callbacks, dict[str, Any]]:
    """Return the callbacks among ``settings``, and the other settings.

    Args:
        verb: Name of the verb.
        settings: Settings by name.

    Raises:
        ConfigError: A callback is no function, or the verb has no such event.
    """
    for name in settings:
        if name in TRAINER_KEYWORDS:
            raise ConfigError(f"{name} is a keyword of other trainers; {TRAINER_KEYWORDS[name]}")
    found = {
        name: value for name, value in settings.items() if name in EVENTS and value is not None
    }
    for name, value in found.items():
        if not callable(value) or isinstance(value, type):
            what = value.__name__ if isinstance(value, type) else type(value).__name__
            raise ConfigError(
                f"{name} is of type {what}, not a function; give a function of one event"
            )
        check_call(name, value, "event")
        if trains(verb) is None and (verb, name) != ("generate", RolloutsEvent.name):
            raise ConfigError(
                f"{name} is called by verbs that train, and {verb} does not; leave it out"
            )
        if name == RolloutsEvent.name and verb not in OF_ROLLOUTS:
            raise ConfigError(
                f"{name} is called by {', '.join(OF_ROLLOUTS)}, and {verb} has no such event; "
                "leave it out"
            )
    return found, {name: value for name, value in settings.items() if name not in EVENTS}


def _trained(verb: str, function: str, config: Any, callbacks: Callbacks) -> Run:
    """Train, and return the run. It is also returned if it was stopped, as by Ctrl-C.

    Args:
        verb: Name of the verb.
        function: Its function, as ``module:name``.
        config: Settings of the run.
        callbacks: Functions of events, by keyword.
    """
    path = config.run.folder
    with show_warnings():
        if isinstance(config, RLConfig):
            check_algorithm(config)
        run_here = partial(import_function, function, config.run.threads)
        if not isinstance(config, IterateConfig):
            if callbacks and is_elsewhere(config):
                raise ConfigError(
                    f"{next(iter(callbacks))} is called in this process, and launch starts others; "
                    "leave it out, or start this program itself with torchrun"
                )
            if _in_processes(verb, config):
                return Run(path)
            run_here = partial(program, function, config)
        with watching(config.run, callbacks) as observer:
            summary = run_here()(config, observer)
    check_trained(summary)
    return Run(path)


def is_elsewhere(config: TrainingConfig) -> bool:
    """Return True if the run is in other processes than this one."""
    is_single = config.launch.processes == 1 or "WORLD_SIZE" in os.environ
    return config.launch.kind == "ray" or not is_single


def _in_processes(verb: str, config: TrainingConfig) -> bool:
    """Train in processes of torchrun if the settings say so. Return False if they do not."""
    verb, *method = verb.split("-")  # grm-sft is two words of the command line
    if not is_elsewhere(config) or config.launch.kind == "ray":
        return started(verb, [], config) is not None
    text = to_yaml(config)
    folder = Path(config.run.dir).expanduser() / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"config-{hashlib.sha256(text.encode()).hexdigest()[:DIGITS]}.yaml"
    write_atomic(file, text, private=True)
    os.environ[FROM_PYTHON] = "1"  # their messages are in the form of Python
    try:
        status = started(verb, [*method, str(file.absolute())], config)
    finally:
        del os.environ[FROM_PYTHON]
    if status is None:
        return False
    # A run that was stopped by a signal has 128 and its number, and can be resumed.
    if 0 < status < 128:
        raise ConfigError(f"lightrft.{verb} ended with status {status}; its messages are above")
    return True


@contextmanager
def show_warnings() -> Generator[None]:
    """Show warnings, and explain out-of-memory errors, as the command line does."""
    if "torch" not in sys.modules:
        set_thread_policy()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    shown = log_to_terminal(logging.WARNING)
    shown.setFormatter(PythonFormatter(shown.formatter))
    try:
        with (
            nullcontext() if "WORLD_SIZE" in os.environ else raise_at_termination(),
            memory_errors(),
        ):
            yield
    finally:
        stop_logging(shown)


def _function(verb: str, about: str) -> Callable[..., Any]:
    """Return the function of a verb.

    Args:
        verb: Name of the verb.
        about: First line of its docstring.
    """

    def run(*configs: Given, **settings: Any) -> Any:
        return call(verb, *configs, **settings)

    run.__name__ = run.__qualname__ = verb.replace("-", "_")
    # The help of the command line shows a command after it.
    run.__doc__ = f"{about.partition(': lightrft ')[0].removesuffix('.')}."
    return run


def grm(method: str, /, *configs: Given, **settings: Any) -> Run:
    """Train a judge of responses by ``method``: sft, rl or dpo."""
    return call(f"grm-{method}", *configs, **settings)


class _Shown(Settings):
    """The settings of ``lightrft.data`` itself."""

    show: ShowConfig = ShowConfig()
    """The rows to show, and the page."""


@python_messages
def data(*configs: Given, **settings: Any) -> ShownData:
    """Show the first rows of a config as a run reads them: their tokens, media and lengths."""
    _, settings = take_callbacks("data", settings)
    own = {name: settings.pop(name) for name in list(settings) if name.split(".")[0] == "show"}
    options = read(_Shown, (), own).show
    written: Written = {}
    config = fitting(options.verb, lambda cls: load(cls, configs, settings, written)).settings
    with show_warnings():
        return shown_data(config, options)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{
        verb.replace("-", "_"): _function(verb, row.purpose)
        for verb, row in of_kind("training", "rounds", "call", "server").items()
    },
    "grm": grm,
    "data": data,
}
"""Every verb that is a function, by the name of the function."""


@functools.cache
def signed(name: str) -> Callable[..., Any]:
    """Return the function ``name`` with the signature and the docstring of its settings.

    Only a program reads these, so the command line starts without them.
    """
    function = FUNCTIONS[name]
    verb = name.replace("_", "-")
    classes = [RLConfig, _Shown] if name == "data" else [VERBS[verb].settings_class()]
    sign(function, name, classes, trains=name == "grm" or trains(verb) is not None)
    return function
