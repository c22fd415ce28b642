"""Training in one process, on one device.

It has float32 master weights, global-norm clipping, and a portable checkpoint by parameter name.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lightrft.config.strategy import OptimizerConfig, StrategyConfig
from lightrft.distributed.process_group import SINGLE_PROCESS, ProcessGroup, run_on_all_ranks
from lightrft.strategy.activation_offload import keep_on_host
from lightrft.strategy.base import StepInfo, TrainableModule, TrainState, lr_factor, on_host
from lightrft.utils.cpu import bound_products, keep_freed_memory
from lightrft.utils.errors import CheckpointError, ConfigError, first_line

MOMENTS = ("exp_avg", "exp_avg_sq", "step")
HOST = torch.device("cpu")
WEIGHTS = "weights/"
"""Prefix of a parameter's name in ``STATE_FILE``."""
PIECE_BYTES = 64 * 2**20
"""Bytes of masters whose gradients are converted together: few kernels, little memory."""
STATE_FILE, ABOUT_FILE = "state.safetensors", "state.json"


@dataclass(slots=True)
class Masters:
    """Trainable parameters by name, and their float32 masters.

    The optimizer updates the masters. A float32 parameter is its own master.
    """

    parameters: dict[str, nn.Parameter]
    masters: dict[str, Tensor]
    step: int = 0
    total: int = 1

    def halves(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Return the parameters that have a master of their own, each with it."""
        pairs = [(p, self.masters[name]) for name, p in self.parameters.items()]
        return [pair for pair in pairs if pair[0] is not pair[1]]


def _pieces(
    pairs: Sequence[tuple[nn.Parameter, Tensor]],
) -> Iterator[list[tuple[nn.Parameter, Tensor]]]:
    """Split ``pairs`` so that the masters of a piece take ``PIECE_BYTES``, or are one tensor."""
    piece: list[tuple[nn.Parameter, Tensor]] = []
    size = 0
    for pair in pairs:
        if piece and size + pair[1].nbytes > PIECE_BYTES:
            yield piece
            piece, size = [], 0
        piece.append(pair)
        size += pair[1].nbytes
    if piece:
        yield piece


class SingleStrategy:
    """``Strategy`` for one process."""

    ranks: ProcessGroup = SINGLE_PROCESS

    def __init__(self, config: StrategyConfig) -> None:
        self.config = config
        self.device = _device(config.device)
        self.keeps_state_on_host = config.cpu_offload
        """Masters, their gradients and the moments are on the host, apart from the weights."""
        if self.device.type == "cpu":
            bound_products()
            keep_freed_memory()

    @property
    def data_parallel_group(self) -> ProcessGroup:
        return self.ranks

    def loading(self) -> AbstractContextManager[torch.device]:
        return nullcontext(self.device)

    def place(self, model: nn.Module) -> None:
        """Move ``model`` to the device of its calls."""
        model.to(self.device)
        if self.config.offload_activations:
            keep_on_host(model)

    def prepare(self, model: nn.Module, optimizer: OptimizerConfig, total_steps: int) -> TrainState:
        self.place(model)
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        masters: dict[str, Tensor] = {}
        for name, p in parameters.items():
            is_full = p.dtype in (torch.float32, torch.float64)
            # bfloat16 has 8 bits of precision: a step of a learning rate of 1e-6 would be lost.
            masters[name] = p if is_full else p.detach().float()
            if self.keeps_state_on_host:
                masters[name] = self._host_like(masters[name]).copy_(masters[name].detach())
        shapes = shapes_of(model)
        groups: list[dict[str, Any]] = []
        for group in parameter_groups(model, shapes, masters, optimizer):
            groups += [{**group, "params": part} for part in self.alike(group["params"])]
        adamw = torch.optim.AdamW(
            groups, lr=optimizer.lr, betas=optimizer.betas, eps=optimizer.eps, fused=True
        )
        inner = Masters(parameters, masters, 0, total_steps)
        set_lr(adamw, optimizer, inner.step, inner.total)
        return TrainState(model, adamw, optimizer, inner, shapes)

    def backward(self, state: TrainState, loss: Tensor, *, last: bool) -> None:
        if self.keeps_state_on_host:
            self._collect_on_host(state, loss)
            return
        loss.backward()
        inner: Masters = state.inner
        halves = [(p, m) for p, m in inner.halves() if p.grad is not None]
        for pairs in _pieces(halves):
            # Micro-batches add up in float32: a sum of half-precision gradients would lose the
            # small ones.
            grads = [torch.empty_like(master) for _, master in pairs]
            self._copy(grads, [p.grad for p, _ in pairs if p.grad is not None])
            sums = [(m.grad, grad) for (_, m), grad in zip(pairs, grads) if m.grad is not None]
            if sums:
                torch._foreach_add_(*([self.local(x) for x in column] for column in zip(*sums)))
            for (parameter, master), grad in zip(pairs, grads):
                master.grad = grad if master.grad is None else master.grad
                parameter.grad = None

    def _collect_on_host(self, state: TrainState, loss: Tensor) -> None:
        """Add the gradients of ``loss`` to those of the masters on the host.

        Each gradient leaves the device once it is complete, during the backward pass. The
        host waits once, for the last one.

        Args:
            state: The state of the trained model.
            loss: The loss of a micro-batch.
        """
        inner: Masters = state.inner
        arrived: dict[str, Tensor] = {}

        def send(name: str, parameter: Tensor) -> None:
            assert parameter.grad is not None
            arrived[name] = self._host_like(inner.masters[name])
            arrived[name].copy_(parameter.grad, non_blocking=True)
            parameter.grad = None

        hooks = [
            parameter.register_post_accumulate_grad_hook(partial(send, name))
            for name, parameter in inner.parameters.items()
        ]
        try:
            loss.backward()
        finally:
            for hook in hooks:
                hook.remove()
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        for name, grad in arrived.items():
            master = inner.masters[name]
            master.grad = grad if master.grad is None else master.grad.add_(grad)

    def _host_like(self, tensor: Tensor) -> Tensor:
        """Return memory of the host for ``tensor``, pinned if a device copies to it."""
        pinned = self.device.type != "cpu"
        return torch.empty_like(tensor, device=HOST, pin_memory=pinned, requires_grad=False)

    def step(self, state: TrainState) -> StepInfo:
        inner: Masters = state.inner
        masters = list(inner.masters.values())
        limit = state.config.max_grad_norm
        parts = self.alike([m.grad for m in masters if m.grad is not None])
        norms = [self.gather(torch.nn.utils.get_total_norm(part)) for part in parts]
        # Of one part, not the norm of its norm, which may differ in the last bit.
        norm = norms[0] if len(norms) == 1 else torch.stack(norms).norm()
        lr = state.config.lr * lr_factor(inner.step, inner.total, state.config)
        info = StepInfo(float(norm), lr)
        # The norm is global, so every rank skips the same steps.
        if not math.isfinite(info.grad_norm):
            info.skipped = "gradient not finite"
        else:
            if limit is not None:
                for part in self.alike(masters):
                    torch.nn.utils.clip_grads_with_norm_(part, limit, norm)
            state.optimizer.step()
            self._write_back(inner)
            inner.step += 1
            set_lr(state.optimizer, state.config, inner.step, inner.total)
        state.optimizer.zero_grad(set_to_none=True)
        return info

    def advance(self, state: TrainState, steps: int) -> None:
        state.inner.step += steps
        set_lr(state.optimizer, state.config, state.inner.step, state.inner.total)

    @contextmanager
    def offloaded(
        self, states: Iterable[TrainState], frozen: Iterable[nn.Module]
    ) -> Generator[None]:
        # With ``cpu_offload``, the state is on the host all the time; with FSDP2, weights are too.
        is_away = self.config.cpu_offload and not self.keeps_state_on_host
        if not self.config.offload_during_generation or is_away:
            yield
            return
        states, frozen = [] if self.keeps_state_on_host else list(states), list(frozen)
        self._bring(states, frozen, HOST)
        try:
            yield
        finally:
            self._bring(states, frozen, self.device)

    @staticmethod
    def _bring(
        states: Iterable[TrainState], frozen: Iterable[nn.Module], device: torch.device
    ) -> None:
        """Move optimizer state and models to ``device``."""
        for state in states:
            inner: Masters = state.inner
            for name, master in inner.masters.items():
                # The engine may generate with the parameters, so they stay.
                if master is not inner.parameters[name]:
                    other = moved(master, device)
                    if other is not master:
                        # Setting the data of a DTensor would not move its shard.
                        torch.utils.swap_tensors(master, other)
                held = state.optimizer.state.get(master, {})
                # Not the step count, which is a single number.
                for key in MOMENTS[:2]:
                    if key in held:
                        held[key] = moved(held[key], device)
        for model in frozen:
            model.to(device)

    def gathered(self, model: nn.Module) -> AbstractContextManager[None]:
        return nullcontext()

    def local_parameters(self, module: nn.Module) -> AbstractContextManager[Mapping[str, Tensor]]:
        return nullcontext(dict(module.named_parameters()))

    def shards(self, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's part of every parameter of ``module``, by name, without gathering."""
        yield from module.named_parameters()

    def alike(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        """Split ``tensors`` into groups, each of which one call can process."""
        return [list(tensors)]

    def gather(self, tensor: Tensor) -> Tensor:
        return tensor

    def local(self, tensor: Tensor) -> Tensor:
        """Return this rank's part of ``tensor``, in the same memory."""
        return tensor

    def shard_like(self, whole: Tensor, tensor: Tensor) -> Tensor:
        return whole.to(tensor.device)

    def full_parameters(self, state: TrainState) -> Iterator[tuple[str, Tensor]]:
        yield from state.model.named_parameters()

    def save(self, state: TrainState, path: Path) -> None:
        inner: Masters = state.inner
        tensors = {f"weights/{n}": m.detach() for n, m in inner.masters.items()}
        for name, master in inner.masters.items():
            moments = state.optimizer.state.get(master, {})
            tensors |= {f"{key}/{name}": moments[key] for key in MOMENTS if key in moments}
        write_state(self.ranks, path, on_host(self, tensors.items()), inner.step, inner.total)

    def load(self, state: TrainState, path: Path) -> None:
        inner: Masters = state.inner
        tensors, inner.step = read_state(path, {name: state.shapes[name] for name in inner.masters})
        with torch.no_grad():
            for name, master in inner.masters.items():
                master.copy_(self.shard_like(tensors[f"weights/{name}"], master))
                # A parameter that never had a gradient has no moments.
                if f"exp_avg/{name}" not in tensors:
                    continue
                held = {
                    key: self.shard_like(tensors[f"{key}/{name}"], master) for key in MOMENTS[:2]
                }
                # AdamW with ``fused`` expects the step count on the GPU.
                on = master.device if master.is_cuda else HOST
                held["step"] = tensors[f"step/{name}"].to(on)
                state.optimizer.state[master] = held
        self._write_back(inner)
        set_lr(state.optimizer, state.config, inner.step, inner.total)

    def _write_back(self, inner: Masters) -> None:
        if self.keeps_state_on_host:
            with torch.no_grad():
                # The next call on the device comes after these copies, so nothing waits for them.
                for parameter, master in inner.halves():
                    parameter.copy_(master, non_blocking=True)
            return
        for pairs in _pieces(inner.halves()):
            parameters, masters = zip(*pairs)
            self._copy(parameters, masters)

    @torch.no_grad()
    def _copy(self, to: Sequence[Tensor], of: Sequence[Tensor]) -> None:
        """Copy tensors into others of the same shapes, in few kernels on a GPU."""
        torch._foreach_copy_([self.local(x) for x in to], [self.local(x) for x in of])


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return ``tensor`` on ``device``; of a DTensor, move the shard.

    A DTensor rebuilt from its shard would move to its mesh's device instead.
    """
    return tensor.to(device)


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter, by name."""
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def set_lr(adamw: torch.optim.Optimizer, config: OptimizerConfig, step: int, total: int) -> None:
    """Set the learning rate of each group after ``step`` of ``total`` steps.

    Args:
        adamw: Its groups have their base rate in ``rate``.
        config: Schedule and warm-up.
        step: Optimizer steps taken.
        total: Optimizer steps of the run.
    """
    for group in adamw.param_groups:
        group["lr"] = group["rate"] * lr_factor(step, total, config)


def change_lr(state: TrainState, lr: float) -> None:
    """Replace the learning rate of a model from its next step on. The schedule continues."""
    state.config = state.config.model_copy(update={"lr": lr})
    for group in state.optimizer.param_groups:
        group["rate"] = lr
    set_lr(state.optimizer, state.config, state.inner.step, state.inner.total)


def parameter_groups(
    model: nn.Module,
    shapes: Mapping[str, tuple[int, ...]],
    masters: Mapping[str, Tensor],
    config: OptimizerConfig,
) -> list[dict[str, Any]]:
    """Build AdamW's groups: one set per learning rate, with weight decay for matrices only.

    Args:
        model: Assigns parameters to parts.
        shapes: Full shapes by name. Parameters of at least two dimensions are decayed.
        masters: The tensors that AdamW updates, by name.
        config: Learning rates and weight decay.

    Raises:
        ConfigError: No parameter is trained, or a learning rate names a part that the model lacks
            or does not train.
    """
    rates = rates_of(model, masters, config)
    decays = {True: config.weight_decay, False: 0.0}
    # The order of the groups must be the same in every run: a dictionary keeps it, a set does not.
    keys = itertools.product(dict.fromkeys(rates.values()), decays)
    found: dict[tuple[float, bool], list[Tensor]] = {key: [] for key in keys}
    for name, master in masters.items():
        # By full shapes: in ZeRO stage 3, every parameter has the shape [0].
        is_matrix = len(shapes[name]) >= 2
        found[rates[name], is_matrix].append(master)
    groups: list[dict[str, Any]] = []
    for (rate, is_matrix), params in found.items():
        if params:
            groups.append({"params": params, "weight_decay": decays[is_matrix], "rate": rate})
    return groups


def write_state(
    ranks: ProcessGroup, path: Path, tensors: Mapping[str, Tensor], step: int, total: int
) -> None:
    """Write full tensors to the folder ``path``, on rank 0. Every rank must call it.

    Args:
        ranks: All ranks of the run.
        path: The folder.
        tensors: Tensors by ``<weights | exp_avg | ..>/<name>``.
        step: Optimizer steps taken.
        total: Optimizer steps of the run.
    """

    def write() -> None:
        if ranks.rank == 0:
            path.mkdir(parents=True, exist_ok=True)
            save_file(dict(tensors), path / STATE_FILE)
            (path / ABOUT_FILE).write_text(json.dumps({"step": step, "total": total}))

    run_on_all_ranks(ranks, write)


def read_state(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> tuple[dict[str, Tensor], int]:
    """Return the tensors that ``write_state`` wrote, and the step.

    Raises ``CheckpointError`` unless ``shapes`` match.
    """
    try:
        tensors = load_file(path / STATE_FILE)
        about = json.loads((path / ABOUT_FILE).read_text())
    except Exception as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}); resume from an older step, or set "
            "run.overwrite=true to start over"
        ) from error
    weights = [name for name in tensors if name.startswith(WEIGHTS)]
    there = {name.removeprefix(WEIGHTS): tuple(tensors[name].shape) for name in weights}
    check_shapes(path, shapes, there)
    return tensors, about["step"]


