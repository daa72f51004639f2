"""Hypothesis strategies for protobuf messages of any type."""

from collections.abc import Mapping
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

# Strategies for plausible values of fields, by the field's name or full name.
Likely = Mapping[str, st.SearchStrategy[Any]]

_SCALARS: Mapping[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.CPPTYPE_INT32: st.integers(-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: st.integers(-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: st.integers(0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: st.integers(0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_FLOAT: st.floats(width=32),
    FieldDescriptor.CPPTYPE_DOUBLE: st.floats(),
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
    FieldDescriptor.CPPTYPE_ENUM: st.integers(-(2**31), 2**31 - 1),  # proto3 allows any value
}
_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
# Maximum number of elements of a repeated field.
_MAX_ELEMENTS = 3


def messages(kind: Descriptor, likely: Likely) -> st.SearchStrategy[Message]:
    """Return a strategy for messages of a type.

    `likely` maps names of fields to strategies of plausible values. Most values of these fields
    come from these strategies. All other values are arbitrary.
    """
    sent = {f.name: _likely_values(f, likely) for f in kind.fields if _is_likely(f, likely)}
    others = {f.name: _field_values(f, likely) for f in kind.fields if f.name not in sent}
    message_class = GetMessageClass(kind)
    return st.fixed_dictionaries(sent, optional=others).map(lambda values: message_class(**values))


def _is_likely(field: FieldDescriptor, likely: Likely) -> bool:
    return field.name in likely or field.full_name in likely


def _likely_values(field: FieldDescriptor, likely: Likely) -> st.SearchStrategy[Any]:
    expected = likely[field.full_name if field.full_name in likely else field.name]
    unexpected = _field_values(field, likely)
    return st.integers(0, 15).flatmap(lambda number: expected if number < 15 else unexpected)


def _field_values(field: FieldDescriptor, likely: Likely) -> st.SearchStrategy[Any]:
    kind = field.message_type
    if kind is not None and kind.GetOptions().map_entry:
        return st.dictionaries(_TEXT, _values(kind.fields_by_name["value"], likely), max_size=1)
    values = _values(field, likely)
    return st.lists(values, max_size=_MAX_ELEMENTS) if field.is_repeated else values


def _values(field: FieldDescriptor, likely: Likely) -> st.SearchStrategy[Any]:
    if field.message_type is not None:
        return messages(field.message_type, likely)
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return st.binary(max_size=64) if field.type == FieldDescriptor.TYPE_BYTES else _TEXT
    return _SCALARS[field.cpp_type]
