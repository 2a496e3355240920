"""Tiny Shakespeare in GPT-2 tokens, at nanoGPT's path: runs prepare/shakespeare.py with the same arguments."""

import runpy
from pathlib import Path

if __name__ == "__main__":
    print("running prepare/shakespeare.py")
    script = Path(__file__).resolve().parent.parent.parent / "prepare" / "shakespeare.py"
    runpy.run_path(str(script), run_name="__main__")
