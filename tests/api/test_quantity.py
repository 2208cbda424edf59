"""Quantities mean what Kubernetes means by them."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, TypeAdapter, ValidationError

from flexinfer.api import Quantity, parse_quantity

BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50, "Ei": 2**60}
DECIMAL = {
    "": 1,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "P": 10**15,
    "E": 10**18,
    "m": Decimal("0.001"),
    "u": Decimal("0.000001"),
    "n": Decimal("0.000000001"),
}


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("16Gi", 16 * 2**30),
        ("1", 1),
        ("500m", Decimal("0.5")),
        ("1e3", 1000),
        ("1E3", 1000),
        ("1.5E-1", Decimal("0.15")),
        ("2E", 2 * 10**18),
        (".5", Decimal("0.5")),
        ("5.", 5),
        ("+3", 3),
        ("-1", -1),
        ("0", 0),
        ("23000000000", 23_000_000_000),
        (7, 7),
        (0.25, Decimal("0.25")),
    ],
)
def test_reads(text: str | int | float, number: int | Decimal) -> None:
    assert parse_quantity(text) == number


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("16GB", "16G"),
        ("16GiB", "16Gi"),
        ("16gi", "16Gi"),
        ("16 Gi", "16Gi"),
        ("16g", "16G"),
        ("5mb", "5M"),
        ("100K", "100k"),
        ("8 bytes", "8"),
        ("", None),
        (" 1", None),
        ("1 ", None),
        ("Gi", None),
        ("1GiGi", None),
        ("1,5", None),
        ("one", None),
        ("1e", "1E"),
        ("1e1000000", None),
        ("1.2.3GB", None),
        ("0x10", None),
        ("\u0661", None),
        ("1" * 65, None),
        ("9223372036854775808", None),
        ("8Ei", None),
        (True, None),
        (float("nan"), None),
        (float("inf"), None),
    ],
)
def test_refuses(text: str | float, meant: str | None) -> None:
    with pytest.raises(ValueError, match="allowed:") as caught:
        parse_quantity(text)
    assert ("did you mean" in str(caught.value)) == (meant is not None)
    if meant is not None:
        assert f"did you mean {meant}?" in str(caught.value)
        parse_quantity(meant)


@given(st.integers(0, 7), st.sampled_from(sorted(BINARY)))
def test_binary_suffixes_are_powers_of_1024(number: int, suffix: str) -> None:
    assert parse_quantity(f"{number}{suffix}") == number * BINARY[suffix]


@given(
    st.decimals(0, 9, places=3, allow_nan=False, allow_infinity=False),
    st.sampled_from(sorted(DECIMAL)),
)
def test_decimal_suffixes_are_exact(number: Decimal, suffix: str) -> None:
    assert parse_quantity(f"{number}{suffix}") == number * DECIMAL[suffix]


@given(st.integers(-(2**63) + 1, 2**63 - 1))
def test_whole_numbers_stand_for_themselves(number: int) -> None:
    assert parse_quantity(number) == number == parse_quantity(str(number))


@given(st.text(max_size=80))
def test_any_text_is_a_number_or_a_value_error(text: str) -> None:
    try:
        number = parse_quantity(text)
    except ValueError as error:
        assert "allowed" in str(error)
    else:
        assert number.is_finite()


@given(
    st.one_of(st.integers(0, 2**63 - 1), st.from_regex(r"[0-9]{1,3}(m|k|Mi|Gi)", fullmatch=True))
)
def test_the_text_is_kept_as_written(value: int | str) -> None:
    quantity = TypeAdapter(Quantity).validate_python(value)
    assert quantity == str(value)
    assert quantity.value == parse_quantity(value)


class Holder(BaseModel):
    amount: Quantity


def test_it_survives_a_round_trip_as_text() -> None:
    holder = Holder.model_validate({"amount": "16Gi"})
    assert holder.model_dump() == {"amount": "16Gi"}
    assert Holder.model_validate_json(holder.model_dump_json()) == holder
    assert type(holder.model_dump()["amount"]) is str


@pytest.mark.parametrize("value", [0.5, True, None, [], "-1", "1 Gi", {}])
def test_a_field_refuses(value: object) -> None:
    with pytest.raises(ValidationError):
        Holder.model_validate({"amount": value})


def test_its_schema_is_int_or_string() -> None:
    assert Holder.model_json_schema()["properties"]["amount"]["x-kubernetes-int-or-string"] is True


def test_it_cannot_be_made_from_nonsense() -> None:
    with pytest.raises(ValueError, match="is no quantity"):
        Quantity("lots")
