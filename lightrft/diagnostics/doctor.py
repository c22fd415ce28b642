"""Check a run before it starts: memory of its models, settings, data and rewards."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from typing import TypeAlias, TypeGuard, TypeVar

import torch
from transformers import PreTrainedTokenizerBase

from lightrft.algorithms.preference.requirements import preference_requirements
from lightrft.config.verbs import (
    DistillVerbConfig,
    DoctorConfig,
    DPOConfig,
    PolicyConfig,
    PRMVerbConfig,
    RLConfig,
    RMConfig,
    ScoringConfig,
    SFTConfig,
    SupervisedConfig,
    TrainingConfig,
)
from lightrft.datasets.chat_encoder import ChatEncoder
from lightrft.datasets.preference.preference_dataset import PreferenceDataset
from lightrft.datasets.process.process_dataset import ProcessDataset
from lightrft.datasets.prompt_dataset import PromptDataset
from lightrft.datasets.row_warnings import MOST_UNKNOWN, TOKENS, UNKNOWN
from lightrft.datasets.sft_dataset import SFTDataset
from lightrft.datasets.turns import check_template
from lightrft.diagnostics import speed_probe
from lightrft.diagnostics.doctor_parts.engine import (
    ServerReport,
    engine_findings,
    eval_set_findings,
    examine_server,
    length_findings,
    media_findings,
)
from lightrft.diagnostics.doctor_parts.other_models import reward_model_findings, teacher_findings
from lightrft.diagnostics.findings import Finding, Verdict
from lightrft.diagnostics.memory.estimate import MemoryEstimate, estimate_memory, workers
from lightrft.diagnostics.memory.phases import Device, Lengths, device_of
from lightrft.diagnostics.memory.report import memory_findings, worker_findings
from lightrft.engines.base import Engine
from lightrft.models.loading.from_pretrained import config_ends, model_settings
from lightrft.models.loading.meta_device import dtype_of
from lightrft.models.processors import Processor, load_processor
from lightrft.rewards.scorer import Scorer
from lightrft.rewards.startup_check import answer_of, answered
from lightrft.strategy.single import SingleStrategy
from lightrft.trainer.checks.check_config import check
from lightrft.trainer.distill.checks import check_distill
from lightrft.trainer.preference.checks import check as check_preference_run
from lightrft.trainer.process_model.run import check as check_process_run
from lightrft.trainer.process_model.run import load_steps
from lightrft.trainer.reward_model.checks import check as check_reward_run
from lightrft.trainer.reward_model.run import load_examples
from lightrft.trainer.supervised import check_supervised
from lightrft.types import Rollout
from lightrft.utils.chat_template import turn_ends
from lightrft.utils.errors import ConfigError, UserError, install_extra
from lightrft.workers.engine_kinds import kinds_to_check
from lightrft.workers.local import local_tokenizer

Result = TypeVar("Result")
SamplingVerb: TypeAlias = RLConfig | DistillVerbConfig | DPOConfig
"""The settings of a verb whose training steps may sample responses."""
MANY_OVERLONG = 0.05
RESPONSES = 2
"""Responses to a prompt in preference data that was not read."""


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


def run_doctor(config: TrainingConfig, options: DoctorConfig) -> Report:
    """Run all checks. A failed check becomes a finding and does not stop the others."""
    with closing(examine_server(config)) as server:
        return _examined(config, options, server)


def _examined(config: TrainingConfig, options: DoctorConfig, server: ServerReport) -> Report:
    """Run the other checks.

    Args:
        config: Settings of the run.
        options: Settings of the checks.
        server: The result of the checks of its server.
    """
    found: list[Finding] = []
    device = device_of(config, options)
    found += _settings(config, device)
    found += _devices(config, options, device)
    found += server.findings
    found += engine_findings(config, device.kind)
    data = _attempt(found, "data", "rows", lambda: _data(config, found, server.engine))
    # Memory is estimated without data too, from the lengths that the settings allow.
    lengths = _bounds(config) if data is None else data.lengths
    found += _batch(config, lengths)
    estimate = partial(estimate_memory, config, lengths, device, server.kind)
    memory = _attempt(found, "memory", "models", estimate)
    if memory is not None:
        found += memory_findings(memory, device, config)
    in_workers = (
        _attempt(found, "memory", "workers", lambda: workers(config, lengths, device)) or {}
    )
    found += worker_findings(in_workers, memory, device, config)
    # Rewards and the probe need prompts.
    if data is None:
        return Report(tuple(found), memory, in_workers)
    if isinstance(config, RLConfig):
        found += reward_model_findings(config.reward, config.model, data.tokenizer)
    scores = not isinstance(config, ScoringConfig) and config.reward.calls_functions
    if options.rows and scores:
        score = partial(_rewards, config, data, options.rows)
        _attempt(found, "reward", "terms", lambda: found.extend(score()))
    if options.probe:
        measure = partial(_measured, config, data, device, memory)
        if server.is_paused:
            says = "not run: the server answers nobody until a run sends it all weights"
            found.append(Finding("time", "warn", "probe", says))
        else:
            _attempt(found, "time", "probe", lambda: found.extend(measure()))
    return Report(tuple(found), memory, in_workers)


def _attempt(
    found: list[Finding],
    section: str,
    about: str,
    look: Callable[[], Result],
) -> Result | None:
    """Return the result of ``look``. A ``UserError`` becomes a finding, and the result is None.

    Args:
        found: The findings so far.
        section: Section of the finding.
        about: Subject of the finding.
        look: A check.
    """
    try:
        return look()
    except UserError as error:
        found.append(Finding(section, "bad", about, str(error)))
        return None


def _settings(config: TrainingConfig, device: Device) -> Iterator[Finding]:
    found: list[Finding] = []
    if isinstance(config, RLConfig):
        _attempt(found, "settings", "algorithm, roles", lambda: check(config))
    elif isinstance(config, DPOConfig):
        _attempt(found, "settings", "preference", lambda: check_preference_run(config))
    elif isinstance(config, RMConfig):
        _attempt(found, "settings", "reward model", lambda: check_reward_run(config))
    elif isinstance(config, PRMVerbConfig):
        _attempt(found, "settings", "process model", lambda: check_process_run(config))
    elif isinstance(config, DistillVerbConfig):
        _attempt(found, "settings", "distill, teacher", lambda: check_distill(config))
    else:
        _attempt(found, "settings", "data, evaluation", lambda: check_supervised(config))
    yield from found or [Finding("settings", "ok", "settings", "go together")]
    yield from _strategy(config, device)
    try:
        dtype = dtype_of(config.model)
    except UserError:
        return  # reported where the model is loaded
    yield _dtype(dtype, device)


def _strategy(config: TrainingConfig, device: Device) -> Iterator[Finding]:
    """Check the number of processes against the sharding settings."""
    strategy = config.strategy
    processes = device.processes
    # ``auto`` is not in the table: it fits any number of processes.
    is_alone = processes == 1
    fits = {"single": is_alone, "fsdp2": not is_alone, "deepspeed": not is_alone}
    if not fits.get(strategy.kind, True):
        says = f"= {strategy.kind} with launch.processes = {processes}; set strategy.kind=auto"
        yield Finding("settings", "bad", "strategy.kind", says)
    ranks_per_row = strategy.tensor_parallel * strategy.sequence_parallel
    if processes % ranks_per_row:
        says = (
            f"= {processes}, which groups of {ranks_per_row} (strategy.tensor_parallel x "
            f"strategy.sequence_parallel) do not divide; set it to a multiple of {ranks_per_row}"
        )
        yield Finding("settings", "bad", "launch.processes", says)
    # HSDP shards over the ranks that are left after tensor parallelism.
    rows = processes // strategy.tensor_parallel
    if strategy.hsdp_shard_size is not None and rows % strategy.hsdp_shard_size:
        says = (
            f"= {strategy.hsdp_shard_size}, which does not divide {rows} (launch.processes / "
            "strategy.tensor_parallel); set it to a divisor, or leave it out"
        )
        yield Finding("settings", "bad", "strategy.hsdp_shard_size", says)
    if strategy.kind == "deepspeed" and find_spec("deepspeed") is None:
        says = (
            "= deepspeed, and the package is not installed here: "
            f"{install_extra('deepspeed')}, or set strategy.kind=fsdp2"
        )
        yield Finding("settings", "bad", "strategy.kind", says)


def _devices(
    config: TrainingConfig,
    options: DoctorConfig,
    device: Device,
) -> Iterator[Finding]:
    """Check that this machine has the requested devices, unless another machine is specified."""
    devices = f"{device.processes} x {device.kind}"
    if options.device_memory != "auto" or options.device != "auto":
        says = f"{devices}, computed: another machine may have it"
        yield Finding("settings", "ok", "device", says)
        return
    way = (
        "for a machine that is not here set doctor.device=cuda and doctor.device_memory, e.g. 80GiB"
    )
    try:
        SingleStrategy(config.strategy)
    except ConfigError as error:
        yield Finding("settings", "bad", "strategy.device", f"{error}; {way}")
        return
    there = torch.accelerator.device_count()
    if device.kind != "cpu" and device.processes > there:
        says = (
            f"= {device.processes}, and this machine has {there} {device.kind} devices; lower "
            f"it, or {way}"
        )
        yield Finding("settings", "bad", "launch.processes", says)
    else:
        yield Finding("settings", "ok", "device", f"{devices} ({config.strategy.device})")


def _dtype(dtype: torch.dtype, device: Device) -> Finding:
    if dtype == torch.float16:
        says = (
            "float16: small gradients become 0, and nothing scales the loss; set "
            "model.dtype=bfloat16, or float32 on a CPU"
        )
        return Finding("settings", "warn", "model.dtype", says)
    on_cpu = device.kind == "cpu"
    if on_cpu and dtype == torch.bfloat16 and not torch.cpu._is_avx512_bf16_supported():
        says = (
            "bfloat16: this CPU computes it by detours, several times slower than float32; set "
            "model.dtype=float32"
        )
        return Finding("settings", "warn", "model.dtype", says)
    return Finding("settings", "ok", "model.dtype", str(dtype).removeprefix("torch."))


@dataclass(frozen=True, slots=True)
class _Data:
    tokenizer: PreTrainedTokenizerBase
    lengths: Lengths
    prompts: PromptDataset | None


def _data(config: TrainingConfig, found: list[Finding], server: Engine | None) -> _Data:
    """Check tokenizer, template and rows, and return them. Raises their errors.

    Args:
        config: Settings of the run.
        found: Gets the findings.
        server: The engine over a server. None without one.
    """
    tokenizer = local_tokenizer(config.model)
    rows = model_settings(config.model).get_text_config(decoder=True).vocab_size
    # Added one by one, so that an error later keeps the findings before it.
    found.append(
        Finding("data", "ok", "tokenizer", f"{len(tokenizer)} tokens, {rows} in the model")
    )
    found.append(_template(config, tokenizer))
    found += _tokens(config, tokenizer)
    processor = load_processor(config.model, tokenizer, config.data.media)
    if isinstance(config, PolicyConfig):
        held = eval_set_findings(config, tokenizer, processor, server)
        _attempt(found, "data", "eval.data", lambda: found.extend(held))
    if isinstance(config, DistillVerbConfig) and config.distill.on_policy == 1:
        sampled = _prompts(config, tokenizer, processor, found, server)
        _teachers(config, sampled, tokenizer, processor, found)
        # Its rewards score the eval set alone.
        return _Data(tokenizer, replace(_bounds(config), prompt=sampled.longest), None)
    if isinstance(config, RLConfig) or samples_preferences(config):
        prompts = _prompts(config, tokenizer, processor, found, server)
        return _Data(tokenizer, replace(_bounds(config), prompt=prompts.longest), prompts)
    examples = _examples(config, tokenizer, processor)
    found.append(_overlong(examples.counts, "examples", "max_tokens"))
    found += _unwritten(examples.encoder)
    longest = examples.longest
    if isinstance(config, DistillVerbConfig) and isinstance(examples, SFTDataset):
        _teachers(config, examples, tokenizer, processor, found)
    if isinstance(config, DistillVerbConfig) and config.distill.on_policy:
        assert isinstance(examples, SFTDataset)
        found += length_findings(config, config.sampling, examples.longest_prompt, server)
        longest = max(longest, examples.longest_prompt + config.sampling.max_new_tokens)
    lengths = replace(_bounds(config), answer=max(1, longest - 1))
    if isinstance(examples, PreferenceDataset):
        lengths = replace(lengths, samples=examples.most_responses)
    if isinstance(examples, ProcessDataset):
        lengths = replace(lengths, steps=examples.most_steps)
    return _Data(tokenizer, lengths, None)


def samples_preferences(config: TrainingConfig) -> TypeGuard[DPOConfig]:
    """Return True if the run compares responses that it samples."""
    return isinstance(config, DPOConfig) and config.online.group_size > 0


def _teachers(
    config: DistillVerbConfig,
    dataset: SFTDataset | PromptDataset,
    tokenizer: PreTrainedTokenizerBase,
    processor: Processor | None,
    found: list[Finding],
) -> None:
    """Add findings about the tokenizers of the teachers. See ``teacher_findings``."""

    def look() -> None:
        found.extend(teacher_findings(config, dataset, tokenizer, processor))

    _attempt(found, "data", "teacher", look)


def _prompts(
    config: SamplingVerb,
    tokenizer: PreTrainedTokenizerBase,
    processor: Processor | None,
    found: list[Finding],
    server: Engine | None,
) -> PromptDataset:
    """Encode the prompts to which the run samples responses.

    Args:
        config: Settings of the run.
        tokenizer: Encodes the prompts.
        processor: Prepares media, or None for a text-only model.
        found: Gets the findings.
        server: The engine over a server. None without one.
    """
    prompts = PromptDataset(config.data, tokenizer, seed=config.run.seed, processor=processor)
    found.append(_overlong(prompts.counts, "prompts", "data.max_prompt_tokens"))
    found += _unwritten(prompts.encoder)
    found += _unknown(prompts)
    found += length_findings(config, config.sampling, prompts.longest, server)
    kinds = kinds_to_check(config.engine, prompts)
    found += media_findings(config.model, config.engine, kinds, server)
    return prompts


def _examples(
    config: SupervisedConfig | ScoringConfig,
    tokenizer: PreTrainedTokenizerBase,
    processor: Processor | None,
) -> SFTDataset | PreferenceDataset | ProcessDataset:
    """Encode the rows that the run trains on."""
    max_tokens, seed = config.max_tokens, config.run.seed
    if isinstance(config, PRMVerbConfig):
        return load_steps(config, tokenizer, processor, config.data, "data")
    if isinstance(config, RMConfig):
        return load_examples(config, tokenizer, processor, config.data, "data")
    if isinstance(config, DPOConfig):
        requirements = preference_requirements(config.preference)
        return PreferenceDataset(
            config.data,
            tokenizer,
            kind=requirements.kind,
            max_tokens=max_tokens,
            seed=seed,
            processor=processor,
            gold=requirements.gold,
            corrupted=requirements.corrupted,
        )
    assert isinstance(config, SFTConfig | DistillVerbConfig)
    return SFTDataset(config.data, tokenizer, max_tokens=max_tokens, seed=seed, processor=processor)


def _tokens(config: TrainingConfig, tokenizer: PreTrainedTokenizerBase) -> Iterator[Finding]:
    """Check that a custom tokenizer agrees with the model's, and that a response can end."""
    if config.model.tokenizer is not None:
        own_model = config.model.model_copy(update={"tokenizer": None})
        vocabulary = tokenizer.get_vocab()
        try:
            own = local_tokenizer(own_model).get_vocab()
        except UserError:  # the model has no tokenizer, which is a valid use of the setting
            own = vocabulary
        other = sum(own.get(token) != number for token, number in vocabulary.items())
        if other:
            says = (
                f"= {config.model.tokenizer}: {other} of its {len(tokenizer)} tokens are not "
                f"those of {config.model.path}, which was trained with its own; "
                "leave it out unless the model was made for it"
            )
            yield Finding("data", "warn", "model.tokenizer", says)
    if tokenizer.eos_token_id is None:
        says = (
            "has no end token, so every response runs to sampling.max_new_tokens; set "
            "sampling.stop or sampling.stop_token_ids"
        )
        yield Finding("data", "warn", "tokenizer", says)
    yield from _turn_ends(config, tokenizer)


