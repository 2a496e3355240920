"""Writes safetensors files with the usual permissions and errors."""

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write tensors to a new safetensors file. Raises OSError, also for a full disk."""
    path.touch()
    mode = path.stat().st_mode  # as the umask says; safetensors makes files readable by the owner only
    try:
        save_file(tensors, path, metadata)
    except SafetensorError as error:
        raise OSError(str(error)) from None
    path.chmod(mode)
