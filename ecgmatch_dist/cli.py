"""The `ecgmatch` command. Each subcommand is one typed function; only the one that is called is imported."""

import errno
import importlib
import os
import sys
from collections.abc import Callable

import tyro

from ecgmatch_dist.errors import UserError

COMMANDS = {
    "doctor": ("ecgmatch_dist.doctor:main", "check this machine or all ranks of a launcher before the first run"),
    "download": ("ecgmatch_dist.data.download:main", "fetch a public database, resumable and verified"),
    "synth": ("ecgmatch_dist.data.synthetic.databases:main", "make four small synthetic databases"),
    "shards build": ("ecgmatch_dist.launch.build_shards:main", "recordings -> preprocessed webdataset shards"),
    "shards verify": ("ecgmatch_dist.data.verify:main", "check shards and draw their card"),
    "split": ("ecgmatch_dist.data.splits:main", "labelled / unlabelled / validation / test, in one file"),
    "train": ("ecgmatch_dist.train:main", "train one run (the same as torchrun -m ecgmatch_dist.train)"),
    "report": ("ecgmatch_dist.report:main", "runs -> the paper's tables, statistics and figures on one page"),
    "sweep": ("ecgmatch_dist.launch.sweep:main", "submit many runs to Slurm, or run them here one after the other"),
    "status": ("ecgmatch_dist.launch.status:main", "a sweep's runs: state, node, step, best MAP, restarts, errors"),
    "logs": ("ecgmatch_dist.launch.status:logs", "the log of a run and the output of its job"),
    "cancel": ("ecgmatch_dist.launch.status:cancel", "cancel the jobs of a sweep"),
    "choose": ("ecgmatch_dist.launch.choose:choose", "rank the settings of a sweep by validation MAP"),
    "predict": ("ecgmatch_dist.predict.command:main", "new ECGs -> classes, probabilities and their reasons"),
    "monitor": ("ecgmatch_dist.record.monitor:main", "open TensorBoard on a folder of runs"),
    "demo": ("ecgmatch_dist.demo:main", "the whole path on synthetic ECGs"),
    "plan": ("ecgmatch_dist.capacity.command:main", "estimate memory, traffic and time on a cluster"),
    "bench": ("ecgmatch_dist.bench:main", "measure speed against the usual alternatives"),
}
DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO}
PARSE_THEMSELVES = {"train", "bench"}  # their first words decide which options there are


def usage() -> str:
    width = max(map(len, COMMANDS))
    rows = "\n".join(f"  {name:{width}}  {what}" for name, (_, what) in COMMANDS.items())
    return f"usage: ecgmatch COMMAND ...   (options: ecgmatch COMMAND --help)\n\n{rows}"


def resolve(args: list[str]) -> tuple[str, Callable[..., object], list[str]]:
    """The longest command name that `args` begin with, its function, and the remaining arguments."""
    for words in (2, 1):
        name = " ".join(args[:words])
        if name in COMMANDS:
            module, function = COMMANDS[name][0].split(":")
            return name, getattr(importlib.import_module(module), function), args[words:]
    raise UserError(f"no command `{' '.join(args[:2])}`\n{usage()}")


def main() -> None:
    args = sys.argv[1:]
    if not args or args[0] in ("-h", "--help"):
        print(usage())
        return
    try:
        name, function, rest = resolve(args)
        if name in PARSE_THEMSELVES:
            function(rest)
        else:
            tyro.cli(function, prog=f"ecgmatch {name}", args=rest)
    except UserError as error:
        sys.exit(f"ecgmatch: {error}")
    except BrokenPipeError:  # `ecgmatch ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        if error.errno not in DISK:
            raise
        where = f"{error.filename}: " if error.filename else ""
        sys.exit(f"ecgmatch: {where}{error.strerror}; make room or repair the disk, then give the same command again")
    except KeyboardInterrupt:
        sys.exit("ecgmatch: interrupted; the same command continues where it stopped")
