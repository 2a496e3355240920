"""OpenWebText, at nanoGPT's path: runs prepare/openwebtext.py with the same arguments."""

import runpy
from pathlib import Path

if __name__ == "__main__":
    print("running prepare/openwebtext.py")
    script = Path(__file__).resolve().parent.parent.parent / "prepare" / "openwebtext.py"
    runpy.run_path(str(script), run_name="__main__")
