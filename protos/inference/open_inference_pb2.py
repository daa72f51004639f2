"""The messages of open_inference.proto, from the descriptors that `make protos` writes.

They live in a pool of their own: generated code would put them into the default one, where
tritonclient puts messages of the same names, and no process could use both.
"""

from importlib.resources import files

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.internal import builder

(_file,) = FileDescriptorSet.FromString(
    files(__package__).joinpath("open_inference.binpb").read_bytes()
).file
DESCRIPTOR = DescriptorPool().AddSerializedFile(_file.SerializeToString())
builder.BuildMessageAndEnumDescriptors(DESCRIPTOR, globals())
builder.BuildTopDescriptorsAndMessages(DESCRIPTOR, __name__, globals())
