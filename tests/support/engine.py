"""Runs the JavaScript engine (folio/web/browser) in Chromium, and stores models in its format."""

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from folio.web.html_file import engine_constants
from model import GPT

FOLDER = Path(__file__).resolve().parent.parent.parent / "folio" / "web" / "browser"
TYPES = {"float32": "Float32Array", "float64": "Float64Array", "int32": "Int32Array", "uint8": "Uint8Array"}

# In JSON, an array is its type and its bytes in base64.
CONVERSIONS = """
const toArray = ({dtype, base64}) => new globalThis[dtype](Uint8Array.from(atob(base64), c => c.charCodeAt(0)).buffer);
function received(value) {
  if (Array.isArray(value)) return value.map(received);
  if (value === null || typeof value !== "object") return value;
  if ("base64" in value) return toArray(value);
  return Object.fromEntries(Object.entries(value).map(([name, item]) => [name, received(item)]));
}
function sent(value) {
  if (ArrayBuffer.isView(value)) {
    const bytes = new Uint8Array(value.buffer, value.byteOffset, value.byteLength);
    let text = "";
    for (let i = 0; i < bytes.length; i += 32768) text += String.fromCharCode(...bytes.subarray(i, i + 32768));
    return {dtype: value.constructor.name, base64: btoa(text)};
  }
  if (Array.isArray(value)) return value.map(sent);
  if (value === null || typeof value !== "object") return value;
  return Object.fromEntries(Object.entries(value).map(([name, item]) => [name, sent(item)]));
}
function finish(generator, yielded = []) { // returns its return value; collects what it yields, except pauses
  for (;;) {
    const {done, value} = generator.next();
    if (done) return value;
    if (value !== undefined) yielded.push(value);
  }
}
function errorOf(compute) {
  try {
    compute();
  } catch (error) {
    return error.message;
  }
}
function eventsOf(generator) {
  const events = [];
  finish(generator, events);
  return events;
}
"""


class Engine:
    """Scripts of folio/web/browser in a page. engine("x + y", x=1, y=2) evaluates an expression, which may use await.

    NumPy arrays are converted to typed arrays and back. `finish(generator)` runs a generator to its end, and
    `eventsOf(generator)` returns the yielded values.
    """

    def __init__(self, page: Any, scripts: tuple[str, ...]):
        self.page = page
        source = (
            CONVERSIONS + engine_constants() + "".join((FOLDER / name).read_text(encoding="utf-8") for name in scripts)
        )
        self.page.add_script_tag(content=source)

    def __call__(self, expression: str, **names: Any) -> Any:
        script = (
            f"async argument => {{ const {{{', '.join(names)}}} = received(argument); return sent({expression}); }}"
        )
        return self._received(self.page.evaluate(script, self._sent(names)))

    def _sent(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            value = value.numpy()
        if isinstance(value, (bytes, np.ndarray)):
            array = np.frombuffer(value, dtype=np.uint8) if isinstance(value, bytes) else value
            return {"dtype": TYPES[array.dtype.name], "base64": base64.b64encode(array.tobytes()).decode()}
        if isinstance(value, dict):
            return {name: self._sent(item) for name, item in value.items()}
        return [self._sent(item) for item in value] if isinstance(value, (list, tuple)) else value

    def _received(self, value: Any) -> Any:
        if isinstance(value, dict) and "base64" in value:
            dtype = next(dtype for dtype, name in TYPES.items() if name == value["dtype"])
            return np.frombuffer(base64.b64decode(value["base64"]), dtype=dtype)
        if isinstance(value, dict):
            return {name: self._received(item) for name, item in value.items()}
        return [self._received(item) for item in value] if isinstance(value, list) else value

    def load(self, model: GPT, storage: str = "float32", simd: bool = True) -> GPT:
        """Load a model as `gpt` in the page. Returns the model with the stored weights."""
        header, weights, stored = store(model, storage)
        wasm = (FOLDER / "kernels.wasm").read_bytes() if simd else None
        self(
            "(globalThis.gpt = new GPT(header, await makeKernels(wasm)), finish(gpt.setWeights(weights)))",
            header=header,
            weights=weights,
            wasm=wasm,
        )
        assert self("gpt.kernels.simd") == simd
        return stored


@contextmanager
def engine_in(browser: Any, *scripts: str) -> Iterator[Engine]:
    """An Engine in a new page. Errors in the page fail the test."""
    page, problems = browser.new_page(), []
    page.on("pageerror", lambda error: problems.append(str(error)))
    yield Engine(page, scripts)
    page.close()
    assert problems == []


def store(model: GPT, storage: str) -> tuple[dict[str, Any], bytes, GPT]:
    """The header of a model, its weights as bytes, and the model with these weights, quantized if the storage is."""
    parameters, parts, tensors = [], [], {}

    def append(array: np.ndarray) -> int:
        """Append an array and return its offset, a multiple of 4."""
        offset = sum(map(len, parts))
        data = array.tobytes()
        parts.append(data + bytes(-len(data) % 4))
        return offset

    for name, p in model.named_parameters():
        weight = p.detach().numpy()
        dtype = storage if weight.ndim == 2 else "float32"
        entry = {"name": name, "shape": list(weight.shape), "dtype": dtype}
        if dtype == "int8":
            scales = np.maximum(np.abs(weight).max(1), 1e-30).astype(np.float32) / np.float32(127)
            integers = np.rint(weight / scales[:, None]).astype(np.int8)
            entry |= {"offset": append(integers), "scales": append(scales)}
            weight = integers * scales[:, None]
        else:
            entry["offset"] = append(weight.astype(dtype))
            weight = weight.astype(dtype).astype(np.float32)
        parameters.append(entry)
        tensors[name] = torch.from_numpy(weight.copy())
    stored = GPT.from_tensors(model.config, tensors).eval()
    return {"config": asdict(model.config), "parameters": parameters}, b"".join(parts), stored
