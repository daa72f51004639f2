"""Messages of open_inference.proto, built from the descriptors that `make protos` writes.

They have their own descriptor pool. In the default pool they would collide with the messages of
tritonclient, which have the same names.
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
