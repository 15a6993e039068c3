"""What a run is: typed, frozen, checked. The defaults are the paper's; where it is silent, the official code's.

All batch sizes and steps are global: the number of ranks changes the speed of a run, never its meaning.
"""

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from ecgmatch_dist.errors import UserError
from ecgmatch_dist.methods.configs import ECGMatch, FullySupervised, MethodConfig, Supervised


def require(condition: bool, field_name: str, value: object, remedy: str) -> None:
    """Fail early, with the name of the field and what to write instead."""
    if not condition:
        raise UserError(f"{field_name} = {value!r}: {remedy}")


@dataclass(frozen=True)
class Data:
    """How shards are read that lie behind a URL; local ones need nothing of this."""

    window: int = 0
    """Mix this many shards at a time instead of all, so that the cache needs to hold only some; 0: all."""
    cache: str = ""
    """Folder for fetched shards, on a local disk; empty: ecgmatch/ in the user's cache folder."""
    cache_gib: float = 32.0
    """Most that the cache may hold."""

    def __post_init__(self) -> None:
        require(self.window >= 0, "data.window", self.window, "a number of shards, or 0 for all")
        require(self.cache_gib > 0, "data.cache_gib", self.cache_gib, "greater than 0")


@dataclass(frozen=True)
class Model:
    """The attention CNN."""

    width: int = 128
    """Channels of the encoder and length of the feature z."""
    heads: int = 8
    """Attention heads."""
    dropout: float = 0.5
    """Dropout between the encoder and the attention."""

    def __post_init__(self) -> None:
        require(self.heads > 0 and self.width % self.heads == 0, "model.width", self.width, "a multiple of model.heads")
        require(0 <= self.dropout < 1, "model.dropout", self.dropout, "between 0 and 1")


@dataclass(frozen=True)
class Augment:
    """The weak view w(x) and the strong view g(x)."""

    pipeline: Literal["ecgaugment", "sequential", "mild"] = "ecgaugment"
    """ecgaugment: the paper's; sequential: the fixed sequence it compares with; mild: views that keep the diagnosis."""
    labelled: Literal["weak", "strong"] = "weak"
    """The view of the labelled signals: weak (paper), or strong where few labels are soon learnt by heart."""
    granularity: Literal["sample", "batch"] = "sample"
    """Draw the transformations for each signal (paper) or once a batch (official code)."""
    noise_weak: float = 0.05
    """Standard deviation of the weak view's noise."""
    noise_strong: float = 0.5
    """Standard deviation of the strong view's noise."""
    dropout_window: Literal["shared", "per_lead"] = "shared"
    """Signal dropout zeroes one window of all leads (paper) or one of each lead (official code)."""


@dataclass(frozen=True)
class Bank:
    """The two memory banks and the search in them."""

    shard_group: int | Literal["auto", "world", "node"] = "auto"
    """Ranks that share one copy: 1 replicates, "world" shards over all ranks, "node" over a node's; auto: world on one
    node, node on several."""
    backend: Literal["auto", "torch", "faiss-cpu", "faiss-gpu", "faiss-ivf"] = "auto"
    """Who searches; auto times the exact ones on the real shapes at start and takes the fastest."""
    view: Literal["weak", "clean"] = "weak"
    """What teacher and query see: the weak view (paper) or the signal itself."""
    overlap: bool = True
    """Run the exchange and the search behind the training forward."""

    def __post_init__(self) -> None:
        ok = isinstance(self.shard_group, str) or self.shard_group >= 1
        require(ok, "bank.shard_group", self.shard_group, "a number of ranks, at least 1")


