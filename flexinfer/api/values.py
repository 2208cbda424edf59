"""Types of values that several fields share."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field

from flexinfer.api.base import refusal


def _check_line(value: str) -> str:
    if not value.strip() or any(ord(c) < 32 or ord(c) == 127 for c in value):
        raise refusal("one line of text, not empty")
    return value


def _check_argument(value: str) -> str:
    if "\0" in value:
        raise refusal("text without NUL characters")
    return value


def _check_fraction(value: str) -> str:
    match = re.fullmatch(r"[0-9]*\.?[0-9]+", value, re.ASCII)
    if not match or not 0 < float(value) <= 1:
        raise refusal('a fraction above 0 and up to 1 as a string, like "0.85"')
    return value


def _check_variable(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z_.-][A-Za-z0-9_.-]*", name, re.ASCII):
        raise refusal("a variable name of A-Z a-z 0-9 _ - . that starts with no digit")
    return name


def _check_inner_path(path: str) -> str:
    _check_line(path)
    if ".." in path.split("/"):
        raise refusal("a path without '..'")
    return path


#: One line of text.
Line = Annotated[str, AfterValidator(_check_line)]
#: An argument for a command line: anything but NUL.
Argument = Annotated[str, AfterValidator(_check_argument)]
#: A fraction in (0, 1], written as a string.
Fraction = Annotated[str, AfterValidator(_check_fraction)]
#: A path that never climbs out of where it starts.
InnerPath = Annotated[str, AfterValidator(_check_inner_path)]
#: Environment variables.
Environment = dict[Annotated[str, AfterValidator(_check_variable)], Argument]

PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
