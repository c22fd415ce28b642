"""Scores of a reward model with heads, for the endpoints of OpenRLHF, of vLLM and of lightrft.

Each field of a request is read, unread, or refused.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import math
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lightrft.config.generation.serving import ServeRMConfig
from lightrft.datasets.conversations.conversation_encoder import Sample, batch_of_answers
from lightrft.learner.micro_batches import micro_batches
from lightrft.learner.reward_model.outputs import joined, separated
from lightrft.models.families import context_length
from lightrft.models.processors import Processor
from lightrft.models.reward.heads import HeadOutputs
from lightrft.models.reward.reward_model import MIXTURE, RewardModel
from lightrft.serving.batcher import Batcher
from lightrft.serving.field_table import (
    BOOLEAN,
    LIST,
    NULL,
    OBJECT,
    TEXT,
    RequestFields,
    Types,
    list_of,
    object_of,
)
from lightrft.serving.http_server import Endpoint
from lightrft.serving.problems import HTTPCall, HTTPProblem, bad
from lightrft.serving.sample_encoder import SampleEncoder
from lightrft.serving.server_metrics import ServerMetrics
from lightrft.serving.work_queue import Work
from lightrft.types import Batch, Segments
from lightrft.utils.errors import DataError
from lightrft.workers.scoring.reward_wire import (
    PATH,
    answers_from_json,
    batch_from_json,
    template_digest,
    vocabulary_digest,
    weights_digest,
)

ENCODERS = 4
"""Threads that encode requests and read their media."""

Outputs = dict[str, HeadOutputs]
Payload = Sequence[Sample] | Batch


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Name, digests and scores of a served model.

    Attributes:
        name: Name of the model.
        digest: Digest of its weights.
        vocabulary: Digest of its vocabulary.
        heads: Names of its scores; empty for a generative model.
        reward: Name of the score that is the reward; empty for a generative model.
        layout: Layout of its inputs.
        max_model_len: Most tokens of a prompt with its response. ``None`` for no limit.
        template: Digest of its chat template; empty if it has none.
        template_problem: The reason why the template cannot render responses; empty if it can.
        weights_layout: Digest of names, types and shapes of its weights. Empty for a reward model.
    """

    name: str
    digest: str
    vocabulary: str
    heads: tuple[str, ...] = ()
    reward: str = ""
    layout: str = ""
    template: str = ""
    template_problem: str = ""
    max_model_len: int | None = None
    weights_layout: str = ""

    def entry(self) -> dict[str, object]:
        """Return what ``/v1/models`` tells of the model."""
        return {
            "id": self.name,
            "object": "model",
            "owned_by": "lightrft",
            "digest": self.digest,
            "vocabulary": self.vocabulary,
            "heads": list(self.heads),
            "reward": self.reward,
            "layout": self.layout,
            "max_model_len": self.max_model_len,
            "template": self.template,
            "template_problem": self.template_problem,
            "weights_layout": self.weights_layout,
        }

    def retrieved(self, call: HTTPCall) -> dict[str, object]:
        """Answer ``/v1/models/{name}``.

        Raises:
            HTTPProblem: The model has another name.
        """
        if call.body["name"] != self.name:
            raise HTTPProblem(
                404, f"no model is named {call.body['name']!r}; this server has {self.name!r}"
            )
        return self.entry()

    def named(self, kind: str) -> dict[str, object]:
        """Return the first fields of an answer, as in the API of OpenAI.

        Args:
            kind: Beginning of the id of the answer.
        """
        made = f"{kind}-{uuid.uuid4().hex}"
        return {"id": made, "object": "list", "created": int(time.time()), "model": self.name}


