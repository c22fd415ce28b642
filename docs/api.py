"""The reference of public names from their docstrings: ``api.md``.

Signatures, arguments, results and errors are those of the code. Examples are statements of
``python-examples.md``, which a test runs.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import lightrft
from docs.public_names import BATCH, MODELS
from lightrft.api.run import Page
from lightrft.api.shown_data import ShownData
from lightrft.observability.events import EVENTS, RunEvent
from lightrft.types import Batch, Prompt, Rollout

EXAMPLES = Path(__file__).resolve().parent / "python-examples.md"
BLOCKS = ("Args", "Attributes", "Returns", "Raises")
ENTRY = re.compile(r"^(\w+): (.*(?:\n +.*)*)", re.M)
COLUMN = re.compile(
    r"(?:^\n    # (.*)\.\n)?((?:^    # .*\n)*)^    (\w+): Tensor \| None = \w+_column\(\)(?:  # (.*))?",
    re.M,
)
GIVEN = """\
Each function takes config files, mappings or settings as `*configs`, and sections of
[settings](configuration.md) as keywords. A keyword may be a section or a dotted name, as in
`**{"optimizer.lr": 1e-6}`. [From Python](python.md) says what data, models and rewards may be.

They raise subclasses of `lightrft.UserError`:

* `ConfigError`: lists every problem of the settings.
* `DataError`: a file or row cannot be read.
* `ModelError`: a model cannot be loaded.
* `RewardError`: a reward fails.
* `NothingTrained`: all steps are done, and none trained anything."""


SECTIONS = (
    "The classes of sections take their settings as keywords, as in `OptimizerConfig(lr=1e-6)`. "
    "[Configuration](configuration.md) has the settings of each, with types, defaults and units. "
    "They raise `ConfigError`."
)


def api_page(signature: Callable[[str], str]) -> str:
    """Return the page.

    Args:
        signature: The signature of the function of a verb, by name, as Python.
    """
    lines = [
        "# Reference of Python",
        "",
        "The [public names](public.md) with their signatures, arguments, results and errors, from "
        "the docstrings of the code. Letters in shapes: P distinct prompts, B responses, N "
        "response tokens of all B responses, L tokens of a padded row, V tokens of the vocabulary.",
        "",
        "## Functions of verbs",
        "",
        GIVEN,
        "",
    ]
    for name in lightrft.VERBS:
        verb = name.replace("_", "-")
        lines += [f"### `lightrft.{name}`", "", *python(signature(name))]
        lines += [
            *documented(getattr(lightrft, name)),
            f"The verb is [{verb}](verbs/{verb}.md).",
            "",
        ]
        lines += example(f"lightrft.{name}")
    lines += ["### `lightrft.here`", "", *member(lightrft.here, "lightrft.here")]
    for name in lightrft.ERRORS:
        error = getattr(lightrft, name)
        lines += [f"### `lightrft.{name}`", "", *python(f"class {name}({error.__base__.__name__})")]
        lines += documented(error)
    lines += ["## `lightrft.config`", "", SECTIONS, ""]
    classes = {
        "`lightrft.Run`": (lightrft.Run, "run"),
        "`lightrft.Policy`": (lightrft.Policy, "policy"),
        "`Page`": (Page, ""),
        "`ShownData`": (ShownData, "shown"),
        "Events": (RunEvent, "event"),
    }
    for title, (cls, variable) in classes.items():
        lines += [f"## {title}", "", *whole_class(cls, variable)]
    for keyword, event in EVENTS.items():
        able = ", ".join(f"`{one}`" for one in event.actions) or "none"
        lines += [f"### `{keyword}`: `{event.__name__}`", "", *documented(event)]
        lines += [f"Methods that it allows: {able}.", "", *example(keyword)]
    for cls in (Rollout, Prompt, Batch):
        lines += [f"## `lightrft.types.{cls.__name__}`", "", *whole_class(cls)]
    lines += ["## `lightrft.models`", ""]
    for name in MODELS:
        lines += model_entry(name, getattr(import_module("lightrft.models"), name))
    return "\n".join(lines).rstrip("\n") + "\n"


def whole_class(cls: type, variable: str = "") -> Iterator[str]:
    """Yield the docstring of a class, its columns, its methods and its properties.

    Args:
        cls: The class.
        variable: The name of an object of the class in the examples; empty for none.
    """
    if "__init__" in vars(cls) and not hasattr(cls, "__dataclass_fields__"):
        yield from python(f"{cls.__name__}{shown_signature(cls)}")
    yield from documented(cls)
    if cls is Batch:
        yield from columns()
    for name, value in vars(cls).items():
        is_method = inspect.isroutine(value) or isinstance(value, property)
        if name.startswith("_") or not is_method or (cls is Batch and f"`{name}`" not in BATCH):
            continue
        yield from (f"### `{cls.__name__}.{name}`", "")
        yield from member(value, f"{variable}.{name}" if variable else "")


def columns() -> Iterator[str]:
    """Yield the columns of a batch by group, with the shape and meaning of each."""
    yield from ("| column | shape and meaning |", "|---|---|")
    for group, above, name, behind in COLUMN.findall(inspect.getsource(Batch)):
        if group:
            yield f"| | **{group}** |"
        said = behind or " ".join(re.findall(r"# (.*)", above))
        said = re.sub(r"^\[([^\]]*)\]", r"`[\1]`", said.replace("``", "`"))
        yield f"| `{name}` | {said.replace('|', chr(92) + '|')} |"
    yield ""


def member(value: Any, called: str) -> Iterator[str]:
    """Yield the signature of a function, method or property, its docstring, and an example.

    Args:
        value: The function, method or property.
        called: The expression by which an example names it; empty for no example.
    """
    if isinstance(value, property):
        kind = inspect.signature(value.fget).return_annotation if value.fget else ""
        yield from (f"Property of type `{kind}`.", "")
    else:
        function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
        yield from python(f"{function.__name__}{shown_signature(function)}")
    yield from documented(value)
    if called and "Example::" not in (inspect.getdoc(value) or ""):
        yield from example(called)


def model_entry(name: str, value: Any) -> Iterator[str]:
    """Yield the entry of a class or function of ``lightrft.models``, with its public methods."""
    yield from (f"### `{name}`", "", *python(f"{name}{shown_signature(value)}"))
    if not isinstance(value, type):
        yield from (*documented(value), *example(f"models.{name}"))
        return
    lineage = [cls for cls in value.__mro__ if cls.__module__.startswith("lightrft.")]
    yield from documented(value)
    for method in ("forward", "generate"):
        owner = next((cls for cls in lineage if method in vars(cls)), None)
        if owner is not None:
            function = vars(owner)[method]
            yield from python(f"{name}.{method}{shown_signature(function)}")
            yield from documented(function)
    yield from example(f"models.{name}")


def shown_signature(value: Any) -> str:
    """Return the signature of a function or class without ``self`` and quotes, in lines."""
    signature = inspect.signature(value)
    own = [one for one in signature.parameters.values() if one.name != "self"]
    parts = [re.sub(r"""^(\**\w+): (['"])(.*?)\2(?= = |$)""", r"\1: \3", str(one)) for one in own]
    kind = signature.return_annotation
    result = "" if kind in (inspect.Signature.empty, None, "None") else f" -> {kind}"
    names = [one.kind for one in own]
    if inspect.Parameter.KEYWORD_ONLY in names and inspect.Parameter.VAR_POSITIONAL not in names:
        parts.insert(names.index(inspect.Parameter.KEYWORD_ONLY), "*")
    line = f"({', '.join(parts)}){result}"
    if len(line) < 70:
        return line
    return "\n".join(["(", *(f"    {part}," for part in parts), f"){result}"])


def parameters(value: Any) -> list[str]:
    """Return the names of the arguments of a function or class, without ``self`` and ``**``."""
    return [
        name
        for name, one in inspect.signature(value).parameters.items()
        if name != "self" and one.kind is not inspect.Parameter.VAR_KEYWORD
    ]


def documented(value: Any) -> Iterator[str]:
    """Yield a docstring as Markdown: its text, its lists and its examples.

    The arguments of a class are those of the first class above it that lists them.
    """
    text = inspect.getdoc(value) or ""
    if isinstance(value, type) and "Args:\n" not in text:
        listed = (inspect.getdoc(one) or "" for one in value.__mro__)
        _, title, arguments = next((d for d in listed if "Args:\n" in d), "").partition("Args:\n")
        text = f"{text}\n\n{title}{arguments}"
    for part in paragraphs(text):
        title, _, body = part.partition(":\n")
        if title in BLOCKS:
            yield from (f"**{title}**", "")
            inside = textwrap.dedent(body)
            found = ENTRY.findall(inside) if title != "Returns" else []
            yield from (
                (f"* `{name}`: {' '.join(said.split())}" for name, said in found)
                if found
                else [" ".join(inside.split())]
            )
            yield ""
        elif not part.startswith("Example:"):
            yield from (part, "")
    if block := re.search(r"Example::\n\n((?:(?: {4}.*)?\n?)*)", text):
        yield from python(textwrap.dedent(block[1]).strip())


def paragraphs(text: str) -> list[str]:
    """Return the paragraphs of a docstring as Markdown, each of prose as one line."""
    before, example_title, after = text.partition("Example::\n\n")
    tail = re.sub(r"\A(?:(?: {4}.*)?\n)*(?: {4}.*)?", "", after) if example_title else ""
    parts = [
        part for part in f"{before}\n\n{tail}".replace("``", "`").split("\n\n") if part.strip()
    ]
    return [
        part if part.partition(":\n")[0] in BLOCKS else " ".join(part.split()) for part in parts
    ]


def python(code: str) -> list[str]:
    """Return the lines of a block of code."""
    return ["```python", *code.splitlines(), "```", ""]


def example(called: str) -> list[str]:
    """Return the shortest statement of the examples that uses a name, as a block of code.

    Args:
        called: An expression, such as ``policy.sample``, or the keyword of a callback.
    """
    page = EXAMPLES.read_text(encoding="utf-8")
    found = []
    for block in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.keyword) and node.arg == called:
                found.append(
                    f"lightrft.rl(config, {called}={ast.get_source_segment(block, node.value)})"
                )
            elif isinstance(node, ast.stmt) and called in map(ast.unparse, expressions(node)):
                rows = block.splitlines()[node.lineno - 1 : node.end_lineno]
                found.append(textwrap.dedent("\n".join(rows)))
    if not found and called.startswith("run."):
        return example(f"lightrft.Run('runs/run').{called.removeprefix('run.')}")
    return python(min(found, key=len)) if found else []


def expressions(node: ast.stmt) -> Iterator[ast.Attribute]:
    """Yield the attributes that a statement reads or calls."""
    return (one for one in ast.walk(node) if isinstance(one, ast.Attribute))
