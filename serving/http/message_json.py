"""Conversion of protobuf messages to JSON values."""

from typing import Any

from google.protobuf.message import Message


def value_from_message(message: Message) -> dict[str, Any]:
    """Convert a message to a JSON object with the field names of the .proto file.

    Unlike in protobuf's own JSON, 64-bit integers are numbers, as Triton's clients expect, and
    fields with default values are included. Message fields, optional fields and members of a oneof
    are omitted if they are not set.
    """
    value: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        if field.has_presence and not message.HasField(field.name):
            continue
        content = getattr(message, field.name)
        kind = field.message_type
        if kind is not None and kind.GetOptions().map_entry:
            entry = kind.fields_by_name["value"]
            value[field.name] = {key: _json_value(entry, content[key]) for key in content}
        elif field.is_repeated:
            value[field.name] = [_json_value(field, element) for element in content]
        else:
            value[field.name] = _json_value(field, content)
    return value


def _json_value(field: Any, value: Any) -> Any:
    if field.message_type is not None:
        return value_from_message(value)
    if field.enum_type is not None:
        return field.enum_type.values_by_number[value].name
    return value