@dataclass(frozen=True)
class Optim:
    """Optimiser, schedule and batches."""

    optimizer: Literal["sgd", "adamw"] = "sgd"
    """SGD with momentum 0.9 (paper) or AdamW."""
    lr: float = 0.03
    """Initial learning rate of the classifier."""
    encoder_lr_scale: float = 0.1
    """Factor on lr for encoder and attention (official code)."""
    momentum: float = 0.9
    """Momentum of SGD."""
    weight_decay: float = 5e-4
    """On every parameter."""
    schedule: Literal["power", "cosine", "constant"] = "power"
    """power: lr (1 + 10 i/E)^-0.75; cosine: to zero at E."""
    warmup: int = 0
    """Steps of linear warm-up."""
    steps: int = 5000
    """E, the most steps a run takes."""
    labelled_batch: int = 64
    """B, global."""
    unlabelled_batch: int = 448
    """B_u, global."""
    teacher_momentum: float = 0.999
    """m of equation 5."""
    teacher_warmup: bool = False
    """Smaller m in the first steps, so that a teacher that starts from random weights soon forgets them."""
    teacher_batchnorm: Literal["copied", "averaged"] = "copied"
    """The teacher's BatchNorm statistics: the student's latest (official code), or averaged as its weights are."""

    def __post_init__(self) -> None:
        require(self.lr > 0, "optim.lr", self.lr, "greater than 0")
        require(self.steps > 0, "optim.steps", self.steps, "at least 1")
        require(self.labelled_batch > 0, "optim.labelled_batch", self.labelled_batch, "at least 1")
        require(self.unlabelled_batch > 0, "optim.unlabelled_batch", self.unlabelled_batch, "at least 1")
        require(0 <= self.teacher_momentum <= 1, "optim.teacher_momentum", self.teacher_momentum, "between 0 and 1")


@dataclass(frozen=True)
class Evaluate:
    """Validation, early stopping and which model is kept."""

    every: int = 50
    """Steps between validations."""
    patience: int = 20
    """Validations without a better MAP before the run stops."""
    model: Literal["student", "teacher"] = "student"
    """Whose weights are validated, kept and tested."""
    batch: int = 256
    """Recordings a forward, global."""

    def __post_init__(self) -> None:
        require(self.every > 0, "evaluate.every", self.every, "at least 1")
        require(self.patience > 0, "evaluate.patience", self.patience, "at least 1")


@dataclass(frozen=True)
class Runtime:
    """How the run is executed. Nothing here changes what it computes, up to rounding."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where there is one."""
    precision: Literal["auto", "fp32", "bf16", "fp64"] = "auto"
    """Autocast of the forward; losses and banks stay in fp32. auto: bf16 on cuda, fp32 on cpu. fp64 is for tests."""
    batchnorm: Literal["global", "local"] = "global"
    """Statistics over the global batch (exact) or over a rank's share (faster, inexact)."""
    compile: bool = False
    """torch.compile the student's training forward; docs/gpus.md says what it leaves out."""
    threads: int = 0
    """Computing threads a rank; 0: the cores of the machine divided by its ranks."""
    readers: int = 2
    """Threads a rank that read batches ahead."""
    log_every: int = 10
    """Steps between log lines."""
    save_every: int = 200
    """Steps between checkpoints; 0: only at the end and when the run is asked to stop."""
    timeout_minutes: float = 10.0
    """A collective that takes longer ends the run with an error."""


