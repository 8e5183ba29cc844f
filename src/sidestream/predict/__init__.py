"""What a choice would cost on a cluster: pure functions, no torch, no clock. See docs/predictor.md."""
