"""YAML as in files of settings and on the command line, and JSON, without repeated keys."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import yaml

from lightrft.utils.errors import is_unicode


def tree_to_yaml(tree: Mapping[str, Any]) -> str:
    """Return a tree of plain values as YAML that ``parse_yaml`` reads back equal."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def inline_yaml(value: object) -> str:
    """Return ``value`` as YAML on one line, as on the command line."""
    text = yaml.dump(
        value,
        Dumper=_LineDumper,
        default_flow_style=True,
        allow_unicode=True,
        width=float("inf"),
    )
    return text.removesuffix("\n").removesuffix("\n...").strip()


def parse_yaml(text: str) -> Any:
    """Return the value of ``text``, read as in files and on the command line.

    Raises:
        yaml.YAMLError: ``text`` is not YAML.
    """
    return yaml.load(text, Loader=_Loader)


def parse_argument(key: str, value: str, *, is_text: bool = False) -> Any:
    """Return the value of a setting on the command line.

    Args:
        key: Name of the setting, for messages.
        value: YAML.
        is_text: The setting takes text alone. A table, or what is no YAML, is then text, as
            ``{prompt} Answer:`` is.

    Raises:
        ValueError: ``value`` is no Unicode, not YAML, or ends in a comment.
    """
    if not is_unicode(value):
        raise ValueError(f"{key}: {value!r} has bytes that are no UTF-8; give other text")
    way_out = f"to give it as text, put quotes inside the quotes: {key}='\"...\"'"
    try:
        leaf, node = parse_yaml(value), yaml.compose(value)
    except yaml.YAMLError as error:
        if is_text:
            return value
        problem = getattr(error, "problem", error)
        raise ValueError(f"{key}: {value!r} is not a YAML value: {problem}; {way_out}") from None
    if is_text and isinstance(leaf, Mapping):
        return value
    comment = value[node.end_mark.index if node else 0 :].strip()
    if comment.startswith("#"):
        raise ValueError(
            f"{key}: {comment!r} in {value!r} is a comment in YAML and would be lost; {way_out}"
        )
    return leaf


def yaml_problem(error: yaml.YAMLError | UnicodeDecodeError, text: bytes) -> str:
    """Return what is wrong in ``text``, with the line of it and how to mend it."""
    if isinstance(error, UnicodeDecodeError):
        return f"{error}; save it as UTF-8"
    lines = text.decode().splitlines()
    mark = getattr(error, "problem_mark", None)
    if mark is None or mark.line >= len(lines):
        return str(error)
    line = lines[mark.line]
    hint = "look at its indentation, its quotes and the space after each colon"
    if "\t" in line.removesuffix(line.lstrip()):
        hint = "indent by spaces, not by tabs"
    return f"line {mark.line + 1}, {line.strip()!r}: {getattr(error, 'problem', error)}; {hint}"


def parse_json(text: str | bytes) -> Any:
    """Return the value of JSON, which Python's own reader reads with the last of equal keys.

    Raises:
        RepeatedKeyError: An object has a key twice.
        ValueError: ``text`` is not JSON.
    """
    return json.loads(text, object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        key = next(key for key in counts if counts[key] > 1)
        raise RepeatedKeyError(f"the key {key!r} is given twice; leave one of them out")
    return found


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
    """A YAML loader that reads ``1e-6`` as a number and refuses duplicate keys.

    YAML 1.1 reads ``1e-6`` as text. YAML 1.2 forbids duplicate keys.
    """

    def get_single_node(self) -> yaml.Node | None:
        # On nodes, before they become a ``dict``, which keeps the last of two equal keys silently.
        node = super().get_single_node()
        _refuse_duplicate_keys(node)
        return node


def _refuse_duplicate_keys(root: yaml.Node | None) -> None:
    """Raise ``DuplicateKeyError`` for the first mapping below ``root`` that has a key twice."""
    left, seen = [root], set[int]()
    while left:
        node = left.pop()
        # An alias is the node of its anchor, and may be inside of it.
        if not isinstance(node, yaml.CollectionNode) or id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            left += reversed(node.value)
            continue
        left += reversed([part for pair in node.value for part in pair])
        first: dict[str, int] = {}
        for key, _ in node.value:
            # The merge key ``<<`` may be given several times, once for each merged mapping.
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            line = key.start_mark.line + 1
            if key.value in first:
                earlier = first[key.value]
                where = f"line {line}" if earlier == line else f"lines {earlier} and {line}"
                raise DuplicateKeyError(
                    f"the key {key.value!r} is given twice ({where}); leave one of them out"
                )
            first[key.value] = line


class RepeatedKeyError(ValueError):
    """A JSON object has the same key twice."""


class DuplicateKeyError(yaml.YAMLError):
    """A mapping has the same key twice."""


class _LineDumper(yaml.SafeDumper):
    """A YAML dumper that writes every character as it is. libyaml's escapes emoji."""


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):
    """A YAML dumper that quotes text which ``_Loader`` would read as a number."""


# They must agree on what is a number, or a tree that is written and read back changes.
for _side in (_Loader, _LineDumper, _Dumper):
    _side.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$"),
        list("-+.0123456789"),
    )
