"""Models of the field ``kv_compression``, one per policy, that check requests and describe them as JSON schemas."""

from collections.abc import Collection
from functools import lru_cache, reduce
from operator import or_
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, create_model

from vllm_kvmerge.policies import PARTS, PRESETS, load_plugins
from vllm_kvmerge.policies.choice import PartNames
from vllm_kvmerge.policies.fields import Budget, CommonFields

FULL = "full"
"""The policy that compresses nothing."""

REFERENCE = "#/components/schemas/{model}"


class RecommendedRequest(CommonFields):
    """No policy: the best that has been measured for the case, with ``context_tokens`` or ``context_messages`` (the
    question comes later) or without, and with ``allocator: uniform`` or without. Fields of that policy may be given
    too."""

    model_config = ConfigDict(frozen=True, json_schema_extra={"not": {"required": ["policy"]}})
    budget: Budget


class FullRequest(BaseModel):
    """No compression."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    policy: Literal["full"]


@lru_cache(maxsize=128)  # of some 0.1 MiB each
def request_model(policy: str, names: PartNames) -> type[BaseModel]:
    """The model of a policy made of these parts: the common fields and the parts', with the preset's defaults."""
    preset = PRESETS[policy]
    defaults = preset.defaults | {"decode": preset.decode}

    def described(model: type[BaseModel]) -> dict[str, Any]:
        return {
            field: (
                Annotated[info.annotation, *info.metadata, Field(description=info.description, examples=info.examples)],
                defaults.get(field, info.default),
            )
            for field, info in model.model_fields.items()
        }

    fields: dict[str, Any] = {"policy": Literal[policy], **described(CommonFields)}  # type: ignore[valid-type]
    for kind, name in names._asdict().items():
        own = f"The policy's own is {getattr(preset, kind)}"
        if kind == "tracker":
            own += "; where it does not suit the other parts, the first that does is taken"
        fields[kind] = (Literal[*sorted(PARTS[kind])], Field(name, description=f"Part to use as {kind}. {own}."))
    for part in names.classes.values():
        fields |= described(part)
    return create_model(
        "".join(word.capitalize() for word in policy.split("_")) + "Request",
        __config__=ConfigDict(extra="forbid", frozen=True, strict=True),
        __doc__=f"{preset.source}. Another {', '.join(names._fields[:-1])} or {names._fields[-1]} brings its own "
        "parameters, which are then fields of this object too: GET /kvmerge/policies lists them.",
        **fields,
    )


def request_schema(policies: Collection[str] | None = None) -> dict[str, Any]:
    """JSON schema of objects that name a policy: one per policy, told apart by ``policy``.

    policies: those to describe, besides ``full``; None: all.

    An object lists the fields of the policy's own parts. It does not forbid others, because a request may name other
    parts, which bring their own; ``parse_compression`` refuses fields that the parts do not know.
    """
    load_plugins()
    described = [name for name in PRESETS if policies is None or name in policies]
    models = [FullRequest, *(request_model(name, PartNames.of(PRESETS[name])) for name in described)]
    union: Any = Annotated[reduce(or_, models), Field(discriminator="policy")]
    schema = TypeAdapter(union).json_schema(ref_template=REFERENCE)
    for name, reference in schema["discriminator"]["mapping"].items():
        if name != FULL:
            del schema["$defs"][reference.rpartition("/")[2]]["additionalProperties"]
    return schema


def field_schema(policies: Collection[str] | None = None) -> dict[str, Any]:
    """JSON schema of ``kv_compression``: ``request_schema``, or an object without a policy."""
    schema, own = request_schema(policies), RecommendedRequest.model_json_schema(ref_template=REFERENCE)
    return {"anyOf": [schema, own], "$defs": schema.pop("$defs") | own.pop("$defs")}