def _turn_ends(config: TrainingConfig, tokenizer: PreTrainedTokenizerBase) -> Iterator[Finding]:
    """Name ends of turns of the chat template that are no end tokens of the model."""
    known = {*config_ends(config.model), tokenizer.eos_token_id}
    others = [end for end in turn_ends(tokenizer).ids if end not in known]
    if others:
        shown = ", ".join(map(repr, tokenizer.convert_ids_to_tokens(others)))
        says = (
            f"is {shown} in the chat template, and no end token of the tokenizer or a config; "
            "responses end there too, and generation_config.json of the trained model names it"
        )
        yield Finding("data", "ok", "end of turn", says)


def _unknown(prompts: PromptDataset) -> Iterator[Finding]:
    """Check that the tokenizer can encode the rows."""
    unknown = prompts.counts[UNKNOWN]
    tokens = prompts.counts[TOKENS]
    if not unknown:
        return
    verdict: Verdict = "bad" if unknown > MOST_UNKNOWN * tokens else "warn"
    says = (
        f"{unknown} of {tokens} tokens of prompts are unknown to it, the first in "
        f"{prompts.first_with(UNKNOWN)}; set model.tokenizer, or mend the rows"
    )
    yield Finding("data", verdict, "tokenizer", says)


def _bounds(config: TrainingConfig) -> Lengths:
    """Return the lengths that settings allow, for when no data was loaded."""
    if isinstance(config, DistillVerbConfig) and config.distill.on_policy == 1:
        longest, limit = config.data.max_prompt_tokens, config.sampling.max_new_tokens
        return Lengths(longest, limit, config.batch_size, 1)
    if samples_preferences(config):
        longest, limit = config.data.max_prompt_tokens, config.sampling.max_new_tokens
        return Lengths(longest, limit, config.batch_size, config.online.group_size)
    if isinstance(config, SupervisedConfig | ScoringConfig):
        # An example counts as one prompt token and a response, since all of its row is trained on.
        responses = RESPONSES if isinstance(config, DPOConfig | RMConfig) else 1
        return Lengths(1, config.max_tokens - 1, config.batch_size, responses)
    return Lengths(
        config.data.max_prompt_tokens,
        config.sampling.max_new_tokens,
        config.rollout.prompts_per_step,
        config.rollout.group_size,
    )


