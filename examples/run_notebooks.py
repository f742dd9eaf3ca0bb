"""Run the notebooks of this folder from top to bottom, and keep nothing of what they print.

    python examples/run_notebooks.py              all of them
    python examples/run_notebooks.py FILE...      some

No network is used: a model of the hub that is not in its cache is left out, as the notebooks say.
One that stops for want of something, by SystemExit and a sentence, counts as skipped.
"""

import os
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

HERE = Path(__file__).resolve().parent
LONGEST = 300  # seconds of a cell, on a busy machine


def run(path: Path, folder: Path) -> str:
    """What became of one notebook, run in this folder; an error of a cell is raised."""
    start = time.perf_counter()
    notebook = nbformat.read(path, as_version=4)
    kernel = KernelManager(
        kernel_name="python3",
        transport="ipc",  # sockets in the folder of this file, and no open port
        connection_file=str(folder / "kernel.json"),
        client_class="jupyter_client.asynchronous.AsyncKernelClient",
    )
    where = {"metadata": {"path": str(folder)}}
    client = NotebookClient(notebook, km=kernel, timeout=LONGEST, resources=where)
    try:
        client.execute()
    except CellExecutionError as error:
        if error.ename != "SystemExit":
            raise
        return f"skipped. {error.evalue}"
    finally:
        kernel.shutdown_kernel(now=True)
    return f"ran in {time.perf_counter() - start:.0f} s"


def main() -> int:
    """Run all that are asked for; 1 if a cell of one of them failed."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # for the kernels, which inherit it
    failed = 0
    for path in [Path(name) for name in sys.argv[1:]] or sorted(HERE.glob("*.ipynb")):
        with tempfile.TemporaryDirectory() as folder:
            try:
                print(f"{path.name}: {run(path, Path(folder))}", flush=True)
            except CellExecutionError as error:
                print(f"{path.name}: failed\n{error}", file=sys.stderr)
                failed += 1
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
