"""The records of TensorFlow Federated's SQLite files: messages of the type tf.train.Example.

The message type is declared here, so TensorFlow is not needed.
"""

from collections.abc import Iterable

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

from fedda.data.readers.common import Arrays

_LISTS = {"bytes_list": object, "float_list": np.float32, "int64_list": np.int64}
_DECLARATION = """
name: "fedda_example.proto" package: "fedda" syntax: "proto3"
message_type { name: "Example"
  field { number: 1 name: "features" type: TYPE_MESSAGE type_name: "Features" } }
message_type { name: "Features"
  field { number: 1 name: "feature" label: LABEL_REPEATED
          type: TYPE_MESSAGE type_name: "FeatureEntry" }
  nested_type { name: "FeatureEntry" options { map_entry: true }
    field { number: 1 name: "key" type: TYPE_STRING }
    field { number: 2 name: "value" type: TYPE_MESSAGE type_name: "Feature" } } }
message_type { name: "Feature" oneof_decl { name: "kind" }
  field { number: 1 name: "bytes_list" oneof_index: 0 type: TYPE_MESSAGE type_name: "Bytes" }
  field { number: 2 name: "float_list" oneof_index: 0 type: TYPE_MESSAGE type_name: "Floats" }
  field { number: 3 name: "int64_list" oneof_index: 0 type: TYPE_MESSAGE type_name: "Ints" } }
message_type { name: "Bytes"
  field { number: 1 name: "value" label: LABEL_REPEATED type: TYPE_BYTES } }
message_type { name: "Floats"
  field { number: 1 name: "value" label: LABEL_REPEATED type: TYPE_FLOAT } }
message_type { name: "Ints"
  field { number: 1 name: "value" label: LABEL_REPEATED type: TYPE_INT64 } }
"""
_POOL = descriptor_pool.DescriptorPool()
_POOL.Add(text_format.Parse(_DECLARATION, descriptor_pb2.FileDescriptorProto()))
_Example = message_factory.GetMessageClass(_POOL.FindMessageTypeByName("fedda.Example"))


def decode(data: bytes, names: Iterable[str]) -> Arrays:
    """Return features of one example by name. Byte strings have the dtype object."""
    features = _Example.FromString(data).features.feature
    arrays: Arrays = {}
    for name in names:
        if name not in features:
            raise LookupError(f"no feature {name!r}, only {', '.join(sorted(features))}")
        kind = features[name].WhichOneof("kind") or "bytes_list"
        arrays[name] = np.array(getattr(features[name], kind).value, _LISTS[kind])
    return arrays
