"""Time, peak memory and accuracy of linear cross-entropy, provider by provider."""
