"""The tab *Methods* of the page: a method, everything in it that can be moved, what that does."""

from functools import partial
from typing import Any

from whence.app.cards import note
from whence.app.quick_import import quickly
from whence.app.tab import DRAGGED, HIDDEN, Tab
from whence.app.worker import Worker

with quickly():
    import gradio as gr

SENTENCE = "I think therefore I am"
FIRST = "tisa"
# Two renders at the same time disturb each other in Gradio's table of components.
ONE_BY_ONE: dict[str, Any] = {"concurrency_limit": 1, "concurrency_id": "render"}
NO_NUMBERS: dict[str, Any] = {"why": "", "controls": []}


class MethodsTab(Tab):
    """One method, its options and numbers on the left, what they do on the right.

    `view` is all that the user has set. Callbacks change it in place before they ask the worker,
    so that none of two that overlap is lost.
    """

    def __init__(self, page: gr.Blocks, worker: Worker) -> None:
        super().__init__(worker)
        self.form, self.numbers = gr.State({"controls": []}), gr.State(NO_NUMBERS)
        self.view = gr.State(
            {
                "name": FIRST,
                "options": {},
                "defaults": {},
                "moved": {},
                "sentence": SENTENCE,
                "n": 48,
                "n_heads": 4,
                "head": 2,
                "causal": False,
            }
        )
        with gr.Row(elem_classes="tab"):
            with gr.Column(scale=1, min_width=300):
                self.method = gr.Dropdown(
                    [FIRST],
                    value=FIRST,
                    label="Method",
                    info="Choose one, or write one: shaw:clip=8, tisa+rope",
                    allow_custom_value=True,
                    elem_id="method",
                )
                self.about = gr.HTML(elem_classes="about")
                gr.render([self.form], [self.form.change], **ONE_BY_ONE)(self.show_options)
                sentence = gr.Textbox(
                    SENTENCE, label="A sentence of yours", max_lines=3, elem_id="sentence"
                )
                n = gr.Slider(4, 128, 48, step=1, label="Positions", elem_id="positions")
                with gr.Row():
                    n_heads = gr.Slider(1, 12, 4, step=1, label="Heads", min_width=120)
                    self.head = gr.Slider(1, 4, 2, step=1, label="Head shown", min_width=120)
                causal = gr.Checkbox(False, label="Causal: no key after the query")
                gr.render([self.numbers], [self.numbers.change], **ONE_BY_ONE)(self.show_numbers)
            with gr.Column(scale=3, min_width=330, elem_classes="shown"):
                self.plots = gr.HTML(note("Importing torch ..."), elem_id="plots")
        redrawn = [self.numbers, self.plots]
        page.load(self.begin, [self.view], [self.method, self.about, self.form, *redrawn], **HIDDEN)
        self.method.input(
            self.choose, [self.method, self.view], [self.about, self.form, *redrawn], **DRAGGED
        )
        n_heads.input(self.set_heads, [n_heads, self.view], [self.head, *redrawn], **DRAGGED)
        for component, event, key in (
            (sentence, sentence.change, "sentence"),  # a pasted text is a change, but no input
            (n, n.input, "n"),
            (self.head, self.head.input, "head"),
            (causal, causal.input, "causal"),
        ):
            event(partial(self.set, key), [component, self.view], redrawn, **DRAGGED)

    def show_options(self, form: dict[str, Any]) -> None:
        """A control for each option of the method."""
        for control in form["controls"]:
            component = _component(control)
            event = component.change if control["kind"] == "text" else component.input
            event(
                partial(self.set_option, control["key"], control["kind"]),
                [component, self.view],
                [self.numbers, self.plots],
                **DRAGGED,
            )

    def show_numbers(self, numbers: dict[str, Any]) -> None:
        """A slider for each number of the head that is shown."""
        heading = "Numbers of the head shown" if numbers["controls"] else numbers["why"]
        with gr.Accordion(heading, open=True, elem_id="numbers"):
            for control in numbers["controls"]:
                component = _component(control)
                component.input(
                    partial(self.move, control["key"]),
                    [component, self.view],
                    [self.plots],
                    **DRAGGED,
                )

    def begin(self, view: dict[str, Any]) -> tuple[Any, ...]:
        """The first look: the names of all methods, and the first of them."""
        names = self.asked("method_names")
        update = gr.update() if isinstance(names, str) else gr.update(choices=names)
        return update, *self.choose(view["name"], view)

    def choose(self, name: str | None, view: dict[str, Any]) -> tuple[Any, ...]:
        """Another method: its options and numbers begin anew."""
        view |= {"name": name or "", "options": {}, "defaults": {}, "moved": {}}
        found = self.asked("method", spec=view["name"], **_shown(view))
        if isinstance(found, str):
            return "", {"controls": []}, NO_NUMBERS, found
        form = found["form"]
        view["name"], view["defaults"] = form["name"], form["defaults"]
        view["options"] = {
            control["key"]: _value(control["kind"], control["value"])
            for control in form["controls"]
        }
        return found["about"], form, found["numbers"], found["plots"]

    def set(self, key: str, value: Any, view: dict[str, Any]) -> tuple[Any, Any]:
        """Something other than the method itself."""
        view[key] = value
        return self._redrawn(view)

    def set_heads(self, value: int, view: dict[str, Any]) -> tuple[Any, ...]:
        """Another number of heads, of which one is shown."""
        view["n_heads"], view["head"] = value, min(view["head"], value)
        return gr.update(maximum=value, value=view["head"]), *self._redrawn(view)

    def set_option(self, key: str, kind: str, value: Any, view: dict[str, Any]) -> tuple[Any, Any]:
        """Another value for an option; numbers that were moved stay where they are."""
        view["options"][key] = _value(kind, value)
        return self._redrawn(view)

    def move(self, key: str, value: Any, view: dict[str, Any]) -> Any:
        """Another value for a number of a head: the sliders stay, the plots change."""
        view["moved"][key] = value
        return self._redrawn(view)[1]

    def _redrawn(self, view: dict[str, Any]) -> tuple[Any, Any]:
        what = {key: view[key] for key in ("name", "options", "defaults")}
        found = self.asked("with_options", **what, **_shown(view))
        if isinstance(found, str):
            return gr.skip(), found
        return found["numbers"], found["plots"]


def _shown(view: dict[str, Any]) -> dict[str, Any]:
    return {key: view[key] for key in ("sentence", "n", "n_heads", "head", "causal", "moved")}


def _value(kind: str, value: Any) -> Any:
    """The value of an option that a control stands for."""
    return float(f"{10.0**value:.3g}") if kind == "power" else value


def _component(control: dict[str, Any]) -> Any:
    """What Gradio has for a control (`whence.app.methods_view.Control`)."""
    value = control["value"]
    look = {
        "label": control["label"],
        "elem_id": f"control-{control['key']}",
        "interactive": True,  # Gradio would make what a render makes for reading alone
    }
    if control["kind"] == "tick":
        return gr.Checkbox(value, **look)
    if control["kind"] == "list":
        return gr.Dropdown(list(control["choices"]), value=value, **look)
    if control["kind"] == "text":
        return gr.Textbox(value, max_lines=1, **look)
    return gr.Slider(control["low"], control["high"], value, step=control["step"], **look)