def _template(config: TrainingConfig, tokenizer: PreTrainedTokenizerBase) -> Finding:
    if config.data.apply_chat_template is False:
        says = "not used, as data.apply_chat_template says"
        return Finding("data", "ok", "chat template", says)
    if not tokenizer.chat_template:
        says = (
            "there is none, so rows are plain text; set model.chat_template or data.template "
            "where the model expects another form"
        )
        return Finding("data", "warn", "chat template", says)
    try:
        check_template(tokenizer, config.data.chat_template_options)
    except UserError as error:
        return Finding("data", "warn", "chat template", str(error))
    says = "there, and a turn begins as it does within a longer conversation"
    return Finding("data", "ok", "chat template", says)


def _unwritten(encoder: ChatEncoder) -> Iterator[Finding]:
    """Report the placeholders for media that no chat template writes."""
    for kind, text in encoder.unsupported_media.items():
        if encoder.chat:
            says = (
                f"takes no {kind}, each is written as {text!r}; leave model.chat_template out, "
                "or set one that takes it"
            )
            yield Finding("data", "warn", "chat template", says)
        else:
            says = f"written into the text as {text!r}, since no chat template is in use"
            yield Finding("data", "ok", kind, says)


def _overlong(counts: Counter[str], what: str, setting: str) -> Finding:
    """Report the rows that are left out.

    Args:
        counts: Counts of a data set.
        what: ``prompts`` or ``examples``.
        setting: The setting that bounds their length.
    """
    lost = (counts["overlong"] + counts["malformed"]) / max(1, counts["rows"])
    says = (
        f"{counts[what]} {what} of {counts['rows']} rows; {counts['overlong']} overlong, "
        f"{counts['malformed']} malformed"
    )
    if counts["truncated"]:
        says += f", {counts['truncated']} cut"
    if lost > MANY_OVERLONG:
        says += f": {lost:.0%} are left out; raise {setting}, or mend the rows"
        return Finding("data", "warn", "rows", says)
    return Finding("data", "ok", "rows", says)


