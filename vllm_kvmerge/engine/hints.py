"""Hints on what a compressed request leaves in the prefix cache: those actions of vLLM's ``kv_hints`` that are ours."""

import logging
from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, Field, ValidationError
from vllm.v1.kv_hints import KvHintsEnvelope

PIN, EXPECT, DROP = "kvmerge.pin", "kvmerge.expect", "kvmerge.drop"
MAJOR = "1"
"""Of their versions: what follows the dot may add to a payload."""

logger = logging.getLogger(__name__)


class _Hold(BaseModel):
    """Payload of ``PIN`` and ``EXPECT``."""

    seconds: Annotated[float, Field(gt=0.0, le=1e9, strict=True)]


@dataclass
class Hints:
    """What becomes of a request's context and turn when it has ended. pin, expect: seconds for which the context's
    front, and the turn, are held; 0: none. drop: nothing is left in the prefix cache that was not there."""

    pin: float = 0.0
    expect: float = 0.0
    drop: bool = False

    @classmethod
    def of(cls, envelope: KvHintsEnvelope | None) -> "Hints":
        """Those of a request. Other actions are ignored, and so are ours with another payload."""
        hints = cls()
        for action in envelope.actions if envelope else ():
            if action.action_version.partition(".")[0] != MAJOR:
                continue
            try:
                if action.action_type == PIN:
                    hints.pin = _Hold.model_validate(action.payload).seconds
                elif action.action_type == EXPECT:
                    hints.expect = _Hold.model_validate(action.payload).seconds
                elif action.action_type == DROP:
                    hints.drop = True
            except ValidationError as error:
                fault = error.errors()[0]
                where = ".".join(map(str, fault["loc"]))
                logger.warning("%s is ignored: payload %s: %s", action.action_type, where, fault["msg"])
        return hints
