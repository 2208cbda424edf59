"""Types of tensors in safetensors and MLC files: bytes of one element."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

#: safetensors' names. F4 and F6 are packed.
SAFETENSORS: Mapping[str, Fraction] = {
    **{name: Fraction(8) for name in ("F64", "I64", "U64", "C64")},
    **{name: Fraction(4) for name in ("F32", "I32", "U32")},
    **{name: Fraction(2) for name in ("F16", "BF16", "I16", "U16")},
    **{name: Fraction(1) for name in ("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL")},
    **{name: Fraction(1) for name in ("F8_E4M3FNUZ", "F8_E5M2FNUZ")},
    "F6_E2M3": Fraction(3, 4),
    "F6_E3M2": Fraction(3, 4),
    "F4": Fraction(1, 2),
}
#: The types that an engine converts to the type it computes in.
PLAIN_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})

#: TVM's names.
TVM: Mapping[str, int] = {
    **{name: 8 for name in ("float64", "int64", "uint64")},
    **{name: 4 for name in ("float32", "int32", "uint32")},
    **{name: 2 for name in ("float16", "bfloat16", "int16", "uint16")},
    **{name: 1 for name in ("int8", "uint8", "bool", "float8_e4m3fn", "float8_e5m2")},
    **{name: 1 for name in ("e4m3_float8", "e5m2_float8", "float8_e4m3", "float4_e2m1fn")},
}
