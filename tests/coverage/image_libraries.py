"""Models of timm and torchvision, which import only where a torchvision is installed.

``tests.helpers.torchvision_schemas`` comes first, where it is one of another torch build.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torch import nn

from tests.coverage.case import Case, first, positional
from tests.coverage.images import frozen_statistics


def _group_norm(channels: int, **_: object) -> nn.Module:
    return nn.GroupNorm(2, channels)


class Named(str):
    """A class of the module that makes the model, which need not be there to be imported."""


def made(group: str, name: str, path: str, *, size: int = 32, **options: Any) -> Case:
    """What a function or class of a library returns, by its module's path."""

    def build() -> nn.Module:
        folder, _, maker = path.rpartition(".")
        module = importlib.import_module(folder)
        given = {
            key: getattr(module, value) if isinstance(value, Named) else value
            for key, value in options.items()
        }
        return getattr(module, maker)(num_classes=5, **given)

    return Case(name, group, build, positional(size), first)


def timm(name: str, title: str | None = None, *, size: int = 32, **options: Any) -> Case:
    return made("timm", title or name, "timm.create_model", size=size, model_name=name, **options)


def timm_class(name: str, path: str, **options: Any) -> Case:
    return made("timm", name, f"timm.models.{path}", **options)


def torchvision(name: str, title: str | None = None, *, size: int = 32, **options: Any) -> Case:
    path = f"torchvision.models.{name}"
    return made("torchvision", title or name, path, size=size, **options)


_VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2}
_MIXER = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "num_blocks": 1}
_STAGES = {"depths": (1, 1, 1, 1), "dims": (4, 8, 8, 16)}

TIMM = [
    timm("vit_tiny_patch16_224", **_VIT),
    timm("vit_tiny_patch16_224", "vit_tiny_patch16_224, layer scale", init_values=0.1,
         class_token=False, global_pool="avg", **_VIT),
    timm("deit_tiny_distilled_patch16_224", **_VIT),
    timm("vit_small_patch14_reg4_dinov2", **_VIT),
    timm("beit_base_patch16_224", **_VIT),
    timm("eva02_tiny_patch14_224", **_VIT),
    timm("cait_xxs24_224", **_VIT),
    frozen_statistics(
        timm("xcit_nano_12_p8_224", **_VIT), "xcit_nano_12_p8_224, frozen batch norm"
    ),
    timm_class("MLP-Mixer", "mlp_mixer.MlpMixer", **_MIXER),
    timm_class("gMLP", "mlp_mixer.MlpMixer", mlp_ratio=2, mlp_layer=Named("GatedMlp"),
               block_layer=Named("SpatialGatingBlock"), **_MIXER),
    timm_class("ResMLP", "mlp_mixer.MlpMixer", mlp_ratio=2, block_layer=Named("ResBlock"),
               norm_layer=Named("Affine"), **_MIXER),
    timm("swin_tiny_patch4_window7_224", img_size=32, patch_size=4, window_size=4, embed_dim=8,
         depths=(1, 1), num_heads=(1, 2)),
    timm("swinv2_tiny_window8_256", img_size=32, patch_size=4, window_size=4, embed_dim=8,
         depths=(1, 1), num_heads=(1, 2)),
    timm("convnext_atto", **_STAGES),
    timm("convnextv2_atto", **_STAGES),
    timm_class("PoolFormer", "metaformer.MetaFormer", layer_scale_init_values=0.1, **_STAGES),
    frozen_statistics(
        timm_class("ConvMixer", "convmixer.ConvMixer", dim=16, depth=1),
        "ConvMixer, frozen batch norm",
    ),
    timm_class("FocalNet", "focalnet.FocalNet", embed_dim=8, depths=(1, 1), focal_levels=(2, 2),
               focal_windows=(3, 3)),
    timm("pvt_v2_b0", depths=(1, 1), embed_dims=(8, 16), num_heads=(1, 2), mlp_ratios=(2, 2),
         sr_ratios=(2, 1)),
    timm("twins_svt_small", img_size=32, embed_dims=(8, 16), num_heads=(1, 2), depths=(1, 1),
         mlp_ratios=(2, 2), sr_ratios=(2, 1), wss=(2, 2)),
    timm("test_resnet", "ResNet, group norm", norm_layer=_group_norm),
    timm("test_nfnet", "NFNet", size=64),
    timm("test_mambaout", "MambaOut"),
    timm("test_efficientnet_gn", "EfficientNet, group norm"),
    timm("test_efficientnet_ln", "EfficientNet, layer norm"),
    timm("test_efficientnet", "EfficientNet"),
    frozen_statistics(timm("test_resnet"), "ResNet, frozen batch norm"),
    frozen_statistics(timm("test_efficientnet"), "EfficientNet, frozen batch norm"),
    frozen_statistics(timm("test_byobnet"), "ByobNet, frozen batch norm"),
    frozen_statistics(timm("mobilenetv3_small_050"), "mobilenetv3_small_050, frozen batch norm"),
]  # fmt: skip


