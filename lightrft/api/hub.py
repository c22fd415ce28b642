"""Share a trained model on the Hugging Face Hub, with a model card that is made from its run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from lightrft import __version__
from lightrft.config.base import dotted
from lightrft.config.preference.presets import PREFERENCE_PAPERS
from lightrft.config.presets import PAPERS
from lightrft.utils.errors import ConfigError, first_line
from lightrft.utils.yaml_text import inline_yaml

if TYPE_CHECKING:
    from lightrft.api.run import Run

CARD = "README.md"
"""Name of a model card."""
OF_THIS_MACHINE = ("run", "log", "launch", "checkpoint", "strategy.device")
"""Settings that say nothing of the model, or name folders of the machine."""


def push(run: Run, repo: str, *, private: bool | None, revision: str | None) -> str:
    """Upload the model of ``run`` with its card, in one commit, and return its address.

    Args:
        run: A finished run.
        repo: Name of the repository, ``me/model``. It is made if there is none.
        private: Who sees a new repository. ``None`` takes the account's default.
        revision: Branch to commit to, which exists. ``None`` takes the main one.

    Raises:
        ConfigError: The hub refuses the upload, or cannot be reached.
        DataError: The run has not finished.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    folder = run.model
    files = [p for p in sorted(folder.rglob("*")) if p.is_file() and p.name != CARD]
    operations = [CommitOperationAdd(p.relative_to(folder).as_posix(), p) for p in files]
    operations.append(CommitOperationAdd(CARD, model_card(run).encode()))
    api = HfApi(library_name="lightrft", library_version=__version__)
    try:
        made = api.create_repo(repo, private=private, exist_ok=True)
        name = f"Model of step {run.summary.get('model_step', run.summary.get('steps'))}"
        api.create_commit(made.repo_id, operations, commit_message=name, revision=revision)
    except Exception as error:  # each version of the client has other classes
        raise ConfigError(
            f"push_to_hub({repo!r}): {first_line(error)}; the account is that of `hf auth login` "
            "or HF_TOKEN, and needs the right to write there"
        ) from error
    return str(made)


def model_card(run: Run) -> str:
    """Return the model card of ``run``: base, method, data, settings and measured results.

    Folders of the machine are left out, and paths are cut to their last part.
    """
    config, summary, verb = run.config, run.summary, run.verb
    base = str(config["model"]["path"])
    on_hub = "/" in base and not Path(base).expanduser().exists()
    own = run.model / CARD  # of adapters, and says how they are used
    adapters = own.read_text(encoding="utf-8").partition("\n---\n") if own.is_file() else None
    head = adapters[0].splitlines()[1:] if adapters else _fields(base, verb, on_hub=on_hub)
    shown = base if on_hub else PurePath(base).name
    lines = ["---", *head, "---", "", f"# {config['run']['name']}", ""]
    lines += [f"`{shown}`, trained by `lightrft {verb}` of LightRFT {__version__}.", ""]
    if adapters:
        lines += [f"#{adapters[2].strip()}", ""]  # its title is that of a section here
    lines += ["## Training", "", *_training(summary), "", *_results(run)]
    lines += ["## Settings", "", "Those that differ from the defaults:", "", "```yaml"]
    lines += [f"{name}: {inline_yaml(_shared(value))}" for name, value in _changed(summary)]
    return "\n".join([*lines, "```", ""])


def _fields(base: str, verb: str, *, on_hub: bool) -> list[str]:
    """Return the fields of the card that the hub reads."""
    found = [f"base_model: {base}"] if on_hub else []
    return [*found, "library_name: transformers", "tags:", "- lightrft", f"- {verb}"]


def _training(summary: dict[str, Any]) -> Iterator[str]:
    method = str(summary.get("algorithm") or summary.get("preset") or "")
    if paper := PAPERS.get(method) or PREFERENCE_PAPERS.get(method):
        yield f"* method: `{method}` ({paper})"
    elif method:
        yield f"* method: `{method}`"
    yield f"* steps: {summary.get('steps_trained', summary.get('steps'))}"
    if tokens := summary.get("tokens_trained"):
        yield f"* trained tokens: {tokens:,}"
    if seconds := summary.get("seconds"):
        yield (
            f"* time: {seconds / 3600:.1f} hours"
            if seconds > 3600
            else (f"* time: {math.ceil(seconds / 60)} minutes")
        )


def _results(run: Run) -> Iterator[str]:
    """Yield a table of the first and the last evaluation, with the intervals of the last."""
    metrics = run.metrics
    names = [name for name in metrics if name.startswith("eval/")]
    rows = metrics[names].dropna(how="all") if names else metrics.head(0)
    if rows.empty:
        return
    last = rows.iloc[-1].dropna()
    steps = [0, -1] if len(rows) > 1 else [-1]
    titles = [f"step {rows.index[k]}" for k in steps]
    yield from ("## Results", "", "Of the eval set:", "")
    yield f"| metric | {' | '.join(titles)} | 95 % interval |"
    yield "|---" * (len(steps) + 2) + "|"
    for name in last.index:
        if not str(name).endswith(("_low", "_high", "_stderr")):
            values = " | ".join(f"{rows.iloc[k][name]:.4g}" for k in steps)
            low, high = last.get(f"{name}_low"), last.get(f"{name}_high")
            interval = "" if low is None or high is None else f"{low:.4g} to {high:.4g}"
            yield f"| `{name}` | {values} | {interval} |"
    yield ""


def _changed(summary: dict[str, Any]) -> Iterator[tuple[str, object]]:
    for name, value in dotted(summary.get("changed", {})):
        if not name.startswith(OF_THIS_MACHINE):
            yield name, value


def _shared(value: object) -> object:
    """Return ``value`` with absolute paths cut to their last part."""
    if isinstance(value, dict):
        return {key: _shared(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_shared(one) for one in value]
    is_path = isinstance(value, str) and PurePath(value).is_absolute()
    return PurePath(str(value)).name if is_path else value
