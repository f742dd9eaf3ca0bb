"""The page: a tab each for methods, a model and results.

Nothing is computed here. Every callback asks a worker, and shows its answer or its refusal.
"""

from pathlib import Path
from typing import Any

from whence.app.methods_tab import MethodsTab
from whence.app.model_tab import ModelTab
from whence.app.quick_import import quickly
from whence.app.results_tab import ResultsTab
from whence.app.worker import Worker

with quickly():
    import gradio as gr

TITLE = (
    "<div class='title'><h1>whence explore</h1>"
    "<p>How a Transformer knows what stands where.</p></div>"
)
BLUES = (  # about the blue of the figures, from pale to dark
    *("#eaf4fa", "#d3e8f4", "#a8d1e9", "#6fb4d9", "#3796c6", "#0072b2"),
    *("#0064a0", "#005587", "#00466f", "#003757", "#002a43"),
)


def make_page(quick: Worker, long: Worker) -> gr.Blocks:
    """The blocks of the page; `quick` redraws methods at once, `long` reads models and results."""
    with gr.Blocks(title="whence explore", analytics_enabled=False) as page:
        gr.HTML(TITLE)
        with gr.Tabs():
            with gr.Tab("Methods", id="methods"):
                MethodsTab(page, quick)
            with gr.Tab("Model", id="model"):
                ModelTab(long)
            with gr.Tab("Results", id="results") as tab:
                ResultsTab(tab, long)
    return page


def look() -> dict[str, Any]:
    """Theme, style and script: nothing of them is fetched from elsewhere."""
    here = Path(__file__).parent
    theme = gr.themes.Base(
        primary_hue=gr.themes.Color(*BLUES),
        neutral_hue="gray",
        font=["system-ui", "sans-serif"],
        font_mono=["ui-monospace", "monospace"],
    )
    script = (here / "page.js").read_text(encoding="utf-8")
    return {
        "theme": theme,
        "css": (here / "page.css").read_text(encoding="utf-8"),
        "head": f"<script>{script}</script>",
    }
