"""Runs the JavaScript engine (folio/web/browser) in Chromium."""

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import numpy as np

from folio.checkpoints.build_model import model_from_tensors
from folio.web.html_file import ENGINE, KERNEL_FILE, engine_constants, pack_weights, unpack_weights
from model import GPT

ARRAYS = {"float32": "Float32Array", "float64": "Float64Array", "int32": "Int32Array", "uint8": "Uint8Array"}
DTYPES = {name: dtype for dtype, name in ARRAYS.items()}

# In JSON, an array is its type and its bytes in base64.
FUNCTIONS = """
function decodeArray(key, value) {
  if (typeof value?.base64 !== "string") return value;
  return new globalThis[value.array](Uint8Array.from(atob(value.base64), c => c.charCodeAt(0)).buffer);
}
function encodeArray(key, value) {
  if (!ArrayBuffer.isView(value)) return value;
  const bytes = new Uint8Array(value.buffer, value.byteOffset, value.byteLength);
  let text = "";
  for (let i = 0; i < bytes.length; i += 32768) text += String.fromCharCode(...bytes.subarray(i, i + 32768));
  return {array: value.constructor.name, base64: btoa(text)};
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

    Arrays are converted to typed arrays and back. `finish(generator)` runs a generator to its end, and
    `eventsOf(generator)` returns the yielded values.
    """

    def __init__(self, page: Any, scripts: tuple[str, ...]):
        self.page = page
        sources = [(ENGINE / name).read_text(encoding="utf-8") for name in scripts]
        self.page.add_script_tag(content="".join([FUNCTIONS, engine_constants(), *sources]))

    def __call__(self, expression: str, **names: Any) -> Any:
        definitions = f"const {{{', '.join(names)}}} = JSON.parse(names, decodeArray);"
        script = f"async names => {{ {definitions} return JSON.stringify({expression}, encodeArray); }}"
        value = self.page.evaluate(script, json.dumps(names, default=encode_array))
        return None if value is None else json.loads(value, object_hook=decode_array)

    def load(self, model: GPT, storage: str = "float32", simd: bool = True) -> GPT:
        """Load a model as `gpt` in the page. Returns the model with the stored weights."""
        weights = pack_weights(dict(model.named_parameters()), storage)
        self(
            "(globalThis.gpt = new GPT(header, await makeKernels(wasm)), finish(gpt.setWeights(weights)))",
            header={"config": asdict(model.config), "parameters": weights.parameters},
            weights=weights.content,
            wasm=(ENGINE / KERNEL_FILE).read_bytes() if simd else None,
        )
        assert self("gpt.kernels.simd") == simd
        return model_from_tensors(model.config, unpack_weights(weights)).eval()


def encode_array(value: Any) -> dict[str, str]:
    array = np.frombuffer(value, np.uint8) if isinstance(value, bytes) else np.asarray(value)
    return {"array": ARRAYS[array.dtype.name], "base64": base64.b64encode(array.tobytes()).decode()}


def decode_array(value: dict[str, Any]) -> Any:
    return np.frombuffer(base64.b64decode(value["base64"]), DTYPES[value["array"]]) if "base64" in value else value


@contextmanager
def engine_in(browser: Any, *scripts: str) -> Iterator[Engine]:
    """An Engine in a new page. Errors in the page fail the test."""
    page, problems = browser.new_page(), []
    page.on("pageerror", lambda error: problems.append(str(error)))
    yield Engine(page, scripts)
    page.close()
    assert problems == []
