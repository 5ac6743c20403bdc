"""The gated delta net: one-token steps, prefill in chunks, its norm."""
