"""A value in an error message: short, whatever it is."""

from __future__ import annotations

_MOST = 60


def shown(value: object) -> str:
    """`value` as Python writes it, cut after 60 characters. A whole number too long to be written is told by its size."""
    try:
        text = repr(value)
    except ValueError:  # integers beyond `sys.get_int_max_str_digits`, on their own or inside a container
        bits = value.bit_length() if isinstance(value, int) else None
        return f"a {type(value).__name__} with an endless number" if bits is None else f"a whole number of {bits} bits"
    return text if len(text) <= _MOST else f"{text[: _MOST - 3]}..."
