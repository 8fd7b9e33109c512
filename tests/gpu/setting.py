"""An engine to check, and what its checks need to know of it; one process has one engine."""

import json
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from tests.demo_model import bytes_per_block
from tests.engine.conftest import NUM_BLOCKS, engine_arguments, random_prompt
from tests.gpu.compare import Tolerance
from vllm_kvmerge import compression
from vllm_kvmerge.policies import PRESETS

RUNNERS = ("v1", "v2")
DTYPES = {"float32": 4, "bfloat16": 2}
POLICIES = sorted(set(PRESETS) - {"kvzap", "calibrated"})
"""All but the one that reads hidden states, which compiled models do not show."""
OFTEN = ("streaming_llm", "h2o", "snapkv", "keepkv", "zsmerge", "morphkv", "grkv")
FEW = (*OFTEN, "adakv")
SMALL_NUM_BLOCKS, NUM_BESIDE_WINDOWS = 11, 30
"""For a few requests at a time; some blocks are of layers with a window, where there are such."""


@dataclass(frozen=True)
class Setting:
    """An engine: vLLM's model runner, a folder with a model, and its dtype.

    is_on_gpu: if not, our parts of the runner on the CPU (``tests.engine.cuda_on_cpu``). is_small: few and short
    requests, and ``FEW`` policies, so that few kernels are compiled. is_eager: without graphs and torch.compile.
    expected: a JSON file with what vLLM and our operators' reference generate for the setting's jobs.
    """

    runner: str
    model: str
    dtype: str
    is_on_gpu: bool
    is_small: bool = False
    is_eager: bool = False
    expected: str = ""

    @classmethod
    def read(cls, path: Path) -> "Setting":
        return cls(**json.loads(path.read_text()))

    def write(self, path: Path) -> Path:
        path.write_text(json.dumps(asdict(self)))
        return path

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return 150 if self.is_small else 3000

    @property
    def num_tokens(self) -> int:
        """That are generated for each prompt."""
        return 10 if self.is_small else 40

    @property
    def against_vllm(self) -> Tolerance:
        """Of plain requests. On a GPU vLLM's attention multiplies float32 as TF32."""
        if self.dtype == "bfloat16":
            return Tolerance(most=0.5, mean=0.1)
        return Tolerance(most=3e-2, mean=5e-3) if self.is_on_gpu else Tolerance(most=1e-3, mean=1e-4)

    @property
    def against_itself(self) -> Tolerance:
        """Of requests, compressed ones too, in other company or by other operators.

        In 16 bits, what is rounded otherwise may make a policy keep another of two entries that are about as good.
        """
        if self.dtype == "bfloat16":
            return Tolerance(most=1.5, mean=0.15)
        return Tolerance(most=3e-2, mean=3e-3) if self.is_on_gpu else Tolerance(most=1e-3, mean=1e-4)

    @cached_property
    def config(self) -> dict:
        """The model's."""
        return json.loads((Path(self.model) / "config.json").read_text())

    @property
    def has_windows(self) -> bool:
        return "sliding_attention" in self.config.get("layer_types", [])

    @property
    def policies(self) -> list[str]:
        return [name for name in POLICIES if not self.is_small or name in FEW]

    @property
    def engine(self) -> dict:
        """Arguments of any engine with this model."""
        size = bytes_per_block(self.config, DTYPES[self.dtype])
        common = engine_arguments() | {"model": self.model, "dtype": self.dtype}
        if self.is_on_gpu:
            # Several engines are on the GPU at a time: vLLM asks for this share of it before it looks at the rest.
            common |= {"gpu_memory_utilization": 0.3}
        if not self.is_small:
            return common | {"kv_cache_memory_bytes": NUM_BLOCKS * size}
        small = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 100}
        small["additional_config"] = {"kvmerge": {"allowed_policies": list(FEW)}}
        num_blocks = NUM_BESIDE_WINDOWS if self.has_windows else SMALL_NUM_BLOCKS
        return common | small | {"kv_cache_memory_bytes": num_blocks * size}

    def prompts(self, count: int) -> list[list[int]]:
        """Of many lengths, some with a common beginning."""
        rng = np.random.default_rng(1)
        shared = random_prompt(rng, self.longest)
        found = []
        for index, length in enumerate(np.geomspace(10, self.longest, count).astype(int).tolist()):
            own = random_prompt(rng, length)
            found.append([*shared[: length // 2], *own[length // 2 :]] if index % 3 == 0 else own)
        return found

    def plain_jobs(self) -> list[tuple[list[int], None]]:
        return [(prompt, None) for prompt in self.prompts(6 if self.is_small else 24)]

    def compressed_jobs(self) -> list[tuple[list[int], dict | None]]:
        """Prompts with every policy, compressed at the prompt's end and while they generate, and plain ones between."""
        rng = np.random.default_rng(2)
        jobs: list[tuple[list[int], dict | None]] = []
        for index, policy in enumerate(self.policies):
            length = int(self.longest * rng.uniform(0.5, 1))
            budget = max(40, length // 5)
            jobs.append((random_prompt(rng, length), compression(policy, budget=budget, interval=8)))
            context = {"context_tokens": length * 2 // 3} if index % 2 else {"decode": "bounded"}
            jobs.append((random_prompt(rng, length), compression(policy, budget=budget + 4, interval=5, **context)))
            if index % 3 == 0:
                jobs.append((random_prompt(rng, length), None))
        return jobs
