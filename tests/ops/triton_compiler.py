"""Compiles what Triton's operators would launch, for GPUs that are not there."""

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import triton
from triton.backends.compiler import BaseBackend, GPUTarget
from triton.compiler import ASTSource
from triton.runtime import JITFunction
from triton.runtime.jit import native_specialize_impl

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@dataclass(frozen=True)
class Launch:
    """A kernel and what it would have been given; options: warps and stages."""

    kernel: JITFunction
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, int]

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for launches that need the same machine code."""
        return self.kernel.__name__, *(str(part) for part in (*self.source, self.options))

    @property
    def is_paged(self) -> bool:
        """Whether some fronts are in pages of heads' own."""
        given = *self.arguments.items(), *getattr(self.arguments.get("located"), "_asdict", dict)().items()
        return any(name in ("page_tables", "pages", "to_pages") and table is not None for name, table in given)

    @property
    def source(self) -> tuple[dict[str, Any], dict[tuple[int, ...], Any], dict[tuple[int, ...], list[list[Any]]]]:
        """(signature, constants, attributes), specialised as Triton does: None, ones, and multiples of 16."""
        signature: dict[str, Any] = {}
        constants, attributes = {}, {}

        def add(path: tuple[int, ...], value: Any, kind: Any, attribute: Any) -> None:
            if isinstance(kind, tuple):
                for place, parts in enumerate(zip(value, kind, attribute, strict=True)):
                    add((*path, place), *parts)
            elif kind == "constexpr":
                constants[path] = value
            elif attribute:
                attributes[path] = BaseBackend.parse_attr(attribute)

        for place, param in enumerate(self.kernel.params):
            value, found = self.arguments[param.name], ("constexpr", None)
            if not param.is_constexpr:
                rules = False, not param.do_not_specialize, not param.do_not_specialize_on_alignment
                found = native_specialize_impl(BaseBackend, value, *rules)
            signature[param.name] = found[0]
            add((place,), value, *found)
        return signature, constants, attributes


@contextmanager
def launches() -> Iterator[list[Launch]]:
    """Collects launches instead of running them."""
    found: list[Launch] = []

    def record(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        options = {name: kwargs.pop(name) for name in ("num_warps", "num_stages") if name in kwargs}
        arguments = dict(zip(self.arg_names, args, strict=False)) | kwargs
        assert arguments.keys() == set(self.arg_names), arguments.keys() ^ set(self.arg_names)
        found.append(Launch(self, grid, arguments, options))

    with mock.patch.object(JITFunction, "run", record):
        yield found


@dataclass(frozen=True)
class Code:
    """What a GPU would run: PTX, registers of a thread, bytes of stack of a thread, of shared memory of a program, and
    how many instructions within loops use that stack."""

    ptx: str
    registers: int
    stack: int
    shared: int
    spills_in_loops: int


def compile_for(launch: Launch, capability: int, scratch: Path) -> Code:
    """Machine code for one kind of GPU: 80 or 90. Raises what Triton raises where it cannot."""
    signature, constants, attributes = launch.source
    source = ASTSource(launch.kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch.options)
    binary = scratch / f"{launch.kernel.__name__}.cubin"
    binary.write_bytes(compiled.asm["cubin"])
    usage = subprocess.run([CUOBJDUMP, "--dump-resource-usage", binary], capture_output=True, text=True, check=True)
    figures = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage.stdout)}
    stack = figures["STACK"] + figures["LOCAL"]
    spills = _spills_in_loops(binary) if stack else 0
    return Code(compiled.asm["ptx"], figures["REG"], stack, compiled.metadata.shared, spills)


def _spills_in_loops(binary: Path) -> int:
    """Instructions between a branch and its target before it that load from the stack or store to it."""
    listing = subprocess.run([CUOBJDUMP, "-sass", binary], capture_output=True, text=True, check=True).stdout
    instructions = [(int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", listing)]
    loops = [
        (int(target.group(1), 16), at)
        for at, text in instructions
        if (target := re.search(r"\bBRA.*?0x([0-9a-f]+)", text)) and int(target.group(1), 16) < at
    ]
    spills = [at for at, text in instructions if re.search(r"\b(LDL|STL)\b", text)]
    return sum(any(first <= at <= last for first, last in loops) for at in spills)
