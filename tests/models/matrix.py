"""The support matrix: ``python -m tests.models.matrix`` writes docs/support-matrix.md anew.

Each model is made with random weights, run by stock vLLM and then by the plugin, each in a process of its own.
"""

import argparse
import re
import tempfile
from pathlib import Path
from typing import Any

from rich.progress import track
from vllm.version import __version__

from tests.engine.conftest import in_a_process
from tests.engine.test_plain import STOCK
from tests.models.architectures import ARGUMENTS, MODELS, write_model
from tests.models.probe import FEATURES, arguments, prompts

PAGE = Path(__file__).parents[2] / "docs" / "support-matrix.md"
HEADER = f"""# Support matrix

Each model has a few small random-weight layers, built from Transformers' configuration. Stock vLLM and the plugin run
it on the CPU, in float32 unless its name says otherwise. `python -m tests.models.matrix` writes this page.

- **plain**: requests without a policy generate stock vLLM's tokens.
- **policies** (without `kvzap` and `calibrated`, which need a file made for the model): each generates 64 tokens after
  a prompt of 300 and stays within its budget. Afterwards every block is free, and plain requests generate the same
  tokens.
- **fields** of a [request](request-field.md), each tried with one policy: {", ".join(FEATURES)}.

What is not supported is refused with HTTP status 400; the notes say why.

"""


def found_of(name: str) -> dict[str, Any]:
    """What ``probe`` finds of a model."""
    own, reason = ARGUMENTS.get(name, {}), ""
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), name)
        try:
            tokens, _ = in_a_process(["-c", STOCK], [arguments(folder, own), prompts(), 24], is_stock=True)
        except AssertionError as error:
            tokens, reason = None, _last_error(str(error).split("\nassert ")[0])
        try:
            return in_a_process(["-m", "tests.models.probe", folder], [own, tokens])
        except AssertionError:
            if not reason:
                raise
            return {"refused": f"stock vLLM does not run it here: {reason}"}


def _last_error(text: str) -> str:
    lines = [line for line in text.splitlines() if "Error" in line or "Value error" in line]
    lines = [line.split("] ")[-1].split(" [type=")[0] for line in lines]
    return lines[-1].strip()[:120] if lines else "its process ended"


def row(name: str, found: dict[str, Any], notes: dict[str, str]) -> str:
    """The model's row of the table. notes: names of footnotes by their text, which it adds to."""

    def note(reason: str) -> str:
        return notes.setdefault(reason, f"[^{len(notes) + 1}]")

    def summary(found: dict[str, str | None]) -> str:
        left_out: dict[str, list[str]] = {}
        for one, reason in found.items():
            if reason is not None:
                left_out.setdefault(_without_subject(reason), []).append(one)
        if not left_out:
            return f"all {len(found)}"
        some = "; ".join(f"{', '.join(names)}{note(reason)}" for reason, names in left_out.items())
        return f"{len(found) - sum(map(len, left_out.values()))}, not {some}"

    if found["refused"]:
        return f"| {name} | refused{note(found['refused'])} | | |"
    cells = [name, "yes" if found["is_plain"] else "**no**", summary(found["policies"]), summary(found["features"])]
    return f"| {' | '.join(cells)} |"


def _without_subject(reason: str) -> str:
    """The reason without the part or value that it is about, so that others can share its note."""
    return re.sub(r"^'\w+'( of the policy '\w+')? ", "", reason)


def page(found: dict[str, dict[str, Any]]) -> str:
    """The whole page."""
    notes: dict[str, str] = {}
    head = ["model", "plain", "policies", "fields"]
    rows = [
        f"| {' | '.join(head)} |",
        "|---" * len(head) + "|",
        *(row(name, one, notes) for name, one in found.items()),
    ]
    footnotes = "\n".join(f"{mark}: {reason}" for reason, mark in notes.items())
    return f"{HEADER}vLLM {__version__}.\n\n" + "\n".join(rows) + f"\n\n{footnotes}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--output", type=Path, default=PAGE)
    parsed = parser.parse_args()
    found = {name: found_of(name) for name in track(parsed.models, "models")}
    parsed.output.write_text(page(found))


if __name__ == "__main__":
    main()
