"""The step-timeline manager: an append-only event log is the truth, all state is a fold over it."""
