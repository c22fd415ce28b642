"""One base model with an adapter for each training client: training, sampling and checkpoints.

One thread calls it.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lightrft.algorithms.policy_losses import POLICY_LOSSES
from lightrft.algorithms.token_ops import TokenRows
from lightrft.config.algorithm import LossConfig
from lightrft.config.strategy import SamplingConfig
from lightrft.engines.native import NativeEngine
from lightrft.learner.micro_batches import micro_batches
from lightrft.models.actor import Actor
from lightrft.models.lora import adapted_modules
from lightrft.serving.chat.text_generator import echoed
from lightrft.serving.chat.token_logprobs import TokenLogprobs, likely_tokens
from lightrft.serving.tinker.training_data import Datum
from lightrft.types import Batch, Request, Rollout, Segments
from lightrft.utils.atomic_files import whole_folder, write_json
from lightrft.utils.errors import CheckpointError, ConfigError, ModelError, UserError
from lightrft.utils.seeding import seeded_weights
from lightrft.utils.state_io import load_state, save_state
from lightrft.utils.yaml_text import parse_json

SAMPLER = "sampler"
"""Name of the adapter that samples."""
WEIGHTS, OPTIMIZER, ABOUT = "adapter_model.safetensors", "optimizer", "tinker.json"
"""Files of a checkpoint. With its ``adapter_config.json``, it is a folder of PEFT."""
PREFIX = "base_model.model."
"""Prefix of the names in a file of PEFT."""


@dataclass(frozen=True, slots=True)
class AdapterShape:
    """The size and the places of an adapter.

    Attributes:
        rank: Its rank.
        alpha: Its product counts ``alpha / rank`` times.
        train_attn: Layers of attention have one.
        train_mlp: All other linear layers but the head have one.
        train_unembed: The output head has one.
    """

    rank: int
    alpha: float
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """A copy of the weights of an adapter on the CPU, by name."""

    shape: AdapterShape
    tensors: Mapping[str, Tensor]


@dataclass(slots=True, eq=False)
class Trained:
    """The adapter of a training client.

    Attributes:
        name: Its name in the model.
        shape: Its size and places.
        optimizer: Its optimizer.
        failed: The reason why gradients were dropped since the last step; empty if none were.
    """

    name: str
    shape: AdapterShape
    optimizer: torch.optim.AdamW
    failed: str = ""
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class SamplingJob:
    """Responses that a request asks for.

    Attributes:
        requests: A request for each response, of one prompt. ``Request.sample`` is its index.
        prompt_likely: Number of likely tokens at each place of the prompt. ``None`` for no
            log-probs of the prompt.
        likely: Number of likely tokens at each place of a response.
    """

    requests: Sequence[Request]
    prompt_likely: int | None = None
    likely: int = 0


@dataclass(frozen=True, slots=True)
class Sampled:
    """The responses to ``SamplingJob``, and what it asks about their tokens.

    Attributes:
        rollouts: The responses.
        prompt: Log-probs of the prompt after its first token, and of tokens after it. ``None`` for
            none.
        likely: The likely tokens of each response. ``None`` for none.
    """

    rollouts: list[Rollout]
    prompt: TokenLogprobs | None
    likely: list[TokenLogprobs] | None


class Adapters:
    """The model and its adapters.

    Args:
        actor: The base model, without adapters.
        engine: Samples from the same weights.
        base: Path and digest of the base model, for checkpoints.
        budget: Largest number of tokens of a forward pass.
    """

    def __init__(
        self, actor: Actor, engine: NativeEngine, base: tuple[str, str], budget: int
    ) -> None:
        self.actor = actor.requires_grad_(False).eval()
        self.engine = engine
        self.base = base
        self.budget = budget
        embeddings: Any = actor.base.get_input_embeddings()
        self.vocabulary: int = embeddings.num_embeddings
        linear = adapted_modules(actor.base)
        attention = [
            n for n in linear if any("attn" in p or "attention" in p for p in n.split("."))
        ]
        head = actor.base.get_output_embeddings()
        self._places = {
            "train_attn": attention,
            "train_mlp": [name for name in linear if name not in set(attention)],
            "train_unembed": [n for n, module in actor.base.named_modules() if module is head],
        }
        self._stacked = next(
            (n for n, p in actor.base.named_parameters() if ".experts." in n and p.ndim == 3), ""
        )
        self._count = 0
        self._sampler: Snapshot | None = None

    def add(self, shape: AdapterShape, seed: int | None) -> Trained:
        """Add an adapter whose product is 0.

        Args:
            shape: Its size and places.
            seed: Seed of its weights. ``None`` for random ones.
        """
        if shape.train_mlp and self._stacked:
            raise UserError(
                f"train_mlp = true: the experts of this model are stacked ({self._stacked}) and "
                "get no adapters here; create the client with train_mlp=False"
            )
        self._count += 1
        name = f"client{self._count}"
        found = self._inject(name, shape, secrets.randbits(63) if seed is None else seed)
        self.actor.check_trained(f"model.{n}" for n in found)
        return Trained(name, shape, _adam(found), parameters=found)

    def remove(self, trained: Trained) -> None:
        """Free the memory of an adapter."""
        self._delete(trained.name)

    def forward(
        self, trained: Trained, data: Sequence[Datum], loss: LossConfig, *, backward: bool
    ) -> tuple[list[np.ndarray], float]:
        """Return the log-probs of the targets of each datum, and the sum of the loss.

        Args:
            trained: The adapter.
            data: The sequences.
            loss: The policy loss of a token.
            backward: Add the gradient of the sum to that of earlier calls.
        """
        found: list[np.ndarray] = [np.zeros(0)] * len(data)
        total = 0.0
        batch = Batch(
            Segments.of([datum.tokens[:1] for datum in data]),
            # The states before the last token are read, so the last one is never computed.
            Segments.of([[*datum.tokens[1:], 0] for datum in data]),
            torch.arange(len(data)),
        )
        self.actor.train(backward)
        try:
            with self._using(trained.name), torch.set_grad_enabled(backward):
                for index in micro_batches(batch, self.budget, self.actor.layout):
                    states, _ = self.actor.hidden(batch.select(index))
                    part = [data[k] for k in index.tolist()]
                    value, logprobs = self._loss(states, part, loss)
                    if backward:
                        value.backward()
                    total += float(value.detach())
                    for k, own in zip(index.tolist(), logprobs, strict=True):
                        found[k] = own.reshape(data[k].targets.shape)
        except BaseException as error:
            if backward:
                self.fail(trained, str(error) or type(error).__name__)
            raise
        finally:
            self.actor.eval()
        return found, total

    def fail(self, trained: Trained, reason: str) -> None:
        """Drop the gradient, a part of which could not be computed, and refuse the next step."""
        trained.optimizer.zero_grad()
        trained.failed = reason

    def _loss(
        self, states: Tensor, data: Sequence[Datum], loss: LossConfig
    ) -> tuple[Tensor, list[np.ndarray]]:
        """Return the sum of the loss, and the log-probs of the targets of each datum.

        Args:
            states: ``[N, H]`` states after each token.
            data: The sequences.
            loss: The policy loss of a token.
        """
        device = states.device
        counts = torch.tensor([len(d.tokens) for d in data])
        each = torch.tensor([d.targets.size // len(d.tokens) for d in data])
        if int(each.max()) > 1:
            of_token = each.repeat_interleave(counts).to(device)
            states = states.repeat_interleave(of_token, dim=0)
        targets, weights = (
            torch.from_numpy(np.concatenate([own.reshape(-1) for own in column])).to(device)
            for column in ([d.targets for d in data], [d.weights for d in data])
        )
        logprobs = self.actor.score_states(states, targets).logprobs
        old = logprobs.detach()
        given = [d.old for d in data if d.old is not None]
        if given:
            old = torch.from_numpy(np.concatenate(given)).to(device)
        lengths = (counts * each).to(device)
        rows = TokenRows(
            torch.arange(len(data), device=device).repeat_interleave(lengths),
            lengths,
            torch.arange(len(data), device=device),
            torch.ones_like(targets, dtype=torch.bool),
        )
        losses, _ = POLICY_LOSSES[loss.name](logprobs, old, weights, rows, loss)
        shown = logprobs.detach().float().cpu().numpy()
        return losses.sum(), np.split(shown, np.cumsum(lengths.cpu().numpy())[:-1])

    def step(self, trained: Trained, settings: Mapping[str, Any], clip: float) -> float:
        """Take a step of AdamW, drop the gradient, and return its norm.

        Args:
            trained: The adapter.
            settings: Settings of a group of AdamW.
            clip: Largest norm of the gradient; 0 for none.

        Raises:
            UserError: There is no gradient, or one that cannot be used.
        """
        failed, trained.failed = trained.failed, ""
        try:
            grads = [p.grad for p in trained.parameters.values() if p.grad is not None]
            if failed:
                raise UserError(
                    "no step: an earlier forward_backward failed, and the gradients since the last "
                    f"step were dropped ({failed}); call forward_backward again"
                )
            if not grads:
                raise UserError("no step: there is no gradient; call forward_backward before it")
            norm = torch.nn.utils.get_total_norm(grads)
            if not math.isfinite(float(norm)):
                raise UserError("no step: the gradient is not finite, and was dropped")
            if clip > 0:
                torch.nn.utils.clip_grads_with_norm_(trained.parameters.values(), clip, norm)
            trained.optimizer.param_groups[0].update(settings)
            trained.optimizer.step()
        finally:
            trained.optimizer.zero_grad()
        return float(norm)

    def snapshot(self, trained: Trained) -> Snapshot:
        """Return the weights of the adapter as they are now."""
        return Snapshot(
            trained.shape,
            {n: p.detach().cpu().clone() for n, p in trained.parameters.items()},
        )

    def save(
        self, trained: Trained, folder: Path, about: Mapping[str, object], *, optimizer: bool
    ) -> None:
        """Write a checkpoint, in place of one that is there.

        Args:
            trained: The adapter.
            folder: Its folder.
            about: What the client tells of it.
            optimizer: Write the state of the optimizer too.

        Raises:
            UserError: A gradient waits for its step, which no file has.
        """
        if optimizer and any(p.grad is not None for p in trained.parameters.values()):
            raise UserError(
                "a gradient waits for its step, and a checkpoint cannot hold it; call optim_step "
                "before save_state"
            )
        path, digest = self.base
        tensors = self.snapshot(trained).tensors
        with whole_folder(folder) as temporary:
            save_file({PREFIX + n: t for n, t in tensors.items()}, temporary / WEIGHTS)
            settings = self._settings(trained.shape)
            settings.base_model_name_or_path = path
            settings.save_pretrained(str(temporary))
            if optimizer:
                save_state(temporary / OPTIMIZER, trained.optimizer.state_dict())
            shape = asdict(trained.shape)
            write_json(temporary / ABOUT, {"base": digest, "shape": shape, **about})

    def read(self, folder: Path) -> Snapshot:
        """Return the weights of a checkpoint.

        Raises:
            CheckpointError: It is missing or damaged, or of another base model.
        """
        about = checkpoint_info(folder)
        if about["base"] != self.base[1]:
            raise CheckpointError(
                f"{folder} is a checkpoint of another base model ({about['base']}), and this server "
                f"has {self.base[1]}; start a server with that model"
            )
        try:
            tensors = load_file(folder / WEIGHTS)
        except Exception as error:
            raise CheckpointError(f"{folder / WEIGHTS} is missing or damaged: {error}") from error
        named = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}
        return Snapshot(AdapterShape(**about["shape"]), named)

    def load(self, trained: Trained, folder: Path, *, optimizer: bool) -> None:
        """Take the weights of a checkpoint, and the state of its optimizer or a new one.

        Args:
            trained: The client's adapters.
            folder: The checkpoint.
            optimizer: Take the state of its optimizer.

        Raises:
            CheckpointError: The checkpoint does not fit, or has no state of an optimizer.
        """
        found = self.read(folder)
        if found.shape != trained.shape:
            raise CheckpointError(
                f"{folder} has adapters of {found.shape}, and the client has {trained.shape}; "
                "create the client from the checkpoint"
            )
        state = load_state(folder / OPTIMIZER) if optimizer else None
        _copy(found.tensors, trained.parameters)
        trained.failed = ""
        trained.optimizer = _adam(trained.parameters)
        trained.optimizer.zero_grad()
        if state is not None:
            trained.optimizer.load_state_dict(state)

    def sample(
        self, snapshot: Snapshot | None, sampling: SamplingConfig, jobs: Sequence[SamplingJob]
    ) -> list[Sampled]:
        """Return the responses of ``jobs``, which are generated together.

        Args:
            snapshot: The adapter to sample from. ``None`` for the base model.
            sampling: Settings of all of them.
            jobs: The requests.
        """
        if snapshot is not None:
            self._load_sampler(snapshot)
        with self._using(*([] if snapshot is None else [SAMPLER])):
            found: dict[int, dict[int, Rollout]] = {}
            requests = [request for job in jobs for request in job.requests]
            for rollout in self.engine.generate(requests, sampling):
                found.setdefault(id(rollout.prompt), {})[rollout.sample] = rollout
            results = []
            for job in jobs:
                prompt = job.requests[0].prompt
                rollouts = [one for _, one in sorted(found[id(prompt)].items())]
                scored = None
                if job.prompt_likely is not None:
                    scored = self._likely([echoed(rollouts[0])], job.prompt_likely)[0]
                likely = self._likely(rollouts, job.likely) if job.likely else None
                results.append(Sampled(rollouts, scored, likely))
        return results

    def _likely(self, rollouts: Sequence[Rollout], count: int) -> list[TokenLogprobs]:
        return likely_tokens(self.actor, self.budget, rollouts, count)

    def _load_sampler(self, snapshot: Snapshot) -> None:
        held = self._sampler
        if held is snapshot:
            return
        self._sampler = None
        if held is not None and held.shape != snapshot.shape:
            self._delete(SAMPLER)
            held = None
        if held is None:
            self._inject(SAMPLER, snapshot.shape, 0)
        _copy(snapshot.tensors, self._named(SAMPLER))
        self._sampler = snapshot

    def _inject(self, name: str, shape: AdapterShape, seed: int) -> dict[str, nn.Parameter]:
        """Add an adapter to the layers, and return its parameters in float32."""
        from peft import inject_adapter_in_model

        try:
            with seeded_weights(seed):
                inject_adapter_in_model(self._settings(shape), self.actor.base, name)
        except ValueError as error:
            raise ModelError(f"peft cannot add {shape} to this model: {error}") from error
        # Else the next one is reported as a mistake.
        vars(self.actor.base).pop("peft_config", None)
        found = self._named(name)
        for parameter in found.values():
            parameter.data = parameter.data.float()
        self._activate()
        return found

    def _settings(self, shape: AdapterShape) -> Any:
        from peft import LoraConfig

        names = [n for key, own in self._places.items() if getattr(shape, key) for n in own]
        if not names:
            raise ConfigError(
                "train_attn, train_mlp and train_unembed select no layer of this model, so nothing "
                "would be trained; set one of them"
            )
        return LoraConfig(
            r=shape.rank,
            lora_alpha=shape.alpha,  # ty: ignore[invalid-argument-type]
            target_modules=names,
            task_type="CAUSAL_LM",
        )

    def _layers(self) -> Collection[Any]:
        from peft.tuners.tuners_utils import BaseTunerLayer

        return [m for m in self.actor.base.modules() if isinstance(m, BaseTunerLayer)]

    def _named(self, name: str) -> dict[str, nn.Parameter]:
        """Return the parameters of an adapter, by names without that of the adapter."""
        part = f".{name}."
        pairs = self.actor.base.named_parameters()
        return {n.replace(part, "."): p for n, p in pairs if part in n and ".lora_" in n}

    def _activate(self, *names: str) -> None:
        """Compute with the adapters ``names`` from now on, and with the base alone without any."""
        for layer in self._layers():
            layer.set_adapter(list(names))

    def _delete(self, name: str) -> None:
        for layer in self._layers():
            layer.delete_adapter(name)

    @contextmanager
    def _using(self, *names: str) -> Generator[None]:
        """Compute with the adapters ``names`` inside the context."""
        self._activate(*names)
        try:
            yield
        finally:
            self._activate()


def checkpoint_info(folder: Path) -> dict[str, Any]:
    """Return what a checkpoint tells of itself. Raises ``CheckpointError`` if there is none."""
    try:
        found = parse_json((folder / ABOUT).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} is no checkpoint of this server: {error}") from error
    return found


def _adam(parameters: Mapping[str, nn.Parameter]) -> torch.optim.AdamW:
    return torch.optim.AdamW([p.requires_grad_() for p in parameters.values()])


@torch.no_grad()
def _copy(tensors: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]) -> None:
    if tensors.keys() != parameters.keys():
        raise CheckpointError("the weights of the checkpoint are not those of this model's layers")
    for name, parameter in parameters.items():
        parameter.copy_(tensors[name])