def _batch(config: TrainingConfig, lengths: Lengths) -> Iterator[Finding]:
    budget = config.train.micro_batch_tokens
    if config.train.max_tokens_per_micro_batch == "auto":
        says = f"= auto: {budget} tokens on this machine"
        yield Finding("settings", "ok", "train.max_tokens_per_micro_batch", says)
    if budget < lengths.longest:
        says = (
            f"= {budget} is less than the longest row, {lengths.longest} tokens: such a row goes "
            "alone, and takes more than said; raise it, or bound the lengths"
        )
        yield Finding("settings", "warn", "train.max_tokens_per_micro_batch", says)
    answers = lengths.groups * lengths.samples
    if config.launch.processes > answers:
        says = (
            f"= {config.launch.processes}, and a step has {answers} responses: some processes "
            "have nothing to do"
        )
        yield Finding("settings", "warn", "launch.processes", says)


def _rewards(config: TrainingConfig, data: _Data, rows: int) -> Iterator[Finding]:
    """Score the reference response of some rows, and an empty response.

    Args:
        config: Settings of the run.
        data: Its tokenizer and prompts.
        rows: Number of rows to score.
    """
    if data.prompts is None or isinstance(config, ScoringConfig):
        return
    count = min(rows, len(data.prompts))
    # Rewards do not read media, which may take long to decode.
    prompts = [data.prompts.prompt(i, media=False) for i in range(count)]
    answers = []
    for prompt in prompts:
        answer = answer_of(prompt)
        if answer is not None:
            answers.append((prompt, answer))
    given = {"reference response": answers, "empty response": [(prompt, "") for prompt in prompts]}
    means: dict[str, float] = {}
    with Scorer(config.reward) as scorer:
        scorer.check_sources(prompt.data_source for prompt in prompts)
        for name, pairs in given.items():
            if not pairs:
                says = (
                    "rows have neither reference nor label, so only empty responses are scored; "
                    "look at data.columns"
                )
                yield Finding("reward", "warn", name, says)
                continue
            began = time.perf_counter()
            for prompt, text in pairs:
                scorer.submit(answered(prompt, text, data.tokenizer))
            scored = list(scorer.results(wait=True))
            each = (time.perf_counter() - began) / len(pairs)
            yield _scores(name, scored, each)
            means[name] = sum(rollout.reward or 0.0 for rollout in scored) / len(scored)
    # A reward that reads the label gives the reference response the most.
    lists = [config.reward.terms, *config.reward.per_source.values()]
    counts = any(term.weight for terms in lists for term in terms)
    if counts and len(means) == 2 and means["reference response"] <= means["empty response"]:
        says = (
            "reference responses score no more than empty ones: the reward may not read them, or "
            "the label is not a response"
        )
        yield Finding("reward", "warn", "order", says)


