"""Runs the mutants: for each, the tests that reach its symbol, until one fails.

    python -m tests.mutants [WORD...]            those whose fault, symbol or file has a WORD; default: all
    python -m tests.mutants --reach PATH...      measures again which symbols the tests of PATH reach
    python -m tests.mutants --list               what has come out

First each is tried with the test that is known to find it (``found_by``). For the others, one run of the fast layer
measures which tests reach which symbol. Everything is done in copies of the checkout below build/mutants. What a test
has found counts if it passes without a fault, which is checked last. Run it again to go on after an interruption;
``--again`` runs those that have survived once more, ``--anew`` all.
"""

import argparse
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from hashlib import sha1
from itertools import accumulate
from pathlib import Path
from queue import SimpleQueue

import pytest

from tests.mutants.plugin import CHOSEN, LAST
from tests.mutants.plugin import name as test_name
from tests.mutants.reach import FOLDER, instrumented, noted
from tests.mutants.table import ROOT, Mutant, mutants
from tests.vllm_library import HAS_AVX512

BUILD = ROOT / "build" / "mutants"
QUICK_SECONDS = 10.0
"""Of tests that run in a first process: most mutants are found by one of them, before others have imported vLLM."""
HUNG_SECONDS = 150
"""After which a test hangs, for which other runs wait longer."""
LIMIT_SECONDS = 7200.0
"""Of a process of tests; a test that hangs ends before that."""
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


def environment(folder: Path, **more: str) -> dict[str, str]:
    return os.environ | {
        "PYTHONPATH": str(folder),
        "PYTHONDONTWRITEBYTECODE": "1",  # sources change within a second
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        **more,
    }


def measure_reach(jobs: int, paths: list[str]) -> dict[str, dict[str, float]]:
    """By symbol, the tests of the fast layer that reach it, and how many seconds each takes.

    paths: of tests; none: all.
    """
    folder, notes = copy("reach"), BUILD / "notes"
    shutil.rmtree(notes, ignore_errors=True)
    notes.mkdir()
    symbols: dict[Path, set[str]] = {}
    for mutant in mutants():
        if not mutant.tests and not mutant.is_native:
            symbols.setdefault(mutant.path, set()).add(mutant.symbol)
    for path, some in symbols.items():
        (folder / path).write_text(instrumented((folder / path).read_text(), sorted(some)))
    words = f"-n {jobs} --dist loadgroup --no-loadscope-reorder --max-worker-restart 0 -p tests.mutants.plugin"
    subprocess.run(
        [sys.executable, "-m", "pytest", *words.split(), *paths],
        cwd=folder,
        env=environment(folder, **{FOLDER: str(notes), CHOSEN: ""}),
    )
    seconds = json.loads((notes / "seconds.json").read_text())
    return {
        symbol: {test: round(seconds[test], 2) for test in tests if test in seconds}
        for symbol, tests in sorted(noted(notes).items())
    }


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


def run(
    mutant: Mutant, folder: Path, tests: dict[str, float], seconds: float = math.inf, reached: Mapping[str, int] = {}
) -> dict | None:
    """Plants a mutant in a copy and runs tests until one fails.

    seconds: of tests, at most. reached: by test, how many symbols it reaches. None: none has failed in that time, of
    those that there are.
    """
    start, some = time.monotonic(), first(tests, seconds, reached)
    with planted(mutant, folder):
        found = next(filter(None, (first_failure(folder, stage) for stage in stages(some))), None)
        while (
            found and len(some) > 1 and not first_failure(folder, [found])
        ):  # it failed after others, not by the fault
            some = {test: cost for test, cost in some.items() if test != test_name(found)}
            found = next(filter(None, (first_failure(folder, stage) for stage in stages(some))), None)
    if not found and len(some) < len(tests):
        return None
    return {"found_by": found, "seconds": round(time.monotonic() - start), "tests": len(tests)}


