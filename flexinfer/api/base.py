"""What every resource model has in common: strict types, camelCase on the wire, all errors at once.

The rules follow a Kubernetes API server, so that a manifest which is accepted here is accepted
there: an unknown field is an error, a type is never converted, and a null is a field left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    model_validator,
)
from pydantic.alias_generators import to_camel
from pydantic_core import InitErrorDetails, PydanticCustomError

GROUP = "ai.flexinfer"
VERSION = "v1alpha1"
API_VERSION: Literal["ai.flexinfer/v1alpha1"] = "ai.flexinfer/v1alpha1"

INT32_MAX = 2**31 - 1

Count = Annotated[int, Field(ge=0, le=INT32_MAX)]
PositiveCount = Annotated[int, Field(ge=1, le=INT32_MAX)]

# Names whose capitals a generator cannot guess; the rest is plain camelCase.
_SPELLING = {
    "n_gpu_layers": "nGPULayers",
    "n_cpu_moe": "nCPUMoE",
    "main_gpu": "mainGPU",
    "draft_gpu_layers": "draftGPULayers",
    "cpu_offload_gb": "cpuOffloadGB",
}


def wire_name(attribute: str) -> str:
    """The YAML name of a Python attribute: ``max_num_seqs`` is ``maxNumSeqs``."""
    return _SPELLING.get(attribute) or to_camel(attribute)


@dataclass(frozen=True)
class Finding:
    """A rule that a value breaks: where below the model that checks it, what was found, what is
    allowed, and what to write instead if that can be said."""

    loc: tuple[str | int, ...]
    found: Any
    allowed: str
    suggestion: str | None = None


def refusal(allowed: str, suggestion: str | None = None) -> PydanticCustomError:
    """The error that a field validator raises; the manifest reader takes its parts out again."""
    return PydanticCustomError(
        "flexinfer", "allowed: {allowed}", {"allowed": allowed, "suggestion": suggestion}
    )


class ApiModel(BaseModel):
    """Base of all resource models. Immutable; attributes in snake_case, YAML in camelCase."""

    model_config = ConfigDict(
        alias_generator=wire_name,
        extra="forbid",
        frozen=True,
        populate_by_name=True,
        protected_namespaces=(),
        strict=True,
    )

    #: What to say of a field that does not exist but that people write, by its YAML name.
    unknown_field_hints: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def cross_checks(cls, given: Mapping[str, Any]) -> Iterator[Finding]:
        """Rules over several fields. `given` holds raw values by YAML name, of any type: a rule
        leaves a value of the wrong type to the field's own error."""
        yield from ()

    @model_validator(mode="wrap")
    @classmethod
    def _report_all(cls, raw: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        # A validator that runs after the fields would be silent while any field is wrong, and a
        # user would meet the errors one run after another.
        if not isinstance(raw, Mapping):
            return handler(raw)
        to_wire = {name: wire_name(name) for name in cls.model_fields}
        wire = set(to_wire.values())
        raw = {key: value for key, value in raw.items() if value is not None or key not in wire}
        given = {to_wire.get(key, key): _plain(value) for key, value in raw.items()}
        findings = list(cls.cross_checks(given))
        if not findings:
            return handler(raw)
        lines: list[InitErrorDetails] = []
        try:
            handler(raw)
        except ValidationError as error:
            lines += [_line_again(line) for line in error.errors(include_url=False)]
        lines += [
            InitErrorDetails(
                type=refusal(finding.allowed, finding.suggestion),
                loc=finding.loc,
                input=finding.found,
            )
            for finding in findings
        ]
        raise ValidationError.from_exception_data(cls.__name__, lines)


def _plain(value: Any) -> Any:
    """Rules read raw values; a part that was built in Python is put back into that form."""
    if isinstance(value, BaseModel):
        return value.model_dump(by_alias=True, exclude_none=True)
    return value


def _line_again(line: Any) -> InitErrorDetails:
    context = line.get("ctx", {})
    kind: Any = line["type"]
    if kind == "flexinfer":
        kind = refusal(context["allowed"], context["suggestion"])
    return InitErrorDetails(type=kind, loc=line["loc"], input=line["input"], ctx=context)
