"""Steps and batch that follow the number of recordings, so that one preset serves 20 labels and 20,000.

`optim.passes` asks for it, and belongs to the run's fingerprint. What it means for a split is
worked out here when the run begins.
"""

from dataclasses import replace

from ecgmatch_dist.config.fields import Config, Optim

STEPS_PER_PASS = 5  # at least, or the few labels would be learnt by heart in large batches
SMALLEST_BATCH = 8
SHORTEST = 10  # a run takes no less than a tenth of `optim.steps`
VALIDATIONS = 25


def fitted(config: Config, labelled: int, unlabelled: int, hidden: int | None = None) -> Config:
    """The same run with the steps, batch and validation interval for so many recordings; without `optim.passes`, unchanged.

    `hidden`: the unlabelled recordings whose labels are known, and hidden; None: all of them."""
    optim, every = config.optim, 0
    if not optim.passes:
        return config
    if not config.method.needs_labels:
        recordings, batch = labelled + unlabelled, optim.unlabelled_batch
    elif config.method.uses_unlabelled:
        recordings, batch = min(unlabelled, config.data.unlabelled or unlabelled), optim.unlabelled_batch
        every = config.evaluate.every  # its start is validated often: it overfits. This stage settles slowly
    else:
        also = unlabelled if hidden is None else hidden
        recordings = labelled + also if config.method.knows_all_labels else labelled
        batch = labelled_batch(optim, recordings)
        optim = replace(optim, labelled_batch=batch)
    steps = number_of_steps(optim, recordings, batch)
    optim = replace(optim, steps=steps, passes=0.0)
    return replace(config, optim=optim, evaluate=replace(config.evaluate, every=max(1, every, steps // VALIDATIONS)))


def labelled_batch(optim: Optim, recordings: int) -> int:
    """`optim.labelled_batch`, halved until a pass over the recordings takes five steps, but not below eight."""
    batch = optim.labelled_batch
    while batch > SMALLEST_BATCH and batch % 2 == 0 and recordings < STEPS_PER_PASS * batch:
        batch //= 2
    return batch


def number_of_steps(optim: Optim, recordings: int, batch: int) -> int:
    """So many passes, but at most `optim.steps` and at least a tenth of them."""
    wanted = round(optim.passes * recordings / batch)
    return min(optim.steps, max(wanted, -(-optim.steps // SHORTEST)))
