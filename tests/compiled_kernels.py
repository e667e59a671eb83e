"""Compiles the decoder's kernels for GPUs, without one: prints registers, spilled bytes, shared memory and seconds of each.

python tests/compiled_kernels.py
"""

import re
import subprocess
import tempfile
import time
from itertools import product
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hf_ext.storage.delta import device_checksum, device_kernels

TARGETS = (GPUTarget("cuda", 80, 32), GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx942", 64))
TYPES = {"bf16": (16, 7), "fp16": (16, 10), "fp32": (32, 23)}
POINTERS = {"arena": "*u8", "secret": "*u64", "sums": "*u64", "accumulators": "*u64"}
POINTERS |= dict.fromkeys(("errors", "_errors", "_numbers", "all_numbers"), "*i32")
WARPS = device_kernels.WARPS | {device_checksum.sum_blocks: 1, device_checksum.chain_blocks: 1}
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def registers(compiled: triton.compiler.CompiledKernel) -> str:
    """Returns the registers of a thread, and the bytes that it spills."""
    if "cubin" in compiled.asm:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            usage = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
        return "{} registers, {} spilled".format(*re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
    fields = (re.search(rf"\.{name}:\s+(\d+)", compiled.asm["amdgcn"])[1] for name in ("vgpr_count", "vgpr_spill_count"))
    return "{} registers, {} spilled".format(*fields)


for target in TARGETS:
    for kernel, warps in WARPS.items():
        names = kernel.arg_names
        kinds = TYPES if "WIDTH" in names else {"": (None, None)}
        for (name, (width, mantissa)), wide in product(kinds.items(), (False, True) if "WIDE" in names else (None,)):
            constants = {"WIDTH": width, "MANTISSA": mantissa, "WIDE": wide}
            constants = {key: value for key, value in constants.items() if value is not None}
            signature = {key: "constexpr" if key in constants else POINTERS.get(key, "*i64") for key in names}
            aligned = {(i,): [["tt.divisibility", 16]] for i, key in enumerate(names) if key not in constants}
            start = time.perf_counter()
            source = ASTSource(kernel, signature, constants, aligned)
            compiled = triton.compile(source, target=target, options={"num_warps": warps, "enable_fp_fusion": False})
            text = compiled.asm.get("ptx", "")
            if re.search(r"\.ftz|fma\.rn\.f", text):
                raise SystemExit(f"{kernel.__name__} rounds in another way than the format says")
            shared, seconds = compiled.metadata.shared, time.perf_counter() - start
            what = f"{target.arch}, {kernel.__name__} {name}{' wide' * bool(wide)}"
            print(f"{what}: {registers(compiled)}, {shared} bytes shared, {seconds:.1f} s", flush=True)
