"""Expert-parallel mixture-of-experts training whose parts are chosen on the command line."""

__version__ = "0.1.0"
