"""`python -m ecgmatch_dist` is `ecgmatch`."""

from ecgmatch_dist.cli import main

if __name__ == "__main__":
    main()