class RewardService:
    """Answers requests with scores of ``model``.

    Args:
        model: The reward model, in evaluation mode.
        tokenizer: Its tokenizer.
        processor: Its media processor. ``None`` for a model that reads text alone.
        config: Settings of the server.
        metrics: Counts samples and scores that are not finite.
    """

    def __init__(
        self,
        model: RewardModel,
        tokenizer: PreTrainedTokenizerBase,
        processor: Processor | None,
        config: ServeRMConfig,
        metrics: ServerMetrics,
    ) -> None:
        self.model = model
        self.metrics = metrics
        self.budget = config.batching.max_tokens
        self.context = context_length(model.base.config)
        embeddings: Any = model.base.get_input_embeddings()
        self.vocabulary: int = embeddings.num_embeddings
        self.encoder = SampleEncoder(tokenizer, processor, config.media, self.vocabulary)
        self.served = ServedModel(
            config.name or config.model.path,
            weights_digest(model),
            vocabulary_digest(tokenizer),
            tuple(model.score_names),
            model.reward_name,
            model.layout,
            template_digest(tokenizer),
            self.encoder.template_problem(),
        )
        self._threads = ThreadPoolExecutor(ENCODERS, thread_name_prefix="encode")
        self.batcher: Batcher[Payload] = Batcher(self.compute, config.batching, metrics)

    @property
    def problem(self) -> str:
        """The reason why nothing is computed; empty while requests are answered."""
        return self.batcher.problem

    def endpoints(self) -> list[Endpoint]:
        """Return the addresses of this model."""
        return [
            Endpoint(("/get_reward",), self.get_reward, fields=GET_REWARD),
            Endpoint(("/score", "/v1/score"), self.score, fields=SCORE),
            Endpoint(("/classify", "/v1/classify"), self.classify, fields=CLASSIFY),
            Endpoint(("/pooling", "/v1/pooling"), self.pooling, fields=POOLING),
            Endpoint((PATH,), self.rewards, fields=REWARDS),
        ]

    def stop(self) -> None:
        """Let no request wait for others to share its batch."""
        self.batcher.stop()

    def close(self) -> None:
        """Finish the requests that wait, and stop."""
        self._threads.shutdown()
        self.batcher.close()

    @torch.inference_mode()
    def compute(self, works: Sequence[Work[Payload]]) -> list[Outputs]:
        """Return the outputs of each work, computed together. See ``Batcher``."""
        first = works[0].payload
        if isinstance(first, Batch):  # alone in its batch, see ``rewards``
            batch, sizes = first, [len(first)]
        else:
            groups = [work.payload for work in works if not isinstance(work.payload, Batch)]
            batch = batch_of_samples(list(itertools.chain.from_iterable(groups)))
            sizes = [len(group) for group in groups]
        parts = micro_batches(batch, self.budget, self.model.layout)
        if len(parts) == 1:
            # rows as they were sent: a local call with these rows has the same rounding
            parts = [torch.arange(len(batch))]
        matrix = torch.zeros(0)
        found: Mapping[str, HeadOutputs] = {}
        for index in parts:
            found = self.model.score(batch.select(index))
            rows = joined(found).double().cpu()
            if not len(matrix):
                matrix = torch.zeros(len(batch), rows.shape[1], dtype=torch.float64)
            matrix[index] = rows
        self.metrics.count("scored_samples", len(batch))
        self.metrics.count("nonfinite_scores", int((~matrix.isfinite()).any(1).sum()))
        return [dict(separated(part, found)) for part in matrix.split(sizes)]

    async def get_reward(self, call: HTTPCall) -> dict[str, object]:
        """Answer as the reward server of OpenRLHF, or as LightRFT's trainer expects it."""
        texts = call.listed(*TEXTS)
        prompts = call.body.get("prompts") or [None] * len(texts)
        images = call.body.get("images") or [None] * len(texts)
        for name, values in (("prompts", prompts), ("images", images)):
            if len(values) != len(texts):
                raise bad(
                    f"the request has {len(texts)} texts and {len(values)} {name}; send as many"
                )
        if self.model.gate is not None and not all(prompts):
            raise bad("this model weights its heads by the prompt; send prompts too")

        def encode(k: int) -> Sample:
            return self.encoder.query(texts[k], prompts[k], k, images[k])

        head = self._head(call)
        outputs, _ = await self._outputs(call, encode, len(texts))
        rewards = numbers(outputs[head].scores)
        logs = {name: numbers(head.scores) for name, head in outputs.items()}
        return {"rewards": rewards, "scores": rewards, "extra_logs": logs}

    async def score(self, call: HTTPCall) -> dict[str, object]:
        """Answer as ``/score`` of vLLM: the score of each answer to a question."""
        asked = call.listed(*PROMPTS)
        answers = call.listed(*RESPONSES)
        if len(asked) not in (1, len(answers)):
            raise bad(
                f"text_1 has {len(asked)} items and text_2 {len(answers)}; send one text_1, or as "
                "many of both"
            )
        asked = asked * len(answers) if len(asked) == 1 else asked

        def encode(k: int) -> Sample:
            return self.encoder.pair(asked[k], answers[k], f"pair {k}")

        outputs, tokens = await self._outputs(call, encode, len(answers))
        rows = []
        for k, value in enumerate(numbers(outputs[self._head(call)].scores)):
            rows.append({"index": k, "object": "score", "score": value})
        return {**self.served.named("score"), "data": rows, "usage": usage(tokens)}

    async def classify(self, call: HTTPCall) -> dict[str, object]:
        """Answer as ``/classify`` of vLLM: probabilities of the classes of a head."""
        head = self._head(call)
        outputs, tokens = await self._items(call)
        values = outputs[head].outputs
        is_raw = False in [call.body.get(n) for n in ("use_activation", "activation", "softmax")]
        if head != MIXTURE and not is_raw:
            kinds = {one.name: one.kind for one in self.model.settings.heads}
            values = values.softmax(-1) if kinds[head] == "classes" else values.sigmoid()
        rows = []
        for k, row in enumerate(values):
            label = f"LABEL_{int(row.argmax())}"
            probs = numbers(row)
            rows.append({"index": k, "label": label, "probs": probs, "num_classes": len(probs)})
        return {**self.served.named("classify"), "data": rows, "usage": usage(tokens)}

    async def pooling(self, call: HTTPCall) -> dict[str, object]:
        """Answer as ``/pooling`` of vLLM: the score of each head, or the outputs of one head."""
        form = call.body.get("encoding_format", "float")
        if form not in ("float", "base64"):
            raise bad(f"encoding_format = {form!r}; take float or base64")
        chosen = call.body.get("head")
        outputs, tokens = await self._items(call)
        if chosen is not None:
            values = outputs[self._head(call)].outputs
        else:
            values = torch.stack([head.scores for head in outputs.values()], 1)
        rows = []
        for k, row in enumerate(values):
            data: object = numbers(row)
            if form == "base64":
                data = base64.b64encode(row.numpy().astype(np.float32).tobytes()).decode()
            rows.append({"index": k, "object": "pooling", "data": data})
        return {**self.served.named("pool"), "data": rows, "usage": usage(tokens)}

    async def rewards(self, call: HTTPCall) -> dict[str, object]:
        """Return the scores of token ids or conversations in a form of ``reward_wire``, by head.

        The request is a batch of its own, so its scores do not depend on other requests. A
        conversation that cannot be read has no score, and its reason is in ``problems``.
        """
        about = {"model": self.served.name, "digest": self.served.digest}
        _check_form(call)
        if "conversations" in call.body:
            return {**about, **await self._answers(call)}
        batch = await asyncio.to_thread(batch_from_json, call.body, self.vocabulary)
        self._check_length(int(_lengths(batch).max()))
        return {**about, "scores": await self._scores(batch, call)}

    async def _answers(self, call: HTTPCall) -> dict[str, object]:
        """Return the scores of conversations, and the problem of each that cannot be read."""
        answers = answers_from_json(call.body)
        loop = asyncio.get_running_loop()

        def encode(k: int) -> Sample | str:
            one = answers[k]
            try:
                sample = self.encoder.answered(
                    one.messages, one.text, cut=one.cut, where="the conversation"
                )
            except DataError as error:
                return str(error)
            return self._length_problem(sample.tokens) or sample

        asked = [loop.run_in_executor(self._threads, encode, k) for k in range(len(answers))]
        found = list(enumerate(await asyncio.gather(*asked)))
        problems = {str(k): one for k, one in found if isinstance(one, str)}
        samples = {k: one for k, one in found if isinstance(one, Sample)}
        scores: dict[str, list[float | None]] = {n: [None] * len(found) for n in self.served.heads}
        if samples:
            origins = [answers[k].conversation for k in samples]
            batch = batch_of_answers(list(samples.values()), origins)
            for name, values in (await self._scores(batch, call)).items():
                for k, value in zip(samples, values, strict=True):
                    scores[name][k] = value
        return {"scores": scores, "problems": problems}

    async def _scores(self, batch: Batch, call: HTTPCall) -> dict[str, list[float | None]]:
        """Return the scores of ``batch``, computed by itself, by head."""
        # a key that equals no other
        work = Work[Payload](batch, int(_lengths(batch).sum()), call.deadline, key=object())
        outputs = await asyncio.wrap_future(self.batcher.submit(work))
        return {name: numbers(head.scores) for name, head in outputs.items()}

    async def _items(self, call: HTTPCall) -> tuple[Outputs, int]:
        """Return the outputs of ``input`` or ``messages``, and the number of tokens."""
        items = call.listed("input", "messages")
        if "messages" in call.body or all(type(one) is int for one in items):
            items = [items]  # messages or token ids of one item

        def encode(k: int) -> Sample:
            return self.encoder.item(items[k], f"item {k}")

        return await self._outputs(call, encode, len(items))

    async def _outputs(
        self, call: HTTPCall, encode: Callable[[int], Sample], count: int
    ) -> tuple[Outputs, int]:
        """Encode items in threads and return their outputs, and the number of their tokens."""
        loop = asyncio.get_running_loop()
        asked = [loop.run_in_executor(self._threads, encode, k) for k in range(count)]
        samples = await asyncio.gather(*asked)
        for sample in samples:
            self._check_length(sample.tokens)
        tokens = sum(sample.tokens for sample in samples)
        work = Work[Payload](samples, tokens, call.deadline, key="samples")
        return await asyncio.wrap_future(self.batcher.submit(work)), tokens

    def _head(self, call: HTTPCall) -> str:
        """Return the name of the head that a request asks for."""
        name = call.body.get("head") or self.served.reward
        if name not in self.served.heads:
            raise bad(f"head = {name!r}: this model has {', '.join(self.served.heads)}")
        return name

    def _check_length(self, tokens: int) -> None:
        problem = self._length_problem(tokens)
        if problem:
            raise bad(problem)

    def _length_problem(self, tokens: int) -> str:
        if self.context is None or tokens <= self.context:
            return ""
        return f"{tokens} tokens of one item exceed the model's context of {self.context}"