def _short_vgg(**options: Any) -> nn.Module:
    models = importlib.import_module("torchvision.models.vgg")
    model = models.VGG(models.make_layers([8, "M", 16, "M"]), init_weights=False, **options)
    model.avgpool, model.classifier = nn.AdaptiveAvgPool2d(2), nn.Linear(64, 5)
    return model


def _short_alexnet(**options: Any) -> nn.Module:
    model = importlib.import_module("torchvision.models").alexnet(**options)
    model.avgpool, model.classifier = nn.AdaptiveAvgPool2d(1), nn.Linear(256, 5)
    return model


def _short_resnet(block: str = "BasicBlock", **options: Any) -> nn.Module:
    models = importlib.import_module("torchvision.models.resnet")
    return models.ResNet(getattr(models, block), [1, 1, 1, 1], **options)


def _swin_v2(**options: Any) -> nn.Module:
    models = importlib.import_module("torchvision.models.swin_transformer")
    return models.SwinTransformer(
        block=models.SwinTransformerBlockV2, downsample_layer=models.PatchMergingV2, **options
    )


def _short_convnext(**options: Any) -> nn.Module:
    models = importlib.import_module("torchvision.models.convnext")
    blocks = [models.CNBlockConfig(8, 16, 1), models.CNBlockConfig(16, None, 1)]
    return models.ConvNeXt(blocks, layer_scale=0.1, **options)


def _short_efficientnet(**options: Any) -> nn.Module:
    models = importlib.import_module("torchvision.models.efficientnet")
    stages = [models.MBConvConfig(e, 3, s, i, o, 1, 1.0, 1.0) for e, s, i, o in _EFFICIENT]
    return models.EfficientNet(stages, dropout=0.0, last_channel=32, **options)


_EFFICIENT = [(1, 1, 8, 8), (4, 2, 8, 16)]  # expansion, stride, channels in and out


def _short_regnet(**options: Any) -> nn.Module:
    models = importlib.import_module("torchvision.models.regnet")
    params = models.BlockParams([1, 1], [8, 16], [4, 4], [1.0, 1.0], [2, 2], se_ratio=0.25)
    return models.RegNet(params, stem_width=8, **options)


def local(name: str, make: Callable[..., nn.Module], *, size: int = 32, **options: Any) -> Case:
    """A class of torchvision with fewer layers than the models that it names."""
    return Case(
        name, "torchvision", lambda: make(num_classes=5, **options), positional(size), first
    )


_SWIN = {"patch_size": [4, 4], "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2],
         "window_size": [2, 2]}  # fmt: skip
_MAXVIT = {"input_size": (32, 32), "stem_channels": 8, "partition_size": 4,
           "block_channels": [8, 16], "block_layers": [1, 1], "head_dim": 4,
           "stochastic_depth_prob": 0.0}  # fmt: skip

TORCHVISION = [
    torchvision("VisionTransformer", image_size=32, patch_size=8, num_layers=1, num_heads=2,
                hidden_dim=16, mlp_dim=24),
    torchvision("swin_transformer.SwinTransformer", "SwinTransformer", **_SWIN),
    local("SwinTransformer, v2", _swin_v2, **_SWIN),
    local("ConvNeXt", _short_convnext),
    torchvision("MaxVit", "MaxVit, group norm", norm_layer=_group_norm, **_MAXVIT),
    torchvision("MaxVit", **_MAXVIT),
    local("AlexNet", _short_alexnet, size=64),
    local("VGG", _short_vgg),
    torchvision("squeezenet1_1"),
    local("ResNet", _short_resnet),
    local("ResNet, group norm", _short_resnet, norm_layer=_group_norm),
    local("ResNeXt, group norm", _short_resnet, block="Bottleneck", groups=4, width_per_group=4,
          norm_layer=_group_norm),
    torchvision("mobilenet_v2", "mobilenet_v2, group norm", norm_layer=_group_norm,
                width_mult=0.25),
    torchvision("mobilenet_v3_small", "mobilenet_v3_small, group norm", norm_layer=_group_norm,
                width_mult=0.25),
    local("EfficientNet, group norm", _short_efficientnet, norm_layer=_group_norm),
    frozen_statistics(local("ResNet", _short_resnet), "ResNet, frozen batch norm"),
    frozen_statistics(
        torchvision("DenseNet", growth_rate=4, block_config=(1, 1), num_init_features=8, bn_size=2),
        "DenseNet, frozen batch norm",
    ),
    frozen_statistics(torchvision("shufflenet_v2_x0_5"), "shufflenet_v2_x0_5, frozen batch norm"),
    frozen_statistics(local("RegNet", _short_regnet), "RegNet, frozen batch norm"),
    frozen_statistics(torchvision("MNASNet", alpha=0.1), "MNASNet, frozen batch norm"),
]  # fmt: skip
