#!/usr/bin/env python3
"""Runs a command under a filter of system calls (seccomp), as a container has one.

deny.py ERRNO CALL[,CALL...] COMMAND...

CALL is the number of a system call, or NUMBER:ARGUMENT:VALUE for those calls whose argument (from 0)
has that value in its low 32 bits. The filter answers them with ERRNO.
"""

import ctypes
import errno
import os
import platform
import struct
import sys

LOAD, IF_EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, REFUSE = 0x7FFF0000, 0x00050000
ARCHES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, FILTER = 22, 38, 2
NUMBER_AT, ARCH_AT, ARGUMENTS_AT = 0, 4, 16


class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_void_p)]


def rules(call, refuse):
    number, *argument = (int(part, 0) for part in call.split(":"))
    if not argument:
        return [(LOAD, 0, 0, NUMBER_AT), (IF_EQUAL, 0, 1, number), (RETURN, 0, 0, refuse)]
    at, value = argument
    return [
        (LOAD, 0, 0, NUMBER_AT),
        (IF_EQUAL, 0, 3, number),
        (LOAD, 0, 0, ARGUMENTS_AT + 8 * at),
        (IF_EQUAL, 0, 1, value),
        (RETURN, 0, 0, refuse),
    ]


def main():
    refuse = REFUSE | getattr(errno, sys.argv[1])
    code = [(LOAD, 0, 0, ARCH_AT), (IF_EQUAL, 1, 0, ARCHES[platform.machine()]), (RETURN, 0, 0, ALLOW)]
    for call in sys.argv[2].split(","):
        code += rules(call, refuse)
    code.append((RETURN, 0, 0, ALLOW))
    packed = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
    program = Program(len(code), ctypes.addressof(packed))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    assert libc.prctl(PR_SET_SECCOMP, FILTER, ctypes.byref(program), 0, 0) == 0, ctypes.get_errno()
    os.execvp(sys.argv[3], sys.argv[3:])


main()