def _check_form(call: HTTPCall) -> None:
    """Raise ``HTTPProblem`` unless a request has the fields of one form of ``reward_wire``."""
    call.listed("conversations", "prompts")
    form, own, other = "prompts", "responses", "answers"
    if "conversations" in call.body:
        form, own, other = "conversations", other, own
    if other in call.body:
        raise bad(f"the request has {form!r} and {other!r}; send {own!r} with {form!r}")


def _lengths(batch: Batch) -> Tensor:
    """Return the number of tokens of prompt and response of each row, ``[B]``."""
    return batch.prompts.lengths[batch.prompt_of] + batch.lengths


def batch_of_samples(samples: Sequence[Sample]) -> Batch:
    """Collate ``samples``. Equal prompts without media become one prompt."""
    known: dict[object, int] = {}
    prompts, prompt_of = [], []
    for sample in samples:
        prompt = sample.prompt
        key: object = id(prompt) if prompt.media else tuple(prompt.token_ids)
        if key not in known:
            known[key] = len(prompts)
            prompts.append(prompt)
        prompt_of.append(known[key])
    responses = [Segments.of([sample.response], sample.media) for sample in samples]
    return Batch(
        Segments.of_prompts(prompts),
        Segments.cat(responses),
        torch.tensor(prompt_of, dtype=torch.long),
    )


