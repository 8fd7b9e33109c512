"""Runs the mutants, each with the test that is to find it (``found_by``).

    python -m tests.mutants [WORD...]            those whose fault, symbol or file has a WORD; default: all

Each is planted in a copy of the checkout below build/mutants. What a test has found counts if it passes without a
fault, which is checked last. Run it again to go on after an interruption; ``--again`` runs those that have survived
once more, ``--anew`` all.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict
from hashlib import sha1
from pathlib import Path
from queue import SimpleQueue

import pytest

from tests.mutants.table import ROOT, Mutant, mutants
from tests.vllm_library import HAS_AVX512

BUILD = ROOT / "build" / "mutants"
HUNG_SECONDS = 150
"""After which a test hangs, which counts as a failure."""
NATIVE = "vllm_kvmerge/ops/_native.so"


def copy(name: str) -> Path:
    """A copy of the checkout, as it is now."""
    folder = BUILD / name
    shutil.rmtree(folder, ignore_errors=True)
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, check=True, capture_output=True
    )
    for path in [*filter(None, listed.stdout.decode().split("\0")), NATIVE]:
        if (ROOT / path).exists():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / path, folder / path)
    # What asks git about the checkout is answered about the copy.
    for words in (["init", "-q"], ["add", "-A"], ["-c", "user.name=x", "-c", "user.email=x", "commit", "-qm", "copy"]):
        subprocess.run(["git", *words], cwd=folder, check=True)
    return folder


@contextmanager
def planted(mutant: Mutant, folder: Path) -> Iterator[None]:
    """A copy with a mutant in it."""
    path = folder / mutant.path
    source = path.read_text()
    path.write_text(mutant.plant(source))
    try:
        if mutant.is_native:
            build(folder)
        yield
    finally:
        path.write_text(source)
        if mutant.is_native:
            shutil.copy2(ROOT / NATIVE, folder / NATIVE)


def build(folder: Path) -> None:
    subprocess.run(
        [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"], cwd=folder, check=True, capture_output=True
    )


def run_tests(folder: Path, tests: list[str]) -> tuple[int, str]:
    """In a copy of the checkout, as in the fast layer: pytest's status and what it has printed."""
    environment = os.environ | {
        "PYTHONPATH": str(folder),
        "PYTHONDONTWRITEBYTECODE": "1",  # sources change within a second
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    if any("interpreted" in test for test in tests):
        environment["TRITON_INTERPRET"] = "1"
    words, log = f"-q --no-all -p no:cacheprovider --timeout {HUNG_SECONDS}", folder.with_name(f"{folder.name}.log")
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *words.split(), *tests],
            cwd=folder,
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            status = process.wait()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if status in (pytest.ExitCode.NO_TESTS_COLLECTED, pytest.ExitCode.USAGE_ERROR):
        every_case = [test.partition("[")[0] for test in tests]
        if every_case == tests:
            raise RuntimeError(f"none of {tests} ran: {log}")
        return run_tests(folder, every_case)  # the case is one of another processor
    return status, log.read_text()


def check_finders(folder: Path, found: dict[str, dict]) -> None:
    """Takes back what tests have found that fail without a fault, as one does that needs another before it.

    found: results by key.
    """
    finders = sorted({one["test"] for one in found.values()})
    _, log = run_tests(folder, finders) if finders else (0, "")
    for test in finders:
        has_failed = re.search(rf"^(FAILED|ERROR) {re.escape(test)}( |$)", log, re.MULTILINE)
        if has_failed and run_tests(folder, [test])[0]:  # alone too: not only after others
            print(f"        without a fault {test} fails as well", flush=True)
            for one in found.values():
                if one["test"] == test:
                    note(one | {"is_found": False})


def key(mutant: Mutant) -> str:
    return sha1(json.dumps(asdict(mutant)).encode()).hexdigest()[:12]


def results() -> dict[str, dict]:
    """What has come out so far, by ``key``."""
    path = BUILD / "results.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return {one["key"]: one for one in map(json.loads, lines)}


def note(result: dict) -> None:
    with (BUILD / "results.jsonl").open("a") as file:
        file.write(json.dumps(result) + "\n")


def can_run(mutant: Mutant) -> bool:
    """Whether this processor has what the fault needs."""
    return HAS_AVX512 or not mutant.needs


def run_all(some: list[Mutant], jobs: int) -> None:
    """Runs mutants, several at a time, each in a copy of the checkout of its own."""
    copies: SimpleQueue[Path] = SimpleQueue()
    for number in range(jobs if some else 0):
        copies.put(copy(f"copy-{number}"))
    lock = threading.Lock()

    def one(mutant: Mutant) -> None:
        folder, start = copies.get(), time.monotonic()
        try:
            with planted(mutant, folder):
                status, _ = run_tests(folder, [mutant.found_by])
        except (RuntimeError, OSError, subprocess.CalledProcessError) as error:  # it stays to be run
            print(f"        {mutant.fault}: {error}", flush=True)
            return
        finally:
            copies.put(folder)
        with lock:
            note({"key": key(mutant), "fault": mutant.fault, "test": mutant.found_by, "is_found": status != 0})
            told = mutant.found_by if status else "IS NOT FOUND"
            print(f"{time.monotonic() - start:5.0f} s  {mutant.fault}: {told}", flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, some))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="WORD")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--anew", action="store_true")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time (default: 2)")
    args = parser.parse_args()
    BUILD.mkdir(parents=True, exist_ok=True)
    done, tried = {} if args.anew else results(), [mutant for mutant in mutants() if can_run(mutant)]
    waiting = [
        mutant
        for mutant in tried
        if not args.words or any(word in f"{mutant.fault} {mutant.symbol} {mutant.group}" for word in args.words)
        if key(mutant) not in done or (args.again and not done[key(mutant)]["is_found"])
    ]
    run_all(waiting, args.jobs)
    keys = set(map(key, waiting))
    check_finders(copy("copy-0"), {name: one for name, one in results().items() if name in keys and one["is_found"]})
    found = sum(results().get(key(mutant), {"is_found": False})["is_found"] for mutant in tried)
    print(f"{found} of {len(tried)} mutants are found, {len(mutants()) - len(tried)} not tried")
    sys.exit(found < len(tried))


if __name__ == "__main__":
    main()
