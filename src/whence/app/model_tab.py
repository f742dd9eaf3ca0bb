"""The tab *Model* of the page: a checkpoint is read, its heads are shown, one is enlarged."""

from typing import Any

from whence.app.cards import note, problem
from whence.app.quick_import import quickly
from whence.app.tab import DRAGGED, HIDDEN, SHOWN, Tab
from whence.app.worker import RefusedError, Worker

with quickly():
    import gradio as gr

CHOOSE = """element.addEventListener('click', (event) => {
  const card = event.target.closest('[data-choice]');
  if (!card || event.target.closest('[data-save]')) return;
  element.querySelectorAll('.chosen').forEach((other) => other.classList.remove('chosen'));
  card.classList.add('chosen');
  trigger('click', {choice: card.dataset.choice});
});"""
FIRST = (
    "Name a model and press Inspect, for example sentence-transformers/all-MiniLM-L6-v2, which is "
    "fetched from the hub."
)
SILENT = 900.0  # seconds after which a reading that says nothing is given up


class ModelTab(Tab):
    """`key` names the model that was read last, by which the worker finds it again."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        key = gr.State("")
        with gr.Row(elem_classes="tab flows"):
            with gr.Column(scale=1, min_width=300):
                model = gr.Textbox(
                    worker.settings.model,
                    label="Model",
                    info=f"A folder in {worker.settings.root}, or a name on the hub",
                    elem_id="model-name",
                )
                layer = gr.Number(0, label="Layer", elem_id="layer")
                biases = gr.Checkbox(False, label="With the biases of the projections")
                run = gr.Checkbox(False, label="Also run it on text and measure (slower)")
                button = gr.Button("Inspect", variant="primary", elem_id="inspect")
                window = gr.Slider(0, 1, 0, step=1, label="Window", visible=False, elem_id="window")
                facts = gr.HTML(elem_id="facts", elem_classes="about")
            with gr.Column(scale=3, min_width=330, elem_classes="shown"):
                heat = gr.HTML(note(FIRST), elem_id="heat")
                head = gr.HTML(elem_id="head")
                heads = gr.HTML(elem_id="heads", js_on_load=CHOOSE)
        outputs = [key, window, facts, heat, head, heads]
        for event in (button.click, model.submit):
            event(
                self.inspect,
                [model, layer, biases, run],
                outputs,
                **SHOWN,
                show_progress_on=heat,
            )
        window.input(self.set_window, [window, key], [heat], **DRAGGED)
        heads.click(self.choose_head, [key], [head], **HIDDEN)

    def inspect(
        self,
        model: str | None,
        layer: float | None,
        biases: bool,
        run: bool,
        progress: gr.Progress = gr.Progress(),  # noqa: B008  Gradio fills it in
    ) -> tuple[Any, ...]:
        """Read a model, saying how far it is."""
        try:
            found = self.worker.call(
                "inspected",
                seconds=SILENT,
                progress=lambda what, share: progress(share, desc=what),
                model=model or "",
                layer=layer,
                biases=biases,
                run=run,
            )
        except RefusedError as error:
            hidden = gr.update(visible=False)
            return "", hidden, "", problem(str(error)), "", ""
        stops = found["windows"]
        place = found["place"]
        window = gr.update(
            visible=len(stops) > 1,
            maximum=max(1, len(stops) - 1),
            value=place,
            label="Window: " + ", ".join(f"{i} = {n}" for i, n in enumerate(stops)) + " positions",
        )
        parts = (found[name] for name in ("facts", "heat", "head", "heads"))
        return found["key"], window, *parts

    def set_window(self, place: int, key: str) -> Any:
        """The heat map of other first positions."""
        return self.asked("window", key=key, place=place)

    def choose_head(self, key: str, event: gr.EventData) -> Any:
        """The head whose card was clicked, enlarged."""
        return self.asked("one_head", key=key, number=int(event.choice))
