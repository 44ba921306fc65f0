"""Networks whose gradients are bounded by their weights: what clipless training, and certificates, are made of.

    model = nn.Sequential(
        BoundedInput((1, 28, 28), radius=5.0),
        Conv2d(1, 16, 3, padding=1), GroupSort(), L2NormPool2d(2),
        nn.Flatten(), Linear(16 * 14 * 14, 10),
    )
    certify(model).gradient["1.weight"]

`bounds` says what a layer states, `norms` what is proved about its weights, `certificate` what follows for a network.
"""

from .bounds import Bound, Constants, LipschitzLayer, chain, constants_for, constants_of
from .certificate import Certificate, certify
from .colour import COLOURS, Colour, Normalize
from .holding import Held, constrained_tensors, held
from .layers import (
    Bias,
    BoundedInput,
    Centering,
    Conv2d,
    GroupSort,
    Householder,
    L2NormPool2d,
    Linear,
    MixerBlock,
    Residual,
    Tokens,
    Transposed,
)  # fmt: skip
from .losses import LIPSCHITZ_LOSSES, LipschitzLoss
from .models import LIPSCHITZ_MODELS, lipschitz_lenet, lipschitz_mixer, lipschitz_mlp, lipschitz_resnet, lipschitz_vgg

__all__ = [
    "COLOURS", "LIPSCHITZ_LOSSES", "LIPSCHITZ_MODELS", "Bias", "Bound", "BoundedInput", "Centering", "Certificate",
    "Colour", "Constants", "Conv2d", "GroupSort", "Held", "Householder", "L2NormPool2d", "Linear", "LipschitzLayer",
    "LipschitzLoss", "MixerBlock", "Normalize", "Residual", "Tokens", "Transposed", "certify", "chain",
    "constants_for", "constants_of", "constrained_tensors", "held", "lipschitz_lenet", "lipschitz_mixer",
    "lipschitz_mlp", "lipschitz_resnet", "lipschitz_vgg",
]  # fmt: skip
