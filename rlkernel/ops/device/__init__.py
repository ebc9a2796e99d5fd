"""The regions of a dense model on a GPU: tensors on the device, kernels in Triton, one source for both vendors."""