def load_weights(model: nn.Module, path: Path) -> None:
    """Copy the trained weights of a checkpoint into ``model``.

    ``write_state`` wrote them to ``path``. The optimizer state is not read. Raises
    ``CheckpointError`` unless the file has exactly the trained parameters of ``model``.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    expected = {name: tuple(p.shape) for name, p in trained.items()}
    try:
        with safe_open(path / STATE_FILE, "pt") as file:
            names = [key.removeprefix(WEIGHTS) for key in file.keys() if key.startswith(WEIGHTS)]  # noqa: SIM118 not a mapping
            # From the header, before any tensor is read and any weight is changed.
            there = {name: tuple(file.get_slice(WEIGHTS + name).get_shape()) for name in names}
            check_shapes(path, expected, there)
            with torch.no_grad():
                for name, parameter in trained.items():
                    parameter.copy_(file.get_tensor(WEIGHTS + name))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}); take another checkpoint"
        ) from error


def check_shapes(
    path: Path, shapes: Mapping[str, tuple[int, ...]], there: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise ``CheckpointError`` unless the shapes of a checkpoint match by name.

    Args:
        path: The checkpoint, for the message.
        shapes: Expected shapes by name.
        there: Shapes of the checkpoint by name.
    """
    if shapes != there:
        odd = sorted(set(shapes.items()) ^ set(there.items()))[:3]
        raise CheckpointError(
            f"{path} holds another model's weights (first differences: {odd}); "
            "set model.path and model.lora to those of the run that wrote it"
        )


