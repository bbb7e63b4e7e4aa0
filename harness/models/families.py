"""The table of model families; nothing of a family is imported before it is used."""

from __future__ import annotations

from espalier.harness.specs.registry import Registry

ADAPTERS = Registry("model.adapter")
ADAPTERS.add("llava", "espalier.harness.models.llava:LlavaAdapter")
ADAPTERS.add("llava_next", "espalier.harness.models.llava_next:LlavaNextAdapter")
ADAPTERS.add("llava_onevision", "espalier.harness.models.llava_onevision:LlavaOnevisionAdapter")
ADAPTERS.add("llava_video", "espalier.harness.models.llava_video:LlavaVideoAdapter")
ADAPTERS.add("qwen2_vl", "espalier.harness.models.qwen2_vl:Qwen2VLAdapter")
ADAPTERS.add("qwen2_5_vl", "espalier.harness.models.qwen2_5_vl:Qwen25VLAdapter")
ADAPTERS.add("qwen3_vl", "espalier.harness.models.qwen3_vl:Qwen3VLAdapter")
ADAPTERS.add("internvl", "espalier.harness.models.internvl:InternVLAdapter")
ADAPTERS.add("deepseek_ocr", "espalier.harness.models.deepseek_ocr:DeepseekOcrAdapter")
ADAPTERS.add("llada_v", "espalier.harness.models.llada_v:LladaVAdapter")
ADAPTERS.add("lavida", "espalier.harness.models.lavida:LavidaAdapter")
