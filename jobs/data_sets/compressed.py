"""Files that are compressed with gzip or zstd, read as a stream."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable
from typing import IO, Any

from jobs.errors import invalid

# The first bytes of compressed files.
MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
UNREAD = {b"BZh": "bzip2", b"\xfd7zXZ\x00": "xz", b"\x04\x22\x4d\x18": "lz4"}
BZIP2_BLOCK = b"1AY&SY"  # after the level: text may begin with BZh


def compression_of(head: bytes) -> str | None:
    """The compression of a file with these first bytes. Raises InvalidRequest for one that is not
    supported."""
    for magic, name in UNREAD.items():
        if head.startswith(magic) and (name != "bzip2" or head[4:10] == BZIP2_BLOCK):
            raise invalid(f"the file is compressed with {name}: decompress it, or use gzip or zstd")
    return next((name for magic, name in MAGIC.items() if head.startswith(magic)), None)


def decompressed(file: IO[bytes], compression: str) -> IO[bytes]:
    """The content of a file from its position on. `file` stays open."""
    if compression == "gzip":
        return io.BufferedReader(_Stream(gzip.GzipFile(fileobj=file).read, compression))
    import pyarrow as pa

    if not pa.Codec.is_available(compression):
        raise invalid(f"this pyarrow can't read {compression}: decompress the file")
    source = pa.PythonFile(_KeptOpen(file), mode="r")
    stream = pa.CompressedInputStream(source, compression)
    return io.BufferedReader(_Stream(stream.read, compression))


class _Stream(io.RawIOBase):
    """Decompressed bytes. Raises InvalidRequest for damaged data."""

    def __init__(self, read: Callable[[int], bytes], compression: str) -> None:
        self._read, self._compression = read, compression

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        import pyarrow as pa

        try:
            data = self._read(len(buffer))
        except (EOFError, OSError, zlib.error, pa.ArrowException) as error:
            raise invalid(
                f"the {self._compression} data of the file is damaged or cut off: {error}"
            ) from None
        buffer[: len(data)] = data
        return len(data)


class _KeptOpen:
    """A file that pyarrow does not close when its stream ends."""

    closed = False

    def __init__(self, file: IO[bytes]) -> None:
        self.read = file.read

    def close(self) -> None:
        """The file belongs to the caller."""
