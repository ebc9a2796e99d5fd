"""Known-answer vectors: what the interpreter predicts for every region and case, to be confirmed on a device."""
