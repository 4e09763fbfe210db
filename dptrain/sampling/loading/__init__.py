"""The private loader: from a stream of batches to the tensors of a step."""
