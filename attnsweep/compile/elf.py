"""What a cubin says of its functions beside their code: attributes of its ELF file.

NVIDIA documents none of them; the names are nvdisasm's.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

# A section .nv.info.<function> has the place and size of each parameter, in two encodings, the end
# of the last one, and the threads of a block, exact or at most: EIATTR_KPARAM_INFO,
# EIATTR_KPARAM_INFO_V2, EIATTR_CBANK_PARAM_SIZE, EIATTR_REQNTID, EIATTR_MAX_THREADS.
PARAMETER, PARAMETER_V2, ALL_PARAMETERS, THREADS, MOST_THREADS = 0x17, 0x45, 0x19, 0x10, 0x05
# The section .nv.info has these of each function: EIATTR_REGCOUNT and EIATTR_FRAME_SIZE.
REGISTERS, STACK = 0x2F, 0x11
_WITH_PAYLOAD = 4


def attributes(elf: Any, section: str) -> Iterator[tuple[int, int, bytes]]:
    """The kind, value and payload of each attribute of a section; none without the section."""
    there = elf.get_section_by_name(section)
    info, at = b"" if there is None else there.data(), 0
    while at < len(info):
        form, kind, value = struct.unpack_from("<BBH", info, at)
        at += 4
        size = value if form == _WITH_PAYLOAD else 0
        yield kind, value, info[at : at + size]
        at += size


def of_functions(elf: Any, wanted: int) -> dict[str, int]:
    """Function name to its number of this kind, which .nv.info has by symbol."""
    symbols, found = elf.get_section_by_name(".symtab"), dict[str, int]()
    for kind, _, payload in attributes(elf, ".nv.info") if symbols else ():
        if kind == wanted:
            number, value = struct.unpack_from("<II", payload)
            found[symbols.get_symbol(number).name] = value
    return found
