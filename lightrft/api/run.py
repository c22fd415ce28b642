"""The results of a run, read from its folder."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar

import yaml

from lightrft.api.inputs import is_chat
from lightrft.api.progress import closing_lines
from lightrft.config.base import build
from lightrft.config.data import DataConfig
from lightrft.config.run import RunConfig
from lightrft.observability.rollout_writer import read_rollouts
from lightrft.observability.trackers import read_rows
from lightrft.utils.errors import ConfigError, DataError, HintedAttributes, first_line
from lightrft.utils.yaml_text import parse_yaml

if TYPE_CHECKING:
    import pandas


RUNS = Path("runs")


def folder_of(name: str | os.PathLike[str]) -> Path:
    """Return the folder of a run. Raises ``ConfigError`` with the closest name if there is none."""
    name = os.fspath(name)
    for path in (Path(name).expanduser(), RUNS / name):
        if path.is_dir():
            return path
    # The slash matches folders alone. A parent that does not exist has none.
    folders = [*RUNS.glob("*/"), *Path(name).parent.glob("*/")]
    known = list(map(str, folders))
    # A misspelled path first, then a misspelled name of a run.
    near = [
        *difflib.get_close_matches(name, known, n=1),
        *difflib.get_close_matches(str(RUNS / name), known, n=1),
    ]
    hint = f"; did you mean {near[0]}?" if near else ""
    if known and not near:
        hint = f"; there are {', '.join(sorted(known)[:8])}"
    raise ConfigError(f"there is no run folder {name}{hint}")


class Page:
    """An HTML page in a file, which notebooks show.

    Args:
        path: The file.
        height: Height in a notebook, in pixels.
    """

    def __init__(self, path: Path, height: int) -> None:
        self.path = path
        self.height = height

    def __repr__(self) -> str:
        return str(self.path)

    def _repr_html_(self) -> str:
        """Return the page as an element of a notebook's page."""
        return frame(self.path.read_text(encoding="utf-8"), self.height)


def frame(page: str, height: int) -> str:
    """Return an HTML page as an element of a notebook's page.

    Args:
        page: The text of the page.
        height: Height in pixels.
    """
    style = f"width:100%;height:{height}px;border:0"
    return f'<iframe srcdoc="{escape(page, quote=True)}" style="{style}"></iframe>'


