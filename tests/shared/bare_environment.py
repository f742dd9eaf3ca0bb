"""An environment with a wheel of whence and what its extras ask for, made without a network.

Dependencies are not installed anew: they are links to the packages of the environment that runs the tests,
chosen by following the requirements of the wheel's extras and nothing else. What an extra does
not bring is therefore not there, as after `pip install 'whence[EXTRA]'` into an empty environment.
"""

import subprocess
import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


class BareEnvironment:
    """A virtual environment in a folder, with this wheel and these extras."""

    def __init__(self, folder: Path, wheel: Path, extras: tuple[str, ...] = ()) -> None:
        self.folder = folder
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
        self.python = folder / "bin" / "python"
        (self.packages,) = (folder / "lib").glob("python*/site-packages")
        pip = [sys.executable, "-m", "pip", "--python", str(self.python), "install", "-qq"]
        subprocess.run([*pip, "--no-deps", "--no-index", str(wheel)], check=True)
        (ours,) = metadata.distributions(name="whence", path=[str(self.packages)])
        self.linked = set[str]()
        self._link_requirements(ours, extras)

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """`python *command` there, away from the sources and from this environment."""
        return self._ended(str(self.python), *command)

    def whence(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """The command `whence` as it is installed."""
        return self._ended(str(self.folder / "bin" / "whence"), *arguments)

    def _ended(self, *command: str) -> subprocess.CompletedProcess[str]:
        env = {"PATH": "/usr/bin:/bin", "HOME": str(self.folder), "HF_HUB_OFFLINE": "1"}
        env |= {"OMP_NUM_THREADS": "1"}
        return subprocess.run(
            command, capture_output=True, text=True, timeout=150, cwd=self.folder, env=env
        )

    def _link_requirements(self, of: metadata.Distribution, extras: tuple[str, ...]) -> None:
        for text in of.requires or ():
            wanted = Requirement(text)
            marker = wanted.marker
            if marker is not None and not any(marker.evaluate({"extra": e}) for e in ("", *extras)):
                continue
            asked = tuple(sorted(wanted.extras))
            key = f"{canonicalize_name(wanted.name)}[{','.join(asked)}]"
            if key in self.linked:
                continue
            self.linked.add(key)
            if wanted.name == "whence":
                self._link_requirements(of, asked)
                continue
            found = metadata.distribution(wanted.name)
            self._link(found)
            self._link_requirements(found, asked)

    def _link(self, found: metadata.Distribution) -> None:
        """Its files' top folders; those outside site-packages, as commands, are left out."""
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            target = self.packages / top
            if not target.exists():
                target.symlink_to(Path(str(found.locate_file(top))))
