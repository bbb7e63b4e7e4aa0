"""Signals by name. A new one is a class in a file here, a line below and one in `espalier.methods.base.SIGNALS`."""

from __future__ import annotations

from espalier.harness.specs.registry import Registry

#: Made at a site inside the tower, by the engine's run of the tower's blocks.
INSIDE_TOWER = frozenset({"sizes", "sequence", "block_keys", "rollout", "flow", "pixels"})

#: Read before the decoder, for each unit of the projector, so that a prompt can store them.
BEFORE_DECODER = frozenset(
    {
        "cls_attention",
        "cls_logits",
        "tower_received",
        "tower_keys",
        "wide_cls_attention",
        "wide_tower_keys",
        "tower_states",
        "luma",
    }
)

#: Made in denoising steps alone.
DENOISING = frozenset({"decider_attention", "masked_attention", "first_kept", "layer_normed"})

PRODUCERS = Registry("signal")
PRODUCERS.add("cls_attention", "espalier.harness.engine.signals.tower_attention:ClassAttention")
PRODUCERS.add("cls_logits", "espalier.harness.engine.signals.tower_attention:ClassLogits")
PRODUCERS.add("tower_received", "espalier.harness.engine.signals.tower_attention:TowerReceived")
PRODUCERS.add("tower_keys", "espalier.harness.engine.signals.tower_attention:TowerKeys")
PRODUCERS.add(
    "wide_cls_attention", "espalier.harness.engine.signals.tower_attention:ClassAttention"
)
PRODUCERS.add("wide_tower_keys", "espalier.harness.engine.signals.tower_attention:TowerKeys")
PRODUCERS.add("tower_states", "espalier.harness.engine.signals.tower_attention:TowerStates")
PRODUCERS.add("projected", "espalier.harness.engine.signals.decoder_states:Projected")
PRODUCERS.add("all_projected", "espalier.harness.engine.signals.decoder_states:AllProjected")
PRODUCERS.add("text_embeddings", "espalier.harness.engine.signals.decoder_states:TextEmbeddings")
PRODUCERS.add("last_attention", "espalier.harness.engine.signals.decoder_attention:LastAttention")
PRODUCERS.add("mean_attention", "espalier.harness.engine.signals.decoder_attention:MeanAttention")
PRODUCERS.add(
    "text_received_max", "espalier.harness.engine.signals.decoder_attention:TextReceivedMax"
)
PRODUCERS.add(
    "text_received_peak", "espalier.harness.engine.signals.decoder_attention:TextReceivedPeak"
)
PRODUCERS.add(
    "visual_received_max", "espalier.harness.engine.signals.decoder_attention:VisualReceivedMax"
)
PRODUCERS.add(
    "next_last_attention", "espalier.harness.engine.signals.next_layer_attention:NextLastAttention"
)
PRODUCERS.add(
    "next_bare_attention", "espalier.harness.engine.signals.next_layer_attention:NextBareAttention"
)
PRODUCERS.add(
    "next_mean_attention", "espalier.harness.engine.signals.next_layer_attention:NextMeanAttention"
)
PRODUCERS.add(
    "next_visual_keys", "espalier.harness.engine.signals.next_layer_attention:NextVisualKeys"
)
PRODUCERS.add("page_rank", "espalier.harness.engine.signals.decoder_attention:PageRank")
PRODUCERS.add("decider_attention", "espalier.harness.engine.signals.deciders:DeciderAttention")
PRODUCERS.add("masked_attention", "espalier.harness.engine.signals.deciders:MaskedAttention")
PRODUCERS.add("first_kept", "espalier.harness.engine.signals.deciders:FirstKept")
PRODUCERS.add("layer_normed", "espalier.harness.engine.signals.deciders:LayerNormed")
PRODUCERS.add("text_attention", "espalier.harness.engine.signals.decoder_attention:TextAttention")
PRODUCERS.add(
    "text_information", "espalier.harness.engine.signals.decoder_attention:TextInformation"
)
PRODUCERS.add("text_rollout", "espalier.harness.engine.signals.decoder_attention:TextRollout")
PRODUCERS.add("visual_keys", "espalier.harness.engine.signals.decoder_states:VisualKeys")
PRODUCERS.add("text_queries", "espalier.harness.engine.signals.decoder_states:TextQueries")
PRODUCERS.add("text_keys", "espalier.harness.engine.signals.decoder_states:TextKeys")
PRODUCERS.add("text_states", "espalier.harness.engine.signals.decoder_states:TextStates")
PRODUCERS.add("text_normed", "espalier.harness.engine.signals.decoder_states:TextNormed")
PRODUCERS.add("normed", "espalier.harness.engine.signals.decoder_states:Normed")
PRODUCERS.add("text_positions", "espalier.harness.engine.signals.token_properties:TextPositions")
PRODUCERS.add(
    "visual_positions", "espalier.harness.engine.signals.token_properties:VisualPositions"
)
PRODUCERS.add("all_positions", "espalier.harness.engine.signals.token_properties:AllPositions")
PRODUCERS.add("tile", "espalier.harness.engine.signals.token_properties:Tile")
PRODUCERS.add("luma", "espalier.harness.engine.signals.token_properties:Luma")
PRODUCERS.add("prior", "espalier.harness.engine.signals.token_properties:CalibratedPrior")
