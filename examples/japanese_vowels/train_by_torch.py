"""Train the network of train.py in PyTorch, with and without layer normalisation.

Nine speakers say the vowel pair /ae/; the network recognises the speaker while the frames arrive. It is a
layer-normalised LSTM, 12 -> 64 (Eq. 20-22 of arXiv:1607.06450), with a linear read-out, 64 -> 9.

    python examples/japanese_vowels/train_by_torch.py

trains ten seeds with and ten without layer normalisation, prints both learning curves, writes their
picture, and writes the packaged model: the layer-normalised network with the least loss on training
utterances that none of the twenty networks was trained on. The test split is used for the curves only, not
to choose a network. On the same machine, the same version of PyTorch gives the same file, byte for byte.
"""

import hashlib
import json
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from safetensors.numpy import save
from torch import nn
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "cnorm/data/demo.safetensors"
PICTURE = ROOT / "docs/pictures/learning_curves.png"

INPUT, HIDDEN, SPEAKERS = 12, 64, 9
EPS = 1e-5
SEEDS, EPOCHS, BATCH = range(10), 40, 30
RATE = 3e-3  # of Adam at the start; a half cosine takes it to 0
NOISE = 0.2  # standard deviation of the noise added to training frames (a frame's own is 0.1 to 0.5)
EARLY = 0.2  # weight of the mean loss over all frames; the rest is the loss at the last frame
HELD_OUT = 6  # of each speaker's 30 training utterances, the last 6 are used to choose the seed


