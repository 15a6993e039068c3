"""Process group (`session`), collectives, and the current position of this rank (`whereabouts`)."""
