from __future__ import annotations

from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "tasks" / "seedling_crowd"


@pytest.fixture(scope="module")
def task():
    from lmms_eval.tasks import TaskManager, get_task_dict

    manager = TaskManager(include_path=str(FOLDER), include_defaults=False)
    assert set(manager.all_tasks) == {"seedling_crowd"}
    return get_task_dict(["seedling_crowd"], manager, task_type="chat")["seedling_crowd"]


def test_task_gives_documents_with_images(task):
    documents = list(task.test_docs())
    assert len({document["index"] for document in documents}) == 500
    document = documents[0]
    image, text = task.doc_to_messages(document)[0]["content"]
    assert image["url"].size == (192, 192)
    assert text["text"] == document["question"] == task.doc_to_text(document)
    assert task.doc_to_visual(document)[0].tobytes() == image["url"].tobytes()
    assert task.doc_to_target(document) == document["answer"]
    assert task.config.generation_kwargs["until"]


def test_right_answers_score_full_marks_and_every_metric_comes_up(task):
    reported = set()
    for document in list(task.test_docs())[:16]:
        scores = task.process_results(document, [document["answer"]])
        assert scores["accuracy"] == 1.0
        assert scores["unparsed"] == 0.0
        assert task.process_results(document, [""])["accuracy"] == 0.0
        reported |= set(scores)
    assert reported == set(task.aggregation()) == set(task.higher_is_better())