class LSTM(nn.Module):
    """LSTM of Eq. 20-22, or the same without its three layer norms; parameters as in the `ba2016` preset."""

    def __init__(self, normalise: bool):
        super().__init__()
        self.normalise = normalise
        bound = HIDDEN**-0.5
        self.weight_x = nn.Parameter(torch.empty(4 * HIDDEN, INPUT).uniform_(-bound, bound))
        self.weight_h = nn.Parameter(torch.empty(4 * HIDDEN, HIDDEN).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.zeros(4 * HIDDEN))
        if normalise:
            for name, size in ("x", 4 * HIDDEN), ("h", 4 * HIDDEN), ("c", HIDDEN):
                self.register_parameter(f"gain_{name}", nn.Parameter(torch.ones(size)))
                self.register_parameter(f"bias_{name}", nn.Parameter(torch.zeros(size)))

    def norm(self, name: str, a: torch.Tensor) -> torch.Tensor:
        if not self.normalise:
            return a
        gain, bias = getattr(self, f"gain_{name}"), getattr(self, f"bias_{name}")
        return F.layer_norm(a, a.shape[-1:], gain, bias, EPS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [B, T, 12] -> h [B, T, 64], from zero states."""
        a = self.norm("x", x @ self.weight_x.T) + self.bias  # independent of the state: all frames at once
        h = c = x.new_zeros(len(x), HIDDEN)
        outputs = []
        for t in range(x.shape[1]):
            f, i, o, g = (self.norm("h", h @ self.weight_h.T) + a[:, t]).split(HIDDEN, dim=-1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()  # the next step sees this c, not LN(c)
            h = o.sigmoid() * self.norm("c", c).tanh()
            outputs.append(h)
        return torch.stack(outputs, dim=1)


class Utterances:
    """x [N, T, 12] zero-padded frames, length [N], label [N]."""

    def __init__(self, x: torch.Tensor, length: torch.Tensor, label: torch.Tensor):
        self.x, self.length, self.label = x, length, label

    @classmethod
    def of(cls, pieces: list[np.ndarray], labels: np.ndarray) -> "Utterances":
        x = nn.utils.rnn.pad_sequence([torch.from_numpy(piece) for piece in pieces], batch_first=True)
        return cls(x, torch.tensor([len(piece) for piece in pieces]), torch.from_numpy(labels.astype(np.int64)))

    def __len__(self) -> int:
        return len(self.label)

    def __getitem__(self, index: torch.Tensor) -> "Utterances":
        length = self.length[index]
        return Utterances(self.x[index, : length.max()], length, self.label[index])


def score(network: nn.Module, x: torch.Tensor, data: Utterances) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss, and the share of utterances that are classified correctly at their last frame.

    The loss is (1 - EARLY) times the cross-entropy at the last frame plus EARLY times its mean over all
    frames of the utterance, so that the network also learns to classify before the last frame.
    """
    logits = network(x)  # [B, T, 9]
    rows = torch.arange(len(data))
    loss = F.cross_entropy(logits.transpose(1, 2), data.label[:, None].expand(logits.shape[:2]), reduction="none")
    heard = torch.arange(logits.shape[1]) < data.length[:, None]
    last = loss[rows, data.length - 1]
    every = (loss * heard).sum(1) / data.length
    named = logits[rows, data.length - 1].argmax(-1)
    return torch.lerp(last, every, EARLY).mean(), (named == data.label).float().mean()


def train(normalise: bool, seed: int, fit: Utterances, test: Utterances, after_epoch) -> tuple[nn.Module, list]:
    """The network of one seed and its accuracy on the test split, in percent, after each epoch."""
    torch.manual_seed(seed)
    network = nn.Sequential(LSTM(normalise), nn.Linear(HIDDEN, SPEAKERS))
    adam = torch.optim.Adam(network.parameters(), lr=RATE)
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(adam, EPOCHS)
    curve = []
    for _ in range(EPOCHS):
        for index in torch.randperm(len(fit)).split(BATCH):
            batch = fit[index]
            loss, _ = score(network, batch.x + NOISE * torch.randn_like(batch.x), batch)
            adam.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            adam.step()
        rate.step()
        with torch.no_grad():
            curve.append(100 * score(network, test.x, test)[1].item())
        after_epoch()
    return network, curve


def write_model(network: nn.Module, path: Path) -> None:
    """Write the safetensors file that `cnorm.load` reads; in float16, half the bytes of a wheel."""
    tensors = {
        f"layers.{i}.{name}": np.ascontiguousarray(value.detach().numpy().astype(np.float16))
        for i, layer in enumerate(network)
        for name, value in layer.named_parameters()
    }
    layers = [{"type": "LSTM", "preset": "ba2016", "eps": EPS}, {"type": "Linear"}]
    metadata = {"cnorm.model": json.dumps({"format": 1, "layers": layers})}
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(save(tensors, metadata))
    temporary.replace(path)


def draw(curves: dict[str, np.ndarray], path: Path) -> None:
    """Picture of curves [seeds, epochs] in percent: their mean, and a band of one standard deviation."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    epochs = np.arange(1, EPOCHS + 1)
    for (name, curve), colour in zip(curves.items(), ("#0b6e99", "#c2571a"), strict=True):
        mean, deviation = curve.mean(0), curve.std(0, ddof=1)
        axes.plot(epochs, mean, color=colour, lw=2, label=f"{name}: {mean[-1]:.1f} ± {deviation[-1]:.1f} %")
        axes.fill_between(epochs, mean - deviation, np.minimum(mean + deviation, 100), color=colour, alpha=0.2, lw=0)
    axes.set(xlabel="epochs", ylabel="test utterances named correctly (%)", xlim=(1, EPOCHS), ylim=(0, 100))
    axes.set_xticks([1, 5, 10, 20, 30, 40])
    axes.set_title(f"Japanese Vowels, LSTM 12 → 64: mean ± standard deviation of {len(SEEDS)} seeds", fontsize=11)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right", title="after 40 epochs", alignment="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, metadata={"Software": None})


def split(name: str) -> Utterances:
    """The utterances of the split "train" or "test"."""
    with np.load(ROOT / f"examples/japanese_vowels/japanese_vowels_{name}.npz") as data:
        return Utterances.of(np.split(data["frames"], np.cumsum(data["lengths"])[:-1]), data["labels"])


def main() -> None:
    torch.set_num_threads(1)  # the order of the sums, hence the file, must not depend on the machine's cores
    console = Console(highlight=False)
    training, test = split("train"), split("test")
    # consecutive utterances of each speaker, not random ones: neighbours in the file may be similar
    held = torch.cat([(training.label == k).nonzero()[-HELD_OUT:, 0] for k in range(SPEAKERS)])
    rest = torch.ones(len(training), dtype=torch.bool).scatter(0, held, False).nonzero()[:, 0]
    fit, held = training[rest], training[held]
    console.print(
        f"{len(fit)} utterances to train on, {len(held)} held out to choose the seed, {len(test)} to test; "
        f"{EPOCHS} epochs, PyTorch {torch.__version__}"
    )

    networks, curves = {}, {}
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("epochs", total=2 * len(SEEDS) * EPOCHS)
        for name, normalise in ("with layer norm", True), ("without", False):
            runs = [train(normalise, seed, fit, test, lambda: progress.advance(task)) for seed in SEEDS]
            networks[name], curves[name] = [run[0] for run in runs], np.array([run[1] for run in runs])

    table = Table(title=f"Test utterances named correctly (%), mean ± standard deviation of {len(SEEDS)} seeds")
    table.add_column("after epoch", justify="right")
    for name in curves:
        table.add_column(name, justify="right")
    for epoch in 1, 2, 5, 10, 20, EPOCHS:
        at = [curve[:, epoch - 1] for curve in curves.values()]
        table.add_row(str(epoch), *(f"{a.mean():.1f} ± {a.std(ddof=1):.1f}" for a in at))
    console.print(table)
    draw(curves, PICTURE)

    with torch.no_grad():
        losses, _ = zip(*(score(network, held.x, held) for network in networks["with layer norm"]), strict=True)
    best = int(np.argmin([loss.item() for loss in losses]))
    write_model(networks["with layer norm"][best], MODEL)
    console.print(
        f"held-out loss by seed: {', '.join(f'{loss:.3f}' for loss in losses)}\n"
        f"shipped: seed {SEEDS[best]}, test accuracy {curves['with layer norm'][best, -1]:.1f} %\n"
        f"{MODEL.relative_to(ROOT)}  sha256 {hashlib.sha256(MODEL.read_bytes()).hexdigest()[:16]}\n"
        f"{PICTURE.relative_to(ROOT)}"
    )


if __name__ == "__main__":
    main()
