"""Kubernetes quantities: ``16Gi``, ``500m``, ``"1"``, ``1e3``."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from flexinfer.api.base import refusal

_BINARY = {f"{letter}i": Decimal(1024) ** power for power, letter in enumerate("KMGTPE", start=1)}
_DECIMAL = {
    "n": Decimal("1e-9"),
    "u": Decimal("1e-6"),
    "m": Decimal("1e-3"),
    "": Decimal(1),
    "k": Decimal("1e3"),
    "M": Decimal("1e6"),
    "G": Decimal("1e9"),
    "T": Decimal("1e12"),
    "P": Decimal("1e15"),
    "E": Decimal("1e18"),
}
_FACTORS = _BINARY | _DECIMAL
_TEXT = re.compile(
    r"(?P<number>[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+))"
    r"(?:[eE](?P<exponent>[+-]?[0-9]{1,3})|(?P<suffix>[A-Za-z]*))",
    re.ASCII,
)
_LONGEST = 64
_LARGEST = Decimal(2**63 - 1)

ALLOWED = (
    "a Kubernetes quantity: a number with one of the suffixes Ki Mi Gi Ti Pi Ei (powers of 1024), "
    "k M G T P E (powers of 1000), m u n, or none"
)


def parse_quantity(value: str | int | float) -> Decimal:
    """The exact number that a quantity stands for, in the quantity's own unit (bytes, cores).

    Raises:
        ValueError: `value` is no quantity, or beyond 2^63 - 1; the message says what is allowed
            and, where the suffix is only misspelled, what was probably meant.
    """
    if isinstance(value, bool):
        raise ValueError(f"{value!r} is no quantity; allowed: {ALLOWED}")
    text = str(value)
    match = _TEXT.fullmatch(text) if len(text) <= _LONGEST else None
    suffix = match["suffix"] or "" if match else ""
    if match is None or suffix not in _FACTORS:
        meant = probably_meant(text)
        hint = f"; did you mean {meant}?" if meant else ""
        raise ValueError(f"{text[:_LONGEST]!r} is no quantity; allowed: {ALLOWED}{hint}")
    number = Decimal(match["number"])
    number = number.scaleb(int(match["exponent"])) if match["exponent"] else number
    number *= _FACTORS[suffix]
    if abs(number) > _LARGEST:
        raise ValueError(f"{text!r} is too large; allowed: at most 2^63 - 1")
    return number


def probably_meant(text: str) -> str | None:
    """The quantity that a misspelled one (``16GB``, ``16 gi``) was probably meant to be."""
    match = re.fullmatch(r"\s*([0-9.]+)\s*([A-Za-z]+)\s*", text[:_LONGEST], re.ASCII)
    if match is None:
        return None
    number, suffix = match[1], match[2].lower()
    if suffix in {"b", "byte", "bytes"}:
        suffix = ""
    elif len(suffix) > 1 and suffix.endswith("b"):
        suffix = suffix[:-1]
    for known in _FACTORS:
        # m is a thousandth and M a million: somebody who writes MB means the large one.
        if known.lower() == suffix and known not in {"m", "n", "u"}:
            meant = number + known
            return meant if _TEXT.fullmatch(meant) else None
    return None


class Quantity(str):
    """A quantity as it was written (``Quantity("16Gi") == "16Gi"``), with its number in `value`.

    In a manifest it is a string or a whole number, as Kubernetes' int-or-string is. Raises
    ValueError when made from anything else.
    """

    __slots__ = ()

    def __new__(cls, text: str | int) -> Quantity:
        parse_quantity(text)
        return super().__new__(cls, text)

    @property
    def value(self) -> Decimal:
        """The exact number, in the quantity's own unit."""
        return parse_quantity(str(self))

    @classmethod
    def read(cls, value: Any) -> Quantity:
        """The quantity that a manifest's value stands for; errors as a field validator's."""
        if isinstance(value, float):
            raise refusal("a quantity as a string", f'quote it: "{value}"')
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise refusal(ALLOWED)
        text = str(value)
        try:
            number = parse_quantity(text)
        except ValueError as error:
            meant = probably_meant(text)
            allowed = "at most 2^63 - 1" if "too large" in str(error) else ALLOWED
            raise refusal(allowed, f"did you mean {meant}?" if meant else None) from None
        if number < 0:
            raise refusal("a quantity of zero or more")
        return cls(text)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls.read, serialization=core_schema.plain_serializer_function_ser_schema(str)
        )

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "x-kubernetes-int-or-string": True,
        }
