"""Check a run before it starts: memory of its models, settings, data and rewards."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch

from lightrft.config.launch import LaunchConfig
from lightrft.config.verbs import DoctorConfig, RLConfig, SFTConfig
from lightrft.datasets.chat_encoder import ChatEncoder, check_template
from lightrft.datasets.prompt_dataset import PromptDataset
from lightrft.datasets.row_warnings import MOST_UNKNOWN, TOKENS, UNKNOWN
from lightrft.datasets.sft_dataset import SFTDataset
from lightrft.diagnostics import speed_probe
from lightrft.diagnostics.memory.estimate import ROLES, MemoryEstimate, estimate_memory, workers
from lightrft.diagnostics.memory.formulas import shown, size_of
from lightrft.diagnostics.memory.phases import Device, Lengths
from lightrft.diagnostics.memory.sharding import shares_of
from lightrft.distributed.placement import plan_placement
from lightrft.models.attention import varlen_cuda
from lightrft.models.families import context_length
from lightrft.models.loading.from_pretrained import model_settings
from lightrft.models.loading.meta_device import dtype_of
from lightrft.models.processors import load_processor
from lightrft.rewards.scorer import Scorer
from lightrft.rewards.startup_check import answer_of, answered
from lightrft.strategy.single import SingleStrategy
from lightrft.trainer.check_config import check
from lightrft.trainer.context_limits import check_bound
from lightrft.types import Rollout
from lightrft.utils.errors import ConfigError, UserError
from lightrft.workers.local import local_tokenizer

Verdict = Literal["ok", "warn", "bad"]
SHARDED = ("fsdp2", "deepspeed")
ROOM = 0.85
"""The fraction of device memory that a prediction may use, given its error of up to 15 %."""
MANY_OVERLONG = 0.05
ALLOCATOR = "MALLOC_MMAP_THRESHOLD_"
KEPT = 2.5
"""The largest measured ratio of resident memory to memory in use (docs/verbs/doctor.md)."""
WAYS = {
    "drawing": "lower engine.token_budget or engine.max_rows",
    "loading": "load fewer models: algorithm.kl, critic, teacher",
    "models": "set model.lora or model.load_in_4bit, take a smaller model, or spread it over more processes (launch.processes)",
    "passes": "lower train.micro_batch_tokens, set model.gradient_checkpointing=true or model.lora, or raise launch.processes",
}
"""Advice to reduce the memory of a phase. ``models`` applies if the models alone are too large."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report: ``about`` names the subject, ``says`` the result and a remedy if
    needed.
    """

    section: str
    verdict: Verdict
    about: str
    says: str


@dataclass(frozen=True, slots=True)
class Report:
    """The result of ``lightrft doctor``."""

    findings: tuple[Finding, ...]
    memory: MemoryEstimate | None = None
    workers: Mapping[str, MemoryEstimate] = field(default_factory=dict)

    @property
    def bad(self) -> int:
        """The number of bad findings."""
        return sum(f.verdict == "bad" for f in self.findings)


def run_doctor(config: RLConfig | SFTConfig, options: DoctorConfig) -> Report:
    """Run all checks. A failed check becomes a finding and does not stop the others."""
    found: list[Finding] = []
    device = device_of(config, options)
    found += _settings(config, device)
    found += _devices(config, options, device)
    data = _attempt(found, "data", "rows", lambda: _data(config, found))
    lengths = data.lengths if data is not None else _bounds(config)
    found += _batch(config, lengths)
    memory = _attempt(found, "memory", "models", lambda: estimate_memory(config, lengths, device))
    if memory is not None:
        found += _memory(memory, device, config)
    apart = _attempt(found, "memory", "workers", lambda: workers(config, lengths, device)) or {}
    found += _apart(apart, memory, device, config)
    if data is not None and options.rows and _rewarded(config):
        _attempt(found, "reward", "terms", lambda: found.extend(_rewards(config, data, options.rows)))
    if data is not None and options.probe:
        _attempt(found, "time", "probe", lambda: found.extend(_measured(config, data, device, memory)))
    return Report(tuple(found), memory, apart)


def device_of(config: RLConfig | SFTConfig, options: DoctorConfig) -> Device:
    """Return the device of each process, as given or as found on this machine.

    Raises ``ConfigError`` for an invalid memory size.
    """
    processes = config.launch.processes
    own = config.strategy.device if config.strategy.device != "auto" else str(torch.accelerator.current_accelerator() or "cpu")
    kind = options.device if options.device != "auto" else own.partition(":")[0]
    if options.device_memory != "auto":
        try:
            return Device(kind, size_of(options.device_memory), processes, _kernel())
        except ValueError as error:
            raise ConfigError(f"doctor.device_memory = {error}") from None
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and kind == accelerator.type:
        return Device(kind, _free_on_device(), processes, _kernel())
    return Device(kind, _free_memory() // processes if kind == "cpu" else 0, processes, _kernel())


def _kernel() -> bool:
    """Return True if torch has the GPU kernel for sequences of different lengths."""
    return varlen_cuda.kernel() is not None


def _free_on_device() -> int:
    """Return the free bytes of the current accelerator, or 0 if torch cannot tell."""
    try:
        return torch.accelerator.get_memory_info()[0]
    except (NotImplementedError, RuntimeError):  # not every backend reports its memory
        return 0


def _free_memory() -> int:
    """Return the available bytes of CPU memory, or 0 if the system does not report them."""
    file = Path("/proc/meminfo")
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), 0)


def _resident() -> int:
    """Return the resident bytes of this process, which a run uses before it loads any model."""
    file = Path("/proc/self/statm")
    return int(file.read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE") if file.is_file() else 0


def _attempt(found: list[Finding], section: str, about: str, look: Callable[[], Any]) -> Any:
    """Return the result of ``look``. A ``UserError`` becomes a finding, and the result is None."""
    try:
        return look()
    except UserError as error:
        found.append(Finding(section, "bad", about, str(error)))
        return None


def _settings(config: RLConfig | SFTConfig, device: Device) -> Iterator[Finding]:
    found: list[Finding] = []
    if isinstance(config, RLConfig):
        _attempt(found, "settings", "algorithm, roles", lambda: check(config))
    elif not config.data.sources:
        found.append(
            Finding(
                "settings",
                "bad",
                "data.sources",
                "is empty; name what to train on, e.g. data.sources=[train.jsonl]",
            )
        )
    yield from found or [Finding("settings", "ok", "settings", "go together")]
    yield from _strategy(config, device)
    try:
        dtype = dtype_of(config.model)
    except UserError:
        return
    yield _dtype(dtype, device)


def _strategy(config: RLConfig | SFTConfig, device: Device) -> Iterator[Finding]:
    """Check the number of processes against the sharding settings."""
    kind, many = config.strategy.kind, device.processes
    if (kind in SHARDED and many == 1) or (kind == "single" and many > 1):
        yield Finding(
            "settings",
            "bad",
            "strategy.kind",
            f"= {kind} with launch.processes = {many}; set strategy.kind=auto",
        )
    team = config.strategy.tensor * config.strategy.sequence
    if many % team:
        says = (
            f"= {many}, which teams of {team} (strategy.tensor x strategy.sequence) do not divide; set it to a multiple of {team}"
        )
        yield Finding("settings", "bad", "launch.processes", says)
    rows = many // config.strategy.tensor
    if config.strategy.shard is not None and rows % config.strategy.shard:
        says = f"= {config.strategy.shard}, which does not divide {rows} (launch.processes / strategy.tensor); "
        says += "set it to a divisor, or leave it out"
        yield Finding("settings", "bad", "strategy.shard", says)
    if kind == "deepspeed" and find_spec("deepspeed") is None:
        says = "= deepspeed, and the package is not installed here: pip install 'lightrft[deepspeed]', or set strategy.kind=fsdp2"
        yield Finding("settings", "bad", "strategy.kind", says)


def _devices(config: RLConfig | SFTConfig, options: DoctorConfig, device: Device) -> Iterator[Finding]:
    """Check that this machine has the requested devices, unless another machine is specified."""
    if options.device_memory != "auto" or options.device != "auto":
        yield Finding(
            "settings",
            "ok",
            "device",
            f"{device.processes} x {device.kind}, computed: another machine may have it",
        )
        return
    asked, there = config.strategy.device, torch.accelerator.device_count()
    way = "for a machine that is not here set doctor.device=cuda and doctor.device_memory, e.g. 80GiB"
    try:
        SingleStrategy(config.strategy)
    except ConfigError as error:
        yield Finding("settings", "bad", "strategy.device", f"{error}; {way}")
        return
    if device.kind != "cpu" and device.processes > there:
        says = f"= {device.processes}, and this machine has {there} {device.kind} devices; lower it, or {way}"
        yield Finding("settings", "bad", "launch.processes", says)
    else:
        yield Finding("settings", "ok", "device", f"{device.processes} x {device.kind} ({asked})")


def _dtype(dtype: torch.dtype, device: Device) -> Finding:
    name = str(dtype).removeprefix("torch.")
    if dtype == torch.float16:
        says = "float16: small gradients become 0, and nothing scales the loss; set model.dtype=bfloat16, or float32 on a CPU"
        return Finding("settings", "warn", "model.dtype", says)
    if dtype == torch.bfloat16 and device.kind == "cpu" and not torch.cpu._is_avx512_bf16_supported():
        says = "bfloat16: this CPU computes it by detours, several times slower than float32; set model.dtype=float32"
        return Finding("settings", "warn", "model.dtype", says)
    return Finding("settings", "ok", "model.dtype", name)


@dataclass(frozen=True, slots=True)
class _Data:
    tokenizer: Any
    lengths: Lengths
    prompts: PromptDataset | None


def _data(config: RLConfig | SFTConfig, found: list[Finding]) -> _Data:
    """Check tokenizer, template and rows, and return them. Raises their errors."""
    tokenizer = local_tokenizer(config.model)
    rows = model_settings(config.model).get_text_config(decoder=True).vocab_size
    found.append(Finding("data", "ok", "tokenizer", f"{len(tokenizer)} tokens, {rows} in the model"))
    found.append(_template(config, tokenizer))
    found += _tokens(config, tokenizer)
    processor = load_processor(config.model, tokenizer)
    if isinstance(config, SFTConfig):
        examples = SFTDataset(
            config.data,
            tokenizer,
            max_tokens=config.max_tokens,
            seed=config.run.seed,
            processor=processor,
        )
        found.append(_overlong(examples.counts, "examples", "max_tokens"))
        found += _unwritten(examples.encoder)
        return _Data(tokenizer, Lengths(1, max(1, examples.longest - 1), config.batch_size, 1), None)
    prompts = PromptDataset(config.data, tokenizer, seed=config.run.seed, processor=processor)
    found.append(_overlong(prompts.counts, "prompts", "data.max_prompt_tokens"))
    found += _unwritten(prompts.encoder)
    found += _unknown(prompts)
    found.append(_context(config, prompts.longest))
    bounds = _bounds(config)
    return _Data(tokenizer, Lengths(prompts.longest, bounds.answer, bounds.groups, bounds.samples), prompts)


def _tokens(config: RLConfig | SFTConfig, tokenizer: Any) -> Iterator[Finding]:
    """Check that a custom tokenizer agrees with the model's, and that a response can end."""
    if config.model.tokenizer is not None:
        try:
            own = local_tokenizer(config.model.model_copy(update={"tokenizer": None})).get_vocab()
        except UserError:  # the model has no tokenizer, which is a valid use of the setting
            own = tokenizer.get_vocab()
        other = sum(own.get(token) != number for token, number in tokenizer.get_vocab().items())
        if other:
            says = (
                f"= {config.model.tokenizer}: {other} of its {len(tokenizer)} tokens are not "
                f"those of {config.model.path}, which was "
            )
            yield Finding(
                "data",
                "warn",
                "model.tokenizer",
                f"{says}trained with its own; leave it out unless the model was made for it",
            )
    if tokenizer.eos_token_id is None:
        says = (
            "has no end token, so that every answer goes on to sampling.max_new_tokens; set "
            "sampling.stop or sampling.stop_token_ids"
        )
        yield Finding("data", "warn", "tokenizer", says)


