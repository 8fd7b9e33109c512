"""Compression policies: parts that combine, and presets that name combinations; ``load_plugins`` adds others'."""

# Importing a module registers its parts.
from vllm_kvmerge.policies import allocators as allocators
from vllm_kvmerge.policies import mergers as mergers
from vllm_kvmerge.policies import presets as presets
from vllm_kvmerge.policies import selectors as selectors
from vllm_kvmerge.policies import trackers as trackers
from vllm_kvmerge.policies.base import DEAD as DEAD
from vllm_kvmerge.policies.base import MAX_TOKENS as MAX_TOKENS
from vllm_kvmerge.policies.base import Allocator as Allocator
from vllm_kvmerge.policies.base import CacheUpdate as CacheUpdate
from vllm_kvmerge.policies.base import CompressionContext as CompressionContext
from vllm_kvmerge.policies.base import Entries as Entries
from vllm_kvmerge.policies.base import Heads as Heads
from vllm_kvmerge.policies.base import Merger as Merger
from vllm_kvmerge.policies.base import Queries as Queries
from vllm_kvmerge.policies.base import Selector as Selector
from vllm_kvmerge.policies.base import Tracker as Tracker
from vllm_kvmerge.policies.composition import CompressionPolicy as CompressionPolicy
from vllm_kvmerge.policies.plugins import load_plugins as load_plugins
from vllm_kvmerge.policies.registry import ALLOCATORS as ALLOCATORS
from vllm_kvmerge.policies.registry import MERGERS as MERGERS
from vllm_kvmerge.policies.registry import PARTS as PARTS
from vllm_kvmerge.policies.registry import PRESETS as PRESETS
from vllm_kvmerge.policies.registry import SELECTORS as SELECTORS
from vllm_kvmerge.policies.registry import TRACKERS as TRACKERS
from vllm_kvmerge.policies.registry import Preset as Preset
from vllm_kvmerge.policies.registry import register as register
from vllm_kvmerge.policies.registry import register_preset as register_preset
from vllm_kvmerge.policies.update import CompressionResult as CompressionResult
