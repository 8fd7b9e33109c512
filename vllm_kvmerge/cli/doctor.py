"""``vllm-kvmerge doctor``: versions, devices, operators in use, and what is unsupported, with reasons; or what a vLLM
release lacks."""

import importlib
import json
import os
import platform
import zipfile
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_kvmerge import __version__
from vllm_kvmerge.cli.arguments import read_arguments, set_environment
from vllm_kvmerge.cli.common import CommandParser, one_line, quiet, table_of
from vllm_kvmerge.cli.memory import shortage
from vllm_kvmerge.engine.reliance import Sources, installed, listed
from vllm_kvmerge.engine.support import (
    DISTRIBUTIONS,
    SUPPORTED_RANGE,
    UnsupportedConfigError,
    check_vllm_version,
    is_supported,
    platform_obstacle,
    unsupported_features,
)
from vllm_kvmerge.errors import CommandError

if TYPE_CHECKING:
    from rich.table import Table

LIBRARIES = (*DISTRIBUTIONS, "torch", "transformers", "triton", "apache-tvm-ffi", "numpy")
FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
"""Instruction sets, by their Linux names, that determine which operators run."""


def run(argv: list[str]) -> int:
    """Prints the report. Status 1: no server can start here, or not the one that the arguments describe.

    The JSON report's versions: of installed software, by name. devices: one line each. operators: those that run on the
    KV cache, and why others do not. problems: reasons why no server can start here, one line each. unsupported: engine
    options that are refused on every machine, with reasons. server: its arguments, and why they are refused.
    """
    from rich.console import Console

    parser = CommandParser(
        prog="vllm-kvmerge doctor",
        allow_abbrev=False,  # of what may be an option of vLLM's
        usage="vllm-kvmerge doctor [--json] [MODEL [options of vllm-kvmerge serve] | --vllm PATH]",
        description="Prints what is installed and works here. Exit status 1: no server can start, or not the "
        "one that a model and options of serve describe.",
    )
    parser.add_argument("--json", action="store_true", help="everything as JSON")
    parser.add_argument(
        "--vllm",
        metavar="PATH",
        help="only compare a vLLM that is not installed with what is relied on: wheel or folder",
    )
    args, server = parser.parse_known_args(argv)
    if args.vllm is not None:
        return _compare(Path(args.vllm), args.json)
    with quiet():
        report: dict[str, Any] = {
            "versions": versions(),
            "devices": devices(),
            "operators": operators(),
            "problems": _problems(),
            "unsupported": unsupported_features(),
        }
        if server:
            report["server"] = {"arguments": server}
            set_environment()
            try:
                fault = shortage(read_arguments(server, needs_port=False)[0])
            except CommandError as error:
                fault = str(error)
            report["server"]["fault"] = fault
            report["problems"] += filter(None, [fault])
    status = 1 if report["problems"] else 0
    if args.json:
        print(json.dumps(report, indent=2))
        return status
    tables = [_pairs(name, report[name]) for name in ("versions", "operators", "unsupported")]
    tables.insert(1, _pairs("devices", dict(line.split(": ", 1) for line in report["devices"])))
    console = Console(markup=False)
    console.print(*tables, sep="\n")
    for problem in report["problems"]:
        console.print(f"Problem: {problem}", soft_wrap=True)
    if not report["problems"]:
        console.print("vllm-kvmerge serve", *server, "can start here." if server else "MODEL can start here.")
    return status


def _compare(path: Path, as_json: bool) -> int:
    """Prints what the vLLM in a wheel or folder has otherwise than the package relies on, one line each. Status 1 if
    there is anything."""
    try:
        sources = Sources(path.parent if (path / "__init__.py").is_file() else path)
    except (OSError, zipfile.BadZipFile) as error:
        raise CommandError(f"--vllm {path}: {one_line(error)}") from None
    if sources.module("vllm") is None:
        raise CommandError(
            f"--vllm {path}: there is no vLLM in it; allowed: a wheel, or a folder with the package vllm"
        )
    version, faults, count = sources.version, sources.faults(), len(listed())
    if as_json:
        print(
            json.dumps({"version": version, "supported": is_supported(version), "relied_on": count, "faults": faults})
        )
        return 1 if faults else 0
    for fault in faults:
        print(fault)
    print(f"vLLM {version}: {len(faults)} of the {count} names that vllm-kvmerge relies on are gone or differ")
    if not is_supported(version):
        print(f"vLLM {version} is not supported; allowed: {SUPPORTED_RANGE}")
    return 1 if faults else 0


def _pairs(title: str, rows: dict[str, str]) -> "Table":
    """A table of names and their texts."""
    table = table_of(title.capitalize(), "name", "")
    table.show_header = False
    for name, text in rows.items():
        table.add_row(name, text)
    return table


def versions() -> dict[str, str]:
    found = {"vllm-kvmerge": __version__, "python": platform.python_version(), "system": platform.platform()}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def devices() -> list[str]:
    """The processor, and the GPUs that PyTorch sees."""
    import torch

    listed = [_processor()]
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        listed.append(f"GPU {index}: {gpu.name}, sm_{gpu.major}{gpu.minor}, {gpu.total_memory / 2**30:.0f} GiB")
    return listed


def _processor() -> str:
    described: dict[str, str] = {}
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                name, _, value = line.partition(":")
                described.setdefault(name.strip(), value.strip())
    except OSError:
        pass  # not Linux
    flags = described.get("flags", "").split()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    name = described.get("model name", platform.machine())
    known = " ".join(flag for flag in FLAGS if flag in flags) or "none of " + " ".join(FLAGS)
    return f"processor: {name}, {cores} cores, {memory:.0f} GiB, {known}"


def operators() -> dict[str, str]:
    """``in use``: the operators that run on the CPU; others: availability of each implementation, with reasons."""
    from vllm_kvmerge import ops
    from vllm_kvmerge.ops import cpu

    try:
        in_library = f"{', '.join(cpu.levels())} (best first)"
    except (OSError, ImportError) as error:
        in_library = f"none: {error}"
    try:
        importlib.import_module("vllm_kvmerge.ops.triton")
        in_triton = f"Triton {metadata.version('triton')}, for GPUs"
    except (ImportError, metadata.PackageNotFoundError) as error:
        in_triton = f"none: {error}"
    return {"in use": ops.implementation(), "native": in_library, "triton": in_triton}


def _problems() -> list[str]:
    found = []
    try:
        check_vllm_version()
    except (UnsupportedConfigError, ImportError) as error:
        found.append(" ".join(str(error).split()))
    else:
        found += installed().faults()
    with suppress(ImportError):  # reported with the version
        found += filter(None, [platform_obstacle()])
    return found
