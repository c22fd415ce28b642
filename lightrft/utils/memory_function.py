"""Functions of the running program, such as a notebook's, as files that other processes load.

The file is a Python module that defines the function, so it is named and trusted as any
``file.py:function``. It shows the source of the function, and holds the function as ``cloudpickle``
writes it, with the values that it uses.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import inspect
import keyword
import pickle
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from lightrft.utils.atomic_files import write_atomic
from lightrft.utils.errors import ConfigError, first_line

DIGITS = 12
"""Digits of a digest in the name of a file."""


def name_of_function(function: Callable[..., Any], folder: Path) -> str:
    """Return a name under which other processes find ``function``.

    It is ``package.module:function`` if the function can be imported, and otherwise
    ``file.py:function`` of a file that is written to ``folder``. The name of the file has a digest
    of the code of the function and of the values that it uses, wherever it was defined.

    Raises:
        ConfigError: The function uses a value that cannot be sent to another process.
    """
    module = getattr(function, "__module__", None) or ""
    name = getattr(function, "__name__", type(function).__name__)
    if _is_imported(function, module, name):
        return f"{module}:{name}"
    if not name.isidentifier() or keyword.iskeyword(name):
        name = "function"  # a lambda, which has no name
    digest = hashlib.sha256()
    try:
        for part in _parts(function, {}):
            digest.update(part)
        data = _pickled(function)
    except (TypeError, pickle.PicklingError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"the function {name!r} cannot be sent to other processes{_culprit(function)}: "
            f"{first_line(error)}; create that value inside the function, name the function as "
            "file.py:function, or give a reward as lightrft.here(function), which runs in this "
            "process"
        ) from error
    file = folder / f"{name}-{digest.hexdigest()[:DIGITS]}.py"
    if not file.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(file, _module_text(name, function, data))
    return f"{file}:{name}"


def load(data: str) -> Any:
    """Return the function that a file of ``name_of_function`` holds.

    Args:
        data: The function as ``cloudpickle`` writes it, in base64.
    """
    here = str(Path.cwd())
    # Modules next to the program may be used by the function. Installed modules come first.
    if here not in sys.path:
        sys.path.append(here)
    return pickle.loads(base64.b64decode(data))


def _is_imported(value: object, module: str, name: str) -> bool:
    """Return True if another process finds ``value`` as ``name`` by importing ``module``."""
    known = sys.modules.get(module)
    return known is not None and vars(known).get(name) is value and _is_installed(module)


def _is_installed(module: str) -> bool:
    """Return True if another process can import ``module``, and gets this one."""
    if module == "__main__":
        return False
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):  # a module that is made by the program
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    return spec is not None and file in (None, spec.origin)


def _pickled(value: object) -> bytes:
    import cloudpickle

    return cloudpickle.dumps(value)


def _parts(value: object, seen: dict[int, object]) -> Iterator[bytes]:
    """Yield what makes two functions equal: code, defaults, and the values that they use.

    The place of the definition is left out, so that a notebook that runs again has equal functions.

    Args:
        value: A function, or a value that one uses.
        seen: The values that were met already, by identity. They stay alive, and keep it.
    """
    if id(value) in seen:
        return
    seen[id(value)] = value
    kind = type(value)
    if isinstance(value, ModuleType):
        yield value.__name__.encode()
    elif isinstance(value, FunctionType | type):
        yield value.__qualname__.encode()
        if _is_imported(value, value.__module__ or "", value.__qualname__):
            yield value.__module__.encode()
        elif isinstance(value, FunctionType):
            yield from _code(value.__code__)
            yield from _parts([value.__defaults__, value.__kwdefaults__, vars(value)], seen)
            yield from _parts(_used(value), seen)
        else:
            own = {name: each for name, each in vars(value).items() if name not in _OF_CLASSES}
            yield from _parts([value.__bases__, own], seen)
    elif isinstance(value, dict):
        for key, each in value.items():
            yield repr(key).encode()
            yield from _parts(each, seen)
    elif isinstance(value, list | tuple):
        yield str(len(value)).encode()
        for each in value:
            yield from _parts(each, seen)
    elif isinstance(value, set | frozenset):
        yield repr(sorted(map(repr, value))).encode()
    elif _is_installed(kind.__module__):
        yield _pickled(value)
    else:  # cloudpickle numbers the classes of the program differently in each process
        yield from _parts([kind, vars(value)], seen)


_OF_CLASSES = ("__dict__", "__weakref__", "__module__", "__firstlineno__", "__static_attributes__")
"""Entries of a class that say nothing about what it does."""


def _code(code: CodeType) -> Iterator[bytes]:
    yield repr((code.co_code, code.co_names, code.co_varnames, code.co_freevars)).encode()
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _code(constant)
        else:
            # The order of a set changes from process to process.
            is_set = isinstance(constant, frozenset)
            yield repr(sorted(map(repr, constant)) if is_set else constant).encode()


def _used(function: FunctionType) -> dict[str, object]:
    """Return the variables outside ``function`` that its code reads, by name."""
    names = list(_names(function.__code__))
    found = {name: function.__globals__[name] for name in names if name in function.__globals__}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        with suppress(ValueError):  # not assigned yet
            found[name] = cell.cell_contents
    return dict(sorted(found.items()))


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _culprit(function: object) -> str:
    """Return words about the first variable of ``function`` that cannot be sent, or ""."""
    for name, value in _used(function).items() if isinstance(function, FunctionType) else ():
        try:
            _pickled(value)
        except Exception:
            return f", since it uses {name!r}, which is of type {type(value).__name__}"
    return ""


def shown_source(function: object) -> str:
    """Return the source of a function as a comment."""
    try:
        source = textwrap.dedent(inspect.getsource(function))  # ty: ignore[invalid-argument-type]
    except (OSError, TypeError):
        source = "(not known)"
    return textwrap.indent(source.rstrip(), "# ", lambda line: True)


def code_of(function: object) -> Iterator[bytes]:
    """Yield the code of a function, or of the object's class that is called."""
    called = function if isinstance(function, FunctionType) else type(function).__call__
    code = getattr(called, "__code__", None)
    yield repr(called).encode() if code is None else b"".join(_code(code))


def _module_text(name: str, function: object, data: bytes) -> str:
    """Return the text of a module that defines ``name``.

    Args:
        name: Name of the function.
        function: The function, whose source is shown.
        data: The function as ``cloudpickle`` writes it.
    """
    shown = shown_source(function)
    lines = "\n".join(textwrap.wrap(base64.b64encode(data).decode(), 96))
    return (
        f"# {name}, a function of the program that started the run:\n#\n{shown}\n\n"
        f'from lightrft.utils.memory_function import load\n\n{name} = load("""\n{lines}\n""")\n'
    )
