"""The traits of the served model that request defaults depend on: type, tokenizer and chat template."""

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

from vllm_kvmerge.policies.base import ServedModel

if TYPE_CHECKING:
    from vllm.config import ModelConfig

MISTRAL_FORMAT = "transformer"
"""vLLM's name for the type of a model that comes with Mistral's params.json instead of a config.json."""

SAID = "what a user says"


class TokenizedModel(ServedModel):
    """A model with a tokenizer, or with None, which ``read_tokenizer`` gives when it is first asked for."""

    def __init__(self, read_tokenizer: Callable[[], Any], model_type: str = "", is_calibrated: bool = False) -> None:
        super().__init__(model_type, is_calibrated)
        self._read_tokenizer = read_tokenizer

    @cached_property
    def _tokenizer(self) -> Any:
        return self._read_tokenizer()

    def encode(self, text: str) -> list[int] | None:
        if self._tokenizer is None:
            return None
        tokens = [int(token) for token in self._tokenizer.encode(text, add_special_tokens=False)]
        unknown = getattr(self._tokenizer, "unk_token_id", None)
        return None if unknown is not None and unknown in tokens else tokens

    @property
    def answer_prefix(self) -> str | None:
        if not getattr(self._tokenizer, "chat_template", None):
            return None
        said = [{"role": "user", "content": SAID}]
        try:
            text = self._tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
        except Exception:  # the template's own
            return None
        _, found, after = str(text).rpartition(SAID)
        return after if found else None


class EngineModel(TokenizedModel):
    """The model of an engine. Its tokenizer is read only if this process has not read it yet."""

    def __init__(self, config: "ModelConfig", is_calibrated: bool = False) -> None:
        def read_tokenizer() -> Any:
            from vllm.tokenizers import cached_tokenizer_from_config

            return cached_tokenizer_from_config(config)

        name = str(getattr(config.hf_text_config, "model_type", ""))
        super().__init__(read_tokenizer, "mistral" if name == MISTRAL_FORMAT else name, is_calibrated)
