"""An object while its clip's story is told."""

from __future__ import annotations

from dataclasses import dataclass, field

from espalier.harness.seedling.scenes import BOX
from espalier.harness.seedling.video.events import Track


@dataclass
class Actor:
    """The state of one object.

    Attributes:
        track: What is known of it frame by frame; written here.
        cell: Number of its place, or of the one it moves to.
        colour: Number of its colour.
        digit: Digit that it shows, -1 for shapes.
        draw: Number that chooses the digit's image.
        at: Its left upper corner.
        ready: First frame in which something may happen to it again.
        path: Corners still ahead of it while it moves.
        previous_cell: Number of the place that it moved from last, -1 before.
        covered_at: Frame in which a panel came over it, -1 without one.
        present: Whether it is in the picture.
    """

    track: Track
    cell: int
    colour: int
    digit: int
    draw: int
    at: tuple[int, int]
    ready: int
    path: list[tuple[int, int]] = field(default_factory=list)
    previous_cell: int = -1
    covered_at: int = -1
    present: bool = True

    @property
    def box(self) -> BOX:
        """Its pixels, x1 and y1 exclusive."""
        x, y = self.at
        return (x, y, x + self.track.size, y + self.track.size)

    def glide(self) -> None:
        """Goes one frame further, if it is on its way."""
        if self.path:
            self.at = self.path.pop(0)

    def record(self, frame: int) -> None:
        """Writes its state into its track, if it is in the picture."""
        if not self.present:
            return
        track = self.track
        track.box[frame] = self.box
        track.colour[frame], track.digit[frame] = self.colour, self.digit
        track.draw[frame] = self.draw
        track.covered[frame] = self.covered_at >= 0
        track.place[frame] = -1 if self.path else self.cell
