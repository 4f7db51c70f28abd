"""The weights with which the autoencoder of the demo image model begins: it already passes colours through, blurred.

From random weights most of the training time goes into finding out that colours matter.
"""

from __future__ import annotations

from typing import Any

import torch

# Two channels hold a constant through all layers. Without them the group norms would scale a picture of one colour
# like a picture of another, and its colour were lost.
CONSTANT = 3.0
FIRST = 2
RANDOM_PART = 0.3
SMALL_LOG_VARIANCE = -4.6


def begin_as_a_blur(model: Any) -> None:
    """Set the weights in place: every layer outside the residuals passes its channels on, and averages going down."""
    with torch.no_grad():
        for name, layer in model.named_modules():
            if name.endswith(".conv2"):
                layer.weight.zero_()
            elif isinstance(layer, torch.nn.Conv2d) and not name.endswith(".conv1"):
                layer.weight *= RANDOM_PART
                layer.bias.zero_()
                _pass_on(name, layer)
                if not name.endswith("conv_out"):
                    layer.weight[:FIRST] = 0
                    layer.bias[0], layer.bias[1] = CONSTANT, -CONSTANT
        channels = model.config.latent_channels
        model.encoder.conv_out.weight[channels:] = 0
        model.encoder.conv_out.bias[channels:] = SMALL_LOG_VARIANCE


def _pass_on(name: str, layer: Any) -> None:
    weight = layer.weight
    outputs, inputs = weight.shape[:2]
    middle = weight.shape[2] // 2
    into, out_of, gain = FIRST, FIRST, 1.0
    if name.endswith("conv_in"):
        out_of = 0
    elif name.endswith("conv_out"):
        into, gain = 0, 2.0
    for number in range(min(outputs - into, inputs - out_of)):
        if "downsamplers" in name:
            weight[into + number, out_of + number, :2, :2] += gain / 4
        else:
            weight[into + number, out_of + number, middle, middle] += gain
