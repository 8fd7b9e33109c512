"""Patches: none by importing, each once however often its process is prepared."""

import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest

from vllm_kvmerge.engine import compat

pytestmark = pytest.mark.engine

IMPORTS_CHANGE_NOTHING = """
import logging, sys
from types import SimpleNamespace
from prometheus_client import REGISTRY, multiprocess, values
from vllm.config import LoggingConfig
from vllm.entrypoints.cli import serve
from vllm.entrypoints.launchers.api_server import entry
from vllm.logger import configure_logging_if_needed
from vllm.platforms import current_platform
from vllm.v1 import kv_cache_spec_registry as specs, utils
from vllm.v1.attention.backends import registry as backends
from vllm.v1.engine.coordinator import DPCoordinatorProc
from vllm.v1.engine.core import EngineCoreProc

configure_logging_if_needed(LoggingConfig())

def state():
    return [
        dict(vars(current_platform)), dict(backends._ATTN_OVERRIDES), set(specs._REGISTRY_KVCACHESPEC_LIST),
        values.MmapedDict, multiprocess.MultiProcessCollector, utils.run_api_server_worker_proc,
        EngineCoreProc.run_engine_core, DPCoordinatorProc.run_coordinator, entry.build_and_serve, serve.run_server,
        serve.CoreEngineProcManager, list(logging.getLogger("vllm_kvmerge").handlers),
    ]

specs.KVCacheSpecRegistry._ensure_registered()
before = state()
import vllm_kvmerge.cli.serve, vllm_kvmerge.engine.scheduler, vllm_kvmerge.engine.worker.cpu_worker
import vllm_kvmerge.engine.worker.cuda_worker, vllm_kvmerge.engine.worker.cuda_runner, vllm_kvmerge.server.endpoint
from vllm_kvmerge.engine import compat
from vllm_kvmerge.engine.arguments import VALIDATOR
from vllm_kvmerge.engine.validation import check_prompt
assert state() == before, [pair for pair in zip(before, state()) if pair[0] != pair[1]]

config = SimpleNamespace(model_config=SimpleNamespace(logits_processors=["other", VALIDATOR]))
compat.install_worker(config)
assert config.model_config.logits_processors == ["other"]
compat.install_front_end(check_prompt)
compat.install_server()
after = state()
assert [old != new for old, new in zip(before, after)] == [True] * len(before), after
compat.install_worker(config)
compat.install_front_end(check_prompt)
compat.install_server()
compat.fail_when_engine_dies()
assert state() == after
"""


@pytest.mark.slow
def test_importing_changes_nothing_and_installing_changes_all_once():
    done = subprocess.run([sys.executable, "-c", IMPORTS_CHANGE_NOTHING], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def test_hooks_are_called_before_the_engine_stops_the_newest_first():
    calls = Mock(first=Mock(return_value=3), second=Mock(return_value=5))
    client = SimpleNamespace(shutdown=lambda timeout: calls.engine(timeout))
    compat.before_shutdown(client, calls.first)
    compat.before_shutdown(client, calls.second)
    client.shutdown()
    client.shutdown(timeout=9)
    assert calls.mock_calls == [
        call.second(None), call.first(5), call.engine(3), call.second(9), call.first(5), call.engine(3)
    ]  # fmt: skip
