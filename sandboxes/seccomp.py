"""The system call filter of local sandboxes: a BPF program made here, without a compiler or a library.

It allows what it does not name. What it names are calls that a sandboxed program never needs and that widen
what it can reach of the kernel: mounts, namespaces, tracing, keys, modules, rings, rare address families. Calls
of another architecture end the process. Depends on the standard library.
"""

from __future__ import annotations

import errno
import os
import struct
import sys
from collections.abc import Iterable, Mapping

__all__ = ["DENIED", "filter_file", "filter_program"]

DENIED: Mapping[str, tuple[int | None, int | None]] = {
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "setns": (308, 268),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "fanotify_init": (300, 262),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "create_module": (174, None),
    "query_module": (178, None),
    "get_kernel_syms": (177, None),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "syslog": (103, 116),
    "uselib": (134, None),
    "nfsservctl": (180, 42),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    "vhangup": (153, 58),
    "lookup_dcookie": (212, 18),
    "_sysctl": (156, None),
    "move_pages": (279, 239),
    "migrate_pages": (256, 238),
    "mbind": (237, 235),
    "memfd_secret": (447, 447),
}
"""Numbers on x86_64 and aarch64 of calls that fail with EPERM."""
_ABSENT = {
    "clone3": (435, 435),  # its flags lie in memory, where a filter cannot look; libraries then use clone
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
}
"""Calls that fail as on a kernel that does not have them, so that programs do without."""
_CLONE, _UNSHARE, _PERSONALITY = (56, 220), (272, 97), (135, 92)
_SOCKET, _SOCKETPAIR, _IOCTL = (41, 198), (53, 199), (16, 29)
_PRLIMIT = (302, 261)
_SETPRIORITY, _IOPRIO_SET = (141, 140), (251, 30)
_SCHEDULING = ((203, 122), (144, 119), (142, 118), (314, 274))
"""sched_setaffinity, sched_setscheduler, sched_setparam, sched_setattr."""
_FIRST_PROCESS = 1
"""Inside a sandbox it has the same uid as all others, and runs their commands."""
_NEW_NAMESPACES = 0x7E020000
_NEW_TIME_NAMESPACE = 0x80
"""For ``unshare`` only: in ``clone`` these bits are the signal at the end."""
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
_AF_UNIX, _AF_INET, _AF_INET6, _AF_NETLINK = 1, 2, 10, 16
_NETLINK_ROUTE = 0
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Column in the tables above and the kernel's name of the architecture."""
_X32 = 0x40000000

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_KILL, _ALLOW, _ERRNO = 0x80000000, 0x7FFF0000, 0x00050000
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16

Instruction = tuple[int, int, int, int]
"""Code, jumps when true and when false, operand."""


def filter_program(machine: str) -> bytes | None:
    """The filter for ``machine`` as the kernel takes it; ``None`` for machines whose numbers are not known here.

    >>> len(filter_program("x86_64")) % 8
    0
    """
    if machine not in _ARCHITECTURES or sys.byteorder != "little":
        return None
    column, architecture = _ARCHITECTURES[machine]
    program: list[Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_AT),
    ]
    if machine == "x86_64":
        program += [(_AT_LEAST, 0, 1, _X32), _fail(errno.ENOSYS)]
    program += _calls(column)
    program.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in program)


def filter_file() -> int | None:
    """Descriptor of a file with this machine's filter; ``None`` when there is none."""
    program = filter_program(os.uname().machine)
    if program is None:
        return None
    fd = os.memfd_create("seccomp", os.MFD_CLOEXEC)
    os.write(fd, program)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _calls(column: int) -> Iterable[Instruction]:
    for numbers in _ABSENT.values():
        yield from _when(numbers[column], [_fail(errno.ENOSYS)])
    yield from _when(_CLONE[column], [*_if_any(0, _NEW_NAMESPACES, errno.EPERM), (_RETURN, 0, 0, _ALLOW)])
    mask = _NEW_NAMESPACES | _NEW_TIME_NAMESPACE
    yield from _when(_UNSHARE[column], [*_if_any(0, mask, errno.EPERM), (_RETURN, 0, 0, _ALLOW)])
    # Reading it, and the ordinary one.
    yield from _when(_PERSONALITY[column], _only(0, (0xFFFFFFFF, 0), errno.EPERM))
    yield from _when(_SOCKETPAIR[column], _only(0, (_AF_UNIX,), errno.EAFNOSUPPORT))
    yield from _when(_SOCKET[column], _socket())
    yield from _when(_IOCTL[column], _except(1, (_TIOCSTI, _TIOCLINUX), errno.EPERM))
    # A process limits itself, or its children before they run; limits of others end them.
    yield from _when(_PRLIMIT[column], _only(0, (0,), errno.EPERM))
    for call in _SCHEDULING:
        yield from _when(call[column], _except(0, (_FIRST_PROCESS,), errno.EPERM))
    # Which (a process, and neither a group nor a user) and who.
    for call, one in ((_SETPRIORITY, 0), (_IOPRIO_SET, 1)):
        others = [(_LOAD, 0, 0, _ARGUMENTS_AT), (_EQUAL, 1, 0, one), _fail(errno.EPERM)]
        yield from _when(call[column], [*others, *_except(1, (_FIRST_PROCESS,), errno.EPERM)])
    for each in DENIED.values():
        number = each[column]
        if number is not None:
            yield from _when(number, [_fail(errno.EPERM)])


def _socket() -> list[Instruction]:
    families = (_AF_UNIX, _AF_INET, _AF_INET6)
    program: list[Instruction] = [(_LOAD, 0, 0, _ARGUMENTS_AT)]
    for family in families:
        program += [(_EQUAL, 0, 1, family), (_RETURN, 0, 0, _ALLOW)]
    routes = _only(2, (_NETLINK_ROUTE,), errno.EPROTONOSUPPORT)
    return [*program, (_EQUAL, 0, len(routes), _AF_NETLINK), *routes, _fail(errno.EAFNOSUPPORT)]


def _when(number: int, then: list[Instruction]) -> list[Instruction]:
    """``then`` must return in every case: the number is no longer loaded after it."""
    return [(_EQUAL, 0, len(then), number), *then]


def _fail(number: int) -> Instruction:
    return (_RETURN, 0, 0, _ERRNO | number)


def _if_any(argument: int, bits: int, error: int) -> list[Instruction]:
    return [(_LOAD, 0, 0, _ARGUMENTS_AT + 8 * argument), (_ANY_BIT, 0, 1, bits), _fail(error)]


def _only(argument: int, values: tuple[int, ...], error: int) -> list[Instruction]:
    program: list[Instruction] = [(_LOAD, 0, 0, _ARGUMENTS_AT + 8 * argument)]
    for value in values:
        program += [(_EQUAL, 0, 1, value), (_RETURN, 0, 0, _ALLOW)]
    return [*program, _fail(error)]


def _except(argument: int, values: tuple[int, ...], error: int) -> list[Instruction]:
    program: list[Instruction] = [(_LOAD, 0, 0, _ARGUMENTS_AT + 8 * argument)]
    for value in values:
        program += [(_EQUAL, 0, 1, value), _fail(error)]
    return [*program, (_RETURN, 0, 0, _ALLOW)]
