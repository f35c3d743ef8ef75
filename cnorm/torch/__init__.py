"""cnorm's kernels in PyTorch: recurrent modules by preset and norms, with gradients. Needs the extra ``torch``."""

from cnorm.torch.norms import BatchNorm, LayerNorm, RMSNorm, add_layer_norm, layer_norm, rms_norm
from cnorm.torch.recurrent import GRU, LSTM, RNN, GRUCell, LSTMCell, RNNCell

__all__ = [
    "GRU",
    "LSTM",
    "RNN",
    "BatchNorm",
    "GRUCell",
    "LSTMCell",
    "LayerNorm",
    "RMSNorm",
    "RNNCell",
    "add_layer_norm",
    "layer_norm",
    "rms_norm",
]
