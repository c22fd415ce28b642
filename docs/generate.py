"""Write the reference pages that the code knows best: ``python -m docs.generate``, or ``make docs``.

``configuration.md`` is made from the settings classes, ``parts.md`` from the registries, ``readers.md`` from its table,
``families.md`` from its table and the verdicts of ``benchmarks/families.py``, ``algorithms.md`` from the presets, and
``algorithms/*.md`` from what ``lightrft explain`` says of each. ``public.md`` is made by ``docs.public_names``, and
``errors.md`` by ``docs.errors``. Written by hand are ``migration.md``, but for the configs of ``examples/coming_from``, and
``index.md``, but for its verbs.
"""

from __future__ import annotations

import inspect
import json
import re
import textwrap
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

import lightrft
import lightrft.datasets.open_source  # fills READERS
from docs.api import api_page
from docs.errors import errors_page
from docs.public_names import public_page
from lightrft.algorithms.validate.component_kinds import COMPONENT_KINDS, ComponentKind
from lightrft.api.calls import signed
from lightrft.config import verbs
from lightrft.config.base import Settings, build, descriptions, dotted
from lightrft.config.config_tools import ShowConfig
from lightrft.config.other_names.rows import FRAMEWORKS
from lightrft.config.other_names.table import ROWS
from lightrft.config.preference.presets import PREFERENCE_PRESETS
from lightrft.config.presets import PAPERS, PRESETS
from lightrft.datasets.row_tables import READERS
from lightrft.diagnostics.importing.reading import read_foreign
from lightrft.diagnostics.importing.writing import translate
from lightrft.models.families import FAMILIES, MEMBERS, UNREAD, Family
from lightrft.observability.events import EVENTS
from lightrft.observability.metric_table import METRICS
from lightrft.trainer.explanation.explain import Line, explain, symbol_of, to_latex
from lightrft.trainer.explanation.of_config import explain_supervised
from lightrft.trainer.phases import PHASES
from lightrft.verbs import VERBS, trains

DOCS = Path(__file__).resolve().parent
MADE_BY = "<!-- Made by docs/generate.py from the code: `make docs` writes it. -->\n"


class Examined(verbs.RLConfig):
    """The settings of `lightrft rl`, or else of `lightrft sft`, and the branch `doctor`."""

    doctor: verbs.DoctorConfig = verbs.DoctorConfig()
    """The examination itself."""


class Shown(verbs.RLConfig):
    """The settings of `lightrft rl`, or else of another verb, and the branch `show`."""

    show: ShowConfig = ShowConfig()
    """The rows to show, and the page."""


SETTINGS: dict[str, type[Settings]] = {
    **{name: verb.settings_class() for name, verb in VERBS.items() if verb.settings},
    "doctor": Examined,
    "data": Shown,
}
"""Settings of each verb, with the config that it is about."""
RESULTS = {"data": "ShownData"}
"""Classes of the results of functions that do not train."""
FAMILY_PROOFS = DOCS.parent / "benchmarks" / "results" / "families.json"
WIDTH = 100
"""Longest line of prose."""
PAIRS = "examples/coming_from"
"""Folder of configs of other frameworks, each next to the config that is made from it."""
OURS = ".lightrft.yaml"
"""End of the name of a config that is made from another one."""
BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def pages() -> dict[Path, str]:
    """Path below ``docs`` to the text of the page."""
    made = {Path("algorithms", f"{preset}.md"): algorithm_page(preset) for preset in PRESETS}
    found = {
        Path("configuration.md"): configuration_page(),
        Path("algorithms.md"): algorithms_page(),
        Path("parts.md"): parts_page(),
        Path("preferences.md"): preferences_page(),
        Path("families.md"): families_page(),
        Path("metrics.md"): metrics_page(),
        Path("readers.md"): readers_page(),
        Path("other-names.md"): other_names_page(),
        Path("public.md"): MADE_BY + public_page(),
        Path("api.md"): MADE_BY + api_page(shown_signature),
        Path("errors.md"): MADE_BY + errors_page(),
        **made,
    }
    made = {path: wrapped(text) for path, text in found.items()}
    ours = imported_configs()
    made[Path("migration.md")] = migration_page(ours)
    made[Path("index.md")] = index_page()
    stub = {Path("..", "lightrft", "__init__.pyi"): python_stub()}
    return {**made, **{Path("..", name): text for name, text in ours.items()}, **stub}


