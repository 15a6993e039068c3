"""Named configurations to start from. Every setting can still be changed on the command line."""

from collections.abc import Callable
from dataclasses import replace

from ecgmatch_dist.config import Augment, Config, Data, Evaluate, Model, Optim, Runtime
from ecgmatch_dist.methods.ecgmatch import ECGMatchSettings

SMALL = Data(rate=100, length=1024)
"""Shards of `shards build --preset cpu`."""


def paper() -> Config:
    """The paper's settings: 500 Hz, 12 x 6144, width 128, B = 64, B_u = 448. Meant for GPUs."""
    return Config(data=Data(rate=500, length=6144))


def official_code() -> Config:
    """The authors' code where it differs from the paper (docs/faithfulness.md has the list)."""
    return replace(paper(), augment=Augment(granularity="batch", dropout_window="per_lead"))


def cpu() -> Config:
    """The paper's recipe, small enough for two cores: shards of `shards build --preset cpu`, width 64, B_u = 128."""
    optim = Optim(steps=2400, unlabelled_batch=128)
    return replace(paper(), data=SMALL, model=Model(width=64), optim=replace(optim, steps=1200), pretrain=optim)


def few_labels() -> Config:
    """At 100 Hz, for 20 labels as well as for 20,000: a residual network on crops of 5.12 s learns for a number of passes; the
    mean of it and of trees on measurements fills the bank; ECGMatch puts both into one network. For results, not for
    faithfulness. `--selfsupervised contrastive` adds a start without labels. docs/tried.md: what each part adds."""
    adamw = Optim(
        optimizer="adamw",
        lr=2e-3,
        encoder_lr_scale=1.0,
        weight_decay=1e-2,
        schedule="cosine",
        warmup=20,
        teacher_momentum=0.995,
        teacher_warmup=True,
        teacher_batchnorm="averaged",
    )
    return Config(
        method=ECGMatchSettings(
            neighbours=1,
            refine=False,
            lambda_u=8.0,
            lambda_f=0.02,
            similarity="expected",
            query="teacher",
            memory=1.0,
            measurements=True,
        ),
        data=SMALL,
        model=Model(width=128, backbone="resnet1d", first_width=32, dropout=0.3),
        augment=Augment(pipeline="mild", labelled="strong", crop=512),
        contrast=replace(adamw, passes=64, steps=5000, unlabelled_batch=192),
        pretrain=replace(adamw, passes=100, steps=4000),
        optim=replace(
            adamw,
            passes=16,  # 600 steps for up to 3,600 unlabelled recordings, 1,667 for 10,000
            steps=6000,
            labelled_batch=32,
            unlabelled_batch=96,
            teacher_momentum=0.99,
            teacher_warmup=False,
        ),
        evaluate=Evaluate(every=50, model="teacher"),
    )


def demo() -> Config:
    """A shorter `few_labels` for synthetic ECGs, on shorter crops."""
    base = few_labels()
    return replace(
        base,
        augment=replace(base.augment, crop=256),
        optim=replace(base.optim, steps=200, unlabelled_batch=64),
        evaluate=replace(base.evaluate, every=20),
        runtime=Runtime(save_every=40),
    )


def fitting(rate: int, length: int) -> list[str]:
    """Names of the presets for shards of this rate and length."""
    return [name for name, make in PRESETS.items() if (make().data.rate, make().data.length) == (rate, length)]


PRESETS: dict[str, Callable[[], Config]] = {
    "paper": paper,
    "official_code": official_code,
    "cpu": cpu,
    "few_labels": few_labels,
    "demo": demo,
}