def _unknown(prompts: PromptDataset) -> Iterator[Finding]:
    """Check that the tokenizer can encode the rows."""
    unknown, tokens = prompts.counts[UNKNOWN], prompts.counts[TOKENS]
    if unknown:
        says = f"{unknown} of {tokens} tokens of prompts are unknown to it, the first in {prompts.first_with(UNKNOWN)}; set "
        verdict = "bad" if unknown > MOST_UNKNOWN * tokens else "warn"
        yield Finding("data", verdict, "tokenizer", f"{says}model.tokenizer, or mend the rows")


def _bounds(config: RLConfig | SFTConfig) -> Lengths:
    """Return the lengths that settings allow, for when no data was loaded."""
    if isinstance(config, SFTConfig):
        return Lengths(1, config.max_tokens - 1, config.batch_size, 1)
    return Lengths(
        config.data.max_prompt_tokens,
        config.sampling.max_new_tokens,
        config.rollout.prompts,
        config.rollout.samples,
    )


def _template(config: RLConfig | SFTConfig, tokenizer: Any) -> Finding:
    if config.data.chat is False or config.data.template is not None:
        return Finding("data", "ok", "chat template", "not used, as data.chat or data.template says")
    if not tokenizer.chat_template:
        says = (
            "there is none, so rows are plain text; set model.chat_template or data.template where the model expects another form"
        )
        return Finding("data", "warn", "chat template", says)
    try:
        check_template(tokenizer, config.data.chat_options)
    except UserError as error:
        return Finding("data", "warn", "chat template", str(error))
    return Finding(
        "data",
        "ok",
        "chat template",
        "there, and a turn begins as it does within a longer conversation",
    )


