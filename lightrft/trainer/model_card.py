"""Share a trained model on the Hugging Face Hub, with a model card that is made from its run."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

from lightrft import __version__
from lightrft.config.base import Settings, build, dotted
from lightrft.config.data import DataConfig
from lightrft.config.preference.presets import PREFERENCE_PAPERS
from lightrft.config.presets import PAPERS
from lightrft.config.verbs import IterateConfig, TrainingConfig
from lightrft.datasets.open_source import is_on_hub
from lightrft.observability.run_directory import ROUNDS
from lightrft.observability.trackers import read_rows
from lightrft.trainer.explanation.explain import formula_rows
from lightrft.trainer.explanation.of_config import explained
from lightrft.utils.errors import ConfigError, UserError, first_line
from lightrft.utils.yaml_text import inline_yaml, parse_yaml
from lightrft.verbs import VERBS

log = logging.getLogger(__name__)

CARD = "README.md"
"""Name of a model card."""
OF_THIS_MACHINE = ("run", "log", "launch", "checkpoint", "strategy.device")
"""Settings that say nothing of the model, or name folders of the machine."""
FOLDERS = re.compile(r"(?<![\w.:/~)}\]])/(?:[^\s/:'\"]+/)+")
"""The folders of an absolute path in a text. Formulas divide by other than words with slashes."""


class Hub:
    """A repository of the Hugging Face Hub, which is made if there is none.

    Args:
        repo: Name of the repository, ``me/model``.
        private: Who sees a new repository. ``None`` takes the account's default.
        asked: What the user wrote to push there, for messages.

    Raises:
        ConfigError: The hub refuses the repository, or cannot be reached.
    """

    def __init__(self, repo: str, *, private: bool | None, asked: str) -> None:
        from huggingface_hub import HfApi

        self.asked = asked
        self._api = HfApi(library_name="lightrft", library_version=__version__)
        # A repository that exists is answered to a wrong token too.
        self._ask(self._api.whoami)
        made = self._ask(lambda: self._api.create_repo(repo, private=private, exist_ok=True))
        self.address, self._repo = str(made), made.repo_id

    def push(self, folder: Path, card: str, message: str, revision: str | None = None) -> None:
        """Upload a model folder with its card, in one commit.

        Args:
            folder: The folder.
            card: The text of the card.
            message: Message of the commit.
            revision: Branch to commit to, which exists. ``None`` takes the main one.

        Raises:
            ConfigError: The hub refuses the upload, or cannot be reached.
        """
        from huggingface_hub import CommitOperationAdd

        files = [p for p in sorted(folder.rglob("*")) if p.is_file() and p.name != CARD]
        operations = [CommitOperationAdd(p.relative_to(folder).as_posix(), p) for p in files]
        operations.append(CommitOperationAdd(CARD, card.encode()))
        self._ask(
            lambda: self._api.create_commit(
                self._repo, operations, commit_message=message, revision=revision
            )
        )

    def _ask(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:  # each version of the client has other classes
            raise ConfigError(
                f"{self.asked}: {first_line(error)}; the account is that of `hf auth login` or "
                "HF_TOKEN, and needs the right to write there"
            ) from error


def message_of(summary: Mapping[str, Any]) -> str:
    """Return the message of the commit of a model."""
    return f"Model of step {summary.get('model_step', summary.get('steps'))}"


def model_card(run: Path, model: Path, summary: Mapping[str, Any]) -> str:
    """Return the model card of a run: base, data, method, hardware, settings and results.

    Folders of the machine are left out, and paths are cut to their last part.

    Args:
        run: The run folder.
        model: The folder of its model.
        summary: The content of ``summary.json``, or what is known of it during the run.

    Raises:
        ConfigError: ``config.yaml`` is of another version, and has other settings.
    """
    tree = _tree_of(run)
    verb, name = str(summary["verb"]), str(tree["run"]["name"])
    config = build(VERBS[verb.split()[-1]].settings_class(), tree)
    data = dict(_data_of(config))
    # Trained on the responses that models of lightrft iterate sampled, in a folder of its run.
    if run.match(f"{ROUNDS}/*") and (run.parents[1] / "config.yaml").is_file():
        tree = _tree_of(run.parents[1])
        name = f"{tree['run']['name']}, {run.parent.name.replace('_', ' ')}"
        prompts = build(IterateConfig, tree).data
        data = {"data": prompts, **{key: one for key, one in data.items() if key != "data"}}
    base = str(tree["model"]["path"])
    on_hub = "/" in base and not Path(base).expanduser().exists()
    own = model / CARD  # of adapters, and says how they are used
    adapters = own.read_text(encoding="utf-8").partition("\n---\n") if own.is_file() else None
    head = adapters[0].splitlines()[1:] if adapters else _fields(base, verb, on_hub=on_hub)
    shown = base if on_hub else PurePath(base).name
    lines = ["---", *head, *_datasets(data), "---", "", f"# {name}", ""]
    version = summary.get("environment", {}).get("lightrft", __version__)
    lines += [f"`{shown}`, trained by `lightrft {verb}` of LightRFT {version}.", ""]
    if adapters:
        lines += [f"#{adapters[2].strip()}", ""]  # its title is that of a section here
    lines += ["## Training", "", *_training(summary), "", *_formulas(config), *_data(data)]
    lines += [*_results(run), "## Settings", "", "Those that differ from the defaults:", ""]
    settings = [f"{name}: {inline_yaml(_shared(value))}" for name, value in _changed(summary)]
    return "\n".join([*lines, "```yaml", *settings, "```", ""])


def _tree_of(run: Path) -> dict[str, Any]:
    return parse_yaml((run / "config.yaml").read_text(encoding="utf-8"))


def _data_of(value: object, key: str = "") -> Iterator[tuple[str, DataConfig]]:
    """Yield the sections of data with sources, by name."""
    if isinstance(value, DataConfig):
        if value.sources:
            yield key, value
    elif isinstance(value, Settings):
        for name in type(value).model_fields:
            yield from _data_of(getattr(value, name), f"{key}.{name}".lstrip("."))


def _datasets(data: Mapping[str, DataConfig]) -> list[str]:
    """Return the field of the card that names the data sets of the hub."""
    sources = (source for section in data.values() for source in section.sources)
    names = dict.fromkeys(source.path for source in sources if is_on_hub(source))
    return ["datasets:", *(f"- {name}" for name in names)] if names else []


def _data(data: Mapping[str, DataConfig]) -> Iterator[str]:
    """Yield the names of the sources of each section. Of local files, the last part is shown."""
    if not data:
        return
    yield from ("## Data", "")
    for key, section in data.items():
        shown = []
        for source in section.sources:
            name = f"`{source.name or _shared(source.path)}`"
            if is_on_hub(source):
                parts = {"subset": source.subset, "split": source.split}
                told = ", ".join(f"{part} {value}" for part, value in parts.items() if value)
                name = f"[{source.path}](https://huggingface.co/datasets/{source.path}) ({told})"
            rows = "" if source.limit is None else f", the first {source.limit} rows"
            shown.append(f"{name}{rows}")
        yield f"* `{key}`: {'; '.join(shown)}"
    yield ""


def _formulas(config: TrainingConfig | IterateConfig) -> Iterator[str]:
    """Yield the objective with its formulas and papers, as ``lightrft explain`` prints them."""
    try:
        rows = formula_rows(explained(config, {}))
    except UserError as error:  # such as a function of the user that has gone
        log.warning("the model card has no formulas: %s", first_line(error))
        return
    yield from ("## Objective", "", "```text")
    yield from (FOLDERS.sub("", row) for row in rows)
    yield from ("```", "")


def _fields(base: str, verb: str, *, on_hub: bool) -> list[str]:
    """Return the fields of the card that the hub reads."""
    found = [f"base_model: {base}"] if on_hub else []
    return [*found, "library_name: transformers", "tags:", "- lightrft", f"- {verb}"]


def _training(summary: Mapping[str, Any]) -> Iterator[str]:
    method = str(summary.get("algorithm") or summary.get("preset") or "")
    if paper := PAPERS.get(method) or PREFERENCE_PAPERS.get(method):
        yield f"* method: `{method}` ({paper})"
    elif method:
        yield f"* method: `{method}`"
    yield f"* steps: {summary.get('steps_trained', summary.get('steps'))}"
    if tokens := summary.get("tokens_trained"):
        yield f"* trained tokens: {tokens:,}"
    if seconds := summary.get("seconds"):
        minutes = math.ceil(seconds / 60)
        is_long = seconds > 3600
        time = (
            f"{seconds / 3600:.1f} hours" if is_long else f"{minutes} minute{'s' * (minutes > 1)}"
        )
        yield f"* time: {time}"
    found = summary.get("environment", {})
    if name := found.get("device"):
        many = f", processes: {found['processes']}" if found["processes"] > 1 else ""
        yield f"* hardware: {found['devices']} x {name}{many}"
    for key, what in (("lightrft_commit", "commit of LightRFT"), ("code_commit", "commit of code")):
        if commit := found.get(key):
            yield f"* {what}: {commit}"


def _results(run: Path) -> Iterator[str]:
    """Yield a table of the first and the last evaluation, with the intervals of the last."""
    found = [row for row in read_rows(run / "metrics.jsonl") if any(map(_is_eval, row))]
    if not found:
        return
    last = found[-1]
    shown = found[:: len(found) - 1] if len(found) > 1 else found
    titles = " | ".join(f"step {row['step']}" for row in shown)
    yield from ("## Results", "", "Of the eval set:", "")
    yield f"| metric | {titles} | 95 % interval |"
    yield "|---" * (len(shown) + 2) + "|"
    for name in filter(_is_eval, last):
        if not name.endswith(("_low", "_high", "_stderr")):
            values = " | ".join(f"{row.get(name, math.nan):.4g}" for row in shown)
            low, high = last.get(f"{name}_low"), last.get(f"{name}_high")
            interval = "" if low is None or high is None else f"{low:.4g} to {high:.4g}"
            yield f"| `{name}` | {values} | {interval} |"
    yield ""


def _is_eval(name: str) -> bool:
    return name.startswith("eval/")


def _changed(summary: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    for name, value in dotted(summary.get("changed", {})):
        if not name.startswith(OF_THIS_MACHINE):
            yield name, value


def _shared(value: object) -> object:
    """Return ``value`` with absolute paths cut to their last part, also inside of texts."""
    if isinstance(value, dict):
        return {key: _shared(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_shared(one) for one in value]
    if not isinstance(value, str):
        return value
    return PurePath(value).name if PurePath(value).is_absolute() else FOLDERS.sub("", value)
