"""The pictures of the docs and the numbers beside them: from results, and from one `whence demo`.

    python docs/make_pictures.py --results  draw the README's picture alone, from results
    python docs/make_pictures.py            that, and run the demo, then copy
    python docs/make_pictures.py FOLDER     that, and copy what `whence demo --out FOLDER` wrote

It writes docs/*.png and results/inspect_minilm.json, the inspection without its arrays, from which
docs/make_tables.py makes tables. It needs the model: `make demo` installs it.
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import first_picture
from tables.results_folder import ResultsFolder
from whence.analysis.fit import fit_heads
from whence.analysis.results import Inspection
from whence.files import write_bytes, write_text
from whence.report import telling

ROOT = Path(__file__).resolve().parent.parent
MODEL = "sentence-transformers--all-MiniLM-L6-v2"
PICTURES = {
    "lag_curves.png": "lag_curves.png",
    "demo/figures/heat_maps.png": "inspect_minilm.png",
    "demo/figures/windows.png": "inspect_windows.png",
    f"demo/figures/{MODEL}.curves-0.png": "inspect_curves.png",
    f"demo/figures/{MODEL}.fits-0.png": "inspect_fits.png",
    f"demo/figures/{MODEL}.profiles-0.png": "inspect_profiles.png",
}
LARGEST = 300_000  # bytes of a picture


def copy(folder: Path) -> None:
    """Everything, or nothing: all files are read before one is written."""
    pictures = {target: (folder / source).read_bytes() for source, target in PICTURES.items()}
    for name, data in pictures.items():
        if len(data) > LARGEST:
            raise SystemExit(f"{name} has {len(data):,} bytes, more than {LARGEST:,}.")
    found = Inspection.load(folder / "demo" / f"{MODEL}.json")
    if found.table is None:
        raise SystemExit(f"{MODEL} has no position table: is this the demo's folder?")
    numbers = {
        "model": asdict(found.model),
        "versions": found.versions,
        "notes": found.notes,
        "telling": [asdict(number) for number in telling(found)],
        "windows": [asdict(window) for window in (*found.table.windows, found.table.whole)],
        "fits": fits_of(found),
    }
    for name, data in pictures.items():
        write_bytes(ROOT / "docs" / name, data)
    text = json.dumps(numbers, indent=1, ensure_ascii=False) + "\n"
    write_text(ROOT / "results" / "inspect_minilm.json", text)


def fits_of(found: Inspection) -> list[dict[str, Any]]:
    """The fits of the heads that sense position, as made, and to all lags of their curves."""
    heads = [head for head in found.heads if head.sensitive]
    near = {(one.layer, one.head): one for one in found.fits}
    far = fit_heads(heads, reach=int(max(abs(heads[0].lag))))
    return [
        {
            "head": head.head,
            "strength": head.strength,
            "r2_of_f": head.r2,
            "near_r2_of_f": None if head.near is None else head.near.r2,
            **{
                name: {
                    "reach": one.fits[0].reach,
                    "chosen": one.chosen,
                    "r2": [fit.r2 for fit in one.fits],
                    "largest_amplitude": max(map(abs, one.fits[one.chosen - 1].amplitude)),
                }
                for name, one in (("near", near[head.layer, head.head]), ("all", everywhere))
            },
        }
        for head, everywhere in zip(heads, far, strict=True)
    ]


def main() -> None:
    """Run the demo unless its folder is given, or nothing of it is wanted."""
    first_picture.save(ResultsFolder(ROOT), ROOT / "docs" / "first_picture.png")
    if sys.argv[1:] == ["--results"]:
        return
    if len(sys.argv) > 1:
        copy(Path(sys.argv[1]))
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "whence", "demo", "--out", folder]
        subprocess.run(command, check=True)
        copy(Path(folder))


if __name__ == "__main__":
    main()