@dataclass(frozen=True)
class Config:
    """One training run."""

    split: Path = Path("splits/within-chapman@0.05.s20.json")
    """The split's file (`ecgmatch split`)."""
    shards: str = "data/shards"
    """Folder or URL with one folder of shards a database."""
    runs: Path = Path("runs")
    """Where run folders are made."""
    name: str = ""
    """Name of the run's folder; empty: <split>.<method>, and the changed settings' tag if there is one."""
    tag: str = ""
    """Appended to the name, to tell runs with other settings apart."""
    seed: int = 0
    """Initial weights, order and augmentation; 0: the split's seed."""
    member: int = 0
    """Which member of a committee of supervised runs this is: each has a seed of its own."""
    init: Literal["pretrained", "scratch"] = "pretrained"
    """Start from the supervised run on the same split (trained first if it is missing), or from random weights."""
    method: MethodConfig = field(default_factory=ECGMatch)
    """What to train with."""
    data: Data = Data()
    """Reading of remote shards."""
    model: Model = Model()
    """The network."""
    augment: Augment = Augment()
    """The views."""
    bank: Bank = Bank()
    """The memory banks."""
    optim: Optim = Optim()
    """Optimiser and batches."""
    pretrain: Optim = Optim()
    """Optimiser and batches of the supervised run that the others start from."""
    evaluate: Evaluate = Evaluate()
    """Validation."""
    runtime: Runtime = Runtime()
    """Execution."""

    def __post_init__(self) -> None:
        if isinstance(self.method, ECGMatch):
            require(
                self.method.committee >= 1, "method.committee", self.method.committee, "at least 1, the start itself"
            )
            require(0 <= self.method.memory <= 1, "method.memory", self.method.memory, "between 0 and 1")

    def supervised(self, member: int | None = None) -> "Config":
        """The supervised run that this one starts from: the same data, network and views, `pretrain` as its optimiser.
        `member` asks for another of the committee."""
        member = self.member if member is None else member
        return dataclasses.replace(
            self,
            name="",
            tag=f"member{member + 1}" if member else "",
            member=member,
            method=Supervised(),
            init="scratch",
            bank=Bank(),
            optim=self.pretrain,
        )

    @property
    def committee(self) -> int:
        """Number of supervised runs that this one needs."""
        if self.init == "scratch" or isinstance(self.method, Supervised):
            return 0
        return self.method.committee if isinstance(self.method, ECGMatch) else 1

    def check_shares(self, ranks: int) -> None:
        """A global batch is shared evenly. Asked before the supervised runs, which can take hours."""
        section = "pretrain" if isinstance(self.method, Supervised) else "optim"
        batches = {"labelled_batch": self.optim.labelled_batch, "unlabelled_batch": self.optim.unlabelled_batch}
        if isinstance(self.method, Supervised | FullySupervised):
            del batches["unlabelled_batch"]
        for name, batch in batches.items():
            require(
                batch % ranks == 0, f"{section}.{name}", batch, f"make it a multiple of {ranks}, the number of ranks"
            )

    def run_name(self, split_name: str) -> str:
        return self.name or ".".join(part for part in (split_name, self.method.name, self.tag) if part)

    def to_json(self) -> dict[str, Any]:
        def plain(value: Any) -> Any:
            if isinstance(value, Path):
                return str(value)
            if dataclasses.is_dataclass(value) and not isinstance(value, type):
                fields = {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
                return {"name": value.name, **fields} if isinstance(value, get_args(MethodConfig)) else fields
            return value

        return dict(plain(self))

    def meaning(self) -> str:
        """Hash of everything that decides the result: all but folders, names and the way of execution."""
        value = self.to_json()
        for key in ("split", "shards", "runs", "name", "tag", "runtime"):
            del value[key]
        for key in ("shard_group", "backend", "overlap"):
            del value["bank"][key]
        del value["data"]["cache"], value["data"]["cache_gib"]
        value["batchnorm"], value["precision"] = self.runtime.batchnorm, self.runtime.precision
        return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def from_json(value: dict[str, Any]) -> Config:
    """The configuration that `to_json` wrote; an unknown or missing key is an error, never ignored."""

    def build(cls: Any, value: dict[str, Any], where: str) -> Any:
        fields = {f.name: f for f in dataclasses.fields(cls)}
        if unknown := set(value) - set(fields):
            raise UserError(f"configuration: unknown key {where}{sorted(unknown)[0]}; known are {', '.join(fields)}")
        out: dict[str, Any] = {}
        for key, entry in value.items():
            default = fields[key].default
            if dataclasses.is_dataclass(default):
                out[key] = build(type(default), entry, f"{where}{key}.")
            elif key == "method" and cls is Config:
                classes = {c.name: c for c in get_args(MethodConfig)}
                require(entry.get("name") in classes, "method.name", entry.get("name"), f"one of {', '.join(classes)}")
                out[key] = build(classes[entry["name"]], {k: v for k, v in entry.items() if k != "name"}, "method.")
            else:
                out[key] = Path(entry) if isinstance(default, Path) else entry
        return cls(**out)

    config = build(Config, value, "")
    assert isinstance(config, Config)
    return config