def _unwritten(encoder: ChatEncoder) -> Iterator[Finding]:
    """Report the placeholders for media that no chat template writes."""
    for kind, text in encoder.unsupported_media.items():
        if encoder.chat:
            says = f"takes no {kind}, each is written as {text!r}; leave model.chat_template out, or set one that takes it"
            yield Finding("data", "warn", "chat template", says)
        else:
            yield Finding(
                "data",
                "ok",
                kind,
                f"written into the text as {text!r}, since no chat template is in use",
            )


def _overlong(counts: Any, what: str, setting: str) -> Finding:
    lost, rows = counts["overlong"] + counts["malformed"], max(1, counts["rows"])
    says = f"{counts[what]} {what} of {counts['rows']} rows; {counts['overlong']} overlong, {counts['malformed']} malformed"
    says += f", {counts['truncated']} cut" if counts["truncated"] else ""
    if lost / rows > MANY_OVERLONG:
        return Finding(
            "data",
            "warn",
            "rows",
            f"{says}: {lost / rows:.0%} are left out; raise {setting}, or mend the rows",
        )
    return Finding("data", "ok", "rows", says)


def _context(config: RLConfig, longest: int) -> Finding:
    """Check the context length like ``context_limits.check_lengths``, which would end a run."""
    settings = model_settings(config.model)
    try:
        check_bound(settings, longest, config.sampling, "sampling", "data")
    except ConfigError as error:
        return Finding("data", "bad", "lengths", str(error))
    context, end = context_length(settings), longest + config.sampling.max_new_tokens
    if context is not None and end > context:
        says = f"an answer may go on to token {end}, and the model was made for {context}; lower sampling.max_new_tokens"
        return Finding("data", "bad", "lengths", says)
    return Finding(
        "data",
        "ok",
        "lengths",
        f"longest prompt {longest}, longest answer {config.sampling.max_new_tokens} tokens",
    )


