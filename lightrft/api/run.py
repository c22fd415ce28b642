"""The results of a run, read from its folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import yaml

from lightrft.api.progress import closing_lines
from lightrft.config.base import build
from lightrft.config.data import DataConfig
from lightrft.config.run import RunConfig
from lightrft.observability.rollout_writer import read_rollouts
from lightrft.observability.trackers import read_rows
from lightrft.utils.errors import DataError, first_line
from lightrft.utils.yaml_text import parse_yaml

if TYPE_CHECKING:
    import pandas


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


class Run:
    """A run that trains, or that has trained: its metrics, responses, model and report.

    Everything is read from the folder at the time of the call.

    Args:
        path: The run folder, such as ``runs/first``.

    Raises:
        DataError: ``path`` is not a run folder.

    Example::

        run = lightrft.Run("runs/first")
        run.metrics["reward/mean"]
        run.generate("What is 2 + 3?")
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
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
        return str(self.summary.get("verb") or self.metrics["phase"].iloc[-1])

    @property
    def metrics(self) -> pandas.DataFrame:
        """The metrics of each step, one row per step. The index is the step."""
        import pandas

        frame = pandas.DataFrame(read_rows(self.path / "metrics.jsonl"))
        return frame.set_index("step") if "step" in frame else frame

    def rollouts(self, step: int | None = None, kind: str = "step") -> pandas.DataFrame:
        """Return the written responses, one row each: prompt, label, text, reward, its terms ...

        Args:
            step: Their step; None takes all.
            kind: ``step`` for responses to train on, ``eval`` for those to the eval set.

        Raises:
            DataError: No responses were written for that step.
        """
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
            prompts: One prompt, or several.
            settings: Settings of ``lightrft generate`` that differ, such as
                ``sampling={"temperature": 0}``.

        Returns:
            The text of the response, or a list of texts for a list of prompts.
        """
        from lightrft.api.calls import call

        asked = [prompts] if isinstance(prompts, str) else list(prompts)
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
        return found[0] if isinstance(prompts, str) else found

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