class Run(HintedAttributes):
    """A run that trains, or that has trained: its metrics, responses, model and report.

    Everything is read from the folder at the time of the call.

    Args:
        path: The run folder, such as ``runs/first``.

    Raises:
        ConfigError: There is no such folder.
        DataError: ``path`` is not a run folder.

    Example::

        run = lightrft.Run("runs/first")
        run.metrics["reward/mean"]
        run.generate("What is 2 + 3?")
    """

    _meant: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("train", "fit"), "the run is trained; resume(steps=...) trains on"),
        **dict.fromkeys(
            ("save_model", "save_pretrained"), "its model is in the folder that 'model' names"
        ),
        **dict.fromkeys(("log_history", "history", "state"), "did you mean 'metrics'?"),
        "evaluate": "call lightrft.eval(model=run, ...)",
        "predict": "did you mean 'generate'?",
    }

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = folder_of(path)
        if not (self.path / "config.yaml").is_file():
            raise DataError(f"{path} is not a run's folder: it has no config.yaml")

    @property
    def config(self) -> dict[str, Any]:
        """The settings of the run, as in ``config.yaml``."""
        return self._read("config.yaml", parse_yaml)

    @property
    def summary(self) -> dict[str, Any]:
        """The content of ``summary.json``; empty until the run ends."""
        is_there = (self.path / "summary.json").is_file()
        return self._read("summary.json", json.loads) if is_there else {}

    def _read(self, name: str, parse: Callable[[str], Any]) -> dict[str, Any]:
        """Return the content of a file of the run. Raises ``DataError`` if it is damaged."""
        file = self.path / name
        try:
            found = parse(file.read_text(encoding="utf-8"))
        except (ValueError, yaml.YAMLError) as error:
            raise DataError(f"{file} is damaged ({first_line(error)})") from None
        if not isinstance(found, dict):
            raise DataError(f"{file} is damaged: it has no keys and values")
        return found

    @property
    def verb(self) -> str:
        """The verb of the run, such as ``sft`` or ``grm sft``."""
        if found := self.summary.get("verb"):
            return str(found)
        rows = read_rows(self.path / "metrics.jsonl")
        return str(rows[-1]["phase"]) if rows else self._fitting_verb()

    def _fitting_verb(self) -> str:
        """Return the verb whose settings a run has that took no step."""
        from lightrft.api.verbs import fitting
        from lightrft.config.base import load_settings
        from lightrft.verbs import of_kind

        file = self.path / "config.yaml"
        settings = fitting("auto", lambda cls: load_settings(cls, [file])).settings
        known = of_kind("training").items()
        return next(name for name, row in known if row.settings_class() is type(settings))

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def metrics(self) -> pandas.DataFrame:
        """The metrics of each step, one row per step. The index is the step.

        Raises:
            DataError: No step has ended.
        """
        import pandas

        rows = read_rows(self.path / "metrics.jsonl")
        if not rows:
            raise DataError(f"{self.path} has no metrics: no step has ended; log.txt says why")
        frame = pandas.DataFrame(rows)
        return frame.set_index("step") if "step" in frame else frame

    def rollouts(self, step: int | None = None, kind: str = "step") -> pandas.DataFrame:
        """Return the written responses, one row each: prompt, label, text, reward, its terms ...

        Args:
            step: Their step; None takes all.
            kind: ``step`` for responses to train on, ``eval`` for those to the eval set.

        Raises:
            DataError: No responses were written for that step.
        """
        if kind not in ("step", "eval"):
            raise ConfigError(f"kind = {kind!r}: write 'step' or 'eval'")
        if step is not None and not hasattr(step, "__index__"):
            raise ConfigError(f"step = {step!r} is no number of a step, such as 1")
        name = "*" if step is None else f"{step:06d}"
        files = sorted((self.path / "rollouts").glob(f"{kind}_{name}.jsonl"))
        if not files:
            known = sorted((self.path / "rollouts").glob(f"{kind}_*.jsonl"))
            steps = ", ".join(str(int(file.stem.rpartition("_")[2])) for file in known)
            of_step = "" if step is None else f" of step {step}"
            has = f"it has those of steps {steps}" if steps else "it has written none"
            raise DataError(
                f"{self.path} has no {kind} responses{of_step}; {has} (log.rollouts_every, "
                "eval.every)"
            )
        import pandas

        rows = []
        for file in files:
            at = int(file.stem.rpartition("_")[2])
            for row in read_rollouts(file):
                prompt = row.pop("prompt")
                shown = {name: prompt[name] for name in ("label", "id", "data_source", "columns")}
                rows.append({"step": at, "prompt": prompt["text"], **shown, **row})
        return pandas.DataFrame(rows)

    def report(self) -> Page:
        """Write ``report.html``, and return it. A notebook shows it."""
        from lightrft.rewards.rules.answers import extracted
        from lightrft.viewer.report import write_report

        return Page(write_report(self.path, extracted), 900)

    def plot(self) -> Page:
        """Write the curves of the run as ``curves.html``, and return it. A notebook shows it."""
        from lightrft.viewer.report import write_curves

        return Page(write_curves(self.path), 560)

    @property
    def model(self) -> Path:
        """The folder of the trained model. Rounds of ``iterate`` have one each; it is the last.

        Raises:
            DataError: The run has not finished.
        """
        folder = self.path / "model"
        if "rounds" in self.config and self.summary:
            rounds = sorted(self.path.glob("round_*"))
            folder = next((r / "train" / "model" for r in reversed(rounds)), folder)
        if not folder.is_dir():
            raise DataError(f"{self.path} has no model yet: the run has not finished")
        return folder

    def push_to_hub(
        self, repo: str, *, private: bool | None = None, revision: str | None = None
    ) -> str:
        """Upload the trained model to the Hugging Face Hub, and return its address.

        The model card has the base, data, formulas with their papers, code, hardware, settings and
        results of the run. The account is that of ``hf auth login`` or of ``HF_TOKEN``.

        Args:
            repo: Name of the repository, such as ``me/model``. It is made if there is none.
            private: Who sees a new repository; None takes the account's default.
            revision: Branch to commit to, which exists; None takes the main one.

        Raises:
            ConfigError: The hub refuses the upload, or cannot be reached.
            DataError: The run has not finished.
        """
        from lightrft.trainer.model_card import Hub, message_of, model_card

        card = model_card(self.path, self.model, {"verb": self.verb, **self.summary})
        hub = Hub(repo, private=private, asked=f"push_to_hub({repo!r})")
        hub.push(self.model, card, message_of(self.summary), revision)
        return hub.address

    def generate(self, prompts: str | Sequence[str], **settings: Any) -> Any:
        """Return a response of the trained model to each prompt.

        Prompts are written, and responses sampled, as in the run.

        Args:
            prompts: One prompt, a text or a list of messages, or several.
            settings: Settings of ``lightrft generate`` that differ, such as
                ``sampling={"temperature": 0}``.

        Returns:
            The text of the response, or a list of texts for a list of prompts.
        """
        from lightrft.api.calls import call

        is_one = isinstance(prompts, str) or is_chat(prompts)
        asked = [prompts] if is_one else list(prompts)
        for one in [prompts] if isinstance(prompts, Mapping) else asked:
            if not isinstance(one, str) and not is_chat(one):
                raise ConfigError(
                    f"a prompt is a text or a list of messages, and not of type {type(one).__name__}"
                )
        if not asked:
            return []
        own = self.config
        data = {key: value for key, value in own["data"].items() if key in DataConfig.model_fields}
        unread = ("columns", "judgement", "shuffle", "bad_rows")
        data = {key: value for key, value in data.items() if key not in unread}
        kept = {key: own[key] for key in ("sampling", "engine", "strategy") if key in own}
        with TemporaryDirectory() as scratch:
            rows = [{"prompt": prompt} for prompt in asked]
            own_run = {"dir": scratch, "threads": own["run"]["threads"], "progress": False}
            output = Path(scratch) / "answers.jsonl"
            base = {**kept, "data": {**data, "sources": rows, "overlong_prompts": "error"}}
            base |= {"model": {"path": str(self.model)}, "output": str(output), "run": own_run}
            call("generate", base, **settings)
            found = [str(row["response"]) for row in json_lines(output)]
        return found[0] if is_one else found

    def resume(self, **settings: Any) -> Run:
        """Go on from the newest checkpoint of the run, and return the run.

        Args:
            settings: Settings that may differ when a run resumes, such as ``steps``, and callbacks
                such as ``on_step``.
        """
        from lightrft.api.calls import call

        resumed = {"run.resume": "auto", "run.overwrite": False}
        return call(self.verb.replace(" ", "-"), self.config, resumed, **settings)

    def __repr__(self) -> str:
        run = build(RunConfig, self.config["run"])
        if not self.summary:
            return f"{self.path}: no summary yet"
        lines = closing_lines(run, self.summary)
        return "\n".join(line for line in lines if not line.startswith("  "))  # no commands


def json_lines(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of JSON lines."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
