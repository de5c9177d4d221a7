"""The messages of Envoy's external processing and of its access log, as far as an endpoint picker uses them.

They are declared here by the names and numbers of their fields, facts of ``envoy/service/ext_proc/v3``,
``envoy/service/accesslog/v3`` and of what these import; protobuf's own library makes classes of them. Fields that are
left out are skipped by readers. The names of the messages do not travel, so they are ours, and no other package's
declaration of the same stands in the way.
Nothing is generated, so any protobuf of the last years reads this.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, message_factory, struct_pb2
from google.protobuf.descriptor_pool import Default

PACKAGE = "poolgrid.ext_proc"

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
METHOD = "Process"

LOG_SERVICE = "envoy.service.accesslog.v3.AccessLogService"
LOG_METHOD = "StreamAccessLogs"

# What ``processing_mode.proto`` calls the ways in which a body is sent.
NONE, STREAMED, BUFFERED, BUFFERED_PARTIAL, FULL_DUPLEX_STREAMED, GRPC = range(6)

LOG_NOT_SET, LOG_DOWNSTREAM_END = 0, 6
"""Of ``AccessLogType``: an entry for the end of a request; older Envoys do not name it."""

OVERWRITE_IF_EXISTS_OR_ADD = 2
"""Of ``HeaderAppendAction``: the header has this value and no other."""

_Field = tuple[int, str]
"""Number and type: a scalar's name, a message's with ``.``, either with ``[]`` for repeated, ``{}`` for a map from
strings."""

SAID = "said"
"""Name of the choice among what a message can be, for ``WhichOneof``."""

_MESSAGES: dict[str, dict[str, _Field]] = {
    # envoy/config/core/v3/base.proto
    "HeaderValue": {"key": (1, "string"), "value": (2, "string"), "raw_value": (3, "bytes")},
    "HeaderMap": {"headers": (1, ".HeaderValue[]")},
    "HeaderValueOption": {"header": (1, ".HeaderValue"), "append_action": (3, "int32")},
    "Metadata": {"filter_metadata": (1, "struct{}")},
    # envoy/type/v3/http_status.proto; an enum travels as its number
    "HttpStatus": {"code": (1, "int32")},
    # envoy/service/ext_proc/v3/external_processor.proto: from Envoy
    "ProtocolConfiguration": {"request_body_mode": (1, "int32"), "response_body_mode": (2, "int32")},
    "HttpHeaders": {"headers": (1, ".HeaderMap"), "end_of_stream": (3, "bool")},
    "HttpBody": {"body": (1, "bytes"), "end_of_stream": (2, "bool")},
    "HttpTrailers": {"trailers": (1, ".HeaderMap")},
    "ProcessingRequest": {
        "request_headers": (2, ".HttpHeaders"),
        "response_headers": (3, ".HttpHeaders"),
        "request_body": (4, ".HttpBody"),
        "response_body": (5, ".HttpBody"),
        "request_trailers": (6, ".HttpTrailers"),
        "response_trailers": (7, ".HttpTrailers"),
        "metadata_context": (8, ".Metadata"),
        "attributes": (9, "struct{}"),
        "protocol_config": (11, ".ProtocolConfiguration"),
    },
    # the same: to Envoy
    "HeaderMutation": {"set_headers": (1, ".HeaderValueOption[]"), "remove_headers": (2, "string[]")},
    "StreamedBodyResponse": {"body": (1, "bytes"), "end_of_stream": (2, "bool")},
    "BodyMutation": {"streamed_response": (3, ".StreamedBodyResponse")},
    "CommonResponse": {
        "header_mutation": (2, ".HeaderMutation"),
        "body_mutation": (3, ".BodyMutation"),
        "clear_route_cache": (5, "bool"),
    },
    "HeadersResponse": {"response": (1, ".CommonResponse")},
    "BodyResponse": {"response": (1, ".CommonResponse")},
    "TrailersResponse": {"header_mutation": (1, ".HeaderMutation")},
    "ImmediateResponse": {
        "status": (1, ".HttpStatus"),
        "headers": (2, ".HeaderMutation"),
        "body": (3, "bytes"),
        "details": (5, "string"),
    },
    "ProcessingResponse": {
        "request_headers": (1, ".HeadersResponse"),
        "response_headers": (2, ".HeadersResponse"),
        "request_body": (3, ".BodyResponse"),
        "response_body": (4, ".BodyResponse"),
        "request_trailers": (5, ".TrailersResponse"),
        "response_trailers": (6, ".TrailersResponse"),
        "immediate_response": (7, ".ImmediateResponse"),
        "dynamic_metadata": (8, "struct"),
    },
    # envoy/data/accesslog/v3/accesslog.proto, envoy/service/accesslog/v3/als.proto: from Envoy
    "AccessLogCommon": {"metadata": (17, ".Metadata"), "access_log_type": (33, "int32")},
    "HTTPAccessLogEntry": {"common_properties": (1, ".AccessLogCommon")},
    "HTTPAccessLogEntries": {"log_entry": (1, ".HTTPAccessLogEntry[]")},
    "StreamAccessLogsMessage": {"http_logs": (2, ".HTTPAccessLogEntries")},
}

_CHOICES = {
    "ProcessingRequest": (
        "request_headers", "response_headers", "request_body", "response_body", "request_trailers", "response_trailers",
    ),
    "ProcessingResponse": (
        "request_headers", "response_headers", "request_body", "response_body", "request_trailers",
        "response_trailers", "immediate_response",
    ),
}  # fmt: skip
"""Of which fields exactly one is set."""

_SCALARS = {
    "string": descriptor_pb2.FieldDescriptorProto.TYPE_STRING,
    "bytes": descriptor_pb2.FieldDescriptorProto.TYPE_BYTES,
    "bool": descriptor_pb2.FieldDescriptorProto.TYPE_BOOL,
    "int32": descriptor_pb2.FieldDescriptorProto.TYPE_INT32,
}
_STRUCT = "google.protobuf.Struct"


def _declare() -> Any:
    """Return the declaration of all messages, as protobuf wants it."""
    file = descriptor_pb2.FileDescriptorProto(name="poolgrid/ext_proc.proto", package=PACKAGE, syntax="proto3")
    file.dependency.append(struct_pb2.DESCRIPTOR.name)
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        if name in _CHOICES:
            message.oneof_decl.add(name=SAID)
        for field, (number, kind) in fields.items():
            declared = message.field.add(name=field, number=number)
            declared.label = declared.LABEL_REPEATED if kind.endswith(("[]", "{}")) else declared.LABEL_OPTIONAL
            if kind.endswith("{}"):
                entry = message.nested_type.add(name=f"{field.title().replace('_', '')}Entry")
                entry.options.map_entry = True
                key = entry.field.add(name="key", number=1, label=declared.LABEL_OPTIONAL)
                key.type = _SCALARS["string"]
                _type(entry.field.add(name="value", number=2, label=declared.LABEL_OPTIONAL), kind[:-2])
                declared.type = declared.TYPE_MESSAGE
                declared.type_name = f".{PACKAGE}.{name}.{entry.name}"
            else:
                _type(declared, kind.removesuffix("[]"))
            if field in _CHOICES.get(name, ()):
                declared.oneof_index = 0
    return file


def _type(field: Any, kind: str) -> None:
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type = field.TYPE_MESSAGE
        field.type_name = f".{_STRUCT}" if kind == "struct" else f".{PACKAGE}{kind}"


def _class(name: str) -> Any:
    return message_factory.GetMessageClass(Default().FindMessageTypeByName(f"{PACKAGE}.{name}"))


Default().AddSerializedFile(_declare().SerializeToString())

ProcessingRequest = _class("ProcessingRequest")
ProcessingResponse = _class("ProcessingResponse")
StreamAccessLogsMessage = _class("StreamAccessLogsMessage")
