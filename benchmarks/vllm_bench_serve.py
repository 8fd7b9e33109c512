"""vLLM's own ``vllm bench serve``, with the same options: the CPU build's ``vllm`` command does not start, because its
package is not called vllm."""

from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

if __name__ == "__main__":
    parser = FlexibleArgumentParser(description="vllm bench serve")
    add_cli_args(parser)
    main(parser.parse_args())
