"""The classes of transformers whose losses fuse, and the reasons for the others."""
