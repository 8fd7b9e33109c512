"""The command ``vllm-kvmerge``, one module per subcommand, each imported when it is called."""

import sys
from importlib import import_module

from vllm_kvmerge import __version__
from vllm_kvmerge.cli.common import CommandParser
from vllm_kvmerge.errors import CommandError

DESCRIPTION = "vLLM's server with compression of the KV cache switched on, evaluation, and the list of policies."
COMMANDS = {
    "serve": "serve a model over HTTP: vllm-kvmerge serve MODEL [any option of vllm serve]",
    "eval": "measure policies and budgets on tasks: vllm-kvmerge eval CONFIG.yaml",
    "train-kvzap": "train a KVzap model, which predicts what to keep: vllm-kvmerge train-kvzap MODEL --output FOLDER",
    "calibrate": "measure what budget each head of a model needs: vllm-kvmerge calibrate MODEL --output FILE",
    "doctor": "print versions, devices, operators in use, and what is not supported",
    "health": "ask the servers that run here whether they are well",
    "size": "say how many requests fit: vllm-kvmerge size MODEL --context N --answer N",
    "policies": "list the policies and parts that a request can name",
}
"""Summaries by the name of the command and its module, whose ``run`` takes the words after the name."""


def main(argv: list[str] | None = None) -> int:
    """Runs the command and returns its exit status; a CommandError is one line on stderr and status 2."""
    name, *words = (sys.argv[1:] if argv is None else argv) or [""]
    try:
        if name not in COMMANDS:
            parser = CommandParser(prog="vllm-kvmerge", description=DESCRIPTION)
            parser.add_argument("--version", action="version", version=f"vllm-kvmerge {__version__}")
            commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
            for command, summary in COMMANDS.items():
                commands.add_parser(command, help=summary)
            name, words = parser.parse_args([name, *words] if name else []).command, []
        return import_module(f"vllm_kvmerge.cli.{name.replace('-', '_')}").run(words)
    except CommandError as error:
        print("vllm-kvmerge:", " ".join(str(error).split()), file=sys.stderr)
        return 2