def build(folder: Path) -> None:
    subprocess.run(
        [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"], cwd=folder, check=True, capture_output=True
    )


def first(tests: dict[str, float], seconds: float, reached: Mapping[str, int]) -> dict[str, float]:
    """Those that take little and reach few symbols, as many as take so long together, in the order of both."""
    ordered = sorted(tests, key=lambda test: tests[test] * reached.get(test, 1))
    total = accumulate(tests[test] for test in ordered)
    return {test: tests[test] for test, until in zip(ordered, total, strict=True) if until < seconds}


def stages(tests: dict[str, float]) -> Iterable[list[str]]:
    """Tests in their order: first those of ``QUICK_SECONDS``, then the others."""
    until = list(accumulate(tests.values()))
    quick = sum(end < QUICK_SECONDS for end in until)
    return filter(None, [list(tests)[:quick], list(tests)[quick:]])


def first_failure(folder: Path, tests: list[str]) -> str | None:
    """The test that fails first; None: none does."""
    last = folder.with_name(f"{folder.name}.last")
    last.write_text("collection")
    status, _ = run_tests(folder, tests, "-x", **{LAST: str(last)})
    return last.read_text() if status else None


def run_tests(folder: Path, tests: list[str], *options: str, **variables: str) -> tuple[int, str]:
    """In a copy of the checkout, in this order: pytest's status and what it has printed."""
    chosen, log = (folder.with_name(f"{folder.name}.{end}") for end in ("tests", "log"))
    chosen.write_text(json.dumps(tests))
    files = sorted({test.partition("::")[0] for test in tests})
    variables[CHOSEN] = str(chosen)
    if any("interpreted" in file for file in files):
        variables["TRITON_INTERPRET"] = "1"
    words = f"-m pytest -q -p tests.mutants.plugin -p no:cacheprovider --timeout {HUNG_SECONDS}".split()
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, *words, *options, *files],
            cwd=folder,
            env=environment(folder, **variables),
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            status = process.wait(LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{tests} take too long: {log}") from None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if status in (pytest.ExitCode.NO_TESTS_COLLECTED, pytest.ExitCode.USAGE_ERROR):
        raise RuntimeError(f"none of {tests} ran: {log}")
    return status, log.read_text()


def check_finders(folder: Path, found: set[str | None]) -> None:
    """Takes back what tests have found that fail without a fault, as one does that needs another before it."""
    finders = sorted(filter(None, found))
    _, log = run_tests(folder, finders) if finders else (0, "")
    for test in finders:
        has_failed = re.search(rf"^(FAILED|ERROR) {re.escape(test)}( |$)", log, re.MULTILINE)
        if has_failed and first_failure(folder, [test]):  # alone too: not only after others
            print(f"        without a fault {test} fails as well", flush=True)
            with (BUILD / "results.jsonl").open("a") as file:
                for one in results().values():
                    if one["found_by"] == test:
                        file.write(json.dumps(one | {"found_by": None}) + "\n")


def key(mutant: Mutant) -> str:
    return sha1(json.dumps(asdict(replace(mutant, found_by=""))).encode()).hexdigest()[:12]


def results() -> dict[str, dict]:
    path = BUILD / "results.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return {one["key"]: one for one in map(json.loads, lines)}


def missing(mutant: Mutant) -> str:
    """What this processor lacks that the fault needs."""
    return "needs AVX-512" if mutant.needs and not HAS_AVX512 else ""


def listed() -> str:
    """All mutants, as Markdown."""
    done, lines, group = results(), [], ""
    for mutant in mutants():
        if mutant.group != group:
            group = mutant.group
            lines += ["", f"**{group}**", ""]
        one = done.get(key(mutant))
        found = (one and one["found_by"] and f"`{one['found_by']}`") or ("**nothing**" if one else missing(mutant))
        lines.append(f"- {mutant.fault}. `{mutant.symbol.removeprefix('vllm_kvmerge.')}` {found or 'not run'}")
    return "\n".join(lines)


def on_copies(
    jobs: int, some: list[Mutant], work: Callable[[Mutant, Path], dict | None], is_last: bool = False
) -> list[Mutant]:
    """Works on mutants, several at a time, each in a copy of the checkout of its own: those that are found.

    is_last: what is not found survives.
    """
    copies: SimpleQueue[Path] = SimpleQueue()
    for number in range(jobs if some else 0):
        copies.put(copy(f"copy-{number}"))
    lock, found = threading.Lock(), []

    def one(mutant: Mutant) -> None:
        folder = copies.get()
        try:
            result = work(mutant, folder)
        except (RuntimeError, OSError, subprocess.CalledProcessError) as error:  # it stays to be run
            print(f"        {mutant.fault}: {error}", flush=True)
            return
        finally:
            copies.put(folder)
        if result is None or not (result["found_by"] or is_last):
            print(f"        {mutant.fault}: not found yet", flush=True)
            return
        with lock, (BUILD / "results.jsonl").open("a") as file:
            found.append(mutant)
            file.write(json.dumps({"key": key(mutant), "fault": mutant.fault} | result) + "\n")
            print(f"{result['seconds']:5} s  {mutant.fault}: {result['found_by'] or 'NOTHING FINDS IT'}", flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, some))
    return found