def imported_configs() -> dict[str, str]:
    """Return what ``import-config`` makes of each config of another framework, by path."""
    made = {}
    for theirs in sorted((DOCS.parent / PAIRS).glob("*/*")):
        if OURS not in theirs.name:
            foreign = read_foreign(theirs)
            text = translate(foreign, theirs.parent.name, foreign.verb()).text()
            made[f"{PAIRS}/{theirs.parent.name}/{theirs.stem}{OURS}"] = text
    return made


def migration_page(ours: dict[str, str]) -> str:
    """Return ``migration.md`` with the files that its comments name in the blocks below them.

    Args:
        ours: Texts of made files, by path.
    """

    def filled(found: re.Match[str]) -> str:
        name = found["name"]
        text = ours.get(name) or (DOCS.parent / name).read_text(encoding="utf-8")
        return f"{found['head']}{text.strip()}\n```"

    page = (DOCS / "migration.md").read_text(encoding="utf-8")
    block = re.compile(r"(?P<head>^<!-- (?P<name>\S+) -->\n```[^\n]*\n).*?^```$", re.M | re.S)
    return block.sub(filled, page)


def index_page() -> str:
    """Return ``index.md`` with a row for each verb."""
    page = (DOCS / "index.md").read_text(encoding="utf-8")
    rows = "".join(
        f"| [{name}](verbs/{name}.md) | {verb.about} |\n" for name, verb in VERBS.items()
    )
    return re.sub(r"(?:^\| \[[\w-]+\]\(verbs/.*\n)+", lambda _: rows, page, flags=re.M)


def python_stub() -> str:
    """Return the signatures of the functions of Python, which editors complete."""
    functions = [_signature(name) for name in lightrft.VERBS]
    used = sorted(
        {cls for text in functions for cls in re.findall(r"(\w+Config|\w+Settings) \|", text)}
    )
    modules: dict[str, list[str]] = {}
    for cls in dict.fromkeys((Settings, *_branches(), *SETTINGS.values())):
        if cls.__name__ in {*used, "Settings"}:
            modules.setdefault(cls.__module__, []).append(cls.__name__)
    for event in EVENTS.values():
        modules.setdefault(event.__module__, []).append(event.__name__)
    imports = sorted(
        f"from {module} import {', '.join(sorted(n))}" for module, n in modules.items()
    )
    head = [
        "# Made by docs/generate.py from the settings: `make docs` writes it.",
        "from collections.abc import Callable, Iterable, Mapping, Sequence",
        "from os import PathLike",
        "from typing import Any, Literal, TypeAlias",
        "",
        "from lightrft.api.policy import Policy as Policy",
        "from lightrft.api.run import Run as Run",
        "from lightrft.api.shown_data import ShownData",
        "from lightrft.rewards.program_function import here as here",
        "from lightrft.utils.errors import ConfigError as ConfigError, UserError as UserError",
        *imports,
        "",
        "Given: TypeAlias = str | PathLike[str] | Mapping[str, Any] | Settings",
        "Data: TypeAlias = str | PathLike[str] | Mapping[str, Any] | Settings | Iterable[Any]",
        "",
        "__version__: str",
        "VERBS: tuple[str, ...]",
        "",
    ]
    return "\n".join([*head, *functions])


def _signature(name: str) -> str:
    """Return the signature of the function ``name``, and its docstring."""
    result = "Run" if name == "grm" or trains(name) else RESULTS.get(name, "Any")
    found = inspect.signature(signed(name)).parameters.values()
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    rows = [
        f"    {stars.get(one.kind, '')}{one.name}: {one.annotation}"
        f"{' = ...' if one.kind is one.KEYWORD_ONLY else ''},"
        for one in found
    ]
    rows = [row.replace("method: str", 'method: Literal["sft", "rl", "dpo"]') for row in rows]
    said = textwrap.indent(f'"""{signed(name).__doc__}\n"""', "    ")
    return "\n".join([f"def {name}(", *rows, f") -> {result}:", said, ""])


