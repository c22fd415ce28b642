"""The page of errors: ``errors.md``, natural mistakes with the answers of ``lightrft``.

``tests/e2e/mistakes.py`` has the mistakes. ``tests/e2e/test_mistakes.py`` types each of them and
compares the answer with ``docs/errors.json``. To write that file from the answers, and the page::

    LIGHTRFT_RECORD=1 pytest -n 0 tests/e2e/test_mistakes.py
    python -m docs.generate
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from tests.e2e.mistakes import FILES, OWN_CODE, PROMPT, SUBJECTS, VARIED, Mistake
from tests.e2e.python_mistakes import START

ROOT = Path(__file__).resolve().parents[1]
ANSWERS = ROOT / "docs" / "errors.json"
WIDTH = 80
"""Longest line of an answer."""
KNOWN = re.compile(r"((?:[Kk]nown|looked for)(?: [a-z ]+:|:| )(?:[^,;)\n]+, ){3})[^;)\n]*")
"""A list of names, of which the page shows three."""
PACKAGE_LINE = re.compile(r'(File "lightrft/[^"]+"), line \d+')
HALTED = re.compile(r"import of (\w+) halted; None in sys.modules")
"""What the import of a package says that the test hides."""
EXAMPLE = re.compile(r"\n(?! {12}|  (?:prompt|response|result) )")
"""The end of a line, unless the example of a warning goes on."""
VARYING = re.compile(
    r"\([^()]*\)|[\d.]+ [KMGT]iB|(?<=response  )'[^']*'|(?<=reads )'[^']*'|^[\s^~]+$"
    r"|(?<=[Kk]nown: )[^;)\n]*",
    re.M,
)
"""Parts that depend on the machine, on other packages or on what a program has registered: words
in brackets, sizes, responses, known names."""
WORD = re.compile(r"(?:[^\s']|'[^']*')+")
ABOUT = {
    "Settings": "A name that no verb has is answered with the nearest name, or with the name here "
    "of a setting of another framework. [Configuration](configuration.md) lists all settings, and "
    "`lightrft settings WORD` searches them. All errors of a config are reported at once.",
    "Data": "An answer names the file and the line. `lightrft data config.yaml` shows the first "
    "rows as a run reads them ([Your own data](tutorials/own-data.md)). `data.bad_rows: skip` "
    "leaves rows out that cannot be read.",
    "Rewards": "A reward is called on made-up responses before the run starts. `lightrft check "
    "file.py:function` does the same without a run ([Your own reward](tutorials/own-reward.md)).",
    "Models": "`model.path` is a folder, or a name on the hub. [Families](families.md) lists the "
    "models that are supported.",
    "Memory": "`lightrft doctor config.yaml` estimates the memory before a run starts, and names "
    "the phase that needs most ([doctor](verbs/doctor.md)). `train.max_tokens_per_micro_batch` "
    "bounds the memory of a step, and does not change its result.",
    "Launch": "`launch.processes` starts one process per GPU. Sharding and parallelism are in "
    "`strategy` ([Several processes](processes.md), [Engines](engines.md)).",
    "Runs": "A run is in `run.dir/run.name`. A run of the same name resumes from its newest "
    "checkpoint, if its settings are the same.",
    "Python": "Errors are a `lightrft.UserError`, and name settings as keywords "
    "([Python](python.md)). `grpo.yaml`, `sft.yaml` and `dpo.yaml` would run as they are. The lines "
    f"follow these:\n\n```python\n{START}```",
}


def answer(mistake: Mistake, said: str, folder: Path) -> str:
    """Return the lines of an answer that are about the mistake, or none for a value that is used.

    Args:
        mistake: The mistake.
        said: The output of the command.
        folder: The working directory, which the answer does not name.
    """
    for path in (folder, ROOT):
        said = said.replace(f"{path}/", "").replace(str(path), ".")
    said = HALTED.sub(r"No module named '\1'", PACKAGE_LINE.sub(r"\1", KNOWN.sub(r"\1...", said)))
    parts, lines = mistake.said.split(" | "), re.split(EXAMPLE, said.rstrip("\n"))
    last = max((k for k, line in enumerate(lines) if line.startswith("lightrft")), default=0)
    about = [line for line in lines if any(part in line for part in parts)]
    if mistake.typed.startswith("doctor"):  # a line for each thing that it looked at
        return "\n".join(about).strip()
    if mistake.status == 0:
        return "\n".join(line for line in about[:1] if line.startswith("WARNING"))
    before = about[:1] if about and about[0] not in lines[last:] else []
    told = "\n".join([*before, *lines[last:]]).strip()
    # Errors of Python name no verb.
    return told.removeprefix("lightrft: ") if mistake.typed.startswith(PROMPT) else told


def alike(recorded: str, said: str) -> bool:
    """Return True if two answers differ at most in parts that depend on the machine."""
    return VARYING.sub("", recorded) == VARYING.sub("", said)


def recorded() -> dict[str, str]:
    """Return the answer to each mistake by its name."""
    return json.loads(ANSWERS.read_text(encoding="utf-8"))


def record(mistake: Mistake, said: str) -> None:
    """Write the answer to a mistake into the file of answers."""
    found = recorded() if ANSWERS.exists() else {}
    found[mistake.id] = said
    ANSWERS.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def errors_page() -> str:
    """Return the page."""
    answers = recorded()
    lines = [
        "# Errors",
        "",
        "Natural mistakes, by subject, with the answer to each. An answer names the setting and "
        "its value, and ends with what to do. A command that starts from `config.yaml` would run "
        "without the words behind it. Lists of known names are cut to three here.",
        "",
        "The exit status is 2 for an error, and 0 after a `WARNING`. A test types each command and "
        "compares the answer with this page.",
        "",
    ]
    for subject, mistakes in SUBJECTS.items():
        lines += [f"## {subject}", "", ABOUT[subject], ""]
        for mistake in mistakes:
            if answers[mistake.id]:
                lines += entry(mistake, answers[mistake.id])
    lines += [
        "## Forms that are used as they are meant",
        "",
        "These look like mistakes, and do what was meant.",
        "",
        "| command |",
        "|---|",
    ]
    used = [m for part in SUBJECTS.values() for m in part if not answers[m.id]]
    programs = [command(m) for m in used if m.typed.startswith(PROMPT)]
    lines += [f"| `{command(m)}` |" for m in used if not m.typed.startswith(PROMPT)]
    for program in programs:
        lines += ["", "```python", *program.splitlines(), "```"]
    return "\n".join([*lines, ""])


def entry(mistake: Mistake, said: str) -> Iterator[str]:
    """Yield the lines about a mistake: its words, the file that it names, the command, the answer."""
    if mistake.typed.startswith(PROMPT):
        yield from (
            f"### `{mistake.id}`",
            "",
            "```python",
            *command(mistake).splitlines(),
            "```",
            "",
        )
        yield from ("```text", *wrapped(said), "```", "")
        return
    verb, words = parts_of(mistake)
    yield from (f"### `{words if verb.endswith('+') else command(mistake)}`", "", "```text")
    for name in dict.fromkeys(re.findall(r"[\w.]+\.(?:jsonl|csv|py|yaml)\b", mistake.typed)):
        if name in FILES and name in said:
            yield from shown(name, said)
    yield f"$ {command(mistake)}"
    yield from (*wrapped(said), "```", "")


def wrapped(said: str) -> Iterator[str]:
    """Yield the lines of an answer, none longer than ``WIDTH``."""
    for line in said.splitlines():
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        yield from textwrap.wrap(
            line, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )


def parts_of(mistake: Mistake) -> tuple[str, str]:
    """Return the first word of a mistake, and the others without those that replace a default."""
    typed = mistake.typed if mistake.status == 0 else mistake.typed.replace(f" {VARIED}", "")
    verb, *words = WORD.findall(typed.replace(OWN_CODE, "model.path=own_code"))
    return verb, " ".join(word for word in words if not word.endswith("="))


def command(mistake: Mistake) -> str:
    """Return the command of a mistake, with a config for words that are right."""
    if mistake.typed.startswith(PROMPT):
        return mistake.typed.removeprefix(PROMPT)
    verb, words = parts_of(mistake)
    return f"lightrft {verb.replace('+', ' config.yaml')} {words}"


def shown(name: str, said: str) -> Iterator[str]:
    """Yield a command that prints a file of a mistake, or the line that its answer names."""
    text = FILES[name]
    rows = (text.decode("latin-1") if isinstance(text, bytes) else text).splitlines()
    if name.endswith((".py", ".yaml")):
        yield from (f"$ cat {name}", *(row.replace("\t", "        ") for row in rows), "")
    elif rows:
        line = re.search(rf"{re.escape(name)}, line (\d+)", said)
        number = int(line[1]) if line else 1
        row = rows[number - 1]
        yield f"$ sed -n {number}p {name}"
        yield row if len(row) <= WIDTH else f"{row[: WIDTH - 4]} ..."
        yield ""
