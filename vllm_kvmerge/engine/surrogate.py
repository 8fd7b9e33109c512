"""KVzap's surrogate models, which predict scores from hidden states: reading their published format."""

import hashlib
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from pydantic import BaseModel, Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from vllm_kvmerge.engine.support import UnsupportedConfigError

if TYPE_CHECKING:
    from vllm.config import ModelConfig

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
OPTION = "kvzap"


class SurrogateConfig(BaseModel):
    """``config.json`` of a surrogate model; other entries are ignored.

    input_dim: the model's hidden size. output_dim: its KV heads. n_modules: its layers. hidden_dim: of the MLP of each
    layer; None: a linear layer. fingerprint: of the model whose scores were learnt; published models have none.
    """

    input_dim: int = Field(ge=1)
    output_dim: int = Field(ge=1)
    n_modules: int = Field(ge=1)
    hidden_dim: int | None = Field(None, ge=1)
    fingerprint: str | None = None

    def modules(self) -> nn.ModuleList:
        """The layers' modules, with the parameter names of the published format."""

        def one() -> nn.Module:
            if self.hidden_dim is None:
                return nn.Linear(self.input_dim, self.output_dim)
            first, last = nn.Linear(self.input_dim, self.hidden_dim), nn.Linear(self.hidden_dim, self.output_dim)
            return nn.Sequential(first, nn.GELU(), last)

        return nn.ModuleList(one() for _ in range(self.n_modules))


@dataclass(frozen=True)
class Surrogate:
    """A surrogate model. layers: by layer of the served model; of hidden states ``[n, input_dim]`` each makes
    ``[n, output_dim]``, the logarithms of the KVzip+ scores of n tokens in each KV head."""

    config: SurrogateConfig
    layers: nn.ModuleList

    @classmethod
    def load(cls, name: str) -> "Surrogate":
        """``name``: a folder, or a name on the Hugging Face hub.

        Raises:
            UnsupportedConfigError: there is none, or it cannot be read.
        """
        folder = _folder(name)
        config = read_config(name)
        layers = config.modules()
        try:
            weights = load_file(folder / WEIGHTS_FILE)
            layers.load_state_dict({name.removeprefix("layers."): weight for name, weight in weights.items()})
        except (OSError, SafetensorError, RuntimeError) as error:
            raise _unsupported(name, f"{WEIGHTS_FILE} cannot be read ({' '.join(str(error).split())[:300]})") from None
        return cls(config, layers.requires_grad_(False))

    def of_heads(self, heads: list[int], dtype: torch.dtype, device: torch.device) -> list[nn.Module]:
        """The layers' modules on ``device``, for some KV heads."""
        for module in self.layers:
            last = module[-1] if isinstance(module, nn.Sequential) else module
            assert isinstance(last, nn.Linear)
            last.weight, last.bias = nn.Parameter(last.weight[heads], False), nn.Parameter(last.bias[heads], False)
        return [module.to(device, dtype) for module in self.layers]

    def save(self, folder: Path) -> None:
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        weights: dict[str, Tensor] = {f"layers.{name}": t.contiguous() for name, t in self.layers.state_dict().items()}
        save_file(weights, folder / WEIGHTS_FILE, {"format": "pt"})
        config = {"model_type": "kvzap", **self.config.model_dump()}
        (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")


def read_config(name: str) -> SurrogateConfig:
    """Raises UnsupportedConfigError."""
    try:
        return SurrogateConfig.model_validate_json((_folder(name) / CONFIG_FILE).read_text())
    except OSError as error:
        raise _unsupported(name, f"it has no {CONFIG_FILE} ({error.strerror})") from None
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(map(str, fault["loc"])) or "it"
        raise _unsupported(name, f"{CONFIG_FILE}: {where}: {fault['msg']}") from None


def check_surrogate(name: str, model: "ModelConfig") -> None:
    """Raises UnsupportedConfigError unless the surrogate model was made for models of this shape."""
    config = read_config(name)
    layers = model.get_total_num_hidden_layers()
    expected = {"n_modules": layers, "input_dim": model.get_hidden_size(), "output_dim": model.get_total_num_kv_heads()}
    for field, value in expected.items():
        if getattr(config, field) != value:
            raise _unsupported(name, f"its {field} is {getattr(config, field)}, the model's {value}")


def fingerprint(model: nn.Module) -> str:
    """A digest of the weights of a model's norms, which a checkpoint's quantisation and tensor parallelism leave alone:
    the same in Transformers and in vLLM, in any dtype that holds bfloat16."""
    norms = [weight.detach() for name, weight in model.named_parameters() if name.endswith("norm.weight")]
    digests = [hashlib.sha256(one.to(torch.bfloat16).view(torch.int16).cpu().numpy()).digest() for one in norms]
    return hashlib.sha256(b"".join(sorted(digests))).hexdigest()[:16]


def check_fingerprint(name: str, model: nn.Module) -> None:
    """Raises UnsupportedConfigError if the surrogate model says that it was trained for another model."""
    trained, served = read_config(name).fingerprint, fingerprint(model)
    if trained not in (None, served):
        raise _unsupported(name, f"it was trained for another model (fingerprint {trained}, the model's {served})")


def _unsupported(name: str, explanation: str) -> UnsupportedConfigError:
    return UnsupportedConfigError(
        f"{OPTION}={name} is not supported: {explanation}; allowed: a KVzap model made for this one, such as "
        "nvidia/KVzap-mlp-Qwen3-8B for Qwen3-8B, or one trained by vllm-kvmerge train-kvzap"
    )


@cache
def _folder(name: str) -> Path:
    if Path(name).exists() or name.startswith(("/", ".", "~")):
        return Path(name).expanduser()
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=[CONFIG_FILE, WEIGHTS_FILE]))
    except (OSError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        gist = " ".join(str(error).split())[:200]
        raise _unsupported(name, f"there is no such folder, and the hub does not give it ({gist})") from None
