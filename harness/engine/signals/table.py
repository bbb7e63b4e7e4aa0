"""Signals by name. A new one is a file here, its line below, and its line in `methods.base.SIGNALS`."""

from __future__ import annotations

from harness.registry import Registry

#: Made where a site inside the tower is asked, by the engine's own run of the tower's blocks.
INSIDE_TOWER = frozenset({"sizes", "sequence", "block_keys", "rollout"})

#: Read before the decoder: for each unit of the projector, so that a kept prompt can hold them.
BEFORE_DECODER = frozenset(
    {
        "cls_attention",
        "cls_logits",
        "tower_keys",
        "wide_cls_attention",
        "wide_tower_keys",
        "tower_states",
        "luma",
    }
)

PRODUCERS = Registry("signal")
PRODUCERS.add("cls_attention", "harness.engine.signals.tower_attention:ClassAttention")
PRODUCERS.add("cls_logits", "harness.engine.signals.tower_attention:ClassLogits")
PRODUCERS.add("tower_keys", "harness.engine.signals.tower_attention:TowerKeys")
PRODUCERS.add("wide_cls_attention", "harness.engine.signals.tower_attention:ClassAttention")
PRODUCERS.add("wide_tower_keys", "harness.engine.signals.tower_attention:TowerKeys")
PRODUCERS.add("tower_states", "harness.engine.signals.tower_states:TowerStates")
PRODUCERS.add("projected", "harness.engine.signals.entering:Projected")
PRODUCERS.add("all_projected", "harness.engine.signals.entering:AllProjected")
PRODUCERS.add("text_embeddings", "harness.engine.signals.entering:TextEmbeddings")
PRODUCERS.add("last_attention", "harness.engine.signals.received:LastAttention")
PRODUCERS.add("mean_attention", "harness.engine.signals.received:MeanAttention")
PRODUCERS.add("text_received_max", "harness.engine.signals.received_max:TextReceivedMax")
PRODUCERS.add("visual_received_max", "harness.engine.signals.received_max:VisualReceivedMax")
PRODUCERS.add("next_last_attention", "harness.engine.signals.next_row:NextLastAttention")
PRODUCERS.add("decider_attention", "harness.engine.signals.deciders:DeciderAttention")
PRODUCERS.add("layer_normed", "harness.engine.signals.deciders:LayerNormed")
PRODUCERS.add("text_attention", "harness.engine.signals.text_attention:TextAttention")
PRODUCERS.add("text_rollout", "harness.engine.signals.text_rollout:TextRollout")
PRODUCERS.add("visual_keys", "harness.engine.signals.heads:VisualKeys")
PRODUCERS.add("text_queries", "harness.engine.signals.heads:TextQueries")
PRODUCERS.add("text_keys", "harness.engine.signals.heads:TextKeys")
PRODUCERS.add("text_states", "harness.engine.signals.states:TextStates")
PRODUCERS.add("text_normed", "harness.engine.signals.states:TextNormed")
PRODUCERS.add("normed", "harness.engine.signals.states:Normed")
PRODUCERS.add("text_positions", "harness.engine.signals.places:TextPositions")
PRODUCERS.add("visual_positions", "harness.engine.signals.places:VisualPositions")
PRODUCERS.add("all_positions", "harness.engine.signals.places:AllPositions")
PRODUCERS.add("tile", "harness.engine.signals.places:Tile")
PRODUCERS.add("luma", "harness.engine.signals.pixels:Luma")
PRODUCERS.add("prior", "harness.engine.signals.calibrated:CalibratedPrior")
