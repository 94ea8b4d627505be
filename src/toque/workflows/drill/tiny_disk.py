"""Tiny disk that only one process and its children see, to be filled."""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import sys
from pathlib import Path
from typing import Final

_NEW_MOUNTS: Final = 0x00020000  # CLONE_NEWNS of linux/sched.h
_NEW_USERS: Final = 0x10000000  # CLONE_NEWUSER
_PRIVATE: Final = (1 << 18) | (1 << 14)  # MS_PRIVATE | MS_REC of linux/mount.h
_REMOUNT: Final = 1 << 5  # MS_REMOUNT


class NoTinyDiskError(Exception):
    """This system does not allow one; the message says why."""


def mount_tiny_disk(folder: Path, size: int) -> None:
    """Give this process a view of the files in which `folder` is an empty disk of `size` bytes.

    For a process with one thread; others see nothing of it, and it vanishes with the last process
    that sees it.

    Raises:
        NoTinyDiskError: not Linux, or the kernel refuses.
    """
    if not sys.platform.startswith("linux"):
        raise NoTinyDiskError(f"{sys.platform} has no private mounts")
    libc = ctypes.CDLL(ctypes.util.find_library("c"), use_errno=True)
    user, group = os.getuid(), os.getgid()
    if libc.unshare(_NEW_MOUNTS) != 0:
        if libc.unshare(_NEW_MOUNTS | _NEW_USERS) != 0:
            raise NoTinyDiskError(f"the kernel refuses private mounts: {_last_error()}")
        # user_namespaces(7): groups are given up before they may be mapped.
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    if libc.mount(None, b"/", None, _PRIVATE, None) != 0:
        raise NoTinyDiskError(f"the kernel refuses private mounts: {_last_error()}")
    if libc.mount(b"tmpfs", bytes(folder), b"tmpfs", 0, f"size={size}".encode()) != 0:
        raise NoTinyDiskError(f"the kernel refuses a tmpfs: {_last_error()}")


def pages_of(folder: Path) -> int:
    """Bytes that the files of `folder` take on such a disk: whole pages of memory."""
    page = os.sysconf("SC_PAGE_SIZE")
    return sum(-(-file.stat().st_size // page) * page for file in folder.glob("*"))


def resize_tiny_disk(folder: Path, size: int) -> None:
    """Give the disk at `folder` another size.

    Raises:
        NoTinyDiskError: the kernel refuses.
    """
    libc = ctypes.CDLL(ctypes.util.find_library("c"), use_errno=True)
    if libc.mount(b"tmpfs", bytes(folder), b"tmpfs", _REMOUNT, f"size={size}".encode()) != 0:
        raise NoTinyDiskError(f"the kernel refuses another size: {_last_error()}")


def _last_error() -> str:
    return os.strerror(ctypes.get_errno())
