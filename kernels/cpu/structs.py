"""What goes to the C library, field by field as attention.h has it; library.py compares the sizes."""

import ctypes

PARTS = 2  # keys and values

Address = ctypes.c_void_p


class Layout(ctypes.Structure):
    """Where K and V lie in a slot."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("dtype", "q_heads", "kv_heads", "key_dim", "value_dim")),
        *((name, ctypes.c_int32) for name in ("block_tokens", "layers", "chunk_tokens")),
        *((name, ctypes.c_int64) for name in ("layer_bytes", "key_at", "value_at", "key_head_bytes", "value_head_bytes")),
        *((name, ctypes.c_int64) for name in ("key_token_bytes", "value_token_bytes")),
    ]  # fmt: skip


class Rows(ctypes.Structure):
    """The rows of a step."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("rows", "threads", "isa", "unused")),
        *((name, Address) for name in ("tables", "lengths", "scratch")),
        ("scratch_floats", ctypes.c_int64),
    ]


class Decode(ctypes.Structure):
    """One layer's attention."""

    _fields_ = [
        *((name, Address) for name in ("q", "out")),
        *((name, ctypes.c_int64) for name in ("q_row_bytes", "q_head_bytes", "out_row_bytes", "out_head_bytes")),
        ("sinks", Address),
        *((name, ctypes.c_int32) for name in ("layer", "window")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    ]


class Prefill(ctypes.Structure):
    """One layer's attention of the new tokens of one sequence."""

    _fields_ = [
        *((name, Address) for name in ("table", "q", "out")),
        *((name, ctypes.c_int64) for name in ("q_row_bytes", "q_head_bytes", "out_row_bytes", "out_head_bytes")),
        ("sinks", Address),
        *((name, ctypes.c_int32) for name in ("layer", "window", "start", "count")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    ]


class Write(ctypes.Structure):
    """One layer's new K and V."""

    _fields_ = [
        *((name, Address) for name in ("slots", "places")),
        ("source", Address * PARTS),
        *((name, ctypes.c_int64 * PARTS) for name in ("outer_bytes", "inner_bytes", "head_bytes")),
        *((name, ctypes.c_int32) for name in ("layer", "count", "inner", "unused")),
    ]