def _batch(config: RLConfig | SFTConfig, lengths: Lengths) -> Iterator[Finding]:
    budget, held = config.train.micro_batch_tokens, config.engine.token_budget
    if budget < lengths.longest:
        says = (
            f"= {budget} is less than the longest row, {lengths.longest} tokens: such a row goes alone, and takes more than said"
        )
        yield Finding(
            "settings",
            "warn",
            "train.micro_batch_tokens",
            f"{says}; raise it, or bound the lengths",
        )
    if isinstance(config, RLConfig) and held < lengths.longest:
        says = f"= {held} cannot hold one prompt and answer of {lengths.longest} tokens, which ends the run; raise it"
        yield Finding("settings", "bad", "engine.token_budget", says)
    answers = lengths.groups * lengths.samples
    if config.launch.processes > answers:
        says = f"= {config.launch.processes}, and a step has {answers} answers: some processes have nothing to do"
        yield Finding("settings", "warn", "launch.processes", says)


def _memory(found: MemoryEstimate, device: Device, config: RLConfig | SFTConfig) -> Iterator[Finding]:
    yield from _parts(found, "memory")
    if device.processes > 1:
        yield Finding("memory", "ok", "spread", _spread(config, device))
    program = _resident() if device.kind == "cpu" else 0
    total = found.peak + program
    each = "each device" if device.kind != "cpu" else "each process" if device.processes > 1 else "the process"
    says = f"{shown(total)} on {each}, in {found.largest.name}" + (f" ({shown(program)} of it the program)" if program else "")
    yield _fits("memory", says, total, device, _way(found, device))
    if device.kind == "cpu" and sys.platform == "linux" and ALLOCATOR not in os.environ:
        says = f"the C library keeps what is freed, in pieces: runs may take up to {KEPT:g} times this; {ALLOCATOR}=262144 and "
        says += "MALLOC_TRIM_THRESHOLD_=262144 give it back"
        tight = device.memory and KEPT * total > device.memory
        yield Finding("memory", "warn" if tight else "ok", "allocator", says)