def _scores(name: str, scored: list[Rollout], each: float) -> Finding:
    """Report rewards.

    Args:
        name: Name of the responses.
        scored: The scored responses.
        each: Seconds per response.
    """
    failed = [rollout.failed for rollout in scored if rollout.failed]
    rewards = [f"{rollout.reward:g}" for rollout in scored if rollout.reward is not None]
    numbers = ", ".join(rewards) or "no number"
    says = f"{numbers} ({len(scored)} rows, {each * 1e3:.1f} ms each)"
    if failed:
        says += f"; {len(failed)} failed, the first: {failed[0]}"
        return Finding("reward", "bad", name, says)
    return Finding("reward", "ok", name, says)


def _measured(
    config: TrainingConfig,
    data: _Data,
    device: Device,
    memory: MemoryEstimate | None,
) -> Iterator[Finding]:
    """Run some prompts and report the predicted time of a step.

    Args:
        config: Settings of the run.
        data: Its tokenizer, lengths and prompts.
        device: The device of each process.
        memory: Memory of each rank, or None if it is unknown.
    """
    if not isinstance(config, RLConfig) or data.prompts is None:
        yield Finding("time", "warn", "probe", "is made for lightrft rl only")
        return
    # The probe loads the real policy, and would end this program instead of reporting.
    if memory is not None and device.memory and memory.peak > device.memory:
        says = "not run, since the run does not fit (memory, peak)"
        yield Finding("time", "warn", "probe", says)
        return
    count = min(speed_probe.ANSWERS, len(data.prompts))
    prompts = [data.prompts.prompt(i) for i in range(count)]
    said = speed_probe.expected(config, prompts, data.tokenizer, data.lengths)
    yield from _agrees(config, said)
    over = f" on one process, {device.processes} share it" if device.processes > 1 else ""
    says = (
        f"about {said.total:.3g} s{over}: {said.drawing:.3g} generation, "
        f"{said.forward:.3g} forward, {said.update:.3g} update; "
        f"anything from {said.low:.3g} to {said.high:.3g} s, rewards not counted"
    )
    yield Finding("time", "ok", "a step", says)


