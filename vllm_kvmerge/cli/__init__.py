"""The command ``vllm-kvmerge``, one module per subcommand, each imported when it is called."""

import sys

from vllm_kvmerge import __version__
from vllm_kvmerge.cli.common import CommandParser
from vllm_kvmerge.errors import CommandError

DESCRIPTION = "vLLM's server with compression of the KV cache switched on, evaluation, and the list of policies."


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit status. A CommandError is one line on stderr and status 2."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        match argv[:1]:
            case ["serve"]:
                from vllm_kvmerge.cli.serve import serve

                return serve(argv)
            case ["eval"]:
                from vllm_kvmerge.cli.evaluate import evaluate

                return evaluate(argv[1:])
            case ["doctor"]:
                from vllm_kvmerge.cli.doctor import doctor

                return doctor(argv[1:])
            case ["policies"]:
                from vllm_kvmerge.cli.policies import policies

                return policies(argv[1:])
        parser = CommandParser(prog="vllm-kvmerge", description=DESCRIPTION)
        parser.add_argument("--version", action="version", version=f"vllm-kvmerge {__version__}")
        commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
        for name, summary in {
            "serve": "serve a model over HTTP: vllm-kvmerge serve MODEL [any option of vllm serve]",
            "eval": "measure policies and budgets on tasks: vllm-kvmerge eval CONFIG.yaml",
            "doctor": "print versions, devices, operators in use, and what is not supported",
            "policies": "list the policies and parts that a request can name",
        }.items():
            commands.add_parser(name, help=summary)
        return main([parser.parse_args(argv).command])
    except CommandError as error:
        print("vllm-kvmerge:", " ".join(str(error).split()), file=sys.stderr)
        return 2