def _parts(found: MemoryEstimate, section: str) -> Iterator[Finding]:
    """Report the memory of models, and the additional memory of each phase."""
    for name, held in found.models.items():
        counts = found.parameters.get(name)
        of = "" if counts is None else f"{counts[0] / 1e6:.1f} M parameters, {counts[1] / 1e6:.1f} M trained: "
        parts = {"weights": held.weights, "float32 masters": held.masters, "moments": held.moments}
        says = of + (" + ".join(f"{shown(size)} {part}" for part, size in parts.items() if size) or "nothing on the device")
        says = says if counts else shown(held.total)
        yield Finding(section, "ok", name, says)
    for phase in found.phases:
        says = " + ".join(f"{shown(size)} {part}" for part, size in phase.parts.items() if size)
        says = f"{shown(sum(phase.parts.values()))}: {says}" if says else "nothing more"
        says += f"; {shown(phase.resting)} of the models rest in the memory of the host" if phase.resting else ""
        yield Finding(section, "ok", phase.name, says)
    if found.host:
        says = " + ".join(f"{shown(size)} {name}" for name, size in found.host.items())
        yield Finding(section, "ok", "host", f"{says} for each process, in the memory of the host")
    for problem in found.problems:
        yield Finding(section, "warn", "not traced", problem)


def _apart(
    found: dict[str, MemoryEstimate], ranks: MemoryEstimate | None, device: Device, config: RLConfig | SFTConfig
) -> Iterator[Finding]:
    """Check the memory of workers with a model, and of devices shared by several processes."""
    program = _resident() if device.kind == "cpu" else 0
    for role, needed in found.items():
        yield from _parts(needed, f"memory of each {role}")
        total = needed.peak + program
        says = f"{shown(total)} in {needed.largest.name}" + (f" ({shown(program)} of it the program)" if program else "")
        yield _fits(f"memory of each {role}", says, total, device, _way(needed, device))
    if ranks is None or device.kind == "cpu":
        return
    peaks = {"rank": ranks.peak, **{role: needed.peak for role, needed in found.items()}}
    for tenants in _shared(config.launch):
        total = sum(peaks.get(role, 0.0) for role in tenants)
        says = f"{shown(total)} on a device of {' and '.join(tenants)}"
        yield _fits(
            "devices",
            says,
            total,
            device,
            "give workers devices of their own (launch.ray.engine_devices, model_devices)",
        )


