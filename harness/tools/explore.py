"""The page of `espalier explore`: a question about a picture, answered with two methods and by the unpruned model."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from functools import partial
from html import escape
from typing import Any

import gradio as gr

from espalier.harness.api.answer import Answer
from espalier.harness.api.apply import apply
from espalier.harness.api.loaded_models import Model
from espalier.harness.api.questions import opened_picture
from espalier.harness.config.catalogue import own_choices
from espalier.harness.errors import UserError
from espalier.harness.seedling.scene_benchmarks import FAMILY_CYCLES, sample_scene, samples

TITLE = """\
# Espalier: {name}
Two methods answer the question beside the unpruned model. Faded areas of a picture were dropped.
Times of a method's first question include its warm-up.
"""

#: How the page is served: from this process alone, without a record of questions.
SERVED = {
    **{"quiet": True, "share": False, "show_error": True, "run_history": False, "footer_links": []},
    # Of Gradio's own font the bold letters are missing.
    "theme": gr.themes.Default(font="system-ui"),
}

#: Small scenes are enlarged, large pictures fit a screen, and long answers are wrapped.
STYLE = """\
.picture .image-frame img {height: 100%; object-fit: contain}
.answers img {max-width: 100%; max-height: 70vh; margin: auto}
.answers table {width: 100%; table-layout: fixed}
.answers :is(td, th) {
    text-align: left; vertical-align: top; overflow-wrap: anywhere; padding: 2px 6px; font-weight: normal;
    border-color: var(--border-color-primary)
}
.answers :is(th, tr:first-child td) {color: var(--neutral-500)}
"""


class QuestionPage(gr.Blocks):
    """A page that notebooks display."""

    def launch(self, **options: Any) -> Any:
        """Serve the page; the options are Gradio's."""
        return super().launch(**{**SERVED, "css": STYLE, **options})

    def _ipython_display_(self) -> None:
        self.launch()


def explore(
    model: Model,
    picture: Any = None,
    *,
    method: str = "divprune",
    against: str = "random",
    ratio: float = 0.75,
) -> QuestionPage:
    """Return a page on which two methods answer questions about pictures, one question at a time.

    Args:
        model: result of `load` or `wrap`.
        picture: the first picture, as in `ask`; None: a scene of the embedded benchmarks, with its question.
        method: name of the first method.
        against: name of the second one.
        ratio: share of visual tokens removed at first, 0 <= ratio < 1.

    Raises:
        UserError: a method does not run on the model, or the picture cannot be opened; one line.

    Cost: four seconds, to see which methods run on the model.
    """
    for name in (method, against):
        apply(model, name, ratio)
    records = [samples(name, "test", 0, n, 1)[0] for n, name in enumerate(FAMILY_CYCLES)]
    scenes = [[sample_scene(record).to_pil(), record["question"]] for record in records]
    first = scenes[0]
    if picture is not None:
        first = [opened_picture(picture, model.spec.transparency), ""]
    choices = sorted({method, against, *methods_on(model)})
    page = QuestionPage(title="Espalier", analytics_enabled=False)
    with page:
        gr.Markdown(TITLE.format(name=model.spec.name))
        with gr.Row():
            image = gr.Image(
                first[0],
                label="Picture",
                sources=["upload", "clipboard"],
                format="png",  # no lossy copy: the model reads what `ask` reads
                height=330,
                elem_classes="picture",
            )
            # `ask` opens the file: what is wrong with it is one line.
            image.preprocess = lambda payload: payload and payload.path
            with gr.Column():
                question = gr.Textbox(first[1], label="Question")
                names = [
                    gr.Dropdown(choices, value=name, label=label)
                    for name, label in ((method, "Method A"), (against, "Method B"))
                ]
                percent = gr.Slider(
                    *(1, 100, round(100 * (1 - ratio))), step=1, label="Visual tokens kept, %"
                )
                button = gr.Button("Ask", variant="primary")
        with gr.Row():
            halves = []
            for _ in names:
                with gr.Column(min_width=330):
                    halves.append(gr.HTML(elem_classes="answers"))
        gr.Examples(scenes, [image, question], label="Scenes of the embedded benchmarks")
        # One question at a time, also of two people: one method acts on a model.
        gr.on(
            [button.click, question.submit],
            partial(compare, model),
            [image, question, percent, *names],
            halves,
            concurrency_limit=1,
            api_name="ask",
        )
    return page


def methods_on(model: Model) -> list[str]:
    """Return the methods of conf/ and of plug-ins that run on a model."""
    names = []
    for name in own_choices("method").all_names:
        try:
            apply(model, name, 0)
        except UserError:
            continue
        names.append(name)
    return names


def compare(
    model: Model, picture: str | None, question: str, percent: float, *methods: str
) -> list[str]:
    """Return the half of each method as HTML: its answer, or a line that says why there is none.

    Args:
        model: the model.
        picture: a file.
        question: a text.
        percent: share of visual tokens kept.
        methods: their names.
    """
    try:
        if picture is None or not question.strip():
            raise UserError("nothing to ask; valid: a picture and a question")
        unpruned = ask(model, "none", 0, picture, question)
    except UserError as error:
        return [_line(error)] * len(methods)
    halves = []
    for method in methods:
        try:
            answer = ask(model, method, round(1 - percent / 100, 2), picture, question)
            halves.append(_drawing(answer) + _table({method: answer, "unpruned": unpruned}))
        except UserError as error:
            halves.append(_line(error))
    return halves


def ask(model: Model, method: str, ratio: float, picture: str, question: str) -> Answer:
    """Return the answer with a method.

    Raises:
        UserError: the method does not run on the model or the picture, or the picture cannot be opened.
    """
    with apply(model, method, ratio) as pruned:
        answer: Answer = pruned.ask(picture, question)
    return answer


def _drawing(answer: Answer) -> str:
    """Return the picture with the kept tokens, or a line where the model's tokens have no place in it."""
    try:
        content = b64encode(answer.show()._repr_png_()).decode()
    except UserError as error:
        return _line(error)
    return f'<img alt="the kept tokens" src="data:image/png;base64,{content}">'


def _table(answers: Mapping[str, Answer]) -> str:
    """Return a table with a column for each answer."""
    columns = [_cells(name, answer) for name, answer in answers.items()]
    rows = [
        f"<tr><th>{key}</th>{''.join(f'<td>{escape(column[key])}</td>' for column in columns)}</tr>"
        for key in columns[0]
    ]
    return f"<table>{''.join(rows)}</table>"


def _cells(name: str, answer: Answer) -> dict[str, str]:
    """Return a column of the table by the names of its rows."""
    kept, times = f"{answer.kept} of {answer.visual}", answer.times_ms
    kept += f", {answer.cache:.0%} in the cache" if answer.cache < 1 else ""
    kept += f", draft {answer.decoding.draft_visual:.0f}" if answer.decoding else ""
    return {
        "": name,
        "answer": answer.text,
        "visual tokens kept": kept,
        "FLOPs of the prefill": f"{answer.flops.exact / 1e9:.3g} G, {answer.flops.share:.0%}",
        "prefill": f"{times['prefill']:.1f} ms",
        "answer, in all": f"{times['vision'] + times['prefill'] + times['decode']:.1f} ms",
    }


def _line(error: UserError) -> str:
    return f"<p><b>{escape(str(error))}</b></p>"
