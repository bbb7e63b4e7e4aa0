"""RefCOCO, RefCOCO+ and RefCOCOg: one sample per description; pictures are read one at a time."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

from datasets import Dataset, DatasetDict, Image
from lmms_eval.api.task import ConfigurableMessagesTask
from PIL import Image as Pictures

from espalier.tasks.rec.boxes import Resized, question, score

Doc = dict[str, Any]

#: Columns of the data set that are read: not the picture, and not the outlines of its objects, which are large.
COLUMNS = ("ref_list", "image_info")


class ReferringTask(ConfigurableMessagesTask):
    """A split of the RefCOCO family.

    A row of the data set is a picture with all described objects. Samples hold the number of their row and fetch the
    picture when they are read, so that an open split takes the memory of its texts only.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        """Take the settings of the task file, without `class`."""
        super().__init__(config={key: value for key, value in config.items() if key != "class"})

    def download(self, dataset_kwargs: dict[str, Any] | None = None) -> None:
        """Load the split and make one sample per description. Cost: one pass over all columns but the picture."""
        super().download(dataset_kwargs)
        split = self.config.test_split
        samples = described(self.dataset[split])
        # lmms-eval removes pictures from the copy that it scores; the scorer needs only their size, which is a column.
        self.dataset_no_image = DatasetDict({split: samples})
        self.dataset = DatasetDict({split: with_pictures(samples, self.dataset[split])})

    def process_results(self, doc: Doc, results: list[Any], full_docs: Any = None) -> Any:
        """Score an answer by the model's box format, which lmms-eval passes to questions only."""
        return self.config.process_results(doc, results, self.lmms_eval_specific_kwargs)


def described(rows: Dataset) -> Dataset:
    """Return one sample for each description, without the picture."""
    samples: list[Doc] = []
    for number, row in enumerate(rows.select_columns(list(COLUMNS))):
        size = row["image_info"]
        for described_object in row["ref_list"]:
            for sentence in described_object["ref_info"]["sentences"]:
                samples.append(
                    {
                        "row": number,
                        "sent_id": sentence["sent_id"],
                        "ref_id": described_object["ref_info"]["ref_id"],
                        "file_name": described_object["ref_info"]["file_name"],
                        "expression": sentence["sent"],
                        "bbox": described_object["ann_info"]["bbox"],
                        "width": size["width"],
                        "height": size["height"],
                    }
                )
    return Dataset.from_list(samples)


def with_pictures(samples: Dataset, rows: Dataset) -> Dataset:
    """Return samples that fetch their picture from its row when they are read; it is opened but not decoded."""
    pictures = rows.select_columns(["image"]).cast_column("image", Image(decode=False))

    def fetch(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        stored = [pictures[number]["image"] for number in batch["row"]]
        return batch | {
            "image": [None if picture is None else opened(picture) for picture in stored]
        }

    return samples.with_transform(fetch)


def opened(stored: Mapping[str, Any]) -> Pictures.Image:
    data = stored["bytes"]
    return Pictures.open(io.BytesIO(data) if data is not None else stored["path"])


def process_results(
    doc: Doc, results: list[Any], settings: Mapping[str, Any]
) -> Mapping[str, float]:
    """Score an answer; an answer without a box is wrong."""
    answer = results[0] if results else ""
    x0, y0, width, height = doc["bbox"]
    return score(
        answer if isinstance(answer, str) else "",
        (x0, y0, x0 + width, y0 + height),
        settings["boxes"],
        (doc["width"], doc["height"]),
        resized(settings),
    )


def resized(settings: Mapping[str, Any]) -> Resized | None:
    """Return the size bounds of the model's pictures, if it writes boxes in their pixels."""
    bounds = settings["resized"]
    return None if bounds is None else Resized(*bounds)


def doc_to_visual(doc: Doc) -> list[Any]:
    """Return the picture."""
    if doc["image"] is None:
        raise ValueError(f"{doc['file_name']} has no picture")
    return [doc["image"].convert("RGB")]


def doc_to_text(doc: Doc, lmms_eval_specific_kwargs: Mapping[str, Any]) -> str:
    """Return the question in the wording of the model's training."""
    return question(lmms_eval_specific_kwargs["boxes"], doc["expression"])
