"""All signals that a method may need, by name."""

from __future__ import annotations

from collections.abc import Mapping

#: Every signal that a method may request. Shapes are those of `View.signals`; producers are in harness/engine/signals/.
SIGNALS: Mapping[str, str] = {
    "cls_attention": "(B, N) attention that the tower's class token pays each patch, mean over heads, fp32; on towers "
    "without one the substitute that `model.facts.class_attention` names",
    "cls_logits": "(B, N) `cls_attention` before its softmax: scaled products of queries and keys, mean over heads",
    "tower_received": "(B, N) attention that each patch receives in a tower layer, mean over heads and all queries, a "
    "class token's too, fp32",
    "tower_keys": "(B, N, Dk) keys of the tower layer whose output the projector reads, mean over heads",
    "wide_cls_attention": "(B, N) `cls_attention` of one head as wide as the tower in place of its own heads, fp32",
    "wide_tower_keys": "(B, N, H Dk) `tower_keys` of all heads side by side",
    "tower_states": "(B, N, D) mean of the tower's hidden states over its last third, 16 to 24 of 24, fp32",
    "projected": "(B, N, D) visual tokens as they entered the decoder",
    "text_embeddings": "(B, T, D) words as they entered the decoder, 0 where a row has fewer",
    "all_projected": "(B, M, D) visual tokens as they entered the decoder, those dropped since included, 0 where a row "
    "has fewer",
    "last_attention": "(B, N) attention that the last prompt token pays each visual token, mean over heads, fp32",
    "next_last_attention": "(B, N) `last_attention` in the site's own layer, which has not run yet",
    "next_bare_attention": "(B, N) `next_last_attention` without rotary positions, softmax over the visual tokens left",
    "next_mean_attention": "(B, N) attention in the site's own layer, which has not run yet, of the mean query of all "
    "tokens up to the last visual one to these tokens, without rotary positions, mean over heads, fp32",
    "next_visual_keys": "(B, H_kv, N, Dh) `visual_keys` of the site's own layer, which has not run yet",
    "page_rank": "(B, N) PageRank of the layer's attention at a tenth of the temperature, five rounds from equal ranks "
    "of all tokens left, root of the mean square over heads, fp32",
    "mean_attention": "(B, N) attention a visual token receives, mean over all queries that can see it and heads, fp32",
    "text_received_max": "(B, N) attention a visual token receives, largest over heads, mean over the words after the "
    "image, fp32",
    "text_received_peak": "(B, N) attention a visual token receives, largest over heads and over the words after the "
    "image, fp32",
    "visual_received_max": "(B, N) attention a visual token receives, largest over heads, mean over the visual tokens "
    "left, fp32",
    "text_attention": "(B, T, N) attention that each word pays each visual token, mean over heads, fp32, 0 where a row "
    "has fewer words",
    "text_information": "(B, 1) mutual information in bits of the words after the image and the visual tokens, by the "
    "words' attention, all words alike, sum over heads, fp32",
    "text_rollout": "(B, T, N) attention rollout, the product of 0.5 A + 0.5 I with A the mean over heads, of the "
    "decoder layers since the last site: one row for each word, fp32, 0 where a row has fewer",
    "sizes": "(P, N) how many patches each slot of a picture stands for, fp32; at `tower` sites",
    "sequence": "(P, E + N) slots of a picture in the order of the last site's `Plan.order`, at the first site of the "
    "raster; a class token (E = 1) stands in front, as -1; at `tower` sites",
    "flow": "(P, N) information flow of the tower's blocks so far, half the last one's and half what was before: the "
    "class token's attention and the likeness of its value, or the attention received, times the value's size; fp32; "
    "at `tower` sites",
    "pixels": "(P, N, F) pixels in [0, 1] of each patch, as the tower sees them; fp32 or wider; at `tower` sites",
    "block_keys": "(P, N, Dk) keys of the site's tower block, mean over heads; at `tower` sites",
    "rollout": "(P, N) attention rollout, as in `text_rollout`, of the tower blocks since the last site: the class "
    "token's row, or the mean over rows where the tower has none, fp32; at `tower` sites",
    "decider_attention": "(B, N) attention that the answer's tokens unveiled in the step before pay each visual token "
    "in the layer named, or in a `block` site's own, mean over heads, sum over those tokens, fp32; in denoising steps",
    "masked_attention": "(B, N) attention that the answer's tokens that the first denoising step left masked paid each "
    "visual token in that step, mean over those tokens, layers and heads, fp32; 0 in the first step",
    "first_kept": "(B, N) 1 for each visual token that the first denoising step kept, fp32; 0 in the first step",
    "layer_normed": "(B, N, D) visual tokens as they enter the site's layer, after that layer's input norm; at `block` "
    "sites",
    "visual_keys": "(B, H_kv, N, Dh) keys of the visual tokens, rotary positions applied",
    "text_queries": "(B, H, T, Dh) queries of the prompt's words, rotary positions applied, 0 where a row has fewer",
    "text_keys": "(B, H_kv, T, Dh) keys of the prompt's words, rotary positions applied, 0 where a row has fewer",
    "text_states": "(B, T, D) words as they enter the site's layer, 0 where a row has fewer",
    "normed": "(B, N, D) visual tokens as they enter the site's layer, after the decoder's final norm",
    "text_normed": "(B, T, D) words as they enter the site's layer, after the decoder's final norm, 0 where a row has "
    "fewer",
    "text_positions": "(B, T) place of each word in the row's prompt, -1 where a row has fewer",
    "visual_positions": "(B, N) place of each visual token in the row's prompt",
    "all_positions": "(B, M) place of each visual token in the row's prompt, those dropped since included, -1 where a "
    "row has fewer",
    "tile": "(B, N) crop of a high-resolution image that each visual token lies in, from 1; 0 for the global view",
    "luma": "(B, N, h + 2, w + 2) BT.601 luma in [-1, 1] of the pixels that each visual token was made of, as the "
    "tower sees them, with one pixel of border on each side, 0 outside the picture; fp32 or wider",
    "prior": "(B, N) calibrated mean of `last_attention` over many images at the token's place in its view (see "
    "harness/tools/calibration), fp32",
}
