from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MaskFormat(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MASK_FORMAT_UNSPECIFIED: _ClassVar[MaskFormat]
    MASK_FORMAT_RLE: _ClassVar[MaskFormat]
    MASK_FORMAT_PROBABILITIES: _ClassVar[MaskFormat]
    MASK_FORMAT_NONE: _ClassVar[MaskFormat]
    MASK_FORMAT_POLYGON: _ClassVar[MaskFormat]
MASK_FORMAT_UNSPECIFIED: MaskFormat
MASK_FORMAT_RLE: MaskFormat
MASK_FORMAT_PROBABILITIES: MaskFormat
MASK_FORMAT_NONE: MaskFormat
MASK_FORMAT_POLYGON: MaskFormat

class DetectRequest(_message.Message):
    __slots__ = ("id", "image", "score_threshold", "max_detections", "mask_format", "precision", "priority", "timeout_us", "model")
    ID_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    SCORE_THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    MAX_DETECTIONS_FIELD_NUMBER: _ClassVar[int]
    MASK_FORMAT_FIELD_NUMBER: _ClassVar[int]
    PRECISION_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_US_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    id: str
    image: bytes
    score_threshold: float
    max_detections: int
    mask_format: MaskFormat
    precision: str
    priority: int
    timeout_us: int
    model: str
    def __init__(self, id: _Optional[str] = ..., image: _Optional[bytes] = ..., score_threshold: _Optional[float] = ..., max_detections: _Optional[int] = ..., mask_format: _Optional[_Union[MaskFormat, str]] = ..., precision: _Optional[str] = ..., priority: _Optional[int] = ..., timeout_us: _Optional[int] = ..., model: _Optional[str] = ...) -> None: ...

class DetectResponse(_message.Message):
    __slots__ = ("id", "height", "width", "detections", "timing")
    ID_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    DETECTIONS_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    id: str
    height: int
    width: int
    detections: _containers.RepeatedCompositeFieldContainer[Detection]
    timing: Timing
    def __init__(self, id: _Optional[str] = ..., height: _Optional[int] = ..., width: _Optional[int] = ..., detections: _Optional[_Iterable[_Union[Detection, _Mapping]]] = ..., timing: _Optional[_Union[Timing, _Mapping]] = ...) -> None: ...

class DetectStreamResponse(_message.Message):
    __slots__ = ("id", "response", "error")
    ID_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    id: str
    response: DetectResponse
    error: Error
    def __init__(self, id: _Optional[str] = ..., response: _Optional[_Union[DetectResponse, _Mapping]] = ..., error: _Optional[_Union[Error, _Mapping]] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("code", "message")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: int
    message: str
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class Detection(_message.Message):
    __slots__ = ("label", "class_name", "category_id", "score", "box", "rle", "probabilities", "polygons")
    LABEL_FIELD_NUMBER: _ClassVar[int]
    CLASS_NAME_FIELD_NUMBER: _ClassVar[int]
    CATEGORY_ID_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    BOX_FIELD_NUMBER: _ClassVar[int]
    RLE_FIELD_NUMBER: _ClassVar[int]
    PROBABILITIES_FIELD_NUMBER: _ClassVar[int]
    POLYGONS_FIELD_NUMBER: _ClassVar[int]
    label: int
    class_name: str
    category_id: int
    score: float
    box: Box
    rle: Rle
    probabilities: MaskProbabilities
    polygons: Polygons
    def __init__(self, label: _Optional[int] = ..., class_name: _Optional[str] = ..., category_id: _Optional[int] = ..., score: _Optional[float] = ..., box: _Optional[_Union[Box, _Mapping]] = ..., rle: _Optional[_Union[Rle, _Mapping]] = ..., probabilities: _Optional[_Union[MaskProbabilities, _Mapping]] = ..., polygons: _Optional[_Union[Polygons, _Mapping]] = ...) -> None: ...

class Box(_message.Message):
    __slots__ = ("x_min", "y_min", "x_max", "y_max")
    X_MIN_FIELD_NUMBER: _ClassVar[int]
    Y_MIN_FIELD_NUMBER: _ClassVar[int]
    X_MAX_FIELD_NUMBER: _ClassVar[int]
    Y_MAX_FIELD_NUMBER: _ClassVar[int]
    x_min: float
    y_min: float
    x_max: float
    y_max: float
    def __init__(self, x_min: _Optional[float] = ..., y_min: _Optional[float] = ..., x_max: _Optional[float] = ..., y_max: _Optional[float] = ...) -> None: ...

class Rle(_message.Message):
    __slots__ = ("height", "width", "counts")
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    height: int
    width: int
    counts: bytes
    def __init__(self, height: _Optional[int] = ..., width: _Optional[int] = ..., counts: _Optional[bytes] = ...) -> None: ...

class MaskProbabilities(_message.Message):
    __slots__ = ("side", "values")
    SIDE_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    side: int
    values: bytes
    def __init__(self, side: _Optional[int] = ..., values: _Optional[bytes] = ...) -> None: ...

class Polygons(_message.Message):
    __slots__ = ("polygons",)
    POLYGONS_FIELD_NUMBER: _ClassVar[int]
    polygons: _containers.RepeatedCompositeFieldContainer[Polygon]
    def __init__(self, polygons: _Optional[_Iterable[_Union[Polygon, _Mapping]]] = ...) -> None: ...

class Polygon(_message.Message):
    __slots__ = ("coordinates",)
    COORDINATES_FIELD_NUMBER: _ClassVar[int]
    coordinates: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, coordinates: _Optional[_Iterable[float]] = ...) -> None: ...

class Timing(_message.Message):
    __slots__ = ("decode_us", "queue_us", "infer_us", "encode_us", "batch_size")
    DECODE_US_FIELD_NUMBER: _ClassVar[int]
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    INFER_US_FIELD_NUMBER: _ClassVar[int]
    ENCODE_US_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    decode_us: int
    queue_us: int
    infer_us: int
    encode_us: int
    batch_size: int
    def __init__(self, decode_us: _Optional[int] = ..., queue_us: _Optional[int] = ..., infer_us: _Optional[int] = ..., encode_us: _Optional[int] = ..., batch_size: _Optional[int] = ...) -> None: ...

class GetModelRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class GetModelResponse(_message.Message):
    __slots__ = ("name", "provenance", "categories", "buckets", "precisions", "max_detections", "mask_side", "limits")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PROVENANCE_FIELD_NUMBER: _ClassVar[int]
    CATEGORIES_FIELD_NUMBER: _ClassVar[int]
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    PRECISIONS_FIELD_NUMBER: _ClassVar[int]
    MAX_DETECTIONS_FIELD_NUMBER: _ClassVar[int]
    MASK_SIDE_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    name: str
    provenance: Provenance
    categories: _containers.RepeatedCompositeFieldContainer[Category]
    buckets: _containers.RepeatedCompositeFieldContainer[Bucket]
    precisions: _containers.RepeatedScalarFieldContainer[str]
    max_detections: int
    mask_side: int
    limits: Limits
    def __init__(self, name: _Optional[str] = ..., provenance: _Optional[_Union[Provenance, _Mapping]] = ..., categories: _Optional[_Iterable[_Union[Category, _Mapping]]] = ..., buckets: _Optional[_Iterable[_Union[Bucket, _Mapping]]] = ..., precisions: _Optional[_Iterable[str]] = ..., max_detections: _Optional[int] = ..., mask_side: _Optional[int] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ...) -> None: ...

class Provenance(_message.Message):
    __slots__ = ("checkpoint", "checkpoint_sha256", "iteration", "metrics", "exported_by", "exported_at")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_SHA256_FIELD_NUMBER: _ClassVar[int]
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    EXPORTED_BY_FIELD_NUMBER: _ClassVar[int]
    EXPORTED_AT_FIELD_NUMBER: _ClassVar[int]
    checkpoint: str
    checkpoint_sha256: str
    iteration: int
    metrics: _containers.ScalarMap[str, float]
    exported_by: str
    exported_at: str
    def __init__(self, checkpoint: _Optional[str] = ..., checkpoint_sha256: _Optional[str] = ..., iteration: _Optional[int] = ..., metrics: _Optional[_Mapping[str, float]] = ..., exported_by: _Optional[str] = ..., exported_at: _Optional[str] = ...) -> None: ...

class Category(_message.Message):
    __slots__ = ("id", "name")
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    id: int
    name: str
    def __init__(self, id: _Optional[int] = ..., name: _Optional[str] = ...) -> None: ...

class Bucket(_message.Message):
    __slots__ = ("height", "width")
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    height: int
    width: int
    def __init__(self, height: _Optional[int] = ..., width: _Optional[int] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("max_pixels", "max_message_bytes", "queue_size", "max_batch")
    MAX_PIXELS_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUEUE_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_FIELD_NUMBER: _ClassVar[int]
    max_pixels: int
    max_message_bytes: int
    queue_size: int
    max_batch: int
    def __init__(self, max_pixels: _Optional[int] = ..., max_message_bytes: _Optional[int] = ..., queue_size: _Optional[int] = ..., max_batch: _Optional[int] = ...) -> None: ...
