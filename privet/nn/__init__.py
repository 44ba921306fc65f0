"""Ready networks, and the way from BatchNorm to a norm that keeps records apart."""

from privet.nn.activations import TemperedSigmoid, activation
from privet.nn.groupnorm import batchnorm_to_groupnorm
from privet.nn.input_clip import InputClip, clip_inputs
from privet.nn.models import EXAMPLE_SHAPES, MODELS, build
from privet.nn.normalise import Normalise, Standardise, normalised, standardise_of

__all__ = [
    "EXAMPLE_SHAPES", "MODELS", "InputClip", "Normalise", "Standardise", "TemperedSigmoid", "activation",
    "batchnorm_to_groupnorm", "build", "clip_inputs", "normalised", "standardise_of",
]  # fmt: skip
