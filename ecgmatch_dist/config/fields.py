"""The settings of a run. The defaults are the paper's; where the paper is silent, those of the official code.

All batch sizes and steps are global: the number of ranks changes the speed of a run, never its result.

Every field has a role. A plain field decides the result. `draw(...)` decides it too, but only as another random draw of the
same experiment. `execution(...)` does not change it. The fingerprint of a run, the check that a folder belongs to the same run
and the report's grouping of runs follow from the roles. Importing this module does not import torch.
"""

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ecgmatch_dist.config.as_json import as_json
from ecgmatch_dist.config.backbones import backbones
from ecgmatch_dist.config.data import Data
from ecgmatch_dist.config.method import MethodSettings, method_settings
from ecgmatch_dist.config.roles import added, draw, execution
from ecgmatch_dist.config.weights import PIN, without_trees
from ecgmatch_dist.errors import require


@dataclass(frozen=True)
class Model:
    """The network."""

    width: int = 128
    """Channels of the encoder and length of the feature z."""
    heads: int = 8
    """Attention heads, of backbones that have some."""
    dropout: float = 0.5
    """Dropout behind the encoder."""
    backbone: str = added("attention_cnn")
    """A file of network/backbones/. attention_cnn: the paper's; resnet1d: a plain residual network, better with few labels."""
    depth: int = added(5)
    """Residual blocks; each halves the length."""
    first_width: int = added(0)
    """Channels of resnet1d's first block, doubled every second block up to width; 0: width throughout."""
    feature: Literal["bottleneck", "encoder"] = added("bottleneck")
    """z, which the bank keeps. bottleneck: the hidden layer of the classifier (official code); encoder: its input, f(x)
    (paper)."""

    def __post_init__(self) -> None:
        require(self.backbone in backbones(), "model.backbone", self.backbone, f"one of {', '.join(backbones())}")
        fits = self.heads > 0 and self.width % self.heads == 0
        require(fits or self.backbone != "attention_cnn", "model.width", self.width, "a multiple of model.heads")
        require(self.width > 0, "model.width", self.width, "at least 1")
        require(0 <= self.dropout < 1, "model.dropout", self.dropout, "between 0 and 1")
        require(self.depth > 0, "model.depth", self.depth, "at least 1 block")
        remedy = f"between 1 and model.width, {self.width}; or 0 for model.width"
        require(0 <= self.first_width <= self.width, "model.first_width", self.first_width, remedy)
        used = self.backbone != "attention_cnn" or not self.first_width
        paper = self.backbone == "attention_cnn" or self.feature == "bottleneck"
        require(paper, "model.feature", self.feature, "bottleneck: only attention_cnn can give the encoder's output")
        require(used, "model.first_width", self.first_width, "0: all blocks of attention_cnn have model.width channels")


@dataclass(frozen=True)
class Augment:
    """The weak view w(x) and the strong view g(x)."""

    pipeline: Literal["ecgaugment", "sequential", "mild"] = "ecgaugment"
    """ecgaugment: the paper's; sequential: the fixed sequence that the paper compares with; mild: keeps the diagnosis."""
    labelled: Literal["weak", "strong"] = "weak"
    """The view of labelled signals: weak (paper), or strong against overfitting when labels are few."""
    granularity: Literal["sample", "batch"] = "sample"
    """Draw the transformations per signal (paper) or per batch (official code)."""
    noise_weak: float = 0.05
    """Standard deviation of the weak view's noise."""
    noise_strong: float = 0.5
    """Standard deviation of the strong view's noise."""
    dropout_window: Literal["shared", "per_lead"] = "shared"
    """Signal dropout zeroes the same window of all leads (paper) or another one per lead (official code)."""
    crop: int = added(0)
    """Train on random crops of this many samples, and predict by the mean over evenly spaced ones; 0: on whole recordings
    (paper)."""

    def __post_init__(self) -> None:
        require(self.crop >= 0, "augment.crop", self.crop, "a number of samples, or 0 for whole recordings")


