"""The wire format of the socket for lookups alone, beside the service's own. Little-endian.

    request   REQUEST (magic, namespace_id, blocks, epoch), then 32 bytes a block
    reply     REPLY (status, bytes), then with status 0 a byte for the tier of each leading block that is here, as in LookupReply; with
              another the name of a gRPC status, a space, and the text that the service would give

One request is under way on a connection at a time.
"""

import struct

SUFFIX = ".lookup"  # of the socket's path, after that of the service's own
MAGIC = b"kvl1"
EPOCH_BYTES = 16  # bytes: what a request has room for, and epochs have
REQUEST = struct.Struct(f"<4sII{EPOCH_BYTES}s")
REPLY = struct.Struct("<II")
