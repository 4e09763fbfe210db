"""Transformers that see, hear, or do several things at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tests.coverage.case import (
    ROWS,
    Case,
    Inputs,
    first,
    generator,
    hugging_face,
    images,
    tiny,
    tokens,
    waves,
)

_VISION = {
    "image_size": 32,
    "patch_size": 8,
    "num_channels": 3,
    "embed_dim": 16,
    "depths": [1, 1],
    "num_heads": [2, 2],
    "window_size": 2,
    "hidden_sizes": [8, 16],
    "num_stages": 2,
    "mlp_ratio": 2.0,
    "num_labels": 5,
}


def vision(name: str, config: str, kind: str = "ForImageClassification", **options: Any) -> Case:
    inputs = options.pop("inputs", images())
    quick = options.pop("quick", False)
    build = hugging_face(f"{options.pop('prefix', config)}{kind}", config, **{**_VISION, **options})
    return Case(name, "vision", build, inputs, first, quick)


def frozen_statistics(case: Case, name: str) -> Case:
    """The same with its batch norms frozen, as is done where their statistics are public."""

    def build() -> nn.Module:
        model = case.build()
        for layer in model.modules():
            if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                layer.requires_grad_(False)
        return model

    return dataclasses.replace(case, name=name, build=build, twice=True)


_RESNET = vision("ResNet", "ResNet", embedding_size=8, layer_type="basic")
_EFFICIENT = vision("EfficientNet", "EfficientNet", width_coefficient=0.1, depth_coefficient=0.1,
                    hidden_dim=128, inputs=images(64))  # fmt: skip
_MOBILEVIT = vision(
    "MobileViT", "MobileViT", hidden_sizes=[8, 16, 16], neck_hidden_sizes=[8, 8, 8, 8, 16, 16, 16],
    patch_size=2, num_attention_heads=2, inputs=images(64),
)  # fmt: skip
_MOBILENET = vision("MobileNetV2", "MobileNetV2", depth_multiplier=0.1, min_depth=4,
                    inputs=images(64))  # fmt: skip
_REGNET = vision("RegNet", "RegNet", num_hidden_layers=..., embedding_size=8, groups_width=4)
_LEVIT = vision(
    "LeViT", "Levit", drop_path_rate=0, image_size=64, patch_size=16, inputs=images(64),
    hidden_sizes=[16, 16, 16], num_attention_heads=[2, 2, 2], depths=[1, 1, 1], key_dim=[4, 4, 4],
    mlp_ratio=[2, 2, 2], attention_ratio=[2, 2, 2], down_ops=[["Subsample", 4, 2, 2, 2, 2]] * 2,
)  # fmt: skip

VISION = [
    vision("ViT", "ViT", quick=True),
    vision("DeiT", "DeiT", "ForImageClassification"),
    vision("BEiT", "Beit", layer_scale_init_value=0.1, use_relative_position_bias=True),
    vision("BEiT, shared bias", "Beit", use_shared_relative_position_bias=True),
    vision("Data2Vec (vision)", "Data2VecVision", layer_scale_init_value=0.1),
    vision("Swin", "Swin", num_attention_heads=..., patch_size=4),
    vision("Swin, absolute positions", "Swin", num_attention_heads=..., patch_size=4,
           use_absolute_embeddings=True),
    vision("Swin v2", "Swinv2", num_attention_heads=..., patch_size=4),
    vision("ConvNeXt", "ConvNext", patch_size=4, layer_scale_init_value=0.1),
    vision("ConvNeXt V2", "ConvNextV2", patch_size=4),
    vision("DINOv2", "Dinov2", mlp_ratio=2),
    vision("DINOv2 with registers", "Dinov2WithRegisters", mlp_ratio=2, num_register_tokens=2),
    vision("DINOv3", "DINOv3ViT", "Model", num_register_tokens=2, layerscale_value=0.1,
           pos_embed_rescale=None),
    vision("SegFormer", "Segformer", sr_ratios=[2, 1], patch_sizes=[7, 3], strides=[4, 2],
           num_encoder_blocks=2, num_attention_heads=[1, 2], mlp_ratios=[2, 2],
           decoder_hidden_size=16),
    vision("PVT", "Pvt", patch_sizes=[4, 2], strides=[4, 2], num_encoder_blocks=2,
           sequence_reduction_ratios=[2, 1], num_attention_heads=[1, 2], mlp_ratios=[2, 2]),
    vision("PVT v2", "PvtV2", patch_sizes=[7, 3], strides=[4, 2], num_encoder_blocks=2,
           sr_ratios=[2, 1], num_attention_heads=[1, 2], mlp_ratios=[2, 2],
           layer_norm_eps=1e-6),
    vision("PoolFormer", "PoolFormer", patch_sizes=[7, 3], strides=[4, 2], padding=[2, 1],
           num_encoder_blocks=2, layer_scale_init_value=0.1),
    vision("FocalNet", "FocalNet", patch_size=4, focal_levels=[1, 1], focal_windows=[3, 3],
           use_layerscale=True, layerscale_value=0.1),
    vision("Hiera", "Hiera", image_size=[32, 32], query_stride=[2, 2], masked_unit_size=[2, 2],
           patch_size=[7, 7], patch_stride=[4, 4], patch_padding=[3, 3], num_query_pool=1,
           embed_dim_multiplier=2.0, masked_unit_attention=[True, False]),
    vision("BiT", "Bit", num_hidden_layers=..., embedding_size=8, hidden_sizes=[8, 16],
           layer_type="preactivation", num_groups=4, global_padding="same"),
    vision("ViT-MSN", "ViTMSN"),
    vision("I-JEPA", "IJepa"),
    vision("YOLOS", "Yolos", "ForObjectDetection", image_size=[32, 32], num_detection_tokens=3),
    vision("DPT", "DPT", "ForDepthEstimation", neck_hidden_sizes=[8, 8, 8, 8], is_hybrid=False,
           num_hidden_layers=4, backbone_out_indices=[0, 1, 2, 3], fusion_hidden_size=8,
           reassemble_factors=[4, 2, 1, 0.5]),
    vision("ImageGPT", "ImageGPT", n_positions=16, vocab_size=50,
           inputs=lambda: {"input_ids": torch.randint(0, 49, (ROWS, 16), generator=generator())}),
    vision("VideoMAE", "VideoMAE", "ForVideoClassification", num_frames=2, tubelet_size=2,
           inputs=lambda: {
               "pixel_values": torch.randn(ROWS, 2, 3, 32, 32, generator=generator())
           }),
    vision("TimeSformer", "Timesformer", "ForVideoClassification", drop_path_rate=0, num_frames=2,
           inputs=lambda: {
               "pixel_values": torch.randn(ROWS, 2, 3, 32, 32, generator=generator())
           }),
    vision("ViViT", "Vivit", "ForVideoClassification", num_frames=2, tubelet_size=[2, 8, 8],
           inputs=lambda: {
               "pixel_values": torch.randn(ROWS, 2, 3, 32, 32, generator=generator())
           }),
    _RESNET,
    frozen_statistics(_RESNET, "ResNet, frozen batch norm"),
    _EFFICIENT,
    frozen_statistics(_EFFICIENT, "EfficientNet, frozen batch norm"),
    _MOBILENET,
    frozen_statistics(_MOBILENET, "MobileNetV2, frozen batch norm"),
    _MOBILEVIT,
    frozen_statistics(_MOBILEVIT, "MobileViT, frozen batch norm"),
    _REGNET,
    frozen_statistics(_REGNET, "RegNet, frozen batch norm"),
    _LEVIT,
    frozen_statistics(_LEVIT, "LeViT, frozen batch norm"),
]  # fmt: skip


_SOUND = {
    "conv_dim": [8, 8],
    "conv_stride": [5, 2],
    "conv_kernel": [10, 3],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "conv_pos_kernel_size": 4,
    "mask_time_prob": 0.0,
    "mask_feature_prob": 0.0,
    "apply_spec_augment": False,
    "num_labels": 5,
    "classifier_proj_size": 8,
    "squeeze_factor": 2,
}


def sound(name: str, config: str, kind: str = "ForSequenceClassification", **options: Any) -> Case:
    inputs = options.pop("inputs", waves())
    build = hugging_face(f"{config}{kind}", config, **{**_SOUND, **options})
    return Case(name, "audio", build, inputs, first)


def _spectrum(name: str, *shape: int) -> Callable[[], Inputs]:
    return lambda: {name: torch.randn(ROWS, *shape, generator=generator())}


def _spoken() -> Inputs:
    ids = torch.randint(3, 50, (ROWS, 5), generator=generator())
    return {**_spectrum("input_features", 8, 32)(), "decoder_input_ids": ids}


def _labelled() -> Inputs:
    """The model shifts labels itself, and returns a loss beside the logits."""
    labels = torch.randint(3, 50, (ROWS, 5), generator=generator())
    return {**_spectrum("input_features", 8, 32)(), "labels": labels}


def _frames() -> Inputs:
    ids = torch.randint(3, 50, (ROWS, 5), generator=generator())
    return {**_spectrum("input_features", 32, 8)(), "decoder_input_ids": ids}


_SPEECH = {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "decoder_start_token_id": 1,
}

AUDIO = [
    sound("wav2vec 2.0", "Wav2Vec2"),
    sound("wav2vec 2.0, CTC", "Wav2Vec2", "ForCTC"),
    sound("wav2vec 2.0, layer norm", "Wav2Vec2", feat_extract_norm="layer",
          do_stable_layer_norm=True),
    sound("HuBERT", "Hubert"),
    sound("WavLM", "WavLM"),
    sound("UniSpeech", "UniSpeech"),
    sound("UniSpeech-SAT", "UniSpeechSat"),
    sound("SEW", "SEW"),
    sound("SEW-D", "SEWD"),
    sound("wav2vec 2.0 Conformer", "Wav2Vec2Conformer"),
    sound("Data2Vec (audio)", "Data2VecAudio"),
    sound("AST", "AST", "ForAudioClassification", max_length=32, num_mel_bins=16, patch_size=8,
          frequency_stride=8, time_stride=8, inputs=_spectrum("input_values", 32, 16)),
    sound("Whisper", "Whisper", "ForConditionalGeneration", num_mel_bins=8,
          max_source_positions=16, max_target_positions=16, inputs=_spoken, **_SPEECH),
    sound("Whisper, encoder", "Whisper", "ForAudioClassification", num_mel_bins=8,
          max_source_positions=16, inputs=_spectrum("input_features", 8, 32), **_SPEECH),
    sound("Whisper, with labels", "Whisper", "ForConditionalGeneration", num_mel_bins=8,
          max_source_positions=16, max_target_positions=16, inputs=_labelled, **_SPEECH),
    sound("Speech2Text", "Speech2Text", "ForConditionalGeneration", input_feat_per_channel=8,
          conv_channels=8, max_source_positions=32, max_target_positions=16, inputs=_frames,
          **_SPEECH),
]  # fmt: skip


def _clip() -> Any:
    text, seen = tiny("CLIPText", projection_dim=8), tiny("CLIPVision", **_VISION, projection_dim=8)
    return transformers.CLIPConfig(
        text_config=text.to_dict(), vision_config=seen.to_dict(), projection_dim=8
    )


def _seen_and_read() -> Inputs:
    return {**tokens(), **images()()}


def _field(name: str) -> Callable[[Any], Tensor]:
    return lambda output: getattr(output, name)


def _llava() -> nn.Module:
    text, seen = tiny("Llama"), tiny("CLIPVision", **_VISION)
    config = transformers.LlavaConfig(
        text_config=text, vision_config=seen, image_token_id=49, vision_feature_layer=-1,
        vision_feature_select_strategy="default",
    )  # fmt: skip
    return transformers.LlavaForConditionalGeneration(config)


def _pictured() -> Inputs:
    """16 patches of an image stand before the text."""
    text = tokens()
    ids = torch.cat([torch.full((ROWS, 16), 49), text["input_ids"].clamp(max=48)], 1)
    mask = torch.cat([torch.ones(ROWS, 16, dtype=torch.long), text["attention_mask"]], 1)
    return {"input_ids": ids, "attention_mask": mask, **images()()}


def _captions() -> nn.Module:
    reader = tiny("GPT2", is_decoder=True, add_cross_attention=True)
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        tiny("ViT", **_VISION), reader
    )
    return transformers.VisionEncoderDecoderModel(config)


def _series() -> Inputs:
    return {"past_values": torch.randn(ROWS, 16, 2, generator=generator())}


def several(
    name: str, build: Callable[[], nn.Module], inputs: Callable[[], Inputs], read: Any = first
) -> Case:
    return Case(name, "several kinds of data", build, inputs, read)


SEVERAL = [
    several("CLIP, contrastive", lambda: transformers.CLIPModel(_clip()), _seen_and_read,
            _field("logits_per_image")),
    several("CLIP, text", hugging_face("CLIPTextModelWithProjection", "CLIPText",
            projection_dim=8), tokens, _field("text_embeds")),
    several("CLIP, images", hugging_face("CLIPVisionModelWithProjection", "CLIPVision",
            **_VISION, projection_dim=8), images(), _field("image_embeds")),
    several("CLIP, image classes", lambda: transformers.CLIPForImageClassification(_clip()),
            images()),
    several("SigLIP, images", hugging_face("SiglipVisionModel", "SiglipVision", **_VISION),
            images(), _field("pooler_output")),
    several("SigLIP, text", hugging_face("SiglipTextModel", "SiglipText", projection_size=8),
            lambda: {"input_ids": tokens()["input_ids"]}, _field("pooler_output")),
    several("ViLT", hugging_face("ViltForQuestionAnswering", "Vilt", **_VISION), _seen_and_read),
    several("LLaVA", _llava, _pictured),
    several("ViT and GPT-2, captions", _captions, lambda: {
        **images()(), "decoder_input_ids": tokens()["input_ids"]}),
    several("PatchTST", hugging_face("PatchTSTForPrediction", "PatchTST", num_input_channels=2,
            context_length=16, patch_length=4, patch_stride=4, prediction_length=4, d_model=16,
            ffn_dim=24, norm_type="layernorm", scaling=None, loss="mse"), _series,
            _field("prediction_outputs")),
    several("PatchTSMixer", hugging_face("PatchTSMixerForPrediction", "PatchTSMixer",
            num_input_channels=2, context_length=16, patch_length=4, patch_stride=4, d_model=8,
            prediction_length=4, norm_mlp="LayerNorm", scaling=None), _series,
            _field("prediction_outputs")),
]  # fmt: skip
