"""LaViDa and LLaDA-V in fp64, written out from their descriptions, on a release's tensors by its own names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, isqrt, sqrt

import numpy as np
import torch
from PIL import Image
from torch import Tensor

HEADS = 4
THETA = 500000.0
EPS = 1e-5
TOWER = "model.vision_tower.vision_tower.vision_model."


class Reference:
    """A tiny release that computes by itself.

    Args:
        tensors: by the release's names.
        pooled: whether views are pooled 2 x 2 before they are stitched (LaViDa); otherwise a plane of more than
            `max_views` views is shrunk (LLaDA-V).
        side: pixels along an edge of a tile.
        patch: pixels along an edge of a patch.
        most: see `pooled`.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], pooled: bool, side: int, patch: int, max_views: int
    ):
        self.of = {name: value.double() for name, value in tensors.items()}
        self.pooled, self.side, self.patch, self.max_views = pooled, side, patch, max_views

    def linear(self, x: Tensor, name: str) -> Tensor:
        out = x @ self.of[f"{name}.weight"].T
        bias = self.of.get(f"{name}.bias")
        return out if bias is None else out + bias

    # ------------------------------------------------------------------ tower

    def tower(self, picture: Tensor) -> Tensor:
        """Return (patches, D) features of (3, S, S) pixels after the last layer, before a final norm."""
        n = self.side // self.patch
        weight = self.of[f"{TOWER}embeddings.patch_embedding.weight"].flatten(1)
        rows = []
        for y in range(n):
            for x in range(n):
                p = self.patch
                cut = picture[:, y * p : (y + 1) * p, x * p : (x + 1) * p].flatten()
                rows.append(weight @ cut)
        x = torch.stack(rows) + self.of[f"{TOWER}embeddings.patch_embedding.bias"]
        x = x + self.of[f"{TOWER}embeddings.position_embedding.weight"]
        layers = {
            name.split(".")[6] for name in self.of if name.startswith(f"{TOWER}encoder.layers.")
        }
        for number in range(len(layers)):
            at = f"{TOWER}encoder.layers.{number}."
            x = x + self.tower_attention(self.layer_norm(x, f"{at}layer_norm1"), f"{at}self_attn.")
            wide = self.linear(self.layer_norm(x, f"{at}layer_norm2"), f"{at}mlp.fc1")
            bent = 0.5 * wide * (1 + torch.tanh(sqrt(2 / torch.pi) * (wide + 0.044715 * wide**3)))
            x = x + self.linear(bent, f"{at}mlp.fc2")
        return x

    def layer_norm(self, x: Tensor, name: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
        return scaled * self.of[f"{name}.weight"] + self.of[f"{name}.bias"]

    def tower_attention(self, x: Tensor, at: str) -> Tensor:
        q, k, v = (self.linear(x, f"{at}{letter}_proj") for letter in "qkv")
        return self.linear(attend(q, k, v), f"{at}out_proj")

    # ------------------------------------------------------------------ from views to tokens

    def views(self, pictures: Tensor) -> list[Tensor]:
        """(V, 3, S, S) pixels to the projected features of each view."""
        views = []
        for picture in pictures.double():
            wide = self.linear(self.tower(picture), "model.mm_projector.0")
            bent = 0.5 * wide * (1 + torch.erf(wide / sqrt(2)))
            views.append(self.linear(bent, "model.mm_projector.2"))
        return views

    def image(
        self, pictures: Tensor, size: tuple[int, int], shape: tuple[int, int], bare: bool = False
    ) -> Tensor:
        """One image, its base view and `shape` (rows, columns) of tiles, to its tokens; `bare`: one view's patches."""
        if bare:
            return self.views(pictures)[0]
        views = [self.grid(view) for view in self.views(pictures)]
        if self.pooled:
            views = [resized(view, ceil(len(view) / 2), ceil(len(view) / 2)) for view in views]
        global_view, tiles = views[0], views[1:]
        if not tiles:
            return torch.cat([global_view.flatten(0, 1), self.of["model.image_newline"][None]])
        rows, columns = shape
        plane = torch.cat(
            [torch.cat(tiles[r * columns : (r + 1) * columns], 1) for r in range(rows)]
        )
        plane = unpadded(plane, size)
        n = len(global_view)
        shrink = sqrt(plane.shape[0] * plane.shape[1] / (self.max_views * n * n))
        if not self.pooled and shrink > 1.1:
            plane = resized(plane, int(plane.shape[0] // shrink), int(plane.shape[1] // shrink))
        tokens = list(global_view.flatten(0, 1))
        for row in plane:
            tokens += [*row, self.of["model.image_newline"]]
        return torch.stack(tokens)

    def video(self, frames: Tensor) -> Tensor:
        """A video's frames to its tokens."""
        tokens = []
        for view in map(self.grid, self.views(frames)):
            small = ceil(len(view) / 2)
            tokens += list(resized(view, small, small).flatten(0, 1))
        return torch.stack([*tokens, self.of["model.image_newline"]])

    @staticmethod
    def grid(view: Tensor) -> Tensor:
        side = isqrt(len(view))
        return view.view(side, side, -1)

    # ------------------------------------------------------------------ text stack

    def text(self, x: Tensor) -> Tensor:
        """(L, D) embeddings to (L, V) logits; every token sees every other."""
        llada = "model.transformer.wte.weight" in self.of
        names = (
            (
                "attn_norm",
                "q_proj",
                "k_proj",
                "v_proj",
                "attn_out",
                "ff_norm",
                "ff_proj",
                "up_proj",
                "ff_out",
            )
            if llada
            else (
                "input_layernorm",
                *(f"self_attn.{part}_proj" for part in "qkvo"),
                "post_attention_layernorm",
                *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
            )
        )
        blocks = "model.transformer.blocks." if llada else "model.layers."
        depth = 1 + max(
            int(n.removeprefix(blocks).split(".")[0]) for n in self.of if n.startswith(blocks)
        )
        for number in range(depth):
            norm, q, k, v, out, norm2, gate, up, down = (
                f"{blocks}{number}.{name}" for name in names
            )
            h = self.rms_norm(x, norm)
            q, k, v = (self.linear(h, name) for name in (q, k, v))
            size = q.shape[1] // HEADS
            x = x + self.linear(attend(turned(q, size), turned(k, size), v), out)
            h = self.rms_norm(x, norm2)
            g = self.linear(h, gate)
            x = x + self.linear(g * torch.sigmoid(g) * self.linear(h, up), down)
        x = self.rms_norm(x, "model.transformer.ln_f" if llada else "model.norm")
        return self.linear(x, "model.transformer.ff_out" if llada else "lm_head")

    def rms_norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * self.of[f"{name}.weight"]

    def words(self, ids: Sequence[int]) -> Tensor:
        """The embeddings of token ids."""
        table = self.of.get(
            "model.transformer.wte.weight", self.of.get("model.embed_tokens.weight")
        )
        return table[list(ids)]


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(L, D) each; softmax over all keys, head by head; a head of keys may serve several of queries."""
    out, size = [], q.shape[1] // HEADS
    shared = q.shape[1] // k.shape[1]
    for head in range(HEADS):
        part = slice(head * size, (head + 1) * size)
        kv = slice(head // shared * size, (head // shared + 1) * size)
        scores = (q[:, part] @ k[:, kv].T / sqrt(size)).exp()
        out.append(scores / scores.sum(1, keepdim=True) @ v[:, kv])
    return torch.cat(out, 1)


def turned(x: Tensor, size: int) -> Tensor:
    """Rotate each head's (i, i + half) pairs of channels by place times a falling frequency."""
    half = size // 2
    places = torch.arange(len(x), dtype=torch.float64)
    out = x.clone()
    for head in range(x.shape[1] // size):
        for i in range(half):
            angle = places * THETA ** (-2 * i / size)
            a, b = x[:, head * size + i], x[:, head * size + half + i]
            out[:, head * size + i] = a * angle.cos() - b * angle.sin()
            out[:, head * size + half + i] = b * angle.cos() + a * angle.sin()
    return out


def resized(plane: Tensor, rows: int, columns: int) -> Tensor:
    """Bilinear interpolation of a (H, W, D) plane between the centres of its cells, without smoothing."""

    def taps(n: int, m: int) -> list[tuple[int, int, float]]:
        taps = []
        for place in range(m):
            at = max((place + 0.5) * n / m - 0.5, 0.0)
            low = int(at)
            taps.append((low, min(low + 1, n - 1), at - low))
        return taps

    down = [(1 - s) * plane[a] + s * plane[b] for a, b, s in taps(plane.shape[0], rows)]
    turned = torch.stack(down).transpose(0, 1)
    across = [(1 - s) * turned[a] + s * turned[b] for a, b, s in taps(plane.shape[1], columns)]
    return torch.stack(across).transpose(0, 1)


def unpadded(plane: Tensor, size: tuple[int, int]) -> Tensor:
    """Cut off the rows or columns that no picture of `size` (height, width) reaches, as many on each side."""
    (height, width), (rows, columns) = size, plane.shape[:2]
    if width / height > columns / rows:
        cut = (rows - int(height * columns / width + 1e-9)) // 2
        return plane[cut : rows - cut]
    cut = (columns - int(width * rows / height + 1e-9)) // 2
    return plane[:, cut : columns - cut]


def plane_for(size: tuple[int, int], planes: Sequence[Sequence[int]]) -> tuple[int, int]:
    """The plane (height, width) that shows most of a picture of `size` (height, width); of those the smallest waste."""
    best: tuple[float, float] | None = None
    chosen = (0, 0)
    for high, wide in planes:
        scale = min(wide / size[1], high / size[0])
        area = min(int(size[1] * scale) * int(size[0] * scale), size[0] * size[1])
        if best is None or (area, -(high * wide - area)) > best:
            best, chosen = (area, -(high * wide - area)), (high, wide)
    return chosen


def pixels(
    picture: Image.Image, planes: Sequence[Sequence[int]], side: int
) -> tuple[np.ndarray, tuple[int, int]]:
    """The views of a lone picture as (V, 3, S, S) values in [-1, 1], and (rows, columns) of its tiles."""
    high, wide = plane_for((picture.height, picture.width), planes)
    scale = min(wide / picture.width, high / picture.height)
    if wide / picture.width < high / picture.height:
        inner = (wide, min(ceil(picture.height * scale), high))
    else:
        inner = (min(ceil(picture.width * scale), wide), high)
    canvas = Image.new("RGB", (wide, high))
    resized = picture.resize(inner, Image.Resampling.BICUBIC)
    canvas.paste(resized, ((wide - inner[0]) // 2, (high - inner[1]) // 2))
    corners = [(left, top) for top in range(0, high, side) for left in range(0, wide, side)]
    tiles = [canvas.crop((left, top, left + side, top + side)) for left, top in corners]
    views = [picture.resize((side, side), Image.Resampling.BICUBIC), *tiles]
    stacked = np.stack([np.asarray(view, dtype=np.float64) for view in views])
    return (stacked / 255 - 0.5).transpose(0, 3, 1, 2) / 0.5, (high // side, wide // side)
