"""Storage of weights: tensors of checkpoints, their slots, and the layouts of linears."""
