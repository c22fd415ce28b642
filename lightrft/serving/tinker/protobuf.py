"""The messages of protobuf between tinker's client and a server.

The client sends training data and reads samples and log-probs in this form. A field that no table
here has is refused, so that nothing is dropped which a newer client sends.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Any

from lightrft.serving.problems import bad

VARINT, FIXED64, BYTES = 0, 1, 2
"""Types on the wire, see https://protobuf.dev/programming-guides/encoding."""
ENDS_AFTER = 10
"""Most bytes of a number."""


SCHEMA = """
SparseCsr: 1 values bytes, 2 crow_indices bytes, 3 col_indices bytes
Tensor: 1 dense bytes, 2 sparse_csr SparseCsr, 3 dtype int, 4 shape* int
EncodedTextChunk: 1 tokens bytes
Chunk: 1 encoded_text EncodedTextChunk, 2 image bytes, 3 dmel bytes
Input: 1 key text, 2 value Tensor
Datum: 1 model_input* Chunk, 2 loss_fn_inputs* Input, 3 model_input_spans* bytes,
  4 loss_fn_input_spans* bytes
Number: 1 key text, 2 value double
ConfigValue: 1 number double, 2 text text
Config: 1 key text, 2 value ConfigValue
ForwardBackwardRequest: 1 model_id text, 2 seq_id int, 3 data* Datum, 4 loss_fn text,
  5 loss_fn_config* Number, 6 forward_only int, 7 loss_fn_config_v2* Config
BatchedTensor: 1 data bytes, 2 offsets bytes, 3 dtype int, 4 trailing_shape* int
Field: 1 key text, 2 value BatchedTensor
ArrayRecord: 2 fields* Field, 3 num_datums int
ForwardBackwardOutput: 1 loss_fn_output_type text, 2 loss_fn_outputs* ArrayRecord,
  3 metrics* Number
TopkLogprobs: 1 token_ids bytes, 2 logprobs bytes, 3 k int, 4 length int
SampledSequence: 1 stop_reason int, 2 tokens bytes, 3 logprobs bytes,
  4 topk_sampled_logprobs TopkLogprobs
SampleResponse: 1 sequences* SampledSequence, 2 prompt_logprobs bytes,
  3 topk_prompt_logprobs TopkLogprobs
"""
"""The messages: number, name and type of each field. A name with ``*`` repeats."""


def _messages() -> dict[str, dict[int, tuple[str, str]]]:
    found: dict[str, dict[int, tuple[str, str]]] = {}
    for line in SCHEMA.replace("\n  ", " ").strip().splitlines():
        name, _, fields = line.partition(": ")
        rows = (field.split() for field in fields.split(", "))
        found[name] = {int(number): (field, kind) for number, field, kind in rows}
    return found


MESSAGES = _messages()
"""By name of the message, and number of the field: its name and type."""


def encode(message: str, values: Mapping[str, Any]) -> bytes:
    """Return ``values`` as a message. A field that is missing or ``None`` is left out."""
    found = bytearray()
    for number, (name, kind) in MESSAGES[message].items():
        repeats = name.endswith("*")
        value = values.get(name.rstrip("*"))
        for one in value or () if repeats else (value,):
            if one is None:
                continue
            if kind == "int":
                found += _varint(number << 3 | VARINT) + _varint(one)
            elif kind == "double":
                found += _varint(number << 3 | FIXED64) + struct.pack("<d", one)
            else:
                if kind in MESSAGES:
                    one = encode(kind, one)
                data = one.encode() if isinstance(one, str) else bytes(one)
                found += _varint(number << 3 | BYTES) + _varint(len(data)) + data
    return bytes(found)


def decode(message: str, data: bytes) -> dict[str, Any]:
    """Return the fields of a message. A field that repeats is a list, which may be empty.

    Raises ``HTTPProblem`` for a message that is malformed, or has a field that is unknown here.
    """
    fields = MESSAGES[message]
    found: dict[str, Any] = {n[:-1]: [] for n, _ in fields.values() if n.endswith("*")}
    try:
        for number, value in _fields(data):
            if number not in fields:
                raise bad(
                    f"{message} has a field with the number {number}, which this server does not "
                    "know; take the version of tinker that its documentation names"
                )
            name, kind = fields[number]
            if name.endswith("*"):
                packed = kind == "int" and isinstance(value, bytes)
                found[name[:-1]] += _numbers(value) if packed else [_value(kind, value)]
            else:
                found[name] = _value(kind, value)
    except (IndexError, ValueError, TypeError, struct.error) as error:
        raise bad(f"a {message} is malformed: {error}") from error
    return found


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])


def _read(data: bytes, at: int) -> tuple[int, int]:
    """Return the number at ``at``, and the place after it."""
    found = 0
    for k in range(ENDS_AFTER):
        found |= (data[at + k] & 0x7F) << 7 * k
        if data[at + k] < 0x80:
            return found, at + k + 1
    raise ValueError("a number does not end")


def _numbers(data: bytes) -> list[int]:
    """Return the numbers of a packed field."""
    found, at = [], 0
    while at < len(data):
        number, at = _read(data, at)
        found.append(number)
    return found


def _fields(data: bytes) -> Iterator[tuple[int, int | float | bytes]]:
    """Yield number and value of each field."""
    at = 0
    while at < len(data):
        key, at = _read(data, at)
        kind = key & 7
        if kind == VARINT:
            value, at = _read(data, at)
            yield key >> 3, value
        elif kind == FIXED64:
            yield key >> 3, struct.unpack_from("<d", data, at)[0]
            at += 8
        elif kind == BYTES:
            size, at = _read(data, at)
            if at + size > len(data):
                raise ValueError("it is truncated")
            yield key >> 3, data[at : at + size]
            at += size
        else:
            raise ValueError(f"a field has the type {kind}")


def _value(kind: str, value: int | float | bytes) -> Any:
    expected = {"int": int, "double": float}.get(kind, bytes)
    if not isinstance(value, expected):
        raise ValueError("a field has the wrong type")
    if isinstance(value, bytes) and kind != "bytes":
        return value.decode() if kind == "text" else decode(kind, value)
    return value
