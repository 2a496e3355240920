"""Tiny Shakespeare in characters, at nanoGPT's path: runs prepare/shakespeare_char.py with the same arguments."""

import runpy
from pathlib import Path

if __name__ == "__main__":
    print("running prepare/shakespeare_char.py")
    script = Path(__file__).resolve().parent.parent.parent / "prepare" / "shakespeare_char.py"
    runpy.run_path(str(script), run_name="__main__")