def _agrees(config: RLConfig, said: speed_probe.StepTimeEstimate) -> Iterator[Finding]:
    """Check that the engine and the training pass agree on log-probs."""
    if said.layout:
        yield Finding("engine", "warn", "model.layout", said.layout)
    if said.agreement is None:
        least = config.sampling.min_new_tokens
        says = (
            f"not compared: no response is longer than sampling.min_new_tokens = {least}; lower it"
        )
        yield Finding("engine", "warn", "log-probs", says)
    elif not said.agreement.cause:
        yield Finding("engine", "ok", "log-probs", str(said.agreement))
    elif config.engine.url is not None:
        says = (
            f"with the weights that the server has now: {said.agreement} The run sends it those of "
            "model.path first, and compares the log-probs of its first batch"
        )
        yield Finding("engine", "warn", "log-probs", says)
    elif config.engine.check_logprobs:
        says = f"{said.agreement} With this, a run would stop"
        yield Finding("engine", "bad", "log-probs", says)
    else:
        says = f"{said.agreement} With this, a run would go on, since engine.check_logprobs = False"
        yield Finding("engine", "warn", "log-probs", says)


def to_text(report: Report) -> str:
    """Format a report for a terminal."""
    width = max((len(finding.about) for finding in report.findings), default=0)
    sections: dict[str, list[str]] = {}
    for finding in report.findings:
        first, *more = finding.says.splitlines() or [""]
        lines = sections.setdefault(finding.section, [finding.section])
        lines.append(f"  {finding.verdict:<4}  {finding.about:<{width}}  {first}")
        lines += [f"  {'':<{width + 6}}  {line}" for line in more]
    warned = sum(finding.verdict == "warn" for finding in report.findings)
    last = f"{report.bad} bad, {warned} to look at, {len(report.findings)} in all"
    return "\n\n".join(["\n".join(lines) for lines in sections.values()] + [last])


def to_json(report: Report) -> dict[str, object]:
    """Convert a report to JSON data: findings, and the bytes of models and phases."""
    memory = None if report.memory is None else _as_tree(report.memory)
    in_workers = {role: _as_tree(needed) for role, needed in report.workers.items()}
    return {
        "findings": [asdict(finding) for finding in report.findings],
        "memory": memory,
        "workers": in_workers,
        "bad": report.bad,
    }


def _as_tree(found: MemoryEstimate) -> dict[str, object]:
    return {**asdict(found), "peak": found.peak}