@dataclass(frozen=True)
class Bank:
    """The two memory banks and the search in them."""

    shard_group: int | Literal["auto", "world", "node"] = execution("auto")
    """Number of ranks that share one copy of the banks. 1: a full copy per rank; world: sharded over all ranks; node: over the
    ranks of a node; auto: world on one node, node on several."""
    backend: Literal["faiss", "auto", "torch", "faiss-cpu", "faiss-gpu", "faiss-gpu-index", "faiss-ivf"] = execution(
        "faiss", but=("faiss-ivf",)
    )
    """Search library. faiss: on a CPU faiss.knn; on a GPU knn_gpu or a resident index, whichever is faster on the real shapes
    at the start; torch where Faiss is missing. auto: the fastest of Faiss and torch. All but faiss-ivf give the same bits;
    faiss-ivf is approximate, and its runs have fingerprints of their own."""
    view: Literal["weak", "clean"] = "weak"
    """Input of the teacher and of the query: the weak view (paper) or the signal itself."""
    overlap: bool = execution(True)
    """Run the exchange and the search in the background during the training forward."""

    def __post_init__(self) -> None:
        ok = isinstance(self.shard_group, str) or self.shard_group >= 1
        require(ok, "bank.shard_group", self.shard_group, "a number of ranks, at least 1")


@dataclass(frozen=True)
class Optim:
    """Optimiser, schedule and batches."""

    optimizer: Literal["sgd", "adamw"] = "sgd"
    """SGD with momentum 0.9 (paper) or AdamW."""
    lr: float = 0.03
    """Initial learning rate of the head (bottleneck and classifier)."""
    encoder_lr_scale: float = 0.1
    """Factor on lr for encoder and attention (official code: 0.1)."""
    momentum: float = 0.9
    """Momentum of SGD."""
    weight_decay: float = 5e-4
    """Applies to every parameter."""
    schedule: Literal["power", "cosine", "constant"] = "power"
    """power: lr (1 + 10 i/E)^-0.75; cosine: to zero at E."""
    warmup: int = 0
    """Steps of linear warm-up."""
    steps: int = 5000
    """E, the largest number of steps."""
    labelled_batch: int = 64
    """B, over all ranks."""
    unlabelled_batch: int = 448
    """B_u, over all ranks."""
    teacher_momentum: float = 0.999
    """m of equation 5."""
    teacher_warmup: bool = False
    """Smaller m in the first steps, so that a teacher forgets its random initial weights sooner."""
    teacher_batchnorm: Literal["copied", "averaged"] = "copied"
    """The teacher's BatchNorm statistics: copied from the student (official code), or averaged like the weights."""
    passes: float = added(0.0)
    """Train for this many passes over the recordings that the method learns from: the labelled part; for a method that also
    reads unlabelled recordings, those; for one without labels, all. At most `steps` steps and at least a tenth of them, and at
    most 25 validations. Learning from labels alone takes smaller batches if they are few. 0: for `steps` steps."""

    def __post_init__(self) -> None:
        require(self.lr > 0, "optim.lr", self.lr, "greater than 0")
        require(self.steps > 0, "optim.steps", self.steps, "at least 1")
        require(self.passes >= 0, "optim.passes", self.passes, "a number of passes, or 0 for optim.steps")
        require(self.labelled_batch > 0, "optim.labelled_batch", self.labelled_batch, "at least 1")
        require(self.unlabelled_batch > 0, "optim.unlabelled_batch", self.unlabelled_batch, "at least 1")
        require(0 <= self.teacher_momentum <= 1, "optim.teacher_momentum", self.teacher_momentum, "between 0 and 1")


