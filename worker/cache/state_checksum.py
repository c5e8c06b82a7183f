"""The checksum of a state file: of its tensors and its header, in which it stands itself."""

from __future__ import annotations

import struct
import zlib
from typing import BinaryIO

NO_CRC = "0" * 8  # in the header while its CRC is computed
CHUNK_BYTES = 1 << 24  # read at once


def crc_field(crc: str) -> bytes:
    """The entry of the checksum in a header."""
    return f'"crc32":"{crc}"'.encode()


def checksum(file: BinaryIO, stated: str) -> str:
    """The CRC of a file whose header states one. Raises struct.error if it is truncated."""
    file.seek(0)
    start = file.read(8)
    header = file.read(struct.unpack("<Q", start)[0])
    crc = zlib.crc32(start + header.replace(crc_field(stated), crc_field(NO_CRC)))
    while chunk := file.read(CHUNK_BYTES):
        crc = zlib.crc32(chunk, crc)
    return f"{crc:08x}"
