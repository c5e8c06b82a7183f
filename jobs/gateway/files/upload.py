"""Reads an upload, multipart/form-data: the file goes to the disk as it arrives, at most so many
bytes of it, and the fields beside it are short texts."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path
from typing import Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from jobs.api.wire import describe
from jobs.errors import invalid
from jobs.gateway.bodies import discard
from jobs.gateway.failures import HttpError
from jobs.gateway.folders import on_disk
from jobs.sizes import size_texts

FORM = b"multipart/form-data"
OVERHEAD = 64 * 1024  # bytes of a body beside its file
WRITE_BYTES = 2**20  # at once
SLOWEST = 64 * 1024  # bytes in a second that a client must send after the first ones
MAX_NAME = 255  # characters


class Upload:
    """A form while it is read. `fields`: the texts. `filename`: None until the file has begun."""

    def __init__(self) -> None:
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.size = 0  # of the file
        self.ended = False
        self.unwritten = bytearray()  # of the file
        self._header = (bytearray(), bytearray())  # name and value of the header that is read
        self._disposition = b""
        self._name = ""
        self._text: bytearray | None = None  # of the part that is read; None: it is the file

    def callbacks(self) -> Any:
        return {
            "on_part_begin": self._begin,
            "on_part_data": self._data,
            "on_part_end": self._end,
            "on_header_field": lambda data, start, end: self._add(0, data[start:end]),
            "on_header_value": lambda data, start, end: self._add(1, data[start:end]),
            "on_header_end": self._end_header,
            "on_headers_finished": self._end_headers,
            "on_end": self._finish,
        }

    def _begin(self) -> None:
        self._disposition = b""

    def _add(self, which: int, data: bytes) -> None:
        self._header[which].extend(data)

    def _end_header(self) -> None:
        name, value = self._header
        if bytes(name).lower() == b"content-disposition":
            self._disposition = bytes(value)
        self._header = (bytearray(), bytearray())

    def _end_headers(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"").decode(errors="replace")
        self._text = bytearray()
        if self._name != "file":
            if b"filename" in options or self._name in self.fields:
                raise invalid(f"{describe(self._name)} may be given once, and as text", "file")
            return
        if self.filename is not None or b"filename" not in options:
            raise invalid("file: send one file, with a filename", "file")
        self.filename = _base_name(options[b"filename"].decode(errors="replace"))
        self._text = None

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._text is None:
            self.unwritten += data[start:end]
            self.size += end - start
        else:
            self._text += data[start:end]

    def _end(self) -> None:
        if self._text is not None:
            self.fields[self._name] = self._text.decode(errors="replace")

    def _finish(self) -> None:
        self.ended = True


async def read_upload(request: Request, data: Path, limit: int, seconds: float) -> Upload:
    """Write the file of a form to `data`, durably. Raises HttpError and InvalidRequest; the file is
    not complete then."""
    kind, options = parse_options_header(request.headers.get("content-type"))
    boundary = options.get(b"boundary")
    if kind != FORM or not boundary:
        raise HttpError(
            415,
            "an upload needs the content-type multipart/form-data with a boundary",
            "unsupported_media_type",
        )
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit + OVERHEAD:
        await discard(request)
        raise _too_large(int(declared), limit)
    upload = Upload()
    file = await on_disk(data.open, "wb")
    try:
        await _read(
            request, upload, MultipartParser(boundary, upload.callbacks()), file, limit, seconds
        )
        await on_disk(file.write, upload.unwritten)
        await on_disk(file.flush)
        await on_disk(os.fsync, file.fileno())
    except TimeoutError:
        raise HttpError(
            408,
            f"the upload did not arrive in time, {seconds:g} s and 1 s for each "
            f"{SLOWEST // 1024} kB: send it faster",
            "request_timeout",
            headers={"connection": "close", "x-should-retry": "false"},
        ) from None
    except FormParserError:
        raise invalid("the body is no valid multipart/form-data", "file") from None
    finally:
        file.close()
    if not upload.ended:
        raise invalid("the body is no valid multipart/form-data: it has no end", "file")
    if upload.filename is None:
        raise invalid("file: the form has no file", "file")
    return upload


async def _read(
    request: Request,
    upload: Upload,
    parser: MultipartParser,
    file: Any,
    limit: int,
    seconds: float,
) -> None:
    begin, received = asyncio.get_running_loop().time(), 0
    async with asyncio.timeout(seconds) as allowed:
        async for part in request.stream():
            received += len(part)
            allowed.reschedule(begin + seconds + received / SLOWEST)
            parser.write(part)
            beside = received - upload.size
            if upload.size > limit or beside > OVERHEAD:
                upload.unwritten.clear()
                await discard(request)
                if upload.size > limit:
                    raise _too_large(upload.size, limit)
                raise invalid("the form has more than a file and short fields", "file")
            if len(upload.unwritten) >= WRITE_BYTES:
                await on_disk(file.write, bytes(upload.unwritten))
                upload.unwritten.clear()


def _too_large(size: int, limit: int) -> HttpError:
    has, most = size_texts(size, limit)
    return HttpError(
        413,
        f"the file has {has} or more, and the limit (--max-file) is {most}",
        "request_too_large",
        headers={"connection": "close", "x-should-retry": "false"},
    )


def _base_name(name: str) -> str:
    """The name of a file without folders. Raises InvalidRequest."""
    last = re.split(r"[/\\]", name)[-1]
    if not last or len(last) > MAX_NAME or not last.isprintable():
        raise invalid(f"file: a name has 1 to {MAX_NAME} printable characters", "file")
    return last