@dataclass(frozen=True)
class Evaluate:
    """Validation, early stopping and the choice of the model that is kept."""

    every: int = 50
    """Steps between validations."""
    patience: int = 20
    """Validations without a better MAP before the run stops."""
    model: Literal["student", "teacher"] = "student"
    """Whose weights are validated, kept and tested."""
    batch: int = 256
    """Recordings per forward pass, over all ranks."""

    def __post_init__(self) -> None:
        require(self.every > 0, "evaluate.every", self.every, "at least 1")
        require(self.patience > 0, "evaluate.patience", self.patience, "at least 1")


@dataclass(frozen=True)
class Runtime:
    """How the run is executed."""

    device: Literal["auto", "cpu", "cuda"] = execution("auto")
    """auto: cuda if the machine has it. A GPU that torch cannot use is an error."""
    precision: Literal["auto", "fp32", "bf16", "fp64"] = "auto"
    """Autocast of the forward; losses and banks stay in fp32. auto: bf16 on GPUs that
    have it (Ampere and newer), else fp32. fp64 is for tests."""
    batchnorm: Literal["global", "local"] = "global"
    """Statistics over the global batch (exact) or over each rank's own rows (faster, another result)."""
    compile: bool = execution(False)
    """torch.compile the student's training forward; docs/gpus.md says what is not compiled."""
    threads: int = execution(0)
    """Computing threads per rank; 0: the cores of the node divided by its ranks."""
    readers: int = execution(0)
    """Threads per rank that read batches ahead; 0: two on a CPU, eight on a GPU."""
    deterministic: bool = execution(False)
    """On GPUs, only algorithms that give the same bits each time, at a cost (docs/gpus.md). On a CPU it is so anyway."""
    log_every: int = execution(10)
    """Steps between log lines."""
    save_every: int = execution(200)
    """Steps between checkpoints; 0: only at the end and when the run is stopped."""
    timeout_minutes: float = execution(10.0)
    """A collective operation that takes longer ends the run with an error."""


OPINION = 2
"""Version of what is measured on an ECG, and of how the trees' opinion on it is mixed (`measurements/`). Raise it with every
change: runs that ask trees get another fingerprint, and published trees, which know measurements by number, are not asked."""


