"""The attention CNN, the student that is trained, the teacher that averages it, BatchNorm over ranks, and the optimiser."""