def numbers(values: Tensor) -> list[float | None]:
    """Return ``values`` as numbers of JSON, which has no infinity: ``None`` is not finite."""
    return [value if math.isfinite(value) else None for value in values.tolist()]


def usage(tokens: int) -> dict[str, int]:
    """Return the numbers of tokens of a request that generates none."""
    return {"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens}


_HEAD: Mapping[str, Types] = {"head": (TEXT, NULL)}
_SEVERAL: Types = (TEXT, OBJECT, LIST)
"""One text or content, or a list of them."""
_UNREAD = ("model", "user", "request_id", "priority", "cache_salt")
_NEUTRAL: dict[str, object] = {
    "truncate_prompt_tokens": None,
    "truncation_side": None,
    "padding": "do_not_pad",
    "mm_processor_kwargs": {},
}
_OF_INPUTS: dict[str, object] = {
    **_NEUTRAL,
    "add_special_tokens": True,
    # messages end with an answer, which is scored as it is
    "add_generation_prompt": False,
    "continue_final_message": False,
    "chat_template": None,
    "chat_template_kwargs": {},
    "media_io_kwargs": {},
}
_ACTIVATION = ("use_activation", "activation", "softmax")
"""Names of one field in different versions of vLLM."""
_INPUTS: Mapping[str, Types] = {
    "input": (TEXT, LIST),
    "messages": (list_of(OBJECT),),
    **_HEAD,
}
PROMPTS, RESPONSES = ("text_1", "queries", "data_1"), ("text_2", "documents", "items", "data_2")
"""Names of the two sides of ``/score`` of vLLM."""

TEXTS = ("query", "queries")
"""Names of the texts of ``/get_reward``: of OpenRLHF, and of LightRFT."""
GET_REWARD = RequestFields(
    read={**dict.fromkeys(TEXTS, (TEXT, LIST)), "prompts": (LIST, NULL), "images": (LIST, NULL)}
    | _HEAD,
    # no reward model reads the reference answers
    unread=("labels", "references"),
)
"""``/get_reward`` of OpenRLHF and of LightRFT."""
SCORE = RequestFields(
    read={**dict.fromkeys((*PROMPTS, *RESPONSES), _SEVERAL), **_HEAD},
    unread=_UNREAD,
    # a score is the output of its head
    neutral={**_NEUTRAL, **dict.fromkeys(_ACTIVATION, False)},
)
"""``/score`` of vLLM."""
CLASSIFY = RequestFields(
    read={**_INPUTS, **dict.fromkeys(_ACTIVATION, (BOOLEAN, NULL))},
    unread=_UNREAD,
    neutral=_OF_INPUTS,
)
"""``/classify`` of vLLM."""
POOLING = RequestFields(
    read={**_INPUTS, "encoding_format": (TEXT,)},
    unread=_UNREAD,
    neutral={
        **_OF_INPUTS,
        **dict.fromkeys(_ACTIVATION, False),
        "task": "classify",
        "dimensions": None,
        "embed_dtype": "float32",
        "endianness": "native",
    },
)
"""``/pooling`` of vLLM."""
_TOKENS = RequestFields(read={"input_ids": (LIST,), "media": (TEXT, NULL)})
REWARDS = RequestFields(
    read={
        "prompts": (object_of(_TOKENS),),
        "responses": (object_of(_TOKENS),),
        "conversations": (LIST,),
        "answers": (LIST,),
        "prompt_of": (LIST,),
    }
)
"""The forms of ``reward_wire``."""
