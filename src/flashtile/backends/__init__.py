"""The implementations of attention, each a module with `supports`, `forward` and `backward`.

    supports(spec, device)                             -> None, or the reason why it cannot take the spec there
    forward(spec, q, k, v)                             -> out, lse
    backward(spec, dout, dlse, q, k, v, out, lse)      -> dq, dk, dv      (dout or dlse may be None: zero)

Backends never import each other.
"""
