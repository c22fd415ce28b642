"""The verb ``lightrft completion``: scripts by which shells complete verbs and settings."""

from __future__ import annotations

import sys
import typing
from collections.abc import Iterator, Sequence

from lightrft.cli.arguments import wants_usage
from lightrft.config.algorithm import AlgorithmConfig
from lightrft.config.base import Settings, branch_of
from lightrft.config.engine import KINDS, EngineConfig
from lightrft.config.preference.presets import PREFERENCE_PRESETS
from lightrft.config.preference.sections import PreferenceConfig
from lightrft.config.presets import PRESETS
from lightrft.utils.errors import ConfigError, did_you_mean
from lightrft.utils.yaml_text import inline_yaml
from lightrft.verbs import VERBS, all_settings

NAMES: dict[tuple[type[Settings], str], Sequence[str]] = {
    (AlgorithmConfig, "preset"): tuple(PRESETS),
    (PreferenceConfig, "preset"): tuple(PREFERENCE_PRESETS),
    (EngineConfig, "kind"): KINDS,
}
"""Section and setting to the known names among other values."""

FIND = r"""awk -F "\t" -v before="BEFORE" -v cur="CURRENT" '
  BEGIN {
    n = split(before, given, " ")
    verb = given[1]
    if (verb == "grm" && n > 1) verb = verb " " given[2]
  }
  index($1, "," verb ",") && index($2, cur) == 1 && $2 != cur {
    rest = substr($2, length(cur) + 1)
    # One section at a time.
    if (cur !~ /=/ && match(rest, /[.=]/)) rest = substr(rest, 1, RSTART)
    if (!seen[rest]++) print cur rest
  }'"""
"""Prints the words of the table that continue the word ``CURRENT`` after the words ``BEFORE``."""

BASH = r"""
_lightrft() {
  local line="${COMP_LINE:0:COMP_POINT}" current words file
  current="${line##*[[:space:]]}"
  words="${line%"$current"}"
  mapfile -t COMPREPLY < <(_lightrft_words "${words#*[[:space:]]}" "$current")
  if [[ $current != *=* ]]; then
    while read -r file; do
      [[ -d $file ]] && file+=/
      COMPREPLY+=("$file")
    done < <(compgen -f -- "$current")
  fi
  [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} != *[.=/] ]] || compopt -o nospace
  # Readline replaces what follows the last "=".
  [[ $COMP_WORDBREAKS != *=* ]] || COMPREPLY=("${COMPREPLY[@]#"${current%"${current##*=}"}"}")
}
complete -o default -F _lightrft lightrft
"""

ZSH = r"""
_lightrft() {
  local -a found
  found=("${(@f)$(_lightrft_words "${words[2,CURRENT-1]}" "$PREFIX")}")
  found=(${found:#})
  (( $#found )) && compadd -S '' -- $found
  if [[ $PREFIX != *=* ]]; then
    _files
  elif (( ! $#found )); then
    compset -P '*='
    _files
  fi
}
compdef _lightrft lightrft
"""

FISH = r"""
function _lightrft
  set -l before (commandline -opc)
  set -e before[1]
  set -l current (commandline -ct)
  # In quotes, since a list without items would be no argument.
  _lightrft_words "$before" "$current"
end
complete -c lightrft -a "(_lightrft)"
"""

SHELLS = {
    "bash": ("_lightrft_words() {\n", "$1", "$2", "\n}", BASH),
    "zsh": ("_lightrft_words() {\n", "$1", "$2", "\n}", ZSH),
    "fish": ("function _lightrft_words\n", "$argv[1]", "$argv[2]", "\nend", FISH),
}
"""Shell to the start of a function, its two parameters, its end, and what asks the function."""

USAGE = f"lightrft completion <{' | '.join(SHELLS)}>"


def run(arguments: Sequence[str]) -> int:
    """Print the script of a shell, and return the exit status.

    Raises:
        ConfigError: There is no such shell.
    """
    if wants_usage(arguments):
        sys.stdout.write(
            f"{USAGE}\n\nPrint a script by which the shell completes verbs, settings and values.\n"
        )
        return 0
    shell, *others = arguments
    if shell not in SHELLS or others:
        raise ConfigError(
            f"{' '.join(arguments)} is not one of {', '.join(SHELLS)}{did_you_mean(shell, SHELLS)}"
        )
    start, before, current, end, asks = SHELLS[shell]
    find = FIND.replace("BEFORE", before).replace("CURRENT", current)
    sys.stdout.write(f"{start}printf '%s\\n' '{table()}' | {find}{end}{asks}")
    return 0


def table() -> str:
    """Return a line for each word: the verbs that take it, and the word, such as ``kind=vllm``."""
    known = all_settings()
    words: dict[str, list[str]] = {"": [*VERBS, "--help", "--version"], "completion": [*SHELLS]}
    words |= {name: [*verb.methods] for name, verb in VERBS.items() if verb.methods}
    words["settings"], words["check"] = ["--schema"], ["--kind", "--limit"]
    for verb, cls in known.items():
        words[verb] = ["--help", *settings(cls)]
    for name, row in VERBS.items():
        if row.section:
            own = settings(row.settings_class(), f"{row.section}.") if row.settings else PRESETS
            words[name] = [*own, *words["rl"]]
    verbs: dict[str, list[str]] = {}
    for verb, each in words.items():
        for word in each:
            verbs.setdefault(word, []).append(verb)
    return "\n".join(f",{','.join(of)},\t{word}" for word, of in verbs.items() if "'" not in word)


def settings(cls: type[Settings], above: str = "") -> Iterator[str]:
    """Yield ``name=value`` for each value of a setting with few values, and ``name=`` for others.

    Args:
        cls: The settings.
        above: The section that they are in, with a dot.
    """
    for name, info in cls.model_fields.items():
        kinds, below = list(flat(info.annotation)), branch_of(cls, name)
        # A list or a table is written in brackets.
        values = [
            *([] if {tuple, dict} & {*kinds} else choices(kinds)),
            *NAMES.get((cls, name), ()),
        ]
        if below is cls:
            yield from (f"{above}{name}={value}" for value in values or [""])
            continue
        if below.shorthand:
            short = settings(below, f"{above}{name}.")
            start = f"{above}{name}.{below.shorthand}="
            values += [word.removeprefix(start) for word in short if word.startswith(start)]
            yield from (f"{above}{name}={value}" for value in dict.fromkeys(values))
        elif tuple in kinds:
            yield f"{above}{name}="
        # An item of a list is named by its number.
        yield from settings(below, f"{above}{name}.{'0.' * (tuple in kinds)}")


def flat(kind: object) -> Iterator[object]:
    """Yield ``kind``, its origin, and those inside it."""
    yield kind
    yield typing.get_origin(kind)
    if typing.get_origin(kind) is not typing.Literal:
        for inner in typing.get_args(kind):
            yield from flat(inner)


def choices(kinds: Sequence[object]) -> list[str]:
    """Return the values of a setting of ``kinds``, or none if they are too many to list."""
    found = [
        one
        for kind in kinds
        if typing.get_origin(kind) is typing.Literal
        for one in typing.get_args(kind)
    ]
    found += [True, False] if bool in kinds else []
    found += [None] if found and type(None) in kinds else []
    return [inline_yaml(value) for value in dict.fromkeys(found)]
