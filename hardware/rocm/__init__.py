"""gfx942: ``mfma`` (matrix cores, bf16, fp16 and fp32). Predicted: no such device was at hand."""
