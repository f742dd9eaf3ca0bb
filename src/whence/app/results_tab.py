"""The tab *Results* of the page: one result file of a folder at a time, as tables and plots."""

from typing import Any

from whence.app.quick_import import quickly
from whence.app.tab import HIDDEN, SHOWN, Tab
from whence.app.worker import Worker

with quickly():
    import gradio as gr


class ResultsTab(Tab):
    """The list of files is read when the tab is opened, and again on request."""

    def __init__(self, tab: gr.Tab, worker: Worker) -> None:
        super().__init__(worker)
        with gr.Row():
            which = gr.Dropdown(
                [],
                label="Result",
                info=f"In {worker.settings.results}",
                elem_id="result",
                scale=4,
            )
            again = gr.Button("Read the folder again", scale=1, min_width=160)
        shown = gr.HTML(elem_id="shown")
        for event in (tab.select, again.click):
            event(self.list, [which], [which, shown], **HIDDEN)
        which.input(self.show, [which], [shown], **SHOWN)

    def list(self, chosen: str | None) -> tuple[Any, Any]:
        """The files that can be shown, and one of them."""
        names = self.asked("result_names")
        if isinstance(names, str):
            return gr.update(choices=[], value=None), names
        value = chosen if chosen in names else names[0]
        return gr.update(choices=names, value=value), self.show(value)

    def show(self, chosen: str | None) -> Any:
        """One file."""
        return self.asked("result", name=chosen or "")
