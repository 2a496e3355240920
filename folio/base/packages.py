"""Optional packages: whether they are installed, and which requirements file lists them."""

import os
import re
from importlib import import_module
from pathlib import Path

from folio import UserError

ROOT = Path(__file__).resolve().parent.parent.parent


def require(feature: str, *modules: str) -> None:
    """Raise UserError if a module cannot be imported. Called before the feature's work begins."""
    for module in modules:
        try:
            import_module(module)
        except ModuleNotFoundError as error:
            raise UserError(f"{feature}: {describe_missing(error.name) or error}") from None
        except ImportError as error:
            raise UserError(f"{feature}: the package {module} cannot be imported ({error})") from None


def is_installed(module: str) -> bool:
    """Whether a module can be imported. Imports it, because an installed package can be broken."""
    try:
        import_module(module)
    except ImportError:
        return False
    return True


def describe_missing(module: str | None) -> str | None:
    """How to install the package of a module; None if no requirements file lists it.

    module: as in ModuleNotFoundError.name.
    """
    package = (module or "").partition(".")[0]
    for path in sorted(ROOT.glob("requirements*.txt"), key=lambda path: (len(path.name), path.name)):
        if package in packages_in(path):
            return f"the package {package} is not installed: pip install -r {os.path.relpath(path)}"
    return None


def packages_in(requirements: Path) -> set[str]:
    """Module names of the packages in a requirements file, without the files that it includes."""
    lines = requirements.read_text(encoding="utf-8").replace("-", "_")
    return {*re.findall(r"^[a-z]\w*", lines, re.MULTILINE)}