def _shared(launch: LaunchConfig) -> list[tuple[str, ...]]:
    """Return the kinds of processes that share a device, as placed by ``launch.ray``."""
    plan = plan_placement(launch, True)
    living: list[list[str]] = [[] for _ in plan.bundles]
    for slot in plan.ranks:
        living[slot.bundle].append("rank")
    for name, slot in plan.workers.items():
        if slot.devices:
            kind = name.rpartition(" ")[0]
            living[slot.bundle].append(ROLES.get(kind, kind))
    return list(dict.fromkeys(tuple(each) for each in living if len(each) > 1))


def _spread(config: RLConfig | SFTConfig, device: Device) -> str:
    """Describe the part of a trained model that each process stores."""
    shares = shares_of(config.strategy, device.processes, device.kind, trained=True)
    parts = {
        "weights": shares.weights,
        "masters and moments": shares.state,
        "gradients": shares.gradients,
    }
    says = ", ".join(f"{part} {'whole' if count == 1 else f'1/{count}'}" for part, count in parts.items())
    cut = f", each layer cut over {shares.cut} (strategy.tensor)" if shares.cut > 1 else ""
    cut += f", the tokens of a row over {config.strategy.sequence} (strategy.sequence)" if config.strategy.sequence > 1 else ""
    precise = "; weights that are trained lie in float32 alone" if shares.precise else ""
    names = {"state": "masters and moments"}
    away = (
        (f"; {', '.join(names.get(part, part) for part in shares.on_host)} are in the memory of the host")
        if shares.on_host
        else ""
    )
    return f"of each trained model, a process holds {says}{cut}{precise}{away}"


def _way(found: MemoryEstimate, device: Device) -> str:
    """Return advice to reduce the largest use of memory."""
    if sum(m.total for m in found.models.values()) > ROOM * device.memory:
        return WAYS["models"]
    kind = next((word for word in ("drawing", "loading") if found.largest.name.startswith(word)), "passes")
    return WAYS[kind]


def _fits(section: str, says: str, total: float, device: Device, way: str) -> Finding:
    if not device.memory:
        return Finding(section, "ok", "peak", f"{says}; set doctor.device_memory to compare")
    share = total / device.memory
    says += f"; there are {shown(device.memory)} for it"
    if share <= ROOM:
        return Finding(section, "ok", "peak", f"{says}: it fits ({share:.0%})")
    if share <= 1:
        return Finding(
            section,
            "warn",
            "peak",
            f"{says}: tight ({share:.0%}, and the prediction may be off by 15 %); {way}",
        )
    return Finding(section, "bad", "peak", f"{says}: it does not fit ({share:.0%}); {way}")


def _rewarded(config: RLConfig | SFTConfig) -> bool:
    return isinstance(config, RLConfig) and bool(config.reward.terms or config.reward.per_source)


def _rewards(config: RLConfig | SFTConfig, data: _Data, rows: int) -> Iterator[Finding]:
    """Score the reference response of some rows, and an empty response."""
    if data.prompts is None:
        return
    prompts = [data.prompts.prompt(i, media=False) for i in range(min(rows, len(data.prompts)))]
    answers = [(p, a) for p in prompts if (a := answer_of(p)) is not None]
    given = {"own answer": answers, "empty answer": [(p, "") for p in prompts]}
    means: dict[str, float] = {}
    with Scorer(config.reward) as scorer:
        scorer.check_sources(p.data_source for p in prompts)
        for name, pairs in given.items():
            if not pairs:
                says = "rows have neither reference nor label, so only empty answers are scored; look at data.columns"
                yield Finding("reward", "warn", name, says)
                continue
            began = time.perf_counter()
            for prompt, text in pairs:
                scorer.submit(answered(prompt, text, data.tokenizer))
            scored = list(scorer.results(wait=True))
            each = (time.perf_counter() - began) / len(pairs)
            yield _scores(name, scored, each)
            means[name] = sum(r.reward or 0.0 for r in scored) / len(scored)
    if len(means) == 2 and means["own answer"] <= means["empty answer"]:
        says = "rows' own answers score no more than empty ones: the reward may not read them, or the label is not an answer"
        yield Finding("reward", "warn", "order", says)


