"""The two memory banks, sharded over the ranks, and the nearest-neighbour search in them."""
