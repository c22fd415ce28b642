"""Messages of tinker's client, compared with Google's implementation of protobuf."""

from __future__ import annotations

import math
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import given
from hypothesis import strategies as st

from lightrft.serving.problems import HTTPProblem
from lightrft.serving.tinker.protobuf import MESSAGES, decode, encode

REFERENCE_TYPES = {"int": 3, "double": 1, "text": 9, "bytes": 12}
KINDS: dict[str, st.SearchStrategy[Any]] = {
    "int": st.integers(0, 2**63 - 1),
    "double": st.floats(allow_nan=False),
    "text": st.text(),
    "bytes": st.binary(max_size=300),
}


def reference() -> dict[str, Any]:
    """The classes that Google's package makes of the same schema."""
    file = descriptor_pb2.FileDescriptorProto(name="t.proto", package="t", syntax="proto3")
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for number, (field, kind) in fields.items():
            made = message.field.add(name=field.rstrip("*"), number=number)
            made.label = 3 if field.endswith("*") else 1
            made.type = REFERENCE_TYPES.get(kind, 11)
            if made.type == 11:
                made.type_name = f".t.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = {name: pool.FindMessageTypeByName(f"t.{name}") for name in MESSAGES}
    return {name: message_factory.GetMessageClass(type) for name, type in found.items()}


CLASSES = reference()


def trees(name: str) -> st.SearchStrategy[dict[str, Any]]:
    fields = {}
    for field, kind in MESSAGES[name].values():
        one = KINDS[kind] if kind in KINDS else st.deferred(lambda kind=kind: trees(kind))
        fields[field.rstrip("*")] = st.lists(one, max_size=3) if field.endswith("*") else one
    return st.fixed_dictionaries(fields)


@pytest.mark.parametrize("name", ["ForwardBackwardRequest", "SampleResponse", "Tensor"])
def test_a_message_is_read_and_written_as_google_does(name):
    @given(trees(name))
    def check(tree: dict[str, Any]) -> None:
        data = encode(name, tree)
        theirs = CLASSES[name](**tree)
        assert CLASSES[name].FromString(data) == theirs
        # Theirs leaves out zeros, and packs numbers.
        assert CLASSES[name].FromString(encode(name, decode(name, theirs.SerializeToString()))) == (
            theirs
        )

    check()


MALFORMED = {
    "truncated": (b"\x0a\x05ab", "it is truncated"),
    "a field of a later version": (b"\xfa\x01\x00", "a field with the number 31"),
    "a number without end": (b"\x10" + b"\xff" * 11, "a number does not end"),
    "text for a number": (b"\x12\x01a", "a field has the wrong type"),
    "a number for text": (b"\x08\x01", "a field has the wrong type"),
    "a type of old": (b"\x0b", "a field has the type 3"),
    "text that is no text": (b"\x0a\x01\xff", "malformed"),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_a_malformed_message_is_refused_with_the_reason(what):
    data, reason = MALFORMED[what]
    with pytest.raises(HTTPProblem, match=reason) as caught:
        decode("ForwardBackwardRequest", data)
    assert caught.value.status == 400


@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(data):
    try:
        found = decode("ForwardBackwardRequest", data)
    except HTTPProblem as problem:
        assert problem.status == 400
    else:
        assert found.keys() >= {"data", "loss_fn_config"}


def test_a_field_without_a_value_is_left_out():
    assert encode("TopkLogprobs", {"k": None, "logprobs": b""}) == b"\x12\x00"
    assert math.isinf(decode("Number", encode("Number", {"value": math.inf}))["value"])