def _scores(name: str, scored: list[Rollout], each: float) -> Finding:
    failed = [r.failed for r in scored if r.failed]
    numbers = ", ".join(f"{r.reward:g}" for r in scored if r.reward is not None)
    says = f"{numbers or 'no number'} ({len(scored)} rows, {each * 1e3:.1f} ms each)"
    if failed:
        return Finding("reward", "bad", name, f"{says}; {len(failed)} failed, the first: {failed[0]}")
    return Finding("reward", "ok", name, says)


def _measured(config: RLConfig | SFTConfig, data: _Data, device: Device, memory: MemoryEstimate | None) -> Iterator[Finding]:
    if not isinstance(config, RLConfig) or data.prompts is None:
        yield Finding("time", "warn", "probe", "is made for lightrft rl only")
        return
    if memory is not None and device.memory and memory.peak > device.memory:
        yield Finding("time", "warn", "probe", "not run, since the run does not fit (memory, peak)")
        return
    prompts = [data.prompts.prompt(i) for i in range(min(speed_probe.ANSWERS, len(data.prompts)))]
    said = speed_probe.expected(config, prompts, data.tokenizer, data.lengths)
    over = f" on one process, {device.processes} share it" if device.processes > 1 else ""
    yield from _agrees(config, said)
    says = f"about {said.total:.3g} s{over}: {said.drawing:.3g} drawing, {said.forward:.3g} forward, {said.update:.3g} update"
    yield Finding(
        "time",
        "ok",
        "a step",
        f"{says}; anything from {said.low:.3g} to {said.high:.3g} s, rewards not counted",
    )


def _agrees(config: RLConfig, said: speed_probe.StepTimeEstimate) -> Iterator[Finding]:
    """Check that the engine and the training pass agree on log-probs."""
    if said.layout:
        yield Finding("engine", "warn", "model.layout", said.layout)
    if said.agreement is None:
        says = f"not compared: no response is longer than sampling.min_new_tokens = {config.sampling.min_new_tokens}; lower it"
        yield Finding("engine", "warn", "log-probs", says)
    elif not said.agreement.cause:
        yield Finding("engine", "ok", "log-probs", str(said.agreement))
    else:
        stops = "a run would stop" if config.engine.check_logprobs else "a run would go on, since engine.check_logprobs = False"
        verdict: Verdict = "bad" if config.engine.check_logprobs else "warn"
        yield Finding("engine", verdict, "log-probs", f"{said.agreement} With this, {stops}")


def to_text(report: Report) -> str:
    """Format a report for a terminal."""
    width = max((len(f.about) for f in report.findings), default=0)
    lines: list[str] = []
    for section in dict.fromkeys(f.section for f in report.findings):
        lines += [*([""] if lines else []), section]
        for f in (f for f in report.findings if f.section == section):
            first, *more = f.says.splitlines() or [""]
            lines += [
                f"  {f.verdict:<4}  {f.about:<{width}}  {first}",
                *(f"  {'':<{width + 6}}  {line}" for line in more),
            ]
    warned = sum(f.verdict == "warn" for f in report.findings)
    lines += ["", f"{report.bad} bad, {warned} to look at, {len(report.findings)} in all"]
    return "\n".join(lines)


def to_json(report: Report) -> dict[str, Any]:
    """Convert a report to JSON data: findings, and the bytes of models and phases."""
    memory = None if report.memory is None else _as_tree(report.memory)
    apart = {role: _as_tree(needed) for role, needed in report.workers.items()}
    return {
        "findings": [asdict(f) for f in report.findings],
        "memory": memory,
        "workers": apart,
        "bad": report.bad,
    }


def _as_tree(found: MemoryEstimate) -> dict[str, Any]:
    return {**asdict(found), "peak": found.peak}
