"""Messages between processes: a JSON header and byte strings. Never pickle.

    message    u32 length of the header, header, parts one after the other
    frame      u64 length of the message, message

The header's own field `_part_lens` tells where a part ends.
"""

import json
import os
import struct
from collections.abc import Mapping
from typing import Any

_HEADER_LEN = struct.Struct("<I")
_FRAME_LEN = struct.Struct("<Q")
FRAME_LEN_SIZE = _FRAME_LEN.size


def pack(header: Mapping[str, Any], *parts: bytes) -> bytes:
    """One message. O(bytes)."""
    text = json.dumps({**header, "_part_lens": [len(part) for part in parts]}).encode()
    return b"".join((_HEADER_LEN.pack(len(text)), text, *parts))


def unpack(message: bytes) -> tuple[dict[str, Any], list[bytes]]:
    """What `pack` was given. O(bytes)."""
    start = _HEADER_LEN.size
    end = start + _HEADER_LEN.unpack_from(message)[0]
    header = json.loads(message[start:end])
    parts = []
    for length in header.pop("_part_lens"):
        parts.append(message[end : end + length])
        end += length
    return header, parts


def frame_len(prefix: bytes) -> int:
    """Length of the message behind the first `FRAME_LEN_SIZE` bytes of a frame."""
    length: int = _FRAME_LEN.unpack(prefix)[0]
    return length


def write_frame(fd: int, message: bytes) -> None:
    """Raises OSError where nobody reads any more."""
    write_all(fd, _FRAME_LEN.pack(len(message)))
    write_all(fd, message)


def write_all(fd: int, content: bytes) -> None:
    """Raises OSError where nobody reads any more."""
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(fd, rest) :]


def read_frame(fd: int) -> bytes | None:
    """Waits for a whole frame; None where the other side has closed."""
    prefix = _read_exactly(fd, FRAME_LEN_SIZE)
    return None if prefix is None else _read_exactly(fd, frame_len(prefix))


def _read_exactly(fd: int, size: int) -> bytes | None:
    content = bytearray()
    while len(content) < size:
        piece = os.read(fd, min(size - len(content), 2**20))
        if not piece:
            return None
        content += piece
    return bytes(content)
