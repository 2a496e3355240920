"""The compiled functions of text_step.py, as their callers name them."""

from folio.machine.compiled import CompiledModule

TEXT_STEP = CompiledModule("folio.data.text_step", imports=("folio.data.minhash", "folio.machine.simd"))
