"""Explains OSErrors of folders: the path, the reason and what to do."""

from __future__ import annotations

import errno
import os
import pwd
from pathlib import Path

_ADVICE = {
    errno.ENOSPC: "free space there, or give the disk more",
    errno.EDQUOT: "free space there, or raise the quota of this user",
    errno.EROFS: "mount it for writing",
    errno.EACCES: "give this user write permission",
    errno.EPERM: "give this user write permission",
    errno.EIO: "the disk fails, see the log of the system",
    errno.ESTALE: "mount it again",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "raise the system's limit of open files",
    errno.EFBIG: "raise the limit of the size of files (ulimit -f)",
    errno.ENOTDIR: "move away what has the name of a folder there",
    errno.EEXIST: "move away what has the name of a folder there",
    errno.EISDIR: "move away the folder that has the name of a file",
}
_OF_THE_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE}


class FolderLost(OSError):
    """The path of the results folder does not lead to the folder that the worker began with."""


def explain(error: OSError, root: Path) -> str:
    """The error with the path, and what to do about it."""
    if isinstance(error, FolderLost):
        return str(error)
    name = error.filename2 or error.filename  # the second one of a rename is the target
    path = Path(os.fsdecode(name)) if isinstance(name, str | bytes) else root
    if error.errno in (errno.ENOTDIR, errno.EEXIST):
        path = next(one for one in (path, *path.parents) if one.exists())  # what is in the way
    reason = error.strerror or " ".join(str(error).split()) or type(error).__name__
    advice = _ADVICE.get(error.errno or 0, "see the log of the system")
    return f"{path}: {reason}: {advice}"


def explain_denied(error: PermissionError) -> str:
    """The error with the path, and who may use it. It names a file."""
    path = Path(os.fsdecode(error.filename2 or error.filename)).absolute()
    advice = "give this user permission"
    for one in (path, *path.parents):
        try:
            owner = one.stat().st_uid
        except OSError:  # absent, or in a folder that this user may not look into
            continue
        if owner != os.geteuid():
            advice += f", or run this as {_name_of(owner)}, who owns {one}"
        break
    return f"{path}: {error.strerror}: {advice}"


def _name_of(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return f"user {user}"


def is_full(error: OSError) -> bool:
    """True if the disk, or a limit of this process, has no room for the file now."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def fails_all(error: OSError) -> bool:
    """True if no file of any run can be written, so that trying the next one is useless."""
    return isinstance(error, FolderLost) or error.errno in _OF_THE_DISK
