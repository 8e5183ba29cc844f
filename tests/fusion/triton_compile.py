"""Compile every kernel for a GPU that need not be there: `python -m tests.fusion.triton_compile 90 bf16`.

With `all` behind it, the large ones for every entry of `triton_kernels.SPACE`.
Prints for each kernel: name, bytes of PTX, bytes of shared memory.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sidestream.fusion.mega import triton_kernels as kernels

# Sizes of a layer as they are trained: 8 ranks, 4096 tokens, 4 experts each.
SIZES = {
    "R": 8, "RP": 8, "L": 4, "H": 2048, "F": 1408, "K": 8, "KP": 8, "TK": 32768, "MT": 516,
    "READY": 0, "TOKENS": 128, "DONE": 256, "IDS": 2**20, "WEIGHTS": 2**20 + 2**18, "ROUTES_SIZE": 2**19,
    "X": 2**21, "GRAD": 2**25, "ROWS": 2**26, "ROW_GRADS": 2**31, "B": 1024,
    "WITH_IDS": True, "WITH_GRAD": True, "KEEP": True,
}  # fmt: skip
INT64 = {"bases", "ids"}
INT32 = {
    "step_ptr", "counters", "num_tiles_ptr", "tile_expert", "tile_begin", "tile_end", "expert_begin", "expert_end",
    "expert_tiles", "src", "place", "owner", "tile", "all_ids", "all_tokens",
}  # fmt: skip
FP32 = {"weights", "row_weights", "partial", "d_weights", "all_weights"}
SHARED = 227 * 1024  # bytes that a program can have on Hopper and Blackwell
SCALARS = {"num_tokens", "rank", "S"}


def compile_for(name: str, arch: int, dtype: str, *, tiles: Any = None, **more: Any) -> Any:
    """The compiled kernel."""
    itemsize = 2 if dtype == "bf16" else 4
    tiles = tiles or kernels.pick_tiles(rows_per_expert=8192, itemsize=itemsize)
    sizes = {
        **SIZES, "ITEM": itemsize, "PRECISION": "ieee" if dtype == "fp32" else "tf32", "RECOMPUTE": True,
        "BM": tiles.m, "BN": tiles.n, "BK": tiles.k, "BG": tiles.gather, "BT": tiles.tokens, "GROUP": tiles.group,
        **more,
    }  # fmt: skip
    kernel = getattr(kernels, name)
    signature, constants, attrs = {}, {}, {}
    for place, parameter in enumerate(inspect.signature(kernel.fn).parameters):
        if parameter in sizes and parameter not in SCALARS:
            signature[parameter], constants[(place,)] = "constexpr", sizes[parameter]
        elif parameter in SCALARS:
            signature[parameter] = "i32"
        else:
            kind = "i64" if parameter in INT64 else "i32" if parameter in INT32 else "fp32"
            signature[parameter] = f"*{kind if parameter in INT64 | INT32 | FP32 else dtype}"
            attrs[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attrs)
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def check(name: str, arch: int, dtype: str, compiled: Any) -> None:
    """What can be seen without running it."""
    ptx = compiled.asm["ptx"]
    assert f"sm_{arch}" in ptx and compiled.asm["cubin"]
    assert compiled.metadata.shared <= SHARED, (name, compiled.metadata.shared)
    # Warps leave a waiting loop one by one: no barrier may be in it.
    loops = [block for block in ptx.split("$L__BB") if "nanosleep" in block]
    assert not any("bar.sync" in loop.split("nanosleep")[0] for loop in loops), name
    if dtype == "bf16":
        # Rows are read and written 16 bytes at once, here and at peers, and multiplied by tensor cores.
        assert "ld.global.b16" not in ptx and "st.global.b16" not in ptx, name
        assert ("wgmma" if arch == 90 else "tcgen05.mma") in ptx or name not in ("forward", "backward"), name
    print(name, len(ptx), compiled.metadata.shared, flush=True)


def main() -> None:
    arch, dtype = int(sys.argv[1]), sys.argv[2]
    for name in ("publish", "announce", "fetch", "forward", "backward"):
        check(name, arch, dtype, compile_for(name, arch, dtype))
    if sys.argv[3:] == ["all"]:
        for tiles in kernels.SPACE:
            for name in ("forward", "backward"):
                compiled = compile_for(name, arch, dtype, tiles=tiles, RECOMPUTE=False)
                check(name, arch, dtype, compiled)


if __name__ == "__main__":
    main()
