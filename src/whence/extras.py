"""Optional packages: which extra of whence brings a module, and the command that installs it."""

import re
from importlib import metadata

PACKAGES = {"sklearn": "scikit-learn"}  # modules that are named otherwise than their package


def install(*extras: str) -> str:
    """How to install extras of whence, from a package registry or in a clone of its repository.

    >>> install("hf")
    "pip install 'whence[hf]', or in a clone pip install '.[hf]'"
    """
    listed = ",".join(extras)
    return f"pip install 'whence[{listed}]', or in a clone pip install '.[{listed}]'"


def extra_of(module: str) -> str | None:
    """The smallest extra of whence that brings this module, as the package's metadata has it."""
    name = PACKAGES.get(module, module)
    packages: dict[str, list[str]] = {}
    for requirement in metadata.requires("whence") or ():
        package, _, condition = requirement.partition(";")
        if "extra ==" in condition:
            extra = condition.partition("extra ==")[2].strip(" '\"")
            packages.setdefault(extra, []).append(re.split(r"[^\w.-]", package)[0])
    return min(
        (extra for extra, names in packages.items() if name in names),
        key=lambda extra: len(packages[extra]),
        default=None,
    )