def rates_of(model: nn.Module, names: Iterable[str], config: OptimizerConfig) -> dict[str, float]:
    """Return the learning rate of each parameter before the schedule.

    Args:
        model: Assigns parameters to parts.
        names: Trained parameters.
        config: Learning rates.

    Raises:
        ConfigError: No parameter is trained, or a learning rate names a part that the model lacks
            or does not train.
        ModelError: A trained parameter changes a weight that ``model.freeze`` selects.
    """
    names = list(names)
    if not names:
        raise ConfigError(
            "nothing of the model is trained: model.freeze leaves no parameter; leave a part of "
            "the model out of it"
        )
    if isinstance(model, TrainableModule):
        model.check_trained(names)
    if not config.lr_of:
        return dict.fromkeys(names, config.lr)
    if not isinstance(model, TrainableModule):
        raise ConfigError(
            f"optimizer.lr_of = {config.lr_of}: this model does not say which parts it has; "
            "leave it out"
        )
    part_of = {name: model.part_of(name) for name in names}
    for part, rate in config.lr_of.items():
        if part not in model.parts:
            raise ConfigError(
                f"optimizer.lr_of.{part} = {rate}: the model has no such part; it has "
                f"{', '.join(model.parts)}"
            )
        if part not in part_of.values():
            raise ConfigError(
                f"optimizer.lr_of.{part} = {rate} changes nothing: nothing of that part is "
                "trained (model.freeze, model.lora)"
            )
    return {name: config.lr_of.get(part, config.lr) for name, part in part_of.items()}


def _device(name: str) -> torch.device:
    """Return the device ``name``, or for ``auto`` an accelerator if there is one.

    Raises ``ConfigError`` if it does not exist.
    """
    if name == "auto":
        return torch.accelerator.current_accelerator(check_available=True) or HOST
    try:
        return torch.empty(0, device=name).device
    # torch raises AssertionError for a device that it was not built for.
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"device = {name!r} cannot be used ({first_line(error)}); set strategy.device, or "
            "device of a server, to auto, cpu or one that is there"
        ) from None
