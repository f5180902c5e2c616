"""One-line mutants of fxpass, and which of them the tests kill: see ``__main__``."""
