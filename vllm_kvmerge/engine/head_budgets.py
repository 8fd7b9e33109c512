"""The file that says what the budgets of the served model's heads are."""

from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError
from torch import nn

from vllm_kvmerge.engine.support import UnsupportedConfigError
from vllm_kvmerge.engine.surrogate import fingerprint
from vllm_kvmerge.policies.head_budgets import HeadBudgets

if TYPE_CHECKING:
    from vllm.config import ModelConfig

OPTION = "head_budgets"


def read_head_budgets(name: str) -> HeadBudgets:
    """Raises UnsupportedConfigError."""
    try:
        return HeadBudgets.model_validate_json(Path(name).expanduser().read_bytes())
    except OSError as error:
        raise _unsupported(name, f"it cannot be read ({error.strerror})") from None
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(map(str, fault["loc"])) or "it"
        raise _unsupported(name, f"{where}: {fault['msg']}") from None


def check_head_budgets(name: str, model: "ModelConfig") -> None:
    """Raises UnsupportedConfigError unless the file is of a model of this shape."""
    expected = model.get_total_num_hidden_layers(), model.get_total_num_kv_heads()
    if (found := read_head_budgets(name).shape) != expected:
        raise _unsupported(name, f"its (layers, KV heads) are {found}, the model's {expected}")


def head_budgets_of(name: str, model: nn.Module, layers: list[int]) -> HeadBudgets:
    """Those of the ``layers`` of the model. Raises UnsupportedConfigError if the file is of another model."""
    budgets, served = read_head_budgets(name), fingerprint(model)
    if budgets.fingerprint != served:
        raise _unsupported(name, f"it is of another model (fingerprint {budgets.fingerprint}, the model's {served})")
    return budgets.model_copy(update={"shares": [budgets.shares[layer] for layer in layers]})


def _unsupported(name: str, explanation: str) -> UnsupportedConfigError:
    return UnsupportedConfigError(
        f"{OPTION}={name} is not supported: {explanation}; allowed: a file that vllm-kvmerge calibrate wrote "
        "for this model"
    )
