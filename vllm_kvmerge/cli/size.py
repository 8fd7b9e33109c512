"""``vllm-kvmerge size``: how many requests of one kind fit into a KV cache."""

import json
from dataclasses import asdict

from vllm_kvmerge.cli.arguments import read_arguments, set_environment
from vllm_kvmerge.cli.common import CommandParser, one_line, quiet, table_of
from vllm_kvmerge.cli.memory import CPU_SPACE, pool_bytes
from vllm_kvmerge.errors import CommandError


def run(argv: list[str]) -> int:
    """Prints a table, or JSON. Raises CommandError."""
    parser = CommandParser(
        prog="vllm-kvmerge size",
        allow_abbrev=False,  # of what may be an option of vLLM's
        usage="vllm-kvmerge size MODEL --context N --answer N [--json] [options of vllm-kvmerge serve]",
        description="Requests that fit into --kv-cache-memory-bytes, with --kv-compression and on stock vLLM.",
    )
    parser.add_argument("--context", type=int, required=True, metavar="N", help="tokens of a prompt")
    parser.add_argument("--answer", type=int, required=True, metavar="N", help="new tokens")
    parser.add_argument("--json", action="store_true", help="as JSON")
    ours, words = parser.parse_known_args(argv)
    for name in ("context", "answer"):
        if getattr(ours, name) < 1:
            raise CommandError(f"--{name} {getattr(ours, name)}: allowed: 1 or more")
    set_environment()
    args, _ = read_arguments(words, needs_port=False)
    memory = pool_bytes(args)
    if not memory:
        raise CommandError(f"how large is the KV cache? say --kv-cache-memory-bytes N, or {CPU_SPACE}=GIB")
    from vllm import AsyncEngineArgs

    from vllm_kvmerge.engine.arguments import plugin_config, request_limits
    from vllm_kvmerge.engine.sizing import size
    from vllm_kvmerge.policies.errors import PartError
    from vllm_kvmerge.request.spec import parse_compression

    try:
        with quiet():
            config = AsyncEngineArgs.from_cli_args(args).create_engine_config()
            asked = plugin_config(config).default
            compression = None if asked is None else parse_compression(asked)
            stock, compressed = size(config, memory, ours.context, ours.answer, compression)
            beside = request_limits(config).kept_bytes
    except (ValueError, PartError) as error:
        raise CommandError(one_line(error)) from error
    name = "full" if compression is None else compression.name
    if ours.json:
        sides = {"stock": stock, "kvmerge": compressed}
        found = {side: asdict(one) | {"num_requests": one.num_requests} for side, one in sides.items()}
        print(json.dumps(found | {"policy": name, "bytes_beside_the_pool": beside}, indent=2))
        return 0
    from rich.console import Console

    rows = {
        "bytes per block, all layers": [one.block_bytes for one in (stock, compressed)],
        "blocks for requests": [one.num_blocks for one in (stock, compressed)],
        "blocks of a request, reading": [one.life.reading for one in (stock, compressed)],
        "blocks of a request, generating": [one.life.generating for one in (stock, compressed)],
        "bytes beside the pool, at most": [0, beside],
        "requests that fit": [one.num_requests for one in (stock, compressed)],
    }
    title = f"{ours.context} + {ours.answer} tokens, blocks of {stock.block_size}, one worker"
    table = table_of(title, "", "stock vLLM", name, lines=False)
    for label, values in rows.items():
        table.add_row(label, *(f"{value:,}" for value in values))
    if compression is None:
        table.caption = "Nothing is compressed without --kv-compression, such as '{\"budget\": 0.25}'."
    Console(markup=False).print(table)
    return 0
