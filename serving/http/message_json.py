"""Conversion of protobuf messages to JSON values."""

from typing import Any

from google.protobuf.message import Message


def value_from_message(message: Message) -> dict[str, Any]:
    """Return a message as a JSON object with the names of the .proto file, and with all fields.

    Unlike in protobuf's own JSON, 64-bit integers are numbers, as Triton's clients expect.
    Message fields that are not set are omitted.
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
