"""Optional packages: which extra of whence brings a module, and the command that installs it."""

import re
from importlib import metadata


def install(*extras: str) -> str:
    """How to install extras of whence, from a package registry or in a clone of its repository.

    >>> install("hf")
    "pip install 'whence[hf]', or in a clone pip install '.[hf]'"
    """
    listed = ",".join(extras)
    return f"pip install 'whence[{listed}]', or in a clone pip install '.[{listed}]'"


def extra_of(module: str) -> str | None:
    """The smallest extra of whence that brings a package of this name, as its metadata has it."""
    packages: dict[str, list[str]] = {}
    for requirement in metadata.requires("whence") or ():
        package, _, condition = requirement.partition(";")
        if "extra ==" in condition:
            extra = condition.partition("extra ==")[2].strip(" '\"")
            packages.setdefault(extra, []).append(re.split(r"[^\w.-]", package)[0])
    return min(
        (extra for extra, names in packages.items() if module in names),
        key=lambda extra: len(packages[extra]),
        default=None,
    )