def known_reach() -> dict[str, dict[str, float]]:
    """By symbol, the tests that reach it and what each takes, as measured earlier."""
    path = BUILD / "reach.json"
    return json.loads(path.read_text()) if path.exists() else {}


def measure(paths: list[str], jobs: int) -> dict[str, dict[str, float]]:
    """Measures again what the tests of some paths reach; none: all of the fast layer."""
    print(f"measuring which symbols are reached by the tests of {', '.join(paths) or 'the fast layer'}", flush=True)
    reach: dict[str, dict[str, float]] = {one.symbol: {} for one in mutants() if not one.tests}
    for symbol, tests in known_reach().items() if paths else ():
        reach[symbol] = {test: seconds for test, seconds in tests.items() if not test.startswith(tuple(paths))}
    for symbol, tests in measure_reach(jobs + 1, paths).items():
        reach[symbol] = reach.get(symbol, {}) | tests
    (BUILD / "reach.json").write_text(json.dumps(reach, indent=1))
    return reach


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="WORD")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--anew", action="store_true")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time (default: 2)")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="of tests for each; what is not found stays to be run"
    )
    parser.add_argument("--reach", nargs="+", metavar="PATH")
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args()
    if args.list:
        print(listed())
        return
    BUILD.mkdir(parents=True, exist_ok=True)
    if args.reach:
        measure(args.reach, args.jobs)
        return
    done = {} if args.anew else results()
    waiting = [
        mutant
        for mutant in mutants()
        if not args.words or any(word in f"{mutant.fault} {mutant.symbol} {mutant.group}" for word in args.words)
        if not missing(mutant)
        if key(mutant) not in done or (args.again and not done[key(mutant)]["found_by"])
    ]
    named = [mutant for mutant in waiting if mutant.found_by]
    found = on_copies(args.jobs, named, lambda mutant, folder: run(mutant, folder, {mutant.found_by: 1.0}))
    others = [mutant for mutant in waiting if mutant not in found]
    reach = known_reach()
    if {one.symbol for one in others if not one.tests} - reach.keys():
        reach = measure([], args.jobs)
    seconds = {test: seconds for tests in reach.values() for test, seconds in tests.items()}
    reached = Counter(test for tests in reach.values() for test in tests)

    def search(mutant: Mutant, folder: Path) -> dict | None:
        tests = {test: seconds.get(test, 1.0) for test in mutant.tests} or reach[mutant.symbol]
        nothing = {"found_by": None, "seconds": 0, "tests": 0}
        return run(mutant, folder, tests, args.seconds, reached) if tests else nothing

    on_copies(args.jobs, others, search, is_last=True)
    check_finders(copy("copy-0"), {one["found_by"] for mutant in waiting if (one := results().get(key(mutant)))})
    tried = [mutant for mutant in mutants() if not missing(mutant)]
    survivors = [mutant.fault for mutant in tried if not results().get(key(mutant), {}).get("found_by")]
    print(f"{len(tried) - len(survivors)} of {len(tried)} mutants are found, {len(mutants()) - len(tried)} not tried")
    sys.exit(bool(survivors))


if __name__ == "__main__":
    main()
