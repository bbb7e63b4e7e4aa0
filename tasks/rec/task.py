"""RefCOCO, RefCOCO+ and RefCOCOg: one sample a description, the pictures read one at a time."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

from datasets import Dataset, DatasetDict, Image
from lmms_eval.api.task import ConfigurableMessagesTask
from PIL import Image as Pictures

from espalier.tasks.rec.boxes import Resized, question, score

Doc = dict[str, Any]

#: Of a row of the data set, everything but the picture and the outlines of its objects, which are most of the rest.
COLUMNS = ("ref_list", "image_info")


class Referring(ConfigurableMessagesTask):
    """A split of the RefCOCO family.

    A row of the data set is a picture with all objects that are described in it. The samples hold the number of their
    row and fetch the picture when they are asked for, so that opening a split takes the memory of its words.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        """Take the task file; `class` is what led here and no setting."""
        super().__init__(config={key: value for key, value in config.items() if key != "class"})

    def download(self, dataset_kwargs: dict[str, Any] | None = None) -> None:
        """Load the split and make a sample of each description. Cost: one pass over all columns but the picture."""
        super().download(dataset_kwargs)
        split = self.config.test_split
        samples = described(self.dataset[split])
        # lmms-eval takes pictures out of the copy that it scores; the scorer needs their size alone, which is a column.
        self.dataset_no_image = DatasetDict({split: samples})
        self.dataset = DatasetDict({split: with_pictures(samples, self.dataset[split])})

    def process_results(self, doc: Doc, results: list[Any], full_docs: Any = None) -> Any:
        """Score an answer by the format in which this model writes boxes, which lmms-eval tells to questions only."""
        return self.config.process_results(doc, results, self.lmms_eval_specific_kwargs)


def described(rows: Dataset) -> Dataset:
    """Return one sample for each description, without the picture."""
    samples: list[Doc] = []
    for number, row in enumerate(rows.select_columns(list(COLUMNS))):
        size = row["image_info"]
        for one in row["ref_list"]:
            for sentence in one["ref_info"]["sentences"]:
                samples.append(
                    {
                        "row": number,
                        "sent_id": sentence["sent_id"],
                        "ref_id": one["ref_info"]["ref_id"],
                        "file_name": one["ref_info"]["file_name"],
                        "expression": sentence["sent"],
                        "bbox": one["ann_info"]["bbox"],
                        "width": size["width"],
                        "height": size["height"],
                    }
                )
    return Dataset.from_list(samples)


def with_pictures(samples: Dataset, rows: Dataset) -> Dataset:
    """Return samples that fetch their picture from its row when they are read, opened but not decoded."""
    pictures = rows.select_columns(["image"]).cast_column("image", Image(decode=False))

    def fetch(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        stored = [pictures[number]["image"] for number in batch["row"]]
        return batch | {"image": [None if one is None else opened(one) for one in stored]}

    return samples.with_transform(fetch)


def opened(stored: Mapping[str, Any]) -> Pictures.Image:
    data = stored["bytes"]
    return Pictures.open(io.BytesIO(data) if data is not None else stored["path"])


def process_results(doc: Doc, results: list[Any], told: Mapping[str, Any]) -> Mapping[str, float]:
    """Judge an answer; whatever is no box is wrong."""
    answer = results[0] if results else ""
    left, top, width, height = doc["bbox"]
    return score(
        answer if isinstance(answer, str) else "",
        (left, top, left + width, top + height),
        told["boxes"],
        (doc["width"], doc["height"]),
        resized(told),
    )


def resized(told: Mapping[str, Any]) -> Resized | None:
    """Return how the model's processor resizes pictures, where it writes boxes in pixels of them."""
    bounds = told["resized"]
    return None if bounds is None else Resized(*bounds)


def doc_to_visual(doc: Doc) -> list[Any]:
    """Return the picture."""
    if doc["image"] is None:
        raise ValueError(f"{doc['file_name']} has no picture")
    return [doc["image"].convert("RGB")]


def doc_to_text(doc: Doc, lmms_eval_specific_kwargs: Mapping[str, Any]) -> str:
    """Return the question, in the words that this model was taught."""
    return question(lmms_eval_specific_kwargs["boxes"], doc["expression"])