@dataclass(frozen=True)
class Config:
    """One training run."""

    split: Path = execution(Path("splits/within-chapman@0.05.s20.json"))
    """File of the split (`ecgmatch split`)."""
    shards: str = execution("data/shards")
    """Folder or URL with one folder of shards per database."""
    runs: Path = execution(Path("runs"))
    """Folder of the run folders."""
    name: str = execution("")
    """Name of the run folder; empty: <split>.<method>, and .<tag> if there is one."""
    tag: str = execution("")
    """Appended to the name, so that runs with other settings get folders of their own."""
    seed: int = draw(0)
    """Seed of initial weights, order and augmentation; 0: the split's seed."""
    member: int = 0
    """Number of this run in a committee of supervised runs. Each member has its own seed."""
    init: Literal["pretrained", "scratch"] = "pretrained"
    """Start from the supervised run on the same split (trained first if it is missing), or from random weights."""
    weights: str = added("")
    """A trained model that the first run of the chain begins with, instead of random weights: a run folder, one of `ecgmatch
    export`, the name of a model that comes with the package, or one on the hub. It must have the same network."""
    method: MethodSettings = field(default_factory=lambda: method_settings("ecgmatch")())
    """The training method."""
    data: Data = Data()
    """Reading shards."""
    model: Model = Model()
    """The network."""
    augment: Augment = Augment()
    """The views."""
    bank: Bank = Bank()
    """The memory banks."""
    optim: Optim = Optim()
    """Optimiser and batches."""
    pretrain: Optim = Optim()
    """Optimiser and batches of the supervised run that other methods start from."""
    selfsupervised: str = added("none")
    """What the supervised run starts from: none: random weights; contrastive: a run of this method, which needs no labels
    (trained first if it is missing)."""
    contrast: Optim = added(Optim())
    """Optimiser and batches of the run without labels."""
    evaluate: Evaluate = Evaluate()
    """Validation."""
    runtime: Runtime = Runtime()
    """Execution."""

    @property
    def begins_with(self) -> str:
        """The model whose weights this very run begins with; empty: random weights, or those of a run that it starts from."""
        return self.weights if self.starts == 0 else ""

    @property
    def starts(self) -> int:
        """Number of runs that this one starts from. The chain: self-supervised, supervised, all other methods."""
        if not self.method.needs_labels:
            return 0
        if self.method.is_start:
            return int(self.selfsupervised != "none")
        return 0 if self.init == "scratch" else self.method.starts

    def start(self, member: int = 0) -> "Config":
        """One of the runs that this one starts from."""
        return self.without_labels() if self.method.is_start else self.supervised(member)

    def supervised(self, member: int | None = None) -> "Config":
        """The supervised run that this one starts from: the same data, network and views, and `pretrain` as the optimiser.
        `member` chooses another member of the committee."""
        member = self.member if member is None else member
        sees_unlabelled = self.selfsupervised != "none"  # by the run that it starts from
        return dataclasses.replace(
            self,
            name="",
            data=self.data if sees_unlabelled else dataclasses.replace(self.data, unlabelled=0),
            tag=f"member{member + 1}" if member else "",
            member=member,
            method=method_settings("supervised")(),
            weights=without_trees(self.weights),
            init="scratch",
            bank=Bank(),
            optim=self.pretrain,
        )

    def without_labels(self) -> "Config":
        """The self-supervised run that the supervised one starts from: the same data, network and views, `contrast` as the
        optimiser, and nothing that concerns labels, so that all members of a committee share it."""
        method = self.method if not self.method.needs_labels else method_settings(self.selfsupervised)()
        require(not method.needs_labels, "selfsupervised", self.selfsupervised, "a method without labels, or none")
        return dataclasses.replace(
            self,
            name="",
            tag="",
            member=0,
            method=method,
            weights=without_trees(self.weights),
            selfsupervised=method.name,
            init="scratch",
            augment=dataclasses.replace(self.augment, labelled="weak"),
            bank=Bank(),
            optim=self.contrast,
            pretrain=Optim(),
            evaluate=Evaluate(model=self.evaluate.model, batch=self.evaluate.batch),
        )

    def settled(self) -> "Config":
        """The configuration that is trained: a run that others start from takes its optimiser from `pretrain` or `contrast`."""
        if not self.method.is_start:
            return self
        start = self.supervised() if self.method.needs_labels else self.without_labels()
        start = dataclasses.replace(start, method=self.method, weights=self.weights)
        return dataclasses.replace(start, name=self.name, tag=self.tag or start.tag)

    def check_shares(self, ranks: int) -> None:
        """Refuse a global batch that the ranks cannot share evenly. Called before the runs that this one starts from, which
        can take hours."""
        section = "optim" if not self.method.is_start else "pretrain" if self.method.needs_labels else "contrast"
        batches = {}
        if self.method.needs_labels:
            batches["labelled_batch"] = self.optim.labelled_batch
        if self.method.uses_unlabelled:
            batches["unlabelled_batch"] = self.optim.unlabelled_batch
        for name, batch in batches.items():
            remedy = f"make it a multiple of {ranks}, the number of ranks"
            require(batch % ranks == 0, f"{section}.{name}", batch, remedy)

    def run_name(self, split_name: str) -> str:
        return self.name or ".".join(part for part in (split_name, self.method.name, self.tag) if part)

    def to_json(self) -> dict[str, Any]:
        """Every setting, for `config_json.from_json`. The method's settings include its name."""
        return as_json(self)

    def fingerprint(self) -> str:
        """Hash of every setting that decides the result; the split and the shards are compared by their own checksums."""
        value = as_json(self, without=("execution",), older=True)
        if self.weights:
            value["weights"] = self.weights.rpartition(PIN)[2]  # what they are, not where
        if self.method.asks_trees:
            value["opinion"] = OPINION
        # the first release had these two fields at the top level, and its hashes must stay
        value |= value.pop("runtime")
        return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