def shown_signature(name: str) -> str:
    """Return the signature of a function of a verb without its docstring."""
    return _signature(name).partition('\n    """')[0].removeprefix("def ").removesuffix(":")


def metrics_page() -> str:
    """Return the page of metrics."""
    lines = [
        "# Metrics",
        "",
        "`metrics.jsonl` has one row per step with these metrics of [`lightrft rl`](verbs/rl.md) and of "
        "evaluations. A mean over the tokens or responses of a step is one mean: the split into "
        "micro-batches, mini-batches and ranks does not change it. Metrics of other verbs are on the "
        "pages of the verbs.",
        "",
        "A run has the metrics of its parts: one without a critic has no `critic/loss`, and a policy "
        "loss without weights no `policy/weight`. A metric that a run has is in every step, unless the "
        "last column says which steps lack it. A mean or an extreme over nothing has no value, so a "
        "step lacks it where its set is empty; a sum over nothing is 0.",
        "",
        "| metric | over | meaning | not where |",
        "|---|---|---|---|",
        *(f"| `{row.name}` | {row.over} | {row.meaning} | {row.when} |" for row in METRICS),
        "",
        "## Phases of a step",
        "",
        "A step runs these phases on its batch, in order. `time/<phase>` is the time of each, and "
        "[replay](off-policy.md#replay-a-step) repeats some of them.",
        "",
        "| phase | computes |",
        "|---|---|",
        *(f"| `{phase.name}` | {phase.about} |" for phase in PHASES),
    ]
    return "\n".join(lines) + "\n"


