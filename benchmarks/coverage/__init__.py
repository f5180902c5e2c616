"""Which of transformers' own classes fuse, and why the others do not."""
