"""How soon `whence explore` can be used, and how soon a slider redraws.

python benchmarks/explore.py. The clock starts with the command and stops when a real browser,
already open, shows plots and sliders. Then a slider is moved, and each time counts until the plots
have changed. Results go to results/cpu/explore.json. Everything else on the machine should be
quiet; the load is noted.
"""

import json
import os
import platform
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright

import whence

STARTS, MOVES = 3, 15
METHODS = ("tisa", "alibi", "shaw", "rope", "t5", "deberta", "floater")
BARS = {"seconds_to_interactive": 3.0, "milliseconds_a_redraw": 300.0}
OUT = Path("results/cpu/explore.json")
MOVE = """async (slider) => {
  const shown = () => document.querySelector('#plots .cards')?.innerHTML;
  const before = shown(), start = performance.now();
  slider.value = String(Number(slider.value) + Number(slider.step) *
    (Number(slider.value) + Number(slider.step) > Number(slider.max) ? -1 : 1));
  slider.dispatchEvent(new Event('input', {bubbles: true}));
  while (shown() === before) {
    if (performance.now() - start > 10000) throw new Error('the plots did not change');
    await new Promise((done) => setTimeout(done, 2));
  }
  return performance.now() - start;
}"""


def main() -> None:
    """Measure, print and write."""
    load = os.getloadavg()[0]
    starts, redraws = measured(starts=STARTS, moves=MOVES)
    found: dict[str, Any] = {
        "what": "whence explore in Chromium on this machine: seconds from the command to plots "
        "and sliders, milliseconds from moving a slider to other plots",
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load_before": round(load, 2),
        "seconds_to_interactive": round(statistics.median(starts), 2),
        "milliseconds_a_redraw": round(statistics.median(redraws["tisa"])),
        "bars": BARS,
        "starts": [{"seconds": round(each, 2)} for each in starts],
        "redraws": [
            {
                "slider": name,
                "median_ms": round(statistics.median(each)),
                "most_ms": round(max(each)),
            }
            for name, each in redraws.items()
        ],
    }
    print(json.dumps(found, indent=1))
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def measured(*, starts: int, moves: int) -> tuple[list[float], dict[str, list[float]]]:
    """Seconds of each start, and milliseconds of each redraw by method."""
    seconds, redraws = [], {}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        for _ in range(starts):
            page = browser.new_page(viewport={"width": 1400, "height": 900})
            page.set_default_timeout(120_000)
            port, begin = _free_port(), time.perf_counter()
            process = _started(port)
            try:
                _open(page, port)
                seconds.append(time.perf_counter() - begin)
                if not redraws:
                    redraws = {name: _redraws(page, name, moves) for name in METHODS}
            finally:
                process.send_signal(signal.SIGINT)
                process.wait(30)
                page.close()
        browser.close()
    return seconds, redraws


def _started(port: int) -> subprocess.Popen[bytes]:
    source = str(Path(whence.__file__).parents[1])
    command = [sys.executable, "-m", "whence", "explore", "--port", str(port)]
    return subprocess.Popen(
        command, stdout=subprocess.DEVNULL, env=os.environ | {"PYTHONPATH": source}
    )


def _open(page: Page, port: int) -> None:
    """Knock until somebody answers, then wait for plots and sliders."""
    while True:
        with socket.socket() as door:
            if door.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.02)
    page.goto(f"http://127.0.0.1:{port}/", wait_until="commit")
    page.wait_for_selector("#plots svg")
    page.wait_for_selector("[id='control-2:amplitude:0'] input[type=range]:enabled")


def _redraws(page: Page, method: str, moves: int) -> list[float]:
    """Of the first slider of a method: an amplitude of TISA, elsewhere an option or a slope."""
    box = page.locator("#method input")
    box.fill(method)
    box.press("Enter")
    page.wait_for_selector(f"#plots svg[aria-label='Attention with {method}']")
    page.wait_for_timeout(500)
    place = "#numbers" if method in ("tisa", "alibi") else "[id^=control-]:not(#numbers *)"
    slider = page.locator(f"{place} input[type=range]").first
    return [slider.evaluate(MOVE) for _ in range(moves)]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