def wrapped(text: str) -> str:
    """Wrap the lines of ``text`` that are longer than ``WIDTH``, except tables and code blocks."""
    rows: list[str] = []
    in_code = False
    for row in text.split("\n"):
        in_code ^= row.startswith("```")
        if in_code or len(row) <= WIDTH or row.startswith(("|", "`minimise")):
            rows.append(row)
            continue
        indent = "  " if row.startswith("* ") else ""
        rows += textwrap.wrap(
            row, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
    return "\n".join(rows)


def algorithms_page() -> str:
    """The presets, with what each takes of the parts."""
    rows = []
    for preset in PRESETS:
        chosen = build(verbs.AlgorithmConfig, {"preset": preset})
        kl = f"{chosen.kl.estimator} in the {chosen.kl.where}" if chosen.kl.used else "none"
        link = f"[{preset}](algorithms/{preset}.md)"
        row = (
            f"| {link} | `{chosen.advantage.name}` | `{chosen.loss.name}` | "
            f"`{chosen.aggregation}` | {kl}"
        )
        rows.append(f"{row} | {_cell(PAPERS[preset])} |")
    return "\n".join(
        [
            "# Algorithms\n",
            MADE_BY,
            "`algorithm: <name>` sets the numbers and functions of a published algorithm. "
            "Settings next to it override it.\n",
            "| preset | advantage | policy loss | aggregation | KL | from "
            "|\n|---|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


TITLES = {
    "advantage": "Advantages",
    "loss": "Policy losses",
    "correction": "Corrections",
    "token_mask": "Token masks",
    "shaping": "Shapings of the reward",
    "filter": "Filters of groups",
    "aggregation": "Aggregations",
    "kl": "KL estimators",
    "preference": "Preference losses",
    "reward_model": "Reward-model losses",
}


def parts_page() -> str:
    """Every registered part by kind: its formula, its options with their defaults, what it needs, and where it was published."""
    return (
        "\n".join(
            [
                "# Parts\n",
                MADE_BY,
                "The parts of an algorithm. Each table names the setting that takes the name of "
                "a part. The setting also",
                "takes a function of your own ([extending](extending.md)). An option without a "
                "default must be given.\n",
                *(_parts_of(COMPONENT_KINDS[kind], title) for kind, title in TITLES.items()),
            ]
        ).rstrip("\n")
        + "\n"
    )


def _parts_of(kind: ComponentKind, title: str) -> str:
    rows = [
        f"## {title}\n",
        f"`{kind.key}`, called with `{', '.join((*kind.arguments, *kind.given))}`.\n",
    ]
    rows.append("| name | formula | options | reads | needs | from |\n|---|---|---|---|---|---|")
    for name in kind.registry:
        about, options = kind.registry.about(name), kind.options(kind.registry[name])
        given = ", ".join(
            f"`{o}`" if d is inspect.Parameter.empty else f"`{o} = {d}`" for o, d in options.items()
        )
        reads, needs = (
            ", ".join(f"`{x}`" for x in sorted(names)) for names in (about.reads, about.needs)
        )
        if about.heads is not None:
            fitting = "a head of kind " + " or ".join(f"`{x}`" for x in sorted(about.heads))
            needs = ", ".join(filter(None, (needs, fitting)))
        rows.append(
            f"| `{name}` | `{_cell(about.formula)}` | {given} | {reads} | {needs} | "
            f"{_cell(about.paper)} |"
        )
    return "\n".join([*rows, ""])


def families_page() -> str:
    """The page of model families: the verdicts of ``benchmarks/families.py``, and the parts of families that read media."""
    result = json.loads(FAMILY_PROOFS.read_text(encoding="utf-8"))
    texts = [
        row
        for row in result["families"]
        if row["family"] in FAMILIES and not FAMILIES[row["family"]].reads_media
    ]
    own = [
        row
        for row in result["families"]
        if row["family"] in FAMILIES and FAMILIES[row["family"]].own is not None
    ]
    right = [row for row in texts if row["verdict"] == "right"]
    kinds = dict.fromkeys((row["layout"], row["decoding"]) for row in right)
    groups = [
        (kind, [f"`{r['family']}`" for r in right if (r["layout"], r["decoding"]) == kind])
        for kind in sorted(kinds)
    ]
    return "\n".join(
        [
            "# Families\n",
            MADE_BY,
            "The family of a model is the `model_type` of its `config.json`. "
            "`benchmarks/families.py` verifies each family",
            f"on a tiny model, with transformers {result['transformers']}:\n",
            "* The model loads.",
            "* The three layouts give the log-probs and gradients of the model's own forward, in "
            "float64.",
            "* Sampled tokens have the log-probs of that forward.",
            "* A training step makes a response more likely.\n",
            f"{len(right)} text families are verified, and {len(texts) - len(right)} are "
            "refused. A family that is not listed is",
            "refused at start. `model.unproved_family=allow` loads a language model of such a "
            "family, and runs its own forward",
            "in padded rows. If your model is a renamed copy of a listed family, set "
            "`model_type` in its `config.json` instead.\n",
            "## A model of your own\n",
            "A class that `AutoModelForCausalLM` knows, or the code of a model folder with "
            "`model.trust_remote_code=true`, is trained with",
            "`model.unproved_family=allow`. It is a `PreTrainedModel` with these members. A missing "
            "one is named at start.\n",
            "| member | returns |\n|---|---|",
            *(f"| `{member}` | {returns} |" for member, returns, _ in MEMBERS),
            "\n## Families that read media\n",
            "`tower` and `projector` are parts that [can be frozen, adapted and trained at a "
            "separate",
            "rate](media.md#what-is-trained). The table shows the prefixes of their parameters' "
            "names. You can also [add a",
            "family](media.md#a-family-of-your-own).\n",
            "| model type | class in transformers | reads | positions | layout | `tower` | "
            "`projector` |\n|---|---|---|---|---|---|---|",
            *(
                _family(name, family)
                for name, family in FAMILIES.items()
                if family.reader is not None
            ),
            "\n## Families that read media by their own processor\n",
            f"{len(own)} more families have no code of their own here. The family's processor of "
            "transformers writes the placeholders",
            "and computes the tensors, and its methods such as `get_image_features` compute the "
            "features. Tests compare both, log-probs,",
            "gradients and sampled tokens with the model's own forward. "
            "[Limits](media.md#families-without-a-row-of-their-own).\n",
            "| layout | decoding | model types |\n|---|---|---|",
            *(
                f"| `{layout}` | {decoding} | "
                + ", ".join(
                    f"`{row['family']}`"
                    for row in own
                    if (row["layout"], row["decoding"]) == (layout, decoding)
                )
                + " |"
                for layout, decoding in sorted({(r["layout"], r["decoding"]) for r in own})
            ),
            "\n## Families that read text\n",
            "`layout` is the leanest layout that gives the right numbers. It replaces a leaner "
            "`model.layout`. `decoding` is how",
            "the native engine samples: with an attention plan, or with the model's own cache, "
            "which is slower.\n",
            "| layout | decoding | model types |\n|---|---|---|",
            *(
                f"| `{layout}` | {decoding} | {', '.join(names)} |"
                for (layout, decoding), names in groups
            ),
            "\n## Families that are refused\n",
            "| model type | why |\n|---|---|",
            *(
                f"| `{row['family']}` | {FAMILIES[row['family']].refused} |"
                for row in texts
                if row["verdict"] == "refused"
            ),
            *(f"| `{name}` | {reason} |" for name, reason in sorted(UNREAD.items())),
            "",
        ]
    )


def _family(name: str, family: Family) -> str:
    reader = family.reader
    assert reader is not None
    kinds = ", ".join(dict.fromkeys(tower.kind for tower in reader.towers))
    axes = "several axes" if reader.positions else "one axis"
    parts = [
        ", ".join(f"`{prefix}`" for prefix in reader.parts.get(part, ()))
        for part in ("tower", "projector")
    ]
    return (
        "| "
        + " | ".join([f"`{name}`", f"`{family.loader}`", kinds, axes, f"`{family.layout}`", *parts])
        + " |"
    )


def readers_page() -> str:
    """The readers of public data sets: the layout that each takes, and its options."""
    rows = []
    for name in READERS:
        function = READERS[name]
        about = " ".join(inspect.cleandoc(function.__doc__ or "").split()).replace("``", "`")
        options = [
            p
            for p in inspect.signature(function).parameters.values()
            if p.kind is inspect.Parameter.KEYWORD_ONLY
        ]
        rows.append(
            f"| `{name}` | {_cell(about)} | "
            f"{', '.join(f'`{o.name} = {o.default!r}`' for o in options)} |"
        )
    return "\n".join(
        [
            "# Readers\n",
            MADE_BY,
            "A reader converts a row of one layout into the usual columns: `prompt`, `response`, "
            "`label`, `reference`,",
            "`data_source`, `id`, `images`, `videos` and `audios`. Name it in",
            "`data.sources: [{path: ..., reader: name, reader_options: {...}}]`. A function of "
            "your own,",
            "`package.module:function`, takes a row and returns one.\n",
            "Sets of preferences become questions for a judge. The prompt holds both candidates, "
            "called A and B in an order that",
            "depends on their content. The label is the letter of the better one, or C for a "
            "tie. `chosen`, `rejected` and",
            "`request` hold the same pair for training on preferences. Every other comparison of "
            "the set is a column with a",
            "letter.\n",
            "| reader | layout | options |\n|---|---|---|",
            *rows,
            "",
        ]
    )


def configuration_page() -> str:
    """Return the page of every setting of every verb: type, bounds, default and description."""
    parts = [
        "# Configuration\n",
        MADE_BY,
        "The settings that a YAML file, or `a.b=value` on the command line, can set. The first "
        "part lists the sections of each",
        "verb. The second part lists the settings of each section. Some sections can be replaced "
        "by a bare value, as *short for*",
        "says: `model=path` is `model.path=path`.\n",
        "`lightrft settings WORD` searches them. `lightrft settings --schema rl > rl.schema.json` "
        "writes the JSON Schema of a",
        "verb. With `# yaml-language-server: $schema=rl.schema.json` as the first line of a YAML "
        "file, editors complete its",
        "settings, show their descriptions and mark mistakes.\n",
        "## Verbs\n",
        *(_verb(verb, cls) for verb, cls in SETTINGS.items()),
        "`lightrft explain` reads what `lightrft rl` reads.\n",
        "## Sections\n",
        *(_branch(cls) for cls in _branches()),
    ]
    return "\n".join(parts).rstrip("\n") + "\n"


def _verb(verb: str, cls: type[Settings]) -> str:
    about = f"[`lightrft {verb}`](verbs/{verb}.md): {_prose(cls)}"
    return f"### {verb}\n\n{about}\n\n{_table(cls)}\n"


def _branch(cls: type[Settings]) -> str:
    short = f"Short for `{cls.shorthand}`.\n\n" if cls.shorthand else ""
    return f"### {cls.__name__}\n\n{_prose(cls)}\n\n{short}{_table(cls)}\n"


def _branches() -> list[type[Settings]]:
    """Classes that the verbs' trees are made of, in the order in which they are met; those of the verbs themselves left out."""
    found: list[type[Settings]] = []
    waiting = list(SETTINGS.values())
    while waiting:
        cls = waiting.pop(0)
        below = [c for f in cls.model_fields.values() for c in _classes(f.annotation)]
        fresh = [c for c in dict.fromkeys(below) if c not in found and c not in SETTINGS.values()]
        found += fresh
        waiting += fresh
    return found


def _classes(kind: Any) -> Iterator[type[Settings]]:
    if isinstance(kind, type) and issubclass(kind, Settings):
        yield kind
    for inner in typing.get_args(kind):
        yield from _classes(inner)


def _table(cls: type[Settings]) -> str:
    rows = [
        f"| `{name}` | {_kind(f.annotation)}{_bounds(f)} | {_default(f)} |"
        for name, f in cls.model_fields.items()
    ]
    about = [f"* `{name}`: {text}" for name, text in descriptions(cls).items()]
    return "\n".join(
        ["| setting | type | default |", "|---|---|---|", *rows, *(["", *about] if about else [])]
    )


def _kind(kind: Any) -> str:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return _kind(inner[0])
    if isinstance(kind, type) and issubclass(kind, Settings):
        verb = next((v for v, c in SETTINGS.items() if c is kind), None)
        return f"[{kind.__name__}](#{(verb or kind.__name__).lower()})"
    if origin is typing.Literal:
        return " or ".join(f"`{v}`" for v in inner)
    if origin in (typing.Union, types.UnionType):
        return " or ".join("`null`" if k is type(None) else _kind(k) for k in inner)
    if origin is tuple:
        return (
            f"list of {_kind(inner[0])}"
            if inner[-1] is Ellipsis
            else f"{len(inner)} x {_kind(inner[0])}"
        )
    if origin is dict:
        return f"table of {_kind(inner[0])} to {_kind(inner[1])}"
    return {Any: "anything", object: "anything", str: "text", bool: "true or false"}.get(
        kind, getattr(kind, "__name__", str(kind))
    )


def _bounds(field: FieldInfo) -> str:
    found = [
        f"{sign} {getattr(m, name):g}"
        for m in field.metadata
        for name, sign in BOUNDS.items()
        if hasattr(m, name)
    ]
    return f", {', '.join(found)}" if found else ""


def _default(field: FieldInfo) -> str:
    """The value; of a branch, only what differs from the branch's own defaults."""
    if field.is_required():
        return "must be given"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, tuple) and value and isinstance(value[0], Settings):
        value = [part.model_dump(mode="json", exclude_unset=True) for part in value]
    if isinstance(value, Settings):
        own = dict(dotted(type(value)().model_dump(mode="json")))
        given = dotted(value.model_dump(mode="json"))
        return ", ".join(f"{_code(v)} for `{k}`" for k, v in given if own.get(k) != v)
    return _code(value)


def _code(value: Any) -> str:
    """``value`` as it is written in YAML."""
    return (
        f"`{json.dumps(list(value) if isinstance(value, tuple) else value)}`"
        if not isinstance(value, str) or not value
        else f"`{value}`"
    )


def _prose(cls: type[Settings]) -> str:
    return inspect.cleandoc(cls.__doc__ or "").replace("``", "`")


def algorithm_page(preset: str) -> str:
    """What ``lightrft explain`` says of ``preset``, with every other setting at its default."""
    found = explain(
        build(verbs.RLConfig, {"algorithm": {"preset": preset}}), {"algorithm.preset": "given"}
    )
    lines = [
        f"| {line.part} | `{line.name}` | `{_cell(line.about.formula)}` | {_with(line)} | "
        f"{_cell(line.about.paper)} |"
        for line in found.lines
    ]
    numbers = [f"| `{n.key}` | `{n.value}` | {n.source} |" for n in found.numbers]
    passes = [f"| {f.model} | {f.passes} | {f.what} |" for f in found.forwards]
    return "\n".join(
        [
            f"# {preset}\n",
            MADE_BY,
            f"{found.paper}.\n",
            f"```bash\nlightrft explain {preset}\n```\n",
            f"`{found.objective}`\n",
            "| part | name | formula | with | from |\n|---|---|---|---|---|",
            *lines,
            f"\n```math\n{to_latex(found, 'aligned')}\n```\n",
            *(f"* {line}" for line in found.gradient),
            "\n## Models\n",
            *(f"* {role.name}: {role.what}." for role in found.roles),
            "\n| model | passes over the batch in a step | for |\n|---|---|---|",
            *passes,
            "\n## Numbers in force\n",
            "| setting | value | from |\n|---|---|---|",
            *numbers,
            "",
        ]
    )


def preferences_page() -> str:
    """Return the page of the presets of preference learning."""
    rows = []
    for preset in PREFERENCE_PRESETS:
        found = explain_supervised(
            build(verbs.DPOConfig, {"preference": preset}), {"preference.preset": "given"}
        )
        values = []
        for number in found.numbers:
            if number.key.startswith("preference.") and number.source != "default":
                key = number.key.removeprefix("preference.")
                values.append(f"`{key} = {_cell(str(number.value))}`")
        about = (f"`{_cell(found.objective.partition(' of ')[2])}`", ", ".join(values), found.paper)
        rows.append(f"| `{preset}` | {' | '.join(about)} |")
    return "\n".join(
        [
            "# Presets of preference learning\n",
            MADE_BY,
            "`preference: <name>` sets the losses and numbers of a row in `lightrft dpo`, or in "
            "`lightrft kto` for a loss of labelled responses. `lightrft explain <name>` prints its "
            "formulas, and where each number comes from. [Losses](parts.md#preference-losses) has "
            "all formulas.\n",
            "| preset | losses | numbers | paper |\n|---|---|---|---|",
            *rows,
            "",
        ]
    )


def other_names_page() -> str:
    """Return the page of names of settings in other frameworks."""
    here: dict[str, dict[tuple[str, str], list[str]]] = {}
    none: dict[str, list[str]] = {}
    for row in ROWS:
        names = [
            f"`{_cell(name)}`" + (f" ({FRAMEWORKS[framework]})" if framework else "")
            for framework, name in row.each_name()
        ]
        if row.here:
            section = row.here.split()[0].split(".")[0]
            here.setdefault(section, {}).setdefault((row.here, row.note), []).extend(names)
        else:
            none.setdefault(row.note, []).extend(names)
    lines = [
        "# Names of settings in other frameworks\n",
        MADE_BY,
        "Options of TRL, verl, OpenRLHF, LLaMA-Factory, ms-swift and LightRFT, with the setting that "
        "does the same here, and what changes with the name: its unit, its scope, or its relation to "
        "other options. An error about an unknown setting gives the row of this table, and "
        "[`lightrft import-config`](verbs/import-config.md) translates a whole config by it. "
        "[Coming from another framework](migration.md) lists commands.\n",
        "A name is looked up whole. `*` stands for one part of a dotted name, and `**` for any. Where "
        "several settings are listed, a verb takes the first one that it has.\n",
    ]
    for section in sorted(here):
        lines += [f"## {section}\n", "| here | elsewhere | difference |\n|---|---|---|"]
        for (settings, note), names in here[section].items():
            own = ", ".join(f"`{one}`" for one in settings.split())
            lines.append(f"| {own} | {', '.join(names)} | {_cell(note)} |")
        lines.append("")
    lines += ["## Without a counterpart\n", "| why | names |\n|---|---|"]
    lines += [f"| {_cell(note)} | {', '.join(sorted(names))} |" for note, names in none.items()]
    return "\n".join([*lines, ""])


def _with(line: Line) -> str:
    return ", ".join(f"`{symbol_of(n)} = {_cell(str(n.value))}`" for n in line.numbers)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    for path, text in pages().items():
        (DOCS / path).parent.mkdir(exist_ok=True)
        (DOCS / path).write_text(text, encoding="utf-8")
